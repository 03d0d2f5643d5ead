"""Read NCCL's files that describe machines: its topology XML (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE) and its graph XML.

NCCL's own dumps are complete. Vendors' files are partial: they have PCI addresses, and the speed and width of PCIe
links. In some of them the addresses of switches are invented. A value that a file leaves out stays unknown, unless the
file's name or a comment in it names a known machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from xml.parsers import expat

from meshkit.config import catalog
from meshkit.config.files import integer, short
from meshkit.discover.topology import (
    Connection,
    Domain,
    FoundGpu,
    FoundNic,
    Match,
    NvLink,
    PcieLink,
    Rdma,
    Topology,
    apply_platform,
    assume_gpu,
    gpu_by_name,
    gpu_name_by_pci,
    nic_by_pci,
    nic_by_rate,
    pcie_generation,
    platform,
    stand_in_notes,
    with_domains,
)
from meshkit.errors import TraceError

_BUS = re.compile(r"[0-9a-f]{1,8}:[0-9a-f]{1,2}:[0-9a-f]{1,2}(\.[0-7])?", re.IGNORECASE | re.ASCII)
_MEGABIT = 10**6
_MOST_DEVICES = 1024
_DEEPEST = 64
_MOST_ELEMENTS = 50_000
_REMOTES = {"0x0302": "gpu", "0x0680": "switch", "0x0604": "switch", "0x068001": "cpu"}
_OVER_PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")
_OTHER_PATHS = ("NVL", "NVB", "PXN", "LOC", "C2C")
_HINT = "a topology file as NCCL writes it with NCCL_TOPO_DUMP_FILE"


@dataclass
class Element:
    """One element of an XML file."""

    tag: str
    attributes: Mapping[str, str]
    line: int
    children: list[Element] = field(default_factory=list)

    def get(self, name: str) -> str:
        """Return an attribute; empty where it is absent."""
        return self.attributes.get(name, "")

    def children_of(self, tag: str) -> list[Element]:
        return [child for child in self.children if child.tag == tag]

    def descendants(self, tag: str) -> Iterator[Element]:
        """Yield every element of that tag below this one."""
        for child in self.children:
            if child.tag == tag:
                yield child
            yield from child.descendants(tag)


@dataclass(frozen=True)
class _Place:
    """The place of a device: its host, its NUMA node, and the PCI switches above it."""

    host: int
    numa: int | None
    switches: tuple[int, ...] = ()

    def path_to(self, other: _Place) -> str:
        """Return the PCI path between two devices, as far as the tree shows it."""
        shared = sum(x == y for x, y in zip(self.switches, other.switches))
        if shared:
            return "PIX" if len(self.switches) == len(other.switches) == shared else "PXB"
        return "NODE" if self.numa == other.numa and self.numa is not None else "SYS"


def parse_topology(data: bytes, *, at: str) -> Topology:
    """Return the Topology that a file of NCCL describes.

    Args:
        at: the file's name, which may contain the name of a vendor's machine.

    Raises:
        TraceError: the file has another form, or is damaged.
    """
    root, comments = _parse_xml(data, at=at)
    row = platform((at.rsplit("/", 1)[-1], *comments))
    if root.tag == "graphs":
        found = _graph(root, at)
    elif root.tag == "system":
        found = _System(at).read(root, row)
    else:
        raise TraceError(f"<{short(root.tag)}> is not a NCCL topology, which starts with <system>.", at=at, hint=_HINT)
    return stand_in_notes(assume_gpu(apply_platform(with_domains(found), row)))


class _System:
    """Reads the devices of a <system>; errors point into the file `at`."""

    def __init__(self, at: str):
        self.at = at
        self.gpus: list[FoundGpu] = []
        self.nics: list[FoundNic] = []
        self.places: dict[str, _Place] = {}
        self.numa_nodes: list[tuple[int, int]] = []
        self.unknown: list[tuple[str, _Place]] = []  # PCI devices without a class.
        self.gdr: set[bool] = set()
        self.warnings: list[str] = []
        self.links: dict[str, list[Element]] = {}  # The NVLinks by GPU, if the file lists them.

    def read(self, root: Element, row: Mapping[str, Any] | None) -> Topology:
        """Return the Topology; `row` describes the vendor's machine, if the file names a known one."""
        at, cpus = self.at, root.children_of("cpu")
        if not cpus:
            raise TraceError(
                "the topology has no <cpu>, so it describes no machine.", at=f"{at}:{root.line}", hint=_HINT
            )
        hashes = list(dict.fromkeys(cpu.get("host_hash") for cpu in cpus))
        for cpu in cpus:
            self._cpu(cpu, hashes.index(cpu.get("host_hash")))
        if row is not None and not self.gpus and "gpu_bus" in row:
            self._take_unknown(row)
        if len(self.gpus) + len(self.nics) > _MOST_DEVICES:
            raise TraceError(f"the topology has more than {_MOST_DEVICES} GPUs and NICs.", at=at, hint=_HINT)
        buses = [(gpu.host, gpu.bus) for gpu in self.gpus]
        repeated = next((bus for host, bus in buses if buses.count((host, bus)) > 1), None)
        if repeated:
            raise TraceError(f"two GPUs have the PCI address {repeated}.", at=at, hint=_HINT)
        self.gpus = [replace(gpu, nvlinks=self._nvlinks(gpu)) for gpu in self.gpus]
        if self.unknown and not self.gpus:
            what = f"the file names {len(self.unknown)} PCI devices without their class"
            self.warnings.append(f"{what}, so none is known to be a GPU.")
        switched = tuple(gpu.id for gpu in self.gpus if gpu.ends_at_switch)
        return Topology(
            source=at,
            gpus=tuple(self.gpus),
            nics=tuple(self.nics),
            numa_nodes=tuple(sorted(self.numa_nodes)),
            connections=tuple(self._connections()),
            domains=(Domain("host", switched),) if len(switched) > 1 and len(hashes) == 1 else (),
            rdma=Rdma(peer_memory=True) if True in self.gdr else Rdma(False, False) if self.gdr else Rdma(),
            hosts=len(hashes),
            warnings=tuple(self.warnings),
            nothing_here="" if self.gpus else "the file names no GPU",
        )

    def _cpu(self, cpu: Element, host: int) -> None:
        numa = integer(cpu.get("numaid"))
        if numa is None and cpu.get("numaid") not in ("-1", ""):
            raise _bad(cpu, "numaid", self.at)
        if numa is not None:
            if (host, numa) in self.numa_nodes:
                raise TraceError(f"NUMA node {numa} appears twice.", at=f"{self.at}:{cpu.line}", hint=_HINT)
            self.numa_nodes.append((host, numa))
        self._walk(cpu, _Place(host, numa))

    def _walk(self, parent: Element, place: _Place) -> None:
        for element in parent.children:
            if element.tag == "pci":
                self._pci(element, place)
            elif element.tag == "nic":
                self._ports(element, element, place, FoundNic("", host=place.host, numa=place.numa))

    def _pci(self, element: Element, place: _Place) -> None:
        bus, kind = element.get("busid").lower(), element.get("class").lower()
        if not _BUS.fullmatch(bus):
            raise _bad(element, "busid", self.at)
        pcie = PcieLink(*_slot(element, self.at))
        if kind.startswith(("0x0302", "0x0300")) or element.children_of("gpu"):
            self._gpu(element, bus, place, pcie)
        elif kind.startswith("0x02") or element.children_of("nic"):
            layer = "infiniband" if kind.startswith("0x0207") else "ethernet"
            adapter = next(iter(element.children_of("nic")), None)
            nic = FoundNic("", layer, bus=bus, numa=place.numa, pcie=pcie, host=place.host)
            self._ports(adapter or element, adapter, place, nic)
        elif kind.startswith("0x0604") or element.children:
            self._walk(element, replace(place, switches=(*place.switches, id(element))))
        elif not kind:
            self.unknown.append((bus, place))

    def _take_unknown(self, row: Mapping[str, Any]) -> None:
        """Add devices without a class as GPUs if the known machine has GPUs at their addresses."""
        for bus, place in self.unknown:
            if re.fullmatch(row["gpu_bus"], bus):
                self._add_gpu(row["gpu_name"], Match(gpu_by_name(row["gpu_name"]).key), bus, place, PcieLink())

    def _gpu(self, element: Element, bus: str, place: _Place, pcie: PcieLink) -> None:
        name = gpu_name_by_pci(element.get("vendor"), element.get("device"))
        gpu = self._add_gpu(name, gpu_by_name(name) if name else Match(), bus, place, pcie)
        for node in element.children_of("gpu")[:1]:
            if node.get("sm") and integer(node.get("sm")) is None:
                raise _bad(node, "sm", self.at)
            self.links[gpu] = node.children_of("nvlink")

    def _add_gpu(self, name: str | None, match: Match, bus: str, place: _Place, pcie: PcieLink) -> str:
        gpu = FoundGpu(
            id=f"gpu{len(self.gpus)}",
            name=name,
            key=match.key,
            stand_in=match.stand_in,
            bus=bus,
            numa=place.numa,
            pcie=pcie,
            host=place.host,
        )
        self.gpus.append(gpu)
        self.places[gpu.id] = place
        return gpu.id

    def _ports(self, device: Element, adapter: Element | None, place: _Place, nic: FoundNic) -> None:
        """Add the ports of one adapter; a PCI adapter without ports in the file counts as one port.

        `device` has the PCI ids. `adapter` has the ports; it is None if the file has no <nic>. `nic` has the values
        that all ports share; its `layer` is None if it is not a PCI device.
        """
        nets = adapter.children_of("net") if adapter else []
        match = nic_by_pci(device.get("vendor"), device.get("device"))
        if not nets and nic.bus:
            bits = catalog.nic(match.key).bytes_per_s * 8 if match.key else None
            self._add_nic(
                replace(nic, id=f"nic{len(self.nics)}", key=match.key, stand_in=match.stand_in, bits_per_s=bits), place
            )
        for net in nets:
            speed = integer(net.get("speed"))
            if speed is None:
                raise _bad(net, "speed", self.at)
            name = short(net.get("name"), 30) or f"net{integer(net.get('dev')) or 0}"
            if any(other.id == name and other.host == place.host for other in self.nics):
                name = f"{name}.{net.get('port') or len(self.nics)}"
            if net.get("gdr") in ("0", "1"):
                self.gdr.add(net.get("gdr") == "1")
            layer, bits = nic.layer or "tcp", speed * _MEGABIT
            key = nic_by_rate(layer, bits).key
            self._add_nic(replace(nic, id=name, layer=layer, key=key, bits_per_s=bits, active=speed > 0), place)

    def _add_nic(self, nic: FoundNic, place: _Place) -> None:
        self.nics.append(nic)
        self.places[nic.id] = place

    def _nvlinks(self, gpu: FoundGpu) -> tuple[NvLink, ...]:
        """Return the NVLinks of a GPU, without links of a GPU to itself, which add a warning."""
        links: list[NvLink] = []
        for element in self.links.get(gpu.id, []):
            count, target = integer(element.get("count")), element.get("target").lower()
            if count is None or not 0 < count <= 36:
                raise _bad(element, "count", self.at)
            if target == gpu.bus:
                text = f"{gpu.id} is listed with {count} NVLinks to itself, as some virtual machines show; ignored."
                self.warnings.append(text)
                continue
            kind = element.get("tclass").lower()
            remote: Any = _REMOTES.get(kind) or _REMOTES.get(kind[:6])
            links += [NvLink(True, None, remote, target)] * count
        return tuple(links)

    def _connections(self) -> Iterator[Connection]:
        """Yield the paths between devices of one host: NVLinks, or else the PCI path in the tree.

        If no PCI device has a <gpu>, the file does not say which NVLinks exist. The path between two GPUs is then
        unknown and left out.
        """
        by_bus = {(gpu.host, gpu.bus): gpu.id for gpu in self.gpus}
        gpus = {gpu.id: gpu for gpu in self.gpus}
        direct: dict[tuple[str, str], int] = {}
        for gpu in self.gpus:
            for link in gpu.nvlinks:
                if other := by_bus.get((gpu.host, link.remote_bus)):
                    direct[gpu.id, other] = direct.get((gpu.id, other), 0) + 1
        order = [*gpus, *(nic.id for nic in self.nics)]
        for i, a in enumerate(order):
            for b in order[i + 1 :]:
                if self.places[a].host != self.places[b].host:
                    continue
                links = direct.get((a, b)) or direct.get((b, a)) or 0
                if a in gpus and b in gpus and gpus[a].ends_at_switch and gpus[b].ends_at_switch:
                    links = min(len(gpus[a].nvlinks), len(gpus[b].nvlinks))
                if links:
                    yield Connection(a, b, "NV", links)
                elif self.links or not (a in gpus and b in gpus):
                    yield Connection(a, b, self.places[a].path_to(self.places[b]))


