"""Read a compiled program from its serialized message: computations and their instructions, each read once.

    serialized HloModuleProto -> Module -> Computation -> HloInstruction: shape, operands, users, attributes

jaxlib has no Python classes for XLA's messages (xla/service/hlo.proto, xla/xla_data.proto), so they are parsed from the
wire format (https://protobuf.dev/programming-guides/encoding). Their field numbers hold across jaxlib 0.11 and 0.12. As
in XLA, names are unique in a module, and an instruction's operands come before it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from meshkit.errors import MeshkitError, ProgramError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NUMBERED = {_VARINT, _BYTES}  # Fields of these kinds begin with a number: the value, or its length.
_HOST_SPACE = 5  # Number of host memory in XLA:GPU.
_TUPLE = 13
_DTYPES = {  # `PrimitiveType`
    1: "pred", 2: "s8", 3: "s16", 4: "s32", 5: "s64", 6: "u8", 7: "u16", 8: "u32", 9: "u64", 10: "f16", 11: "f32",
    12: "f64", 13: "tuple", 14: "opaque", 15: "c64", 16: "bf16", 17: "token", 18: "c128", 19: "f8e5m2",
    20: "f8e4m3fn", 21: "s4", 22: "u4", 23: "f8e4m3b11fnuz", 24: "f8e5m2fnuz", 25: "f8e4m3fnuz", 26: "s2", 27: "u2",
    28: "f8e4m3", 29: "f8e3m4", 30: "s1", 31: "u1", 32: "f4e2m1fn", 33: "f8e8m0fnu", 34: "buffer",
}  # fmt: skip
_BITS = re.compile(r"^[a-z]+?(\d+)")
# Fields that equal programs may differ in: metadata with files and lines, ids that count through a process, values of a
# run.
_NOT_PRINTED = {7, 35, 36, 37, 38, 68, 82, 88}

Fields = dict[int, list[int | bytes]]


def read_fields(message: bytes) -> Fields:
    """Return field number -> values in order: int for a varint, bytes for everything else.

    Raises:
        ProgramError: the bytes are not a message.
    """
    found: Fields = {}
    position, end = 0, len(message)
    try:
        while position < end:
            tag, position = message[position], position + 1  # Most numbers have one byte.
            if tag > 127:
                tag, position = _varint(message, position - 1)
            kind = tag & 7
            if kind in _NUMBERED:
                value, position = message[position], position + 1
                if value > 127:
                    value, position = _varint(message, position - 1)
            else:
                value = {_FIXED64: 8, _FIXED32: 4}[kind]
            if kind != _VARINT:
                stop = position + value
                if stop > end:
                    raise IndexError
                value, position = message[position:stop], stop
            number = tag >> 3
            if number in found:
                found[number].append(value)
            else:
                found[number] = [value]
    except (IndexError, KeyError):
        raise ProgramError(f"not a protocol buffer: byte {position} of {end} is out of place.") from None
    return found


def ints(fields: Fields, number: int) -> list[int]:
    """Return a repeated integer field, packed or not."""
    return [x for value in fields.get(number, ()) for x in ([value] if isinstance(value, int) else _unpack(value))]


def integer(fields: Fields, number: int) -> int:
    """Return an integer field; 0 if the message lacks it."""
    values = ints(fields, number)
    return values[-1] if values else 0


def messages(fields: Fields, number: int) -> list[Fields]:
    return [read_fields(value) for value in fields.get(number, ()) if isinstance(value, bytes)]


def message(fields: Fields, number: int) -> Fields:
    """Return a message field; an empty message if the field is missing."""
    return next(iter(messages(fields, number)), {})


def texts(fields: Fields, number: int) -> list[str]:
    return [value.decode(errors="replace") for value in fields.get(number, ()) if isinstance(value, bytes)]


def text(fields: Fields, number: int) -> str:
    """Return a string field; "" if the message lacks it."""
    return next(iter(texts(fields, number)), "")


def _unpack(packed: bytes) -> list[int]:
    values, position = [], 0
    while position < len(packed):
        value, position = _varint(packed, position)
        values.append(value)
    return values


def _varint(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    if byte < 128:
        return byte, position + 1
    value, shift = byte & 127, 7
    while True:
        position += 1
        byte = data[position]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position + 1
        shift += 7
        if shift > 63:
            raise IndexError


@contextmanager
def refusing_malformed(what: str) -> Iterator[None]:
    """Turn errors from reading malformed contents into a `ProgramError`: "`what` cannot be read"."""
    try:
        yield
    except MeshkitError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ProgramError(f"{what} cannot be read: {type(error).__name__}: {error}.") from None


@dataclass(frozen=True)
class Shape:
    """An array (dtype and dims), or a tuple of shapes (dtype `tuple`)."""

    dtype: str
    """The name as XLA spells it: `bf16`, `f8e4m3fn`, `s32`, `pred`, `token`."""
    dims: tuple[int, ...] = ()
    """Sizes; () for a scalar, a token or a tuple."""
    parts: tuple[Shape, ...] = ()
    layout: tuple[int, ...] = field(default=(), compare=False)
    """The dims in memory order, the one with adjacent elements first; () if unknown."""
    on_host: bool = field(default=False, compare=False)
    """Whether it, or a part of it, is in host memory."""

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of an array or, summed, of a tuple; sub-byte types are packed."""
        if self.dtype == "tuple":
            return sum(p.bytes for p in self.parts)
        return math.ceil(self.elements * dtype_bits(self.dtype) / 8)

    @property
    def elements(self) -> int:
        """Number of elements of an array; 1 for anything else."""
        return math.prod(self.dims)

    @property
    def minor(self) -> int | None:
        """The dim whose elements are adjacent in memory; None for a scalar, a tuple, or if unknown."""
        return self.layout[0] if self.layout else None

    def __str__(self) -> str:
        if self.dtype == "tuple":
            return f"({', '.join(map(str, self.parts))})"
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


