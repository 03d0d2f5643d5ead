"""The verb: looks at a machine, writes its cluster file, compares it with a declared one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshkit.config.cluster import Cluster, shipped_clusters
from meshkit.config.emit import to_toml
from meshkit.discover import LiveProbe, Topology, discover, read_matrix, read_xml, replay, to_cluster
from meshkit.discover import check as check_topology
from meshkit.discover import record as record_bundle
from meshkit.errors import ConfigError
from meshkit.verbs.topo.topo_report import (
    DomainPart,
    FindingPart,
    GpuPart,
    LinkPart,
    NicPart,
    OtherPart,
    PciePart,
    RdmaPart,
    TopoReport,
)


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
        gpu: catalog key of the GPUs, where discovery cannot tell it.

    Raises:
        ConfigError: contradictory arguments, a file that is missing or exists, nothing to write for `out`.
        TraceError: a file that is damaged.
    """
    sources = [name for name, path in (("bundle", bundle), ("xml", xml), ("matrix", matrix)) if path is not None]
    if len(sources) > 1 or (sources and record is not None):
        names = [f"--{name}" for name in sources] + ([] if record is None else ["record"])
        raise ConfigError(f"{' and '.join(names)} are given, but one machine is described.", hint="one of them")
    found, others = _look(bundle, xml, matrix, record)
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
    findings = check_topology(found, check) if check is not None else ()
    return _report(
        found,
        cluster=cluster,
        shipped=_shipped(cluster),
        others=tuple(OtherPart(source=t.source, num_gpus=len(t.gpus), cluster=_cluster(t, gpu)[0]) for t in others),
        checked_against=check.name if check is not None else None,
        findings=tuple(FindingPart(code=f.code, where=f.where, message=f.message) for f in findings),
        warnings=tuple(warnings),
        written=written,
        recorded=str(record) if record is not None else None,
    )


def _look(
    bundle: Path | None, xml: Path | None, matrix: Path | None, record: Path | None
) -> tuple[Topology, tuple[Topology, ...]]:
    """The machine, and further ones that the same file describes."""
    if bundle is not None:
        return replay(bundle), ()
    if xml is not None:
        return read_xml(xml), ()
    if matrix is not None:
        first, *rest = read_matrix(matrix)
        return first, tuple(rest)
    if record is not None:
        return record_bundle(record, LiveProbe()), ()
    return discover(LiveProbe()), ()


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


def _report(found: Topology, **rest: Any) -> TopoReport:
    rdma = found.rdma
    return TopoReport(
        source=found.source,
        hosts=found.hosts,
        nothing_here=found.nothing_here or None,
        scale_up=found.scale_up,
        numa_nodes=found.numa_nodes,
        gpus=tuple(_gpu_part(found, gpu) for gpu in found.gpus),
        nics=tuple(
            NicPart(**{**_plain(nic, NicPart), "stand_in": nic.stand_in or None, "pcie": _pcie(nic)})
            for nic in found.nics
        ),
        links=tuple(LinkPart(a=c.a, b=c.b, path=c.label) for c in found.connections),
        domains=tuple(DomainPart(**_plain(domain, DomainPart)) for domain in found.domains),
        gpudirect_rdma=RdmaPart(
            works=rdma.works, peer_memory=rdma.peer_memory, dma_buf=rdma.dma_buf, acs_bridges=rdma.acs_bridges
        ),
        **rest,
    )


def _gpu_part(found: Topology, gpu: Any) -> GpuPart:
    path, nics = found.nearest_nics(gpu.id)
    return GpuPart(
        id=gpu.id,
        host=gpu.host,
        name=gpu.name,
        key=gpu.key,
        stand_in=gpu.stand_in or None,
        numa=gpu.numa,
        memory_bytes=gpu.memory_bytes,
        pcie=_pcie(gpu),
        nvlinks_active=gpu.active_nvlinks,
        nvlinks=len(gpu.nvlinks) or None,
        nvlink_version=next((link.version for link in gpu.nvlinks if link.version), None),
        nvlink_domain=found.domain_of(gpu.id),
        nearest_nics=tuple(nic.id for nic in nics),
        nearest_path=path or None,
    )


def _pcie(device: Any) -> PciePart:
    slot = device.pcie
    return PciePart(
        generation=slot.generation, width=slot.width, max_generation=slot.max_generation, max_width=slot.max_width
    )


def _plain(value: Any, part: type[DomainPart | NicPart]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in part.model_fields}
