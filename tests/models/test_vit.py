"""Test models.vit: published sizes, the mathematics against a plain restatement, and sharded steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh

from meshkit.config.experiment import load
from meshkit.errors import ConfigError
from meshkit.planning.resolved import make_train_step, resolve
from meshkit.sharding import build_mesh
from meshkit.step.data import open_data
from models.vit import PRESETS, ViT, classification_loss

EXPERIMENTS = Path(__file__).parents[2] / "configs" / "experiments"
# Dosovitskiy et al. 2021, table 1, say 86M and 307M; these exact counts are of the released models with 1000 classes.
PUBLISHED = {"vit_b16": 86_567_656, "vit_l16": 304_326_632}
UNIT_ROUNDOFF = 2.0**-24


@pytest.mark.parametrize(("preset", "parameters"), PUBLISHED.items(), ids=PUBLISHED)
def test_parameter_counts_are_the_published_ones(preset, parameters):
    model = nnx.eval_shape(lambda: ViT(preset, rngs=nnx.Rngs(0)))
    assert sum(math.prod(p.shape) for p in jax.tree.leaves(nnx.state(model, nnx.Param))) == parameters


def test_matmul_parameters_count_what_runs_on_every_token():
    """B/16 has 12 (4 + 2 * 4) 768^2 in the layers, and 196 patches and one head over 197 tokens."""
    model = nnx.eval_shape(lambda: ViT("vit_b16", rngs=nnx.Rngs(0)))
    assert model.matmul_parameters() == 12 * 12 * 768**2 + round((196 * 768 * 768 + 768 * 1000) / 197)
    assert model.attention_shape() == (12, 12, 64)


def plain_vit(p: dict, images: np.ndarray, c) -> np.ndarray:
    """Return the logits of the whole model, computed in numpy with float64 and loops."""

    def norm(x, n):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + c.norm_eps)
        return x * n["scale"] + n["bias"]

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    result = []
    for image in images:
        tokens = [p["class_token"]] if c.pool == "class" else []
        for row in range(0, c.image, c.patch):
            for column in range(0, c.image, c.patch):
                patch = image[row : row + c.patch, column : column + c.patch].reshape(-1)
                tokens.append(patch @ p["patches"]["kernel"] + p["patches"]["bias"])
        x = np.stack(tokens) + p["positions"]
        for i in range(c.layers):
            layer = jax.tree.map(lambda a, i=i: a[i], p["layers"])
            h, attention, heads = norm(x, layer["attention_norm"]), layer["attention"], []
            q, k, v = (
                np.einsum("te,ehd->htd", h, attention[n]["kernel"]) + attention[n]["bias"][:, None]
                for n in ("query", "key", "value")
            )
            for one in range(c.heads):
                heads.append(softmax(q[one] @ k[one].T / np.sqrt(q.shape[-1])) @ v[one])
            x = (
                x
                + np.einsum("htd,hde->te", np.stack(heads), attention["output"]["kernel"])
                + attention["output"]["bias"]
            )
            h = gelu(norm(x, layer["mlp_norm"]) @ layer["up"]["kernel"] + layer["up"]["bias"])
            x = x + h @ layer["down"]["kernel"] + layer["down"]["bias"]
        x = norm(x, p["norm"])
        pooled = x[0] if c.pool == "class" else x.mean(0)
        result.append(pooled @ p["head"]["kernel"] + p["head"]["bias"])
    return np.stack(result)


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_logits_are_those_of_a_plain_restatement(pool):
    make = lambda: ViT("vit_debug", rngs=nnx.Rngs(0), dtype=jnp.float32, pool=pool)
    model = nnx.eval_shape(make)
    graph, random = nnx.graphdef(model), np.random.default_rng(1)
    # Biases start as zeros, where a missing one would not show.
    state = jax.tree.map(
        lambda x: np.asarray(x) + 0.1 * random.standard_normal(x.shape, np.float32),
        jax.jit(lambda: nnx.state(make()))(),
    )
    images = np.random.default_rng(0).standard_normal((2, 32, 32, 3), np.float32)
    plain = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(state))
    expected = plain_vit(plain, images.astype(np.float64), model.config)
    # D = 14 sums one after the other (6 matmuls a layer, patches, head) have K = 256 terms at most; errors add up like
    # a random walk.
    tolerance = np.sqrt(14 * 256) * UNIT_ROUNDOFF * np.abs(expected).max()
    found = jax.jit(lambda state, images: nnx.merge(graph, state)(images))(state, images)
    assert np.abs(np.asarray(found) - expected).max() < tolerance


# fp32 sums are in another order, as in tests/equivalence: the longest run over K = 16 images * 17 tokens (a weight's
# gradient), through D = 30 of them one after the other (7 matmuls a layer, 2 layers, forward and backward, 2 ends).
IMAGES = 16
TOLERANCE = np.sqrt(30) * np.sqrt(IMAGES * 17) * UNIT_ROUNDOFF
MESHES = {
    "data": ["mesh.fsdp=", "mesh.tensor=", "mesh.data=8", 'rules.preset="data"'],
    "fsdp": ["mesh.tensor=", "mesh.fsdp=8", 'rules.preset="fsdp"'],
    "fsdp + tensor": [],
}


def experiment(*overrides):
    return load(EXPERIMENTS / "vit_cpu.toml", ['train.precision="fp32"', f"train.global_batch={IMAGES}", *overrides])


def loss_and_gradients(spec, mesh, state=None):
    program = make_train_step(spec, mesh)
    data = open_data(resolve(spec), None).train
    rows = [data[i] for i in range(IMAGES)]
    values = {k: np.stack([r[k] for r in rows]) for k in rows[0]}
    batch = {k: jax.device_put(v, program.abstract_batch[k].sharding) for k, v in values.items()}
    state = (
        program.init()
        if state is None
        else jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, program.abstract_state)
    )
    before = jax.tree.map(np.asarray, state)
    loss, gradients = program.gradients(state, batch)
    return before, float(loss), jax.tree.map(np.asarray, gradients)


@pytest.fixture(scope="module")
def alone():
    spec = experiment()
    rank = len(spec.mesh.shape)
    one = Mesh(np.array(jax.devices()[:1]).reshape((1,) * rank), spec.mesh.axis_names, (AxisType.Auto,) * rank)
    return loss_and_gradients(spec, one)


@pytest.mark.parametrize("overrides", MESHES.values(), ids=MESHES)
def test_loss_and_all_gradients_equal_one_device(overrides, alone):
    spec = experiment(*overrides)
    state, expected, wanted = alone
    _, loss, gradients = loss_and_gradients(spec, build_mesh(spec.mesh, spec.cluster), state)
    assert loss == pytest.approx(expected, rel=TOLERANCE)
    largest = max(np.abs(w).max() for w in jax.tree.leaves(wanted))
    for (path, g), w in zip(jax.tree_util.tree_flatten_with_path(gradients)[0], jax.tree.leaves(wanted)):
        # Softmax does not feel the bias of the keys, so that gradient is zero but for rounding.
        scale = largest if "key" in jax.tree_util.keystr(path) else np.abs(w).max()
        assert np.abs(g - w).max() < TOLERANCE * scale, jax.tree_util.keystr(path)


def test_the_loss_is_the_cross_entropy_of_the_label_and_counts_hits():
    logits = jnp.array([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0]])
    batch = {"images": None, "labels": jnp.array([0, 1])}
    loss_sum, weight, metrics = classification_loss(cast(ViT, lambda _: logits), batch, jax.random.key(0))
    expected = np.log(np.exp(logits).sum(-1)) - np.array([2.0, 1.0])
    # The tolerance allows a handful of fp32 operations.
    assert float(loss_sum) == pytest.approx(expected.sum(), rel=1e-6)
    assert (float(weight), float(metrics["accuracy"])) == (2.0, 0.5)


def test_synthetic_images_depend_on_seed_and_index_alone_and_share_a_pattern_within_a_class():
    first, again = (open_data(resolve(experiment()), None).train for _ in range(2))
    np.testing.assert_array_equal(first[3]["images"], again[3]["images"])
    other = open_data(resolve(experiment("data.seed=1")), None).train
    assert np.any(first[3]["images"] != other[3]["images"])
    assert first[3]["images"].shape == (32, 32, 3)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.sequence_length=16", "train.sequence_length = 16, but an image has 17 tokens"),
        ("model.patch=5", "image = 32 is not a multiple of patch = 5"),
        ('model.pool="max"', "pool = 'max' is neither 'class' nor 'mean'"),
        ("model.depth=3", "a ViT has no option 'depth'"),
        ('model.preset="vit_h14"', "no ViT preset 'vit_h14'"),
        ("model.heads=0", "heads = 0 must be a whole number"),
    ],
)
def test_mistakes_are_one_sentence(override, message):
    spec = experiment(override)
    with pytest.raises(ConfigError, match=message):
        make_train_step(spec, build_mesh(spec.mesh, spec.cluster))


def test_the_configs_name_the_presets():
    for name in ("vit_cpu", "vit_l16"):
        spec = load(EXPERIMENTS / f"{name}.toml")
        assert spec.train.sequence_length == PRESETS[str(spec.model.preset)].tokens
