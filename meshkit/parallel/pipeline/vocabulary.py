"""Embedding and cross-entropy with the vocabulary cut over the pipeline's axis.

Every stage holds V / S rows of the table, so no stage has more to store or to do than another (Yeung et al. 2024,
arXiv:2411.05288). For `first_fn` and `loss_fn` (with `head = "vocab_parallel"`), whose parameters name the axis first
in their PartitionSpec. A tied table serves both.
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
    """Rows of a table of which each stage has vocab / S: each from the stage that has it, by one all-reduce.

    Args:
        table: this stage's rows, those from stage * stage_vocab on.
        tokens: ids in the whole vocabulary; one outside of it gives a row of zeros.

    Returns:
        Rows in the table's dtype, the same on every stage.
    """
    place, mine = _local(tokens, table.shape[0], axis)
    rows = jnp.where(mine[..., None], table[place], jnp.zeros((), table.dtype))
    return psum(rows, axis)


def cross_entropy(
    logits: Float[Array, "*tokens stage_vocab"], targets: Int[Array, "*tokens"], axis: str
) -> Float[Array, "*tokens"]:
    """-log softmax(logits)[target] in fp32, for logits of which each stage has vocab / S.

    Three all-reduces of [...], in fp32: the largest logit, the sum of exponentials, the target's logit. That one is
    found by comparison, not by index: where a tensor axis cuts the vocabulary too, an index would gather the logits.

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
    """Index of each token in this stage's part, in bounds; whether it is there."""
    place = tokens - lax.axis_index(axis) * rows
    return jnp.clip(place, 0, rows - 1), (place >= 0) & (place < rows)
