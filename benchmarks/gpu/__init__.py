"""What one GPU can tell of meshkit, in pieces of nine minutes: `python -m benchmarks.gpu --out DIR`.

measurements.py (the list) -> __main__.py (each in a process of its own, while time lasts) -> DIR/NAME/result.json
"""
