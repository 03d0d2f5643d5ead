"""Attention over a sequence that is cut over GPUs, which exchange keys and values, or cut the heads for a time.

Each of n GPUs has `b` sequences, `l` of their tokens, `h` heads and `k` key heads of size `d`; an activation element
has `e` bytes. One piece, the keys and values of one GPU, is P = 2 b l k d e bytes. The payloads of communication per
layer and GPU, as the report counts them, are:

    ring, forward        n - 1 collective-permutes of P
    ring, backward       n + 1 collective-permutes: n - 1 times P, and n times 4 P / e of fp32 gradients of k and v
    all_gather, forward  1 all-gather of n P
    all_gather, backward 1 all-gather of n P, 1 reduce-scatter of 4 n P / e
    ulysses, forward     2 all-to-alls: (h + 2 K) b l d e of queries, keys and values, then h b l d e of the output
    ulysses, backward    2 all-to-alls: h b l d e of the output's gradient, then (h + 2 K) b l d e

For a window of w tokens (`causal_kernels`), let w' be w - 1 rounded up to a multiple of 64. The forward pass moves keys
and values in 4 collective-permutes of b w' k d e bytes. The backward pass does so again, and moves their fp32 gradients
in 4 more.

Ring and all_gather compute the same blocks in the same order. The ring holds two pieces at a time and hides each hop
behind the attention of a block; all_gather receives all n pieces in one larger message and holds them all. Ulysses
repeats key heads to K = lcm(k, n), so that n divides them. A recomputed layer runs its forward pass twice.

Under a causal mask tokens are in balanced order (`meshkit.parallel.layout`). A GPU computes attention to its own keys
first, with an ordinary causal mask over its two chunks. Of the four pairs of chunks with any other piece, exactly two
are visible, each in full, and only these are computed. Sources: Liu, Zaharia and Abbeel (2023), Ring Attention; Jacobs
et al. (2023), DeepSpeed Ulysses; Megatron-LM for the balanced order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshkit.errors import ConfigError
from meshkit.parallel.blocks import ATTENTION, attend, attend_gradients, differentiable, merge
from meshkit.parallel.layout import ContextLayout, Keys, Queries, balance, choose_implementation, restore
from meshkit.sharding.constrain import partition_spec

Kernels = tuple[Callable[..., tuple[Queries, jax.Array]], Callable[..., tuple[Queries, Keys, Keys]]]


def ring_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    *,
    mesh,
    axis: str | Sequence[str],
    causal: bool = True,
    batch: str | Sequence[str] = (),
    heads: str | Sequence[str] = (),
    balanced: bool = False,
) -> Queries:
    """Return exact attention with the length cut over a mesh axis; its GPUs pass keys and values around a ring.

    Call it with global arrays inside `jax.jit`. It computes softmax(q k^T / sqrt(head_dim)) v, is differentiable, and
    its memory is linear in the local length. The docstring of this module gives its costs.

    Args:
        q, k, v: kv_heads divides heads; keys are sent once per key head.
        mesh: a `jax.sharding.Mesh`, or a result of `meshkit.build_mesh`.
        axis: one or several mesh axes that cut the length.
        causal: token i sees tokens 0..i.
        batch, heads: mesh axes that cut those dims.
        balanced: q, k, v and the result are in balanced order (`meshkit.parallel.layout`). Otherwise a causal call
            itself reorders q, k, v and the result.

    Raises:
        ConfigError: sizes that do not go together or that the axes do not divide.
    """
    return _attention(q, k, v, ContextLayout.of(mesh, axis, batch, heads), causal, balanced, _Ring)


def gathered_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    *,
    mesh,
    axis: str | Sequence[str],
    causal: bool = True,
    batch: str | Sequence[str] = (),
    heads: str | Sequence[str] = (),
    balanced: bool = False,
) -> Queries:
    """Return exact attention with the length cut over a mesh axis; every GPU gathers all keys and values.

    Arguments, result and errors are those of `ring_attention`.
    """
    return _attention(q, k, v, ContextLayout.of(mesh, axis, batch, heads), causal, balanced, _Gathered)


def _attention(q, k, v, layout: ContextLayout, causal: bool, balanced: bool, exchange: type) -> jax.Array:
    layout.check(q, k, v)
    ordered = causal and layout.ways > 1
    if ordered:
        layout.check_balanced(q.shape[1])
    attention = differentiable(*_kernels(q, layout, causal, exchange))
    if balanced or not ordered:
        return attention(q, k, v)
    q, k, v = (balance(x, layout, layout.array) for x in (q, k, v))
    return restore(attention(q, k, v), layout, layout.array)


def causal_kernels(q: Queries, layout: ContextLayout, context: str, window: int | None = None) -> Kernels:
    """Return the forward and the backward pass of causal attention in balanced order, as two functions.

    The first maps (q, k, v) to (output, log-sum-exp). The second maps (q, k, v, output, log-sum-exp, gradient of the
    output) to the gradients of q, k and v. A caller that adds terms to the softmax, such as attention sinks, changes
    the output and the log-sum-exp between the two calls.

    With a window, a chunk of queries needs only its own keys and the end of the chunk before it. Neighbours send that
    end, whatever `context` is.

    Args:
        q: the queries, [batch, length, heads, head_dim].
        layout: the axes that cut them.
        context: `ring` or `all_gather`.
        window: how many tokens a query sees, including its own; None: its own and all tokens before it.

    Raises:
        ConfigError: a window that reaches over more than one chunk.
    """
    layout.check_balanced(q.shape[1])
    return _kernels(q, layout, True, {"ring": _Ring, "all_gather": _Gathered}[context], window)


def _kernels(q: jax.Array, layout: ContextLayout, causal: bool, exchange: type, window: int | None = None) -> Kernels:
    chunk = q.shape[1] // layout.pieces(layout.length) // (2 if causal and layout.ways > 1 else 1)
    how: dict[str, Any] = {"causal": causal, "implementation": choose_implementation(layout.mesh, q, chunk)}
    array, statistics = layout.array, layout.statistics
    forward, backward = partial(_forward, exchange(layout), how), partial(_backward, exchange(layout), how)
    if window is not None:
        if window - 1 > chunk:
            raise ConfigError(
                f"a window of {window} tokens reaches over more than one chunk of {chunk}, of which each GPU has two.",
                hint="fewer GPUs along the length, or longer sequences",
            )
        width = min(chunk, 64 * -(-(window - 1) // 64))  # cuDNN takes multiples of 64
        how |= {"window": window}
        forward, backward = (partial(fn, _Halo(layout, width), how) for fn in (_windowed, _windowed_gradients))
    inputs = (array,) * 4 + (statistics, array)
    return layout.run(forward, (array,) * 3, (array, statistics)), layout.run(backward, inputs, (array,) * 3)


# The code below runs on every GPU, on its own shards. A *piece* stacks k and v: [2, batch, length, kv_heads, head_dim].


def _forward(exchange: _Ring | _Gathered, how: dict, q, k, v):
    ours = jnp.stack([k, v])

    def first():
        out, lse = attend(q, k, v, **how)
        return out.astype(jnp.float32), lse

    def block(state, piece, earlier):
        return _fold(state, q, piece, earlier, how)

    out, lse = exchange.forward(ours, first, block)
    return out.astype(q.dtype), lse


def _backward(exchange: _Ring | _Gathered, how: dict, q, k, v, out, lse, g):
    ours, rows = jnp.stack([k, v]), (q, out, lse, g)

    def first():
        dq, dk, dv = attend_gradients(q, k, v, out, lse, g, **how)
        return dq, jnp.stack([dk, dv])

    def block(dq, piece, earlier):
        return _fold_gradients(dq, rows, piece, earlier, how)

    dq, (dk, dv) = exchange.backward(ours, first, block)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


@dataclass(frozen=True)
class _Halo:
    """The two chunks of a GPU as a batch of two, each with the `width` tokens that precede it in the sequence.

    The sequence's first chunk has no tokens before it. Its padding comes after it, where the causal mask hides it.
    """

    layout: ContextLayout
    width: int

    def extend(self, x: jax.Array, axis: int = 1, *, filled: bool = True) -> jax.Array:
        """Return [batch, length] as [2 batch, width + length / 2]; without `filled`, zeros precede the chunks."""
        axes, ways = self.layout.length, self.layout.ways
        first, second = _halves(x, axis)
        rank, size = lax.axis_index(axes), first.shape[axis]
        ends = [lax.slice_in_dim(chunk, size - self.width, size, axis=axis) for chunk in (first, second)]
        if filled and self.width:
            before_first = lax.ppermute(ends[0], axes, [(i, i + 1) for i in range(ways - 1)])
            before_second = lax.ppermute(ends[1], axes, [(i, i - 1) for i in range(1, ways)])
            before_second = jnp.where(rank == ways - 1, ends[0], before_second)
        else:
            before_first, before_second = jnp.zeros_like(ends[0]), jnp.zeros_like(ends[1])
        first = jnp.concatenate([before_first, first], axis=axis)
        first = jnp.where(rank == 0, jnp.roll(first, -self.width, axis=axis), first)
        return jnp.concatenate([first, jnp.concatenate([before_second, second], axis=axis)])

    def reduce(self, found: jax.Array, like: jax.Array, axis: int = 1, *, filled: bool = True) -> jax.Array:
        """Return the transpose of `extend`: the values of this GPU's tokens; if `filled`, summed over their copies."""
        like = jnp.zeros(like.shape, found.dtype)
        return jax.vjp(lambda x: self.extend(x, axis, filled=filled), like)[1](found)[0]


