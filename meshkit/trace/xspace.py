"""Read XSpace profiler files as columns of numbers.

    file -> planes -> lines, names, stats;  a line's events -> columns, when requested

Field numbers are those of tsl/profiler/protobuf/xplane.proto. A trace has millions of events, so numpy finds the
beginnings of events from many places of a line at once, and decodes the fields and stats of many events at once. Events
whose fields are in an unusual order are decoded one by one, so that any valid file gives the right result.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from meshkit.config.files import open_regular
from meshkit.errors import TraceError
from meshkit.trace.protobuf import Buffer, Malformed, WireError, assembled, span_of

_SPACE_PLANE, _SPACE_ERROR, _SPACE_WARNING, _SPACE_HOST = 1, 2, 3, 4
_PLANE_NAME, _PLANE_LINE, _PLANE_EVENT_METADATA, _PLANE_STAT_METADATA, _PLANE_STAT = 2, 3, 4, 5, 6
_SHORT = {number << 3 | 2 for number in (_PLANE_EVENT_METADATA, _PLANE_STAT_METADATA)}
_LINE_NAME, _LINE_TIMESTAMP_NS, _LINE_EVENT = 2, 3, 4
_EVENT_METADATA, _EVENT_OFFSET_PS, _EVENT_DURATION_PS, _EVENT_STAT = 1, 2, 3, 4
_STAT_METADATA, _STAT_DOUBLE, _STAT_STRING, _STAT_BYTES, _STAT_REF = 1, 2, 5, 6, 7
_METADATA_STAT = 5
_PROGRAM = re.compile(r"^(.*)\((-?\d+)\)$")  # In `jit_f(12)`, 12 is the runtime's id of the program.
_EVENT_TAG = _LINE_EVENT << 3 | 2
CHUNK = 1 << 14  # Number of events decoded at a time, so that temporary arrays stay in the CPU's cache.
# The bytes at the beginning of an event: tag, length, id, and the tag of its time. A stat has other bytes.
_EVENT = re.compile(rb"\x22(?:[\x00-\x7f]|[\x80-\xff][\x01-\x7f])\x08[\x80-\xff]{0,3}[\x00-\x7f]\x10")
STRETCH_BYTES, _LANE_BYTES, _FEWEST_LANES = 1 << 21, 1 << 12, 32  # See `event_starts`.
NO_VALUE = np.iinfo(np.int64).min  # The value of a stat that an event does not have.
_NOTHING = np.zeros(0, np.int64)
# The most planes of a file and lines of a plane; each takes far more memory than an event.
_MOST_PLANES, _MOST_LINES = 10_000, 100_000


@dataclass
class Line:
    """One line (a stream, a thread) of a plane."""

    name: str
    """`Stream #...` for a GPU's stream."""
    timestamp_ns: int
    """Time since the profile began, or from some writers, since the epoch."""
    span: tuple[int, int]
    """(start, end) of its bytes in the file."""


class Names:
    """The names of ids in a plane, from a metadata map; `spans` are the map's entries `{key, value {id, name}}`."""

    def __init__(self, buffer: Buffer, spans: Sequence[tuple[int, int]]):
        self.names: dict[int, str] = {}
        self._found: dict[tuple[Sequence[str], str], dict[int, str]] = {}
        if not spans:
            return
        begin, end = np.array(spans, np.int64).T
        key, start, length, plain = _entries(buffer, begin, end)
        self.names = dict(zip(key[plain].tolist(), buffer.texts(start[plain], (start + length)[plain])))
        for i in np.flatnonzero(~plain).tolist():
            self.names.update([_read_named(buffer, *spans[i])])

    def get(self, id_: int) -> str:
        """Return the name of an id; "" if the plane has none."""
        return self.names.get(id_, "")

    def ids(self, *, of: Sequence[str] = (), beginning: str = "") -> dict[int, str]:
        """Return id -> name for the names in `of`, or for all names that begin with `beginning`."""
        if (of, beginning) not in self._found:
            some = {i: n for i, n in self.names.items() if n in of or (beginning and n.startswith(beginning))}
            self._found[of, beginning] = some
        return self._found[of, beginning]


