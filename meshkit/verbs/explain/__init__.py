"""`meshkit explain`: where every parameter and activation goes, and why.

Enters: an experiment. Leaves: placements, findings and the reasons of collectives, as `explain/1`. May be imported by
the CLI.
"""
