"""Capture real steps, and read them back into a Timeline. See README.md.

Input: a running program, or the files of a capture. Output: a capture's record, and a Trace (measured Timeline).
May be imported by report and the verbs.
"""
