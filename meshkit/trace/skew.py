"""Waiting for a late peer apart from moving data; who is waited for.

An instance is one collective, in one step, its k-th time, over one group of devices. All of its members leave it
together, so whoever is in it longer than the one that spends the least time has waited. Two ways to tell how long:

    clock-free   wait = duration - the shortest duration of any member              (needs no common clock)
    clocked      wait = from the own start to the last member's start               (one process, or aligned clocks)

Clock-free calls the slowness of everybody but one a wait; clocked does not, and is used where clocks are good enough.
Of an instance that was not seen on every member neither is known.

Clocks of several processes are aligned by the ends of their collectives: the members leave together, so their end times
differ by their clocks alone. Each process gets the offset that makes its ends agree best with everybody's (medians,
which a few late ends do not move); groups need not span the job, only be connected. What then still differs is the
residual.
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
_MOST_RESIDUAL = 0.2  # share of the median wait that aligned clocks may be wrong by
_LEAST_RESIDUAL = 0.01  # share of a collective's median duration by which they may be wrong where nobody waits
_PASSES = 12
_DRIFT_AFTER_S = 10.0  # over a shorter trace two crystals drift apart by less than a collective's ends scatter


class Instances:
    """The communication of every device step, in order: which collective, its k-th time, from when to when."""

    def __init__(self) -> None:
        self.clock_ns: dict[int, int | None] = {}  # process -> when its clock reads zero
        self.process: list[int] = []  # of each device step
        self._columns: list[tuple[np.ndarray, ...]] = []
        self._bounds = [0]

    def begin(self, process: int, clock_ns: int | None) -> float:
        """Begins a process; returns when its clock reads zero, in seconds after the first process's does; 0 if unknown.

        Args:
            process: its number in the job.
            clock_ns: time since the epoch at which its clock reads zero; None where the trace does not say.
        """
        self.clock_ns[process] = clock_ns
        first = next(iter(self.clock_ns.values()))
        return (clock_ns - first) * 1e-9 if clock_ns is not None and first is not None else 0.0

    def add(self, step: DeviceStep, own: np.ndarray, starts_at_s: float) -> None:
        """Adds the communication of the next device step, of the process that was begun last.

        Args:
            step: its spans.
            own: [m] whether a communication span began in this step, and not in the one before.
            starts_at_s: start of the step's window.
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
        """Entry, collective, occurrence (-1: none), start_s, end_s, and seconds inside the step's window."""
        if not self._columns:
            return tuple(np.zeros(0, t) for t in (np.int32, np.int32, np.int32, float, float, float))
        if len(self._columns) > 1:
            self._columns = [tuple(np.concatenate(c) for c in zip(*self._columns))]
        return self._columns[0]

    def by_step(self, column: np.ndarray) -> list[np.ndarray]:
        """A column, cut into the device steps."""
        return np.split(column, self._bounds[1:-1])


@dataclass(frozen=True)
class Straggler:
    """A device that others waited for; seconds are sums over all steps."""

    device: int
    process: int
    caused_wait_s: float  # what the other members of its groups waited for it, all added up
    waited_s: float  # what it waited itself
    last_share: float  # share of its instances that it was the last to reach
    delay_s: float  # what each of the others waited for it, as a mean over the members of each group


@dataclass(frozen=True)
class Skew:
    """Wait and transfer of every instance whose members were all seen."""

    method: str | None = None  # how waits were measured, `clocked` or `clock_free`; None where nothing is known
    clocks: Clocks | None = None  # those of the processes, where there are several
    instances: int = 0  # how many were judged
    median_wait_s: float | None = None  # of the instances' members that waited, clock-free
    wait_clock_free_s: float | None = None  # all added up
    wait_clocked_s: float | None = None
    stragglers: tuple[Straggler, ...] = ()  # the device that caused the most waiting first
    transfers: Sequence[np.ndarray] = ()
    """[m] seconds of each communication span of every device step that moved data, NaN where unknown; empty for all."""


@dataclass(frozen=True)
class _Judged:
    """Rows of the instance table that form whole instances."""

    row: np.ndarray  # [n] rows of the table
    instance: np.ndarray  # [n] number of the instance each belongs to
    count: int


