"""Define the precisions of `[train]`: the number formats in which a step computes, keeps and sends values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PrecisionName = Literal["fp32", "bf16", "fp8", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class Precision:
    """The number formats of a step. Linear layers may multiply in fewer bits than the rest of the model computes in."""

    item_bytes: int
    """Bytes of an element of activations and of gathered weights: 4 in fp32, 2 in bf16."""
    operands: str
    """XLA's element type of what linear layers multiply; `mxfp8` is meshkit's name for block-scaled fp8."""
    few_bits: bool = False
    """Whether linear layers multiply in fewer bits than `item_bytes`."""
    block: int = 0
    """Elements that share one scale; 0 if blocks have no scales."""
    packed: int = 1
    """Elements that XLA packs into one byte to send them; 1 if it packs none."""


PRECISIONS: Mapping[str, Precision] = {
    "fp32": Precision(4, "f32"),
    "bf16": Precision(2, "bf16"),
    "fp8": Precision(2, "f8e4m3fn", few_bits=True),
    "mxfp8": Precision(2, "mxfp8", few_bits=True, block=32),
    "nvfp4": Precision(2, "f4e2m1fn", few_bits=True, block=16, packed=2),
}
