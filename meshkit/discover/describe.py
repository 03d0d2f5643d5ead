"""Turn a Topology into a cluster table, and compare it with the cluster that an experiment declares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.discover.topology import NEAR, FoundGpu, FoundNic, Topology, gpu_by_name
from meshkit.errors import ConfigError

_GIGABIT = 1e9


def to_cluster(found: Topology, *, gpu: str | None = None) -> dict[str, Any]:
    """Return a cluster table, which `Cluster.load` reads.

    Args:
        gpu: the catalog key of the GPUs; None takes the key that discovery found.

    Raises:
        ConfigError: there is no GPU, the GPUs are of several kinds or not in the catalog, or the hosts differ.
    """
    per_host = _gpus_per_host(found)
    key = gpu or _gpu_key(found)
    if key not in catalog.gpu_keys():
        keys = ", ".join(catalog.gpu_keys())
        raise ConfigError(f"the catalog has no GPU '{key}'.", at=found.source, hint=f"one of: {keys}")
    scale_up = _scale_up(found, key)
    table: dict[str, Any] = {"gpu": key, "hosts": found.hosts, "gpus_per_host": per_host, "scale_up": scale_up}
    table |= _domains(found, per_host) if scale_up == "nvlink" else {"nvlink_domain_size": per_host}
    ports = compute_nics(found)
    if ports and ports[0].key:
        table |= {"nic": ports[0].key, "nics_per_host": max(1, len(ports) // found.hosts)}
        works = False if ports[0].layer == "tcp" else found.rdma.works
        table |= {} if works is None else {"gpudirect_rdma": works}
    return table | _unusual_switch(found, table)


def compute_nics(found: Topology) -> tuple[FoundNic, ...]:
    """Return the ports that collectives would use.

    These are active ports of one kind; if any port is near a GPU, only such ports count. Kinds in the catalog come
    first, and among them the kind with the most total bandwidth.
    """
    ports = [nic for nic in found.nics if nic.active is not False]
    near = {nic.id for g in found.gpus for kind, nics in [found.nearest_nics(g.id)] if kind in NEAR for nic in nics}
    ports = [nic for nic in ports if nic.id in near] or ports
    groups: dict[tuple[str | None, str | None], list[FoundNic]] = {}
    for nic in ports:
        groups.setdefault((nic.key, nic.layer), []).append(nic)
    if not groups:
        return ()
    return tuple(max(groups.values(), key=lambda g: (g[0].key is not None, sum(n.bits_per_s or 0 for n in g))))


def _unusual_switch(found: Topology, table: dict[str, Any]) -> dict[str, bool]:
    """Return `nvlink_switch` if the machine differs from the usual host with that GPU and size."""
    switch = _has_nvswitch(found)
    if table["scale_up"] != "nvlink" or switch is None:
        return {}
    try:
        return {} if Cluster.load(table).has_nvswitch == switch else {"nvlink_switch": switch}
    except ConfigError:
        return {"nvlink_switch": switch}


def _has_nvswitch(found: Topology) -> bool | None:
    remotes = {link.remote for gpu in found.gpus for link in gpu.nvlinks if link.active}
    if "switch" in remotes or remotes == {"gpu"}:
        return "switch" in remotes
    cells = [c.nvlinks for c in found.connections if c.kind == "NV"]
    if not cells or len(found.gpus) < 3:
        return None
    return max(gpu.active_nvlinks or 0 for gpu in found.gpus) == max(cells)


def _gpus_per_host(found: Topology) -> int:
    if not found.gpus:
        what = f"there is no GPU to describe: {found.nothing_here}."
        raise ConfigError(what, at=found.source, hint="a machine or file with GPUs")
    counts = Counter(gpu.host for gpu in found.gpus)
    numbers = sorted({counts[host] for host in range(found.hosts)})
    if len(numbers) > 1:
        what = f"the hosts have {' and '.join(map(str, numbers))} GPUs, but a cluster's hosts must be alike."
        raise ConfigError(what, at=found.source, hint="only hosts that are alike")
    return numbers[0]


def _gpu_key(found: Topology) -> str:
    names = sorted({gpu.name or "?" for gpu in found.gpus})
    keys = {gpu.key for gpu in found.gpus}
    if len(keys) > 1 or len(names) > 1:
        what = f"the machine has several kinds of GPUs: {', '.join(names)}."
        raise ConfigError(what, at=found.source, hint="a machine of one kind")
    key = keys.pop()
    if key is None:
        known = f"'{names[0]}' is not in the catalog" if names != ["?"] else "the kind of the GPUs is unknown"
        raise ConfigError(f"{known}.", at=found.source, hint="--gpu with the nearest catalog key")
    return key


def _scale_up(found: Topology, key: str) -> str:
    links = catalog.gpu(key).nvlink_links
    if found.scale_up == "nvlink" and not links:
        what = f"the GPUs are connected by NVLink, but '{key}' of the catalog has none."
        raise ConfigError(what, at=found.source, hint="another --gpu")
    if found.scale_up:
        return found.scale_up
    name = found.gpus[0].name
    return "nvlink" if links and not (name and gpu_by_name(name).pcie_card) else "pcie"


def _domains(found: Topology, per_host: int) -> dict[str, int]:
    sizes = sorted({len(domain.gpus) for domain in found.domains})
    covered = sum(len(domain.gpus) for domain in found.domains) == len(found.gpus)
    if not sizes or (covered and len(sizes) == 1 and (per_host % sizes[0] == 0 or sizes[0] % per_host == 0)):
        return {"nvlink_domain_size": sizes[0] if sizes else per_host}
    # A GPU has failed. The domain keeps the size with which the machine was built, and the job uses fewer of its GPUs.
    biggest = max(sizes)
    size = per_host if biggest <= per_host else -(-biggest // per_host) * per_host
    whole_domains = [len(d.gpus) for d in found.domains if len(d.gpus) > size // 2] or sizes
    return {"nvlink_domain_size": size, "gpus_used_per_domain": min(whole_domains)}


@dataclass(frozen=True)
class Mismatch:
    """A difference between the discovered and the declared machine."""

    code: str
    """`gpu_kind`, `gpu_count`, `outside_domain`, `domain_size`, `nvlink_down`, `pcie_width`, `pcie_generation`,
    `nic_down`, `nic_kind`, `nic_count` or `gpudirect_rdma`."""
    where: str
    """The device; "" for the whole machine."""
    message: str
    """One sentence with both values."""


def check(found: Topology, cluster: Cluster) -> tuple[Mismatch, ...]:
    """Return the differences between the discovered hosts and the hosts of the cluster."""
    if found.gpus:
        parts = (_check_gpus(found, cluster), _check_nvlink(found, cluster), _check_pcie(found))
        return tuple(item for part in (*parts, _check_nics(found, cluster)) for item in part)
    if cluster.is_cpu:
        return ()
    expected = f"{cluster.gpus_per_host} {cluster.gpu.name} a host"
    return (Mismatch("gpu_count", "", f"the cluster has {expected}, but there is no GPU: {found.nothing_here}."),)


def _check_gpus(found: Topology, cluster: Cluster) -> Iterator[Mismatch]:
    """Yield the hosts with another number or another kind of GPUs than declared."""
    hosts: list[list[FoundGpu]] = [[] for _ in range(found.hosts)]
    for gpu in found.gpus:
        hosts[gpu.host].append(gpu)
    for host, gpus in enumerate(hosts):
        where = f"host{host}" if found.hosts > 1 else ""
        if len(gpus) != cluster.gpus_per_host:
            what = f"the cluster has {cluster.gpus_per_host} GPUs a host, but {len(gpus)} are here."
            yield Mismatch("gpu_count", where, what)
        kinds: dict[str, list[str]] = {}
        for gpu in gpus:
            if gpu.key != cluster.gpu.key and (gpu.key or gpu.name):
                kinds.setdefault(gpu.name or str(gpu.key), []).append(gpu.id)
        for name, ids in kinds.items():
            what = f"the cluster has {cluster.gpu.name}, but {_list(ids)} {'is' if len(ids) == 1 else 'are'} {name}."
            yield Mismatch("gpu_kind", where, what)


def _check_nvlink(found: Topology, cluster: Cluster) -> Iterator[Mismatch]:
    """Yield the GPUs outside the domain, links that are down, and domains of another size."""
    if cluster.scale_up != "nvlink":
        return
    if found.scale_up == "pcie":
        yield Mismatch("outside_domain", "", "the cluster has NVLink, but the GPUs reach each other over PCIe.")
    sizes = [len(domain.gpus) for domain in found.domains]
    largest = max(sizes, default=0)
    inside = {gpu for domain in found.domains if len(domain.gpus) == largest for gpu in domain.gpus}
    for gpu in found.gpus:
        if largest and gpu.id not in inside:
            why = f" ({gpu.fabric_problem})" if gpu.fabric_problem else ""
            what = f"{gpu.id} is outside the NVLink domain of {largest} GPUs{why}."
            yield Mismatch("outside_domain", gpu.id, what)
        up, expected = gpu.active_nvlinks, cluster.gpu.nvlink_links
        if up is not None and (gpu.nvlinks or found.domains) and 0 < up < expected:
            yield Mismatch("nvlink_down", gpu.id, f"{gpu.id} has only {up} of {expected} NVLinks up.")
    expected = min(cluster.nvlink_domain_size, len(found.gpus))
    too_small = len(inside) == len(found.gpus) and largest < expected
    if sizes and (too_small or largest > cluster.nvlink_domain_size):
        what = f"the cluster's NVLink domain has {cluster.nvlink_domain_size} GPUs, but the GPUs here form {sizes}."
        yield Mismatch("domain_size", "", what)


def _check_pcie(found: Topology) -> Iterator[Mismatch]:
    """Yield devices that run with fewer lanes or a lower generation than they and their slot support.

    The generation of idle GPUs is not checked, because they lower it.
    """
    for device in (*found.gpus, *found.nics):
        slot, it = device.pcie, "but it and its slot support"
        if slot.width and slot.max_width and slot.width < slot.max_width:
            what = f"{device.id} runs at PCIe x{slot.width}, {it} x{slot.max_width}."
            yield Mismatch("pcie_width", device.id, what)
        lower = slot.generation and slot.max_generation and slot.generation < slot.max_generation
        if lower and not getattr(device, "idle", False):
            what = f"{device.id} runs at PCIe generation {slot.generation}, {it} {slot.max_generation}."
            yield Mismatch("pcie_generation", device.id, what)


def _check_nics(found: Topology, cluster: Cluster) -> Iterator[Mismatch]:
    """Yield the ports that are down, missing or slow, and GPUDirect RDMA that cannot work."""
    for nic in found.nics:
        if nic.active is False:
            yield Mismatch("nic_down", nic.id, f"port {nic.id} is {nic.state or 'down'}.")
    if cluster.nic is None or (not found.nics and found.source != "this machine" and not found.rdma.works):
        return
    ports = compute_nics(found)
    per_host = len(ports) / found.hosts
    if per_host < cluster.nics_per_host:
        what = f"the cluster has {cluster.nics_per_host} ports a host, but {per_host:g} of one kind are up."
        yield Mismatch("nic_count", "", what)
    expected = cluster.nic.bytes_per_s * 8
    slow = [nic for nic in ports if nic.bits_per_s and nic.bits_per_s < expected]
    if slow:
        ids, rate = [nic.id for nic in slow], slow[0].bits_per_s or 0
        what = f"the cluster's ports run at {expected / _GIGABIT:g} Gb/s, but {_list(ids)} at {rate / _GIGABIT:g}."
        yield Mismatch("nic_kind", ids[0] if len(ids) == 1 else "", what)
    if cluster.gpudirect_rdma and found.rdma.works is False:
        what = "the cluster has GPUDirect RDMA, but neither nvidia_peermem nor dma-buf is there."
        yield Mismatch("gpudirect_rdma", "", what)
    if found.rdma.acs_bridges:
        what = f"{found.rdma.acs_bridges} PCIe bridges redirect peer traffic to the CPU (ACS)."
        yield Mismatch("gpudirect_rdma", "", what)


def _list(ids: list[str]) -> str:
    return ", ".join(ids) if len(ids) <= 4 else f"{ids[0]} to {ids[-1]} ({len(ids)})"
