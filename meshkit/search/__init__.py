"""Search over plans: used by `tune`, by `plan --sweep`, and for the proposals of `plan` and `explain`.

Input: an experiment, and the choices that may change in it. Output: an outcome for each candidate that was planned.
May be imported by the verbs.
"""
