"""Prices of a program's instructions: what each needs of the GPU or of the network, and what a collective leaves.

NCCL's kernels hold multiprocessors until they are done, and every byte that arrives passes device memory several times.
cuBLAS's kernels on Hopper start one block per multiprocessor: with some of them taken, the rest of the blocks form a
second wave, and the matmul takes up to twice as long. How much is measured where there are measurements (catalog,
`contended`); elsewhere a kernel loses the multiprocessors that the collective holds. An H100 with cuBLAS 13.1 lost no
more than those either, beside blocks that stream memory; what published runs say against it is in how-plan-works.md.
"""

from __future__ import annotations

from collections.abc import Callable

from meshkit.config import catalog
from meshkit.config.cluster import Cluster, Gpu
from meshkit.hlo.module import Instruction
from meshkit.hlo.schedule import Collective
from meshkit.predict.algorithms import CHOSEN, wire_factor
from meshkit.predict.assumptions import Assumptions, slowest_of
from meshkit.predict.kernels import KernelWork, kernel_work, measured_rates, memory_bytes_per_s
from meshkit.predict.links import by_hand
from meshkit.predict.network import How, Price, collective_price
from meshkit.predict.traffic import NO_LOAD, Load, Transfer


def arithmetic_left(gpu: Gpu, channels: int, *, waves: bool = True) -> float:
    """Share of its arithmetic rate that a collective leaves to a kernel: as measured, else that of the other
    multiprocessors.

    Args:
        gpu: that both run on.
        channels: of the collective.
        waves: False: no measurement counts.
    """
    measured = gpu.achieved.get("contended") if waves else None
    return measured or max(by_hand("least_left"), 1.0 - channels / gpu.sms)


def load_of(c: Collective, price: Price, gpu: Gpu, memory_bytes_per_s: float, *, waves: bool = True) -> Load:
    """What a collective leaves of a GPU whose memory sustains `memory_bytes_per_s`; `waves`: see `Assumptions`."""
    if price.seconds <= 0.0 or not gpu.compute_capability:
        return NO_LOAD
    wire = c.payload_bytes * wire_factor(c.collective, c.group_size)
    taken = catalog.kernels()["nccl_memory_passes"] * wire / price.seconds / memory_bytes_per_s
    left = arithmetic_left(gpu, price.channels, waves=waves)
    return Load(left, max(by_hand("least_left"), 1.0 - taken), adds=not (waves and "contended" in gpu.achieved))


class Pricer:
    """Prices of the instructions of one program on one cluster.

    Args:
        cluster: GPUs and links.
        assumptions: what to take into account.
        seconds: durations that are known, of a kernel alone, a collective or a copy; None prices by model.
        gpus: of the whole job; default the cluster's.
        busy: share of the step's time in which tensor cores work, see `matmuls.step_gain`.
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
        """What a kernel, or a copy on the device or to the host, needs of the GPU."""
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

    def transfer(self, i: Instruction) -> Transfer:
        """What a collective needs, from the last arrival of a member to the end, and leaves to the GPU's kernels."""
        c = i.collective
        assert c is not None
        crosses = c.group_size > c.gpus_per_domain
        if self._seconds is not None:
            known = self._seconds(i)
            return self._transfer(c, Price(known, 0.0, known, known) if crosses else Price(known, known, 0.0, known))
        key = (c.collective, c.payload_bytes, c.gpus_per_domain, c.group_size, c.grouped)
        if key not in self._collectives:
            inside = not crosses and c.group_size > 1 and self._cluster.scale_up == "nvlink"
            ways = (None, "symmetric") if self._assumptions.symmetric and inside and c.collective in CHOSEN else (None,)
            group = (c.gpus_per_domain, c.group_size // c.gpus_per_domain, None)
            how: How = {"launch": "grouped" if c.grouped else "xla"}
            prices = (
                collective_price(c.collective, c.payload_bytes, group, self._cluster, {**how, "algorithm": way})
                for way in ways
            )
            self._collectives[key] = self._transfer(c, min(prices, key=lambda price: price.seconds))
        return self._collectives[key]

    def collective_s(self, i: Instruction) -> float:
        """Seconds of a collective that is alone."""
        return self.transfer(i).seconds

    def _transfer(self, c: Collective, price: Price) -> Transfer:
        """A price with what the collective leaves to the kernels of its GPU."""
        if not self._assumptions.contention:
            return Transfer(**vars(price))
        gpu = self._cluster.gpu
        load = load_of(c, price, gpu, memory_bytes_per_s(gpu, self._rates), waves=self._assumptions.waves)
        return Transfer(**vars(price), load=load)


def host_bytes_per_s(cluster: Cluster) -> float:
    """Sustained rate between one GPU and its host's memory."""
    link = cluster.offload_link()
    return link.bytes_per_s * link.achieved
