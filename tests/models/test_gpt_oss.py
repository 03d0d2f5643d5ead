"""Test models.gpt_oss: published sizes, attention and experts against a plain restatement, and sharded steps."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import meshkit as mk
from meshkit.compile.program import compile_absent
from meshkit.config.rules import ShardingRules
from meshkit.errors import ConfigError
from meshkit.parallel.layout import ContextLayout
from meshkit.sharding import sharding_scope
from models.attention import TokenOrder, sink_attention
from models.gpt_oss import ALPHA, GptOss, GptOssMlp
from tests.models.test_moe import check_sharded, count, experiment, loss_and_gradients


@pytest.mark.parametrize(
    ("preset", "total", "active", "mlp", "attention"),
    [("gpt_oss_20b", 20.91e9, 3.61e9, 19.12e9, 0.64e9), ("gpt_oss_120b", 116.83e9, 5.13e9, 114.71e9, 0.96e9)],
)
def test_parameter_counts_are_the_published_ones(preset, total, active, mlp, attention):
    """The sizes are table 1 of the model card (arXiv 2508.10925), to its digits; active ones exclude the look-up."""
    model = nnx.eval_shape(lambda: GptOss(preset, rngs=nnx.Rngs(0)))
    digit = 0.005e9
    leaves = nnx.to_flat_state(nnx.state(model, nnx.Param))
    sums = [sum(math.prod(p.shape) for path, p in leaves if part in path) for part in ("moe", "attention")]
    assert (count(model), *sums) == pytest.approx((total, mlp, attention), abs=digit)
    assert model.matmul_parameters() == pytest.approx(active, abs=digit)


def test_an_odd_number_of_layers_is_refused():
    with pytest.raises(ValueError, match="layers = 3 is odd; layers with a window and without come in pairs"):
        GptOss(rngs=nnx.Rngs(0), layers=3)
    with pytest.raises(ValueError, match="a GptOss has no option 'qk_norm'"):
        GptOss(rngs=nnx.Rngs(0), qk_norm=True)


BATCH, TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2, 1024, 4, 2, 16  # There are two blocks of queries and two of keys.


def plain_attention(q, k, v, sinks, window):
    k, v = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(HEAD_DIM)
    distance = jnp.arange(TOKENS)[:, None] - jnp.arange(TOKENS)
    scores = jnp.where((distance >= 0) & (distance < (window or TOKENS)), scores, -jnp.inf)
    column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1))[..., :-1]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


# fp32 sums have at most 1024 products (2 heads of a group in the gradient of keys), eight in series, as in
# tests/parallel/test_context.py; errors are relative to the largest entry.
ATTENTION_TOLERANCE = math.sqrt(8 * 2 * TOKENS) * 2.0**-24


def check_attention(ours, window):
    """Check that output and gradients are those of whole rows of scores."""
    random = np.random.default_rng(0)
    shapes = [(BATCH, TOKENS, n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS)] + [(HEADS,)]
    arrays = [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]
    g = jnp.asarray(random.standard_normal((BATCH, TOKENS, HEADS, HEAD_DIM)), jnp.float32)

    def run(attention):
        out, pull = jax.vjp(attention, *arrays)
        return [out, *pull(g)]

    wanted = jax.jit(lambda: run(lambda *args: plain_attention(*args, window)))()
    for found, want in zip(jax.jit(lambda: run(ours))(), wanted, strict=True):
        assert np.abs(found - want).max() < ATTENTION_TOLERANCE * np.abs(want).max()


@pytest.mark.parametrize(("window", "sharded"), [(None, False), (100, True), (600, False)])
def test_attention_with_sinks_and_its_gradients(window, sharded):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rules = ShardingRules({"act_batch": "data", "act_heads": "tensor", "act_kv_heads": "tensor"})

    def ours(q, k, v, sinks):
        with sharding_scope(mesh if sharded else None, rules if sharded else None):
            return sink_attention(q, k, v, sinks, window=window)

    check_attention(ours, window)


@pytest.mark.parametrize(
    ("window", "context"),
    [(None, "all_gather"), (None, "ring"), (100, "all_gather"), (257, "all_gather"), (1, "ring")],
)
def test_attention_with_sinks_over_a_cut_length(window, context):
    """Four chunks of 256 tokens lie on two GPUs; there are whole rows, and windows that begin in the chunk before."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("context", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rules = ShardingRules({"act_length": "context", "act_heads": "tensor", "act_kv_heads": "tensor"})

    def ours(q, k, v, sinks):
        with sharding_scope(mesh, rules):
            return sink_attention(q, k, v, sinks, context, window)

    check_attention(ours, window)


