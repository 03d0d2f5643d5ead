"""Summarize a timeline as a report: means over devices and steps, rows of communication, compute by kind.

plan passes a simulated timeline, profile a measured one, and rehearse a simulation with measured kernels; all are
summarized in the same way. The collectives of one row have the same axes, link, kind, dtype and group shape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import Placement
from meshkit.hlo.instructions import OTHER_KERNELS, InstructionInfo, kind_of_kernel
from meshkit.hlo.pipeline_report import PipelineReport, useful_flops
from meshkit.hlo.schedule import Collective, Schedule
from meshkit.predict.algorithms import wire_factor
from meshkit.predict.coverage import LAUNCH_BOUND, NOT_PREDICTED, UNKNOWN_TRIPS
from meshkit.predict.interval import step_interval, stratum_of
from meshkit.predict.kernels import compute_peak_flops, peak_flops
from meshkit.predict.network import checkpoint_time_s, infiniband_share, peak_bus_bandwidth_bytes_per_s
from meshkit.report import schema
from meshkit.report.schema import CommunicationPart, KernelsPart, Report, StepPart, Warning_
from meshkit.step.program import NO_FACTS, StepFacts
from meshkit.timeline import KernelTotals, Sweep, Timeline, kernel_totals, sweep
from meshkit.units import format_seconds

if TYPE_CHECKING:
    from meshkit.predict.simulate import Simulation
    from meshkit.trace.reader import Trace

UNMAPPED = "unmapped"
# Collectives with the same values of these attributes are one row of communication.
_ROW = ("axes", "axes_complete", "link", "fabric", "collective", "dtype", "group_size", "num_groups", "gpus_per_domain",
        "replica_groups")  # fmt: skip
_MAX_KERNELS = 25  # The most instructions of a kind that are listed by name; the rest are only in its sums.
_ADDITIVE = ("time_s", "compute_s", "communication_s", "overlapped_s", "exposed_s", "other_s", "idle_s")
_MOST_CELLS = 200_000  # A larger picture of a pipeline is left out of report.json.
_EXPERTS = re.compile(r"\b(experts?|moe|router)\b", re.IGNORECASE)  # Matches the module names of a mixture of experts.
_TOLERANCE = 1e-6  # Relative. Rounding errors in sums over 1e5 spans are smaller; wrongly joined spans err by more.


@dataclass(frozen=True)
class Machines:
    """The machines that a program runs on, and the number of processes whose traces were seen."""

    placement: Placement | None = None
    cluster: Cluster | None = None
    """None if no cluster is described."""
    processes_seen: int = 1
    processes_expected: int = 1

    @property
    def num_gpus(self) -> int | None:
        """The number of GPUs that the program runs on."""
        return self.placement.num_partitions if self.placement else None


def summarize(
    timeline: Timeline,
    *,
    source: schema.Source,
    machines: Machines = Machines(),
    facts: StepFacts = NO_FACTS,
    instructions: Mapping[str, InstructionInfo] | None = None,
    swept: Trace | None = None,
    step_bounds: tuple[float | None, float | None] = (None, None),
    warnings: Sequence[Warning_] = (),
) -> Report:
    """Return the report of a timeline; every number is a mean over its device steps.

    The caller adds the parts that do not depend on the timeline (memory, program, compile, quality).

    Args:
        timeline: the simulated or measured timeline; without steps, times are None.
        facts: facts about the step; keys that need an unknown fact are None.
        instructions: name of an instruction -> its kind and source, for compute by kind and for source lines.
        swept: the trace of the timeline, whose sums are used; None computes them here.
        step_bounds: (all_overlapped_s, all_exposed_s) of a prediction.

    Raises:
        AssertionError: the result breaks an invariant of the report, which is a bug in meshkit.
    """
    row_of, groups = group_rows(timeline.collectives)
    each, known = facts.steps_per_call, instructions or {}
    found = swept.sweeps if swept else [sweep(step, len(timeline.collectives), row_of) for step in timeline.steps]
    sweeps = [one.mean_over(each) for one in found]
    rows = communication_rows(timeline, sweeps, row_of, groups, known, machines.cluster)
    step = step_part(source, sweeps, facts, machines.num_gpus, step_bounds)
    totals = None
    if timeline.steps and (known or facts.pipeline or swept):
        totals = swept.kernels if swept else kernel_totals(timeline)
    if facts.pipeline and step.time_s is not None and totals:
        bubble_s = _bubble_s(facts.pipeline, timeline.op_names, totals, known) / each
        step = step.model_copy(update={"bubble_s": bubble_s, "bubble_fraction": bubble_s / step.time_s})
    report = Report(
        source=source,
        cluster=cluster_part(machines.cluster, machines.num_gpus),
        mesh=mesh_part(machines.placement) if machines.placement else (),
        window=schema.WindowPart(
            steps=len({s.step for s in timeline.steps}) * each,
            devices=len({s.device for s in timeline.steps}),
            processes_seen=machines.processes_seen,
            processes_expected=machines.processes_expected,
        ),
        step=step,
        spread=schema.SpreadsPart() if source == "plan" else _spreads(timeline, sweeps),
        communication=rows,
        training=training_cost(step.time_s, facts, machines),
        pipeline=pipeline_part(facts.pipeline, rows) if facts.pipeline else None,
        kernels=kernels_part(timeline.op_names, totals, known, steps_per_execution=each) if totals else None,
        per_step=None if source == "plan" else _step_samples(timeline, sweeps, swept, each),
        warnings=(*warnings, *_unmapped_warning(rows)),
    )
    check_invariants(report)
    return report


# Code of a warning -> the reason why a step with this warning has no interval: no published run is comparable.
_LONGER = {
    NOT_PREDICTED: "a kernel of the step has no predicted time",
    UNKNOWN_TRIPS: "how often a loop of the step runs is not known",
    LAUNCH_BOUND: "the step is bound by launches, and no comparable run is",
}


def summarize_simulation(
    simulation: Simulation,
    schedule: Schedule,
    *,
    source: schema.Source,
    machines: Machines,
    facts: StepFacts,
    instructions: Mapping[str, InstructionInfo],
    warnings: Sequence[Warning_],
) -> Report:
    """Return the report of a simulated step; see `summarize`.

    MFU refers to the peak of the facts' precision, or without one, of the precision of most of the program's FLOP.

    Args:
        source: only a `plan` gets an interval for its step time.
        facts: facts about the model; executed and peak FLOP are computed here.
        warnings: warnings for the report. If one means that the step is longer than predicted, there is no interval.
    """
    each, flops, cluster = facts.steps_per_call, simulation.flops, machines.cluster
    assert cluster is not None
    executed = useful_flops(schedule, facts.pipeline) if facts.pipeline else sum(flops.values())
    if facts.precision is not None or not flops:
        peak = compute_peak_flops(cluster.gpu, facts.precision or "bf16")
    else:
        peak = peak_flops(cluster.gpu, max(flops, key=lambda dtype: flops[dtype]))
    report = summarize(
        simulation.timeline,
        source=source,
        machines=machines,
        facts=facts.model_copy(update={"hardware_flops_per_gpu": executed / each, "peak_flops_per_gpu": peak}),
        instructions=instructions,
        step_bounds=(simulation.all_overlapped_s / each, simulation.all_exposed_s / each),
        warnings=warnings,
    )
    longer = next((_LONGER[w.code] for w in warnings if w.code in _LONGER), None)
    if source != "plan" or cluster.is_cpu or report.step.time_s is None:
        return report
    if longer is not None:
        part, reason = None, longer
    else:
        widest = max(flops, key=lambda dtype: flops[dtype], default="bf16")
        experts = any(_EXPERTS.search(i.source) for i, _ in schedule.walk())
        stratum = stratum_of(cluster.gpu, facts.precision or widest, experts, one_gpu=cluster.num_gpus == 1)
        part, reason = step_interval(report.step.time_s, stratum)
    found = {"time_interval": part, "time_interval_reason": reason}
    return report.model_copy(update={"step": report.step.model_copy(update=found)})


def check_invariants(report: Report) -> None:
    """Check that the parts of the report add up, with a tolerance of 1e-6 of the step.

    Raises:
        AssertionError: they do not.
    """
    step, rows = report.step, report.communication
    if step.time_s is None:
        assert all(getattr(step, k) is None for k in _ADDITIVE), "a step without a time has parts"
        return
    tolerance = _TOLERANCE * step.time_s

    def check(name: str, parts: Sequence[float | None], total: float | None) -> None:
        value = math.fsum(p or 0.0 for p in parts)
        assert total is not None, f"{name} has no total"
        assert abs(value - total) <= tolerance, f"{name}: the parts add up to {value} s, not {total} s"

    check("step", (step.compute_s, step.exposed_s, step.other_s, step.idle_s), step.time_s)
    for bound, sign, name in ((step.all_overlapped_s, 1, "all hid"), (step.all_exposed_s, -1, "none hid")):
        inside = bound is None or sign * (step.time_s - bound) >= -tolerance
        assert inside, f"the step takes {step.time_s} s, outside of its bound {bound} s if {name}"
    check("communication", (step.overlapped_s, step.exposed_s), step.communication_s)
    for key, total in (
        ("time_s", step.communication_s),
        ("overlapped_s", step.overlapped_s),
        ("exposed_s", step.exposed_s),
    ):
        check(f"communication rows' {key}", [getattr(row, key) for row in rows], total)
    for row in rows:
        if row.time_s is None:  # The seconds of this row were withheld, and are in the row without axes.
            continue
        name = f"row {'+'.join(row.axes) or '(no axis)'} {row.collective}"
        check(f"{name} time_s", (row.overlapped_s, row.exposed_s), row.time_s)
        assert (row.sole_exposed_s or 0) <= (row.exposed_s or 0) + tolerance, f"{name}: sole_exposed_s > exposed_s"
        if row.ops:
            check(f"{name} ops' exposed_s", [op.exposed_s for op in row.ops], row.exposed_s)


def training_cost(step_time_s: float | None, facts: StepFacts, machines: Machines) -> schema.TrainingPart:
    """Return the time and the cost of the whole training; unknown values are None.

    Returns:
        Hours of wall time, GPU hours (None on CPUs), cost in the currency of `price_per_gpu_hour`, and seconds of one
        checkpoint.
    """
    steps, cluster = facts.training_steps, machines.cluster
    checkpoint_s = checkpoint_time_s(facts.state_bytes, cluster) if cluster else None
    if step_time_s is None or steps is None:
        return schema.TrainingPart(steps=steps, checkpoint_s=checkpoint_s)
    hours = step_time_s * steps / 3600
    has_gpus = cluster is None or not cluster.is_cpu
    gpu_hours = hours * machines.num_gpus if machines.num_gpus and has_gpus else None
    price = cluster.price_per_gpu_hour if cluster else None
    cost = gpu_hours * price if gpu_hours is not None and price is not None else None
    return schema.TrainingPart(steps=steps, hours=hours, gpu_hours=gpu_hours, cost=cost, checkpoint_s=checkpoint_s)


def cluster_part(cluster: Cluster | None, num_gpus: int | None = None) -> schema.ClusterPart:
    """Return the cluster as a part of the report; without a described cluster, only the number of GPUs."""
    if cluster is None:
        return schema.ClusterPart(num_gpus=num_gpus)
    return schema.ClusterPart.from_sources(cluster, gpu=cluster.gpu.key)


def mesh_part(placement: Placement) -> tuple[schema.MeshAxisPart, ...]:
    """Return each mesh axis with its factors: `infiniband` is the largest number of NVLink domains along it."""
    across = placement.domains_along()
    return tuple(
        schema.MeshAxisPart(axis=name, size=size, nvlink=size // across[name], infiniband=across[name])
        for name, size in zip(placement.axis_names, placement.shape)
    )


def pipeline_part(pipeline: PipelineReport, rows: Iterable[CommunicationPart]) -> schema.PipelinePart:
    """Return a pipeline's schedule, with the number and the time of its permutes."""
    permutes = [r for r in rows if r.axes == (pipeline.axis,) and r.collective == "collective-permute"]
    time_s, exposed_s = ([getattr(r, key) for r in permutes] for key in ("time_s", "exposed_s"))
    known = pipeline.model_dump(exclude={"useful", "picture"})
    return schema.PipelinePart(
        **known,
        permute_count=sum(r.count for r in permutes),
        permute_s=_sum(time_s),
        permute_exposed_s=_sum(exposed_s),
        picture=pipeline.picture if sum(map(len, pipeline.picture)) <= _MOST_CELLS else None,
    )


