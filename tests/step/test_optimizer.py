"""Test optimizer and FLOP against closed forms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meshkit.config.sections import OptimizerTable
from meshkit.step.loss import cross_entropy
from meshkit.step.program import count_model_flops
from meshkit.step.train_step import make_adamw, make_schedule
from models.llama import Llama


@pytest.mark.parametrize(("schedule", "last"), [("constant", 1.0), ("linear", 0.0), ("cosine", 0.1)])
def test_schedules_warm_up_and_end(schedule, last):
    rate = make_schedule(OptimizerTable(learning_rate=1.0, warmup_steps=10, schedule=schedule), 100)
    np.testing.assert_allclose([rate(0), rate(4), rate(9)], [0.1, 0.5, 1.0], rtol=1e-6)
    assert float(rate(100)) == pytest.approx(last, abs=1e-6)


def test_adamw_takes_the_textbook_first_step():
    """Adam's first step is -lr sign(g); decay adds -lr wd w to kernels, but not to scales."""
    spec = OptimizerTable(learning_rate=0.1, weight_decay=0.5, clip=0.0, schedule="constant")
    params = {"kernel": jnp.full((2, 2), 2.0), "scale": jnp.full((2,), 2.0)}
    optimizer = make_adamw(spec, 10)
    gradients = jax.tree.map(lambda p: jnp.full_like(p, -3.0), params)
    updates, _ = optimizer.update(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], 0.1 * (1 - 0.5 * 2), atol=1e-6)
    np.testing.assert_allclose(updates["scale"], 0.1, rtol=1e-5)


def test_dtype_is_that_of_the_first_moment_only():
    state = make_adamw(OptimizerTable(dtype="bf16"), 10).init({"kernel": jnp.zeros((2, 2))})
    dtypes = [str(x.dtype) for x in jax.tree.leaves(state) if x.ndim]
    assert sorted(dtypes) == ["bfloat16", "float32"]


def test_model_flops_of_a_llama():
    model = nnx.eval_shape(lambda: Llama("llama3_8b", rngs=nnx.Rngs(0)))
    found = count_model_flops(model, None, tokens=1000, sequence_length=8192)
    n = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    attention = 12 * 32 * 32 * 128 * 8192 * 1000
    assert found.matmul_parameters == n
    assert found.model_flops == 6 * n * 1000 + attention
    assert found.model_flops_causal == 6 * n * 1000 + attention / 2


def test_model_flops_of_a_model_that_says_nothing():
    params = {"kernel": jax.ShapeDtypeStruct((4, 8), jnp.float32), "bias": jax.ShapeDtypeStruct((8,), jnp.float32)}
    found = count_model_flops(object(), params, tokens=10, sequence_length=5)
    assert (found.model_flops, found.model_flops_causal, found.flops_source) == (6 * 32 * 10, 6 * 32 * 10, "shapes")


def test_cross_entropy_is_minus_log_softmax():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 7)) * 30
    targets = jnp.array([[0, 6, 3], [2, 2, 5]])
    wanted = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(cross_entropy(logits, targets), wanted, rtol=1e-5, atol=1e-5)
