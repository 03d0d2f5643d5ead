"""The links under one group of a collective, as NCCL sees them, and the constants of nccl.toml that hold for them."""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any

from meshkit.config.cluster import Cluster, Link
from meshkit.errors import ConfigError

FABRICS = ("flat", "rail", "leaf")
_LEAF_PORTS = 32  # of a 64-port switch, those that lead down
_OLDEST = (2, 18)
# What a calibration may have beside the fitted constants: of the rate that the model takes of a link and of a port.
RATES = ("nvlink_rate", "network_rate")


@functools.cache
def nccl_constants() -> dict[str, Any]:
    """The tables of nccl.toml."""
    return tomllib.loads(resources.files("meshkit.predict").joinpath("nccl.toml").read_text(encoding="utf-8"))


def by_hand(name: str) -> float:
    """A number that is neither NCCL's nor fitted."""
    return nccl_constants()["by_hand"][name]["value"]


@functools.cache
def fitted_values() -> Mapping[str, float]:
    """Every fitted constant by name; one that differs by generation of NVLink as `name.generation`."""
    found = {}
    for name, row in nccl_constants()["fitted"].items():
        by = row["value"]
        found |= {f"{name}.{key}": value for key, value in by.items()} if isinstance(by, dict) else {name: by}
    return found


@functools.cache
def fitted_for(generation: str) -> Mapping[str, float]:
    """The shipped constants of one generation by their plain names."""
    return _of_generation(generation, fitted_values())


def _of_generation(generation: str, values: Mapping[str, float]) -> dict[str, float]:
    """Constants of one generation, or of all, by their plain names."""
    parts = ((*name.partition("."), value) for name, value in values.items())
    return {name: value for name, _, suffix, value in parts if suffix in ("", generation)}


def with_constants(wires: Wires, values: Mapping[str, float]) -> Wires:
    """The same links with other constants of `[fitted]`, and with other rates than the catalog's (RATES).

    NCCL chooses by what it takes them for, as before.
    """
    inside, outside = (values.get(name, 1.0) for name in RATES)
    own = _of_generation(wires.generation, {name: value for name, value in values.items() if name not in RATES})
    return replace(
        wires,
        taken_for=wires.taken_for or wires,
        fitted={**fitted_for(wires.generation), **own},
        inside_bytes_per_s=wires.inside_bytes_per_s * inside,
        peer_bytes_per_s=wires.peer_bytes_per_s * inside,
        outside_bytes_per_s=wires.outside_bytes_per_s * outside,
        port_bytes_per_s=wires.port_bytes_per_s * outside,
    )


def version_of(text: str) -> tuple[int, ...]:
    """A version of NCCL as numbers.

    Raises:
        ConfigError: no version, or one older than the tables reach.
    """
    try:
        found = tuple(int(part) for part in text.split("."))
    except ValueError:
        found = ()
    if len(found) < 2 or found < _OLDEST:
        raise ConfigError(f"'{text}' is no version of NCCL that has a model.", hint="2.18 to 2.30, like '2.28.9'")
    return found