def _sum(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _bubble_s(
    pipeline: PipelineReport, op_names: Sequence[str], totals: KernelTotals, instructions: Mapping[str, InstructionInfo]
) -> float:
    sources = (instructions[name].source if name in instructions else "" for name in op_names)
    return sum((1 - pipeline.useful_share(source)) * float(t) for source, t in zip(sources, totals.time_s))


def step_part(
    source: schema.Source,
    sweeps: Sequence[Sweep],
    facts: StepFacts = NO_FACTS,
    num_gpus: int | None = None,
    bounds: tuple[float | None, float | None] = (None, None),
) -> StepPart:
    """Return the step as a mean over device steps, with its rates.

    Args:
        source: for `profile`, idle time is split by place; for others, the bubble is 0, and the caller may set it.
        sweeps: device steps, as means per training step; without sweeps, all times are None.
        num_gpus: number of GPUs of the program; None leaves out MFU, tokens/s and examples/s.
        bounds: seconds of the step if compute hid all communication, and if it hid none.
    """
    if not sweeps:
        return StepPart(model_flops=facts.model_flops)
    means, measured = _means(sweeps), source == "profile"
    time_s = means["time_s"]
    bubble_s = None if measured else 0.0  # A trace does not show which work of a pipeline was masked.
    peak = facts.peak_flops_per_gpu
    peak_of_all = peak * num_gpus if peak and num_gpus else None
    return StepPart(
        **means,  # pyright: ignore[reportArgumentType]
        bubble_s=bubble_s,
        bubble_fraction=_ratio(bubble_s, time_s),
        model_flops=facts.model_flops,
        mfu=_utilization(facts.model_flops, time_s, peak_of_all),
        mfu_causal=_utilization(facts.model_flops_causal, time_s, peak_of_all),
        hfu=_utilization(facts.hardware_flops_per_gpu, time_s, peak),
        tokens_per_s_per_gpu=_utilization(facts.tokens, time_s, num_gpus),
        examples_per_s_per_gpu=_utilization(facts.examples, time_s, num_gpus),
        all_overlapped_s=bounds[0],
        all_exposed_s=bounds[1],
        **(_idle_parts(sweeps, means["idle_s"]) if measured else {}),
    )


def _idle_parts(sweeps: Sequence[Sweep], idle_s: float) -> dict[str, float]:
    """Split the idle time of measured steps: inside the step, between steps, and before the next input."""
    between_s, input_s = (math.fsum(getattr(s, n) for s in sweeps) / len(sweeps) for n in ("between_s", "input_s"))
    inside_s = max(0.0, idle_s - between_s - input_s)
    return {"idle_inside_s": inside_s, "idle_between_s": between_s, "idle_input_s": input_s}


def _means(sweeps: Sequence[Sweep]) -> dict[str, float]:
    of_sweep = {name: "window_s" if name == "time_s" else name for name in _ADDITIVE}
    return {name: math.fsum(getattr(s.total, field) for s in sweeps) / len(sweeps) for name, field in of_sweep.items()}


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _utilization(amount: float | None, time_s: float, capacity: float | None) -> float | None:
    return _ratio(amount, time_s * capacity if capacity else None)


def _spreads(timeline: Timeline, sweeps: Sequence[Sweep]) -> schema.SpreadsPart:
    if not sweeps:
        return schema.SpreadsPart()

    def spread(field: str) -> schema.SpreadPart:
        values = np.array([getattr(s.total, field) for s in sweeps])
        low, median, p90, high = map(float, np.percentile(values, [0, 50, 90, 100]))
        worst = int(np.argmax(values))
        where = {"worst_device": timeline.steps[worst].device, "worst_step": timeline.steps[worst].step}
        return schema.SpreadPart(min=low, median=median, p90=p90, max=high, **where)

    fields = {"time_s": "window_s", "compute_s": "compute_s", "exposed_s": "exposed_s", "idle_s": "idle_s"}
    return schema.SpreadsPart(**{key: spread(field) for key, field in fields.items()})


def _step_samples(
    timeline: Timeline, sweeps: Sequence[Sweep], trace: Trace | None, each: int
) -> tuple[schema.StepSample, ...]:
    """Return each captured step as means over its devices; steps that are left out of other numbers are included."""
    left_out = trace.left_out if trace else ()
    by_step: dict[int, list[tuple[Sweep, int]]] = {}
    found = [*zip(timeline.steps, sweeps), *((out.step, out.swept.mean_over(each)) for out in left_out)]
    for step, swept in found:
        by_step.setdefault(step.step, []).append((swept, step.device))
    why = {out.step.step: out.why for out in left_out}
    samples = []
    for number, members in sorted(by_step.items()):
        slowest, device = max(members, key=lambda member: member[0].total.window_s)
        samples.append(
            schema.StepSample(
                step=number,
                **_means([swept for swept, _ in members]),
                slowest_device=device,
                slowest_time_s=slowest.total.window_s,
                left_out=why.get(number),
            )
        )
    return tuple(samples)


def _unmapped_warning(rows: Sequence[CommunicationPart]) -> list[Warning_]:
    """Return a warning if communication maps to no mesh axis; groups of one GPU do not count."""
    unmapped = [row for row in rows if not row.axes and row.group_size != 1]
    seconds = math.fsum(row.time_s or 0.0 for row in unmapped)
    if not unmapped:
        return []
    kinds = ", ".join(sorted({row.collective or "unknown" for row in unmapped}))
    message = f"{format_seconds(seconds)} of communication a step ({kinds}) map to no mesh axis."
    return [Warning_(code="unmapped_communication", message=message, seconds=seconds)]


def group_rows(collectives: Sequence[Collective]) -> tuple[np.ndarray, list[list[int]]]:
    """Return the row of every collective, and the collectives of every row.

    Returns:
        [n + 1] the row of each collective, where the last entry is the row for communication without an instruction;
        and for each row, the indices of its collectives.
    """
    rows: dict[tuple, list[int]] = {}
    for i, collective in enumerate(collectives):
        rows.setdefault(tuple(getattr(collective, name) for name in _ROW), []).append(i)
    groups = [*rows.values(), []]
    row_of = np.full(len(collectives) + 1, len(groups) - 1, np.intp)
    for row, members in enumerate(groups):
        row_of[members] = row
    return row_of, groups


def communication_rows(
    timeline: Timeline,
    sweeps: Sequence[Sweep],
    row_of: np.ndarray,
    groups: Sequence[Sequence[int]],
    instructions: Mapping[str, InstructionInfo] | None = None,
    cluster: Cluster | None = None,
) -> tuple[CommunicationPart, ...]:
    """Return rows as means over the device steps, the most exposed first; rows that never ran are left out."""
    if not sweeps:
        return ()
    mean = {
        name: np.mean([getattr(s, name) for s in sweeps], axis=0)
        for name in ("share_s", "exposed_share_s", "sole_exposed_s", "busy_s", "count")
    }
    for name in ("transfer_s", "exposed_wait_s"):
        known = [value for s in sweeps if (value := getattr(s, name)) is not None]
        mean[name] = np.mean(known, axis=0) if len(known) == len(sweeps) else np.full(len(row_of), np.nan)
    rows = [_row(timeline.collectives, members, mean, instructions or {}, cluster) for members in groups[:-1]]
    unmapped = len(timeline.collectives)
    if mean["count"][unmapped] > 0:
        rows.append(CommunicationPart(axes=(), **_seconds([unmapped], mean)))
    return tuple(sorted((r for r in rows if r.count), key=lambda r: (-(r.exposed_s or 0), -(r.time_s or 0), r.axes)))


def _row(
    collectives: Sequence[Collective],
    members: Sequence[int],
    mean: dict[str, np.ndarray],
    instructions: Mapping[str, InstructionInfo],
    cluster: Cluster | None,
) -> CommunicationPart:
    first = collectives[members[0]]
    payload = _whole(sum(float(mean["count"][i]) * collectives[i].payload_bytes for i in members))
    seconds = _seconds(members, mean)
    linked, grouped = first.link or None, first.group_size or None
    moving_s = seconds["busy_s"] if seconds["transfer_s"] is None else seconds["transfer_s"]
    return CommunicationPart.from_sources(
        first,
        link=linked,
        group_size=grouped,
        num_groups=grouped and first.num_groups,
        gpus_per_domain=linked and first.gpus_per_domain,
        dtype=first.dtype or None,
        payload_bytes=grouped and payload,
        ops=_ops(collectives, members, mean, instructions),
        **seconds,
        **wire_numbers(first, payload, moving_s, cluster),
    )


def wire_numbers(c: Collective, payload: float, moving_s: float | None, cluster: Cluster | None) -> dict[str, Any]:
    """Return a row's bytes on the links of one GPU, its bus bandwidth and the peak; None for what is unknown.

    Args:
        c: one of the row's collectives; all have the same kind, group and link.
        payload: bytes of the whole row on one GPU, per step.
        moving_s: seconds per step in which these bytes move; if waits are unknown, they are included.
        cluster: the cluster, for the peak of its links; None leaves the peak out.
    """
    wire = payload * wire_factor(c.collective, c.group_size)
    across = wire * infiniband_share(c)
    linked, grouped = c.link or None, c.group_size or None
    return {
        "wire_bytes": grouped and _whole(wire),
        "wire_bytes_nvlink": linked and _whole(wire - across),
        "wire_bytes_infiniband": linked and _whole(across),
        "bus_bandwidth_bytes_per_s": wire / moving_s if wire and moving_s else None,
        "bus_bandwidth_peak_bytes_per_s": peak_bus_bandwidth_bytes_per_s(c, cluster) if wire else None,
    }


def _seconds(members: Sequence[int], mean: dict[str, np.ndarray]) -> dict:
    total = {name: float(values[list(members)].sum()) for name, values in mean.items()}
    transfer_s, waited_s = (None if np.isnan(total[name]) else total[name] for name in ("transfer_s", "exposed_wait_s"))
    return {
        "count": _whole(total["count"]),
        "time_s": total["share_s"],
        "overlapped_s": _difference(total["share_s"], total["exposed_share_s"]),
        "exposed_s": total["exposed_share_s"],
        "sole_exposed_s": total["sole_exposed_s"],
        "exposed_wait_s": None if transfer_s is None or waited_s is None else min(waited_s, total["exposed_share_s"]),
        "busy_s": total["busy_s"],
        "transfer_s": transfer_s,
        "wait_s": None if transfer_s is None else max(0.0, total["busy_s"] - transfer_s),
    }


def _difference(whole: float, part: float) -> float:
    """Return whole - part, or 0 if the difference is only a rounding error."""
    rest = whole - part
    return rest if rest > 1e-9 * whole else 0.0


def _ops(
    collectives: Sequence[Collective],
    members: Sequence[int],
    mean: dict[str, np.ndarray],
    instructions: Mapping[str, InstructionInfo],
) -> tuple[schema.OpPart, ...]:
    ops = []
    for i in (i for i in members if mean["count"][i] > 0):
        each, info = collectives[i], instructions.get(collectives[i].name)
        payload = _whole(mean["count"][i] * each.payload_bytes)
        whole = sum(info.causes.values()) if info else 0
        part = schema.OpPart.from_sources(
            each,
            source=each.source or None,
            line=info.line if info else None,
            count=_whole(mean["count"][i]),
            payload_bytes=payload,
            busy_s=float(mean["busy_s"][i]),
            transfer_s=None if np.isnan(mean["transfer_s"][i]) else float(mean["transfer_s"][i]),
            exposed_s=float(mean["exposed_share_s"][i]),
            arrays=info.arrays if info else 1,
            causes={cause: payload * n / whole for cause, n in info.causes.items()} if info and whole else {},
        )
        ops.append(part)
    return tuple(sorted(ops, key=lambda op: (-(op.exposed_s or 0), -(op.busy_s or 0), op.name)))


def kernels_part(
    op_names: Sequence[str],
    totals: KernelTotals,
    instructions: Mapping[str, InstructionInfo],
    *,
    steps_per_execution: int = 1,
) -> KernelsPart | None:
    """Return compute by kind, as means over the device steps; None if no kernels are known.

    The seconds of a kind are shares, like those of a communication row: each of k operations that run at once gets 1/k
    of the time, so that the kinds add up to the step's `compute_s`.

    Args:
        op_names: names of instructions, or of kernels whose instruction is unknown.
        totals: times of these operations.
        instructions: name of an instruction -> its kind and source; if empty, kinds are guessed from kernel names.
        steps_per_execution: training steps per execution of the program.
    """
    if not op_names:
        return None
    known = [instructions.get(name) for name in op_names]
    unknown = {OTHER_KERNELS: UNMAPPED} if instructions else {}
    by_name = {name: kind_of_kernel(name) for name, info in zip(op_names, known) if info is None}
    kind_of = [info.kind if info else unknown.get(by_name[n], by_name[n]) for n, info in zip(op_names, known)]
    kinds = list(dict.fromkeys(kind_of))
    kind_of_op = np.array([kinds.index(kind) for kind in kind_of], np.intp)
    time_s, busy_s, count = (
        np.pad(v, (0, len(known) - len(v))) / steps_per_execution for v in (totals.time_s, totals.busy_s, totals.count)
    )
    classes = [
        schema.KernelClassPart(
            kind=kind,
            count=_whole(float(count[kind_of_op == k].sum())),
            time_s=float(time_s[kind_of_op == k].sum()),
            busy_s=float(busy_s[kind_of_op == k].sum()),
            ops=_kernel_ops(op_names, known, np.flatnonzero(kind_of_op == k), busy_s, count),
        )
        for k, kind in enumerate(kinds)
    ]
    return KernelsPart(classes=tuple(sorted((c for c in classes if c.count), key=lambda c: -(c.time_s or 0))))


def _kernel_ops(
    op_names: Sequence[str], known: Sequence[InstructionInfo | None], members: np.ndarray, busy_s, count
) -> tuple[schema.KernelPart, ...]:
    """Return the instructions of one kind with the most busy seconds; operations with the same name are merged."""
    chosen: list[int] = members.tolist()
    first = {op_names[i]: i for i in reversed(chosen)}
    number = {name: n for n, name in enumerate(first)}
    index = [number[op_names[i]] for i in chosen]
    seconds, runs = (np.bincount(index, weights=values[members]).tolist() for values in (busy_s, count))
    most = sorted(((-seconds[n], name, runs[n]) for name, n in number.items() if runs[n]))[:_MAX_KERNELS]
    parts = []
    for busy, name, total in most:
        info = known[first[name]]
        source = (info.source or None) if info else None
        parts.append(schema.KernelPart.from_sources(info, name=name, source=source, count=_whole(total), busy_s=-busy))
    return tuple(parts)


def _whole(x: float) -> int | float:
    """Return an int if the value is whole, so that a count of 3 prints as 3; means of unequal devices stay floats."""
    nearest = round(float(x))
    return nearest if abs(x - nearest) <= 1e-9 * max(1.0, abs(x)) else float(x)
