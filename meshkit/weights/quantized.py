"""Read quantized weights as fp32 numbers: block-scaled fp8 and MXFP4.

DeepSeek-V3's checkpoint has block-scaled fp8. Each matrix NAME of F8_E4M3 comes with NAME_scale_inv of F32, which has a
factor for the entries of each block of 128 x 128. Blocks at the ends may be smaller.

GPT-OSS's experts are in MXFP4 (OCP Microscaling Formats 1.0, sections 5.3 and 6.3). A tensor is cut along its last dim
into blocks of 32 numbers of 4 bits (1 sign, 2 exponent, 1 mantissa). A byte has two numbers, the first in its lower
half. Each block has a scale, a power of two in a byte (E8M0). A file holds both as bytes: NAME_blocks [..., blocks, 16]
and NAME_scales [..., blocks].
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
MXFP4_BLOCKS, _MXFP4_SCALES = "_blocks", "_scales"  # suffixes of the two tensors' names
_MXFP4_BLOCK = 32  # numbers under one scale
_BIAS = 127  # bias of a scale's exponent
_NOT_A_NUMBER = 255  # the scale that means NaN
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array((*_POSITIVE, *(-x for x in _POSITIVE)), np.float32)


def fp8_values(path: Path, start: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return a tensor of FP8 in a file, as a memory map.

    safetensors cannot slice such a tensor, since numpy has no FP8 type of its own.

    Args:
        path: path of the file, whose header was checked.
        start: the tensor's first byte.
    """
    if not math.prod(shape):
        return np.empty(shape, ml_dtypes.float8_e4m3fn)
    return np.memmap(path, ml_dtypes.float8_e4m3fn, "r", start, shape)


@dataclass(frozen=True)
class BlockScaled:
    """A matrix of block-scaled fp8; indexing it returns a part, multiplied by the scales of its blocks."""

    values: Any
    scales: Any

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        ranges = [range(*s.indices(n)) for s, n in zip(index, self.values.shape, strict=True)]
        blocks = tuple(slice(r.start // BLOCK, -(-r.stop // BLOCK)) for r in ranges)
        scales = np.asarray(self.scales[blocks])
        rows, columns = (np.arange(r.start, r.stop) // BLOCK - b.start for r, b in zip(ranges, blocks))
        return np.asarray(self.values[index]).astype(np.float32) * scales[np.ix_(rows, columns)]


@dataclass(frozen=True)
class Mxfp4:
    """A tensor of MXFP4; indexing it returns a part as fp32.

    Attributes:
        blocks, scales: arrays of bytes, or objects that read the part they are indexed with.
        shape: shape of the fp32 tensor.
    """

    blocks: Any
    scales: Any
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Return the numbers of a part; the index has one slice of step 1 for each dim, or for the first dims."""
        index = index if isinstance(index, tuple) else (index,)
        index = (*index, *(slice(None),) * (len(self.shape) - len(index)))
        *outer, last = index
        start, stop, _ = last.indices(self.shape[-1])
        within = slice(start // _MXFP4_BLOCK, -(-stop // _MXFP4_BLOCK))
        packed, scales = (np.asarray(x[(*outer, within)]) for x in (self.blocks, self.scales))
        numbers = np.stack([_VALUES[packed & 15], _VALUES[packed >> 4]], axis=-1).reshape(*scales.shape, _MXFP4_BLOCK)
        exponents = np.where(scales == _NOT_A_NUMBER, 0, scales.astype(np.int32) - _BIAS)
        numbers = np.ldexp(numbers, exponents[..., None])
        numbers[scales == _NOT_A_NUMBER] = np.nan
        flat = numbers.reshape(*scales.shape[:-1], -1)
        return flat[..., start - within.start * _MXFP4_BLOCK : stop - within.start * _MXFP4_BLOCK]


def dequantized(files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of `open_folder` without scales; indexing a quantized tensor returns dequantized numbers.

    Tensors of MXFP4 keep the names of their blocks.

    Args:
        files: name -> Tensor.

    Raises:
        ConfigError: scales of another dtype or shape than the format asks for, or blocks without scales.
    """
    found = dict(files)
    for name, tensor in files.items():
        if name.endswith(MXFP4_BLOCKS):
            scale = found.pop(name.removesuffix(MXFP4_BLOCKS) + _MXFP4_SCALES, None)
            found[name] = _mxfp4(name, tensor, scale)
        elif tensor.dtype == FP8 and name + _SCALE in files:
            found[name] = _block_scaled(name, tensor, found.pop(name + _SCALE))
    return found


def _mxfp4(name: str, blocks: Any, scales: Any) -> Any:
    if scales is None or {blocks.dtype, scales.dtype} != {"U8"} or blocks.shape != (*scales.shape, _MXFP4_BLOCK // 2):
        has = f"scales {scales.shape} of {scales.dtype}" if scales else "no scales"
        message = f"{name} is {blocks.shape} of {blocks.dtype}, with {has}: no MXFP4 blocks."
        raise ConfigError(message, at=str(blocks.path), hint="an intact copy of an MXFP4 checkpoint")
    shape = (*scales.shape[:-1], scales.shape[-1] * _MXFP4_BLOCK)
    values = Mxfp4(blocks.values, scales.values, shape)
    return replace(blocks, dtype="BF16", shape=shape, values=values)  # BF16 can represent all values of the format


def _block_scaled(name: str, tensor: Any, scale: Any) -> Any:
    blocks = tuple(-(-n // BLOCK) for n in tensor.shape)
    if scale.dtype != "F32" or scale.shape != blocks or len(blocks) != 2:
        message = f"{name}{_SCALE} is {scale.dtype} {scale.shape}, but {tensor.shape} has F32 {blocks} scales."
        raise ConfigError(message, at=str(scale.path), hint=f"fp8 weights in blocks of {BLOCK} x {BLOCK}")
    return replace(tensor, dtype="F32", values=BlockScaled(tensor.values, scale.values))
