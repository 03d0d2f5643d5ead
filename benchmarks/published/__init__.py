"""Published training runs, predicted: `python -m benchmarks.published --rows FILE.csv --out DIR [--only TEXT]`.

rows.py (a row of the CSV) -> machines.py (its cluster) and frameworks.py (what its framework does) -> experiments.py
(an experiment file that a reader can plan) -> replay.py (compile once, simulate) -> predictions.csv -> summary.py
(errors by family, the trivial predictor, trends, memory, a plot).
"""
