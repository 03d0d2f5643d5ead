"""Where the executions of one program begin and end on one device of a trace.

Steps are dispatched ahead of time, so a host's annotation says nothing about when a device ran one. A step is therefore
cut on the device: from the first operation of execution k to the first of execution k + 1, idle time between included.
"""

from __future__ import annotations

import numpy as np


def step_windows(
    start: np.ndarray, end: np.ndarray, op: np.ndarray, run: np.ndarray, num_steps: int | None = None
) -> list[tuple[float, float]]:
    """Windows of the executions, in order; the last one is dropped unless it is the only one.

    What follows the last execution is not in the trace, so its idle time is unknown: alone, it ends with its last
    operation.

    Args:
        start, end: times of the program's operations on one device, sorted by start.
        op: an id of the instruction of each operation.
        run: the runtime's id of the execution, negative or positive; -1 everywhere where the trace has none.
        num_steps: executions in the trace, if known.
    """
    first = _starts_by_run(start, run) if (run != -1).any() else _starts_by_count(start, op, num_steps)
    if len(first) == 1:
        return [(float(first[0]), float(end.max()))]
    return list(zip(first[:-1].tolist(), first[1:].tolist()))


def runs_in_order(start: np.ndarray, run: np.ndarray) -> np.ndarray:
    """The runtime's ids of the executions, in time; empty where the trace has none.

    Args:
        start, run: as of `step_windows`.
    """
    numbered = run != -1
    ids, index = np.unique(run[numbered], return_index=True)
    return ids[np.argsort(start[numbered][index], kind="stable")]


def _starts_by_run(start: np.ndarray, run: np.ndarray) -> np.ndarray:
    numbered = run != -1
    _, index = np.unique(run[numbered], return_index=True)  # first of each run, as start is sorted
    return np.sort(start[numbered][index])


def _starts_by_count(start: np.ndarray, op: np.ndarray, num_steps: int | None) -> np.ndarray:
    """Start of each execution where none is numbered: an op that ran m times per execution opens one every m times.

    Ops whose count is no multiple of the number of executions (a conditional; events that the profiler dropped) are
    left out.
    """
    # by op, in time; numpy sorts 16-bit numbers by radix, in one pass
    order = np.argsort(op.astype(np.uint16) if len(op) and op.max() < 2**16 else op, kind="stable")
    _, begin, count = np.unique(op[order], return_index=True, return_counts=True)
    steps = _number_of_runs(count, num_steps)
    regular = count % steps == 0
    every = count[regular] // steps
    occurrence = begin[regular, None] + every[:, None] * np.arange(steps)
    return np.sort(start[order][occurrence].min(axis=0))


def _number_of_runs(count: np.ndarray, num_steps: int | None) -> int:
    """The number given, if it fits most ops; else the largest number that fits all."""
    if num_steps and np.mean(count % num_steps == 0) > 0.5:
        return num_steps
    return int(np.gcd.reduce(count))
