"""Embedding and cross-entropy with the vocabulary sharded over the pipeline's axis.

Each of the S stages holds vocab / S rows of the table, so all stages store and compute the same amount (Yeung et al.
2024, arXiv:2411.05288). With `head = "vocab_parallel"`, call `lookup` in `first_fn` and `cross_entropy` in `loss_fn`.
The PartitionSpec of the table names the pipeline's axis first. One tied table can serve as embedding and as head.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from meshkit.parallel.pipeline.manual import psum


def lookup(
    table: Float[Array, "stage_vocab embed"], tokens: Int[Array, "*tokens"], axis: str
) -> Float[Array, "*tokens embed"]:
    """Return the rows of a table for tokens, using one all-reduce; each stage has vocab / S rows of the table.

    Args:
        table: this stage's rows; the first of them is row `stage * stage_vocab` of the whole table.
        tokens: ids in the whole vocabulary; an id outside of it gives a row of zeros.

    Returns:
        Rows in the table's dtype, the same on every stage.
    """
    place, mine = _local(tokens, table.shape[0], axis)
    rows = jnp.where(mine[..., None], table[place], jnp.zeros((), table.dtype))
    return psum(rows, axis)


def cross_entropy(
    logits: Float[Array, "*tokens stage_vocab"], targets: Int[Array, "*tokens"], axis: str
) -> Float[Array, "*tokens"]:
    """Return -log softmax(logits)[target] in fp32; each stage has vocab / S of the logits.

    It takes three fp32 all-reduces of [*tokens]: the largest logit, the sum of exponentials, the target's logit. The
    target's logit is found by comparison: if a tensor axis cuts the vocabulary too, indexing would gather the logits.

    Returns:
        fp32, in nats, the same on every stage.
    """
    logits = logits.astype(jnp.float32)
    top = lax.pmax(lax.stop_gradient(logits.max(-1)), axis)
    total = lax.psum(jnp.exp(logits - top[..., None]).sum(-1), axis)
    place = targets - lax.axis_index(axis) * logits.shape[-1]
    is_target = lax.broadcasted_iota(place.dtype, logits.shape, logits.ndim - 1) == place[..., None]
    chosen = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jnp.log(total) + top - lax.psum(chosen, axis)


def _local(tokens: jax.Array, rows: int, axis: str) -> tuple[jax.Array, jax.Array]:
    """Return each token's index in this stage's rows, clipped to their range, and whether this stage has its row."""
    place = tokens - lax.axis_index(axis) * rows
    return jnp.clip(place, 0, rows - 1), (place >= 0) & (place < rows)