def _windowed(halo: _Halo, how: dict, q, k, v):
    out, lse = attend(halo.extend(q, filled=False), halo.extend(k), halo.extend(v), **how)
    like = jnp.zeros((q.shape[0], q.shape[2], q.shape[1]))
    return halo.reduce(out, q, filled=False).astype(q.dtype), halo.reduce(lse, like, axis=2, filled=False)


def _windowed_gradients(halo: _Halo, how: dict, q, k, v, out, lse, g):
    queries, out, g = (halo.extend(x, filled=False) for x in (q, out, g))
    lse = halo.extend(lse, axis=2, filled=False)
    found = attend_gradients(queries, halo.extend(k), halo.extend(v), out, lse, g, **how)
    reduced = (halo.reduce(d, x, filled=x is not q) for d, x in zip(found, (q, k, v)))
    return tuple(d.astype(x.dtype) for d, x in zip(reduced, (q, k, v)))


class _Ring:
    """An exchange that sends pieces on to the next GPU while attention to them is computed."""

    def __init__(self, layout: ContextLayout):
        self.ways, self.axes = layout.ways, layout.length

    def forward(self, ours, first: Callable, block: Callable):
        if self.ways == 1:
            return first()
        piece = self.shift(ours)
        state = first()

        def step(carry, distance):
            state, piece = carry
            following = self.shift(piece)
            return (block(state, piece, self.earlier(distance)), following), None

        state, piece = _steps(step, (state, piece), self.ways - 1)
        return block(state, piece, self.earlier(self.ways - 1))

    def backward(self, ours, first: Callable, block: Callable):
        if self.ways == 1:
            return first()
        piece = self.shift(ours)
        dq, gradient = first()  # the gradient of a piece follows it, one hop behind

        def step(carry, distance):
            dq, gradient, piece = carry
            following, so_far = _apart(self.shift(_together(piece, gradient)), piece.dtype)
            dq, added = block(dq, piece, self.earlier(distance))
            return (dq, so_far + added, following), None

        dq, gradient, piece = _steps(step, (dq, gradient, piece), self.ways - 1)
        so_far = self.shift(gradient)
        dq, added = block(dq, piece, self.earlier(self.ways - 1))
        return dq, self.shift(so_far + added)

    def shift(self, x):
        return lax.ppermute(x, self.axes, [(i, (i + 1) % self.ways) for i in range(self.ways)])

    def earlier(self, distance):
        """Return whether a piece that made this many hops is from a lower rank, so that it did not wrap around."""
        return distance <= lax.axis_index(self.axes)


