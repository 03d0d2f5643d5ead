"""Test models.gpt: published sizes, equal results of both attentions, and sharded results equal to one device's."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from meshkit.config.rules import ShardingRules
from meshkit.sharding import sharding_scope
from models.attention import causal_attention
from models.gpt import GPT, PRESETS, materialized_attention
from models.layers import Projection

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 32)))


def parameters(preset: str, **options: Any) -> int:
    model = nnx.eval_shape(lambda: GPT(preset, rngs=nnx.Rngs(0), **options))
    return sum(math.prod(p.shape) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


def test_parameter_counts_are_the_published_ones():
    """GPT-2 has 124.4M parameters with biases: 9 embed a layer beside the norms'. Its table is padded to 50304."""
    biases = 12 * 9 * 768
    padding = (50_304 - 50_257) * 768
    assert parameters("gpt2") == 124_439_808 - biases + padding
    assert parameters("gpt2", bias=True) == 124_439_808 + padding
    assert parameters("gpt3_175b") == pytest.approx(175e9, rel=3e-3)


def test_matmul_parameters_count_the_tied_table_once_and_positions_not():
    model = nnx.eval_shape(lambda: GPT("gpt2", rngs=nnx.Rngs(0)))
    assert model.matmul_parameters() == 12 * 12 * 768**2 + 50_304 * 768
    assert model.attention_shape() == (12, 12, 64)


def make(**options: Any) -> GPT:
    return GPT("gpt_debug", rngs=nnx.Rngs(0), dtype=jnp.float32, **options)


def logits(**options: Any) -> jax.Array:
    model = make(**options)
    return jax.jit(lambda tokens: model(tokens))(TOKENS)


def test_materialized_attention_is_the_fused_one():
    """In fp32 the two differ by the order of sums over 32 positions: some 2^-24 of logits of order 1."""
    fused, materialized = (logits(attention=name, kv_heads=2) for name in ("fused", "materialized"))
    np.testing.assert_allclose(fused, materialized, atol=1e-4)


def test_so_are_its_gradients_which_come_from_the_probabilities():
    """Forward and backward have the same sums over 32 positions, and gradients are of order 1."""

    def gradients(attention: str) -> jax.Array:
        return jax.jit(jax.grad(lambda x: (attend(x, attention) ** 2).sum()))(
            jax.random.normal(jax.random.key(0), (2, 32, 4, 16))
        )

    def attend(x: jax.Array, attention: str) -> jax.Array:
        kernel = {"fused": causal_attention, "materialized": materialized_attention}[attention]
        return kernel(x, jnp.roll(x, 1, axis=0), jnp.roll(x, 2, axis=-1))

    np.testing.assert_allclose(gradients("fused"), gradients("materialized"), atol=1e-4)


def test_no_token_sees_a_later_one():
    changed = TOKENS.at[:, 20:].set(0)
    model = make(attention="materialized")
    run = jax.jit(lambda tokens: model(tokens))
    whole, cut = (run(tokens)[:, :20] for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(whole, cut)


def test_sharded_equals_one_device():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rules = ShardingRules({"act_batch": "data", "embed": "data", "heads": "tensor", "mlp": "tensor",
                           "act_heads": "tensor", "act_mlp": "tensor"})  # fmt: skip
    model = make(attention="materialized", kv_heads=4, bias=True, one_hot_lookup=True)
    model.layers.up.bias.set_value(jax.random.normal(jax.random.key(1), model.layers.up.bias.get_value().shape))

    @jax.jit
    def sharded(tokens):
        with sharding_scope(mesh, rules):
            return model(tokens)

    # Partial sums of 128 products in another order differ by 128 x 2^-24 of outputs of order 1, through four layers.
    np.testing.assert_allclose(sharded(TOKENS), jax.jit(lambda tokens: model(tokens))(TOKENS), atol=1e-4)


def test_sharded_gradients_of_materialized_attention_equal_one_device():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rules = ShardingRules({"act_batch": "data", "act_heads": "tensor", "act_kv_heads": "tensor"})
    q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 32, 4, 16))
    gradients = jax.grad(lambda *x: (materialized_attention(*x) ** 2).sum(), argnums=(0, 1, 2))

    @jax.jit
    def sharded(q, k, v):
        with sharding_scope(mesh, rules):
            return gradients(q, k, v)

    for cut, whole in zip(sharded(q, k, v), jax.jit(gradients)(q, k, v)):  # The sums run over 32 positions of order 1.
        np.testing.assert_allclose(cut, whole, atol=1e-4)


def test_the_gradient_of_a_bias_is_summed_in_its_own_dtype():
    """There are 4,099 tokens, a number that bf16 does not have."""
    graph, state = nnx.split(Projection("up", {"embed": 8}, {"mlp": 8}, bias=True, rngs=nnx.Rngs(0)))
    x = jnp.ones((4099, 8), jnp.bfloat16)
    gradient = jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(x).astype(jnp.float32)))(state)
    np.testing.assert_array_equal(gradient["bias"].get_value(), np.full(8, 4099, np.float32))


@pytest.mark.slow
def test_recomputation_changes_no_gradient():
    def gradients(remat):
        return nnx.grad(lambda m: m(TOKENS).std())(make(remat=remat, bias=True))

    for a, b in zip(jax.tree.leaves(gradients("none")), jax.tree.leaves(gradients(["query", "up", "attention"]))):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "gpt5"}, "no GPT preset 'gpt5'"),
        ({"depth": 2}, "no option 'depth'"),
        ({"heads": 3}, "not a multiple of heads = 3"),
        ({"kv_heads": 3}, "not a multiple of kv_heads = 3"),
        ({"layers": 0}, "layers = 0 must be"),
        ({"attention": "sparse"}, "'sparse' is not one of"),
        ({"bias": 1}, "bias = 1 must be true or false"),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GPT(**{"preset": "gpt_debug", **options}, rngs=nnx.Rngs(0))


def test_more_tokens_than_positions_are_refused():
    model = GPT("gpt_debug", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="more than the 64 positions"):
        model(jnp.zeros((1, PRESETS["gpt_debug"].length + 1), int))
