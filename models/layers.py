"""Building blocks of the transformer models: projections, norms, rotary positions, attention, look-up.

Every parameter carries its logical axes as nnx metadata (`out_sharding`), every large activation is constrained by
logical axis. A parameter may be stacked over layers: a leading `layers` dim that a scan takes apart.

**Precision rule.** A layer computes in the dtype of its activations, and the gradient of a weight is *produced*, and
therefore reduced over the mesh, in the dtype of the weight that the layer was given. So the caller picks the precision
of the gradient reduction by passing fp32 or bf16 weights, and the matmuls run in bf16 either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshkit.sharding import attention_implementation, constrain, current_scope, shard_over, shard_over_mesh

_PROJECTION = "projection"  # the name under which recomputation policies know a projection's output
HEAD_AXES = ("act_batch", "act_length", "act_heads", None)
KV_HEAD_AXES = ("act_batch", "act_length", "act_kv_heads", None)


def parameter(rngs: nnx.Rngs, init: jax.nn.initializers.Initializer, shape, axes, *, stack: int | None) -> nnx.Param:
    """An fp32 parameter with a logical axis per dim; `stack` adds a leading `layers` dim.

    flax must not apply the names itself (`eager_sharding`): they are logical, and no mesh is around.
    """
    if stack is not None:
        shape, axes = (stack, *shape), ("layers", *axes)
    return nnx.Param(init(rngs.params(), tuple(shape), jnp.float32), out_sharding=tuple(axes), eager_sharding=False)


class RMSNorm(nnx.Module):
    """Root-mean-square norm: x / sqrt(mean(x^2) + eps) * scale, computed in fp32 (Zhang and Sennrich, 2019)."""

    def __init__(self, embed: int, *, eps: float, stack: int | None = None, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = parameter(rngs, jax.nn.initializers.ones, (embed,), ("embed",), stack=stack)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = x.astype(jnp.float32)
        h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + self.eps)
        return (h * self.scale.get_value().astype(jnp.float32)).astype(x.dtype)


class Projection(nnx.Module):
    """A linear map without bias from the trailing `inputs` dims to the `outputs` dims, e.g. embed -> heads, head_dim.

    Args:
        name: shows in HLO as the scope of the matmul.
        inputs: logical axis -> size of the dims contracted away.
        outputs: logical axis -> size of the dims that come in their place.
        scale: factor on the 1/sqrt(fan_in) standard deviation of the initial weights.
    """

    def __init__(self, name: str, inputs: dict, outputs: dict, *, stack: int | None = None, scale=1.0, rngs: nnx.Rngs):
        self.name, self.contracted = name, len(inputs)
        stddev = scale / math.sqrt(math.prod(inputs.values()))
        shape, axes = (*inputs.values(), *outputs.values()), (*inputs, *outputs)
        self.kernel = parameter(rngs, jax.nn.initializers.normal(stddev), shape, axes, stack=stack)

    def __call__(self, x: jax.Array, out_dtype=None) -> jax.Array:
        with jax.named_scope(self.name):
            y = project(x, self.kernel.get_value(), self.contracted, out_dtype or x.dtype)
            return checkpoint_name(y, _PROJECTION)


def project(x: jax.Array, kernel: jax.Array, contracted: int, out_dtype) -> jax.Array:
    """x contracted with the kernel over its first `contracted` dims, under the precision rule of this module.

    The kernel is cast once, outside of the custom_vjp, so that a recomputed forward pass and the backward pass share
    the cast kernel, and with it the all-gather that FSDP puts behind the cast.
    """
    return _project(x, kernel, lax.stop_gradient(kernel.astype(x.dtype)), contracted, out_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _project(x, kernel, cast, contracted, out_dtype):
    del kernel  # takes the gradient
    return _dot(x, cast, _last(x, contracted), range(contracted), out_dtype)


def _project_forward(x, kernel, cast, contracted, out_dtype):
    like = jnp.zeros((), kernel.dtype)
    return _project(x, kernel, cast, contracted, out_dtype), (x, cast, like)


def _project_backward(contracted, out_dtype, residuals, g):
    x, cast, like = residuals
    g = g.astype(x.dtype)
    dx = _dot(g, cast, _last(g, cast.ndim - contracted), range(contracted, cast.ndim), x.dtype)
    leading = range(x.ndim - contracted)
    return dx, _dot(x, g, leading, leading, like.dtype), None


_project.defvjp(_project_forward, _project_backward)


def _dot(a, b, a_dims, b_dims, dtype) -> jax.Array:
    numbers = ((tuple(a_dims), tuple(b_dims)), ((), ()))
    return lax.dot_general(a, b, numbers, preferred_element_type=dtype)


def _last(x: jax.Array, n: int) -> range:
    return range(x.ndim - n, x.ndim)


def lookup(table: jax.Array, tokens: jax.Array, dtype) -> jax.Array:
    """Rows of a [vocab, embed] table, in `dtype`; the gradient is scattered, and reduced, in fp32.

    Always in fp32, since a frequent token adds up thousands of rows, more than bf16 can count.

    The table is gathered over whatever shards `embed` and stays cut over `act_vocab`, which the partitioner turns into
    a masked look-up and one all-reduce. Left to itself it would replicate the batch instead.
    """
    # The backward pass is traced outside of the sharding scope, so what it needs of the scope is taken here.
    scatter = _scatter_shards(table.shape, tokens.shape) or partial(_scatter_rows, table.shape)
    return _lookup(table, tokens, dtype, scatter)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: jax.Array, tokens: jax.Array, dtype, scatter: Callable) -> jax.Array:
    return constrain(table.astype(dtype), "act_vocab", None)[tokens]


def _lookup_forward(table, tokens, dtype, scatter):
    return _lookup(table, tokens, dtype, scatter), (tokens, jnp.zeros((), table.dtype))


def _lookup_backward(dtype, scatter, residuals, g):
    tokens, like = residuals
    return scatter(tokens, g).astype(like.dtype), None


def _scatter_rows(shape: tuple[int, ...], tokens: jax.Array, g: jax.Array) -> jax.Array:
    """[vocab, embed] fp32 sums of the rows of g by token; tokens outside of the table are dropped."""
    return jnp.zeros(shape, jnp.float32).at[tokens].add(g.astype(jnp.float32), mode="drop")


def _scatter_shards(shape: tuple[int, ...], rows: tuple[int, ...]) -> Callable | None:
    """`_scatter_rows` by hand on each GPU's shards, for a table cut along embed and vocab; None for any other.

    The axes that cut embed move from the batch to the columns in one all-to-all; each GPU then scatters the rows of
    all of them into its own columns and its own part of the vocabulary. The partitioner, left to itself, gathers the
    whole batch on every GPU as soon as the vocabulary is cut.
    """
    scope = current_scope()
    if scope is None:
        return None
    (embed,) = scope.rules.spec_for(("embed",), kind="gradients")
    batch, length, vocab = scope.rules.spec_for(("act_batch", "act_length", "act_vocab"), kind="activations")
    pieces = {axes: math.prod(scope.mesh.shape[a] for a in axes) for axes in (embed, batch, length, vocab)}
    cut_alike = embed and batch[len(batch) - len(embed) :] == embed and not set(vocab) & {*batch, *length}
    cuts = ((shape[0], vocab), (shape[1], embed), (rows[0], batch), (rows[1], length))
    divides = all(size % pieces[axes] == 0 for size, axes in cuts)
    if not (cut_alike and vocab and divides):
        return None
    own_shape = (shape[0] // pieces[vocab], shape[1] // pieces[embed])
    rest = batch[: len(batch) - len(embed)]

    def local(tokens: jax.Array, g: jax.Array) -> jax.Array:
        g = lax.all_to_all(g, embed, split_axis=2, concat_axis=0, tiled=True)
        row = tokens - lax.axis_index(vocab) * own_shape[0]
        sums = _scatter_rows(own_shape, jnp.where(row < 0, own_shape[0], row), g)
        return lax.psum(sums, (*rest, *length)) if rest or length else sums

    return shard_over_mesh(local, ((rest, length), (batch, length, ())), (vocab, embed))


_lookup.defvjp(_lookup_forward, _lookup_backward)


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


_KEEPS_PROJECTIONS = ("dots", "dots_saveable", "dots_with_no_batch_dims_saveable")
_POLICIES = (*_KEEPS_PROJECTIONS, "everything_saveable", "nothing_saveable")


def check_remat(policy: str) -> str:
    """The policy itself.

    Raises:
        ValueError: `recompute` does not know it.
    """
    if policy not in ("none", "full", *_POLICIES):
        raise ValueError(f"remat policy '{policy}' is not one of none, full, {', '.join(_POLICIES)}.")
    return policy


def recompute(fn: Callable, policy: str) -> Callable:
    """fn under `jax.checkpoint`.

    Args:
        fn: a layer.
        policy: `none` (keep all), `full` (keep nothing but the input), `dots` (keep what projections give), or a name
            in jax.checkpoint_policies.
    """
    if policy == "none":
        return fn
    policies, chosen = jax.checkpoint_policies, None
    if policy == "dots":
        chosen = policies.save_only_these_names(_PROJECTION)
    elif policy in _KEEPS_PROJECTIONS:
        # the matmul of a projection is inside a custom_vjp, where policies do not look: it goes by its name
        chosen = policies.save_from_both_policies(
            getattr(policies, policy), policies.save_only_these_names(_PROJECTION)
        )
    elif policy != "full":
        chosen = getattr(policies, policy)
    # A scan's body is compiled once for all layers, so nothing outside of it could be merged with what it recomputes.
    return jax.checkpoint(fn, policy=chosen, prevent_cse=False)
