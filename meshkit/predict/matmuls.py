"""What a matmul's shape leaves of a GPU's best rate: waves, tiles and short inner loops.

OpenXLA measured 375 shapes of powers of two on an H100 and on a B200 (config/matmul_rates.csv). Between them rates are
log-linear; a dim that is no multiple of a tile costs as much as the next multiple; dims beyond the table are further
waves of the same tiles. Another GPU is read at the shape that gives each of its multiprocessors the same number of
tiles, and a tile the same time, as on the measured one.
"""

from __future__ import annotations

import functools
import math

import numpy as np

from meshkit.config import catalog
from meshkit.config.cluster import Gpu
from meshkit.hlo.costs import Matmul

_TILE = 128  # cuBLAS's smallest output tile that keeps tensor cores busy, both ways
_INNER = 64  # of its loop over k
_MEASURED = {"hopper": "h100_sxm", "blackwell": "b200"}


def shape_share(matmul: Matmul, gpu: Gpu, precision: str) -> float:
    """Rate of a matmul of this shape over that of the largest measured one, at most 1.

    Args:
        matmul: its shape.
        gpu: where it runs.
        precision: as the catalog calls it; one that the table lacks is read as bf16.
    """
    if gpu.compute_capability is None or min(matmul.batch, matmul.m, matmul.n, matmul.k) < 1:
        return 1.0
    generation = "blackwell" if gpu.compute_capability >= (10, 0) else "hopper"
    return _share(matmul.batch, matmul.m, matmul.n, matmul.k, gpu.key, generation, precision)


@functools.lru_cache(maxsize=65536)
def _share(batch: int, m: int, n: int, k: int, key: str, generation: str, precision: str) -> float:
    gpu, measured = catalog.gpu(key), catalog.gpu(_MEASURED[generation])
    tiles_each = batch * measured.sms / gpu.sms
    slower = (_rate(measured, precision) / measured.sms) / (_rate(gpu, precision) / gpu.sms)
    wide, tall, deep = _padded(m, _TILE), _padded(n, _TILE), _padded(k, _INNER)
    useful = (m * n * k) / (wide * tall * deep)
    return min(1.0, useful * _interpolated(generation, precision, tiles_each, wide, tall, deep * slower))


def _rate(gpu: Gpu, precision: str) -> float:
    return gpu.peak_flops.get(precision, gpu.peak_flops["fp32"]) * gpu.achieved["matmul"]


def _padded(size: int, tile: int) -> int:
    """The next multiple of a tile; powers of two below it have kernels of their own."""
    if size <= tile:
        return 1 << (size - 1).bit_length()
    return -(-size // tile) * tile


def _interpolated(generation: str, precision: str, batch: float, m: float, n: float, k: float) -> float:
    """Of the measured rates, over the largest of them with every dim at the table's end."""
    grids, table = _table(generation, precision)
    most_batch, most_m, most_n, most_k = (float(grid[-1]) for grid in grids)
    batch, m, n = batch * max(1.0, m / most_m) * max(1.0, n / most_n), min(m, most_m), min(n, most_n)
    while batch > most_batch and min(m, n) < most_m:  # more small products fill the GPU as fewer larger ones do
        batch, m, n = (batch / 2, 2 * m, n) if m <= n else (batch / 2, m, 2 * n)
    below = 1.0  # dims below the table fill a part of the smallest tile that was measured
    for size, grid in ((m, grids[1]), (n, grids[2]), (k, grids[3])):
        below *= min(1.0, size / float(grid[0]))
    point = [batch, min(m, most_m), min(n, most_n), min(k, most_k)]
    return below * _log_linear(grids, table, point) / float(table[-1, -1, -1, -1])


def _log_linear(grids: tuple[np.ndarray, ...], table: np.ndarray, point: list[float]) -> float:
    values = np.log(table)
    for grid, x in zip(grids, point):
        position = float(np.interp(math.log(x), np.log(grid), np.arange(len(grid))))
        low = min(int(position), len(grid) - 2)
        part = position - low
        values = values[low] * (1 - part) + values[low + 1] * part
    return float(np.exp(values))


@functools.cache
def _table(generation: str, precision: str) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """(grid of each dim, rates [batch, m, n, k])."""
    column = precision if precision in ("bf16", "tf32", "fp8") else "bf16"
    rows = [row for row in catalog.matmul_rates() if row["generation"] == generation]
    dims = ("batch", "m", "n", "k")
    grids = tuple(np.array(sorted({float(row[d]) for row in rows})) for d in dims)
    table = np.zeros([len(grid) for grid in grids])
    for row in rows:
        table[tuple(int(np.searchsorted(grid, float(row[d]))) for d, grid in zip(dims, grids))] = float(row[column])
    return grids, table
