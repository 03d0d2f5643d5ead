"""The run folder of a training: its owner, metrics, goodput, phases, hangs, and snapshots in memory.

Input: what a training reports about itself. Output: files that survive a killed process.
May be imported by report and the verbs.
"""
