"""What NCCL sees of a group of GPUs, and which algorithm and protocol it takes there: links, constants, its own tuner.

`Wires` are the links under one group of a collective, with the constants of nccl.toml that hold for them. NCCL's tuner
knows a latency and a bandwidth for each algorithm and protocol, from tables of its version and from the channels that
its search found, and takes the least sum (`expected`). What it picks need not be the fastest: what a pick costs is in
algorithms.py.
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
_LEAF_PORTS = 32  # of a 64-port switch, those that lead down
_OLDEST = (2, 18)
# What a calibration may have beside the fitted constants: of the rate that the model takes of a link and of a port.
RATES = ("nvlink_rate", "network_rate")
# Times that a payload goes around a ring: all-reduce reduces and then gathers.
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
    """The tables of nccl.toml."""
    return tomllib.loads(resources.files("meshkit.predict").joinpath("nccl.toml").read_text(encoding="utf-8"))


@functools.cache
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
def _fitted() -> Mapping[str, Mapping[str, float]]:
    """The shipped constants of each generation by their plain names."""
    return {generation: _of_generation(generation, fitted_values()) for generation in ("3", "4", "5")}


def fitted_for(generation: str) -> Mapping[str, float]:
    """The shipped constants of one generation by their plain names."""
    return _fitted()[generation]


def _of_generation(generation: str, values: Mapping[str, float]) -> dict[str, float]:
    """Constants of one generation, or of all, by their plain names."""
    parts = ((*name.partition("."), value) for name, value in values.items())
    return {name: value for name, _, suffix, value in parts if suffix in ("", generation)}


def constants_of(generation: str, values: Mapping[str, float]) -> Mapping[str, float]:
    """Every constant of a generation, those given in the place of the shipped ones, and the rates (RATES).

    Args:
        generation: of NVLink, as `Wires.generation`: `3`, `4` or `5`.
        values: by plain name, or by `name.generation`, of which those of other generations are left out; units as in
            nccl.toml, of RATES a factor on the catalog's rate.

    Raises:
        KeyError: another generation.
    """
    return {**dict.fromkeys(RATES, 1.0), **fitted_for(generation), **_of_generation(generation, values)}


def with_constants(wires: Wires, values: Mapping[str, float]) -> Wires:
    """The same links with other constants of `[fitted]`, and with other rates than the catalog's: see `constants_of`.

    NCCL chooses by what it takes them for, as before.

    Args:
        wires: remembered in `taken_for`.
        values: every constant and rate that `constants_of` returns.

    Raises:
        KeyError: a rate is missing.
    """
    inside, outside = values["nvlink_rate"], values["network_rate"]
    return replace(
        wires,
        taken_for=wires.taken_for or wires,
        fitted=values,
        inside_bytes_per_s=wires.inside_bytes_per_s * inside,
        peer_bytes_per_s=wires.peer_bytes_per_s * inside,
        outside_bytes_per_s=wires.outside_bytes_per_s * outside,
        port_bytes_per_s=wires.port_bytes_per_s * outside,
    )


@functools.cache
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


@dataclass(eq=False)  # nobody changes one; frozen, it would take three times as long to make
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
    sms: int  # multiprocessors of a GPU
    slices: int = 0  # of a ragged all-to-all, that each member sends to each; 0: as many as its kernel has blocks for
    taken_for: Wires | None = field(default=None, repr=False)  # what NCCL takes them for, if not this
    known: dict[str, Any] = field(default_factory=dict, repr=False)  # what the tuner expects, once made

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
        slices: int = 0,
    ) -> Wires:
        """The links under a group of k domains with g GPUs each, with so many such groups in a domain at a time.

        `fabric`: how hosts are cabled, and over how many racks the group is spread; None: as the cluster's
        `oversubscription` says, for all that leaves a host.

        Args:
            cluster: GPUs and links.
            g: members of the group inside one domain.
            k: domains that it spans; with 1, `outside_bytes_per_s` is infinite.
            concurrent_groups: such groups in a domain at a time; None: each GPU is in one.
            nvls: False as with `NCCL_NVLS_ENABLE=0`.
            fabric: one of FABRICS, and the leaves that the domains lie under; see above for None.
            nccl: version, such as "2.28.9"; None for `default_version` of nccl.toml.
            slices: of a ragged all-to-all, that each member sends to each; 0: as many as its kernel has blocks for.

        Raises:
            ConfigError: no version of NCCL, or one that has no model.
        """
        constants, gpu = nccl_constants(), cluster.gpu
        per_host = min(cluster.gpus_per_host, cluster.gpus_used_per_domain)
        # Inside a host: a ring and the switch's reductions send to the next host as little as to a NIC, so that a
        # tapered NVLink network does not slow them (NVIDIA: 256 H100s reduce at the full 450 GB/s).
        switch = cluster.has_nvswitch
        link = cluster.link("nvlink", gpus=min(g, per_host) if switch else g)
        peer = link if g == 2 or (switch and per_host > 1) else cluster.link("nvlink", gpus=2)
        capability = gpu.compute_capability or (0, 0)
        generation, links = _generation(capability), str(gpu.nvlink_generation)
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
            peer_bytes_per_s=peer.bytes_per_s * share,
            hops=1.0 if switch else cluster.mesh_hops(g),
            taper=cluster.nvlink_taper,
            inside=inside_row,
            outside=outside_row,
            inside_extra_s=_extra_latency(link, constants["step_latency_s"][inside_row]),
            outside_extra_s=outside_extra,
            generation=generation,
            column=column,
            channel_bytes_per_s=(
                constants["nvlink"]["ring_channel_bytes_per_s"][links] if nvlink else link.bytes_per_s * share
            ),
            ll128=nvlink and capability >= (7, 0),
            nvls=bool(nvls and nvlink and switch and column in constants["nvls"]["channels"]),
            x86=gpu.cpu_link == "pcie",
            ports=_ports(cluster, g),
            port_bytes_per_s=port,
            line_bytes_per_s=line,
            ranks=cluster.gpus_used_per_domain,
            per_host=per_host,
            busy=max(1.0, busy),
            spine=spine,
            nccl=version_of(nccl or constants["default_version"]),
            fitted=fitted_for(generation),
            sms=gpu.sms,
            slices=slices,
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


class Expected(NamedTuple):
    """What the tuner expects of one algorithm in one protocol."""

    name: str  # `ring ll`, `tree simple`, `nvls`, `nvls tree`, `pat`
    latency_s: float
    bytes_per_s: float  # of payload
    medium: str = ""  # protocol whose dip at medium sizes counts: trees
    slower: float = 1.0  # factor on the latency
    slower_from: float = math.inf  # from so many bytes

    def seconds(self, payload: float) -> float:
        """The tuner's estimate."""
        rate = self.bytes_per_s * (tree_medium(self.medium, payload) if self.medium else 1.0)
        return self.latency_s * (self.slower if payload >= self.slower_from else 1.0) + payload / rate