@dataclass(frozen=True)
class Wires:
    """The links under one group of a collective, as NCCL sees them: k domains with g GPUs each."""

    g: int
    k: int
    inside_bytes_per_s: float  # usable, of one GPU and direction, inside its domain
    outside_bytes_per_s: float  # the same out of its domain
    peer_bytes_per_s: float  # inside, to one other GPU: without a switch only the links that lead there
    hops: float  # NVLinks that a byte crosses between two members, on average; more than one in a cube mesh
    taper: float  # NVLink bandwidth to other hosts of the domain, relative to inside the host
    inside: str  # row of NCCL's latencies: `nvlink` or `pcie`
    outside: str  # another: `net`, or `pcie` where no NIC is between domains
    inside_extra_s: tuple[float, float]  # what a step costs beyond that table, (LL and LL128, Simple)
    outside_extra_s: tuple[float, float]
    generation: str  # of NVLink, whose fitted constants hold
    column: str  # of the tuner's tables: `volta`, `ampere`, `hopper`, `blackwell`
    channel_bytes_per_s: float  # what one channel of a ring carries
    ll128: bool  # whether NCCL may use the protocol
    nvls: bool  # whether NCCL may add in the NVLink switch
    x86: bool
    ports: int  # network ports that lead out of the group's part of a domain
    port_bytes_per_s: float  # what one of them sends
    line_bytes_per_s: float  # what NCCL takes one of them for
    ranks: int  # GPUs of a domain that the job uses
    per_host: int  # of which on one host
    busy: float  # groups that a GPU is in at a time
    spine: tuple[float, float]  # how much slower what crosses the spine is: of a ring, and of sends to everybody
    nccl: tuple[int, ...]  # version
    fitted: Mapping[str, float]  # `[fitted]` of nccl.toml, of this generation
    taken_for: Wires | None = field(default=None, compare=False, repr=False)  # what NCCL takes them for, if not this
    known: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # what the tuner expects, once made

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        g: int,
        k: int,
        *,
        concurrent_groups: int | None = None,
        nvls: bool = True,
        fabric: tuple[str | None, int | None] = (None, None),
        nccl: str | None = None,
    ) -> Wires:
        """The links under a group of k domains with g GPUs each, with so many such groups in a domain at a time.

        `fabric`: how hosts are cabled, and over how many racks the group is spread; None: as the cluster's
        `oversubscription` says, for all that leaves a host.
        """
        constants = nccl_constants()
        per_host = min(cluster.gpus_per_host, cluster.gpus_used_per_domain)
        # Inside a host: a ring and the switch's reductions send to the next host as little as to a NIC, so that a
        # tapered NVLink network does not slow them (NVIDIA: 256 H100s reduce at the full 450 GB/s).
        link = cluster.link("nvlink", gpus=min(g, per_host) if cluster.has_nvswitch else g)
        capability = cluster.gpu.compute_capability or (0, 0)
        links = str(cluster.gpu.nvlink_generation)
        nvlink = "nvlink" in link.fabric
        column = _column(capability)
        busy = busy_share(cluster, g, concurrent_groups)
        share = (constants["nvlink"]["usable"][links] if nvlink else link.achieved) / max(1.0, busy)
        inside_row, outside_row = "nvlink" if nvlink else "pcie", "net" if cluster.nic else "pcie"
        outside, port, line, outside_extra, spine = math.inf, math.inf, math.inf, (0.0, 0.0), (1.0, 1.0)
        if k > 1:
            net = cluster.link("infiniband")
            tight = cluster.oversubscription
            spine, blocked = _spine(cluster, k, fabric)
            outside = _share_of_nics(cluster, net, busy) * net.achieved * (tight / blocked)
            port = max(outside, _port_bytes_per_s(cluster) * net.achieved / blocked)
            line = cluster.nic.bytes_per_s * constants["net"]["nccl_share"] if cluster.nic else port
            outside_extra = _extra_latency(net, constants["step_latency_s"][outside_row])
        return cls(
            g=g,
            k=k,
            inside_bytes_per_s=link.bytes_per_s * share,
            outside_bytes_per_s=outside,
            peer_bytes_per_s=cluster.link("nvlink", gpus=2).bytes_per_s * share,
            hops=cluster.mesh_hops(g),
            taper=cluster.nvlink_taper,
            inside=inside_row,
            outside=outside_row,
            inside_extra_s=_extra_latency(link, constants["step_latency_s"][inside_row]),
            outside_extra_s=outside_extra,
            generation=_generation(capability),
            column=column,
            channel_bytes_per_s=(
                constants["nvlink"]["ring_channel_bytes_per_s"][links] if nvlink else link.bytes_per_s * share
            ),
            ll128=nvlink and capability >= (7, 0),
            nvls=bool(nvls and nvlink and column in constants["nvls"]["channels"] and cluster.has_nvswitch),
            x86=cluster.gpu.cpu_link == "pcie",
            ports=_ports(cluster, g),
            port_bytes_per_s=port,
            line_bytes_per_s=line,
            ranks=cluster.gpus_used_per_domain,
            per_host=per_host,
            busy=max(1.0, busy),
            spine=spine,
            nccl=version_of(nccl or constants["default_version"]),
            fitted=fitted_for(_generation(capability)),
        )


def _column(capability: tuple[int, int]) -> str:
    """The tuner's column for a GPU."""
    for least, name in ((10, "blackwell"), (9, "hopper"), (8, "ampere")):
        if capability[0] >= least:
            return name
    return "volta"


def _generation(capability: tuple[int, int]) -> str:
    """The fitted column for a GPU: of NVLink's generations that were measured; Ada cards launch like Hopper."""
    return "5" if capability >= (10, 0) else "4" if capability >= (8, 9) else "3"


def _spine(cluster: Cluster, k: int, fabric: tuple[str | None, int | None]) -> tuple[tuple[float, float], float]:
    """How much slower the spine makes rings and all-to-alls over k hosts; and oversubscription that is left to all.

    Of a ring over leaves of h hosts one in h flows crosses, so that an oversubscribed spine does not hurt until h; of
    sends to everybody (k - h) / k cross.
    """
    kind, racks = fabric
    if kind is None and racks is None:
        return (1.0, 1.0), cluster.oversubscription
    if kind == "flat":
        return (1.0, 1.0), 1.0
    per_leaf = k / racks if racks else _LEAF_PORTS / (1 if kind == "rail" else max(1, cluster.nics_per_host))
    if per_leaf >= k:
        return (1.0, 1.0), 1.0
    tight = cluster.oversubscription
    return (max(1.0, tight / max(1.0, per_leaf)), max(1.0, tight * (k - per_leaf) / k)), 1.0


def busy_share(cluster: Cluster, g: int, concurrent_groups: int | None) -> float:
    """Groups that a GPU of a domain is in at a time, on average; None: one, as in an SPMD program."""
    return 1.0 if concurrent_groups is None else concurrent_groups * g / cluster.gpus_used_per_domain


def _share_of_nics(cluster: Cluster, net: Link, busy: float) -> float:
    """Bytes per second that a busy GPU may send: its own share of the ports, idle GPUs' shares, at most one port."""
    if busy >= 1 or cluster.nic is None:
        return net.bytes_per_s / max(1.0, busy)
    return max(net.bytes_per_s, min(net.bytes_per_s / busy, _port_bytes_per_s(cluster)))


def _port_bytes_per_s(cluster: Cluster) -> float:
    """What one GPU can send through one port; 0 without a network."""
    return min(cluster.nic.bytes_per_s, cluster.gpu.pcie_bytes_per_s) if cluster.nic else 0.0


def _ports(cluster: Cluster, g: int) -> int:
    """Network ports of a domain that a group of g GPUs in it reaches by its own PCIe switches."""
    hosts = -(-g // cluster.gpus_per_host)
    return max(1, min(g, hosts * (cluster.nics_per_host or g)))


def _extra_latency(link: Link, row: Mapping[str, Any]) -> tuple[float, float]:
    """What a step costs beyond NCCL's table, small and large: TCP, EFA, host memory."""
    return max(0.0, link.latency_small_s - row["ring"]["ll"]), max(0.0, link.latency_s - row["ring"]["simple"])
