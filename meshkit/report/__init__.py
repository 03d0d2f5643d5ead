"""One report of plan, rehearse and profile: its schema, how it is summed up, its views. Imports no jax.

Enters: a Timeline and what is known of the step. Leaves: report.json, the page, the terminal.
May be imported by the verbs.
"""
