"""Plan published JAX training runs from their own files: rows.py, experiments.py, __main__.py, intervals.py."""
