"""Test that real models in a pipeline on every other axis have the gradients of the same model on one device.

Stages are the blocks of `models.llama` and `models.moe` as they are, with their own attention, vocabulary loss and
token exchange. The terms summed are the same, in another order: a few ulp (1.2e-7) of the largest gradient. The bound
is 1e-5 of it.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import meshkit as mk
from meshkit.parallel.pipeline import Functions, StageOutput, make_pipeline, scan_layers
from meshkit.sharding import sharding_scope
from models.llama import Llama
from models.losses import next_token_losses
from models.moe import Moe
from tests.parallel.pipeline import toy

VOCAB, BATCH, LENGTH = 64, 4, 16
TOLERANCE, Z_LOSS = 1e-5, 0.01
SIZES = {"vocab": VOCAB, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 2, "head_dim": 8}
TENSOR = {"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
TENSOR |= {f"act_{name}": axis for name, axis in TENSOR.items()}
# Each row holds the mesh beside the pipeline's axis, rules, and the axes that shard a batch's [batch, length].
KINDS = {
    "pipeline": ({}, {}, ()),
    "data": ({"data": 2}, {"act_batch": "data"}, ("data",)),
    "tensor": ({"tensor": 2}, TENSOR, ()),
    "sequence": ({"tensor": 2}, TENSOR | {"act_residual_length": "tensor"}, ()),
    "fsdp": ({"fsdp": 2}, {"act_batch": "fsdp", "embed": "fsdp"}, ("fsdp",)),
    "context": ({"context": 2}, {"act_length": "context", "act_residual_length": "context"}, (None, "context")),
    "context_tensor": (
        {"context": 2, "tensor": 2},
        TENSOR | {"act_length": "context", "act_residual_length": ["context", "tensor"]},
        (None, "context"),
    ),
    "expert": (
        {"data": 2, "expert": 2},
        {"act_batch": ["data", "expert"], "experts": "expert", "act_experts": "expert"},
        (("data", "expert"),),
    ),
    "expert_alone": (
        {"expert": 2},
        {"act_batch": "expert", "experts": "expert", "act_experts": "expert"},
        ("expert",),
    ),
    "expert_fsdp_tensor": (
        {"fsdp": 1, "expert": 2, "tensor": 2},
        TENSOR | {"act_batch": ["fsdp", "expert"], "experts": "expert", "act_experts": "expert", "embed": "fsdp"},
        (("fsdp", "expert"),),
    ),
}


@functools.cache
def parts(kind, context, layers):
    """Return the graph of a model of so many layers and its fp32 state."""
    make, sizes = (Moe, {"mlp": 32, "experts": 4, "experts_per_token": 2}) if "expert" in kind else (Llama, {})
    preset = "moe_debug" if make is Moe else "llama_debug"
    config = {"dtype": jnp.float32, "context": context, "layers": layers, **SIZES, **sizes}
    graph, state = nnx.split(nnx.eval_shape(lambda: make(preset, rngs=nnx.Rngs(0), **config)))
    random = np.random.default_rng(1)

    def values(path, like):
        norm = "scale" in jax.tree_util.keystr(path)
        return (norm + random.standard_normal(like.shape) / SIZES["embed"] ** 0.5).astype(np.float32)

    return graph, jax.tree_util.tree_map_with_path(values, state)


def batch_of(microbatches):
    random = np.random.default_rng(0)
    shape = (microbatches, BATCH, LENGTH)
    tokens, targets = random.integers(0, VOCAB, (2, *shape), np.int32)
    return {"tokens": tokens, "targets": targets, "weights": (random.random(shape) < 0.7).astype(np.float32)}


def make_functions(graph, state):
    """Return the functions of a pipeline of a model, made from its own pieces."""

    def whole(outer):
        return nnx.merge(graph, nnx.State({**state, **outer}))

    def stage_fn(params, x, ctx):
        model = nnx.merge(graph, state)

        def layer(parameters, x, key):
            found = model.layer(parameters, x, ctx, key)
            if not isinstance(found, tuple):
                return found
            x, values = found
            return StageOutput(x, Z_LOSS * values["router_z_loss"] * x.shape[0] * x.shape[1])

        return scan_layers(layer, params, x, ctx)

    def first_fn(outer, batch, ctx):
        return whole(outer).first(batch, ctx)

    def loss_fn(outer, y, batch, ctx):
        model = whole(outer)
        losses = next_token_losses(model.last(y, ctx), batch["targets"], VOCAB, ctx)
        return (losses * batch["weights"]).sum(), batch["weights"].sum()

    return Functions(first_fn, stage_fn, loss_fn)


@functools.cache
def expected(kind, layers, microbatches):
    graph, state = parts(kind, "all_gather", layers)
    batch = batch_of(microbatches)

    def loss(state):
        model = nnx.merge(graph, state)

        def one(batch):
            logits, values = model(batch["tokens"]), {"router_z_loss": 0.0}
            if "expert" in kind:
                logits, values = model.with_routing(batch["tokens"])
            loss_sum = (next_token_losses(logits, batch["targets"], VOCAB) * batch["weights"]).sum()
            return loss_sum + layers * Z_LOSS * values["router_z_loss"] * BATCH * LENGTH, batch["weights"].sum()

        loss_sum, weight = jax.lax.map(one, batch)
        return loss_sum.sum() / weight.sum()

    value, gradients = toy.compiled(jax.value_and_grad(loss), state)
    return jax.device_get((value, nnx.to_pure_dict(gradients)))


def check(kind, schedule="1f1b", chunks=1, context="all_gather", *, stages=2, microbatches=4, **options):
    count = max(4, stages * chunks)
    sizes, logical, cut = KINDS[kind]
    mesh = toy.make_mesh(pipeline=stages, **sizes)
    rules = mk.ShardingRules({"layers": "pipeline", **logical})
    graph, state = parts(kind, context, count)
    params = {"stages": state["layers"], "outer": nnx.State({k: v for k, v in state.items() if k != "layers"})}
    specs = jax.tree.map(lambda s: s.spec, mk.shardings(params, mesh, rules))
    made = make_pipeline(
        make_functions(graph, state),
        mesh=mesh,
        layers=count,
        batch_spec=P(None, *cut),
        kept=("expert",) if "expert" in kind else (),
        specs=specs,
        schedule=schedule,
        virtual_stages=chunks,
        **options,
    )

    def run(params, batch):
        with sharding_scope(mesh, rules):
            return made.value_and_gradients(params, batch)

    arranged = {**params, "stages": made.stack.arrange(params["stages"])}
    loss, _, gradients = toy.compiled(run, jax.device_put(arranged, made.shardings(arranged)), batch_of(microbatches))
    found = {
        **nnx.to_pure_dict(gradients["outer"]),
        "layers": nnx.to_pure_dict(made.stack.restore(gradients["stages"])),
    }
    wanted_loss, wanted = expected(kind, count, microbatches)
    assert float(loss) == pytest.approx(float(wanted_loss), rel=TOLERANCE)
    pairs = zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(jax.device_get(found)), strict=True)
    for (path, w), g in pairs:
        assert np.abs(g - w).max() < TOLERANCE * np.abs(w).max(), jax.tree_util.keystr(path)


# These have one of each kind of axis over which stages communicate themselves; `slow` has the rest.
DEFAULT = {("context", "1f1b", 1, "ring")}
CASES = [
    *((kind, "1f1b", 1, "all_gather") for kind in KINDS),
    *((kind, "interleaved_1f1b", 2, "all_gather") for kind in KINDS),
    *(("context", "1f1b", 1, context) for context in ("ring", "ulysses")),
    ("context_tensor", "interleaved_1f1b", 2, "ulysses"),
    ("context_tensor", "interleaved_1f1b", 2, "ring"),
]


@pytest.mark.parametrize(
    ("kind", "schedule", "chunks", "context"),
    [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow) for case in CASES],
)
def test_gradients_of_whole_models(kind, schedule, chunks, context):
    check(kind, schedule, chunks, context)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["context", "expert"])
def test_stashed_residuals_of_what_a_stage_exchanges(kind):
    check(kind, residuals="stash")


# test_gradients covers the meshes without such axes.
MATRIX = [
    (kind, schedule, stages, chunks, times)
    for kind, stages, times in itertools.product(("context", "expert_alone"), (2, 4), (1, 2, 4))
    for schedule, chunks in (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4))
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "schedule", "stages", "chunks", "times"), MATRIX)
def test_gradients_of_the_whole_matrix(kind, schedule, stages, chunks, times):
    context = "ring" if times == 2 else "all_gather"
    check(kind, schedule, chunks, context, stages=stages, microbatches=times * stages)
