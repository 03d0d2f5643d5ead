"""Test `mk.pipeline` as users call it, what it refuses, and the FLOP of a schedule against its formula."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from meshkit.compile.traced import traced_flops
from meshkit.errors import ConfigError
from meshkit.parallel.pipeline import Functions, StageOutput, make_pipeline, pipeline, scan_layers
from tests.parallel.pipeline import toy

LAYERS, EMBED = 4, 8


def layer(params, x, key):
    return x + jnp.tanh(x @ params["w"])


def stage_fn(params, x, ctx):
    return scan_layers(layer, params, x, ctx)


def first_fn(outer, batch, ctx):
    return batch["x"] * outer["scale"]


def loss_fn(outer, y, batch, ctx):
    return jnp.sum((y - batch["y"]) ** 2), y.size


FUNCTIONS = Functions(first_fn, stage_fn, loss_fn)


def problem(layers=LAYERS, microbatches=4):
    random = np.random.default_rng(0)
    x, y = random.standard_normal((2, microbatches, 2, EMBED)).astype(np.float32)
    w = random.standard_normal((layers, EMBED, EMBED)).astype(np.float32) / EMBED
    return {"stages": {"w": w}, "outer": {"scale": np.ones(EMBED, np.float32)}}, {"x": x, "y": y}


def plain(params, batch):
    x = batch["x"] * params["outer"]["scale"]
    for i in range(params["stages"]["w"].shape[0]):
        x = layer({"w": params["stages"]["w"][i]}, x, None)
    return jnp.mean((x - batch["y"]) ** 2)


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "interleaved_1f1b", "virtual_stages": 2},
        {"schedule": "1f1b", "layout": "3|1"},
        {"schedule": "1f1b", "batch_spec": P(None, "data")},
    ],
)
def test_layers_go_in_and_gradients_come_out_in_the_model_s_order(options):
    mesh = toy.make_mesh(pipeline=2, data=2)
    params, batch = problem()
    run = jax.jit(lambda p, b: pipeline(stage_fn, loss_fn, p, b, first_fn=first_fn, mesh=mesh, **options))
    loss, gradients = run(params, batch)
    wanted, wanted_gradients = jax.value_and_grad(plain)(params, batch)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-6)
    # fp32 sums are in another order: see test_gradients.
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, atol=1e-5 * np.abs(w).max()), gradients, wanted_gradients
    )


def test_metrics_come_with_the_loss():
    mesh = toy.make_mesh(pipeline=2)
    params, batch = problem()

    def stage(params, x, ctx):
        return StageOutput(stage_fn(params, x, ctx), metrics={"stages_passed": 1.0})

    def loss(outer, y, batch, ctx):
        return *loss_fn(outer, y, batch, ctx), {"microbatch": ctx.microbatch}

    call = lambda p, b: pipeline(stage, loss, p, b, first_fn=first_fn, mesh=mesh, has_metrics=True)
    (value, metrics), _ = jax.jit(call)(params, batch)
    assert float(value) == pytest.approx(float(plain(params, batch)), rel=1e-6)
    # Metrics are summed over stages and averaged over microbatches.
    assert jax.device_get(metrics) == {
        "stages_passed": 2.0,
        "microbatch": 1.5,
    }


def test_garbage_of_the_bubble_does_no_harm():
    """x / |x| is NaN on the zeros that stages run on before anything has arrived."""
    params, batch = problem()
    mesh = toy.make_mesh(pipeline=2)

    def stage(params, x, ctx):
        return stage_fn(params, x / jnp.abs(x).sum(-1, keepdims=True), ctx)

    loss, gradients = jax.jit(lambda p, b: pipeline(stage, loss_fn, p, b, first_fn=first_fn, mesh=mesh))(params, batch)
    assert np.isfinite(loss)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


MAKE = {"mesh": None, "layers": LAYERS}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis": "stages"}, r"mesh axis 'stages', which the mesh \(pipeline 2 x data 2\) lacks"),
        ({"batch_spec": P(None, "pipeline")}, r"(?s)'pipeline' cuts the batch.*try rules"),
        ({"schedule": "2f2b"}, r"(?s)no pipeline schedule '2f2b'.*1f1b"),
        ({"virtual_stages": 2}, r"(?s)one virtual stage.*interleaved_1f1b"),
        ({"head": "sharded"}, r"(?s)no pipeline head 'sharded'.*vocab_parallel"),
        ({"residuals": "recompile"}, r"(?s)no residuals 'recompile'.*dots_saveable"),
        ({"layers": 1}, r"(?s)2 stages need at least 2 layers.*at most 1"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(options, message):
    mesh = toy.make_mesh(pipeline=2, data=2)
    with pytest.raises(ConfigError, match=message):
        make_pipeline(FUNCTIONS, **{**MAKE, "mesh": mesh, **options})


@pytest.mark.parametrize(
    ("options", "microbatches", "message"),
    [
        ({"schedule": "interleaved_1f1b", "virtual_stages": 2}, 5, r"(?s)5 microbatches.*microbatches = 4 or 6"),
        (
            {"specs": {"stages": {"w": P(None, "data")}, "outer": {"scale": P()}}},
            4,
            r"(?s)must cut the layers.*layers = ",
        ),
        (
            {"specs": {"stages": {"w": P("pipeline")}, "outer": {}}},
            4,
            r"0 PartitionSpecs are given for 1 arrays of outer",
        ),
        ({"batch_spec": P(None, None, ("data", "tensor"))}, 4, r"'tensor', which the mesh"),
        ({"batch_spec": P("data")}, 3, r"dim 0 of x, 3 .*2 parts of data"),
    ],
)
def test_calls_that_cannot_be_are_refused(options, microbatches, message):
    mesh = toy.make_mesh(pipeline=2, data=2)
    params, batch = problem(microbatches=microbatches)
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(
            lambda p, b: pipeline(stage_fn, loss_fn, p, b, first_fn=first_fn, mesh=mesh, **options), params, batch
        )


def test_a_pipeline_needs_a_mesh():
    with pytest.raises(ConfigError, match="needs a mesh"):
        pipeline(stage_fn, loss_fn, *problem(), first_fn=first_fn)


@pytest.mark.parametrize(
    ("schedule", "stages", "chunks", "microbatches"),
    [
        *(("1f1b", s, 1, m) for s, m in ((4, 4), (4, 32), (8, 32))),
        *(("interleaved_1f1b", s, v, m) for s, v, m in ((4, 2, 8), (4, 4, 8), (8, 4, 32))),
    ],
)
def test_executed_over_useful_flops_are_the_formula(schedule, stages, chunks, microbatches):
    """The matmuls of the traced program are counted; there are none outside of the layers."""
    made = make_pipeline(
        FUNCTIONS,
        mesh=toy.make_mesh(pipeline=stages),
        layers=stages * chunks,
        schedule=schedule,
        virtual_stages=chunks,
    )
    executed = traced_flops(jax.make_jaxpr(made.value_and_gradients)(*problem(stages * chunks, microbatches)))
    # This is one layer's matmul of one microbatch; it runs forward, recomputed, and twice backward.
    one = 2 * 2 * EMBED * EMBED
    useful = 4 * one * chunks * microbatches
    report = made.report(microbatches)
    assert report.executed_over_useful == pytest.approx((microbatches + (stages - 1) / chunks) / microbatches)
    assert executed is not None
    assert executed.executed / stages / useful == pytest.approx(report.executed_over_useful, rel=0.005)
    assert report.bubble_fraction == pytest.approx((stages - 1) / (microbatches * chunks + stages - 1))


def test_stash_recomputes_nothing():
    options = {"mesh": toy.make_mesh(pipeline=2), "layers": LAYERS}
    args = problem()
    flops = [
        traced_flops(
            jax.make_jaxpr(make_pipeline(FUNCTIONS, residuals=r, **options).value_and_gradients)(*args)
        ).executed
        for r in ("recompute", "stash")
    ]
    assert flops[1] / flops[0] == pytest.approx(3 / 4)


def test_padding_counts_as_bubble():
    """Of 5 layers on 2 stages, each stage computes 3."""
    made = make_pipeline(FUNCTIONS, mesh=toy.make_mesh(pipeline=2), layers=5)
    report = made.report(6)
    assert report.padding_layers == 1
    assert report.executed_over_useful == pytest.approx((6 + 1) * 3 * 2 / (6 * 5))


def test_the_picture_shows_each_stage_in_each_tick():
    mesh = toy.make_mesh(pipeline=2)
    report = make_pipeline(FUNCTIONS, mesh=mesh, layers=2).report(3)
    assert report.picture == (("F0", "F1", "F2 B0", "B1", "B2"), ("", "F0 B0", "F1 B1", "F2 B2", ""))
    assert (report.warmup_ticks, report.steady_ticks, report.drain_ticks) == (1, 3, 1)
