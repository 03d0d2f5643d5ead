"""Define `Topology`, the discovered parts of one or several machines, and identify the parts.

    device names, ids, rates -> names.toml, catalog -> Match (the catalog key)
    Topology -> with_domains, assume_gpu, apply_platform, stand_in_notes -> the same Topology with missing parts added

`names.toml` has the vendors' names of the hardware; all numbers come from the catalog.
"""

from __future__ import annotations

import functools
import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Annotated, Any, Literal

from pydantic import Field

from meshkit.config import catalog

NEAR = ("PIX", "PXB")  # Paths through PCIe switches only, without the host bridge.
PCI_ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")  # Nearest first, as `nvidia-smi topo -m` names them.

Small = Annotated[int, Field(ge=0, le=4096)]  # `Snapshot` checks NVML's answers against these bounds.
Text = Annotated[str, Field(max_length=200)]
_GIGABIT = 1e9
_NVIDIA = "10de"
_FAMILY = re.compile(r"\b(P100|V100|A100|H100|H200|GH200|B200|GB200|B300|GB300)\b", re.ASCII)
_SPEED = re.compile(r"([0-9]{1,3}(?:\.[0-9])?) ?GT/s", re.ASCII)


@dataclass(frozen=True)
class PcieLink:
    """The PCIe link of a device: its present state, and the maximum of device and slot; None if unknown."""

    generation: Small | None = None
    width: Small | None = None
    max_generation: Small | None = None
    max_width: Small | None = None


@dataclass(frozen=True)
class NvLink:
    """One NVLink of a GPU."""

    active: bool
    version: Small | None = None
    """Generation, 1 to 5."""
    remote: Literal["gpu", "switch", "cpu"] | None = None
    remote_bus: Text | None = None
    """PCI address of the other end, if known."""


@dataclass(frozen=True)
class FoundGpu:
    """A discovered GPU."""

    id: str
    """`gpu0`; `host1.gpu0` when several hosts are merged."""
    name: str | None = None
    key: str | None = None
    """Its catalog key; None if the GPU is not in the catalog, or if nothing identifies it."""
    stand_in: str | None = None
    """Why `key` is not exactly this GPU."""
    bus: str | None = None
    numa: int | None = None
    memory_bytes: int | None = None
    pcie: PcieLink = PcieLink()
    nvlinks: tuple[NvLink, ...] = ()
    nvlinks_total: int | None = None
    """Number of active links, if they are not listed one by one."""
    fabric: str | None = None
    """NVML's `clusterUuid.cliqueId`; None if NVLink ends at the host."""
    fabric_problem: str | None = None
    idle: bool = False
    """Whether it is in an idle power state, in which the driver lowers the PCIe generation."""
    host: int = 0

    @property
    def active_nvlinks(self) -> int | None:
        """Number of links that are up; None if unknown."""
        return sum(link.active for link in self.nvlinks) if self.nvlinks else self.nvlinks_total

    @property
    def ends_at_switch(self) -> bool:
        """Whether an active NVLink is known to end at a switch."""
        return any(link.active and link.remote == "switch" for link in self.nvlinks)


@dataclass(frozen=True)
class FoundNic:
    """A discovered port of a network adapter."""

    id: str
    """Its kernel name, `mlx5_0`."""
    layer: str | None = None
    """`infiniband`, `ethernet` (RDMA over it), or `tcp` (no RDMA); None if unknown."""
    key: str | None = None
    """Its catalog key; None if the port is not in the catalog."""
    stand_in: str | None = None
    """Why `key` is not exactly this port."""
    bits_per_s: float | None = None
    active: bool | None = None
    state: str | None = None
    bus: str | None = None
    numa: int | None = None
    pcie: PcieLink = PcieLink()
    host: int = 0


@dataclass(frozen=True)
class Connection:
    """The path between two devices: `NV` with a number of NVLinks, or a PCIe path in nvidia-smi's names (PCI_ORDER)."""

    a: str
    b: str
    kind: str
    nvlinks: int = 0

    @property
    def path(self) -> str:
        """The path as the matrix prints it: `NV18`, `PIX`."""
        return f"NV{self.nvlinks}" if self.kind == "NV" else self.kind


@dataclass(frozen=True)
class Domain:
    """GPUs that reach each other over NVLink."""

    identity: str
    """The fabric's `clusterUuid.cliqueId`; without it `host`, or `host.0`, `host.1`, ... for several domains."""
    gpus: tuple[str, ...]
    spans_hosts: bool = False
    """Whether it may also contain GPUs of hosts that were not examined."""


