"""Seconds of one collective on one cluster: from a calibration, or from NCCL's algorithms in closed form.

A ring over k domains with g GPUs each moves `wire_bytes` through every GPU, and `wire_bytes / g` through every GPU's
share of the NICs; the slower of the two links sets the pace. Each algorithm and protocol (ring, tree, NVLS, sends) has
a latency, of the operation and of each step, and a time on the wire; NCCL's tuner takes the fastest, so do we.

A message moves in pieces: few large ones fill the pipeline late, many small ones each pay the handoff t from one GPU to
the next. With the best size of piece, what would take w takes w + 2 sqrt(t w) (the least of pieces x t + w / pieces,
added to w): that is why bus bandwidth still rises at hundreds of MiB. Constants and their sources are in nccl.toml.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from meshkit.config import calibration, catalog
from meshkit.config.cluster import Cluster, Link
from meshkit.errors import ConfigError

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
_PROTOCOLS = ("ll", "ll128", "simple")


@functools.cache
def nccl_constants() -> dict[str, Any]:
    """The tables of nccl.toml."""
    return tomllib.loads(resources.files("meshkit.predict").joinpath("nccl.toml").read_text(encoding="utf-8"))


def wire_factor(collective: str, n: int) -> float:
    """Bytes on the wire per GPU over payload bytes: nccl-tests' bus bandwidth factors (doc/PERFORMANCE.md)."""
    if n <= 1:
        return 0.0
    if collective == "all-reduce":
        return 2 * (n - 1) / n
    if collective in ("collective-permute", "collective-broadcast"):
        return 1.0
    return (n - 1) / n


def collective_time_s(
    collective: str,
    *,
    payload_bytes: float,
    gpus_per_domain: int,
    domains: int = 1,
    cluster: Cluster,
    concurrent_groups: int | None = None,
    nvls: bool = True,
    fitted: Mapping[str, float] | None = None,
) -> float:
    """Seconds of one collective, from the last arrival of a member to the end.

    Args:
        collective: HLO opcode, without `-start`.
        payload_bytes: on one GPU: the operand; of an all-gather, the result.
        gpus_per_domain: members of the group inside one NVLink domain.
        domains: NVLink domains that the group spans.
        cluster: its links, with what they are measured to achieve; its calibration, if it names one, comes first.
        concurrent_groups: such groups in a domain at the same time. By default each GPU is in one, as in an SPMD
            program, and has its own NVLinks and its share of the host's NICs; idle GPUs leave theirs to the others.
        nvls: whether NCCL may add in the NVLink switch; False as with `NCCL_NVLS_ENABLE=0`.
        fitted: replaces `[fitted]` of nccl.toml (for refits).

    Raises:
        ConfigError: an unknown collective, a group that makes no sense, or a calibration that cannot be read.
    """
    n = gpus_per_domain * domains
    if collective not in RING_TURNS:
        raise ConfigError(f"unknown collective '{collective}'.", hint=", ".join(sorted(RING_TURNS)))
    if not 0 <= payload_bytes < math.inf or gpus_per_domain < 1 or domains < 1:
        raise ConfigError(
            f"a {collective} of {payload_bytes} bytes over {domains} domains x {gpus_per_domain} GPUs makes no sense."
        )
    if concurrent_groups is not None and concurrent_groups < 1:
        raise ConfigError(f"{concurrent_groups} concurrent groups make no sense.", hint="1 or more")
    if n == 1:
        return 0.0
    if cluster.calibration is not None:
        sharing = max(1.0, busy_share(cluster, gpus_per_domain, concurrent_groups))
        measured = _calibrated_s(cluster.calibration, collective, payload_bytes * sharing, gpus_per_domain, domains)
        if measured is not None:
            return measured
    wires = _wires(cluster, gpus_per_domain, domains, concurrent_groups, nvls)
    if fitted:
        wires = replace(wires, fitted=fitted)
    return wires.fitted["launch_s"] + fastest(collective, payload_bytes, wires).time_s


def checkpoint_time_s(state_bytes: float | None, cluster: Cluster) -> float | None:
    """Seconds to write a checkpoint: state_bytes / min(storage, the GPUs' paths to it).

    Args:
        state_bytes: parameters and optimizer state over all GPUs, replicas counted once.
        cluster: its `storage_bytes_per_s` over all hosts. The paths are the GPUs' PCIe slots (or links to their CPU)
            with GPUDirect Storage, and host memory, which is written and read, without.

    Returns:
        None where the size or the storage is unknown.
    """
    rate = cluster.checkpoint_bytes_per_s
    return None if rate is None or state_bytes is None else state_bytes / rate


