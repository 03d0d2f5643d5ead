"""Refits of the network model's constants: of those shipped to many systems, of one cluster's own by `meshkit bench`.

A fit is the least sum of |log(predicted / measured)|. How a prediction moves with each constant is taken around where
they stand, which makes the problem linear; one cluster's own is solved so a few times, each from what came out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from meshkit.config.calibration import NetworkConstants
from meshkit.config.cluster import Cluster
from meshkit.predict.nccl import RATES, RING_TURNS, Wires
from meshkit.predict.network import collective_time_s

_NUDGE = 1.02
_REACH = 0.7  # a refit moves a constant by a factor of two at most
_STIFF = 0.02  # what holds a constant that few rows speak of where it is
_ROUNDS = 25
_TIMES = 4  # that one cluster's own are solved for
_FEWEST = 8  # measured collectives


@dataclass(frozen=True)
class Sensitivity:
    """Measured times in log space, linear around where the constants start."""

    names: list[str]
    misfit: np.ndarray  # log(predicted / measured)
    slopes: np.ndarray  # of it by log(constant)
    weights: np.ndarray

    @classmethod
    def of(
        cls,
        predicted_s: Callable[[Mapping[str, float]], Sequence[float]],
        measured_s: Sequence[float],
        start: Mapping[str, float],
        groups: Sequence[Hashable],
    ) -> Sensitivity:
        """Around the constants `start`; every group of times weighs the same.

        Args:
            predicted_s: constants by name -> [n] seconds of the measured collectives. Called with `start`, then
                with one constant after the other 2 % larger.
            measured_s: [n] seconds, in that order.
            start: constants by name.
            groups: [n] what each belongs to; the weights of a group sum to 1.

        Returns:
            With misfit [n], slopes [n, constants] and weights [n].
        """
        here = np.log(predicted_s(start))
        moved = [np.log(predicted_s({**start, name: start[name] * _NUDGE})) for name in start]
        sizes = Counter(groups)
        weights = np.array([1 / sizes[group] for group in groups])
        return cls(list(start), here - np.log(measured_s), (np.array(moved) - here).T / np.log(_NUDGE), weights)

    def refit(self, used: np.ndarray | slice = slice(None)) -> dict[str, float]:
        """By how much each constant should be multiplied, for the times that are used.

        Args:
            used: which of the n times, as numpy indexes them; by default all.

        Returns:
            Name of a constant -> factor, from exp(-0.7) to exp(0.7).
        """
        slopes, misfit, weights = self.slopes[used], self.misfit[used], self.weights[used]
        step = np.zeros(len(self.names))
        total = weights.sum()
        for _ in range(_ROUNDS):
            pull = weights / np.maximum(np.abs(misfit + slopes @ step), 0.01) / total
            normal = (slopes * pull[:, None]).T @ slopes + _STIFF * np.eye(len(step))
            step = np.clip(np.linalg.solve(normal, -(slopes * pull[:, None]).T @ misfit), -_REACH, _REACH)
        return dict(zip(self.names, np.exp(step).tolist(), strict=True))


class MeasuredCollective(Protocol):
    """One collective that was timed: `payload_bytes` as `collective_time_s` takes it."""

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
    """What the model says of a collective that was timed.

    Args:
        row: its kind, group and bytes; the time that was measured is not read.
        cluster: where it ran; its calibration comes first, if it names one and nothing is `fitted`.
        fitted: constants by name, in the place of the shipped ones.

    Returns:
        Seconds, with one launch of XLA's.

    Raises:
        ConfigError: an unknown collective, a group that makes no sense, or a calibration that cannot be read.
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
    """The constants that hold for a cluster's GPU, and the rates of its links relative to the catalog's: 1."""
    wires = Wires.of(cluster, min(2, cluster.gpus_used_per_domain), 1)
    return dict(wires.fitted) | dict.fromkeys(RATES, 1.0)


def network_constants(measured: Sequence[MeasuredCollective], cluster: Cluster) -> NetworkConstants | None:
    """The model's constants, and its links' rates, of one cluster; None where too few collectives were measured.

    Only those that the measured times speak of. One launch is in each, as in a step.

    Args:
        measured: what was timed; single GPUs and collectives that the model has not are left out.
        cluster: where; the calibration that it names does not count.

    Returns:
        Constants and rates by name, and the median of |predicted / measured - 1| before and after; None also on CPUs.
        Too few are fewer than 8.
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
        found = Sensitivity.of(predicted, times.tolist(), tried[-1], groups)
        told |= {name for name, slope in zip(found.names, np.abs(found.slopes).max(0), strict=True) if slope > 1e-6}
        factors = found.refit()
        tried.append({name: value * (factors[name] if name in told else 1.0) for name, value in tried[-1].items()})
    misses = [miss(values) for values in tried]
    best = tried[misses.index(min(misses))]
    values = {name: value for name, value in best.items() if name in told}
    return NetworkConstants(constants=values, points=len(rows), error_before=misses[0], error_after=min(misses))
