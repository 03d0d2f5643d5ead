"""Lint what is legal and probably not intended: rules against arrays, the strategy against compiled collectives.

Enters: an experiment, its step, its compiled program. Leaves: findings.
May be imported by the verbs.
"""
