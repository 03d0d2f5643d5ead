"""Find causes of a slow step, for the verdicts of measurements, plans and communication-only reports.

report -> a case (`ExaminedReport`) -> functions that each look for a cause -> findings, most seconds first -> verdict

The exposed time of a row of communication is divided among its causes: waiting for peers, the time that fewer messages
would save, the time that a faster link would save, and the rest. A cause is reported only if the data shows it: a plan
has no waiting, no late devices and no outliers. The causes that only a measurement has are in `verdict.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from meshkit.config.cluster import Cluster
from meshkit.hlo.instructions import InstructionInfo, layer_of
from meshkit.hlo.schedule import Collective, Schedule
from meshkit.predict.coverage import NOT_PREDICTED, kernel_seconds_by_name
from meshkit.predict.kernels import peak_flops
from meshkit.predict.nccl import RING_TURNS
from meshkit.predict.network import collective_time_s
from meshkit.predict.simulate import Simulation
from meshkit.report.schema import (
    CommunicationPart,
    FindingPart,
    LatePart,
    MemoryPart,
    OpPart,
    Report,
    StragglerPart,
)
from meshkit.units import format_bytes, format_percent, format_rate, format_seconds

LEAST, WARNS = 0.005, 0.05  # Shares of the step from which a cause is reported, and from which it is a warning.
EXPOSED_WARNS = 0.1  # The share from which exposed communication without another cause is a warning; some is normal.
WAITING = "waiting_for_peers"
_STEADY = 0.75  # A device that is late in this share of the steps counts as always late.
_AS_LATE, _MOST_LATE = 0.25, 3  # Others with at least this share of the longest delay are named, too; at most 3.
_LATE_WORDS = {
    "kernels": "in kernels",
    "clock": "by its clock",
    "memory": "by its memory",
    "copies": "in memory copies",
    "communication": "in exposed transfers",
    "input": "waiting for its input",
    "host": "idle between steps",
    "launch_gaps": "idle between kernels",
    "not_known": "not known",
}
_SLOW = 1.5  # A collective is slow if it takes this many times its predicted time; predictions err by less.
# If a row waits longer than this multiple of its transfer, its transfer time is too uncertain to judge the link.
_MOSTLY_WAITS = 4.0
_SMALL_BYTES, _MANY = 2**20, 8  # Latency dominates messages up to this size; combining pays off from this number.
_RECOMPUTED = re.compile(r"rematted_computation|(?:^|/)remat[^/]*/.*transpose|\.remat\d*(?:\.\d+)*$")
# Hints for plans and for measurements.
_HOST_BUSY = "other processes on its host"
_LATE_HINTS = {
    "kernels": "its share of the work (padding, experts, repeated tokens), or what autotuning chose in its process",
    "clock": "its clocks, power and temperature (`meshkit doctor` there)",
    "memory": "its memory: ECC errors, another process on it (`meshkit doctor` there)",
    "copies": "what is copied there and not elsewhere",
    "communication": "NCCL_DEBUG=INFO for its transport, and `meshkit bench` of the axis",
    "input": "more workers or a deeper prefetch in [data], and what else its host does",
    "host": _HOST_BUSY,
    "launch_gaps": _HOST_BUSY,
    "not_known": "its share of the work (padding, experts, stages), what its host does, a capture of more steps",
}
_OF_CORES = "what else runs on its cores, or its share of the work"  # For virtual CPU devices, which share the cores.
_FLOATS = re.compile(r"\bb?f\d")  # Matches a float type in an instruction's shapes.
_SCATTER = "a one-hot matmul in place of the scatter-add, such as an embedding's gradient (openxla/xla#26371, #46225)"
OVERLAP_MORE = "overlap it with another micro-batch or layer, or use another axis or a faster link (`meshkit tune`)"
# On virtual CPU devices the link is memory, so there is no faster one.
OVERLAP_MORE_CPU = "overlap it with another micro-batch or layer, or use another axis"
NO_LOOP = (
    "layers without a loop (scan_layers = false in meshkit's models): a loop keeps the layers' weights, and what "
    "train.remat saves, in stacked arrays, and copies them out and in"
)
KEEP_MORE = "a remat policy that saves more (train.remat), where memory allows it"
COMBINED = {
    "all-reduce": "xla_gpu_all_reduce_combine_threshold_bytes",
    "all-gather": "xla_gpu_all_gather_combine_threshold_bytes",
    "reduce-scatter": "xla_gpu_reduce_scatter_combine_threshold_bytes",
    "collective-permute": "xla_gpu_collective_permute_combine_threshold_bytes",
}


@dataclass(frozen=True)
class Fix:
    """A hypothetical change to a measured step, for a replay. Collectives are indices into the timeline's table."""

    hidden: Collection[int] = ()
    """Collectives that compute hides completely."""
    transfer: Mapping[int, float] = field(default_factory=dict)
    """Collective -> factor on its measured transfer time."""
    evenly: bool = False
    """Whether each device has at most the median device's work before each collective."""


