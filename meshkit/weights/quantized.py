"""Block-scaled fp8 weights, as DeepSeek-V3's checkpoint has them, read as the fp32 numbers that they stand for.

Beside a matrix NAME of F8_E4M3 lies NAME_scale_inv of F32, which has a number for each block of 128 x 128: what the
block's entries are multiplied by. Blocks at the ends may be smaller.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from meshkit.errors import ConfigError

BLOCK = 128
FP8 = "F8_E4M3"
_SCALE = "_scale_inv"


def fp8_values(path: Path, start: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of FP8 in a file, which is read where it is indexed.

    numpy has no such type of its own, so that safetensors cannot slice one.

    Args:
        path: of the file, whose header was checked.
        start: the tensor's first byte.
        shape: of the tensor.
    """
    if not math.prod(shape):
        return np.empty(shape, ml_dtypes.float8_e4m3fn)
    return np.memmap(path, ml_dtypes.float8_e4m3fn, "r", start, shape)


@dataclass(frozen=True)
class BlockScaled:
    """A matrix that multiplies the part that it is indexed with by the scales of its blocks."""

    values: Any
    scales: Any

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        ranges = [range(*s.indices(n)) for s, n in zip(index, self.values.shape, strict=True)]
        blocks = tuple(slice(r.start // BLOCK, -(-r.stop // BLOCK)) for r in ranges)
        scales = np.asarray(self.scales[blocks])
        rows, columns = (np.arange(r.start, r.stop) // BLOCK - b.start for r, b in zip(ranges, blocks))
        return np.asarray(self.values[index]).astype(np.float32) * scales[np.ix_(rows, columns)]


def dequantized(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of `open_folder`, those of fp8 with scales as the fp32 that they amount to; without the
    scales.

    Args:
        files: name -> Tensor.

    Raises:
        ConfigError: scales of another dtype or shape than blocks of 128 x 128 ask for.
    """
    found = dict(files)
    for name, tensor in files.items():
        scale = files.get(name + _SCALE)
        if tensor.dtype != FP8 or scale is None:
            continue
        blocks = tuple(-(-n // BLOCK) for n in tensor.shape)
        if scale.dtype != "F32" or scale.shape != blocks or len(blocks) != 2:
            message = f"{name}{_SCALE} is {scale.dtype} {scale.shape}, but {tensor.shape} has F32 {blocks} scales."
            raise ConfigError(message, at=str(scale.path), hint=f"fp8 weights in blocks of {BLOCK} x {BLOCK}")
        found[name] = replace(tensor, dtype="F32", values=BlockScaled(tensor.values, scale.values))
        del found[name + _SCALE]
    return found
