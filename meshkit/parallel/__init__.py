"""Parallelisms that shardings alone cannot say: context parallel attention, experts, pipelines, local SGD, compression.

Enters: arrays inside of a jitted program, and the mesh axes that cut them. Leaves: the same arrays, computed by hand
over those axes. May be imported by step and all above it, and by models.
"""

from meshkit.parallel.context import gathered_attention, ring_attention, ulysses_attention

__all__ = ["gathered_attention", "ring_attention", "ulysses_attention"]
