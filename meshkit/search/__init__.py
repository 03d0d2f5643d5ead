"""A search over plans: candidates, their bounds, the worker processes that plan them, proposals and scaling.

Enters: an experiment and what may change in it. Leaves: outcomes, a row for each candidate that was planned.
May be imported by the verbs.
"""
