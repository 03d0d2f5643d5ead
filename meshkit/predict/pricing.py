"""Price a program's instructions, and share the GPU and the links among kernels and collectives in flight.

NCCL's kernels occupy multiprocessors until they end, and every byte that arrives passes device memory several times. A
kernel that runs during a collective loses the multiprocessors that the collective occupies, as measured on an H100 with
cuBLAS 13.1 while other blocks streamed memory. If the catalog has a measured share for the GPU (`contended`: A100), the
kernel keeps this share of its rate. Kernels that assign their tiles to one block per multiprocessor in advance lose up
to half; a plan cannot tell which kernels do.

Each stream runs its collectives in order (`InFlight`). A collective first waits for its latency, which others do not
change. Then it sends and uses a share of the link inside a domain and of the GPU's link out of it. If several
collectives need more than all of a link, they get equal shares of it (max-min fairness), and none exceeds its rate when
alone. So two collectives on one link take the sum of their wire times, and two on different links take the longer of
the two wire times.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshkit.config import catalog
from meshkit.config.cluster import Cluster, Gpu
from meshkit.hlo.module import Instruction
from meshkit.hlo.schedule import Collective
from meshkit.predict.algorithms import CHOSEN, COPIED, ragged_copy_s, wire_factor
from meshkit.predict.assumptions import Assumptions, slowest_of
from meshkit.predict.kernels import KernelWork, kernel_work, measured_rates, memory_bytes_per_s, power_share
from meshkit.predict.nccl import model_constant
from meshkit.predict.network import How, Price, collective_price
from meshkit.predict.ways import RAGGED, Way

# A copy engine reads and writes each byte once. NCCL's kernels also use a buffer in between.
_COPY_PASSES = 2
_FAIR = 0.5


def arithmetic_left(gpu: Gpu, channels: int | None) -> float:
    """Return the share of arithmetic rate that a collective with this many channels (None: unknown) leaves to a kernel.

    It is the share measured on the GPU, if there is one; otherwise the share of multiprocessors without a channel.
    """
    if channels == 0:
        return model_constant("beside_copies")
    return gpu.achieved.get("contended") or max(model_constant("least_left"), 1.0 - (channels or 0) / gpu.sms)


def load_of(c: Collective, price: Price, gpu: Gpu, memory_bytes_per_s: float) -> Load:
    """Return the load of a collective on a GPU whose memory sustains `memory_bytes_per_s`."""
    if price.seconds <= 0.0 or not gpu.compute_capability:
        return NO_LOAD
    wire = c.payload_bytes * wire_factor(c.collective, c.group_size)
    passes = catalog.kernels()["nccl_memory_passes"] if price.channels != 0 else _COPY_PASSES
    taken = passes * wire / price.seconds / memory_bytes_per_s
    return Load(arithmetic_left(gpu, price.channels), 1.0 - taken, adds="contended" not in gpu.achieved)


class Pricer:
    """Prices the instructions of one program on one cluster.

    Args:
        seconds: function that returns the known duration of an instruction (of a kernel: when it runs alone); None:
            the model prices instructions.
        gpus: GPUs of the whole job; default the cluster's.
        busy: share of the step's time in which tensor cores work, see `kernels.step_gain`.

    Raises:
        ConfigError: the calibration that the cluster names cannot be read.
    """

    def __init__(
        self,
        cluster: Cluster,
        assumptions: Assumptions,
        seconds: Callable[[Instruction], float] | None = None,
        *,
        gpus: int | None = None,
        busy: float = 1.0,
    ):
        self._cluster, self._assumptions, self._seconds = cluster, assumptions, seconds
        self._busy = busy
        self._rates = measured_rates(cluster)
        self._slowest = 1.0
        if assumptions.slowest and not cluster.is_cpu:
            self._slowest = slowest_of(gpus or cluster.num_gpus, cluster.gpu_spread)
        self._collectives: dict[tuple, Transfer] = {}

    def work(self, i: Instruction) -> KernelWork:
        """Return the work of a kernel, or of a copy on the device or to the host."""
        if self._seconds is not None:
            known = self._seconds(i)
            bound_by_arithmetic = i.cost is not None and i.cost.multiplies
            return KernelWork(arithmetic_s=known * self._slowest) if bound_by_arithmetic else KernelWork(memory_s=known)
        if i.cost is None:
            return KernelWork()
        found = kernel_work(
            i.cost,
            self._cluster.gpu,
            self._rates,
            host_bytes_per_s=host_bytes_per_s(self._cluster),
            assumptions=self._assumptions,
            busy=self._busy,
        )
        return KernelWork(found.arithmetic_s * self._slowest, found.memory_s, found.host_s)

    def power_share(self, i: Instruction) -> float:
        """Return the power of a kernel's tensor cores, relative to a large matmul at the same clock."""
        return power_share(i.cost, self._cluster.gpu) if i.cost else 0.0

    def transfer(self, i: Instruction) -> Transfer:
        """Return a collective's time from the last member's arrival to its end, and its load on the GPU."""
        c = i.collective
        assert c is not None
        crosses = c.group_size > c.gpus_per_domain
        if self._seconds is not None:
            known = self._seconds(i)
            return self._transfer(c, Price(known, 0.0, known, known) if crosses else Price(known, known, 0.0, known))
        key = (c.collective, c.payload_bytes, c.gpus_per_domain, c.group_size, c.grouped, c.slices, c.room,
               c.axes_complete)  # fmt: skip
        if key not in self._collectives and c.collective == RAGGED:
            way = self._assumptions.ragged.way(c, self._cluster)
            self._collectives[key] = self._transfer(c, self.ragged_price(c, way))
        if key not in self._collectives:
            inside = not crosses and c.group_size > 1 and self._cluster.scale_up == "nvlink"
            ways: tuple[str | None, ...] = (None,)
            if self._assumptions.symmetric and inside and c.collective in CHOSEN:
                copied = self._assumptions.copy_engines and c.collective in COPIED
                ways = ("copy engine",) if copied else (None, "symmetric")
            group = (c.gpus_per_domain, c.group_size // c.gpus_per_domain, None)
            how: How = {"launch": "grouped" if c.grouped else "xla"}
            prices = (
                collective_price(c.collective, c.payload_bytes, group, self._cluster, {**how, "algorithm": way})
                for way in ways
            )
            self._collectives[key] = self._transfer(c, min(prices, key=lambda price: price.seconds))
        return self._collectives[key]

    def ragged_price(self, c: Collective, way: Way) -> Price:
        """Return the price of a ragged all-to-all on the GPU that receives most rows, up to its buffer's size."""
        payload = c.payload_bytes
        if c.group_size == 1:
            memory = memory_bytes_per_s(self._cluster.gpu, self._rates)
            seconds = model_constant("xla_launch_s") + ragged_copy_s(payload, c.slices, self._cluster.gpu.sms, memory)
            return Price(seconds, wire_s=seconds)
        if c.axes_complete:  # Otherwise XLA split this part off, and its payload is the whole buffer.
            payload *= min(self._assumptions.imbalance, c.room)
        group = (c.gpus_per_domain, c.group_size // c.gpus_per_domain, None)
        how: How = {"launch": "xla", "algorithm": way.price, "slices": c.slices}
        return collective_price(c.collective, payload, group, self._cluster, how)

    def collective_s(self, i: Instruction) -> float:
        return self.transfer(i).seconds

    def _transfer(self, c: Collective, price: Price) -> Transfer:
        if not self._assumptions.contention:
            return Transfer(**vars(price))
        gpu = self._cluster.gpu
        return Transfer(**vars(price), load=load_of(c, price, gpu, memory_bytes_per_s(gpu, self._rates)))


def host_bytes_per_s(cluster: Cluster) -> float:
    """Return the sustained rate between one GPU and its host's memory."""
    link = cluster.offload_link()
    return link.bytes_per_s * link.achieved


@dataclass(frozen=True)
class Load:
    """Shares of arithmetic rate and of memory bandwidth that a collective at full rate leaves to a kernel."""

    arithmetic: float = 1.0
    memory: float = 1.0
    adds: bool = True
    """Whether the arithmetic lost to several collectives adds up; a measured share counts once."""

    def slowdowns(self, work: KernelWork) -> tuple[float, float]:
        """Return (kernel's seconds during the collective / its seconds alone, collective's rate / its rate when alone).

        If memory bandwidth suffices, both get what they need. Otherwise each gets at least half of it. So a
        memory-bound kernel gets the bandwidth that the collective leaves, or half if the collective would leave less,
        which slows the collective.
        """
        if work.alone_s <= 0.0:
            return 1.0, 1.0
        seconds = max(work.arithmetic_s / self.arithmetic, work.memory_s / max(_FAIR, self.memory), work.host_s)
        if self.memory >= _FAIR:
            return seconds / work.alone_s, 1.0
        return seconds / work.alone_s, min(1.0, (1.0 - work.memory_s / seconds) / (1.0 - self.memory))


NO_LOAD = Load()


def combined_load(loads: Sequence[tuple[Load, float]]) -> Load:
    """Return the load of several collectives; the relative speed of each scales only its use of memory bandwidth."""
    if not loads:
        return NO_LOAD
    held = sum(1.0 - load.arithmetic for load, _ in loads if load.adds)
    once = min((load.arithmetic for load, _ in loads if not load.adds), default=1.0)
    moved = sum((1.0 - load.memory) * speed for load, speed in loads)
    return Load(max(model_constant("least_left"), min(once, 1.0 - held)), 1.0 - moved)


@dataclass(frozen=True)
class Transfer(Price):
    """The price of one collective that runs alone, and its load on the GPU."""

    load: Load = NO_LOAD

    @property
    def uses(self) -> tuple[float, float]:
        """Shares of both links (inside a domain, out of it) that it uses while no other collective sends."""
        return (self.inside_s / self.wire_s, self.outside_s / self.wire_s) if self.wire_s else (0.0, 0.0)


class Flow:
    """A collective in flight."""

    def __init__(self, transfer: Transfer, stream: int | None, label: int):
        self.stream, self.label, self.uses, self.load = stream, label, transfer.uses, transfer.load
        self.wire_s = min(transfer.wire_s, transfer.seconds)  # Remaining wire time at its rate when alone.
        self.latency_s = transfer.seconds - self.wire_s
        self.start: float | None = None
        self.end: float | None = None


class InFlight:
    """All collectives of one GPU, from time 0; `on_end` receives (start_s, end_s, label) of each that ends."""

    def __init__(self, on_end: Callable[[float, float, int], None]):
        self._now, self._on_end = 0.0, on_end
        self._active: list[Flow] = []
        self._queues: defaultdict[int, deque[Flow]] = defaultdict(deque)

    def start(self, transfer: Transfer, label: int, at: float, stream: int | None = None) -> Flow:
        """Queue a collective behind the others of its stream; with None it begins at once, on the compute stream."""
        self.advance(at)
        flow = Flow(transfer, stream, label)
        if stream is not None:
            self._queues[stream].append(flow)
        if stream is None or self._queues[stream][0] is flow:
            self._begin(flow)
        return flow

    def advance(self, to: float) -> None:
        while self._active and self._now < to:
            self._pass(to, self._speeds())
        self._now = max(self._now, to)

    def begun(self, flow: Flow) -> float:
        """Return the time at which a collective begins, if nothing else starts before."""
        while flow.start is None:
            self._pass(math.inf, self._speeds())
        return flow.start

    def finished(self, flow: Flow) -> float:
        """Return the time at which a collective ends, if nothing else starts before."""
        while flow.end is None:
            self._pass(math.inf, self._speeds())
        return flow.end

    def drained(self) -> float:
        """Return the time at which everything in flight has ended."""
        while self._active:
            self._pass(math.inf, self._speeds())
        return self._now

    def busy(self, at: float) -> bool:
        self.advance(at)
        return bool(self._active)

    def run_kernel(self, work: KernelWork, start: float) -> float:
        """Return the end of a kernel that starts at `start` and is slowed by the collectives in flight.

        No other collective can be queued in this time: the schedule starts the next collective after this kernel.
        """
        self.advance(start)
        now, left = start, 1.0
        while self._active:
            speeds = self._speeds()
            load = combined_load([(f.load, speed) for f, speed in zip(self._active, speeds, strict=True)])
            slowdown, share = load.slowdowns(work)
            seconds, speeds = work.alone_s * slowdown, [speed * share for speed in speeds]
            if seconds * left <= self._next_s(speeds):
                end = now + seconds * left
                self._pass(end, speeds)
                break
            self._pass(math.inf, speeds)
            left -= (self._now - now) / seconds
            now = self._now
        else:
            end = now + work.alone_s * left
        self.advance(end)
        return end

    def _begin(self, flow: Flow) -> None:
        flow.start = self._now
        self._active.append(flow)
        if not flow.latency_s and not flow.wire_s:
            self._end(flow)

    def _end(self, flow: Flow) -> None:
        """Record the end of a collective and begin the next one of its stream."""
        assert flow.start is not None
        self._active.remove(flow)
        flow.end = self._now
        self._on_end(flow.start, flow.end, flow.label)
        if flow.stream is not None:
            queue = self._queues[flow.stream]
            queue.popleft()
            if queue:
                self._begin(queue[0])

    def _speeds(self) -> list[float]:
        """Return the speed of each collective in flight, relative to its speed when alone."""
        if len(self._active) == 1:
            return [1.0]
        speeds, free, level = [1.0] * len(self._active), [1.0, 1.0], 0.0
        growing = [n for n, flow in enumerate(self._active) if not flow.latency_s]
        while growing:
            wanted = [sum(self._active[n].uses[link] for n in growing) for link in (0, 1)]
            full, tight = min(((free[link] / wanted[link], link) for link in (0, 1) if wanted[link]), default=(1.0, 0))
            if full >= 1.0:
                break
            level = max(level, full)  # Only rounding can make `full` less than `level`.
            for n in [n for n in growing if self._active[n].uses[tight]]:
                speeds[n] = level
                free = [f - u * level for f, u in zip(free, self._active[n].uses)]
                growing.remove(n)
        return speeds

    def _next_s(self, speeds: Sequence[float]) -> float:
        """Return the seconds until the first collective in flight ends its latency or its sending."""
        return min(f.latency_s or f.wire_s / speed for f, speed in zip(self._active, speeds, strict=True))

    def _pass(self, to: float, speeds: Sequence[float]) -> None:
        """Advance the time to the next change, but not beyond `to`."""
        change = self._next_s(speeds)
        seconds = min(change, to - self._now)
        ended = []
        for flow, speed in zip(self._active, speeds, strict=True):
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
