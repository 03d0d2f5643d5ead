"""`meshkit train`: train on attached devices, and write a run folder from which the same command resumes.

Enters: an experiment. Leaves: metrics, checkpoints, a trace. May be imported by the CLI.
"""
