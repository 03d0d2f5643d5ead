"""Cluster: the machines of an experiment, and the links between their GPUs.

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

from meshkit.config import catalog, links
from meshkit.config.catalog import Gpu, Nic
from meshkit.config.document import Document
from meshkit.config.links import Link
from meshkit.config.paths import absolute, is_path
from meshkit.config.problems import SpecError, did_you_mean, kind, show
from meshkit.config.tables import ClusterTable
from meshkit.config.validate import check_plain, validate
from meshkit.errors import ConfigError

__all__ = ["Cluster", "Gpu", "Link", "Nic", "shipped_clusters"]


@dataclass(frozen=True)
class Cluster:
    """The machines of an experiment.

    Attributes:
        name: the shipped name, or the stem of the file; `inline` where there is neither.
        gpu: of the catalog.
        hosts: machines.
        gpus_per_host: GPUs of a machine.
        nvlink_domain_size: GPUs that reach each other over the scale-up fabric; may span hosts.
        gpus_used_per_domain: how many of them the job uses: the first of each domain.
        scale_up: `nvlink`; `pcie`, from GPU to GPU; `shared_memory`, through pinned host memory, or of CPU devices.
        nvlink_taper: scale-up bandwidth beyond the host relative to inside it.
        nic: of the catalog; None where hosts are not connected.
        nics_per_host: ports of a machine, which its GPUs share; also its rails. 0 without a NIC.
        fabric: `infiniband`, `roce`, `ethernet`, or None without a NIC.
        gpudirect_rdma: whether NICs (and storage) read GPU memory without the host.
        oversubscription: of the scale-out network, 1 = none: what all GPUs of one half can send, over what reaches the
            other half. Of a fat tree the ratio at its narrowest layer, of a dragonfly that of its global links. All
            traffic between domains is priced as if it crossed there.
        storage_bytes_per_s: of checkpoints, over all hosts.
        host_memory_bytes: of a host's CPUs, for what is offloaded; None: unknown.
        price_per_gpu_hour: in any currency.
        calibration: path of a file of `meshkit bench`.
        nvlink_switch: whether NVLink goes through a switch; None: as hosts of that GPU and size are built.
        cpu_link: what connects a GPU and its CPU, a key of the catalog; None: as the GPU comes.
        gpu_spread: standard deviation of the GPUs' compute rates, relative; None: as in published fleets.
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
    host_memory_bytes: float | None = None
    price_per_gpu_hour: float | None = None
    calibration: str | None = None
    nvlink_switch: bool | None = None
    cpu_link: str | None = None
    gpu_spread: float | None = None

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

    def rail_of(self, gpu_index: int) -> int | None:
        """The port of its host that a GPU sends through; GPUs of one rail meet at one switch. None without a NIC."""
        if not self.nics_per_host:
            return None
        domain, local = divmod(gpu_index, self.gpus_used_per_domain)
        place = (domain * self.nvlink_domain_size + local) % self.gpus_per_host
        return place * self.nics_per_host // self.gpus_per_host

    @property
    def has_nvswitch(self) -> bool:
        """Whether the domain's NVLinks go through switches, so that any group of GPUs has all its links' bandwidth."""
        return links.has_nvswitch(self)

    @property
    def checkpoint_bytes_per_s(self) -> float | None:
        """Rate of a checkpoint over all hosts: what the storage takes, or what the GPUs' paths to it carry.

        None where `storage_bytes_per_s` is. Without GPUDirect the path leads through host memory.
        """
        if self.storage_bytes_per_s is None:
            return None
        return min(self.storage_bytes_per_s, links.storage_path_bytes_per_s(self))

    def link(self, name: str, *, gpus: int | None = None) -> Link:
        """The link of that name.

        Args:
            name: `nvlink` (inside a domain) or `infiniband` (between domains).
            gpus: members of a group inside one domain, neighbours in GPU order. NVLink of a group larger than a host is
                what a GPU has beyond it (`nvlink_taper`), and without a switch a GPU has only its links to members: 2
                is what one pair has. Default: all links of a GPU, which is what a ring or a reduction in the switches
                uses, since little of either leaves a host. `infiniband` does not depend on it.

        Raises:
            ConfigError: no such link.
        """
        if name == "nvlink":
            return links.scale_up_link(self, gpus)
        if name == "infiniband":
            return links.scale_out_link(self)
        raise ConfigError(f"there is no link '{name}'.", hint="nvlink or infiniband")

    def offload_link(self) -> Link:
        """The link between one GPU and its host's memory: NVLink-C2C, NVLink of POWER hosts, PCIe elsewhere."""
        return links.offload_link(self)

    def to_dict(self) -> dict[str, Any]:
        """Every key with a plain value, None where unset; `Cluster.load` reads it back."""
        table = {field.name: getattr(self, field.name) for field in fields(self)}
        table["gpu"] = self.gpu.key
        table["nic"] = self.nic.key if self.nic else None
        table["nics_per_host"] = self.nics_per_host or None
        return table


