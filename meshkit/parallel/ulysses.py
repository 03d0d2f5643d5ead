"""Attention over a sequence that is cut over GPUs: for the time of attention the heads are cut instead.

n GPUs, each with `b` sequences, `l` of their tokens, `h` heads and `k` key heads of size `d`, activations of `e` bytes.
Key heads are repeated to K = lcm(k, n), the fewest that n GPUs can share out. Per layer and GPU, payloads as the report
counts them:

    forward   2 all-to-alls: (h + 2 K) b l d e of queries, keys and values, then h b l d e of the output
    backward  2 all-to-alls: h b l d e of the output's gradient, then (h + 2 K) b l d e

A layer that is recomputed runs its forward pass twice. After Jacobs et al. (2023), DeepSpeed Ulysses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshkit.errors import ConfigError
from meshkit.parallel.blocks import attend, attend_gradients
from meshkit.parallel.layout import ContextLayout, Keys, Queries, choose_implementation
from meshkit.parallel.ring import ATTENTION
from meshkit.sharding.constrain import partition_spec


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
    """Exact attention with the length cut over a mesh axis; all-to-alls cut the heads instead and back.

    softmax(q k^T / sqrt(head_dim)) v for global arrays inside `jax.jit`, differentiable. Tokens are in natural order.
    Costs: see the module.

    Args:
        q, k, v: kv_heads divides heads.
        mesh: a `jax.sharding.Mesh`, or one of `meshkit.build_mesh`.
        axis: mesh axis, or several, that cut the length.
        causal: token i sees tokens 0..i.
        batch, heads: mesh axes that cut those dims.

    Raises:
        ConfigError: sizes that do not go together, or heads that do not divide over the GPUs of both axes.
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
    """[b, l, h, d] of each, all heads of a piece of the sequence, as [b, l n, h / n, d]; one all-to-all."""
    pieces = [x.reshape(*x.shape[:2], layout.ways, -1, x.shape[3]) for x in arrays]
    together = jnp.concatenate(pieces, axis=3)
    moved = lax.all_to_all(together, layout.length, split_axis=2, concat_axis=1, tiled=True)
    return tuple(jnp.split(moved[:, :, 0], _ends(pieces), axis=2))


def _cut_length(arrays: tuple[jax.Array, ...], layout: ContextLayout) -> tuple[jax.Array, ...]:
    """The way back from `_cut_heads`."""
    pieces = [x[:, :, None] for x in arrays]
    together = jnp.concatenate(pieces, axis=3)
    moved = lax.all_to_all(together, layout.length, split_axis=1, concat_axis=2, tiled=True)
    parts = jnp.split(moved, _ends(pieces), axis=3)
    return tuple(x.reshape(*x.shape[:2], -1, x.shape[4]) for x in parts)


def _ends(pieces: Sequence[jax.Array]) -> list[int]:
    """Where each array's heads end among the heads of all of them."""
    sizes = [x.shape[3] for x in pieces]
    return [sum(sizes[: n + 1]) for n in range(len(sizes) - 1)]


def _sum_copies(x: jax.Array, copies: int) -> jax.Array:
    """Gradient of a head from those of its copies."""
    if copies == 1:
        return x
    grouped = x.reshape(*x.shape[:2], -1, copies, x.shape[3])
    return jnp.sum(grouped, axis=3, dtype=jnp.float32).astype(x.dtype)