def rank_findings[C: ExaminedReport](
    case: C, causes: Iterable[Callable[[C], Iterator[FindingPart]]]
) -> tuple[FindingPart, ...]:
    """Return the findings that cost at least LEAST of the step, most seconds first."""
    every = (found for cause in causes for found in cause(case))
    worth = (f for f in every if (f.seconds or 0.0) >= LEAST * case.time_s)
    return tuple(sorted(worth, key=lambda f: -(f.seconds or 0.0)))


class ExaminedReport:
    """A report with the values that the search for causes needs; subclasses add the source of the report."""

    # What messages call the time that waiting is a part of, and the field of a communication row with its waiting time.
    lost, waited = "exposed communication", "exposed_wait_s"
    usual, cpu = "", False  # An adjective for the step ("usual "), and whether its devices are virtual CPU devices.
    instructions: Mapping[str, InstructionInfo] = {}
    """The known instructions of the program, by name."""

    def __init__(self, report: Report, cluster: Cluster | None, collectives: Sequence[Collective] = ()):
        self.report, self.step, self.rows = report, report.step, report.communication
        self.cluster, self.collectives = cluster, collectives
        self.time_s: float = self.step.time_s or 0.0

    @property
    def device(self) -> str:
        return "device" if self.cpu else "GPU"

    def share(self, seconds: float, what: str, *, first: bool) -> str:
        """Return e.g. `20.0 % of the step of 1.00 ms is idle.`; without `first`, the step time is left out."""
        of = f"the {self.usual}step" + (f" of {format_seconds(self.time_s)}" if first else "")
        return f"{format_percent(seconds / self.time_s)} of {of} is {what}."

    @cached_property
    def waits_s(self) -> float:
        """Return the sum of the known exposed waits."""
        return sum(row.exposed_wait_s or 0.0 for row in self.rows)

    @cached_property
    def late_s(self) -> float:
        """Return an estimate of a device's mean wait for the latest device; 0 if waits were measured."""
        behind_s = max((late.behind_s for _, late in self.late), default=0.0)
        others = 1 - 1 / max(1, self.report.window.devices)
        return 0.0 if self.waits_s else min(others * behind_s, self.step.exposed_s or 0.0)

    @cached_property
    def late(self) -> list[tuple[StragglerPart, LatePart]]:
        """Return the devices that take longer than the median device, the latest first; a plan has none."""
        devices = self.report.stragglers.devices if self.report.stragglers else ()
        return sorted(((d, d.late) for d in devices if d.late), key=lambda found: -found[1].behind_s)

    @cached_property
    def index(self) -> dict[str, int]:
        """Map the name of a collective to its index in the timeline."""
        return {c.name: i for i, c in enumerate(self.collectives)}

    def time_with(self, fix: Fix) -> float | None:
        """Return the seconds of the step with a change; None if there is no measured step to replay."""
        return None

    def collectives_of(self, row: CommunicationPart) -> list[Collective]:
        return [self.collectives[i] for i in self.members(row)]

    def members(self, row: CommunicationPart) -> list[int]:
        """Return the indices of a row's collectives in the timeline."""
        return [self.index[op.name] for op in row.ops if op.name in self.index]

    def model_s(self, c: Collective, *, count: float = 1.0) -> float | None:
        """Return the network model's seconds for `count` such collectives combined into one; None if not modelled."""
        cluster = self.cluster
        if cluster is None or cluster.is_cpu or c.group_size < 2:
            return None
        domains = c.group_size // max(1, c.gpus_per_domain)
        payload = c.payload_bytes * count
        return collective_time_s(
            c.collective, payload_bytes=payload, gpus_per_domain=c.gpus_per_domain, domains=domains, cluster=cluster
        )

    @cached_property
    def shares(self) -> dict[int, tuple[float, float, float]]:
        """Map each row's index to its exposed transfer seconds: (saved by a faster link, saved by combining, rest)."""
        return {i: self._divided(row) for i, row in enumerate(self.rows) if row.exposed_s is not None}

    def _divided(self, row: CommunicationPart) -> tuple[float, float, float]:
        share = (row.exposed_s or 0.0) / self.step.exposed_s if self.step.exposed_s else 0.0
        moving = max(0.0, (row.exposed_s or 0.0) - (row.exposed_wait_s or 0.0) - share * self.late_s)
        combined = self._combined_s(row)
        saved = min(moving, (moving / row.transfer_s) * combined) if combined and row.transfer_s else 0.0
        slow = 0.0
        priced = [(op.count, self.model_s(c)) for op, c in zip(row.ops, self.collectives_of(row))]
        expected_s = sum(n * s for n, s in priced if s is not None)
        waits = (row.wait_s or 0.0) > _MOSTLY_WAITS * (row.transfer_s or 0.0)
        if row.transfer_s and expected_s and not waits and None not in [s for _, s in priced]:
            slow = (moving - saved) * (1 - expected_s / row.transfer_s) if row.transfer_s > _SLOW * expected_s else 0.0
        return slow, saved, moving - saved - slow

    def _combined_s(self, row: CommunicationPart) -> float:
        ops = self.collectives_of(row)
        if not ops or not row.transfer_s or row.count < _MANY or not row.payload_bytes:
            return 0.0
        if row.payload_bytes / row.count > _SMALL_BYTES:
            return 0.0
        whole = self.model_s(ops[0], count=row.payload_bytes / max(1, ops[0].payload_bytes))
        if whole is None:  # Without a model: the mean time of one message, plus the data at the best rate of any row.
            best = max((r.bus_bandwidth_bytes_per_s or 0.0 for r in self.rows), default=0.0)
            whole = row.transfer_s / row.count + (row.wire_bytes or 0.0) / best if best else row.transfer_s
        return max(0.0, row.transfer_s - whole)


