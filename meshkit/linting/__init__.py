"""Find what is legal but probably not intended: check rules against arrays, and collectives against the strategy.

Enters: an experiment, its step and its compiled program. Leaves: findings.
May be imported by the verbs.
"""
