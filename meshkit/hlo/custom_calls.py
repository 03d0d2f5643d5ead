"""Custom calls by target: those that run nothing, and those that only stream their arrays."""

from __future__ import annotations

# They tell the compiler something and run nothing.
FREE_CALLS = frozenset(
    {
        "AllocateBuffer",
        "AssumeGatherIndicesInBound",
        "CreateBuffer",
        "LayoutConstraint",
        "NopReturnToken",
        "Pin",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
        "Sharding",
        "Unpin",
    }
)
# One pass over their operands and results: memory traffic is all of their price. XLA's TopK (k up to 16) keeps the best
# in registers while it reads; a threefry hash writes as fast as memory takes it.
STREAMING_CALLS = frozenset({"__gpu$TopK", "cu_threefry2x32_ffi"})