def finding(
    case: ExaminedReport,
    code: str,
    seconds: float,
    message: str,
    *,
    step_s: float | None = None,
    of_s: float | None = None,
    warns: float = WARNS,
    **more: Any,
) -> FindingPart:
    """Return a finding; it is a warning if its seconds are at least the share `warns` of the step.

    Args:
        seconds: cost of the cause per step, rounded to nine digits. The finding states at most `of_s - step_s`, since a
            fix may save less: another collective may then wait longer.
        message: a sentence; its first letter is made a capital.
        step_s: seconds of the step without the cause; None if unknown.
        of_s: seconds of the step with the cause; by default the case's step time.
        warns: share of the step from which the finding is a warning.
        more: `evidence` and `hint` of `FindingPart`.
    """
    if step_s is not None:
        of_s = case.time_s if of_s is None else of_s
        seconds = min(seconds, max(0.0, of_s - step_s))
        step_s = of_s - seconds
    severity = "warning" if seconds >= warns * case.time_s else "note"
    message = message[0].upper() + message[1:]
    seconds = float(f"{seconds:.9g}")  # Without this, rounding errors would decide the order of equal findings.
    return FindingPart(code=code, severity=severity, message=message, seconds=seconds, step_s=step_s, **more)


def waiting(case: ExaminedReport) -> Iterator[FindingPart]:
    """Find the time that devices wait for the last member of their group."""
    seconds = case.waits_s or case.late_s
    if not seconds:
        return
    devices = [*case.report.stragglers.devices] if case.report.stragglers else []
    caused = sum(d.caused_wait_s or 0.0 for d in devices)
    worst = devices[0] if caused and (devices[0].caused_wait_s or 0.0) > 1.5 * caused / len(devices) else None
    most_s = case.late[0][1].behind_s if case.late else 0.0
    steady = [(d, why) for d, why in case.late if why.late_share >= _STEADY and why.behind_s >= _AS_LATE * most_s]
    late = [found for found in case.late if found[0] is worst] or steady or case.late[:1]
    late = (late + [found for found in steady if found not in late])[:_MOST_LATE]
    evidence = [f"communication.{i}.{case.waited}" for i, row in enumerate(case.rows) if row.exposed_wait_s]
    evidence += [f"stragglers.devices.{devices.index(d)}.late" for d, _ in late]
    share = seconds / case.step.exposed_s if case.step.exposed_s else 0.0
    message = f"{format_percent(share)} of the {case.lost}, {format_seconds(seconds)} a step, is waiting for peers"
    if worst:
        host = f" on {worst.host}" if worst.host else ""
        part = format_percent((worst.caused_wait_s or 0.0) / caused)
        message += f", {part} of it for {case.device} {worst.device} (process {worst.process}{host})"
        evidence.append("stragglers.devices.0.caused_wait_s")
    elif not steady:
        message += "; which one is late changes from step to step"
    said = [f"{case.device} {d.device} is {_behind(why, 1 if i else None)}." for i, (d, why) in enumerate(late)]
    hint = _LATE_HINTS["not_known"]
    if late:
        kernels, cause = late[0][1].kernels, next(iter(late[0][1].causes), "not_known")
        name = kernels[0].name if cause == "kernels" else ""
        hint = scatter_hint(name, case.instructions.get(name)) or _LATE_HINTS[cause]
    hint = _OF_CORES if case.cpu else hint
    evenly = case.time_with(Fix(evenly=True))
    saved_s = case.time_s - evenly if case.waits_s and evenly is not None else seconds
    yield finding(
        case,
        WAITING,
        saved_s,
        " ".join([f"{message}.", *(s[0].upper() + s[1:] for s in said)]),
        evidence=tuple(evidence),
        hint=hint,
        step_s=evenly,
    )


