"""Ten more models and ways of training that do not use meshkit are written as a newcomer would, and sharded by path.

`python -m benchmarks.third_party` shards, trains, profiles and plans each. No model or step here names meshkit: rules
shard weights by their paths, and the moments and averages of a weight like the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import meshkit as mk
from benchmarks.third_party.models import Foreign, first_key

BATCH = {"act_batch": "fsdp"}
AXES = (("fsdp", 4), ("tensor", 2))
TWO_LAYERS = [("up/kernel", ("fsdp", "tensor")), ("down/kernel", ("tensor", "fsdp"))]
PAIRS = (jax.random.normal(first_key(), (32, 64)), jnp.arange(32) % 8)


def _modules(what: str, make: Callable[[], nnx.Module], loss: Any, batch: Any, rules: Any, tx: Any = None) -> Foreign:
    """Return the training of an nnx model with an optimizer of optax's, Adam by default."""

    def both():
        model = make()
        return model, nnx.Optimizer(model, tx or optax.adam(1e-3), wrt=nnx.Param)

    return Foreign(what, both, loss, batch, rules=rules, axes=AXES, placed=True)


def _arrays(what: str, init: Callable[[], Any], loss: Any, batch: Any, rules: Any) -> Foreign:
    """Return the training of a pytree of parameters with AdamW."""
    tx = optax.adamw(1e-3)

    def both():
        params = init()
        return {"params": params, "opt_state": tx.init(params)}

    return Foreign(what, both, loss, batch, tx, rules=rules, axes=AXES, placed=True)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.norm = nnx.LayerNorm(256, rngs=rngs)
        self.down = nnx.Linear(256, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.norm(self.up(x))))


def _classify(model, x, labels):
    return _cross_entropy(model(x), labels)


def unet() -> Foreign:
    """Return a U-Net that removes noise.

    It has convolutions down and transposed ones up, skips between them, and group norms.
    """

    class Block(nnx.Module):
        def __init__(self, inside, out, rngs):
            self.conv = nnx.Conv(inside, out, (3, 3), rngs=rngs)
            self.norm = nnx.GroupNorm(out, num_groups=4, rngs=rngs)

        def __call__(self, x):
            return nnx.silu(self.norm(self.conv(x)))

    class UNet(nnx.Module):
        def __init__(self, rngs):
            widths = (16, 32)
            self.first = Block(3, 16, rngs)
            self.down = nnx.List([Block(w, 2 * w, rngs) for w in widths])
            self.up = nnx.List([nnx.ConvTranspose(2 * w, w, (2, 2), (2, 2), rngs=rngs) for w in widths])
            self.joined = nnx.List([Block(2 * w, w, rngs) for w in widths])
            self.last = nnx.Conv(16, 3, (1, 1), rngs=rngs)

        def __call__(self, x):
            x, skips = self.first(x), []
            for down in self.down:
                skips.append(x)
                x = nnx.max_pool(down(x), (2, 2), (2, 2))
            for up, joined in zip(self.up[::-1], self.joined[::-1]):
                x = joined(jnp.concatenate([up(x), skips.pop()], axis=-1))
            return self.last(x)

    def loss(model, clean, noise):
        return jnp.mean((model(clean + noise) - noise) ** 2)

    batch = (jax.random.normal(first_key(), (8, 16, 16, 3)), jax.random.normal(jax.random.key(2), (8, 16, 16, 3)))
    overrides = [("last/kernel", (None, None, "fsdp", None)), ("**/kernel", (None, None, None, ("fsdp", "tensor")))]
    return _modules("U-Net (nnx)", lambda: UNet(nnx.Rngs(0)), loss, batch, mk.ShardingRules(BATCH, overrides=overrides))