@dataclass
class Plane:
    """One plane: its lines, and the names of the ids in its events."""

    name: str
    lines: list[Line]
    event_names: Names
    stat_names: Names
    stats: dict[str, int | float | str]
    span: tuple[int, int] = (0, 0)
    strings: list[str] = field(default_factory=list)
    """The texts with ids from `intern`, in order."""
    _interned: dict[str, int] = field(default_factory=dict)

    def text(self, value: int) -> str:
        """Return the text for a stat's value in `Events.stats`: "" for `NO_VALUE`, the digits for a plain number."""
        if value >= 0:
            return self.stat_names.get(value) or str(value)
        if value == NO_VALUE:
            return ""
        return self.strings[-value - 2] if -value - 2 < len(self.strings) else str(value)

    def texts(self, values: Iterable[int]) -> dict[int, str]:
        """Return value -> its `text`, for some values."""
        names = self.stat_names.names
        return {value: names.get(value) or self.text(value) for value in values}

    def intern(self, text: str) -> int:
        """Return an id below -1 for a text that is stored in an event itself, not in the plane's names."""
        if text not in self._interned:
            self._interned[text] = -2 - len(self.strings)
            self.strings.append(text)
        return self._interned[text]


@dataclass
class Events:
    """Events in the file's order, as columns."""

    metadata: np.ndarray
    """[n] ids into the plane's `event_names`."""
    offset_ps: np.ndarray
    """[n] starts, since the line's timestamp."""
    duration_ps: np.ndarray
    stats: dict[str, np.ndarray]
    """Wanted stat -> [n] values; `NO_VALUE` if the event has none. `Plane.text` gives the text of a value."""

    def rows(self, rows: np.ndarray) -> Events:
        stats = {name: values[rows] for name, values in self.stats.items()}
        return Events(self.metadata[rows], self.offset_ps[rows], self.duration_ps[rows], stats)

    @classmethod
    def joined(cls, parts: list[Events], wanted: Sequence[str]) -> Events:
        """Return all events of some parts, each with the stats `wanted`; the list `parts` is emptied."""
        columns = [(p.metadata, p.offset_ps, p.duration_ps, *(p.stats[name] for name in wanted)) for p in parts]
        parts.clear()
        metadata, offset_ps, duration_ps, *stats = concatenated(columns, 3 + len(wanted))
        return cls(metadata, offset_ps, duration_ps, dict(zip(wanted, stats)))


def concatenated(parts: list[tuple[np.ndarray, ...]], count: int) -> list[np.ndarray]:
    """Return `count` columns, [sum of n] each: the parts one after the other. A constant column is a read-only view.

    The list `parts` is emptied, and columns are freed one by one, so that not all are in memory twice.
    """
    columns = [list(part) for part in parts]
    parts.clear()
    found = []
    for i in range(count):
        pieces = [column[i] for column in columns if len(column[i])] or [_NOTHING]
        for column in columns:
            column[i] = _NOTHING
        if len(pieces[0]) and all((piece == pieces[0][0]).all() for piece in pieces):
            found.append(np.broadcast_to(pieces[0][0], sum(map(len, pieces))))
        else:
            found.append(np.concatenate(pieces) if len(pieces) > 1 else pieces[0])
    return found


