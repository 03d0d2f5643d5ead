"""The report of plan, rehearse and profile: its schema, its computation, its views. Imports no jax.

Enters: a Timeline, and facts about the step. Leaves: report.json, the HTML page, the terminal's text.
May be imported by the verbs.
"""
