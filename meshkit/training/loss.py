"""Losses: the default next-token cross-entropy, and the experiment's own. Layer 4.

A loss is `(model, batch, rng) -> (loss_sum, weight, metrics)`. Sums, so that micro-batches and shards of unequal weight
add up to exactly the mean over the whole batch: loss = sum of loss_sum / sum of weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from meshkit.spec.experiment import Experiment
from meshkit.training.state import load_object

Loss = Callable[[Any, Mapping[str, jax.Array], jax.Array], tuple[jax.Array, jax.Array, Mapping[str, jax.Array]]]


def find_loss(experiment: Experiment) -> Loss:
    """The experiment's `train.loss`, or next-token cross-entropy. Raises ConfigError as `load_object` does."""
    name = experiment.train.loss
    if name is None:
        return next_token
    return load_object(name, experiment.search_paths, at=experiment.error("train.loss", "").at)


def next_token(model: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> tuple[jax.Array, jax.Array, dict]:
    """Weighted sum of -log p(target | tokens so far), in nats; the sum of weights; no further metrics."""
    del rng
    losses = cross_entropy(model(batch["tokens"]), batch["targets"])
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"]), {}


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """logsumexp(logits) - logits[target] in fp32, for each position.

    The target's logit is picked by comparison with an iota, not by indexing: over a sharded vocab each GPU then sums
    its own part, and one all-reduce of [batch, length] follows instead of a gather of the logits.
    """
    logits = logits.astype(jnp.float32)
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked
