"""Find what is legal but probably not intended: check rules against arrays, and collectives against the strategy.

Input: an experiment, its step and its compiled program. Output: findings.
May be imported by the verbs.
"""
