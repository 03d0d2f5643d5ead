"""Collectives in flight: each stream runs its own in order, and links are shared by those that run at once.

A collective first waits for its latency, which it shares with nobody, and then sends. While it sends it takes a share
of the link inside a domain and of the GPU's way out of it; where several ask for more of a link than there is, all
that use it get as much as each other, as long as they want it (max-min fairness), and none is served beyond its own
rate. So two on one link take the sum of their times on the wire, two on different links the longer of the two.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshkit.predict.kernels import KernelWork
from meshkit.predict.links import by_hand
from meshkit.predict.network import Price


@dataclass(frozen=True)
class Load:
    """Shares that a collective in flight leaves to a kernel: of its arithmetic rate and of memory bandwidth."""

    arithmetic: float = 1.0
    memory: float = 1.0
    adds: bool = True  # whether another collective takes as much again of the arithmetic; a second wave comes once

    def slowdown(self, work: KernelWork) -> float:
        """Seconds of the kernel during the collective over its seconds alone."""
        if work.alone_s <= 0.0:
            return 1.0
        return max(work.arithmetic_s / self.arithmetic, work.memory_s / self.memory, work.host_s) / work.alone_s


NO_LOAD = Load()


def together(loads: Sequence[tuple[Load, float]]) -> Load:
    """What several collectives at once leave, each at a share of its own speed: bytes fall with it, blocks do not."""
    if not loads:
        return NO_LOAD
    held = sum(1.0 - load.arithmetic for load, _ in loads if load.adds)
    once = min((load.arithmetic for load, _ in loads if not load.adds), default=1.0)
    moved = sum((1.0 - load.memory) * speed for load, speed in loads)
    least = by_hand("least_left")
    return Load(max(least, min(once, 1.0 - held)), max(least, 1.0 - moved))


@dataclass(frozen=True)
class Transfer(Price):
    """What one collective needs when it is alone, and leaves to kernels."""

    load: Load = NO_LOAD

    @property
    def uses(self) -> tuple[float, float]:
        """Shares of both links that it takes while it sends alone."""
        return (self.inside_s / self.wire_s, self.outside_s / self.wire_s) if self.wire_s else (0.0, 0.0)


class Flow:
    """A collective on its way."""

    def __init__(self, transfer: Transfer, stream: int | None, label: int):
        self.stream, self.label, self.uses, self.load = stream, label, transfer.uses, transfer.load
        self.wire_s = min(transfer.wire_s, transfer.seconds)  # what is left of it, were it alone
        self.latency_s = transfer.seconds - self.wire_s
        self.start: float | None = None  # when it began, and ended
        self.end: float | None = None


class InFlight:
    """All collectives of one GPU, from time 0.

    Args:
        landed: told (start_s, end_s, label) of each collective that ends.
    """

    def __init__(self, landed: Callable[[float, float, int], None]):
        self._now, self._landed = 0.0, landed
        self._flying: list[Flow] = []
        self._queues: defaultdict[int, deque[Flow]] = defaultdict(deque)

    def start(self, transfer: Transfer, label: int, at: float, stream: int | None = None) -> Flow:
        """A collective behind the others of its stream; None: of the stream that computes, which it holds up."""
        self.advance(at)
        flow = Flow(transfer, stream, label)
        if stream is not None:
            self._queues[stream].append(flow)
        if stream is None or self._queues[stream][0] is flow:
            self._begin(flow)
        return flow

    def advance(self, to: float) -> None:
        """Lets time pass."""
        while self._flying and self._now < to:
            self._pass(to, self._speeds())
        self._now = max(self._now, to)

    def begun(self, flow: Flow) -> float:
        """When a collective begins, if nothing else starts before."""
        while flow.start is None:
            self._pass(math.inf, self._speeds())
        return flow.start

    def finished(self, flow: Flow) -> float:
        """When a collective ends, if nothing else starts before."""
        while flow.end is None:
            self._pass(math.inf, self._speeds())
        return flow.end

    def drained(self) -> float:
        """When all that is in flight has ended."""
        while self._flying:
            self._pass(math.inf, self._speeds())
        return self._now

    def busy(self, at: float) -> bool:
        """Whether anything is in flight then."""
        self.advance(at)
        return bool(self._flying)

    def run(self, work: KernelWork, start: float) -> float:
        """When a kernel that starts now is done, slowed by what is in flight.

        What is in flight is known: a collective that the schedule starts later waits for this kernel.
        """
        self.advance(start)
        now, left = start, 1.0
        while self._flying:
            speeds = self._speeds()
            beside = together([(f.load, speed) for f, speed in zip(self._flying, speeds, strict=True)])
            seconds = work.alone_s * beside.slowdown(work)
            if seconds * left <= self._next_s(speeds):
                break
            self._pass(math.inf, speeds)
            left -= (self._now - now) / seconds
            now = self._now
        else:
            seconds = work.alone_s
        end = now + seconds * left
        self.advance(end)
        return end

    def _begin(self, flow: Flow) -> None:
        flow.start = self._now
        self._flying.append(flow)
        if not flow.latency_s and not flow.wire_s:
            self._end(flow)

    def _end(self, flow: Flow) -> None:
        """Records it, and lets the next of its stream begin."""
        assert flow.start is not None
        self._flying.remove(flow)
        flow.end = self._now
        self._landed(flow.start, flow.end, flow.label)
        if flow.stream is not None:
            queue = self._queues[flow.stream]
            queue.popleft()
            if queue:
                self._begin(queue[0])

    def _speeds(self) -> list[float]:
        """Of each that flies, over its own when alone."""
        if len(self._flying) == 1:
            return [1.0]
        speeds, free, level = [1.0] * len(self._flying), [1.0, 1.0], 0.0
        growing = [n for n, flow in enumerate(self._flying) if not flow.latency_s]
        while growing:
            wanted = [sum(self._flying[n].uses[link] for n in growing) for link in (0, 1)]
            full, tight = min(((free[link] / wanted[link], link) for link in (0, 1) if wanted[link]), default=(1.0, 0))
            if full >= 1.0:
                break
            level = max(level, full)  # which falls by rounding alone
            for n in [n for n in growing if self._flying[n].uses[tight]]:
                speeds[n] = level
                free = [f - u * level for f, u in zip(free, self._flying[n].uses)]
                growing.remove(n)
        return speeds

    def _next_s(self, speeds: Sequence[float]) -> float:
        """Seconds until the first of them has waited, or sent, all."""
        return min(f.latency_s or f.wire_s / speed for f, speed in zip(self._flying, speeds, strict=True))

    def _pass(self, to: float, speeds: Sequence[float]) -> None:
        """Lets time pass until something changes, but not beyond `to`."""
        change = self._next_s(speeds)
        seconds = min(change, to - self._now)
        ended = []
        for flow, speed in zip(self._flying, speeds, strict=True):
            whole = seconds == (flow.latency_s or flow.wire_s / speed)
            if flow.latency_s:
                flow.latency_s = 0.0 if whole else flow.latency_s - seconds
                whole = whole and not flow.wire_s
            else:
                flow.wire_s = 0.0 if whole else flow.wire_s - seconds * speed
            ended += [flow] if whole else []
        self._now += seconds
        for flow in ended:
            self._end(flow)
