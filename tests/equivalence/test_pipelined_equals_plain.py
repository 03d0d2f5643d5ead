"""Test that a pipelined step computes the loss and every gradient of the plain step on one device.

The test uses only the experiment file and `make_train_step`. Both steps sum the same fp32 terms in another order: the
bound is that of test_sharded_equals_single.py, for sums of 512 terms through 48 of them (6 layers).
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.planning.resolved import make_train_step
from meshkit.sharding import build_mesh

EXPERIMENT = Path(__file__).parents[2] / "configs" / "experiments" / "llama_pipeline_cpu.toml"
TOLERANCE = np.sqrt(48) * np.sqrt(512) * 2.0**-24  # This is 9.3e-6.
VOCAB, LENGTH = 64, 16
# LLVM's optimizations would take most of the time.
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
SMALL = [
    *(f"model.{name}={size}" for name, size in (("vocab", VOCAB), ("embed", 32), ("mlp", 64), ("head_dim", 8))),
    *("model.heads=4", "model.kv_heads=2", f"train.sequence_length={LENGTH}", 'train.precision="fp32"'),
]
MOE = [
    *("model.class=models.moe:Moe", "model.preset=moe_debug", "model.experts=4", "model.z_loss_weight=0.01"),
    *("model.load_balance_weight=0.1", "train.loss=models.moe:next_token_loss"),
]
# Each row holds the mesh axes beside the pipeline and the overrides that they need.
MESHES = {
    "pipeline": ({}, []),
    "data": ({"data": 2}, []),
    "zero1": ({"data": 2}, ['rules.preset="zero1_tensor"']),
    "fsdp": ({"fsdp": 2}, []),
    "tensor": ({"tensor": 2}, []),
    "sequence": ({"tensor": 2}, ['rules.preset="fsdp_tensor_sequence"']),
    "fsdp + sequence": ({"fsdp": 2, "tensor": 2}, ['rules.preset="fsdp_tensor_sequence"']),
    "context": ({"context": 2}, ['rules.preset="fsdp_context"']),
    "experts": ({"fsdp": 2, "expert": 2}, ['rules.preset="fsdp_expert"']),
    "ring": ({"context": 2}, ['rules.preset="fsdp_context"', 'model.context="ring"']),
}


jax.devices()  # jax must start with all eight devices before an experiment asks for fewer.


def mesh(**axes: int) -> list[str]:
    """Return overrides that make the mesh these axes, outermost first, on as many devices."""
    gone = [f"mesh.{name}=" for name in ("pipeline", "fsdp", "tensor")]
    count = f"cluster.gpus_per_host={int(np.prod(list(axes.values())))}"
    return [*gone, *(f"mesh.{name}={size}" for name, size in axes.items()), count]


def pipelined(stages, schedule="1f1b", chunks=1, times=1, kind="pipeline", *overrides):
    """Return an experiment with a pipeline."""
    sizes, more = MESHES[kind]
    microbatches = times * stages
    spec = [f"pipeline.schedule={schedule}", f"pipeline.virtual_stages={chunks}", "pipeline.layout="]
    spec += [f"pipeline.microbatches={microbatches}", f"train.global_batch={2 * microbatches}"]
    spec += [f"model.layers={stages * chunks}"]
    return load(EXPERIMENT, [*SMALL, *mesh(pipeline=stages, **sizes), *spec, *more, *overrides])


@functools.cache
def plain(*overrides: str):
    """Return the experiment without a pipeline."""
    return load(EXPERIMENT, [*SMALL, "pipeline=", *overrides])


def batch_for(program):
    random = np.random.default_rng(0)
    rows = program.abstract_batch["tokens"].shape[0]
    tokens = random.integers(0, VOCAB, (rows, LENGTH + 1), np.int32)
    weights = random.random((rows, LENGTH), np.float32)  # The weights are unequal, so that a mean of means would show.
    values = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    return {name: jax.device_put(v, program.abstract_batch[name].sharding) for name, v in values.items()}


def random_state(program):
    """Return a numpy state in the model's own order: parameters as a model starts with, everything else zero."""
    abstract = program.arrangement.saved if program.arrangement else program.abstract_state
    random = np.random.default_rng(1)

    def value(path, x):
        norm = "scale" in jax.tree_util.keystr(path)
        return (norm + random.standard_normal(x.shape) / 32**0.5).astype(x.dtype)

    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
    zeros.params = jax.tree_util.tree_map_with_path(value, abstract.params)
    return zeros


