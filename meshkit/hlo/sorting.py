"""How often XLA's sort passes over its arrays: one kernel and one round trip of device memory each time.

XLA:GPU sorts bitonically (meshkit keeps CUB's radix sort off, see options.py). Comparisons within a tile, as large as
a block's shared memory and threads allow, share a kernel; every wider one is a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshkit.hlo.shapes import Shape, dtype_bits

# What the plan of XLA's bitonic sort (openxla/xla, ir_emitter_unnested.cc, EmitSort) takes for a tile: four elements
# of each of a block's 1024 threads, as far as its 48 KiB of static shared memory hold them.
_TILE_ELEMENTS = 4 * 1024
_SHARED_BYTES = 48 * 1024


def sort_passes(operands: Sequence[Shape], dim: int) -> int:
    """Kernels of a sort along `dim` of these arrays, which move together.

    Stage s of the log2(n) stages compares elements 2^(s+1) - 1, 2^(s-1), ..., 1 apart. With a tile of 2^t elements the
    stages below t are one kernel, and stage s >= t is s - t + 1 wide comparisons and one kernel for the rest.
    """
    stages = (operands[0].dims[dim] - 1).bit_length()
    element_bytes = sum(dtype_bits(s.dtype) for s in operands) / 8
    tile = int(min(_TILE_ELEMENTS, _SHARED_BYTES / max(1.0, element_bytes), 2**stages))
    wide = stages - (tile.bit_length() - 1)
    return 1 + wide * (wide + 3) // 2
