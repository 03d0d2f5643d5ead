"""Topology: what one machine (or several, merged) is made of, as found."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field

NEAR = ("PIX", "PXB")  # behind one PCIe switch: traffic between the two stays off the host bridge
PCI_ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")  # nearest first, as `nvidia-smi topo -m` names them

Small = Annotated[int, Field(ge=0, le=4096)]  # bounds are checked where NVML's answers are (nvml.Snapshot)
Text = Annotated[str, Field(max_length=200)]


@dataclass(frozen=True)
class PcieLink:
    """The slot of a device: what runs now, and the most that device and slot could do together; None = unknown."""

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
    """PCI address of the other end, where one is shown."""


@dataclass(frozen=True)
class FoundGpu:
    """A GPU that is there."""

    id: str
    """`gpu0`; `host1.gpu0` when several hosts are merged."""
    name: str | None = None
    """What the driver calls it."""
    key: str | None = None
    """Its catalog key; None when the catalog has none, or when nothing says what it is."""
    stand_in: str | None = None
    """Why `key` is not exactly this GPU."""
    bus: str | None = None
    numa: int | None = None
    memory_bytes: int | None = None
    pcie: PcieLink = PcieLink()
    nvlinks: tuple[NvLink, ...] = ()
    nvlinks_total: int | None = None
    """Active links when the single ones are not listed."""
    fabric: str | None = None
    """NVML's `clusterUuid.cliqueId`; None where NVLink ends at the host."""
    fabric_problem: str | None = None
    idle: bool = False
    """Whether it is in a power state in which the PCIe generation drops."""
    host: int = 0

    @property
    def active_nvlinks(self) -> int | None:
        """Links that are up; None where nothing says."""
        return sum(link.active for link in self.nvlinks) if self.nvlinks else self.nvlinks_total

    @property
    def on_switch(self) -> bool:
        """Whether an active NVLink is known to end at a switch."""
        return any(link.active and link.remote == "switch" for link in self.nvlinks)


@dataclass(frozen=True)
class FoundNic:
    """A port of a network adapter that is there."""

    id: str
    """Its name in the kernel, `mlx5_0`."""
    layer: str | None = None
    """`infiniband`, `ethernet` (RDMA over it), or `tcp` (no RDMA); None = unknown."""
    key: str | None = None
    """Its catalog key; None when the catalog has none."""
    stand_in: str | None = None
    """Why `key` is not exactly this port."""
    bits_per_s: float | None = None
    active: bool | None = None
    """Whether the port is up; None = unknown."""
    state: str | None = None
    """What the kernel calls that."""
    bus: str | None = None
    numa: int | None = None
    pcie: PcieLink = PcieLink()
    host: int = 0


@dataclass(frozen=True)
class Connection:
    """How two devices reach each other: `NV` with its links, or PCIe: `PIX PXB PHB NODE SYS`, as nvidia-smi says."""

    a: str
    b: str
    kind: str
    nvlinks: int = 0

    @property
    def path(self) -> str:
        """As the matrix prints it: `NV18`, `PIX`."""
        return f"NV{self.nvlinks}" if self.kind == "NV" else self.kind


@dataclass(frozen=True)
class Domain:
    """GPUs that reach each other over NVLink."""

    identity: str
    """The fabric's `clusterUuid.cliqueId`, or the host and part of it that they are wired in."""
    gpus: tuple[str, ...]
    spans_hosts: bool = False
    """Whether GPUs of hosts that were not looked at may be in it too."""


@dataclass(frozen=True)
class Rdma:
    """Whether NICs can read GPU memory: peer-memory module, dma-buf; and ACS, which sends such reads to the CPU."""

    peer_memory: bool | None = None
    dma_buf: bool | None = None
    acs_bridges: int | None = None

    @property
    def works(self) -> bool | None:
        """True with either way, False with neither, None where nothing says."""
        if self.peer_memory or self.dma_buf:
            return True
        return None if self.peer_memory is None or self.dma_buf is None else False


@dataclass(frozen=True)
class Topology:
    """What is there."""

    source: str
    """Where this was read: `this machine`, or a file."""
    gpus: tuple[FoundGpu, ...] = ()
    nics: tuple[FoundNic, ...] = ()
    numa_nodes: tuple[tuple[int, int], ...] = ()
    """NUMA nodes of each host, in order: `(host, numa)`."""
    connections: tuple[Connection, ...] = ()
    """Pairs whose path is known; ids of `gpus` and `nics`."""
    domains: tuple[Domain, ...] = ()
    """NVLink domains; empty where no GPU has NVLink, or where nothing says."""
    rdma: Rdma = Rdma()
    hosts: int = 1
    """How many machines it covers."""
    scale_up: str | None = None
    """`nvlink`, `pcie` or `shared_memory`; None where nothing says."""
    nics_listed: bool = False
    """Whether every RDMA port of the machine would be in `nics`."""
    assumed: tuple[tuple[str, object], ...] = ()
    """Cluster keys known of such a machine, with why in `warnings`."""
    warnings: tuple[str, ...] = ()
    nothing_here: str = ""
    """Why there is no GPU, in one sentence; empty when there is one."""

    def between(self, a: str, b: str) -> Connection | None:
        """The connection of two devices, in either order."""
        return self._paths.get(a, {}).get(b)

    def nearest_nics(self, gpu: str) -> tuple[str, tuple[FoundNic, ...]]:
        """The closest kind of path from a GPU to any NIC, and the NICs at that distance; ("", ()) when unknown."""
        paths = self._paths.get(gpu, {})
        found = [(c.kind, self._nics[other]) for other, c in paths.items() if other in self._nics and c.kind != "NV"]
        if not found:
            return "", ()
        best = min((kind for kind, _ in found), key=PCI_ORDER.index)
        return best, tuple(nic for kind, nic in found if kind == best)

    def warn(self, *warnings: str) -> Topology:
        """The same with further warnings."""
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
    """One Topology of several machines, each with its own; domains with the same fabric identity become one."""
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
    """Groups of ids that edges connect, directly or through others, in the order of `ids`."""
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
