"""Programs compiled by XLA, for the GPUs that are there and for those that are not.

Enters: a training step and a cluster. Leaves: the compiled program, its scheduled HLO, its options.
May be imported by lint, report and the verbs.
"""
