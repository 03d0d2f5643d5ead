"""Time kernels on one GPU: matmuls, attention, copies, and the small kernels between them. Operands are random."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.profiler import ProfileData

from benchmarks.gpu.sampling import Sampler

REPEATS = 8  # Repeats inside one program, so that the launch does not count.
_TRACED = 10  # Calls whose kernels the profiler records.
# Without Triton, XLA takes cuBLAS's kernels at once. Otherwise it would compile and time dozens of its own for each
# shape, which takes 8 s, and then choose cuBLAS's.
_CUBLAS = {"xla_gpu_enable_triton_gemm": False}
_FP8 = jnp.float8_e4m3fn
# Rows x inner x columns of matmuls that the shipped models make on one GPU, with 8,192 tokens at a time.
SHAPES = {
    "llama3_8b query, key, value": (8192, 4096, 6144),
    "llama3_8b attention output": (8192, 4096, 4096),
    "llama3_8b up": (8192, 4096, 14336),
    "llama3_8b down": (8192, 14336, 4096),
    "llama3_8b head": (8192, 4096, 128256),
    "llama3_8b up, tensor 4": (8192, 4096, 3584),
    "llama3_8b down, tensor 4": (8192, 3584, 4096),
    "llama3_70b query, key, value": (8192, 8192, 10240),
    "llama3_70b up": (8192, 8192, 28672),
    "llama3_70b down": (8192, 28672, 8192),
}


# Additions to a table that fits the L2 cache. Each case has the elements that are added along memory, those that are
# each added to a cache line of their own, and the updates of the busiest row.
_UPDATES, _WIDTH, _FEW = 8192, 4096, 1024
ADDED = {
    "gradient of 1024 rows": (float(_UPDATES * _WIDTH), 0.0, _UPDATES / _FEW),
    "gradient of 256 rows": (float(_UPDATES * _WIDTH), 0.0, _UPDATES / 256),
    "gradient of one row": (0.0, 0.0, float(_UPDATES)),
    "gradient across rows": (0.0, float(_UPDATES * _WIDTH), 0.0),
}


def matmuls(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Yield the FLOP/s of matmuls in each precision.

    A large square matmul runs for 20 s and gives the burst and the sustained rate; each shape runs for 1 s.
    """
    for name in ("bf16", "fp8"):
        n, seconds = (128, 0.1) if toy else (8192, 20.0)
        with Sampler() as sampler:
            burst, sustained = times(_multiply, _operands(name, (n, n, n)), seconds, _CUBLAS)
        yield {
            f"{name} {n} cubed burst_flops_per_s": 2 * n**3 / burst,
            f"{name} {n} cubed sustained_flops_per_s": 2 * n**3 / sustained,
            **{f"{name} {key}": value for key, value in sampler.summary().items()},
        }
        for label, shape in list(SHAPES.items())[: 2 if toy else None]:
            m, k, n_ = (size // 64 for size in shape) if toy else shape
            _, seconds_each = times(_multiply, _operands(name, (m, k, n_)), 0.05 if toy else 1.0, _CUBLAS)
            yield {f"{name} {label} flops_per_s": 2 * m * k * n_ / seconds_each}


def attention(folder: Path, toy: bool, lengths: Sequence[int] = (4096, 8192)) -> Iterator[dict[str, Any]]:
    """Yield seconds and FLOP/s of causal attention with 32 heads and 8 key heads of dimension 128, by length."""
    for length in (64,) if toy else lengths:
        heads, kv_heads, size = (4, 2, 16) if toy else (32, 8, 128)
        batch = max(1, 16_384 // length) if not toy else 1
        dtype = jnp.float32 if toy else jnp.bfloat16
        keys = jax.random.split(jax.random.key(0), 3)
        q, k, v = (
            jax.random.normal(key, (batch, length, n, size), dtype) for key, n in zip(keys, (heads, kv_heads, kv_heads))
        )
        attend = functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="xla" if toy else "cudnn"
        )
        forward = times(functools.partial(_apply, attend), (q, k, v), 0.05 if toy else 5.0)
        gradient = jax.grad(functools.partial(_summed, attend))
        both = times(gradient, (q, k, v), 0.05 if toy else 8.0)
        flops = 2 * batch * heads * length**2 * size  # Two matmuls, half of each masked.
        yield {f"{length} tokens": batch * length}
        # Attention alone soon reaches the GPU's power limit, which attention in a step does not, so bursts are kept
        # too.
        for burst, forward_s, both_s in zip((" burst", ""), forward, both):
            yield {
                f"{length}{burst} forward_s": forward_s,
                f"{length}{burst} forward_flops_per_s": flops / forward_s,
                f"{length}{burst} forward and backward_s": both_s,
                f"{length}{burst} backward_flops_per_s": 2.5 * flops / max(both_s - forward_s, forward_s / 10),
            }


def copies(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Yield the bytes per second that x + 1 reads and writes, by size; arrays that fit the L2 cache stay in it."""
    for size in (2**16, 2**20) if toy else (2**20, 2**23, 2**26, 2**29, 2**32):
        x = jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
        seconds = kernels_s(lambda x: x + 1, x, 0.05 if toy else 1.0)
        yield {f"{size} bytes_per_s": 2 * size / seconds}


def small(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Yield seconds and bytes per second of the kernels between the matmuls, for 8,192 tokens of Llama 3 8B."""
    tokens, width, vocabulary = (64, 32, 128) if toy else (8192, 4096, 128_256)
    parameters = 2**12 if toy else 2**28
    key = jax.random.key(0)
    x = jax.random.normal(key, (tokens, width), jnp.bfloat16)
    wide = jax.random.normal(key, (tokens, width), jnp.float32)
    scale = jnp.ones((width,), jnp.float32)
    table = jax.random.normal(key, (vocabulary, width), jnp.bfloat16)
    ids = jax.random.randint(key, (tokens,), 0, vocabulary)
    weights = jax.random.normal(key, (parameters,), jnp.float32)
    adamw = optax.adamw(1e-3)
    state = adamw.init(weights)

    def norm(operands: Any) -> Any:
        value, gain = operands
        wide_value = value.astype(jnp.float32)
        return (wide_value * lax.rsqrt(jnp.mean(wide_value**2, -1, keepdims=True) + 1e-5) * gain).astype(value.dtype)

    def update(operands: Any) -> Any:
        w, s = operands
        changes, s = adamw.update(w, s, w)
        return optax.apply_updates(w, changes), s

    each, rows = tokens * width, tokens * width * 2
    cases: dict[str, tuple[Callable, Any, float]] = {
        "cast fp32 to bf16": (lambda v: v.astype(jnp.bfloat16), wide, 6 * each),
        "cast bf16 to fp8": (lambda v: v.astype(_FP8), x, 3 * each),
        "amax": (lambda v: jnp.max(jnp.abs(v)), x, 2 * each),
        "rms norm": (norm, (x, scale), 2 * rows),
        "rms norm gradient": (jax.grad(lambda o: norm(o).astype(jnp.float32).sum()), (x, scale), 2 * rows),
        "silu times": (lambda v: jax.nn.silu(v) * v, x, 2 * rows),
        "transpose": (lambda v: v.T + 1, x, 2 * rows),
        "embedding": (lambda o: o[0][o[1]], (table, ids), 2 * rows),
        "embedding gradient": (
            lambda o: jnp.zeros((vocabulary, width), jnp.float32).at[o[1]].add(o[0].astype(jnp.float32)),
            (x, ids),
            rows + 4.0 * vocabulary * width,
        ),
        "adamw": (update, (weights, state), 7 * 4 * parameters),
    }
    few, read = jnp.arange(tokens) % _FEW, 4.0 * (tokens + _FEW) * width  # The fill is included.
    gradient = lambda o: jnp.zeros((_FEW, width), jnp.float32).at[o[1]].add(o[0])
    across = lambda o: jnp.zeros((width, _FEW), jnp.float32).at[:, o[1]].add(o[0])
    cases |= {name: (gradient, (wide, of), read) for name, of in zip(ADDED, (few, few % 256, few * 0))}
    cases["gradient across rows"] = (across, (wide.T.copy(), few), read)
    for name, (work, operands, moved) in cases.items():
        seconds = kernels_s(work, operands, 0.05 if toy else 1.5)
        yield {f"{name} s": seconds, f"{name} bytes_per_s": moved / seconds}


def _multiply(operands: Any) -> jax.Array:
    """Return a @ b.T.

    In fp8, cuBLAS takes both operands with the inner dim in rows; XLA would copy operands that lie otherwise.
    """
    a, b = operands
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _operands(precision: str, shape: tuple[int, int, int]) -> list[jax.Array]:
    m, k, n = shape
    dtype, keys = _FP8 if precision == "fp8" else jnp.bfloat16, jax.random.split(jax.random.key(0))
    return [jax.random.normal(key, (rows, k), jnp.bfloat16).astype(dtype) for key, rows in zip(keys, (m, n))]


def _apply(function: Callable, operands: Any) -> Any:
    return function(*operands)


def _summed(function: Callable, operands: Any) -> jax.Array:
    return function(*operands).astype(jnp.float32).sum()


def kernels_s(work: Callable, operands: Any, seconds: float) -> float:
    """Return the seconds of the kernels of one call, from a profiler's trace, after `seconds` of calls.

    The launch of a call (15 to 40 us in a loop) is not included. If no kernel is traced, as on a CPU, the time is that
    of the clock.
    """
    program = jax.jit(work)
    _, clocked = timed(program, operands, seconds, calls=1)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(_TRACED):
                jax.block_until_ready(program(operands))
        (file,) = Path(folder).rglob("*.xplane.pb")
        planes = [p for p in ProfileData.from_file(str(file)).planes if p.name.startswith("/device:GPU")]
        streams = [line for plane in planes for line in plane.lines if line.name.startswith("Stream")]
        traced_ns = sum(event.duration_ns for line in streams for event in line.events)
    return traced_ns / 1e9 / _TRACED or clocked


def times(
    work: Callable, operands: Any, seconds: float, options: Mapping[str, Any] | None = None
) -> tuple[float, float]:
    """Return the seconds of one call, in a burst and sustained.

    The burst is the median over the first tenth of a second, the sustained time that over the second half of the run.
    """
    return timed(compiled(work, operands, options), operands, seconds)


def compiled(work: Callable, operands: Any, options: Mapping[str, Any] | None = None) -> Callable:
    """Return a program that does the work REPEATS times, compiled with these XLA options and run once."""

    def repeated(operands: Any) -> Any:
        def again(_: Any, carry: Any) -> Any:
            operands, _ = lax.optimization_barrier(carry)  # Otherwise the compiler merges all calls into one.
            return operands, work(operands)

        return lax.fori_loop(0, REPEATS - 1, again, (operands, work(operands)))[1]

    program = jax.jit(repeated, compiler_options=dict(options or {}))
    jax.block_until_ready(program(operands))
    return program


def timed(program: Callable, operands: Any, seconds: float, calls: int = REPEATS) -> tuple[float, float]:
    """Return what `times` returns, for a compiled program that does the work `calls` times and runs for `seconds`."""
    ends: list[float] = []
    began = time.perf_counter()
    while len(ends) < 4 or ends[-1] < seconds:
        jax.block_until_ready(program(operands))
        ends.append(time.perf_counter() - began)
    each = [(end - start) / calls for start, end in zip([0.0, *ends], ends)]
    first = [t for t, end in zip(each, ends) if end < 0.1] or each[:1]
    return statistics.median(first), statistics.median(each[len(each) // 2 :])
