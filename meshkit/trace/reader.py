"""Read profiler traces (XSpace files of GPU or CPU runs) into a Timeline of measured device steps.

    file -> operations -> classes -> windows of steps -> sweep    (one file at a time)
    all files -> steps in common -> wait and transfer -> Trace

After the sweep of a step, only its collectives have to stay in memory. A trace names the HLO instruction of every
operation. The compiled program, which was recorded with the trace, has each instruction's collective, groups and bytes.

Steps are dispatched ahead of time, so an annotation on the host does not tell when a device ran a step. A step is
therefore cut on the device: from the first operation of execution k to the first operation of execution k + 1, with the
idle time between them.

Every loss is counted in `Facts` and reported in a `Note`: events that the profiler dropped, kernels without a name,
devices and processes without a trace, collectives that ran more or less often than in the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from meshkit.errors import TraceError
from meshkit.hlo.schedule import Collective
from meshkit.timeline import DeviceStep, KernelTotals, Sweep, Timeline, exposed_spans, exposed_waits, sweep
from meshkit.trace.graphs import name_graph_kernels
from meshkit.trace.nsys import is_nsys, read_nsys
from meshkit.trace.operations import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    FUSED,
    Classes,
    Classifier,
    DeviceOperations,
    Operations,
    TracedProgram,
    TraceFile,
    found_windows,
    read_operations,
    runs_in_order,
    step_windows,
)
from meshkit.trace.skew import Instances, Skew, measure_skew
from meshkit.units import format_percent, format_seconds

COMMAND_BUFFERS_FLAG = "--xla_gpu_enable_command_buffer="  # An empty value turns CUDA graphs off.
MOST_UNMAPPED = 0.02  # With a larger share of communication without instruction, numbers by axis are not reported.
_OUTLIER = 1.5  # An outlier takes longer than this multiple of the median step.
_WARM_UP = 0.02  # A warm-up step is longer than every later usual step by at least this share of the median step.
_MOST_APART = 3.0  # If step times differ by a larger factor, the steps are not of one kind.
KEPT_SPANS = 4_000_000  # Limit on the spans of all steps that are kept for drawing: 100 MB.
_NO_SPANS = np.zeros((0, 2))
_NO_INDEX = np.zeros(0, np.int32)
Apart = Literal["warm-up", "outlier", "not chosen"]


@dataclass(frozen=True)
class Note:
    """A caveat for the reader of the report; `seconds` is a mean per device step."""

    code: str
    message: str
    seconds: float | None = None


@dataclass
class Facts:
    """Counts and sums over all files; seconds are sums of the operations' durations in the measured steps."""

    device_steps: int = 0
    events: int = 0
    dropped: int | None = None
    """Events that the profiler reports as lost; None if it reports none."""
    discarded: int = 0
    graph_s: float = 0.0
    """Seconds of operations inside CUDA graphs whose instruction is unknown."""
    graphs: bool = False
    copies_s: float = 0.0
    own_copies_s: float = 0.0
    """Seconds of copies on the GPU itself, by instructions of the program."""
    fused_s: float = 0.0
    """Seconds in kernels that compute and communicate at once."""
    compute_s: float = 0.0
    mapped_compute_s: float = 0.0
    """Seconds in kernels that compute and whose instruction is known."""
    communication_s: float = 0.0
    own_s: float = 0.0
    """Seconds of communication without that of other programs, which may run between the steps."""
    mapped_s: float = 0.0
    """Seconds of communication whose instruction is known."""
    on_axes_s: float = 0.0
    """Seconds of communication that runs along known mesh axes."""
    partial_steps: int = 0
    """Number of executions that were not seen on every device."""
    missing_devices: list[int] = field(default_factory=list)
    odd_executions: dict[int, int] = field(default_factory=dict)
    """Device -> number of executions, if it differs from the number in the capture's record."""
    whole: dict[int, float] = field(default_factory=dict)
    """Device -> seconds of its whole trace, if it counts as one step, since no executions were found in it."""
    odd_counts: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Collective that ran more or less often than in the program -> (expected, seen) runs per step."""
    namesakes: int = 0
    """Number of programs in a trace with the name of the measured program, itself included."""
    cpu: bool = False
    hardware: dict[str, int | float | str] = field(default_factory=dict)
    kernels: dict[int, float] = field(default_factory=dict)
    """Device -> mean number of operations in a step, without copies."""
    step_s: float = 0.0
    """The median device step."""
    damaged: dict[int, str] = field(default_factory=dict)
    """Process -> the reason why its trace cannot be used."""
    messages: list[str] = field(default_factory=list)

    @property
    def mapped_share(self) -> float | None:
        """Share of the program's communication whose instruction is known; None without communication."""
        return self.mapped_s / self.own_s if self.own_s else None

    @property
    def axis_mapped_share(self) -> float | None:
        """Share of the program's communication that runs along known mesh axes; None without communication."""
        return self.on_axes_s / self.own_s if self.own_s else None

    @property
    def kernels_mapped_share(self) -> float | None:
        """Share of the compute whose instruction is known; None without compute."""
        return self.mapped_compute_s / self.compute_s if self.compute_s else None

    @property
    def believes_axes(self) -> bool:
        """Whether enough communication has a known instruction, so that numbers by axis can be reported."""
        share = self.mapped_share
        return not self.hidden and (share is None or 1 - share <= MOST_UNMAPPED)

    @property
    def hidden(self) -> list[str]:
        """Collectives of the program that never ran in the trace, probably because CUDA graphs hide them."""
        return [name for name, (_, seen) in self.odd_counts.items() if not seen] if self.graph_s else []

    def counts(self, expected: Mapping[str, int], collectives: Sequence[Collective], sweeps: Sequence[Sweep]) -> None:
        """Set `odd_counts` to the collectives that ran more or less often than `expected` in any sweep."""
        if not sweeps or not expected:
            return
        seen = np.stack([s.count[:-1] for s in sweeps])
        for i, collective in enumerate(collectives):
            wanted = expected.get(collective.name)
            if wanted is not None and (seen[:, i] != wanted).any():
                self.odd_counts[collective.name] = (wanted, float(seen[:, i].mean()))