class _Gathered:
    """An exchange that gathers all pieces at once, and uses them in the order in which the ring would bring them."""

    def __init__(self, layout: ContextLayout):
        self.ways, self.axes = layout.ways, layout.length

    def forward(self, ours, first: Callable, block: Callable):
        if self.ways == 1:
            return first()
        pieces = lax.all_gather(ours, self.axes)

        def step(state, distance):
            source, earlier = self.source(distance)
            return block(state, lax.dynamic_index_in_dim(pieces, source, keepdims=False), earlier), None

        return _steps(step, first(), self.ways)

    def backward(self, ours, first: Callable, block: Callable):
        if self.ways == 1:
            return first()
        pieces = lax.all_gather(ours, self.axes)
        dq, own = first()
        gradients = jnp.zeros((self.ways, *own.shape), own.dtype)
        gradients = lax.dynamic_update_index_in_dim(gradients, own, lax.axis_index(self.axes), 0)

        def step(carry, distance):
            dq, gradients = carry
            source, earlier = self.source(distance)
            dq, added = block(dq, lax.dynamic_index_in_dim(pieces, source, keepdims=False), earlier)
            return (dq, lax.dynamic_update_index_in_dim(gradients, added, source, 0)), None

        dq, gradients = _steps(step, (dq, gradients), self.ways)
        return dq, lax.psum_scatter(gradients, self.axes)

    def source(self, distance):
        rank = lax.axis_index(self.axes)
        return (rank - distance) % self.ways, distance <= rank


