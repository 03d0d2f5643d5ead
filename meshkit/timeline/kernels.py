"""Seconds of one kernel on one GPU: a roofline. Layer 5; imports no jax.

time = max(FLOP / (dense peak x sustained share), bytes / (memory bandwidth x sustained share)). The shares are measured
ones and live in spec/catalog.toml with their sources; the rates of a calibration that the cluster names come first.
"""

from __future__ import annotations

from meshkit.spec import calibration
from meshkit.spec.calibration import Rates
from meshkit.spec.cluster import Cluster, Gpu
from meshkit.units import format_count, format_rate
from meshkit.xla.costs import Cost

_COMPUTE_DTYPE = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "fp8": "f8e4m3fn"}
# XLA's element types -> precisions of the catalog. fp32 matmuls run as TF32 where the GPU has it: XLA's default.
_PRECISION = {"bf16": "bf16", "f16": "fp16", "f32": "tf32", "f32_highest": "fp32", "f64": "fp32"}


_NOT_MEASURED = Rates()


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
    return peak_flops(gpu, _COMPUTE_DTYPE[precision]) if gpu.peak_flops else None


def kernel_time_s(
    cost: Cost, gpu: Gpu, rates: Rates = _NOT_MEASURED, *, host_bytes_per_s: float | None = None
) -> float:
    """Seconds of a kernel that does this work, without its launch.

    Args:
        cost: the work.
        gpu: its peaks, and the sustained shares of them for whatever was not measured.
        rates: measured ones, see `measured_rates`.
        host_bytes_per_s: sustained, between the GPU and its host's memory; default the peak of its slot.
    """
    matmul = sum(flops / _matmul_flops_per_s(gpu, dtype, rates) for dtype, flops in cost.matmul_flops.items())
    attention = cost.attention_flops / _attention_flops_per_s(cost, gpu, rates)
    memory = cost.bytes_accessed / _memory_bytes_per_s(gpu, rates)
    host = cost.host_bytes / (host_bytes_per_s or gpu.pcie_bytes_per_s) if cost.host_bytes else 0.0
    return max(matmul + attention, memory, host)


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


def _matmul_flops_per_s(gpu: Gpu, dtype: str, rates: Rates) -> float:
    precision = precision_of(gpu, dtype)
    peak = gpu.peak_flops[precision]
    return min(peak, rates.matmul_flops_per_s.get(precision, peak * gpu.achieved["matmul"]))


def _attention_flops_per_s(cost: Cost, gpu: Gpu, rates: Rates) -> float:
    """Of fused attention; a backward pass does less well than a forward pass."""
    peak = peak_flops(gpu, "bf16")
    sustained = peak * gpu.achieved["attention"]
    sustained *= gpu.achieved.get("attention_backward", 1.0) if cost.attention_backward else 1.0
    return min(peak, rates.attention_flops_per_s.get("backward" if cost.attention_backward else "forward", sustained))


def _memory_bytes_per_s(gpu: Gpu, rates: Rates) -> float:
    return min(gpu.memory_bytes_per_s, rates.memory_bytes_per_s or gpu.memory_bytes_per_s * gpu.achieved["memory"])
