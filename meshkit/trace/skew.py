"""Separate waiting for a late peer from moving data, and find the stragglers.

An instance is the k-th run of one collective in one step, over one group of devices. All members leave it together, so
a member that spends more time in it than the fastest member has waited. There are two ways to measure the wait:

    clock-free   wait = the member's duration - the shortest duration of any member   (needs no common clock)
    clocked      wait = the last member's start - the member's start    (needs a single process, or aligned clocks)

If all members but one transfer slowly, the clock-free way counts their slowness as waiting. The clocked way does not,
and is used if the clocks are good enough. If a member of an instance was not seen, its waits are unknown.

The ends of collectives align the clocks of several processes: the members leave together, so their end times differ
only by their clocks. Each process gets the offset with which its ends agree best with those of the others; medians
keep a few late ends from moving it. Groups may be smaller than the job if together they connect all processes. The
difference that remains is the residual.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from meshkit.hlo.schedule import Collective
from meshkit.timeline import DeviceStep

_PERMUTE = "collective-permute"
_MOST_RESIDUAL = 0.2  # The residual of good clocks is at most this share of the median wait, ...
_LEAST_RESIDUAL = 0.01  # ... or at most this share of the median duration of a collective.
_PASSES = 12
_DRIFT_AFTER_S = 10.0  # In a shorter trace, clock drift is smaller than the scatter of a collective's ends.


class Instances:
    """A table of the communication spans of all device steps: collective, occurrence k, start and end."""

    def __init__(self) -> None:
        self.clock_ns: dict[int, int | None] = {}  # Process -> time since the epoch at which its clock is zero.
        self.process: list[int] = []  # The process of each device step.
        self._columns: list[tuple[np.ndarray, ...]] = []
        self._bounds = [0]

    def begin(self, process: int, clock_ns: int | None) -> float:
        """Begin a process; return the seconds from the first clock's zero to this clock's zero; 0 if unknown."""
        self.clock_ns[process] = clock_ns
        first = next(iter(self.clock_ns.values()))
        return (clock_ns - first) * 1e-9 if clock_ns is not None and first is not None else 0.0

    def add(self, step: DeviceStep, own: np.ndarray, starts_at_s: float) -> None:
        """Add the communication of the next device step, in the process that was begun last.

        Args:
            own: [m] whether each communication span began in this step, and not in the previous step.
            starts_at_s: start of the step after the zero of the first process's clock.
        """
        start, end = step.communication[:, 0], step.communication[:, 1]
        inside = np.clip(end, *step.window) - np.clip(start, *step.window)
        occurrence = np.where(own & (step.collective >= 0), _occurrence(step.collective, start, own), -1)
        entries = np.full(len(start), len(self.process), np.int32)
        self._columns.append((entries, step.collective.astype(np.int32), occurrence.astype(np.int32),
                              start + starts_at_s, end + starts_at_s, inside))  # fmt: skip
        self._bounds.append(self._bounds[-1] + len(start))
        self.process.append(next(reversed(self.clock_ns)))

    def columns(self) -> tuple[np.ndarray, ...]:
        """Return columns: entry (index of the device step), collective, occurrence, start_s, end_s, seconds in step.

        The occurrence is -1 for a span that has no collective, or that began in the previous step.
        """
        if not self._columns:
            return tuple(np.zeros(0, t) for t in (np.int32, np.int32, np.int32, float, float, float))
        if len(self._columns) > 1:
            self._columns = [tuple(np.concatenate(c) for c in zip(*self._columns))]
        return self._columns[0]

    def split_steps(self, column: np.ndarray) -> list[np.ndarray]:
        """Return a column, split into the device steps."""
        return np.split(column, self._bounds[1:-1])


@dataclass(frozen=True)
class Straggler:
    """The waits that a device caused, and its own; seconds are sums over all steps."""

    device: int
    process: int
    caused_wait_s: float
    """Seconds that other devices waited for this device, as a sum over these devices."""
    waited_s: float
    """Seconds that this device waited."""
    last_share: float
    """Share of its instances in which this device arrived last and others waited."""
    delay_s: float
    """Seconds that other devices waited for this device, as a mean over the other members of each instance."""


@dataclass(frozen=True)
class Skew:
    """Wait and transfer of every instance whose members were all seen."""

    method: str | None = None
    """How waits were measured, `clocked` or `clock_free`; None if no wait is known."""
    clocks: Clocks | None = None
    instances: int = 0
    median_wait_s: float | None = None
    """Median of the clock-free waits above zero."""
    wait_clock_free_s: float | None = None
    """Sum of all clock-free waits."""
    wait_clocked_s: float | None = None
    """Sum of all clocked waits."""
    stragglers: tuple[Straggler, ...] = ()
    transfers: Sequence[np.ndarray] = ()
    """For each device step, [m] transfer seconds of its communication spans, NaN if unknown; empty without waits."""


@dataclass(frozen=True)
class _Judged:
    """Rows of the instance table that form whole instances."""

    row: np.ndarray
    """[n] indices of rows in the table."""
    instance: np.ndarray
    """[n] number of each row's instance, from 0."""
    count: int


