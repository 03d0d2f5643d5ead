"""`meshkit topo`: describe this machine, or a recorded one, as a cluster, and compare it with a declared cluster.

Input: a machine, or a recorded bundle of one. Output: `TopoReport`, a cluster file, a bundle. Imports no jax.
"""
