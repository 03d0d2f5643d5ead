"""Attention of a block of queries to a block of keys, and its gradients, as one GPU computes them.

Context parallelism computes a row of the softmax in several blocks of keys. Each block gives its own output and the
log-sum-exp of its scores, and `merge` combines them. The backward pass of a block needs no other block, only the row's
final output and log-sum-exp (Dao, 2023, FlashAttention-2, section 3.1). Temporary memory is linear in the lengths of
the blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching, lax
from jax._src.cudnn.fused_attention_stablehlo import MaskType
from jax._src.cudnn.fused_attention_stablehlo import dot_product_attention as cudnn_attention
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal
from jaxtyping import Array, Float

ATTENTION = "attention"  # the name by which `jax.checkpoint` policies find the output and its log-sum-exp
BLOCK = 512  # rows and columns of the scores that the plain implementation computes at once
QueryBlock = Float[Array, "batch queries heads head_dim"]
KeyBlock = Float[Array, "batch keys kv_heads head_dim"]
RowSums = Float[Array, "batch heads queries"]  # log-sum-exp of each row of scores


def attend(
    q: QueryBlock, k: KeyBlock, v: KeyBlock, *, causal: bool, implementation: str, window: int | None = None
) -> tuple[QueryBlock, RowSums]:
    """Return softmax(q k^T / sqrt(head_dim)) v and the log-sum-exp of each row of scores.

    Args:
        q: queries.
        k, v: keys and values; kv_heads divides heads.
        causal: query i sees keys 0..i; there must be as many keys as queries.
        implementation: `cudnn` or `xla`.
        window: for a causal block: query i sees only the last `window` keys up to key i; None: all of them.

    Returns:
        Output, fp32 from `xla` and of q's dtype from `cudnn`, and log-sum-exp in fp32.
    """
    if implementation == "cudnn":
        return _cudnn_attend(q, k, v, causal, window)
    return _attend(q, k, v, causal, window)


def attend_gradients(
    q: QueryBlock,
    k: KeyBlock,
    v: KeyBlock,
    out: QueryBlock,
    lse: RowSums,
    g: QueryBlock,
    *,
    causal: bool,
    implementation: str,
    window: int | None = None,
) -> tuple[QueryBlock, KeyBlock, KeyBlock]:
    """Return the contribution of this block to the gradients of q, k and v, in fp32.

    Args:
        q, k, v, causal, implementation, window: as in `attend`.
        out: final output of the queries, over all blocks of keys.
        lse: final log-sum-exp of the queries, over all blocks of keys.
        g: gradient of out.
    """
    if implementation == "cudnn":
        found = _cudnn_gradients(q, k, v, out, lse, g, causal, window)
    else:
        found = _gradients(q, k, v, out, lse, g, causal, window)
    dq, dk, dv = (x.astype(jnp.float32) for x in found)
    return dq, dk, dv


def merge(first: tuple[QueryBlock, RowSums], second: tuple[QueryBlock, RowSums]) -> tuple[QueryBlock, RowSums]:
    """Return the output (fp32) and log-sum-exp of queries over the keys of two blocks.

    Args:
        first, second: results of `attend` for the same queries and two blocks of keys that share no key.
    """
    lse = jnp.logaddexp(first[1], second[1])
    one, other = (out.astype(jnp.float32) * _per_query(jnp.exp(part - lse)) for out, part in (first, second))
    return one + other, lse


def with_sinks(out: QueryBlock, lse: RowSums, sinks: Float[Array, " heads"]) -> tuple[QueryBlock, RowSums]:
    """Return the output and log-sum-exp of rows to which their head's attention sink is added.

    A sink (Xiao et al., 2023) is the score of one more key, whose value is zero. For the backward pass, give the
    results to `attend_gradients` and `sink_gradients`.

    Args:
        out, lse: final output and log-sum-exp of the queries, without the sink.
        sinks: the score of each head.
    """
    total = jnp.logaddexp(lse, sinks.astype(jnp.float32)[:, None])
    return (out.astype(jnp.float32) * _per_query(jnp.exp(lse - total))).astype(out.dtype), total


def sink_gradients(
    out: QueryBlock, lse: RowSums, g: QueryBlock, sinks: Float[Array, " heads"]
) -> Float[Array, " heads"]:
    """Return the gradient of the sinks: weight * (d(weight) - g . out), summed over the rows.

    d(weight) = g . value is 0, since a sink's value is 0.

    Args:
        out, lse: results of `with_sinks`.
        g: gradient of out.
        sinks: the score of each head.
    """
    delta = jnp.einsum("bqhd,bqhd->bhq", g, out, preferred_element_type=jnp.float32)
    weights = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
    return -jnp.sum(weights * delta, axis=(0, 2)).astype(sinks.dtype)


def _per_query(x: jax.Array) -> jax.Array:
    """Return [batch, heads, queries] as [batch, queries, heads, 1]."""
    return jnp.swapaxes(x, 1, 2)[..., None]


# The plain implementation computes the scores of one query block and one key block at a time. It skips hidden pairs.


def _attend(q, k, v, causal, window=None):
    pairs, size = visible_pairs(q.shape[1], k.shape[1], causal, window)
    grouped = _group(q, k.shape[2])
    batch, queries, kv_heads, group, _ = grouped.shape
    out = jnp.zeros(grouped.shape, jnp.float32)
    top = jnp.full((batch, kv_heads, group, queries), -jnp.inf)
    total = jnp.zeros_like(top)

    def step(carry, pair):
        out, top, total = carry
        i, j = pair
        scores = _scores(_rows(grouped, i, size[0]), _rows(k, j, size[1]), i, j, causal, window)
        old = _rows(top, i, size[0], axis=3)
        new = jnp.maximum(old, scores.max(axis=-1))
        weights, keep = jnp.exp(scores - new[..., None]), jnp.exp(old - new)
        added = jnp.einsum("bkgqs,bskd->bqkgd", weights.astype(v.dtype), _rows(v, j, size[1]),
                           preferred_element_type=jnp.float32)  # fmt: skip
        kept = _rows(out, i, size[0]) * jnp.moveaxis(keep, 3, 1)[..., None]
        sums = _rows(total, i, size[0], axis=3) * keep + weights.sum(axis=-1)
        return (
            _put(out, kept + added, i, size[0]),
            _put(top, new, i, size[0], axis=3),
            _put(total, sums, i, size[0], axis=3),
        ), None

    (out, top, total), _ = lax.scan(step, (out, top, total), pairs)
    out = out / jnp.moveaxis(total, 3, 1)[..., None]
    lse = (top + jnp.log(total)).reshape(batch, kv_heads * group, queries)
    return out.reshape(q.shape), lse


def _gradients(q, k, v, out, lse, g, causal, window=None):
    pairs, size = visible_pairs(q.shape[1], k.shape[1], causal, window)
    kv_heads = k.shape[2]
    queries, g5 = _group(q, kv_heads), _group(g.astype(q.dtype), kv_heads)
    # d(scores) = weights * (d(weights) - sum_over_keys(weights * d(weights))), and that sum is g . out
    delta = jnp.einsum("bqhd,bqhd->bhq", g, out, preferred_element_type=jnp.float32)
    shape = (q.shape[0], kv_heads, q.shape[2] // kv_heads, q.shape[1])
    lse, delta = lse.reshape(shape), delta.reshape(shape)

    def step(carry, pair):
        dq, dk, dv = carry
        i, j = pair
        q_i, g_i = _rows(queries, i, size[0]), _rows(g5, i, size[0])
        k_j, v_j = _rows(k, j, size[1]), _rows(v, j, size[1])
        weights = jnp.exp(_scores(q_i, k_j, i, j, causal, window) - _rows(lse, i, size[0], axis=3)[..., None])
        d_weights = jnp.einsum("bqkgd,bskd->bkgqs", g_i, v_j, preferred_element_type=jnp.float32)
        d_scores = weights * (d_weights - _rows(delta, i, size[0], axis=3)[..., None]) / math.sqrt(q.shape[-1])
        weights, d_scores = weights.astype(q.dtype), d_scores.astype(q.dtype)
        return (
            _add(dq, jnp.einsum("bkgqs,bskd->bqkgd", d_scores, k_j, preferred_element_type=jnp.float32), i, size[0]),
            _add(dk, jnp.einsum("bkgqs,bqkgd->bskd", d_scores, q_i, preferred_element_type=jnp.float32), j, size[1]),
            _add(dv, jnp.einsum("bkgqs,bqkgd->bskd", weights, g_i, preferred_element_type=jnp.float32), j, size[1]),
        ), None

    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (queries, k, v))
    (dq, dk, dv), _ = lax.scan(step, zeros, pairs)
    return dq.reshape(q.shape), dk, dv


def visible_pairs(
    queries: int, keys: int, causal: bool, window: int | None = None
) -> tuple[tuple[jax.Array, jax.Array], tuple[int, int]]:
    """Return the indices (query blocks, key blocks) of the pairs with visible keys, and the lengths of both blocks.

    With `causal`, the pair with a query block's own keys comes first. Every query sees a key there, whatever the
    window, so its running maximum is finite from then on.
    """
    size = _block(queries), _block(keys)
    i, j = np.indices((queries // size[0], keys // size[1]))
    seen = (j <= i) if causal else np.ones_like(i, bool)
    if window is not None:  # keep a pair if its first query and its last key are less than a window apart
        seen &= i * size[0] - ((j + 1) * size[1] - 1) < window
    i, j = np.nonzero(seen)
    order = np.lexsort((-j, i))
    i, j = i[order], j[order]
    return (jnp.asarray(i, jnp.int32), jnp.asarray(j, jnp.int32)), size


def _block(length: int) -> int:
    """Return the largest divisor of length that is at most BLOCK."""
    return next(size for size in range(min(BLOCK, length), 0, -1) if length % size == 0)


def _scores(q_i, k_j, i, j, causal, window=None):
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q_i, k_j, preferred_element_type=jnp.float32) / math.sqrt(q_i.shape[-1])
    if not causal:
        return scores
    rows, columns = q_i.shape[1], k_j.shape[1]
    distance = (i * rows + jnp.arange(rows))[:, None] - (j * columns + jnp.arange(columns))
    visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return jnp.where(visible, scores, -jnp.inf)


def _group(q: jax.Array, kv_heads: int) -> jax.Array:
    """Return [batch, length, heads, head_dim] as [batch, length, kv_heads, heads / kv_heads, head_dim]."""
    return q.reshape(*q.shape[:2], kv_heads, q.shape[2] // kv_heads, q.shape[3])


def _rows(x: jax.Array, index, size: int, axis: int = 1) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _put(x: jax.Array, rows: jax.Array, index, size: int, axis: int = 1) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, rows, index * size, axis)


def _add(x: jax.Array, rows: jax.Array, index, size: int) -> jax.Array:
    return _put(x, _rows(x, index, size) + rows, index, size)


# cuDNN's forward kernel returns the log-sum-exp, and its backward kernel takes it. jax.nn.dot_product_attention rounds
# it to q's dtype, and its caller cannot choose the inputs of the backward kernel. So jax's function is traced here, and
# its forward and backward kernels are called separately.


def _cudnn_attend(q, k, v, causal, window=None):
    forward, _ = _cudnn_kernels(q, k, v, causal, window)
    return forward(q, k, v)


def _cudnn_gradients(q, k, v, out, lse, g, causal, window=None):
    _, backward = _cudnn_kernels(q, k, v, causal, window)
    return backward(q, k, v, g.astype(q.dtype), out.astype(q.dtype), lse)


def fused_attention(
    q: QueryBlock, k: KeyBlock, v: Float[Array, "batch keys kv_heads value_dim"]
) -> Float[Array, "batch queries heads value_dim"]:
    """Return causal attention by cuDNN; the heads of values may be smaller than those of queries and keys.

    `jax.nn.dot_product_attention` refuses such values, and the `jax.vmap` rule of its cuDNN primitive assumes that
    values are as large as keys.
    """
    forward, backward = (mapped_as_batch(kernel) for kernel in _cudnn_kernels(q, k, v, True))
    return differentiable(forward, lambda q, k, v, out, lse, g: backward(q, k, v, g, out, lse))(q, k, v)


def differentiable(forward: Callable, backward: Callable) -> Callable[..., jax.Array]:
    """Return attention whose backward pass needs only q, k, v, the output and the log-sum-exp.

    Args:
        forward: (q, k, v) -> (output, log-sum-exp).
        backward: (q, k, v, output, log-sum-exp, gradient of the output) -> gradients of q, k and v.
    """

    @jax.custom_vjp
    def attention(q, k, v):
        return forward(q, k, v)[0]

    def save(q, k, v):
        out, lse = (checkpoint_name(x, ATTENTION) for x in forward(q, k, v))
        return out, (q, k, v, out, lse)

    attention.defvjp(save, lambda residuals, g: backward(*residuals, g))
    return attention


def mapped_as_batch(kernel: Callable) -> Callable:
    """Wrap a kernel so that `vmap` merges the mapped dim into the batch and calls it once."""

    @custom_batching.custom_vmap
    def mapped(*arrays):
        return kernel(*arrays)

    @mapped.def_vmap
    def _(_axis_size, in_batched, *arrays):
        count = next(a.shape[0] for a, batched in zip(arrays, in_batched) if batched)
        each = (a if batched else jnp.stack([a] * count) for a, batched in zip(arrays, in_batched))
        outputs = mapped(*(a.reshape(-1, *a.shape[2:]) for a in each))
        return tuple(x.reshape(count, -1, *x.shape[1:]) for x in outputs), (True,) * len(outputs)

    return mapped


def _cudnn_kernels(q, k, v, causal, window=None):
    """Return jax's cuDNN calls, (q, k, v) -> (out, lse) and (q, k, v, g, out, lse) -> (dq, dk, dv)."""
    mask, g = MaskType.CAUSAL if causal else MaskType.NO_MASK, (*q.shape[:3], v.shape[-1])

    def both(q, k, v, g):
        def fused(q, k, v):
            scale = 1 / math.sqrt(q.shape[-1])
            return cudnn_attention(q, k, v, scale=scale, mask_type=mask, sliding_window_length=window)

        return jax.vjp(fused, q, k, v)[1](g)

    given = ((q.shape, q), (k.shape, k), (v.shape, v), (g, q))
    traced = jax.make_jaxpr(both)(*(jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in given))
    jaxpr, constants = traced.jaxpr, dict(zip(traced.jaxpr.constvars, traced.consts))
    results = [g, (q.shape[0], q.shape[2], q.shape[1])]  # shapes by which the forward kernel is found
    (at,) = [n for n, e in enumerate(jaxpr.eqns) if [getattr(o.aval, "shape", None) for o in e.outvars] == results]
    computed = jaxpr.eqns[at].outvars

    def forward(q, k, v):
        values = constants | _empties(jaxpr, q) | dict(zip(jaxpr.invars, (q, k, v)))
        return _evaluate(jaxpr.eqns[: at + 1], values, computed)

    def backward(q, k, v, g, out, lse):
        values = constants | _empties(jaxpr, q) | dict(zip([*jaxpr.invars, *computed], (q, k, v, g, out, lse)))
        return _evaluate([*jaxpr.eqns[:at], *jaxpr.eqns[at + 1 :]], values, jaxpr.outvars)

    return forward, backward


def _empties(jaxpr, q):
    """Return the empty arrays that jax passes for absent inputs of a kernel (a bias, a seed), as slices of q.

    As constants they would be computed once for all layers, in a separate shard_map, and become arguments of the
    layers' shard_maps. jaxlib 0.11 crashes on arguments without elements.
    """
    made = [e.outvars[0] for e in jaxpr.eqns if not e.primitive.multiple_results and not e.outvars[0].aval.size]
    return {x: q[:0].reshape(x.aval.shape).astype(x.aval.dtype) for x in made}


def _evaluate(equations, values, wanted):
    """Evaluate the equations of a jaxpr whose results are not in `values` yet; return the values of `wanted`."""

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for e in equations:
        if all(out in values for out in e.outvars):
            continue
        results = e.primitive.bind(*map(read, e.invars), **e.params)
        values.update(zip(e.outvars, results if e.primitive.multiple_results else [results]))
    return tuple(map(read, wanted))
