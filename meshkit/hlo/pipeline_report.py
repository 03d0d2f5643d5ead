"""PipelineReport: the cost of a pipeline's schedule, and the useful share of a program's instructions.

In a lockstep pipeline every stage works in every tick, on garbage where it has nothing to do. A program and a timeline
count that as compute; the schedule says which share of it was useful. Instructions carry the scopes of the pipeline in
their op_name path, and the innermost one decides (`PipelineReport.useful`).

`meshkit.parallel.pipeline` makes the report; a step's facts, the sidecar of a trace and the report carry it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from meshkit.hlo.schedule import Schedule


class ScheduleCost(BaseModel):
    """A schedule's cost in closed form; the formulas are in `meshkit.parallel.pipeline.schedules`."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    axis: str
    """The mesh axis that shards the layers."""
    schedule: str
    stages: int
    """S, the number of stages."""
    virtual_stages: int
    """v, the chunks of layers of a stage."""
    microbatches: int
    layers: int
    padding_layers: int
    """Inactive layers that are computed all the same."""
    warmup_ticks: int
    """Ticks in which stages only go forward."""
    steady_ticks: int
    """Ticks in which they go both ways."""
    drain_ticks: int
    """Ticks in which they only go back; the three add up to a step."""
    slots: int
    """Inputs of chunks that each stage keeps at most."""
    bubble_fraction: float
    """Share of the layers' work that is useless, padding included."""
    executed_over_useful: float
    """Executed over useful FLOP of the layers."""


class PipelineReport(ScheduleCost):
    """A schedule's cost, its picture, and the useful share of a program's work."""

    picture: tuple[tuple[str, ...], ...]
    """A row for each stage, a text for each tick: `F3`, `B1` or both, `F3.1` with the chunk, empty where it waits."""
    useful: dict[str, float]
    """Name of a scope -> useful share of what runs in it, the mean over stages."""

    def useful_share(self, source: str) -> float:
        """Return the useful share of an instruction, by the innermost scope of the pipeline in its op_name path."""
        found = re.findall("|".join(self.useful), source)
        return self.useful[found[-1]] if found else 1.0


def useful_flops(schedule: Schedule, pipeline: PipelineReport | None = None) -> float:
    """Return the matmul and attention FLOP of one GPU and step, with recompute and without masked work of a pipeline.

    Args:
        schedule: schedule of the step. The branch of a conditional with the most FLOP counts, and one iteration of a
            loop of unknown length.
        pipeline: gives each instruction's `useful_share`; None counts everything.
    """

    def count(name: str) -> float:
        total = 0.0
        for i in schedule.computations[name]:
            if i.cost:
                flops = sum(i.cost.matmul_flops.values()) + i.cost.attention_flops
                total += flops * (pipeline.useful_share(i.source) if pipeline else 1.0)
            if i.bodies:
                total += max(count(body) for body in i.bodies) * (1 if i.trip_count is None else i.trip_count)
        return total

    return count(schedule.entry)
