"""Where a machine differs from the cluster that an experiment declares."""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.config.cluster import Cluster
from meshkit.discover.describe import compute_nics
from meshkit.discover.topology import Topology

_GIGABIT = 1e9


@dataclass(frozen=True)
class Finding:
    """Where what is there differs from what was declared.

    Attributes:
        code: `gpu_kind`, `gpu_count`, `outside_domain`, `domain_size`, `nvlink_down`, `pcie_width`, `pcie_generation`,
            `nic_down`, `nic_kind`, `nic_count`, `gpudirect_rdma`.
        where: the device, or empty for the whole machine.
        message: one sentence with the numbers.
    """

    code: str
    where: str
    message: str


def check(found: Topology, cluster: Cluster) -> tuple[Finding, ...]:
    """Where the machine differs from a host of the cluster (or from all of it, if as many hosts are described)."""
    if not found.gpus:
        expected = f"{cluster.gpus_per_host} {cluster.gpu.name} a host"
        what = f"the cluster has {expected}, but there is no GPU: {found.nothing_here}."
        return () if cluster.is_cpu else (Finding("gpu_count", "", what),)
    return (
        *_check_gpus(found, cluster),
        *_check_nvlink(found, cluster),
        *_check_pcie(found),
        *_check_nics(found, cluster),
    )


def _check_gpus(found: Topology, cluster: Cluster) -> list[Finding]:
    findings = []
    for host in range(found.hosts):
        here = found.gpus_of(host)
        where = f"host{host}" if found.hosts > 1 else ""
        if len(here) != cluster.gpus_per_host:
            what = f"the cluster has {cluster.gpus_per_host} GPUs a host, but {len(here)} are here."
            findings.append(Finding("gpu_count", where, what))
        kinds: dict[str, list[str]] = {}
        for gpu in here:
            if gpu.key != cluster.gpu.key and (gpu.key or gpu.name):
                kinds.setdefault(gpu.name or str(gpu.key), []).append(gpu.id)
        for name, ids in kinds.items():
            what = f"the cluster has {cluster.gpu.name}, but {_list(ids)} {'is' if len(ids) == 1 else 'are'} {name}."
            findings.append(Finding("gpu_kind", where, what))
    return findings


def _check_nvlink(found: Topology, cluster: Cluster) -> list[Finding]:
    if cluster.scale_up != "nvlink":
        return []
    findings = []
    if found.scale_up == "pcie":
        findings.append(
            Finding("outside_domain", "", "the cluster has NVLink, but the GPUs reach each other over PCIe.")
        )
    largest = max((len(domain.gpus) for domain in found.domains), default=0)
    inside = {gpu for domain in found.domains if len(domain.gpus) == largest for gpu in domain.gpus}
    for gpu in found.gpus:
        if largest and gpu.id not in inside:
            why = f" ({gpu.fabric_problem})" if gpu.fabric_problem else ""
            what = f"{gpu.id} is outside the NVLink domain of {largest} GPUs{why}."
            findings.append(Finding("outside_domain", gpu.id, what))
        up, expected = gpu.active_nvlinks, cluster.gpu.nvlink_links
        if up is not None and (gpu.nvlinks or found.domains) and 0 < up < expected:
            findings.append(Finding("nvlink_down", gpu.id, f"{gpu.id} has {up} of {expected} NVLinks up."))
    expected = min(cluster.nvlink_domain_size, len(found.gpus))
    sizes = [len(domain.gpus) for domain in found.domains]
    too_small = len(inside) == len(found.gpus) and largest < expected
    if sizes and (too_small or largest > cluster.nvlink_domain_size):
        what = f"the cluster's NVLink domain has {cluster.nvlink_domain_size} GPUs, but the GPUs here form {sizes}."
        findings.append(Finding("domain_size", "", what))
    return findings


def _check_pcie(found: Topology) -> list[Finding]:
    findings = []
    for device in (*found.gpus, *found.nics):
        slot = device.pcie
        if slot.width and slot.max_width and slot.width < slot.max_width:
            what = f"{device.id} runs at PCIe x{slot.width}, but it and its slot can do x{slot.max_width}."
            findings.append(Finding("pcie_width", device.id, what))
        lower = slot.generation and slot.max_generation and slot.generation < slot.max_generation
        if lower and not getattr(device, "idle", False):
            what = (
                f"{device.id} runs at PCIe generation {slot.generation}, "
                f"but it and its slot can do {slot.max_generation}."
            )
            findings.append(Finding("pcie_generation", device.id, what))
    return findings


def _check_nics(found: Topology, cluster: Cluster) -> list[Finding]:
    findings = [
        Finding("nic_down", nic.id, f"port {nic.id} is {nic.state or 'down'}.")
        for nic in found.nics
        if nic.active is False
    ]
    if cluster.nic is None or (not found.nics and found.source != "this machine" and not found.rdma.works):
        return findings
    ports = compute_nics(found)
    per_host = len(ports) / found.hosts
    if per_host < cluster.nics_per_host:
        what = f"the cluster has {cluster.nics_per_host} ports a host, but {per_host:g} of one kind are up."
        findings.append(Finding("nic_count", "", what))
    expected = cluster.nic.bytes_per_s * 8
    slow = [nic.id for nic in ports if nic.bits_per_s and nic.bits_per_s < expected]
    if slow:
        rate = next(nic.bits_per_s for nic in ports if nic.id == slow[0]) or 0
        what = f"the cluster's ports run at {expected / _GIGABIT:g} Gb/s, but {_list(slow)} at {rate / _GIGABIT:g}."
        findings.append(Finding("nic_kind", slow[0] if len(slow) == 1 else "", what))
    if cluster.gpudirect_rdma and found.rdma.works is False:
        what = "the cluster has GPUDirect RDMA, but neither nvidia_peermem nor dma-buf is there."
        findings.append(Finding("gpudirect_rdma", "", what))
    if found.rdma.acs_bridges:
        what = f"{found.rdma.acs_bridges} PCIe bridges redirect peer traffic to the CPU (ACS)."
        findings.append(Finding("gpudirect_rdma", "", what))
    return findings


def _list(ids: list[str]) -> str:
    return ", ".join(ids) if len(ids) <= 4 else f"{ids[0]} to {ids[-1]} ({len(ids)})"
