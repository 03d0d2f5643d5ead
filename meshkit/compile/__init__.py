"""Compile programs with XLA, for attached GPUs and for GPUs that this machine does not have.

Enters: a training step and a cluster. Leaves: the compiled program, its scheduled HLO, its compiler options.
May be imported by its row of CONTRIBUTING.md and all rows above.
"""
