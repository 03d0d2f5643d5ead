"""Predict the seconds of one kernel on one GPU by a roofline, with matmul rates that depend on their shape.

time = max(FLOP / (dense peak x sustained share), bytes / (memory bandwidth x sustained share)). The shares are
measured. config/catalog.toml has them with their sources. Rates of a calibration that the cluster names take
precedence.

`config/matmuls.csv` has the rates of matmuls in short bursts: some 5,000 shapes of cuBLAS on seven GPUs, and 375 shapes
(powers of two) that OpenXLA measured on an H100 and on a B200. Rates of other shapes are interpolated log-linearly
(`burst_flops_per_s`). In a long run of one shape alone, a shape that fills the GPU is throttled to the rate of a large
matmul under the power cap (`large_flops_per_s`). A shape that fills half of a GPU does not draw enough power to be
throttled, and keeps its burst rate. So the lower of these two rates counts (`shape_share`). A block-scaled matmul takes
as long as an fp8 matmul whose operands have as many bytes. For NVFP4, with two elements per byte, that matmul has half
of k.

In a step the power cap limits the mean power. Kernels that wait for memory draw less, and the clock rises until tensor
cores use the remaining power. `step_gain` is their rate in a step over their rate in a long run of matmuls. At the
same clock, attention draws less power than a matmul, because its tensor cores wait for exponentials (`power_share`).

OpenXLA's rates cover what cuBLAS's rates lack: dims below 512, batches of small matmuls, and TF32. The rate of the
nearest cuBLAS shape is multiplied by the ratio of OpenXLA's rates for the two shapes. Without cuBLAS's rates,
OpenXLA's are used alone. A batch of small matmuls fills a GPU like one large matmul. A dim that is not a multiple of a
tile costs as much as the next multiple. Dims larger than any in the table add waves of the same tiles.

A GPU that was not measured is modelled as a measured GPU with another number of multiprocessors, each at another rate.
A matmul's m is scaled so that a multiprocessor has as many tiles on the measured GPU as on the modelled GPU. The
matmul's k is scaled so that a tile takes as long on both. The measured GPU's table is read at this m and k. The rate
found is multiplied by the ratio of the two GPUs' rates for large matmuls.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshkit.config import calibration, catalog
from meshkit.config.calibration import Rates
from meshkit.config.cluster import Cluster, Gpu
from meshkit.config.precisions import PRECISIONS
from meshkit.hlo.costs import Cost, Matmul
from meshkit.predict.assumptions import Assumptions
from meshkit.units import format_count, format_rate

# XLA's element type -> precision of the catalog. By XLA's default, fp32 matmuls run as TF32 on GPUs that have it.
_PRECISION = {"bf16": "bf16", "f16": "fp16", "f32": "tf32", "f32_highest": "fp32", "f64": "fp32",
              "mxfp8": "mxfp8", "f4e2m1fn": "nvfp4"}  # fmt: skip


Shape = tuple[int, int, int, int]  # batch, m, n, k

_NOT_MEASURED = Rates()
_ALL = Assumptions()
_CHARTED_HEAD = 128
_CHARTED = {"a100_40gb": "a100_80gb", "h100_sxm": "h200", "h100_pcie": "h200", "h800": "h200", "gh200": "h200",
            "b200": "gb200", "b300": "gb300"}  # fmt: skip
_TILE = 128  # cuBLAS's smallest output tile that keeps tensor cores busy, in both dims.
_INNER = 64  # The step of cuBLAS's loop over k.
# GPU -> measured GPU with the same multiprocessors and clocks.
_STAND_INS = {"a100_40gb": "a100_80gb", "h800": "h100_sxm", "gh200": "h200"}
_PEAK_SHARE = 0.99
_PACKED = {"nvfp4": 2}  # Elements in a byte; the matmul takes as long as an fp8 matmul over as many bytes.


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Return the dense peak, in FLOP/s, of a matmul on operands of an XLA element type.

    If the GPU cannot multiply in this type, the result is the peak of the type in which XLA multiplies instead.

    Args:
        dtype: element type as XLA spells it: `bf16`, `f32`, `f8e4m3fn`. `f32_highest` is fp32 that must not run as
            TF32. `f8..._highest` is fp8 with partial sums promoted to fp32. `mxfp8` is block-scaled fp8, which XLA
            multiplies in bf16 on a GPU without it.

    Raises:
        KeyError: the catalog has no peaks for the GPU, as for a CPU.
    """
    return gpu.peak_flops[precision_of(gpu, dtype)]


