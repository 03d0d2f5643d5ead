"""Test that a pipeline's gradients equal those of the same layers in series on one device, without microbatches.

Both sum the same fp32 terms in another order: a few ulp (1.2e-7) of the largest gradient. The bound is 1e-5 of it; a
microbatch too many or too few, or one masked wrongly, is off by more than 1e-2.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshkit.parallel.pipeline import SCHEDULES, Stack, make_tables
from tests.parallel.pipeline import toy

TOLERANCE = 1e-5
MESHES = {
    "pipeline": {},
    "data": {"data": ("data",)},
    "tensor": {"tensor": "tensor"},
    "fsdp": {"data": ("fsdp",), "fsdp": "fsdp"},
}


@functools.cache
def expected(layers, microbatches, shards=1, rate=0.0, aux=False, tied=False):
    params, batch = toy.make_params(layers, tied=tied), toy.make_batch(microbatches)
    rng = jax.random.key(3) if rate else None
    run = functools.partial(toy.reference, layers=layers, rate=rate, aux=aux, shards=shards)
    (loss, metrics), gradients = toy.compiled(jax.value_and_grad(run, has_aux=True), params, batch, rng)
    return jax.device_get((loss, metrics, gradients))


def check(mesh, layers, microbatches, *, rate=0.0, aux=False, tied=False, **options):
    """Check the toy model pipelined on a mesh against the toy model alone, and return the pipeline."""
    made = toy.build(mesh, layers, rate=rate, aux=aux, tied=tied, **options)
    params, batch = toy.make_params(layers, tied=tied), toy.make_batch(microbatches)
    params = {**params, "stages": made.stack.arrange(params["stages"])}
    params = jax.device_put(params, made.shardings(params))
    rng = jax.random.key(3) if rate else None
    loss, metrics, gradients = toy.compiled(made.value_and_gradients, params, batch, rng)
    for g, p in zip(jax.tree.leaves(gradients), jax.tree.leaves(params)):
        assert g.sharding.is_equivalent_to(p.sharding, g.ndim)
    loss, metrics = jax.device_get((loss, metrics))
    gradients = jax.device_get({**gradients, "stages": made.stack.restore(gradients["stages"])})
    shards = made.axes.shards if rate or aux else 1  # Each shard draws masks and adds losses of its own.
    wanted = expected(layers, microbatches, shards, rate, aux, tied)
    assert loss == pytest.approx(wanted[0], rel=TOLERANCE)
    assert set(metrics) == set(wanted[1])
    for name, value in metrics.items():
        assert value == pytest.approx(wanted[1][name], rel=TOLERANCE), name
    paths = jax.tree_util.tree_leaves_with_path(gradients)
    for (path, g), w in zip(paths, jax.tree.leaves(wanted[2])):
        assert np.abs(g - w).max() < TOLERANCE * np.abs(w).max(), jax.tree_util.keystr(path)
    return made


def mesh_of(kind, stages):
    return toy.make_mesh(**({"pipeline": stages} if kind == "pipeline" else {"pipeline": stages, kind: 2}))


# Each schedule, number of stages, of chunks and of microbatches, and each mesh, is tested at least once. There are 4 or
# 8 layers and 8 microbatches, so that two programs suffice to compare with; `slow` has all pairs.
PRUNED = [
    ("1f1b", "pipeline", 8, 1, 1),
    ("1f1b", "fsdp", 4, 1, 2),
    pytest.param("interleaved_1f1b", "data", 2, 4, 4, marks=pytest.mark.slow),
    ("interleaved_1f1b", "tensor", 4, 2, 2),
    ("interleaved_1f1b", "pipeline", 2, 2, 4),
]
MATRIX = [
    (schedule, kind, stages, chunks, times)
    for kind, stages, times in itertools.product(MESHES, (2, 4, 8), (1, 2, 4))
    if kind == "pipeline" or stages < 8
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4))
]


@pytest.mark.parametrize(("schedule", "kind", "stages", "chunks", "times"), PRUNED)
def test_gradients_equal_those_without_a_pipeline(schedule, kind, stages, chunks, times):
    layers = stages * chunks
    check(mesh_of(kind, stages), layers, times * stages, schedule=schedule, virtual_stages=chunks, **MESHES[kind])


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "kind", "stages", "chunks", "times"), [m for m in MATRIX if m not in PRUNED])
def test_gradients_of_the_whole_matrix(schedule, kind, stages, chunks, times):
    layers = stages * chunks
    check(mesh_of(kind, stages), layers, times * stages, schedule=schedule, virtual_stages=chunks, **MESHES[kind])


HARD = {"rate": 0.2, "aux": True}  # This adds dropout, and a loss and a metric of each layer.


@pytest.mark.parametrize(
    ("schedule", "chunks", "layers", "options"),
    [
        ("1f1b", 1, 5, {"residuals": "dots_saveable", "tied": True}),
        pytest.param("1f1b", 1, 4, {"residuals": "stash"}, marks=pytest.mark.slow),
        pytest.param("interleaved_1f1b", 2, 7, {"head": "vocab_parallel", "tied": True}, marks=pytest.mark.slow),
        pytest.param("interleaved_1f1b", 2, 9, {"residuals": "stash", "layout": "2|3|3|1"}, marks=pytest.mark.slow),
        pytest.param("1f1b", 1, 3, {"head": "vocab_parallel", "tied": True}, marks=pytest.mark.slow),
        pytest.param("interleaved_1f1b", 2, 7, {"residuals": "dots_saveable"}, marks=pytest.mark.slow),
    ],
)
def test_dropout_losses_of_layers_tied_tables_and_uneven_layers(schedule, chunks, layers, options):
    mesh = toy.make_mesh(pipeline=2, data=2)
    check(mesh, layers, 4, schedule=schedule, virtual_stages=chunks, data=("data",), **HARD, **options)


@pytest.mark.slow
def test_a_head_over_the_pipeline_with_fsdp_and_tensor():
    """All axes are used: the table is sharded over the pipeline along vocab and over fsdp along embed."""
    mesh = toy.make_mesh(pipeline=2, fsdp=2, tensor=2)
    axes = {"data": ("fsdp",), "fsdp": "fsdp", "tensor": "tensor"}
    check(mesh, 7, 4, schedule="interleaved_1f1b", virtual_stages=2, head="vocab_parallel", tied=True, **HARD, **axes)


@pytest.mark.parametrize("microbatches", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_one_chunk_takes_fewer_microbatches_than_stages(microbatches):
    check(toy.make_mesh(pipeline=4), 4, microbatches)


@pytest.mark.parametrize("chunks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_one_stage_is_a_pipeline_too(chunks):
    check(toy.make_mesh(pipeline=1), 4, 8, schedule=SCHEDULES[chunks > 1], virtual_stages=chunks)


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_loss_alone_is_the_loss(chunks):
    made = toy.build(toy.make_mesh(pipeline=2), 4, schedule=SCHEDULES[chunks > 1], virtual_stages=chunks)
    params, batch = toy.make_params(4), toy.make_batch(8)
    params = {**params, "stages": made.stack.arrange(params["stages"])}
    loss, metrics = jax.device_get(toy.compiled(made.value, params, batch))
    wanted = expected(4, 8)
    assert loss == pytest.approx(wanted[0], rel=TOLERANCE)
    assert metrics["right"] == pytest.approx(wanted[1]["right"], rel=TOLERANCE)


@pytest.mark.slow
def test_accumulators_keep_what_bf16_would_lose():
    """Of 128 equal gradients, a bf16 sum stops growing at 2^8 times an addend's ulp; an fp32 sum does not."""
    mesh, layers = toy.make_mesh(pipeline=2), 2
    params = toy.make_params(layers, dtype=jnp.bfloat16)
    batch = jax.tree.map(lambda a: np.repeat(a, 128, axis=0), toy.make_batch(1))
    found = {}
    for accumulators in (jnp.float32, None):
        made = toy.build(mesh, layers, accumulators=accumulators)
        _, _, found[accumulators] = toy.compiled(made.value_and_gradients, params, batch)
    one = jax.tree.map(lambda a: a[:1], batch)
    wanted = toy.compiled(toy.build(mesh, layers).value_and_gradients, params, one)[2]

    def error(gradients):
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(wanted))
        return max(float(jnp.abs(g - w).max() / jnp.abs(w).max()) for g, w in pairs)

    assert {g.dtype for g in jax.tree.leaves(found[jnp.float32])} == {jnp.dtype(jnp.float32)}
    assert {g.dtype for g in jax.tree.leaves(found[None])} == {jnp.dtype(jnp.bfloat16)}
    assert error(found[jnp.float32]) < 1e-5
    assert error(found[None]) > 1e-2


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_arranged_layers_are_where_the_schedule_runs_them(chunks):
    stack = Stack.of(8, 2, chunks)
    order = np.arange(8).reshape(chunks, 2, -1).swapaxes(0, 1).reshape(-1)
    np.testing.assert_array_equal(stack.arrange(np.arange(8)), order)
    tables = make_tables("interleaved_1f1b" if chunks > 1 else "1f1b", 2, chunks, 2)
    assert tables.forward.chunk.max() == chunks - 1