def measure_skew(
    instances: Instances,
    collectives: Sequence[Collective],
    groups: Mapping[str, np.ndarray],
    steps: Sequence[DeviceStep],
    numbers: np.ndarray,
    keep: np.ndarray,
) -> Skew:
    """Return the wait and transfer of all device steps; `method` is None if no instance was seen on all members.

    Args:
        groups: collective's name -> [groups, members] device ids, or [pairs, 2] for a collective-permute.
        steps: the device steps, which are the entries of `instances`.
        numbers: [entries] number of the execution of each device step.
        keep: [entries] whether to use each device step.
    """
    waits = instance_waits(instances, collectives, groups, [step.device for step in steps], numbers, keep)
    if waits is None:
        return Skew()
    judged, permutes = waits.judged, waits.permutes
    known = ~np.isnan(waits.free_s)
    if not known.any():
        return Skew(clocks=waits.clocks)
    inside, duration = instances.columns()[5], waits.duration_s
    share = np.divide(inside, duration, out=np.zeros_like(inside), where=duration > 0)
    return Skew(
        method=waits.method,
        clocks=waits.clocks,
        instances=judged.count + sum(len(set(peers.tolist())) for _, peers in permutes),
        median_wait_s=waits.median_s,
        wait_clock_free_s=float(waits.free_s[known].sum()),
        wait_clocked_s=float(waits.clocked_s[known].sum()),
        stragglers=stragglers(
            judged.instance, *(of[judged.row] for of in (waits.device, waits.process, waits.wait_s, waits.early))
        ),
        transfers=instances.split_steps(np.where(known, (duration - waits.wait_s) * share, np.nan)),
    )


@dataclass(frozen=True)
class InstanceWaits:
    """The waits of each row of the instance table; NaN for rows that belong to no whole instance."""

    judged: _Judged
    permutes: list[tuple[np.ndarray, np.ndarray]]
    """For each collective-permute: rows of devices with their neighbours, and the number of each row's set."""
    device: np.ndarray
    """[rows] global device id."""
    process: np.ndarray
    duration_s: np.ndarray
    """[rows] end - start."""
    free_s: np.ndarray
    """[rows] clock-free wait: the row's duration - the shortest duration in the instance."""
    clocked_s: np.ndarray
    """[rows] clocked wait: time until the last member's start, at most the row's duration."""
    start_s: np.ndarray
    """[rows] start on the aligned clocks."""
    clocks: Clocks | None

    @cached_property
    def median_s(self) -> float:
        """The median of the clock-free waits above zero; 0 without any."""
        waits = self.free_s[self.free_s > 0]
        return float(np.median(waits)) if len(waits) else 0.0

    @cached_property
    def method(self) -> str:
        """The way to measure waits: `clocked` if the clocks are aligned well enough, else `clock_free`."""
        durations = self.duration_s[~np.isnan(self.free_s)]
        usual_s = float(np.median(durations)) if len(durations) else 0.0
        most = max(_MOST_RESIDUAL * self.median_s, _LEAST_RESIDUAL * usual_s)
        residual_s = self.clocks.residual_s if self.clocks else 0.0
        return "clocked" if residual_s is not None and residual_s <= most else "clock_free"

    @property
    def wait_s(self) -> np.ndarray:
        """[rows] waits by `method`."""
        return self.clocked_s if self.method == "clocked" else self.free_s

    @property
    def early(self) -> np.ndarray:
        """[rows] values to compare devices in an instance: a larger value means an earlier arrival."""
        return -self.start_s if self.method == "clocked" else self.duration_s