def precision_of(gpu: Gpu, dtype: str) -> str:
    """Return the precision, as the catalog calls it, in which the GPU multiplies operands of an XLA element type."""
    wanted = "fp8" if dtype.startswith("f8") else _PRECISION.get(dtype, "bf16")
    for precision in (wanted, "bf16", "fp16", "fp32"):
        if precision in gpu.peak_flops and (precision == wanted or wanted != "tf32"):
            return precision
    return "fp32"


def compute_peak_flops(gpu: Gpu, precision: str) -> float | None:
    """Return the dense peak, in FLOP/s, by which MFU is computed for a precision of `[train]`.

    For fp32 it is that of TF32, in which XLA multiplies. It is None for a CPU, whose virtual devices have no peak.

    Raises:
        KeyError: the precision is unknown (only on a GPU).
    """
    return peak_flops(gpu, PRECISIONS[precision].operands) if gpu.peak_flops else None


@dataclass(frozen=True)
class KernelWork:
    """Seconds for which a kernel that runs alone uses each part of a GPU; the parts work at the same time."""

    arithmetic_s: float = 0.0
    """Tensor cores, and the preparation of their operands."""
    memory_s: float = 0.0
    host_s: float = 0.0

    @property
    def alone_s(self) -> float:
        """Seconds of the kernel when nothing else runs, without its launch."""
        return max(self.arithmetic_s, self.memory_s, self.host_s)


def kernel_work(
    cost: Cost,
    gpu: Gpu,
    rates: Rates = _NOT_MEASURED,
    *,
    host_bytes_per_s: float | None = None,
    assumptions: Assumptions = _ALL,
    busy: float = 1.0,
) -> KernelWork:
    """Return the seconds for which a kernel with this work uses each part of a GPU.

    Args:
        gpu: the GPU; its peaks and their sustained shares apply if `rates` lacks a rate.
        rates: measured rates, see `measured_rates`.
        host_bytes_per_s: sustained rate between the GPU and its host's memory; default the peak of the GPU's PCIe slot.
        busy: share of the step's time in which tensor cores work; 1 in a long run of matmuls.
    """
    share = catalog.kernels()["convolution_share"] if cost.convolves else 1.0
    matmul = _matmul_s(cost, gpu, rates, assumptions, busy) / share
    attention = cost.attention_flops / _attention_flops_per_s(cost, gpu, rates, assumptions, busy)
    memory = max(_moved_bytes(cost) / memory_bytes_per_s(gpu, rates) / share, _handling_s(cost, gpu))
    host = cost.host_bytes / (host_bytes_per_s or gpu.pcie_bytes_per_s) if cost.host_bytes else 0.0
    matmul += cost.scalar_flops / large_flops_per_s(gpu, "fp32")
    made = cost.joined_bytes / memory_bytes_per_s(gpu, rates)
    if _turns_fp8(gpu):  # `turned_bytes` counts an element twice: one byte is read, one written.
        made += _clocks_s(catalog.kernels()["transpose_clocks"] * cost.turned_bytes / 2, gpu)
    return KernelWork(matmul + attention + made, memory, host)


def measured_rates(cluster: Cluster) -> Rates:
    """Return the rates of the calibration that a cluster names; empty without one, or if it is for another GPU.

    Raises:
        ConfigError: the calibration cannot be read.
    """
    if cluster.calibration is None:
        return _NOT_MEASURED
    found = calibration.load_cached(cluster.calibration)
    return found.rates if _is_of(found, cluster) else _NOT_MEASURED


