"""Prices of a program's instructions: what each needs of the GPU or of the network, and what a collective leaves.

NCCL's kernels hold multiprocessors until they are done, and every byte that arrives passes device memory several times.
cuBLAS's kernels on Hopper start one block per multiprocessor: with some of them taken, the rest of the blocks form a
second wave, and the matmul takes up to twice as long. How much is measured where there are measurements (catalog,
`contended`); elsewhere a kernel loses the multiprocessors that the collective holds. An H100 with cuBLAS 13.1 lost no
more than those either, beside blocks that stream memory; what published runs say against it is in how-plan-works.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshkit.config import catalog
from meshkit.config.cluster import Cluster, Gpu
from meshkit.hlo.module import Instruction
from meshkit.hlo.schedule import Collective
from meshkit.predict.assumptions import Assumptions, slowest_of
from meshkit.predict.kernels import KernelWork, kernel_work, measured_rates, memory_bytes_per_s
from meshkit.predict.network import collective_time_s, wire_factor


@dataclass(frozen=True)
class Load:
    """Shares that a collective in flight leaves to a kernel: of its arithmetic rate and of memory bandwidth."""

    arithmetic: float = 1.0
    memory: float = 1.0

    def slowdown(self, work: KernelWork) -> float:
        """Seconds of the kernel during the collective over its seconds alone."""
        if work.alone_s <= 0.0:
            return 1.0
        return max(work.arithmetic_s / self.arithmetic, work.memory_s / self.memory, work.host_s) / work.alone_s


NO_LOAD = Load()
LEAST_MEMORY = 0.2  # a kernel always gets some of the memory's bandwidth: the controller is fair


def arithmetic_left(gpu: Gpu, *, crosses: bool) -> float:
    """Share of its arithmetic rate that a collective leaves to a kernel: as measured, else that of the other
    multiprocessors. `crosses`: it runs over several domains, in fewer channels."""
    channels = catalog.kernels()["nccl_channels"][crosses]
    return gpu.achieved.get("contended", max(0.5, 1.0 - channels / gpu.sms))


def load_of(collective: Collective, seconds: float, gpu: Gpu, memory_bytes_per_s: float) -> Load:
    """What a collective of so many seconds leaves of a GPU whose memory sustains `memory_bytes_per_s`."""
    if seconds <= 0.0 or not gpu.compute_capability:
        return NO_LOAD
    arithmetic = arithmetic_left(gpu, crosses=collective.group_size > collective.gpus_per_domain)
    wire = collective.payload_bytes * wire_factor(collective.collective, collective.group_size)
    taken = catalog.kernels()["nccl_memory_passes"] * wire / seconds / memory_bytes_per_s
    return Load(arithmetic, max(LEAST_MEMORY, 1.0 - taken))


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
        self._collectives: dict[tuple, float] = {}

    def work(self, i: Instruction) -> KernelWork:
        """What a kernel, or a copy on the device or to the host, needs of the GPU."""
        if self._seconds is not None:
            known = self._seconds(i)
            bound_by_arithmetic = i.cost is not None and bool(i.cost.matmul_flops or i.cost.attention_flops)
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

    def collective_s(self, i: Instruction) -> float:
        """Seconds from the last arrival of a member to the end."""
        c = i.collective
        assert c is not None
        if self._seconds is not None:
            return self._seconds(i)
        key = (c.collective, c.payload_bytes, c.gpus_per_domain, c.group_size)
        if key not in self._collectives:
            self._collectives[key] = collective_time_s(
                c.collective,
                payload_bytes=c.payload_bytes,
                gpus_per_domain=c.gpus_per_domain,
                domains=c.group_size // c.gpus_per_domain,
                cluster=self._cluster,
            )
        return self._collectives[key]

    def load(self, c: Collective, seconds: float) -> Load:
        """What a collective of so many seconds leaves to the kernels of its GPU."""
        if not self._assumptions.contention:
            return NO_LOAD
        return load_of(c, seconds, self._cluster.gpu, memory_bytes_per_s(self._cluster.gpu, self._rates))


def host_bytes_per_s(cluster: Cluster) -> float:
    """Sustained rate between one GPU and its host's memory."""
    link = cluster.offload_link()
    return link.bytes_per_s * link.achieved
