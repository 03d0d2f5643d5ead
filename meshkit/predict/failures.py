"""Predict how much time of a training run failures take: goodput in closed form, and a simulator of given failures.

    Costs, checkpoint interval, failure rate -> expected_goodput, best_interval   (closed form)
    Costs, checkpoint interval, failures (drawn or given) -> play -> Spent        (simulator)

Every failure ends all processes of a synchronous job. If each of h hosts fails at rate r, the job fails at rate h r, as
a Poisson process. An attempt makes steps and saves after every k steps. A save blocks training for b = `blocked_s`,
while the state leaves the device. It can be restored once it is on disk, w = `write_s` later, while training goes on.

The closed form is that of Daly (2006), with writes in the background. A step takes t, the mean time between failures is
M, and the time from save to save is c = b + max(k t, w). It takes d until a failure is detected, and R from then until
the next attempt makes steps:

    kept steps of an attempt      k sum_i P(save i is written) = k e^(-(k t + b + w) / M) / (1 - e^(-c / M))
    time from failure to failure  M + d e^(R/M) + M (e^(R/M) - 1) = (M + d) e^(R/M)

Goodput is the time of the kept steps divided by the time from failure to failure. To first order, the lost share is
b / (k t) + (d + R + k t / 2 + w) / M, which is least at Young's k t = sqrt(2 b M).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

HOST = "host"  # After such a failure a host is replaced; after every other kind the job only restarts.
DAY_S = 86400.0
_MONTHS = 200


@dataclass(frozen=True)
class Costs:
    """Seconds that the steps, saves and failures of a job take."""

    step_s: float
    blocked_s: float
    """The time for which a save blocks the steps."""
    write_s: float
    """The time from the end of the block until the save can be restored; training goes on meanwhile."""
    detection_s: float
    """The time from a failure until the last process of the attempt is gone."""
    restart_s: float
    """The time from the detection until the next attempt could make a step, without reading the state."""
    read_s: float = 0.0
    """The time to read the state."""
    first_s: float = 0.0
    """The time from the start of the run to its first step."""

    @property
    def up_s(self) -> float:
        """Seconds from the detection of a failure until the next attempt makes steps."""
        return self.restart_s + self.read_s

    def cycle_s(self, every: int) -> float:
        """Return the seconds from the start of one save to that of the next, which waits until the first is written."""
        return self.blocked_s + max(every * self.step_s, self.write_s)


class Failure(NamedTuple):
    """An event that ends all processes of the job."""

    at_s: float
    kind: str
    detection_s: float | None = None
    """Overrides `Costs.detection_s`."""
    up_s: float | None = None
    """Overrides `Costs.up_s`."""
    saves: bool = False
    """Whether all processes save their state before they end, as after SIGTERM, so that no step is lost."""


@dataclass
class Spent:
    """Where the time of a run went; the seconds add up to `wall_s`."""

    step_s: float = 0.0
    """Time of the steps that count."""
    save_s: float = 0.0
    """Time for which saves block the steps."""
    lost_s: float = 0.0
    """Time of steps that were made again or never ended."""
    down_s: float = 0.0
    """Time from a failure to the next attempt's first step (without `wait_s`), and from the run's start to its first
    step."""
    wait_s: float = 0.0
    """Time in which no spare host was available to replace a lost host."""
    attempts: int = 1
    lost_steps: int = 0

    @property
    def wall_s(self) -> float:
        return self.step_s + self.save_s + self.lost_s + self.down_s + self.wait_s

    @property
    def goodput(self) -> float:
        """The share of the time that went into steps that count; 0 for a run without time."""
        return self.step_s / self.wall_s if self.wall_s else 0.0


class Spares:
    """Spare hosts, and the hosts under repair.

    Args:
        each: number of spare hosts in each pool.
        repair_s: time until a lost host is back in its pool.
        pools: number of groups of hosts. A host can replace only hosts of its group, such as a rack that is an NVLink
            domain.
        seed: seed for the random pool of each lost host.
    """

    def __init__(self, each: int, repair_s: float, *, pools: int = 1, seed: int = 0):
        self._each, self._repair_s, self._draw = each, repair_s, random.Random(seed)
        self._out: list[list[float]] = [[] for _ in range(pools)]

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until a spare host replaces a host that is lost now."""
        out = self._out[self._draw.randrange(len(self._out))]
        while out and out[0] <= now_s:
            heapq.heappop(out)
        heapq.heappush(out, now_s + self._repair_s)
        short = len(out) - self._each  # This many hosts must return before all lost hosts are replaced.
        return max(0.0, heapq.nsmallest(short, out)[-1] - now_s) if short > 0 else 0.0


