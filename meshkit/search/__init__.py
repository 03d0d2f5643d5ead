"""Search over plans for `tune` and `plan --sweep`, and for the proposals that plans and `explain` print.

Input: an experiment, and the choices that may change in it. Output: an outcome for each candidate that was planned.
May be imported by the verbs.
"""
