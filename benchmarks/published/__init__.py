"""Published training runs of JAX, planned from their own files: rows.py, experiments.py, __main__.py, intervals.py."""