def dtype_bits(name: str) -> int:
    """Return the bits of an element: 16 for bf16, 8 for pred and every f8, 4 for s4; 0 for a token."""
    if name == "pred":
        return 8
    m = _BITS.match(name)
    return int(m[1]) if m else 0


@functools.lru_cache(maxsize=65536)
def _shape(serialized: bytes) -> Shape:
    fields = read_fields(serialized)
    kind = integer(fields, 2)
    if kind == _TUPLE:
        parts = tuple(_shape(part) for part in fields.get(4, ()) if isinstance(part, bytes))
        return Shape("tuple", parts=parts, on_host=any(p.on_host for p in parts))
    layout = message(fields, 5)
    dims = tuple(ints(fields, 3))
    return Shape(_DTYPES.get(kind, "invalid"), dims, (), tuple(ints(layout, 1)), integer(layout, 8) == _HOST_SPACE)


@dataclass(eq=False)
class HloInstruction:
    """One instruction of a computation."""

    name: str
    """Unique in its module."""
    opcode: str
    """The opcode as XLA prints it: `all-gather-start`."""
    fields: Fields = field(repr=False)
    operands: Sequence[HloInstruction] = field(default=(), repr=False)
    called: Sequence[Computation] = field(default=(), repr=False)
    """Computations that it calls: for a loop (body, condition), for a conditional its branches."""
    users: list[HloInstruction] = field(default_factory=list, repr=False)
    """Users of its result, each once, in order."""

    @functools.cached_property
    def shape(self) -> Shape:
        return _shape(b"".join(v for v in self.fields.get(3, ()) if isinstance(v, bytes)))

    @property
    def tuple_index(self) -> int:
        """Index of the member that a `get-tuple-element` takes."""
        return integer(self.fields, 13)

    @property
    def parameter_number(self) -> int:
        """Index of a `parameter` in its computation."""
        return integer(self.fields, 9)

    @property
    def channel(self) -> int:
        """Channel that a send and a receive share; 0 without one."""
        return integer(self.fields, 26)

    @property
    def dimensions(self) -> list[int]:
        """Dims along which it joins, sorts or reduces."""
        return ints(self.fields, 14)

    @functools.cached_property
    def source(self) -> str:
        """The op_name path of the model code that caused it; "" if XLA kept none."""
        return clean_path(text(self.metadata, 2))

    @functools.cached_property
    def metadata(self) -> Fields:
        """`OpMetadata`, the instruction's origin in the source."""
        return message(self.fields, 7)

    @property
    def target(self) -> str:
        """`custom_call_target`; "" for other instructions."""
        return text(self.fields, 28)

    @property
    def frontend(self) -> Mapping[str, str]:
        """`frontend_attributes`."""
        return {text(pair, 1): text(pair, 2) for m in messages(self.fields, 68) for pair in messages(m, 1)}

    @functools.cached_property
    def _configuration(self) -> dict[str, Any]:
        try:
            found = json.loads(text(self.fields, 43) or "{}")
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def configured(self, *keys: str) -> Any:
        """Return the value under nested keys in XLA:GPU's `backend_config`, or in a part of it, or None."""
        whole = self._configuration
        found: Any = next((c for c in (whole, *whole.values()) if isinstance(c, dict) and keys[0] in c), None)
        for key in keys:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    @property
    def trip_count(self) -> int | None:
        """Iterations of a loop; None if XLA does not know."""
        known = str(self.configured("known_trip_count", "n"))
        return int(known) if known.isdecimal() and len(known) < 19 else None

    def identity(self) -> tuple:
        """Return a tuple that is equal for equal instructions, wherever they were written."""
        names = [[o.name for o in self.operands], [c.name for c in self.called], sorted(self.frontend.items())]
        rest = [(number, self.fields[number]) for number in sorted(self.fields.keys() - _NOT_PRINTED)]
        return self.name, self.opcode, names, rest


