"""Seconds of one kernel on one GPU: a roofline.

time = max(FLOP / (dense peak x sustained share), bytes / (memory bandwidth x sustained share)). The shares are measured
ones and live in config/catalog.toml with their sources; the rates of a calibration that the cluster names come first.

What a matmul's shape leaves of the best rate (waves, tiles, short inner loops) is read from 375 shapes of powers of two
that OpenXLA measured on an H100 and on a B200 (config/matmul_rates.csv). Between them rates are log-linear; a dim that
is no multiple of a tile costs as much as the next multiple; dims beyond the table are further waves of the same tiles.
Another GPU is read at the shape that gives each of its multiprocessors the same number of tiles, and a tile the same
time, as on the measured one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from meshkit.config import calibration, catalog
from meshkit.config.calibration import Rates
from meshkit.config.cluster import Cluster, Gpu
from meshkit.hlo.costs import Cost, Matmul
from meshkit.predict.assumptions import Assumptions
from meshkit.units import format_count, format_rate

# Precisions of `[train]` -> element types that their matmuls have.
COMPUTE_DTYPE = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "fp8": "f8e4m3fn"}
# XLA's element types -> precisions of the catalog. fp32 matmuls run as TF32 where the GPU has it: XLA's default.
_PRECISION = {"bf16": "bf16", "f16": "fp16", "f32": "tf32", "f32_highest": "fp32", "f64": "fp32"}


_NOT_MEASURED = Rates()
_ALL = Assumptions()


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Dense peak of a matmul on operands of an XLA element type, FLOP/s; the next wider type where the GPU lacks it."""
    return gpu.peak_flops[precision_of(gpu, dtype)]


def precision_of(gpu: Gpu, dtype: str) -> str:
    """The precision, as the catalog calls it, in which the GPU multiplies operands of an XLA element type."""
    wanted = "fp8" if dtype.startswith("f8") else _PRECISION.get(dtype, "bf16")
    for precision in (wanted, "bf16", "fp16", "fp32"):
        if precision in gpu.peak_flops and (precision == wanted or wanted != "tf32"):
            return precision
    return "fp32"


def compute_peak_flops(gpu: Gpu, precision: str) -> float | None:
    """Dense peak that MFU refers to for a precision of `[train]`, FLOP/s: of what its matmuls run as (fp32 as TF32).

    None for a CPU, whose virtual devices have none.
    """
    return peak_flops(gpu, COMPUTE_DTYPE[precision]) if gpu.peak_flops else None


@dataclass(frozen=True)
class KernelWork:
    """What one kernel needs of each part of a GPU, as seconds of that part alone; they run at the same time."""

    arithmetic_s: float = 0.0  # of tensor cores
    memory_s: float = 0.0  # of device memory
    host_s: float = 0.0  # of the link to the host

    @property
    def alone_s(self) -> float:
        """The kernel when nothing else runs, without its launch."""
        return max(self.arithmetic_s, self.memory_s, self.host_s)


def kernel_work(
    cost: Cost,
    gpu: Gpu,
    rates: Rates = _NOT_MEASURED,
    *,
    host_bytes_per_s: float | None = None,
    assumptions: Assumptions = _ALL,
) -> KernelWork:
    """What a kernel that does this work needs of a GPU.

    Args:
        cost: the work.
        gpu: its peaks, and the sustained shares of them for whatever was not measured.
        rates: measured ones, see `measured_rates`.
        host_bytes_per_s: sustained, between the GPU and its host's memory; default the peak of its slot.
        assumptions: what to take into account.
    """
    matmul = _matmul_s(cost, gpu, rates, assumptions)
    attention = cost.attention_flops / _attention_flops_per_s(cost, gpu, rates, assumptions)
    memory = cost.bytes_accessed / memory_bytes_per_s(gpu, rates)
    host = cost.host_bytes / (host_bytes_per_s or gpu.pcie_bytes_per_s) if cost.host_bytes else 0.0
    return KernelWork(matmul + attention, memory, host)


