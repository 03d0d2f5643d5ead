"""Seconds of one collective on one cluster: bandwidth and latency per link. Layer 5; imports no jax.

A ring over k domains with g GPUs each moves `wire_bytes` through every GPU, and `wire_bytes / g` through every GPU's
share of the NICs; the slower of the two links sets the pace. To that come NCCL's own latencies per operation and per
step, and the choice NCCL makes between protocols (low latency LL, full bandwidth Simple) and algorithms (ring, tree).
"""

from __future__ import annotations

import functools
import math
import tomllib
from importlib import resources
from typing import Any

from meshkit.errors import ConfigError
from meshkit.spec.cluster import Cluster


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
    collective: str, *, payload_bytes: float, gpus_per_domain: int, domains: int = 1, cluster: Cluster
) -> float:
    """Seconds of one collective, alone on the network.

    Args:
        collective: HLO opcode, without `-start`.
        payload_bytes: on one GPU: the operand; of an all-gather, the result.
        gpus_per_domain: members of the group inside one NVLink domain.
        domains: NVLink domains that the group spans.
        cluster: its links, with what they are measured to achieve.

    Returns:
        Seconds from the last arrival of a member to the end.

    Raises:
        ConfigError: an unknown collective, or a group that the cluster cannot hold.
    """
    n = gpus_per_domain * domains
    if collective not in _STEPS:
        raise ConfigError(f"unknown collective '{collective}'.", hint=", ".join(sorted(_STEPS)))
    if payload_bytes < 0 or gpus_per_domain < 1 or domains < 1:
        raise ConfigError(
            f"a {collective} of {payload_bytes} bytes over {domains} domains x {gpus_per_domain} GPUs makes no sense."
        )
    if n == 1:
        return 0.0
    constants = nccl_constants()
    options = [
        _protocol_time(collective, name, payload_bytes, gpus_per_domain, domains, cluster, constants)
        for name in _protocols(collective)
    ]
    return constants["launch"]["latency_s"] + min(options)


@functools.cache
def nccl_constants() -> dict[str, Any]:
    """The tables of nccl.toml."""
    return tomllib.loads(resources.files("meshkit.timeline").joinpath("nccl.toml").read_text())


# Ring steps of a group of n, as multiples of (n - 1).
_STEPS = {
    "all-reduce": 2,
    "all-gather": 1,
    "reduce-scatter": 1,
    "all-to-all": 1,
    "ragged-all-to-all": 1,
    "collective-broadcast": 1,
    "collective-permute": 0,
}


def _protocols(collective: str) -> tuple[str, ...]:
    return (
        ("ring_ll", "ring_simple", "tree_ll", "tree_simple")
        if collective == "all-reduce"
        else ("ring_ll", "ring_simple")
    )


def _protocol_time(
    collective: str, protocol: str, payload: float, g: int, k: int, cluster: Cluster, constants: dict[str, Any]
) -> float:
    n = g * k
    intra = _step_latency_s("nvlink", protocol, cluster)
    inter = _step_latency_s("infiniband", protocol, cluster) if k > 1 else 0.0
    if collective == "collective-permute":
        latency = inter if k > 1 else intra
    elif protocol.startswith("tree"):
        latency = 2 * ((g - 1) * intra + math.log2(k) * inter)
    else:
        crossing = _STEPS[collective] * (k - 1)
        latency = (_STEPS[collective] * (n - 1) - crossing) * intra + crossing * inter
    return constants["base_latency_s"][protocol] + latency + _transfer_s(collective, protocol, payload, g, k, cluster)


def _transfer_s(collective: str, protocol: str, payload: float, g: int, k: int, cluster: Cluster) -> float:
    """Seconds on the slower link."""
    wire = payload * wire_factor(collective, g * k)
    nvlink = _bandwidth("nvlink", protocol, cluster)
    if k == 1:
        return wire / nvlink
    infiniband = _bandwidth("infiniband", protocol, cluster)
    if collective in ("all-to-all", "ragged-all-to-all"):
        outside = payload * (g * k - g) / (g * k)  # to GPUs of other domains, each through its own NIC
        return max((wire - outside) / nvlink, outside / infiniband)
    if collective == "collective-permute":
        return wire / infiniband
    return max(wire / nvlink if g > 1 else 0.0, wire / g / infiniband)


def _step_latency_s(link: str, protocol: str, cluster: Cluster) -> float:
    found = cluster.link(link)
    return found.latency_small_s if protocol.endswith("_ll") else found.latency_s


def _bandwidth(link: str, protocol: str, cluster: Cluster) -> float:
    """Bytes per second and direction of one GPU on a link, under a protocol."""
    constants = nccl_constants()
    found = cluster.link(link)
    bandwidth = found.bytes_per_s * found.achieved * constants["protocol_bandwidth"][protocol]
    if protocol.endswith("_ll") and link == "nvlink" and cluster.gpu.nvlink_generation:
        caps = constants["limits"]["ll_bytes_per_s_by_generation"]
        bandwidth = min(bandwidth, caps[str(cluster.gpu.nvlink_generation)])
    return bandwidth