def _together(piece, gradient):
    """Join a piece and its fp32 gradient in one array: XLA overlaps only one of two messages with attention."""
    if piece.dtype == gradient.dtype:
        return jnp.concatenate([piece, gradient], axis=-1)
    # Sent as integers: XLA:CPU converts bf16 collectives to fp32, which could change halves of fp32 cast to bf16.
    words = lax.bitcast_convert_type(gradient, jnp.uint16).reshape(*gradient.shape[:-1], -1)
    return jnp.concatenate([lax.bitcast_convert_type(piece, jnp.uint16), words], axis=-1)


def _apart(both, dtype):
    """Undo `_together`: return (piece, gradient)."""
    if dtype == jnp.float32:
        return jnp.split(both, 2, axis=-1)
    head_dim = both.shape[-1] // 3
    piece, words = jnp.split(both, [head_dim], axis=-1)
    gradient = lax.bitcast_convert_type(words.reshape(*piece.shape, 2), jnp.float32)
    return lax.bitcast_convert_type(piece, dtype), gradient


def _steps(step: Callable, carry: Any, end: int) -> Any:
    """Scan over the distances 1..end - 1; return `carry` where there are none."""
    if end <= 1:
        return carry
    return lax.scan(step, carry, jnp.arange(1, end))[0]


def _fold(state, q, piece, earlier, how: dict):
    """Return the (out, lse) of this GPU's queries with attention to another GPU's piece merged in."""
    if not how["causal"]:
        return merge(state, attend(q, *piece, **how))
    queries, keys = _visible(earlier, q, 1), _seen(earlier, piece)
    found = attend(queries, *keys, causal=False, implementation=how["implementation"])
    one, other = zip(*(jnp.split(x, 2) for x in found))
    first, second = zip(_halves(state[0], 1), _halves(state[1], 2))
    second = merge(second, one)
    merged = merge(_pick(earlier, first, second), other)
    first, second = _pick(earlier, merged, first), _pick(earlier, second, merged)
    return jnp.concatenate([first[0], second[0]], axis=1), jnp.concatenate([first[1], second[1]], axis=2)


def _fold_gradients(dq, rows, piece, earlier, how: dict):
    """Return (dq with the contribution of another GPU's piece added, the gradient of that piece from these queries)."""
    q, out, lse, g = rows
    if not how["causal"]:
        k, v = piece
        added, dk, dv = attend_gradients(q, k, v, out, lse, g, **how)
        return dq + added, jnp.stack([dk, dv])
    q, out, g = (_visible(earlier, x, 1) for x in (q, out, g))
    lse, (k, v) = _visible(earlier, lse, 2), _seen(earlier, piece)
    found = attend_gradients(q, k, v, out, lse, g, causal=False, implementation=how["implementation"])
    (dq_1, dq_2), *of_keys = (jnp.split(x, 2) for x in found)
    first, second = _halves(dq, 1)
    dq = jnp.concatenate([first + _only(earlier, dq_2), second + dq_1 + _only(~earlier, dq_2)], axis=1)
    keys = [jnp.concatenate([one + _only(earlier, two), _only(~earlier, two)], axis=1) for one, two in of_keys]
    return dq, jnp.stack(keys)


# Our queries and another GPU's keys have two chunks each, first and second. Two of the four pairs are visible. Our
# second chunk is late in the sequence and always sees their first chunk. If their first chunk comes before ours, our
# first chunk sees it too, and their second chunk is after all of ours. Otherwise our second chunk sees their second
# chunk as well. The two pairs become a batch.


def _visible(earlier, rows, axis: int):
    """Return the queries of the two visible pairs, stacked along batch."""
    first, second = _halves(rows, axis)
    return jnp.concatenate([second, jnp.where(earlier, first, second)])


def _seen(earlier, piece):
    """Return k and v of the two visible pairs, stacked along batch."""
    halves = (_halves(x, 1) for x in piece)
    return tuple(jnp.concatenate([first, jnp.where(earlier, first, second)]) for first, second in halves)


def _halves(x, axis: int):
    return jnp.split(x, 2, axis=axis)


def _pick(condition, one, other):
    return jax.tree.map(partial(jnp.where, condition), tuple(one), tuple(other))


def _only(condition, x):
    return jnp.where(condition, x, 0)