def _behind(late: LatePart, most: int | None = None) -> str:
    """Return `9.00 ms a step behind the usual one: 8.00 ms by its clock (...), 1.00 ms not known`.

    Args:
        most: the most causes to list; None for all.
    """
    said = f"{format_seconds(late.behind_s)} a step behind the usual one"
    if late.late_share < _STEADY:
        said += f", in {format_percent(late.late_share)} of the steps"
    ratios = [("compute-bound", late.compute_bound_ratio), ("memory-bound", late.memory_bound_ratio)]
    slower = f" ({', '.join(f'{name} kernels take {r:.3f} x as long' for name, r in ratios if r is not None)})"
    parts = []
    for cause, seconds in list(late.causes.items())[:most]:
        text = f"{_LATE_WORDS[cause]}{slower if cause in ('clock', 'memory') else ''}"
        if cause == "kernels":
            kernel, *more = late.kernels
            takes = " to ".join(dict.fromkeys(map(format_seconds, (kernel.least_s, kernel.most_s))))
            line = f"{kernel.line}; " if kernel.line else ""
            text = f"in {kernel.name} ({line}{takes}, usually {format_seconds(kernel.usual_s)})"
            text += f" and {len(more)} more" if more else ""
        parts.append(f"{format_seconds(seconds)} {text}")
    return f"{said}: {', '.join(parts)}"


