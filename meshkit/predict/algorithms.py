"""What each way to run a collective costs: latency, time on the wire, and what fills the pipeline.

A ring over k domains with g GPUs each moves `wire_bytes` through every GPU, and `wire_bytes / g` through every GPU's
share of the NICs; the slower of the two links sets the pace. A message moves in pieces: few large ones fill the
pipeline late, many small ones each pay the handoff t from one GPU to the next. With the best size of piece, what would
take w takes w + 2 sqrt(t w) (the least of pieces x t + w / pieces, added to w): that is why bus bandwidth still rises
at hundreds of MiB. NVLS has pieces of fixed sizes. Constants and their sources are in nccl.toml.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from meshkit.config import catalog
from meshkit.predict.nccl import (
    PROTOCOLS,
    RING_TURNS,
    Expected,
    Wires,
    by_hand,
    expected,
    nccl_constants,
    table_step_s,
    tree_medium,
)

CHOSEN = ("all-reduce", "all-gather", "reduce-scatter")  # of which NCCL's tuner chooses how
COPIED = ("all-gather", "all-to-all")  # which NCCL runs on copy engines too
RAGGED_WAYS = ("one-shot", "device kernel", "send")  # of a ragged all-to-all, which XLA runs
FORCED = (
    "ring", "tree", "nvls", "nvls tree", "pat", "collnet", "symmetric", "copy engine", "one-shot", "neighbours",
    "device kernel", "send",
)  # fmt: skip
_BLOCKS_A_MULTIPROCESSOR = 16  # of 128 threads, of which a multiprocessor holds 2,048


def wire_factor(collective: str, n: int) -> float:
    """Bytes on the wire per GPU over payload bytes: nccl-tests' bus bandwidth factors (doc/PERFORMANCE.md).

    Args:
        collective: HLO opcode without `-start`, or nccl-tests' `reduce`, `send`, `recv`; any other counts as a gather.
        n: GPUs of the group; 1 or less moves nothing.
    """
    if n <= 1:
        return 0.0
    if collective == "all-reduce":
        return 2 * (n - 1) / n
    if collective in ("collective-permute", "collective-broadcast", "reduce", "send", "recv"):
        return 1.0
    return (n - 1) / n


class Algorithm(NamedTuple):
    """One way to run a collective: its latency, its time on each link, and the handoff between two pieces of it."""

    name: str
    latency_s: float
    inside_s: float  # of the link inside a domain
    outside_s: float  # of the GPU's way out of it
    handoff_s: float
    steps_s: float = 0.0  # latency that the wire may hide
    overlap: float = 1.0  # how much: steps and wire add up as this norm; 1 hides nothing
    channels_s: float = 0.0  # that its channels need for the bytes, whatever the links could

    @property
    def wire_s(self) -> float:
        """Time on the wire: of what is slowest."""
        return max(self.inside_s, self.outside_s, self.channels_s)

    @property
    def time_s(self) -> float:
        """Seconds with the best size of piece."""
        wire = self.wire_s
        full = wire + 2 * math.sqrt(self.handoff_s * wire)
        if self.overlap == 1.0:
            return self.latency_s + self.steps_s + full
        return self.latency_s + (self.steps_s**self.overlap + full**self.overlap) ** (1 / self.overlap)


def fastest(collective: str, payload: float, wires: Wires) -> Algorithm:
    """What NCCL takes, without what the host adds: the fastest of all by its own tuner's reckoning.

    Args:
        collective: one of `nccl.RING_TURNS`.
        payload: bytes on one GPU: the operand; of an all-gather, the result.
        wires: the links under its group, of two GPUs or more.

    Raises:
        KeyError: a collective that `nccl.RING_TURNS` has not.
    """
    if collective == "collective-permute":
        return _permute(payload, wires)
    if collective == "all-to-all":
        return _all_to_all(payload, wires)
    if collective == "ragged-all-to-all":
        return _ragged_one_shot(payload, wires) if wires.k == 1 else _ragged_sends(payload, wires)
    if collective == "collective-broadcast":
        return _broadcast(payload, wires)
    return _taken(collective, expected(collective, wires), payload, wires)


def _taken(collective: str, choices: Sequence[Expected], payload: float, wires: Wires) -> Algorithm:
    """The tuner's pick; over hosts the fastest of the rings and trees that it takes for about as good."""
    estimates = [choice.seconds(payload) for choice in choices]
    least = min(estimates)
    pick = choices[estimates.index(least)]
    if wires.k == 1 or pick.name == "nvls tree":
        return _priced(collective, pick, payload, wires)
    best, best_s, most = None, math.inf, by_hand("tie") * least
    for choice, estimate in zip(choices, estimates, strict=True):
        if estimate <= most and choice.name != "nvls tree":
            found = _priced(collective, choice, payload, wires)
            if (seconds := found.time_s) < best_s:
                best, best_s = found, seconds
    assert best is not None  # the pick is among them
    return best


