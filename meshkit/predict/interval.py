"""Give an interval for a predicted step time, from the errors of `plan` on published runs of JAX.

`intervals.csv` has, for each stratum, conformal quantiles of the distance |ln(measured / predicted)| over runs whose
own experiment file was planned unchanged (`python -m benchmarks.published.intervals` writes it). Runs of one page,
model and precision are correlated, and so are our own runs on one card. Such a group has the weight of one run. Over n
groups, the quantile of a level is the least distance that covers this share of n + 1 groups (Lee, Barber and Willett,
2306.06342). It exists if level * (n + 1) <= n: 50 % needs one group, and 80 % needs four. A stratum with fewer groups
has no interval; the interval of another stratum is never used. docs/concepts/validation.md has the coverage with each
group left out.
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
# Runs of a single publisher may share its systematic errors, so such a stratum does not count as calibrated.
_PUBLISHERS = 2
_GENERATIONS = {8: "ampere", 9: "hopper", 10: "blackwell"}


@dataclass(frozen=True)
class Stratum:
    """Runs whose errors are taken to be alike."""

    experts: bool
    generation: str
    """`ampere`, `hopper`, `blackwell`, or `other`."""
    bits: int
    """Bits of most matmuls' operands: 4, 8, 16 or 32."""
    one_gpu: bool = False
    """Whether the runs use one GPU, without communication; their errors say nothing about runs on several GPUs."""

    @property
    def name(self) -> str:
        """The name in intervals.csv."""
        name = f"{'experts' if self.experts else 'dense'}, {self.generation}, {self.bits} bit"
        return f"one GPU, {name}" if self.one_gpu else name


class StepInterval(BaseModel):
    """The range (low, high) of a predicted step time, from the errors of `rows` runs in the plan's own stratum.

    `calibrated` is true if the runs have more than one publisher.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    p50_s: tuple[float, float]
    p80_s: tuple[float, float]
    stratum: str
    calibrated: bool
    rows: int


def least_groups(level: float) -> int:
    """Return the number of groups that a quantile of this level needs: the least n with level * (n + 1) <= n.

    >>> least_groups(0.5), least_groups(0.8)
    (1, 4)
    """
    return math.ceil(level / (1 - level) - 1e-9)


def stratum_of(gpu: Gpu, precision: str, experts: bool, *, one_gpu: bool = False) -> Stratum:
    """Return the stratum of a run; `precision` is a name of `[train]` or of the catalog: `bf16`, `fp8`, ..."""
    major = (gpu.compute_capability or (0, 0))[0]
    bits = 4 if "fp4" in precision else 8 if "8" in precision else 32 if "32" in precision else 16
    return Stratum(experts, _GENERATIONS.get(major, "other"), bits, one_gpu)


def step_interval(
    time_s: float, stratum: Stratum, table: Mapping[str, Mapping[str, str]] | None = None
) -> tuple[StepInterval | None, str | None]:
    """Return (interval of a predicted step time, None), or (None, the reason why there is no interval).

    Args:
        table: stratum's name -> its row; default intervals.csv.
    """
    row = (_table() if table is None else table).get(stratum.name)
    if row is None:
        return None, f"no published run of JAX is comparable ({stratum.name})"
    groups, least = int(row["groups"]), least_groups(max(LEVELS))
    if groups < least:
        count = f"{groups} group{'s' if groups > 1 else ''} of comparable runs"
        return None, f"{count} ({stratum.name}), {least} are needed for {max(LEVELS):.0%}".replace("%", " %")
    p50, p80 = ((time_s * math.exp(-q), time_s * math.exp(q)) for q in (float(row["q50"]), float(row["q80"])))
    calibrated = int(row["publishers"]) >= _PUBLISHERS
    found = StepInterval(p50_s=p50, p80_s=p80, stratum=stratum.name, calibrated=calibrated, rows=int(row["rows"]))
    return found, None


@functools.cache
def _table() -> dict[str, Mapping[str, str]]:
    return {row["stratum"]: row for row in catalog.measured_table("intervals.csv")}