def loss_and_gradients(spec, mesh):
    program = make_train_step(spec, mesh)
    state = random_state(program)
    arranged = program.arrangement
    if arranged:
        state.params["layers"] = arranged.stack.arrange(state.params["layers"])
        state.opt_state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), program.abstract_state.opt_state)
    state = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, program.abstract_state)
    batch = batch_for(program)
    loss, gradients = program.gradients.lower(state, batch).compile(FAST)(state, batch)
    gradients = jax.tree.map(np.asarray, gradients)
    if arranged:
        gradients["layers"] = arranged.stack.restore(gradients["layers"])
    return float(loss), gradients


@functools.cache
def reference(*overrides: str):
    spec = plain(*overrides)
    one = Mesh(np.array(jax.devices()[:1]).reshape(1), ("data",), (AxisType.Auto,))
    return loss_and_gradients(spec, one)


def assert_close(got, wanted) -> None:
    assert got[0] == pytest.approx(wanted[0], rel=TOLERANCE)
    for (path, g), w in zip(jax.tree_util.tree_flatten_with_path(got[1])[0], jax.tree.leaves(wanted[1]), strict=True):
        worst = np.abs(g - w).max() / np.abs(w).max()
        assert worst < TOLERANCE, f"{jax.tree_util.keystr(path)} differs by {worst:.2e} of its largest entry"


def check(spec, *overrides: str) -> None:
    """Check the pipeline's loss and gradients against those of the same model without one."""
    wanted = reference(
        *(f"train.global_batch={spec.train.global_batch}", f"model.layers={spec.model.options['layers']}"),
        *mesh(data=1),
        *overrides,
    )
    assert_close(loss_and_gradients(spec, build_mesh(spec.mesh, spec.cluster)), wanted)


def test_stages_of_unequal_layers_with_a_tied_table_on_every_axis():
    """This case combines chunks, padding, and a table at both ends over the axes pipeline, fsdp and tensor."""
    tied = ["model.tied=true", "model.layers=5"]
    check(pipelined(2, "interleaved_1f1b", 2, 1, "fsdp + sequence", *tied, 'pipeline.layout="1|2|1|1"'), *tied)


# Each mesh has each kind of schedule, while stages, chunks and microbatches take turns. The toy of
# tests/parallel/pipeline has the whole product.
MATRIX = [
    (kind, schedule, stages if kind == "pipeline" else min(stages, 8 // math.prod(MESHES[kind][0].values())),
     1 if schedule == "1f1b" else chunks, times)
    for i, kind in enumerate(kind for kind in MESHES if kind != "experts")
    for j, schedule in enumerate(("1f1b", "interleaved_1f1b"))
    for stages, chunks, times in [((2, 4, 8)[(i + j) % 3], (2, 4)[(i + j) % 2], (1, 2, 4)[(i + 2 * j) % 3])]
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "schedule", "stages", "chunks", "times"), MATRIX)
def test_loss_and_all_gradients_equal_one_device(kind, schedule, stages, chunks, times):
    check(pipelined(stages, schedule, chunks, times, kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "schedule", "overrides"),
    [
        (2, "1f1b", ['pipeline.head="replicated"']),
        (2, "1f1b", ['pipeline.head="replicated"', "model.tied=true"]),
        (4, "1f1b", ['pipeline.head="replicated"', "model.tied=true"]),
        (2, "1f1b", ['pipeline.residuals="stash"']),
        (2, "1f1b", ['pipeline.residuals="stash"', "train.remat=full"]),
        (2, "1f1b", ["train.remat=dots"]),
    ],
)
def test_heads_residuals_and_remat(stages, schedule, overrides):
    tied = [o for o in overrides if "tied" in o]
    check(pipelined(stages, schedule, 1, 2, "data", *overrides), *tied)


@pytest.mark.slow
def test_normalized_heads():
    check(pipelined(2, "1f1b", 1, 2, "fsdp + sequence", "model.qk_norm=true"), "model.qk_norm=true")


def test_a_pipeline_refuses_layers_that_are_no_loop():
    spec = pipelined(2, "1f1b", 1, 1, "pipeline", "model.scan_layers=false")
    program = make_train_step(spec, build_mesh(spec.mesh, spec.cluster))
    with pytest.raises(ConfigError, match="scan_layers = false: a pipeline scans the layers of a stage"):
        program.step.trace(program.abstract_state, program.abstract_batch)


