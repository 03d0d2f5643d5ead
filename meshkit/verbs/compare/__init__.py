"""`meshkit compare`: two reports side by side.

Enters: two report.json. Leaves: `Comparison`, a page, exit code 3 where a condition holds. May be imported by
the CLI.
"""
