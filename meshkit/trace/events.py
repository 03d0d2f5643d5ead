"""The events of one line of an XSpace file, decoded side by side.

The runtime's own binding makes a Python object of every event and stat, which costs microseconds each. Here a loop
finds where events begin, and numpy decodes all of them at once. Events whose fields stand in an order that no writer
uses are decoded one by one, so that any valid file reads right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshkit.errors import TraceError
from meshkit.trace.protobuf import Buffer, Malformed, WireError, span_of

if TYPE_CHECKING:
    from meshkit.trace.xspace import Line, Plane

_CHUNK = 1 << 14  # events decoded at a time: the temporaries stay in the cache, and memory is bounded
_LINE_EVENT = 4
_EVENT_TAG = _LINE_EVENT << 3 | 2
_EVENT_METADATA, _EVENT_OFFSET_PS, _EVENT_DURATION_PS, _EVENT_STAT = 1, 2, 3, 4
_STAT_METADATA, _STAT_DOUBLE, _STAT_STRING, _STAT_BYTES, _STAT_REF = 1, 2, 5, 6, 7
NO_VALUE = np.iinfo(np.int64).min  # of a stat that an event does not have


@dataclass
class Events:
    """The events of one line, in the file's order.

    Attributes:
        metadata: [n] ids into the plane's `event_names`.
        offset_ps, duration_ps: [n] from the line's timestamp.
        stats: wanted stat -> [n] values; `NO_VALUE` where the event has none. Strings are ids for `Plane.text`.
    """

    metadata: np.ndarray
    offset_ps: np.ndarray
    duration_ps: np.ndarray
    stats: dict[str, np.ndarray]


def decode_line(buffer: Buffer, plane: Plane, line: Line, wanted: Sequence[str], only_with: str | None) -> Events:
    """The events of a line; see `XSpace.events`."""
    slots = {id_: wanted.index(name) for id_, name in plane.stat_names.ids(of=wanted).items()}
    parts: list[Events] = []
    try:
        for begin, end in _event_spans(buffer, *line.span):
            part = _Decoder(buffer, plane, slots, wanted).decode(begin, end)
            parts.append(_filtered(part, only_with) if only_with else part)
    except WireError as e:
        raise TraceError(f"line '{line.name}' of plane '{plane.name}' is damaged: {e}.", at=str(buffer.path)) from None
    return _joined(parts, wanted)


def _filtered(events: Events, only_with: str) -> Events:
    keep = events.stats[only_with] != NO_VALUE
    if keep.all():
        return events
    stats = {name: values[keep] for name, values in events.stats.items()}
    return Events(events.metadata[keep], events.offset_ps[keep], events.duration_ps[keep], stats)


def _joined(parts: Sequence[Events], wanted: Sequence[str]) -> Events:
    if len(parts) == 1:
        return parts[0]
    empty = np.zeros(0, np.int64)

    def join(columns: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(columns) if columns else empty

    return Events(
        join([p.metadata for p in parts]),
        join([p.offset_ps for p in parts]),
        join([p.duration_ps for p in parts]),
        {name: join([p.stats[name] for p in parts]) for name in wanted},
    )


def _event_spans(buffer: Buffer, start: int, end: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Begin and end of the events of a line, a chunk at a time."""
    data, tag = bytes(buffer.data[start:end]), _EVENT_TAG  # bytes are indexed in half the time of a memoryview
    i, size = 0, end - start
    while i < size:
        begins: list[int] = []
        append = begins.append
        try:
            for _ in range(_CHUNK):  # the one loop over events: nothing in it that numpy can do afterwards
                if data[i] == tag:
                    n = data[i + 1]
                    i += 2
                    if n > 0x7F:
                        n, i = buffer.varint(start + i - 1, end)
                        i -= start
                    append(i)
                    i += n
                else:
                    i = buffer.skip(start + i, end) - start
        except IndexError:  # the line is over
            if i < size:
                raise Malformed("an event reaches beyond its line") from None
        if i > size:
            raise Malformed("an event reaches beyond its line")
        if begins:
            begin = np.array(begins, np.int64) + start
            yield begin, begin + _lengths(buffer.bytes, begin)


