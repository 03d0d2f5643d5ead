"""Test dropout of GPT and Llama: its share and mean, equal masks on every mesh and recomputation, and no cost at 0."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from meshkit.config.rules import ShardingRules
from meshkit.parallel.layout import ContextLayout, balanced_positions
from meshkit.sharding import sharding_scope
from models.attention import TokenOrder
from models.gpt import GPT
from models.layers import dropout
from models.llama import Llama
from models.moe import Moe
from models.vit import ViT

TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 32)))
KEY = jax.random.key(1)
MODELS = {"gpt": (GPT, {}), "gpt, inputs": (GPT, {"dropout_at": "inputs"}), "llama": (Llama, {})}


def make(kind: str, **options: Any) -> Any:
    model, own = MODELS[kind]
    return model(rngs=nnx.Rngs(0), **{"dtype": jnp.float32, "dropout": 0.2, **own, **options})


def compiled(model):
    return jax.jit(lambda key: model(TOKENS, key=key))


def test_a_share_is_dropped_and_the_mean_stays():
    """Of 2^20 numbers, a share of 0.1 +- 0.0003 (one standard deviation) is dropped, in bf16 as in fp32."""
    x = jnp.full((4, 512, 512), 3.0)
    for dtype in (jnp.float32, jnp.bfloat16):
        y = dropout(x.astype(dtype), 0.1, KEY)
        assert y.dtype == dtype
        assert abs(float((y == 0).mean()) - 0.1) < 0.0012
        np.testing.assert_allclose(np.unique(np.asarray(y, np.float32)), [0, 3 / 0.9], rtol=2**-8)
    np.testing.assert_allclose(y.astype(jnp.float32).mean(), 3, rtol=2**-8)
    places = [dropout(x, 0.1, KEY, place) == 0 for place in (0, 1)]
    assert abs(float((places[0] & places[1]).mean()) - 0.01) < 0.0004  # The masks are independent of each other.
    assert abs(float((places[0][:, 1:] & places[0][:, :-1]).mean()) - 0.01) < 0.0004


def test_a_mask_goes_by_position_whatever_the_order_of_tokens():
    mesh = Mesh(np.array(jax.devices()[:4]), ("context",), axis_types=(AxisType.Auto,))
    order = TokenOrder(ContextLayout(mesh, ("context",)), balanced=True)
    natural = dropout(jnp.ones((2, 32, 8)), 0.5, KEY)
    np.testing.assert_array_equal(
        dropout(jnp.ones((2, 32, 8)), 0.5, KEY, order=order), natural[:, balanced_positions(32, 4)]
    )


@pytest.mark.parametrize("kind", MODELS)
def test_training_draws_by_its_key_and_evaluation_not_at_all(kind):
    model = make(kind)
    run = compiled(model)
    drawn, other = run(KEY), run(jax.random.key(2))
    np.testing.assert_array_equal(drawn, run(KEY))
    assert np.abs(drawn - other).max() > 0.1
    with pytest.raises(ValueError, match=r"dropout = 0\.2 draws in training: call model\(tokens, key=rng\)"):
        model(TOKENS)
    model.eval()
    np.testing.assert_array_equal(compiled(model)(KEY), compiled(make(kind, dropout=0.0))(None))


@pytest.mark.parametrize("kind", MODELS)
def test_without_dropout_a_key_changes_nothing_of_the_program(kind):
    model = make(kind, dropout=0.0)
    keyed, plain = (str(jax.make_jaxpr(lambda tokens, key=key: model(tokens, key=key))(TOKENS)) for key in (KEY, None))
    assert keyed == plain
    assert "random" not in plain


# tests/equivalence/test_sharded_equals_single.py covers Llama.
@pytest.mark.parametrize("kind", ["gpt", "gpt, inputs", pytest.param("llama", marks=pytest.mark.slow)])
def test_sharded_equals_one_device(kind):
    """Batch, length and heads are sharded; sums of 128 products in another order pass four layers of order 1."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(2, 2, 2), ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3
    )
    rules = ShardingRules({"act_batch": "data", "act_length": "context", "embed": "data", "heads": "tensor",
                           "act_residual_length": ["context", "tensor"], "mlp": "tensor", "act_heads": "tensor",
                           "act_mlp": "tensor", "kv_heads": "tensor", "act_kv_heads": "tensor"})  # fmt: skip
    model = make(kind)

    @jax.jit
    def sharded(tokens, key):
        with sharding_scope(mesh, rules):
            return model(tokens, key=key)

    np.testing.assert_allclose(sharded(TOKENS, KEY), compiled(model)(KEY), atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "policies"),
    [("gpt", ["full", ["query", "up"]]), pytest.param("llama", ["offload_dots"], marks=pytest.mark.slow)],
)
def test_a_recomputed_layer_draws_the_same_mask(kind, policies):
    def gradients(remat):
        model = make(kind, remat=remat)
        return jax.tree.leaves(jax.jit(nnx.grad(lambda m: m(TOKENS, key=KEY).std()))(model))

    kept = gradients("none")
    for remat in policies:
        for a, b in zip(gradients(remat), kept, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (GPT, {"dropout": 1.0}, "dropout = 1.0 must be a share of at least 0 and below 1"),
        (GPT, {"dropout": True}, "dropout = True must be a share"),
        (GPT, {"dropout": 0.1, "dropout_at": "attention"}, "'attention' is not one of branches, inputs"),
        (Llama, {"dropout": -0.1}, "dropout = -0.1 must be a share"),
        (Moe, {"dropout": 0.1}, "a Moe has no option 'dropout'"),
        (ViT, {"dropout": 0.1}, "a ViT has no option 'dropout'"),
    ],
)
def test_what_cannot_be_dropped_is_refused(make, options, message):
    with pytest.raises(ValueError, match=message):
        make(rngs=nnx.Rngs(0), **options)
