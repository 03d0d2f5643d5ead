"""Sustained rates of one device: matmul, attention, memory.

Sustained: a GPU under its power cap clocks down within a second, so each rate is the median over the second half of a
run that is long enough. Operands are random: a GPU that multiplies zeros draws less power and is faster than any
training.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshkit.units import GIB, MIB
from meshkit.verbs.bench.bench_report import RatesPart
from meshkit.verbs.bench.measure import platform_of

_REPEATS = 8  # inside one program
_FEWEST_RUNS = 6


@dataclass(frozen=True)
class RateSizes:
    """How large the work is, by platform, and how long each rate is measured."""

    matmul: int
    attention: tuple[int, int, int, int]
    """Batch, length, heads, head_dim."""
    copy_bytes: int
    seconds: float


_SIZES = {
    "gpu": RateSizes(matmul=8192, attention=(4, 4096, 16, 128), copy_bytes=2 * GIB, seconds=3.0),
    "cpu": RateSizes(matmul=512, attention=(1, 256, 4, 32), copy_bytes=32 * MIB, seconds=0.2),
}


def measure_rates(device: Any) -> RatesPart:
    """The rates of one device, alone: matmul by precision, causal attention forward and backward, a copy."""
    platform = platform_of(device)
    sizes = _SIZES[platform]
    with jax.default_device(device):
        return RatesPart(
            matmul_flops_per_s={name: _matmul_flops_per_s(name, sizes) for name in _precisions(device, platform)},
            attention_flops_per_s=_attention_flops_per_s(sizes, device, platform),
            memory_bytes_per_s=_memory_bytes_per_s(sizes),
        )


def _precisions(device: Any, platform: str) -> tuple[str, ...]:
    if platform == "cpu":
        return ("fp32",)
    if _capability(device) >= (8, 9):
        return ("bf16", "fp16", "tf32", "fp32", "fp8")
    return ("bf16", "fp16", "tf32", "fp32") if _capability(device) >= (8, 0) else ("fp16", "fp32")


def _capability(device: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(getattr(device, "compute_capability", "0.0")).split("."))


def _matmul_flops_per_s(precision: str, sizes: RateSizes) -> float:
    """The rate of a matmul as large as the catalog's `achieved.matmul` refers to: no shape could be faster."""
    n = sizes.matmul
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp8": jnp.float8_e4m3fn}.get(precision, jnp.float32)
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.float32).astype(dtype) for i in range(2))
    # fp32 operands run as TF32 on GPUs unless the highest precision is asked for; fp8 results leave in bf16
    asked = lax.Precision.HIGHEST if precision == "fp32" else lax.Precision.DEFAULT
    out = jnp.bfloat16 if precision == "fp8" else dtype
    multiply = functools.partial(jnp.matmul, precision=asked, preferred_element_type=out)
    return 2 * n**3 / _seconds_each(lambda x: multiply(*x), (a, b), sizes.seconds)


def _attention_flops_per_s(sizes: RateSizes, device: Any, platform: str) -> dict[str, float]:
    batch, length, heads, head_dim = shape = sizes.attention
    fused = platform == "gpu" and _capability(device) >= (8, 0)
    dtype = jnp.bfloat16 if fused else jnp.float32
    qkv = tuple(jax.random.normal(jax.random.key(i), shape, dtype) for i in range(3))
    name = "cudnn" if fused else "xla"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=name)
    # two matmuls, of which the causal mask leaves half
    forward_flops = 2 * batch * heads * length**2 * head_dim
    forward_s = _seconds_each(lambda x: attend(*x), qkv, sizes.seconds)
    gradient = jax.grad(lambda x: attend(*x).astype(jnp.float32).sum())
    both_s = _seconds_each(gradient, qkv, sizes.seconds)
    # five matmuls where the forward pass has two
    backward_s = max(both_s - forward_s, forward_s / 10)
    return {"forward": forward_flops / forward_s, "backward": 2.5 * forward_flops / backward_s}


def _memory_bytes_per_s(sizes: RateSizes) -> float:
    x = jax.random.normal(jax.random.key(0), (sizes.copy_bytes // 4,), jnp.float32)
    return 2 * sizes.copy_bytes / _seconds_each(lambda x: x + 1, x, sizes.seconds)


def _seconds_each(work: Callable, operands, seconds: float) -> float:
    """Median seconds of one call, over the second half of `seconds` of calls."""

    def repeated(operands):
        def again(_, carry):
            operands, _ = lax.optimization_barrier(carry)  # see measure.py
            return operands, work(operands)

        return lax.fori_loop(0, _REPEATS - 1, again, (operands, work(operands)))[1]

    program = jax.jit(repeated)
    jax.block_until_ready(program(operands))
    times: list[float] = []
    while len(times) < _FEWEST_RUNS or sum(times) < seconds:
        began = time.perf_counter()
        jax.block_until_ready(program(operands))
        times.append(time.perf_counter() - began)
    return float(np.median(times[len(times) // 2 :])) / _REPEATS