def cut_length(context: str, window: int):
    mesh = Mesh(np.array(jax.devices()), ("context",), axis_types=(AxisType.Auto,))
    x = jnp.zeros((1, 64, HEADS, HEAD_DIM))
    with sharding_scope(mesh, ShardingRules({"act_length": "context"})):
        return sink_attention(x, x, x, jnp.zeros(HEADS), context, window)


def test_a_window_of_one_token_needs_no_other_gpus_keys():
    """From two tokens on, both chunks exchange their ends, of keys and of values."""
    one, two = (str(jax.make_jaxpr(functools.partial(cut_length, "ring", w))()).count("ppermute[") for w in (1, 2))
    assert two - one == 4


def test_a_cut_length_refuses_what_it_does_not_do():
    with pytest.raises(ConfigError, match="context = 'ulysses' cuts heads, which sinks do not follow"):
        cut_length("ulysses", 8)
    with pytest.raises(ConfigError, match="a window of 8 tokens reaches over more than one chunk of 4"):
        cut_length("ring", 8)


@pytest.mark.parametrize("capacity", [{}, {"capacity_factor": 8.0}])
def test_a_layer_is_a_weighted_sum_of_its_experts(capacity):
    """Every expert runs on every token in plain jnp, with biases and clamps; gradients of all parameters agree."""
    c = GptOss.make_config("gpt_oss_debug", layers=2, swiglu_limit=0.5, **capacity)
    graph, state = nnx.split(GptOssMlp(c, rngs=nnx.Rngs(0)))
    state = jax.tree.map(lambda p: p[0] + 0.3 * jax.random.normal(jax.random.key(p.size), p.shape[1:]), state)
    x = jax.random.normal(jax.random.key(0), (2, 8, c.embed))
    g = jax.random.normal(jax.random.key(1), x.shape)

    def plain(state, x):
        layer = nnx.merge(graph, state)
        e = layer.experts
        scores = x @ layer.router.kernel.get_value() + layer.router.bias.get_value()
        chosen, choices = jax.lax.top_k(scores, c.experts_per_token)
        weights = jnp.einsum("blk,blke->ble", jax.nn.softmax(chosen), jax.nn.one_hot(choices, c.experts))
        gate, up = (
            jnp.einsum("bld,edf->blef", x, k.get_value()) + b.get_value()
            for k, b in ((e.gate, e.gate_bias), (e.up, e.up_bias))
        )
        gate, up = jnp.minimum(gate, 0.5), jnp.clip(up, -0.5, 0.5)
        hidden = (up + 1) * gate * jax.nn.sigmoid(ALPHA * gate)
        out = jnp.einsum("blef,efd->bled", hidden, e.down.get_value()) + e.down_bias.get_value()
        return jnp.einsum("ble,bled->bld", weights, out)

    def run(layer):
        out, pull = jax.vjp(layer, state, x)
        return out, pull(g)

    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda: run(lambda state, x: nnx.merge(graph, state)(x)[0]))()
        wanted = jax.jit(lambda: run(plain))()
    for ours, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(ours, want, rtol=0, atol=3e-6 * float(np.abs(want).max()))


ON_CPU = ["model.class=models.gpt_oss:GptOss", "model.preset=gpt_oss_debug", "model.shared_experts="]
ON_CPU += ["model.window=8", "model.layers=2"]
MESHES = {
    "fsdp 2 x expert 4, dots": ['train.remat="dots"'],
    "expert 4 x tensor 2, sequence parallel": ["mesh.fsdp=1", "mesh.expert=4", "mesh.tensor=2", 'rules.preset="all"'],
    "context 2 x expert 4": ["mesh.fsdp=1", "mesh.context=2", "mesh.expert=4", 'rules.preset="all"'],
    "fsdp 2 x expert 4, capacity": ["model.capacity_factor=4.0", 'train.remat="full"'],
}


