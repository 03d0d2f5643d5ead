"""The verbs of the command line, a package each; `cli.py` of each holds its arguments.

Enters: what the user asked for. Leaves: a result, printed or written.
May be imported by the command line; by another verb only where the import contract says so.
"""
