"""`meshkit train`: train on attached devices, and write a run folder from which the same command resumes.

Input: an experiment. Output: metrics, checkpoints, a trace. May be imported by the CLI.
"""