def scatter_hint(name: str, info: InstructionInfo | None) -> str | None:
    """Return a hint for a scatter-add of floats, which is slow when many adds go to one place; None for other kernels.

    XLA adds bfloat16 by compare-and-swap; jaxlib 0.10.2 to 0.11.0 do so for float32 as well.

    If `info` is None, the name alone decides.
    """
    what = f"{name} {info.source if info else ''}"
    scatters = (
        "scatter" in what and not re.search("reduce.scatter", what) and (info is None or bool(_FLOATS.search(info.key)))
    )
    return _SCATTER if scatters else None


def slow_link(case: ExaminedReport) -> Iterator[FindingPart]:
    """Find collectives that move their data more slowly than the network model predicts."""
    for i, (seconds, _, _) in case.shares.items():
        row = case.rows[i]
        if not seconds or not row.transfer_s:
            continue
        priced = [(op, op.count * (case.model_s(c) or 0.0)) for op, c in zip(row.ops, case.collectives_of(row))]
        expected_s = sum(s for _, s in priced)
        share = expected_s / row.transfer_s
        rate, should = row.bus_bandwidth_bytes_per_s, (row.wire_bytes or 0.0) / expected_s
        op, alone_s = max(priced, key=lambda one: (one[0].transfer_s or 0.0) - one[1])
        size = format_bytes((op.payload_bytes or row.payload_bytes or 0.0) / op.count)
        sized, most = f"its size, {size}", ""
        if len(priced) > 1 and op.transfer_s:
            sized, most = "its sizes", f"; most in {op.name}{place_text(op)}, {size} at {alone_s / op.transfer_s:.2f}"
        where = f" on {row.fabric or row.link}" if row.link else ""
        yield finding(
            case,
            "slow_link",
            seconds,
            f"{describe_row(row)}{'' if most else place_text(op)} runs at {share:.2f} of NCCL's speed at {sized}"
            f"{where}: {format_rate(rate)} instead of the network model's {format_rate(should)}, which costs "
            f"{format_seconds(seconds)} a step{most}.",
            evidence=(f"communication.{i}.bus_bandwidth_bytes_per_s", f"communication.{i}.transfer_s"),
            hint="NCCL_DEBUG=INFO for the transport (P2P, GPUDirect, every NIC), and `meshkit bench` of the axis",
            step_s=case.time_with(Fix(transfer=dict.fromkeys(case.members(row), share))),
        )


def small_collectives(case: ExaminedReport) -> Iterator[FindingPart]:
    """Find small messages that would be faster if combined."""
    for i, (_, seconds, _) in case.shares.items():
        row = case.rows[i]
        if not seconds or not row.transfer_s:
            continue
        mean = format_bytes((row.payload_bytes or 0.0) / row.count)
        left = 1 - case._combined_s(row) / row.transfer_s
        option = None if case.cpu else COMBINED.get(row.collective or "")
        yield finding(
            case,
            "small_collectives",
            seconds,
            f"{row.count:g} times a step {describe_row(row)} moves {mean} on average: combined, they would take "
            f"{format_seconds(row.transfer_s * left)} instead of {format_seconds(row.transfer_s)}.",
            evidence=(f"communication.{i}.count", f"communication.{i}.payload_bytes", f"communication.{i}.transfer_s"),
            hint=f"[xla] {option} = {2**28}" if option else "one message for all of them",
            step_s=case.time_with(Fix(transfer=dict.fromkeys(case.members(row), left))),
        )


def recomputes(name: str, info: InstructionInfo | None) -> bool:
    """Return whether a kernel recomputes the forward pass; if `info` is None, the name alone decides."""
    return bool(_RECOMPUTED.search(name) or (info is not None and _RECOMPUTED.search(info.source)))


def describe_row(row: CommunicationPart) -> str:
    """Return `the all-reduce bf16 over tensor`."""
    what = " ".join(part for part in (row.collective or "communication", row.dtype) if part)
    over = f" over {' + '.join(row.axes)}" if row.axes else ""
    groups = f" over {row.replica_groups}" if row.replica_groups and not row.axes else ""
    sized = f" in groups of {row.group_size}" if row.group_size and not over and not groups else ""
    return f"the {what}{over}{groups}{sized}"


