"""`meshkit compare`: compare two reports.

Input: two report.json files, or traces that are measured first. Output: `Comparison`, an HTML page, and exit code 3
if a `--fail-if` condition is met. May be imported by the CLI.
"""