def measured_rates(cluster: Cluster) -> Rates:
    """The rates of the calibration that a cluster names; empty without one, and where it is of another GPU.

    Raises:
        ConfigError: the calibration cannot be read.
    """
    if cluster.calibration is None:
        return _NOT_MEASURED
    found = calibration.load_cached(cluster.calibration)
    return found.rates if _is_of(found, cluster) else _NOT_MEASURED


def calibration_note(cluster: Cluster) -> str | None:
    """What a plan takes from the calibration that its cluster names, in one sentence; None without one.

    Raises:
        ConfigError: the calibration cannot be read.
    """
    if cluster.calibration is None:
        return None
    found = calibration.load_cached(cluster.calibration)
    machine = found.measured_on
    where = f", measured on {machine.devices} x {machine.gpu} on {machine.date[:10]}" if machine else ""
    used = [f"{len(found.fits)} fits of collectives"] if found.fits else []
    rates = measured_rates(cluster)
    used += [f"{name} matmuls at {format_count(x)}FLOP/s" for name, x in rates.matmul_flops_per_s.items()]
    used += [f"attention {name} at {format_count(x)}FLOP/s" for name, x in rates.attention_flops_per_s.items()]
    used += [f"memory at {format_rate(rates.memory_bytes_per_s)}"] if rates.memory_bytes_per_s else []
    other = "" if _is_of(found, cluster) else f"; its rates are not of a {cluster.gpu.key}, so the catalog's serve"
    return f"calibrated by {cluster.calibration}{where}: {', '.join(used) or 'nothing of it'}{other}"


def _is_of(found: calibration.Calibration, cluster: Cluster) -> bool:
    """Whether a calibration is of the cluster's GPU, or does not say of which."""
    return found.measured_on is None or found.measured_on.gpu in (cluster.gpu.key, cluster.gpu.name)


def _matmul_s(cost: Cost, gpu: Gpu, rates: Rates, assumptions: Assumptions) -> float:
    """Seconds of all matmuls; FLOP that have no shape (convolutions) run as fast as a large one."""
    seconds, shaped = 0.0, dict.fromkeys(cost.matmul_flops, 0.0)
    for matmul in cost.matmuls if assumptions.shapes else ():
        rate = _matmul_flops_per_s(gpu, matmul.dtype, rates, assumptions)
        seconds += matmul.flops / (rate * shape_share(matmul, gpu, precision_of(gpu, matmul.dtype)))
        shaped[matmul.dtype] = shaped.get(matmul.dtype, 0.0) + matmul.flops
    for dtype, flops in cost.matmul_flops.items():
        seconds += max(0.0, flops - shaped[dtype]) / _matmul_flops_per_s(gpu, dtype, rates, assumptions)
    return seconds


def _matmul_flops_per_s(gpu: Gpu, dtype: str, rates: Rates, assumptions: Assumptions) -> float:
    """Sustained rate of a large matmul."""
    precision = precision_of(gpu, dtype)
    peak, kind = gpu.peak_flops[precision], "matmul" if assumptions.sustained else "burst"
    share = gpu.achieved.get(f"{kind}_{precision}", gpu.achieved.get(kind, gpu.achieved["matmul"]))
    return min(peak, rates.matmul_flops_per_s.get(precision, peak * share))


def _attention_flops_per_s(cost: Cost, gpu: Gpu, rates: Rates, assumptions: Assumptions) -> float:
    """Sustained rate of fused attention: by length and mask, less where there are too few queries to fill the GPU.

    A backward pass does less well than a forward pass.
    """
    peak = peak_flops(gpu, "bf16")
    if not assumptions.attention:
        return _matmul_flops_per_s(gpu, "bf16", rates, assumptions)
    sustained = peak * gpu.achieved["attention"]
    sustained *= gpu.achieved.get("attention_backward", 1.0) if cost.attention_backward else 1.0
    measured = rates.attention_flops_per_s.get("backward" if cost.attention_backward else "forward", sustained)
    return min(peak, measured * attention_share(cost, gpu))


