"""Compute the cost of each algorithm of a collective: latency, time on the wire, and time to fill its pipeline.

A ring over k domains with g GPUs each moves `wire_bytes` through every GPU, and `wire_bytes / g` through every GPU's
share of the NICs. The slower of the two links determines the time. A message moves in pieces. Few large pieces fill the
pipeline late, and many small pieces each pay the handoff time t from one GPU to the next. With p pieces, a message with
wire time w takes w + p t + w / p, which is w + 2 sqrt(t w) for the best p. So bus bandwidth still rises at hundreds of
MiB. NVLS (reductions in the NVLink switch) has pieces of fixed sizes. Constants and their sources are in nccl.toml.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from meshkit.config import catalog
from meshkit.predict.nccl import (
    PROTOCOLS,
    RING_TURNS,
    Expected,
    Links,
    expected,
    model_constant,
    nccl_constants,
    table_step_s,
    tree_medium,
)

CHOSEN = ("all-reduce", "all-gather", "reduce-scatter")  # NCCL's tuner chooses the algorithm of these.
COPIED = ("all-gather", "all-to-all")  # NCCL can run these on copy engines, too.
FORCED = (
    "ring", "tree", "nvls", "nvls tree", "pat", "collnet", "symmetric", "copy engine", "one-shot", "neighbours",
    "device kernel", "send",
)  # fmt: skip
_BLOCKS_A_MULTIPROCESSOR = 16  # A block has 128 threads, and a multiprocessor holds 2,048.


def wire_factor(collective: str, n: int) -> float:
    """Return bytes on the wire per GPU over payload bytes: nccl-tests' bus bandwidth factors (doc/PERFORMANCE.md).

    Args:
        collective: HLO opcode without `-start`, or nccl-tests' `reduce`, `send`, `recv`; any other counts as a gather.
        n: GPUs of the group; a group of one moves no bytes.
    """
    if n <= 1:
        return 0.0
    if collective == "all-reduce":
        return 2 * (n - 1) / n
    if collective in ("collective-permute", "collective-broadcast", "reduce", "send", "recv"):
        return 1.0
    return (n - 1) / n


class Algorithm(NamedTuple):
    """The cost of one algorithm: its latency, its time on each link, and the handoff of a piece between GPUs."""

    name: str
    latency_s: float
    inside_s: float
    """Seconds for which the link inside a domain is busy."""
    outside_s: float
    """Seconds for which the GPU's link out of the domain is busy."""
    handoff_s: float
    steps_s: float = 0.0
    """Latency of all steps, a part of which may be hidden by the time on the wire."""
    overlap: float = 1.0
    """Exponent p that combines steps and wire as (steps^p + wire^p)^(1/p); with 1 nothing is hidden."""
    channels_s: float = 0.0
    """Seconds that its channels need for the bytes, however fast the links are."""

    @property
    def wire_s(self) -> float:
        """Seconds on the wire: those of the slowest link, or of the channels."""
        return max(self.inside_s, self.outside_s, self.channels_s)

    @property
    def time_s(self) -> float:
        """Seconds of the collective with the best size of pieces."""
        wire = self.wire_s
        full = wire + 2 * math.sqrt(self.handoff_s * wire)
        if self.overlap == 1.0:
            return self.latency_s + self.steps_s + full
        return self.latency_s + (self.steps_s**self.overlap + full**self.overlap) ** (1 / self.overlap)


def fastest(collective: str, payload: float, links: Links) -> Algorithm:
    """Return the cost of the algorithm that NCCL (for a ragged all-to-all: XLA) chooses, after XLA has launched it.

    Args:
        payload: bytes of the operand (for an all-gather, of the result) on one GPU.

    Raises:
        KeyError: the collective is not in `nccl.RING_TURNS`.
    """
    made = {
        "collective-permute": _permute,
        "all-to-all": _all_to_all,
        "ragged-all-to-all": _ragged_one_shot if links.k == 1 else _ragged_sends,
        "collective-broadcast": _broadcast,
    }.get(collective)
    return made(payload, links) if made else _taken(collective, expected(collective, links), payload, links)


