"""Seconds: of a kernel, of a collective, of a whole step that is simulated. Imports no jax. See README.md.

Enters: a Schedule and a cluster. Leaves: a simulated Timeline, and what was assumed.
May be imported by compile, trace, report and the verbs.
"""