def measure_skew(
    instances: Instances,
    collectives: Sequence[Collective],
    groups: Mapping[str, np.ndarray],
    steps: Sequence[DeviceStep],
    numbers: np.ndarray,
    keep: np.ndarray,
) -> Skew:
    """Wait and transfer of the communication of all device steps.

    Args:
        instances: of all device steps.
        collectives: of the timeline.
        groups: collective's name -> [groups, members] device ids, or [pairs, 2] of a collective-permute.
        steps: the device steps.
        numbers: [entries] which execution each is.
        keep: [entries] which take part.

    Returns:
        one without a `method` where no instance was seen on all its members.
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
        transfers=instances.by_step(np.where(known, (duration - waits.wait_s) * share, np.nan)),
    )


@dataclass(frozen=True)
class InstanceWaits:
    """What each row of the instance table waited; NaN where it is in no whole instance."""

    judged: _Judged
    permutes: list[tuple[np.ndarray, np.ndarray]]  # rows of each collective-permute, and the set of neighbours
    device: np.ndarray  # [rows] global id
    process: np.ndarray  # [rows]
    duration_s: np.ndarray  # [rows] end less start
    free_s: np.ndarray  # [rows] clock-free: its duration less the shortest of the instance
    clocked_s: np.ndarray  # [rows] until the last member began; at most its duration
    start_s: np.ndarray  # [rows] on the aligned clocks
    clocks: Clocks | None

    @cached_property
    def median_s(self) -> float:
        """Of the rows that waited, clock-free."""
        waits = self.free_s[self.free_s > 0]
        return float(np.median(waits)) if len(waits) else 0.0

    @cached_property
    def method(self) -> str:
        """Aligned clocks can tell who came last, or are wrong by too little of a collective to matter."""
        durations = self.duration_s[~np.isnan(self.free_s)]
        usual_s = float(np.median(durations)) if len(durations) else 0.0
        most = max(_MOST_RESIDUAL * self.median_s, _LEAST_RESIDUAL * usual_s)
        residual_s = self.clocks.residual_s if self.clocks else 0.0
        return "clocked" if residual_s is not None and residual_s <= most else "clock_free"

    @property
    def wait_s(self) -> np.ndarray:
        """[n] by that method."""
        return self.clocked_s if self.method == "clocked" else self.free_s

    @property
    def early(self) -> np.ndarray:
        """[n] the larger, the earlier a row's device came."""
        return -self.start_s if self.method == "clocked" else self.duration_s


def instance_waits(
    instances: Instances,
    collectives: Sequence[Collective],
    groups: Mapping[str, np.ndarray],
    devices: Sequence[int],
    numbers: np.ndarray,
    keep: np.ndarray,
) -> InstanceWaits | None:
    """What every device waited in every instance; None where there is none. `devices` are those of the device steps.

    Args:
        instances, collectives, groups: as of `measure_skew`.
        devices: [entries] global id of the device of each device step.
        numbers: [entries] which execution each is.
        keep: [entries] which take part; the rows of others stay NaN.
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
        # a permute's instance is a device and its neighbours: each device has its own, and is its first member
        own = _first_of_each(peers, n) if rows is not judged.row else np.arange(len(rows))
        mine, which = rows[own], peers[own]
        free[mine] = np.maximum(0.0, duration[mine] - shortest[which])
        clocked[mine] = np.clip(last[which] - start[mine], 0.0, duration[mine])
    return InstanceWaits(judged, permutes, device, process, duration, free, clocked, start, clocks)


def _occurrence(collective: np.ndarray, start: np.ndarray, own: np.ndarray) -> np.ndarray:
    """[m] how many spans of the same collective began earlier in this step."""
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
    """Rows by instance; and of each collective-permute rows by device, with its neighbours."""
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
        # where a member lost an event, its k-th time is another's k+1-th: none of that step's can be told apart
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
    """[n] whether the devices of a step's group all ran a collective equally often.

    Args:
        where: number of the step's group.
        device: which device.
        occurrence: which time, from 0 on each device.
        members: devices of a group; 0 to judge each device by the others.
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
    """The usable rows of each collective."""
    rows = np.flatnonzero(usable)
    rows = rows[np.argsort(collective[rows], kind="stable")]
    found, begin = np.unique(collective[rows], return_index=True)
    yield from zip(found.tolist(), np.split(rows, begin[1:]))