def play(
    costs: Costs,
    every: int,
    failures: Iterable[Failure],
    *,
    steps: int | None = None,
    until_s: float = math.inf,
    spares: Spares | None = None,
) -> Spent:
    """Return how the time of one run with these failures is spent.

    A failure while nothing runs (before an earlier failure is detected, or while the job waits for a host) has no
    effect. A failure while the next attempt starts ends that attempt.

    Args:
        every: steps between saves; 0 for none.
        failures: failures in order, with times from the start of the run.
        steps: the run ends after this many steps and a last save; None for a run that does not end by itself.
        until_s: the time at which a run without `steps` ends.
        spares: hosts that replace lost hosts; None: a spare host is always available.
    """
    spent, kept, began, up = Spent(), 0, 0.0, costs.first_s
    for failure in failures:
        if failure.at_s >= until_s:
            break
        if failure.at_s < began:  # Nothing runs then, so the failure changes nothing.
            continue
        if failure.at_s >= up:
            left = None if steps is None else steps - kept
            if left is not None and failure.at_s - up >= _ending_s(costs, every, left):
                break
            kept += _attempt(costs, every, failure.at_s - up, spent, keeps=failure.saves)
        spent.down_s += min(failure.at_s, up) - began
        detected = failure.at_s + (costs.detection_s if failure.detection_s is None else failure.detection_s)
        wait_s = spares.wait_s(detected) if spares is not None and failure.kind == HOST else 0.0
        spent.down_s += detected - failure.at_s
        spent.wait_s += wait_s
        began = detected + wait_s
        up = began + (costs.up_s if failure.up_s is None else failure.up_s)
        spent.attempts += 1
    if steps is not None:
        spent.down_s += up - began
        left = steps - kept
        spent.step_s += left * costs.step_s
        spent.save_s += _ending_s(costs, every, left) - left * costs.step_s
    elif math.isfinite(until_s):
        spent.down_s += max(0.0, min(up, until_s) - began)
        _attempt(costs, every, max(0.0, until_s - up), spent, keeps=True)
    return spent


