"""NCCL's topology XML (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE), and its graph XML.

NCCL's own dumps say everything; files of vendors are partial: PCI addresses and slots, some with invented addresses of
switches. What a file does not say stays unknown, unless its name or comment tells which vendor's machine it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshkit.config import catalog
from meshkit.discover.damage import integer, short
from meshkit.discover.identify import (
    gpu_by_name,
    gpu_name_by_pci,
    nic_by_pci,
    nic_by_rate,
    pcie_generation,
    platform,
)
from meshkit.discover.topology import (
    Connection,
    Domain,
    FoundGpu,
    FoundNic,
    NvLink,
    PcieLink,
    Rdma,
    Topology,
)
from meshkit.discover.wiring import apply_platform, assume_gpu, stand_in_notes, with_domains
from meshkit.discover.xml_tree import Element, parse_xml
from meshkit.errors import TraceError

_BUS = re.compile(r"[0-9a-f]{1,8}:[0-9a-f]{1,2}:[0-9a-f]{1,2}(\.[0-7])?", re.IGNORECASE | re.ASCII)
_MEGABIT = 10**6
_MOST_DEVICES = 1024
_REMOTES = {"0x0302": "gpu", "0x0680": "switch", "0x0604": "switch", "0x068001": "cpu"}
_HINT = "a topology file as NCCL writes it with NCCL_TOPO_DUMP_FILE"


@dataclass
class _Place:
    """Where an element stands: its host, NUMA node, and the PCI switches above it."""

    host: int = 0
    numa: int | None = None
    switches: tuple[int, ...] = ()


@dataclass
class _Reading:
    """What was read so far."""

    at: str
    gpus: list[FoundGpu] = field(default_factory=list)
    nics: list[FoundNic] = field(default_factory=list)
    places: dict[str, _Place] = field(default_factory=dict)
    numa_nodes: list[tuple[int, int]] = field(default_factory=list)
    unknown: list[tuple[str, _Place]] = field(default_factory=list)  # PCI devices without a class
    gdr: set[bool] = field(default_factory=set)  # of the ports
    warnings: list[str] = field(default_factory=list)
    links: dict[str, list[Element]] = field(default_factory=dict)


def parse_topology(data: bytes, *, at: str) -> Topology:
    """The Topology that a file of NCCL describes.

    Args:
        data: the file.
        at: its name; it is also searched for the name of a vendor's machine.

    Raises:
        TraceError: not such a file, or a damaged one.
    """
    root, comments = parse_xml(data, at=at)
    row = platform((at.rsplit("/", 1)[-1], *comments))
    if root.tag == "graphs":
        found = _graph(root, at)
    elif root.tag == "system":
        found = _system(root, at, row)
    else:
        raise TraceError(f"<{short(root.tag)}> is no NCCL topology, which starts with <system>.", at=at, hint=_HINT)
    return stand_in_notes(assume_gpu(apply_platform(with_domains(found), row)))


def _system(root: Element, at: str, row: Mapping[str, Any] | None) -> Topology:
    reading = _Reading(at)
    cpus = [child for child in root.children if child.tag == "cpu"]
    if not cpus:
        raise TraceError("the topology has no <cpu>, so no machine.", at=f"{at}:{root.line}", hint=_HINT)
    hashes = list(dict.fromkeys(cpu.get("host_hash") for cpu in cpus))
    for cpu in cpus:
        numa = integer(cpu.get("numaid"))
        if numa is None and cpu.get("numaid") not in ("-1", ""):
            raise _bad(cpu, "numaid", at)
        place = _Place(hashes.index(cpu.get("host_hash")), numa)
        if numa is not None:
            if (place.host, numa) in reading.numa_nodes:
                raise TraceError(f"NUMA node {numa} is there twice.", at=f"{at}:{cpu.line}", hint=_HINT)
            reading.numa_nodes.append((place.host, numa))
        _walk(cpu, place, reading)
    if row is not None and not reading.gpus and "gpu_bus" in row:
        _take_unknown(reading, row)
    if len(reading.gpus) + len(reading.nics) > _MOST_DEVICES:
        raise TraceError(f"the topology has more than {_MOST_DEVICES} GPUs and NICs.", at=at, hint=_HINT)
    buses = [(gpu.host, gpu.bus) for gpu in reading.gpus]
    repeated = next((bus for host, bus in buses if buses.count((host, bus)) > 1), None)
    if repeated:
        raise TraceError(f"two GPUs have the PCI address {repeated}.", at=at, hint=_HINT)
    gpus, switched = _with_links(reading)
    if reading.unknown and not gpus:
        reading.warnings.append(
            f"the file names {len(reading.unknown)} PCI devices without their class, so none is known to be a GPU."
        )
    domains = (Domain("host", switched),) if len(switched) > 1 and len(hashes) == 1 else ()
    rdma = Rdma(peer_memory=True) if True in reading.gdr else Rdma(False, False) if reading.gdr else Rdma()
    return Topology(
        source=at,
        gpus=gpus,
        nics=tuple(reading.nics),
        numa_nodes=tuple(sorted(reading.numa_nodes)),
        connections=_connections(gpus, reading),
        domains=domains,
        rdma=rdma,
        hosts=len(hashes),
        warnings=tuple(reading.warnings),
        nothing_here="" if gpus else "the file names no GPU",
    )


def _walk(parent: Element, place: _Place, reading: _Reading) -> None:
    for element in parent.children:
        if element.tag == "pci":
            _pci(element, place, reading)
        elif element.tag == "nic":
            _nets(element, place, reading, PcieLink(), None, "")


def _pci(element: Element, place: _Place, reading: _Reading) -> None:
    bus, kind = element.get("busid").lower(), element.get("class").lower()
    if not _BUS.fullmatch(bus):
        raise _bad(element, "busid", reading.at)
    pcie = PcieLink(*_slot(element, reading.at))
    if kind.startswith(("0x0302", "0x0300")) or _child(element, "gpu"):
        _gpu(element, bus, place, pcie, reading)
    elif kind.startswith("0x02") or _child(element, "nic"):
        nic = _child(element, "nic")
        _nets(nic or element, place, reading, pcie, bus, "infiniband" if kind.startswith("0x0207") else "ethernet")
    elif kind.startswith("0x0604") or element.children:
        _walk(element, replace(place, switches=(*place.switches, id(element))), reading)
    elif not kind:
        reading.unknown.append((bus, place))


def _take_unknown(reading: _Reading, row: Mapping[str, Any]) -> None:
    """Devices without a class, at the addresses where a known machine has its GPUs."""
    for bus, place in reading.unknown:
        if re.fullmatch(row["gpu_bus"], bus):
            match = gpu_by_name(row["gpu_name"])
            gpu = FoundGpu(
                f"gpu{len(reading.gpus)}", row["gpu_name"], match.key, bus=bus, numa=place.numa, host=place.host
            )
            reading.gpus.append(gpu)
            reading.places[gpu.id] = place


def _gpu(element: Element, bus: str, place: _Place, pcie: PcieLink, reading: _Reading) -> None:
    name = gpu_name_by_pci(element.get("vendor"), element.get("device"))
    match = gpu_by_name(name) if name else None
    node = _child(element, "gpu")
    gpu = FoundGpu(
        id=f"gpu{len(reading.gpus)}",
        name=name,
        key=match.key if match else None,
        stand_in=match.stand_in if match else "",
        bus=bus,
        numa=place.numa,
        pcie=pcie,
        host=place.host,
    )
    if node is not None:
        if node.get("sm") and integer(node.get("sm")) is None:
            raise _bad(node, "sm", reading.at)
        reading.links[gpu.id] = [child for child in node.children if child.tag == "nvlink"]
    reading.gpus.append(gpu)
    reading.places[gpu.id] = place


def _nets(element: Element, place: _Place, reading: _Reading, pcie: PcieLink, bus: str | None, layer: str) -> None:
    """The ports of one adapter; an adapter without ports in the file counts as one."""
    nets = [child for child in element.children if child.tag == "net"] if element.tag == "nic" else []
    match = nic_by_pci(element.get("vendor"), element.get("device"))
    if not nets and bus:
        bits = catalog.nic(match.key).bytes_per_s * 8 if match.key else None
        name = f"nic{len(reading.nics)}"
        nic = FoundNic(name, layer, match.key, match.stand_in, bits, None, None, bus, place.numa, pcie, place.host)
        reading.nics.append(nic)
        reading.places[name] = place
    for net in nets:
        speed = integer(net.get("speed"))
        if speed is None:
            raise _bad(net, "speed", reading.at)
        name = short(net.get("name"), 30) or f"net{integer(net.get('dev')) or 0}"
        if any(nic.id == name and nic.host == place.host for nic in reading.nics):
            name = f"{name}.{net.get('port') or len(reading.nics)}"
        kind = layer or "tcp"  # a port without a PCI device of its own is a plain network device
        found = nic_by_rate(kind, speed * _MEGABIT)
        if net.get("gdr") in ("0", "1"):
            reading.gdr.add(net.get("gdr") == "1")
        nic = FoundNic(name, kind, found.key, "", speed * _MEGABIT, speed > 0, None, bus, place.numa, pcie, place.host)
        reading.nics.append(nic)
        reading.places[name] = place


def _with_links(reading: _Reading) -> tuple[tuple[FoundGpu, ...], tuple[str, ...]]:
    """GPUs with their NVLinks, and those on a switch; a link of a GPU to itself says nothing and is left out."""
    gpus, switched = [], []
    for gpu in reading.gpus:
        links: list[NvLink] = []
        for element in reading.links.get(gpu.id, []):
            count, target = integer(element.get("count")), element.get("target").lower()
            if count is None or not 0 < count <= 36:
                raise _bad(element, "count", reading.at)
            if target == gpu.bus:
                text = f"{gpu.id} is listed with {count} NVLinks to itself, as some virtual machines show; ignored."
                reading.warnings.append(text)
                continue
            kind = element.get("tclass").lower()
            remote = _REMOTES.get(kind) or _REMOTES.get(kind[:6])
            links += [NvLink(True, None, remote, target)] * count
        if any(link.remote == "switch" for link in links):
            switched.append(gpu.id)
        gpus.append(replace(gpu, nvlinks=tuple(links)))
    return tuple(gpus), tuple(switched)


def _connections(gpus: tuple[FoundGpu, ...], reading: _Reading) -> tuple[Connection, ...]:
    """NVLink between GPUs where it is listed, else the PCI path, as far as the tree tells."""
    by_bus = {g.bus: g.id for g in gpus}
    switched = {g.id for g in gpus if any(link.remote == "switch" for link in g.nvlinks)}
    order = [*(g.id for g in gpus), *(n.id for n in reading.nics)]
    hosts = {**{g.id: g.host for g in gpus}, **{n.id: n.host for n in reading.nics}}
    direct: dict[tuple[str, str], int] = {}
    for gpu in gpus:
        for link in gpu.nvlinks:
            other = by_bus.get(link.remote_bus)
            if other:
                direct[gpu.id, other] = direct.get((gpu.id, other), 0) + 1
    found = []
    listed = {g.id: g.active_nvlinks or 0 for g in gpus}
    for i, a in enumerate(order):
        for b in order[i + 1 :]:
            if hosts[a] != hosts[b]:
                continue
            links = direct.get((a, b)) or direct.get((b, a)) or 0
            if a in switched and b in switched:
                links = min(listed[a], listed[b])
            if links:
                found.append(Connection(a, b, "NV", links))
            elif not (a in by_bus.values() and b in by_bus.values() and not reading.links):
                found.append(Connection(a, b, _path(reading.places[a], reading.places[b])))
    return tuple(found)


def _path(a: _Place, b: _Place) -> str:
    shared = len([1 for x, y in zip(a.switches, b.switches) if x == y])
    if shared:
        return "PIX" if len(a.switches) == len(b.switches) == shared else "PXB"
    if a.numa != b.numa:
        return "SYS"
    return "NODE" if a.numa is not None else "SYS"


def _graph(root: Element, at: str) -> Topology:
    """What a file of NCCL's chosen rings tells of the machine: how many GPUs, and the worst path between them."""
    graphs = [child for child in root.children if child.tag == "graph"]
    channels = [channel for graph in graphs for channel in graph.all("channel")]
    if not channels:
        raise TraceError("the graph has no <channel>, so no GPUs.", at=f"{at}:{root.line}", hint=_HINT)
    sets = [[integer(gpu.get("dev")) for gpu in channel.all("gpu")] for channel in channels]
    devices = sorted({dev for devs in sets for dev in devs if dev is not None})
    if any(sorted(d for d in devs if d is not None) != devices or None in devs for devs in sets) or not devices:
        raise TraceError("the channels of the graph do not name the same GPUs.", at=at, hint=_HINT)
    intra = graphs[0].get("typeintra")
    if intra not in ("NVL", "NVB", "PIX", "PXB", "PXN", "PHB", "NODE", "SYS", "LOC", "C2C"):
        raise _bad(graphs[0], "typeintra", at)
    gpus = tuple(FoundGpu(f"gpu{dev}") for dev in devices)
    over_pcie = intra in ("PIX", "PXB", "PHB", "NODE", "SYS")
    pairs = [(a.id, b.id) for i, a in enumerate(gpus) for b in gpus[i + 1 :]] if over_pcie else []
    domains = () if over_pcie else (Domain("host", tuple(g.id for g in gpus)),)
    return Topology(
        source=at,
        gpus=gpus,
        connections=tuple(Connection(a, b, intra) for a, b in pairs),
        domains=domains,
        scale_up="pcie" if over_pcie else "nvlink",
        warnings=("this is NCCL's graph of rings and trees, not a topology: it tells only how many GPUs there are.",),
    )


def _slot(element: Element, at: str) -> tuple[int | None, int | None]:
    """PCIe generation and width; None where the file leaves them empty."""
    speed, width = element.get("link_speed"), element.get("link_width")
    generation = pcie_generation(speed)
    if generation is None and speed and not speed.lower().startswith("unknown"):
        raise _bad(element, "link_speed", at)
    lanes = integer(width)
    if width and (lanes is None or lanes > 32):
        raise _bad(element, "link_width", at)
    return generation, lanes or None


def _child(element: Element, tag: str) -> Element | None:
    return next((child for child in element.children if child.tag == tag), None)


def _bad(element: Element, name: str, at: str) -> TraceError:
    value = element.get(name)
    shown = f'{name}="{short(value, 30)}"' if value else f"no {name}"
    return TraceError(
        f"<{element.tag}> has {shown}, which is not what NCCL writes.", at=f"{at}:{element.line}", hint=_HINT
    )
