"""Refit constants of the network model: the shipped ones to many systems, or a cluster's own to a `meshkit bench`.

A fit minimizes the sum of |log(predicted / measured)|. Predictions are linearized: the effect of each constant is taken
around its present value. For one cluster's own constants, the fit is repeated a few times, each time from the last
result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from meshkit.config.calibration import NetworkConstants
from meshkit.config.cluster import Cluster
from meshkit.predict.nccl import RATES, RING_TURNS, find_links
from meshkit.predict.network import collective_time_s

_NUDGE = 1.02
_REACH = 0.7  # A refit changes a constant by a factor of two at most.
_STIFF = 0.02  # This keeps a constant in place if few measurements depend on it.
_ROUNDS = 25
_TIMES = 4
_FEWEST = 8


@dataclass(frozen=True)
class Sensitivity:
    """log(predicted / measured) of all times, linearized around the starting values of the constants."""

    names: list[str]
    misfit: np.ndarray
    """log(predicted / measured)."""
    slopes: np.ndarray
    """Derivative of the misfit by log(constant)."""
    weights: np.ndarray

    @classmethod
    def measure(
        cls,
        predicted_s: Callable[[Mapping[str, float]], Sequence[float]],
        measured_s: Sequence[float],
        start: Mapping[str, float],
        groups: Sequence[Hashable],
    ) -> Sensitivity:
        """Return the sensitivity around the constants `start`; every group of times has the same weight.

        Args:
            predicted_s: function of the constants by name, which returns [n] predicted seconds of the measured
                collectives. It is called with `start`, then once for each constant with this constant 2 % larger.
            measured_s: [n] measured seconds of the same collectives.
            groups: [n] groups of the measurements; the weights of a group sum to 1.
        """
        here = np.log(predicted_s(start))
        moved = [np.log(predicted_s({**start, name: start[name] * _NUDGE})) for name in start]
        sizes = Counter(groups)
        weights = np.array([1 / sizes[group] for group in groups])
        return cls(list(start), here - np.log(measured_s), (np.array(moved) - here).T / np.log(_NUDGE), weights)

    def refit(self, used: np.ndarray | slice = slice(None)) -> dict[str, float]:
        """Return constant -> factor, exp(-0.7) to exp(0.7), that fits the times at the numpy index `used`."""
        slopes, misfit, weights = self.slopes[used], self.misfit[used], self.weights[used]
        step = np.zeros(len(self.names))
        total = weights.sum()
        for _ in range(_ROUNDS):
            pull = weights / np.maximum(np.abs(misfit + slopes @ step), 0.01) / total
            normal = (slopes * pull[:, None]).T @ slopes + _STIFF * np.eye(len(step))
            step = np.clip(np.linalg.solve(normal, -(slopes * pull[:, None]).T @ misfit), -_REACH, _REACH)
        return dict(zip(self.names, np.exp(step).tolist(), strict=True))


class MeasuredCollective(Protocol):
    """One timed collective; `size_bytes` is the `payload_bytes` of `collective_time_s`."""

    @property
    def collective(self) -> str: ...
    @property
    def gpus_per_domain(self) -> int: ...
    @property
    def domains(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...
    @property
    def time_s(self) -> float: ...


def predicted_s(row: MeasuredCollective, cluster: Cluster, fitted: Mapping[str, float] | None = None) -> float:
    """Return the model's prediction for a timed collective, in seconds, with one launch by XLA.

    Args:
        cluster: the cluster of the measurement; a calibration that it names takes precedence, unless `fitted` is given.
        fitted: constants by name that replace the shipped ones.

    Raises:
        ConfigError: the collective is unknown, the group is not possible, or a calibration cannot be read.
    """
    return collective_time_s(
        row.collective,
        payload_bytes=row.size_bytes,
        gpus_per_domain=row.gpus_per_domain,
        domains=row.domains,
        cluster=cluster,
        fitted=fitted,
    )


def shipped_constants(cluster: Cluster) -> dict[str, float]:
    """Return the shipped constants for a cluster's GPU, and the factors on its link rates, which are 1."""
    links = find_links(cluster, min(2, cluster.gpus_used_per_domain), 1)
    return dict(links.fitted) | dict.fromkeys(RATES, 1.0)


def network_constants(measured: Sequence[MeasuredCollective], cluster: Cluster) -> NetworkConstants | None:
    """Return the model's constants and link rates for one cluster; None if too few collectives were measured.

    Only constants that affect the measured times are refitted. Each time includes one launch, as in a step. Collectives
    on single GPUs, and those that the model lacks, are left out. A calibration that the cluster names is ignored.

    Returns:
        Constants and rates by name, and the median of |predicted / measured - 1| before and after. None on CPUs, and
        with fewer than 8 measurements.
    """
    rows = [row for row in measured if row.collective in RING_TURNS and row.gpus_per_domain * row.domains > 1]
    if len(rows) < _FEWEST or cluster.gpu.compute_capability is None:
        return None
    plain = cluster.model_copy(update={"calibration": None})
    start = shipped_constants(plain)

    def predicted(values: Mapping[str, float]) -> list[float]:
        return [predicted_s(row, plain, values) for row in rows]

    def miss(values: Mapping[str, float]) -> float:
        return float(np.median(np.abs(predicted(values) / times - 1)))

    times = np.array([row.time_s for row in rows])
    groups = [(row.collective, row.gpus_per_domain, row.domains, row.size_bytes.bit_length() // 5) for row in rows]
    tried, told = [start], set[str]()
    for _ in range(_TIMES):
        found = Sensitivity.measure(predicted, times.tolist(), tried[-1], groups)
        told |= {name for name, slope in zip(found.names, np.abs(found.slopes).max(0), strict=True) if slope > 1e-6}
        factors = found.refit()
        tried.append({name: value * (factors[name] if name in told else 1.0) for name, value in tried[-1].items()})
    misses = [miss(values) for values in tried]
    best = tried[misses.index(min(misses))]
    values = {name: value for name, value in best.items() if name in told}
    return NetworkConstants(constants=values, points=len(rows), error_before=misses[0], error_after=min(misses))