@dataclass(frozen=True)
class Rdma:
    """Whether NICs can read GPU memory by the peer-memory module or by dma-buf; None if unknown.

    `acs_bridges` is the number of PCIe bridges whose access control services (ACS) redirect such reads to the CPU.
    """

    peer_memory: bool | None = None
    dma_buf: bool | None = None
    acs_bridges: int | None = None

    @property
    def works(self) -> bool | None:
        """Whether the peer-memory module or dma-buf works; None if unknown."""
        if self.peer_memory or self.dma_buf:
            return True
        return None if self.peer_memory is None or self.dma_buf is None else False


@dataclass(frozen=True)
class Topology:
    """Everything that was discovered."""

    source: str
    """`this machine`, or the name of a file."""
    gpus: tuple[FoundGpu, ...] = ()
    nics: tuple[FoundNic, ...] = ()
    numa_nodes: tuple[tuple[int, int], ...] = ()
    """NUMA nodes of each host, in order: `(host, numa)`."""
    connections: tuple[Connection, ...] = ()
    """Known paths between pairs of devices, by ids of `gpus` and `nics`."""
    domains: tuple[Domain, ...] = ()
    """NVLink domains; empty if no GPU has NVLink, or if they are unknown."""
    rdma: Rdma = Rdma()
    hosts: int = 1
    scale_up: str | None = None
    """`nvlink`, `pcie` or `shared_memory`; None if unknown."""
    nics_listed: bool = False
    """Whether `nics` has every RDMA port of the machine."""
    warnings: tuple[str, ...] = ()
    nothing_here: str = ""
    """The reason why there is no GPU, in one sentence; empty if there is one."""

    def nearest_nics(self, gpu: str) -> tuple[str, tuple[FoundNic, ...]]:
        """Return the shortest kind of path from a GPU to any NIC, and the NICs with this path; ("", ()) if unknown."""
        paths = self._paths.get(gpu, {})
        found = [(c.kind, self._nics[other]) for other, c in paths.items() if other in self._nics and c.kind != "NV"]
        if not found:
            return "", ()
        best = min((kind for kind, _ in found), key=PCI_ORDER.index)
        return best, tuple(nic for kind, nic in found if kind == best)

    def warn(self, *warnings: str) -> Topology:
        return replace(self, warnings=(*self.warnings, *warnings))

    @functools.cached_property
    def _paths(self) -> dict[str, dict[str, Connection]]:
        paths: dict[str, dict[str, Connection]] = {}
        for connection in self.connections:
            paths.setdefault(connection.a, {})[connection.b] = connection
            paths.setdefault(connection.b, {})[connection.a] = connection
        return paths

    @functools.cached_property
    def _nics(self) -> dict[str, FoundNic]:
        return {nic.id: nic for nic in self.nics}


def merge(hosts: Sequence[Topology], source: str) -> Topology:
    """Return one Topology of several machines; domains with the same fabric identity become one.

    Args:
        hosts: one or more machines. The ids of devices get the prefix `host0.` on the first machine, `host1.` on the
            second, and so on. A single host is returned as it is.
    """
    if len(hosts) == 1:
        return hosts[0]
    gpus, nics, numa, connections = [], [], [], []
    shared = [text for text in hosts[0].warnings if all(text in host.warnings for host in hosts)]
    warnings = list(shared)
    domains: dict[str, Domain] = {}
    for index, host in enumerate(hosts):
        prefix = f"host{index}."
        gpus += [replace(g, id=prefix + g.id, host=index) for g in host.gpus]
        nics += [replace(n, id=prefix + n.id, host=index) for n in host.nics]
        numa += [(index, node) for _, node in host.numa_nodes]
        connections += [replace(c, a=prefix + c.a, b=prefix + c.b) for c in host.connections]
        warnings += [f"host{index}: {text}" for text in host.warnings if text not in shared]
        for domain in host.domains:
            identity = domain.identity if domain.spans_hosts else prefix + domain.identity
            before = domains.get(identity, Domain(identity, ()))
            spans = before.spans_hosts or domain.spans_hosts
            domains[identity] = Domain(identity, (*before.gpus, *(prefix + g for g in domain.gpus)), spans)
    return Topology(
        source=source,
        gpus=tuple(gpus),
        nics=tuple(nics),
        numa_nodes=tuple(numa),
        connections=tuple(connections),
        domains=tuple(domains.values()),
        rdma=_worst_rdma([host.rdma for host in hosts]),
        hosts=len(hosts),
        nics_listed=all(host.nics_listed for host in hosts),
        scale_up=next((host.scale_up for host in hosts if host.scale_up), None),
        warnings=tuple(warnings),
        nothing_here="" if gpus else hosts[0].nothing_here,
    )


