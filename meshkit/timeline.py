"""Spans of work on devices, and the sweep that splits a step into overlapped and exposed parts.

`plan` simulates a Timeline, and `profile` reads one from a trace. All times are seconds on one clock. Spans are a
float64 array of shape [n, 2] with the columns (start_s, end_s).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from meshkit.errors import ConfigError
from meshkit.hlo.schedule import Collective


@dataclass(frozen=True)
class DeviceStep:
    """The work of one device in one step."""

    device: int
    """Global device id (partition id in a simulation)."""
    step: int
    window: tuple[float, float]
    """(start_s, end_s) of the step on this device."""
    compute: np.ndarray
    """[n, 2] spans of kernels that compute."""
    compute_op: np.ndarray
    """[n] indices into `Timeline.op_names`."""
    communication: np.ndarray
    """[m, 2] spans of collectives."""
    collective: np.ndarray
    """[m] indices into `Timeline.collectives`; -1 for communication that maps to no instruction."""
    copies: np.ndarray
    """[k, 2] spans of memory copies."""
    transfer_s: np.ndarray | None = None
    """[m] seconds in which each collective moved data; None if the waiting time is unknown."""
    input_end_s: float | None = None
    """End of the last copy from the host in the step's window; None without such a copy."""


@dataclass(frozen=True)
class Timeline:
    """Steps of devices, and the tables that their indices point into."""

    steps: tuple[DeviceStep, ...]
    collectives: tuple[Collective, ...]
    op_names: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Overlap:
    """Seconds of one window, split by what ran: `compute_s + exposed_s + other_s + idle_s == window_s`."""

    window_s: float
    compute_s: float
    communication_s: float
    """Union of the communication spans: `overlapped_s + exposed_s`."""
    overlapped_s: float
    """Communication under compute."""
    exposed_s: float
    """Communication with no compute at the same time."""
    other_s: float
    """Memory copies under neither compute nor communication."""
    idle_s: float


@dataclass(frozen=True)
class Sweep:
    """The totals of one device step, and the part of each collective in the totals.

    The arrays have one entry per collective of the timeline, and a last one for unmapped communication. A row is a
    group of collectives, see `sweep`. `share_s` and `exposed_share_s` divide every instant equally among its active
    rows, and a row's part equally among its instances. So they add up to `total.communication_s` and `total.exposed_s`;
    `busy_s` does not add up.
    """

    total: Overlap
    share_s: np.ndarray
    """Additive parts of communication."""
    exposed_share_s: np.ndarray
    """Additive parts of exposed communication."""
    sole_exposed_s: np.ndarray
    """Seconds in which nothing but the row of this collective ran."""
    busy_s: np.ndarray
    """Sum of the instances' own durations, inside the window."""
    transfer_s: np.ndarray | None
    """Sum of the seconds in which the instances moved data; None if unknown."""
    count: np.ndarray
    exposed_wait_s: np.ndarray | None = None
    """The part of `exposed_share_s` that waited for peers; None if unknown."""
    between_s: float = 0.0
    """Idle time after the last operation, before the next step begins."""
    input_s: float = 0.0
    """Idle time after the last operation, until the next step's input has come from the host."""

    def mean_over(self, steps: int) -> Sweep:
        """Return the mean over the training steps in one execution of a program."""

        def share(value: Any) -> Any:
            return None if value is None else value / steps

        total = Overlap(**{f.name: share(getattr(self.total, f.name)) for f in fields(self.total)})
        parts = {f.name: share(getattr(self, f.name)) for f in fields(self) if f.name != "total"}
        return Sweep(total, **parts)


def overlap(compute, communication, window, *, copies=None) -> Overlap:
    """Split a window by unions into compute, overlapped and exposed communication, copies and idle time.

    `overlapped_s` is the length of the intersection of both unions, so spans that overlap each other count once.

    Args:
        compute: float array [n, 2] of (start_s, end_s).
        communication: the same for collectives.
        window: (start_s, end_s), to which all spans are cut.
        copies: the same for memory copies, if they are known.

    Raises:
        ConfigError: an array has another shape, a span ends before it starts, or a value is not finite.
    """
    bounds = _checked_spans([window], "window")
    if bounds.shape != (1, 2):
        raise ConfigError(f"`window` is one (start_s, end_s), not {window!r}.")
    named = {"compute": compute, "communication": communication, "copies": () if copies is None else copies}
    spans = [_clipped(_checked_spans(value, name), bounds[0]) for name, value in named.items()]
    return _split(*(_Cover(s) for s in spans), length_s=float(bounds[0, 1] - bounds[0, 0]))


