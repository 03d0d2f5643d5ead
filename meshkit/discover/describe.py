"""From what is there to a cluster table."""

from __future__ import annotations

from collections import Counter
from typing import Any

from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.discover.identify import gpu_by_name
from meshkit.discover.topology import NEAR, FoundNic, Topology
from meshkit.errors import ConfigError


def to_cluster(found: Topology, *, gpu: str | None = None) -> dict[str, Any]:
    """A cluster table, which `Cluster.load` reads.

    Args:
        found: what is there.
        gpu: the catalog key where discovery cannot tell it, or tells it wrongly.

    Raises:
        ConfigError: no GPU, GPUs of several kinds or none that the catalog has, hosts that are not alike.
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
    table |= dict(found.assumed)
    return table | _unusual_switch(found, table)


def nvswitch(found: Topology) -> bool | None:
    """Whether NVLink goes through a switch; None where nothing tells."""
    remotes = {link.remote for gpu in found.gpus for link in gpu.nvlinks if link.active}
    if "switch" in remotes or remotes == {"gpu"}:
        return "switch" in remotes
    cells = [c.nvlinks for c in found.connections if c.kind == "NV"]
    if not cells or len(found.gpus) < 3:
        return None
    return max(gpu.active_nvlinks or 0 for gpu in found.gpus) == max(cells)


def _unusual_switch(found: Topology, table: dict[str, Any]) -> dict[str, bool]:
    """`nvlink_switch`, where hosts of that GPU and size are usually built the other way."""
    switch = nvswitch(found)
    if table["scale_up"] != "nvlink" or switch is None:
        return {}
    try:
        return {} if Cluster.load(table).has_nvswitch == switch else {"nvlink_switch": switch}
    except ConfigError:
        return {"nvlink_switch": switch}


def compute_nics(found: Topology) -> tuple[FoundNic, ...]:
    """The ports that collectives would use: up, of one kind, near GPUs if any are, the most bandwidth together."""
    ports = [nic for nic in found.nics if nic.active is not False]
    near = {nic.id for g in found.gpus for kind, nics in [found.nearest_nics(g.id)] if kind in NEAR for nic in nics}
    ports = [nic for nic in ports if nic.id in near] or ports
    groups: dict[tuple[str | None, str | None], list[FoundNic]] = {}
    for nic in ports:
        groups.setdefault((nic.key, nic.layer), []).append(nic)
    if not groups:
        return ()
    return tuple(max(groups.values(), key=lambda g: (g[0].key is not None, sum(n.bits_per_s or 0 for n in g))))


def _gpus_per_host(found: Topology) -> int:
    if not found.gpus:
        raise ConfigError(
            f"there is no GPU to describe: {found.nothing_here}.", at=found.source, hint="a machine or file with GPUs"
        )
    counts = Counter(gpu.host for gpu in found.gpus)
    numbers = sorted({counts.get(host, 0) for host in range(found.hosts)})
    if len(numbers) > 1:
        raise ConfigError(
            f"the hosts have {' and '.join(map(str, numbers))} GPUs; a cluster's hosts are alike.",
            at=found.source,
            hint="the hosts that are alike only",
        )
    return numbers[0]


def _gpu_key(found: Topology) -> str:
    names = sorted({gpu.name or "?" for gpu in found.gpus})
    keys = {gpu.key for gpu in found.gpus}
    if len(keys) > 1 or len(names) > 1:
        raise ConfigError(
            f"there are GPUs of several kinds: {', '.join(names)}.", at=found.source, hint="a machine of one kind"
        )
    key = keys.pop()
    if key is None:
        known = f"'{names[0]}' is not in the catalog" if names != ["?"] else "nothing says what the GPUs are"
        raise ConfigError(f"{known}.", at=found.source, hint="--gpu with the catalog key that is nearest")
    return key


def _scale_up(found: Topology, key: str) -> str:
    links = catalog.gpu(key).nvlink_links
    if found.scale_up == "nvlink" and not links:
        raise ConfigError(
            f"the GPUs are connected by NVLink, but '{key}' of the catalog has none.",
            at=found.source,
            hint="another --gpu",
        )
    if found.scale_up:
        return found.scale_up
    name = found.gpus[0].name
    card = bool(name and gpu_by_name(name).pcie_card)
    return "nvlink" if links and not card else "pcie"


def _domains(found: Topology, per_host: int) -> dict[str, int]:
    sizes = sorted({len(domain.gpus) for domain in found.domains})
    covered = sum(len(domain.gpus) for domain in found.domains) == len(found.gpus)
    if not sizes or (covered and len(sizes) == 1 and (per_host % sizes[0] == 0 or sizes[0] % per_host == 0)):
        return {"nvlink_domain_size": sizes[0] if sizes else per_host}
    # A GPU has fallen out: the domain is what the machine was built as, and the job uses what is left of it.
    biggest = max(sizes)
    size = per_host if biggest <= per_host else -(-biggest // per_host) * per_host
    whole_domains = [len(d.gpus) for d in found.domains if len(d.gpus) > size // 2] or sizes
    return {"nvlink_domain_size": size, "gpus_used_per_domain": min(whole_domains)}
