"""Test Muon: the updates of optax.contrib.muon, for the matrices that the names of dims tell, on any mesh."""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from meshkit.config.experiment import load
from meshkit.config.rules import ShardingRules
from meshkit.config.sections import OptimizerTable
from meshkit.errors import ConfigError
from meshkit.planning.resolved import make_train_step
from meshkit.sharding import build_mesh
from meshkit.step.muon import find_matrices
from meshkit.step.train_step import make_optimizer
from models.gpt import GPT
from models.gpt_oss import GptOss
from models.llama import Llama
from models.moe import Moe

CONFIGS = Path(__file__).parents[2] / "configs/experiments"
MESH = AbstractMesh((2, 2), ("fsdp", "expert"))
RULES = ShardingRules({"embed": "fsdp", "experts": "expert"})


def matrices_of(cls, **options):
    params = nnx.state(nnx.eval_shape(lambda: cls(rngs=nnx.Rngs(0), **options)), nnx.Param)
    return params, find_matrices(params, MESH, RULES)


def test_matrices_of_layers_and_experts_are_muons_and_all_else_is_adamws():
    attention = {f"attention/{name}/kernel" for name in ("query", "key", "value", "output")}
    mlp = {f"mlp/{name}/kernel" for name in ("gate", "up", "down")}
    assert set(matrices_of(Llama, qk_norm=True)[1]) == {f"layers/{name}" for name in attention | mlp}
    experts = {f"moe/experts/{name}" for name in ("gate", "up", "down")}
    moe = {f"layers/{name}" for name in attention | experts} | {f"prefix/{name}" for name in attention | mlp}
    assert set(matrices_of(Moe, dense_layers=1)[1]) == moe
    pairs = {f"layers/{kind}/{name}" for kind in ("sliding", "full") for name in attention | experts}
    assert set(matrices_of(GptOss)[1]) == pairs  # No bias, sink or router is among them.
    assert not any("bias" in path or "embedding" in path or "positions" in path for path in matrices_of(GPT)[1])


def test_axes_that_cut_matrices_move_to_the_stack():
    """One axis shards eight experts of three layers: twelve matrices of a half, and three layers padded to four."""
    state, found = matrices_of(Moe, layers=3)
    gate = found["layers/moe/experts/gate"]
    assert gate.stored.spec == PartitionSpec(None, "expert", "fsdp", None)
    assert [s.spec for s in gate.moves] == [
        PartitionSpec(None, "expert", None, "fsdp", None), PartitionSpec(None, "expert", "fsdp", None, None)
    ]  # fmt: skip
    assert (gate.pieces, gate.matrices) == ((1, 2), 12)
    assert found["layers/attention/query/kernel"].matrices == 4
    x = np.arange(math.prod(shape := state["layers"]["moe"]["experts"]["gate"].shape), dtype=np.float32).reshape(shape)
    np.testing.assert_array_equal(gate.from_rows(gate.to_rows(jnp.asarray(x)), x.shape), x)
    np.testing.assert_array_equal(gate.to_rows(jnp.asarray(x))[0, 1, 4], x[1, 4])  # It is the fifth of the second half.


def test_updates_are_those_of_optax():
    """Two steps of a Moe's parameters agree; optax is given the same dims."""
    state, _ = matrices_of(Moe, layers=2, embed=24, mlp=40, vocab=32, experts=4)
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "expert"), axis_types=(AxisType.Auto,) * 2)
    matrices = find_matrices(state, one, RULES)
    random = np.random.default_rng(0)
    params, *gradients = (
        jax.tree.map(lambda x: jnp.asarray(random.standard_normal(x.shape), jnp.float32), nnx.to_pure_dict(state))
        for _ in range(3)
    )
    table = OptimizerTable(algorithm="muon", learning_rate=0.1, weight_decay=0.3, clip=0.0, schedule="constant")

    def dims(path, x):
        name = "/".join(str(k.key) for k in path)
        if name not in matrices:
            return None
        start, middle = matrices[name].stacked, matrices[name].stacked + matrices[name].inner
        return optax.contrib.MuonDimensionNumbers(tuple(range(start, middle)), tuple(range(middle, x.ndim)))

    theirs = optax.contrib.muon(
        0.1,
        weight_decay=0.3,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=jax.tree_util.tree_map_with_path(dims, params),
    )
    ours = make_optimizer(table, None, 10, matrices)

    @jax.jit
    def both(params, gradients):
        found = []
        for optimizer in (ours, theirs):
            state = optimizer.init(params)
            for g in gradients:
                updates, state = optimizer.update(g, state, params)
            found.append(updates)
        return found

    with jax.default_matmul_precision("highest"):
        found, wanted = both(params, gradients)
    wanted = {jax.tree_util.keystr(at): x for at, x in jax.tree_util.tree_leaves_with_path(wanted)}
    compared = 0
    for at, x in jax.tree_util.tree_leaves_with_path(found):
        if "/".join(str(k.key) for k in at) in matrices:
            # There are five cubic steps of sums of 40 products, each of which magnifies small values by 3.4 at most.
            np.testing.assert_allclose(x, wanted[jax.tree_util.keystr(at)], rtol=0, atol=2e-5 * float(jnp.abs(x).max()))
            compared += 1
    assert compared == len(matrices) == 7