def sweep(step: DeviceStep, num_collectives: int, rows: np.ndarray | None = None) -> Sweep:
    """Split one device step, in O(n log n) over its spans.

    Args:
        rows: [num_collectives + 1] the row of each collective; the last entry is for unmapped communication. Active
            rows share an instant equally. None gives each collective a row of its own.
    """
    compute, communication, copies = (
        _clipped(np.asarray(s, np.float64).reshape(-1, 2), step.window)
        for s in (step.compute, step.communication, step.copies)
    )
    owner = np.where(step.collective < 0, num_collectives, step.collective).astype(np.intp)
    row = owner if rows is None else np.asarray(rows)[owner]
    covered = _Cover(compute)
    segments = _Segments(communication, row, covered)
    inside = communication[:, 1] > communication[:, 0]

    def per_collective(values: np.ndarray) -> np.ndarray:
        return np.bincount(owner, weights=values, minlength=num_collectives + 1)

    share, exposed_share, sole = (per_collective(v) for v in segments.instance_shares())
    length_s = float(step.window[1] - step.window[0])
    copied = _Cover(copies)
    total = _split(covered, _Cover(communication), copied, length_s=length_s)
    last = max((float(spans[:, 1].max()) for spans in (compute, communication) if len(spans)), default=0.0)
    fed = min(max(last, (step.input_end_s or 0.0) - step.window[0]), length_s)
    input_s, between_s = (
        min(total.idle_s, b - a - float(np.diff(copied.until(np.array([a, b])))[0]))
        for a, b in ((last, fed), (fed, length_s))
    )
    return Sweep(
        total=total,
        share_s=share,
        exposed_share_s=exposed_share,
        sole_exposed_s=sole,
        busy_s=per_collective(communication[:, 1] - communication[:, 0]),
        transfer_s=None if step.transfer_s is None else per_collective(np.asarray(step.transfer_s)),
        count=per_collective(inside.astype(np.float64)),
        between_s=max(0.0, between_s),
        input_s=max(0.0, input_s),
    )


def exposed_waits(
    communication: np.ndarray, transfer_s: np.ndarray, row: np.ndarray, exposed: np.ndarray
) -> np.ndarray:
    """Return [m] the waiting part of each collective's exposed share; waiting comes before the transfer.

    Args:
        communication: [m, 2] spans.
        transfer_s: [m] seconds in which each collective moved data; NaN if unknown, which counts as no waiting.
        row: [m] row of each, as in `sweep`.
        exposed: [n, 2] intervals in which a collective runs and nothing computes, from `exposed_spans`.
    """
    begins = np.clip(communication[:, 1] - transfer_s, communication[:, 0], communication[:, 1])
    begins = np.where(np.isnan(begins), communication[:, 0], begins)
    parts = np.concatenate([np.stack([communication[:, 0], begins], 1), np.stack([begins, communication[:, 1]], 1)])
    segments = _Segments(parts, np.tile(row, 2), _Cover(exposed))
    segments.exposed = segments.seconds - segments.exposed  # Here the cover is the exposed time, not compute.
    return segments.instance_shares()[1][: len(row)]


def exposed_spans(step: DeviceStep) -> np.ndarray:
    """Return [n, 2] intervals of a step in which a collective runs and nothing computes, in seconds from its start."""
    compute, communication = (
        _Cover(_clipped(np.asarray(s, np.float64).reshape(-1, 2), step.window))
        for s in (step.compute, step.communication)
    )
    edges = np.concatenate([compute.starts, compute.ends])
    i = np.searchsorted(communication.starts, edges, "right")
    edges = edges[edges <= _led(-np.inf, communication.ends)[i]]  # Spans outside communication cut nothing.
    cuts = np.unique(np.concatenate([edges, communication.starts, communication.ends]))
    # Between two cuts everything or nothing is covered; comparing with half is safe against rounding of running sums.
    half = 0.5 * np.diff(cuts)
    covered, communicating = np.diff(compute.until(cuts)) > half, np.diff(communication.until(cuts)) > half
    exposed = np.r_[False, communicating & ~covered, False]
    starts, ends = np.flatnonzero(~exposed[:-1] & exposed[1:]), np.flatnonzero(exposed[:-1] & ~exposed[1:])
    return np.stack([cuts[starts], cuts[ends]], axis=1) if len(starts) else np.zeros((0, 2))