# A Cluster holds mappings and has no hash; its identity, with the object kept alive with the value, serves as one.
_known_wires: dict[tuple[int, int, int, int | None, bool], tuple[Cluster, Wires]] = {}
_MOST_KNOWN = 1024


def _wires(cluster: Cluster, g: int, k: int, concurrent_groups: int | None, nvls: bool) -> Wires:
    """`Wires.of`, made once for each cluster and shape of group."""
    key = (id(cluster), g, k, concurrent_groups, nvls)
    if key not in _known_wires:
        if len(_known_wires) >= _MOST_KNOWN:
            _known_wires.clear()
        _known_wires[key] = cluster, Wires.of(cluster, g, k, concurrent_groups=concurrent_groups, nvls=nvls)
    return _known_wires[key][1]


def _calibrated_s(path: str, collective: str, payload: float, g: int, k: int) -> float | None:
    """Seconds by a fit of `meshkit bench`; None where it measured nothing alike.

    Latency grows with the steps of a ring: of this group, over those of the group that was measured.
    """
    collective = collective.removeprefix("ragged-")
    fit = calibration.load_cached(path).find("infiniband" if k > 1 else "nvlink", collective, g, k)
    if fit is None:
        return None
    n, measured_n = g * k, fit.gpus_per_domain * fit.domains
    steps = max(1, RING_TURNS[collective] * (n - 1)) / max(1, RING_TURNS[collective] * (measured_n - 1))
    return fit.latency_s * steps + payload * wire_factor(collective, n) / fit.bytes_per_s


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
    generation: Mapping[str, Any] | None  # NVLink's row of nccl.toml; None without NVLink
    ll128: bool  # whether NCCL may use the protocol
    nvls: bool  # whether NCCL may add in the switch
    plateau: float  # factor on the latency of a Simple all-reduce ring over hosts
    ports: int  # network ports that lead out of the group's part of a domain
    port_bytes_per_s: float  # what one of them sends
    ranks: int  # GPUs of a domain that the job uses
    per_host: int  # of which on one host
    fitted: Mapping[str, float]  # launch, and steps that a ring needs to turn around: `[fitted]` of nccl.toml

    @classmethod
    def of(cls, cluster: Cluster, g: int, k: int, *, concurrent_groups: int | None = None, nvls: bool = True) -> Wires:
        """The links under a group of k domains with g GPUs each, with so many such groups in a domain at a time."""
        constants = nccl_constants()
        per_host = min(cluster.gpus_per_host, cluster.gpus_used_per_domain)
        # Inside a host: a ring and the switch's reductions send to the next host as little as to a NIC, so that a
        # tapered NVLink network does not slow them (NVIDIA: 256 H100s reduce at the full 450 GB/s).
        link = cluster.link("nvlink", gpus=min(g, per_host) if cluster.has_nvswitch else g)
        capability = cluster.gpu.compute_capability or (0, 0)
        generation = constants["nvlink"].get(str(cluster.gpu.nvlink_generation)) if "nvlink" in link.fabric else None
        busy = busy_share(cluster, g, concurrent_groups)
        share = (generation["usable"] if generation else link.achieved) / max(1.0, busy)
        inside_row, outside_row = "nvlink" if generation else "pcie", "net" if cluster.nic else "pcie"
        outside, port, outside_extra = math.inf, math.inf, (0.0, 0.0)
        if k > 1:
            net = cluster.link("infiniband")
            outside = _share_of_nics(cluster, net, busy) * net.achieved
            port = max(outside, _port_bytes_per_s(cluster) * net.achieved / cluster.oversubscription)
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
            generation=generation,
            ll128=generation is not None and capability >= (7, 0),
            nvls=bool(
                nvls and generation and generation["nvls_share"] and capability >= (9, 0) and cluster.has_nvswitch
            ),
            plateau=constants["protocol"]["plateau" if capability >= (8, 0) else "plateau_before_ampere"],
            ports=_ports(cluster, g),
            port_bytes_per_s=port,
            ranks=cluster.gpus_used_per_domain,
            per_host=per_host,
            fitted=constants["fitted"],
        )


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


@dataclass(frozen=True)
class Algorithm:
    """One way to run a collective: its latency, its time on the wire, and the handoff between two pieces of it."""

    name: str
    latency_s: float
    wire_s: float
    handoff_s: float

    @property
    def time_s(self) -> float:
        """Seconds with the best size of piece."""
        return self.latency_s + self.wire_s + 2 * math.sqrt(self.handoff_s * self.wire_s)


