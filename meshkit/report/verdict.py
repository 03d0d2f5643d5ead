"""Why a measured step takes as long as it does: findings by what they cost, and a verdict in a few sentences.

report, trace, program -> causes, each with its seconds -> findings, the most seconds first -> verdict

The exposed time of a row of communication is divided among its causes: waiting for peers first, then what a faster link
or fewer messages would save, then why nothing hides the rest. A cause that cannot be told from what is known is not
named. Where a few steps are outliers, all others are judged by the usual ones.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from meshkit.config.cluster import Cluster
from meshkit.hlo.instructions import InstructionInfo
from meshkit.hlo.schedule import Collective, Schedule
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.network import collective_time_s
from meshkit.predict.pricing import Pricer
from meshkit.report.rows import combined_text, communication_rows, group_rows
from meshkit.report.schema import CommunicationPart, FindingPart, HistoryPart, Report
from meshkit.report.summarize import step_part
from meshkit.report.what_if import Mended, Replay
from meshkit.trace.operations import TracedProgram
from meshkit.trace.reader import Trace
from meshkit.units import format_bytes, format_percent, format_rate, format_seconds

LEAST, WARNS = 0.005, 0.05  # shares of the step from which a cause is named, and is a warning
EXPOSED_WARNS = 0.1  # the same, of exposed communication of which nothing is wrong but that it is exposed
_OUTLIER = 1.5  # x the median step
_SLOW = 1.5  # x the model's seconds, of a collective; its error is below that where it was tested
_LOW_RATE = 2.0  # x the model's seconds, of a kernel
_SMALL_BYTES, _MANY = 2**20, 8  # messages that are latency more than data, and how many of them are worth combining
_UNEVEN = 1.03  # x the median device's compute
_RECOMPUTED = re.compile(r"rematted_computation|(?:^|/)remat[^/]*/.*transpose|\.remat\d*(?:\.\d+)*$")
_COMBINED = {
    "all-reduce": "xla_gpu_all_reduce_combine_threshold_bytes",
    "all-gather": "xla_gpu_all_gather_combine_threshold_bytes",
    "reduce-scatter": "xla_gpu_reduce_scatter_combine_threshold_bytes",
    "collective-permute": "xla_gpu_collective_permute_combine_threshold_bytes",
}
_PART = {  # of the step, which a cause takes from
    **dict.fromkeys(
        ("waiting_for_peers", "slow_link", "small_collectives", "synchronous_collectives", "serialized_by_xla",
         "exposed_communication"), "exposed communication",
    ),
    "host_bound": "idle",
    "input_wait": "idle",
}  # fmt: skip
_HIDES = "xla_gpu_enable_latency_hiding_scheduler"
_ASYNC_OFF = "xla_gpu_disable_async_collectives"


@dataclass(frozen=True)
class Known:
    """What is known of a trace beside its report."""

    trace: Trace
    program: TracedProgram
    schedule: Schedule | None = None
    instructions: Mapping[str, InstructionInfo] = field(default_factory=dict)
    cluster: Cluster | None = None
    options: Mapping[str, Any] | None = None  # of the compiler
    untraced_step_s: float | None = None  # a step of the same run without the capture
    steps_per_execution: int = 1


def judged(report: Report, known: Known, history: HistoryPart | None = None) -> Report:
    """The report with its findings and its verdict."""
    if not report.step.time_s or not known.trace.sweeps:
        return report
    case = JudgedReport(report, known, history)
    every = [finding for cause in _CAUSES for finding in cause(case)]
    worth = [f for f in every if (f.seconds or 0.0) >= LEAST * case.time_s]
    findings = tuple(sorted(worth, key=lambda f: -(f.seconds or 0.0)))
    return report.model_copy(update={"findings": findings, "verdict": _verdict(case, findings)})


class JudgedReport:
    """A report as its causes look at it: of the usual steps."""

    lost, waited = "exposed communication", "exposed_wait_s"  # what waiting is a part of, and where that stands

    def __init__(self, report: Report, known: Known, history: HistoryPart | None):
        self.known, self.history = known, history
        self.mean_s = report.step.time_s or 0.0
        self.outliers, self.report = (), report
        samples = report.per_step or ()
        if len(samples) >= 3:
            usual_s = statistics.median(s.time_s for s in samples)
            self.outliers = tuple(s for s in samples if s.time_s > _OUTLIER * usual_s)
            if self.outliers:
                self.report = self._usual({s.step for s in self.outliers})
        self.step, self.rows = self.report.step, self.report.communication
        self.time_s: float = self.step.time_s or 0.0

    def _usual(self, left_out: set[int]) -> Report:
        """The report without some steps."""
        trace, each = self.known.trace, self.known.steps_per_execution
        first = min(s.step for s in trace.steps.steps)
        pairs = [
            (step, swept.each_of(each))
            for step, swept in zip(trace.steps.steps, trace.sweeps)
            if first + (step.step - first) * each not in left_out
        ]
        sweeps = [swept for _, swept in pairs]
        update: dict[str, Any] = {"step": step_part("profile", sweeps)}
        if trace.facts.believes_axes:
            timeline = replace(trace.steps, steps=tuple(step for step, _ in pairs))
            placed, known = group_rows(timeline.collectives), self.known
            rows = communication_rows(timeline, sweeps, *placed, known.instructions, known.cluster)
            update["communication"] = rows
        return self.report.model_copy(update=update)

    @cached_property
    def waits_s(self) -> float:
        """Exposed waiting, as far as it is known."""
        return sum(row.exposed_wait_s or 0.0 for row in self.rows)

    @cached_property
    def late_s(self) -> float:
        """Where waits are unknown: by how much the device that computes longest is behind the others."""
        worst = max(self.uneven.values(), default=1.0)
        if self.waits_s or worst <= _UNEVEN:
            return 0.0
        compute = self.per_device("compute_s").values()
        return min(max(compute) - statistics.fmean(compute), self.step.exposed_s or 0.0)

    def per_device(self, name: str) -> dict[int, float]:
        """Device -> the mean of a part of its steps."""
        each, seconds = self.known.steps_per_execution, dict[int, list[float]]()
        for step, swept in zip(self.known.trace.steps.steps, self.known.trace.sweeps):
            seconds.setdefault(step.device, []).append(getattr(swept.total, name) / each)
        return {device: statistics.fmean(values) for device, values in seconds.items()}

    @cached_property
    def uneven(self) -> dict[int, float]:
        """Device -> its compute over that of the median device."""
        means = self.per_device("compute_s")
        usual = statistics.median_low(means.values())
        return {device: mean / usual for device, mean in means.items()} if usual else {}

    @cached_property
    def index(self) -> dict[str, int]:
        """Name of a collective -> its index in the timeline."""
        return {c.name: i for i, c in enumerate(self.known.trace.timeline.collectives)}

    @cached_property
    def _replay(self) -> Replay:
        return Replay(self.known.trace, self.known.program)

    def with_(self, mended: Mended) -> float | None:
        """Seconds of the step with something mended."""
        ratio = self._replay.ratio(mended)
        return None if ratio is None else ratio * self.time_s

    def of(self, row: CommunicationPart) -> list[Collective]:
        """The collectives of a row."""
        timeline = self.known.trace.timeline.collectives
        return [timeline[self.index[op.name]] for op in row.ops if op.name in self.index]

    def members(self, row: CommunicationPart) -> list[int]:
        """Their indices."""
        return [self.index[op.name] for op in row.ops if op.name in self.index]

    def model_s(self, c: Collective, *, count: float = 1.0) -> float | None:
        """What the network model says of a collective, or of `count` of them as one; None without a cluster."""
        cluster = self.known.cluster
        if cluster is None or cluster.is_cpu or c.group_size < 2:
            return None
        domains = c.group_size // max(1, c.gpus_per_domain)
        payload = c.payload_bytes * count
        return collective_time_s(
            c.collective, payload_bytes=payload, gpus_per_domain=c.gpus_per_domain, domains=domains, cluster=cluster
        )

    @cached_property
    def shares(self) -> dict[int, tuple[float, float, float]]:
        """Row -> its exposed seconds that move data: (what a faster link saves, what combining saves, the rest)."""
        return {i: self._divided(row) for i, row in enumerate(self.rows) if row.exposed_s is not None}

    def _divided(self, row: CommunicationPart) -> tuple[float, float, float]:
        share = (row.exposed_s or 0.0) / self.step.exposed_s if self.step.exposed_s else 0.0
        moving = max(0.0, (row.exposed_s or 0.0) - (row.exposed_wait_s or 0.0) - share * self.late_s)
        combined = self._combined_s(row)
        saved = min(moving, (moving / row.transfer_s) * combined) if combined and row.transfer_s else 0.0
        slow = 0.0
        priced = [(op.count, self.model_s(c)) for op, c in zip(row.ops, self.of(row))]
        expected_s = sum(n * s for n, s in priced if s is not None)
        if row.transfer_s and expected_s and None not in [s for _, s in priced]:
            slow = (moving - saved) * (1 - expected_s / row.transfer_s) if row.transfer_s > _SLOW * expected_s else 0.0
        return slow, saved, moving - saved - slow

    def _combined_s(self, row: CommunicationPart) -> float:
        """What the transfers of many small messages would lose as one message of each kind."""
        ops = self.of(row)
        if not ops or not row.transfer_s or row.count < _MANY or not row.payload_bytes:
            return 0.0
        if row.payload_bytes / row.count > _SMALL_BYTES:
            return 0.0
        whole = self.model_s(ops[0], count=row.payload_bytes / max(1, ops[0].payload_bytes))
        if whole is None:  # nobody knows the link: one of its messages, and the data at the best rate seen
            best = max((r.bus_bandwidth_bytes_per_s or 0.0 for r in self.rows), default=0.0)
            whole = row.transfer_s / row.count + (row.wire_bytes or 0.0) / best if best else row.transfer_s
        return max(0.0, row.transfer_s - whole)


def _finding(
    case: JudgedReport, code: str, seconds: float, message: str, *, warns: float = WARNS, **more: Any
) -> FindingPart:
    severity = "warning" if seconds >= warns * case.time_s else "note"
    message = message[0].upper() + message[1:]
    seconds = float(f"{seconds:.9g}")  # what sums of floats add would order equals
    return FindingPart(code=code, severity=severity, message=message, seconds=seconds, **more)


def _capture_overhead(case: JudgedReport) -> Iterator[FindingPart]:
    """The profiler makes the step longer than it is without."""
    quality = case.report.quality
    added_s = quality.overhead_s if quality else None
    untraced_s = case.known.untraced_step_s
    if (
        untraced_s and added_s is not None
    ):  # of the traced window as the host saw it, which may hold more than its steps
        added_s = min(added_s, case.mean_s - untraced_s)
    if added_s is None or added_s <= 0:
        return
    without = f": without a trace it takes {format_seconds(untraced_s)}" if untraced_s else ""
    yield _finding(
        case,
        "capture_overhead",
        added_s,
        f"The capture itself adds {format_seconds(added_s)} to a step{without}.",
        evidence=("quality.overhead_s",),
        hint="fewer captured steps, no Python tracer (python_tracer_level=0), and the step times of metrics.jsonl",
        step_s=untraced_s,
    )


def _outlier_steps(case: JudgedReport) -> Iterator[FindingPart]:
    """A few steps make the mean."""
    if not case.outliers:
        return
    worst = max(case.outliers, key=lambda s: s.time_s)
    parts = {"compute": worst.compute_s - (case.step.compute_s or 0), "exposed communication": worst.exposed_s
             - (case.step.exposed_s or 0), "idle time": worst.idle_s - (case.step.idle_s or 0)}  # fmt: skip
    most = max(parts, key=lambda name: parts[name])
    yield _finding(
        case,
        "outlier_steps",
        case.mean_s - case.time_s,
        f"The mean of {format_seconds(case.mean_s)} is not the usual step of {format_seconds(case.time_s)}: step "
        f"{worst.step} takes {format_seconds(worst.time_s)}, most of it more {most}.",
        evidence=("per_step", "spread.time_s"),
        hint="what runs at that step (checkpoint, evaluation, a recompile, garbage collection), or another capture",
        step_s=case.time_s,
    )


def waiting(case: JudgedReport) -> Iterator[FindingPart]:
    """Devices wait for the last one of their group."""
    if not case.waits_s:
        yield from _uneven_compute(case)
        return
    devices = case.report.stragglers.devices if case.report.stragglers else ()
    caused = sum(d.caused_wait_s or 0.0 for d in devices)
    share = case.waits_s / case.step.exposed_s if case.step.exposed_s else 0.0
    message = f"{format_percent(share)} of the {case.lost}, {format_seconds(case.waits_s)} a step, is waiting"
    evidence = [f"communication.{i}.{case.waited}" for i, row in enumerate(case.rows) if row.exposed_wait_s]
    if devices and caused and (devices[0].caused_wait_s or 0.0) > 1.5 * caused / len(devices):
        worst = devices[0]
        why, hint = _why_late(case, worst.device)
        host = f" on {worst.host}" if worst.host else ""
        part = format_percent((worst.caused_wait_s or 0.0) / caused)
        message += f" for peers, {part} of it for GPU {worst.device} (process {worst.process}{host}){why}."
        evidence.append("stragglers.devices.0.caused_wait_s")
    else:
        message += " for peers that come late, now one and now another."
        hint = "work that varies between devices (padding, experts), hosts that are busy, a loss read every step"
    evenly = case.with_(Mended(evenly=True))
    yield _finding(case, "waiting_for_peers", case.waits_s, message, evidence=tuple(evidence), hint=hint, step_s=evenly)


def _why_late(case: JudgedReport, device: int) -> tuple[str, str]:
    """What a device that others wait for does longer than they do, as a clause; and what to try."""
    longer = case.uneven.get(device, 1.0)
    if longer > _UNEVEN:
        hint = "its clocks, temperature and neighbours (`meshkit doctor` there), or its share of the work"
        return f", which computes {format_percent(longer - 1)} longer than the median", hint
    idle = case.per_device("idle_s")
    more_s = idle[device] - statistics.median_low(idle.values()) if device in idle else 0.0
    if more_s > LEAST * case.time_s:
        return f", which idles {format_seconds(more_s)} more: its host is late", "what its host does beside the job"
    return "", "its share of the work (padding, experts, stages), or what its host does"


def _uneven_compute(case: JudgedReport) -> Iterator[FindingPart]:
    """A device computes longer, and the others communicate longer by as much: groups, and so waits, are not known."""
    if not case.late_s:
        return
    worst = max(case.uneven, key=lambda d: case.uneven[d])
    yield _finding(
        case,
        "waiting_for_peers",
        case.late_s,
        f"GPU {worst} computes {format_percent(case.uneven[worst] - 1)} longer than the median: the others wait "
        f"{format_seconds(case.late_s)} a step for it in their collectives.",
        evidence=("spread.compute_s",),
        hint="its clocks, temperature and neighbours, or its share of the work",
        step_s=case.with_(Mended(evenly=True)),
    )


def slow_link(case: JudgedReport) -> Iterator[FindingPart]:
    """A collective moves its data more slowly than the model of its links says."""
    for i, (seconds, _, _) in case.shares.items():
        row = case.rows[i]
        if not seconds or not row.transfer_s:
            continue
        expected_s = sum(op.count * (case.model_s(c) or 0.0) for op, c in zip(row.ops, case.of(row)))
        share = expected_s / row.transfer_s
        rate, should = row.bus_bandwidth_bytes_per_s, (row.wire_bytes or 0.0) / expected_s
        where = f" on {row.fabric or row.link}" if row.link else ""
        yield _finding(
            case,
            "slow_link",
            seconds,
            f"{named(row)} runs at {format_rate(rate)}{where}, where the network model has {format_rate(should)}: "
            f"{format_seconds(seconds)} a step.",
            evidence=(f"communication.{i}.bus_bandwidth_bytes_per_s", f"communication.{i}.transfer_s"),
            hint="NCCL_DEBUG=INFO for the transport (P2P, GPUDirect, every NIC), and `meshkit bench` of the axis",
            step_s=case.with_(Mended(transfer=dict.fromkeys(case.members(row), share))),
        )


def small_collectives(case: JudgedReport) -> Iterator[FindingPart]:
    """Many small messages that would be faster as one."""
    for i, (_, seconds, _) in case.shares.items():
        row = case.rows[i]
        if not seconds or not row.transfer_s:
            continue
        mean = format_bytes((row.payload_bytes or 0.0) / row.count)
        left = 1 - case._combined_s(row) / row.transfer_s
        option = _COMBINED.get(row.collective or "")
        yield _finding(
            case,
            "small_collectives",
            seconds,
            f"{row.count:g} times a step {named(row)} moves {mean} on average: combined they would take "
            f"{format_seconds(row.transfer_s * left)}, not {format_seconds(row.transfer_s)}.",
            evidence=(f"communication.{i}.count", f"communication.{i}.payload_bytes", f"communication.{i}.transfer_s"),
            hint=f"[xla] {option} = {2**28}" if option else "one message for all of them",
            step_s=case.with_(Mended(transfer=dict.fromkeys(case.members(row), left))),
        )


def _exposed(case: JudgedReport) -> Iterator[FindingPart]:
    """Data is moved while nothing computes: because XLA runs it so, or for reasons that the trace does not tell."""
    blocking, adjacent = _schedules(case.known.schedule)
    gpu, off = not case.known.trace.facts.cpu, (case.known.options or {}).get(_ASYNC_OFF)
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
        hidden = case.with_(Mended(hidden=case.members(row))) if rest >= LEAST * case.time_s and row.ops else None
        for code, seconds in shared.items():
            if seconds < LEAST * case.time_s:
                continue
            what = f"{named(row)}{source(row)} is exposed for {format_seconds(seconds)} a step"
            message, hint, warns = _reason(code, what, off, row)
            yield _finding(case, code, seconds, message, warns=warns, evidence=evidence, hint=hint, step_s=hidden)


def _reason(code: str, what: str, off: Any, row: CommunicationPart) -> tuple[str, str, float]:
    """The message of exposed communication, the way out, and the share from which it warns."""
    if code == "synchronous_collectives":
        said = f" ({_ASYNC_OFF} = {off})" if off else ""
        hint = f"[xla] without {_ASYNC_OFF}" if off else f"[xla] {_HIDES} = true"
        return f"{what}: XLA compiled it synchronous{said}, so nothing can run beside it.", hint, WARNS
    if code == "serialized_by_xla":
        message = f"{what}: XLA waits for it right where it starts, with no work between."
        loops = f", and xla_gpu_pipeline_{(row.collective or '').replace('-', '_')} in a loop over layers"
        return message, f"[xla] {_HIDES} = true{loops if row.collective in list(_COMBINED)[:3] else ''}", WARNS
    message = f"{what}, with nothing to compute beside it."
    hint = "micro-batches or layers that do not need it yet, another axis for it, or a faster link (`meshkit tune`)"
    return message, hint, EXPOSED_WARNS


def _schedules(schedule: Schedule | None) -> tuple[set[str], set[str]]:
    """Names of collectives that block, and of those that are waited for before any work is started."""
    blocking, adjacent = set(), set()
    for body in schedule.computations.values() if schedule else ():
        open_: dict[str, bool] = {}  # start -> whether work came since
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


def _idle(case: JudgedReport) -> Iterator[FindingPart]:
    """The device has nothing to do."""
    step = case.step
    input_s, between_s, inside_s = step.idle_input_s or 0.0, step.idle_between_s or 0.0, step.idle_inside_s or 0.0
    waited = [w for w in (case.history.values.get("data_wait_s", ()) if case.history else ()) if w is not None]
    known_s = min(between_s, statistics.median(waited)) if waited else 0.0  # as the trainer's host counted it
    input_s, between_s = input_s + known_s, between_s - known_s
    yield _finding(
        case,
        "input_wait",
        input_s,
        f"The step waits {format_seconds(input_s)} for its input: the GPU is idle until the batch has come from the "
        "host.",
        evidence=("history.values.data_wait_s",) if known_s else ("step.idle_input_s",),
        hint="more workers or a deeper prefetch in [data], batches put on the devices a step ahead",
        step_s=case.time_s - input_s,
    )
    where = [(between_s, "between steps"), (inside_s, "between kernels")]
    most = [(s, name) for s, name in sorted(where, reverse=True) if s > 0.1 * (between_s + inside_s)]
    listed = " and ".join(f"{format_seconds(s)} {name}" for s, name in most)
    hint = "reading the loss less often, logging and checkpoints off the path of the step (dispatch runs ahead)"
    if inside_s > between_s:
        graphs = "" if case.known.trace.facts.graphs else "CUDA graphs (--xla_gpu_enable_command_buffer not empty), "
        hint = f"{graphs}fewer and larger kernels, a less busy host"
    yield _finding(
        case,
        "host_bound",
        between_s + inside_s,
        f"The GPU is idle {listed}: the host is late with work for it.",
        evidence=("step.idle_between_s", "step.idle_inside_s"),
        hint=hint,
        step_s=case.time_s - between_s - inside_s,
    )


def _copies(case: JudgedReport) -> Iterator[FindingPart]:
    """Memory is copied while nothing computes."""
    seconds, facts = case.step.other_s or 0.0, case.known.trace.facts
    own = facts.own_copies_s > 0.5 * facts.copies_s
    hint = "what moves between host and device each step (offloading, input, checkpoints), ahead of its use"
    if own:
        hint = "what a loop over layers takes out of stacked arrays and puts into them: weights, what train.remat saves"
    yield _finding(
        case,
        "exposed_copies",
        seconds,
        f"Memory is copied {'on the GPU ' if own else ''}for {format_seconds(seconds)} a step with nothing running "
        "beside it.",
        evidence=("step.other_s",),
        hint=hint,
        step_s=case.time_s - seconds,
    )


def _recomputation(case: JudgedReport) -> Iterator[FindingPart]:
    """The backward pass computes the forward again."""
    trace, each = case.known.trace, case.known.steps_per_execution
    seconds, known = 0.0, case.known.instructions
    for name, s in zip(trace.timeline.op_names, trace.kernels.time_s.tolist()):
        seconds += s / each if recomputes(name, known.get(name)) else 0.0
    memory = case.report.memory
    room = f", and {format_bytes(memory.margin_bytes)} are free" if (memory.margin_bytes or 0) > 0 else ""
    share = seconds / case.step.compute_s if case.step.compute_s else 0.0
    yield _finding(
        case,
        "recomputation",
        seconds,
        f"{format_percent(share)} of the compute, {format_seconds(seconds)} a step, is the forward pass again{room}.",
        evidence=("kernels",),
        hint="a remat policy that saves more (train.remat), where memory allows it",
        step_s=case.time_s - seconds,
    )


def _low_rate(case: JudgedReport) -> Iterator[FindingPart]:
    """Kernels that take far longer than their work does at the rates of the GPU."""
    cluster, schedule, trace = case.known.cluster, case.known.schedule, case.known.trace
    if cluster is None or cluster.is_cpu or schedule is None:
        return
    pricer = Pricer(cluster, Assumptions(contention=False, slowest=False))
    work = {i.name: i for body in schedule.computations.values() for i in body if i.cost is not None}
    runs, slow = schedule.known_runs(), []
    kernels = zip(trace.timeline.op_names, *(v.tolist() for v in (trace.kernels.time_s, trace.kernels.busy_s,
                                                                  trace.kernels.count)))  # fmt: skip
    for name, time_s, busy_s, count in kernels:
        instruction = work.get(name)
        if instruction is None or not count:
            continue
        should_s = pricer.work(instruction).alone_s * min(count, runs.get(name, count))
        if should_s and busy_s > _LOW_RATE * should_s:
            slow.append((time_s * (1 - should_s / busy_s), name, busy_s / should_s))
    if not slow:
        return
    seconds = sum(s for s, *_ in slow) / case.known.steps_per_execution
    _, worst, times = max(slow)
    info = case.known.instructions.get(worst)
    where = f" ({info.line})" if info and info.line else ""
    yield _finding(
        case,
        "low_rate_kernels",
        seconds,
        f"{len(slow)} kernels run at less than half of the rate that their work has on {cluster.gpu.name}, for "
        f"{format_seconds(seconds)} a step; {worst}{where} takes {times:.1f} x as long.",
        evidence=("kernels",),
        hint="shapes that tile (multiples of 128), the precision of the operands, the GPU's clock and power limit",
        step_s=case.time_s - seconds,
    )


_CAUSES = (
    _capture_overhead, _outlier_steps, waiting, slow_link, small_collectives, _exposed, _idle, _copies,
    _recomputation, _low_rate,
)  # fmt: skip


def recomputes(name: str, info: InstructionInfo | None) -> bool:
    """Whether a kernel of the backward pass computes the forward again."""
    return bool(_RECOMPUTED.search(name) or (info is not None and _RECOMPUTED.search(info.source)))


def named(row: CommunicationPart) -> str:
    """`the all-reduce bf16 over tensor`."""
    what = " ".join(part for part in (row.collective or "communication", row.dtype) if part)
    over = f" over {' + '.join(row.axes)}" if row.axes else ""
    groups = f" over {row.replica_groups}" if row.replica_groups and not row.axes else ""
    sized = f" among {row.group_size} GPUs" if row.group_size and not over and not groups else ""
    return f"the {what}{over}{groups}{sized}"


def source(row: CommunicationPart) -> str:
    """` (models/llama.py:116)`, of the operation that is exposed most."""
    op = max(row.ops, key=lambda op: op.exposed_s or 0.0, default=None)
    where = (combined_text(op, 2) or op.line or op.source) if op else None
    return f" ({where})" if where else ""


def _verdict(case: JudgedReport, findings: Sequence[FindingPart]) -> str:
    """A few sentences: where the step goes, what costs most, and the step without it."""
    step, time_s = case.step, case.time_s
    totals = {"exposed communication": step.exposed_s or 0.0, "idle": step.idle_s or 0.0}
    bad = [f for f in findings if f.severity == "warning"]
    if not bad:
        copies = {"memory copies": step.other_s or 0.0} if (step.other_s or 0.0) > 0.01 * time_s else {}
        parts = {"compute": step.compute_s or 0.0} | totals | copies
        said = ", ".join(f"{format_percent(s / time_s)} {name}" for name, s in parts.items())
        return f"Nothing stands out in a step of {format_seconds(time_s)}: {said}."
    parts_of: dict[str, list[FindingPart]] = {}
    for finding in bad:
        parts_of.setdefault(_PART.get(finding.code, finding.code), []).append(finding)
    ranked = sorted(parts_of.items(), key=lambda item: -sum(f.seconds or 0.0 for f in item[1]))
    sentences = []
    for part, members in ranked[:2]:
        if part in totals:
            of = f"the {'usual ' if case.outliers else ''}step" + ("" if sentences else f" of {format_seconds(time_s)}")
            sentences.append(f"{format_percent(totals[part] / time_s)} of {of} is {part}.")
        sentences += [f.message for f in members[: 2 if len(ranked) == 1 else 1]]
    first = ranked[0][1][0]
    if first.step_s is not None and first.step_s < 0.995 * case.mean_s:
        sentences.insert(
            2 if ranked[0][0] in totals else 1, f"Without that the step would take {format_seconds(first.step_s)}."
        )
    return " ".join(sentences)
