"""The report of `meshkit topo`: examine a machine, compare it with a cluster, write a cluster file, render the report.

The terminal view has tables and a text picture, and fits in 80 columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from meshkit.config.cluster import Cluster, shipped_clusters
from meshkit.config.toml import inline, to_toml
from meshkit.discover import Form, LiveProbe, Topology, discover, read_recorded, to_cluster
from meshkit.discover import check as check_topology
from meshkit.discover import record as record_bundle
from meshkit.errors import ConfigError
from meshkit.report.schema import Part
from meshkit.units import format_bytes

SCHEMA = "meshkit.topo/1"
_MOST_HOSTS_DRAWN = 4
_LAYERS = {"infiniband": "InfiniBand", "ethernet": "RoCE", "tcp": "Ethernet"}


class PciePart(Part):
    """A device's PCIe link: its present generation and width, and the highest ones supported; null if unknown."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None


class GpuPart(Part):
    """A GPU."""

    id: str
    host: int
    name: str | None
    key: str | None
    stand_in: str | None
    numa: int | None
    memory_bytes: int | None
    pcie: PciePart
    nvlinks_active: int | None
    nvlinks: int | None
    nvlink_version: int | None
    nvlink_domain: int | None
    nearest_nics: tuple[str, ...]
    nearest_path: str | None


class NicPart(Part):
    """A port of a network adapter."""

    id: str
    host: int
    layer: str | None
    key: str | None
    stand_in: str | None
    bits_per_s: float | None
    active: bool | None
    state: str | None
    numa: int | None
    pcie: PciePart


class LinkPart(Part):
    """The path between two devices, named as in `nvidia-smi topo -m`: `NV18`, `PIX`, `SYS`, ..."""

    a: str
    b: str
    path: str


class DomainPart(Part):
    """GPUs that reach each other over NVLink."""

    identity: str
    gpus: tuple[str, ...]
    spans_hosts: bool


class RdmaPart(Part):
    """Whether GPUDirect RDMA works, by which kernel modules, and how many PCIe bridges use ACS; null if unknown."""

    works: bool | None
    peer_memory: bool | None
    dma_buf: bool | None
    acs_bridges: int | None


class MismatchPart(Part):
    """A difference between the machine and the declared cluster."""

    code: str
    where: str
    message: str


class OtherPart(Part):
    """A further machine in the same recorded file or folder."""

    source: str
    num_gpus: int
    cluster: dict[str, Any] | None


class TopoReport(Part):
    """The report of `meshkit topo`. `cluster` is a table that `Cluster.load` accepts; it is null if there is none."""

    schema_: Literal["meshkit.topo/1"] = Field(default=SCHEMA, alias="schema")
    source: str
    hosts: int
    nothing_here: str | None
    scale_up: str | None
    numa_nodes: tuple[tuple[int, int], ...]
    gpus: tuple[GpuPart, ...]
    nics: tuple[NicPart, ...]
    links: tuple[LinkPart, ...]
    domains: tuple[DomainPart, ...]
    gpudirect_rdma: RdmaPart
    cluster: dict[str, Any] | None
    shipped: str | None
    others: tuple[OtherPart, ...]
    checked_against: str | None
    findings: tuple[MismatchPart, ...]
    warnings: tuple[str, ...]
    written: str | None
    recorded: str | None


