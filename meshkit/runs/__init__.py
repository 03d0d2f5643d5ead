"""A run folder: metrics, goodput, phases, the experiment it was made by, and where metrics go.

Enters: what a training says of itself. Leaves: files that survive a kill.
May be imported by report and the verbs.
"""