def connected(ids: Iterable[str], edges: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Return the groups of ids that edges connect, directly or through others, in the order of `ids`."""
    order = list(ids)
    group = {name: index for index, name in enumerate(order)}
    for a, b in edges:
        old, new = sorted((group[a], group[b]), reverse=True)
        group = {name: new if index == old else index for name, index in group.items()}
    return [tuple(n for n in order if group[n] == g) for g in dict.fromkeys(group.values())]


def _worst_rdma(states: Sequence[Rdma]) -> Rdma:
    acs = [s.acs_bridges for s in states if s.acs_bridges is not None]
    peer, dma = ({getattr(s, name) for s in states} for name in ("peer_memory", "dma_buf"))
    worst = [False if False in values else None if None in values else True for values in (peer, dma)]
    return Rdma(worst[0], worst[1], max(acs) if acs else None)


@dataclass(frozen=True)
class Match:
    """A catalog key, why it is only the nearest one (None if it is exact), and whether the GPU is a PCIe card."""

    key: str | None = None
    stand_in: str | None = None
    pcie_card: bool = False


@functools.cache
def names() -> Mapping[str, Any]:
    text = resources.files("meshkit.discover").joinpath("names.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def gpu_by_name(name: str) -> Match:
    """Return the catalog's GPU for the name that the driver reports."""
    for row in names()["gpu_name"]:
        if re.search(row["pattern"], name):
            return Match(row["key"], row.get("stand_in"), row.get("pcie_card", False))
    exact = [key for key in catalog.gpu_keys() if catalog.gpu(key).name == name]
    return Match(exact[0]) if exact else Match()


def gpu_name_by_pci(vendor: str, device: str) -> str | None:
    """Return the driver's name of the GPU with these PCI ids (hexadecimal digits, with or without 0x)."""
    return names()["gpu_pci"].get(_hex(device)) if _hex(vendor) == _NVIDIA else None


def nic_by_pci(vendor: str, device: str) -> Match:
    """Return the catalog's NIC for the PCI ids (hexadecimal) of an adapter with a fixed rate, else an empty match."""
    row = names()["nic_pci"].get(f"{_hex(vendor)}:{_hex(device)}")
    return Match(row["key"], row["stand_in"] or None) if row else Match()


def nic_by_rate(layer: str, bits_per_s: float, technology: str = "") -> Match:
    """Return the catalog's NIC with that line rate.

    Args:
        layer: `infiniband`, `ethernet` (RDMA over it), or `tcp`.
        technology: the kernel's name of the link type (`NDR`), which distinguishes InfiniBand ports of the same rate.
    """
    prefix = {"infiniband": "ib_", "ethernet": "roce_", "tcp": "tcp_"}[layer]
    entries = [catalog.nic(key) for key in catalog.nic_keys() if key.startswith(prefix)]
    same = [n for n in entries if round(n.bytes_per_s * 8 / _GIGABIT) == bits_per_s / _GIGABIT]
    named = [n for n in same if technology and technology.lower() in n.label]
    return Match((named or same)[0].key) if same else Match()


def pcie_generation(speed: str) -> int | None:
    """Return the PCIe generation for a lane rate printed by Linux or NCCL (`16.0 GT/s PCIe`); None if unknown."""
    match = _SPEED.match(speed.strip())
    return names()["pcie_generation"].get(match[1].removesuffix(".0")) if match else None


def gpus_by_nvlinks(links: int) -> tuple[str, ...]:
    """Return the catalog GPUs with that many NVLinks, the most common first."""
    order = names()["assume"]["order"]
    return tuple(key for key in order if key in catalog.gpu_keys() and catalog.gpu(key).nvlink_links == links)


def platform(texts: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the known machine that a file's name or comments mention; None if they mention none or several."""
    joined = "\n".join(texts).lower()
    found = [row for row in names()["platform"] if re.search(row["pattern"], joined)]
    return found[0] if len(found) == 1 else None


def with_domains(found: Topology) -> Topology:
    """Return the same Topology with NVLink domains, by the GPUs' fabric identities or else by NVLink connections."""
    if found.domains or not found.gpus:
        return found
    by_fabric: dict[str, list[str]] = {}
    for gpu in found.gpus:
        if gpu.fabric:
            by_fabric.setdefault(gpu.fabric, []).append(gpu.id)
    domains = [Domain(identity, tuple(ids), spans_hosts=True) for identity, ids in by_fabric.items()]
    wired = [g for g in found.gpus if not g.fabric]
    ids = {g.id for g in wired}
    edges = [(c.a, c.b) for c in found.connections if c.kind == "NV" and c.a in ids and c.b in ids]
    edges += itertools.pairwise(g.id for g in wired if g.ends_at_switch)
    groups = [group for group in connected([g.id for g in wired], edges) if len(group) > 1]
    domains += [Domain(f"host.{i}" if len(groups) > 1 else "host", group) for i, group in enumerate(groups)]
    has_nvlink = bool(domains) or any(g.active_nvlinks for g in found.gpus)
    ids = {g.id for g in found.gpus}
    paths_known = any(c.a in ids and c.b in ids for c in found.connections)
    scale_up = found.scale_up or ("nvlink" if has_nvlink else "pcie" if paths_known else None)
    return replace(found, domains=tuple(domains), scale_up=scale_up)


def assume_gpu(found: Topology, *, heading: Sequence[str] = ()) -> Topology:
    """Return the same Topology with a catalog key for unidentified GPUs, assumed from their number of NVLinks.

    The result has a warning about the assumption. If no GPU of the catalog has that number, only a warning is added.

    Args:
        heading: text that may name the GPU model; a model that contradicts the number of NVLinks is ignored.
    """
    if not found.gpus or any(g.key or g.name for g in found.gpus) or not found.scale_up:
        return found
    links = max((g.active_nvlinks or 0 for g in found.gpus), default=0)
    keys, family = gpus_by_nvlinks(links), _family(heading)
    if not keys:
        return found.warn(f"the kind of the GPUs is unknown, and no GPU of the catalog has {links} NVLinks.")
    seen = f"their {links} NVLinks" if links else "no NVLink between them"
    named = [key for key in keys if family and re.search(rf"\b{family}\b", catalog.gpu(key).name)]
    first, *rest = named or keys
    others = f" ({', '.join(rest)} would fit as well)" if rest else ""
    said = f"only the text above names the GPUs, {family}" if named else "the kind of the GPUs is unknown"
    stand_in = None if named and not rest else "assumed from the number of NVLinks"
    gpus = tuple(replace(g, key=first, stand_in=stand_in) for g in found.gpus)
    return replace(found, gpus=gpus).warn(f"{said}; from {seen}, {first} is assumed{others}.")


def _family(lines: Sequence[str]) -> str | None:
    """Return the GPU model (`H100`) in the first line that names any; None if the line names several."""
    for line in lines:
        found = set(_FAMILY.findall(line))
        if found:
            return found.pop() if len(found) == 1 else None
    return None


def apply_platform(found: Topology, row: Mapping[str, Any] | None) -> Topology:
    """Return the same Topology, completed from the row that `platform` found, with a warning about added values.

    GPUs and NICs that have a catalog key keep it. If `row` is None, nothing changes.
    """
    if row is None:
        return found
    gpus, nics, domains = found.gpus, found.nics, found.domains
    key, nic, scale_up = row.get("gpu"), row.get("nic"), row.get("scale_up")
    filled = []
    if key and any(g.key is None for g in gpus):
        gpus = tuple(replace(g, key=key) if g.key is None else g for g in gpus)
        filled.append(f"gpu = {key}")
    if nic and any(n.key is None for n in nics):
        port = catalog.nic(nic)
        layer = "infiniband" if port.fabric == "infiniband" else "ethernet" if port.rdma else "tcp"
        bits = port.bytes_per_s * 8
        nics = tuple(
            replace(n, key=nic, layer=n.layer or layer, bits_per_s=n.bits_per_s or bits) if n.key is None else n
            for n in nics
        )
        filled.append(f"nic = {nic}")
    if scale_up and found.scale_up is None:
        domains = (Domain("host", tuple(g.id for g in gpus)),) if scale_up == "nvlink" and len(gpus) > 1 else ()
        filled.append(f"scale_up = {scale_up}")
    if not filled:
        return found
    found = replace(found, gpus=gpus, nics=nics, domains=domains, scale_up=found.scale_up or scale_up)
    return found.warn(f"the file does not say {', '.join(filled)}; these are known for {row['label']}.")


def stand_in_notes(found: Topology) -> Topology:
    """Return the same Topology with a warning for each kind of GPU or NIC without an exact catalog entry."""
    unknown = dict.fromkeys(gpu.name for gpu in found.gpus if gpu.key is None and gpu.name)
    inexact = dict.fromkeys((gpu.name, gpu.stand_in) for gpu in found.gpus if gpu.name and gpu.stand_in)
    ports = dict.fromkeys(nic.stand_in for nic in found.nics if nic.stand_in)
    return found.warn(
        *(f"the catalog has no GPU '{name}'." for name in unknown),
        *(f"{name} is {why}." for name, why in inexact),
        *(f"the ports are {why}." for why in ports),
    )


def _hex(text: str) -> str:
    return text.strip().lower().removeprefix("0x")