@pytest.mark.slow
def test_auxiliary_losses_of_a_mixture_of_experts_behind_a_dense_layer():
    """Each micro-batch of each replica balances its own tokens, with a pipeline as without."""
    on = ["model.layers=2", "model.mlp=32", "model.dense_layers=1", "train.global_batch=8", *MOE]
    spec = pipelined(2, "1f1b", 1, 1, "data", *on)
    wanted = plain(*on, *mesh(data=2), "train.accumulate=2")
    wanted = loss_and_gradients(wanted, build_mesh(wanted.mesh, wanted.cluster))
    assert_close(loss_and_gradients(spec, build_mesh(spec.mesh, spec.cluster)), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_experts_over_an_axis_of_their_own(schedule):
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    on = [*MOE, "model.layers=4", "model.mlp=32", "train.global_batch=8"]
    spec = pipelined(2, schedule, chunks, 1, "experts", *on)
    wanted = plain(*on, *mesh(fsdp=2, expert=2), 'rules.preset="fsdp_expert"', "train.accumulate=2")
    wanted = loss_and_gradients(wanted, build_mesh(wanted.mesh, wanted.cluster))
    assert_close(loss_and_gradients(spec, build_mesh(spec.mesh, spec.cluster)), wanted)


@pytest.mark.slow
def test_pairs_of_layers_with_and_without_a_window_over_the_axis_of_experts():
    """The pairs of layers of GPT-OSS are a pipeline's layers."""
    on = [*MOE, "model.class=models.gpt_oss:GptOss", "model.preset=gpt_oss_debug"]
    on += ["model.layers=4", "model.mlp=32", "train.global_batch=8"]
    spec = pipelined(2, "1f1b", 1, 1, "experts", *on)
    wanted = plain(*on, *mesh(fsdp=2, expert=2), 'rules.preset="fsdp_expert"', "train.accumulate=2")
    wanted = loss_and_gradients(wanted, build_mesh(wanted.mesh, wanted.cluster))
    assert_close(loss_and_gradients(spec, build_mesh(spec.mesh, spec.cluster)), wanted)


@pytest.mark.slow
def test_latent_attention_and_balanced_experts_behind_a_dense_layer():
    """DeepSeek-V3's dense layers run on every stage; the balancing bias moves by the same loads."""
    on = [*MOE, "model.class=models.deepseek:DeepSeek", "model.preset=deepseek_debug", "model.kv_heads="]
    on += ["model.experts=8", "model.layers=2", "model.mlp=32", "train.global_batch=8"]
    spec = pipelined(2, "1f1b", 1, 1, "experts", *on)
    wanted = plain(*on, *mesh(fsdp=2, expert=2), 'rules.preset="fsdp_expert"', "train.accumulate=2")
    wanted = loss_and_gradients(wanted, build_mesh(wanted.mesh, wanted.cluster))
    assert_close(loss_and_gradients(spec, build_mesh(spec.mesh, spec.cluster)), wanted)


@pytest.mark.slow
def test_three_steps_of_adamw_and_an_evaluation():
    """Parameters, moments and metrics agree after three steps.

    eps is of the size of the gradients, so that an entry whose gradient is rounding error alone does not make a step of
    its sign (see test_sharded_equals_single.py). Clipping is on.
    """
    optimizer = ["optimizer.eps=1e-2", "optimizer.warmup_steps=0", "optimizer.clip=0.5", "model.layers=5"]
    spec = pipelined(2, "interleaved_1f1b", 2, 1, "fsdp + sequence", *optimizer)
    single = plain(*optimizer, "train.global_batch=4", *mesh(data=1))
    one = Mesh(np.array(jax.devices()[:1]).reshape(1), ("data",), (AxisType.Auto,))
    found = []
    for program in (make_train_step(single, one), make_train_step(spec, build_mesh(spec.mesh, spec.cluster))):
        state, batch = program.init(), batch_for(program)
        for _ in range(3):
            state, metrics = program.step(state, batch)
        evaluation = program.evaluate(state, batch)
        state = program.arrangement.to_saved(state) if program.arrangement else state
        found.append(jax.tree.map(np.asarray, (state.params, state.opt_state, {**metrics, **evaluation})))
    for (path, w), g in zip(jax.tree_util.tree_leaves_with_path(found[0]), jax.tree.leaves(found[1]), strict=True):
        assert np.abs(g - w).max() <= 4 * TOLERANCE * np.abs(w).max(), jax.tree_util.keystr(path)
