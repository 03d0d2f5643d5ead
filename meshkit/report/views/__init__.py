"""Views of a report: the terminal, the HTML page, charts, Perfetto. Imports no jax.

Enters: a Report and its Timeline. Leaves: renderables for rich, report.html, trace.json.gz. The views of bench, tune,
explain and sweeps use `page` as well.
"""
