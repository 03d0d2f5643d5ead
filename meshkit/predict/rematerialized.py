"""What XLA computes a second time because it counts more memory than a program may take.

Its pass clones instructions and calls the clones `NAME.remat`, `NAME.remat2.1`, ... before it knows how buffers share
memory, so that it may do so for a program that would fit. Where it fails it logs what it counted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from meshkit.predict.simulate import Simulation
from meshkit.predict.unpriced import kernel_seconds_by_name

CODE = "xla_rematerialization"
_CLONE = re.compile(r"\.remat\d*(\.\d+)*$")
_COUNTED = re.compile(r"rematerialization;.*down from \S+ \((\d+) bytes\)")


@dataclass(frozen=True)
class Rematerialized:
    """Kernels that run twice.

    Attributes:
        kernels: how many.
        seconds: of all their runs, in one run of the program.
        counted_bytes: that XLA counted before; None where it says nothing, for it kept within the limit.
    """

    kernels: int
    seconds: float
    counted_bytes: int | None


def rematerialized(simulation: Simulation, log: Sequence[str]) -> Rematerialized:
    """Clones of XLA's rematerialization that cost time, beside their original or, where XLA removed that, one of them.

    Args:
        simulation: of a program.
        log: what the compiler said.
    """
    families: dict[str, list[tuple[bool, float]]] = {}  # of each original: whether a clone, seconds
    for name, s in kernel_seconds_by_name(simulation).items():
        families.setdefault(_CLONE.sub("", name), []).append((_CLONE.search(name) is not None, s))
    seconds = [s for found in families.values() for clone, s in sorted(found)[1:] if clone and s > 0]
    counted = next((int(found[1]) for line in log if (found := _COUNTED.search(line))), None)
    return Rematerialized(len(seconds), sum(seconds), counted)