@dataclass
class XSpace:
    """One file: its planes in order, and the profiler's errors and warnings."""

    buffer: Buffer
    planes: list[Plane] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def events(self, plane: Plane, line: Line, wanted: Sequence[str]) -> Iterator[Events]:
        """Yield the events of a line in pieces; a line can be read only once, since its memory is freed.

        Args:
            wanted: names of the stats to keep, each as a column [n] of int64.

        Raises:
            TraceError: the line is damaged.
        """
        slots = {id_: wanted.index(name) for id_, name in plane.stat_names.ids(of=wanted).items()}
        try:
            for begin, end in event_spans(self.buffer, *line.span):
                yield _Decoder(self.buffer, plane, slots, wanted).decode(begin, end)
                self.buffer.forget(line.span[0], int(end[-1]))
        except WireError as e:
            where = f"line '{line.name}' of plane '{plane.name}'"
            raise TraceError(f"{where} is damaged: {e}.", at=str(self.buffer.path)) from None

    def programs(self) -> dict[tuple[str, int], bytes]:
        """Return (module, the runtime's id) -> serialized `HloProto` of the programs in the file.

        Raises:
            TraceError: the plane with the programs is damaged.
        """
        found: dict[tuple[str, int], bytes] = {}
        try:
            for plane in self.planes:
                if plane.name == "/host:metadata":
                    for number, value in self.buffer.fields(*plane.span):
                        if number == _PLANE_EVENT_METADATA:
                            found.update(self._program(plane, *span_of(value)))
        except WireError as e:
            raise TraceError(f"the programs in the trace are damaged: {e}.", at=str(self.buffer.path)) from None
        return found

    def _program(self, plane: Plane, start: int, end: int) -> Iterator[tuple[tuple[str, int], bytes]]:
        key, name = _read_named(self.buffer, start, end)
        named = _PROGRAM.match(name)
        known = (named[1], _signed(int(named[2]))) if named else (name, key)
        for value in (span_of(v) for number, v in self.buffer.fields(start, end) if number == 2):
            for stat in (span_of(v) for number, v in self.buffer.fields(*value) if number == _METADATA_STAT):
                fields = dict(self.buffer.fields(*stat))
                id_, blob = fields.get(_STAT_METADATA), fields.get(_STAT_BYTES)
                if (
                    isinstance(id_, int)
                    and blob is not None
                    and plane.stat_names.get(id_) in ("Hlo Proto", "hlo_proto")
                ):
                    begin, stop = span_of(blob)
                    yield known, bytes(self.buffer.data[begin:stop])


_JSON = (
    "JSON: a timeline for Perfetto or chrome://tracing, of jax or of PyTorch's Kineto, without the program",
    "of jax: the *.xplane.pb beside it; of PyTorch: Holistic Trace Analysis reads it",
)
_ARCHIVE = ("an archive, as nsys-jax writes it", "unpacking it; meshkit profile FOLDER reads what is in it")
_NSYS = ("a report of Nsight Systems", "nsys export --type sqlite REPORT.nsys-rep; meshkit profile reads its SQLite")
_FORMATS = {".nsys-rep": _NSYS, ".qdrep": _NSYS, "trace.json": _JSON, "trace.json.gz": _JSON, ".zip": _ARCHIVE}
_LONGEST_BEGIN = 256
_JSON_KEY = re.compile(rb'\s*(?:\[\s*)?\{\s*"[^"]{0,64}"\s*:')


def named_format(path: Path) -> tuple[str, str] | None:
    """Return what a file named like a trace of another format is, and what to do with it; None for any other file."""
    return next((format_ for end, format_ in _FORMATS.items() if path.name.endswith(end)), None)


def _foreign_format(path: Path) -> tuple[str, str] | None:
    """Return what `named_format` returns, by the name or by the first bytes; a large file is not unpacked."""
    known = named_format(path)
    with suppress(OSError, EOFError, zlib.error), open_regular(path) as file:
        begin = file.read(_LONGEST_BEGIN)
        if begin.startswith(b"\x1f\x8b"):
            file.seek(0)
            begin = gzip.GzipFile(fileobj=file).read(_LONGEST_BEGIN)
        known = known or (_JSON if _JSON_KEY.match(begin) else _ARCHIVE if begin.startswith(b"PK") else None)
    return known


def read_xspace(path: str | Path) -> XSpace:
    """Read the planes, lines and names of a file; events are decoded on request.

    Raises:
        TraceError: the file cannot be read, or is not an XSpace.
    """
    path = Path(path)
    if (known := _foreign_format(path)) is not None:
        raise TraceError(f"this is {known[0]}, and meshkit reads XSpace.", at=str(path), hint=known[1])
    try:
        buffer = Buffer.read(path)
    except OSError as e:
        raise TraceError(f"the trace cannot be read: {e.strerror}.", at=str(path)) from None
    except WireError as e:
        raise TraceError(f"the trace cannot be unpacked: {e}.", at=str(path)) from None
    if buffer.size == 0:
        raise TraceError("the trace is empty (0 bytes).", at=str(path), hint="capturing again")
    space = XSpace(buffer)
    messages: dict[int, list[str]] = {_SPACE_ERROR: [], _SPACE_WARNING: []}
    try:
        for number, value in buffer.fields(0, buffer.size):
            if number == _SPACE_PLANE:
                if len(space.planes) == _MOST_PLANES:
                    raise Malformed(f"it has more than {_MOST_PLANES:,} planes")
                space.planes.append(_read_plane(buffer, *span_of(value)))
            elif number in messages:
                messages[number].append(buffer.text(*span_of(value)))
            elif number != _SPACE_HOST:
                raise Malformed(f"field {number} is not one of an XSpace")
    except WireError as e:
        raise TraceError(f"this file is not a profiler trace, or is cut short: {e}.", at=str(path)) from None
    space.messages = [*messages[_SPACE_ERROR], *messages[_SPACE_WARNING]]
    return space