@dataclass(frozen=True)
class LeftOut:
    """A device step that is left out of all other numbers of a trace."""

    step: DeviceStep
    """The step, without its spans."""
    swept: Sweep
    why: Apart


@dataclass(frozen=True)
class Trace:
    """The measured steps of a trace, and notes on what could not be read."""

    timeline: Timeline
    """The steps with their spans; of a large trace, those of the first devices only."""
    steps: Timeline
    """The usual (or chosen) steps of every device; in a large trace, later steps have no spans."""
    sweeps: tuple[Sweep, ...]
    kernels: KernelTotals
    skew: Skew
    facts: Facts
    notes: tuple[Note, ...]
    left_out: tuple[LeftOut, ...] = ()
    """Warm-up steps and outliers, or steps that were not chosen."""
    kernel_s: tuple[np.ndarray, ...] = ()
    """For each of `steps`, [operations] seconds as in `KernelTotals.time_s`; trailing zeros are left out."""

    def incomparable(self, device: str) -> str | None:
        """Return a sentence on why the steps cannot be compared, or None if they can.

        Args:
            device: the word for a device in the sentence.
        """
        if self.facts.whole:
            whole, seconds = next(iter(self.facts.whole.items()))
            return (
                f"No period was found in the operations of {device} {whole}, so its whole trace, "
                f"{format_seconds(seconds)}, counts as one step."
            )
        windows = [swept.total.window_s for swept in self.sweeps]
        short, long = (self.steps.steps[windows.index(at)] for at in (min(windows), max(windows)))
        if max(windows) > _MOST_APART * min(windows) and not self.facts.cpu:
            return (
                f"What counts as one step takes from {format_seconds(min(windows))} ({device} {short.device}, step "
                f"{short.step}) to {format_seconds(max(windows))} ({device} {long.device}, step {long.step})."
            )
        counts = self.facts.kernels
        few, many = (choose(counts, key=lambda d: counts[d]) for choose in (min, max))
        if counts[few] < (1 - MOST_UNMAPPED) * counts[many]:
            return (
                f"{device} {few} has {counts[few]:,.0f} operations a step and {device} {many} has "
                f"{counts[many]:,.0f}: the profiler dropped some, or the two run different parts of the program."
            )
        return None


