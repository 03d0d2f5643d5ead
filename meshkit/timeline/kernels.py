"""Seconds of one kernel on one GPU: a roofline. Layer 5; imports no jax.

time = max(FLOP / (dense peak x sustained share), bytes / (memory bandwidth x sustained share)). The shares are measured
ones and live in spec/catalog.toml with their sources.
"""

from __future__ import annotations

from meshkit.spec.cluster import Gpu
from meshkit.xla.costs import Cost

_COMPUTE_DTYPE = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "fp8": "f8e4m3fn"}
# XLA's element types -> precisions of the catalog. fp32 matmuls run as TF32 where the GPU has it: XLA's default.
_PRECISION = {"bf16": "bf16", "f16": "fp16", "f32": "tf32", "f32_highest": "fp32", "f64": "fp32"}


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Dense peak of a matmul on operands of an XLA element type, FLOP/s; the next wider type where the GPU lacks it."""
    wanted = "fp8" if dtype.startswith("f8") else _PRECISION.get(dtype, "bf16")
    for precision in (wanted, "bf16", "fp16", "fp32"):
        if precision in gpu.peak_flops and (precision == wanted or wanted != "tf32"):
            return gpu.peak_flops[precision]
    return gpu.peak_flops["fp32"]


def compute_peak_flops(gpu: Gpu, precision: str) -> float | None:
    """Dense peak that MFU refers to for a precision of `[train]`, FLOP/s: of what its matmuls run as (fp32 as TF32).

    None for a CPU, whose virtual devices have none.
    """
    return peak_flops(gpu, _COMPUTE_DTYPE[precision]) if gpu.peak_flops else None


def kernel_time_s(cost: Cost, gpu: Gpu) -> float:
    """Seconds of a kernel that does this work, without its launch."""
    matmul = sum(
        flops / (peak_flops(gpu, dtype) * gpu.achieved["matmul"]) for dtype, flops in cost.matmul_flops.items()
    )
    attention = cost.attention_flops / (peak_flops(gpu, "bf16") * _attention_share(cost, gpu))
    memory = cost.bytes_accessed / (gpu.memory_bytes_per_s * gpu.achieved["memory"])
    host = cost.host_bytes / gpu.pcie_bytes_per_s if cost.host_bytes else 0.0
    return max(matmul + attention, memory, host)


def _attention_share(cost: Cost, gpu: Gpu) -> float:
    """Sustained share of the peak of fused attention; a backward pass does less well than a forward pass."""
    share = gpu.achieved["attention"]
    return share * gpu.achieved.get("attention_backward", 1.0) if cost.attention_backward else share
