"""Capture real steps, and read them back into a Timeline. See README.md.

A running program enters, or the files of one that ran; a capture's record and a Trace (measured Timeline) leave.
May be imported by report and the verbs.
"""
