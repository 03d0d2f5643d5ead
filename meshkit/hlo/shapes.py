"""Shapes of HLO values: element type, dims, bytes.

jaxlib 0.12 gives an instruction's shape as an object; 0.11 only prints it. Both become the same `Shape`.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Any

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=\s]*)\]")
_RESULT = re.compile(r"^\s*(?:ROOT )?%?[\w.\-]+ = ")
_BITS = re.compile(r"^[a-z]+?(\d+)")


@dataclass(frozen=True)
class Shape:
    """An array (dtype and dims), or a tuple of shapes (dtype `tuple`)."""

    dtype: str  # as XLA spells it: `bf16`, `f8e4m3fn`, `s32`, `pred`, `token`
    dims: tuple[int, ...] = ()  # sizes; () of a scalar, a token or a tuple
    parts: tuple[Shape, ...] = ()  # members of a tuple

    @property
    def bytes(self) -> int:
        """Bytes of an array or, summed, of a tuple; sub-byte types are packed."""
        if self.dtype == "tuple":
            return sum(p.bytes for p in self.parts)
        return math.ceil(math.prod(self.dims) * dtype_bits(self.dtype) / 8)

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def shape_of(instruction: Any) -> Shape:
    """The shape of an instruction's result, from its object where jaxlib has one, else from its text."""
    native = getattr(instruction, "shape", None)
    return _from_object(native) if native is not None else parse_shape(instruction.to_string())


def parse_shape(text: str) -> Shape:
    """The result shape of a printed instruction `%name = shape opcode(...)`."""
    return _parse(_result_text(_RESULT.sub("", text, count=1)))


def dtype_bits(name: str) -> int:
    """Bits of an element: 16 for bf16, 8 for pred and every f8, 4 for s4; 0 for a token."""
    if name == "pred":
        return 8
    m = _BITS.match(name)
    return int(m[1]) if m else 0


def _from_object(native: Any) -> Shape:
    if native.is_tuple():
        return Shape("tuple", parts=tuple(_from_object(s) for s in native.tuple_shapes()))
    if native.is_token():
        return Shape("token")
    return Shape(native.xla_element_type().name.lower(), tuple(native.dimensions()))


def _result_text(text: str) -> str:
    """The leading shape of `text`: up to the bracket that closes a tuple, or the first space."""
    if not text.startswith("("):
        return text.split(" ", 1)[0]
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: position + 1]
    return text


@functools.lru_cache(maxsize=65536)
def _parse(text: str) -> Shape:
    text = re.sub(r"/\*[^*/]*\*/|\{[^{}]*\}", "", text).strip()
    if text.startswith("("):
        return Shape("tuple", parts=tuple(_parse(part) for part in _members(text[1:-1])))
    found = _ARRAY.match(text)
    if not found:
        return Shape("token" if text.startswith("token") else text)
    return Shape(found[1], tuple(int(d.strip(" <=")) for d in found[2].split(",") if d.strip(" <=")))


def _members(text: str) -> list[str]:
    """The members of a printed tuple: split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for position, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [p.strip() for p in [*parts, text[start:]] if p.strip()]
