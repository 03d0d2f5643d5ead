"""Define the report of a pipeline: the cost of its schedule, and the useful share of a program's instructions.

In a lockstep pipeline every stage computes in every tick, on garbage if it has no microbatch. FLOP counts and timelines
include this work; the pipeline's schedule gives the share that is useful. The op_name paths of instructions have scopes
of the pipeline, and the innermost scope determines the share (`PipelineReport.useful`).

`meshkit.parallel.pipeline` makes a PipelineReport. `StepFacts` and the sidecar file of a trace contain it. report.json
has the cost of the schedule, and the picture unless that is very large.
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
    """Executed FLOP of the layers divided by their useful FLOP."""


class PipelineReport(ScheduleCost):
    """A schedule's cost, its picture, and the useful share of a program's work."""

    picture: tuple[tuple[str, ...], ...]
    """A row for each stage and a text for each tick: `F3` (forward pass of microbatch 3), `B1` (backward pass), `F3 B1`
    (both), or empty (idle). With several chunks on a stage, `F3.1` is chunk 1."""
    useful: dict[str, float]
    """Name of a scope -> useful share of the work in it, the mean over stages."""

    def useful_share(self, source: str) -> float:
        """Return the useful share of an instruction, by the innermost scope of the pipeline in its op_name path."""
        found = re.findall("|".join(self.useful), source)
        return self.useful[found[-1]] if found else 1.0


def useful_flops(schedule: Schedule, pipeline: PipelineReport | None = None) -> float:
    """Return the matmul and attention FLOP of one GPU in one execution of a program, recomputation included.

    Args:
        schedule: the compiled program. A conditional counts as its branch with the most FLOP, a loop of unknown length
            as one iteration.
        pipeline: gives the `useful_share` of each instruction, so that work on garbage does not count; with None all
            work counts.
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
