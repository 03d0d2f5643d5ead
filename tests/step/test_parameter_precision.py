"""Test `train.parameter_precision`: parameters have 16 bits between steps, and everything else is unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from meshkit.config.experiment import load
from meshkit.planning.resolved import make_train_step
from meshkit.sharding.mesh import build_mesh

MLP = "configs/experiments/mlp.toml"
FP32 = ['train.precision="fp32"', 'rules.preset="fsdp"', "mesh={ fsdp = 8 }", "optimizer.warmup_steps=0"]
BF16 = [*FP32, 'train.parameter_precision="bf16"']


def step_of(overrides, *, devices=8):
    experiment = load(MLP, overrides)
    if devices == 8:
        return make_train_step(experiment, build_mesh(experiment.mesh, experiment.cluster))
    return make_train_step(experiment, Mesh(np.array(jax.devices()[:1]), ("fsdp",), (AxisType.Auto,)))


@pytest.fixture(scope="module")
def kept():
    return step_of(BF16)


def test_parameters_take_half_and_moments_what_they_took(kept):
    facts, wide = kept.facts, step_of(FP32).facts
    assert facts.parameters_bytes * 2 == wide.parameters_bytes
    assert (facts.optimizer_bytes, facts.gradients_bytes) == (wide.optimizer_bytes, wide.gradients_bytes)


def test_a_step_on_eight_devices_is_that_of_fp32_on_one_rounded(kept):
    state = kept.init()
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    one = step_of(FP32, devices=1)
    wide = jax.tree.map(np.asarray, state)
    wide.params = jax.tree.map(lambda leaf: leaf.astype(np.float32), wide.params)
    batch = {
        name: np.random.default_rng(0).standard_normal(leaf.shape).astype(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else np.random.default_rng(0).integers(0, 2, leaf.shape).astype(leaf.dtype)
        for name, leaf in kept.abstract_batch.items()
    }
    put = jax.tree.map(
        lambda x, a: jax.device_put(x, a.sharding), (wide, batch), (one.abstract_state, one.abstract_batch)
    )
    expected, metrics = one.step(*put)
    after, found = kept.step(state, jax.device_put(batch, {n: a.sharding for n, a in kept.abstract_batch.items()}))
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-5)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, kept.abstract_state)
    for leaf, whole in zip(jax.tree.leaves(after.params), jax.tree.leaves(expected.params)):
        rounded = np.asarray(whole).astype(jnp.bfloat16)
        # The sums of 8 devices differ from one device's in the last bits, which may round a value the other way.
        differing = np.asarray(leaf) != rounded
        assert differing.mean() < 0.01
        np.testing.assert_allclose(np.asarray(leaf, np.float32), np.asarray(rounded, np.float32), rtol=2**-7, atol=1e-6)
