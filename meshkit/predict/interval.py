"""How far a predicted step time may be off: intervals from the errors of published runs.

The logarithm of measured over predicted lies around a middle. `intervals.csv` has it and the quantiles, of dense runs
and of those with experts, made by `python -m benchmarks.published.intervals` from a replay of published runs
(conformal; a group of correlated runs weighs one, and is what is exchangeable). A stratum is finer: the generation of
the GPU, the width of the matmuls. One with fewer than 20 groups, or of fewer than three sources, is not calibrated:
what intervals cover in it is not known, and a plan says so. docs/concepts/validation.md has the coverage with each
source left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from meshkit.config import catalog

if TYPE_CHECKING:
    from meshkit.config.cluster import Gpu

LEVELS = (0.5, 0.8)
PAIRS = "two runs of one model"  # on as many GPUs: how far their errors lie apart, in intervals.csv
_LEAST_GROUPS, _LEAST_SOURCES = 20, 3  # of a stratum that counts as calibrated
_GENERATIONS = {8: "ampere", 9: "hopper", 10: "blackwell"}


@dataclass(frozen=True)
class Stratum:
    """Runs that the coverage of intervals is shown for."""

    experts: bool
    generation: str  # `ampere`, `hopper`, `blackwell`, or `other`
    bits: int  # of most matmuls: 4, 8 or 16

    @property
    def kind(self) -> str:
        """Of the runs whose errors its intervals are made of."""
        return "experts" if self.experts else "dense"

    @property
    def name(self) -> str:
        """As intervals.csv has it."""
        return f"{self.kind}, {self.generation}, {self.bits} bit"


@dataclass(frozen=True)
class Law:
    """How measured step times lie around predicted ones: exp(middle +- quantile)."""

    middle: float
    quantiles: Mapping[float, float]  # level -> of all distances from the middle

    def ends(self, level: float) -> tuple[float, float]:
        """(low, high) of measured over predicted, in which a share `level` of all runs lies."""
        half = self.quantiles[level]
        return math.exp(self.middle - half), math.exp(self.middle + half)


class StepInterval(BaseModel):
    """Where a predicted step will lie: (low, high), by errors of `rows` published runs, all dense or all with experts.

    `calibrated` is whether enough of them are of the plan's own stratum.
    """

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
    """The interval of a step that is predicted to take so long; None where there are no published runs of its kind.

    Args:
        time_s: of the predicted step.
        stratum: of the run.
    """
    table = _table()
    own, kind = table.get(stratum.name), table.get(stratum.kind)
    if kind is None:
        return None
    law = Law(float(kind["middle"]), {level: float(kind[f"q{100 * level:.0f}"]) for level in LEVELS})
    p50, p80 = ((time_s * low, time_s * high) for low, high in map(law.ends, LEVELS))
    calibrated = own is not None and enough(int(own["groups"]), int(own["sources"]))
    return StepInterval(p50_s=p50, p80_s=p80, stratum=stratum.name, calibrated=calibrated, rows=int(kind["rows"]))


def errors_apart() -> float:
    """A logarithm: how far the errors of two plans of one model on as many GPUs lie apart in half of all pairs."""
    return float(_table()[PAIRS]["q50"])


@functools.cache
def _table() -> dict[str, Mapping[str, str]]:
    return {row["stratum"]: row for row in catalog.measured_table("intervals.csv")}