def _read_plane(buffer: Buffer, start: int, end: int) -> Plane:
    """Return the lines, names and stats of a plane; most fields are names, so the loop handles them without calls."""
    name, lines = "", []
    spans: dict[int, list[tuple[int, int]]] = {_PLANE_EVENT_METADATA: [], _PLANE_STAT_METADATA: [], _PLANE_STAT: []}
    data, at = buffer.data, start
    while at < end:
        key, length = data[at], data[at + 1]
        if key in _SHORT and length < 0x80 and at + 2 + length <= end:  # The field is a short name.
            spans[key >> 3].append((at + 2, at + 2 + length))
            at += 2 + length
            continue
        after = buffer.skip(at, end)
        ((number, value),) = buffer.fields(at, after)
        at = after
        if number == _PLANE_NAME:
            name = buffer.text(*span_of(value))
        elif number == _PLANE_LINE:
            if len(lines) == _MOST_LINES:
                raise Malformed(f"a plane has more than {_MOST_LINES:,} lines")
            lines.append(_read_line(buffer, *span_of(value)))
        elif number in spans:
            spans[number].append(span_of(value))
    names = [Names(buffer, spans[number]) for number in (_PLANE_EVENT_METADATA, _PLANE_STAT_METADATA)]
    plane = Plane(name, lines, *names, stats={}, span=(start, end))
    for span in spans[_PLANE_STAT]:
        id_, kind, value = _read_stat(buffer, *span)
        name = plane.stat_names.get(id_)
        plane.stats[name] = plane.stat_names.get(int(value)) if kind == _STAT_REF else value
    return plane


def _read_line(buffer: Buffer, start: int, end: int) -> Line:
    """Return the name and time of a line; once the name is found, stop at the first event: writers put events last."""
    line = Line("", 0, (start, end))
    for number, value in buffer.fields(start, end):
        if number == _LINE_NAME:
            line.name = buffer.text(*span_of(value))
        elif number == _LINE_TIMESTAMP_NS and isinstance(value, int):
            line.timestamp_ns = value
        elif number == _LINE_EVENT and line.name:
            break
    return line


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 == 1 else number


