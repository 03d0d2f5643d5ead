"""`meshkit plan` and `mk.plan`: a step on GPUs that are not there; remedies, sweeps over sizes, variants in parallel.

Enters: an experiment, or any jitted function with a cluster. Leaves: a Report, and outcomes of variants of it.
May be imported by tune, rehearse and explain.
"""
