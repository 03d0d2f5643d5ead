"""Test a scan whose offloaded values move under the next layer: equal results, and where the values wait."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.gpt import GPT
from models.llama import Llama
from models.moe import Moe
from models.remat import check_remat, run_layers

MIXES = [
    {"offload": ["gate"]},
    {"keep": ["key", "value"], "offload": ["query", "layer_input"]},
    {"keep": ["query"], "offload": ["gate", "up", "layer_input"]},
    {"offload": ["layer_input"]},
]


@cache
def gradients(model, remat: str):
    module = model(dtype=jnp.float32, remat=eval(remat), rngs=nnx.Rngs(0))  # The text comes from a literal above.
    graph, params = nnx.split(module, nnx.Param)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 256)

    def loss(params):
        return jnp.mean(jnp.square(nnx.merge(graph, params)(tokens)))

    return jax.jit(jax.value_and_grad(loss))(params)


@pytest.mark.parametrize(
    "remat", [MIXES[0], *(pytest.param(mix, marks=pytest.mark.slow) for mix in MIXES[1:])], ids=str
)
def test_gradients_are_those_without_recomputation(remat):
    """The bits agree, because the operations are the same with other copies between them."""
    for a, b in zip(jax.tree.leaves(gradients(Llama, repr(remat))), jax.tree.leaves(gradients(Llama, "'none'"))):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "remat"), [(GPT, {"offload": ["up"]}), (Moe, {"offload": ["query", "layer_input"]})])
def test_other_models_offload_too(model, remat):
    """Operations are fused differently, which costs a few fp32 roundings of the largest entry."""
    for a, b in zip(jax.tree.leaves(gradients(model, repr(remat))), jax.tree.leaves(gradients(model, "'none'"))):
        np.testing.assert_allclose(a, b, rtol=0, atol=32 * 2.0**-24 * float(np.abs(b).max()))


def mlp(x, parameters):
    """Return a layer whose value `up` is the only residual of its width, since it has no bias."""
    first, second = parameters
    up = jax.ad_checkpoint.checkpoint_name(x @ first, "up")
    return x + jnp.tanh(up) @ second, jnp.sum(x)


def traced(remat):
    x, stacked = jnp.ones((4, 8)), (jnp.ones((3, 8, 32)), jnp.ones((3, 32, 8)))

    def loss(x, stacked):
        x, sums = run_layers(mlp, x, stacked, check_remat(remat))
        return jnp.sum(x) + jnp.sum(sums)

    return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(x, stacked)


def test_copies_are_of_the_layer_beside():
    """Forward, an iteration sends what its carry brought; backward, what it fetches goes into its carry."""
    scans = [e for e in traced({"offload": ["up"]}).jaxpr.eqns if e.primitive.name == "scan"]
    assert len(scans) == 2
    for scan, towards in zip(scans, (jax.memory.Space.Host, jax.memory.Space.Device)):
        body = scan.params["jaxpr"].jaxpr
        (copy,) = [e for e in body.eqns if e.primitive.name == "device_put"]
        (to,) = copy.outvars
        assert to.aval.memory_space == towards
        assert to.aval.shape == (4, 32)
        if towards == jax.memory.Space.Host:
            assert copy.invars[0] in body.invars  # The iteration itself makes none of it.
        else:
            assert to in body.outvars  # The iteration itself uses none of it.
            assert not any(to in e.invars for e in body.eqns)


def test_what_cannot_be_carried_is_left_to_jax():
    """A layer whose value is an integer has no gradient to scan over, so the plain scan runs with the same result."""

    def layer(x, parameters):
        x, _ = mlp(x, parameters)
        return x, jnp.argmax(x)

    x, stacked = jnp.ones((4, 8)), (jnp.ones((3, 8, 32)), jnp.ones((3, 32, 8)))
    run = partial(run_layers, layer, x, stacked)
    mixed, plain = run(check_remat({"offload": ["up"]})), run("none")
    for a, b in zip(jax.tree.leaves(mixed), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(a, b)
    names = [e.primitive.name for e in jax.make_jaxpr(lambda: run(check_remat({"offload": ["up"]})))().jaxpr.eqns]
    assert "scan" in names
    assert "custom_vjp_call" not in names
