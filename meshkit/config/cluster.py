"""Describe the machines of an experiment, and the links between their GPUs.

The GPUs in use are numbered domain by domain: `gpu_index = domain * gpus_used_per_domain + local`.

A path between GPUs that does not use NVLink is as fast as its slowest hop: the GPU's link to its CPU, host memory if
the path crosses it, and between hosts the NIC and the NIC's PCIe slot. Hops are compared by sustained rate. A `Link`
has the peak and the sustained share of its slowest hop.
"""

# A file may omit a key or give a name. A Cluster has the resolved value, so its fields have narrower types.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshkit.config import catalog
from meshkit.config.catalog import CpuLink, Gpu, Nic
from meshkit.config.files import TomlDocument, absolute, as_table
from meshkit.config.sections import ClusterTable
from meshkit.config.toml import SpecError, check_plain, did_you_mean, kind, show, validate
from meshkit.errors import ConfigError

if TYPE_CHECKING:  # numpy takes longer to import than an experiment to load
    import numpy as np

__all__ = ["Cluster", "Gpu", "Link", "Nic", "shipped_clusters"]

_SHIPPED = Path(__file__).with_name("clusters")
_NVSWITCH_GENERATION = 3  # earlier NVLink came without a switch on 8-GPU hosts
# NVLink has that generation or a later one -> largest number of GPUs that are wired to each other without a switch.
_LARGEST_MESH = {True: 4, False: 8}

# Passes over host memory for each byte that a GPU sends through it: one write and one read. In a collective over a
# network the GPU also receives as many bytes, which doubles the passes.
_PASSES_SCALE_UP = 2
_PASSES_SCALE_OUT = 4

# Protocol of a port -> prefix of the catalog's NICs. A ConnectX runs as InfiniBand or as Ethernet. If a port is not in
# the mode of its catalog entry, its label begins with the word in the second table.
_NIC_PREFIX = {"roce": "roce_", "ethernet": "tcp_", "infiniband": "ib_"}
_OTHER_MODE = {"roce": "roce", "ethernet": "tcp", "infiniband": "infiniband"}

Hop = tuple[float, float]  # peak bytes/s, sustained share


@dataclass(frozen=True)
class Link:
    """A link between GPUs inside a domain, between domains, or between a GPU and its CPU."""

    name: str
    """`nvlink` (inside a domain), `infiniband` (between domains) or `cpu`."""
    fabric: str
    """The fabric behind it: `nvlink4_nvswitch`, `pcie4_p2p`, `shared_memory`, `infiniband_ndr`, ..."""
    bytes_per_s: float
    """Peak rate of one GPU, one direction. A GPU has its share of the host's ports, after oversubscription."""
    achieved: float
    """Sustained share of the peak rate."""
    latency_s: float
    """Latency of one ring step of a large message (NCCL's Simple protocol)."""
    latency_small_s: float
    """Latency of one ring step of a small message (NCCL's LL protocol)."""


