"""The verbs (subcommands) of the command line. Each verb is a package, and its `cli.py` declares its arguments.

Input: the command that the user typed. Output: a result, printed or written.
May be imported by the command line, and by another verb only where the import contract in pyproject.toml allows it.
"""