def _group_of(members: np.ndarray, device: np.ndarray) -> np.ndarray:
    """[n] which group each device is in; -1 for none."""
    flat = members.ravel()
    order = np.argsort(flat, kind="stable")
    at = np.minimum(np.searchsorted(flat[order], device), len(flat) - 1)
    return np.where(flat[order][at] == device, order[at] // members.shape[1], -1)


def _neighbours(pairs: np.ndarray, device, moment, rows) -> tuple[np.ndarray, np.ndarray]:
    """Rows of each device of a permute and of those it exchanges with, and a number for each such set.

    A device's own row stands first in its set. A set with a neighbour that was not seen is left out.
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
    """[n] the first row of each number; -1 for none."""
    first = np.full(n, -1, np.int64)
    first[number[::-1]] = np.arange(len(number))[::-1]
    return first


def _extreme(ufunc, values: np.ndarray, number: np.ndarray, n: int, start: float) -> np.ndarray:
    """[n] the least or the most of the values of each number."""
    result = np.full(n, start)
    ufunc.at(result, number, values)
    return result


def stragglers(
    instance: np.ndarray, device: np.ndarray, process: np.ndarray, wait_s: np.ndarray, early: np.ndarray
) -> tuple[Straggler, ...]:
    """Devices by the wait they cause: that of each instance goes to the member that came last.

    Args:
        instance: [n] number of the instance, of which none is left out.
        device, process: [n] whose row it is.
        wait_s: [n] what it waited.
        early: [n] the larger, the earlier it came.
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
    """Offsets that were taken out."""

    process: np.ndarray  # [p] numbers of the processes
    offset_s: np.ndarray  # [p] what each clock is ahead by, against the first one it is connected with
    drift: np.ndarray  # [p] seconds per second by which each clock runs fast; zeros in a short trace
    middle_s: float  # when the offset holds exactly
    residual_s: float | None
    """Median over instances of (last - first) of the aligned ends; None without instances in common."""
    connected: bool  # whether collectives connect all processes
    from_epoch: bool = False  # whether each trace says when it began, so that offsets are those of the machines

    @property
    def count(self) -> int:
        """Processes."""
        return len(self.process)

    def ahead_s(self, process: np.ndarray, at_s: np.ndarray) -> np.ndarray:
        """[n] what to take from times `at_s` on the clocks of some processes; 0 for one without collectives."""
        i = np.minimum(np.searchsorted(self.process, process), len(self.process) - 1)
        ahead = self.offset_s[i] + self.drift[i] * (at_s - self.offset_s[i] - self.middle_s)
        return np.where(self.process[i] == process, ahead, 0.0)


def align(instance: np.ndarray, process: np.ndarray, end_s: np.ndarray) -> Clocks | None:
    """The clocks of all processes that have ends of instances; None where there is but one.

    Args:
        instance: [n] number of the instance.
        process: [n] process that saw this end.
        end_s: [n] on that process's clock.
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
    """One end for each process of an instance (the mean of its devices'), of instances with several processes."""
    key, number, size = np.unique(instance * processes + process, return_inverse=True, return_counts=True)
    end = np.bincount(number, weights=end_s) / size
    inst, proc = key // processes, key % processes
    _, again, members = np.unique(inst, return_inverse=True, return_counts=True)
    shared = members[again] > 1
    return np.unique(inst[shared], return_inverse=True)[1], proc[shared], end[shared]


def _along_tree(inst, proc, end, processes: int) -> tuple[np.ndarray, bool]:
    """First offsets: from process to process, the median difference of the ends that both saw."""
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
    """[processes] median of how far each one's ends lie behind the mean end of their instances."""
    if not len(inst):
        return np.zeros(processes)
    mean = np.bincount(inst, weights=end) / np.bincount(inst)
    return _medians(proc, end - mean[inst], processes)


def _medians(number: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """[n] the median of the values of each number; 0 for none."""
    order = np.lexsort((values, number))
    count = np.bincount(number, minlength=n)
    begin = np.cumsum(count) - count
    ordered = values[order]
    low = np.minimum(begin + np.maximum(count - 1, 0) // 2, len(values) - 1)
    high = np.minimum(begin + count // 2, len(values) - 1)
    return np.where(count > 0, (ordered[low] + ordered[high]) / 2, 0.0)


def _drift(inst, proc, end, processes: int) -> tuple[np.ndarray, float]:
    """[processes] how fast each clock runs, by a line through its ends, and the middle of them."""
    drift, middle = np.zeros(processes), float(end.mean()) if len(end) else 0.0
    if not len(end) or np.ptp(end) < _DRIFT_AFTER_S:
        return drift, middle
    mean = np.bincount(inst, weights=end) / np.bincount(inst)
    behind, since = end - mean[inst], end - middle
    square = np.bincount(proc, weights=since**2, minlength=processes)
    along = np.bincount(proc, weights=since * behind, minlength=processes)
    return np.divide(along, square, out=drift, where=square > 0), middle


def _residual(inst, end) -> float | None:
    """Median over instances of how far the aligned ends lie apart."""
    if not len(inst):
        return None
    n = inst.max() + 1
    return float(np.median(_extreme(np.maximum, end, inst, n, -np.inf) - _extreme(np.minimum, end, inst, n, np.inf)))
