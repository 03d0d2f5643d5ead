"""Search over plans: candidates and their bounds, the processes that plan them, `tune`, proposals and scaling.

Enters: an experiment, and the choices that may change in it. Leaves: an outcome for each candidate that was planned.
May be imported by the verbs.
"""
