"""Describe the links of a group of GPUs as NCCL sees them, and predict which algorithm and protocol its tuner chooses.

`Links` describes the links of one group of a collective, with the constants of nccl.toml that apply to them. NCCL's
tuner estimates a latency and a bandwidth for each algorithm and protocol, from the tables of its version and from the
channels that its search finds. It chooses the least estimated time (`expected`). Its choice need not be the fastest:
algorithms.py has the actual cost of each choice.
"""

from __future__ import annotations

import functools
import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, NamedTuple

from meshkit.config.cluster import Cluster, Link
from meshkit.errors import ConfigError

FABRICS = ("flat", "rail", "leaf")
_LEAF_PORTS = 32  # A 64-port leaf switch has half of its ports to hosts.
_OLDEST = (2, 18)
# Factors on the model's rates of links and of ports, which a calibration may have beside the fitted constants.
RATES = ("nvlink_rate", "network_rate")
# How often a payload goes around a ring: an all-reduce first reduces and then gathers.
RING_TURNS = {
    "all-reduce": 2,
    "all-gather": 1,
    "reduce-scatter": 1,
    "collective-broadcast": 1,
    "all-to-all": 1,
    "ragged-all-to-all": 1,
    "collective-permute": 0,
}
PROTOCOLS = ("ll", "ll128", "simple")


@functools.cache
def nccl_constants() -> dict[str, Any]:
    return tomllib.loads(resources.files("meshkit.predict").joinpath("nccl.toml").read_text(encoding="utf-8"))


@functools.cache
def model_constant(name: str) -> float:
    """Return a constant of `[by_hand]` in nccl.toml, which is neither NCCL's own nor fitted."""
    return nccl_constants()["by_hand"][name]["value"]


@functools.cache
def fitted_values() -> Mapping[str, float]:
    """Return every fitted constant by name; `name.generation` for a constant that differs by generation of NVLink."""
    found = {}
    for name, row in nccl_constants()["fitted"].items():
        by = row["value"]
        found |= {f"{name}.{key}": value for key, value in by.items()} if isinstance(by, dict) else {name: by}
    return found


@functools.cache
def fitted_for(generation: str) -> Mapping[str, float]:
    """Return the shipped fitted constants of one generation of NVLink by their plain names."""
    return _select_generation(generation, fitted_values())