def calibration_note(cluster: Cluster) -> str | None:
    """Return one sentence on what a plan takes from the calibration that its cluster names; None without one.

    Raises:
        ConfigError: the calibration cannot be read.
    """
    if cluster.calibration is None:
        return None
    found = calibration.load_cached(cluster.calibration)
    machine = found.measured_on
    where = f", measured on {machine.devices} x {machine.gpu} on {machine.date[:10]}" if machine else ""
    used = [f"{len(found.fits)} fits of collectives"] if found.fits and not found.network else []
    used += [f"{len(found.network.constants)} constants of the network model"] if found.network else []
    rates = measured_rates(cluster)
    used += [f"{name} matmuls at {format_count(x)}FLOP/s" for name, x in rates.matmul_flops_per_s.items()]
    used += [f"attention {name} at {format_count(x)}FLOP/s" for name, x in rates.attention_flops_per_s.items()]
    used += [f"memory at {format_rate(rates.memory_bytes_per_s)}"] if rates.memory_bytes_per_s else []
    other = "" if _is_of(found, cluster) else f"; its rates are not for a {cluster.gpu.key}, so the catalog's are used"
    return f"calibrated by {cluster.calibration}{where}: {', '.join(used) or 'nothing'}{other}"


def _is_of(found: calibration.Calibration, cluster: Cluster) -> bool:
    """Return whether a calibration is for the cluster's GPU, or names no GPU."""
    return found.measured_on is None or found.measured_on.gpu in (cluster.gpu.key, cluster.gpu.name)


def _matmul_s(cost: Cost, gpu: Gpu, rates: Rates, assumptions: Assumptions, busy: float) -> float:
    """Return the seconds of all matmuls; FLOP without a shape (convolutions) get the rate of a large matmul."""
    seconds, shaped = 0.0, dict.fromkeys(cost.matmul_flops, 0.0)
    for matmul in cost.matmuls if assumptions.shapes else ():
        rate = _matmul_flops_per_s(gpu, matmul.dtype, rates, assumptions, busy)
        share = shape_share(matmul, gpu, precision_of(gpu, matmul.dtype), _kind(assumptions))
        seconds += matmul.flops / (rate * share)
        shaped[matmul.dtype] = shaped.get(matmul.dtype, 0.0) + matmul.flops
    for dtype, flops in cost.matmul_flops.items():
        rate = _matmul_flops_per_s(gpu, dtype, rates, assumptions, busy)
        seconds += max(0.0, flops - shaped[dtype]) / rate
    return seconds


def _matmul_flops_per_s(gpu: Gpu, dtype: str, rates: Rates, assumptions: Assumptions, busy: float) -> float:
    precision = precision_of(gpu, dtype)
    large = large_flops_per_s(gpu, precision, _kind(assumptions))
    kept = gain = _promoted_share(gpu, dtype)
    # A matmul with promotion draws less power at the same clock, so the power cap allows a higher clock.
    if assumptions.sustained:
        capped = kept ** (1 - 1 / catalog.kernels()["power_exponent"])
        gain = capped * step_gain(full_clock(gpu, precision) * kept / capped, busy)
    return min(gpu.peak_flops[precision], rates.matmul_flops_per_s.get(precision, large) * gain)


def _promoted_share(gpu: Gpu, dtype: str) -> float:
    """Return the rate of an fp8 matmul that promotes its partial sums, divided by the rate without promotion.

    Both rates are at the same clock. The accumulators of Hopper's tensor cores keep 14 bits of a sum, so CUDA cores
    add up partial sums in fp32. Blackwell's keep all bits.
    """
    held = dtype.startswith("f8") and dtype.endswith("_highest") and gpu.compute_capability == (9, 0)
    return catalog.kernels()["fp8_promoted"] if held else 1.0