def examine(
    *,
    bundle: Path | None = None,
    check: Cluster | None = None,
    out: Path | None = None,
    record: Path | None = None,
    xml: Path | None = None,
    matrix: Path | None = None,
    gpu: str | None = None,
) -> TopoReport:
    """Examine this machine, or a recorded one, and return its report.

    Args:
        bundle: a bundle of `meshkit topo record`, or a folder with one per host.
        check: the declared cluster to compare with.
        out: the cluster file to write.
        record: the bundle of this machine to write, without names and serial numbers.
        xml: NCCL's topology XML to read instead of this machine.
        matrix: output of `nvidia-smi topo -m` to read instead of this machine.
        gpu: catalog key of the GPUs, if discovery finds none.

    Raises:
        ConfigError: arguments contradict each other, an input is missing, an output exists, or there is no cluster to
            write to `out`.
        TraceError: a file is damaged.
    """
    given: list[tuple[Path | None, Form]] = [(bundle, "bundle"), (xml, "xml"), (matrix, "matrix")]
    sources: list[tuple[Path, Form]] = [(path, form) for path, form in given if path is not None]
    if len(sources) > 1 or (sources and record is not None):
        names = [f"--{form}" for _, form in sources] + ([] if record is None else ["record"])
        raise ConfigError(
            f"{' and '.join(names)} are given, but only one machine can be described.", hint="one of them"
        )
    if record is not None:
        found, *others = [record_bundle(record, LiveProbe())]
    elif sources:
        found, *others = read_recorded(*sources[0])
    else:
        found, *others = [discover(LiveProbe())]
    cluster, problem = _cluster(found, gpu)
    written = None
    if out is not None:
        if cluster is None:
            raise problem or ConfigError("there is nothing to write.", at=found.source)
        written = _write(out, cluster, found)
    warnings = list(found.warnings)
    if found.gpus and problem is not None:
        hint = f" Try {problem.hint}." if problem.hint else ""
        warnings.append(f"no cluster file can be written: {problem.message}{hint}")
    for other in others:
        warnings += [f"{Path(other.source).name}: {warning}" for warning in other.warnings]
    contents = {
        "source": found.source,
        "hosts": found.hosts,
        "nothing_here": found.nothing_here or None,
        "scale_up": found.scale_up,
        "numa_nodes": found.numa_nodes,
        "gpus": _gpu_parts(found),
        "nics": found.nics,
        "links": found.connections,
        "domains": found.domains,
        "gpudirect_rdma": found.rdma,
        "cluster": cluster,
        "shipped": _shipped(cluster),
        "others": [OtherPart(source=t.source, num_gpus=len(t.gpus), cluster=_cluster(t, gpu)[0]) for t in others],
        "checked_against": check.name if check is not None else None,
        "findings": check_topology(found, check) if check is not None else (),
        "warnings": warnings,
        "written": written,
        "recorded": str(record) if record is not None else None,
    }
    return TopoReport.model_validate(contents, from_attributes=True)


def _gpu_parts(found: Topology) -> Iterator[GpuPart]:
    domains = {gpu: index for index, domain in enumerate(found.domains) for gpu in domain.gpus}
    for gpu in found.gpus:
        path, nics = found.nearest_nics(gpu.id)
        more = {
            "nvlinks_active": gpu.active_nvlinks,
            "nvlinks": len(gpu.nvlinks) or None,
            "nvlink_version": next((link.version for link in gpu.nvlinks if link.version), None),
            "nvlink_domain": domains.get(gpu.id),
            "nearest_nics": tuple(nic.id for nic in nics),
            "nearest_path": path or None,
        }
        same = {name: getattr(gpu, name) for name in GpuPart.model_fields if name not in more}
        yield GpuPart.model_validate(same | more, from_attributes=True)


def _cluster(found: Topology, gpu: str | None) -> tuple[dict[str, Any] | None, ConfigError | None]:
    try:
        table = to_cluster(found, gpu=gpu)
        Cluster.load(table)
    except ConfigError as error:
        return None, error
    return table, None


def _shipped(table: dict[str, Any] | None) -> str | None:
    """Return the name of the shipped cluster whose hosts equal this machine; None if there is none."""
    if table is None:
        return None
    mine = Cluster.load(table).to_dict() | {"name": None}
    unknown = {key for key in ("gpudirect_rdma", "nic", "nics_per_host", "fabric") if key not in table}
    unknown |= {"host_memory_bytes", "price_per_gpu_hour", "storage_bytes_per_s", "calibration"}
    unknown |= {"oversubscription", "hosts"}
    for name in shipped_clusters():
        theirs = Cluster.load(name).to_dict() | {"name": None}
        if all(theirs[key] == value for key, value in mine.items() if key not in unknown) and "nic" in table:
            return name
    return None


def _write(out: Path, table: dict[str, Any], found: Topology) -> str:
    comments = [f"# Found by `meshkit topo` on {found.source}."]
    comments += [f"# {warning}" for warning in found.warnings]
    lines = [" ".join(line.split()) for line in comments]
    text = "\n".join(lines) + "\n" + to_toml(table)
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{out} exists, and `topo` never overwrites.", hint="another --out") from None
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.", hint="another --out") from None
    return str(out)