def _select_generation(generation: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return the constants that hold for one generation (its own and the common ones) by their plain names."""
    parts = ((*name.partition("."), value) for name, value in values.items())
    return {name: value for name, _, suffix, value in parts if suffix in ("", generation)}


def constants_of(generation: str, values: Mapping[str, float]) -> Mapping[str, float]:
    """Return every constant of a generation and the RATES, where `values` replace the shipped values.

    Args:
        generation: generation of NVLink, as in `Links.generation`: `3`, `4` or `5`.
        values: values by plain name, or by `name.generation`; values of other generations are ignored. Units are as in
            nccl.toml; RATES are factors on the catalog's rates.

    Raises:
        KeyError: there is no such generation.
    """
    return {**dict.fromkeys(RATES, 1.0), **fitted_for(generation), **_select_generation(generation, values)}


def with_constants(links: Links, values: Mapping[str, float]) -> Links:
    """Return the links with the fitted constants and rates that `constants_of` returns.

    NCCL's tuner still chooses by the links with the catalog's rates, which are in `taken_for`.
    """
    inside, outside = values["nvlink_rate"], values["network_rate"]
    return replace(
        links,
        taken_for=links.taken_for or links,
        fitted=values,
        inside_bytes_per_s=links.inside_bytes_per_s * inside,
        peer_bytes_per_s=links.peer_bytes_per_s * inside,
        outside_bytes_per_s=links.outside_bytes_per_s * outside,
        port_bytes_per_s=links.port_bytes_per_s * outside,
    )


@functools.cache
def version_of(text: str) -> tuple[int, ...]:
    """Return a version of NCCL as numbers.

    Raises:
        ConfigError: the text is no version, or the version is older than the tables.
    """
    try:
        found = tuple(int(part) for part in text.split("."))
    except ValueError:
        found = ()
    if len(found) < 2 or found < _OLDEST:
        raise ConfigError(f"'{text}' is not a version of NCCL with a model.", hint="2.18 to 2.30, like '2.28.9'")
    return found


@dataclass(eq=False)  # A frozen dataclass takes three times as long to create.
class Links:
    """The links of one group of a collective, as NCCL sees them: k domains with g GPUs each."""

    g: int
    k: int
    inside_bytes_per_s: float
    """Usable rate of one GPU in one direction, inside its domain."""
    outside_bytes_per_s: float
    """Usable rate of one GPU in one direction, out of its domain."""
    peer_bytes_per_s: float
    """Rate to one other GPU of the domain; without a switch, over the links between these two GPUs."""
    hops: float
    """Mean number of NVLinks that a byte crosses between two members; more than one in a cube mesh."""
    taper: float
    """NVLink bandwidth to other hosts of the domain, relative to the bandwidth inside a host."""
    inside: str
    """Row of NCCL's table of latencies for the link inside a domain: `nvlink` or `pcie`."""
    outside: str
    """Row for the link out of a domain: `net`, or `pcie` for a cluster without NICs."""
    inside_extra_s: tuple[float, float]
    """Latency of a step in addition to NCCL's table: (LL and LL128, Simple)."""
    outside_extra_s: tuple[float, float]
    generation: str
    """Generation of NVLink, which selects the fitted constants."""
    column: str
    """Column of the tuner's tables: `volta`, `ampere`, `hopper` or `blackwell`."""
    channel_bytes_per_s: float
    """Rate of one channel of a ring."""
    ll128: bool
    nvls: bool
    """Whether NCCL may reduce in the NVLink switch."""
    x86: bool
    ports: int
    """Network ports that lead out of the group's part of a domain."""
    port_bytes_per_s: float
    line_bytes_per_s: float
    """Rate of one port that NCCL's tuner assumes."""
    ranks: int
    """GPUs of a domain that the job uses."""
    per_host: int
    """GPUs of a domain that the job uses on one host."""
    busy: float
    """Mean number of groups in which a GPU communicates at a time."""
    spine: tuple[float, float]
    """Slowdown of traffic over the spine: (rings, all-to-alls)."""
    nccl: tuple[int, ...]
    fitted: Mapping[str, float]
    """`[fitted]` of nccl.toml for this generation."""
    sms: int
    """Multiprocessors of a GPU."""
    slices: int = 0
    """Slices of a ragged all-to-all that each member sends to each member; 0: as many as its kernel has blocks for."""
    taken_for: Links | None = field(default=None, repr=False)
    """The links by which NCCL's tuner chooses, if they are not these."""
    known: dict[str, Any] = field(default_factory=dict, repr=False)
    """Cache of the tuner's estimates."""


class _WayOut(NamedTuple):
    """Rates and latency of the link out of a domain; for a group inside one domain the rates are infinite."""

    bytes_per_s: float = math.inf
    port_bytes_per_s: float = math.inf
    line_bytes_per_s: float = math.inf
    extra_s: tuple[float, float] = (0.0, 0.0)
    spine: tuple[float, float] = (1.0, 1.0)


def find_links(
    cluster: Cluster,
    g: int,
    k: int,
    *,
    concurrent_groups: int | None = None,
    nvls: bool = True,
    fabric: tuple[str | None, int | None] = (None, None),
    nccl: str | None = None,
    slices: int = 0,
) -> Links:
    """Return the links of a group of k domains with g GPUs each.

    Args:
        g: members of the group inside one domain.
        k: domains that it spans; with 1, `outside_bytes_per_s` is infinite.
        concurrent_groups: number of such groups in a domain at a time; None: each GPU is in one.
        nvls: False as with `NCCL_NVLS_ENABLE=0`.
        fabric: how hosts are cabled (one of FABRICS), and the number of leaf switches to which the domains are
            connected. With None for both, the cluster's `oversubscription` applies to all traffic that leaves a host.
        nccl: version, such as "2.28.9"; None for `default_version` of nccl.toml.
        slices: slices of a ragged all-to-all that each member sends to each member; 0: as many as its kernel has blocks
            for.

    Raises:
        ConfigError: `nccl` is not a version, or not one that the model knows.
    """
    constants, gpu = nccl_constants(), cluster.gpu
    per_host = min(cluster.gpus_per_host, cluster.gpus_used_per_domain)
    # With a switch, the rate inside a host counts: rings and reductions in the switch send as little to the next host
    # as to a NIC, so a tapered NVLink network does not slow them (NVIDIA: 256 H100s reduce at the full 450 GB/s).
    switch = cluster.has_nvswitch
    link = cluster.link("nvlink", gpus=min(g, per_host) if switch else g)
    peer = link if g == 2 or (switch and per_host > 1) else cluster.link("nvlink", gpus=2)
    capability, nvlink_row = gpu.compute_capability or (0, 0), str(gpu.nvlink_generation)
    nvlink, column = "nvlink" in link.fabric, _column(capability)
    busy = busy_share(cluster, g, concurrent_groups)
    share = (constants["nvlink"]["usable"][nvlink_row] if nvlink else link.achieved) / max(1.0, busy)
    inside_row, outside_row = "nvlink" if nvlink else "pcie", "net" if cluster.nic else "pcie"
    way_out = _way_out(cluster, k, busy, fabric, outside_row) if k > 1 else _WayOut()
    return Links(
        g=g,
        k=k,
        inside_bytes_per_s=link.bytes_per_s * share,
        outside_bytes_per_s=way_out.bytes_per_s,
        peer_bytes_per_s=peer.bytes_per_s * share,
        hops=1.0 if switch else cluster.mesh_hops(g),
        taper=cluster.nvlink_taper,
        inside=inside_row,
        outside=outside_row,
        inside_extra_s=_extra_latency(link, constants["step_latency_s"][inside_row]),
        outside_extra_s=way_out.extra_s,
        generation=_generation(capability),
        column=column,
        channel_bytes_per_s=(
            constants["nvlink"]["ring_channel_bytes_per_s"][nvlink_row] if nvlink else link.bytes_per_s * share
        ),
        ll128=nvlink and capability >= (7, 0),
        nvls=bool(nvls and nvlink and switch and column in constants["nvls"]["channels"]),
        x86=gpu.cpu_link == "pcie",
        ports=_ports(cluster, g),
        port_bytes_per_s=way_out.port_bytes_per_s,
        line_bytes_per_s=way_out.line_bytes_per_s,
        ranks=cluster.gpus_used_per_domain,
        per_host=per_host,
        busy=max(1.0, busy),
        spine=way_out.spine,
        nccl=version_of(nccl or constants["default_version"]),
        fitted=fitted_for(_generation(capability)),
        sms=gpu.sms,
        slices=slices,
    )


def _way_out(cluster: Cluster, k: int, busy: float, fabric: tuple[str | None, int | None], outside_row: str) -> _WayOut:
    constants, net = nccl_constants(), cluster.link("infiniband")
    spine, blocked = _spine(cluster, k, fabric)
    outside = _share_of_nics(cluster, net, busy) * net.achieved * (cluster.oversubscription / blocked)
    port = max(outside, _port_bytes_per_s(cluster) * net.achieved / blocked)
    line = cluster.nic.bytes_per_s * constants["net"]["nccl_share"] if cluster.nic else port
    return _WayOut(outside, port, line, _extra_latency(net, constants["step_latency_s"][outside_row]), spine)


def _column(capability: tuple[int, int]) -> str:
    names = ((10, "blackwell"), (9, "hopper"), (8, "ampere"))
    return next((name for least, name in names if capability[0] >= least), "volta")


def _generation(capability: tuple[int, int]) -> str:
    """Return the generation of NVLink whose fitted constants hold for a GPU; Ada cards launch kernels like Hopper."""
    return "5" if capability >= (10, 0) else "4" if capability >= (8, 9) else "3"


def _spine(cluster: Cluster, k: int, fabric: tuple[str | None, int | None]) -> tuple[tuple[float, float], float]:
    """Return the spine's slowdown of (rings, all-to-alls) over k domains, and the oversubscription of all traffic.

    With h domains per leaf switch, one flow in h of a ring crosses the spine, so an oversubscription of up to h does
    not slow the ring. Of an all-to-all, a share of (k - h) / k crosses the spine.
    """
    kind, racks = fabric
    if kind is None and racks is None:
        return (1.0, 1.0), cluster.oversubscription
    if kind == "flat":
        return (1.0, 1.0), 1.0
    ports = cluster.hosts_per_domain * (1 if kind == "rail" else max(1, cluster.nics_per_host))  # of a domain on a leaf
    per_leaf = k / racks if racks else _LEAF_PORTS / ports
    if per_leaf >= k:
        return (1.0, 1.0), 1.0
    tight = cluster.oversubscription
    return (max(1.0, tight / max(1.0, per_leaf)), max(1.0, tight * (k - per_leaf) / k)), 1.0


def busy_share(cluster: Cluster, g: int, concurrent_groups: int | None) -> float:
    """Return the mean number of groups in which a GPU of a domain communicates at a time; with None it is one."""
    return 1.0 if concurrent_groups is None else concurrent_groups * g / cluster.gpus_used_per_domain


def _share_of_nics(cluster: Cluster, net: Link, busy: float) -> float:
    """Return the bytes/s that a busy GPU may send over its own and idle GPUs' share of NICs, up to one port's rate."""
    if busy >= 1 or cluster.nic is None:
        return net.bytes_per_s / max(1.0, busy)
    return max(net.bytes_per_s, min(net.bytes_per_s / busy, _port_bytes_per_s(cluster)))


def _port_bytes_per_s(cluster: Cluster) -> float:
    return min(cluster.nic.bytes_per_s, cluster.gpu.pcie_bytes_per_s) if cluster.nic else 0.0


def _ports(cluster: Cluster, g: int) -> int:
    """Return the number of network ports that a group of g GPUs in a domain reaches through its PCIe switches."""
    hosts = -(-g // cluster.gpus_per_host)
    return max(1, min(g, hosts * (cluster.nics_per_host or g)))


def _extra_latency(link: Link, row: Mapping[str, Any]) -> tuple[float, float]:
    """Return the latency that TCP, EFA or host memory adds to NCCL's table, for a step of (small, large) messages."""
    return max(0.0, link.latency_small_s - row["ring"]["ll"]), max(0.0, link.latency_s - row["ring"]["simple"])


class Expected(NamedTuple):
    """The tuner's estimate for one algorithm in one protocol."""

    name: str
    """`ring ll`, `tree simple`, `nvls`, `nvls tree`, `pat`."""
    latency_s: float
    bytes_per_s: float
    medium: str = ""
    """For a tree, the protocol whose loss of bandwidth at medium sizes applies."""
    slower: float = 1.0
    """Factor on the latency."""
    slower_from: float = math.inf
    """Payload in bytes from which the factor counts."""

    def seconds(self, payload: float) -> float:
        """Return the estimated seconds for a payload."""
        rate = self.bytes_per_s * (tree_medium(self.medium, payload) if self.medium else 1.0)
        return self.latency_s * (self.slower if payload >= self.slower_from else 1.0) + payload / rate


def expected(collective: str, links: Links) -> tuple[Expected, ...]:
    """Return the tuner's estimates for the algorithms and protocols that it may choose, if their bandwidth is not 0.

    Args:
        collective: `all-reduce`, `all-gather` or `reduce-scatter`.
        links: the links of the group, which has two GPUs or more; they cache the estimates.
    """
    links = links.taken_for or links
    if collective not in links.known:
        links.known[collective] = tuple([found for found in _expected(collective, links) if found.bytes_per_s > 0])
    return links.known[collective]


@functools.cache
def version_constants(version: tuple[int, ...]) -> Mapping[str, Any]:
    """Return the tuner's tables and flags for a version of NCCL."""
    constants = nccl_constants()
    found: dict[str, Any] = {name: dict(row) for name, row in constants["tuner"].items() if name != "before"}
    found |= {
        "nvls_tree_step_s": constants["step_latency_s"]["net"]["nvls"],
        "ring_ll_share": constants["protocol"]["ring_share"]["ll"],
        "nvls_s": None,
        "nvls_ratio": False,
        "pat": True,
    }
    for row in constants["tuner"]["before"]:
        if version >= version_of(row["version"]):
            break
        for name, value in row.items():
            if isinstance(value, dict):
                found[name] |= value
            elif name != "version":
                found[name] = value
    return found


@functools.cache
def _medium(protocol: str) -> Sequence[float]:
    """Return NCCL's treeCorrectionFactor at 64 B, 128 B and so on, followed by 1."""
    return (*nccl_constants()["protocol"]["tree_medium"][protocol], 1.0)


def tree_medium(protocol: str, payload: float) -> float:
    """Return the share of its bandwidth that a tree reaches at medium sizes: NCCL's table, interpolated.

    Args:
        payload: bytes of the message. The share is linear in their logarithm between NCCL's points (64 B and its
            doublings), and 1 beyond the last point.
    """
    if payload <= 64.0:
        return _medium(protocol)[0]
    where, table = math.log2(payload / 64), _medium(protocol)
    low = int(where)
    return table[low] + (where - low) * (table[low + 1] - table[low]) if low + 1 < len(table) else 1.0


def table_step_s(algorithm: str, protocol: str, links: Links) -> tuple[float, float]:
    """Return NCCL's latency, in seconds, of a step of a `ring` or `tree`: (inside a domain, out of it)."""
    rows = nccl_constants()["step_latency_s"]
    simple = protocol == "simple"
    inside = rows[links.inside][algorithm][protocol] + links.inside_extra_s[simple]
    return inside, rows[links.outside][algorithm][protocol] + links.outside_extra_s[simple]


@functools.lru_cache(maxsize=256)
def _speed(column: str, total: float, version: tuple[int, ...]) -> float:
    """Return the bandwidth of a channel that NCCL's search finds: the speed of its list that uses the links best."""
    speeds = version_constants(version)[column]["speeds"]
    return max(speeds, key=lambda s: (int(total / s) * s, s)) if total >= speeds[-1] else total


def _channels(links: Links) -> tuple[int, float]:
    """Return the number of a ring's channels that NCCL's search finds, and their total bandwidth."""
    total = links.inside_bytes_per_s * links.busy
    speed = _speed(links.column, total, links.nccl)
    number = max(1, int(total / speed))
    if links.k > 1:
        inside = number * speed if links.g > 1 else math.inf
        return links.ports, min(inside, links.ports * min(links.line_bytes_per_s, total if links.g > 1 else math.inf))
    doubled = speed >= 25e9 and (links.column in ("volta", "ampere") or speed >= 50e9 or number <= 4)
    return number * (2 if doubled else 1), number * speed


def _row(p: str, own: Mapping[str, Any], column: str, links: tuple[str, str], place: int) -> tuple[tuple, tuple]:
    """Return the tuner's numbers of protocol `p` for `place` + 1 domains, by tables `own` of a version (`_sheets`)."""
    constants, caps, last = nccl_constants(), own[column], {"ll": "", "ll128": "_ll128_channel", "simple": ""}[p]
    steps, share = constants["step_latency_s"], constants["protocol"]["ring_share"][p]
    ring, tree = (
        (constants["base_latency_s"][kind][p], *(steps[link][kind][p] for link in links)) for kind in ("ring", "tree")
    )
    ring_most, tree_most = (caps[kind + last][place] if last else math.inf for kind in ("ring", "tree"))
    share, most = (own["ring_ll_share"], caps["ll"][place]) if p == "ll" else (share, math.inf)
    return (p, *ring, steps["net"]["post"][p], share, most, ring_most), (*tree, caps["tree_channel"][place], tree_most)


@functools.cache
def _sheets(version: tuple[int, ...]) -> Mapping[tuple[str, str, str, int], Sequence[tuple[tuple, tuple]]]:
    """Return (column, link inside a domain, link out of it, domains up to 3) -> tuner's numbers, a row per protocol.

    A row has two tuples, for the ring and for the tree. The ring's tuple is: protocol, base latency, latency of a step
    on each of the two links, least latency of a step over hosts, share of the bandwidth, highest bandwidth of the
    protocol, and of one channel. The tree's tuple is: base latency, latency of a step on each of the two links, highest
    bandwidth of a channel, and of a channel with LL128.
    """
    own, columns = version_constants(version), [name for name in nccl_constants()["tuner"] if name != "before"]
    return {
        (column, *links, place + 1): [_row(p, own, column, links, place) for p in PROTOCOLS]
        for column in columns
        for links in itertools.product(("nvlink", "pcie"), ("net", "pcie"))
        for place in range(3)
    }


def _expected(collective: str, links: Links) -> list[Expected]:
    g, k, n, found = links.g, links.k, links.g * links.k, []
    version, reduces = version_constants(links.nccl), collective == "all-reduce"
    channels, total = _channels(links)
    steps, crossing = RING_TURNS[collective] * (n - 1), RING_TURNS[collective] * (k - 1)
    levels = int(math.log2(k))
    for (
        (protocol, base, inside, outside, least, share, most, channel),
        (tree_base, tree_inside, tree_outside, tree_channel, tree_ll128_channel),
    ) in _sheets(links.nccl)[links.column, links.inside, links.outside, min(k, 3)]:
        if protocol == "ll128" and not links.ll128:
            continue
        simple = protocol == "simple"
        more_inside, more_outside = links.inside_extra_s[simple], links.outside_extra_s[simple]
        tree_inside, tree_outside = tree_inside + more_inside, tree_outside + more_outside
        inside = max(inside + more_inside, least) if k > 1 and links.outside == "net" else inside + more_inside
        outside = tree_outside if g == 1 and k > 1 else outside + more_outside  # No step hides this one (tuning.cc).
        rate = min(total * share, most, channels * channel)
        latency = base + (steps - crossing) * inside + crossing * outside
        slower, slower_from = 1.0, math.inf
        if reduces and simple and k > 1:
            shares = nccl_constants()["protocol"]
            slower = shares["plateau_before_ampere" if links.column == "volta" else "plateau"]
            slower_from = shares["plateau_channel_bytes"] * channels * n
        found.append(Expected(f"ring {protocol}", latency, rate * n / steps, "", slower, slower_from))
        if not reduces:
            continue
        latency = tree_base + 2 * ((g - 1) * tree_inside + levels * tree_outside)
        rate = min(total * 0.92, channels * tree_channel)
        if protocol == "ll":
            rate = min(rate / 3.8, most)
        elif not simple:
            rate = min(rate * (7 / 9 if k == 1 else 120 / 128), channels * tree_ll128_channel)
        found.append(Expected(f"tree {protocol}", latency, rate / 2, protocol))
    if reduces:
        found += _expected_nvls(links, version, levels)
    elif g == 1 and version["pat"]:
        # With registered buffers NVLS gathers too, at the rate of the ring (togethercomputer: 661 and 655 GB/s).
        constants = nccl_constants()
        rows = constants["step_latency_s"]
        step = rows["net"]["tree"]["simple"] + 2 * links.outside_extra_s[1]
        latency = constants["base_latency_s"]["pat"]["simple"] + levels * step / 3.5 + n * rows["pat_gpu"]
        found.append(Expected("pat", latency, total * constants["protocol"]["pat_share"]))
    return found


def _expected_nvls(links: Links, version: Mapping[str, Any], levels: int) -> tuple[Expected, ...]:
    """Return the estimate of NVLS inside a domain, or of NVLSTree over several; empty if NCCL cannot use it."""
    constants, k, n = nccl_constants(), links.k, links.g * links.k
    column, heads = version[links.column], min(links.g, constants["nvls"]["max_heads"])
    if not links.nvls or heads < 2 or column["nvls_share"] == 0.0:
        return ()
    most = links.inside_bytes_per_s * links.busy / heads
    inside = next((speed for speed in column["speeds"] if speed <= most), most)  # A speed of NCCL's list.
    outside = links.line_bytes_per_s * links.ports / heads if k > 1 else math.inf
    latency = version["nvls_s"] or constants["step_latency_s"]["nvlink"]["nvls"]
    latency += 2 * levels * (version["nvls_tree_step_s"] + 2 * links.outside_extra_s[1])
    if version["nvls_ratio"]:
        rate = heads * min(inside, outside if k <= 2 else outside / 2) * 5 / 6
    else:
        rate = 2 * inside * column["nvls_share"] * (heads - 1) / heads
        if k > 1:
            rate = min(rate, outside * (2 if k == 2 else 1), column["nvls_tree_channel"][min(k, 3) - 1])
        rate *= heads * n / (2 * (n - 1))
    dips = k > 1 and links.column == "blackwell" and links.x86 and links.nccl >= (2, 29)
    return (Expected("nvls" if k == 1 else "nvls tree", latency, rate, "simple" if dips else ""),)
