"""Test delayed scaling in a training step: histories of tensors are no gradients, and are the same on every mesh."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from flax.linen import fp8_ops

from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.planning.resolved import make_train_step
from meshkit.sharding import build_mesh, constrain
from models.layers import RESIDUAL_AXES, Matmuls, Projection, parameter, project_each
from models.llama import Llama
from models.remat import recompute

DEBUG = Path(__file__).parents[2] / "configs/experiments/llama_debug_cpu.toml"
SIZES = ["train.global_batch=16", "train.sequence_length=32", "profile.steps=", "train.evaluate_every=0"]
DELAYED = ['train.precision="fp8"', 'train.fp8_scaling="delayed"']
BATCH, LENGTH, STEPS = 16, 32, 3
ONE = ["cluster.gpus_per_host=1", "mesh={data=1}"]
GATED = [f'model={{class="{__name__}:Gated"}}']


class Gated(nnx.Module):
    """A language model of two gated perceptrons, which compiles several times as fast as a Llama."""

    def __init__(self, *, rngs: nnx.Rngs, dtype=jnp.bfloat16, remat="none", fp8: bool, fp8_scaling: str):
        self.table = parameter(rngs, jax.nn.initializers.normal(0.2), (256, 32), ("vocab", "embed"), stack=None)
        self.layers, self.dtype, self.remat = GatedLayer(Matmuls(fp8, fp8_scaling), rngs), dtype, remat

    def __call__(self, tokens: jax.Array) -> jax.Array:
        graph, stacked = nnx.split(self.layers)
        layer = recompute(lambda x, one: (nnx.merge(graph, one)(x), None), self.remat)
        x, _ = jax.lax.scan(layer, self.table.get_value()[tokens].astype(self.dtype), stacked)
        return x @ self.table.get_value().T.astype(self.dtype)


class GatedLayer(nnx.Module):
    def __init__(self, matmuls: Matmuls, rngs: nnx.Rngs):
        def projection(name, inputs, outputs):
            return Projection(name, inputs, outputs, stack=2, matmuls=matmuls, rngs=rngs)

        self.gate, self.up = (projection(name, {"embed": 32}, {"mlp": 64}) for name in ("gate", "up"))
        self.down = projection("down", {"mlp": 64}, {"embed": 32})

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = project_each(constrain(x, *RESIDUAL_AXES), self.gate, self.up)
        return x + self.down(jax.nn.silu(gate) * up)


class FlaxDense(linen.Module):
    """A language model of one matmul with flax's own delayed scaling."""

    @linen.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        dense = linen.Dense(256, use_bias=False, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
        return dense(linen.Embed(256, 32)(tokens))


def of_current_scales(*, rngs: nnx.Rngs, fp8: bool = False) -> nnx.Module:
    """Return a model whose author knows of fp8 alone."""
    return Llama(fp8=fp8, rngs=rngs)


def trained(*overrides: str) -> tuple[list[float], dict]:
    """Return the losses of a few steps, and the model's variables after them."""
    experiment = load(DEBUG, [*SIZES, *overrides])
    program = make_train_step(experiment, build_mesh(experiment.mesh, experiment.cluster))
    state, losses, random = program.init(), [], np.random.default_rng(0)
    for _ in range(STEPS):
        tokens = random.integers(0, 256, (BATCH, LENGTH + 1), dtype=np.int32)
        weights = np.ones((BATCH, LENGTH), np.float32)
        values = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
        batch = {n: jax.device_put(v, program.abstract_batch[n].sharding) for n, v in values.items()}
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.variables))
    return losses, jax.tree.map(np.asarray, state.variables)


@pytest.fixture(scope="module")
def on_one():
    return trained(*ONE, *DELAYED, *GATED)


@pytest.mark.parametrize(
    "overrides",
    [
        ['train.remat="full"'],
        ["train.accumulate=2"],
        ["train.accumulate=2", *ONE],
        ["compression={axis='data',dtype='bf16'}", "mesh.fsdp=4", "mesh.tensor=", 'rules.preset="hsdp"'],
    ],
    ids=["recomputed", "replicas", "one device", "compressed"],
)
def test_a_step_is_the_same_on_every_mesh_and_in_micro_batches(on_one, overrides):
    """The largest numbers differ by a few roundings of bf16; sums over micro-batches would be twice as large."""
    losses, variables = trained(*DELAYED, *GATED, *overrides)
    np.testing.assert_allclose(losses, on_one[0], rtol=1e-3)
    for found, expected in zip(jax.tree.leaves(variables), jax.tree.leaves(on_one[1]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0.1)
        assert np.count_nonzero(found) == found.shape[0] * STEPS * 3


def test_projections_of_one_input_share_a_history(on_one):
    layers = on_one[1]["layers"]
    np.testing.assert_array_equal(layers["gate"]["amaxes"], layers["up"]["amaxes"])


def test_the_histories_of_flaxs_modules_are_kept_as_well():
    _, variables = trained(f'model={{class="{__name__}:FlaxDense"}}', "train.accumulate=2")
    kept = {name: x for name, x in _flat(variables).items() if "amax" in name}
    assert len(kept) == 3
    assert all(np.count_nonzero(x) == STEPS for x in kept.values())


def test_a_model_that_takes_no_scaling_is_refused():
    with pytest.raises(ConfigError, match="of_current_scales takes no `fp8_scaling` argument") as refused:
        trained(f'model={{class="{__name__}:of_current_scales"}}', *DELAYED)
    assert "train.fp8_scaling" in str(refused.value)


def _flat(tree: dict) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
