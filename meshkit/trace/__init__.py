"""Capture real steps, and read them back into a Timeline. See README.md.

Enters: a running program, or the files of a capture. Leaves: a capture's record, and a Trace (measured Timeline).
May be imported by report and the verbs.
"""
