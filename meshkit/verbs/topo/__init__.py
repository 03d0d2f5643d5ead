"""`meshkit topo`: describe this machine (or a recorded one) as a cluster, and compare it with a declared one.

Enters: a machine, or a record of one. Leaves: `TopoReport`, a cluster file, a bundle. Imports no jax.
"""
