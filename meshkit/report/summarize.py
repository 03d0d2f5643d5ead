"""Timeline -> Report: means over devices and steps, rows of communication, and the invariants.

plan hands in a simulated timeline, rehearse and profile a measured one; from here on nothing differs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshkit.hlo.instructions import InstructionInfo
from meshkit.report.kernel_rows import Totals, kernels_part, totals_of
from meshkit.report.parts import KernelsPart, QualityPart, StepSample, StragglersPart
from meshkit.report.rows import communication_rows, group_rows
from meshkit.report.schema import (
    ClusterPart,
    CommunicationPart,
    CompilePart,
    MemoryPart,
    MeshAxisPart,
    ProgramPart,
    Report,
    Source,
    SpreadPart,
    SpreadsPart,
    StepPart,
    TrainingPart,
    Warning_,
    WindowPart,
)
from meshkit.timeline import Sweep, Timeline, sweep
from meshkit.units import format_seconds

if TYPE_CHECKING:
    from meshkit.config.cluster import Cluster
    from meshkit.config.mesh import MeshSpec

_ADDITIVE = ("time_s", "compute_s", "communication_s", "overlapped_s", "exposed_s", "other_s", "idle_s")
_TOLERANCE = 1e-6  # relative, of the contract: room for the rounding of sums over 1e5 spans, none for a wrong union


@dataclass(frozen=True)
class Work:
    """What one step computes, to relate its time to; None where unknown.

    Attributes:
        model_flops, model_flops_causal: FLOP of the model over all GPUs; the second halves the attention term.
        hardware_flops_per_gpu: executed matmul FLOP of one GPU, with recompute.
        tokens: tokens of a step over all GPUs.
        peak_flops_per_gpu: dense peak of the compute precision, FLOP/s.
        num_gpus: GPUs that share the work.
    """

    model_flops: float | None = None
    model_flops_causal: float | None = None
    hardware_flops_per_gpu: float | None = None
    tokens: float | None = None
    peak_flops_per_gpu: float | None = None
    num_gpus: int | None = None


def summarize(
    timeline: Timeline,
    *,
    source: Source,
    cluster: Cluster | None = None,
    mesh: MeshSpec | None = None,
    mesh_axes: Sequence[Mapping] | None = None,
    processes_seen: int = 1,
    processes_expected: int = 1,
    work: Work | None = None,
    memory: MemoryPart | None = None,
    program: ProgramPart | None = None,
    compile: CompilePart | None = None,
    training: TrainingPart | None = None,
    step_bounds: tuple[float | None, float | None] = (None, None),
    steps_per_execution: int = 1,
    instructions: Mapping[str, InstructionInfo] | None = None,
    sweeps: Sequence[Sweep] | None = None,
    kernels: Totals | None = None,
    quality: QualityPart | None = None,
    stragglers: StragglersPart | None = None,
    warnings: Sequence[Warning_] = (),
) -> Report:
    """The report of a timeline; every number is a mean over its device steps.

    Args:
        timeline: simulated or measured; may have no steps, then times are None.
        source: which verb it comes from.
        cluster, mesh: what the program runs on, where a description exists.
        mesh_axes: `{"axis", "size", "nvlink", "infiniband"}` of each axis, where no spec exists.
        work: to relate the step time to; what is unknown in it is None in the report.
        memory, program, compile, training, quality, stragglers, warnings: parts that others computed.
        step_bounds: (all_overlapped_s, all_exposed_s) of a prediction.
        instructions: name of an instruction -> what it is, for compute by kind and for lines of source.
        sweeps: of the timeline's steps, where somebody has swept them already (the steps then need no spans).
        kernels: what each of `timeline.op_names` took, where somebody has added it up already.
        steps_per_execution: training steps in each step of the timeline, where one execution of the program makes
            several (a round of local SGD).

    Raises:
        AssertionError: the result breaks an invariant of the report (a bug of ours).
    """
    row_of, groups = group_rows(timeline.collectives)
    each = steps_per_execution
    found = sweeps or [sweep(step, len(timeline.collectives), row_of) for step in timeline.steps]
    sweeps = [swept.each_of(each) for swept in found]
    lines = {name: info.line for name, info in (instructions or {}).items()}
    rows = communication_rows(timeline, sweeps, row_of, groups, lines, cluster)
    report = Report(
        source=source,
        cluster=cluster_part(cluster, work),
        mesh=_mesh_part(mesh, mesh_axes),
        window=WindowPart(
            steps=len({s.step for s in timeline.steps}) * each,
            devices=len({s.device for s in timeline.steps}),
            processes_seen=processes_seen,
            processes_expected=processes_expected,
        ),
        step=_step_part(timeline, sweeps, work or Work(), step_bounds, each),
        spread=SpreadsPart() if source == "plan" else _spreads(timeline, sweeps, each),
        communication=rows,
        memory=memory or MemoryPart(),
        program=program or ProgramPart(),
        compile=compile or CompilePart(),
        training=training or TrainingPart(),
        kernels=_kernels(timeline, kernels, instructions, each),
        quality=quality,
        stragglers=stragglers,
        per_step=None if source == "plan" else step_samples(timeline, sweeps, each),
        warnings=(*warnings, *_unmapped_warning(rows)),
    )
    check_invariants(report)
    return report


def _kernels(
    timeline: Timeline, totals: Totals | None, instructions: Mapping[str, InstructionInfo] | None, each: int
) -> KernelsPart | None:
    if not timeline.steps or not instructions:
        return None
    return kernels_part(timeline.op_names, totals or totals_of(timeline), instructions, steps_per_execution=each)


def check_invariants(report: Report) -> None:
    """Asserts that the parts of the report add up, to 1e-6 of the step.

    Raises:
        AssertionError: naming the sum that does not hold.
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
        if row.time_s is None:  # withheld: its seconds are in the row without axes
            continue
        name = f"row {'+'.join(row.axes) or '(no axis)'} {row.collective}"
        check(f"{name} time_s", (row.overlapped_s, row.exposed_s), row.time_s)
        assert (row.sole_exposed_s or 0) <= (row.exposed_s or 0) + tolerance, f"{name} is alone longer than exposed"
        if row.ops:
            check(f"{name} ops' exposed_s", [op.exposed_s for op in row.ops], row.exposed_s)


