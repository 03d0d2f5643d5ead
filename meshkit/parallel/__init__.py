"""Parallelisms that shardings alone cannot say: context parallel attention, and what else needs code."""

from meshkit.parallel.ring import gathered_attention, ring_attention
from meshkit.parallel.ulysses import ulysses_attention

__all__ = ["gathered_attention", "ring_attention", "ulysses_attention"]