def options(collective: str, payload: float, wires: Wires) -> Iterator[Algorithm]:
    """What NCCL can choose from for a reduction or a gather."""
    return (_priced(collective, e, payload, wires) for e in expected(collective, wires))


def forced(collective: str, algorithm: str, payload: float, wires: Wires) -> Algorithm | None:
    """What a family of algorithms, with or without a protocol, costs; NCCL chooses the rest. None: not to be had.

    Args:
        collective: one of `nccl.RING_TURNS`.
        algorithm: one of `FORCED`; `ll`, `ll128` or `simple` may follow. With `nvls` a gather and a reduce-scatter are
            rings, an all-reduce over several domains is `nvls tree`.
        payload: bytes on one GPU, as `fastest` takes it.
        wires: the links under its group, of two GPUs or more.
    """
    if collective == "ragged-all-to-all":
        made = {"one-shot": _ragged_one_shot, "device kernel": _ragged_device, "send": _ragged_sends}.get(algorithm)
        return made(payload, wires) if made and (wires.k == 1 or algorithm != "one-shot") else None
    family, _, protocol = algorithm.rpartition(" ")
    if protocol not in PROTOCOLS:
        family, protocol = algorithm, ""
    if family == "neighbours":
        return _neighbours(payload, wires) if collective == "collective-permute" else None
    if family == "copy engine":
        return _copy_engine(collective, payload, wires) if collective in COPIED else None
    if collective not in CHOSEN:
        return None
    if family == "collnet":
        return _collnet(collective, payload, wires)
    if family == "symmetric":
        return _symmetric(collective, payload, wires)
    if family == "one-shot":
        return _one_shot(collective, payload, wires)
    if family == "nvls":
        if collective != "all-reduce":  # gathers through the switch reach the ring's rate (togethercomputer)
            family, protocol = "ring", protocol or "simple"
        elif wires.k > 1:
            family = "nvls tree"  # NCCL_ALGO=NVLS over hosts
    names = {f"{family} {protocol}"} if protocol else {family, *(f"{family} {p}" for p in PROTOCOLS)}
    found = [e for e in expected(collective, wires) if e.name in names]
    return _taken(collective, found, payload, wires) if found else None