def test_a_model_without_names_is_refused():
    with pytest.raises(ConfigError, match="no parameter of the model is a matrix by the names of its dims"):
        make_optimizer(OptimizerTable(algorithm="muon"), None, 10, {})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.momentum=0.9"], "optimizer.momentum applies to Muon alone"),
        (["optimizer.algorithm=muon", "optimizer.class=optax:lion"], "optimizer.algorithm applies to AdamW alone"),
        (["optimizer.algorithm=muon", "local_sgd.axis=fsdp"], "Muon's exchange of matrices does not support"),
    ],
)
def test_what_muon_does_not_do_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        load(CONFIGS / "moe_debug_cpu.toml", overrides)


MESHES = {
    "fsdp 2 x expert 4": [],
    "fsdp 2 x expert 2 x tensor 2": ["mesh.expert=2", "mesh.tensor=2", 'rules.preset="all"'],
}


def trained(spec, mesh, state=None):
    """Return parameters and moments after three steps from the same start, the start, and the program."""
    program = make_train_step(spec, mesh)
    state = program.init() if state is None else state
    first = jax.tree.map(np.asarray, state)
    state = jax.tree.map(lambda x, a: jax.device_put(np.asarray(x), a.sharding), state, program.abstract_state)
    tokens = np.random.default_rng(0).integers(0, 64, (16, 17), np.int32)
    values = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((16, 16), np.float32)}
    batch = {name: jax.device_put(v, program.abstract_batch[name].sharding) for name, v in values.items()}
    for _ in range(3):
        state, _ = program.step(state, batch)
    return first, jax.tree.map(np.asarray, (state.params, state.opt_state)), program


@pytest.mark.slow
@pytest.mark.parametrize("overrides", MESHES.values(), ids=MESHES)
def test_sharded_training_equals_one_device(overrides):
    """AdamW's eps is of the size of gradients, as in tests/equivalence, and so is what Muon may magnify.

    Singular values that are rounding alone come out 3.4^5 times as large, so the bound is 500 times that of a gradient.
    """
    sizes = ["train.global_batch=16", "train.sequence_length=16", 'train.precision="fp32"', "model.vocab=64"]
    sizes += ["model.embed=32", "model.mlp=32", "optimizer.warmup_steps=0", "optimizer.learning_rate=1e-2"]
    on = [*sizes, 'optimizer.algorithm="muon"', "optimizer.eps=1e-2"]
    alone = load(CONFIGS / "moe_debug_cpu.toml", on)
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), alone.mesh.axis_names, (AxisType.Auto,) * 2)
    start, wanted, _ = trained(alone, one)
    spec = load(CONFIGS / "moe_debug_cpu.toml", [*on, *overrides])
    _, found, program = trained(spec, build_mesh(spec.mesh, spec.cluster), start)
    tolerance = 500 * math.sqrt(32 * 16 * 16) * 2.0**-24
    for (path, w), g in zip(jax.tree_util.tree_leaves_with_path(wanted), jax.tree.leaves(found), strict=True):
        assert np.abs(g - w).max() <= tolerance * max(1e-8, np.abs(w).max()), jax.tree_util.keystr(path)
    # In fp32, there are one moment of a matrix, two of all else, and counters.
    moments = sum(x.size for x in jax.tree.leaves(program.abstract_state.opt_state) if x.ndim)
    counts = {path: x.size for path, x in jax.tree_util.tree_leaves_with_path(program.abstract_state.params)}
    matrices = find_matrices(program.model.params, build_mesh(spec.mesh, spec.cluster), spec.rules)
    of_muon = sum(n for path, n in counts.items() if "/".join(str(k.key) for k in path) in matrices)
    assert moments == 2 * sum(counts.values()) - of_muon