def _kind(assumptions: Assumptions) -> str:
    return "matmul" if assumptions.sustained else "burst"


def _attention_flops_per_s(cost: Cost, gpu: Gpu, rates: Rates, assumptions: Assumptions, busy: float) -> float:
    """Return the sustained rate of fused attention by length and mask, lower if its queries do not fill the GPU."""
    peak = peak_flops(gpu, "bf16")
    if not assumptions.attention:
        return _matmul_flops_per_s(gpu, "bf16", rates, assumptions, busy)
    rate = peak * gpu.achieved["attention"]
    rate *= gpu.achieved.get("attention_backward", 1.0) if cost.attention_backward else 1.0
    way = "backward" if cost.attention_backward else "forward"
    if way in rates.attention_flops_per_s:  # This was measured in a long run of attention alone.
        rate = rates.attention_flops_per_s[way] * attention_gain(gpu, way, 0.0)
    if assumptions.sustained:
        rate *= attention_gain(gpu, way, busy) / attention_gain(gpu, way, 0.0)
    return min(peak, rate * attention_share(cost, gpu))


def attention_gain(gpu: Gpu, way: str, busy: float) -> float:
    """Return the rate of attention in a step over its rate in a long run of attention alone.

    Args:
        busy: as for `step_gain`; but 1 stands for a long run of attention alone.
    """
    k, full = catalog.kernels(), full_clock(gpu, "bf16")
    alone = k[f"attention_power_{way}"]
    gain = step_gain(full, alone if busy >= 1.0 else busy) / step_gain(full, alone)
    return gain ** k["attention_clock"]


def power_share(cost: Cost, gpu: Gpu) -> float:
    """Return the power of a kernel's tensor cores over a large matmul's at the same clock; 0 without work for them."""
    if cost.attention_flops:
        way = "backward" if cost.attention_backward else "forward"
        return catalog.kernels()[f"attention_power_{way}"] * _head_share(cost.attention_head_dim, gpu)
    return 1.0 if cost.matmul_flops else 0.0


def attention_share(cost: Cost, gpu: Gpu) -> float:
    """Return the rate of attention with this length and mask, divided by that of a causal pass over 4k tokens.

    Both rates are of the same direction, forward or backward. The result is 1 if the length is unknown.

    Blocks of queries are assigned to the multiprocessors one by one, and most multiprocessors are idle during the last
    blocks. This costs as much as one more wave of blocks (SimuMax's measurements of 4 to 64 heads on an A100 agree).

    Args:
        cost: has keys, queries and head size; a number that is unknown (0) has no effect.
        gpu: the GPU; the rates of one that was not measured are those of a similar GPU, or else of an H100.
    """
    if not cost.attention_length:
        return 1.0
    k = catalog.kernels()
    lengths, chart = _attention_chart(gpu.key, cost.attention_backward, cost.attention_causal)
    length = cost.attention_length
    if cost.attention_window:  # A causal pass over twice the window has as many keys per query.
        length = max(2 * cost.attention_window, round(math.exp(lengths[0])))
    by_length = float(np.interp(math.log(length), lengths, chart))
    if cost.attention_window:
        by_length *= _band_share(cost.attention_window, length)
    by_length *= _head_share(cost.attention_head_dim, gpu)
    blocks = cost.attention_queries / k["attention_queries_per_block"]
    charted = k["attention_blocks"] / (k["attention_blocks"] + catalog.gpu("h100_sxm").sms)
    return by_length * blocks / (blocks + gpu.sms) / charted if blocks else by_length


def _band_share(window: int, length: int) -> float:
    """Return the rate of attention with a sliding window, relative to a causal pass over `length` tokens.

    For a block of queries, a kernel computes all blocks of keys that the mask touches. At each edge of the mask, half a
    block of keys is computed in vain. A window has two edges, a causal mask one.
    """
    block = catalog.kernels()["attention_queries_per_block"]
    causal = (length / 2) / (length / 2 + block / 2)
    return window / (window + block) / causal