@dataclass(eq=False)
class Computation:
    """The instructions of one computation."""

    name: str
    instructions: Sequence[HloInstruction]
    """Instructions in the order of their ids."""
    order: Sequence[HloInstruction]
    """Instructions in scheduled order; without a schedule, operands come first."""
    root: HloInstruction
    """The instruction whose result is the computation's value."""


class Module:
    """A compiled program, from a serialized `HloModuleProto`.

    Raises:
        ProgramError: the bytes are not a module, or an instruction takes or calls something that does not precede it.
    """

    def __init__(self, serialized: bytes):
        with refusing_malformed(f"the HLO module ({len(serialized)} bytes)"):
            top = read_fields(serialized)
            self.name = text(top, 1)
            self.stack_frames = message(top, 17)  # `StackFrameIndexProto`
            self.device_assignment = message(top, 15)  # `DeviceAssignmentProto`
            sequences = messages(message(top, 7), 1)
            # Computation id -> instruction ids in schedule order.
            scheduled = {integer(pair, 1): ints(message(pair, 2), 1) for pair in sequences}
            found: dict[int, Computation] = {}
            self.instructions: dict[str, HloInstruction] = {}
            for fields in messages(top, 3):
                id_ = integer(fields, 5)
                found[id_] = self._computation(fields, scheduled.get(id_, ()), found)
            self.computations = {c.name: c for c in found.values()}
            if text(top, 2) not in self.computations:
                raise ProgramError(f"the HLO module ({len(serialized)} bytes) has no entry computation.")
        self.entry = self.computations[text(top, 2)]

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of every instruction in order, equal for equal programs."""
        every = ([c.name, c.root.name, *(i.identity() for i in c.order)] for c in self.computations.values())
        digest = hashlib.sha256()
        for each in every:
            digest.update(repr(each).encode())
        return digest.hexdigest()[:16]

    def _computation(self, fields: Fields, scheduled: Iterable[int], known: Mapping[int, Computation]) -> Computation:
        """Return one computation; `known` has the computations before it, which it may call."""
        by_id: dict[int, HloInstruction] = {}
        for read in messages(fields, 2):
            operands = [by_id[i] for i in ints(read, 36)]
            called = [known[i] for i in ints(read, 38)]
            made = HloInstruction(text(read, 1), text(read, 2), read, operands, called)
            if made.name in self.instructions:
                raise ProgramError(f"two instructions of the HLO module are called {made.name}.")
            self.instructions[made.name] = by_id[integer(read, 35)] = made
        order = [by_id[i] for i in scheduled if i in by_id]
        if not len(order) == len(by_id) == len(set(order)):
            order = [*by_id.values()]
        for user in order:
            for operand in dict.fromkeys(user.operands):
                operand.users.append(user)
        by_ids = [i for _, i in sorted(by_id.items())]
        return Computation(text(fields, 1), by_ids, order, by_id[integer(fields, 6)])


def clean_path(op_name: str) -> str:
    """Return an op_name path without the prefix that `jax.export` adds."""
    path = re.sub(r"(?:jit\(call\)/)?(?:call_exported/)?jit\(exported_step\)/", "", op_name)
    path = re.sub(r"(?:jit\(call\)/)?call_exported(?:[:/]|(?=[)]|$))", "", path)
    return path.replace("jit(call)", "").strip("/:") if path else ""
