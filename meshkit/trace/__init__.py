"""Profiler traces: captured, read, aligned, and turned into a Timeline.

Enters: XSpace files and what was captured beside them. Leaves: a measured Timeline.
May be imported by report and the verbs.
"""