def render(report: TopoReport) -> RenderableType:
    """Return the report for `rich.print`: headline, tables, picture, cluster file, and differences."""
    recorded = [f"recorded in {report.recorded}"] if report.recorded else []
    if not report.gpus:
        findings = [f"✗ {finding.message}" for finding in report.findings]
        lines = [f"No NVIDIA GPU: {report.nothing_here}.", *recorded, *findings]
        return Group(*map(Text, lines))
    parts: list[RenderableType] = [_headline(report)]
    if report.hosts <= _MOST_HOSTS_DRAWN:
        parts += [_heading("GPUs"), _gpu_table(report)]
        if report.nics:
            parts += [_heading("network ports"), _nic_table(report), Text(_rdma(report), "bright_black")]
        parts += [_heading("picture"), *_picture(report)]
    cluster = (f"{key} = {inline(value)}" for key, value in (report.cluster or {}).items())
    others = (f"{other.source}: {other.num_gpus} GPUs, {_short(other.cluster)}" for other in report.others)
    parts += [_domains(report), *_section("cluster file", cluster)]
    parts += _section("further machines in the same file", others)
    if report.checked_against and not report.findings:
        parts.append(Padding(Text(f"✓ as {report.checked_against} says", "green"), (1, 0, 0, 0)))
    findings = (Text.assemble(("✗ ", "red"), finding.message) for finding in report.findings)
    parts += _section(f"differences from {report.checked_against}", findings)
    parts += _section("notes", (f"- {warning}" for warning in report.warnings))
    parts += [Text(f"\n{line}") for line in ([f"wrote {report.written}"] if report.written else []) + recorded]
    return Group(*parts)


def _headline(report: TopoReport) -> RenderableType:
    names = list(dict.fromkeys(gpu.name or gpu.key or "GPU" for gpu in report.gpus))
    what = f"{len(report.gpus)} x {' and '.join(names)}"
    hosts = f" on {report.hosts} hosts" if report.hosts > 1 else ""
    like = f", a host of {report.shipped}" if report.shipped else ""
    return Text.assemble((what, "bold"), f"{hosts}{like}", (f"\n{report.source}", "bright_black"))


def _heading(text: str) -> RenderableType:
    return Padding(Text(text, style="bold"), (1, 0, 0, 0))


def _section(title: str, lines: Iterable[str | Text]) -> list[RenderableType]:
    found = [Text(line) if isinstance(line, str) else line for line in lines]
    return [_heading(title), *found] if found else []


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black")
    for name in names:
        table.add_column(name, overflow="fold")
    return table


def _gpu_table(report: TopoReport) -> RenderableType:
    table = _table("GPU", "memory", "NUMA", "PCIe", "NVLink", "domain", "nearest NIC")
    for gpu in report.gpus:
        near = f"{', '.join(gpu.nearest_nics[:2])}{' ...' if len(gpu.nearest_nics) > 2 else ''}"
        cells = (
            gpu.id,
            format_bytes(gpu.memory_bytes),
            _or_dash(gpu.numa),
            _pcie(gpu.pcie),
            _nvlink(gpu),
            _or_dash(gpu.nvlink_domain),
            f"{near} ({gpu.nearest_path})" if near else "-",
        )
        table.add_row(*map(Text, cells))  # rich would parse plain strings for markup.
    return table


def _nic_table(report: TopoReport) -> RenderableType:
    table = _table("port", "rate", "state", "NUMA", "PCIe", "catalog")
    for nic in report.nics:
        state = nic.state or {True: "up", False: "DOWN", None: "-"}[nic.active]
        style = "red" if nic.active is False else ""
        last = (_or_dash(nic.numa), _pcie(nic.pcie), nic.key or "-")
        table.add_row(Text(nic.id), Text(_rate(nic)), Text(state, style), *map(Text, last))
    return table


def _rdma(report: TopoReport) -> str:
    rdma = report.gpudirect_rdma
    if rdma.works is None and rdma.acs_bridges is None:
        return "GPUDirect RDMA: unknown"
    ways = [name for name, there in (("nvidia_peermem", rdma.peer_memory), ("dma-buf", rdma.dma_buf)) if there]
    text = f"GPUDirect RDMA: {'by ' + ' and '.join(ways) if ways else 'no' if rdma.works is False else 'not known'}"
    if rdma.acs_bridges is None:
        return f"{text}; ACS unknown"
    return f"{text}; ACS redirects on {rdma.acs_bridges} bridges" if rdma.acs_bridges else f"{text}; ACS off"


