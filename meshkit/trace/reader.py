"""Profiler traces (XSpace files of GPU or CPU runs) -> a Timeline of measured device steps.

    file -> operations -> labels -> windows of steps -> sweep     (one file at a time: of a step that is swept, only
    all files -> steps in common -> wait and transfer -> Trace     its collectives' instances have to be remembered)

A trace names the HLO instruction of every operation; what those communicate, and where, is known from the compiled
program that was recorded beside the trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from meshkit.errors import TraceError
from meshkit.hlo.collective import Collective
from meshkit.timeline import DeviceStep, Sweep, Timeline, shares_by_op, sweep
from meshkit.trace.checks import COMMAND_BUFFERS_FLAG, Facts, Note, notes_of
from meshkit.trace.labels import COMMUNICATION, COMPUTE, COPY, FUSED, Classes, TracedProgram, classify
from meshkit.trace.operations import DeviceOperations, TraceFile, read_operations
from meshkit.trace.skew import Instances, Skew, measure_skew
from meshkit.trace.windows import runs_in_order, step_windows

__all__ = ["KernelTotals", "Note", "Trace", "TraceFile", "read_trace"]

_KEPT_SPANS = 4_000_000  # of all steps together, for drawing: 100 MB
_NO_SPANS = np.zeros((0, 2))
_NO_INDEX = np.zeros(0, np.intp)


@dataclass(frozen=True)
class KernelTotals:
    """What each operation that computes took, as means over the device steps; indexed as `Timeline.op_names`.

    Attributes:
        time_s: its part of the union, shared by those that run at once. Adds up to `compute_s`.
        busy_s: sum of its own durations.
        count: how often it ran.
    """

    time_s: np.ndarray
    busy_s: np.ndarray
    count: np.ndarray


@dataclass(frozen=True)
class Trace:
    """What was read, and what could not be.

    Attributes:
        timeline: the steps with their spans; of a large trace those of the first devices only.
        steps: every step of every device, without spans where there are too many.
        sweeps: of `steps`.
        kernels: what computes.
        skew: waiting and transfer, and who waited for whom.
        facts: how much of the trace could be used.
        notes: what a reader of the numbers must know.
    """

    timeline: Timeline
    steps: Timeline
    sweeps: tuple[Sweep, ...]
    kernels: KernelTotals
    skew: Skew
    facts: Facts
    notes: tuple[Note, ...]


def read_trace(
    files: Sequence[TraceFile],
    *,
    module_names: Set[str],
    collectives_by_op: Mapping[str, Collective],
    containers: Set[str] = frozenset(),
    fused: Set[str] = frozenset(),
    groups: Mapping[str, np.ndarray] | None = None,
    expected: Mapping[str, int] | None = None,
    rows: np.ndarray | None = None,
    first_step: int = 0,
    num_steps: int | None = None,
    kept_spans: int = _KEPT_SPANS,
) -> Trace:
    """The steps of a program in the traces of its processes.

    Args:
        files: one per process; they are read one after the other.
        module_names, collectives_by_op, containers, fused, groups, expected: see `TracedProgram`.
        rows: [collectives + 1] row of the report of each distinct collective in order (last: unmapped), as for `sweep`.
        first_step: number of the first execution in the trace.
        num_steps: executions in the trace, if known; helps where the trace does not number them.
        kept_spans: how many spans to keep for drawing.

    Raises:
        TraceError: the only file cannot be read, or none has an operation of the program on these devices.
    """
    program = TracedProgram(module_names, collectives_by_op, containers, fused, groups or {}, expected or {})
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


class _Reader:
    """Turns files into swept device steps, and remembers what was lost on the way."""

    def __init__(self, program: TracedProgram, rows: np.ndarray | None, num_steps: int | None, kept_spans: int):
        self.program, self.rows, self.num_steps, self.kept_spans = program, rows, num_steps, kept_spans
        self.collectives = tuple(dict.fromkeys(program.collectives_by_op.values()))
        self.index = {c: i for i, c in enumerate(self.collectives)}
        self.op_names: dict[str, int] = {}
        self.decided: dict[tuple, tuple[int, Collective | None]] = {}
        self.steps: list[DeviceStep] = []
        self.sweeps: list[Sweep] = []
        self.runs: list[int] = []
        self.instances = Instances()
        self.kernels: dict[int, list[tuple[np.ndarray, ...]]] = {}  # by execution: sums over devices
        self.facts = Facts()

    def read(self, file: TraceFile) -> None:
        """Adds one file; nothing of one that cannot be read."""
        operations = read_operations(file)
        facts, labels = self.facts, operations.labels
        if not any(label.module in self.program.module_names for label in labels):
            raise _not_the_program(file, self.program, labels)
        facts.events += operations.events
        facts.discarded += operations.discarded
        facts.problems += operations.problems
        if operations.dropped is not None:
            facts.dropped = (facts.dropped or 0) + operations.dropped
        namesakes = {label.program for label in labels if label.module in self.program.module_names}
        facts.namesakes = max(facts.namesakes, len(namesakes))
        classes = classify(labels, self.program, self.index, self.op_names, self.decided)
        clock_s = self.instances.process(file.process, operations.clock_ns)
        for device in sorted(file.devices.values()):
            if device in operations.devices:
                self._device(device, operations.devices[device], classes, clock_s)
            else:
                facts.missing_devices.append(device)

    def _device(self, device: int, ops: DeviceOperations, classes: Classes, clock_s: float) -> None:
        """Cuts the operations of one device into its executions of the program, and sweeps each."""
        mine = np.flatnonzero(classes.of_program[ops.label])
        if not len(mine):
            self.facts.missing_devices.append(device)
            return
        start, run = ops.start_ps[mine], ops.run[mine]
        windows = step_windows(start, ops.end_ps[mine], ops.label[mine], run, self.num_steps)
        runs = runs_in_order(start, run)
        if self.num_steps and len(windows) != max(1, self.num_steps - 1):
            self.facts.odd_executions[device] = len(windows) + 1
        reach = np.maximum.accumulate(ops.end_ps)
        for i, (w0, w1) in enumerate(windows):
            inside = slice(np.searchsorted(reach, w0, "right"), np.searchsorted(ops.start_ps, w1, "left"))
            step = self._step(device, i, (w0, w1), ops, inside, classes)
            own = ops.start_ps[inside][np.isin(classes.kind[ops.label[inside]], (COMMUNICATION, FUSED))] >= w0
            self._add(step, int(runs[i]) if len(runs) else -1, own, clock_s + w0 * 1e-12)

    def _step(self, device, number, window, ops: DeviceOperations, inside: slice, classes: Classes) -> DeviceStep:
        label = ops.label[inside]
        begin = int(window[0])
        spans = np.stack([ops.start_ps[inside] - begin, ops.end_ps[inside] - begin], axis=1) * 1e-12
        kind = classes.kind[label]
        fused = kind == FUSED
        computes, communicates = (kind == COMPUTE) | fused, (kind == COMMUNICATION) | fused
        step = DeviceStep(
            device=device,
            step=number,
            window=(0.0, (window[1] - window[0]) * 1e-12),
            compute=spans[computes],
            compute_op=classes.op[label[computes]].astype(np.intp),
            communication=spans[communicates],
            collective=classes.collective[label[communicates]].astype(np.intp),
            copies=spans[kind == COPY],
            bubble_s=None,
        )
        seconds = spans[:, 1] - spans[:, 0]
        self.facts.graph_s += float(seconds[classes.lost[label]].sum())
        self.facts.lost_communication_s += float(seconds[classes.lost[label] & communicates].sum())
        self.facts.fused_s += float(seconds[fused].sum())
        self.facts.compute_s += float(seconds[computes].sum())
        self.facts.mapped_compute_s += float(seconds[computes & classes.of_program[label]].sum())
        return step

    def _add(self, step: DeviceStep, run: int, own: np.ndarray, starts_at_s: float) -> None:
        swept = sweep(step, len(self.collectives), self.rows)
        entry = len(self.steps)
        self.instances.add(entry, step, own, starts_at_s)
        self._count_communication(step)
        n = len(self.op_names)
        seconds = np.diff(np.clip(step.compute, *step.window), axis=1).ravel()
        busy, count = (np.bincount(step.compute_op, weights=w, minlength=n) for w in (seconds, None))
        key = step.step if run == -1 else run
        parts = [*self.kernels.get(key, []), (shares_by_op(step, n), busy, count)]
        self.kernels[key] = [_summed(parts)]
        spans = len(step.compute) + len(step.communication) + len(step.copies)
        self.kept_spans -= spans
        if self.kept_spans < 0 and self.steps:
            step = replace(step, compute=_NO_SPANS, communication=_NO_SPANS, copies=_NO_SPANS, compute_op=_NO_INDEX,
                           collective=_NO_INDEX)  # fmt: skip
        self.steps.append(step)
        self.sweeps.append(swept)
        self.runs.append(run)

    def _count_communication(self, step: DeviceStep) -> None:
        seconds = np.diff(step.communication, axis=1).ravel()
        known = step.collective >= 0
        on_axes = np.array([bool(c.axes) or c.group_size == 1 for c in self.collectives] + [False])
        self.facts.communication_s += float(seconds.sum())
        self.facts.mapped_s += float(seconds[known].sum())
        self.facts.on_axes_s += float(seconds[on_axes[step.collective]].sum())

    def trace(self, first_step: int) -> Trace:
        """What all files together say."""
        numbers = _numbers(self.steps, self.runs)
        keep = _in_common(self.steps, numbers, self.facts)
        skew = measure_skew(self.instances, self.collectives, self.program.groups, self.steps, numbers, keep)
        steps, sweeps = [], []
        for entry in np.flatnonzero(keep).tolist():
            transfer = skew.transfer_of(entry)
            step = replace(self.steps[entry], step=first_step + int(numbers[entry]))
            if transfer is not None:
                owner = self.instances.collective_of(entry)
                owner = np.where(owner < 0, len(self.collectives), owner)
                total = np.bincount(owner, weights=transfer, minlength=len(self.collectives) + 1)
                sweeps.append(replace(self.sweeps[entry], transfer_s=total))
                step = replace(step, transfer_s=transfer) if len(step.communication) else step
            else:
                sweeps.append(self.sweeps[entry])
            steps.append(step)
        self.facts.device_steps = len(self.steps)
        keys = {self.steps[i].step if self.runs[i] == -1 else self.runs[i] for i in np.flatnonzero(keep).tolist()}
        sums = _summed([part for key in keys for part in self.kernels[key]])
        kernels = KernelTotals(*(total / len(steps) for total in sums))
        every = Timeline(tuple(steps), self.collectives, tuple(self.op_names))
        drawn = replace(every, steps=tuple(s for s in steps if len(s.compute) or len(s.communication)) or every.steps)
        self.facts.counts(self.program.expected, self.collectives, sweeps)
        notes = notes_of(self.facts, skew)
        return Trace(drawn, every, tuple(sweeps), kernels, skew, self.facts, tuple(notes))


def _not_the_program(file: TraceFile, program: TracedProgram, labels: Sequence) -> TraceError:
    wanted = f"'{', '.join(sorted(program.module_names))}'"
    devices = sorted(file.devices.values())
    if any(label.graph for label in labels):
        return TraceError(
            f"every kernel on devices {devices} ran inside CUDA graphs, where the trace does not say which instruction "
            f"of {wanted} it belongs to.",
            at=str(file.path),
            hint=f"capturing again with XLA_FLAGS={COMMAND_BUFFERS_FLAG}",
        )
    seen = ", ".join(sorted({label.module for label in labels if label.module})) or "none"
    return TraceError(
        f"the trace has no operation of the program {wanted} on devices {devices}; programs in it: {seen}.",
        at=str(file.path),
        hint="capturing again: the traced steps must run the program that was recorded",
    )


def _summed(parts: Sequence[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Sums of columns that grew from one part to the next."""
    totals = []
    for columns in zip(*parts):
        total = np.zeros(max(len(c) for c in columns))
        for column in columns:
            total[: len(column)] += column
        totals.append(total)
    return tuple(totals) or (np.zeros(0),) * 3


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
    seen: dict[int, int] = {}
    for number in numbers.tolist():
        seen[number] = seen.get(number, 0) + 1
    everywhere = [number for number, count in seen.items() if count == len(set(devices.tolist()))]
    if not everywhere:
        raise TraceError(
            "no execution of the program was seen on every device.",
            hint="capturing again: the traces are of different steps, or have lost most of their events",
        )
    keep = np.isin(numbers, everywhere)
    facts.partial_steps = len(seen) - len(everywhere)
    return keep
