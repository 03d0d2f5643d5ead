"""Latency and bandwidth of measured collectives: seconds = latency_s + wire_bytes / bytes_per_s.

Least squares of relative errors, so that 10 us count at 1 KiB as 10 ms do at 1 GiB, made robust by iterated weights
(1 / |error|: the sum of absolute errors is least, and one disturbed size does not bend the line).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ITERATIONS = 60
_SMALLEST_ERROR = 1e-3  # an error below 0.1 % is none: it keeps the weights finite


@dataclass(frozen=True)
class Line:
    """A fitted line and how well it does.

    Attributes:
        latency_s, bytes_per_s: of the line.
        residual_median, residual_p90: of |fitted / measured - 1|.
        points: how many it is fitted to.
    """

    latency_s: float
    bytes_per_s: float
    residual_median: float
    residual_p90: float
    points: int

    def time_s(self, wire_bytes: float) -> float:
        """Seconds on the line."""
        return self.latency_s + wire_bytes / self.bytes_per_s


def fit_line(wire_bytes: Sequence[float], times_s: Sequence[float]) -> Line | None:
    """The line through measured points; None for fewer than two sizes.

    Both terms are kept physical: where the best line has a negative latency it is 0, and where time does not grow with
    size the bandwidth is the highest that was seen.
    """
    wire, times = np.asarray(wire_bytes, float), np.asarray(times_s, float)
    if len(np.unique(wire)) < 2:
        return None
    # latency * (1 / t) + slope * (wire / t) = 1, with the errors of both sides relative ones
    design = np.stack([1 / times, wire / times], axis=1)
    weights = np.ones(len(times))
    solution = np.zeros(2)
    for _ in range(_ITERATIONS):
        solution = _not_negative(design, weights)
        errors = np.abs(design @ solution - 1)
        weights = 1 / np.maximum(errors, _SMALLEST_ERROR)
    latency, slope = solution
    slope = slope if slope > 0 else float((times / wire).min())
    errors = np.abs(design @ np.array([latency, slope]) - 1)
    median, p90 = np.quantile(errors, [0.5, 0.9])
    return Line(float(latency), float(1 / slope), float(median), float(p90), len(times))


def _not_negative(design: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted least squares to ones, with both unknowns >= 0: the best of the corners where the free one is not."""
    scale = np.sqrt(weights)
    rows, target = design * scale[:, None], scale
    size = np.abs(rows).max(0)  # the columns differ by ten orders of magnitude
    free = np.linalg.lstsq(rows / size, target, rcond=None)[0] / size
    if (free >= 0).all():
        return free
    corners = np.diag(rows.T @ target / (rows**2).sum(0))
    losses = ((corners @ rows.T - target) ** 2).sum(1)
    return corners[int(losses.argmin())]
