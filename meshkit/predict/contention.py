"""What a collective in flight takes from kernels that run beside it.

NCCL's kernels hold multiprocessors until they are done, and every byte that arrives passes device memory several times.
cuBLAS's kernels on Hopper start one block per multiprocessor: with some of them taken, the rest of the blocks form a
second wave, and the matmul takes up to twice as long. How much is measured where there are measurements (catalog,
`contended`); elsewhere a kernel loses the multiprocessors that the collective holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.config import catalog
from meshkit.config.cluster import Gpu
from meshkit.hlo.collective import Collective
from meshkit.predict.kernels import Work
from meshkit.predict.network import wire_factor


@dataclass(frozen=True)
class Load:
    """Shares that a collective leaves to a kernel beside it: of its arithmetic rate and of memory bandwidth."""

    arithmetic: float = 1.0
    memory: float = 1.0

    def slowdown(self, work: Work) -> float:
        """Seconds of the kernel beside the collective over its seconds alone."""
        if work.alone_s <= 0.0:
            return 1.0
        beside = max(work.arithmetic_s / self.arithmetic, work.memory_s / self.memory, work.host_s)
        return beside / work.alone_s


NOTHING = Load()
_LEAST = 0.2  # a kernel always gets some of the memory's bandwidth: the controller is fair


def load_of(collective: Collective, seconds: float, gpu: Gpu, memory_bytes_per_s: float) -> Load:
    """What a collective of so many seconds leaves.

    Args:
        collective: what moves.
        seconds: that it takes.
        gpu: whose multiprocessors it holds.
        memory_bytes_per_s: sustained, of that GPU's memory.
    """
    if seconds <= 0.0 or not gpu.compute_capability:
        return NOTHING
    constants = catalog.kernels()
    channels = constants["nccl_channels"][0 if collective.group_size <= collective.gpus_per_domain else 1]
    arithmetic = gpu.achieved.get("contended", max(0.5, 1.0 - channels / gpu.sms))
    wire = collective.payload_bytes * wire_factor(collective.collective, collective.group_size)
    taken = constants["nccl_memory_passes"] * wire / seconds / memory_bytes_per_s
    return Load(arithmetic, max(_LEAST, 1.0 - taken))
