"""Profiler traces (XSpace files of GPU or CPU runs) -> a Timeline of measured device steps.

    file -> operations -> classes -> windows of steps -> sweep    (one file at a time: of a step that is swept, only
    all files -> steps in common -> wait and transfer -> Trace     its collectives' instances have to be remembered)

A trace names the HLO instruction of every operation; what those communicate, and where, is known from the compiled
program that was recorded with the trace.

Steps are dispatched ahead of time, so a host's annotation says nothing about when a device ran one. A step is therefore
cut on the device: from the first operation of execution k to the first of execution k + 1, idle time between included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np

from meshkit.errors import TraceError
from meshkit.hlo.schedule import Collective
from meshkit.timeline import DeviceStep, KernelTotals, Sweep, Timeline, exposed_spans, exposed_waits, sweep
from meshkit.trace.checks import COMMAND_BUFFERS_FLAG, Facts, Note, notes_of
from meshkit.trace.graphs import name_graph_kernels
from meshkit.trace.operations import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    FUSED,
    Classes,
    Classifier,
    DeviceOperations,
    TracedProgram,
    TraceFile,
    read_operations,
)
from meshkit.trace.skew import Instances, Skew, measure_skew

_MOST_FOUND = 10_000  # executions in a trace that numbers none; real ones have some tens
_KEPT_SPANS = 4_000_000  # of all steps together, for drawing: 100 MB
_NO_SPANS = np.zeros((0, 2))
_NO_INDEX = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Trace:
    """What was read, and what could not be."""

    timeline: Timeline  # the steps with their spans; of a large trace those of the first devices only
    steps: Timeline  # every step of every device, without spans where there are too many
    sweeps: tuple[Sweep, ...]  # of `steps`
    kernels: KernelTotals  # what computes, as means over `steps`
    skew: Skew  # waiting and transfer, and who waited for whom
    facts: Facts  # how much of the trace could be used
    notes: tuple[Note, ...]  # what a reader of the numbers must know


def read_trace(
    files: Sequence[TraceFile],
    program: TracedProgram,
    *,
    rows: np.ndarray | None = None,
    first_step: int = 0,
    num_steps: int | None = None,
    kept_spans: int = _KEPT_SPANS,
) -> Trace:
    """The steps of a program in the traces of its processes.

    Args:
        files: one per process; they are read one after the other.
        program: whose executions are the steps.
        rows: [collectives + 1] row of the report of each distinct collective in order (last: unmapped), as for `sweep`.
        first_step: number of the first execution in the trace.
        num_steps: executions in the trace, if known; helps where the trace does not number them.
        kept_spans: how many spans to keep for drawing.

    Raises:
        TraceError: the only file cannot be read, or none has an operation of the program on these devices.
    """
    if len({file.process for file in files}) < len(files):  # not said: every file is a process with its own clock
        files = [replace(file, process=i) for i, file in enumerate(files)]
    reader = _Reader(program, rows, num_steps, kept_spans)
    errors: list[TraceError] = []
    for file in files:
        try:
            reader.read(file)
        except TraceError as error:
            errors.append(error)
            reader.facts.damaged[file.process] = error.message
    if errors and len(errors) == len(files):
        raise errors[0]
    return reader.trace(first_step)


@dataclass(frozen=True)
class OneStep:
    """The communication of one execution, as the devices of one process saw it."""

    collectives: tuple[Collective, ...]
    steps: list[DeviceStep]  # of each device
    sweeps: list[Sweep]
    exposed: list[np.ndarray]  # [n, 2] of each: when a collective runs and nothing computes
    instances: Instances  # on the same clock


def read_instances(file: TraceFile, program: TracedProgram) -> OneStep:
    """The communication of the one execution of a program that a trace holds.

    Raises:
        TraceError: it cannot be read, or holds none.
    """
    reader = _Reader(program, None, 1, 0)
    reader.read(file)
    return OneStep(reader.collectives, reader.steps, reader.sweeps, reader.exposed, reader.instances)


class _Reader:
    """Turns files into swept device steps, and remembers what was lost on the way."""

    def __init__(self, program: TracedProgram, rows: np.ndarray | None, num_steps: int | None, kept_spans: int):
        self.program, self.rows, self.num_steps, self.kept_spans = program, rows, num_steps, kept_spans
        self.classifier = Classifier(program)
        self.collectives = self.classifier.collectives
        self.steps: list[DeviceStep] = []
        self.operations: list[int] = []  # of each
        self.sweeps: list[Sweep] = []
        self.runs: list[int] = []
        self.exposed: list[np.ndarray] = []  # of each device step: when a collective runs and nothing computes
        self.instances = Instances()
        self.kernels: dict[int, KernelTotals] = {}  # by execution: sums over devices
        self.facts = Facts()

    def read(self, file: TraceFile) -> None:
        """Adds one file; nothing of one that cannot be read."""
        operations = read_operations(file)
        name_graph_kernels(operations, self.program)
        facts, labels = self.facts, operations.labels
        own = self.program.owns(labels)
        if not own.any():
            raise _not_the_program(file, self.program, labels)
        facts.events += operations.events
        facts.discarded += operations.discarded
        facts.messages += operations.messages
        facts.cpu = operations.cpu
        facts.graphs |= any(label.graph for label in labels)
        facts.hardware = facts.hardware or operations.hardware
        if operations.dropped is not None:
            facts.dropped = (facts.dropped or 0) + operations.dropped
        namesakes = {label.program for label, mine in zip(labels, own) if mine}
        facts.namesakes = max(facts.namesakes, len(namesakes))
        classes = self.classifier.classify(labels)
        once = np.array([label.op in self.program.once for label in labels], bool)
        clock_s = self.instances.begin(file.process, operations.clock_ns)
        for device in sorted(file.devices.values()):
            if device in operations.devices:
                self._device(device, operations.devices.pop(device), classes, once, clock_s)
            else:
                facts.missing_devices.append(device)

    def _device(self, device: int, ops: DeviceOperations, classes: Classes, once: np.ndarray, clock_s: float) -> None:
        """Cuts the operations of one device into its executions of the program, and sweeps each."""
        mine = classes.of_program[ops.label]
        if not mine.any():
            self.facts.missing_devices.append(device)
            return
        start, end, label, run = (  # nothing is copied where all are
            column if mine.all() else column[mine] for column in (ops.start_ps, ops.end_ps, ops.label, ops.run)
        )
        if self.program.found and (run == -1).all():
            windows = found_windows(start, end, label, once)
        else:
            windows = step_windows(start, end, label, run, self.num_steps)
        runs = runs_in_order(start, run)
        del mine, start, end, label, run
        if self.num_steps and len(windows) != max(1, self.num_steps - 1):
            self.facts.odd_executions[device] = len(windows) + 1
        first = np.searchsorted(np.maximum.accumulate(ops.end_ps), [w0 for w0, _ in windows], "right")
        for i, (w0, w1) in enumerate(windows):
            inside = slice(first[i], np.searchsorted(ops.start_ps, w1, "left"))
            step = self._step(device, i, (w0, w1), ops, inside, classes)
            own = ops.start_ps[inside][np.isin(classes.kind[ops.label[inside]], (COMMUNICATION, FUSED))] >= w0
            self._add(step, int(runs[i]) if len(runs) else -1, own, clock_s + w0 * 1e-12)

    def _step(self, device, number, window, ops: DeviceOperations, inside: slice, classes: Classes) -> DeviceStep:
        """One execution on one device as spans; adds what it holds to the facts."""
        label = ops.label[inside]
        begin = int(window[0])
        spans = np.stack([ops.start_ps[inside] - begin, ops.end_ps[inside] - begin], axis=1) * 1e-12
        kind = classes.kind[label]
        fused = kind == FUSED
        computes, communicates = (kind == COMPUTE) | fused, (kind == COMMUNICATION) | fused
        fed = spans[classes.input[label], 1]
        step = DeviceStep(
            device=device,
            step=number,
            window=(0.0, (window[1] - window[0]) * 1e-12),
            compute=spans[computes],
            compute_op=classes.op[label[computes]],
            communication=spans[communicates],
            collective=classes.collective[label[communicates]],
            copies=spans[kind == COPY],
            input_end_s=float(fed.max()) if len(fed) else None,
        )
        seconds = spans[:, 1] - spans[:, 0]
        self.facts.graph_s += float(seconds[classes.lost[label]].sum())
        self.facts.copies_s += float(seconds[kind == COPY].sum())
        self.facts.own_copies_s += float(seconds[(kind == COPY) & classes.own_copy[label]].sum())
        self.facts.fused_s += float(seconds[fused].sum())
        self.facts.own_s += float(seconds[communicates & ~classes.foreign[label]].sum())
        self.facts.compute_s += float(seconds[computes].sum())
        mapped = computes & classes.of_program[label] & ~classes.lost[label]
        self.facts.mapped_compute_s += float(seconds[mapped].sum())
        return step

    def _add(self, step: DeviceStep, run: int, own: np.ndarray, starts_at_s: float) -> None:
        """Sweeps a device step and keeps what the steps together need; its spans only while there is room."""
        swept = sweep(step, len(self.collectives), self.rows)
        self.instances.add(step, own, starts_at_s)
        if self.program.groups:  # else nobody asks for them
            self.exposed.append(exposed_spans(step) + starts_at_s)
        self._count_communication(step)
        key = step.step if run == -1 else run
        kernels = KernelTotals.of(step, len(self.classifier.op_names))
        self.kernels[key] = KernelTotals.sum([self.kernels[key], kernels]) if key in self.kernels else kernels
        spans = len(step.compute) + len(step.communication) + len(step.copies)
        self.kept_spans -= spans
        if self.kept_spans < 0 and self.steps:
            step = replace(step, compute=_NO_SPANS, communication=_NO_SPANS, copies=_NO_SPANS, compute_op=_NO_INDEX,
                           collective=_NO_INDEX)  # fmt: skip
        self.steps.append(step)
        self.operations.append(spans)
        self.sweeps.append(swept)
        self.runs.append(run)

    def _count_communication(self, step: DeviceStep) -> None:
        """Adds seconds of communication to the facts: all, of known instructions, on mesh axes."""
        seconds = np.diff(step.communication, axis=1).ravel()
        known = (step.collective >= 0) & (not self.program.kinds)
        on_axes = np.array([bool(c.axes) or c.group_size == 1 for c in self.collectives] + [False])
        self.facts.communication_s += float(seconds.sum())
        self.facts.mapped_s += float(seconds[known].sum())
        self.facts.on_axes_s += float(seconds[on_axes[step.collective]].sum())

    def trace(self, first_step: int) -> Trace:
        """What all files together say."""
        numbers = _numbers(self.steps, self.runs)
        keep = _in_common(self.steps, numbers, self.facts)
        skew = measure_skew(self.instances, self.collectives, self.program.groups, self.steps, numbers, keep)
        steps, sweeps, n = [], [], len(self.collectives)
        _, owners, _, starts, ends, _ = (self.instances.by_step(column) for column in self.instances.columns())
        rows = np.arange(n + 1) if self.rows is None else np.asarray(self.rows)
        for entry in np.flatnonzero(keep).tolist():
            step, swept = replace(self.steps[entry], step=first_step + int(numbers[entry])), self.sweeps[entry]
            if skew.transfers:
                transfer, owner = skew.transfers[entry], np.where(owners[entry] < 0, n, owners[entry])
                spans = np.stack([starts[entry], ends[entry]], axis=1)
                waits = exposed_waits(spans, transfer, rows[owner], self.exposed[entry])
                moved, waited = (np.bincount(owner, weights=w, minlength=n + 1) for w in (transfer, waits))
                swept = replace(swept, transfer_s=moved, exposed_wait_s=waited)
                step = replace(step, transfer_s=transfer) if len(step.communication) else step
            steps.append(step)
            sweeps.append(swept)
        self.facts.device_steps = len(self.steps)
        keys = {self.steps[i].step if self.runs[i] == -1 else self.runs[i] for i in np.flatnonzero(keep).tolist()}
        kernels = KernelTotals.sum(self.kernels[key] for key in keys).each_of(len(steps))
        every = Timeline(tuple(steps), self.collectives, tuple(self.classifier.op_names))
        drawn = replace(every, steps=tuple(s for s in steps if len(s.compute) or len(s.communication)) or every.steps)
        self.facts.counts(self.program.expected, self.collectives, sweeps)
        self.facts.step_s = float(np.median([swept.total.window_s for swept in sweeps]))
        for device in {step.device for step in steps}:
            each = [n for step, n in zip(self.steps, self.operations) if step.device == device]
            self.facts.kernels[device] = sum(each) / len(each)
        notes = tuple(notes_of(self.facts, skew))
        return Trace(drawn, every, tuple(sweeps), kernels, skew, self.facts, notes)


def _not_the_program(file: TraceFile, program: TracedProgram, labels: Sequence) -> TraceError:
    """Why a file holds no execution of the program, and what to do."""
    devices = sorted(file.devices.values())
    if any(label.graph for label in labels):
        return TraceError(
            f"every kernel on devices {devices} ran inside CUDA graphs, where the trace does not say which instruction "
            f"of '{program.module}' it belongs to.",
            at=str(file.path),
            hint=f"capturing again with XLA_FLAGS={COMMAND_BUFFERS_FLAG}",
        )
    seen = ", ".join(sorted({label.module for label in labels if label.module})) or "none"
    return TraceError(
        f"the trace has no operation of the program '{program.module}' on devices {devices}; programs in it: {seen}.",
        at=str(file.path),
        hint="capturing again: the traced steps must run the program that was recorded",
    )


def _numbers(steps: Sequence[DeviceStep], runs: Sequence[int]) -> np.ndarray:
    """[entries] which execution each is, the same on every device: by the runtime's id where all have one, else as
    counted on its own device."""
    numbers = np.array([step.step for step in steps], np.int64)
    if -1 in runs:
        return numbers
    earliest: dict[int, int] = {}
    for run, number in zip(runs, numbers.tolist()):
        earliest[run] = max(earliest.get(run, number), number)
    order = {run: i for i, run in enumerate(sorted(earliest, key=lambda r: (earliest[r], r)))}
    return np.array([order[run] for run in runs], np.int64)


def _in_common(steps: Sequence[DeviceStep], numbers: np.ndarray, facts: Facts) -> np.ndarray:
    """[entries] whether an execution was seen whole on every device that has any."""
    devices = np.array([step.device for step in steps], np.int64)
    seen = Counter(numbers.tolist())
    everywhere = [number for number, count in seen.items() if count == len(set(devices.tolist()))]
    if not everywhere:
        raise TraceError(
            "no execution of the program was seen on every device.",
            hint="capturing again: the traces are of different steps, or have lost most of their events",
        )
    keep = np.isin(numbers, everywhere)
    facts.partial_steps = len(seen) - len(everywhere)
    return keep


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


def found_windows(start: np.ndarray, end: np.ndarray, op: np.ndarray, once: np.ndarray) -> list[tuple[float, float]]:
    """Windows of the executions where nobody numbered or counted them, and the trace may begin and end inside of one.

    The operations that ran equally often tell where executions begin: of those that run once an execution, where
    `once` [ids] knows them, the most; else all where their numbers have a divisor in common, else the rarest that are
    a quarter of all. More than any trace has are no executions: then the trace is one.

    Args:
        start, end, op: as of `step_windows`.
        once: of each id of an operation, whether one execution runs it once.
    """
    every = np.bincount(op, minlength=len(once))
    ids = np.flatnonzero(every)
    count = every[ids]
    chosen = np.ones(len(ids), bool)
    if once[ids].any():
        values, votes = np.unique(count[once[ids]], return_counts=True)
        chosen = once[ids] & (count == values[np.argmax(votes)])
    elif np.gcd.reduce(count) == 1 and (count == 1).mean() < 0.1:
        repeated = (c for c in np.unique(count[count > 1]).tolist() if (count % c == 0).mean() >= 0.25)
        number = next(repeated, 1)
        chosen = (count % number == 0) if number > 1 else chosen
    rows = slice(None) if chosen.all() else np.isin(op, ids[chosen])
    windows = step_windows(start[rows], end[rows], op[rows], np.broadcast_to(-1, len(op[rows])))
    return windows if 1 < len(windows) <= _MOST_FOUND else [(float(start[0]), float(end.max()))]


def runs_in_order(start: np.ndarray, run: np.ndarray) -> np.ndarray:
    """The runtime's ids of the executions, in time; empty where the trace has none.

    Args:
        start: times of the program's operations on one device, sorted.
        run: the runtime's id of the execution of each.
    """
    numbered = run != -1
    ids, index = np.unique(run[numbered], return_index=True)
    return ids[np.argsort(start[numbered][index], kind="stable")]


def _starts_by_run(start: np.ndarray, run: np.ndarray) -> np.ndarray:
    """Start of each execution where the runtime numbers them."""
    numbered = run != -1
    _, index = np.unique(run[numbered], return_index=True)  # first of each run, as start is sorted
    return np.sort(start[numbered][index])


def _starts_by_count(start: np.ndarray, op: np.ndarray, num_steps: int | None) -> np.ndarray:
    """Start of each execution where none is numbered: an op that ran m times per execution opens one every m times.

    Ops whose count is no multiple of the number of executions (a conditional; events that the profiler dropped) are
    left out.
    """
    # by op, in time; numpy sorts 16-bit numbers by radix, in one pass
    count = np.bincount(op)
    begin = np.cumsum(count) - count
    begin, count = begin[count > 0], count[count > 0]
    order = np.argsort(op.astype(np.uint16) if len(op) and op.max() < 2**16 else op, kind="stable")
    steps = _number_of_runs(count, num_steps)
    regular = count % steps == 0
    begin, every = begin[regular], count[regular] // steps
    if steps < len(begin):
        return np.sort([start[order[begin + every * i]].min() for i in range(steps)])
    return np.sort(reduce(np.minimum, (start[order[b + e * np.arange(steps)]] for b, e in zip(begin, every))))


def _number_of_runs(count: np.ndarray, num_steps: int | None) -> int:
    """The number given, if it fits most ops; else the largest number that fits all."""
    if num_steps and np.mean(count % num_steps == 0) > 0.5:
        return num_steps
    return int(np.gcd.reduce(count))
