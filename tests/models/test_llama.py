"""Test models.llama and its building blocks: published sizes, and the mathematics against a plain restatement."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import causal_attention, rotate
from models.embedding import lookup
from models.llama import PRESETS, Llama
from models.matmul import project

PUBLISHED = {
    "llama_1b": 1_235_814_400,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "codellama_34b": 33_743_970_304,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
}


def abstract(preset: str, **options) -> Llama:
    return nnx.eval_shape(lambda: Llama(preset, rngs=nnx.Rngs(0), **options))


@pytest.mark.parametrize(("preset", "parameters"), PUBLISHED.items(), ids=PUBLISHED)
def test_parameter_counts_are_the_published_ones(preset, parameters):
    model = abstract(preset)
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(nnx.state(model, nnx.Param))) == parameters


def test_every_parameter_names_every_dim():
    for path, variable in nnx.to_flat_state(nnx.state(abstract("llama_debug"), nnx.Param)):
        names = variable.get_metadata()["out_sharding"]
        assert len(names) == len(variable.shape), path
        assert (names[0] == "layers") == (path[0] == "layers"), path


def test_matmul_parameters_leave_out_norms_and_the_lookup():
    """llama3_8b counts all parameters but the input table and 2 L + 1 norms; a tied table counts as the head."""
    c, d = PRESETS["llama3_8b"], PRESETS["llama_1b"]
    norms = (2 * c.layers + 1) * c.embed
    assert abstract("llama3_8b").matmul_parameters() == PUBLISHED["llama3_8b"] - c.vocab * c.embed - norms
    assert abstract("llama_1b").matmul_parameters() == PUBLISHED["llama_1b"] - (2 * d.layers + 1) * d.embed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preset": "llama3_8B"}, "Did you mean 'llama3_8b'"),
        ({"layer": 3}, "no option 'layer'. Did you mean 'layers'"),
        ({"kv_heads": 3}, "heads = 8 is not a multiple of kv_heads = 3"),
        ({"head_dim": 15}, "head_dim = 15 is odd"),
        ({"remat": "everything"}, "remat policy 'everything' is not one of"),
    ],
)
def test_wrong_options_say_what_is_right(options, message):
    with pytest.raises(ValueError, match=message):
        Llama(rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_fp32_and_causal(tied):
    model = Llama(rngs=nnx.Rngs(0), tied=tied, dtype=jnp.float32)
    run = jax.jit(lambda tokens: model(tokens))
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 256)
    logits, changed = run(tokens), run(tokens.at[:, 9].add(1) % 256)
    assert logits.dtype == jnp.float32
    np.testing.assert_array_equal(logits[:, :9], changed[:, :9])
    assert float(jnp.abs(logits[:, 9:] - changed[:, 9:]).max()) > 1e-3


def test_project_has_the_gradient_of_a_plain_einsum():
    x, w = jax.random.normal(jax.random.key(0), (3, 5, 4, 6)), jax.random.normal(jax.random.key(1), (4, 6, 8))

    def through(f):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), argnums=(0, 1))(x, w)

    plain = through(lambda x, w: jnp.einsum("btnh,nhe->bte", x, w))
    for ours, theirs in zip(through(lambda x, w: project(x, w, 2, jnp.float32)), plain):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_dtype", [jnp.float32, jnp.bfloat16])
def test_a_weights_gradient_is_produced_in_the_dtype_of_the_weight(weight_dtype):
    """Activations are bf16, and the matmul that makes a gradient writes the weight's dtype."""
    x, w = jnp.ones((2, 8, 4), jnp.bfloat16), jnp.ones((4, 6), weight_dtype)
    jaxpr = jax.make_jaxpr(jax.grad(lambda w: jnp.sum(project(x, w, 1, jnp.bfloat16).astype(jnp.float32))))(w)
    dots = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert {str(v.aval.dtype) for e in dots for v in e.invars} == {"bfloat16"}
    assert dots[-1].outvars[0].aval.dtype == weight_dtype


