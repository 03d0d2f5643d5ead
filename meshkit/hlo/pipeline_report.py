"""PipelineReport: what a pipeline's schedule costs, and which share of a program's instructions counts.

In a lockstep pipeline every stage works in every tick, on garbage where it has nothing to do. That is compute like any
other in a program and in a timeline; the schedule says which share of it counted. Instructions carry the scopes of the
pipeline in their op_name path (`PipelineReport.useful`), the innermost of which decides.

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

    axis: str  # mesh axis that cuts the layers
    schedule: str  # name
    stages: int  # S
    virtual_stages: int  # v
    microbatches: int  # M
    layers: int  # of the model
    padding_layers: int  # inactive ones that are computed all the same
    warmup_ticks: int  # in which stages only go forward
    steady_ticks: int  # in which they go both ways
    drain_ticks: int  # in which they only go back; the three add up to a step
    slots: int  # inputs of chunks that each stage keeps at most
    bubble_fraction: float  # share of the layers' work that does nothing useful, padding included
    executed_over_useful: float  # of the layers' FLOP


class PipelineReport(ScheduleCost):
    """A schedule's cost, its picture, and what of a program's work counts."""

    picture: tuple[tuple[str, ...], ...]
    """A row for each stage, a text for each tick: `F3`, `B1` or both, `F3.1` with the chunk, empty where it waits."""
    useful: dict[str, float]
    """Name of a scope -> share of what runs in it that counts, the mean over stages."""

    def useful_share(self, source: str) -> float:
        """The share of an instruction that counts, by the innermost scope of the pipeline in its op_name path."""
        found = re.findall("|".join(self.useful), source)
        return self.useful[found[-1]] if found else 1.0


def useful_flops(schedule: Schedule, pipeline: PipelineReport | None = None) -> float:
    """Matmul and attention FLOP of one GPU and step, recompute included, masked work of a pipeline left out.

    Args:
        schedule: of the step. Of a conditional the branch with the most FLOP counts, of a loop of unknown length one
            iteration.
        pipeline: says by `useful_share` what of an instruction counts; None counts all.
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
