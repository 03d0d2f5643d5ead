"""Cluster: the machines of an experiment, and the links between their GPUs. Layer 1; first in the flow.

GPUs that are used are numbered domain by domain: `gpu_index = domain * gpus_used_per_domain + local`.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from meshkit.errors import ConfigError
from meshkit.spec import catalog
from meshkit.spec.catalog import Gpu, Nic
from meshkit.spec.document import Document
from meshkit.spec.paths import absolute, is_path
from meshkit.spec.problems import SpecError, did_you_mean, kind, show
from meshkit.spec.tables import ClusterTable
from meshkit.spec.validate import check_plain, validate

__all__ = ["Cluster", "Gpu", "Link", "Nic", "shipped_clusters"]

_NVSWITCH_GENERATION = 3  # earlier ones came without a switch on 8-GPU hosts
_LARGEST_MESH_WITHOUT_SWITCH = 4


@dataclass(frozen=True)
class Link:
    """What connects GPUs on one level: inside a domain (`nvlink`) or between domains (`infiniband`).

    Attributes:
        name: `nvlink` or `infiniband`.
        fabric: what it really is: `nvlink4_nvswitch`, `pcie4_p2p`, `shared_memory`, `infiniband_ndr`, `roce_400`, ...
        bytes_per_s: peak per GPU, one direction; ports of a host are shared by its GPUs, oversubscription is taken off.
        achieved: sustained fraction of that.
        latency_s: one ring step of a large message (NCCL's Simple protocol).
        latency_small_s: one ring step of a small message (NCCL's LL protocol).
    """

    name: str
    fabric: str
    bytes_per_s: float
    achieved: float
    latency_s: float
    latency_small_s: float


@dataclass(frozen=True)
class Cluster:
    """The machines of an experiment.

    Attributes:
        name: the shipped name, or the stem of the file; `inline` where there is neither.
        gpu, nic: catalog entries; nic is None where hosts are not connected.
        nvlink_domain_size: GPUs that reach each other over the scale-up fabric; may span hosts.
        gpus_used_per_domain: how many of them the job uses.
        scale_up: `nvlink`, `pcie` or `shared_memory`.
        nvlink_taper: scale-up bandwidth beyond the host relative to inside it.
        fabric: `infiniband`, `roce`, `ethernet`, or None without a NIC.
        oversubscription: of the scale-out network, 1 = none.
        calibration: path of a file of `meshkit bench`.
    """

    name: str
    gpu: Gpu
    hosts: int
    gpus_per_host: int
    nvlink_domain_size: int
    gpus_used_per_domain: int
    scale_up: str
    nvlink_taper: float = 1.0
    nic: Nic | None = None
    nics_per_host: int = 0
    fabric: str | None = None
    gpudirect_rdma: bool = True
    oversubscription: float = 1.0
    storage_bytes_per_s: float | None = None
    price_per_gpu_hour: float | None = None
    calibration: str | None = None

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], *, hosts: int | None = None, **overrides: Any) -> Cluster:
        """A shipped cluster by name, one from a file, or one from a mapping of its keys; further keys override.

        A mapping may hold `name` (of a shipped cluster) or `file`, and keys that override it, or every key itself.

        Raises:
            ConfigError: an unknown name or key, a file that cannot be read, numbers that do not fit together.
        """
        table = as_table(source) | ({} if hosts is None else {"hosts": hosts}) | overrides
        return load_table(table, folder=Path.cwd())

    @property
    def is_cpu(self) -> bool:
        """Whether its devices are virtual CPU devices."""
        return self.gpu.key == "cpu"

    @property
    def num_nvlink_domains(self) -> int:
        """How many scale-up domains there are."""
        return self.hosts * self.gpus_per_host // self.nvlink_domain_size

    @property
    def num_gpus(self) -> int:
        """GPUs that the job uses, over all domains."""
        return self.num_nvlink_domains * self.gpus_used_per_domain

    def domain_of(self, gpu_index: int) -> int:
        """The scale-up domain of a GPU."""
        return gpu_index // self.gpus_used_per_domain

    def host_of(self, gpu_index: int) -> int:
        """The host of a GPU; the GPUs used are the first of each domain."""
        domain, local = divmod(gpu_index, self.gpus_used_per_domain)
        return (domain * self.nvlink_domain_size + local) // self.gpus_per_host

    def link(self, name: str) -> Link:
        """The link of that name.

        Raises:
            ConfigError: no such link, or `infiniband` of a cluster whose one host has a single domain and no NIC.
        """
        if name == "nvlink":
            return self._scale_up_link()
        if name == "infiniband":
            return self._scale_out_link()
        raise ConfigError(f"there is no link '{name}'.", hint="nvlink or infiniband")

    def to_dict(self) -> dict[str, Any]:
        """Every key with a plain value, None where unset; `Cluster.load` reads it back."""
        table = {field.name: getattr(self, field.name) for field in fields(self)}
        table["gpu"] = self.gpu.key
        table["nic"] = self.nic.key if self.nic else None
        table["nics_per_host"] = self.nics_per_host or None
        return table

    def _scale_up_link(self) -> Link:
        fabric = catalog.fabric(self.scale_up)
        latency = {key: fabric[key] for key in ("latency_s", "latency_small_s")}
        if self.scale_up == "nvlink":
            rate, achieved = self.gpu.nvlink_bytes_per_s, self.gpu.achieved["nvlink"]
            return Link("nvlink", self._nvlink_fabric(), rate, achieved, **latency)
        if self.scale_up == "pcie":
            label = f"pcie{self.gpu.pcie_generation}_p2p"
            return Link("nvlink", label, self.gpu.pcie_bytes_per_s, fabric["achieved"], **latency)
        return Link("nvlink", "shared_memory", fabric["bytes_per_s"], fabric["achieved"], **latency)

    def _nvlink_fabric(self) -> str:
        generation, size = self.gpu.nvlink_generation or 0, self.nvlink_domain_size
        # 8-GPU hosts of Pascal and Volta are hybrid cube meshes; up to 4 GPUs are wired to each other directly.
        largest = _LARGEST_MESH_WITHOUT_SWITCH if generation >= _NVSWITCH_GENERATION else 8
        return f"nvlink{generation}_{'nvswitch' if size > largest else 'mesh'}"

    def _scale_out_link(self) -> Link:
        if self.nic is not None:
            rate = self.nic.bytes_per_s * self.nics_per_host / self.gpus_per_host / self.oversubscription
            rate = min(rate, self.gpu.pcie_bytes_per_s)
            latency_s, latency_small_s = self.nic.latency_s, self.nic.latency_small_s
            return Link("infiniband", self._scale_out_fabric(), rate, self.nic.achieved, latency_s, latency_small_s)
        # Without a NIC, domains meet inside one machine: virtual CPU devices, or GPU pairs that share a PCIe tree.
        fabric = catalog.fabric("shared_memory" if self.is_cpu else "pcie")
        label = "shared_memory" if self.is_cpu else f"pcie{self.gpu.pcie_generation}_p2p"
        rate = fabric["bytes_per_s"] if self.is_cpu else self.gpu.pcie_bytes_per_s
        return Link("infiniband", label, rate, fabric["achieved"], fabric["latency_s"], fabric["latency_small_s"])

    def _scale_out_fabric(self) -> str:
        assert self.nic is not None
        if self.fabric == self.nic.fabric:
            return self.nic.label
        # The same port in its other mode: a ConnectX speaks InfiniBand and Ethernet.
        gigabits = round(self.nic.bytes_per_s * 8 / 1e9)
        prefix = {"roce": "roce", "ethernet": "tcp", "infiniband": "infiniband"}[self.fabric or self.nic.fabric]
        return f"{prefix}_{gigabits}"


@functools.cache
def shipped_clusters() -> tuple[str, ...]:
    """Names of the clusters that come with meshkit."""
    folder = resources.files("meshkit.spec").joinpath("clusters")
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


def load_table(table: Mapping[str, Any], *, folder: Path) -> Cluster:
    """The cluster that a `cluster` value (a table) describes; relative paths are relative to `folder`."""
    check_plain({"cluster": table})
    table, name = _resolve(dict(table), folder)
    checked = validate(ClusterTable, table, within=("cluster",))
    return _build(checked, name)


def as_table(source: Any) -> dict[str, Any]:
    """A bare name, a path, or a mapping, as a mapping."""
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | Path):
        raise SpecError(
            f"cluster must be a name, a path or a table, not {kind(source)}.",
            key=("cluster",),
            value=source,
            hint='cluster = "dgx_h100"',
        )
    text = str(source)
    return {"file": text} if isinstance(source, Path) or is_path(text) else {"name": text}


def _resolve(table: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """The table with what `name` or `file` stand for merged in below it, and the cluster's name."""
    name, file = table.get("name"), table.pop("file", None)
    if isinstance(table.get("calibration"), str):
        table["calibration"] = absolute(table["calibration"], folder)
    if file is not None:
        return _merge_file(table, file, folder)
    if isinstance(name, str) and name in shipped_clusters():
        text = resources.files("meshkit.spec").joinpath(f"clusters/{name}.toml").read_text(encoding="utf-8")
        return {**tomllib.loads(text), **table}, name
    if name is not None and "gpu" not in table:
        hint = did_you_mean(str(name), shipped_clusters(), what="a path that ends in .toml, or one of")
        raise SpecError(f"there is no shipped cluster {show(name)}.", key=("cluster", "name"), value=name, hint=hint)
    return table, name if isinstance(name, str) else "inline"


def _merge_file(table: dict[str, Any], file: Any, folder: Path) -> tuple[dict[str, Any], str]:
    key = ("cluster", "file")
    if not isinstance(file, str):
        raise SpecError(f"cluster.file must be a path, not {kind(file)}.", key=key, value=file, hint='"cluster.toml"')
    if "name" in table:
        raise SpecError(
            "a cluster has either a 'name' or a 'file', not both.", key=key, value=file, hint="removing one of them"
        )
    path = Path(absolute(file, folder))
    if not path.exists():
        hint = "a path relative to the file that names it, or the name of a shipped cluster"
        raise SpecError(f"there is no cluster file '{_relative(path)}'.", key=key, value=file, hint=hint)
    document = Document.read(_relative(path), what="cluster file", root=("cluster",))
    try:
        check_plain({"cluster": document.table})
        base, base_name = _resolve(dict(document.table), path.parent)
        checked = validate(ClusterTable, base, within=("cluster",))
    except SpecError as error:
        raise document.locate(error) from None
    # A file that extends a shipped cluster is a cluster of its own; its name must not read as the shipped one's.
    named = "gpu" in document.table and base_name != "inline"
    name = base_name if named else path.stem
    base = checked.model_dump(exclude_unset=True, exclude={"name"})
    return {**base, **table}, path.name if name in shipped_clusters() else name


def _relative(path: Path) -> str:
    """A path as short as it reads from the working directory."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _build(table: ClusterTable, name: str) -> Cluster:
    gpu, nic = _find_gpu(table.gpu), _find_nic(table.nic)
    domain_size = table.nvlink_domain_size or table.gpus_per_host
    values = table.model_dump(exclude={"name"})
    values.update(
        gpu=gpu,
        nic=nic,
        nvlink_domain_size=domain_size,
        gpus_used_per_domain=table.gpus_used_per_domain or domain_size,
        nics_per_host=(table.nics_per_host or table.gpus_per_host) if nic else 0,
        fabric=(table.fabric or nic.fabric) if nic else None,
    )
    cluster = Cluster(name=name, **values)
    _check_domains(cluster)
    _check_scale_up(cluster)
    _check_scale_out(cluster, table)
    return cluster


def _find_gpu(key: str) -> Gpu:
    if key not in catalog.gpu_keys():
        hint = did_you_mean(key, catalog.gpu_keys(), what="a GPU of the catalog")
        raise SpecError(f"the catalog has no GPU '{key}'.", key=("cluster", "gpu"), value=key, hint=hint)
    return catalog.gpu(key)


def _find_nic(key: str | None) -> Nic | None:
    if key is None:
        return None
    if key not in catalog.nic_keys():
        hint = did_you_mean(key, catalog.nic_keys(), what="a NIC of the catalog")
        raise SpecError(f"the catalog has no NIC '{key}'.", key=("cluster", "nic"), value=key, hint=hint)
    return catalog.nic(key)


def _check_domains(cluster: Cluster) -> None:
    size, per_host, total = cluster.nvlink_domain_size, cluster.gpus_per_host, cluster.hosts * cluster.gpus_per_host
    key = ("cluster", "nvlink_domain_size")
    if size % per_host and per_host % size:
        raise SpecError(
            f"an NVLink domain of {size} GPUs is neither whole hosts nor a whole part of one ({per_host} GPUs).",
            key=key,
            value=size,
            hint=f"nvlink_domain_size = {per_host}",
        )
    if total % size:
        raise SpecError(
            f"{cluster.hosts} hosts x {per_host} GPUs = {total} do not make whole NVLink domains of {size} GPUs.",
            key=key,
            value=size,
            hint=f"hosts = {-(-total // size) * size // per_host}, or nvlink_domain_size = {min(total, per_host)}",
        )
    if cluster.gpus_used_per_domain > size:
        raise SpecError(
            f"{cluster.gpus_used_per_domain} GPUs are to be used of each NVLink domain, but a domain has {size}.",
            key=("cluster", "gpus_used_per_domain"),
            value=cluster.gpus_used_per_domain,
            hint=f"gpus_used_per_domain = {size}",
        )


def _check_scale_up(cluster: Cluster) -> None:
    if cluster.is_cpu != (cluster.scale_up == "shared_memory"):
        right = "shared_memory" if cluster.is_cpu else "nvlink or pcie"
        raise SpecError(
            f"the scale-up fabric of gpu '{cluster.gpu.key}' cannot be '{cluster.scale_up}'.",
            key=("cluster", "scale_up"),
            value=cluster.scale_up,
            hint=f"scale_up = {right}",
        )
    if cluster.scale_up == "nvlink" and not cluster.gpu.nvlink_links:
        raise SpecError(
            f"GPU '{cluster.gpu.key}' has no NVLink.",
            key=("cluster", "scale_up"),
            value=cluster.scale_up,
            hint='scale_up = "pcie"',
        )


def _check_scale_out(cluster: Cluster, table: ClusterTable) -> None:
    one_host_or_domain = cluster.hosts * cluster.gpus_per_host <= max(cluster.nvlink_domain_size, cluster.gpus_per_host)
    if cluster.nic is None and not one_host_or_domain and not cluster.is_cpu:
        raise SpecError(
            f"{cluster.hosts} hosts with no 'nic' cannot reach each other.",
            key=("cluster", "hosts"),
            value=cluster.hosts,
            hint='a line nic = "ib_ndr" in the cluster, or hosts = 1',
        )
    if cluster.nic is None and (table.nics_per_host or table.fabric):
        key = "nics_per_host" if table.nics_per_host else "fabric"
        raise SpecError(
            f"cluster.{key} is given, but no 'nic'.",
            key=("cluster", key),
            value=getattr(table, key),
            hint='a line nic = "ib_ndr" in the cluster',
        )