def fastest(collective: str, payload: float, wires: Wires) -> Algorithm:
    """The fastest of what NCCL can choose from, without the launch."""
    if collective == "collective-permute":
        return _permute(payload, wires)
    if collective in ("all-to-all", "ragged-all-to-all"):
        return _all_to_all(payload, wires)
    if collective == "collective-broadcast":
        return _broadcast(payload, wires)
    return min(options(collective, payload, wires), key=lambda option: option.time_s)


def options(collective: str, payload: float, wires: Wires) -> Iterator[Algorithm]:
    """What NCCL can choose from for a reduction or a gather."""
    for protocol in _PROTOCOLS:
        if protocol == "ll128" and not wires.ll128:
            continue
        yield _ring(collective, protocol, payload, wires)
        if collective == "all-reduce":
            yield _tree(protocol, payload, wires)
    if collective == "all-reduce" and wires.nvls and wires.g >= nccl_constants()["nvls"]["min_gpus"]:
        yield _nvls(payload, wires) if wires.k == 1 else _nvls_tree(payload, wires)


def _step_s(algorithm: str, protocol: str, wires: Wires) -> tuple[float, float]:
    """Latency of a step inside a domain, and out of it."""
    rows = nccl_constants()["step_latency_s"]
    simple = protocol == "simple"
    inside = rows[wires.inside][algorithm][protocol] + wires.inside_extra_s[simple]
    return inside, rows[wires.outside][algorithm][protocol] + wires.outside_extra_s[simple]


def _handoff_s(wires: Wires, *, outside: bool) -> float:
    """From one GPU to the next: NCCL's latency of an LL step, the shortest there is."""
    return nccl_constants()["step_latency_s"][wires.outside if outside else wires.inside]["ring"]["ll"]


def _filled(n: int, wires: Wires) -> float:
    """Share of the time that a ring of n, or a pair, has its links full: the first chunk overlaps with nothing."""
    return (n - 1) / (n - 1 + wires.fitted["turnaround_steps"])


def _ring(collective: str, protocol: str, payload: float, wires: Wires) -> Algorithm:
    """Every GPU passes on wire bytes; of g rings over k domains, each crosses on its own GPU's NIC."""
    constants, g, k, n = nccl_constants(), wires.g, wires.k, wires.g * wires.k
    inside_step, outside_step = _step_s("ring", protocol, wires)
    if k > 1 and wires.outside == "net":
        inside_step = max(inside_step, constants["step_latency_s"]["net"]["post"][protocol])
    if g == 1 and k > 1:
        outside_step = _step_s("tree", protocol, wires)[1]  # nothing hides it (tuning.cc, one GPU a node)
    crossing = RING_TURNS[collective] * (k - 1)
    latency = (RING_TURNS[collective] * (n - 1) - crossing) * inside_step + crossing * outside_step
    latency += constants["base_latency_s"]["ring"][protocol]
    if collective == "all-reduce" and protocol == "simple" and k > 1:
        latency *= wires.plateau
    share = constants["protocol"]["ring_share"][protocol]
    wire = payload * wire_factor(collective, n)
    inside = wire / (wires.inside_bytes_per_s * _filled(n, wires) * share) if g > 1 else 0.0
    outside = wire / g / (wires.outside_bytes_per_s * share)
    if protocol == "ll":
        inside = max(inside, wire / _ll_bytes_per_s(wires))
    return Algorithm(f"ring {protocol}", latency, max(inside, outside), _handoff_s(wires, outside=outside > inside))


def _broadcast(payload: float, wires: Wires) -> Algorithm:
    """A chain along the ring, in the protocol that NCCL's tuner expects to be fastest.

    The tuner knows no slots ("waiting for proper chunk modeling", tuning.cc), so its pick need not be the fastest.
    """
    protocols = [p for p in _PROTOCOLS if p != "ll128" or wires.ll128]
    return _chain(min(protocols, key=lambda p: _tuned_s(p, payload, wires)), payload, wires)


def _chain_s(protocol: str, payload: float, wires: Wires) -> float:
    """Seconds of a broadcast's payload on the slower link: a chain never turns around."""
    share = nccl_constants()["protocol"]["ring_share"][protocol]
    rate = min(wires.inside_bytes_per_s if wires.g > 1 else math.inf, wires.g * wires.outside_bytes_per_s) * share
    return payload / (min(rate, _ll_bytes_per_s(wires)) if protocol == "ll" else rate)


