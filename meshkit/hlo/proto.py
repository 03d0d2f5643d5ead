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
from collections.abc import Iterator, Mapping
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
    for tag, value in _walk(message):
        found.setdefault(tag >> 3, []).append(value)
    return found


def _walk(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The tag and the value of each field in order."""
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
            yield tag, value
    except (IndexError, KeyError):
        raise ProgramError(f"not a protocol buffer: byte {position} of {end} is out of place.") from None


def ints(fields: Fields, number: int) -> list[int]:
    """A repeated integer field, packed or not."""
    return [x for value in fields.get(number, ()) for x in ([value] if isinstance(value, int) else _unpack(value))]


def integer(fields: Fields, number: int) -> int:
    """An integer field; 0 where the message leaves it out."""
    values = ints(fields, number)
    return values[-1] if values else 0


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
        if shift > 63:
            raise IndexError


@dataclass(frozen=True)
class Attributes:
    """Attributes of one instruction."""

    name: str  # as XLA prints it
    opcode: str  # as XLA prints it
    called: tuple[str, ...]
    """Names of the computations it calls: of a loop (body, condition), of a conditional its branches."""
    fields: Fields

    @property
    def id(self) -> int:
        """What `operands` of others name it by."""
        return integer(self.fields, 35)

    @property
    def operands(self) -> list[int]:
        """Ids of instructions of the same computation."""
        return ints(self.fields, 36)

    @property
    def tuple_index(self) -> int:
        """Of a `get-tuple-element`, which member it takes."""
        return integer(self.fields, 13)

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
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def is_sync(self) -> bool | None:
        """Whether a collective blocks the stream it is issued on; None where XLA does not say."""
        return _member(self.backend, "collective_backend_config", "is_sync")

    @property
    def trip_count(self) -> int | None:
        """Iterations of a loop; None where XLA does not know."""
        known = str(_member(self.backend, "known_trip_count", "n"))
        return int(known) if known.isdecimal() and len(known) < 19 else None


def _member(backend: Mapping[str, Any], name: str, key: str) -> Any:
    """What an object in a configuration has under a key; None where it is no object."""
    inner = backend.get(name)
    return inner.get(key) if isinstance(inner, dict) else None


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
        self.device_assignment = message(top, 15)  # `DeviceAssignmentProto`

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


_MODULE_COMPUTATION, _MODULE_SCHEDULE = 3, 7
_INSTRUCTION, _COMPUTATION_ROOT = 2, 6
_ID, _OPERANDS, _PREDECESSORS = 35, 36, 37
_WITH_IDS = {
    _MODULE_COMPUTATION: {_INSTRUCTION: {_ID: None, _OPERANDS: None, _PREDECESSORS: None}, _COMPUTATION_ROOT: None},
    _MODULE_SCHEDULE: {1: {2: {1: None}}},
}
_LOCAL = 2**32 - 1  # an id is its computation's, and below it a number of its own
_SPARE_IDS = 2**20  # of tables that XLA makes as long as the highest number in a computation: some 40 MB


def with_dense_ids(module: bytes) -> bytes:
    """A serialized `HloModuleProto` that takes memory in proportion to its instructions, in the order of their ids.

    XLA makes a table for every computation, as long as the highest id in it. Ids of XLA's own that have grown through
    many passes are dense enough; those of a compiler that counts through a process, or of whoever likes, are numbered
    anew.

    Raises:
        ProgramError: the bytes are no module, or an instruction refers to one that is not in its computation.
    """
    rows, count = 0, 0
    for computation in messages(read_fields(module), _MODULE_COMPUTATION):
        ids = [integer(i, _ID) & _LOCAL for i in messages(computation, _INSTRUCTION)]
        rows, count = rows + max(ids, default=0), count + len(ids)
    if rows <= 4 * count + _SPARE_IDS:
        return module
    known: dict[int, int] = {}
    for computation in messages(read_fields(module), _MODULE_COMPUTATION):
        ids = sorted({integer(i, _ID) for i in messages(computation, _INSTRUCTION)})
        known.update((old, old & ~_LOCAL | rank) for rank, old in enumerate(ids))
    return renumbered(module, known)


def renumbered(message: bytes, known: Mapping[int, int], forms: Mapping[int, Any] = _WITH_IDS) -> bytes:
    """A message with other ids of instructions.

    Args:
        message: a serialized `HloModuleProto`, or what of one `forms` is about.
        known: id -> its new one.
        forms: field number -> the forms of a message in it, or None where ids stand.

    Raises:
        ProgramError: the bytes are no message, or have an id that is not known.
    """
    out = bytearray()
    try:
        for tag, value in _walk(message):
            inner = forms.get(tag >> 3, {})
            if inner is None:
                value = (
                    known[value] if isinstance(value, int) else b"".join(_varint_of(known[i]) for i in _unpack(value))
                )
            elif inner and isinstance(value, bytes):
                value = renumbered(value, known, inner)
            length = _varint_of(len(value)) if isinstance(value, bytes) and tag & 7 == _BYTES else b""
            out += _varint_of(tag) + length + (_varint_of(value) if isinstance(value, int) else value)
    except KeyError as error:
        raise ProgramError(f"an instruction refers to id {error.args[0]}, which none has.") from None
    return bytes(out)


def _varint_of(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


@functools.lru_cache(maxsize=1)
def attributes_of(module: Any) -> ModuleAttributes:
    """The attributes of a module as the runtime has it; of the last one asked for they are read once."""
    return ModuleAttributes(module.as_serialized_hlo_module_proto())


def clean_path(op_name: str) -> str:
    """An op_name path without what the way through `jax.export` put in front of it."""
    path = re.sub(r"(?:jit\(call\)/)?(?:call_exported/)?jit\(exported_step\)/", "", op_name)
    path = re.sub(r"(?:jit\(call\)/)?call_exported(?:[:/]|(?=[)]|$))", "", path)
    return path.replace("jit(call)", "").strip("/:") if path else ""
