"""Test that collective matmul is exact, moves the bytes of its closed form, and overlaps them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from meshkit.config.experiment import load
from meshkit.config.rules import ShardingRules
from meshkit.errors import ConfigError
from meshkit.parallel.collective_matmul import PIECES, Cut, gather_matmul, matmul_cut, matmul_scatter
from meshkit.planning.planner import plan_experiment
from meshkit.planning.resolved import make_train_step
from meshkit.sharding import build_mesh, sharding_scope

BATCH, LENGTH, EMBED, HEADS, HEAD_DIM, MLP = 4, 16, 24, 8, 6, 32
# fp32 sums are in another order, the longest over the 48 + 32 columns of both kernels: sqrt(80) u of the largest entry.
# The loss is linear in the outputs, so that their errors do not come back through its derivative.
TOLERANCE = np.sqrt(80) * 2.0**-24


@pytest.fixture(scope="module")
def cut():
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    return Cut(Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2), "tensor", ("data",))


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


X, QUERY, UP = normal(0, BATCH, LENGTH, EMBED), normal(1, EMBED, HEADS, HEAD_DIM), normal(2, EMBED, MLP)
H, OUTPUT = normal(3, BATCH, LENGTH, HEADS, HEAD_DIM), normal(4, HEADS, HEAD_DIM, EMBED)


def gathered(cut, x, *kernels):
    return gather_matmul(cut, x, kernels)


def scattered(cut, x, kernel):
    return (matmul_scatter(cut, x, kernel, 2),)


def plain_columns(x, query, up):
    return jnp.einsum("bte,ehd->bthd", x, query), jnp.einsum("bte,em->btm", x, up)


def plain_rows(x, kernel):
    return (jnp.einsum("bthd,hde->bte", x, kernel),)


CASES = {"gather": (gathered, plain_columns, (X, QUERY, UP)), "scatter": (scattered, plain_rows, (H, OUTPUT))}


def loss(fn, *args):
    return sum(jnp.sum(y * jnp.cos(jnp.arange(y.size).reshape(y.shape))) for y in fn(*args))


def close(found, expected):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * float(np.abs(b).max()))


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_are_those_of_plain_matmuls(cut, case):
    fn, plain, args = CASES[case]
    fn = partial(fn, cut)
    close(jax.jit(fn)(*args), plain(*args))
    every = tuple(range(len(args)))
    close(jax.jit(jax.grad(partial(loss, fn), every))(*args), jax.grad(partial(loss, plain), every)(*args))


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_collective_it_replaces(cut, case):
    """Forward, PIECES move the whole activation [batch/data, length, embed], of which (n-1)/n come from elsewhere."""
    fn, _, args = CASES[case]
    text = jax.jit(partial(fn, cut)).lower(*args).compile().as_text()
    found = re.findall(r"= f32\[([\d,]+)\]\S* (all-gather|reduce-scatter|all-reduce|collective-permute)\(", text)
    sizes = [np.prod([int(d) for d in dims.split(",")]) for dims, _ in found]
    collective, shards = {"gather": ("all-gather", 1), "scatter": ("reduce-scatter", cut.size)}[case]
    assert {kind for _, kind in found} == {collective}
    assert sizes == [BATCH // 2 * LENGTH * EMBED / PIECES / shards] * PIECES


def rules(**logical):
    named = {"act_batch": "data", "act_residual_length": "tensor", "mlp": "tensor", "heads": "tensor", **logical}
    return ShardingRules({k: v for k, v in named.items() if v is not None})


def test_the_cut_is_over_the_axis_that_cuts_the_length_between_blocks(cut):
    with sharding_scope(cut.mesh, rules()):
        assert matmul_cut(LENGTH, ("mlp", MLP)) == cut
    with sharding_scope(cut.mesh, rules(act_residual_length=None)):
        assert matmul_cut(LENGTH, ("mlp", MLP)) is None
    assert matmul_cut(LENGTH, ("mlp", MLP)) is None


@pytest.mark.parametrize(
    ("logical", "dims", "message"),
    [
        ({"act_length": "data", "act_batch": None, "act_residual_length": ["data", "tensor"]}, {}, "length over none"),
        ({"mlp": "data"}, {}, r"needs mlp cut over 'tensor', not over \['data'\]"),
        ({}, {"mlp": 30}, "cannot cut mlp = 30 4 ways"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_are_refused(cut, logical, dims, message):
    with sharding_scope(cut.mesh, rules(**logical)), pytest.raises(ConfigError, match=message):
        matmul_cut(LENGTH, ("mlp", dims.get("mlp", MLP)))


DEBUG = Path(__file__).parents[2] / "configs/experiments/llama_debug_cpu.toml"
SEQUENCE_PARALLEL = ["train.sequence_length=32", 'rules.preset="fsdp_tensor_sequence"']


@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_a_llama_has_the_same_gradients_with_and_without(remat):
    """Two data, two fsdp and two tensor devices compute in fp32.

    As in tests/equivalence, at most 32 sums follow each other, the longest over 512 terms, with errors of the largest
    entry of each leaf.
    """
    found = []
    for option in ("false", "true"):
        overrides = [*SEQUENCE_PARALLEL, 'train.precision="fp32"', f'train.remat="{remat}"']
        experiment = load(DEBUG, [*overrides, f"model.collective_matmul={option}"])
        program = make_train_step(experiment, build_mesh(experiment.mesh, experiment.cluster))
        tokens = np.random.default_rng(0).integers(0, 256, (16, 33), np.int32)
        values = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((16, 32), np.float32)}
        batch = {n: jax.device_put(v, program.abstract_batch[n].sharding) for n, v in values.items()}
        found.append(program.gradients(program.init(), batch))
    tolerance = np.sqrt(32) * np.sqrt(512) * 2.0**-24
    for a, b in zip(*(jax.tree.leaves(f) for f in found), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * float(np.abs(b).max()))


@pytest.mark.slow
@pytest.mark.deviceless
def test_the_same_bytes_hide_better():
    """Two layers of Llama 3 8B on one DGX H100, tensor 8, move the same bytes over tensor with and without.

    The layers' all-gathers and reduce-scatters are in pieces, and more of their time is behind matmuls than in the
    plain program.
    """
    cluster = ['cluster={name="dgx_h100",hosts=1}', "mesh.fsdp=", "mesh.tensor=8", 'rules.preset="tensor_sequence"']
    sizes = ["model.layers=2", "train.global_batch=2"]
    rows = {}
    for option in ("false", "true"):
        experiment = load(DEBUG.with_name("llama3_8b.toml"), [*cluster, *sizes, f"model.collective_matmul={option}"])
        found = plan_experiment(experiment).report.communication
        rows[option] = [r for r in found if r.collective in ("all-gather", "reduce-scatter") and r.dtype != "s32"]
    elements = {"bf16": 2, "f32": 4, "mixed": 2}
    moved = {o: sum(r.payload_bytes / elements[r.dtype] for r in found) for o, found in rows.items()}
    assert moved["true"] == pytest.approx(moved["false"], rel=0.01)
    assert sum(r.count for r in rows["true"]) > 3 * sum(r.count for r in rows["false"])
    hidden = {o: sum(r.overlapped_s for r in found) for o, found in rows.items()}
    assert hidden["true"] > 1.2 * hidden["false"]
