"""Test meshkit's predictions on one GPU, in pieces of nine minutes: `python -m benchmarks.gpu --out DIR`.

measurements.py lists the measurements. __main__.py runs each in a process of its own while time lasts, and writes its
results to DIR/NAME/result.json.
"""