def _graph(root: Element, at: str) -> Topology:
    """Return the machine of NCCL's graph file, which has the number of its GPUs and the worst path between them."""
    graphs = root.children_of("graph")
    channels = [channel for graph in graphs for channel in graph.descendants("channel")]
    if not channels:
        raise TraceError("the graph has no <channel>, so it names no GPUs.", at=f"{at}:{root.line}", hint=_HINT)
    sets = [[integer(gpu.get("dev")) for gpu in channel.descendants("gpu")] for channel in channels]
    devices = sorted({dev for devs in sets for dev in devs if dev is not None})
    if not devices or any(None in devs or sorted(d for d in devs if d is not None) != devices for devs in sets):
        raise TraceError("the channels of the graph do not name the same GPUs.", at=at, hint=_HINT)
    intra = graphs[0].get("typeintra")
    if intra not in (*_OVER_PCIE, *_OTHER_PATHS):
        raise _bad(graphs[0], "typeintra", at)
    ids = [f"gpu{dev}" for dev in devices]
    over_pcie = intra in _OVER_PCIE
    return Topology(
        source=at,
        gpus=tuple(map(FoundGpu, ids)),
        connections=tuple(Connection(a, b, intra) for i, a in enumerate(ids) for b in ids[i + 1 :] if over_pcie),
        domains=() if over_pcie else (Domain("host", tuple(ids)),),
        scale_up="pcie" if over_pcie else "nvlink",
        warnings=("this is NCCL's graph, not a topology: it has only the GPUs and the worst path between them.",),
    )


