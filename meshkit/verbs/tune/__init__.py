"""`meshkit tune`: a search over variants of an experiment, by `meshkit.search`, written into a folder and shown.

Enters: an experiment. Leaves: every outcome, the fastest that fits and why, as `tune/1`. May be imported by the CLI.
"""
