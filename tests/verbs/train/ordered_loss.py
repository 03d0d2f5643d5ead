"""Provide a loss that tells which examples it saw, and where in the batch, and a hook that tells who calls it."""

import jax.numpy as jnp
from jax.experimental import multihost_utils

import meshkit as mk
from meshkit.step.loss import next_token


def loss(model, batch, rng):
    """Return the loss of the next token, and `examples`: the tokens weighted by their places.

    That sum is an integer below 2^24, so it is exact in any order.
    """
    tokens = batch["tokens"].astype(jnp.float32)
    rows, columns = jnp.indices(tokens.shape)
    loss_sum, weight, _ = next_token(model, batch, rng)
    return loss_sum, weight, {"examples": jnp.sum(tokens * (rows % 8 + 1) * (columns % 7 + 1))}


def call_all(step):
    """Add `called`, how many processes have called this after the same step; it waits for all of them."""
    numbers = multihost_utils.process_allgather(jnp.int32(step.number)).reshape(-1)
    step.add(called=sum(int(number) == step.number for number in numbers))


called = mk.Hook(call_all, every=2)
