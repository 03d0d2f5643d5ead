"""Kernels that take less than any kernel does: what a step of many small ones takes more than predicted.

The kernel model prices a kernel by its work and a gap before it. The smallest kernels of a recorded training step take
as long as `least_s` of the catalog whatever their work, so that a step which is mostly these is longer than its price.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshkit.config import catalog
from meshkit.predict.simulate import Simulation


@dataclass(frozen=True)
class Launches:
    """Kernels of a step that are priced below the least that a kernel takes.

    Attributes:
        kernels: how many, loops counted as often as they run.
        seconds: that they would take more.
    """

    kernels: int
    seconds: float


def short_kernels(simulation: Simulation) -> Launches:
    """The kernels of one run of a program that are priced below the least that one takes."""
    compute = simulation.timeline.steps[0].compute
    missing = float(catalog.kernels()["least_s"]) - (compute[:, 1] - compute[:, 0])
    short = missing > 0
    return Launches(int(np.count_nonzero(short)), float(missing[short].sum()))
