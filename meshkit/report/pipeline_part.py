"""What a pipeline does to a step: its schedule, its bubble, its permutes.

    Pipeline.report(M) of meshkit.parallel.pipeline -> bubble and useful FLOP of a step, PipelinePart of its report

In a lockstep pipeline every stage works in every tick, on garbage where it has nothing to do. That is compute like any
other in a timeline; the schedule says which share of it counted. A program's instructions carry the scopes of the
pipeline in their op_name path (`PipelineReport.useful`), the innermost of which decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from meshkit.hlo.instructions import InstructionInfo
from meshkit.report.parts import Part

if TYPE_CHECKING:
    from meshkit.hlo.schedule import Schedule
    from meshkit.report.kernel_rows import Totals
    from meshkit.report.schema import CommunicationPart, Report

_MOST_CELLS = 200_000  # of a picture in report.json; a larger one is left out


class ScheduleCost(Protocol):
    """What this module reads of `meshkit.parallel.pipeline.PipelineReport`, beside the fields of PipelinePart."""

    @property
    def axis(self) -> str: ...
    @property
    def useful(self) -> Mapping[str, float]: ...
    @property
    def picture(self) -> Sequence[Sequence[str]]: ...


class PipelinePart(Part):
    """A pipeline's schedule and what it costs; closed forms of the schedule, but for the permutes.

    Attributes:
        axis: mesh axis that cuts the layers.
        schedule, stages, virtual_stages, microbatches: name, S, v, M.
        layers, padding_layers: of the model; inactive ones that are computed all the same.
        warmup_ticks, steady_ticks, drain_ticks: in which stages only go forward, go both ways, only go back.
        slots: inputs of chunks that each stage keeps at most.
        bubble_fraction: share of the layers' work that does nothing useful, padding included.
        executed_over_useful: of the layers' FLOP.
        permute_count: messages between stages a step and GPU.
        permute_s, permute_exposed_s: their time, and the part under which nothing computes.
        picture: by stage and tick `F3`, `B1` or both, `F3.1` with the chunk; null where it would be very large.
    """

    axis: str
    schedule: str
    stages: int
    virtual_stages: int
    microbatches: int
    layers: int
    padding_layers: int
    warmup_ticks: int
    steady_ticks: int
    drain_ticks: int
    slots: int
    bubble_fraction: float
    executed_over_useful: float
    permute_count: int | float | None = None
    permute_s: float | None = None
    permute_exposed_s: float | None = None
    picture: tuple[tuple[str, ...], ...] | None = None


def pipeline_part(cost: ScheduleCost, rows: Iterable[CommunicationPart]) -> PipelinePart:
    """The part of a report about a pipeline.

    Args:
        cost: of its schedule.
        rows: communication of the report.
    """
    permutes = [r for r in rows if r.axes == (cost.axis,) and r.collective == "collective-permute"]
    names = PipelinePart.model_fields.keys() - {"picture", "permute_count", "permute_s", "permute_exposed_s"}
    size = sum(len(row) for row in cost.picture)
    return PipelinePart(
        **{name: getattr(cost, name) for name in names},
        permute_count=sum(r.count for r in permutes),
        permute_s=_sum(r.time_s for r in permutes),
        permute_exposed_s=_sum(r.exposed_s for r in permutes),
        picture=tuple(tuple(row) for row in cost.picture) if size <= _MOST_CELLS else None,
    )


def with_pipeline(
    report: Report,
    cost: ScheduleCost,
    op_names: Sequence[str],
    totals: Totals,
    instructions: Mapping[str, InstructionInfo],
    *,
    steps_per_execution: int = 1,
) -> Report:
    """A report that knows of its pipeline: `step.bubble_s`, `step.bubble_fraction` and `pipeline`.

    Args:
        report: of a step with a pipeline.
        cost: of its schedule.
        op_names, totals: the operations that compute, and what each took, as means over executions of the program.
        instructions: what they are.
        steps_per_execution: training steps in each execution.
    """
    part = pipeline_part(cost, report.communication)
    if report.step.time_s is None:
        return report.model_copy(update={"pipeline": part})
    sources = (instructions[name].source if name in instructions else "" for name in op_names)
    wasted = [1 - _useful(source, cost.useful) for source in sources]
    bubble_s = sum(share * float(t) for share, t in zip(wasted, totals.time_s)) / steps_per_execution
    update = {"bubble_s": bubble_s, "bubble_fraction": bubble_s / report.step.time_s}
    return report.model_copy(update={"pipeline": part, "step": report.step.model_copy(update=update)})


def useful_flops(schedule: Schedule, cost: ScheduleCost) -> float:
    """Matmul and attention FLOP of one GPU and step, recompute included, masked work of a pipeline left out."""

    def count(name: str) -> float:
        total = 0.0
        for i in schedule.computations[name]:
            if i.cost:
                flops = sum(i.cost.matmul_flops.values()) + i.cost.attention_flops
                total += flops * _useful(i.source, cost.useful)
            if i.bodies:
                total += max(count(body) for body in i.bodies) * (1 if i.trip_count is None else i.trip_count)
        return total

    return count(schedule.entry)


def _useful(source: str, shares: Mapping[str, float]) -> float:
    """The share of an instruction that counts, by the innermost scope of the pipeline in its op_name path."""
    found = re.findall("|".join(shares), source)
    return shares[found[-1]] if found else 1.0


def _sum(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None
