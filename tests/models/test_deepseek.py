"""Test models.deepseek: published sizes, routing against numpy, the balancing bias, and sharded steps."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh
from safetensors.numpy import load_file, save_file

from meshkit.config.experiment import load
from meshkit.config.rules import ShardingRules
from meshkit.errors import ConfigError
from meshkit.planning.planner import plan_experiment
from meshkit.planning.resolved import make_train_step
from meshkit.sharding import build_mesh
from meshkit.weights.files import read_weights, write_weights
from models.deepseek import BalancedMlp, DeepSeek, frequencies, sequence_balance
from models.moe import next_token_loss
from tests.models.test_moe import DEBUG, check_sharded, count, loss_and_gradients
from tests.weights.weight_files import abstract as placed

KEYED = 'model.class="models.deepseek:DeepSeek"', 'model.preset="deepseek_debug"'


def abstract(preset: str, **options) -> DeepSeek:
    return nnx.eval_shape(lambda: DeepSeek(preset, rngs=nnx.Rngs(0), **options))


def test_parameter_counts_are_the_published_ones():
    """The published sizes are 671B and 37B active (DeepSeek-AI, 2024).

    DeepseekV3ForCausalLM of the public config has 671,026,419,200 numbers, including buffers of 58 x 256 biases.
    """
    model = abstract("deepseek_v3")
    c = model.config
    assert count(model) == 671_026_419_200
    assert model.matmul_parameters() == pytest.approx(37e9, rel=0.5 / 37)
    idle = c.layers * (c.experts - c.experts_per_token) * 3 * c.embed * c.mlp
    norms = (c.layers + c.dense_layers) * (2 * c.embed + c.query_rank + c.kv_rank) + c.embed
    rest = c.vocab * c.embed + norms + c.layers * c.experts
    assert count(model) - idle == model.matmul_parameters() + rest


def test_the_published_checkpoint_has_one_module_for_multi_token_prediction():
    """The Hugging Face API counts the numbers of deepseek-ai/DeepSeek-V3 by dtype (`?expand[]=safetensors`).

    Embedding and head are there twice. Numbers in FP32 are the biases, and a scale for each block of 128 x 128 in FP8:
    all matrices of layers but the routers', of which `kv_a_proj_with_mqa` alone has half a block more.
    """
    published = {"BF16": 3_918_786_560, "F8_E4M3": 680_571_043_840, "F32": 41_555_600}
    model = abstract("deepseek_v3", mtp_depth=1)
    c = model.config
    layers, norms = 62, 2 * c.embed + c.query_rank + c.kv_rank
    bf16 = 4 * c.vocab * c.embed + layers * norms + 4 * c.embed + 59 * c.embed * c.experts + 2 * c.embed**2
    fp8 = count(model) + 2 * c.vocab * c.embed - bf16 - 59 * c.experts
    scales = fp8 // 128**2 + layers * c.embed // 128 // 2
    assert {"BF16": bf16, "F8_E4M3": fp8, "F32": 59 * c.experts + scales} == published
    plain = abstract("deepseek_v3")
    active = model.matmul_parameters() - plain.matmul_parameters()
    idle = (c.experts - c.experts_per_token) * 3 * c.embed * c.mlp + c.experts
    norms = 5 * c.embed + c.query_rank + c.kv_rank
    assert active == count(model) - count(plain) - idle - norms + c.vocab * c.embed


def test_a_pipeline_refuses_multi_token_prediction():
    with pytest.raises(ValueError, match="mtp_depth = 1: every stage of a pipeline would compute all modules"):
        abstract("deepseek_debug", mtp_depth=1).config.check_pipeline()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "deepseek"}, "no DeepSeek preset 'deepseek'"),
        ({"kv_heads": 2}, "a DeepSeek has no option 'kv_heads'"),
        ({"groups": 3}, "experts = 8 are not 3 equal groups"),
        ({"groups": 8}, "experts = 8 are not 8 equal groups"),
        ({"groups_per_token": 5}, "a token cannot go to 5 of 4 groups"),
        ({"experts_per_token": 5}, "2 groups have fewer than 5 experts"),
        ({"balance_step": -1.0}, "balance_step = -1.0 must be a share"),
        ({"rope_dim": 7}, "rope_dim = 7 is odd"),
    ],
)
def test_wrong_options_say_what_is_right(options, message):
    with pytest.raises(ValueError, match=message):
        abstract(**{"preset": "deepseek_debug", **options})


def test_slow_frequencies_are_divided_and_fast_ones_are_not():
    c = abstract("deepseek_v3").config
    plain = 1e4 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(np.asarray(frequencies(c))[[0, 31]], plain[[0, 31]] / [1, 40], rtol=1e-6)
    assert c.score_scale == pytest.approx((0.1 * math.log(40) + 1) ** 2)


def test_a_token_goes_to_the_best_experts_of_its_best_groups():
    """Experts are chosen by scores with the bias and weighted by scores without it."""
    c = abstract("deepseek_debug", layers=1).config
    layer = BalancedMlp(c, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    layer = nnx.merge(graph, jax.tree.map(lambda p: p[0], state))
    layer.router.bias.set_value(jnp.linspace(-0.3, 0.3, c.experts))
    x = jax.random.normal(jax.random.key(0), (2, 8, c.embed))
    scores, choices, chosen, weights = jax.jit(layer.route)(x)
    biased = np.asarray(scores) + np.linspace(-0.3, 0.3, c.experts, dtype=np.float32)
    for at in np.ndindex(2, 8):
        groups = np.sort(biased[at].reshape(c.groups, -1), axis=1)[:, -2:].sum(axis=1)
        best = np.argsort(groups)[-c.groups_per_token :]
        allowed = [e for e in range(c.experts) if e // (c.experts // c.groups) in best]
        wanted = sorted(allowed, key=lambda e: -biased[at][e])[: c.experts_per_token]
        assert list(choices[at]) == wanted
        of = np.asarray(scores[at])[wanted]
        np.testing.assert_allclose(weights[at], 2.5 * of / of.sum(), rtol=1e-6)
    loads = np.bincount(np.asarray(choices).ravel(), minlength=c.experts)

    gradients = nnx.grad(lambda layer: jnp.sum(layer.route(x)[3] ** 2))(layer)
    np.testing.assert_allclose(gradients.router.bias.get_value(), loads - loads.mean())
    one = np.asarray(jax.nn.one_hot(choices, c.experts)).mean(axis=(1, 2))
    shares = np.asarray(scores / scores.sum(axis=-1, keepdims=True)).mean(axis=1)
    wanted = c.experts * (one * shares).sum(axis=1).mean()
    assert float(sequence_balance(scores / scores.sum(axis=-1, keepdims=True), chosen)) == pytest.approx(wanted)


def rms(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def swiglu(x, gate, up, down):
    hidden = x @ gate
    return (hidden / (1 + np.exp(-hidden)) * (x @ up)) @ down


def turned(x, positions, theta):
    """Return the rotated array: neighbouring dims are a complex number, and the result is real and imaginary parts."""
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]).T
    half = len(pairs)
    turns = np.exp(1j * np.outer(theta ** (-np.arange(half) / half), positions))
    pairs = (pairs * turns.reshape(half, *[1] * (pairs.ndim - 2), -1)).T
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def layer_in_numpy(c, p, x):
    """Return a layer of DeepSeek-V3 on one sequence [length, embed], from equations 1 to 16 of the report."""
    at, a = np.arange(len(x)), p["attention"]
    h = rms(x, p["attention_norm"]["scale"])
    q = np.einsum("lr,rhd->lhd", rms(h @ a["query_down"]["kernel"], a["query_norm"]["scale"]), a["query_up"]["kernel"])
    latent = h @ a["kv_down"]["kernel"]
    kv = np.einsum("lr,rhd->lhd", rms(latent[:, : c.kv_rank], a["kv_norm"]["scale"]), a["kv_up"]["kernel"])
    shared = turned(latent[:, c.kv_rank :], at, c.rope_theta)
    scores = np.einsum("lhd,mhd->hlm", q[..., : c.head_dim], kv[..., : c.head_dim])
    scores += np.einsum("lhd,md->hlm", turned(q[..., c.head_dim :], at, c.rope_theta), shared)
    scores = np.where(at[:, None] >= at, np.exp(scores / math.sqrt(c.head_dim + c.rope_dim)), 0)
    out = np.einsum("hlm,mhd->lhd", scores / scores.sum(axis=-1, keepdims=True), kv[..., c.head_dim :])
    x = x + np.einsum("lhd,hde->le", out, a["output"]["kernel"])

    h, moe = rms(x, p["mlp_norm"]["scale"]), p["moe"]
    affinity = 1 / (1 + np.exp(-h @ moe["router"]["kernel"]))
    biased = affinity + moe["router"]["bias"]
    y = swiglu(h, *(moe["shared"][name]["kernel"] for name in ("gate", "up", "down")))
    for token, each in enumerate(biased):
        best = np.argsort(np.sort(each.reshape(c.groups, -1))[:, -2:].sum(axis=-1))[-c.groups_per_token :]
        allowed = [e for e in range(c.experts) if e // (c.experts // c.groups) in best]
        chosen = sorted(allowed, key=lambda e: -each[e])[: c.experts_per_token]
        for e in chosen:
            weight = c.routed_scale * affinity[token, e] / affinity[token, chosen].sum()
            y[token] += weight * swiglu(h[token], *(moe["experts"][name][e] for name in ("gate", "up", "down")))
    return x + y


def test_the_loss_of_multi_token_prediction_is_that_of_the_report():
    """Equations 21 to 25 in numpy, for two modules behind our layers' output, agree position by position."""
    sizes = {"layers": 1, "mtp_depth": 2, "load_balance_weight": 0}
    model = DeepSeek("deepseek_debug", rngs=nnx.Rngs(0), dtype=jnp.float32, **sizes)
    random = np.random.default_rng(0)
    for path, leaf in nnx.to_flat_state(nnx.state(model.mtp, nnx.Param)):
        spread = 0.3 if path[-1] in ("bias", "scale") else 0.0
        leaf.set_value(leaf.get_value() + jnp.asarray(spread * random.standard_normal(leaf.shape), jnp.float32))
    c, tokens = model.config, random.integers(0, 256, (2, 17))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": random.random((2, 16), np.float32)}

    @nnx.jit
    def run(model, batch):
        return model.hidden(batch["tokens"])[0], *next_token_loss(model, batch, jax.random.key(0))

    with jax.default_matmul_precision("highest"):
        x, trained, _, metrics = run(model, batch)
        model.eval()
        _, evaluated, _, without = run(model, batch)

    p = jax.tree.map(np.float64, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    total = 0.0
    for h, ids, weights in zip(rms(np.float64(x), p["norm"]["scale"]), tokens, np.float64(batch["weights"])):
        for k in (1, 2):
            module = jax.tree.map(lambda leaf, k=k: leaf[k - 1], p["mtp"])
            after = np.append(ids[k:], np.zeros(k, int))[:16]  # No position that counts sees the zeros.
            embedded = rms(p["embedding"][after], module["embedding_norm"]["scale"])
            joined = np.concatenate([embedded, rms(h, module["hidden_norm"]["scale"])], axis=-1)
            h = layer_in_numpy(c, module["block"], joined @ module["join"]["kernel"])
            logits = rms(h, module["norm"]["scale"]) @ p["head"]["kernel"]
            losses = [np.log(np.exp(logits[i]).sum()) - logits[i, ids[i + k + 1]] for i in range(16 - k)]
            total += losses @ weights[k:] / 2
    assert float(metrics["mtp_loss"]) == pytest.approx(total / batch["weights"].sum(), rel=1e-5)
    assert float(trained - evaluated) == pytest.approx(0.3 * total, rel=1e-5)
    assert "mtp_loss" not in without


PUBLISHED = ["embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"]
PUBLISHED += ["input_layernorm", "post_attention_layernorm", "mlp.gate"]
PUBLISHED += [f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")]
PUBLISHED += [f"self_attn.q_{name}" for name in ("a_proj", "a_layernorm", "b_proj")]
PUBLISHED += [f"self_attn.{name}" for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")]


def test_the_module_is_a_layer_of_the_file_with_copies_of_embedding_and_head(tmp_path):
    model, rules = abstract("deepseek_debug", mtp_depth=1), ShardingRules({"embed": "all"})
    random, mesh = np.random.default_rng(0), Mesh(np.array(jax.devices()), ("all",))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    params = jax.tree.map(lambda x: random.standard_normal(x.shape, np.float32), params)
    write_weights(params, tmp_path, model.hf_layout())
    tensors = load_file(tmp_path / "model.safetensors")
    layer = {name.removeprefix("model.layers.3.") for name in tensors if name.startswith("model.layers.3.")}
    experts = {f"mlp.experts.{e}.{name}_proj.weight" for e in range(8) for name in ("gate", "up", "down")}
    assert layer == {name + ".weight" for name in PUBLISHED} | experts | {"mlp.gate.e_score_correction_bias"}
    np.testing.assert_array_equal(tensors["model.layers.3.embed_tokens.weight"], params["embedding"])
    np.testing.assert_array_equal(tensors["model.layers.3.shared_head.head.weight"], params["head"]["kernel"].T)
    np.testing.assert_array_equal(tensors["model.layers.3.eh_proj.weight"], params["mtp"]["join"]["kernel"][0].T)

    read = read_weights(tmp_path, model.hf_layout(), placed(model, mesh, rules))
    jax.tree.map(np.testing.assert_array_equal, read, params)
    plain = abstract("deepseek_debug")
    read = read_weights(tmp_path, plain.hf_layout(), placed(plain, mesh, rules))
    np.testing.assert_array_equal(read["head"]["kernel"], params["head"]["kernel"])
    tensors["model.layers.3.shared_head.head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model.layers.3.shared_head.head.weight must repeat lm_head.weight"):
        read_weights(tmp_path, model.hf_layout(), placed(model, mesh, rules))


def experiment(*overrides: str):
    sizes = ["train.global_batch=16", "train.sequence_length=32", 'train.precision="fp32"']
    return load(DEBUG, [*KEYED, *sizes, "model.load_balance_weight=0.05", *overrides])


def one_device(spec) -> Mesh:
    axes = spec.mesh.axis_names
    return Mesh(np.array(jax.devices()[:1]).reshape([1] * len(axes)), axes, (AxisType.Auto,) * len(axes))


def test_a_step_moves_the_bias_against_the_load_and_nothing_else_does():
    """The bias moves by the load of the whole accumulated batch; decay, clipping and learning rate do not count."""
    spec = experiment("mesh.fsdp=8", "mesh.expert=1", "train.accumulate=2", "model.layers=1", "model.dense_layers=0")
    program = make_train_step(spec, build_mesh(spec.mesh, spec.cluster))
    state = program.init()
    tokens = np.random.default_rng(0).integers(0, 256, (16, 33), np.int32)
    values = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((16, 32), np.float32)}
    batch = {name: jax.device_put(v, program.abstract_batch[name].sharding) for name, v in values.items()}
    params = jax.tree.map(np.asarray, state.params)
    after, _ = program.step(state, batch)
    bias = np.asarray(after.params["layers"]["moe"]["router"]["bias"])[0]

    model = DeepSeek("deepseek_debug", rngs=nnx.Rngs(0), dtype=jnp.float32, layers=1, dense_layers=0)
    layer = nnx.merge(nnx.graphdef(model), nnx.State(jax.tree.map(jnp.asarray, params))).layers
    layer = nnx.merge(nnx.graphdef(layer), jax.tree.map(lambda p: p[0], nnx.state(layer)))
    x = jnp.asarray(params["embedding"])[values["tokens"]]
    x = x + layer.attention(layer.attention_norm(x))
    choices = np.asarray(layer.moe.route(layer.mlp_norm(x))[1])
    loads = np.bincount(choices.ravel(), minlength=8)
    np.testing.assert_array_equal(bias, np.float32(-1e-3) * np.sign(loads - loads.mean()))


AXES = '["expert_outer","expert"]'
MESHES = {
    "expert 8": ["mesh.fsdp=1", "mesh.expert=8"],
    "two levels, full remat": [
        *("mesh={expert_outer=4,expert=2}", "model.hierarchical_dispatch=true", 'train.remat="full"'),
        f"rules.logical={{act_batch={AXES},experts={AXES},act_experts={AXES}}}",
    ],
    "fsdp 2 x expert 4, full remat": ['train.remat="full"'],
    "expert 4 x tensor 2, sequence parallel": ["mesh.fsdp=1", "mesh.expert=4", "mesh.tensor=2", 'rules.preset="all"'],
    "context 2 x expert 4": ["mesh.fsdp=1", "mesh.context=2", "mesh.expert=4", 'rules.preset="all"'],
    "data 2 x expert 2 x tensor 2, accumulated": [
        *("mesh.data=2", "mesh.fsdp=1", "mesh.expert=2", "mesh.tensor=2", 'rules.preset="all"', "train.accumulate=2")
    ],
}


@pytest.fixture(scope="module")
def alone():
    spec = experiment()
    state = make_train_step(spec, one_device(spec)).init()
    state = jax.tree.map(np.asarray, state)
    router = state.params["layers"]["moe"]["router"]
    router["bias"] = np.linspace(-0.2, 0.2, 16, dtype=np.float32).reshape(2, 8)
    return loss_and_gradients(spec, one_device(spec), state)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", MESHES.values(), ids=MESHES)
def test_sharded_steps_equal_one_device(overrides, alone):
    check_sharded(experiment(*overrides), alone)


@pytest.mark.slow
def test_sharded_multi_token_prediction_equals_one_device():
    """Tokens are shifted over a sharded length, and a module's experts have an axis of their own."""
    on = ["model.mtp_depth=1", "model.layers=1"]
    cut = ["mesh.fsdp=2", "mesh.context=2", "mesh.expert=2", 'rules.preset="all"', 'train.remat="full"']
    spec = experiment(*on)
    check_sharded(experiment(*on, *cut), loss_and_gradients(spec, one_device(spec)))


@pytest.mark.slow
@pytest.mark.deviceless
def test_replicas_that_reduce_once_a_step_attend_by_cudnn():
    """`jax.vmap` over the replicas of deferred reductions keeps the FLOP of unmapped kernels, and one all-reduce."""
    sizes = ["model.head_dim=128", "model.rope_dim=64", "model.value_dim=128", "train.sequence_length=256"]
    mesh = ["cluster={name='dgx_h100',hosts=1}", "mesh.fsdp=", "mesh.expert=", "mesh.data=8", 'rules.preset="data"']
    spec = load(DEBUG, [*KEYED, *sizes, *mesh, "train.global_batch=32", "train.accumulate=2"])
    plan = plan_experiment(spec)
    costs = [(i.cost, times) for i, times in plan.schedule.walk() if i.cost]
    # The factors are layers, sequences of a GPU, heads and pairs of tokens, half of which are causal.
    square = 3 * (32 // 8) * 4 * 256**2
    # These are the sizes of the forward kernel's matmuls and of the backward kernel's.
    sizes = (192 + 128) + (3 * 192 + 2 * 128)
    assert sum(cost.attention_flops * times for cost, times in costs) == square * sizes
    (row,) = plan.report.communication
    assert (row.collective, row.axes, row.count) == ("all-reduce", ("data",), 1)