def expected(collective: str, wires: Wires) -> tuple[Expected, ...]:
    """What the tuner expects of everything that it may choose for a reduction or a gather.

    Args:
        collective: `all-reduce`, `all-gather` or `reduce-scatter`.
        wires: the links under its group, of two GPUs or more; kept there is what was answered once.

    Returns:
        One for each algorithm and protocol that has any bandwidth.
    """
    wires = wires.taken_for or wires
    if collective not in wires.known:
        wires.known[collective] = tuple([found for found in _expected(collective, wires) if found.bytes_per_s > 0])
    return wires.known[collective]


@functools.cache
def version_constants(version: tuple[int, ...]) -> Mapping[str, Any]:
    """The tuner's columns and switches of a version."""
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
    """treeCorrectionFactor, at 64 B, 128 B and so on, and what follows it."""
    return (*nccl_constants()["protocol"]["tree_medium"][protocol], 1.0)


def tree_medium(protocol: str, payload: float) -> float:
    """Share of its bandwidth that a tree reaches on messages of medium size: NCCL's table, without its jumps.

    Args:
        protocol: one of PROTOCOLS.
        payload: bytes of the message; linear in their logarithm between NCCL's points, 64 B and its doublings, and 1
            beyond the last.
    """
    if payload <= 64.0:
        return _medium(protocol)[0]
    where, table = math.log2(payload / 64), _medium(protocol)
    low = int(where)
    return table[low] + (where - low) * (table[low + 1] - table[low]) if low + 1 < len(table) else 1.0


def table_step_s(algorithm: str, protocol: str, wires: Wires) -> tuple[float, float]:
    """NCCL's own latency of a step inside a domain, and out of it.

    Args:
        algorithm: `ring` or `tree`.
        protocol: one of PROTOCOLS.
        wires: its kinds of link, and what they add to NCCL's table.

    Returns:
        Seconds inside a domain, and between two.
    """
    rows = nccl_constants()["step_latency_s"]
    simple = protocol == "simple"
    inside = rows[wires.inside][algorithm][protocol] + wires.inside_extra_s[simple]
    return inside, rows[wires.outside][algorithm][protocol] + wires.outside_extra_s[simple]


def _floor(speeds: list[float], rate: float) -> float:
    """The largest speed of NCCL's grid that a rate allows; the rate itself below the grid."""
    for speed in speeds:
        if speed <= rate:
            return speed
    return rate


@functools.lru_cache(maxsize=256)
def _speed(column: str, total: float, version: tuple[int, ...]) -> float:
    """Bandwidth of a channel as NCCL's search finds it: of its grid, that of which channels use most of the links."""
    speeds = version_constants(version)[column]["speeds"]
    return max(speeds, key=lambda s: (int(total / s) * s, s)) if total >= speeds[-1] else total