def _attempt(costs: Costs, every: int, lives_s: float, spent: Spent, *, keeps: bool = False) -> int:
    """Add an attempt of `lives_s` seconds to `spent`; return the steps that it keeps: all, or those that are saved."""
    step_s, cycle_s = costs.step_s, costs.cycle_s(every)
    first = every * step_s  # The time at which the first save begins.
    saves = int((lives_s - first) // cycle_s) + 1 if every and lives_s >= first else 0
    written_s = lives_s - first - costs.blocked_s - costs.write_s
    written = int(written_s // cycle_s) + 1 if every and written_s >= 0 else 0
    since = lives_s - (first + (saves - 1) * cycle_s) if saves else lives_s  # since the last save began
    blocked = min(since, costs.blocked_s) if saves else 0.0
    ahead = (since - blocked) if saves else lives_s
    if saves and every * step_s < ahead:  # The attempt waits for the previous save before its next one.
        blocked, ahead = blocked + ahead - every * step_s, every * step_s
    made = saves * every + int(ahead / step_s)
    saving = max(0, saves - 1) * (cycle_s - every * step_s) + blocked
    kept = made if keeps else written * every
    productive = lives_s - saving if keeps else kept * step_s
    spent.step_s += productive
    spent.save_s += saving
    spent.lost_s += lives_s - saving - productive
    spent.lost_steps += made - kept
    return kept


def _ending_s(costs: Costs, every: int, left: int) -> float:
    """Return the seconds in which an attempt makes the last `left` steps of a run and waits for the last save."""
    work_s = left * costs.step_s
    if not every or not left:
        return work_s
    before = math.ceil(left / every) - 1  # The number of saves before the last one.
    waits_s = max(0, before - 1) * max(0.0, costs.write_s - every * costs.step_s)
    if before:
        waits_s += max(0.0, costs.write_s - (left - before * every) * costs.step_s)
    return work_s + (before + 1) * costs.blocked_s + waits_s + costs.write_s


def draw(seed: int, rate_per_s: float, *, host_share: float = 0.0) -> Iterator[Failure]:
    """Yield the failures of an endless Poisson process; the same seed gives the same failures.

    Args:
        rate_per_s: failure rate of the whole job.
        host_share: share of the failures after which a host is replaced.
    """
    chance, at_s = random.Random(seed), 0.0
    while True:
        at_s += chance.expovariate(rate_per_s)
        yield Failure(at_s, HOST if chance.random() < host_share else "restart")


def expected_goodput(costs: Costs, every: int, between_s: float) -> float:
    """Return the exact goodput of an endless run that always has a spare host available.

    Args:
        between_s: mean time between failures of the whole job.
    """
    work_s, cycle_s = every * costs.step_s, costs.cycle_s(every)
    first_s = work_s + costs.blocked_s + costs.write_s
    # Both factors are in one exponent, since each alone may leave the range of a float.
    exponent = -(first_s - cycle_s + costs.up_s) / between_s
    scale = work_s / (between_s + costs.detection_s)
    cycle = cycle_s / between_s
    if cycle > 500:
        return scale * math.exp(max(-700.0, exponent - cycle))
    return scale * math.exp(exponent) / math.expm1(cycle)


class Shares(NamedTuple):
    """Shares of the time of an endless run; they add up to 1."""

    goodput: float
    saving: float
    lost: float
    down: float


def expected_shares(costs: Costs, every: int, between_s: float) -> Shares:
    """Return the shares of steps that count, saves, lost steps and restarts, for the run of `expected_goodput`.

    Only saves that were written count as saves. The time of an unwritten save is lost with its steps.
    """
    goodput = expected_goodput(costs, every, between_s)
    saving = goodput * (costs.cycle_s(every) / (every * costs.step_s) - 1)
    up = between_s / (between_s + costs.detection_s) * math.exp(-costs.up_s / between_s)
    return Shares(goodput, saving, up - goodput - saving, 1 - up)


def best_interval(costs: Costs, between_s: float) -> int:
    """Return the number of steps between saves for which `expected_goodput` is highest.

    Goodput has a single maximum over the interval, so the search can narrow the range by thirds. The maximum is near
    Young's interval, unless that is shorter than a write: then steps would wait for the write.
    """
    low, high = 1, max(2, math.ceil(4 * (between_s + costs.write_s) / costs.step_s))
    while high - low > 2:
        third = (high - low) // 3
        a, b = low + third, high - third
        if expected_goodput(costs, a, between_s) < expected_goodput(costs, b, between_s):
            low = a
        else:
            high = b
    return max(range(low, high + 1), key=lambda every: expected_goodput(costs, every, between_s))


def months(costs: Costs, every: int, rate_per_s: float, *, seed: int) -> Sequence[float]:
    """Return the goodput of 200 simulated months of 30 days, each with its own failures, in ascending order."""
    draws = (draw(seed * _MONTHS + i, rate_per_s) for i in range(_MONTHS))
    return sorted(play(costs, every, drawn, until_s=30 * DAY_S).goodput for drawn in draws)