def _entries(buffer: Buffer, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return [n] key, position of the name, its length, and whether the entry has its fields in the usual order."""
    data = buffer.bytes
    key, length = buffer.varints(begin + 1)
    plain = (data[begin] == 0x08) & (length > 0)
    at, value = np.minimum(begin + 1 + length, end), key
    for tag in (0x12, 0x08, 0x12):  # The tags of the message, its id and its name.
        value, length = buffer.varints(at + 1)
        plain &= (data[at] == tag) & (length > 0)
        at = np.minimum(at + 1 + length, end)
    plain &= (value >= 0) & (value <= end - at)
    return key, at, value, plain


def _read_named(buffer: Buffer, start: int, end: int) -> tuple[int, str]:
    """Return the key and name of an entry of a metadata map, with its fields in any order."""
    key, name = 0, ""
    for number, value in buffer.fields(start, end):
        if number == 1 and isinstance(value, int):
            key = value
        elif number == 2:  # Field 2 of the value is the name; the stats after it can be long, and are not read.
            named = (buffer.text(*span_of(v)) for field, v in buffer.fields(*span_of(value)) if field == 2)
            name = next(named, "")
    return key, name


def _read_stat(buffer: Buffer, start: int, end: int) -> tuple[int, int, int | float | str]:
    """Return the id of a stat's name (-1: none), the number of the field with its value (0: none), and the value."""
    id_, kind, found = -1, 0, 0
    for number, value in buffer.fields(start, end):
        if number == _STAT_METADATA and isinstance(value, int):
            id_ = value
        elif number in (_STAT_STRING, _STAT_BYTES):
            kind, found = number, buffer.text(*span_of(value))
        elif number == _STAT_DOUBLE and isinstance(value, bytes):
            kind, found = number, float(np.frombuffer(value, "<f8")[0])
        elif isinstance(value, int):
            kind, found = number, value
    return id_, kind, found


def event_spans(buffer: Buffer, start: int, end: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the beginnings and ends of a line's events, a chunk at a time."""
    while start < end:
        if buffer.data[start] != _EVENT_TAG:
            start = buffer.skip(start, end)
            continue
        begins, after = event_starts(buffer, start, end)
        if not len(begins):
            begins, after = _one_by_one(buffer, start, end)
        for i in range(0, len(begins), CHUNK):
            begin = begins[i : i + CHUNK]
            yield begin, begin + _lengths(buffer.bytes, begin)
        start = after


def event_starts(buffer: Buffer, start: int, end: int) -> tuple[np.ndarray, int]:
    """Return the beginnings of some events from `start` on, and the position after these events.

    A line is entered at places, `_LANE_BYTES` apart, that look like the beginning of an event. From all places at once,
    each event's length leads to the next event, up to the next place. Where the events from one place end exactly at
    the next place, that place is an event too. So all events before the first place that is missed are right, since the
    chain begins at `start`. There are none if the line is too short, with fewer than `_FEWEST_LANES` places.
    """
    end = min(end, start + STRETCH_BYTES)
    places = (_EVENT.search(buffer.data, at, min(at + 512, end)) for at in range(start + _LANE_BYTES, end, _LANE_BYTES))
    lanes = np.array([start, *(found.start() for found in places if found)], np.int64)
    if len(lanes) < _FEWEST_LANES:
        return _NOTHING, start
    data, at, goal, hops = buffer.bytes, lanes[:-1], lanes[1:], []
    while True:
        length, more = data[at + 1].astype(np.int64), data[at + 2].astype(np.int64)
        long = length > 0x7F
        moves = (at < goal) & (data[at] == _EVENT_TAG) & ~(long & (more > 0x7F))
        if not moves.any():
            break
        begin = at + 2 + long
        hops.append(np.where(moves, begin, -1))
        at = np.where(moves, np.minimum(begin + np.where(long, length & 0x7F | more << 7, length), end), at)
    missed = np.flatnonzero(at != goal)
    met = int(missed[0]) if len(missed) else len(goal)
    begins = np.stack(hops, axis=1)[:met].ravel() if hops else _NOTHING
    return begins[begins >= 0], int(lanes[met])


def _one_by_one(buffer: Buffer, start: int, end: int) -> tuple[np.ndarray, int]:
    """Return the beginnings of some events from `start` on, and the position after these events."""
    begins: list[int] = []
    data, varint = buffer.data, buffer.varint
    while start < end and data[start] == _EVENT_TAG and len(begins) < CHUNK:
        length, begin = data[start + 1], start + 2
        if length > 0x7F:
            length, begin = varint(start + 1, end)
        begins.append(begin)
        start = begin + length
    if start > end:
        raise Malformed("an event reaches beyond its line")
    return np.array(begins, np.int64), start


def _lengths(data: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """Return the length before each message, read backwards: only its last byte and the tag before it are below 128."""
    length = data[begin - 1].astype(np.int64)
    more = data[begin - 2] > 0x7F
    if more.any():
        third = more & (data[begin - 3] > 0x7F)
        if (third & (data[begin - 4] > 0x7F)).any():
            raise Malformed("an event of more than 2 MiB")
        length = np.where(more, length << 7 | (data[begin - 2] & 0x7F), length)
        length = np.where(third, length << 7 | (data[begin - 3] & 0x7F), length)
    return length


class _Decoder:
    """Decodes a chunk of events at once, except for odd events (of an unusual form), which are decoded one by one."""

    def __init__(self, buffer: Buffer, plane: Plane, slots: dict[int, int], wanted: Sequence[str]):
        self.buffer, self.plane, self.slots, self.wanted = buffer, plane, slots, wanted
        # Stat id -> index in `wanted`, or -1. Ids of one byte always have an entry; all ids beyond share the last one.
        self.slot_of = np.full(max(0x80, max(slots, default=0) + 2), -1, np.int8)
        for id_, slot in slots.items():
            if 0 <= id_ < len(self.slot_of):
                self.slot_of[id_] = slot

    def decode(self, begin: np.ndarray, end: np.ndarray) -> Events:
        n = len(begin)
        self.odd = np.zeros(n, bool)
        self.values = np.full((len(self.wanted), n), NO_VALUE, np.int64)
        at = begin
        header = []
        for number in (_EVENT_METADATA, _EVENT_OFFSET_PS, _EVENT_DURATION_PS):
            value, at = self._optional(at, end, number << 3)
            header.append(value)
            if (at > end).any():
                raise Malformed("a number reaches beyond its event")
        self._stats(at, end)
        metadata, offset, duration = header
        events = Events(metadata, offset, duration, dict(zip(self.wanted, self.values)))
        for i in np.flatnonzero(self.odd):
            self._slow(events, int(i), int(begin[i]), int(end[i]))
        return events

    def _optional(self, at: np.ndarray, end: np.ndarray, tag: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a varint field that may be absent, and the position after it; mark values beyond 8 bytes as odd."""
        value, length = self.buffer.varints(at + 1)
        present = (self.buffer.bytes[at] == tag) & (at < end)
        self.odd |= present & (length == 0)
        return np.where(present, value, 0), np.where(present, at + 1 + length, at)

    def _stats(self, at: np.ndarray, end: np.ndarray) -> None:
        """Read the stats of all events at once: first the first stat of each event, then the second, ..."""
        event = np.flatnonzero((at < end) & ~self.odd)
        at, end = at[event], end[event]
        while len(event):
            word = self.buffer.words[at]
            low = word.astype(np.uint32)
            # The form that writers use: the tag of a stat, its length below 128, and the tag of its metadata id.
            plain = (low & 0xFF80FF) == (_EVENT_STAT << 3 | 2) | (_STAT_METADATA << 3) << 16
            if not plain.all():
                self.odd[event[~plain]] = True
                event, at, end, word, low = event[plain], at[plain], end[plain], word[plain], low[plain]
            id_, value, rest = low >> 24, at + 4, word >> np.uint64(32)
            if (id_ > 0x7F).any():
                id_, length = self.buffer.varints(at + 3)
                id_ = np.minimum(id_.view(np.uint64), len(self.slot_of) - 1)
                value = at + 3 + length
                rest = self.buffer.words[value]
            slot = self.slot_of[id_]
            wanted = slot >= 0
            after = at + (2 + ((low >> 8) & 0x7F))
            if wanted.all():
                self._values(event, slot, value, after, rest)
            elif wanted.any():
                self._values(event[wanted], slot[wanted], value[wanted], after[wanted], rest[wanted])
            at = after
            more = at < end
            if not more.all():
                if (at > end).any():
                    raise Malformed("a stat reaches beyond its event")
                event, at, end = event[more], at[more], end[more]

    def _values(self, event: np.ndarray, slot: np.ndarray, at: np.ndarray, end: np.ndarray, rest: np.ndarray) -> None:
        """Read values that are whole numbers or references (`rest` has their first bytes); mark other events as odd."""
        tag, number = rest & 0xFF, (rest >> 8) & 0xFFFFFF
        whole = ((tag == 3 << 3) | (tag == 4 << 3) | (tag == _STAT_REF << 3)) & (at < end)
        short = (~number & 0x808080).all()  # Nearly all numbers have up to three bytes.
        value = assembled(number) if short else self.buffer.varints(at + 1, wide=True)[0]
        if not whole.all():
            self.odd[event[~whole]] = True
            event, slot, value = event[whole], slot[whole], value[whole]
        self.values[slot, event] = value

    def _slow(self, events: Events, i: int, start: int, end: int) -> None:
        """Decode one event whose fields are in any order."""
        header = {_EVENT_METADATA: 0, _EVENT_OFFSET_PS: 0, _EVENT_DURATION_PS: 0}
        self.values[:, i] = NO_VALUE
        for number, value in self.buffer.fields(start, end):
            if number in header and isinstance(value, int):
                header[number] = value
            elif number == _EVENT_STAT:
                id_, kind, found = _read_stat(self.buffer, *span_of(value))
                if id_ in self.slots:
                    if isinstance(found, str):
                        found = self.plane.intern(found)
                    self.values[self.slots[id_], i] = int(found) if kind else NO_VALUE
        events.metadata[i], events.offset_ps[i], events.duration_ps[i] = header.values()