def channels_of(name: str, collective: str, payload: float, wires: Wires) -> int:
    """Channels of an algorithm: as many blocks, each of which has a multiprocessor to itself.

    Rings and trees have what NCCL's log says, over hosts two for each port that they reach. A message to one peer
    doubles its channels while each would carry too much; over hosts it has two.

    Args:
        name: `Algorithm.name`.
        collective: HLO opcode, without `-start`; tells a permute's one peer from an all-to-all's many.
        payload: bytes on one GPU; it counts for messages to single peers inside a domain alone.
        wires: the links under its group.

    Returns:
        0 for copy engines, which run no kernel.
    """
    constants, most = nccl_constants(), nccl_constants()["p2p"]["channels"]
    inside, across = catalog.kernels()["nccl_channels"]
    if name.startswith("nvls"):
        return constants["nvls"]["channels"][wires.column]
    if name == "copy engine":
        return 0
    if collective == "ragged-all-to-all" and name == "one-shot":
        return -(-_ragged_blocks(wires) // _BLOCKS_A_MULTIPROCESSOR)
    if name == "device kernel":
        return wires.sms
    if name not in ("send", "neighbours"):
        return inside if wires.k == 1 else min(across, _channels(wires.ports))
    peers = 1 if collective == "collective-permute" else wires.g * wires.k - 1
    each = _first_channels(wires) if wires.k == 1 else constants["net"]["channels_per_gpu"]
    if wires.k == 1:
        while each < most and payload / peers / each > constants["p2p"]["channel_bytes"]:
            each *= 2
    return min(most, each * peers)


def _priced(collective: str, choice: Expected, payload: float, wires: Wires) -> Algorithm:
    """The cost of a choice."""
    if choice.name == "nvls":
        return _nvls(payload, wires)
    if choice.name == "nvls tree":
        return _nvls_tree(payload, wires)
    if choice.name == "pat":
        return _pat(choice, payload, wires)
    family, _, protocol = choice.name.partition(" ")
    return _tree(protocol, payload, wires) if family == "tree" else _ring(collective, protocol, payload, wires)


def _step_s(algorithm: str, protocol: str, wires: Wires) -> tuple[float, float]:
    """Latency of a step inside a domain, and out of it: measured where it was, a tree's by NCCL's relation."""
    rows, (inside, outside) = nccl_constants()["step_latency_s"], table_step_s(algorithm, protocol, wires)
    if wires.inside == "nvlink":
        row = rows["nvlink"]
        inside = wires.fitted[f"{protocol}_step_s"] * row[algorithm][protocol] / row["ring"][protocol]
    return inside, outside


def _first_s(protocol: str, wires: Wires) -> float:
    """What an operation over hosts costs once, beside the steps: a proxy on the CPU takes up its first piece."""
    return wires.fitted[f"net_{protocol}_s"] if wires.k > 1 and wires.outside == "net" and protocol != "simple" else 0.0


def _base_s(protocol: str, wires: Wires) -> float:
    """What an operation costs before and after its steps."""
    base = nccl_constants()["base_latency_s"]["ring"]["simple"] if protocol == "simple" else 0.0
    return wires.fitted["kernel_s"] + base


def _share(protocol: str, wires: Wires) -> float:
    """Of a link's usable rate inside a domain."""
    if wires.inside == "nvlink" and protocol != "simple":
        return wires.fitted[f"{protocol}_share"]
    return nccl_constants()["protocol"]["ring_share"][protocol]


def _handoff_s(wires: Wires, *, outside: bool) -> float:
    """From one GPU to the next: NCCL's latency of an LL step, the shortest there is."""
    return nccl_constants()["step_latency_s"][wires.outside if outside else wires.inside]["ring"]["ll"]


def _ring(collective: str, protocol: str, payload: float, wires: Wires) -> Algorithm:
    """Every GPU passes on wire bytes; of g rings over k domains, each crosses on its own GPU's NIC."""
    g, k, n = wires.g, wires.k, wires.g * wires.k
    inside_step, outside_step = _step_s("ring", protocol, wires)
    if g == 1 and k > 1 and wires.outside == "net":
        outside_step = max(outside_step, _step_s("tree", protocol, wires)[1])  # nothing hides it
    steps, crossing = RING_TURNS[collective] * (n - 1), RING_TURNS[collective] * (k - 1)
    hops = (steps - crossing) * inside_step + crossing * outside_step
    wire = payload * wire_factor(collective, n)
    turnaround = by_hand("ll_turnaround") if protocol == "ll" else wires.fitted["turnaround"]
    inside = wire * (1 + turnaround / steps) / (wires.inside_bytes_per_s * _share(protocol, wires)) if g > 1 else 0.0
    share = nccl_constants()["protocol"]["ring_share"][protocol]
    outside = wire / g / (wires.outside_bytes_per_s * share) * wires.spine[0]
    if protocol == "ll" and k > 1:
        outside = max(outside, wire / _ll_bytes_per_s(wires))
    return Algorithm(
        f"ring {protocol}",
        _base_s(protocol, wires) + _first_s(protocol, wires),
        inside,
        outside,
        _handoff_s(wires, outside=outside > inside),
        steps_s=hops,
        overlap=wires.fitted.get("overlap", 1.0),
    )


def _ll_bytes_per_s(wires: Wires) -> float:
    """Bus bandwidth that LL does not exceed, as NCCL has it."""
    if wires.inside != "nvlink" and wires.k == 1:
        return math.inf
    return nccl_constants()["tuner"][wires.column]["ll"][min(wires.k, 3) - 1]


def _channels(ports: int) -> int:
    """Channels over the network of a group with so many ports in a domain."""
    net = nccl_constants()["net"]
    return min(net["max_channels"], net["channels_per_gpu"] * ports)


def _tree(protocol: str, payload: float, wires: Wires) -> Algorithm:
    """A chain inside each domain, a double binary tree over them: fewer steps than a ring, links used half."""
    constants, g, k = nccl_constants(), wires.g, wires.k
    inside_step, outside_step = _step_s("tree", protocol, wires)
    latency = _base_s(protocol, wires) + 2 * ((g - 1) * inside_step + math.log2(k) * outside_step)
    share = constants["protocol"]["tree_share" if k == 1 else "tree_share_net"][protocol]
    inside = 2 * payload / (wires.inside_bytes_per_s * share) if g > 1 else 0.0
    # Each NIC carries its part up and down once; over two domains half of that would do, but NCCL does not reach it.
    outside = 2 * payload / (g * wires.outside_bytes_per_s * share)
    if k > 1 and wires.inside == "nvlink":
        column, place = constants["tuner"][wires.column], min(k, 3) - 1
        cap = column["tree_ll128_channel" if protocol == "ll128" else "tree_channel"][place]
        outside = max(outside, 2 * payload / (_channels(g) * cap))
    if k > 2:
        outside /= wires.fitted["tree_net_share"]
    if protocol == "ll":
        inside = max(inside, 2 * payload / _ll_bytes_per_s(wires))
    handoff, medium = _handoff_s(wires, outside=outside > inside), tree_medium(protocol, payload)
    return Algorithm(f"tree {protocol}", latency, inside / medium, outside * wires.spine[0] / medium, handoff)


def _pat(choice: Expected, payload: float, wires: Wires) -> Algorithm:
    """A binary tree of every GPU's part, one GPU a host: NCCL's latency, at the rate of a port."""
    wire = payload * wire_factor("all-gather", wires.k) / wires.outside_bytes_per_s * wires.spine[1]
    base = wires.fitted["kernel_s"] + _first_s("ll", wires) - nccl_constants()["base_latency_s"]["pat"]["simple"]
    return Algorithm("pat", choice.latency_s + base, 0.0, wire, _handoff_s(wires, outside=True))


def _nvls_bytes_per_s(wires: Wires) -> float:
    """Payload through the NVLink switch, which adds and multicasts: one GPU's rate, whatever the group."""
    share = nccl_constants()["tuner"][wires.column]["nvls_share"]
    return wires.inside_bytes_per_s * share * wires.fitted["nvls_rate"]


def _piece_bytes(payload: float, wires: Wires, halved: list[list[int]]) -> float:
    """What NVLS works on at a time: a piece for each head on each channel, smaller ones for smaller messages."""
    nvls = nccl_constants()["nvls"]
    operations = nvls["channels"][wires.column] * min(wires.g, nvls["max_heads"])
    chunk = nvls["chunk_bytes"]
    for pieces, smaller in halved:
        if payload < pieces * operations * chunk:
            chunk = min(chunk, smaller)
    return min(payload, operations * chunk)


def _nvls(payload: float, wires: Wires) -> Algorithm:
    """The switch adds and multicasts; the first pieces in and the last out overlap with nothing."""
    rate = _nvls_bytes_per_s(wires)
    piece = _piece_bytes(payload, wires, nccl_constants()["nvls"]["halved_below"])
    fill = wires.fitted["nvls_pieces"] * piece / rate * (1 - piece / payload) if payload else 0.0
    return Algorithm("nvls", wires.fitted["kernel_s"] + wires.fitted["nvls_s"] + fill, payload / rate, 0.0, 0.0)


def _nvls_tree(payload: float, wires: Wires) -> Algorithm:
    """NVLS inside each domain, a double binary tree over them, one NIC for the part of each GPU."""
    constants, g, k = nccl_constants(), wires.g, wires.k
    level = constants["step_latency_s"]["net"]["nvls"] + wires.outside_extra_s[1]
    latency = wires.fitted["kernel_s"] + wires.fitted["nvls_s"] + 2 * math.log2(k) * level
    rate = _nvls_bytes_per_s(wires) * wires.fitted["nvls_tree_share"]
    piece = _piece_bytes(payload, wires, constants["nvls"]["nvls_tree_halved_below"])
    fill = wires.fitted["nvls_pieces"] * piece / rate * (1 - piece / payload) if payload else 0.0
    outside = payload * min(2.0, k / 2) / (g * wires.outside_bytes_per_s)  # both ways at once over two domains
    cap = _channels(wires.ports) * constants["tuner"][wires.column]["nvls_tree_channel"][min(k, 3) - 1]
    outside = max(outside * wires.spine[0], payload * wire_factor("all-reduce", g * k) / cap if g <= 8 else 0.0)
    handoff = constants["step_latency_s"]["net"]["ring"]["ll"] if outside > payload / rate else 0.0
    return Algorithm("nvls tree", latency + fill, payload / rate, outside, handoff)


def _collnet(collective: str, payload: float, wires: Wires) -> Algorithm | None:
    """CollNetDirect: the network's switches add, every port carries its part once."""
    if wires.k == 1:
        return None
    constants, g = nccl_constants(), wires.g
    rows = constants["step_latency_s"]
    share = constants["protocol"]["collnet_share"] if wires.column in ("hopper", "blackwell") else 1.0
    hops = min(1, g - 1) * rows[wires.inside]["collnet"] + (g - 1) * rows["collnet_gpu"]
    latency = wires.fitted["kernel_s"] + 2 * hops + rows["net"]["collnet"] + wires.outside_extra_s[1]
    part = 1.0 if collective == "all-reduce" else wire_factor(collective, wires.k)
    outside = payload * part / (g * wires.outside_bytes_per_s * share)
    inside = payload * wire_factor(collective, g) / wires.inside_bytes_per_s
    return Algorithm("collnet", latency, inside, outside, _handoff_s(wires, outside=True))


def _symmetric(collective: str, payload: float, wires: Wires) -> Algorithm | None:
    """NCCL's symmetric kernels: GPUs read each other's memory directly, between two barriers; no piece is handed on."""
    if wires.k > 1 or wires.inside != "nvlink":
        return None
    rate = wires.inside_bytes_per_s * wires.fitted["symmetric_share"]
    passes = 1 + 1 / wires.g if collective == "all-reduce" and wires.nvls else wire_factor(collective, wires.g)
    latency = wires.fitted["kernel_s"] + 2 * by_hand("symmetric_barrier_s")
    return Algorithm("symmetric", latency, payload * passes / rate, 0.0, 0.0)


def _copy_engine(collective: str, payload: float, wires: Wires) -> Algorithm | None:
    """NCCL's collectives on copy engines: a batch of copies, one to each GPU's memory, between two barriers.

    Every copy of a batch costs its start, one after the other. A barrier is a flag in everybody's memory, by as many
    copies, or by one where the switch multicasts (ce_coll.cc). No multiprocessor takes part.
    """
    if wires.k > 1 or wires.inside != "nvlink" or wires.nccl < (2, 28):
        return None
    start = by_hand("copy_s" if wires.x86 else "copy_grace_s")
    copies = wires.g + 2 * (1 if wires.nvls else wires.g - 1)
    rate = wires.inside_bytes_per_s * by_hand("copy_share")
    return Algorithm("copy engine", copies * start, payload * wire_factor(collective, wires.g) / rate, 0.0, 0.0)


def _one_shot(collective: str, payload: float, wires: Wires) -> Algorithm | None:
    """XLA's own all-reduce: every GPU reads the payload of all others."""
    if wires.k > 1 or collective != "all-reduce":
        return None
    wire = payload * (wires.g - 1) / wires.inside_bytes_per_s
    return Algorithm("one-shot", by_hand("one_shot_s"), wire, 0.0, 0.0)


def _send_s(payload: float, wires: Wires) -> float:
    """Latency of sends of so many bytes to each peer: LL up to a size, and Simple."""
    p2p, f = nccl_constants()["p2p"], wires.fitted
    latency = f["kernel_s"] + f["p2p_s"]
    if payload > p2p["ll_bytes"]:
        latency += f["p2p_simple_s"]
    else:
        share = nccl_constants()["protocol"]["ring_share"]["ll"]
        latency += payload / (share * f["p2p_channel_bytes_per_s"])  # one channel
    if wires.k == 1:
        return latency + _step_s("ring", "ll", wires)[0]
    return latency + _first_s("ll", wires) + _step_s("ring", "ll", wires)[1]


def _all_to_all(payload: float, wires: Wires) -> Algorithm:
    """Every pair at once: what stays in the domain over NVLink, the rest through each GPU's own NIC."""
    constants, g, k, n = nccl_constants(), wires.g, wires.k, wires.g * wires.k
    part = payload / n
    rounds = -(-n // constants["p2p"]["peers_per_round"])
    step = _step_s("ring", "ll", wires)[k > 1]
    latency = _send_s(part, wires) + (rounds - 1) * step
    share = wires.fitted["p2p_share"] if wires.inside == "nvlink" else 1.0
    rate = wires.inside_bytes_per_s * share
    inside = part * (g - 1 + wires.fitted["p2p_turnaround"]) * wires.hops / rate if g > 1 else 0.0
    beyond_host = part * max(0, g - wires.per_host) / (rate * wires.taper)
    outside = part * (n - g) / wires.outside_bytes_per_s * wires.spine[1]
    inside = max(inside, beyond_host)
    return Algorithm("send", latency, inside, outside, _handoff_s(wires, outside=outside > inside))


def _ragged_blocks(wires: Wires) -> int:
    """Blocks that XLA's one-shot kernel runs at once: one for each slice to each member (ragged_all_to_all.cc)."""
    most = wires.sms * _BLOCKS_A_MULTIPROCESSOR
    return min(wires.g * wires.k * wires.slices, most) if wires.slices else most


def _ragged_one_shot(payload: float, wires: Wires) -> Algorithm:
    """XLA's kernel stores every row where its receiver has it, the GPU's own rows too, between two barriers.

    Each thread loads 8 bytes and stores them before it loads the next, so that a block has one rate, whatever the link.
    """
    rate = wires.inside_bytes_per_s * by_hand("ragged_share")
    inside = payload * (wires.g - 1) / wires.g * wires.hops / rate
    latency = 2 * by_hand("one_shot_s") + by_hand("kernel_gap_s")
    channels_s = payload / (_ragged_blocks(wires) * by_hand("ragged_block_bytes_per_s"))
    return Algorithm("one-shot", latency, inside, 0.0, 0.0, channels_s=channels_s)


def ragged_copy_s(payload: float, slices: int, sms: int, memory_bytes_per_s: float) -> float:
    """Seconds in which a GPU copies its own rows by the one-shot kernel: a ragged all-to-all over groups of one.

    Args:
        payload: bytes that it copies.
        slices: that the operation lists; 0: not known.
        sms: multiprocessors of the GPU.
        memory_bytes_per_s: that its memory sustains; a copy reads and writes.
    """
    most = sms * _BLOCKS_A_MULTIPROCESSOR
    blocks = min(slices, most) if slices else most
    wire = max(2 * payload / memory_bytes_per_s, payload / (blocks * by_hand("ragged_block_bytes_per_s")))
    return 2 * by_hand("one_shot_s") + by_hand("kernel_gap_s") + wire


def _ragged_device(payload: float, wires: Wires) -> Algorithm:
    """One kernel with a block on each multiprocessor: stores inside the domain, puts over the network.

    A slice has one block or several, so that slices beyond the blocks come in rounds (RaggedAllToAllCopy).
    """
    n, sends = wires.g * wires.k, _all_to_all(payload, wires)
    slices = n * max(1, wires.slices)
    each = max(1, wires.sms // slices)
    rounds = -(-slices // wires.sms)
    channels_s = rounds * payload / slices / each / by_hand("device_block_bytes_per_s")
    if rounds > 2:
        channels_s = payload / wires.sms / by_hand("device_busy_block_bytes_per_s")
    inside = payload * (wires.g - 1) / n * wires.hops / (wires.inside_bytes_per_s * by_hand("ragged_share"))
    latency = by_hand("one_shot_s") + (sends.latency_s if wires.k > 1 else 0.0)
    return Algorithm("device kernel", latency, inside, sends.outside_s, 0.0, channels_s=channels_s)


def _ragged_sends(payload: float, wires: Wires) -> Algorithm:
    """NCCL's sends, one for each slice, after the host has read their sizes: it waits for the GPU twice."""
    sends = _all_to_all(payload, wires)
    host = 2 * by_hand("host_wait_s") + wires.g * wires.k * max(1, wires.slices) * by_hand("ragged_slice_s")
    return sends._replace(latency_s=sends.latency_s + host)


def _permute(payload: float, wires: Wires) -> Algorithm:
    """One message to one peer; inside a domain on as many channels as NCCL grants it, between hosts on its own rail."""
    latency = _send_s(payload, wires)
    if wires.k > 1:
        return Algorithm("send", latency, 0.0, payload / wires.outside_bytes_per_s, _handoff_s(wires, outside=True))
    taper = wires.taper if wires.g > wires.per_host else 1.0  # the slowest pair crosses hosts
    share = wires.fitted["p2p_share"] if wires.inside == "nvlink" else 1.0
    wire = payload / (wires.peer_bytes_per_s * taper * share)
    channels_s = _channels_s(payload, wires) if wires.inside == "nvlink" else 0.0
    return Algorithm("send", latency, wire, 0.0, _handoff_s(wires, outside=False), channels_s=channels_s)


def _neighbours(payload: float, wires: Wires) -> Algorithm:
    """nccl-tests' send and receive: a ring of ranks, of which one flow leaves each host, through one port.

    Beyond a leaf such flows are hashed to uplinks of the spine; the slowest shares one with others.
    """
    if wires.k == 1:
        return _permute(payload, wires)
    shared = wires.fitted["spine_flows"] if wires.k > by_hand("leaf_hosts") else 1.0
    wire = payload * shared / wires.port_bytes_per_s
    return Algorithm("neighbours", _send_s(payload, wires), 0.0, wire, _handoff_s(wires, outside=True))


def _first_channels(wires: Wires) -> int:
    """Channels that a message to one peer of a domain starts on."""
    return max(1, 1 << max(0, (nccl_constants()["p2p"]["channels"] // wires.ranks).bit_length() - 1))


def _channels_s(payload: float, wires: Wires) -> float:
    """Seconds that the channels of one message need, as if they doubled without the dips that doubling makes."""
    p2p, first = nccl_constants()["p2p"], _first_channels(wires)
    full_first = min(payload / first, p2p["channel_bytes"])
    return max(full_first, payload / p2p["channels"]) / wires.fitted["p2p_channel_bytes_per_s"]


def _broadcast(payload: float, wires: Wires) -> Algorithm:
    """A chain along the ring, in the protocol that NCCL's tuner expects to be fastest.

    The tuner knows no slots ("waiting for proper chunk modeling", tuning.cc), so its pick need not be the fastest.
    """
    protocols = [p for p in PROTOCOLS if p != "ll128" or wires.ll128]
    return _chain(min(protocols, key=lambda p: _tuned_s(p, payload, wires)), payload, wires)


def _chain_s(protocol: str, payload: float, wires: Wires) -> tuple[float, float]:
    """Seconds of a broadcast's payload on the link inside a domain and out of it: a chain never turns around."""
    share = nccl_constants()["protocol"]["ring_share"][protocol]
    rates = [wires.inside_bytes_per_s if wires.g > 1 else math.inf, wires.g * wires.outside_bytes_per_s]
    most = _ll_bytes_per_s(wires) if protocol == "ll" else math.inf
    inside, outside = (payload / min(rate * share, most) for rate in rates)
    return inside, outside


def _tuned_s(protocol: str, payload: float, wires: Wires) -> float:
    """What the tuner expects of a broadcast: over hosts the latency of a network step for every GPU, Simple the tree's.

    Inside a host, where all channels run the same ring, one step (tuning.cc, `sameChannels`).
    """
    constants, k = nccl_constants(), wires.k
    row = constants["step_latency_s"][wires.inside if k == 1 else wires.outside]
    step = row["tree" if protocol == "simple" and k > 1 else "ring"][protocol]
    latency = constants["base_latency_s"]["ring"][protocol] + step * (1 if k == 1 else wires.g * k)
    return latency + max(_chain_s(protocol, payload, wires))


def _chain(protocol: str, payload: float, wires: Wires) -> Algorithm:
    """A broadcast: the first slot passes all GPUs, one after the other, and the rest follows it.

    A network port starts on a slot when all of it is written (net.cc, sendProxyProgress), and the network's latency is
    hidden by nothing, as in a tree. Between GPUs LL and LL128 pass on every line as it comes, while Simple copies a
    slot whole (prims_simple.h). Channels that share a port do not stay side by side: whichever comes first has the port
    to itself, and is ahead by more at every port, so the first slot travels at the rate of the whole port. No sweep
    holds broadcasts: their latencies are NCCL's own.
    """
    constants, k = nccl_constants(), wires.k
    chain, slot_share = constants["chain"], constants["chain"]["data_share"][protocol]
    channels = _channels(wires.ports) if k > 1 else catalog.kernels()["nccl_channels"][0]
    channels = max(1, min(channels, int(payload // chain["least_channel_bytes"])))
    slot = min(chain["slot_bytes"][protocol], payload / channels / slot_share)
    copy = slot / wires.channel_bytes_per_s
    inside = table_step_s("ring", protocol, wires)[0] + (copy if protocol == "simple" else 0.0)
    outside, port = table_step_s("tree", protocol, wires)[1] if k > 1 else 0.0, slot / wires.port_bytes_per_s
    outside += copy + port if protocol == "simple" else max(copy, port)
    fill = constants["base_latency_s"]["ring"][protocol] + (wires.g * k - k) * inside + (k - 1) * outside
    rest = 1 - slot * slot_share / payload if payload else 0.0
    inside, outside = _chain_s(protocol, payload, wires)
    return Algorithm(f"chain {protocol}", fill, rest * inside, rest * outside, 0.0)
