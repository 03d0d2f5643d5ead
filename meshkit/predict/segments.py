"""Spans of a simulated computation by lane, repeated cheaply for loops.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Segment:
    """The simulated run of one computation, from time 0: rows (start_s, end_s) and a label per row, by lane.

    `noted_s` are the seconds of control flow of which not everything is known, by name.
    """

    duration_s: float = 0.0
    host_bytes: float = 0.0
    contention_s: float = 0.0
    flops: Counter = field(default_factory=Counter)
    noted_s: dict[str, float] = field(default_factory=dict)
    lanes: dict[str, list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)
    _open: dict[str, tuple[list[tuple[float, float]], list[int]]] = field(default_factory=dict)

    def add(self, lane: str, start: float, end: float, label: int) -> None:
        """One span."""
        spans, labels = self._open.setdefault(lane, ([], []))
        spans.append((start, end))
        labels.append(label)

    def repeat(self, inner: Segment, start: float, times: int) -> None:
        """Appends `times` runs of inner, back to back from start."""
        offsets = start + inner.duration_s * np.arange(times)
        for lane in inner.names():
            self._close(lane)
            spans, labels = inner.spans(lane), inner.labels(lane)
            tiled = (spans[None] + offsets[:, None, None]).reshape(-1, 2)
            self.lanes.setdefault(lane, []).append((tiled, np.tile(labels, times)))
        self.flops.update({dtype: flops * times for dtype, flops in inner.flops.items()})
        for name, seconds in inner.noted_s.items():
            self.note(name, seconds * times)
        self.host_bytes += inner.host_bytes * times
        self.contention_s += inner.contention_s * times

    def note(self, name: str, seconds: float) -> None:
        """Seconds of control flow of which not everything is known."""
        self.noted_s[name] = self.noted_s.get(name, 0.0) + seconds

    def names(self) -> list[str]:
        """Lanes that have spans."""
        return list({**self.lanes, **self._open})

    def spans(self, lane: str) -> np.ndarray:
        """[n, 2] spans of a lane."""
        self._close(lane)
        parts = self.lanes.get(lane)
        return np.concatenate([s for s, _ in parts]) if parts else np.zeros((0, 2))

    def labels(self, lane: str) -> np.ndarray:
        """[n] labels of a lane's spans."""
        self._close(lane)
        parts = self.lanes.get(lane)
        return np.concatenate([x for _, x in parts]) if parts else np.zeros(0, dtype=int)

    def _close(self, lane: str) -> None:
        """Moves the spans added one by one into arrays."""
        spans, labels = self._open.pop(lane, ([], []))
        if spans:
            self.lanes.setdefault(lane, []).append((np.array(spans), np.array(labels)))
