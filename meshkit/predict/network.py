"""Seconds of one collective on one cluster, from NCCL's own model or from a calibration.

A ring over k domains with g GPUs each moves `wire_bytes` through every GPU, and `wire_bytes / g` through every GPU's
share of the NICs; the slower of the two links sets the pace. Latencies, protocols and the other algorithms: nccl.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshkit.config import calibration
from meshkit.config.cluster import Cluster
from meshkit.errors import ConfigError
from meshkit.predict.nccl import ROUNDS, Wires, best_option, busy_share, nccl_constants, wire_factor

__all__ = ["checkpoint_time_s", "collective_time_s", "nccl_constants", "wire_factor"]


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
        concurrent_groups: such groups in a domain at the same time. Unless told, each GPU is in one, as in an SPMD
            program, and has its own NVLinks and its share of the host's NICs; idle GPUs leave theirs to the others.
        nvls: whether NCCL may add in the NVLink switch; False as with `NCCL_NVLS_ENABLE=0`.
        fitted: replaces `[fitted]` of nccl.toml (for refits).

    Raises:
        ConfigError: an unknown collective, a group that makes no sense, or a calibration that cannot be read.
    """
    n = gpus_per_domain * domains
    if collective not in ROUNDS:
        raise ConfigError(f"unknown collective '{collective}'.", hint=", ".join(sorted(ROUNDS)))
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
    numbers: Mapping[str, float] = fitted or nccl_constants()["fitted"]
    wires = _wires(cluster, gpus_per_domain, domains, concurrent_groups, nvls)
    return numbers["launch_s"] + best_option(collective, payload_bytes, gpus_per_domain, domains, wires, numbers).time_s


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


# A Cluster holds mappings and has no hash; its identity, with the object kept alive beside the value, serves as one.
_known_wires: dict[tuple[int, int, int, int | None, bool], tuple[Cluster, Wires]] = {}
_MOST_KNOWN = 1024


def _wires(cluster: Cluster, g: int, k: int, concurrent_groups: int | None, nvls: bool) -> Wires:
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
    steps = max(1, ROUNDS[collective] * (n - 1)) / max(1, ROUNDS[collective] * (measured_n - 1))
    return fit.latency_s * steps + payload * wire_factor(collective, n) / fit.bytes_per_s