def shares_by_op(step: DeviceStep, num_ops: int) -> np.ndarray:
    """Return [num_ops] seconds of compute by operation in the window; k operations at once get 1/k each."""
    spans = _clipped(np.asarray(step.compute, np.float64).reshape(-1, 2), step.window)
    if (spans[1:, 0] >= spans[:-1, 1]).all():  # On one stream, a share is a duration.
        return np.bincount(step.compute_op, weights=spans[:, 1] - spans[:, 0], minlength=num_ops)
    segments = _Segments(spans, step.compute_op, _Cover(np.zeros((0, 2))))
    return np.bincount(step.compute_op, weights=segments.instance_shares()[0], minlength=num_ops)


@dataclass(frozen=True)
class KernelTotals:
    """The time of each operation that computes, indexed as `Timeline.op_names`."""

    time_s: np.ndarray
    """Part of the union of compute; k operations at once get 1/k each. The parts add up to `compute_s`."""
    busy_s: np.ndarray
    count: np.ndarray

    @classmethod
    def measure(cls, step: DeviceStep, num_ops: int) -> KernelTotals:
        seconds = np.diff(np.clip(step.compute, *step.window), axis=1).ravel()
        busy_s, count = (np.bincount(step.compute_op, weights=w, minlength=num_ops) for w in (seconds, None))
        time_s = shares_by_op(step, num_ops)
        same = np.array_equal(time_s, busy_s)  # With one stream both are the same array, to save memory.
        return cls(busy_s if same else time_s, busy_s, count.astype(np.int32))

    @classmethod
    def sum(cls, parts: Iterable[KernelTotals]) -> KernelTotals:
        """Return the sum of all parts; a part may lack operations that were first seen after it."""
        listed = list(parts)
        totals = np.zeros((3, max((len(part.count) for part in listed), default=0)))
        for part in listed:
            totals[:, : len(part.count)] += np.stack([part.time_s, part.busy_s, part.count])
        return cls(*totals)

    def mean_over(self, steps: int) -> KernelTotals:
        return KernelTotals(self.time_s / steps, self.busy_s / steps, self.count / steps)


def kernel_totals(timeline: Timeline) -> KernelTotals:
    """Return the time of each operation of a timeline, as means over its device steps."""
    n = len(timeline.op_names)
    every = (KernelTotals.measure(step, n) for step in timeline.steps)
    return KernelTotals.sum([KernelTotals(*np.zeros((3, n))), *every]).mean_over(max(1, len(timeline.steps)))


class _Cover:
    """The union of spans [n, 2]: disjoint intervals in time, and the covered seconds before any instant."""

    def __init__(self, spans: np.ndarray):
        if len(spans) and (np.diff(spans[:, 0]) < 0).any():
            spans = spans[np.argsort(spans[:, 0], kind="stable")]
        reach = np.maximum.accumulate(spans[:, 1])
        opens = _led(True, spans[1:, 0] > reach[:-1])[: len(spans)]
        first = np.flatnonzero(opens)
        self.starts = spans[first, 0]
        self.ends = reach[np.append(first[1:], len(spans)) - 1] if len(spans) else np.zeros(0)
        self._before = _led(0.0, np.cumsum(self.ends - self.starts))
        self.seconds = float(self._before[-1])

    def until(self, at: np.ndarray) -> np.ndarray:
        """Return [n] seconds of the union before each instant."""
        i = np.searchsorted(self.starts, at, "right")
        last_end = _led(0.0, self.ends)[i]
        return self._before[i] - np.where(i > 0, np.maximum(0.0, last_end - at), 0.0)

    def common_s(self, other: _Cover) -> float:
        few, many = (self, other) if len(self.starts) < len(other.starts) else (other, self)
        return float((many.until(few.ends) - many.until(few.starts)).sum())

    def spans(self) -> np.ndarray:
        return np.stack([self.starts, self.ends], axis=1)


