"""Instruction -> what it needs of the GPU, or of the network: each shape priced once.py."""

from __future__ import annotations

from collections.abc import Callable

from meshkit.config.cluster import Cluster
from meshkit.hlo.collective import Collective
from meshkit.hlo.module import Instruction
from meshkit.predict.assumptions import Assumptions, slowest_of
from meshkit.predict.contention import NOTHING, Load, load_of
from meshkit.predict.kernels import Work, kernel_work, measured_rates, memory_bytes_per_s
from meshkit.predict.network import collective_time_s


class Pricer:
    """Prices of the instructions of one program on one cluster.

    Args:
        cluster: GPUs and links.
        assumptions: what to take into account.
        seconds: durations that are known, of a kernel alone, a collective or a copy; None prices by model.
        gpus: of the whole job; default the cluster's.
    """

    def __init__(
        self,
        cluster: Cluster,
        assumptions: Assumptions,
        seconds: Callable[[Instruction], float] | None = None,
        *,
        gpus: int | None = None,
    ):
        self._cluster, self._assumptions, self._seconds = cluster, assumptions, seconds
        self._rates = measured_rates(cluster)
        self._slowest = 1.0
        if assumptions.slowest and not cluster.is_cpu:
            self._slowest = slowest_of(gpus or cluster.num_gpus, cluster.gpu_spread)
        self._collectives: dict[tuple, float] = {}

    def work(self, i: Instruction) -> Work:
        """Of a kernel, or of a copy on the device or to the host."""
        if self._seconds is not None:
            known = self._seconds(i)
            bound_by_arithmetic = i.cost is not None and bool(i.cost.matmul_flops or i.cost.attention_flops)
            return Work(arithmetic_s=known * self._slowest) if bound_by_arithmetic else Work(memory_s=known)
        if i.cost is None:
            return Work()
        found = kernel_work(
            i.cost,
            self._cluster.gpu,
            self._rates,
            host_bytes_per_s=host_bytes_per_s(self._cluster),
            assumptions=self._assumptions,
        )
        return Work(found.arithmetic_s * self._slowest, found.memory_s, found.host_s)

    def collective_s(self, i: Instruction) -> float:
        """From the last arrival of a member to the end."""
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
        """What it leaves to kernels beside it."""
        if not self._assumptions.contention:
            return NOTHING
        return load_of(c, seconds, self._cluster.gpu, memory_bytes_per_s(self._cluster.gpu, self._rates))


def host_bytes_per_s(cluster: Cluster) -> float:
    """Sustained, between one GPU and its host's memory."""
    link = cluster.offload_link()
    return link.bytes_per_s * link.achieved