def _taken(collective: str, choices: Sequence[Expected], payload: float, links: Links) -> Algorithm:
    """Return the cost of the tuner's choice.

    Over several domains the tuner's estimates are often close to each other. The result is then the lowest cost among
    the algorithms whose estimates are close to the least one. NVLS tree is left out, unless the tuner chooses it.
    """
    estimates = [choice.seconds(payload) for choice in choices]
    least = min(estimates)
    pick = choices[estimates.index(least)]
    if links.k == 1 or pick.name == "nvls tree":
        return priced(collective, pick, payload, links)
    best, best_s, most = None, math.inf, model_constant("tie") * least
    for choice, estimate in zip(choices, estimates, strict=True):
        if estimate <= most and choice.name != "nvls tree":
            found = priced(collective, choice, payload, links)
            if (seconds := found.time_s) < best_s:
                best, best_s = found, seconds
    assert best is not None  # The tuner's choice is among them.
    return best


def forced(collective: str, algorithm: str, payload: float, links: Links) -> Algorithm | None:
    """Return the cost of a given algorithm, with or without a protocol; None if NCCL or XLA cannot run it.

    Without a protocol, NCCL's tuner chooses one.

    Args:
        algorithm: one of `FORCED`; a protocol (`ll`, `ll128` or `simple`) may follow. With `nvls`, a gather or a
            reduce-scatter runs as a ring, and an all-reduce over several domains as `nvls tree`.
        payload: bytes on one GPU, as `fastest` takes it.
    """
    if collective == "ragged-all-to-all":
        made = {"one-shot": _ragged_one_shot, "device kernel": _ragged_device, "send": _ragged_sends}.get(algorithm)
        return made(payload, links) if made and (links.k == 1 or algorithm != "one-shot") else None
    family, _, protocol = algorithm.rpartition(" ")
    if protocol not in PROTOCOLS:
        family, protocol = algorithm, ""
    if family == "neighbours":
        return _neighbours(payload, links) if collective == "collective-permute" else None
    if family == "copy engine":
        return _copy_engine(collective, payload, links) if collective in COPIED else None
    if collective not in CHOSEN:
        return None
    if made := {"collnet": _collnet, "symmetric": _symmetric, "one-shot": _one_shot}.get(family):
        return made(collective, payload, links)
    if family == "nvls":
        if collective != "all-reduce":  # with NVLS, gathers have a ring's rate, see `nccl._expected`
            family, protocol = "ring", protocol or "simple"
        elif links.k > 1:
            family = "nvls tree"  # what NCCL_ALGO=NVLS means over several domains
    names = {f"{family} {protocol}"} if protocol else {family, *(f"{family} {p}" for p in PROTOCOLS)}
    found = [e for e in expected(collective, links) if e.name in names]
    return _taken(collective, found, payload, links) if found else None