def _split(compute: _Cover, communication: _Cover, copies: _Cover, *, length_s: float) -> Overlap:
    """Return the window split by what ran; the parts add up to its length."""
    overlapped = compute.common_s(communication)
    busy = _Cover(np.concatenate([compute.spans(), communication.spans()]))
    other = max(0.0, copies.seconds - copies.common_s(busy))
    exposed = max(0.0, communication.seconds - overlapped)
    idle = max(0.0, length_s - busy.seconds - other)
    parts = compute.seconds + exposed + other + idle
    assert abs(parts - length_s) <= 1e-9 * length_s, f"the parts of a window of {length_s} s add up to {parts} s"
    return Overlap(
        window_s=length_s,
        compute_s=compute.seconds,
        communication_s=communication.seconds,
        overlapped_s=overlapped,
        exposed_s=exposed,
        other_s=other,
        idle_s=idle,
    )


class _Segments:
    """Time split at every boundary of a communication span [m, 2], so that the active rows are constant in each part.

    Seconds are from the window's start. `compute` is the time that hides communication.
    """

    def __init__(self, communication: np.ndarray, row: np.ndarray, compute: _Cover):
        self.row = row
        self.times, at = np.unique(communication.ravel(), return_inverse=True)
        self.at = at.reshape(-1, 2)
        self.seconds = np.diff(self.times)
        self.exposed = np.clip(self.seconds - np.diff(compute.until(self.times)), 0.0, self.seconds)
        self._merge_rows()

    def _merge_rows(self) -> None:
        m = len(self.at)
        boundary, sign = self.at.T.ravel(), np.repeat([1, -1], m)
        order = np.lexsort((sign, boundary, np.tile(self.row, 2)))
        self.boundary = boundary[order]
        # Active instances of a row after each of its boundaries; 0 again after its last one.
        self.instances = np.cumsum(sign[order])
        self.position = np.empty(2 * m, np.intp)
        self.position[order] = np.arange(2 * m)
        before = _led(0, self.instances[:-1])[: 2 * m]
        opens, closes = (before == 0) & (self.instances == 1), (before == 1) & (self.instances == 0)
        opened, closed = (np.bincount(self.boundary[at], minlength=len(self.times)) for at in (opens, closes))
        self.active_rows = np.cumsum(opened - closed)[:-1]

    def instance_shares(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return [m] share, exposed share and sole exposed seconds of each communication span."""
        rows = np.maximum(self.active_rows, 1)
        return (
            self._integral(np.where(self.active_rows > 0, self.seconds / rows, 0.0)),
            self._integral(np.where(self.active_rows > 0, self.exposed / rows, 0.0)),
            self._integral(np.where(self.active_rows == 1, self.exposed, 0.0)),
        )

    def _integral(self, row_seconds: np.ndarray) -> np.ndarray:
        """Return [m] the part of each span in `row_seconds` (per segment), which a row's instances share equally.

        Two running sums compute it. The first, over segments, gives the seconds between neighbouring boundaries of a
        row. The second, over these seconds divided by the active instances, gives a part as the difference of two
        values.
        """
        until = _led(0.0, np.cumsum(row_seconds))[self.boundary]
        between = np.diff(until, append=until[-1:])
        part = np.divide(between, self.instances, out=np.zeros_like(between), where=self.instances > 0)
        running = _led(0.0, np.cumsum(part))[self.position].reshape(2, -1)
        return np.maximum(running[1] - running[0], 0.0)


def _checked_spans(spans, name: str) -> np.ndarray:
    try:
        array = np.asarray(spans, np.float64)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"`{name}` is not an array of numbers: {e}.") from None
    if array.size == 0:
        return np.zeros((0, 2))
    if array.ndim != 2 or array.shape[1] != 2:
        raise ConfigError(f"`{name}` has shape {array.shape}, but spans are [n, 2] rows of (start_s, end_s).")
    if not np.isfinite(array).all():
        raise ConfigError(f"`{name}` has {int((~np.isfinite(array)).sum())} values that are not finite.")
    backwards = np.flatnonzero(array[:, 1] < array[:, 0])
    if backwards.size:
        i = int(backwards[0])
        raise ConfigError(f"`{name}` row {i} ends at {array[i, 1]} s, before it starts at {array[i, 0]} s.")
    return array


def _led(first: float, rest: np.ndarray) -> np.ndarray:
    """Return [n + 1] values: the first, then the rest; `np.r_` would take ten times as long."""
    return np.concatenate(([first], rest))


def _clipped(spans: np.ndarray, window) -> np.ndarray:
    """Return the spans clipped to the window, in seconds from its start: seconds from an epoch would lose precision."""
    return np.clip(spans - window[0], 0.0, window[1] - window[0])
