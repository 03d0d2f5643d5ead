"""Test models.moe: published sizes, the mathematics against a plain restatement, and sharded steps."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from meshkit.config.experiment import load
from meshkit.config.rules import ShardingRules
from meshkit.planning.resolved import make_train_step
from meshkit.sharding import build_mesh, constrain, sharding_scope
from meshkit.step.loss import next_token
from models.moe import Moe, MoeMlp, choose, make_config, next_token_loss, routing_values

DEBUG = Path(__file__).parents[2] / "configs/experiments/moe_debug_cpu.toml"
VALUES = {"load_balance_loss", "router_z_loss", "dropped_fraction", "largest_expert_share"}


def abstract(preset: str, **options) -> Moe:
    return nnx.eval_shape(lambda: Moe(preset, rngs=nnx.Rngs(0), **options))


def count(model) -> int:
    return sum(math.prod(p.shape) for p in jax.tree.leaves(nnx.state(model, nnx.Param)))


@pytest.mark.parametrize(
    ("preset", "total", "active", "rel"),
    [
        ("mixtral_8x7b", 46.7e9, 12.9e9, 0.005),
        ("mixtral_8x22b", 141e9, 39e9, 0.005),
        ("qwen3_30b_a3b", 30.5e9, 3.3e9, 0.1 / 3.3),  # The published number is cut after its last digit, not rounded.
        ("qwen3_235b_a22b", 235e9, 22e9, 0.5 / 22),
    ],
)
def test_parameter_counts_are_the_published_ones(preset, total, active, rel):
    """The published sizes have two or three digits.

    They are of Jiang et al. (2024), of Mistral AI (2024: 39B active of 141B), and of the model cards of Qwen3.
    """
    model = abstract(preset)
    c = model.config
    assert count(model) == pytest.approx(total, rel=0.005)
    lookup_and_norms = c.vocab * c.embed + (2 * c.layers + 1) * c.embed + 2 * c.layers * c.head_dim * c.qk_norm
    assert model.matmul_parameters() + lookup_and_norms == pytest.approx(active, rel=rel)
    idle = c.layers * (c.experts - c.experts_per_token) * 3 * c.embed * c.mlp
    assert count(model) - idle == model.matmul_parameters() + lookup_and_norms


def test_shared_experts_are_active_parameters():
    plain, shared = abstract("moe_debug"), abstract("moe_debug", shared_experts=2)
    more = plain.config.layers * 3 * plain.config.embed * 2 * plain.config.mlp
    assert count(shared) - count(plain) == shared.matmul_parameters() - plain.matmul_parameters() == more


def test_kernels_of_experts_name_their_dims():
    names = {
        "/".join(map(str, path)): v.get_metadata()["out_sharding"]
        for path, v in nnx.to_flat_state(nnx.state(abstract("moe_debug"), nnx.Param))
    }
    assert names["layers/moe/experts/gate"] == names["layers/moe/experts/up"] == ("layers", "experts", "embed", "mlp")
    assert names["layers/moe/experts/down"] == ("layers", "experts", "mlp", "embed")
    assert names["layers/moe/router/kernel"] == ("layers", "embed", None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "mixtral"}, "no Moe preset 'mixtral'. Did you mean 'mixtral_8x"),
        ({"expert": 3}, "no option 'expert'. Did you mean 'experts'"),
        ({"experts_per_token": 9}, "a token cannot go to 9 of 8 experts"),
        ({"capacity_factor": 0}, "capacity_factor = 0 must be a positive number"),
        ({"capacity_factor": 1.5, "buffer_factor": 2.0}, "leave buffer_factor out"),
        ({"load_balance_weight": -1.0}, "load_balance_weight = -1.0 must be a positive number"),
        ({"tied": True}, "no option 'tied'"),
    ],
)
def test_wrong_options_say_what_is_right(options, message):
    with pytest.raises(ValueError, match=message):
        Moe(rngs=nnx.Rngs(0), **options)


def test_a_layer_is_a_weighted_sum_of_its_experts():
    """Mixtral takes the softmax of the chosen scores; here every expert runs on every token, in plain jnp."""
    c = make_config("moe_debug", layers=1, shared_experts=1)
    layer = MoeMlp(c, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    layer = nnx.merge(graph, jax.tree.map(lambda p: p[0], state))
    x = jax.random.normal(jax.random.key(0), (2, 8, c.embed))
    y, values = jax.jit(lambda x: layer(x))(x)

    scores = x @ layer.router.kernel.get_value()
    chosen, choices = jax.lax.top_k(scores, c.experts_per_token)
    weights = jnp.einsum("blk,blke->ble", jax.nn.softmax(chosen), jax.nn.one_hot(choices, c.experts))
    gate, up, down = (k.get_value() for k in (layer.experts.gate, layer.experts.up, layer.experts.down))
    hidden = jax.nn.silu(jnp.einsum("bld,edf->blef", x, gate)) * jnp.einsum("bld,edf->blef", x, up)
    wanted = jnp.einsum("ble,blef,efd->bld", weights, hidden, down) + layer.shared(x)
    np.testing.assert_allclose(y, wanted, atol=1e-5)
    assert set(values) == VALUES
    assert values["dropped_fraction"] == 0


@pytest.mark.parametrize("batch", [8, 3])  # 4 GPUs cannot shard 3 sequences.
def test_experts_are_chosen_as_on_one_device_without_gathering_scores(batch):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    rules = ShardingRules({"act_batch": "data", "act_length": "context"})
    scores = jax.random.randint(jax.random.key(0), (batch, 16, 8), 0, 4).astype(jnp.float32)  # Some scores are equal.

    def choices(scores):
        with sharding_scope(mesh, rules):
            return choose(constrain(scores, "act_batch", "act_length", None), 2)

    compiled = jax.jit(choices).lower(scores).compile()
    assert np.array_equal(compiled(scores), jax.lax.top_k(scores, 2)[1])
    if batch % 4 == 0:
        assert "all-gather" not in compiled.as_text()


def test_routing_values_of_an_even_and_of_a_collapsed_router():
    even = jnp.eye(4)[None, :, :]  # Each of four tokens goes to its own expert of four.
    kept = jnp.array([True, True, True, False]).reshape(1, 4, 1)
    values = routing_values(jnp.zeros((1, 4, 4)), even[:, :, None], kept)
    assert {name: float(v) for name, v in values.items()} == pytest.approx(
        {
            "load_balance_loss": 1.0,
            "router_z_loss": math.log(4) ** 2,
            "dropped_fraction": 0.25,
            "largest_expert_share": 0.25,
        }
    )
    one = jnp.zeros((1, 4, 4)).at[..., 0].set(50.0)
    values = routing_values(one, jax.nn.one_hot(jnp.zeros((1, 4, 1), int), 4), kept)
    assert float(values["load_balance_loss"]) == pytest.approx(4.0)
    assert float(values["largest_expert_share"]) == 1.0


def test_auxiliary_losses_are_for_training_only():
    model = Moe(rngs=nnx.Rngs(0), dtype=jnp.float32, layers=1, load_balance_weight=0.5, z_loss_weight=0.25)
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 256)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": jnp.full((2, 8), 0.5)}
    plain, weight, _ = next_token(model, batch, jax.random.key(0))
    loss, same_weight, values = next_token_loss(model, batch, jax.random.key(0))
    added = 0.5 * values["load_balance_loss"] + 0.25 * values["router_z_loss"]
    assert float(weight) == float(same_weight) == 8.0
    assert float(loss) == pytest.approx(float(plain + weight * added), rel=1e-6)
    model.eval()
    assert float(next_token_loss(model, batch, jax.random.key(0))[0]) == pytest.approx(float(plain), rel=1e-6)


# The tolerance is sqrt(D N) u, as in tests/equivalence, with N = 512 tokens and D = 32 sums one after the other.
SEQUENCES, LENGTH = 16, 32
TOLERANCE = math.sqrt(32 * SEQUENCES * LENGTH) * 2.0**-24
MESHES = {
    "expert 8": ["mesh.fsdp=1", "mesh.expert=8"],
    "fsdp 2 x expert 4, full remat": ['train.remat="full"'],
    "expert 4 x tensor 2, sequence parallel": ["mesh.fsdp=1", "mesh.expert=4", "mesh.tensor=2", 'rules.preset="all"'],
    "data 2 x expert 2 x tensor 2, accumulated": [
        "mesh.data=2",
        "mesh.fsdp=1",
        "mesh.expert=2",
        "mesh.tensor=2",
        'rules.preset="all"',
        "train.accumulate=2",
    ],
}


def experiment(*overrides: str):
    """Return an experiment, without the load-balance loss where batches are accumulated: it is of each micro-batch."""
    weight = 0.0 if "train.accumulate=2" in overrides else 0.05
    sizes = [f"train.global_batch={SEQUENCES}", f"train.sequence_length={LENGTH}", 'train.precision="fp32"']
    return load(DEBUG, [*sizes, f"model.load_balance_weight={weight}", "model.shared_experts=1", *overrides])


def loss_and_gradients(spec, mesh, state=None):
    program = make_train_step(spec, mesh)
    tokens = np.random.default_rng(0).integers(0, 256, (SEQUENCES, LENGTH + 1), np.int32)
    values = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((SEQUENCES, LENGTH), np.float32)}
    batch = {name: jax.device_put(v, program.abstract_batch[name].sharding) for name, v in values.items()}
    state = program.init() if state is None else state
    state = jax.tree.map(lambda x, a: jax.device_put(np.asarray(x), a.sharding), state, program.abstract_state)
    loss, gradients = program.gradients(state, batch)
    return state, float(loss), jax.tree.map(np.asarray, gradients)


@functools.cache
def on_one_device(load_balance_weight):
    alone = experiment(f"model.load_balance_weight={load_balance_weight}")
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), alone.mesh.axis_names, (AxisType.Auto,) * 2)
    return loss_and_gradients(alone, one)


def check_sharded(spec, on_one_device):
    """Check that loss and gradients on the spec's mesh are those of `loss_and_gradients` on one device."""
    state, loss, gradients = on_one_device
    _, got_loss, got = loss_and_gradients(spec, build_mesh(spec.mesh, spec.cluster), state)
    assert got_loss == pytest.approx(loss, rel=TOLERANCE)
    for (path, g), w in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(gradients), strict=True):
        worst = np.abs(g - w).max() / np.abs(w).max()
        assert worst < TOLERANCE, f"{jax.tree_util.keystr(path)} differs by {worst:.2e} of its largest entry"


SLOW = (
    "data 2 x expert 2 x tensor 2, accumulated",
    "expert 8",
    "fsdp 2 x expert 4, full remat",
    "expert 4 x tensor 2, sequence parallel",
)


@pytest.mark.parametrize(
    "overrides", [pytest.param(o, marks=[pytest.mark.slow] * (n in SLOW)) for n, o in MESHES.items()], ids=MESHES
)
def test_sharded_steps_equal_one_device(overrides):
    spec = experiment(*overrides)
    check_sharded(spec, on_one_device(spec.model.options["load_balance_weight"]))
