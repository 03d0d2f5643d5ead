"""Clocks of several processes, aligned by the ends of their collectives.

The members of a collective leave it together, so their end times differ by their clocks alone. Each process gets the
offset that makes its ends agree best with everybody's (medians, which a few late ends do not move); groups need not
span the job, only be connected. What then still differs is the residual.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

_ROUNDS = 12
_DRIFT_AFTER_S = 10.0  # over a shorter trace two crystals drift apart by less than a collective's ends scatter


@dataclass(frozen=True)
class Clocks:
    """Offsets that were taken out.

    Attributes:
        process: [p] numbers of the processes.
        offset_s: [p] what each clock is ahead by, against the first one it is connected with.
        drift: [p] seconds per second by which each clock runs fast; zeros in a short trace.
        middle_s: when the offset holds exactly.
        residual_s: median over instances of (last - first) of the aligned ends; None without instances in common.
        connected: whether collectives connect all processes.
    """

    process: np.ndarray
    offset_s: np.ndarray
    drift: np.ndarray
    middle_s: float
    residual_s: float | None
    connected: bool

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
    for _ in range(_ROUNDS):
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
    order = np.lexsort((values, number))
    count = np.bincount(number, minlength=n)
    begin = np.cumsum(count) - count
    ordered = values[order]
    low = np.minimum(begin + np.maximum(count - 1, 0) // 2, len(values) - 1)
    high = np.minimum(begin + count // 2, len(values) - 1)
    return np.where(count > 0, (ordered[low] + ordered[high]) / 2, 0.0)


def _drift(inst, proc, end, processes: int) -> tuple[np.ndarray, float]:
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
    low, high = np.full(inst.max() + 1, np.inf), np.full(inst.max() + 1, -np.inf)
    np.minimum.at(low, inst, end)
    np.maximum.at(high, inst, end)
    return float(np.median(high - low))