def source_text(row: CommunicationPart) -> str:
    """Return the place in the model of the row's most exposed operation, as text of `place_text`."""
    return place_text(max(row.ops, key=lambda op: op.exposed_s or 0.0)) if row.ops else ""


def place_text(op: OpPart) -> str:
    """Return ` (layers/attention/output, models/llama.py:116)`."""
    place = ", ".join(text for text in (layer_of(op.source or ""), op.line) if text)
    where = op.combined_text(2) or place or op.source
    return f" ({where})" if where and where != "unknown" else ""


# Verdicts of plans.

_LINKS = {"nvlink": "NVLink", "infiniband": "InfiniBand"}
_HELD = ("parameters", "optimizer", "gradients", "activations", "temporary")


class Planned(NamedTuple):
    """The simulation, program and cluster of a plan, for its verdict."""

    simulation: Simulation
    schedule: Schedule
    instructions: Mapping[str, InstructionInfo]
    cluster: Cluster
    steps: int = 1
    """Training steps per execution of the program."""


class Change(NamedTuple):
    """A change to the experiment that the verdict recommends."""

    said: str
    """The recommendation, as a whole sentence."""
    mends: str | None = None
    """Code of the finding that the change fixes."""
    hint: str | None = None


def add_plan_findings(report: Report, planned: Planned, change: Change | None = None) -> Report:
    """Return a prediction with its findings and a verdict on what bounds the step.

    The change is the second sentence of the verdict. If the step has no time, or part of the program has no prediction,
    there are no findings, and the verdict says at most that the step does not fit.
    """
    memory, time_s = report.memory, report.step.time_s
    said = _too_large(memory) if memory.fits is False else []
    if not time_s or any(w.code == NOT_PREDICTED for w in report.warnings):
        return report.model_copy(update={"verdict": " ".join(said) or None})
    case = _PlanCase(report, planned)
    findings = rank_findings(case, (_find_losses, small_collectives))
    worst = [case.losses[f.code] for f in findings if f.severity == "warning" and f.code in case.losses][:2]
    named = change.said if change else None
    mended = case.losses.get(change.mends or "") if change else None
    if change and mended and mended not in worst[:1]:  # If the change fixes another cause than the first, name it.
        worst = [loss for loss in worst if loss is not mended]
        mends = f"{format_percent(mended.seconds / time_s)} is {mended.what}"
        named = f"{mends}, and {change.said[0].lower()}{change.said[1:]}"
    for i, loss in enumerate(worst):
        said += [case.share(loss.seconds, loss.what, first=i == 0), *loss.more]
    said += [] if worst else [_bound(case)]
    if memory.fits and memory.margin_bytes is not None:
        said.append(f"It fits, with {format_bytes(memory.margin_bytes)} a GPU to spare.")
    if change and named:
        said.insert(1, named)
        findings = tuple(
            f.model_copy(update={"hint": change.hint}) if change.hint and f.code == change.mends else f
            for f in findings
        )
    return report.model_copy(update={"findings": findings, "verdict": " ".join(said), "change": named})


class _Loss(NamedTuple):
    """A part of a planned step's time that is not useful compute."""

    seconds: float
    what: str
    evidence: str
    hint: str | None = None
    more: Sequence[str] = ()
    """Sentences that follow the one with the share of the step."""