def _tuned_s(protocol: str, payload: float, wires: Wires) -> float:
    """What the tuner expects of a broadcast: over hosts the latency of a network step for every GPU, Simple the tree's.

    Inside a host, where all channels run the same ring, one step (tuning.cc, `sameChannels`).
    """
    constants, k = nccl_constants(), wires.k
    row = constants["step_latency_s"][wires.inside if k == 1 else wires.outside]
    step = row["tree" if protocol == "simple" and k > 1 else "ring"][protocol]
    latency = constants["base_latency_s"]["ring"][protocol] + step * (1 if k == 1 else wires.g * k)
    return latency + _chain_s(protocol, payload, wires)


def _chain(protocol: str, payload: float, wires: Wires) -> Algorithm:
    """A broadcast: the first slot passes all GPUs, one after the other, and the rest follows it.

    A network port starts on a slot when all of it is written (net.cc, sendProxyProgress), and the network's latency is
    hidden by nothing, as in a tree. Between GPUs LL and LL128 pass on every line as it comes, while Simple copies a
    slot whole (prims_simple.h). Channels that share a port do not stay side by side: whichever comes first has the port
    to itself, and is ahead by more at every port, so the first slot travels at the rate of the whole port.
    """
    constants, k = nccl_constants(), wires.k
    chain, slot_share = constants["chain"], constants["chain"]["data_share"][protocol]
    channels = _channels(wires.ports) if k > 1 else catalog.kernels()["nccl_channels"][0]
    channels = max(1, min(channels, int(payload // chain["least_channel_bytes"])))
    slot = min(chain["slot_bytes"][protocol], payload / channels / slot_share)
    channel = wires.generation["ring_channel_bytes_per_s"] if wires.generation else wires.inside_bytes_per_s
    copy = slot / channel
    inside = _step_s("ring", protocol, wires)[0] + (copy if protocol == "simple" else 0.0)
    outside, port = _step_s("tree", protocol, wires)[1] if k > 1 else 0.0, slot / wires.port_bytes_per_s
    outside += copy + port if protocol == "simple" else max(copy, port)
    fill = constants["base_latency_s"]["ring"][protocol] + (wires.g * k - k) * inside + (k - 1) * outside
    rest = 1 - slot * slot_share / payload if payload else 0.0
    return Algorithm(f"chain {protocol}", fill, rest * _chain_s(protocol, payload, wires), 0.0)


def _ll_bytes_per_s(wires: Wires) -> float:
    """Bus bandwidth that LL does not exceed."""
    if wires.k > 1:
        return nccl_constants()["net"]["ll_bytes_per_s"][min(wires.k, 3) - 2]
    return wires.generation["ll_bytes_per_s"] if wires.generation else math.inf


def _channels(g: int) -> int:
    """Channels over the network of a group with g GPUs in a domain."""
    net = nccl_constants()["net"]
    return min(net["max_channels"], net["channels_per_gpu"] * g)


def _tree(protocol: str, payload: float, wires: Wires) -> Algorithm:
    """A chain inside each domain, a double binary tree over them: fewer steps than a ring, links used half."""
    constants, g, k = nccl_constants(), wires.g, wires.k
    inside_step, outside_step = _step_s("tree", protocol, wires)
    latency = 2 * ((g - 1) * inside_step + math.log2(k) * outside_step) + constants["base_latency_s"]["tree"][protocol]
    share = constants["protocol"]["tree_share" if k == 1 else "tree_share_net"][protocol]
    inside = 2 * payload / (wires.inside_bytes_per_s * share) if g > 1 else 0.0
    # Each NIC carries its part up and down once; over two domains half of that would do, but NCCL does not reach it.
    outside = 2 * payload / (g * wires.outside_bytes_per_s * share)
    if k > 1 and wires.generation:
        key = "tree_ll128_channel_bytes_per_s" if protocol == "ll128" else "tree_channel_bytes_per_s"
        outside = max(outside, 2 * payload / (_channels(g) * wires.generation[key][min(k, 3) - 2]))
    if protocol == "ll":
        inside = max(inside, 2 * payload / _ll_bytes_per_s(wires))
    wire = max(inside, outside) / _tree_medium(protocol, payload)
    return Algorithm(f"tree {protocol}", latency, wire, _handoff_s(wires, outside=outside > inside))


def _tree_medium(protocol: str, payload: float) -> float:
    """Share of its bandwidth that a tree reaches on messages of medium size: NCCL's table, without its jumps."""
    table = nccl_constants()["protocol"]["tree_medium"][protocol]
    where = math.log2(max(payload, 64.0) / 64)
    low = int(where)
    if low >= len(table):
        return 1.0
    high = table[low + 1] if low + 1 < len(table) else 1.0
    return table[low] + (where - low) * (high - table[low])


def _nvls(payload: float, wires: Wires) -> Algorithm:
    """The switch adds and multicasts: a GPU sends its payload once, and the g-th part that it sums a second time."""
    assert wires.generation is not None
    row = nccl_constants()["step_latency_s"]["nvlink"]
    rate = wires.inside_bytes_per_s * wires.generation["nvls_share"]
    # Pieces are handed over by a barrier of all members, as long as a Simple step.
    return Algorithm("nvls", row["nvls"], payload * (1 + 1 / wires.g) / rate, row["ring"]["simple"])


def _nvls_tree(payload: float, wires: Wires) -> Algorithm:
    """NVLS inside each domain, a double binary tree over them, one NIC for the part of each GPU.

    Both ways pass the whole payload through the switch, at NVLS's bus bandwidth (SimAI, calbusbw.cc).
    """
    assert wires.generation is not None
    rows, g, k = nccl_constants()["step_latency_s"], wires.g, wires.k
    latency = rows["nvlink"]["nvls"] + 2 * math.log2(k) * (rows["net"]["nvls"] + wires.outside_extra_s[1])
    bus = wires.inside_bytes_per_s * wires.generation["nvls_share"] * 2 * (g - 1) / (g + 1)
    inside = 2 * payload / bus
    outside = payload * min(2.0, k / 2) / (g * wires.outside_bytes_per_s)  # both ways at once over two domains
    cap = _channels(g) * wires.generation["nvls_tree_channel_bytes_per_s"][min(k, 3) - 2]
    outside = max(outside, payload * wire_factor("all-reduce", g * k) / cap)
    handoff = rows["net"]["ring"]["ll"] if outside > inside else rows["nvlink"]["ring"]["simple"]
    return Algorithm("nvls tree", latency, max(inside, outside), handoff)


def _all_to_all(payload: float, wires: Wires) -> Algorithm:
    """Every pair at once: what stays in the domain over NVLink, the rest through each GPU's own NIC."""
    constants, g, k, n = nccl_constants(), wires.g, wires.k, wires.g * wires.k
    inside_step, outside_step = _step_s("ring", "simple", wires)
    rounds = -(-n // constants["p2p"]["peers_per_round"])
    latency = constants["base_latency_s"]["ring"]["simple"] + rounds * (outside_step if k > 1 else inside_step)
    part = payload / n
    filled = _filled(n, wires)
    inside = part * (g - 1) * wires.hops / (wires.inside_bytes_per_s * filled)
    beyond_host = part * max(0, g - wires.per_host) / (wires.inside_bytes_per_s * wires.taper * filled)
    outside = part * (n - g) / wires.outside_bytes_per_s
    inside = max(inside, beyond_host)
    return Algorithm("send", latency, max(inside, outside), _handoff_s(wires, outside=outside > inside))


def _permute(payload: float, wires: Wires) -> Algorithm:
    """One message to one peer; inside a domain on as many channels as NCCL grants it."""
    constants = nccl_constants()
    inside_step, outside_step = _step_s("ring", "simple", wires)
    base = constants["base_latency_s"]["ring"]["simple"]
    if wires.k > 1:
        wire = payload / wires.outside_bytes_per_s
        return Algorithm("send", base + outside_step, wire, _handoff_s(wires, outside=True))
    taper = wires.taper if wires.g > wires.per_host else 1.0  # the slowest pair crosses hosts
    wire = payload / (wires.peer_bytes_per_s * taper * _filled(2, wires))
    if wires.generation:
        wire = max(wire, _channels_s(payload, wires.ranks))
    return Algorithm("send", base + inside_step, wire, _handoff_s(wires, outside=False))


def _channels_s(payload: float, ranks: int) -> float:
    """Seconds that the channels of one message need, as if they doubled without the dips that doubling makes."""
    p2p = nccl_constants()["p2p"]
    first = max(1, 1 << max(0, (p2p["channels"] // ranks).bit_length() - 1))
    full_first = min(payload / first, p2p["channel_bytes"])
    return max(full_first, payload / p2p["channels"]) / p2p["channel_bytes_per_s"]
