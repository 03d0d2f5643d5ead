"""Views of a report: the terminal, the HTML page, charts, Perfetto. Imports no jax."""