class _PlanCase(ExaminedReport):
    """A simulated step. It has no waiting for peers, so the transfer time of a row is its busy time."""

    def __init__(self, report: Report, planned: Planned):
        rows = tuple(r.model_copy(update={"transfer_s": r.busy_s}) for r in report.communication)
        report = report.model_copy(update={"communication": rows})
        super().__init__(report, planned.cluster, planned.simulation.timeline.collectives)
        self.planned = planned

    @cached_property
    def losses(self) -> dict[str, _Loss]:
        step, planned, pipeline = self.step, self.planned, self.report.pipeline
        of = f" ({pipeline.stages} stages, {pipeline.microbatches} microbatches)" if pipeline else ""
        seconds = kernel_seconds_by_name(planned.simulation.timeline)
        again_s = sum(s for name, s in seconds.items() if recomputes(name, planned.instructions.get(name)))
        exposed = _Loss(step.exposed_s or 0.0, "exposed communication", "step.exposed_s", OVERLAP_MORE, _largest(self))
        bubble = _Loss(step.bubble_s or 0.0, f"the pipeline's bubble{of}", "step.bubble_s", "more microbatches")
        hint = None if planned.simulation.host_bytes > 0 else NO_LOOP
        copies = _Loss(step.other_s or 0.0, "exposed memory copies", "step.other_s", hint)
        return {
            "exposed_communication": exposed,
            "pipeline_bubble": bubble,
            "recomputation": _Loss(again_s / planned.steps, "recomputation of the forward pass", "kernels", KEEP_MORE),
            "exposed_copies": copies,
            "idle": _Loss(step.idle_s or 0.0, "idle between kernels", "step.idle_s"),
        }


def _find_losses(case: _PlanCase) -> Iterator[FindingPart]:
    for code, loss in case.losses.items():
        exposed = code == "exposed_communication"
        yield finding(
            case,
            code,
            loss.seconds,
            " ".join([case.share(loss.seconds, loss.what, first=False), *loss.more]),
            warns=EXPOSED_WARNS if exposed else WARNS,
            evidence=(loss.evidence,),
            hint=loss.hint,
            step_s=case.step.all_overlapped_s if exposed else case.time_s - loss.seconds,
        )


def _largest(case: _PlanCase) -> list[str]:
    i, row = max(enumerate(case.rows), key=lambda item: item[1].exposed_s or 0.0, default=(0, None))
    if row is None or not row.exposed_s or not case.step.exposed_s:
        return []
    most = "Most of it" if row.exposed_s > 0.5 * case.step.exposed_s else "Its largest part"
    fabric = row.fabric if row.fabric and row.link and not row.fabric.startswith(row.link) else None
    on = f" on {fabric.replace('_', ' ') if fabric else _LINKS[row.link]}" if row.link else ""
    without = format_seconds(case.time_s - (row.sole_exposed_s or 0.0))
    text = (
        f"{most} is {describe_row(row)}{on}{source_text(row)}, {format_seconds(row.exposed_s)}; without it the step "
        f"would take {without}."
    )
    evidence = f"communication.{i}.count"
    small = [f for f in small_collectives(case) if evidence in f.evidence and (f.seconds or 0) >= WARNS * case.time_s]
    return [text, *(f.message for f in small)]


def _too_large(memory: MemoryPart) -> list[str]:
    held = {name: getattr(memory, f"{name}_bytes") or 0 for name in _HELD}
    most = max(held, key=lambda name: held[name])
    largest = [f"The largest part is {most}, {format_bytes(held[most])}."] if held[most] else []
    too_much = f": {format_bytes(-memory.margin_bytes)} a GPU too much" if memory.margin_bytes is not None else ""
    return [f"The step does not fit{too_much}.", *largest]


def _bound(case: _PlanCase) -> str:
    step, planned, time_s = case.step, case.planned, case.time_s
    kinds = [c for c in (case.report.kernels.classes if case.report.kernels else ()) if c.time_s][:2]
    said = []
    for kind in kinds:
        share = format_percent((kind.time_s or 0.0) / time_s)
        rate = _matmul_rate(planned, kind.time_s or 0.0) if kind.kind == "matmul" else None
        said.append(f"{kind.kind} {share}" + (f", at {format_percent(rate)} of the GPU's peak" if rate else ""))
    of = f" ({'; '.join(said)})" if said else ""
    exposed = f"; {format_percent((step.exposed_s or 0.0) / time_s)} is exposed communication" if case.rows else ""
    compute = format_percent((step.compute_s or 0.0) / time_s)
    return f"The step of {format_seconds(time_s)} is bound by compute, which takes {compute} of it{of}{exposed}."


