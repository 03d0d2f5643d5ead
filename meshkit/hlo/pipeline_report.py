"""Define the report of a pipeline: the cost of its schedule, and the useful share of a program's instructions.

In a lockstep pipeline every stage computes in every tick, on garbage if it has no microbatch. A program and a timeline
count this as compute; the schedule gives the share of it that is useful. The op_name paths of instructions have scopes
of the pipeline, and the innermost scope determines the share (`PipelineReport.useful`).

`meshkit.parallel.pipeline` makes a PipelineReport. The facts of a step, the sidecar file of a trace and the report
contain it.
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
    """v, the number of chunks of layers on each stage."""
    microbatches: int
    layers: int
    padding_layers: int
    """Inactive layers that are computed nevertheless."""
    warmup_ticks: int
    """Ticks with forward passes only."""
    steady_ticks: int
    """Ticks with forward and backward passes."""
    drain_ticks: int
    """Ticks with backward passes only; the three kinds of ticks add up to a step."""
    slots: int
    """Largest number of chunk inputs that a stage keeps."""
    bubble_fraction: float
    """Share of the layers' work that is not useful, padding included."""
    executed_over_useful: float
    """Executed over useful FLOP of the layers."""


class PipelineReport(ScheduleCost):
    """A schedule's cost, its picture, and the useful share of a program's work."""

    picture: tuple[tuple[str, ...], ...]
    """A row for each stage, a text for each tick: `F3` (forward pass of microbatch 3), `B1` (backward pass) or both,
    `F3.1` with the chunk, empty for an idle tick."""
    useful: dict[str, float]
    """Name of a scope -> useful share of the work in it, the mean over stages."""

    def useful_share(self, source: str) -> float:
        """Return the useful share of an instruction, by the innermost scope of the pipeline in its op_name path."""
        found = re.findall("|".join(self.useful), source)
        return self.useful[found[-1]] if found else 1.0


def useful_flops(schedule: Schedule, pipeline: PipelineReport | None = None) -> float:
    """Return the matmul and attention FLOP of one GPU and step, with recomputation, without a pipeline's masked work.

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
