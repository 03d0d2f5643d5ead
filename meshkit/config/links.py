"""Link: what connects GPUs of a cluster inside a domain, between domains, and with their CPU.

A path is as fast as the slowest thing on it: NIC, the NIC's slot, the GPU's slot, host memory where it must pass that.
Which is the slowest is judged by sustained rates; the link then has that thing's peak and its sustained share.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshkit.config import catalog
from meshkit.config.catalog import CpuLink, Nic

if TYPE_CHECKING:
    from meshkit.config.cluster import Cluster

_NVSWITCH_GENERATION = 3  # earlier NVLink came without a switch on 8-GPU hosts
_LARGEST_MESH = {True: 4, False: 8}  # GPUs wired to each other directly, from that generation on and before it

# Reads and writes of host memory for each byte that a GPU sends through it: written, then read; and, where the same
# GPU also receives at that rate, as every step of a collective does over a network, the same once more.
_PASSES_SCALE_UP = 2
_PASSES_SCALE_OUT = 4

Hop = tuple[float, float]  # peak bytes/s, sustained share


@dataclass(frozen=True)
class Link:
    """What connects GPUs inside a domain (`nvlink`) or between domains (`infiniband`), or a GPU and its CPU (`cpu`).

    Attributes:
        name: `nvlink`, `infiniband` or `cpu`.
        fabric: what it really is: `nvlink4_nvswitch`, `pcie4_p2p`, `shared_memory`, `infiniband_ndr`, `roce_400`, ...
        bytes_per_s: peak per GPU, one direction; ports of a host are shared by its GPUs, oversubscription is taken off.
        achieved: sustained fraction of that.
        latency_s: one ring step of a large message (NCCL's Simple protocol).
        latency_small_s: one ring step of a small message (NCCL's LL protocol).
    """

    name: str
    fabric: str
    bytes_per_s: float
    achieved: float
    latency_s: float
    latency_small_s: float


def has_nvswitch(cluster: Cluster) -> bool:
    """Whether NVLink goes through a switch: as the file says, else as hosts of that generation and size are built."""
    if cluster.scale_up != "nvlink":
        return False
    if cluster.nvlink_switch is not None:
        return cluster.nvlink_switch
    modern = (cluster.gpu.nvlink_generation or 0) >= _NVSWITCH_GENERATION
    return cluster.nvlink_domain_size > _LARGEST_MESH[modern]


def cpu_link_of(cluster: Cluster) -> CpuLink:
    """The catalog's link between a GPU and its CPU: as the file says, else what comes with the GPU."""
    key = cluster.cpu_link or cluster.gpu.cpu_link
    generation = cluster.gpu.pcie_generation
    return catalog.cpu_link(key, pcie_generation=generation, gpus_per_host=cluster.gpus_per_host)


def scale_up_link(cluster: Cluster, gpus: int | None = None) -> Link:
    """The link inside a domain, for a group of `gpus` of its members; None: all links that a GPU has."""
    if cluster.scale_up == "nvlink":
        return _nvlink(cluster, gpus)
    return _inside_host(cluster, "nvlink")


def scale_out_link(cluster: Cluster) -> Link:
    """The link between domains. Without a NIC they meet inside one host."""
    if cluster.nic is None:
        return _inside_host(cluster, "infiniband")
    nic = _as_spoken(cluster.nic, cluster.fabric)
    share = cluster.nics_per_host / cluster.gpus_per_host
    slot = catalog.pcie_bytes_per_s(min(nic.pcie_generation, cluster.gpu.pcie_generation), nic.pcie_lanes)
    hops = [
        (nic.bytes_per_s * share / cluster.oversubscription, nic.achieved),
        (slot * share, catalog.fabric("pcie")["achieved"]),
        *_gpu_to_nic(cluster, direct=cluster.gpudirect_rdma and nic.rdma),
    ]
    label = _label(cluster.nic, cluster.fabric)
    return Link("infiniband", label, *_slowest(hops), nic.latency_s, nic.latency_small_s)


def offload_link(cluster: Cluster) -> Link:
    """The link between one GPU and the memory of its host, all GPUs of the host at once, one direction."""
    if cluster.is_cpu:
        return _inside_host(cluster, "cpu")
    cpu, latency = cpu_link_of(cluster), catalog.fabric("pcie")
    hops = [(cpu.bytes_per_s, cpu.achieved), _host_memory(cpu, passes=1)]
    return Link("cpu", cpu.label, *_slowest(hops), latency["latency_s"], latency["latency_small_s"])


def storage_path_bytes_per_s(cluster: Cluster) -> float:
    """Sustained bytes per second that all GPUs together move to storage, whatever the storage takes.

    With GPUDirect Storage (as with RDMA: `gpudirect_rdma`) a byte crosses the GPU's slot only; without, it is written
    to host memory and read again.
    """
    cpu = cpu_link_of(cluster)
    hops = [(cpu.bytes_per_s, cpu.achieved)]
    if not cluster.gpudirect_rdma:
        hops.append(_host_memory(cpu, passes=_PASSES_SCALE_UP))
    peak, achieved = _slowest(hops)
    return cluster.num_gpus * peak * achieved


def _nvlink(cluster: Cluster, gpus: int | None) -> Link:
    gpu, latency = cluster.gpu, catalog.fabric("nvlink")
    rate = gpu.nvlink_bytes_per_s * (1 - cpu_link_of(cluster).nvlinks / gpu.nvlink_links)
    if has_nvswitch(cluster):
        kind = "nvswitch"
        rate *= cluster.nvlink_taper if gpus and gpus > cluster.gpus_per_host else 1.0
    else:
        kind = "mesh"
        domain = cluster.nvlink_domain_size
        rate *= _mesh_share(gpu.nvlink_generation or 0, cluster.gpus_per_host, domain, gpus or domain)
    label = f"nvlink{gpu.nvlink_generation}_{kind}"
    return Link("nvlink", label, rate, gpu.achieved["nvlink"], latency["latency_s"], latency["latency_small_s"])


@functools.cache
def _mesh_share(generation: int, gpus_per_host: int, domain: int, gpus: int) -> float:
    """Share of a GPU's NVLinks that lead to members of its group, where no switch lends it the others.

    Of m GPUs that are all wired to each other, each link leads to one of m - 1 peers: (g - 1) / (m - 1). A cube mesh
    has its own table; the group is taken as neighbours in GPU order, and the GPU with the fewest links sets the pace.
    """
    if domain == 1:
        return 1.0  # links that nothing uses
    gpus = max(2, min(gpus, domain))
    table = catalog.cube_mesh(generation) if gpus_per_host == 8 else None
    if table is None:
        return (gpus - 1) / (domain - 1)
    blocks = [range(first, first + gpus) for first in range(0, domain - gpus + 1, gpus)]
    fewest = min(sum(table[member][peer] for peer in block) for block in blocks for member in block)
    return max(1, fewest) / sum(table[0])


def mesh_hops(cluster: Cluster, gpus: int) -> float:
    """NVLinks that a byte crosses between two members of a group of neighbours, on average over all pairs.

    1 where any two GPUs meet directly or at a switch. In a cube mesh a byte for a GPU without a direct link is relayed
    by one that has links to both (NCCL's NVB paths): two.
    """
    table = catalog.cube_mesh(cluster.gpu.nvlink_generation or 0) if cluster.gpus_per_host == 8 else None
    if cluster.scale_up != "nvlink" or has_nvswitch(cluster) or table is None or gpus < 2:
        return 1.0
    pairs = [(a, b) for a in range(min(gpus, 8)) for b in range(min(gpus, 8)) if a != b]
    return sum(1 if table[a][b] else 2 for a, b in pairs) / len(pairs)


def _inside_host(cluster: Cluster, name: str) -> Link:
    """GPUs of one host without NVLink: peer to peer over PCIe, or through pinned host memory; or CPU devices."""
    if cluster.is_cpu:
        row = catalog.fabric("shared_memory")
        return Link(name, "shared_memory", row["bytes_per_s"], row["achieved"], *_latencies("shared_memory"))
    if cluster.scale_up == "shared_memory":
        cpu = cpu_link_of(cluster)
        sustained = min(cpu.achieved, catalog.fabric("host_memory")["achieved"])
        hops = [(cpu.bytes_per_s, sustained), _host_memory(cpu, passes=_PASSES_SCALE_UP)]
        return Link(name, "shared_memory", *_slowest(hops), *_latencies("host_memory"))
    gpu = cluster.gpu
    achieved = catalog.fabric("pcie")["achieved"]
    return Link(name, f"pcie{gpu.pcie_generation}_p2p", gpu.pcie_bytes_per_s, achieved, *_latencies("pcie"))


def _gpu_to_nic(cluster: Cluster, *, direct: bool) -> Iterable[Hop]:
    """What a byte crosses between a GPU and its NIC's slot.

    Without GPUDirect it goes up to host memory and down to the NIC. GPU and NIC of a server mostly sit below one PCIe
    switch, whose way to the CPU then carries what the GPU sends and what the NIC receives: half for each.
    """
    cpu = cpu_link_of(cluster)
    yield cpu.bytes_per_s, cpu.achieved
    if not direct:
        if cpu.key == "pcie":
            yield cpu.bytes_per_s / 2, cpu.achieved
        yield _host_memory(cpu, passes=_PASSES_SCALE_OUT)


def _host_memory(cpu: CpuLink, *, passes: int) -> Hop:
    return cpu.host_memory_bytes_per_s / passes, catalog.fabric("host_memory")["memory_achieved"]


def _slowest(hops: Iterable[Hop]) -> Hop:
    return min(hops, key=lambda hop: hop[0] * hop[1])


def _latencies(fabric: str) -> tuple[float, float]:
    row = catalog.fabric(fabric)
    return row["latency_s"], row["latency_small_s"]


def _as_spoken(nic: Nic, fabric: str | None) -> Nic:
    """The catalog's NIC of the same rate that speaks `fabric`, where a port runs in its other mode; else the same."""
    if fabric in (None, nic.fabric):
        return nic
    prefix = {"roce": "roce_", "ethernet": "tcp_", "infiniband": "ib_"}[fabric]
    others = (catalog.nic(key) for key in catalog.nic_keys() if key.startswith(prefix))
    return next((other for other in others if other.bytes_per_s == nic.bytes_per_s), nic)


def _label(nic: Nic, fabric: str | None) -> str:
    if fabric in (None, nic.fabric):
        return nic.label
    # The same port in its other mode: a ConnectX speaks InfiniBand and Ethernet.
    gigabits = round(nic.bytes_per_s * 8 / 1e9)
    return f"{ {'roce': 'roce', 'ethernet': 'tcp', 'infiniband': 'infiniband'}[fabric] }_{gigabits}"
