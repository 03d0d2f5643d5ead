"""What `meshkit topo` says, as pydantic models: the object that `--json` prints."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

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


class FindingPart(Part):
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
    findings: tuple[FindingPart, ...]
    warnings: tuple[str, ...]
    written: str | None
    recorded: str | None

    def to_json(self, *, indent: int | None = 2) -> str:
        """The object that `--json` prints."""
        return self.model_dump_json(indent=indent, by_alias=True)


def topo_json_schema() -> dict[str, Any]:
    """JSON Schema of the report."""
    return TopoReport.model_json_schema(mode="serialization")