def lstm() -> Foreign:
    """Return two recurrent layers over an embedding that predict the next token."""

    class Lstm(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(256, 32, rngs=rngs)
            self.layers = nnx.List([nnx.RNN(nnx.LSTMCell(n, 64, rngs=rngs)) for n in (32, 64)])
            self.head = nnx.Linear(64, 256, rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    def loss(model, tokens):
        return _cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])

    overrides = [
        ("embed/embedding", ("tensor", "fsdp")),
        ("layers/*/cell/*/kernel", ("fsdp", "tensor")),
        ("head/kernel", (None, ("tensor", "fsdp"))),
    ]
    rules = mk.ShardingRules(BATCH, overrides=overrides)
    tokens = jax.random.randint(first_key(), (8, 13), 0, 256)
    return _modules("LSTM (nnx)", lambda: Lstm(nnx.Rngs(0)), loss, (tokens,), rules)


def schedule_free() -> Foreign:
    """Return a training whose optimizer's state starts as the very weights."""
    tx = optax.contrib.schedule_free(optax.adamw(1e-3, b1=0.0), 1e-3)
    rules = mk.ShardingRules(BATCH, overrides=TWO_LAYERS[:1])
    return _modules("optax.contrib.schedule_free", lambda: Classifier(nnx.Rngs(0)), _classify, PAIRS, rules, tx)


def multi_transform() -> Foreign:
    """Return a training with momentum for matrices and Adam for vectors.

    The state of each has holes where the other's parameters are.
    """

    def labels(params):
        return jax.tree.map(lambda x: "matrix" if x.ndim == 2 else "vector", params)

    tx = optax.multi_transform({"matrix": optax.sgd(1e-2, momentum=0.9), "vector": optax.adam(1e-3)}, labels)
    rules = mk.ShardingRules(BATCH, overrides=[("**/up/kernel", ("fsdp", "tensor")), ("up/bias", ("tensor",))])
    return _modules("optax.multi_transform", lambda: Classifier(nnx.Rngs(0)), _classify, PAIRS, rules, tx)


def ema() -> Foreign:
    """Return a training with its own step over a model, its optimizer and an average of its weights.

    The step returns the loss of the average.
    """

    def make():
        model, average = Classifier(nnx.Rngs(0)), Classifier(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param), average

    def step(model, optimizer, average, x, labels):
        optimizer.update(model, nnx.grad(_classify)(model, x, labels))
        mix = lambda old, new: 0.9 * old + 0.1 * new
        nnx.update(average, jax.tree.map(mix, nnx.state(average, nnx.Param), nnx.state(model, nnx.Param)))
        return _classify(average, x, labels)

    rules = mk.ShardingRules(BATCH, overrides=TWO_LAYERS[:1])
    return Foreign("EMA of the weights (nnx)", make, None, PAIRS, step=step, rules=rules, axes=AXES, placed=True)


def grain() -> Foreign:
    """Return a training on shuffled batches of a loader, a new one each step."""
    import grain.python as loading

    rows = np.random.default_rng(0).standard_normal((256, 64), np.float32)

    def loader():
        data = loading.MapDataset.source(range(256)).shuffle(seed=1).repeat()
        return iter(data.map(lambda i: (rows[i], np.int32(i % 8))).batch(32).to_iter_dataset())

    made = lambda: Classifier(nnx.Rngs(0))
    rules = mk.ShardingRules(BATCH, overrides=TWO_LAYERS[:1])
    return replace(_modules("grain's loader", made, _classify, next(loader()), rules), loader=loader)