def _head_share(head_dim: int, gpu: Gpu) -> float:
    """Return the rate of attention relative to heads of size 128, for which the charts were measured.

    A score costs two multiply-adds for each element of a head, and one exponential for any head size. Larger heads hide
    the exponential. On Ampere and before, tensor cores are relatively slow, so smaller heads hide exponentials, too.
    """
    if not 0 < head_dim < _CHARTED_HEAD or (gpu.compute_capability or (0, 0)) < (9, 0):
        return 1.0
    beside = (1.0 / catalog.kernels()["attention_head_64"] - 1.0) / (_CHARTED_HEAD / 64 - 1.0)
    return 1.0 / (1.0 + beside * (_CHARTED_HEAD / head_dim - 1.0))


@functools.cache
def _attention_chart(key: str, backward: bool, causal: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return (logarithms of lengths, rates relative to a causal pass at 4k).

    Rates are as measured on the GPU or a similar one. Without measurements, they are those of FlashAttention-3's charts
    of an H100. Below the shortest measured length, they are these charts' rates, scaled to meet the measured rate
    there.
    """
    k = catalog.kernels()
    forward = k["attention_causal_forward"]
    full = k["attention_full_backward" if backward else "attention_full_forward"]
    chart = dict(zip(k["attention_lengths"], forward if causal and not backward else full))
    if causal and backward:  # A causal mask lowers the rate of both passes by the same factor.
        masked = dict(zip(k["attention_lengths"], np.divide(forward, k["attention_full_forward"]).tolist()))
        chart = {length: rate * masked[length] / (chart[4096] * masked[4096]) for length, rate in chart.items()}
    found: dict[str, dict[int, float]] = {"causal": {}, "full": {}}
    for row in catalog.measured_table("attention_rates.csv"):
        if row["gpu"] == _CHARTED.get(key, key) and (row["pass"] == "backward") == backward:
            found[row["mask"]][int(row["length"])] = float(row["share"])
    measured = found["causal" if causal else "full"]
    if measured:
        first = min(measured)
        scale = measured[first] / found["causal"][4096] / chart[first]
        chart = {length: rate * scale for length, rate in chart.items() if length < first}
        chart |= {length: rate / found["causal"][4096] for length, rate in measured.items()}
    return np.log(sorted(chart)), np.array([chart[length] for length in sorted(chart)])


def _turns_fp8(gpu: Gpu) -> bool:
    """Return whether cuBLAS needs fp8 operands with the contracted dim contiguous in memory (A transposed, B not).

    B200 and similar GPUs accept any layout (NVIDIA/TransformerEngine, `nvte_is_non_tn_fp8_gemm_supported`).
    """
    return (gpu.compute_capability or (0, 0))[0] != 10


def _moved_bytes(cost: Cost) -> float:
    """Return the bytes that a kernel accesses, plus those that memory could move during the kernel's pauses.

    A Triton kernel holds a tile of rows in the registers of a whole multiprocessor, which loads nothing while it
    reduces them. Rows of a matmul's operands that are no multiple of 16 bytes cannot be prefetched.
    """
    k = catalog.kernels()
    waits = k["tile_reduce_share"] * max(0.0, cost.tile_reduces - 0.5)
    return cost.bytes_accessed * (1.0 + waits) + k["unaligned_share"] * cost.unaligned_bytes


def _handling_s(cost: Cost, gpu: Gpu) -> float:
    """Return the seconds that multiprocessors need for a kernel's elements, even if memory were infinitely fast.

    It is the longest of three times:

    - The time to read, add, move and compare elements. It grows with the sectors that a look-up reads, the additions of
      a scatter, the steps of a sort, and the multiply-adds of a depthwise convolution. It also grows with the elements
      that a kernel transposes. If a kernel sums over a dim other than the minor one, and also has an output with as
      many elements as it sums, the time grows with these.
    - On Hopper, the time to start the thread blocks of kernels that fill an array, move narrow elements or concatenate
      arrays of unequal sizes.
    - The time of the integer arithmetic of random numbers.
    """
    k = catalog.kernels()
    (steps, tile, elements), (along, apart) = cost.compared, cost.added
    clocks = k["sector_clocks"] * cost.sectors
    clocks += k["transpose_clocks"] * cost.transposed * (k["transpose_beside"] if cost.results > 1 else 1.0)
    clocks += k["add_clocks"] * along + k["add_apart_clocks"] * apart
    clocks += k["compare_clocks"] * steps * max(tile * gpu.sms, elements)
    clocks += k["column_clocks"] * cost.column_elements + k["depthwise_clocks"] * cost.depthwise_products
    if gpu.compute_capability == (9, 0):
        clocks = max(clocks, k["block_clocks"] * cost.blocks * (1.0 + k["block_result"] * (cost.results - 1)))
    return _clocks_s(max(clocks, cost.integers / k["integer_lanes"]), gpu)


def _clocks_s(clocks: float, gpu: Gpu) -> float:
    return clocks / (gpu.sms * gpu.clock_hz) if clocks else 0.0


def memory_bytes_per_s(gpu: Gpu, rates: Rates = _NOT_MEASURED) -> float:
    """Return the sustained rate of device memory, reads and writes together."""
    return min(gpu.memory_bytes_per_s, rates.memory_bytes_per_s or gpu.memory_bytes_per_s * gpu.achieved["memory"])


def shape_share(matmul: Matmul, gpu: Gpu, precision: str, kind: str = "matmul") -> float:
    """Return the rate of a matmul of this shape, divided by that of a large one; at most 1.

    Args:
        precision: as the catalog calls it. If matmuls.csv has no rows for it, those of fp8 or bf16 are used.
        kind: kind of run, see `large_flops_per_s`.
    """
    if gpu.compute_capability is None or min(matmul.batch, matmul.m, matmul.n, matmul.k) < 1:
        return 1.0
    return _shape_share((matmul.batch, matmul.m, matmul.n, matmul.k), gpu.key, precision, kind)


@functools.lru_cache(maxsize=65536)
def _shape_share(shape: Shape, key: str, precision: str, kind: str) -> float:
    gpu = catalog.gpu(key)
    if precision == "fp32" and "bf16" in gpu.peak_flops:  # A matmul in fp32 is at most as fast as in bf16.
        faster = large_flops_per_s(gpu, "bf16", kind) / large_flops_per_s(gpu, precision, kind)
        return min(_useful(shape), faster * _shape_share(shape, key, "bf16", kind))
    if _measured_gpu(gpu, precision) is None:
        return _xla_share(shape, gpu, precision)
    burst = burst_flops_per_s(Matmul(precision, *_tiled(shape)), gpu, precision)
    return _useful(shape) * min(1.0, burst / large_flops_per_s(gpu, precision, kind))


def large_flops_per_s(gpu: Gpu, precision: str, kind: str = "matmul") -> float:
    """Return the rate of a large matmul by the catalog, FLOP/s of one GPU.

    Args:
        precision: as the catalog calls it; a precision that the GPU lacks has fp32's peak.
        kind: `matmul` for a long run, `burst` for a short one. The catalog has a share of the peak for each kind, and
            may have another for a precision (`burst_fp8`).
    """
    share = gpu.achieved.get(f"{kind}_{precision}", gpu.achieved.get(kind, gpu.achieved["matmul"]))
    return gpu.peak_flops.get(precision, gpu.peak_flops["fp32"]) * share


def burst_flops_per_s(matmul: Matmul, gpu: Gpu, precision: str, measured: str | None = None) -> float:
    """Return the rate of a short burst of matmuls whose dims are whole tiles, from cuBLAS's measured shapes.

    Args:
        measured: a GPU whose rows are used instead of those of the nearest GPU.

    Raises:
        KeyError: that GPU has no rows of this precision.
    """
    key = measured or _measured_gpu(gpu, precision)
    if key is None:
        raise KeyError(f"{gpu.key} {precision}")
    peak, packed, precision = gpu.peak_flops[precision], _PACKED.get(precision, 1), _column(precision)
    other = catalog.gpu(key)
    theirs, ours = large_flops_per_s(other, precision), large_flops_per_s(gpu, precision)
    tiles, slower = other.sms / gpu.sms, (theirs / other.sms) / (ours / gpu.sms)
    if _STAND_INS.get(gpu.key, gpu.key) == key:
        tiles = slower = 1.0
    batch, m, n, k = matmul.batch, matmul.m, matmul.n, -(-matmul.k // packed)
    grids, rates = _rates(key, precision, "cuBLAS")
    grids, rates = grids[1:], rates[0]
    least = int(grids[0][0])
    near = (max(m * batch * tiles, least), max(n, least), max(k * slower, least))
    if near[0] > grids[0][-1] and near[1] < near[0]:  # A product and its transpose are the same work.
        near = (near[1], near[0], near[2])
    found = _log_linear(grids, rates, [min(x, float(grid[-1])) for x, grid in zip(near, grids)]) * ours / theirs
    if min(m, n, k) < least:  # OpenXLA's rates give the ratio to the nearest cuBLAS shape.
        large = (1, max(m * batch, least), max(n, least), max(k, least))
        found *= _xla_share((batch, m, n, k), gpu, precision) / _xla_share(large, gpu, precision)
    return min(_PEAK_SHARE * peak, packed * found)


def _tiled(shape: Shape) -> Shape:
    batch, m, n, k = shape
    return batch, _padded(m, _TILE), _padded(n, _TILE), _padded(k, _INNER)


def _useful(shape: Shape) -> float:
    """Return a shape's work divided by that of the whole tiles that cover it, whose padding draws power, too."""
    return math.prod(shape) / math.prod(_tiled(shape))


def step_gain(full: float, busy: float) -> float:
    """Return the rate of tensor cores in a step, divided by that in a long run of matmuls; at most `full`.

    Args:
        full: rate at the full clock, divided by that of a long run.
        busy: share of the step's time in which tensor cores work, with each kernel weighted by its `power_share`.
    """
    return max(1.0, min(full, max(busy, 0.01) ** (-1 / catalog.kernels()["power_exponent"])))


def full_clock(gpu: Gpu, precision: str) -> float:
    """Return the rate of tensor cores at the full clock, divided by that of a long run."""
    return large_flops_per_s(gpu, precision, "burst") / large_flops_per_s(gpu, precision)


def _column(precision: str) -> str:
    return {"fp16": "bf16", "mxfp8": "fp8", "nvfp4": "fp8"}.get(precision, precision)


def _measured_gpu(gpu: Gpu, precision: str) -> str | None:
    """Return the GPU whose cuBLAS rows are used for `gpu`; None before Ampere, or without rows for the precision."""
    major = (gpu.compute_capability or (0, 0))[0]
    near = {8: "a100_80gb", 9: "h100_sxm"}.get(major, "b200")
    for key in (_STAND_INS.get(gpu.key, gpu.key), near):
        if (key, _column(precision), "cuBLAS") in _rows() and major >= 8:
            return key
    return None


@functools.cache
def _rows() -> dict[tuple[str, str, str], list[Mapping[str, str]]]:
    rows: dict[tuple[str, str, str], list[Mapping[str, str]]] = {}
    for row in catalog.measured_table("matmuls.csv"):
        rows.setdefault((row["gpu"], row["precision"], row["library"].partition(" ")[0]), []).append(row)
    return rows


@functools.cache
def _rates(key: str, precision: str, library: str) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Return (grid of each dim, rates [batch, m, n, k]), in FLOP/s for cuBLAS and without a unit for XLA.

    A missing shape has the rate of the next smaller shape. A large shape that takes 10 ms or more was measured under
    the power cap (benchmarks/kernel_rates). Its burst rate is unknown. The table has the measured rate, or that of a
    large capped matmul if it is higher.
    """
    rows, unit = _rows()[key, precision, library], 1e12 if library == "cuBLAS" else 1.0
    depths = [name for name in rows[0] if name.isdigit() and any(row[name] for row in rows)]
    grids = tuple(np.array(sorted({float(row[d]) for row in rows})) for d in ("batch", "m", "n"))
    table = np.full((*(len(grid) for grid in grids), len(depths)), np.nan)
    for row in rows:
        at = tuple(int(np.searchsorted(grid, float(row[d]))) for d, grid in zip(("batch", "m", "n"), grids))
        table[at] = [float(row[d] or "nan") * unit for d in depths]
    for axis in range(1, 4):
        for i in range(1, table.shape[axis]):
            cells, below = (np.take(table, j, axis) for j in (i, i - 1))
            np.moveaxis(table, axis, 0)[i] = np.where(np.isnan(cells), below, cells)
    grids = (*grids, np.array([float(d) for d in depths]))
    if library == "cuBLAS":
        _, m, n, k = np.meshgrid(*grids, indexing="ij")
        large = np.minimum(np.minimum(m, n), k) >= catalog.kernels()["large_dim"]
        capped = large & (2 * m * n * k >= catalog.kernels()["long_run_s"] * table)
        table = np.where(capped, np.maximum(table, large_flops_per_s(catalog.gpu(key), precision)), table)
    return grids, table


def _xla_share(shape: Shape, gpu: Gpu, precision: str) -> float:
    """Return a shape's share of the rate of a large matmul, by OpenXLA's rates of an H100 or a B200."""
    measured = catalog.gpu("b200" if (gpu.compute_capability or (0, 0)) >= (10, 0) else "h100_sxm")
    theirs, ours = (
        g.peak_flops.get(precision, g.peak_flops["fp32"]) * g.achieved["matmul"] / g.sms for g in (measured, gpu)
    )
    grids, rates = _rates(measured.key, precision if precision in ("bf16", "tf32", "fp8") else "bf16", "XLA")
    batch, m, n, k = _tiled(shape)
    batch, k = batch * measured.sms / gpu.sms, k * (theirs / ours)
    most_batch, most_m, most_n, most_k = (float(grid[-1]) for grid in grids)
    batch, m, n = batch * max(1.0, m / most_m) * max(1.0, n / most_n), min(m, most_m), min(n, most_n)
    while batch > most_batch and min(m, n) < most_m:  # A batch of small matmuls fills the GPU like fewer larger ones.
        batch, m, n = (batch / 2, 2 * m, n) if m <= n else (batch / 2, m, 2 * n)
    below = 1.0  # A smaller dim than any in the table fills a part of a tile.
    for size, grid in ((m, grids[1]), (n, grids[2]), (k, grids[3])):
        below *= min(1.0, size / float(grid[0]))
    point = [batch, min(m, most_m), min(n, most_n), min(k, most_k)]
    largest = float(rates[-1, -1, -1, -1])
    return min(1.0, _useful(shape) * (below * _log_linear(grids, rates, point) / largest))


def _padded(size: int, tile: int) -> int:
    """Round a size up to a multiple of the tile; below the tile, to a power of two, which has its own kernel."""
    if size <= tile:
        return 1 << (size - 1).bit_length()
    return -(-size // tile) * tile


def _log_linear(grids: tuple[np.ndarray, ...], table: np.ndarray, point: list[float]) -> float:
    """Interpolate a table between its grid points, linearly in the logarithms of dims and rates."""
    values = np.log(table)
    for grid, x in zip(grids, point):
        position = float(np.interp(math.log(x), np.log(grid), np.arange(len(grid))))
        low = min(int(position), len(grid) - 2)
        part = position - low
        values = values[low] * (1 - part) + values[low + 1] * part
    return float(np.exp(values))