def spec_of(*overrides):
    return experiment(*ON_CPU, *overrides)


@pytest.fixture(scope="module")
def on_one_device():
    spec = spec_of()
    one = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), spec.mesh.axis_names, (AxisType.Auto,) * 2)
    return loss_and_gradients(spec, one)


@pytest.mark.parametrize("overrides", [pytest.param(o, marks=pytest.mark.slow) for o in MESHES.values()], ids=MESHES)
def test_sharded_steps_equal_one_device(overrides, on_one_device):
    check_sharded(spec_of(*overrides), on_one_device)


@pytest.mark.deviceless
def test_on_gpus_cudnn_attends_with_sinks_and_windows_and_no_scores_are_kept():
    """Two forward and two backward kernels run, with and without a window; what they keep is linear in the length."""
    cluster = mk.Cluster.load("dgx_h100")
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 4, "tensor": 2}), cluster, devices=mk.describe_devices(cluster))
    rules = ShardingRules({"act_batch": "data", "act_heads": "tensor", "act_kv_heads": "tensor"})
    length, heads, window = 4096, 4, 128
    cut, along = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data", None, "tensor"), ("tensor",)))
    q, k = (jax.ShapeDtypeStruct((4, length, n, 64), jnp.bfloat16, sharding=cut) for n in (heads, 2))
    sinks = jax.ShapeDtypeStruct((heads,), jnp.float32, sharding=along)

    def step(q, k, v, sinks):
        def loss(q, k, v, sinks):
            with sharding_scope(mesh, rules):
                x = sink_attention(q, k, v, sinks, window=window)
                return sink_attention(x, k, v, sinks).astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, sinks)

    schedule = compile_absent(step, (q, k, k, sinks), mesh=mesh, cluster=cluster).schedule
    costs = [i.cost for i, _ in schedule.walk() if i.cost and i.cost.attention_flops]
    assert sorted((c.attention_window, c.attention_backward) for c in costs) == [
        (0, False), (0, True), (window, False), (window, True)
    ]  # fmt: skip
    pairs = length * window - window**2 / 2 + length**2 / 2
    assert sum(c.attention_flops for c in costs) == pytest.approx(3.5 * 4 * 64 * (heads / 2) * pairs)
    # An array of scores would have two numbers a pair of tokens on each GPU.
    assert max(i.cost.bytes_accessed for i, _ in schedule.walk() if i.cost) < length**2


@pytest.mark.slow
@pytest.mark.deviceless
def test_on_gpus_a_window_over_a_cut_length_takes_the_neighbours_keys_alone():
    """cuDNN runs one forward and one backward kernel on chunks behind 128 tokens, and nothing is gathered."""
    cluster = mk.Cluster.load("dgx_h100")
    mesh = mk.build_mesh(mk.MeshSpec.parse({"context": 8}), cluster, devices=mk.describe_devices(cluster))
    rules = ShardingRules({"act_length": "context"})
    length, window = 8192, 128
    cut = NamedSharding(mesh, PartitionSpec(None, "context"))
    q, k = (jax.ShapeDtypeStruct((1, length, n, 64), jnp.bfloat16, sharding=cut) for n in (4, 2))
    order = TokenOrder(ContextLayout(mesh, ("context",)), balanced=True)

    def step(q, k, v):
        def loss(q, k, v):
            with sharding_scope(mesh, rules):
                return sink_attention(q, k, v, jnp.zeros(4), "ring", window, order).astype(jnp.float32).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)

    schedule = compile_absent(step, (q, k, k), mesh=mesh, cluster=cluster).schedule
    costs = [i.cost for i, _ in schedule.walk() if i.cost and i.cost.attention_flops]
    assert sorted((c.attention_window, c.attention_backward) for c in costs) == [(window, False), (window, True)]
    moved = [i for i, _ in schedule.walk() if i.collective]
    assert {i.collective.collective for i in moved} == {"collective-permute"}