def diffusion_transformer() -> Foreign:
    """Return a diffusion transformer: patches, sines of time, and adaptive norms that start at zero."""

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(64, use_bias=False, use_scale=False, rngs=rngs)
            self.attention = nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)
            self.adapt = nnx.Linear(64, 6 * 64, kernel_init=nnx.initializers.zeros, rngs=rngs)

        def __call__(self, x, time):
            shift, scale, gate, shift2, scale2, gate2 = jnp.split(self.adapt(nnx.silu(time))[:, None], 6, axis=-1)
            x = x + gate * self.attention(self.norm(x) * (1 + scale) + shift)
            return x + gate2 * self.down(nnx.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))

    class DiT(nnx.Module):
        def __init__(self, rngs):
            self.patches = nnx.Conv(3, 64, (4, 4), strides=(4, 4), rngs=rngs)
            self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (16, 64)))
            self.time = nnx.Linear(32, 64, rngs=rngs)
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])
            self.last = nnx.Linear(64, 48, rngs=rngs)

        def __call__(self, images, time):
            angles = time[:, None] * jnp.exp(jnp.linspace(0, 7, 16))
            time = self.time(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1))
            x = self.patches(images).reshape(len(images), 16, 64) + self.positions
            for block in self.blocks:
                x = block(x, time)
            return self.last(x).reshape(len(images), 4, 4, 4, 4, 3).swapaxes(2, 3).reshape(images.shape)

    def loss(model, images, noise, time):
        t = time[:, None, None, None]
        return jnp.mean((model((1 - t) * images + t * noise, time) - (noise - images)) ** 2)

    images = jax.random.normal(first_key(), (8, 16, 16, 3))
    batch = (images, images[::-1], jnp.linspace(0.1, 0.9, 8))
    overrides = [
        ("blocks/*/attention/out/kernel", ("tensor", None, "fsdp")),
        ("blocks/*/attention/*/kernel", ("fsdp", "tensor", None)),
        ("blocks/*/down/kernel", ("tensor", "fsdp")),
        ("blocks/**/kernel", ("fsdp", "tensor")),
    ]
    rules = mk.ShardingRules(BATCH, overrides=overrides)
    return _modules("diffusion transformer (nnx)", lambda: DiT(nnx.Rngs(0)), loss, batch, rules)


def haiku() -> Foreign:
    """Return modules whose names have slashes, transformed into functions of a dict."""
    import haiku as hk

    @hk.without_apply_rng
    @hk.transform
    def model(x):
        for _ in range(2):
            y = hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
            x = x + hk.MultiHeadAttention(4, 16, model_size=64, w_init=hk.initializers.VarianceScaling())(y, y, y)
            x = x + hk.nets.MLP([256, 64])(x)
        return x

    def loss(params, x):
        return jnp.mean((model.apply(params, x) - jnp.roll(x, 1, 1)) ** 2)

    overrides = [
        ("multi_head_attention*/linear/w", ("tensor", "fsdp")),
        ("multi_head_attention*/*/w", ("fsdp", "tensor")),
        ("**/linear_0/w", ("fsdp", "tensor")),
        ("**/linear_1/w", ("tensor", "fsdp")),
    ]
    rules = mk.ShardingRules(BATCH, overrides=overrides)
    x = jax.random.normal(first_key(), (8, 16, 64))
    return _arrays("transformer (haiku)", lambda: model.init(jax.random.key(0), x), loss, (x,), rules)


def equinox() -> Foreign:
    """Return a module that is its own tree, with functions among its leaves."""
    import equinox as eqx

    make = lambda: eqx.nn.MLP(64, 8, 256, 2, key=jax.random.key(0))
    fixed = eqx.partition(make(), eqx.is_array)[1]

    def loss(params, x, labels):
        return _cross_entropy(jax.vmap(eqx.combine(params, fixed))(x), labels)

    rules = mk.ShardingRules(
        BATCH, overrides=[("layers/2/weight", (None, "tensor")), ("**/weight", ("tensor", "fsdp"))]
    )
    return _arrays("MLP (Equinox)", lambda: eqx.filter(make(), eqx.is_array), loss, PAIRS, rules)


def transformers() -> Foreign:
    """Return GPT-2 of Hugging Face's library, with weights of its own making."""
    import transformers as library

    config = library.GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    model = library.FlaxGPT2LMHeadModel(config, _do_init=False)
    tokens = jax.random.randint(first_key(), (8, 16), 0, 256)

    def loss(params, tokens):
        return _cross_entropy(model(tokens, params=params).logits[:, :-1], tokens[:, 1:])

    overrides = [
        ("transformer/wte/embedding", ("tensor", "fsdp")),
        ("**/c_proj/kernel", ("fsdp", "tensor")),
        ("**/kernel", ("tensor", "fsdp")),
    ]
    rules = mk.ShardingRules(BATCH, overrides=overrides)
    return _arrays(
        "GPT-2 (Hugging Face, linen)", lambda: model.init_weights(first_key(), (1, 16)), loss, (tokens,), rules
    )


KINDS = (unet, lstm, schedule_free, multi_transform, ema, grain, diffusion_transformer, haiku, equinox, transformers)
