"""Published training runs, predicted: `python -m benchmarks.published --rows FILE.csv --out DIR [--only TEXT]`.

rows.py (a row of the CSV; corrections.toml where its own source contradicts it) -> machines.py (its cluster), shapes.py
(its model's dims; models.toml where the row has none) and frameworks.py (what its framework does) -> experiments.py (an
experiment file that a reader can plan) -> replay.py (compile once, simulate; replica.py where that is
a stage, corrections.py what the framework does other than our program; reasons.py says why a measured time is outside
of the bounds) -> predictions.csv -> summary.py (errors by family, trivial predictor, trends, memory, a plot).
"""
