"""Which algorithm and protocol NCCL takes for a message: its own tuner's estimate, with its constants of that version.

The tuner knows a latency and a bandwidth for each, from tables and from the channels that its search found, and takes
the least sum. What it picks need not be the fastest: what a pick costs is in algorithms.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshkit.predict.links import Wires, nccl_constants, version_of

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


@dataclass(frozen=True)
class Expected:
    """What the tuner expects of one algorithm in one protocol."""

    name: str  # `ring ll`, `tree simple`, `nvls`, `nvls tree`, `pat`
    latency_s: float
    bytes_per_s: float  # of payload
    medium: str = ""  # protocol whose dip at medium sizes counts: trees
    plateau: tuple[float, float] = (1.0, math.inf)  # factor on the latency, from so many bytes

    def seconds(self, payload: float) -> float:
        """The tuner's estimate."""
        rate = self.bytes_per_s * (tree_medium(self.medium, payload) if self.medium else 1.0)
        return self.latency_s * (self.plateau[0] if payload >= self.plateau[1] else 1.0) + payload / rate


def expected(collective: str, wires: Wires) -> tuple[Expected, ...]:
    """What the tuner expects of everything that it may choose for a reduction or a gather."""
    wires = wires.taken_for or wires
    if collective not in wires.known:
        wires.known[collective] = tuple(found for found in _expected(collective, wires) if found.bytes_per_s > 0)
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


def tree_medium(protocol: str, payload: float) -> float:
    """Share of its bandwidth that a tree reaches on messages of medium size: NCCL's table, without its jumps."""
    table = nccl_constants()["protocol"]["tree_medium"][protocol]
    where = math.log2(max(payload, 64.0) / 64)
    low = int(where)
    if low >= len(table):
        return 1.0
    high = table[low + 1] if low + 1 < len(table) else 1.0
    return table[low] + (where - low) * (high - table[low])


def table_step_s(algorithm: str, protocol: str, wires: Wires) -> tuple[float, float]:
    """NCCL's own latency of a step inside a domain, and out of it."""
    rows = nccl_constants()["step_latency_s"]
    simple = protocol == "simple"
    inside = rows[wires.inside][algorithm][protocol] + wires.inside_extra_s[simple]
    return inside, rows[wires.outside][algorithm][protocol] + wires.outside_extra_s[simple]


def _floor(speeds: list[float], rate: float) -> float:
    """The largest speed of NCCL's grid that a rate allows; the rate itself below the grid."""
    return next((speed for speed in speeds if speed <= rate), rate)


def _channels(wires: Wires, column: Mapping[str, Any]) -> tuple[int, float]:
    """Channels of a ring as NCCL's search finds them, and their bandwidth together."""
    total = wires.inside_bytes_per_s * wires.busy
    speeds = column["speeds"]
    speed = max(speeds, key=lambda s: (int(total / s) * s, s)) if total >= speeds[-1] else total
    number = max(1, int(total / speed))
    if wires.k > 1:
        inside = number * speed if wires.g > 1 else math.inf
        return wires.ports, min(inside, wires.ports * min(wires.line_bytes_per_s, total if wires.g > 1 else math.inf))
    doubled = speed >= 25e9 and (wires.column in ("volta", "ampere") or speed >= 50e9 or number <= 4)
    return number * (2 if doubled else 1), number * speed


def _expected(collective: str, wires: Wires):
    """Every algorithm and protocol."""
    constants, g, k, n = nccl_constants(), wires.g, wires.k, wires.g * wires.k
    version = version_constants(wires.nccl)
    column, place = version[wires.column], min(k, 3) - 1
    channels, total = _channels(wires, column)
    steps = RING_TURNS[collective] * (n - 1)
    crossing = RING_TURNS[collective] * (k - 1)
    rows, shares = constants["step_latency_s"], constants["protocol"]
    for protocol in PROTOCOLS:
        if protocol == "ll128" and not wires.ll128:
            continue
        inside, outside = table_step_s("ring", protocol, wires)
        if k > 1 and wires.outside == "net":
            inside = max(inside, rows["net"]["post"][protocol])
        if g == 1 and k > 1:
            outside = table_step_s("tree", protocol, wires)[1]  # nothing hides it (tuning.cc, one GPU a node)
        rate = total * shares["ring_share"][protocol]
        if protocol == "ll":
            rate = min(total * version["ring_ll_share"], column["ll"][place])
        elif protocol == "ll128":
            rate = min(rate, channels * column["ring_ll128_channel"][place])
        latency = constants["base_latency_s"]["ring"][protocol] + (steps - crossing) * inside + crossing * outside
        plateau = (1.0, math.inf)
        if collective == "all-reduce" and protocol == "simple" and k > 1:
            factor = shares["plateau_before_ampere" if wires.column == "volta" else "plateau"]
            plateau = factor, shares["plateau_channel_bytes"] * channels * n
        yield Expected(f"ring {protocol}", latency, rate * n / steps, plateau=plateau)
        if collective != "all-reduce":
            continue
        inside, outside = table_step_s("tree", protocol, wires)
        latency = constants["base_latency_s"]["tree"][protocol] + 2 * ((g - 1) * inside + int(math.log2(k)) * outside)
        rate = min(total * 0.92, channels * column["tree_channel"][place])
        if protocol == "ll":
            rate = min(rate / 3.8, column["ll"][place])
        elif protocol == "ll128":
            rate = min(rate * (7 / 9 if k == 1 else 120 / 128), channels * column["tree_ll128_channel"][place])
        yield Expected(f"tree {protocol}", latency, rate / 2, medium=protocol)
    if collective == "all-reduce":
        yield from _expected_nvls(wires, version)
    elif g == 1 and version["pat"]:
        # With registered buffers NVLS gathers too; its rate is the ring's (togethercomputer: 661 and 655 GB/s).
        step = rows["net"]["tree"]["simple"] + 2 * wires.outside_extra_s[1]
        latency = constants["base_latency_s"]["pat"]["simple"] + int(math.log2(k)) * step / 3.5 + n * rows["pat_gpu"]
        yield Expected("pat", latency, total * shares["pat_share"])


def _expected_nvls(wires: Wires, version: Mapping[str, Any]):
    """NVLS inside a domain, NVLSTree over several."""
    constants, k, n = nccl_constants(), wires.k, wires.g * wires.k
    column, heads = version[wires.column], min(wires.g, constants["nvls"]["max_heads"])
    if not wires.nvls or heads < 2 or column["nvls_share"] == 0.0:
        return
    inside = _floor(column["speeds"], wires.inside_bytes_per_s * wires.busy / heads)
    outside = wires.line_bytes_per_s * wires.ports / heads if k > 1 else math.inf
    latency = version["nvls_s"] or constants["step_latency_s"]["nvlink"]["nvls"]
    latency += 2 * int(math.log2(k)) * (version["nvls_tree_step_s"] + 2 * wires.outside_extra_s[1])
    if version["nvls_ratio"]:
        rate = heads * min(inside, outside if k <= 2 else outside / 2) * 5 / 6
    else:
        rate = 2 * inside * column["nvls_share"] * (heads - 1) / heads
        if k > 1:
            rate = min(rate, outside * (2 if k == 2 else 1), column["nvls_tree_channel"][min(k, 3) - 1])
        rate *= heads * n / (2 * (n - 1))
    dips = k > 1 and wires.column == "blackwell" and wires.x86 and wires.nccl >= (2, 29)
    yield Expected("nvls" if k == 1 else "nvls tree", latency, rate, medium="simple" if dips else "")