def training_cost(
    step_time_s: float | None,
    steps: int | None,
    num_gpus: int | None,
    price_per_gpu_hour: float | None,
    checkpoint_s: float | None = None,
) -> TrainingPart:
    """Time and cost of `steps` steps at one step time; what cannot be known is None."""
    if step_time_s is None or steps is None:
        return TrainingPart(steps=steps, checkpoint_s=checkpoint_s)
    hours = step_time_s * steps / 3600
    gpu_hours = hours * num_gpus if num_gpus else None
    cost = gpu_hours * price_per_gpu_hour if gpu_hours is not None and price_per_gpu_hour is not None else None
    return TrainingPart(steps=steps, hours=hours, gpu_hours=gpu_hours, cost=cost, checkpoint_s=checkpoint_s)


def cluster_part(cluster: Cluster | None, work: Work | None = None) -> ClusterPart:
    """The cluster as a report has it; without a description only the number of GPUs."""
    if cluster is None:
        return ClusterPart(num_gpus=work.num_gpus if work else None)
    return ClusterPart(
        gpu=cluster.gpu.key,
        hosts=cluster.hosts,
        gpus_per_host=cluster.gpus_per_host,
        num_gpus=cluster.num_gpus,
        nvlink_domain_size=cluster.nvlink_domain_size,
        num_nvlink_domains=cluster.num_nvlink_domains,
        scale_up=cluster.scale_up,
        fabric=cluster.fabric,
    )


def _mesh_part(mesh: MeshSpec | None, mesh_axes: Sequence[Mapping] | None) -> tuple[MeshAxisPart, ...]:
    if mesh is None:
        return tuple(MeshAxisPart(**axis) for axis in mesh_axes or ())
    return tuple(
        MeshAxisPart(axis=a.name, size=a.size, nvlink=int(a.nvlink), infiniband=int(a.infiniband)) for a in mesh.axes
    )