def _channels(wires: Wires) -> tuple[int, float]:
    """Channels of a ring as NCCL's search finds them, and their bandwidth together."""
    total = wires.inside_bytes_per_s * wires.busy
    speed = _speed(wires.column, total, wires.nccl)
    number = max(1, int(total / speed))
    if wires.k > 1:
        inside = number * speed if wires.g > 1 else math.inf
        return wires.ports, min(inside, wires.ports * min(wires.line_bytes_per_s, total if wires.g > 1 else math.inf))
    doubled = speed >= 25e9 and (wires.column in ("volta", "ampere") or speed >= 50e9 or number <= 4)
    return number * (2 if doubled else 1), number * speed


def _row(p: str, own: Mapping[str, Any], column: str, links: tuple[str, str], place: int) -> tuple[tuple, tuple]:
    """The tuner's numbers of a protocol; see `_sheets`."""
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
    """The tuner's numbers by its column, links inside a domain and out of it, and hosts (1, 2, more): a row a protocol.

    A row: of a ring the protocol, its latency once, of a step on either link, and over hosts at least, its share of the
    bandwidth, the most that the protocol carries, and one channel; of a tree the latencies, the most of a channel, and
    of one with LL128.
    """
    own, columns = version_constants(version), [name for name in nccl_constants()["tuner"] if name != "before"]
    return {
        (column, *links, place + 1): [_row(p, own, column, links, place) for p in PROTOCOLS]
        for column in columns
        for links in itertools.product(("nvlink", "pcie"), ("net", "pcie"))
        for place in range(3)
    }


def _expected(collective: str, wires: Wires) -> list[Expected]:
    """Every algorithm and protocol."""
    g, k, n, found = wires.g, wires.k, wires.g * wires.k, []
    version, reduces = version_constants(wires.nccl), collective == "all-reduce"
    channels, total = _channels(wires)
    steps, crossing = RING_TURNS[collective] * (n - 1), RING_TURNS[collective] * (k - 1)
    levels = int(math.log2(k))
    for (
        (protocol, base, inside, outside, least, share, most, channel),
        (tree_base, tree_inside, tree_outside, tree_channel, tree_ll128_channel),
    ) in _sheets(wires.nccl)[wires.column, wires.inside, wires.outside, min(k, 3)]:
        if protocol == "ll128" and not wires.ll128:
            continue
        simple = protocol == "simple"
        more_inside, more_outside = wires.inside_extra_s[simple], wires.outside_extra_s[simple]
        tree_inside, tree_outside = tree_inside + more_inside, tree_outside + more_outside
        inside = max(inside + more_inside, least) if k > 1 and wires.outside == "net" else inside + more_inside
        outside = tree_outside if g == 1 and k > 1 else outside + more_outside  # nothing hides it (tuning.cc)
        rate = min(total * share, most, channels * channel)
        latency = base + (steps - crossing) * inside + crossing * outside
        slower, slower_from = 1.0, math.inf
        if reduces and simple and k > 1:
            shares = nccl_constants()["protocol"]
            slower = shares["plateau_before_ampere" if wires.column == "volta" else "plateau"]
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
        found += _expected_nvls(wires, version, levels)
    elif g == 1 and version["pat"]:
        # With registered buffers NVLS gathers too; its rate is the ring's (togethercomputer: 661 and 655 GB/s).
        constants = nccl_constants()
        rows = constants["step_latency_s"]
        step = rows["net"]["tree"]["simple"] + 2 * wires.outside_extra_s[1]
        latency = constants["base_latency_s"]["pat"]["simple"] + levels * step / 3.5 + n * rows["pat_gpu"]
        found.append(Expected("pat", latency, total * constants["protocol"]["pat_share"]))
    return found


def _expected_nvls(wires: Wires, version: Mapping[str, Any], levels: int) -> tuple[Expected, ...]:
    """NVLS inside a domain, NVLSTree over several."""
    constants, k, n = nccl_constants(), wires.k, wires.g * wires.k
    column, heads = version[wires.column], min(wires.g, constants["nvls"]["max_heads"])
    if not wires.nvls or heads < 2 or column["nvls_share"] == 0.0:
        return ()
    inside = _floor(column["speeds"], wires.inside_bytes_per_s * wires.busy / heads)
    outside = wires.line_bytes_per_s * wires.ports / heads if k > 1 else math.inf
    latency = version["nvls_s"] or constants["step_latency_s"]["nvlink"]["nvls"]
    latency += 2 * levels * (version["nvls_tree_step_s"] + 2 * wires.outside_extra_s[1])
    if version["nvls_ratio"]:
        rate = heads * min(inside, outside if k <= 2 else outside / 2) * 5 / 6
    else:
        rate = 2 * inside * column["nvls_share"] * (heads - 1) / heads
        if k > 1:
            rate = min(rate, outside * (2 if k == 2 else 1), column["nvls_tree_channel"][min(k, 3) - 1])
        rate *= heads * n / (2 * (n - 1))
    dips = k > 1 and wires.column == "blackwell" and wires.x86 and wires.nccl >= (2, 29)
    return (Expected("nvls" if k == 1 else "nvls tree", latency, rate, "simple" if dips else ""),)