def _matmul_rate(planned: Planned, time_s: float) -> float:
    """Return the rate of the matmuls as a share of the GPU's peak; they take `time_s` of a step."""
    gpu, least_s = planned.cluster.gpu, 0.0
    for i, times in planned.schedule.walk():
        info = planned.instructions.get(i.name)
        if i.cost is not None and info is not None and info.kind == "matmul":
            least_s += times * sum(n / peak_flops(gpu, dtype) for dtype, n in i.cost.matmul_flops.items())
    return least_s / planned.steps / time_s


# Verdicts of reports from NCCL Inspector's files, which have no compute.


def add_communication_findings(report: Report, cluster: Cluster | None) -> Report:
    """Add findings and a verdict to a report without compute, and return it.

    Args:
        cluster: the cluster where the job ran; with None, nothing is compared with the network model.
    """
    case = _CommunicationCase(report, cluster)
    if not case.time_s:
        return report
    findings = rank_findings(case, (waiting, slow_link, small_collectives))
    if report.step.time_s is None:
        findings = tuple(f.model_copy(update={"message": f.message.replace(" a step", "")}) for f in findings)
    return report.model_copy(update={"findings": findings, "verdict": _verdict_of_communication(case, findings)})


class _CommunicationCase(ExaminedReport):
    """A report in which all communication counts as exposed, since compute is unknown."""

    lost, waited = "communication", "wait_s"

    def __init__(self, report: Report, cluster: Cluster | None):
        rows = [
            row.model_copy(update={"exposed_s": row.busy_s, "exposed_wait_s": row.wait_s, "ops": (op,)})
            for i, row in enumerate(report.communication)
            for op in (OpPart(name=f"row {i}", key="", count=row.count),)
        ]
        self.all_s = sum(row.busy_s or 0.0 for row in rows)
        step = report.step.model_copy(
            update={"exposed_s": self.all_s, "time_s": report.step.time_s or self.all_s, "compute_s": None}
        )
        heard = report.model_copy(update={"communication": tuple(rows), "step": step})
        super().__init__(heard, cluster)
        self.told = report

    def collectives_of(self, row: CommunicationPart) -> list[Collective]:
        """Return one collective that stands for the row, with the mean size of the row's collectives."""
        size = int((row.payload_bytes or 0.0) / row.count) if row.count else 0
        return [
            Collective(
                name=op.name, key="", collective=row.collective or "", axes=row.axes, axes_complete=False,
                link=row.link or "", fabric=row.fabric, dtype="", group_size=row.group_size or 0,
                num_groups=row.num_groups or 0, gpus_per_domain=row.gpus_per_domain or 0, payload_bytes=size,
            )
            for op in row.ops
        ]  # fmt: skip

    def model_s(self, c: Collective, *, count: float = 1.0) -> float | None:
        """Return the network model's seconds; None also if the placement of the GPUs is unknown."""
        known = c.gpus_per_domain > 0 and c.collective in RING_TURNS
        return super().model_s(c, count=count) if known else None


def _verdict_of_communication(case: _CommunicationCase, findings: tuple[FindingPart, ...]) -> str:
    time_s, quality = case.told.step.time_s, case.told.quality
    lost = quality.dropped_events if quality else None
    beside = f" ({lost:,} dropped operations are not counted)" if lost else ""
    if time_s:
        share = format_percent(min(1.0, case.all_s / time_s))
        first = (
            f"Communication takes at most {share} of the step of {format_seconds(time_s)}{beside}. It is unknown how "
            "much of it is overlapped by compute."
        )
    else:
        first = (
            f"Communication took {format_seconds(case.all_s)} of a GPU's time{beside}. The step time is unknown, and "
            "so is the part that is overlapped by compute."
        )
    largest = max(case.rows, key=lambda row: row.busy_s or 0.0)
    part = (largest.busy_s or 0.0) / case.all_s
    sentences = [first, f"{format_percent(part)} of it is {describe_row(largest)}."]
    dear = [f.message for f in findings if f.severity == "warning"][:2]
    return " ".join([*sentences, *(dear or ["Nothing stands out in it."])])
