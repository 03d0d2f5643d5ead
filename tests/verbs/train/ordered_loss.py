"""A loss that also says which examples it saw, and where in the batch."""

import jax.numpy as jnp

from meshkit.step.loss import next_token


def loss(model, batch, rng):
    """Next token, and `examples`: the tokens weighted by their places. An integer below 2^24, exact in any order."""
    tokens = batch["tokens"].astype(jnp.float32)
    rows, columns = jnp.indices(tokens.shape)
    loss_sum, weight, _ = next_token(model, batch, rng)
    return loss_sum, weight, {"examples": jnp.sum(tokens * (rows % 8 + 1) * (columns % 7 + 1))}
