"""`meshkit topo`: what this machine (or a recorded one) is, as a cluster, and where it differs from a declared one.

Enters: a machine, or a record of one. Leaves: `TopoReport`, a cluster file, a bundle. Imports no jax.
"""
