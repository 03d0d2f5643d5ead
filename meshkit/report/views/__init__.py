"""Views of a report: the terminal, the HTML page, charts, Perfetto. Imports no jax.

Input: a Report and its Timeline. Output: renderables for rich, report.html, trace.json.gz. The views of bench, tune,
explain and sweeps use `page` as well.
"""
