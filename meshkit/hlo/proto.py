"""What a module says about its instructions beyond opcode, operands and shape.

    serialized HloModuleProto -> ModuleAttributes: entry, schedule order, and by instruction name: called computations,
    replica groups, backend configuration, op_name path

The runtime's instruction objects print these and nothing more; here they are read from the message that XLA writes
(xla/service/hlo.proto, xla/xla_data.proto), whose field numbers hold across jaxlib 0.11 and 0.12. jaxlib has no Python
classes for these messages, so they are read by their wire format, without a schema
(https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshkit.errors import ProgramError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

Fields = dict[int, list[int | bytes]]


def read_fields(message: bytes) -> Fields:
    """Field number -> values in order: int of a varint, bytes of everything else.

    Raises:
        ProgramError: the bytes are no message.
    """
    found: Fields = {}
    position, end = 0, len(message)
    try:
        while position < end:
            tag, position = _varint(message, position)
            kind = tag & 7
            if kind == _VARINT:
                value, position = _varint(message, position)
            else:
                if kind == _BYTES:
                    size, position = _varint(message, position)
                else:
                    size = {_FIXED64: 8, _FIXED32: 4}[kind]
                if position + size > end:
                    raise IndexError
                value = message[position : position + size]
                position += size
            found.setdefault(tag >> 3, []).append(value)
    except (IndexError, KeyError):
        raise ProgramError(f"not a protocol buffer: byte {position} of {end} is out of place.") from None
    return found


def ints(fields: Fields, number: int) -> list[int]:
    """A repeated integer field, packed or not."""
    return [x for value in fields.get(number, ()) for x in ([value] if isinstance(value, int) else _unpack(value))]


def integer(fields: Fields, number: int, default: int = 0) -> int:
    """An integer field; the default where the message leaves it out."""
    values = ints(fields, number)
    return values[-1] if values else default


def messages(fields: Fields, number: int) -> list[Fields]:
    """A repeated message field."""
    return [read_fields(value) for value in fields.get(number, ()) if isinstance(value, bytes)]


def message(fields: Fields, number: int) -> Fields:
    """A message field; one without fields where the message leaves it out."""
    return next(iter(messages(fields, number)), {})


def texts(fields: Fields, number: int) -> list[str]:
    """A repeated string field."""
    return [value.decode(errors="replace") for value in fields.get(number, ()) if isinstance(value, bytes)]


def text(fields: Fields, number: int) -> str:
    """A string field; "" where the message leaves it out."""
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


@dataclass(frozen=True)
class Attributes:
    """Attributes of one instruction."""

    name: str  # as XLA prints it
    opcode: str  # as XLA prints it
    called: tuple[str, ...]
    """Names of the computations it calls: of a loop (body, condition), of a conditional its branches."""
    fields: Fields

    @property
    def source(self) -> str:
        """The op_name path of the model code that caused it; "" if XLA kept none."""
        return clean_path(text(self.metadata, 2))

    @property
    def metadata(self) -> Fields:
        """`OpMetadata`: where it comes from."""
        return message(self.fields, 7)

    @property
    def target(self) -> str:
        """`custom_call_target`; "" of anything else."""
        return text(self.fields, 28)

    @property
    def frontend(self) -> Mapping[str, str]:
        """`frontend_attributes`."""
        return {text(pair, 1): text(pair, 2) for m in messages(self.fields, 68) for pair in messages(m, 1)}

    @functools.cached_property
    def backend(self) -> Mapping[str, Any]:
        """`backend_config` of XLA:GPU; empty where there is none, or it is no JSON object."""
        try:
            found = json.loads(text(self.fields, 43) or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def is_sync(self) -> bool | None:
        """Whether a collective blocks the stream it is issued on; None where XLA does not say."""
        return self.backend.get("collective_backend_config", {}).get("is_sync")

    @property
    def trip_count(self) -> int | None:
        """Iterations of a loop; None where XLA does not know."""
        known = self.backend.get("known_trip_count", {}).get("n")
        return None if known is None else int(known)


class ModuleAttributes:
    """Attributes of a module, each computation's read when it is first asked for.

    Args:
        module: a serialized `HloModuleProto`.

    Raises:
        ProgramError: the bytes are no message.
    """

    def __init__(self, module: bytes):
        top = read_fields(module)
        self._computations = {text(c, 1): c for c in messages(top, 3)}
        self._names = {integer(c, 5): name for name, c in self._computations.items()}
        sequences = messages(message(top, 7), 1)
        # computation id -> instruction ids in schedule order
        self._sequences = {integer(pair, 1): ints(message(pair, 2), 1) for pair in sequences}
        self._instructions: dict[str, Attributes] = {}
        self._order: dict[str, list[str]] = {}
        self._parents: dict[str, str] = {}
        self.entry = text(top, 2)  # name of the computation that runs
        self.stack_frames = message(top, 17)  # `StackFrameIndexProto`

    @property
    def computations(self) -> list[str]:
        """Names of all computations."""
        return list(self._computations)

    def order(self, computation: str) -> list[str]:
        """Names of a computation's instructions as scheduled; operands first where the module has no schedule."""
        if computation not in self._order:
            self._order[computation] = self._read(computation)
        return self._order[computation]

    def root(self, computation: str) -> int:
        """The id of the instruction whose value a computation gives."""
        return integer(self._computations[computation], 6)

    def of(self, instruction: str) -> Attributes:
        """The attributes of an instruction; names are unique in a module."""
        if instruction not in self._instructions:
            for computation in self._computations:
                self.order(computation)
        return self._instructions[instruction]

    def parent(self, instruction: str) -> str:
        """The computation that an instruction stands in."""
        self.of(instruction)
        return self._parents[instruction]

    def _read(self, name: str) -> list[str]:
        computation = self._computations[name]
        ids: dict[int, str] = {}
        for fields in messages(computation, 2):
            instruction = text(fields, 1)
            called = tuple(self._names[i] for i in ints(fields, 38) if i in self._names)
            self._instructions[instruction] = Attributes(instruction, text(fields, 2), called, fields)
            self._parents[instruction] = name
            ids[integer(fields, 35)] = instruction
        sequence = self._sequences.get(integer(computation, 5), [])
        complete = len(sequence) == len(ids) and all(i in ids for i in sequence)
        return [ids[i] for i in sequence] if complete else list(ids.values())


def clean_path(op_name: str) -> str:
    """An op_name path without what the way through `jax.export` put in front of it."""
    path = re.sub(r"(?:jit\(call\)/)?(?:call_exported/)?jit\(exported_step\)/", "", op_name)
    path = re.sub(r"(?:jit\(call\)/)?call_exported(?:[:/]|(?=[)]|$))", "", path)
    return path.replace("jit(call)", "").strip("/:") if path else ""
