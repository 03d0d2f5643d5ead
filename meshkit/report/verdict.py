"""Explain a measured step: findings, ranked by the seconds that a fix saves, and a verdict of a few sentences.

report, trace, program -> causes, each with its seconds -> findings, most seconds first -> verdict

The trace reader has already left out warm-up steps and outliers. To compute the saving of a fix, one execution is
replayed on all of its devices. Each device runs its own work and its collectives in order. The members of a group leave
a collective together, when the last member has arrived and the data has moved. The replay needs no common clock,
because the last member is the one that did not wait. If a device arrives earlier at a collective, the step becomes
shorter only by the time of the collective that was exposed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from meshkit.config.cluster import Cluster
from meshkit.hlo.instructions import InstructionInfo
from meshkit.hlo.schedule import Schedule
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.pricing import Pricer
from meshkit.report import causes
from meshkit.report.causes import ExaminedReport, Fix, finding
from meshkit.report.schema import CommunicationPart, FindingPart, HistoryPart, Report
from meshkit.timeline import DeviceStep, exposed_spans
from meshkit.trace.operations import TracedProgram
from meshkit.trace.reader import Trace
from meshkit.units import format_bytes, format_percent, format_seconds

_LOW_RATE = 2.0  # A kernel has a low rate if it takes more than this multiple of the model's seconds.
_PART = {  # Code of a finding -> the part of the step that its cause lengthens.
    **dict.fromkeys(
        (causes.WAITING, "slow_link", "small_collectives", "synchronous_collectives", "serialized_by_xla",
         "exposed_communication"), "exposed communication",
    ),
    "host_bound": "idle",
    "input_wait": "idle",
}  # fmt: skip
_TILES = "shapes that tile (multiples of 128), and the precision of the operands"
_FEW_LARGE = "fewer and larger kernels: what is stacked or scanned over, and what keeps XLA from fusing it"
_LAYOUT = "the layout and precision of what it reads and writes, and what XLA fuses with it"
_LAUNCH_S = 1e-5  # If the mean run of kernels is shorter, launches dominate their time.
_HIDES = "xla_gpu_enable_latency_hiding_scheduler"
_ASYNC_OFF = "xla_gpu_disable_async_collectives"


@dataclass(frozen=True)
class Known:
    """A trace, its program and known facts about the run, as input of a verdict."""

    trace: Trace
    program: TracedProgram
    schedule: Schedule | None = None
    instructions: Mapping[str, InstructionInfo] = field(default_factory=dict)
    cluster: Cluster | None = None
    options: Mapping[str, Any] | None = None
    untraced_step_s: float | None = None
    """Median step time of the same run without the capture, if known."""
    steps_per_execution: int = 1
    gpu: Cluster | None = None
    """A cluster of one GPU of the traced kind, which is used if `cluster` is None."""


def add_findings(report: Report, known: Known, history: HistoryPart | None = None) -> Report:
    """Return the report with its findings and its verdict.

    If the step has no time, or the trace no steps, the report is returned unchanged. If the steps cannot be compared,
    there are no findings, and the verdict gives the reason.
    """
    if not report.step.time_s or not known.trace.sweeps:
        return report
    case = _MeasuredCase(report, known, history)
    if reason := known.trace.incomparable(case.device):
        return report.model_copy(update={"verdict": f"No verdict: {reason}"})
    findings = causes.rank_findings(case, _CAUSES)
    return report.model_copy(update={"findings": findings, "verdict": _verdict(case, findings)})


class _MeasuredCase(ExaminedReport):
    """A measured report, its trace and its history; the steps are the usual ones, without warm-up and outliers."""

    def __init__(self, report: Report, known: Known, history: HistoryPart | None):
        self.known, self.history = known, history
        self.cpu, self.instructions = known.trace.facts.cpu, known.instructions
        self.outliers = [s for s in report.per_step or () if s.left_out == "outlier"]
        self.usual = "usual " if self.outliers else ""
        super().__init__(report, known.cluster, known.trace.timeline.collectives)

    @cached_property
    def _median(self) -> Replay:
        return Replay(self.known.trace, self.known.program)

    @cached_property
    def _every(self) -> list[Replay]:
        """Replays of all steps, since a device may be late only in some steps; empty if the steps are too large."""
        trace = self.known.trace
        numbers = sorted({step.step for step in trace.timeline.steps})
        small = sum(len(step.communication) for step in trace.timeline.steps) <= _MOST_SPANS
        return [Replay(trace, self.known.program, at) for at in numbers] if small else []

    def time_with(self, fix: Fix) -> float | None:
        replays = self._every if fix.evenly else []
        ratios = [replay.ratio(fix) for replay in replays or [self._median]]
        known = [ratio for ratio in ratios if ratio is not None]
        return statistics.fmean(known) * self.time_s if known else None


def _capture_overhead(case: _MeasuredCase) -> Iterator[FindingPart]:
    quality = case.report.quality
    added_s = quality.overhead_s if quality else None
    untraced_s = case.known.untraced_step_s
    if added_s is None or added_s <= 0:
        return
    without = f": without a trace it takes {format_seconds(untraced_s)}" if untraced_s else ""
    yield finding(
        case,
        "capture_overhead",
        added_s,
        f"The capture itself adds {format_seconds(added_s)} to a step{without}.",
        evidence=("quality.overhead_s",),
        hint="fewer captured steps, no Python tracer (python_tracer_level=0), and the step times of metrics.jsonl",
        step_s=untraced_s,
    )


def _outlier_steps(case: _MeasuredCase) -> Iterator[FindingPart]:
    if not case.outliers:
        return
    worst, usual = max(case.outliers, key=lambda s: s.time_s), case.report.window.steps
    lost_s = sum(s.time_s - case.time_s for s in case.outliers) * case.known.steps_per_execution
    mean_s = case.time_s + lost_s / (usual + len(case.outliers) * case.known.steps_per_execution)
    parts = {"compute": worst.compute_s - (case.step.compute_s or 0), "exposed communication": worst.exposed_s
             - (case.step.exposed_s or 0), "idle time": worst.idle_s - (case.step.idle_s or 0)}  # fmt: skip
    most = max(parts, key=lambda name: parts[name])
    yield finding(
        case,
        "outlier_steps",
        mean_s - case.time_s,
        f"Step {worst.step} takes {format_seconds(worst.time_s)}, the usual one "
        f"{format_seconds(case.time_s)}; most of the difference is {most}. No other number includes it.",
        evidence=("per_step",),
        hint="what runs at that step (checkpoint, evaluation, a recompile, garbage collection), or another capture",
        step_s=case.time_s,
        of_s=mean_s,
    )


def _exposed(case: _MeasuredCase) -> Iterator[FindingPart]:
    blocking, adjacent = _schedules(case.known.schedule)
    gpu, off = not case.cpu, (case.known.options or {}).get(_ASYNC_OFF)
    for i, (_, _, rest) in case.shares.items():
        row = case.rows[i]
        exposed = {op.name: op.exposed_s or 0.0 for op in row.ops}
        total = sum(exposed.values())
        of = {
            "synchronous_collectives": sum(s for name, s in exposed.items() if gpu and name in blocking),
            "serialized_by_xla": sum(s for name, s in exposed.items() if gpu and name in adjacent),
        }
        shared = {code: rest * s / total if total else 0.0 for code, s in of.items()}
        shared["exposed_communication"] = rest - sum(shared.values())
        evidence = (f"communication.{i}.exposed_s",)
        least_s = causes.LEAST * case.time_s
        hidden = case.time_with(Fix(hidden=case.members(row))) if rest >= least_s and row.ops else None
        for code, seconds in shared.items():
            if seconds < least_s:
                continue
            what = (
                f"{causes.describe_row(row)}{causes.source_text(row)} is exposed for {format_seconds(seconds)} a step"
            )
            message, hint, warns = _reason(code, what, off, row)
            hint = causes.OVERLAP_MORE_CPU if case.cpu else hint
            yield finding(case, code, seconds, message, warns=warns, evidence=evidence, hint=hint, step_s=hidden)


def _reason(code: str, what: str, off: Any, row: CommunicationPart) -> tuple[str, str, float]:
    """Return message and hint of a finding about exposed communication, and the share from which it is a warning."""
    if code == "synchronous_collectives":
        said = f" ({_ASYNC_OFF} = {off})" if off else ""
        hint = f"[xla] without {_ASYNC_OFF}" if off else f"[xla] {_HIDES} = true"
        return f"{what}: XLA compiled it as synchronous{said}, so no compute can overlap it.", hint, causes.WARNS
    if code == "serialized_by_xla":
        message = f"{what}: XLA waits for it right after its start, so no compute overlaps it."
        loops = f", and xla_gpu_pipeline_{(row.collective or '').replace('-', '_')} in a loop over layers"
        loops = loops if row.collective in list(causes.COMBINED)[:3] else ""
        return message, f"[xla] {_HIDES} = true{loops}", causes.WARNS
    message = f"{what}, because no compute overlaps it."
    return message, causes.OVERLAP_MORE, causes.EXPOSED_WARNS


def _schedules(schedule: Schedule | None) -> tuple[set[str], set[str]]:
    """Return the names of synchronous collectives, and of asynchronous ones with no work between start and done."""
    blocking, adjacent = set(), set()
    for body in schedule.computations.values() if schedule else ():
        open_: dict[str, bool] = {}  # Name of a collective's start -> whether other work was scheduled after it.
        names = {i.name: i.collective.name for i in body if i.collective is not None}
        for i in body:
            if i.kind == "collective" and i.collective is not None:
                blocking.add(i.collective.name)
            elif i.kind == "start":
                open_[i.name] = False
            elif i.kind == "done" and i.starts in open_:
                if not open_.pop(i.starts):
                    adjacent.add(names.get(i.starts, i.starts))
            elif i.kind in ("kernel", "while", "conditional", "call"):
                open_ = dict.fromkeys(open_, True)
    return blocking, adjacent


def _idle(case: _MeasuredCase) -> Iterator[FindingPart]:
    step = case.step
    input_s, between_s, inside_s = step.idle_input_s or 0.0, step.idle_between_s or 0.0, step.idle_inside_s or 0.0
    waited = [w for w in (case.history.values.get("data_wait_s", ()) if case.history else ()) if w is not None]
    # The trainer measures on the host how long it waits for data: that part of the idle time is waiting for input.
    known_s = min(between_s, statistics.median(waited)) if waited else 0.0
    input_s, between_s = input_s + known_s, between_s - known_s
    yield finding(
        case,
        "input_wait",
        input_s,
        f"The step waits {format_seconds(input_s)} for its input: the {case.device} is idle until the batch "
        "arrives from the host.",
        evidence=("history.values.data_wait_s",) if known_s else ("step.idle_input_s",),
        hint="more workers or a deeper prefetch in [data], batches put on the devices a step ahead",
        step_s=case.time_s - input_s,
    )
    where = [(between_s, "between steps"), (inside_s, "between kernels")]
    most = [(s, name) for s, name in sorted(where, reverse=True) if s > 0.1 * (between_s + inside_s)]
    listed = " and ".join(f"{format_seconds(s)} {name}" for s, name in most)
    hint = "reading the loss less often, logging and checkpoints off the path of the step (dispatch runs ahead)"
    if inside_s > between_s:
        hint = "fewer and larger kernels, a less busy host"
        if not (case.cpu or case.known.trace.facts.graphs):
            hint = f"CUDA graphs (--xla_gpu_enable_command_buffer not empty), {hint}"
    yield finding(
        case,
        "host_bound",
        between_s + inside_s,
        f"The {case.device} is idle {listed}: the host is too slow to give it work.",
        evidence=("step.idle_between_s", "step.idle_inside_s"),
        hint=hint,
        step_s=case.time_s - between_s - inside_s,
    )


def _copies(case: _MeasuredCase) -> Iterator[FindingPart]:
    seconds, facts = case.step.other_s or 0.0, case.known.trace.facts
    own = facts.own_copies_s > 0.5 * facts.copies_s
    hint = "starting copies between host and device (offloading, input, checkpoints) before they are needed"
    hint = causes.NO_LOOP if own else hint
    yield finding(
        case,
        "exposed_copies",
        seconds,
        f"Memory copies{f' on the {case.device}' if own else ''} take {format_seconds(seconds)} a step, and nothing "
        "overlaps them.",
        evidence=("step.other_s",),
        hint=hint,
        step_s=case.time_s - seconds,
    )


def _recomputation(case: _MeasuredCase) -> Iterator[FindingPart]:
    trace, each = case.known.trace, case.known.steps_per_execution
    seconds, known = 0.0, case.known.instructions
    for name, s in zip(trace.timeline.op_names, trace.kernels.time_s.tolist()):
        seconds += s / each if causes.recomputes(name, known.get(name)) else 0.0
    memory = case.report.memory
    room = f", and {format_bytes(memory.margin_bytes)} are free" if (memory.margin_bytes or 0) > 0 else ""
    share = seconds / case.step.compute_s if case.step.compute_s else 0.0
    yield finding(
        case,
        "recomputation",
        seconds,
        f"{format_percent(share)} of the compute, {format_seconds(seconds)} a step, recomputes the forward pass{room}.",
        evidence=("kernels",),
        hint=causes.KEEP_MORE,
        step_s=case.time_s - seconds,
    )


def _low_rate(case: _MeasuredCase) -> Iterator[FindingPart]:
    cluster, schedule, trace = case.known.cluster or case.known.gpu, case.known.schedule, case.known.trace
    if cluster is None or cluster.is_cpu or schedule is None:
        return
    pricer = Pricer(cluster, Assumptions(contention=False, slowest=False))
    work = {i.name: i for body in schedule.computations.values() for i in body if i.cost is not None}
    runs, slow, run_s, ran = schedule.known_runs(), [], 0.0, 0
    kernels = zip(trace.timeline.op_names, *(v.tolist() for v in (trace.kernels.time_s, trace.kernels.busy_s,
                                                                  trace.kernels.count)))  # fmt: skip
    for name, time_s, busy_s, count in kernels:
        instruction = work.get(name)
        if instruction is None or not count:
            continue
        should_s = pricer.work(instruction).alone_s * min(count, runs.get(name, count))
        if should_s and busy_s > _LOW_RATE * should_s:
            slow.append((time_s * (1 - should_s / busy_s), name, busy_s / should_s))
            run_s, ran = run_s + busy_s, ran + count
    if not slow:
        return
    seconds = sum(s for s, *_ in slow) / case.known.steps_per_execution
    _, worst, times = max(slow)
    info = case.known.instructions.get(worst)
    where = f" ({info.line})" if info and info.line else ""
    tiles = info is not None and info.kind in ("matmul", "attention")
    hint = _FEW_LARGE if run_s < _LAUNCH_S * ran else _TILES if tiles else _LAYOUT
    yield finding(
        case,
        "low_rate_kernels",
        seconds,
        f"{len(slow)} kernels run at less than half of their expected rate on {cluster.gpu.name}, which costs "
        f"{format_seconds(seconds)} a step; {worst}{where} takes {times:.1f} x as long as expected.",
        evidence=("kernels",),
        hint=causes.scatter_hint(worst, info) or hint,
        step_s=case.time_s - seconds,
    )


_CAUSES = (
    _capture_overhead, _outlier_steps, causes.waiting, causes.slow_link, causes.small_collectives, _exposed, _idle,
    _copies, _recomputation, _low_rate,
)  # fmt: skip


def _verdict(case: _MeasuredCase, findings: Sequence[FindingPart]) -> str:
    step, time_s = case.step, case.time_s
    totals = {"exposed communication": step.exposed_s or 0.0, "idle": step.idle_s or 0.0}
    bad = [f for f in findings if f.severity == "warning"]
    if not bad:
        copies = {"memory copies": step.other_s or 0.0} if (step.other_s or 0.0) > 0.01 * time_s else {}
        parts = {"compute": step.compute_s or 0.0} | totals | copies
        said = ", ".join(f"{format_percent(s / time_s)} {name}" for name, s in parts.items())
        return f"Nothing stands out in a step of {format_seconds(time_s)}: {said}."
    parts_of: dict[str, list[FindingPart]] = {}
    for f in bad:
        parts_of.setdefault(_PART.get(f.code, f.code), []).append(f)
    ranked = sorted(parts_of.items(), key=lambda item: -sum(f.seconds or 0.0 for f in item[1]))
    sentences = []
    for part, members in ranked[:2]:
        if part in totals:
            sentences.append(case.share(totals[part], part, first=not sentences))
        sentences += [f.message for f in members[: 2 if len(ranked) == 1 else 1]]
    first = ranked[0][1][0]
    told = first.code == "capture_overhead"  # The message of this finding already has the step time without it.
    if not told and first.step_s is not None and first.step_s < 0.995 * case.time_s:
        without = (
            f"If no {case.device} were slower than the median," if first.code == causes.WAITING else "Without that,"
        )
        without += f" the step would take {format_seconds(first.step_s)}."
        sentences.insert(2 if ranked[0][0] in totals else 1, without)
    return " ".join(sentences)


_MOST_SPANS = 50_000  # Limit on spans of communication in a replay, which takes some microseconds per span.
_END = (-2, 0)  # The key of the end of a step, where a collective's key is (collective, occurrence).


@dataclass(frozen=True)
class _Member:
    device: int
    before_s: float
    """Seconds of the device's own work (no exposed communication) before it reached the collective."""
    wait_s: float
    transfer_s: float
    exposed_s: float


