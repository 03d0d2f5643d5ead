"""Causal self-attention with rotary positions, also over a sequence that is cut over GPUs (context parallelism).

The target GPUs decide the implementation. A model brings its tokens into the order of `token_order(...)` before the
first layer, and its hidden states back into natural order after the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Shaped

from meshkit.errors import ConfigError
from meshkit.parallel import gathered_attention, ring_attention, ulysses_attention
from meshkit.parallel.blocks import attend as attend_blocks
from meshkit.parallel.blocks import attend_gradients, fused_attention, sink_gradients, with_sinks
from meshkit.parallel.context import ATTENTION, Kernels, causal_kernels
from meshkit.parallel.layout import ContextLayout, Keys, Queries, balance, positions_here, restore
from meshkit.sharding import attention_implementation, constrain, current_scope, shard_over, sharding_scope
from meshkit.sharding.constrain import dividing_axes, partition_spec, shard_map_here
from models.options import nearest

HEAD_AXES = ("act_batch", "act_length", "act_heads", None)
KV_HEAD_AXES = ("act_batch", "act_length", "act_kv_heads", None)
Values = Float[Array, "batch length kv_heads value_dim"]
Results = Float[Array, "batch length heads value_dim"]
CONTEXTS = {"all_gather": gathered_attention, "ring": ring_attention, "ulysses": ulysses_attention}


def check_context(context: str) -> str:
    """Return the kind of context parallelism unchanged.

    Raises:
        ValueError: `causal_attention` does not know it.
    """
    if context not in CONTEXTS:
        known = ", ".join(CONTEXTS)
        raise ValueError(f"context = {context!r} is not one of {known}.{nearest(context, CONTEXTS)}")
    return context


@dataclass(frozen=True)
class Yarn:
    """Rotary positions for sequences longer than those a model was first trained on (Peng et al., 2023, YaRN).

    A pair of dims that turns more than `fast` times in the original length keeps its frequency. The frequency of a pair
    that turns less than `slow` times is divided by `factor`. In between, the kept and the divided frequency are
    mixed in proportion to the pair's index. Queries and keys are each multiplied by `scale`.

    Attributes:
        factor: longest sequence divided by the original length.
        original_length: length of the sequences in the first training, in tokens.
        fast, slow: numbers of turns in the original length, `beta_fast` and `beta_slow` of other programs.
        truncate: round the first and last index of the mixed pairs to whole numbers.
    """

    factor: float
    original_length: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = False

    @property
    def scale(self) -> float:
        """Factor on queries and on keys: the square root of 1 / t in section 3.4 of the paper."""
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, plain: Float[Array, " half"], theta: float) -> Float[Array, " half"]:
        """Return the frequency of each pair of dims, from its frequency `plain` without YaRN."""
        half = plain.shape[0]
        first, last = (
            half * math.log(self.original_length / (turns * 2 * math.pi)) / math.log(theta)
            for turns in (self.fast, self.slow)
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0.0), min(last, 2.0 * half - 1)
        share = jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / max(last - first, 0.001), 0, 1)
        return plain * (1 - share) + plain / self.factor * share


def rotate(
    x: Queries, theta: float, positions: Int[Array, " length"] | None = None, yarn: Yarn | None = None
) -> Queries:
    """Apply rotary position embedding to x, in the halves convention (Su et al., 2021).

    Args:
        positions: position of each token in its sequence; 0, 1, ... by default.
        yarn: how positions are scaled; None does not scale them.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    frequency = frequency if yarn is None else yarn.frequencies(frequency, theta)
    positions = jnp.arange(x.shape[1]) if positions is None else positions
    angle = positions.astype(jnp.float32)[:, None, None] * frequency
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = (turn(angle) * (yarn.scale if yarn else 1.0) for turn in (jnp.cos, jnp.sin))
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@dataclass(frozen=True)
class TokenOrder:
    """The order in which layers see the tokens of a sequence.

    It is the natural order, or the balanced order of `meshkit.parallel.layout`, in which every GPU has the same share
    of a causal mask.

    Attributes:
        layout: the mesh axes that cut the length; None if the length is not cut.
        balanced: whether the order is balanced.
    """

    layout: ContextLayout | None = None
    balanced: bool = False

    def positions(self, length: int) -> Int[Array, " {length}"]:
        """Return the position of each token in its sequence."""
        if self.layout is None:
            return jnp.arange(length)
        return positions_here(length, self.layout, balanced=self.balanced)

    def enter(self, x: Shaped[Array, "*dims"], *logical_axes: str | None) -> Shaped[Array, "*dims"]:
        """Bring x from natural order into this order; `logical_axes` name its dims, the second of which is length."""
        return balance(x, self.layout, _spec(x, logical_axes)) if self.layout and self.balanced else x

    def leave(self, x: Shaped[Array, "*dims"], *logical_axes: str | None) -> Shaped[Array, "*dims"]:
        """Bring x from this order into natural order."""
        return restore(x, self.layout, _spec(x, logical_axes)) if self.layout and self.balanced else x


