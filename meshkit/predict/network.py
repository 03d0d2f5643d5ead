"""Predict the seconds of one collective on a cluster, from a calibration or from NCCL's algorithms in closed form.

NCCL's tuner chooses an algorithm and a protocol by its own constants (nccl.py). algorithms.py has the cost of this
algorithm over its links in closed form. The numbers are in nccl.toml, the fitted numbers in its table `[fitted]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict, Unpack

from meshkit.config import calibration
from meshkit.config.cluster import Cluster
from meshkit.config.toml import did_you_mean
from meshkit.errors import ConfigError
from meshkit.hlo.schedule import Collective
from meshkit.predict.algorithms import FORCED, channels_of, fastest, forced, wire_factor
from meshkit.predict.nccl import (
    FABRICS,
    PROTOCOLS,
    RING_TURNS,
    Links,
    busy_share,
    constants_of,
    find_links,
    model_constant,
    with_constants,
)

_LAUNCHES = ("nccl-tests", "xla", "grouped")


class How(TypedDict, total=False):
    """Options of a collective, which replace choices of NCCL and XLA."""

    nvls: bool
    algorithm: str | None
    nccl: str | None
    launch: str
    fabric: str | None
    racks: int | None
    fitted: Mapping[str, float] | None
    slices: int


def _check(how: How, domains: int) -> None:
    for name in how.keys() - How.__annotations__.keys():
        raise TypeError(f"collective_time_s() got an unexpected keyword argument '{name}'")
    algorithm, fabric, racks = how.get("algorithm"), how.get("fabric"), how.get("racks")
    if algorithm is not None:
        family, _, protocol = algorithm.rpartition(" ")
        if (family if protocol in PROTOCOLS else algorithm) not in FORCED:
            raise ConfigError(f"unknown algorithm '{algorithm}'.", hint=did_you_mean(algorithm, FORCED))
    if (launch := how.get("launch", "xla")) not in _LAUNCHES:
        raise ConfigError(f"unknown launch '{launch}'.", hint=", ".join(_LAUNCHES))
    if fabric not in (None, *FABRICS):
        raise ConfigError(f"unknown fabric '{fabric}'.", hint=", ".join(FABRICS))
    if (slices := how.get("slices", 0)) < 0:
        raise ConfigError(f"a ragged all-to-all of {slices} slices is not possible.", hint="1 or more")
    if racks is not None and not 1 <= racks <= domains:
        raise ConfigError(f"{domains} domains cannot be under {racks} racks.", hint=f"1 to {domains}")


def collective_time_s(
    collective: str,
    *,
    payload_bytes: float,
    gpus_per_domain: int,
    domains: int = 1,
    cluster: Cluster,
    concurrent_groups: int | None = None,
    **how: Unpack[How],
) -> float:
    """Return the seconds of one collective, from the arrival of its last member to its end.

    Args:
        collective: HLO opcode, without `-start`.
        payload_bytes: bytes on one GPU of the operand or, for an all-gather, of the result.
        gpus_per_domain: members of the group inside one NVLink domain.
        domains: NVLink domains that the group spans.
        cluster: the cluster, with the sustained rates of its links. A calibration that it names takes precedence.
        concurrent_groups: number of such groups in a domain at the same time. By default each GPU is in one, as in an
            SPMD program, and has its own NVLinks and its share of the host's NICs. With fewer groups, they also use the
            NICs of idle GPUs.
        how: `nvls`: whether NCCL may reduce in the NVLink switch; False as with `NCCL_NVLS_ENABLE=0`.
            `algorithm`: replaces NCCL's choice: `ring`, `tree`, `nvls`, `nvls tree`, `pat`, `collnet` (SHARP),
            `symmetric` (kernels for symmetric memory), `copy engine` (for the same memory, without multiprocessors;
            derived, docs/concepts/network.md has what was measured), `one-shot` (XLA's own all-reduce), `neighbours` (a
            permute as in nccl-tests: every rank sends to the next, so one flow leaves each host). A protocol may
            follow, as in `ring ll128`. For a ragged all-to-all: `one-shot` (inside a domain), `device kernel`, `send`
            (docs/concepts/network.md).
            `nccl`: version of NCCL, which has the tuner's constants: "2.28.9".
            `launch`: `xla`: in a step; `nccl-tests`: one collective directly after the other; `grouped`: in the kernel
            of another collective of the same GPUs, whose price includes the launch.
            `fabric`: `rail`: a leaf switch has one NIC of each of 32 hosts; `leaf`: all NICs of a host are on one leaf;
            `flat`: no oversubscription. By default the cluster's oversubscription applies to all traffic that
            leaves a host.
            `racks`: number of leaf switches over which the domains are spread evenly; by default as few as possible.
            `fitted`: name -> value that replaces a constant of `[fitted]` in nccl.toml (for refits).
            `slices`: slices of a ragged all-to-all that each GPU sends to each GPU; by default as many as XLA's kernel
            has blocks for.

    Raises:
        ConfigError: the collective is unknown, the group is not possible, the algorithm cannot run it, or a calibration
            cannot be read.
    """
    group = (gpus_per_domain, domains, concurrent_groups)
    return collective_price(collective, payload_bytes, group, cluster, how).seconds


@dataclass(frozen=True)
class Price:
    """The time that one collective takes when it runs alone."""

    seconds: float
    inside_s: float = 0.0
    """Part of the seconds in which the link inside a domain is busy."""
    outside_s: float = 0.0
    """Part of the seconds in which the GPU's link out of the domain is busy."""
    wire_s: float = 0.0
    """Part of the seconds in which it sends, at least the busy time of each link; the rest is latency."""
    channels: int | None = None
    """Blocks of its kernel; None if unknown."""


