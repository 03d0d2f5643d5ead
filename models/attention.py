"""Causal self-attention with rotary positions, by the implementation that the target GPUs have."""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp

from meshkit.sharding import attention_implementation, constrain, current_scope, shard_over

HEAD_AXES = ("act_batch", "act_length", "act_heads", None)
KV_HEAD_AXES = ("act_batch", "act_length", "act_kv_heads", None)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding of [batch, length, heads, head_dim], halves convention (Su et al., 2021)."""
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(q k^T / sqrt(head_dim)) v under a causal mask; k and v may have fewer heads (Ainslie et al., 2023).

    The implementation follows the target of the sharding scope. cuDNN's kernel cannot be partitioned, so each GPU runs
    it on its own batch and heads.

    Args:
        q: [batch, length, heads, head_dim].
        k, v: [batch, length, kv_heads, head_dim].
    """
    k, v = (_spread_heads(x, q.shape[2]) for x in (k, v))
    q, k, v = constrain(q, *HEAD_AXES), constrain(k, *KV_HEAD_AXES), constrain(v, *KV_HEAD_AXES)
    attend = partial(jax.nn.dot_product_attention, is_causal=True)
    if attention_implementation() == "cudnn" and _cudnn_takes(q):
        whole = ("act_batch", None, "act_heads", None)  # every query needs every earlier key
        attend = shard_over(partial(attend, implementation="cudnn"), (whole, whole, whole), whole)
    else:
        attend = partial(attend, implementation="xla")
    return constrain(attend(q, k, v), *HEAD_AXES)


def _spread_heads(x: jax.Array, heads: int) -> jax.Array:
    """k or v with heads repeated until the pieces of `act_heads` divide them, so that each GPU holds those it needs."""
    scope = current_scope()
    pieces = scope.shard_count("act_heads") if scope else 1
    kv_heads = x.shape[2]
    wanted = math.lcm(kv_heads, pieces)
    if wanted == kv_heads or heads % wanted:
        return x
    return jnp.repeat(x, wanted // kv_heads, axis=2)


def _cudnn_takes(q: jax.Array) -> bool:
    """Whether cuDNN's fused attention supports the shape, with heads that every GPU has the same number of."""
    scope = current_scope()
    pieces = scope.shard_count("act_heads") if scope else 1
    _, length, heads, head_dim = q.shape
    half_precision = q.dtype in (jnp.bfloat16, jnp.float16)
    return half_precision and head_dim % 8 == 0 and head_dim <= 128 and length % 64 == 0 and heads % pieces == 0