def _picture(report: TopoReport) -> Iterator[Tree]:
    """Yield a tree for each host: its NUMA nodes, and in each node the GPUs with their nearest NICs."""
    for host in range(report.hosts):
        tree = Tree(Text(f"host {host}", style="bold"), guide_style="bright_black")
        gpus = [gpu for gpu in report.gpus if gpu.host == host]
        nics = [nic for nic in report.nics if nic.host == host]
        for numa in sorted({d.numa for d in (*gpus, *nics)}, key=lambda n: (n is None, n)):
            branch = tree.add(Text("NUMA node unknown" if numa is None else f"NUMA {numa}"))
            _draw_node(branch, [g for g in gpus if g.numa == numa], [n for n in nics if n.numa == numa])
        yield tree


def _draw_node(branch: Tree, gpus: Sequence[GpuPart], nics: Sequence[NicPart]) -> None:
    """Add a line per set of nearest NICs: its GPUs, and its NICs if the path is PIX or PXB. Then add the other NICs."""
    groups: dict[tuple[str, ...], list[GpuPart]] = {}
    for gpu in gpus:
        groups.setdefault(gpu.nearest_nics, []).append(gpu)
    near: set[str] = set()
    for names, group in groups.items():
        path = group[0].nearest_path
        line = Text("  ".join(_last(gpu.id) for gpu in group), "green")
        ports = [nic for nic in nics if nic.id in names and path in ("PIX", "PXB")]
        if ports:
            near |= {nic.id for nic in ports}
            line = Text.assemble(line, (f" ─{path}─ ", "bright_black"))
            line.append("  ".join(_port(nic) for nic in ports), "cyan")
        branch.add(line)
    rest = [nic for nic in nics if nic.id not in near]
    if rest:
        branch.add(Text("  ".join(_port(nic) for nic in rest), "cyan"))


def _port(nic: NicPart) -> str:
    rate = f" {_rate(nic)}" if nic.bits_per_s else ""
    return f"{_last(nic.id)}{rate}{' DOWN' if nic.active is False else ''}"


def _domains(report: TopoReport) -> RenderableType:
    if not report.domains:
        fabric = {"pcie": "over PCIe", "shared_memory": "through host memory", None: "in an unknown way"}
        return Padding(Text(f"GPUs reach each other {fabric.get(report.scale_up, 'over NVLink')}."), (1, 0, 0, 0))
    lines = []
    for index, domain in enumerate(report.domains[:8]):
        size, paths = len(domain.gpus), _paths(report, domain.gpus)
        where = "; it may span further hosts" if domain.spans_hosts and report.hosts == 1 else ""
        ids = domain.gpus[0] if size == 1 else f"{domain.gpus[0]} to {domain.gpus[-1]}"
        lines.append(Text(f"NVLink domain {index}: {size} GPUs, {ids}{paths}{where}"))
    if len(report.domains) > 8:
        lines.append(Text(f"... {len(report.domains)} domains"))
    return Padding(Group(*lines), (1, 0, 0, 0))


def _paths(report: TopoReport, gpus: Sequence[str]) -> str:
    members = set(gpus)
    paths = sorted({link.path for link in report.links if link.a in members and link.b in members})
    return f" ({', '.join(paths)})" if paths else ""


def _short(cluster: dict | None) -> str:
    return f"{cluster['gpu']} over {cluster['scale_up']}" if cluster else "unknown"


def _nvlink(gpu: GpuPart) -> str:
    if gpu.nvlinks_active is None:
        return "-"
    of = f"/{gpu.nvlinks}" if gpu.nvlinks and gpu.nvlinks != gpu.nvlinks_active else ""
    return f"{gpu.nvlinks_active}{of}" + (f" v{gpu.nvlink_version}" if gpu.nvlink_version else "")


def _pcie(slot: PciePart) -> str:
    if slot.generation is None and slot.width is None:
        return "-"
    shown = f"{_or_dash(slot.generation)} x{_or_dash(slot.width)}"
    full = (slot.max_generation or slot.generation, slot.max_width or slot.width)
    return shown if full == (slot.generation, slot.width) else f"{shown} of {_or_dash(full[0])} x{_or_dash(full[1])}"


def _rate(nic: NicPart) -> str:
    rate = f"{nic.bits_per_s / 1e9:g} Gb/s" if nic.bits_per_s else "-"
    return f"{rate} {_LAYERS[nic.layer]}" if nic.layer in _LAYERS else rate


def _last(name: str) -> str:
    return name.split(".", 1)[1] if name.startswith("host") and "." in name else name


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
