"""XSpace profiler files as columns of numbers.

    file -> planes -> lines, names, stats;  a line's events -> columns (events.py), when they are asked for

Field numbers are those of tsl/profiler/protobuf/xplane.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from meshkit.errors import TraceError
from meshkit.trace.events import NO_VALUE, Events, decode_line
from meshkit.trace.protobuf import Buffer, Malformed, WireError, span_of

_SPACE_PLANE, _SPACE_ERROR, _SPACE_WARNING, _SPACE_HOST = 1, 2, 3, 4
_PLANE_NAME, _PLANE_LINE, _PLANE_EVENT_METADATA, _PLANE_STAT_METADATA, _PLANE_STAT = 2, 3, 4, 5, 6
_SHORT = {number << 3 | 2 for number in (_PLANE_EVENT_METADATA, _PLANE_STAT_METADATA)}
_LINE_NAME, _LINE_TIMESTAMP_NS, _LINE_EVENT = 2, 3, 4
_STAT_METADATA, _STAT_DOUBLE, _STAT_STRING, _STAT_BYTES, _STAT_REF = 1, 2, 5, 6, 7


@dataclass
class Line:
    """One line (a stream, a thread) of a plane."""

    name: str
    timestamp_ns: int
    span: tuple[int, int]


class Names:
    """What ids stand for: a metadata map of a plane, whose names are decoded when they are asked for.

    Args:
        buffer: the file.
        spans: where the map's entries `{key, value {id, name}}` are.
    """

    def __init__(self, buffer: Buffer, spans: Sequence[tuple[int, int]]):
        self._buffer = buffer
        self._at: dict[int, tuple[int, int]] = {}
        self._known: dict[int, str] = {}
        if not spans:
            return
        begin, end = np.array(spans, np.int64).T
        key, start, length, plain = _entries(buffer, begin, end)
        self._at = dict(zip(key[plain].tolist(), zip(start[plain].tolist(), length[plain].tolist())))
        for i in np.flatnonzero(~plain).tolist():
            self._known.update([_read_named(buffer, *spans[i])])

    def get(self, id_: int, default: str = "") -> str:
        """The name of an id."""
        found = self._known.get(id_)
        if found is None:
            at = self._at.get(id_)
            if at is None:
                return default
            found = self._known[id_] = self._buffer.text(at[0], at[0] + at[1])
        return found

    def items(self) -> Iterator[tuple[int, str]]:
        """Ids and names."""
        return ((id_, self.get(id_)) for id_ in {**self._at, **self._known})

    def ids(self, *, of: Sequence[str] = (), beginning: str = "") -> dict[int, str]:
        """Ids of some names, or of all that begin in a way, without decoding the others."""
        lengths = {len(name.encode()) for name in of}
        head = beginning.encode()
        data = self._buffer.data
        found = {
            id_: self.get(id_)
            for id_, (start, length) in self._at.items()
            if (length in lengths or (head and data[start : start + len(head)] == head))
        }
        found |= self._known
        return {i: n for i, n in found.items() if n in of or (beginning and n.startswith(beginning))}


@dataclass
class Plane:
    """One plane: its lines, and the names that ids in its events stand for."""

    name: str
    lines: list[Line]
    event_names: Names
    stat_names: Names
    stats: dict[str, int | float | str]
    strings: list[str] = field(default_factory=list)
    _interned: dict[str, int] = field(default_factory=dict)

    def text(self, value: int) -> str:
        """What a string stat's value stands for; empty for none, the number itself for a number."""
        if value >= 0:
            return self.stat_names.get(value) or str(value)
        if value == NO_VALUE:
            return ""
        return self.strings[-value - 2] if -value - 2 < len(self.strings) else str(value)

    def intern(self, text: str) -> int:
        """An id for `text`, below -1, where an event carries its string itself."""
        if text not in self._interned:
            self._interned[text] = -2 - len(self.strings)
            self.strings.append(text)
        return self._interned[text]


@dataclass
class XSpace:
    """One file.

    Attributes:
        planes: in the file's order.
        errors, warnings: what the profiler says about itself.
        hosts: names of the hosts in it.
    """

    planes: list[Plane]
    errors: list[str]
    warnings: list[str]
    hosts: list[str]
    buffer: Buffer

    def events(self, plane: Plane, line: Line, wanted: Sequence[str], *, only_with: str | None = None) -> Events:
        """The events of a line, decoded now.

        Args:
            plane, line: of this file.
            wanted: names of the stats to decode.
            only_with: leave out the events without this stat.

        Raises:
            TraceError: the line is damaged.
        """
        return decode_line(self.buffer, plane, line, wanted, only_with)


