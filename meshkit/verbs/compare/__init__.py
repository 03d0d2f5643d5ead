"""`meshkit compare`: compare two reports.

Enters: two report.json files, or traces that are measured first. Leaves: `Comparison`, an HTML page, and exit code 3
if a `--fail-if` condition is met. May be imported by the CLI.
"""