class Replay:
    """Replays one step of a trace with a change.

    Args:
        at: number of the step; None takes the median step among those that every device in `trace.timeline` has.
    """

    def __init__(self, trace: Trace, program: TracedProgram, at: int | None = None):
        whole: dict[int, list[DeviceStep]] = {}
        for step in trace.timeline.steps:
            whole.setdefault(step.step, []).append(step)
        most = max(map(len, whole.values()), default=0)
        times = sorted(
            (statistics.fmean(s.window[1] - s.window[0] for s in steps), number)
            for number, steps in whole.items()
            if len(steps) == most and at in (None, number)
        )
        self._steps = whole[times[(len(times) - 1) // 2][1]] if times else []
        if sum(len(s.communication) for s in self._steps) > _MOST_SPANS:
            self._steps = []
        self._own_s: dict[int, float] = {}  # Device -> seconds of its own work, without exposed communication.
        found: dict[tuple[int, int, int], list[_Member]] = {}
        starts: dict[tuple[int, int, int], float] = {}
        names = [c.name for c in trace.timeline.collectives]
        for step in self._steps:
            group = {
                c: _group_of(program, names[c] if c >= 0 else "", step.device)
                for c in np.unique(step.collective).tolist()
            }
            for key, start, member in self._members(step):
                one = (*key, group[key[0]])
                found.setdefault(one, []).append(member)
                starts.setdefault(one, start)
        self._instances = [(key[:2], found[key]) for key in sorted(found, key=starts.__getitem__)]
        self._more_s = self._more_than_the_median()

    def _members(self, step: DeviceStep):
        """Yield (collective, occurrence), start and `_Member` of each of a device's collectives, sorted by start."""
        exposed = exposed_spans(step)
        edges = np.r_[0.0, exposed.ravel()]
        seconds = np.r_[0.0, np.stack([np.zeros(len(exposed)), np.diff(exposed, axis=1).ravel()], 1).ravel()].cumsum()
        order = np.argsort(step.communication[:, 0], kind="stable")
        start, end = step.communication[order].T
        self._own_s[step.device] = step.window[1] - step.window[0] - float(seconds[-1])
        moved = end - start if step.transfer_s is None else np.asarray(step.transfer_s)[order]
        moved = np.where(np.isnan(moved), end - start, np.minimum(moved, end - start))
        reach = np.r_[0.0, np.maximum.accumulate(end)[:-1]] if len(end) else end
        alone = np.maximum(start, reach), np.minimum(end, np.r_[start[1:], np.inf]) if len(end) else end
        sole = np.maximum(0.0, np.interp(alone[1], edges, seconds) - np.interp(alone[0], edges, seconds))
        before = start - np.interp(start, edges, seconds)
        times: dict[int, int] = {}
        for i, c in enumerate(step.collective[order].tolist()):
            times[c] = times.get(c, -1) + 1
            member = _Member(step.device, float(before[i]), float(end[i] - start[i] - moved[i]), float(moved[i]),
                             float(sole[i]))  # fmt: skip
            yield (c, times[c]), float(start[i]), member

    def _more_than_the_median(self) -> dict[tuple[int, int], dict[int, float]]:
        """Return the seconds by which each device exceeds the median device's work, up to each collective and the end.

        The stretches between two collectives are compared one by one, and only excesses are added up: a device that is
        slower in one stretch and faster in another counts as late.
        """
        came: dict[tuple[int, int], dict[int, float]] = {}
        for key, members in self._instances:
            came.setdefault(key, {}).update((m.device, m.before_s) for m in members)
        before_s, more_s = dict.fromkeys(self._own_s, 0.0), dict.fromkeys(self._own_s, 0.0)
        found = {}
        for key, own_s in [*came.items(), (_END, self._own_s)]:
            stretch = {d: max(0.0, s - before_s[d]) for d, s in own_s.items()}
            usual = statistics.median_low(stretch.values()) if stretch else 0.0
            found[key] = {d: more_s[d] + max(0.0, s - usual) for d, s in stretch.items()}
            more_s |= found[key]
            before_s |= {d: before_s[d] + s for d, s in stretch.items()}
        return found

    def ratio(self, fix: Fix) -> float | None:
        """Return (step time with the change) / (measured step time), over all devices; None if there is no replay."""
        if not self._steps:
            return None
        saved = dict.fromkeys(self._own_s, 0.0)
        less = dict.fromkeys(self._own_s, 0.0)
        for key, members in self._instances:
            collective = key[0]
            if fix.evenly:
                less |= self._more_s[key]
            if collective in fix.hidden:
                for m in members:
                    saved[m.device] += m.exposed_s
                continue
            share = fix.transfer.get(collective, 1.0)
            early = {m.device: saved[m.device] + less[m.device] for m in members}
            alone = len(members) == 1  # Either the group has one member, or the other members were not seen.
            # Times are relative to the arrival of the last member in the measured step.
            ready = max((0.0 if alone else -m.wait_s) - early[m.device] for m in members)
            for m in members:
                gain = m.transfer_s * (1 - share) - early[m.device] - ready
                saved[m.device] += min(gain, m.exposed_s) if gain > 0 or m.exposed_s else 0.0
        less = self._more_s[_END] if fix.evenly else less
        measured = sum(s.window[1] - s.window[0] for s in self._steps)
        return 1 - sum(saved[d] + less[d] for d in saved) / measured if measured else None


def _group_of(program: TracedProgram, name: str, device: int) -> int:
    """Return the index of a device's group in a collective; -1 - device if it is unknown, or for a permute."""
    groups = program.groups.get(name)
    if groups is None or program.collectives[name].collective == "collective-permute":
        return -1 - device
    rows = np.flatnonzero((groups == device).any(axis=1))
    return int(rows[0]) if len(rows) else -1 - device