def _step_part(timeline: Timeline, sweeps: Sequence[Sweep], work: Work, bounds, steps_per_execution: int) -> StepPart:
    if not sweeps:
        return StepPart(model_flops=work.model_flops)
    totals = [s.total for s in sweeps]

    def mean(name: str) -> float:
        return math.fsum(getattr(t, name) for t in totals) / len(totals)

    time_s = mean("window_s")
    bubbles = [s.bubble_s for s in timeline.steps if s.bubble_s is not None]
    known = len(bubbles) == len(totals)
    bubble_s = math.fsum(bubbles) / len(totals) / steps_per_execution if known else None
    peak = work.peak_flops_per_gpu
    peak_of_all = peak * work.num_gpus if peak and work.num_gpus else None
    return StepPart(
        time_s=time_s,
        **{name: mean(name) for name in _ADDITIVE[1:]},
        bubble_s=bubble_s,
        bubble_fraction=_ratio(bubble_s, time_s),
        model_flops=work.model_flops,
        mfu=_utilization(work.model_flops, time_s, peak_of_all),
        mfu_causal=_utilization(work.model_flops_causal, time_s, peak_of_all),
        hfu=_utilization(work.hardware_flops_per_gpu, time_s, peak),
        tokens_per_s_per_gpu=_utilization(work.tokens, time_s, work.num_gpus),
        all_overlapped_s=bounds[0],
        all_exposed_s=bounds[1],
    )


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _utilization(amount: float | None, time_s: float, capacity: float | None) -> float | None:
    """amount / (time x capacity); None where anything is unknown."""
    return _ratio(amount, time_s * capacity if capacity else None)


def _spreads(timeline: Timeline, sweeps: Sequence[Sweep], steps_per_execution: int) -> SpreadsPart:
    if not sweeps:
        return SpreadsPart()
    names = {"time_s": "window_s", "compute_s": "compute_s", "exposed_s": "exposed_s", "idle_s": "idle_s"}
    numbers = _training_steps(timeline, steps_per_execution)
    values = {key: np.array([getattr(s.total, field) for s in sweeps]) for key, field in names.items()}
    return SpreadsPart(**{key: _spread(timeline, numbers, of_key) for key, of_key in values.items()})


def _training_steps(timeline: Timeline, steps_per_execution: int) -> list[int]:
    """The training step of each device step; where one execution makes several, the number of its last."""
    first = min((s.step for s in timeline.steps), default=0)
    return [first + (s.step - first) * steps_per_execution for s in timeline.steps]


def _spread(timeline: Timeline, numbers: Sequence[int], values: np.ndarray) -> SpreadPart:
    worst = int(np.argmax(values))
    low, median, p90, high = np.percentile(values, [0, 50, 90, 100])
    return SpreadPart(
        min=float(low),
        median=float(median),
        p90=float(p90),
        max=float(high),
        worst_device=timeline.steps[worst].device,
        worst_step=numbers[worst],
    )


def step_samples(timeline: Timeline, sweeps: Sequence[Sweep], steps_per_execution: int = 1) -> tuple[StepSample, ...]:
    """Each captured step by itself: means over its devices, which add up as those of the whole report do.

    Where one execution makes several training steps it is one sample, a mean of them, with the number of the last.
    """
    by_step: dict[int, list[int]] = {}
    for i, number in enumerate(_training_steps(timeline, steps_per_execution)):
        by_step.setdefault(number, []).append(i)
    samples = []
    for number, members in sorted(by_step.items()):
        totals = [sweeps[i].total for i in members]
        slowest = max(members, key=lambda i: sweeps[i].total.window_s)
        means = {name: math.fsum(getattr(t, name) for t in totals) / len(totals) for name in _ADDITIVE[1:]}
        samples.append(
            StepSample(
                step=number,
                time_s=math.fsum(t.window_s for t in totals) / len(totals),
                **means,
                slowest_device=timeline.steps[slowest].device,
                slowest_time_s=sweeps[slowest].total.window_s,
            )
        )
    return tuple(samples)


def _unmapped_warning(rows: Sequence[CommunicationPart]) -> list[Warning_]:
    """Says how much communication lies on no mesh axis (a group of one GPU communicates with nobody: not counted)."""
    unmapped = [row for row in rows if not row.axes and row.group_size != 1]
    seconds = math.fsum(row.time_s or 0.0 for row in unmapped)
    if not unmapped:
        return []
    kinds = ", ".join(sorted({row.collective or "unknown" for row in unmapped}))
    message = f"{format_seconds(seconds)} of communication a step ({kinds}) map to no mesh axis."
    return [Warning_(code="unmapped_communication", message=message, seconds=seconds)]
