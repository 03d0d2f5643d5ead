"""Searches over plans: candidates, their bounds, the processes that plan them, tune, proposals and scaling.

Enters: an experiment and what may change in it. Leaves: outcomes, a row for each candidate that was planned.
May be imported by the verbs.
"""
