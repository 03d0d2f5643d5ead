"""The report of plan, rehearse and profile: its schema, its computation, its views. Imports no jax.

Input: a Timeline, and facts about the step. Output: report.json, the HTML page, the terminal's text.
May be imported by the verbs.
"""
