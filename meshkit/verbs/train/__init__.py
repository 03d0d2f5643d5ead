"""`meshkit train`: a training on attached devices, into a run folder that the same command resumes.

Enters: an experiment. Leaves: metrics, checkpoints, a trace. May be imported by the CLI.
"""
