"""How far a predicted step time may be off: intervals from the errors of published runs, by stratum.

`intervals.csv` has quantiles of measured over predicted, made by `python -m benchmarks.published.intervals` from a
replay of published runs (split conformal; a group of correlated runs weighs one, and is what is exchangeable). A
stratum is what the errors differ by: dense or experts, the generation of the GPU, the width of the matmuls. One with
fewer than 20 groups, or of fewer than three sources, is not calibrated: its interval is that of the next wider one,
and says so. Coverage with each source left out is in docs/concepts/validation.md.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from meshkit.config import catalog

if TYPE_CHECKING:
    from meshkit.config.cluster import Gpu

_LEAST_GROUPS, _LEAST_SOURCES = 20, 3  # of a stratum that counts as calibrated
_ENDS = (("q25", "q75"), ("q10", "q90"))
_GENERATIONS = {8: "ampere", 9: "hopper", 10: "blackwell"}


@dataclass(frozen=True)
class Stratum:
    """Runs whose predictions err alike."""

    experts: bool
    generation: str  # `ampere`, `hopper`, `blackwell`, or `other`
    bits: int  # of most matmuls: 4, 8 or 16

    @property
    def names(self) -> tuple[str, ...]:
        """From itself to all runs of its kind, each wider than the one before."""
        kind = "experts" if self.experts else "dense"
        whole = f"{kind}, {self.generation}"
        return f"{whole}, {self.bits} bit", whole, kind


class StepInterval(BaseModel):
    """Where a predicted step will lie: (low, high), by errors of `rows` published runs of its stratum or, where that is
    not calibrated, of a wider one."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    p50_s: tuple[float, float]
    p80_s: tuple[float, float]
    stratum: str
    calibrated: bool
    rows: int


def enough(groups: int, sources: int) -> bool:
    """Whether so many groups of correlated runs, of so many sources, calibrate a stratum."""
    return groups >= _LEAST_GROUPS and sources >= _LEAST_SOURCES


def stratum_of(gpu: Gpu, precision: str, experts: bool) -> Stratum:
    """The stratum of a run. `precision` is of `[train]` or of the catalog: `bf16`, `fp8`, ..."""
    major = (gpu.compute_capability or (0, 0))[0]
    bits = 4 if "fp4" in precision else 8 if "8" in precision else 16
    return Stratum(experts, _GENERATIONS.get(major, "other"), bits)


def step_interval(time_s: float, stratum: Stratum) -> StepInterval | None:
    """The interval of a step that is predicted to take so long; None where there are no published runs at all.

    Args:
        time_s: of the predicted step.
        stratum: of the run; where it is not calibrated, the errors of a wider one serve.
    """
    table = _table()
    for name in stratum.names:
        row = table.get(name)
        if row is None:
            continue
        plenty = enough(int(row["groups"]), int(row["sources"]))
        if plenty or name == stratum.names[-1]:
            p50, p80 = ((time_s * float(row[low]), time_s * float(row[high])) for low, high in _ENDS)
            calibrated = plenty and name == stratum.names[0]
            rows = int(row["rows"])
            return StepInterval(p50_s=p50, p80_s=p80, stratum=stratum.names[0], calibrated=calibrated, rows=rows)
    return None


@functools.cache
def _table() -> dict[str, Mapping[str, str]]:
    return {row["stratum"]: row for row in catalog.measured_table("intervals.csv")}
