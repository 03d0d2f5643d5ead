"""Search over plans: candidates and their bounds, the processes that plan them, `tune`, proposals and scaling.

Input: an experiment, and the choices that may change in it. Output: an outcome for each candidate that was planned.
May be imported by the verbs.
"""
