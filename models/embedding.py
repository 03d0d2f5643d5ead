"""Look-up of token embeddings in a table that may be cut over the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshkit.parallel.pipeline.manual import psum
from meshkit.sharding import constrain, current_scope, shard_over_mesh
from models.matmul import project


def lookup(
    table: Float[Array, "vocab embed"],
    tokens: Int[Array, "batch length"],
    dtype,
    vocab: int | None = None,
    axis: str | None = None,
    one_hot: bool = False,
) -> Float[Array, "batch length embed"]:
    """Return rows of a table, in `dtype`. The gradient is scattered and reduced in fp32.

    A frequent token adds up thousands of rows of the gradient, which is more than bf16 can count.

    The table is gathered over the axes that shard `embed` and stays cut over `act_vocab`. The partitioner turns this
    into a masked look-up and one all-reduce. Without these constraints it would replicate the batch.

    Args:
        table: the whole table or, in a pipeline, the rows of one stage.
        tokens: indices of the rows.
        dtype: dtype of the result.
        vocab: number of rows of the whole table; None if `table` is whole.
        axis: the pipeline's mesh axis; if stages hold parts of the table, one all-reduce over it collects the rows.
        one_hot: multiply one-hot ids by the table instead. That costs 4 vocab embed FLOP more a token, forward and
            backward. The gradient needs no scatter and is reduced like a weight's. MaxText calls this
            `use_iota_embed`, Praxis `lookup_style`.
    """
    if vocab is not None and table.shape[0] < vocab:
        assert axis is not None
        place = tokens - lax.axis_index(axis) * table.shape[0]
        mine = (place >= 0) & (place < table.shape[0])
        rows = lookup(table, jnp.clip(place, 0, table.shape[0] - 1), dtype, one_hot=one_hot)
        return psum(jnp.where(mine[..., None], rows, jnp.zeros((), dtype)), axis)
    if one_hot:
        chosen = constrain(jax.nn.one_hot(tokens, table.shape[0], dtype=dtype), "act_batch", "act_length", "act_vocab")
        return constrain(project(chosen, table, 1, dtype), "act_batch", "act_length", "act_embed")
    # The backward pass is traced outside of the sharding scope, so the scatter takes its axes from the scope here.
    scatter = _scatter_shards(table.shape, tokens.shape) or partial(_scatter_rows, table.shape)
    return _lookup(table, tokens, dtype, scatter)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _lookup(table: jax.Array, tokens: jax.Array, dtype, scatter: Callable) -> jax.Array:
    rows = constrain(table.astype(dtype), "act_vocab", None)[tokens]
    # Constrained to the whole length first: if asked for pieces of it at once, the partitioner gathers the table.
    return constrain(rows, "act_batch", "act_length", "act_embed")


def _lookup_forward(table, tokens, dtype, scatter):
    return _lookup(table, tokens, dtype, scatter), (tokens, jnp.zeros((), table.dtype))


def _lookup_backward(dtype, scatter, residuals, g):
    tokens, like = residuals
    return scatter(tokens, g).astype(like.dtype), None


def _scatter_rows(shape: tuple[int, ...], tokens: jax.Array, g: jax.Array) -> jax.Array:
    """Return [vocab, embed] fp32 sums of the rows of g by token; tokens outside of the table are dropped."""
    return jnp.zeros(shape, jnp.float32).at[tokens].add(g.astype(jnp.float32), mode="drop")


def _scatter_shards(shape: tuple[int, ...], rows: tuple[int, ...]) -> Callable | None:
    """Return `_scatter_rows` for each GPU's shards; None where the partitioner does as well, or a dim does not divide.

    One all-to-all moves the axes that cut embed from the rows (batch, length) to the columns, and the token ids are
    gathered over these axes. Each GPU then scatters the rows it received into its own columns and its own part of the
    vocabulary. The partitioner alone would gather the whole batch on every GPU if the vocabulary or the length is cut,
    or if the innermost axes of the batch are not those that cut embed.
    """
    scope = current_scope()
    if scope is None:
        return None
    (embed,) = scope.rules.spec_for(("embed",), kind="gradients")
    batch, length, vocab = scope.rules.spec_for(("act_batch", "act_length", "act_vocab"), kind="activations")
    pieces = {axes: math.prod(scope.mesh.shape[a] for a in axes) for axes in (embed, batch, length, vocab)}
    cuts = ((shape[0], vocab), (shape[1], embed), (rows[0], batch), (rows[1], length))
    divides = all(size % pieces[axes] == 0 for size, axes in cuts)
    needed = vocab or length or batch[len(batch) - len(embed) :] != embed
    if not (needed and divides and set(embed) <= {*batch, *length} and not set(vocab) & {*batch, *length}):
        return None
    own_shape = (shape[0] // pieces[vocab], shape[1] // pieces[embed])
    summed = tuple(a for a in (*batch, *length) if a not in embed)

    def local(tokens: jax.Array, g: jax.Array) -> jax.Array:
        tokens, g = tokens.reshape(-1), g.reshape(-1, g.shape[-1])
        if embed:
            tokens = lax.all_gather(tokens, embed, axis=0, tiled=True)
            g = lax.all_to_all(g, embed, split_axis=1, concat_axis=0, tiled=True)
        row = tokens - lax.axis_index(vocab) * own_shape[0] if vocab else tokens
        sums = _scatter_rows(own_shape, jnp.where(row < 0, own_shape[0], row), g)
        return lax.psum(sums, summed) if summed else sums

    return shard_over_mesh(local, ((batch, length), (batch, length, ())), (vocab, embed))


_lookup.defvjp(_lookup_forward, _lookup_backward)
