"""`python -m benchmarks.goodput.vendor`: a vendor's test of fault tolerance, as far as its page says what it takes.

Clockwork, "Keeping Distributed Training Running Through Failures" (clockwork.io, read 2026-11-27): TorchTitan trains
Llama 4 Scout on 64 H200 for 3,000 steps with a checkpoint every 100. A failure comes every 2,700 to 4,500 s. Restarts
from checkpoints take 818 minutes in all; with live migration to spare GPUs the same steps take 405. The page does not
say (as far as it could be read) what a step takes without failures, what a save takes, nor how long a restart does.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator

from meshkit.config import catalog
from meshkit.predict.failures import Costs, Failure, play

STEPS, EVERY, BETWEEN_S = 3000, 100, (2700.0, 4500.0)
RESTARTS_MIN, MIGRATION_MIN = 818.0, 405.0
_DRAWS = 200


def minutes(down_s: float) -> float:
    """Minutes of the test, a mean over draws of its failures, where each costs so many seconds beside its lost steps.

    A step is taken to be 405 minutes over 3,000: the most that it can be, since migrations are in it.
    """
    costs = Costs(MIGRATION_MIN * 60 / STEPS, 0.0, 0.0, 0.0, down_s)
    return statistics.mean(play(costs, EVERY, _failures(i), steps=STEPS).wall_s for i in range(_DRAWS)) / 60


def _failures(seed: int) -> Iterator[Failure]:
    chance, at_s = random.Random(seed), 0.0
    while True:
        at_s += chance.uniform(*BETWEEN_S)
        yield Failure(at_s, "restart")


def main() -> None:
    """Prints what the defaults of `[failures]` expect of the test, and the restarts with which it is as it was."""
    row = catalog.failures()
    default_s = row["detection_s"] + row["restart_s"]
    low, high = 0.0, BETWEEN_S[0]
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (middle, high) if minutes(middle) < RESTARTS_MIN else (low, middle)
    print(
        f"by the defaults ({default_s:g} s from a failure to steps): {minutes(default_s):.0f} of {RESTARTS_MIN:g} min"
    )
    print(f"as it was with {low:.0f} s from a failure to steps, which the page does not state")


if __name__ == "__main__":
    main()
