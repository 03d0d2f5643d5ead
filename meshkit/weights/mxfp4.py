"""Tensors of MXFP4 checkpoints as the numbers that they stand for (OCP Microscaling Formats 1.0, sections 5.3 and 6.3).

Along its last dim a tensor is cut into blocks of 32 numbers of 4 bits (1 sign, 2 exponent, 1 mantissa), two in a byte,
the first in the lower half; each block has a scale, a power of two in a byte (E8M0). A file holds both as bytes:
`NAME_blocks` [..., blocks, 16] and `NAME_scales` [..., blocks].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"  # The endings of the two tensors' names.
BLOCK = 32  # Numbers that share one scale.
_BIAS = 127  # The bias of a scale's exponent.
_NOT_A_NUMBER = 255  # This scale stands for NaN.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array((*_POSITIVE, *(-x for x in _POSITIVE)), np.float32)


@dataclass(frozen=True)
class Mxfp4:
    """A tensor that is read in parts, as fp32, from its blocks and scales.

    Attributes:
        blocks, scales: arrays of bytes, or what reads the part of one that it is indexed with.
        shape: of the numbers.
    """

    blocks: Any
    scales: Any
    shape: tuple[int, ...]

    @classmethod
    def from_blocks(cls, blocks: Any, scales: Any) -> Mxfp4 | None:
        """Return the numbers of two tensors of a file; None where they are not blocks and their scales.

        Args:
            blocks, scales: with `dtype` as the format of the file spells it, `shape` and `values`; scales may be None.
        """
        if scales is None or {blocks.dtype, scales.dtype} != {"U8"} or scales.shape != blocks.shape[:-1]:
            return None
        if blocks.shape[-1] != BLOCK // 2:
            return None
        return cls(blocks.values, scales.values, (*scales.shape[:-1], scales.shape[-1] * BLOCK))

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return the numbers of a part; index is one slice of step 1 for each dim, or for the first of them."""
        index = index if isinstance(index, tuple) else (index,)
        index = (*index, *(slice(None),) * (len(self.shape) - len(index)))
        *outer, last = index
        start, stop, _ = last.indices(self.shape[-1])
        within = slice(start // BLOCK, -(-stop // BLOCK))
        packed, scales = (np.asarray(x[(*outer, within)]) for x in (self.blocks, self.scales))
        numbers = np.stack([_VALUES[packed & 15], _VALUES[packed >> 4]], axis=-1).reshape(*scales.shape, BLOCK)
        exponents = np.where(scales == _NOT_A_NUMBER, 0, scales.astype(np.int32) - _BIAS)
        numbers = np.ldexp(numbers, exponents[..., None])
        numbers[scales == _NOT_A_NUMBER] = np.nan
        flat = numbers.reshape(*scales.shape[:-1], -1)
        return flat[..., start - within.start * BLOCK : stop - within.start * BLOCK]