def _slot(element: Element, at: str) -> tuple[int | None, int | None]:
    """Return the PCIe generation and width; None where the file leaves them empty."""
    speed, width = element.get("link_speed"), element.get("link_width")
    generation = pcie_generation(speed)
    if generation is None and speed and not speed.lower().startswith("unknown"):
        raise _bad(element, "link_speed", at)
    lanes = integer(width)
    if width and (lanes is None or lanes > 32):
        raise _bad(element, "link_width", at)
    return generation, lanes or None


def _bad(element: Element, name: str, at: str) -> TraceError:
    value = element.get(name)
    shown = f'{name}="{short(value, 30)}"' if value else f"no {name}"
    what = f"<{element.tag}> has {shown}, which is not what NCCL writes."
    return TraceError(what, at=f"{at}:{element.line}", hint=_HINT)


def _parse_xml(data: bytes, *, at: str) -> tuple[Element, tuple[str, ...]]:
    """Return the root element and the comments of a document; refuse DOCTYPE, entities and very large documents.

    Topology files come from vendors, images and bug reports, so they are not trusted. ElementTree would expand
    entities, and it has no line numbers.
    """
    parser = expat.ParserCreate()
    stack: list[Element] = []
    roots: list[Element] = []
    comments: list[str] = []
    count = 0

    def start(tag: str, attributes: dict[str, str]) -> None:
        nonlocal count
        count += 1
        line = parser.CurrentLineNumber
        if len(stack) >= _DEEPEST or count > _MOST_ELEMENTS:
            what = f"nests elements more than {_DEEPEST} deep" if len(stack) >= _DEEPEST else "has too many elements"
            raise TraceError(f"the XML {what}.", at=f"{at}:{line}", hint="a topology file as NCCL writes it")
        element = Element(tag, attributes, line)
        (stack[-1].children if stack else roots).append(element)
        stack.append(element)

    def refuse(*_: object) -> None:
        raise TraceError(
            "the XML has a DOCTYPE or an entity, which a NCCL topology never has.",
            at=f"{at}:{parser.CurrentLineNumber}",
            hint="the file that NCCL_TOPO_DUMP_FILE writes (a file of hwloc is another kind)",
        )

    parser.StartElementHandler = start
    parser.EndElementHandler = lambda _: stack.pop()
    parser.CommentHandler = comments.append
    parser.StartDoctypeDeclHandler = refuse
    parser.EntityDeclHandler = refuse
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        what = f"the topology is not XML: {short(expat.ErrorString(error.code))}."
        raise TraceError(what, at=f"{at}:{error.lineno}", hint="an intact copy of the file") from None
    except (LookupError, ValueError, UnicodeError):
        raise TraceError("the topology is not encoded as UTF-8.", at=at, hint="a UTF-8 file") from None
    return roots[0], tuple(comments)
