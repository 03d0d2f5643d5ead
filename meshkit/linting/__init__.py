"""What is legal and probably not meant: rules against arrays, strategy against compiled collectives.

Enters: an experiment, its step, its compiled program. Leaves: findings.
May be imported by the verbs.
"""
