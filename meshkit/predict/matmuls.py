"""What a matmul's shape leaves of the best rate on a GPU, from measured tables.

`config/matmul_shapes.csv` has cuBLAS's rates of some 5,000 shapes on seven GPUs, in bursts; between them rates are
log-linear. In a long run of nothing else a kernel takes the smaller of that and of what the power cap leaves
(`achieved.matmul` of the catalog): a shape that fills half of a GPU does not draw the power that would throttle it.

In a step the cap binds the mean: what waits for memory draws less, and the clock rises until tensor cores take what it
leaves. `step_gain` is how much faster they are then than in a long run of nothing else.

Where that table does not reach (dims below 512, many small products, TF32), the rate of its nearest shape is scaled as
`config/matmul_rates.csv` has it, 375 shapes of powers of two that OpenXLA measured on an H100 and on a B200. There many
small products fill a GPU as one large one does, a dim that is no multiple of a tile costs as much as the next multiple,
and dims beyond the table are further waves of the same tiles. A GPU that was not measured is read at the shape that
gives each of its multiprocessors the same number of tiles, and a tile the same time, as on a measured one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import numpy as np

from meshkit.config import catalog
from meshkit.config.cluster import Gpu
from meshkit.hlo.costs import Matmul

_TILE = 128  # cuBLAS's smallest output tile that keeps tensor cores busy, both ways
_INNER = 64  # of its loop over k
_MEASURED = {"hopper": "h100_sxm", "blackwell": "b200"}  # of OpenXLA's table
_STAND_INS = {"a100_40gb": "a100_80gb", "gh200": "h200"}  # the same multiprocessors and clocks
_PEAK_SHARE = 0.99
LARGE, LONG_S = 2048, 10e-3  # of a matmul that the power cap slows


def shape_share(matmul: Matmul, gpu: Gpu, precision: str, sustained: str = "matmul") -> float:
    """Rate of a matmul of this shape over that of a large one, at most 1.

    Args:
        matmul: its shape.
        gpu: where it runs.
        precision: as the catalog calls it; one that no table has is read as bf16.
        sustained: the rate of a large one: `matmul` of a long run, `burst` of a short one.
    """
    if gpu.compute_capability is None or min(matmul.batch, matmul.m, matmul.n, matmul.k) < 1:
        return 1.0
    return _share((matmul.batch, matmul.m, matmul.n, matmul.k), gpu.key, precision, sustained)


@functools.lru_cache(maxsize=65536)
def _share(shape: tuple[int, int, int, int], key: str, precision: str, sustained: str) -> float:
    gpu = catalog.gpu(key)
    if _table_of(gpu, precision) is None:
        return _older_share(shape, gpu, precision)
    large = sustained_flops_per_s(gpu, precision, sustained)
    rate = table_flops_per_s(Matmul(precision, *_tiled(shape)), gpu, precision)
    return _useful(shape) * min(1.0, rate / large)


def _tiled(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """The shape that a kernel of whole tiles works on."""
    batch, m, n, k = shape
    return batch, _padded(m, _TILE), _padded(n, _TILE), _padded(k, _INNER)


def _useful(shape: tuple[int, int, int, int]) -> float:
    """Share of the work of its tiles that a shape needs; the rest draws power too."""
    return math.prod(shape) / math.prod(_tiled(shape))


def sustained_flops_per_s(gpu: Gpu, precision: str, kind: str = "matmul") -> float:
    """Rate of a large matmul by the catalog: `matmul` of a long run, `burst` of a short one."""
    share = gpu.achieved.get(f"{kind}_{precision}", gpu.achieved.get(kind, gpu.achieved["matmul"]))
    return gpu.peak_flops.get(precision, gpu.peak_flops["fp32"]) * share


def step_gain(full: float, busy: float) -> float:
    """Rate of tensor cores in a step over that in a long run of nothing else, up to that at the full clock.

    Args:
        full: rate at the full clock over that of a long run.
        busy: share of the step's time in which they work, in matmuls or in attention.
    """
    return max(1.0, min(full, max(busy, 0.01) ** (-1 / catalog.kernels()["power_exponent"])))


def full_clock(gpu: Gpu, precision: str) -> float:
    """Rate of tensor cores at the full clock over that of a long run."""
    return sustained_flops_per_s(gpu, precision, "burst") / sustained_flops_per_s(gpu, precision)


def table_flops_per_s(matmul: Matmul, gpu: Gpu, precision: str, table_of: str | None = None) -> float:
    """The rate in a burst of a shape of whole tiles, by the measured table.

    Args:
        matmul: its shape.
        gpu: where it runs.
        precision: as the catalog calls it.
        table_of: a GPU whose table is read instead of the nearest one's.

    Raises:
        KeyError: that GPU has no table of this precision.
    """
    table = table_of or _table_of(gpu, precision)
    if table is None:
        raise KeyError(f"{gpu.key} {precision}")
    precision = _column(precision)
    measured = catalog.gpu(table)
    theirs, ours = sustained_flops_per_s(measured, precision), sustained_flops_per_s(gpu, precision)
    tiles, slower = measured.sms / gpu.sms, (theirs / measured.sms) / (ours / gpu.sms)
    if _STAND_INS.get(gpu.key, gpu.key) == table:
        tiles = slower = 1.0
    batch, m, n, k = matmul.batch, matmul.m, matmul.n, matmul.k
    grids, values = _shapes(table, precision)
    least = int(grids[0][0])
    near = (max(m * batch * tiles, least), max(n, least), max(k * slower, least))
    if near[0] > grids[0][-1] and near[1] < near[0]:  # C and its transpose are the same work
        near = (near[1], near[0], near[2])
    found = _log_linear(grids, values, [min(x, float(grid[-1])) for x, grid in zip(near, grids)]) * ours / theirs
    if min(m, n, k) < least:  # as OpenXLA's table has the step from the nearest shape
        large = (1, max(m * batch, least), max(n, least), max(k, least))
        found *= _older_share((batch, m, n, k), gpu, precision) / _older_share(large, gpu, precision)
    return min(_PEAK_SHARE * gpu.peak_flops[precision], found)


def _column(precision: str) -> str:
    return {"fp16": "bf16"}.get(precision, precision)


def _table_of(gpu: Gpu, precision: str) -> str | None:
    """The GPU whose table is read for this one; None where no table has the precision, and for GPUs before Ampere."""
    precision, major = _column(precision), (gpu.compute_capability or (0, 0))[0]
    key = _STAND_INS.get(gpu.key, gpu.key)
    near = {8: "a100_80gb", 9: "h100_sxm"}.get(major, "b200")
    for name in (key, near):
        if (name, precision) in _every_table() and major >= 8:
            return name
    return None


@functools.cache
def _every_table() -> dict[tuple[str, str], list[Mapping[str, str]]]:
    tables: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for row in catalog.measured_table("matmul_shapes.csv"):
        tables.setdefault((row["gpu"], row["precision"]), []).append(row)
    return tables


@functools.cache
def _shapes(key: str, precision: str) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """(grid of each dim, rates [m, n, k] in FLOP/s); a shape that was not measured has the rate of the next smaller.

    A large shape that takes 10 ms or more is what the cap is made of (benchmarks/kernel_rates.py), so its burst is not
    known, and is at least the cap.
    """
    rows = _every_table()[key, precision]
    depths = [name for name in rows[0] if name.isdigit()]
    grids = tuple(np.array(sorted({float(row[d]) for row in rows})) for d in ("m", "n"))
    table = np.full((len(grids[0]), len(grids[1]), len(depths)), np.nan)
    for row in rows:
        at = tuple(int(np.searchsorted(grid, float(row[d]))) for d, grid in zip(("m", "n"), grids))
        table[at] = [float(row[d] or "nan") * 1e12 for d in depths]
    for axis in range(3):
        for i in range(1, table.shape[axis]):
            cells, below = (np.take(table, j, axis) for j in (i, i - 1))
            np.moveaxis(table, axis, 0)[i] = np.where(np.isnan(cells), below, cells)
    every = (*grids, np.array([float(d) for d in depths]))
    m, n, k = np.meshgrid(*every, indexing="ij")
    capped = (np.minimum(np.minimum(m, n), k) >= LARGE) & (2 * m * n * k >= LONG_S * table)
    return every, np.where(capped, np.maximum(table, sustained_flops_per_s(catalog.gpu(key), precision)), table)


def _older_share(shape: tuple[int, int, int, int], gpu: Gpu, precision: str) -> float:
    """The share of a shape by OpenXLA's table, as if it ran on the measured GPU of the same generation."""
    generation = "blackwell" if (gpu.compute_capability or (0, 0)) >= (10, 0) else "hopper"
    measured = catalog.gpu(_MEASURED[generation])
    batch, wide, tall, deep = _tiled(shape)
    rates = (g.peak_flops.get(precision, g.peak_flops["fp32"]) * g.achieved["matmul"] / g.sms for g in (measured, gpu))
    slower = next(rates) / next(rates)
    near = (batch * measured.sms / gpu.sms, wide, tall, deep * slower)
    return min(1.0, _useful(shape) * _interpolated(generation, precision, near))


def _padded(size: int, tile: int) -> int:
    """The next multiple of a tile; powers of two below it have kernels of their own."""
    if size <= tile:
        return 1 << (size - 1).bit_length()
    return -(-size // tile) * tile


def _interpolated(generation: str, precision: str, shape: tuple[float, float, float, float]) -> float:
    """The measured rates between their shapes, over the largest of them with every dim at the table's end."""
    batch, m, n, k = shape
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
    """The table between its grid points: linear in the logarithms of dims and rates."""
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
    rows = [row for row in catalog.measured_table("matmul_rates.csv") if row["generation"] == generation]
    dims = ("batch", "m", "n", "k")
    grids = tuple(np.array(sorted({float(row[d]) for row in rows})) for d in dims)
    table = np.zeros([len(grid) for grid in grids])
    for row in rows:
        table[tuple(int(np.searchsorted(grid, float(row[d]))) for d, grid in zip(dims, grids))] = float(row[column])
    return grids, table
