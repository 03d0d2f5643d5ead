"""Test that a sharded step computes the loss and every gradient of one device, however it is sharded."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from meshkit.config.experiment import load
from meshkit.planning.resolved import make_train_step
from meshkit.sharding import build_mesh

EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "llama_debug_cpu.toml"
BATCH, LENGTH = 16, 32

# A sum of K fp32 terms taken in another order differs by rounding errors that add up like a random walk: about sqrt(K)
# u max|partial sum|, u = 2^-24. The longest sums of this model run over K = BATCH * LENGTH = 512 terms (a weight's
# gradient) and K = 384 (mlp). A gradient passes through at most D = 32 such sums one after the other (8 matmuls a
# layer, 2 layers, forward and backward). Their errors are independent, which gives another factor sqrt(D). Errors are
# measured against the largest entry of their leaf, since small entries are differences of large ones.
UNIT_ROUNDOFF = 2.0**-24
TOLERANCE = np.sqrt(32) * np.sqrt(BATCH * LENGTH) * UNIT_ROUNDOFF  # This is 7.6e-6.


def mesh(**axes: int) -> list[str]:
    """Return overrides that make the mesh these axes, outermost first."""
    gone = [f"mesh.{name}=" for name in ("data", "fsdp", "tensor")]
    return [*gone, *(f"mesh.{name}={size}" for name, size in axes.items())]


def preset(name: str) -> str:
    return f'rules.preset="{name}"'


STRATEGIES = {
    "data": [*mesh(data=8), preset("data")],
    "zero1": [*mesh(data=8), preset("zero1")],
    "zero2": [*mesh(data=8), preset("zero2")],
    "fsdp": [*mesh(fsdp=8), preset("fsdp")],
    "hsdp": [*mesh(data=2, fsdp=4), preset("hsdp")],
    # Eight GPUs share four key heads: the kernels stay whole, and each GPU gets the key heads that its query heads
    # read.
    "tensor": [*mesh(tensor=8), preset("tensor"), 'rules.logical.kv_heads="replicated"'],
    "tensor + sequence": [*mesh(tensor=4, data=2), preset("tensor_sequence")],
    "zero1 + tensor": [*mesh(data=2, tensor=4), preset("zero1_tensor")],
    "hsdp + tensor": [*mesh(data=2, fsdp=2, tensor=2), preset("fsdp_tensor")],
    "hsdp + tensor + sequence": [*mesh(data=2, fsdp=2, tensor=2), preset("fsdp_tensor_sequence")],
    "fsdp + context, ring": [*mesh(fsdp=2, context=4), preset("fsdp_context"), 'model.context="ring"'],
    "fsdp + context, ulysses": [*mesh(fsdp=2, context=4), preset("fsdp_context"), 'model.context="ulysses"'],
    "data + context + tensor + sequence": [*mesh(data=2, context=2, tensor=2), preset("all")],
    "weights gathered once": [*mesh(data=2, fsdp=2, tensor=2), 'rules.compute.embed="replicated"'],
    "optimizer cut": ['rules.logical.embed="replicated"', 'rules.optimizer.embed="fsdp"'],
    # With accumulation, accumulators are whole and reduced once, or sharded and reduced with every micro-batch, or have
    # one axis of each.
    "data, accumulated": [*mesh(data=8), preset("data"), "train.accumulate=2"],
    "zero1, accumulated": [*mesh(data=4), "cluster.gpus_per_host=4", preset("zero1"), "train.accumulate=4"],
    "zero2, accumulated": [*mesh(data=8), preset("zero2"), "train.accumulate=2"],
    "fsdp, accumulated": [*mesh(fsdp=8), preset("fsdp"), "train.accumulate=2"],
    "fsdp, accumulated in pieces": [*mesh(fsdp=8), 'rules.gradients.embed="fsdp"', "train.accumulate=2"],
    "hsdp + tensor + sequence, accumulated": [preset("fsdp_tensor_sequence"), "train.accumulate=2"],
    "hsdp + tensor, accumulated in pieces": ['rules.gradients.embed="fsdp"', "train.accumulate=4"],
    "fsdp + vocab over both": [*mesh(fsdp=4, tensor=2), 'rules.logical.vocab=["fsdp", "tensor"]',
                               'rules.logical.embed="replicated"', "train.accumulate=2"],
}  # fmt: skip


def experiment(*overrides: str):
    sizes = [f"train.global_batch={BATCH}", f"train.sequence_length={LENGTH}", 'train.precision="fp32"']
    return load(EXPERIMENT, [*sizes, *overrides])


def one_device(spec) -> Mesh:
    rank = len(spec.mesh.shape)
    return Mesh(np.array(jax.devices()[:1]).reshape((1,) * rank), spec.mesh.axis_names, (AxisType.Auto,) * rank)


def batch_for(program) -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    tokens = random.integers(0, 256, (BATCH, LENGTH + 1), np.int32)
    weights = random.random((BATCH, LENGTH), np.float32)  # The weights are unequal, so that a mean of means would show.
    values = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    return {name: jax.device_put(v, program.abstract_batch[name].sharding) for name, v in values.items()}


def loss_and_gradients(spec, mesh, state):
    program = make_train_step(spec, mesh)
    state = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, program.abstract_state)
    loss, gradients = program.gradients(state, batch_for(program))
    return float(loss), jax.tree.map(np.asarray, gradients)


@pytest.fixture(scope="module")
def state():
    """Return the initial state on one device."""
    spec = experiment()
    return jax.tree.map(np.asarray, make_train_step(spec, one_device(spec)).init())


@pytest.fixture(scope="module")
def reference(state):
    spec = experiment()
    return loss_and_gradients(spec, one_device(spec), state)


def assert_close(got, wanted, tolerance: float) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=tolerance)
    for (path, g), w in zip(jax.tree_util.tree_flatten_with_path(got[1])[0], jax.tree.leaves(wanted[1])):
        worst = np.abs(g - w).max() / np.abs(w).max()
        assert worst < tolerance, f"{jax.tree_util.keystr(path)} differs by {worst:.2e} of its largest entry"


# These are slow tests: another strategy has their axes, or (zero2) the same program without accumulation.
COVERED = ("zero2", "data, accumulated", "hsdp", "tensor + sequence",
           "zero1 + tensor", "hsdp + tensor", "fsdp, accumulated", "hsdp + tensor + sequence",
           "zero1, accumulated")  # fmt: skip


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(o, marks=[pytest.mark.slow] * (n in COVERED)) for n, o in STRATEGIES.items()],
    ids=STRATEGIES,
)
def test_loss_and_all_gradients_equal_one_device(overrides, reference, state):
    spec = experiment(*overrides)
    assert_close(loss_and_gradients(spec, build_mesh(spec.mesh, spec.cluster), state), reference, TOLERANCE)


def test_normalized_heads_and_layers_that_are_no_loop_equal_one_device():
    """Qwen3's norms on every axis, unrolled and recomputed, agree with a scan on one device."""
    spec = experiment("model.qk_norm=true")
    state = jax.tree.map(np.asarray, make_train_step(spec, one_device(spec)).init())
    wanted = loss_and_gradients(spec, one_device(spec), state)
    every = [*STRATEGIES["data + context + tensor + sequence"], "model.scan_layers=false", "train.remat=dots"]
    spec = experiment("model.qk_norm=true", *every)
    assert_close(loss_and_gradients(spec, build_mesh(spec.mesh, spec.cluster), state), wanted, TOLERANCE)


