"""Write a timeline as an annotated trace for Perfetto and chrome://tracing.

The file has Chrome's Trace Event Format, compressed with gzip; ui.perfetto.dev opens it directly. Each GPU is a process
in it, with a thread per track: steps, compute, exposed communication, communication of each axis, copies. A collective
has its axes, link, group size, bytes, and the model code that caused it.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (the format)
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshkit.config.files import write_file
from meshkit.report.views.words import axes_text, link_text
from meshkit.timeline import DeviceStep, Timeline, exposed_spans

TRACE_FILE = "trace.json.gz"
MAX_EVENTS = 200_000  # So many events are a file of 4 MB, which takes seconds to write and to open.
_DETAILS = ("collective", "axes", "link", "fabric", "dtype", "group_size", "payload_bytes", "source")
_COMPUTE, _EXPOSED = "compute", "exposed communication"


def write_perfetto(
    timeline: Timeline,
    path: str | Path,
    *,
    title: str = "meshkit",
    sources: Mapping[str, str] | None = None,
    device: str = "GPU",
    max_events: int = MAX_EVENTS,
) -> Path | None:
    """Write the trace and return its path; without steps, write no file and return None.

    The steps of a device are placed one after the other, and the first one starts at 0. Device steps beyond
    `max_events` are left out, and `otherData` in the file has their number.

    Args:
        path: the file (`.gz`), or the folder for `trace.json.gz`.
        sources: name of an instruction -> model code that caused it.
        device: the word for a device in the names of processes.
    """
    path = Path(path)
    file = path / TRACE_FILE if path.suffix != ".gz" else path
    if not timeline.steps:
        return None
    chosen = _within(timeline, max_events)
    events = list(_events(timeline, chosen, sources or {}, device))
    left_out = len(timeline.steps) - len(chosen)
    other = {"title": title, "tool": "meshkit", "device_steps": len(chosen), "device_steps_left_out": left_out}
    document = {"displayTimeUnit": "ms", "otherData": other, "traceEvents": events}
    file.parent.mkdir(parents=True, exist_ok=True)
    # Without a time stamp, the same timeline gives the same bytes.
    write_file(file, gzip.compress(json.dumps(document, separators=(",", ":")).encode(), 6, mtime=0))
    return file


def _within(timeline: Timeline, max_events: int) -> list[DeviceStep]:
    """Return the device steps that fit in `max_events`; the last steps of all devices are left out first."""
    chosen, events = [], 0
    for step in sorted(timeline.steps, key=lambda s: (s.step, s.device)):
        events += len(step.compute) + len(step.communication) + len(step.copies)
        if chosen and events > max_events:
            break
        chosen.append(step)
    return chosen


def _events(
    timeline: Timeline, steps: Sequence[DeviceStep], sources: Mapping[str, str], called: str
) -> Iterator[dict[str, Any]]:
    kinds = [f"{c.replica_groups or axes_text(c.axes)} · {link_text(c)}" for c in timeline.collectives] + [
        axes_text(())
    ]
    known = [{key: getattr(c, key) for key in _DETAILS} for c in timeline.collectives] + [{}]
    details = [{key: value for key, value in of.items() if value not in (None, "")} for of in known]
    for device in sorted({s.device for s in steps}):
        tracks = _Tracks(device, called)
        offset_ns = 0
        for step in (s for s in steps if s.device == device):
            start_s, end_s = step.window
            length_ns = _ns(end_s - start_s)
            yield tracks.event("steps", f"step {step.step}", offset_ns, offset_ns + length_ns, {"step": step.step})
            yield from _compute(timeline, step, tracks, offset_ns, sources)
            for span in exposed_spans(step):
                yield tracks.event(_EXPOSED, "exposed", *_interval(span, 0.0, offset_ns), {"step": step.step})
            for i in np.argsort(step.communication[:, 0], kind="stable").tolist():
                span = step.communication[i]
                at = int(step.collective[i])
                name = timeline.collectives[at].name if at >= 0 else "unmapped communication"
                more: dict[str, Any] = {"step": step.step, **details[at]}
                if step.transfer_s is not None:
                    transfer_s = float(step.transfer_s[i])
                    wait_s = max(0.0, float(span[1] - span[0]) - transfer_s)
                    more |= {"transfer_us": round(transfer_s * 1e6, 3), "wait_us": round(wait_s * 1e6, 3)}
                yield tracks.event(kinds[at], name, *_interval(span, start_s, offset_ns), more)
            for span in step.copies:
                yield tracks.event("copies", "copy", *_interval(span, start_s, offset_ns), {"step": step.step})
            offset_ns += length_ns
        yield from tracks.names()


def _compute(
    timeline: Timeline, step: DeviceStep, tracks: _Tracks, offset_ns: int, sources: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    order = np.argsort(step.compute[:, 0], kind="stable")
    for i in order.tolist():
        name = timeline.op_names[int(step.compute_op[i])] if timeline.op_names else _COMPUTE
        more = {"step": step.step} | ({"source": sources[name]} if sources.get(name) else {})
        yield tracks.event(_COMPUTE, name, *_interval(step.compute[i], step.window[0], offset_ns), more)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _interval(span: np.ndarray, start_s: float, offset_ns: int) -> tuple[int, int]:
    return offset_ns + _ns(float(span[0]) - start_s), offset_ns + _ns(float(span[1]) - start_s)


class _Tracks:
    """The threads of one process of the trace.

    The format allows events of one thread to nest, but not to overlap partly. So an event that overlaps another is put
    on a further thread of the same track.
    """

    def __init__(self, device: int, called: str):
        self._device, self._called = device, called
        self._ids: dict[tuple[str, int], int] = {}
        self._ends: dict[str, list[int]] = {}

    def event(self, track: str, name: str, start_ns: int, end_ns: int, details: Mapping[str, Any]) -> dict[str, Any]:
        ends = self._ends.setdefault(track, [])
        lane = next((i for i, end in enumerate(ends) if end <= start_ns), len(ends))
        if lane == len(ends):
            ends.append(0)
        ends[lane] = max(end_ns, start_ns)
        thread = self._ids.setdefault((track, lane), len(self._ids) + 1)
        return {
            "ph": "X",
            "pid": self._device,
            "tid": thread,
            "name": name,
            "cat": track,
            "ts": start_ns / 1e3,
            "dur": max(0, end_ns - start_ns) / 1e3,
            "args": dict(details),
        }

    def names(self) -> Iterator[dict[str, Any]]:
        yield self._metadata("process_name", None, {"name": f"{self._called} {self._device}"})
        yield self._metadata("process_sort_index", None, {"sort_index": self._device})
        first = ("steps", _COMPUTE, _EXPOSED)
        rank = lambda track: first.index(track) if track in first else len(first) + (track == "copies")
        ranked = sorted(self._ids, key=lambda key: (rank(key[0]), key))
        for place, (track, lane) in enumerate(ranked):
            thread = self._ids[track, lane]
            shown = track if lane == 0 else f"{track} ({lane + 1})"
            yield self._metadata("thread_name", thread, {"name": shown})
            yield self._metadata("thread_sort_index", thread, {"sort_index": place})

    def _metadata(self, name: str, thread: int | None, values: Mapping[str, Any]) -> dict[str, Any]:
        where = {} if thread is None else {"tid": thread}
        return {"ph": "M", "pid": self._device, **where, "name": name, "args": dict(values)}
