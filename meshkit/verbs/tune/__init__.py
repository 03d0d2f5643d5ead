"""`meshkit tune`: search variants of an experiment with `meshkit.search`; write the result into a folder and show it.

Input: an experiment. Output: all outcomes, the fastest variant that fits, and why it is fastest, as `meshkit.tune/1`.
May be imported by the CLI.
"""