# AdamW divides by sqrt(v) + eps. With its usual eps, an entry whose gradient is rounding error moves by the sign of
# that error. So eps is of the size of the gradients here, and an error d in a gradient moves the update by at most 2 d
# / eps a step (numerator and denominator), for 3 steps of a learning rate of at most 1e-2.
EPS, RATE, STEPS = 1e-2, 1e-2, 3


def parameters_after_three_steps(spec, mesh, state):
    program = make_train_step(spec, mesh)
    state = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, program.abstract_state)
    batch = batch_for(program)
    losses = []
    for _ in range(STEPS):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, state.params)


ADAMW = [f"optimizer.eps={EPS}", f"optimizer.learning_rate={RATE}", "optimizer.warmup_steps=0"]


@pytest.fixture(scope="module")
def three_steps(state):
    spec = experiment(*ADAMW)
    return parameters_after_three_steps(spec, one_device(spec), state)


# Each shard is updated by itself: the default suite has one layout whose moments lie as their parameters do, and one of
# the others.
LAYOUTS = ("zero1", "fsdp")


@pytest.mark.parametrize(
    "overrides",
    [pytest.param(o, marks=[pytest.mark.slow] * (n not in LAYOUTS)) for n, o in STRATEGIES.items()],
    ids=STRATEGIES,
)
def test_three_steps_of_adamw_equal_one_device(overrides, three_steps, reference, state):
    spec = experiment(*overrides, *ADAMW)
    losses, params = parameters_after_three_steps(spec, build_mesh(spec.mesh, spec.cluster), state)
    np.testing.assert_allclose(losses, three_steps[0], rtol=TOLERANCE * STEPS)
    gradients = jax.tree.leaves(reference[1])
    for start, got, wanted, g in zip(*map(jax.tree.leaves, (state.params, params, three_steps[1])), gradients):
        error = TOLERANCE * np.abs(g).max()
        assert np.abs(got - wanted).max() < STEPS * RATE * 2 * error / EPS + np.abs(wanted).max() * UNIT_ROUNDOFF * 4
        assert np.abs(wanted - start).max() > 100 * STEPS * RATE * error / EPS  # The parameters have moved.


@pytest.mark.parametrize("policy", ["full", "dots"])
def test_recomputation_changes_nothing(policy, reference, state):
    spec = experiment(f'train.remat="{policy}"')
    assert_close(loss_and_gradients(spec, one_device(spec), state), reference, TOLERANCE)


def test_dropout_draws_the_same_masks_on_any_mesh(state):
    """The accumulators stay sharded; if they were reduced once a step, each replica would draw masks of its own."""
    drawn = ["model.dropout=0.2", "train.accumulate=2"]
    spec = experiment(*drawn, *STRATEGIES["fsdp, accumulated in pieces"])
    alone = loss_and_gradients(experiment(*drawn), one_device(experiment()), state)
    assert_close(loss_and_gradients(spec, build_mesh(spec.mesh, spec.cluster), state), alone, TOLERANCE)


def test_a_model_of_ones_own_shards_the_same():
    """The perceptron has its own loss and examples; K = 1024 terms (mlp) pass through D = 6 sums."""
    sizes = ["model.embed=256", "model.mlp=1024", "train.global_batch=64", 'train.precision="fp32"']
    spec = load(EXPERIMENT.with_name("mlp.toml"), sizes)
    x = np.random.default_rng(0).standard_normal((64, 256), np.float32)

    def gradients(mesh):
        program = make_train_step(spec, mesh)
        batch = {n: jax.device_put(x, program.abstract_batch[n].sharding) for n in ("inputs", "targets")}
        loss, grads = program.gradients(program.init(), batch)
        return float(loss), jax.tree.map(np.asarray, grads)

    sharded, alone = gradients(build_mesh(spec.mesh, spec.cluster)), gradients(one_device(spec))
    assert_close(sharded, alone, np.sqrt(6 * 1024) * UNIT_ROUNDOFF)