def read_xspace(path: str | Path) -> XSpace:
    """Reads the outline of a file: planes, lines and names; events are decoded when asked for.

    Raises:
        TraceError: it cannot be read, or is no XSpace.
    """
    path = Path(path)
    try:
        buffer = Buffer.read(path)
    except OSError as e:
        raise TraceError(f"the trace cannot be read: {e.strerror}.", at=str(path)) from None
    if buffer.size == 0:
        raise TraceError("the trace is empty (0 bytes).", at=str(path), hint="capturing again")
    space = XSpace([], [], [], [], buffer)
    texts = {_SPACE_ERROR: space.errors, _SPACE_WARNING: space.warnings, _SPACE_HOST: space.hosts}
    try:
        for number, value in buffer.fields(0, buffer.size):
            if number == _SPACE_PLANE:
                space.planes.append(_read_plane(buffer, *span_of(value)))
            elif number in texts:
                texts[number].append(buffer.text(*span_of(value)))
            else:
                raise Malformed(f"field {number} is not one of an XSpace")
    except WireError as e:
        raise TraceError(f"this file is not a profiler trace, or is cut short: {e}.", at=str(path)) from None
    return space


def _read_plane(buffer: Buffer, start: int, end: int) -> Plane:
    name, lines = "", []
    spans: dict[int, list[tuple[int, int]]] = {_PLANE_EVENT_METADATA: [], _PLANE_STAT_METADATA: [], _PLANE_STAT: []}
    data, at = buffer.data, start
    while at < end:
        key, length = data[at], data[at + 1]
        if key in _SHORT and length < 0x80 and at + 2 + length <= end:  # a name
            spans[key >> 3].append((at + 2, at + 2 + length))
            at += 2 + length
            continue
        after = buffer.skip(at, end)
        ((number, value),) = buffer.fields(at, after)
        at = after
        if number == _PLANE_NAME:
            name = buffer.text(*span_of(value))
        elif number == _PLANE_LINE:
            lines.append(_read_line(buffer, *span_of(value)))
        elif number in spans:
            spans[number].append(span_of(value))
    names = [Names(buffer, spans[number]) for number in (_PLANE_EVENT_METADATA, _PLANE_STAT_METADATA)]
    plane = Plane(name, lines, *names, stats={})
    for span in spans[_PLANE_STAT]:
        key, value = _read_stat(buffer, plane, *span)
        plane.stats[key] = value
    return plane


def _read_line(buffer: Buffer, start: int, end: int) -> Line:
    """Name and time of a line. Writers put both before its events; without a name there they are looked for behind."""
    line = Line("", 0, (start, end))
    for number, value in buffer.fields(start, end):
        if number == _LINE_NAME:
            line.name = buffer.text(*span_of(value))
        elif number == _LINE_TIMESTAMP_NS and isinstance(value, int):
            line.timestamp_ns = value
        elif number == _LINE_EVENT and line.name:
            break
    return line


def _entries(buffer: Buffer, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, ...]:
    """[n] key, where the name begins, its length, and whether the entry has the fields in this order."""
    data = buffer.bytes
    key, length = buffer.varints(begin + 1)
    plain = (data[begin] == 0x08) & (length > 0)
    at = np.minimum(begin + 1 + length, end)
    for tag, is_name in ((0x12, False), (0x08, False), (0x12, True)):
        value, length = buffer.varints(at + 1)
        plain &= (data[at] == tag) & (length > 0)
        after = np.minimum(at + 1 + length, end)
        if is_name:
            plain &= (value >= 0) & (value <= end - after)
            return key, after, value, plain
        at = after
    raise AssertionError


def _read_named(buffer: Buffer, start: int, end: int) -> tuple[int, str]:
    """Key and name of an entry of a metadata map, in any order."""
    key, name = 0, ""
    for number, value in buffer.fields(start, end):
        if number == 1 and isinstance(value, int):
            key = value
        elif number == 2:
            name = _name_of(buffer, *span_of(value))
    return key, name


def _name_of(buffer: Buffer, start: int, end: int) -> str:
    """Field 2 of a metadata message; what follows it (stats of the metadata) can be long and is not looked at."""
    for number, value in buffer.fields(start, end):
        if number == 2:
            return buffer.text(*span_of(value))
    return ""


def _read_stat(buffer: Buffer, plane: Plane, start: int, end: int) -> tuple[str, int | float | str]:
    name, found = "", 0
    for number, value in buffer.fields(start, end):
        if number == _STAT_METADATA and isinstance(value, int):
            name = plane.stat_names.get(value)
        elif number in (_STAT_STRING, _STAT_BYTES):
            found = buffer.text(*span_of(value))
        elif number == _STAT_REF and isinstance(value, int):
            found = plane.stat_names.get(value)
        elif number == _STAT_DOUBLE and isinstance(value, bytes):
            found = float(np.frombuffer(value, "<f8")[0])
        elif isinstance(value, int):
            found = value
    return name, found
