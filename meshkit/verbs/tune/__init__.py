"""`meshkit tune`: a search over variants of an experiment.

Enters: an experiment. Leaves: every outcome, the fastest that fits and why, as `tune/1`. May be imported by the CLI.

    plan/variants.py -> plan/bounds.py -> search.py <-> plan/workers.py (other processes) -> tune_report.py
"""
