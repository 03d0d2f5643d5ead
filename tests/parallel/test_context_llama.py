"""Test that a whole Llama with its sequence sharded over GPUs has the loss and every gradient of one device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from meshkit.config.rules import ShardingRules
from meshkit.errors import ConfigError
from meshkit.sharding import sharding_scope
from models.attention import causal_attention
from models.llama import Llama

BATCH, LENGTH = 4, 32

# As in tests/equivalence, K = 384 (mlp) terms are the longest sums, and D = 32 of them are in series.
TOLERANCE = np.sqrt(32 * 384) * 2.0**-24  # This is 6.6e-6.

RULES = ShardingRules(
    {
        "act_batch": "data",
        "act_length": "context",
        "act_residual_length": ["context", "tensor"],
        **dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "tensor"),
        **dict.fromkeys(("act_heads", "act_kv_heads", "act_mlp", "act_vocab"), "tensor"),
    }
)


def loss_and_gradients(mesh, length=LENGTH, what=jax.value_and_grad, **options):
    """Return loss and gradients of random tokens, weighed unequally so that a token out of order would show."""
    graph, state = nnx.split(Llama(rngs=nnx.Rngs(0), dtype=jnp.float32, **options))
    random = np.random.default_rng(0)
    tokens, targets = jnp.asarray(random.integers(0, 256, (2, BATCH, length), np.int32))
    weights = jnp.asarray(random.random((BATCH, length), np.float32))

    def loss(state):
        logits = nnx.merge(graph, state)(tokens)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        return -jnp.sum(picked * weights) / jnp.sum(weights)

    with sharding_scope(mesh, RULES if mesh else None):
        return jax.jit(what(loss))(state)


@pytest.fixture(scope="module")
def mesh():
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    return Mesh(devices, ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3)


@pytest.fixture(scope="module")
def reference():
    return loss_and_gradients(None)


@pytest.mark.parametrize(
    "options",
    [{"context": "all_gather"}, {"context": "ring", "remat": "full"}, {"context": "ulysses"}],
    ids=["all_gather", "ring, recomputed", "ulysses"],
)
def test_loss_and_all_gradients_equal_one_device(options, mesh, reference):
    loss, gradients = loss_and_gradients(mesh, **options)
    assert float(loss) == pytest.approx(float(reference[0]), rel=TOLERANCE)
    for got, wanted in zip(jax.tree.leaves(gradients), jax.tree.leaves(reference[1]), strict=True):
        assert np.abs(got - wanted).max() < TOLERANCE * np.abs(wanted).max()


def test_a_length_that_does_not_divide_is_left_whole_or_refused(mesh):
    """For 30 tokens on 2 GPUs, ring needs two chunks for each; all_gather is right without sharding."""
    loss_alone = partial(loss_and_gradients, length=30, what=lambda loss: loss)
    assert float(loss_alone(mesh, context="all_gather")) == pytest.approx(float(loss_alone(None)), rel=TOLERANCE)
    with pytest.raises(ConfigError, match="length = 30 does not divide into the 4 chunks"):
        loss_and_gradients(mesh, length=30, context="ring")


@pytest.mark.parametrize("context", ["all_gather", "ring", "ulysses"])
def test_a_model_that_keeps_natural_order_gets_the_same(context, mesh):
    """`causal_attention` reorders by itself where no `token_order` is given."""
    q, k, v = (jax.random.normal(jax.random.key(n), (BATCH, LENGTH, heads, 16)) for n, heads in enumerate((8, 4, 4)))
    with sharding_scope(mesh, RULES):
        got = jax.jit(lambda *qkv: causal_attention(*qkv, context))(q, k, v)
    assert np.abs(got - causal_attention(q, k, v)).max() < TOLERANCE * np.abs(got).max()


def test_an_unknown_context_names_the_known_ones():
    with pytest.raises(ValueError, match=r"context = 'rings' is not one of all_gather, ring, ulysses\. Did you mean"):
        Llama(rngs=nnx.Rngs(0), context="rings")
    with pytest.raises(ValueError, match="context = 3 is not one of"):
        Llama(rngs=nnx.Rngs(0), context=3)