def instance_waits(
    instances: Instances,
    collectives: Sequence[Collective],
    groups: Mapping[str, np.ndarray],
    devices: Sequence[int],
    numbers: np.ndarray,
    keep: np.ndarray,
) -> InstanceWaits | None:
    """Return the waits of every device in every instance; None without communication or groups.

    Args:
        instances, collectives, groups: as in `measure_skew`.
        devices: [entries] global device id of each device step.
        numbers: [entries] number of the execution of each device step.
        keep: [entries] whether to use each device step; waits of the others are NaN.
    """
    entry, collective, occurrence, start, end, _ = instances.columns()
    if not len(entry) or not groups:
        return None
    device = np.asarray(devices)[entry]
    usable = (occurrence >= 0) & keep[entry]
    judged, permutes = _group(collectives, groups, collective, device, numbers[entry], occurrence, usable)
    free, clocked = np.full(len(entry), np.nan), np.full(len(entry), np.nan)
    duration = end - start
    process = np.array(instances.process, np.int64)[entry]
    clocks = align(judged.instance, process[judged.row], end[judged.row]) if len(instances.clock_ns) > 1 else None
    if clocks is not None:
        clocks = replace(clocks, from_epoch=None not in instances.clock_ns.values())
        start = start - clocks.ahead_s(process, start)
    for rows, peers in ((judged.row, judged.instance), *permutes):
        n = int(peers.max(initial=-1)) + 1
        shortest = _extreme(np.minimum, duration[rows], peers, n, np.inf)
        last = _extreme(np.maximum, start[rows], peers, n, -np.inf)
        # In a permute, each device has an instance of its own: the device, as the first member, and its neighbours.
        own = _first_of_each(peers, n) if rows is not judged.row else np.arange(len(rows))
        mine, which = rows[own], peers[own]
        free[mine] = np.maximum(0.0, duration[mine] - shortest[which])
        clocked[mine] = np.clip(last[which] - start[mine], 0.0, duration[mine])
    return InstanceWaits(judged, permutes, device, process, duration, free, clocked, start, clocks)