def read_trace(
    files: Sequence[TraceFile],
    program: TracedProgram,
    *,
    rows: np.ndarray | None = None,
    first_step: int = 0,
    num_steps: int | None = None,
    steps_per_execution: int = 1,
    chosen: Container[int] | None = None,
    operations: MutableMapping[int, Operations] | None = None,
) -> Trace:
    """Return the steps of a program in the traces of its processes.

    Args:
        files: one per process; they are read one after the other.
        rows: [collectives + 1] the report's row of each distinct collective, as for `sweep`; the last is for unmapped
            communication.
        first_step: number of the first step in the trace.
        num_steps: number of executions in the trace, if known, to check their number and to find them without ids.
        steps_per_execution: number of training steps in each execution.
        chosen: numbers of the steps to keep; None keeps all but warm-up and outliers.
        operations: process -> operations of its file, if they were read already; entries are removed as they are used.

    Raises:
        TraceError: the only file cannot be read, or no file has an operation of the program on these devices.
    """
    # If files have no process numbers of their own, each file is a process with its own clock.
    if len({file.process for file in files}) < len(files):
        files = [replace(file, process=i) for i, file in enumerate(files)]
    reader = _Reader(program, rows, num_steps, KEPT_SPANS)
    errors: list[TraceError] = []
    for file in files:
        try:
            reader.read(file, (operations or {}).pop(file.process, None))
        except TraceError as error:
            errors.append(error)
            reader.facts.damaged[file.process] = error.message
    if errors and len(errors) == len(files):
        raise errors[0]
    return reader.trace(first_step, steps_per_execution, chosen)


@dataclass(frozen=True)
class OneStep:
    """The communication of one execution, as the devices of one process saw it."""

    collectives: tuple[Collective, ...]
    steps: list[DeviceStep]
    sweeps: list[Sweep]
    exposed: list[np.ndarray]
    """For each of `steps`, [n, 2] intervals in which a collective runs and nothing computes."""
    instances: Instances


def read_instances(file: TraceFile, program: TracedProgram) -> OneStep:
    """Return the communication of a trace that has a single execution of a program.

    Args:
        program: the program; without its `groups`, `OneStep.exposed` is empty.

    Raises:
        TraceError: the trace cannot be read, or has no execution.
    """
    reader = _Reader(program, None, 1, 0)
    reader.read(file)
    return OneStep(reader.collectives, reader.steps, reader.sweeps, reader.exposed, reader.instances)