def collective_price(
    collective: str, payload_bytes: float, group: tuple[int, int, int | None], cluster: Cluster, how: How
) -> Price:
    """Return the price of one collective, by default with XLA's launch; it is 0 for one GPU.

    Args:
        collective, payload_bytes: as `collective_time_s` takes them.
        group: members inside one domain, domains that it spans, and such groups in a domain at a time (None: each
            GPU is in one).
        cluster: the cluster and, if it names one, its calibration. If a fit of the calibration applies, the fit gives
            the seconds, and the model the parts of them.
        how: options, as the keywords of `collective_time_s`; with {} NCCL and XLA choose.

    Raises:
        ConfigError: as `collective_time_s`.
        TypeError: `how` has an unknown key.
    """
    gpus_per_domain, domains, concurrent_groups = group
    if how:
        _check(how, domains)
    algorithm, fitted = how.get("algorithm"), how.get("fitted")
    if collective not in RING_TURNS:
        raise ConfigError(f"unknown collective '{collective}'.", hint=", ".join(sorted(RING_TURNS)))
    if not 0 <= payload_bytes < float("inf") or gpus_per_domain < 1 or domains < 1:
        raise ConfigError(
            f"a {collective} of {payload_bytes} bytes over {domains} domains x {gpus_per_domain} GPUs is not possible."
        )
    if concurrent_groups is not None and concurrent_groups < 1:
        raise ConfigError(f"{concurrent_groups} concurrent groups are not possible.", hint="1 or more")
    if gpus_per_domain * domains == 1:
        return Price(0.0)
    measured = None
    known = None if cluster.calibration is None or fitted else calibration.load_cached(cluster.calibration)
    if known is not None and known.network is None and algorithm is None:
        sharing = max(1.0, busy_share(cluster, gpus_per_domain, concurrent_groups))
        measured = _calibrated_s(known, collective, payload_bytes * sharing, gpus_per_domain, domains)
    links = _find_links(cluster, group, how, known.network if known else None)
    if fitted:
        links = with_constants(links, constants_of(links.generation, fitted))
    if algorithm is None:
        found = fastest(collective, payload_bytes, links)
    elif (found := forced(collective, algorithm, payload_bytes, links)) is None:
        where = "inside a domain" if domains == 1 else "between domains"
        raise ConfigError(f"the model has no {algorithm} for {collective} {where}.")
    launch = how.get("launch", "xla")
    launch_s = model_constant("xla_launch_s") if launch == "xla" else 0.0
    if launch == "grouped" and found.name != "copy engine":  # A copy engine has no kernel to share.
        launch_s = -links.fitted["kernel_s"]
    wire_s = found.wire_s
    seconds = max(wire_s, launch_s + found.time_s)
    # A calibration gives the seconds, and the model the share of them on the wire.
    part = measured / seconds if measured is not None else 1.0
    channels = channels_of(found.name, collective, payload_bytes, links)
    return Price(seconds * part, found.inside_s * part, found.outside_s * part, wire_s * part, channels)


