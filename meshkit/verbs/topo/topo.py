"""The report of `meshkit topo`, the object that `--json` prints: looks at a machine, describes it, compares, writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from meshkit.config.cluster import Cluster, shipped_clusters
from meshkit.config.toml_text import to_toml
from meshkit.discover import LiveProbe, Topology, discover, read_recorded, to_cluster
from meshkit.discover import check as check_topology
from meshkit.discover import record as record_bundle
from meshkit.errors import ConfigError
from meshkit.report.schema import Part

SCHEMA = "meshkit.topo/1"


class PciePart(Part):
    """The slot of a device: what runs, and the most that device and slot can do; null = unknown."""

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
    """How two devices reach each other, in the words of `nvidia-smi topo -m`."""

    a: str
    b: str
    path: str


class DomainPart(Part):
    """GPUs that reach each other over NVLink."""

    identity: str
    gpus: tuple[str, ...]
    spans_hosts: bool


class RdmaPart(Part):
    """GPUDirect RDMA; null = unknown."""

    works: bool | None
    peer_memory: bool | None
    dma_buf: bool | None
    acs_bridges: int | None


class MismatchPart(Part):
    """Where the machine differs from the declared cluster."""

    code: str
    where: str
    message: str


class OtherPart(Part):
    """A further machine in the same file."""

    source: str
    num_gpus: int
    cluster: dict[str, Any] | None


class TopoReport(Part):
    """What `meshkit topo` says; `cluster` loads with `Cluster.load`, and is null where nothing can be loaded."""

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


def run(
    *,
    bundle: Path | None = None,
    check: Cluster | None = None,
    out: Path | None = None,
    record: Path | None = None,
    xml: Path | None = None,
    matrix: Path | None = None,
    gpu: str | None = None,
) -> TopoReport:
    """Looks at this machine, or at what was recorded of one.

    Args:
        bundle: a bundle of `meshkit topo record`, or a folder with one per host.
        check: a cluster to compare with.
        out: a cluster file to write.
        record: where to write a scrubbed bundle of this machine.
        xml: NCCL's topology XML to read instead of this machine.
        matrix: output of `nvidia-smi topo -m` (or a rack model of topograph) to read instead.
        gpu: catalog key of the GPUs, where discovery does not know it.

    Raises:
        ConfigError: contradictory arguments, a file that is missing or exists, nothing to write for `out`.
        TraceError: a file that is damaged.
    """
    sources = [name for name, path in (("bundle", bundle), ("xml", xml), ("matrix", matrix)) if path is not None]
    if len(sources) > 1 or (sources and record is not None):
        names = [f"--{name}" for name in sources] + ([] if record is None else ["record"])
        raise ConfigError(f"{' and '.join(names)} are given, but one machine is described.", hint="one of them")
    if record is not None:
        found, *others = [record_bundle(record, LiveProbe())]
    elif bundle is not None:
        found, *others = read_recorded(bundle, "bundle")
    elif xml is not None:
        found, *others = read_recorded(xml, "xml")
    elif matrix is not None:
        found, *others = read_recorded(matrix, "matrix")
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
        yield GpuPart(
            id=gpu.id,
            host=gpu.host,
            name=gpu.name,
            key=gpu.key,
            stand_in=gpu.stand_in,
            numa=gpu.numa,
            memory_bytes=gpu.memory_bytes,
            pcie=PciePart.model_validate(gpu.pcie, from_attributes=True),
            nvlinks_active=gpu.active_nvlinks,
            nvlinks=len(gpu.nvlinks) or None,
            nvlink_version=next((link.version for link in gpu.nvlinks if link.version), None),
            nvlink_domain=domains.get(gpu.id),
            nearest_nics=tuple(nic.id for nic in nics),
            nearest_path=path or None,
        )


def _cluster(found: Topology, gpu: str | None) -> tuple[dict[str, Any] | None, ConfigError | None]:
    """The cluster table, or why there is none."""
    try:
        table = to_cluster(found, gpu=gpu)
        Cluster.load(table)
    except ConfigError as error:
        return None, error
    return table, None


def _shipped(table: dict[str, Any] | None) -> str | None:
    """The shipped cluster that this is a host of; None when it is none."""
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
        raise ConfigError(f"{out} exists, and `topo` overwrites nothing.", hint="another --out") from None
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}.", hint="another --out") from None
    return str(out)