@functools.cache
def shipped_clusters() -> tuple[str, ...]:
    """Names of the clusters that come with meshkit."""
    folder = resources.files("meshkit.config").joinpath("clusters")
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
        table["calibration"] = _find_calibration(table["calibration"], folder)
    if file is not None:
        return _merge_file(table, file, folder)
    if isinstance(name, str) and name in shipped_clusters():
        text = resources.files("meshkit.config").joinpath(f"clusters/{name}.toml").read_text(encoding="utf-8")
        return {**tomllib.loads(text), **table}, name
    if name is not None and "gpu" not in table:
        hint = did_you_mean(str(name), shipped_clusters(), what="a path that ends in .toml, or one of")
        raise SpecError(f"there is no shipped cluster {show(name)}.", key=("cluster", "name"), value=name, hint=hint)
    return table, name if isinstance(name, str) else "inline"


def _find_calibration(file: str, folder: Path) -> str:
    path = Path(absolute(file, folder))
    if not path.is_file():
        hint = "`meshkit bench` writes one; or leave out calibration"
        key = ("cluster", "calibration")
        raise SpecError(f"there is no calibration file '{_relative(path)}'.", key=key, value=file, hint=hint)
    return str(path)


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
        overridden = {"calibration"} & table.keys()  # a file that is not used need not be there
        own = {key: value for key, value in document.table.items() if key not in overridden}
        base, base_name = _resolve(own, path.parent)
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
    _check_nvlink_switch(cluster)
    _check_cpu_link(cluster)
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
    if cluster.is_cpu and cluster.scale_up != "shared_memory":
        raise SpecError(
            f"the scale-up fabric of gpu '{cluster.gpu.key}' cannot be '{cluster.scale_up}'.",
            key=("cluster", "scale_up"),
            value=cluster.scale_up,
            hint='scale_up = "shared_memory"',
        )
    if cluster.scale_up == "nvlink" and not cluster.gpu.nvlink_links:
        raise SpecError(
            f"GPU '{cluster.gpu.key}' has no NVLink.",
            key=("cluster", "scale_up"),
            value=cluster.scale_up,
            hint='scale_up = "pcie"',
        )


def _check_nvlink_switch(cluster: Cluster) -> None:
    given, gpu, size = cluster.nvlink_switch, cluster.gpu, cluster.nvlink_domain_size
    key, value = ("cluster", "nvlink_switch"), given
    if given is None:  # what follows is then about the size of the domain
        key, value = ("cluster", "nvlink_domain_size"), size
    generation = gpu.nvlink_generation or 0
    if cluster.scale_up != "nvlink":
        if given is not None:
            message = f"cluster.nvlink_switch is given, but the scale-up fabric is '{cluster.scale_up}'."
            raise SpecError(message, key=key, value=value, hint="removing it")
    elif cluster.has_nvswitch:
        if catalog.nvswitch(generation) is None:
            message = (
                f"no switch speaks NVLink {generation} of GPU '{gpu.key}', which a domain of {size} GPUs would need."
            )
            raise SpecError(message, key=key, value=value, hint="nvlink_domain_size = 8, and no nvlink_switch")
    elif size > cluster.gpus_per_host:
        message = f"without a switch, an NVLink domain of {size} GPUs cannot span hosts of {cluster.gpus_per_host}."
        raise SpecError(message, key=key, value=value, hint=f"nvlink_domain_size = {cluster.gpus_per_host}")
    elif size - 1 > gpu.nvlink_links and not (size == 8 and catalog.cube_mesh(generation)):
        message = f"without a switch, {gpu.nvlink_links} NVLinks of a GPU do not reach {size - 1} others."
        raise SpecError(message, key=key, value=value, hint="nvlink_switch = true, or a smaller nvlink_domain_size")


def _check_cpu_link(cluster: Cluster) -> None:
    given, gpu = cluster.cpu_link, cluster.gpu
    if given in (None, "pcie", gpu.cpu_link):
        return
    key = ("cluster", "cpu_link")
    if given not in catalog.cpu_link_keys():
        hint = did_you_mean(str(given), catalog.cpu_link_keys())
        raise SpecError(f"the catalog has no link to a CPU '{given}'.", key=key, value=given, hint=hint)
    cpu = links.cpu_link_of(cluster)
    takes = cpu.nvlinks * gpu.nvlink_bytes_per_s / gpu.nvlink_links if gpu.nvlink_links else 0.0
    if not cpu.nvlinks or takes != cpu.bytes_per_s:
        message = f"GPU '{gpu.key}' has no link '{given}' to a CPU."
        raise SpecError(message, key=key, value=given, hint=f'cpu_link = "{gpu.cpu_link}"')


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