class Cluster(ClusterTable):
    """The machines of an experiment: the keys of a cluster file, with defaults filled in for omitted keys."""

    name: str = "inline"
    gpu: Gpu
    nvlink_domain_size: int = 1
    gpus_used_per_domain: int = 1
    """Number of GPUs that the job uses in each domain; they are the first ones."""
    nic: Nic | None = None
    """None if hosts are not connected."""
    nics_per_host: int = 0
    """Network ports of a host, shared by its GPUs, which is also the number of rails; 0 without a NIC."""

    @classmethod
    def load(cls, source: str | Path | Mapping[str, Any], *, hosts: int | None = None, **overrides: Any) -> Cluster:
        """Return a cluster from a shipped name, a file or a mapping of its keys; keyword arguments override keys.

        A mapping has `name` (a shipped cluster) or `file`, with keys that override it; or the keys of a new cluster.

        Args:
            source: a shipped name, a path (text that ends in `.toml` or has a slash, or a Path) or a table.

        Raises:
            ConfigError: an unknown name or key, a file that cannot be read, numbers that do not fit together.
        """
        table = as_table(source) | ({} if hosts is None else {"hosts": hosts}) | overrides
        return load_table(table, folder=Path.cwd())

    @property
    def is_cpu(self) -> bool:
        """Return whether its devices are virtual CPU devices."""
        return self.gpu.key == "cpu"

    @property
    def num_nvlink_domains(self) -> int:
        """Return the number of scale-up domains."""
        return self.hosts * self.gpus_per_host // self.nvlink_domain_size

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs that the job uses in all domains."""
        return self.num_nvlink_domains * self.gpus_used_per_domain

    @property
    def hosts_used(self) -> int:
        """Return the number of hosts with a GPU that the job uses."""
        return min(self.hosts, self.num_nvlink_domains * self.hosts_used_per_domain)

    @property
    def hosts_per_domain(self) -> int:
        """Return the number of hosts that a scale-up domain spans; 1 if a host has one or several domains."""
        return max(1, self.nvlink_domain_size // self.gpus_per_host)

    @property
    def hosts_used_per_domain(self) -> int:
        """Return how many hosts of each domain have GPUs that the job uses; 1 if a host has several domains."""
        return -(-self.gpus_used_per_domain // self.gpus_per_host)

    @property
    def gpus_used_per_host(self) -> int:
        """Return the number of GPUs that the job uses on each of its hosts; a domain's last host may have fewer."""
        domains = max(1, self.gpus_per_host // self.nvlink_domain_size)
        return min(self.gpus_per_host, domains * self.gpus_used_per_domain)

    def domain_of[T: (int, np.ndarray)](self, gpu_index: T) -> T:
        """Return the scale-up domain of a GPU index, or of each index in an array."""
        return gpu_index // self.gpus_used_per_domain

    def host_of[T: (int, np.ndarray)](self, gpu_index: T) -> T:
        """Return the host of a GPU index, or of each index in an array; a job uses the first GPUs of each domain."""
        return self._among_all(gpu_index) // self.gpus_per_host

    def rail_of[T: (int, np.ndarray)](self, gpu_index: T) -> T | None:
        """Return the rail of a GPU, which is the index of the host port through which it sends; None without a NIC."""
        if not self.nics_per_host:
            return None
        return self._among_all(gpu_index) % self.gpus_per_host * self.nics_per_host // self.gpus_per_host

    def _among_all[T: (int, np.ndarray)](self, gpu_index: T) -> T:
        unused = self.nvlink_domain_size - self.gpus_used_per_domain
        return gpu_index + self.domain_of(gpu_index) * unused

    @property
    def has_nvswitch(self) -> bool:
        """Return whether NVLink goes through switches, which let a GPU use all its links with any group in its domain.

        If `nvlink_switch` is not set, the answer is how hosts of that NVLink generation and domain size are built.
        """
        if self.scale_up != "nvlink":
            return False
        if self.nvlink_switch is not None:
            return self.nvlink_switch
        modern = (self.gpu.nvlink_generation or 0) >= _NVSWITCH_GENERATION
        return self.nvlink_domain_size > _LARGEST_MESH[modern]

    @property
    def checkpoint_bytes_per_s(self) -> float | None:
        """Return the rate at which all hosts write a checkpoint: the slower of the storage and the GPUs' paths to it.

        It is None if `storage_bytes_per_s` is. With GPUDirect Storage (assumed if `gpudirect_rdma`) a byte crosses only
        the GPU's link to its CPU. Without it, the byte is also written to host memory and read again.
        """
        if self.storage_bytes_per_s is None:
            return None
        cpu = _cpu_link_of(self)
        hops = [(cpu.bytes_per_s, cpu.achieved)]
        if not self.gpudirect_rdma:
            hops.append(_host_memory(cpu, passes=_PASSES_SCALE_UP))
        peak, achieved = _slowest(hops)
        return min(self.storage_bytes_per_s, self.num_gpus * peak * achieved)

    def link(self, name: str, *, gpus: int | None = None) -> Link:
        """Return the link of that name.

        Args:
            name: `nvlink` (inside a domain) or `infiniband` (between domains).
            gpus: number of GPUs of a group inside one domain, neighbours in GPU order. A group larger than a host has
                the tapered NVLink bandwidth (`nvlink_taper`). Without a switch a GPU uses only its links to members:
                with 2 members, the links of that pair. By default all links of a GPU count without taper, as for a ring
                or a reduction in the switches, which send little beyond a host. `infiniband` ignores `gpus`.

        Raises:
            ConfigError: there is no such link.
        """
        if name == "nvlink":
            return _nvlink(self, gpus) if self.scale_up == "nvlink" else _inside_host(self, name)
        if name == "infiniband":
            return _inside_host(self, name) if self.nic is None else _scale_out(self, self.nic)
        raise ConfigError(f"there is no link '{name}'.", hint="nvlink or infiniband")

    def offload_link(self) -> Link:
        """Return the link of a GPU to host memory (NVLink-C2C, NVLink, PCIe) with all GPUs active, one direction."""
        if self.is_cpu:
            return _inside_host(self, "cpu")
        cpu, latency = _cpu_link_of(self), catalog.fabric("pcie")
        hops = [(cpu.bytes_per_s, cpu.achieved), _host_memory(cpu, passes=1)]
        return Link("cpu", cpu.label, *_slowest(hops), latency["latency_s"], latency["latency_small_s"])

    def mesh_hops(self, gpus: int) -> float:
        """Return the mean number of NVLinks that a byte crosses between two of the first `gpus` GPUs of a host.

        It is 1 if direct links or a switch connect all pairs. In a cube mesh, bytes between two GPUs without a direct
        link cross two NVLinks, through a GPU that has links to both (NCCL's NVB paths).
        """
        table = catalog.cube_mesh(self.gpu.nvlink_generation or 0) if self.gpus_per_host == 8 else None
        if self.scale_up != "nvlink" or self.has_nvswitch or table is None or gpus < 2:
            return 1.0
        pairs = [(a, b) for a in range(min(gpus, 8)) for b in range(min(gpus, 8)) if a != b]
        return sum(1 if table[a][b] else 2 for a, b in pairs) / len(pairs)

    def to_dict(self) -> dict[str, Any]:
        """Return every key with a plain value, None where unset; `Cluster.load` reads it back."""
        table = {name: getattr(self, name) for name in ClusterTable.model_fields}
        own = {"gpu": self.gpu.key, "nic": self.nic.key if self.nic else None}
        return table | own | {"nics_per_host": self.nics_per_host or None}


@functools.cache
def shipped_clusters() -> tuple[str, ...]:
    """Return the names of the clusters that come with meshkit."""
    return tuple(sorted(file.stem for file in _SHIPPED.glob("*.toml")))


def load_table(table: Mapping[str, Any], *, folder: Path) -> Cluster:
    """Return the cluster that a `cluster` value (a table) describes; relative paths are relative to `folder`."""
    check_plain({"cluster": table})
    table, name = _resolve(dict(table), folder)
    checked = validate(ClusterTable, table, within=("cluster",))
    return _build(checked, name)


def _resolve(table: dict[str, Any], folder: Path, inside: tuple[Path, ...] = ()) -> tuple[dict[str, Any], str]:
    """Return the table merged over the cluster that its `name` or `file` gives, and the cluster's name.

    `inside` has the cluster files that led to this one, to detect a cycle.
    """
    name, file = table.get("name"), table.pop("file", None)
    if isinstance(table.get("calibration"), str):
        table["calibration"] = _find_calibration(table["calibration"], folder)
    if file is not None:
        return _merge_file(table, file, folder, inside)
    if isinstance(name, str) and name in shipped_clusters():
        return {**tomllib.loads((_SHIPPED / f"{name}.toml").read_text(encoding="utf-8")), **table}, name
    if name is not None and "gpu" not in table:
        hint = did_you_mean(str(name), shipped_clusters(), what="a path that ends in .toml, or one of")
        raise _refused("name", name, f"there is no shipped cluster {show(name)}.", hint)
    return table, name if isinstance(name, str) else "inline"


def _find_calibration(file: str, folder: Path) -> str:
    path = Path(absolute(file, folder))
    if not path.is_file():
        message = f"there is no calibration file '{_relative(path)}'."
        raise _refused("calibration", file, message, "`meshkit bench` writes one; or leave out calibration")
    return str(path)


def _merge_file(table: dict[str, Any], file: Any, folder: Path, inside: tuple[Path, ...]) -> tuple[dict[str, Any], str]:
    if not isinstance(file, str):
        raise _refused("file", file, f"cluster.file must be a path, not {kind(file)}.", 'file = "cluster.toml"')
    if "name" in table:
        raise _refused("file", file, "a cluster has either a 'name' or a 'file', not both.", "removing one of them")
    path = Path(absolute(file, folder))
    if not path.exists() or path.is_dir():
        hint = "a path relative to the file that names it, or the name of a shipped cluster"
        raise _refused("file", file, f"there is no cluster file '{_relative(path)}'.", hint)
    if path.resolve() in inside:
        raise _refused(
            "file",
            file,
            "a cluster file names itself, directly or through other files.",
            "every key, or the name of a shipped cluster",
        )
    document = TomlDocument.read(_relative(path), what="cluster file", root=("cluster",))
    try:
        check_plain({"cluster": document.table})
        overridden = {"calibration"} & table.keys()  # A calibration file that is not used need not exist.
        own = {key: value for key, value in document.table.items() if key not in overridden}
        base, base_name = _resolve(own, path.parent, (*inside, document.path))
        validate(ClusterTable, base, within=("cluster",))
    except SpecError as error:
        raise document.locate(error) from None
    # A file that extends a shipped cluster is another cluster, so it must not have the shipped cluster's name.
    named = "gpu" in document.table and base_name != "inline"
    name = base_name if named else path.stem
    base.pop("name", None)
    return {**base, **table}, path.name if name in shipped_clusters() else name


def _relative(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _build(table: ClusterTable, name: str) -> Cluster:
    _check_known("gpu", table.gpu, catalog.gpu_keys(), "GPU")
    if table.nic is not None:
        _check_known("nic", table.nic, catalog.nic_keys(), "NIC")
    gpu, nic = catalog.gpu(table.gpu), catalog.nic(table.nic) if table.nic is not None else None
    domain_size = table.nvlink_domain_size or table.gpus_per_host
    filled = {
        "name": name,
        "gpu": gpu,
        "nic": nic,
        "nvlink_domain_size": domain_size,
        "gpus_used_per_domain": table.gpus_used_per_domain or domain_size,
        "nics_per_host": (table.nics_per_host or table.gpus_per_host) if nic else 0,
        "fabric": (table.fabric or nic.fabric) if nic else None,
    }
    if gpu.key == "cpu" and "scale_up" not in table.model_fields_set:
        filled["scale_up"] = "shared_memory"  # CPU devices have no other fabric.
    cluster = Cluster.model_construct(**(table.model_dump() | filled))  # The table has been validated.
    _check_domains(cluster)
    _check_scale_up(cluster)
    _check_nvlink_switch(cluster)
    _check_cpu_link(cluster)
    _check_scale_out(cluster, table)
    return cluster


def _refused(key: str, value: Any, message: str, hint: str) -> SpecError:
    return SpecError(message, key=("cluster", key), value=value, hint=hint)


def _check_known(key: str, value: str, known: Sequence[str], what: str) -> None:
    if value not in known:
        hint = did_you_mean(value, known, what=f"a {what} of the catalog")
        raise _refused(key, value, f"the catalog has no {what} '{value}'.", hint)


def _check_domains(cluster: Cluster) -> None:
    size, per_host, total = cluster.nvlink_domain_size, cluster.gpus_per_host, cluster.hosts * cluster.gpus_per_host
    key, used = "nvlink_domain_size", cluster.gpus_used_per_domain
    if size % per_host and per_host % size:
        message = f"an NVLink domain of {size} GPUs is neither whole hosts nor an equal part of one ({per_host} GPUs)."
        raise _refused(key, size, message, f"nvlink_domain_size = {per_host}")
    if total % size:
        hosts = -(-total // size) * size // per_host
        message = f"{cluster.hosts} hosts x {per_host} GPUs = {total} GPUs do not fill whole NVLink domains of {size}."
        raise _refused(key, size, message, f"hosts = {hosts}, or nvlink_domain_size = {min(total, per_host)}")
    if used > size:
        message = f"the job is to use {used} GPUs of each NVLink domain, but a domain has {size}."
        raise _refused("gpus_used_per_domain", used, message, f"gpus_used_per_domain = {size}")


def _check_scale_up(cluster: Cluster) -> None:
    gpu, given = cluster.gpu, cluster.scale_up
    if cluster.is_cpu and given != "shared_memory":
        message = f"the scale-up fabric of gpu '{gpu.key}' cannot be '{given}'."
        raise _refused("scale_up", given, message, 'scale_up = "shared_memory"')
    if given == "nvlink" and not gpu.nvlink_links:
        raise _refused("scale_up", given, f"GPU '{gpu.key}' has no NVLink.", 'scale_up = "pcie"')


def _check_nvlink_switch(cluster: Cluster) -> None:
    gpu, size, per_host = cluster.gpu, cluster.nvlink_domain_size, cluster.gpus_per_host
    key, value = "nvlink_switch", cluster.nvlink_switch
    if value is None:  # The error is then about the size of the domain.
        key, value = "nvlink_domain_size", size
    generation = gpu.nvlink_generation or 0
    if cluster.scale_up != "nvlink":
        if cluster.nvlink_switch is not None:
            message = f"cluster.nvlink_switch is given, but the scale-up fabric is '{cluster.scale_up}'."
            raise _refused(key, value, message, "removing it")
    elif cluster.has_nvswitch:
        if catalog.nvswitch(generation) is None:
            speaker = f"no switch supports NVLink {generation} of GPU '{gpu.key}'"
            message = f"{speaker}, which a domain of {size} GPUs would need."
            raise _refused(key, value, message, "nvlink_domain_size = 8, and no nvlink_switch")
    elif size > per_host:
        message = f"without a switch, an NVLink domain of {size} GPUs cannot span hosts of {per_host}."
        raise _refused(key, value, message, f"nvlink_domain_size = {per_host}")
    elif size - 1 > gpu.nvlink_links and not (size == 8 and catalog.cube_mesh(generation)):
        message = f"without a switch, a GPU's {gpu.nvlink_links} NVLinks cannot reach the {size - 1} other GPUs."
        raise _refused(key, value, message, "nvlink_switch = true, or a smaller nvlink_domain_size")


def _check_cpu_link(cluster: Cluster) -> None:
    given, gpu = cluster.cpu_link, cluster.gpu
    if given in (None, "pcie", gpu.cpu_link):
        return
    if given not in catalog.cpu_link_keys():
        hint = did_you_mean(given, catalog.cpu_link_keys())
        raise _refused("cpu_link", given, f"the catalog has no CPU link '{given}'.", hint)
    cpu = _cpu_link_of(cluster)
    takes = cpu.nvlinks * gpu.nvlink_bytes_per_s / gpu.nvlink_links if gpu.nvlink_links else 0.0
    if not cpu.nvlinks or takes != cpu.bytes_per_s:
        message = f"GPU '{gpu.key}' has no link '{given}' to a CPU."
        raise _refused("cpu_link", given, message, f'cpu_link = "{gpu.cpu_link}"')


def _check_scale_out(cluster: Cluster, table: ClusterTable) -> None:
    if cluster.nic is not None:
        return
    hosts, per_host = cluster.hosts, cluster.gpus_per_host
    if hosts * per_host > max(cluster.nvlink_domain_size, per_host) and not cluster.is_cpu:
        hint = 'a line nic = "ib_ndr" in the cluster, or hosts = 1'
        raise _refused("hosts", hosts, f"{hosts} hosts with no 'nic' cannot reach each other.", hint)
    for key in ("nics_per_host", "fabric"):
        if given := getattr(table, key):
            message = f"cluster.{key} is given, but no 'nic'."
            raise _refused(key, given, message, 'a line nic = "ib_ndr" in the cluster')


def _cpu_link_of(cluster: Cluster) -> CpuLink:
    """Return the link between a GPU and its CPU: the file's `cpu_link`, or else the catalog's for this GPU."""
    key = cluster.cpu_link or cluster.gpu.cpu_link
    generation = cluster.gpu.pcie_generation
    return catalog.cpu_link(key, pcie_generation=generation, gpus_per_host=cluster.gpus_per_host)


def _scale_out(cluster: Cluster, port: Nic) -> Link:
    nic = _as_spoken(port, cluster.fabric)
    share = cluster.nics_per_host / cluster.gpus_per_host
    slot = catalog.pcie_bytes_per_s(min(nic.pcie_generation, cluster.gpu.pcie_generation), nic.pcie_lanes)
    hops = [
        (nic.bytes_per_s * share / cluster.oversubscription, nic.achieved),
        (slot * share, catalog.fabric("pcie")["achieved"]),
        *_gpu_to_nic(cluster, direct=cluster.gpudirect_rdma and nic.rdma),
    ]
    return Link("infiniband", _label(port, cluster.fabric), *_slowest(hops), nic.latency_s, nic.latency_small_s)


def _nvlink(cluster: Cluster, gpus: int | None) -> Link:
    gpu, latency = cluster.gpu, catalog.fabric("nvlink")
    rate = gpu.nvlink_bytes_per_s * (1 - _cpu_link_of(cluster).nvlinks / gpu.nvlink_links)
    if cluster.has_nvswitch:
        kind = "nvswitch"
        rate *= cluster.nvlink_taper if gpus and gpus > cluster.gpus_per_host else 1.0
    else:
        kind = "mesh"
        domain = cluster.nvlink_domain_size
        rate *= _mesh_share(gpu.nvlink_generation or 0, cluster.gpus_per_host, domain, gpus or domain)
    label = f"nvlink{gpu.nvlink_generation}_{kind}"
    return Link("nvlink", label, rate, gpu.achieved["nvlink"], latency["latency_s"], latency["latency_small_s"])


@functools.cache
def _mesh_share(generation: int, gpus_per_host: int, domain: int, gpus: int) -> float:
    """Return the share of a GPU's NVLinks that lead to members of its group, on a host without a switch.

    If all m GPUs of a domain are wired to each other, a group of g uses (g - 1) / (m - 1) of the links. A cube mesh has
    a table of links. There a group is a block of neighbours in GPU order, and the GPU with the fewest links to members
    of its group counts.
    """
    if domain == 1:
        return 1.0  # Nothing uses the links.
    gpus = max(2, min(gpus, domain))
    table = catalog.cube_mesh(generation) if gpus_per_host == 8 else None
    if table is None:
        return (gpus - 1) / (domain - 1)
    blocks = [range(first, first + gpus) for first in range(0, domain - gpus + 1, gpus)]
    fewest = min(sum(table[member][peer] for peer in block) for block in blocks for member in block)
    return max(1, fewest) / sum(table[0])


def _inside_host(cluster: Cluster, name: str) -> Link:
    """Return the link between GPUs of one host without NVLink (PCIe or host memory), or between CPU devices."""
    if cluster.is_cpu:
        row = catalog.fabric("shared_memory")
        return Link(name, "shared_memory", row["bytes_per_s"], row["achieved"], *_latencies("shared_memory"))
    if cluster.scale_up == "shared_memory":
        cpu = _cpu_link_of(cluster)
        sustained = min(cpu.achieved, catalog.fabric("host_memory")["achieved"])
        hops = [(cpu.bytes_per_s, sustained), _host_memory(cpu, passes=_PASSES_SCALE_UP)]
        return Link(name, "shared_memory", *_slowest(hops), *_latencies("host_memory"))
    gpu = cluster.gpu
    achieved = catalog.fabric("pcie")["achieved"]
    return Link(name, f"pcie{gpu.pcie_generation}_p2p", gpu.pcie_bytes_per_s, achieved, *_latencies("pcie"))


def _gpu_to_nic(cluster: Cluster, *, direct: bool) -> Iterable[Hop]:
    """Yield the hops between a GPU and its NIC's slot.

    Without GPUDirect a byte goes to host memory and from there to the NIC. In most servers GPU and NIC share a PCIe
    switch. Its uplink then carries the bytes that the GPU sends and those that the NIC receives, at half the rate each.
    """
    cpu = _cpu_link_of(cluster)
    yield cpu.bytes_per_s, cpu.achieved
    if not direct:
        if cpu.key == "pcie":
            yield cpu.bytes_per_s / 2, cpu.achieved
        yield _host_memory(cpu, passes=_PASSES_SCALE_OUT)


def _host_memory(cpu: CpuLink, *, passes: int) -> Hop:
    """Return host memory as a hop that each byte crosses `passes` times."""
    return cpu.host_memory_bytes_per_s / passes, catalog.fabric("host_memory")["memory_achieved"]


def _slowest(hops: Iterable[Hop]) -> Hop:
    return min(hops, key=lambda hop: hop[0] * hop[1])


def _latencies(fabric: str) -> tuple[float, float]:
    row = catalog.fabric(fabric)
    return row["latency_s"], row["latency_small_s"]


def _as_spoken(nic: Nic, fabric: str | None) -> Nic:
    """Return the catalog's NIC for `fabric` at the same rate (a port may run in another mode), or else `nic`."""
    if fabric in (None, nic.fabric):
        return nic
    others = (catalog.nic(key) for key in catalog.nic_keys() if key.startswith(_NIC_PREFIX[fabric]))
    return next((other for other in others if other.bytes_per_s == nic.bytes_per_s), nic)


def _label(nic: Nic, fabric: str | None) -> str:
    if fabric in (None, nic.fabric):
        return nic.label
    return f"{_OTHER_MODE[fabric]}_{round(nic.bytes_per_s * 8 / 1e9)}"
