"""Search over variants of an experiment: what they are, what bounds them, who compiles them, what came out.

space.py -> bounds.py -> search.py <-> workers.py (worker.py in other processes) -> views.py, page.py
"""