def _lengths(data: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """The length that stands before each message: backwards to the tag, the only byte of them below 128 but the last.

    Raises:
        WireError: an event of 2 MiB or more, which is none.
    """
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
    """Decodes a chunk of events: all at once where they have the form that writers give them, else one by one."""

    def __init__(self, buffer: Buffer, plane: Plane, slots: dict[int, int], wanted: Sequence[str]):
        self.buffer, self.plane, self.slots, self.wanted = buffer, plane, slots, wanted
        # of a stat's id: any of one byte, and the last of those beyond the highest
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
        """A varint field that may be absent; events whose value needs more than 8 bytes are marked as odd."""
        value, length = self.buffer.varints(at + 1)
        present = (self.buffer.bytes[at] == tag) & (at < end)
        self.odd |= present & (length == 0)
        return np.where(present, value, 0), np.where(present, at + 1 + length, at)

    def _stats(self, at: np.ndarray, end: np.ndarray) -> None:
        """Walks the stats of all events side by side: the first of each, the second, ..."""
        event = np.flatnonzero((at < end) & ~self.odd)
        at, end = at[event], end[event]
        while len(event):
            word = self.buffer.words[at]
            # tag of a stat, its length below 128, tag of its metadata id
            plain = (word & 0xFF80FF) == (_EVENT_STAT << 3 | 2) | (_STAT_METADATA << 3) << 16
            if not plain.all():
                self.odd[event[~plain]] = True
                event, at, end, word = event[plain], at[plain], end[plain], word[plain]
            low = word.astype(np.uint32)
            id_, id_length = low >> 24, 1
            if (id_ > 0x7F).any():
                id_, id_length = self.buffer.varints(at + 3)
                id_ = np.minimum(id_.view(np.uint64), len(self.slot_of) - 1).view(np.int64)
            slot = self.slot_of[id_]
            value = at + (3 + id_length)
            at = at + (2 + ((low >> 8) & 0x7F))
            wanted = slot >= 0
            if wanted.all():
                self._values(event, slot, value, at)
            elif wanted.any():
                self._values(event[wanted], slot[wanted], value[wanted], at[wanted])
            more = at < end
            if not more.all():
                if (at > end).any():
                    raise Malformed("a stat reaches beyond its event")
                event, at, end = event[more], at[more], end[more]

    def _values(self, event: np.ndarray, slot: np.ndarray, at: np.ndarray, end: np.ndarray) -> None:
        """Whole numbers and references; other values are decoded one by one."""
        tag = self.buffer.bytes[at]
        whole = ((tag == 3 << 3) | (tag == 4 << 3) | (tag == _STAT_REF << 3)) & (at < end)
        value, _ = self.buffer.varints(at + 1, wide=True)
        if not whole.all():
            self.odd[event[~whole]] = True
            event, slot, value = event[whole], slot[whole], value[whole]
        if len(slot) and (slot == slot[0]).all():
            self.values[slot[0], event] = value
        else:
            self.values[slot, event] = value

    def _slow(self, events: Events, i: int, start: int, end: int) -> None:
        header = {_EVENT_METADATA: 0, _EVENT_OFFSET_PS: 0, _EVENT_DURATION_PS: 0}
        self.values[:, i] = NO_VALUE
        for number, value in self.buffer.fields(start, end):
            if number in header and isinstance(value, int):
                header[number] = value
            elif number == _EVENT_STAT:
                self._slow_stat(i, *span_of(value))
        events.metadata[i], events.offset_ps[i], events.duration_ps[i] = header.values()

    def _slow_stat(self, i: int, start: int, end: int) -> None:
        slot, found = None, NO_VALUE
        for number, value in self.buffer.fields(start, end):
            if number == _STAT_METADATA and isinstance(value, int):
                slot = self.slots.get(value)
            elif number in (_STAT_STRING, _STAT_BYTES):
                found = self.plane.intern(self.buffer.text(*span_of(value)))
            elif number == _STAT_DOUBLE and isinstance(value, bytes):
                found = int(np.frombuffer(value, "<f8")[0])
            elif isinstance(value, int):
                found = value
        if slot is not None:
            self.values[slot, i] = found
