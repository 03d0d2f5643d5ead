"""Predict the seconds of kernels, collectives and whole simulated steps. Does not import jax. See README.md.

Input: a Schedule and a cluster. Output: a simulated Timeline, and its assumptions.

May be imported by compile, trace, report and the verbs.
"""