@pytest.mark.parametrize(("policy", "kept"), [("full", 0), ("nothing_saveable", 0), ("dots", 6), ("dots_saveable", 8)])
def test_policies_keep_what_they_say(policy, kept):
    """A layer keeps its input alone, or six projections too (nothing reads down again), or attention's 2 matmuls."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Llama(rngs=nnx.Rngs(0), remat=policy)))
    tokens = jax.ShapeDtypeStruct((3, 32), jnp.int32)
    jaxpr = jax.make_jaxpr(jax.grad(lambda s, t: jnp.sum(nnx.merge(graph, s)(t))))(state, tokens)
    (forward, _) = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "scan"]
    stacked = [v for v in forward.outvars if v.aval.shape[:1] == (2,)]
    assert len(stacked) == 1 + kept


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_lookup_by_one_hot_ids_is_the_look_up(dtype):
    """Both give the same bits, because a row is a sum with one term; gradients of 24 tokens of 7 kinds sum in fp32."""
    table, tokens = jax.random.normal(jax.random.key(0), (7, 4)), jax.random.randint(jax.random.key(1), (2, 12), 0, 7)
    weights = jax.random.normal(jax.random.key(2), (2, 12, 4))

    def found(one_hot):
        rows, back = jax.vjp(lambda t: lookup(t, tokens, dtype, one_hot=one_hot), table)
        return rows, back(weights.astype(dtype))[0]

    (rows, gradient), (by_matmul, of_matmul) = found(False), found(True)
    np.testing.assert_array_equal(rows, by_matmul)
    np.testing.assert_allclose(gradient, of_matmul, rtol=0, atol=24 * 2.0**-24 * float(jnp.abs(weights).max()))


def test_a_head_in_fp32_multiplies_in_fp32_and_keeps_to_the_precision_of_gradients():
    """The step hands over bf16 weights where gradients travel in bf16; activations are bf16 too."""
    model = Llama("llama_debug", rngs=nnx.Rngs(0), fp32_head=True)
    graph, state = nnx.split(model)
    state = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state)
    tokens = jnp.zeros((1, 8), jnp.int32)
    jaxpr = str(jax.make_jaxpr(lambda s: nnx.merge(graph, s)(tokens))(state))
    assert "f32[1,8,256] = dot_general" in jaxpr
    x = jax.random.normal(jax.random.key(0), (1, 8, 128)).astype(jnp.bfloat16)
    cast = nnx.merge(graph, state)
    wanted = cast.norm(x).astype(jnp.float32) @ cast.head.kernel.get_value().astype(jnp.float32)
    np.testing.assert_allclose(cast.last(x), wanted, rtol=1e-5, atol=1e-5)
    gradients = jax.eval_shape(jax.grad(lambda s: jnp.sum(nnx.merge(graph, s)(tokens))), state)
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.bfloat16)}


def test_lookup_scatters_its_gradient():
    table, tokens = jax.random.normal(jax.random.key(0), (7, 4)), jnp.array([[1, 2, 1], [6, 0, 1]])
    weights = jnp.arange(24.0).reshape(2, 3, 4)
    ours = jax.grad(lambda t: jnp.sum(lookup(t, tokens, jnp.float32) * weights))(table)
    np.testing.assert_allclose(ours, jax.grad(lambda t: jnp.sum(t[tokens] * weights))(table), rtol=1e-6)


def test_rotation_keeps_lengths_and_depends_on_distance_only():
    q, k = (jax.random.normal(jax.random.key(i), (1, 1, 1, 8)) for i in range(2))
    q, k = rotate(jnp.tile(q, (1, 12, 1, 1)), 1e4), rotate(jnp.tile(k, (1, 12, 1, 1)), 1e4)
    scores = jnp.einsum("bqhd,bkhd->qk", q, k)
    np.testing.assert_allclose(
        jnp.linalg.norm(q, axis=-1), jnp.linalg.norm(q[:, :1], axis=-1) * np.ones((1, 12, 1)), rtol=1e-5
    )
    for distance in range(1, 12):
        np.testing.assert_allclose(jnp.diagonal(scores, -distance), scores[distance, 0], rtol=1e-4, atol=1e-5)


def test_grouped_heads_equal_repeated_heads():
    q = jax.random.normal(jax.random.key(0), (2, 8, 8, 4))
    k, v = (jax.random.normal(jax.random.key(i), (2, 8, 2, 4)) for i in (1, 2))
    repeated = causal_attention(q, jnp.repeat(k, 4, axis=2), jnp.repeat(v, 4, axis=2))
    np.testing.assert_allclose(causal_attention(q, k, v), repeated, rtol=1e-5, atol=1e-6)
