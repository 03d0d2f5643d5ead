"""Provide a model that has dropout and the methods that a pipeline needs; see meshkit.step.pipelined."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

VOCAB, EMBED = 64, 16


class Layers(nnx.Module):
    def __init__(self, layers: int, *, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(EMBED**-0.5)
        self.kernel = nnx.Param(init(rngs.params(), (layers, EMBED, EMBED)), out_sharding=("layers", "embed", None))


class Staged(nnx.Module):
    """A look-up, residual layers with dropout, and an output head."""

    def __init__(self, layers: int = 4, rate: float = 0.3, *, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(1.0)
        self.rate, self.deterministic = rate, False
        self.table = nnx.Param(init(rngs.params(), (VOCAB, EMBED)), out_sharding=(None, "embed"))
        self.head = nnx.Param(init(rngs.params(), (EMBED, VOCAB)), out_sharding=("embed", None))
        self.layers = Layers(layers, rngs=rngs)

    def __call__(self, tokens):
        x = self.first({"tokens": tokens})
        for kernel in self.layers.kernel.get_value():
            x = self.layer({"kernel": kernel}, x)
        return self.last(x)

    def first(self, batch, ctx=None):
        return self.table.get_value()[batch["tokens"]]

    def layer(self, parameters, x, ctx=None, key=None):
        y = jnp.tanh(x @ parameters["kernel"])
        if key is not None and not self.deterministic:
            y = jnp.where(jax.random.bernoulli(key, 1 - self.rate, y.shape), y / (1 - self.rate), 0)
        return x + y

    def last(self, x, ctx=None):
        return x @ self.head.get_value()


class NotStaged(nnx.Module):
    """A model without a pipeline's methods."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.layers = Layers(4, rngs=rngs)

    def __call__(self, tokens):
        return jnp.zeros((*tokens.shape, VOCAB)) + self.layers.kernel.get_value().sum()


def own_loss(model, batch, rng):
    """Return the loss sum, the weight and a metric that shows that this function ran."""
    logits = model(batch["tokens"])
    losses = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"]), {"own": jnp.max(logits)}
