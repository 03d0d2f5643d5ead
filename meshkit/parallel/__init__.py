"""Parallelisms beyond sharding annotations: context parallel attention, experts, pipelines, local SGD, compression.

Input: arrays inside a jitted program, and the mesh axes that cut them. Output: results computed with explicit
collectives over those axes. May be imported by step and all above it, and by models.
"""

from meshkit.parallel.context import gathered_attention, ring_attention, ulysses_attention

__all__ = ["gathered_attention", "ring_attention", "ulysses_attention"]
