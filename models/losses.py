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
    """Return logsumexp(logits) - logits[target], computed in fp32 for logits of any dtype.

    The target's logit is picked by comparison, not by index, so that a cut vocabulary needs no gather.

    Args:
        logits: logits of the whole vocabulary, or of a stage's part of it.
        targets: token ids.
        vocab: size of the whole vocabulary.
        ctx: context of the stage, if the logits were computed in a pipeline.
    """
    logits = logits.astype(jnp.float32)
    if logits.shape[-1] < vocab:
        assert ctx is not None
        return vocabulary.cross_entropy(logits, targets, ctx.axis)
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
