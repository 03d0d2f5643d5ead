"""The report of `meshkit topo` on a terminal: tables and a picture in text; 80 columns are enough. No jax."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from meshkit.config.toml_text import inline
from meshkit.units import format_bytes
from meshkit.verbs.topo.topo import GpuPart, NicPart, PciePart, TopoReport

_MOST_HOSTS_DRAWN = 4
_LAYERS = {"infiniband": "InfiniBand", "ethernet": "RoCE", "tcp": "Ethernet"}


def render(report: TopoReport) -> RenderableType:
    """The report for `rich.print`: headline, tables, picture, cluster, and what is wrong."""
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
    parts += _section(f"not as {report.checked_against} says", findings)
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
    """A heading and its lines; nothing where there are none."""
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
        table.add_row(*map(Text, cells))  # Text, as a plain string would be read for markup
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
        return "GPUDirect RDMA: not known"
    ways = [name for name, there in (("nvidia_peermem", rdma.peer_memory), ("dma-buf", rdma.dma_buf)) if there]
    text = f"GPUDirect RDMA: {'by ' + ' and '.join(ways) if ways else 'no' if rdma.works is False else 'not known'}"
    if rdma.acs_bridges is None:
        return f"{text}; ACS not readable"
    return f"{text}; ACS redirects on {rdma.acs_bridges} bridges" if rdma.acs_bridges else f"{text}; ACS off"


def _picture(report: TopoReport) -> Iterator[Tree]:
    """Hosts, their NUMA nodes, and each GPU with the NICs that are near it."""
    for host in range(report.hosts):
        tree = Tree(Text(f"host {host}", style="bold"), guide_style="bright_black")
        gpus = [gpu for gpu in report.gpus if gpu.host == host]
        nics = [nic for nic in report.nics if nic.host == host]
        for numa in sorted({d.numa for d in (*gpus, *nics)}, key=lambda n: (n is None, n)):
            branch = tree.add(Text("NUMA node not known" if numa is None else f"NUMA {numa}"))
            _draw_node(branch, [g for g in gpus if g.numa == numa], [n for n in nics if n.numa == numa])
        yield tree


def _draw_node(branch: Tree, gpus: Sequence[GpuPart], nics: Sequence[NicPart]) -> None:
    """GPUs behind one switch with their NICs on one line each; then NICs that are near none."""
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
        fabric = {"pcie": "over PCIe", "shared_memory": "through host memory", None: "in a way that nothing tells"}
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
    return f"{cluster['gpu']} over {cluster['scale_up']}" if cluster else "which nothing tells"


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
    """An id without its host, which the picture draws around it."""
    return name.split(".", 1)[1] if name.startswith("host") and "." in name else name


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
