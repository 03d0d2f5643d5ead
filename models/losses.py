"""Cross-entropy of logits whose vocabulary may be cut over mesh axes, or over the stages of a pipeline."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from meshkit.parallel.pipeline import StageContext, vocabulary


def next_token_losses(
    logits: Float[Array, "batch length some_vocab"],
    targets: Int[Array, "batch length"],
    vocab: int,
    ctx: StageContext | None = None,
) -> Float[Array, "batch length"]:
    """logsumexp(logits) - logits[target] in fp32, whatever the dtype of the logits.

    By comparison, not by index, so that a cut vocabulary needs no gather.

    Args:
        logits: of the whole vocabulary, or a stage's part of it.
        targets: ids of tokens.
        vocab: size of the whole vocabulary.
        ctx: of a pipeline, if the logits were made in one.
    """
    logits = logits.astype(jnp.float32)
    if logits.shape[-1] < vocab:
        assert ctx is not None
        return vocabulary.cross_entropy(logits, targets, ctx.axis)
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
