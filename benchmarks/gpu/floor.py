"""Llama 3.2 1B in plain jax, the floor under meshkit's own step of it: both are timed in turn on one GPU.

The model and its training follow models/llama.py and meshkit/step/train_step.py: the same parameters, clipping and
AdamW, fp32 weights that multiply in bf16, and outputs of projections kept for the backward pass. Two things are as jax
does them by itself: gradients of weights and logits are bf16, where meshkit's are fp32.
"""

from __future__ import annotations

import functools
import operator
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Params = dict[str, Any]
_WARM_UP, _STEPS = 3, 12
_KEPT = jax.checkpoint_policies.save_only_these_names("projection")


@dataclass(frozen=True)
class Llama:
    """Sizes, and the ways of writing it down that are timed.

    Attributes:
        unrolled: layers are a Python loop, not a scan.
    """

    vocab: int = 128_256
    embed: int = 2048
    mlp: int = 8192
    layers: int = 16
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 64
    theta: float = 500_000.0
    eps: float = 1e-5
    dtype: Any = jnp.bfloat16
    attention: Any = "cudnn"
    unrolled: bool = False


WAYS: dict[str, dict[str, bool]] = {"floor": {}, "unrolled": {"unrolled": True}}
TOY = Llama(256, 128, 384, 2, 8, 4, 16, dtype=jnp.float32, attention="xla")


def init(c: Llama, key: jax.Array) -> Params:
    """Random weights, stacked over layers."""
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes = {
        "query": (c.embed, queries),
        "key": (c.embed, keys),
        "value": (c.embed, keys),
        "output": (queries, c.embed),
    }
    shapes |= {"gate": (c.embed, c.mlp), "up": (c.embed, c.mlp), "down": (c.mlp, c.embed)}
    each = jax.random.split(key, len(shapes) + 1)
    layers = {n: jax.random.normal(k, (c.layers, *s)) * s[0] ** -0.5 for k, (n, s) in zip(each, shapes.items())}
    layers |= {name: jnp.ones((c.layers, c.embed)) for name in ("attention_norm", "mlp_norm")}
    table = jax.random.normal(each[-1], (c.vocab, c.embed)) * c.embed**-0.5
    return {"embedding": table, "layers": layers, "norm": jnp.ones(c.embed)}


def norm(c: Llama, x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm in fp32."""
    h = x.astype(jnp.float32)
    return (h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + c.eps) * scale).astype(x.dtype)


def rotate(c: Llama, x: jax.Array) -> jax.Array:
    """Rotary positions of (batch, length, heads, head_dim)."""
    half = c.head_dim // 2
    angle = jnp.arange(x.shape[1])[:, None, None] * c.theta ** (-jnp.arange(half) / half)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def project(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x times a kernel; kept for the backward pass."""
    return checkpoint_name(x @ kernel.astype(x.dtype), "projection")


def block(c: Llama, x: jax.Array, p: Params) -> jax.Array:
    """One layer."""
    split = lambda y: y.reshape(*y.shape[:2], -1, c.head_dim)
    h = norm(c, x, p["attention_norm"])
    q, k, v = (split(project(h, p[name])) for name in ("query", "key", "value"))
    a = jax.nn.dot_product_attention(rotate(c, q), rotate(c, k), v, is_causal=True, implementation=c.attention)
    x = x + project(a.reshape(*x.shape[:2], -1), p["output"])
    h = norm(c, x, p["mlp_norm"])
    return x + project(jax.nn.silu(project(h, p["gate"])) * project(h, p["up"]), p["down"])


def loss(c: Llama, params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token."""
    layer = jax.checkpoint(functools.partial(block, c), policy=_KEPT, prevent_cse=c.unrolled)
    x = params["embedding"].astype(c.dtype)[tokens]
    if c.unrolled:
        for i in range(c.layers):
            x = layer(x, jax.tree.map(operator.itemgetter(i), params["layers"]))
    else:
        x = lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])[0]
    x = norm(c, x, params["norm"])
    logits = x @ params["embedding"].astype(c.dtype).T
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets).mean()


def optimizer(rate: float = 1e-4) -> optax.GradientTransformation:
    """Clipped AdamW, which leaves norms alone."""
    decayed = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "norm" not in str(path[-1]), params)
    return optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
    )


def step(c: Llama, state: tuple[Params, Any], tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
    """One update: ((parameters, moments), loss)."""
    params, moments = state
    value, gradients = jax.value_and_grad(functools.partial(loss, c))(params, tokens, targets)
    updates, moments = optimizer().update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


# The model ends here. What follows times it.


def measure(folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
    """Seconds of a step of meshkit's and of the floor, in turn, then of other ways of writing it down."""
    from benchmarks.gpu.rows import trace

    c, shape = (TOY, (4, 64)) if toy else (Llama(), (8, 4096))
    traced, began = trace("llama_1b", toy), time.perf_counter()
    program = traced.compile().program
    yield {"meshkit: compile_s": time.perf_counter() - began}
    ids = jax.random.randint(jax.random.key(1), (shape[0], shape[1] + 1), 0, 256)
    batch = (ids[:, :-1], ids[:, 1:])
    floor, found = _compiled(c, batch)
    yield {f"floor: {key}": value for key, value in found.items()}
    times: dict[str, list[float]] = {"meshkit": [], "floor": []}
    for _ in range(2):
        times["meshkit"].append(_step_s(lambda: traced.start(program)))
        yield {"meshkit: step_s": statistics.mean(times["meshkit"]), "meshkit: steps_s": times["meshkit"]}
        times["floor"].append(_step_s(floor))
        yield {"floor: step_s": statistics.mean(times["floor"]), "floor: steps_s": times["floor"]}
    other, found = _compiled(replace(c, **WAYS["unrolled"]), batch)
    yield {f"unrolled: {key}": value for key, value in found.items()}
    yield {"unrolled: step_s": _step_s(other)}


def _compiled(c: Llama, batch: tuple[jax.Array, jax.Array]) -> tuple[Callable[[], Any], dict[str, Any]]:
    """A call that makes a state and what advances it, and what compiling took."""
    began = time.perf_counter()

    @jax.jit
    def start() -> tuple[Params, Any]:
        params = init(c, jax.random.key(0))
        return params, optimizer().init(params)

    program = jax.jit(functools.partial(step, c), donate_argnums=0).lower(jax.eval_shape(start), *batch).compile()
    memory = program.memory_analysis()
    found = {"compile_s": time.perf_counter() - began, "bytes": getattr(memory, "peak_memory_in_bytes", None)}
    return lambda: (start(), lambda state: program(state, *batch)), found


def _step_s(start: Callable[[], tuple[Any, Callable[[Any], tuple[Any, Any]]]]) -> float:
    """Return the seconds of a step, each waited for when the next one is under way; the state is let go of."""
    state, advance = start()
    state, value = advance(state)
    for _ in range(_WARM_UP - 1):
        state, value = advance(state)
    value.block_until_ready()
    began, last = time.perf_counter(), value
    for _ in range(_STEPS):
        state, value = advance(state)
        last.block_until_ready()
        last = value
    last.block_until_ready()
    return (time.perf_counter() - began) / _STEPS