class _Reader:
    """Turns files into swept device steps, and counts lost data in `facts`."""

    def __init__(self, program: TracedProgram, rows: np.ndarray | None, num_steps: int | None, kept_spans: int):
        self.program, self.rows, self.num_steps, self.kept_spans = program, rows, num_steps, kept_spans
        self.classifier = Classifier(program)
        self.collectives = self.classifier.collectives
        self.steps: list[DeviceStep] = []
        self.operations: list[int] = []
        self.sweeps: list[Sweep] = []
        self.runs: list[int] = []
        self.exposed: list[np.ndarray] = []  # Per device step: intervals in which a collective runs without compute.
        self.instances = Instances()
        self.kernels: dict[int, KernelTotals] = {}  # Execution -> sums over devices.
        self.kernel_s: list[np.ndarray] = []  # Per device step: seconds of each operation.
        self.seconds: list[dict[str, float]] = []  # Per device step: name of a field of `Facts` -> seconds.
        self.facts = Facts()

    def read(self, file: TraceFile, operations: Operations | None = None) -> None:
        """Add one file, or its `operations` if they were read already; a file that cannot be read adds nothing."""
        operations = operations or (read_nsys(file) if is_nsys(file.path) else read_operations(file))
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
        """Cut the operations of one device into its executions of the program, and sweep each."""
        mine = classes.of_program[ops.label]
        if not mine.any():
            self.facts.missing_devices.append(device)
            return
        start, end, label, run = (  # If all operations belong to the program, the columns are not copied.
            column if mine.all() else column[mine] for column in (ops.start_ps, ops.end_ps, ops.label, ops.run)
        )
        if self.program.found and (run == -1).all():
            windows = found_windows(start, end, label, once)
            if not windows:
                windows = [(float(start[0]), float(end.max()))]
                self.facts.whole[device] = (windows[0][1] - windows[0][0]) * 1e-12
        else:
            windows = step_windows(start, end, label, run, self.num_steps)
        runs, _ = runs_in_order(start, run)
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
        """Return one execution on one device as spans, and add its seconds for `Facts` to `self.seconds`."""
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
        mapped = computes & classes.of_program[label] & ~classes.lost[label]
        seconds = {
            "graph_s": classes.lost[label],
            "copies_s": kind == COPY,
            "own_copies_s": (kind == COPY) & classes.own_copy[label],
            "fused_s": fused,
            "own_s": communicates & ~classes.foreign[label],
            "compute_s": computes,
            "mapped_compute_s": mapped,
        }
        each = spans[:, 1] - spans[:, 0]
        self.seconds.append({name: float(each[which].sum()) for name, which in seconds.items()})
        return step

    def _add(self, step: DeviceStep, run: int, own: np.ndarray, starts_at_s: float) -> None:
        """Sweep a device step, and keep the results; its spans are kept only within the limit `kept_spans`."""
        swept = sweep(step, len(self.collectives), self.rows)
        self.instances.add(step, own, starts_at_s)
        if self.program.groups:  # Without groups, waiting is unknown and the intervals are not needed.
            self.exposed.append(exposed_spans(step) + starts_at_s)
        self._count_communication(step)
        key = step.step if run == -1 else run
        kernels = KernelTotals.measure(step, len(self.classifier.op_names))
        self.kernels[key] = KernelTotals.sum([self.kernels[key], kernels]) if key in self.kernels else kernels
        self.kernel_s.append(kernels.time_s.astype(np.float32))
        spans = len(step.compute) + len(step.communication) + len(step.copies)
        self.kept_spans -= spans
        if self.kept_spans < 0 and self.steps:
            step = _bare(step)
        self.steps.append(step)
        self.operations.append(spans - len(step.copies))
        self.sweeps.append(swept)
        self.runs.append(run)

    def _count_communication(self, step: DeviceStep) -> None:
        each = np.diff(step.communication, axis=1).ravel()
        known = (step.collective >= 0) & (not self.program.kinds)
        on_axes = np.array([bool(c.axes) or c.group_size == 1 for c in self.collectives] + [False])
        seconds = {"communication_s": each, "mapped_s": each[known], "on_axes_s": each[on_axes[step.collective]]}
        self.seconds[-1] |= {name: float(of.sum()) for name, of in seconds.items()}

    def trace(self, first_step: int, each: int, chosen: Container[int] | None) -> Trace:
        executions = _numbers(self.steps, self.runs)
        whole, numbers = _seen_everywhere(self.steps, executions, self.facts), first_step + executions * each
        left_out = self._left_out(numbers, whole, chosen)
        keep = whole & ~np.isin(numbers, [out.step.step for out in left_out])
        skew = measure_skew(self.instances, self.collectives, self.program.groups, self.steps, numbers, keep)
        steps, sweeps, n = [], [], len(self.collectives)
        _, owners, _, starts, ends, _ = (self.instances.split_steps(column) for column in self.instances.columns())
        rows = np.arange(n + 1) if self.rows is None else np.asarray(self.rows)
        for entry in np.flatnonzero(keep).tolist():
            step, swept = replace(self.steps[entry], step=int(numbers[entry])), self.sweeps[entry]
            if skew.transfers:
                transfer, owner = skew.transfers[entry], np.where(owners[entry] < 0, n, owners[entry])
                spans = np.stack([starts[entry], ends[entry]], axis=1)
                waits = exposed_waits(spans, transfer, rows[owner], self.exposed[entry])
                moved, waited = (np.bincount(owner, weights=w, minlength=n + 1) for w in (transfer, waits))
                swept = replace(swept, transfer_s=moved, exposed_wait_s=waited)
                step = replace(step, transfer_s=transfer) if len(step.communication) else step
            steps.append(step)
            sweeps.append(swept)
        self.facts.device_steps = len(steps)
        for name in self.seconds[0]:
            setattr(self.facts, name, sum(s[name] for s, kept in zip(self.seconds, keep) if kept))
        keys = {self.steps[i].step if self.runs[i] == -1 else self.runs[i] for i in np.flatnonzero(keep).tolist()}
        kernels = KernelTotals.sum(self.kernels[key] for key in keys).mean_over(len(steps))
        every = Timeline(tuple(steps), self.collectives, tuple(self.classifier.op_names))
        drawn = replace(every, steps=tuple(s for s in steps if len(s.compute) or len(s.communication)) or every.steps)
        self.facts.counts(self.program.expected, self.collectives, sweeps)
        self.facts.step_s = float(np.median([swept.total.window_s for swept in sweeps]))
        for device in {step.device for step in steps}:
            counts = [n for step, n, kept in zip(self.steps, self.operations, keep) if step.device == device and kept]
            self.facts.kernels[device] = sum(counts) / len(counts)
        kernel_s = tuple(self.kernel_s[i] for i in np.flatnonzero(keep).tolist())
        notes = (*_apart(left_out, self.facts.step_s), *notes_of(self.facts, skew))
        return Trace(drawn, every, tuple(sweeps), kernels, skew, self.facts, notes, left_out, kernel_s)

    def _left_out(self, numbers: np.ndarray, whole: np.ndarray, chosen: Container[int] | None) -> tuple[LeftOut, ...]:
        """Return the device steps that are unusual or not chosen.

        Raises:
            TraceError: no step remains.
        """
        windows: dict[int, list[float]] = {}
        for entry in np.flatnonzero(whole).tolist():
            windows.setdefault(int(numbers[entry]), []).append(self.sweeps[entry].total.window_s)
        why: dict[int, Apart] = {}
        if chosen is not None:
            why = {number: "not chosen" for number in windows if number not in chosen}
        elif not self.facts.cpu:  # Virtual CPU devices share the CPUs, so their step times vary without reason.
            why = unusual({number: sum(of) / len(of) for number, of in windows.items()})
        if len(why) == len(windows):
            raise TraceError(f"no step is chosen of the {len(windows)} in the trace.", hint=f"steps of {some(windows)}")
        entries = ((i, int(numbers[i])) for i in np.flatnonzero(whole).tolist())
        return tuple(
            LeftOut(_bare(replace(self.steps[i], step=n)), self.sweeps[i], why[n]) for i, n in entries if n in why
        )