def _occurrence(collective: np.ndarray, start: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return [m] the number of spans of the same collective that began earlier in this step."""
    order = np.lexsort((start, collective, ~own))
    sorted_ = collective[order]
    first = np.r_[True, sorted_[1:] != sorted_[:-1]] if len(order) else np.zeros(0, bool)
    counted = np.arange(len(order)) - np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
    occurrence = np.empty(len(order), np.int64)
    occurrence[order] = counted
    return occurrence


def _group(
    collectives: Sequence[Collective], groups: Mapping[str, np.ndarray], collective, device, step, occurrence, usable
) -> tuple[_Judged, list[tuple[np.ndarray, np.ndarray]]]:
    """Return the rows of whole instances; and for each collective-permute, the rows and sets from `_neighbours`."""
    rows: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    permutes: list[tuple[np.ndarray, np.ndarray]] = []
    count, times = 0, int(occurrence.max(initial=0)) + 1
    moment = step * times + occurrence
    for i, mine in _rows_by_collective(collective, usable):
        members = groups.get(collectives[i].name)
        if members is None or collectives[i].group_size < 2:
            continue
        if collectives[i].collective == _PERMUTE:
            mine = mine[_complete(step[mine], device[mine], occurrence[mine], 0)]
            permutes.append(_neighbours(members, device[mine], moment[mine], mine))
            continue
        group = _group_of(members, device[mine])
        mine, group = mine[group >= 0], group[group >= 0]
        # If a member lost an event, its k-th run is the others' (k+1)-th: no instance of that step can be matched.
        whole = _complete(step[mine] * len(members) + group, device[mine], occurrence[mine], members.shape[1])
        mine, group = mine[whole], group[whole]
        _, number, size = np.unique(moment[mine] * len(members) + group, return_inverse=True, return_counts=True)
        whole = (size == members.shape[1])[number]
        _, number = np.unique(number[whole], return_inverse=True)
        rows.append(mine[whole])
        numbers.append(number + count)
        count += int(number.max(initial=-1)) + 1
    empty = np.zeros(0, np.int64)
    joined = _Judged(np.concatenate(rows or [empty]), np.concatenate(numbers or [empty]), count)
    return joined, [p for p in permutes if len(p[0])]


def _complete(where: np.ndarray, device: np.ndarray, occurrence: np.ndarray, members: int) -> np.ndarray:
    """Return [n] whether all devices of a row's group ran a collective equally often in its step.

    Args:
        where: [n] number of each row's step and group.
        members: number of devices of a group. With 0 (a permute), the result is instead whether the row's device ran
            the collective as often as the device that ran it most.
    """
    if not len(where):
        return np.zeros(0, bool)
    _, number, size = np.unique(where, return_inverse=True, return_counts=True)
    most = np.zeros(len(size), np.int64)
    np.maximum.at(most, number, occurrence + 1)
    if members:
        return (size == members * most)[number]
    _, own, runs = np.unique(number * (int(device.max()) + 1) + device, return_inverse=True, return_counts=True)
    return runs[own] == most[number]


def _rows_by_collective(collective: np.ndarray, usable: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    rows = np.flatnonzero(usable)
    rows = rows[np.argsort(collective[rows], kind="stable")]
    found, begin = np.unique(collective[rows], return_index=True)
    yield from zip(found.tolist(), np.split(rows, begin[1:]))


def _group_of(members: np.ndarray, device: np.ndarray) -> np.ndarray:
    flat = members.ravel()
    order = np.argsort(flat, kind="stable")
    at = np.minimum(np.searchsorted(flat[order], device), len(flat) - 1)
    return np.where(flat[order][at] == device, order[at] // members.shape[1], -1)


def _neighbours(pairs: np.ndarray, device, moment, rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of each device of a permute together with its neighbours' rows, and the number of each row's set.

    A device's own row is the first of its set. A set is left out if a neighbour was not seen.
    """
    if not len(rows):
        return rows, rows
    sets: list[np.ndarray] = []
    numbers: list[np.ndarray] = []
    moments, at = np.unique(moment, return_inverse=True)
    table = {int(d): np.full(len(moments), -1, np.int64) for d in set(device.tolist()) | set(pairs.ravel().tolist())}
    for d, known in table.items():
        known[at[device == d]] = rows[device == d]
    count = 0
    for d in set(device.tolist()):
        near = sorted(({*pairs[(pairs == d).any(axis=1)].ravel().tolist()}) - {d})
        together = np.stack([table[d], *(table[n] for n in near)])
        together = together[:, (together >= 0).all(axis=0)]
        sets.append(together.T.ravel())
        numbers.append(np.repeat(np.arange(together.shape[1]) + count, len(together)))
        count += together.shape[1]
    return np.concatenate(sets), np.concatenate(numbers)


def _first_of_each(number: np.ndarray, n: int) -> np.ndarray:
    first = np.full(n, -1, np.int64)
    first[number[::-1]] = np.arange(len(number))[::-1]
    return first


def _extreme(ufunc, values: np.ndarray, number: np.ndarray, n: int, start: float) -> np.ndarray:
    result = np.full(n, start)
    ufunc.at(result, number, values)
    return result


def stragglers(
    instance: np.ndarray, device: np.ndarray, process: np.ndarray, wait_s: np.ndarray, early: np.ndarray
) -> tuple[Straggler, ...]:
    """Return all devices, sorted by the waits that they caused; the last member of an instance causes all its waits.

    Args:
        instance: [n] number of each row's instance, from 0 without gaps.
        device, process: [n] device and process of each row.
        wait_s: [n] wait of each row.
        early: [n] values to compare rows of an instance: a larger value means an earlier arrival.
    """
    if not len(instance):
        return ()
    order = np.lexsort((early, instance))
    last = order[np.r_[True, np.diff(instance[order]) > 0]]
    caused = np.bincount(instance, weights=wait_s) - wait_s[last]
    others = np.maximum(1, np.bincount(instance) - 1)
    devices, first, of = np.unique(device, return_index=True, return_inverse=True)
    columns = (
        devices,
        process[first],
        np.bincount(of[last], caused, len(devices)),
        np.bincount(of, wait_s),
        np.bincount(of[last], caused > 0, len(devices)) / np.bincount(of),
        np.bincount(of[last], caused / others, len(devices)),
    )
    found = [Straggler(*row) for row in zip(*(column.tolist() for column in columns))]
    return tuple(sorted(found, key=lambda s: -s.caused_wait_s))


@dataclass(frozen=True)
class Clocks:
    """The offsets that align the processes' clocks."""

    process: np.ndarray
    """[p] numbers of the processes."""
    offset_s: np.ndarray
    """[p] seconds by which each clock is ahead of the first process's clock (see `connected`)."""
    drift: np.ndarray
    """[p] seconds per second by which each clock runs fast; zeros in a short trace."""
    middle_s: float
    """The time for which `offset_s` is exact."""
    residual_s: float | None
    """Median over instances of (last - first) of the aligned ends; None without common instances."""
    connected: bool
    """Whether common instances connect all processes; if not, offsets are comparable only within a connected part."""
    from_epoch: bool = False
    """Whether each trace has its start as a time since the epoch, so that offsets are of the machines' clocks."""

    @property
    def count(self) -> int:
        return len(self.process)

    def ahead_s(self, process: np.ndarray, at_s: np.ndarray) -> np.ndarray:
        """Return [n] seconds to subtract from times `at_s` on the processes' clocks; 0 if a process has no instance."""
        i = np.minimum(np.searchsorted(self.process, process), len(self.process) - 1)
        ahead = self.offset_s[i] + self.drift[i] * (at_s - self.offset_s[i] - self.middle_s)
        return np.where(self.process[i] == process, ahead, 0.0)


def align(instance: np.ndarray, process: np.ndarray, end_s: np.ndarray) -> Clocks | None:
    """Return the aligned clocks of all processes that have instances; None for a single process.

    Args:
        instance, process: [n] the instance and the process of each row.
        end_s: [n] end of each row, on the clock of its process.
    """
    known, at = np.unique(process, return_inverse=True)
    if len(known) < 2:
        return None
    inst, proc, end = _ends(instance, at, end_s, len(known))
    offset, connected = _along_tree(inst, proc, end, len(known))
    for _ in range(_PASSES):
        offset = offset + _correction(inst, proc, end - offset[proc], len(known))
    offset -= offset[0]
    drift, middle = _drift(inst, proc, end - offset[proc], len(known))
    aligned = end - offset[proc]
    aligned -= drift[proc] * (aligned - middle)
    return Clocks(known, offset, drift, middle, _residual(inst, aligned), connected)


def _ends(instance, process, end_s, processes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (instance, process, mean end of the process's devices) for instances that several processes share."""
    key, number, size = np.unique(instance * processes + process, return_inverse=True, return_counts=True)
    end = np.bincount(number, weights=end_s) / size
    inst, proc = key // processes, key % processes
    _, again, members = np.unique(inst, return_inverse=True, return_counts=True)
    shared = members[again] > 1
    return np.unique(inst[shared], return_inverse=True)[1], proc[shared], end[shared]


def _along_tree(inst, proc, end, processes: int) -> tuple[np.ndarray, bool]:
    """Return first estimates of the offsets, and whether all processes are connected.

    The offset between two processes is the median difference of their common ends. Offsets are added up along a tree.
    """
    first = np.r_[True, np.diff(inst) > 0] if len(inst) else np.zeros(0, bool)
    hub = np.flatnonzero(first)[inst] if len(inst) else np.zeros(0, np.int64)
    pair, difference = proc[hub] * processes + proc, end - end[hub]
    links: dict[int, list[tuple[int, float]]] = {p: [] for p in range(processes)}
    keys, which = np.unique(pair[~first], return_inverse=True)
    for key, d in zip(keys.tolist(), _medians(which, difference[~first], len(keys)).tolist()):
        a, b = key // processes, key % processes
        links[a].append((b, d))
        links[b].append((a, -d))
    offset, trees = np.full(processes, np.nan), 0
    for root in range(processes):
        if not np.isnan(offset[root]):
            continue
        trees += 1
        offset[root], pending = 0.0, deque([root])
        while pending:
            a = pending.popleft()
            for b, d in links[a]:
                if np.isnan(offset[b]):
                    offset[b] = offset[a] + d
                    pending.append(b)
    return offset, trees == 1


def _correction(inst, proc, end, processes: int) -> np.ndarray:
    """Return [processes] the median difference between a process's ends and the mean ends of their instances."""
    if not len(inst):
        return np.zeros(processes)
    mean = np.bincount(inst, weights=end) / np.bincount(inst)
    return _medians(proc, end - mean[inst], processes)


def _medians(number: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """Return [n] the median of the values with each number; 0 if there are none."""
    order = np.lexsort((values, number))
    count = np.bincount(number, minlength=n)
    begin = np.cumsum(count) - count
    ordered = values[order]
    low = np.minimum(begin + np.maximum(count - 1, 0) // 2, len(values) - 1)
    high = np.minimum(begin + count // 2, len(values) - 1)
    return np.where(count > 0, (ordered[low] + ordered[high]) / 2, 0.0)


def _drift(inst, proc, end, processes: int) -> tuple[np.ndarray, float]:
    """Return [processes] the drift of each clock, as the slope of a line through its ends, and the mean of all ends."""
    drift, middle = np.zeros(processes), float(end.mean()) if len(end) else 0.0
    if not len(end) or np.ptp(end) < _DRIFT_AFTER_S:
        return drift, middle
    mean = np.bincount(inst, weights=end) / np.bincount(inst)
    behind, since = end - mean[inst], end - middle
    square = np.bincount(proc, weights=since**2, minlength=processes)
    along = np.bincount(proc, weights=since * behind, minlength=processes)
    return np.divide(along, square, out=drift, where=square > 0), middle


def _residual(inst, end) -> float | None:
    if not len(inst):
        return None
    n = inst.max() + 1
    return float(np.median(_extreme(np.maximum, end, inst, n, -np.inf) - _extreme(np.minimum, end, inst, n, np.inf)))