def checkpoint_time_s(state_bytes: float | None, cluster: Cluster) -> float | None:
    """Return the seconds to write a checkpoint: state_bytes / min(storage, the GPUs' paths to it); None if unknown.

    Args:
        state_bytes: parameters and optimizer state over all GPUs, replicas counted once.
        cluster: the cluster, with `storage_bytes_per_s` over all hosts. With GPUDirect Storage, a path is a GPU's PCIe
            slot (or link to its CPU). Without it, a path also has host memory, which is written and read.
    """
    rate = cluster.checkpoint_bytes_per_s
    return None if rate is None or state_bytes is None else state_bytes / rate


# Clusters and calibrations have no hash, because they contain mappings. Their ids are keys of this cache, and its
# values keep them alive.
_known_links: dict[tuple, tuple[Cluster, calibration.NetworkConstants | None, Links]] = {}
_MOST_KNOWN = 1024


def _find_links(
    cluster: Cluster, group: tuple[int, int, int | None], how: How, own: calibration.NetworkConstants | None
) -> Links:
    """Return the result of `find_links`, with the constants of a calibration if `own` has them; results are cached."""
    nvls, fabric, nccl = how.get("nvls", True), (how.get("fabric"), how.get("racks")), how.get("nccl")
    slices = how.get("slices", 0)
    key = (id(cluster), id(own), group, nvls, fabric, nccl, slices)
    if known := _known_links.get(key):
        return known[2]
    if len(_known_links) >= _MOST_KNOWN:
        _known_links.clear()
    g, k, concurrent_groups = group
    more = {"nvls": nvls, "fabric": fabric, "nccl": nccl, "slices": slices}
    made = find_links(cluster, g, k, concurrent_groups=concurrent_groups, **more)
    if own is not None:
        made = with_constants(made, _own_constants(own, made.generation))
    _known_links[key] = cluster, own, made
    return made


def _own_constants(own: calibration.NetworkConstants, generation: str) -> Mapping[str, float]:
    """Return a calibration's constants for a generation of NVLink; raise a `ConfigError` for an unknown one."""
    names = constants_of(generation, {}).keys()
    if other := own.constants.keys() - names:
        message = f"network.constants has '{min(other)}', which is not a constant of the network model."
        raise ConfigError(message, hint=did_you_mean(min(other), sorted(names)))
    return constants_of(generation, own.constants)


def _calibrated_s(known: calibration.Calibration, collective: str, payload: float, g: int, k: int) -> float | None:
    """Return the seconds by a fit of `meshkit bench`; None if it has no comparable measurement.

    The latency is multiplied by a ring's steps in this group and divided by its steps in the measured group. Nothing
    measured is comparable with a ragged all-to-all, which XLA runs.
    """
    fit = known.find("infiniband" if k > 1 else "nvlink", collective, g, k)
    if fit is None:
        return None
    n, measured_n = g * k, fit.gpus_per_domain * fit.domains
    steps = max(1, RING_TURNS[collective] * (n - 1)) / max(1, RING_TURNS[collective] * (measured_n - 1))
    return fit.latency_s * steps + payload * wire_factor(collective, n) / fit.bytes_per_s


def infiniband_share(c: Collective) -> float:
    """Return the share of the wire bytes that leave the NVLink domain.

    A ring with g GPUs per domain leaves the domain on one of every g hops: 1 / g. An all-to-all has no ring: in a group
    of n GPUs, n - g of the n - 1 peers of a GPU are in other domains.
    """
    if c.link != "infiniband" or c.group_size < 2:
        return 0.0
    if c.collective.endswith("all-to-all"):
        return (c.group_size - c.gpus_per_domain) / (c.group_size - 1)
    return 1.0 / max(1, c.gpus_per_domain)


def peak_bus_bandwidth_bytes_per_s(c: Collective, cluster: Cluster | None) -> float | None:
    """Return the bus bandwidth at which a collective uses a link at its peak rate, in bytes/s per GPU and direction.

    It is None for an unknown cluster, on CPUs, and for a group of one. A share of a GPU's wire bytes crosses InfiniBand
    (see `infiniband_share`), so this link is full at its rate divided by the share. NVLink limits the traffic inside a
    domain.
    """
    if cluster is None or cluster.is_cpu or c.group_size < 2:
        return None
    inside = cluster.link("nvlink", gpus=c.gpus_per_domain).bytes_per_s if c.gpus_per_domain > 1 else None
    if c.link != "infiniband":
        return inside
    across = cluster.link("infiniband").bytes_per_s / infiniband_share(c)
    return across if inside is None else min(across, inside)
