"""Compile programs with XLA, for attached GPUs and for GPUs that this machine does not have.

Input: a training step and a cluster. Output: the compiled program, its scheduled HLO, its compiler options.
May be imported by its row of CONTRIBUTING.md and all rows above.
"""