NATURAL = TokenOrder()


def token_order(context: str, length: int) -> TokenOrder:
    """Return the token order that this kind of context parallelism needs under the scope's rules and mesh.

    Raises:
        ConfigError: the length does not divide as `ring` needs it.
    """
    layout = _length_layout()
    if layout is None or _stays_whole(context, length, layout):
        return NATURAL
    if context == "ulysses":
        return TokenOrder(layout)
    layout.check_balanced(length)
    return TokenOrder(layout, balanced=True)


def causal_attention(
    q: Queries, k: Keys, v: Values, context: str = "all_gather", order: TokenOrder = NATURAL
) -> Results:
    """Return softmax(q k^T / sqrt(head_dim)) v, causally masked; k and v may have fewer heads (Ainslie et al., 2023).

    The target of the sharding scope decides the implementation. cuDNN's kernel cannot be partitioned, so each GPU runs
    it on its own batch and heads and, where rules cut `act_length`, on its own queries.

    Heads of values may be smaller than heads of queries and keys, as in latent attention. cuDNN accepts such values
    from Hopper on. Where `act_length` is cut, and without cuDNN, zeros pad them to the size of the keys.

    Args:
        q, k, v: queries, keys and values.
        context: how a GPU gets the keys and values of other GPUs where rules cut `act_length`: `all_gather` (every GPU
            gathers all of them), `ring` (they travel around a ring), `ulysses` (heads are cut instead of the length).
            `meshkit.parallel.context` has the cost of each.
        order: order of the tokens; a model that calls `token_order` saves reordering q, k, v and the result here.

    Raises:
        ValueError: no such context.
        ConfigError: sizes that the mesh does not divide.
    """
    check_context(context)
    k, v = (_spread_heads(x, q.shape[2]) for x in (k, v))
    q, k, v = constrain(q, *HEAD_AXES), constrain(k, *KV_HEAD_AXES), constrain(v, *KV_HEAD_AXES)
    layout = _length_layout()
    if layout is not None and not _stays_whole(context, q.shape[1], layout):
        attend = _with_equal_heads(_over_length(q, k, context, order))
    elif attention_implementation() == "cudnn" and _cudnn_takes(q, v):
        whole = ("act_batch", None, "act_heads", None)
        attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
        if v.shape[-1] != q.shape[-1]:
            attend = fused_attention
        attend = shard_over(attend, (whole, whole, whole), whole)
    else:
        attend = _with_equal_heads(partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"))
    return constrain(attend(q, k, v), *HEAD_AXES)


def _with_equal_heads(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return `attend` for values whose heads may be smaller than the keys': it pads them and cuts the result back."""

    def equal(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        size = v.shape[-1]
        missing = k.shape[-1] - size
        return attend(q, k, jnp.pad(v, [(0, 0)] * 3 + [(0, missing)]))[..., :size] if missing else attend(q, k, v)

    return equal


def sink_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    sinks: Float[Array, " heads"],
    context: str = "all_gather",
    window: int | None = None,
    order: TokenOrder = NATURAL,
) -> Queries:
    """Return `causal_attention` with one more score in each row of the softmax: the head's sink (Xiao et al., 2023).

    The kernel runs without the sink and returns the log-sum-exp of each row, which gives the factor that adds the sink
    to the output. The kernel's backward pass then gets the output and log-sum-exp with the sink. No scores are stored.

    Args:
        q, k, v: queries, keys and values.
        sinks: the sink's score in each head.
        context: how a GPU gets other GPUs' keys and values where rules cut `act_length`: `all_gather` or `ring`.
            With a window only the neighbours send keys and values.
        window: how many keys a query sees: its own and those before it. None means all of them.
        order: order of the tokens, as in `causal_attention`.

    Raises:
        ConfigError: sizes do not divide, or rules cut `act_length` while `context` is `ulysses`.
    """
    k, v = (_spread_heads(x, q.shape[2]) for x in (k, v))
    q, k, v = constrain(q, *HEAD_AXES), constrain(k, *KV_HEAD_AXES), constrain(v, *KV_HEAD_AXES)
    layout = _length_layout()
    if layout is None or _stays_whole(context, q.shape[1], layout):
        return constrain(_with_sinks(q, k, v, sinks, *_whole_kernels(q, k, v, window)), *HEAD_AXES)
    if context == "ulysses":
        message = "context = 'ulysses' cuts heads, which sinks do not follow."
        raise ConfigError(message, hint='context = "all_gather" or "ring"')
    layout = _layout_of(q, k)
    layout.check(q, k, v)
    if not order.balanced:
        q, k, v = (balance(x, layout, layout.array) for x in (q, k, v))
    out = _with_sinks(q, k, v, sinks, *causal_kernels(q, layout, context, window))
    return constrain(out if order.balanced else restore(out, layout, layout.array), *HEAD_AXES)


def _whole_kernels(q: Queries, k: Keys, v: Keys, window: int | None) -> Kernels:
    """Return the forward and backward pass of attention where every GPU has the whole length of its batch and heads."""
    whole, rows = ("act_batch", None, "act_heads", None), ("act_batch", "act_heads", None)
    fused = attention_implementation() == "cudnn" and _cudnn_takes(q, v)
    how = {"causal": True, "implementation": "cudnn" if fused else "xla", "window": window}
    forward, backward = partial(attend_blocks, **how), partial(attend_gradients, **how)
    if not _divides(q, k):
        return forward, backward
    forward = _on_each_gpu(forward, (whole,) * 3, (whole, rows))
    return forward, _on_each_gpu(backward, (whole,) * 4 + (rows, whole), (whole,) * 3)


def _with_sinks(
    q: Queries, k: Keys, v: Keys, sinks: Float[Array, " heads"], forward: Callable, backward: Callable
) -> Queries:
    """Run attention with a custom backward pass, whose residuals are q, k, v, sinks, the output and log-sum-exp."""

    def save(q, k, v, sinks):
        out, lse = forward(q, k, v)
        out, lse = with_sinks(out, lse, sinks)
        out, lse = checkpoint_name(out.astype(q.dtype), ATTENTION), checkpoint_name(lse, ATTENTION)
        return out, (q, k, v, sinks, out, lse)

    def gradients(saved, g):
        q, k, v, sinks, out, lse = saved
        found = backward(q, k, v, out, lse, g)
        return *(d.astype(x.dtype) for d, x in zip(found, (q, k, v))), sink_gradients(out, lse, g, sinks)

    @jax.custom_vjp
    def attention(q, k, v, sinks):
        return save(q, k, v, sinks)[0]

    attention.defvjp(save, gradients)
    return attention(q, k, v, sinks)


def _divides(q: Queries, k: Keys) -> bool:
    """Return whether every GPU has the same number of sequences, query heads and key heads; False without a scope."""
    scope = current_scope()
    if scope is None:
        return False
    pieces = scope.shard_count("act_heads")
    return q.shape[0] % scope.shard_count("act_batch") == q.shape[2] % pieces == k.shape[2] % pieces == 0


def _on_each_gpu(fn: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
    """Return fn sharded as by `shard_over`, for a function with several results."""
    scope = current_scope()
    assert scope is not None
    spec_of = lambda axes: partition_spec(scope.rules.spec_for(axes, kind="activations"))

    def local(*args):
        with sharding_scope(None, None):
            return fn(*args)

    return shard_map_here(local, scope.mesh, tuple(map(spec_of, inputs)), tuple(map(spec_of, outputs)))


def _over_length(q: jax.Array, k: jax.Array, context: str, order: TokenOrder):
    """Return the context-parallel attention function for the mesh axes of the scope's rules."""
    cut = _layout_of(q, k)
    options = {} if context == "ulysses" else {"balanced": order.balanced}
    return partial(CONTEXTS[context], mesh=cut.mesh, axis=cut.length, batch=cut.batch, heads=cut.heads, **options)


def _layout_of(q: jax.Array, k: jax.Array) -> ContextLayout:
    """Return how the scope's rules cut queries and keys, without axes that do not divide a dim."""
    scope = current_scope()
    assert scope is not None
    batch, length, heads, _ = scope.rules.spec_for(HEAD_AXES, kind="activations")
    pieces = scope.shard_count("act_heads")
    heads = heads if q.shape[2] % pieces == 0 == k.shape[2] % pieces else ()
    axes = length or scope.manual_axes("act_length")
    return ContextLayout(scope.mesh, axes, dividing_axes(batch, q.shape[0], scope.mesh), heads)


def _length_layout() -> ContextLayout | None:
    """Return how rules cut `act_length`, or how a pipeline has cut it; None if it is whole, or outside of a scope."""
    scope = current_scope()
    if scope is None:
        return None
    (length,) = scope.rules.spec_for(("act_length",), kind="activations")
    layout = ContextLayout(scope.mesh, length or scope.manual_axes("act_length"))
    return layout if layout.ways > 1 else None


def _stays_whole(context: str, length: int, layout: ContextLayout) -> bool:
    """Return whether the length stays whole since the axes do not divide it: `all_gather` is correct without a cut."""
    return context == "all_gather" and layout.pieces(layout.length) > 1 and length % (2 * layout.ways) != 0


def _spec(x: jax.Array, logical_axes: tuple[str | None, ...]):
    scope = current_scope()
    assert scope is not None
    wanted = scope.rules.spec_for(logical_axes, kind="activations")
    return partition_spec([dividing_axes(axes, size, scope.mesh) for axes, size in zip(wanted, x.shape)])


def _spread_heads(x: jax.Array, heads: int) -> jax.Array:
    """Repeat the heads of k or v until `act_heads` cuts them evenly, so that each GPU holds the heads it needs."""
    scope = current_scope()
    pieces = scope.shard_count("act_heads") if scope else 1
    kv_heads = x.shape[2]
    wanted = math.lcm(kv_heads, pieces)
    if wanted == kv_heads or heads % wanted:
        return x
    return jnp.repeat(x, wanted // kv_heads, axis=2)


def _cudnn_takes(q: jax.Array, v: jax.Array) -> bool:
    """Return whether cuDNN's fused attention supports the shape and dtype, and every GPU has equally many heads.

    Both passes of cuDNN 9.10 support head sizes up to 128 and, from Hopper on, DeepSeek's 192 with values of 128.
    """
    scope = current_scope()
    pieces = scope.shard_count("act_heads") if scope else 1
    hopper = scope is not None and (scope.compute_capability or (0, 0)) >= (9, 0)
    _, length, heads, head_dim = q.shape
    sizes = (head_dim, v.shape[-1])
    fits = (sizes == (192, 128) and hopper) or (sizes[0] == sizes[1] <= 128 and head_dim % 8 == 0)
    half_precision = q.dtype in (jnp.bfloat16, jnp.float16)
    return half_precision and fits and length % 64 == 0 and heads % pieces == 0