def unusual(times_s: Mapping[int, float]) -> dict[int, Apart]:
    """Return number -> reason for the unusual steps; of fewer than three steps, none is unusual.

    An outlier takes more than 1.5 x the median. Warm-up steps are the first steps, at most half of all, that take
    longer than the longest later usual step; the difference is at least 2 % of the median, and at least the range of
    the later usual steps. If more than a quarter of the steps, and more than one, are outliers, the usual time is
    unknown: then all steps count as usual.
    """
    order = sorted(times_s)
    if len(order) < 3:
        return {}
    usual_s = float(np.median(list(times_s.values())))
    late = {n for n in order if times_s[n] > _OUTLIER * usual_s}
    found: dict[int, Apart] = {}
    for i, number in enumerate(order[: len(order) // 2]):
        later = [times_s[n] for n in order[i + 1 :] if n not in late]
        if times_s[number] < max(later) + max(_WARM_UP * usual_s, max(later) - min(later)):
            break
        found[number] = "warm-up"
    for number in late - found.keys():
        found[number] = "outlier"
    return found if sum(why == "outlier" for why in found.values()) <= max(1, len(order) // 4) else {}


def _apart(left_out: Sequence[LeftOut], usual_s: float) -> Iterator[Note]:
    times: dict[tuple[int, Apart], list[float]] = {}
    for out in left_out:
        times.setdefault((out.step.step, out.why), []).append(out.swept.total.window_s)
    if not times:
        return
    listed = [f"{n} ({format_seconds(sum(of) / len(of))}, {why})" for (n, why), of in sorted(times.items())]
    more = f" and {len(listed) - 4} more" if len(listed) > 4 else ""
    yield Note(
        "steps_left_out",
        f"Steps left out of all numbers: {', '.join(listed[:4])}{more}; the others take {format_seconds(usual_s)}. "
        "--steps all keeps every step.",
    )


def _not_the_program(file: TraceFile, program: TracedProgram, labels: Sequence) -> TraceError:
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


def _bare(step: DeviceStep) -> DeviceStep:
    empty = {"compute": _NO_SPANS, "communication": _NO_SPANS, "copies": _NO_SPANS}
    return replace(step, **empty, compute_op=_NO_INDEX, collective=_NO_INDEX)


def _numbers(steps: Sequence[DeviceStep], runs: Sequence[int]) -> np.ndarray:
    """Return [entries] the number of each device step's execution, from the runtime's ids if all steps have one."""
    numbers = np.array([step.step for step in steps], np.int64)
    if -1 in runs:
        return numbers
    earliest: dict[int, int] = {}
    for run, number in zip(runs, numbers.tolist()):
        earliest[run] = max(earliest.get(run, number), number)
    order = {run: i for i, run in enumerate(sorted(earliest, key=lambda r: (earliest[r], r)))}
    return np.array([order[run] for run in runs], np.int64)


def _seen_everywhere(steps: Sequence[DeviceStep], numbers: np.ndarray, facts: Facts) -> np.ndarray:
    """Return [entries] whether each device step's execution was seen whole on every device that has executions."""
    devices = np.array([step.device for step in steps], np.int64)
    seen = Counter(numbers.tolist())
    everywhere = [number for number, count in seen.items() if count == len(set(devices.tolist()))]
    if not everywhere:
        raise TraceError(
            "no execution of the program was seen on all devices.",
            hint="capturing again: the traces are of different steps, or have lost most of their events",
        )
    facts.partial_steps = len(seen) - len(everywhere)
    return np.isin(numbers, everywhere)


def notes_of(facts: Facts, skew: Skew) -> Iterator[Note]:
    """Yield a note on each problem in the facts."""
    each = max(1, facts.device_steps)
    if facts.graph_s:
        hidden = ""
        if facts.hidden:
            hidden = f" {len(facts.hidden)} collectives of the program were not seen, so their time counts as compute."
        yield Note(
            "command_buffers",
            "Kernels ran inside CUDA graphs, where the trace does not say which instruction they belong to; capture "
            f"with XLA_FLAGS={COMMAND_BUFFERS_FLAG} to see them by axis (which changes the step time a little)."
            f"{hidden}",
            facts.graph_s / each,
        )
    share = facts.kernels_mapped_share
    if share is not None and 1 - share > MOST_UNMAPPED:
        message = f"{format_percent(1 - share)} of the compute belongs to no instruction of the program."
        yield Note("unmapped_kernels", message, (facts.compute_s - facts.mapped_compute_s) / each)
    if facts.fused_s:
        message = "Kernels that compute and communicate at once count as both, and their communication as overlapped."
        yield Note("fused_kernels", message, facts.fused_s / each)
    yield from _lost(facts)
    yield from _executions(facts)
    yield from _shifted(facts, skew)
    clocks, wait_s = skew.clocks, skew.median_wait_s
    if clocks is not None and clocks.residual_s is not None and skew.method != "clocked" and wait_s is not None:
        message = (
            f"The clocks of {clocks.count} processes only agree to {format_seconds(clocks.residual_s)}, against a "
            f"median wait of {format_seconds(wait_s)}: the shortest duration, not the start times, measures waiting."
        )
        yield Note("clocks", message)


def _shifted(facts: Facts, skew: Skew) -> Iterator[Note]:
    """Yield a note on processes whose times are whole steps apart: clocks agree better, so they traced other steps."""
    clocks = skew.clocks
    if clocks is None or not clocks.from_epoch or not facts.step_s:
        return
    usual = np.sort(clocks.offset_s)[(clocks.count - 1) // 2]  # The lower median: the offset of one process.
    steps = (clocks.offset_s - usual) / facts.step_s
    shifted = {int(p): round(k) for p, k in zip(clocks.process, steps.tolist()) if round(k) and abs(k - round(k)) < 0.1}
    if shifted:
        process, by = next(iter(shifted.items()))
        yield Note(
            "shifted_steps",
            f"The traces of processes {some(shifted)} are shifted against the others: what is counted as one step "
            f"began {format_seconds(abs(by) * facts.step_s)} {'later' if by > 0 else 'earlier'} in process {process}, "
            f"{abs(by)} x the step. Waiting and stragglers mix different steps; capture the same steps everywhere.",
        )


def _lost(facts: Facts) -> Iterator[Note]:
    if facts.dropped:
        message = f"The profiler dropped {facts.dropped} events: these numbers lack their seconds."
        yield Note("dropped_events", message)
    usual = float(np.median(list(facts.kernels.values()))) if facts.kernels else 0.0
    if fewer := {d: n for d, n in facts.kernels.items() if n < (1 - MOST_UNMAPPED) * usual}:
        device = min(fewer, key=lambda d: fewer[d])
        yield Note(
            "fewer_kernels",
            f"Devices {some(fewer)} have fewer operations a step than the others (device {device}: "
            f"{fewer[device]:,.0f}, the median {usual:,.0f}): the profiler dropped some, or they run another part "
            "of the program.",
        )
    if facts.discarded:
        message = f"{facts.discarded} events have impossible times and were left out: the trace is damaged."
        yield Note("discarded_events", message)
    if facts.messages:
        yield Note("profiler_messages", f"The profiler says: {'; '.join(dict.fromkeys(facts.messages))[:500]}")
    if facts.damaged:
        first, reason = next(iter(facts.damaged.items()))
        yield Note(
            "damaged_traces",
            f"The traces of {len(facts.damaged)} processes cannot be used ({some(facts.damaged)}); process {first}: "
            f"{reason}",
        )


def _executions(facts: Facts) -> Iterator[Note]:
    if facts.namesakes > 1:
        message = f"{facts.namesakes} programs of the same name ran in the trace, and the steps may mix them."
        yield Note("namesakes", message)
    if facts.missing_devices:
        message = f"Devices {some(facts.missing_devices)} have no operation of the program in their trace."
        yield Note("missing_devices", message)
    if facts.whole:
        yield Note(
            "no_steps",
            f"No period was found in the operations of devices {some(facts.whole)}: the whole trace counts as one "
            "step. At least three traced steps, or the program's HLO beside the trace, would show the steps.",
        )
    if facts.odd_executions:
        device, seen = next(iter(facts.odd_executions.items()))
        yield Note(
            "executions",
            f"{len(facts.odd_executions)} devices have another number of executions than the capture (device "
            f"{device}: {seen}): events are missing, or the program also ran outside the steps.",
        )
    if facts.partial_steps:
        message = f"{facts.partial_steps} executions were not seen on every device and are left out."
        yield Note("partial_steps", message)
    if facts.odd_counts:
        name, (wanted, found) = next(iter(facts.odd_counts.items()))
        yield Note(
            "collective_counts",
            f"{len(facts.odd_counts)} collectives ran more or less often than the program says ({name}: {found:g} a "
            f"step in place of {wanted}): events are missing, or one collective is several kernels.",
        )


def some(values: Iterable[int]) -> str:
    """Return the eight smallest of some numbers, as text."""
    listed = sorted(values)
    return ", ".join(map(str, listed[:8])) + (", ..." if len(listed) > 8 else "")