def channels_of(name: str, collective: str, payload: float, links: Links) -> int:
    """Return the number of multiprocessors that an algorithm occupies; 0 for copy engines.

    Each of NCCL's channels occupies one, while 16 blocks of XLA's one-shot kernel share one.

    Inside a domain, rings and trees have the number that NCCL logs, and a message to one peer doubles its channels
    until none carries too much. Over several domains, rings and trees have two channels for each port, and a message to
    one peer has two.

    Args:
        collective: HLO opcode, without `-start`. A permute has one peer, an all-to-all many.
        payload: bytes on one GPU; only messages to single peers inside a domain depend on it.
    """
    constants, most = nccl_constants(), nccl_constants()["p2p"]["channels"]
    inside, across = catalog.kernels()["nccl_channels"]
    if name.startswith("nvls"):
        return constants["nvls"]["channels"][links.column]
    if name == "copy engine":
        return 0
    if collective == "ragged-all-to-all" and name == "one-shot":
        return -(-_ragged_blocks(links) // _BLOCKS_A_MULTIPROCESSOR)
    if name == "device kernel":
        return links.sms
    if name not in ("send", "neighbours"):
        return inside if links.k == 1 else min(across, _channels(links.ports))
    peers = 1 if collective == "collective-permute" else links.g * links.k - 1
    each = _first_channels(links) if links.k == 1 else constants["net"]["channels_per_gpu"]
    if links.k == 1:
        while each < most and payload / peers / each > constants["p2p"]["channel_bytes"]:
            each *= 2
    return min(most, each * peers)


def priced(collective: str, choice: Expected, payload: float, links: Links) -> Algorithm:
    """Return the cost of one of the tuner's choices."""
    if choice.name == "nvls":
        return _nvls(payload, links)
    if choice.name == "nvls tree":
        return _nvls_tree(payload, links)
    if choice.name == "pat":
        return _pat(choice, payload, links)
    family, _, protocol = choice.name.partition(" ")
    return _tree(protocol, payload, links) if family == "tree" else _ring(collective, protocol, payload, links)


def _step_s(algorithm: str, protocol: str, links: Links) -> tuple[float, float]:
    """Return two latencies, of a step inside a domain and of a step out of it.

    On NVLink, the latency of a ring's step is fitted. A tree's step takes that time, multiplied by the ratio of tree to
    ring in NCCL's table.
    """
    rows, (inside, outside) = nccl_constants()["step_latency_s"], table_step_s(algorithm, protocol, links)
    if links.inside == "nvlink":
        row = rows["nvlink"]
        inside = links.fitted[f"{protocol}_step_s"] * row[algorithm][protocol] / row["ring"][protocol]
    return inside, outside


def _first_s(protocol: str, links: Links) -> float:
    """Return the time until a proxy on the CPU handles the first piece that an operation sends to another host."""
    return links.fitted[f"net_{protocol}_s"] if links.k > 1 and links.outside == "net" and protocol != "simple" else 0.0


def _base_s(protocol: str, links: Links) -> float:
    base = nccl_constants()["base_latency_s"]["ring"]["simple"] if protocol == "simple" else 0.0
    return links.fitted["kernel_s"] + base


def _share(protocol: str, links: Links) -> float:
    if links.inside == "nvlink" and protocol != "simple":
        return links.fitted[f"{protocol}_share"]
    return nccl_constants()["protocol"]["ring_share"][protocol]


def _handoff_s(links: Links, *, outside: bool) -> float:
    """Return the handoff time from one GPU to the next: NCCL's latency of an LL step, which is its shortest."""
    return nccl_constants()["step_latency_s"][links.outside if outside else links.inside]["ring"]["ll"]


def _ring(collective: str, protocol: str, payload: float, links: Links) -> Algorithm:
    """Price a ring: every GPU forwards the wire bytes; each of g rings leaves a domain by a different GPU's NIC."""
    g, k, n = links.g, links.k, links.g * links.k
    inside_step, outside_step = _step_s("ring", protocol, links)
    if g == 1 and k > 1 and links.outside == "net":
        outside_step = max(outside_step, _step_s("tree", protocol, links)[1])  # no NVLink step hides latency
    steps, crossing = RING_TURNS[collective] * (n - 1), RING_TURNS[collective] * (k - 1)
    hops = (steps - crossing) * inside_step + crossing * outside_step
    wire = payload * wire_factor(collective, n)
    turnaround = model_constant("ll_turnaround") if protocol == "ll" else links.fitted["turnaround"]
    inside = wire * (1 + turnaround / steps) / (links.inside_bytes_per_s * _share(protocol, links)) if g > 1 else 0.0
    share = nccl_constants()["protocol"]["ring_share"][protocol]
    outside = wire / g / (links.outside_bytes_per_s * share) * links.spine[0]
    if protocol == "ll" and k > 1:
        outside = max(outside, wire / _ll_bytes_per_s(links))
    return Algorithm(
        f"ring {protocol}",
        _base_s(protocol, links) + _first_s(protocol, links),
        inside,
        outside,
        _handoff_s(links, outside=outside > inside),
        steps_s=hops,
        overlap=links.fitted.get("overlap", 1.0),
    )


def _ll_bytes_per_s(links: Links) -> float:
    if links.inside != "nvlink" and links.k == 1:
        return math.inf
    return nccl_constants()["tuner"][links.column]["ll"][min(links.k, 3) - 1]


def _channels(ports: int) -> int:
    net = nccl_constants()["net"]
    return min(net["max_channels"], net["channels_per_gpu"] * ports)


def _tree(protocol: str, payload: float, links: Links) -> Algorithm:
    """Price a double binary tree over domains, with a chain inside each. It has fewer steps than a ring."""
    constants, g, k = nccl_constants(), links.g, links.k
    inside_step, outside_step = _step_s("tree", protocol, links)
    latency = _base_s(protocol, links) + 2 * ((g - 1) * inside_step + math.log2(k) * outside_step)
    share = constants["protocol"]["tree_share" if k == 1 else "tree_share_net"][protocol]
    inside = 2 * payload / (links.inside_bytes_per_s * share) if g > 1 else 0.0
    # Each NIC carries its part up and down the tree once. Between two domains half of this traffic would suffice in
    # theory, but NCCL does not achieve that.
    outside = 2 * payload / (g * links.outside_bytes_per_s * share)
    if k > 1 and links.inside == "nvlink":
        column, place = constants["tuner"][links.column], min(k, 3) - 1
        cap = column["tree_ll128_channel" if protocol == "ll128" else "tree_channel"][place]
        outside = max(outside, 2 * payload / (_channels(g) * cap))
    if k > 2:
        outside /= links.fitted["tree_net_share"]
    if protocol == "ll":
        inside = max(inside, 2 * payload / _ll_bytes_per_s(links))
    handoff, medium = _handoff_s(links, outside=outside > inside), tree_medium(protocol, payload)
    return Algorithm(f"tree {protocol}", latency, inside / medium, outside * links.spine[0] / medium, handoff)


def _pat(choice: Expected, payload: float, links: Links) -> Algorithm:
    """Price PAT, with one GPU per domain: each GPU's part moves along its own binary tree, at the rate of a port."""
    wire = payload * wire_factor("all-gather", links.k) / links.outside_bytes_per_s * links.spine[1]
    base = links.fitted["kernel_s"] + _first_s("ll", links) - nccl_constants()["base_latency_s"]["pat"]["simple"]
    return Algorithm("pat", choice.latency_s + base, 0.0, wire, _handoff_s(links, outside=True))


def _nvls_bytes_per_s(links: Links) -> float:
    """Return one GPU's payload rate; the size of the group has no effect, since the switch adds and multicasts."""
    share = nccl_constants()["tuner"][links.column]["nvls_share"]
    return links.inside_bytes_per_s * share * links.fitted["nvls_rate"]


def _piece_bytes(payload: float, links: Links, halved: list[list[int]]) -> float:
    """Return the bytes that NVLS processes at a time: for each channel, one piece for each GPU that reduces.

    Pieces are smaller for small messages.
    """
    nvls = nccl_constants()["nvls"]
    operations = nvls["channels"][links.column] * min(links.g, nvls["max_heads"])
    chunk = nvls["chunk_bytes"]
    for pieces, smaller in halved:
        if payload < pieces * operations * chunk:
            chunk = min(chunk, smaller)
    return min(payload, operations * chunk)


def _nvls(payload: float, links: Links) -> Algorithm:
    """Price NVLS, where the switch adds and multicasts; the first and the last pieces overlap with nothing."""
    rate = _nvls_bytes_per_s(links)
    piece = _piece_bytes(payload, links, nccl_constants()["nvls"]["halved_below"])
    fill = links.fitted["nvls_pieces"] * piece / rate * (1 - piece / payload) if payload else 0.0
    return Algorithm("nvls", links.fitted["kernel_s"] + links.fitted["nvls_s"] + fill, payload / rate, 0.0, 0.0)


def _nvls_tree(payload: float, links: Links) -> Algorithm:
    """Price NVLS inside each domain with a double binary tree over domains; each GPU's part uses its own NIC."""
    constants, g, k = nccl_constants(), links.g, links.k
    level = constants["step_latency_s"]["net"]["nvls"] + links.outside_extra_s[1]
    latency = links.fitted["kernel_s"] + links.fitted["nvls_s"] + 2 * math.log2(k) * level
    rate = _nvls_bytes_per_s(links) * links.fitted["nvls_tree_share"]
    piece = _piece_bytes(payload, links, constants["nvls"]["nvls_tree_halved_below"])
    fill = links.fitted["nvls_pieces"] * piece / rate * (1 - piece / payload) if payload else 0.0
    outside = payload * min(2.0, k / 2) / (g * links.outside_bytes_per_s)  # at k = 2, up and down overlap
    cap = _channels(links.ports) * constants["tuner"][links.column]["nvls_tree_channel"][min(k, 3) - 1]
    outside = max(outside * links.spine[0], payload * wire_factor("all-reduce", g * k) / cap if g <= 8 else 0.0)
    handoff = constants["step_latency_s"]["net"]["ring"]["ll"] if outside > payload / rate else 0.0
    return Algorithm("nvls tree", latency + fill, payload / rate, outside, handoff)


def _collnet(collective: str, payload: float, links: Links) -> Algorithm | None:
    """Price CollNetDirect: the network's switches add, and every port carries its part once."""
    if links.k == 1:
        return None
    constants, g = nccl_constants(), links.g
    rows = constants["step_latency_s"]
    share = constants["protocol"]["collnet_share"] if links.column in ("hopper", "blackwell") else 1.0
    hops = min(1, g - 1) * rows[links.inside]["collnet"] + (g - 1) * rows["collnet_gpu"]
    latency = links.fitted["kernel_s"] + 2 * hops + rows["net"]["collnet"] + links.outside_extra_s[1]
    part = 1.0 if collective == "all-reduce" else wire_factor(collective, links.k)
    outside = payload * part / (g * links.outside_bytes_per_s * share)
    inside = payload * wire_factor(collective, g) / links.inside_bytes_per_s
    return Algorithm("collnet", latency, inside, outside, _handoff_s(links, outside=True))


def _symmetric(collective: str, payload: float, links: Links) -> Algorithm | None:
    """Price NCCL's symmetric kernels: GPUs read each other's memory directly, between two barriers, without pieces."""
    if links.k > 1 or links.inside != "nvlink":
        return None
    rate = links.inside_bytes_per_s * links.fitted["symmetric_share"]
    passes = 1 + 1 / links.g if collective == "all-reduce" and links.nvls else wire_factor(collective, links.g)
    latency = links.fitted["kernel_s"] + 2 * model_constant("symmetric_barrier_s")
    return Algorithm("symmetric", latency, payload * passes / rate, 0.0, 0.0)


def _copy_engine(collective: str, payload: float, links: Links) -> Algorithm | None:
    """Price a collective on copy engines: a batch of copies, one to each GPU's memory, between two barriers.

    The copies of a batch are started one after the other, and each start takes time. A barrier copies a flag to every
    other GPU's memory, or makes one copy if the switch multicasts (ce_coll.cc). The collective uses no multiprocessor.
    """
    if links.k > 1 or links.inside != "nvlink" or links.nccl < (2, 28):
        return None
    start = model_constant("copy_s" if links.x86 else "copy_grace_s")
    copies = links.g + 2 * (1 if links.nvls else links.g - 1)
    rate = links.inside_bytes_per_s * model_constant("copy_share")
    return Algorithm("copy engine", copies * start, payload * wire_factor(collective, links.g) / rate, 0.0, 0.0)


def _one_shot(collective: str, payload: float, links: Links) -> Algorithm | None:
    """Price XLA's own all-reduce: every GPU reads the payload of all others."""
    if links.k > 1 or collective != "all-reduce":
        return None
    wire = payload * (links.g - 1) / links.inside_bytes_per_s
    return Algorithm("one-shot", model_constant("one_shot_s"), wire, 0.0, 0.0)


def _send_s(payload: float, links: Links) -> float:
    """Return the latency of sends of `payload` bytes to each peer, in LL up to a size and in Simple above it."""
    p2p, f = nccl_constants()["p2p"], links.fitted
    latency = f["kernel_s"] + f["p2p_s"]
    if payload > p2p["ll_bytes"]:
        latency += f["p2p_simple_s"]
    else:
        share = nccl_constants()["protocol"]["ring_share"]["ll"]
        latency += payload / (share * f["p2p_channel_bytes_per_s"])
    if links.k == 1:
        return latency + _step_s("ring", "ll", links)[0]
    return latency + _first_s("ll", links) + _step_s("ring", "ll", links)[1]


def _all_to_all(payload: float, links: Links) -> Algorithm:
    """Price sends between all pairs: inside the domain over NVLink, the rest through each GPU's own NIC."""
    constants, g, k, n = nccl_constants(), links.g, links.k, links.g * links.k
    part = payload / n
    rounds = -(-n // constants["p2p"]["peers_per_round"])
    step = _step_s("ring", "ll", links)[k > 1]
    latency = _send_s(part, links) + (rounds - 1) * step
    share = links.fitted["p2p_share"] if links.inside == "nvlink" else 1.0
    rate = links.inside_bytes_per_s * share
    inside = part * (g - 1 + links.fitted["p2p_turnaround"]) * links.hops / rate if g > 1 else 0.0
    beyond_host = part * max(0, g - links.per_host) / (rate * links.taper)
    outside = part * (n - g) / links.outside_bytes_per_s * links.spine[1]
    inside = max(inside, beyond_host)
    return Algorithm("send", latency, inside, outside, _handoff_s(links, outside=outside > inside))


def _ragged_blocks(links: Links) -> int:
    """Return how many blocks XLA's one-shot kernel runs at once: one for each receiver and slice (adjacent rows).

    Source: ragged_all_to_all.cc.
    """
    most = links.sms * _BLOCKS_A_MULTIPROCESSOR
    return min(links.g * links.k * links.slices, most) if links.slices else most


def _ragged_one_shot(payload: float, links: Links) -> Algorithm:
    """Price XLA's one-shot kernel: between two barriers, each GPU stores every row in its receiver's memory.

    Each thread stores its 8 bytes before it loads the next ones. So the latency of loads limits a block's rate, and the
    link does not.
    """
    rate = links.inside_bytes_per_s * model_constant("ragged_share")
    inside = payload * (links.g - 1) / links.g * links.hops / rate
    latency = 2 * model_constant("one_shot_s") + model_constant("kernel_gap_s")
    channels_s = payload / (_ragged_blocks(links) * model_constant("ragged_block_bytes_per_s"))
    return Algorithm("one-shot", latency, inside, 0.0, 0.0, channels_s=channels_s)


def ragged_copy_s(payload: float, slices: int, sms: int, memory_bytes_per_s: float) -> float:
    """Return the seconds in which the one-shot kernel copies a GPU's own rows, as XLA does in groups of one GPU.

    `slices` is the number that the operation lists, 0 if unknown. `memory_bytes_per_s` is for reads plus writes.
    """
    most = sms * _BLOCKS_A_MULTIPROCESSOR
    blocks = min(slices, most) if slices else most
    wire = max(2 * payload / memory_bytes_per_s, payload / (blocks * model_constant("ragged_block_bytes_per_s")))
    return 2 * model_constant("one_shot_s") + model_constant("kernel_gap_s") + wire


def _ragged_device(payload: float, links: Links) -> Algorithm:
    """Price one kernel with a block on each multiprocessor.

    It writes by stores inside the domain, and by one-sided puts over the network.

    A slice has one block or several. If there are more slices than blocks, they run in rounds (RaggedAllToAllCopy).
    """
    n, sends = links.g * links.k, _all_to_all(payload, links)
    slices = n * max(1, links.slices)
    each = max(1, links.sms // slices)
    rounds = -(-slices // links.sms)
    channels_s = rounds * payload / slices / each / model_constant("device_block_bytes_per_s")
    if rounds > 2:
        channels_s = payload / links.sms / model_constant("device_busy_block_bytes_per_s")
    inside = payload * (links.g - 1) / n * links.hops / (links.inside_bytes_per_s * model_constant("ragged_share"))
    latency = model_constant("one_shot_s") + (sends.latency_s if links.k > 1 else 0.0)
    return Algorithm("device kernel", latency, inside, sends.outside_s, 0.0, channels_s=channels_s)


def _ragged_sends(payload: float, links: Links) -> Algorithm:
    """Price NCCL's sends, one for each slice; the host waits for the GPU twice to read their sizes."""
    sends = _all_to_all(payload, links)
    slices = links.g * links.k * max(1, links.slices)
    host = 2 * model_constant("host_wait_s") + slices * model_constant("ragged_slice_s")
    return sends._replace(latency_s=sends.latency_s + host)


def _permute(payload: float, links: Links) -> Algorithm:
    """Price one message to one peer, on as many channels as NCCL grants; between hosts it stays on its rail."""
    latency = _send_s(payload, links)
    if links.k > 1:
        return Algorithm("send", latency, 0.0, payload / links.outside_bytes_per_s, _handoff_s(links, outside=True))
    taper = links.taper if links.g > links.per_host else 1.0  # The slowest pair crosses hosts.
    share = links.fitted["p2p_share"] if links.inside == "nvlink" else 1.0
    wire = payload / (links.peer_bytes_per_s * taper * share)
    channels_s = _channels_s(payload, links) if links.inside == "nvlink" else 0.0
    return Algorithm("send", latency, wire, 0.0, _handoff_s(links, outside=False), channels_s=channels_s)


def _neighbours(payload: float, links: Links) -> Algorithm:
    """Price nccl-tests' send and receive: a ring of ranks, in which one flow leaves each host through one port.

    Beyond a leaf switch the flows are hashed to uplinks to the spine. The slowest flow shares an uplink with others.
    """
    if links.k == 1:
        return _permute(payload, links)
    shared = links.fitted["spine_flows"] if links.k > model_constant("leaf_hosts") else 1.0
    wire = payload * shared / links.port_bytes_per_s
    return Algorithm("neighbours", _send_s(payload, links), 0.0, wire, _handoff_s(links, outside=True))


def _first_channels(links: Links) -> int:
    return max(1, 1 << max(0, (nccl_constants()["p2p"]["channels"] // links.ranks).bit_length() - 1))


def _channels_s(payload: float, links: Links) -> float:
    """Return the seconds that the channels of one message need.

    In NCCL a message takes less time just above a size at which its channels double. Here the time never falls.
    """
    p2p, first = nccl_constants()["p2p"], _first_channels(links)
    full_first = min(payload / first, p2p["channel_bytes"])
    return max(full_first, payload / p2p["channels"]) / links.fitted["p2p_channel_bytes_per_s"]


def _broadcast(payload: float, links: Links) -> Algorithm:
    """Price a chain along the ring, in the protocol that NCCL's tuner expects to be fastest.

    The tuner does not model slots ("waiting for proper chunk modeling", tuning.cc), so its choice may not be the
    fastest.
    """
    protocols = [p for p in PROTOCOLS if p != "ll128" or links.ll128]
    return _chain(min(protocols, key=lambda p: _tuned_s(p, payload, links)), payload, links)


def _chain_s(protocol: str, payload: float, links: Links) -> tuple[float, float]:
    """Return a broadcast's seconds on the links (inside, outside); the payload crosses each link of the chain once."""
    share = nccl_constants()["protocol"]["ring_share"][protocol]
    rates = [links.inside_bytes_per_s if links.g > 1 else math.inf, links.g * links.outside_bytes_per_s]
    most = _ll_bytes_per_s(links) if protocol == "ll" else math.inf
    inside, outside = (payload / min(rate * share, most) for rate in rates)
    return inside, outside


def _tuned_s(protocol: str, payload: float, links: Links) -> float:
    """Return the tuner's estimate of a broadcast; over several domains it adds a network step's latency for every GPU.

    Over several domains, Simple has the latency of a tree's step. Inside a domain, the tuner adds the latency of only
    one step (tuning.cc).
    """
    constants, k = nccl_constants(), links.k
    row = constants["step_latency_s"][links.inside if k == 1 else links.outside]
    step = row["tree" if protocol == "simple" and k > 1 else "ring"][protocol]
    latency = constants["base_latency_s"]["ring"][protocol] + step * (1 if k == 1 else links.g * k)
    return latency + max(_chain_s(protocol, payload, links))


def _chain(protocol: str, payload: float, links: Links) -> Algorithm:
    """Price a broadcast as a chain: the first slot passes all GPUs one after the other, and the other slots follow.

    A network port starts to send a slot when the slot is completely written (net.cc, sendProxyProgress). So nothing
    hides the latency of the network, for which NCCL's latency of a tree's step is taken. Between GPUs, LL and LL128
    forward every line as it arrives, while Simple copies whole slots (prims_simple.h). Channels that share a port drift
    apart: the first to arrive has the port to itself, and its lead grows with every port. So the first slot moves at
    the rate of the whole port. Broadcasts keep NCCL's own latencies, because the sweeps to which latencies are fitted
    have no broadcast.
    """
    constants, k = nccl_constants(), links.k
    chain, slot_share = constants["chain"], constants["chain"]["data_share"][protocol]
    channels = _channels(links.ports) if k > 1 else catalog.kernels()["nccl_channels"][0]
    channels = max(1, min(channels, int(payload // chain["least_channel_bytes"])))
    slot = min(chain["slot_bytes"][protocol], payload / channels / slot_share)
    copy = slot / links.channel_bytes_per_s
    inside = table_step_s("ring", protocol, links)[0] + (copy if protocol == "simple" else 0.0)
    outside, port = table_step_s("tree", protocol, links)[1] if k > 1 else 0.0, slot / links.port_bytes_per_s
    outside += copy + port if protocol == "simple" else max(copy, port)
    fill = constants["base_latency_s"]["ring"][protocol] + (links.g * k - k) * inside + (k - 1) * outside
    rest = 1 - slot * slot_share / payload if payload else 0.0
    inside, outside = _chain_s(protocol, payload, links)
    return Algorithm(f"chain {protocol}", fill, rest * inside, rest * outside, 0.0)