def matmul_share(cost: Cost, gpu: Gpu) -> float:
    """Rate of a kernel's matmuls over that of large ones, at most 1; 1 where none has a shape."""
    flops = sum(m.flops for m in cost.matmuls)
    as_large = sum(m.flops / shape_share(m, gpu, precision_of(gpu, m.dtype)) for m in cost.matmuls)
    return flops / as_large if as_large else 1.0


def attention_share(cost: Cost, gpu: Gpu) -> float:
    """Rate of attention of this length and mask over that of a causal pass at 4k tokens, from published charts.

    Blocks of queries are handed to the multiprocessors one by one, and the last of them leave most idle: as if there
    were one more wave (SimuMax's measurements of 4 to 64 heads on an A100 fall that way).
    """
    if not cost.attention_length:
        return 1.0
    k = catalog.kernels()
    lengths = np.log(k["attention_lengths"])
    forward = k["attention_causal_forward"]
    if cost.attention_causal:
        chart = forward
    else:
        chart = k["attention_full_backward" if cost.attention_backward else "attention_full_forward"]
    if cost.attention_causal and cost.attention_backward:  # a mask costs both passes the same share
        masked = np.divide(forward, k["attention_full_forward"])
        at_4k = k["attention_lengths"].index(4096)
        chart = k["attention_full_backward"] * masked / (k["attention_full_backward"][at_4k] * masked[at_4k])
    by_length = float(np.interp(math.log(cost.attention_length), lengths, chart))
    blocks = cost.attention_queries / k["attention_queries_per_block"]
    charted = k["attention_blocks"] / (k["attention_blocks"] + catalog.gpu("h100_sxm").sms)
    return by_length * blocks / (blocks + gpu.sms) / charted if blocks else by_length


def memory_bytes_per_s(gpu: Gpu, rates: Rates = _NOT_MEASURED) -> float:
    """Sustained rate of device memory, reads and writes together."""
    return min(gpu.memory_bytes_per_s, rates.memory_bytes_per_s or gpu.memory_bytes_per_s * gpu.achieved["memory"])


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
    """The share of a shape, as if it ran on the measured GPU of the same generation."""
    gpu, measured = catalog.gpu(key), catalog.gpu(_MEASURED[generation])
    tiles_each = batch * measured.sms / gpu.sms
    slower = (_rate(measured, precision) / measured.sms) / (_rate(gpu, precision) / gpu.sms)
    wide, tall, deep = _padded(m, _TILE), _padded(n, _TILE), _padded(k, _INNER)
    useful = (m * n * k) / (wide * tall * deep)
    return min(1.0, useful * _interpolated(generation, precision, tiles_each, wide, tall, deep * slower))


def _rate(gpu: Gpu, precision: str) -> float:
    """Sustained rate of a large matmul by the catalog, FLOP/s."""
    return gpu.peak_flops.get(precision, gpu.peak_flops["fp32"]) * gpu.achieved["matmul"]


def _padded(size: int, tile: int) -> int:
    """The next multiple of a tile; powers of two below it have kernels of their own."""
    if size <= tile:
        return 1 << (size - 1).bit_length()
    return -(-size // tile) * tile


def _interpolated(generation: str, precision: str, batch: float, m: float, n: float, k: float) -> float:
    """The measured rates between their shapes, over the largest of them with every dim at the table's end."""
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
    rows = [row for row in catalog.matmul_rates() if row["generation"] == generation]
    dims = ("batch", "m", "n", "k")
    grids = tuple(np.array(sorted({float(row[d]) for row in rows})) for d in dims)
    table = np.zeros([len(grid) for grid in grids])
    for row in rows:
        table[tuple(int(np.searchsorted(grid, float(row[d]))) for d, grid in zip(dims, grids))] = float(row[column])
    return grids, table
