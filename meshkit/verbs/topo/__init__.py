"""`meshkit topo`: describe this machine (or a recorded one) as a cluster, and compare it with a declared one.

A machine enters, or a record of one; `TopoReport`, a cluster file and a bundle leave. Imports no jax.
"""