def ulysses_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    *,
    mesh,
    axis: str | Sequence[str],
    causal: bool = True,
    batch: str | Sequence[str] = (),
    heads: str | Sequence[str] = (),
) -> Queries:
    """Return exact attention with the length cut over a mesh axis; all-to-alls cut the heads instead, then undo this.

    Call it with global arrays inside `jax.jit`, in natural order. It computes softmax(q k^T / sqrt(head_dim)) v and is
    differentiable. The docstring of this module gives its costs.

    Args:
        q, k, v: kv_heads divides heads.
        mesh: a `jax.sharding.Mesh`, or a result of `meshkit.build_mesh`.
        axis: one or several mesh axes that cut the length.
        causal: token i sees tokens 0..i.
        batch, heads: mesh axes that cut those dims.

    Raises:
        ConfigError: sizes that do not go together, or heads that do not divide over the GPUs of `axis` and `heads`.
    """
    layout = ContextLayout.of(mesh, axis, batch, heads)
    layout.check(q, k, v)
    _check_heads(q.shape[2], layout)
    whole = partition_spec((layout.batch, (), (*layout.heads, *layout.length), ()))
    statistics = partition_spec((layout.batch, (*layout.heads, *layout.length), ()))
    how = {"causal": causal, "implementation": choose_implementation(mesh, q, q.shape[1])}
    kv_heads = k.shape[2] // layout.size(layout.heads)
    copies = math.lcm(kv_heads, layout.ways) // kv_heads

    def forward(q, k, v):
        def local(q, k, v):
            k, v = (jnp.repeat(x, copies, axis=2) for x in (k, v))
            q, k, v = _cut_heads((q, k, v), layout)
            out, lse = attend(q, k, v, **how)
            out = out.astype(q.dtype)
            return _cut_length((out,), layout)[0], (q, k, v, out, lse)

        found = layout.run(local, (layout.array,) * 3, (layout.array, (*(whole,) * 4, statistics)))(q, k, v)
        out, kept = jax.tree.map(lambda x: checkpoint_name(x, ATTENTION), found)
        return out, kept

    def backward(kept, g):
        def local(q, k, v, out, lse, g):
            (g,) = _cut_heads((g,), layout)
            gradients = attend_gradients(q, k, v, out, lse, g, **how)
            dq, dk, dv = _cut_length(tuple(x.astype(q.dtype) for x in gradients), layout)
            return dq, *(_sum_copies(x, copies) for x in (dk, dv))

        inputs = (*(whole,) * 4, statistics, layout.array)
        return layout.run(local, inputs, (layout.array,) * 3)(*kept, g)

    @jax.custom_vjp
    def attention(q, k, v):
        return forward(q, k, v)[0]

    attention.defvjp(forward, backward)
    return attention(q, k, v)


def _check_heads(heads: int, layout: ContextLayout) -> None:
    pieces = layout.ways * layout.size(layout.heads)
    if heads % pieces:
        axes = (*layout.heads, *layout.length)
        over = " x ".join(f"{a} = {layout.mesh.shape[a]}" for a in axes)
        raise ConfigError(
            f"Ulysses cuts {heads} heads over {pieces} GPUs ({over}), which does not divide.",
            hint='context = "ring" or "all_gather", which leave the heads alone, or axis sizes that divide the heads',
        )


def _cut_heads(arrays: tuple[jax.Array, ...], layout: ContextLayout) -> tuple[jax.Array, ...]:
    """Return each [b, l, h, d], all heads of a part of the sequence, as [b, l n, h / n, d], by one all-to-all."""
    pieces = [x.reshape(*x.shape[:2], layout.ways, -1, x.shape[3]) for x in arrays]
    together = jnp.concatenate(pieces, axis=3)
    moved = lax.all_to_all(together, layout.length, split_axis=2, concat_axis=1, tiled=True)
    return tuple(jnp.split(moved[:, :, 0], _ends(pieces), axis=2))


def _cut_length(arrays: tuple[jax.Array, ...], layout: ContextLayout) -> tuple[jax.Array, ...]:
    """Undo `_cut_heads`, by one all-to-all."""
    pieces = [x[:, :, None] for x in arrays]
    together = jnp.concatenate(pieces, axis=3)
    moved = lax.all_to_all(together, layout.length, split_axis=1, concat_axis=2, tiled=True)
    parts = jnp.split(moved, _ends(pieces), axis=3)
    return tuple(x.reshape(*x.shape[:2], -1, x.shape[4]) for x in parts)


def _ends(pieces: Sequence[jax.Array]) -> list[int]:
    """Return where each array's heads, except the last one's, end in the concatenation of all heads."""
    sizes = [x.shape[3] for x in pieces]
    return [sum(sizes[: n + 1]) for n in range(len(sizes) - 1)]


def _sum_copies(x: jax.Array, copies: int) -> jax.Array:
    """Return the gradient of each head: the sum of its copies' gradients."""
    if copies == 1:
        return x
    grouped = x.reshape(*x.shape[:2], -1, copies, x.shape[3])
    return jnp.sum(grouped, axis=3, dtype=jnp.float32).astype(x.dtype)
