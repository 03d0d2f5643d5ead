"""Vision Transformer as a Flax nnx module, with a loss and a source of images (Dosovitskiy et al., 2021).

Patches of an image are the tokens of a transformer with bidirectional attention, learned positions and LayerNorm.
Layers are stacked and scanned as in models/llama.py, and dims carry the same logical axes. The classes have the axis
`vocab`. An experiment names `models.vit:ViT`, `models.vit:classification_loss` and, if it has no images of its own,
`models.vit:synthetic_images`.

The experiment's `train.sequence_length` must be the number of tokens of an image (`ViTConfig.tokens`), since model FLOP
are computed from it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from meshkit.sharding import constrain
from models.attention import HEAD_AXES
from models.layers import RESIDUAL_AXES, Projection, for_matmuls, parameter
from models.options import check_option
from models.remat import check_remat, run_layers


@dataclass(frozen=True)
class ViTConfig:
    """The shape of a Vision Transformer.

    Attributes:
        image: height and width of an image, in pixels.
        patch: height and width of a patch, in pixels.
        pool: input of the head: an extra `class` token, or the `mean` over all patches.
        scan_layers: as in `models.llama.LlamaConfig`.
    """

    embed: int
    mlp: int
    layers: int
    heads: int
    image: int = 224
    patch: int = 16
    channels: int = 3
    classes: int = 1000
    pool: str = "class"
    norm_eps: float = 1e-6
    scan_layers: bool = True

    def __post_init__(self):
        for name in ("embed", "mlp", "layers", "heads", "image", "patch", "channels", "classes"):
            check_option(name, getattr(self, name), "int")
        check_option("scan_layers", self.scan_layers, "bool")
        if self.embed % self.heads:
            raise ValueError(f"embed = {self.embed} is not a multiple of heads = {self.heads}.")
        if self.image % self.patch:
            raise ValueError(f"image = {self.image} is not a multiple of patch = {self.patch}.")
        if self.pool not in ("class", "mean"):
            raise ValueError(f"pool = {self.pool!r} is neither 'class' nor 'mean'.")

    @property
    def tokens(self) -> int:
        """Length of the sequence: the patches, and the class token if there is one."""
        return (self.image // self.patch) ** 2 + (self.pool == "class")

    @property
    def pixels(self) -> int:
        """Number of values in a patch."""
        return self.patch**2 * self.channels


PRESETS = {
    "vit_debug": ViTConfig(embed=64, mlp=256, layers=2, heads=4, image=32, patch=8, classes=16),
    "vit_b16": ViTConfig(embed=768, mlp=3072, layers=12, heads=12),
    "vit_l16": ViTConfig(embed=1024, mlp=4096, layers=24, heads=16),
}


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * scale + bias, computed in fp32 (Ba et al., 2016)."""

    def __init__(self, embed: int, *, eps: float, stack: int | None = None, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = parameter(rngs, jax.nn.initializers.ones, (embed,), ("embed",), stack=stack)
        self.bias = parameter(rngs, jax.nn.initializers.zeros, (embed,), ("embed",), stack=stack)

    def __call__(self, x: Float[Array, "*dims embed"]) -> Float[Array, "*dims embed"]:
        h = x.astype(jnp.float32)
        h = h - jnp.mean(h, axis=-1, keepdims=True)
        h = h * lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + self.eps)
        scale, bias = (p.get_value().astype(jnp.float32) for p in (self.scale, self.bias))
        return (h * scale + bias).astype(x.dtype)


class Attention(nnx.Module):
    """Bidirectional multi-head self-attention."""

    def __init__(self, c: ViTConfig, *, rngs: nnx.Rngs):
        embed, heads = {"embed": c.embed}, {"heads": c.heads, "head_dim": c.embed // c.heads}
        affine = partial(Projection, stack=c.layers, bias=True, rngs=rngs)
        self.query = affine("query", embed, heads)
        self.key = affine("key", embed, heads)
        self.value = affine("value", embed, heads)
        self.output = affine("output", heads, embed)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = (constrain(f(x), *HEAD_AXES) for f in (self.query, self.key, self.value))
        # Scores of 197 x 197 tokens are small, and `models.attention` uses cuDNN only for lengths that 64 divides.
        attended = jax.nn.dot_product_attention(q, k, v, implementation="xla")
        return self.output(constrain(attended, *HEAD_AXES))


class Block(nnx.Module):
    """One pre-norm transformer layer; its parameters are stacked over all layers until a scan takes them apart."""

    def __init__(self, c: ViTConfig, *, rngs: nnx.Rngs):
        embed, mlp, stack = {"embed": c.embed}, {"mlp": c.mlp}, c.layers
        self.attention_norm = LayerNorm(c.embed, eps=c.norm_eps, stack=stack, rngs=rngs)
        self.attention = Attention(c, rngs=rngs)
        self.mlp_norm = LayerNorm(c.embed, eps=c.norm_eps, stack=stack, rngs=rngs)
        self.up = Projection("up", embed, mlp, stack=stack, bias=True, rngs=rngs)
        self.down = Projection("down", mlp, embed, stack=stack, bias=True, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("attention"):
            x = constrain(x + self.attention(for_matmuls(self.attention_norm(x))), *RESIDUAL_AXES)
        with jax.named_scope("mlp"):
            hidden = jax.nn.gelu(self.up(for_matmuls(self.mlp_norm(x))))
            return constrain(x + self.down(constrain(hidden, "act_batch", "act_length", "act_mlp")), *RESIDUAL_AXES)


class ViT(nnx.Module):
    """An image classifier: float images [batch, height, width, channels] -> fp32 logits [batch, classes].

    Args:
        preset: a name in PRESETS.
        rngs: source of the initial weights.
        dtype: dtype of activations and matmuls. Parameters are fp32.
        remat: what the backward pass recomputes, see `models.remat.recompute`.
        overrides: fields of ViTConfig.

    Raises:
        ValueError: no such preset or field, or sizes that do not go together.
    """

    def __init__(self, preset: str = "vit_debug", *, rngs: nnx.Rngs, dtype=jnp.bfloat16, remat="none", **overrides):
        self.config = c = make_config(preset, **overrides)
        self.dtype, self.remat = jnp.dtype(dtype), check_remat(remat)
        self.patches = Projection("patches", {None: c.pixels}, {"embed": c.embed}, bias=True, rngs=rngs)
        small = jax.nn.initializers.normal(0.02)
        self.positions = parameter(rngs, small, (c.tokens, c.embed), (None, "embed"), stack=None)
        if c.pool == "class":
            self.class_token = parameter(rngs, jax.nn.initializers.zeros, (c.embed,), ("embed",), stack=None)
        self.layers = Block(c, rngs=rngs)
        self.norm = LayerNorm(c.embed, eps=c.norm_eps, rngs=rngs)
        self.head = Projection("head", {"embed": c.embed}, {"vocab": c.classes}, bias=True, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        with jax.named_scope("embedding"):
            x = constrain(self._embed(images), *RESIDUAL_AXES)
        with jax.named_scope("layers"):
            x = self._run_layers(x)
        with jax.named_scope("logits"):
            x = constrain(self.norm(x), "act_batch", None, "act_embed")
            x = x[:, 0] if self.config.pool == "class" else jnp.mean(x, axis=1)
            return constrain(self.head(x, out_dtype=jnp.float32), "act_batch", "act_vocab")

    def _embed(self, images: jax.Array) -> jax.Array:
        """Return tokens [batch, tokens, embed]: a class token and the projected patches, plus positions."""
        c, (batch, height, width, channels) = self.config, images.shape
        if (height, width, channels) != (c.image, c.image, c.channels):
            raise ValueError(f"images are {height} x {width} x {channels}, not {c.image} x {c.image} x {c.channels}.")
        side = c.image // c.patch
        x = images.astype(self.dtype).reshape(batch, side, c.patch, side, c.patch, channels)
        x = self.patches(x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, side * side, c.pixels))
        if c.pool == "class":
            token = jnp.broadcast_to(self.class_token.get_value(), (batch, 1, c.embed))
            x = jnp.concatenate([token.astype(x.dtype), x], axis=1)
        return (x + self.positions.get_value()).astype(self.dtype)

    def _run_layers(self, x: jax.Array) -> jax.Array:
        graph, stacked = nnx.split(self.layers)

        def layer(x, parameters):
            return nnx.merge(graph, parameters)(x), None

        return run_layers(layer, x, stacked, self.remat, self.config.scan_layers)[0]

    def matmul_parameters(self) -> int:
        """Return N in model FLOP = 6 N tokens; patch projection and head count by the share of tokens they read."""
        c = self.config
        patches, head = (c.image // c.patch) ** 2 * c.pixels * c.embed, c.embed * c.classes
        return c.layers * (4 * c.embed**2 + 2 * c.embed * c.mlp) + round((patches + head) / c.tokens)

    def attention_shape(self) -> tuple[int, int, int]:
        """Return (L, heads, head_dim) in attention FLOP = 12 L heads head_dim T tokens, for L layers and length T."""
        c = self.config
        return c.layers, c.heads, c.embed // c.heads


def make_config(preset: str, **overrides) -> ViTConfig:
    """Return a preset with some fields replaced.

    Raises:
        ValueError: no such preset or field, or a value that does not go with the others.
    """
    if preset not in PRESETS:
        raise ValueError(f"no ViT preset '{preset}'. Known: {', '.join(PRESETS)}.")
    fields = [f.name for f in dataclasses.fields(ViTConfig)]
    for name in overrides:
        if name not in fields:
            raise ValueError(f"a ViT has no option '{name}'. Known: {', '.join(fields)}.")
    return dataclasses.replace(PRESETS[preset], **overrides)


def classification_loss(model: ViT, batch: dict, rng: jax.Array) -> tuple[jax.Array, jax.Array, dict]:
    """Return the sum over images of -log p(label) in nats, the number of images, and the `accuracy`."""
    del rng
    logits, labels = model(batch["images"]).astype(jnp.float32), batch["labels"]
    # The label is compared with an iota, not used as an index: each GPU sums its own part of sharded classes.
    classes = lax.broadcasted_iota(labels.dtype, logits.shape, 1)
    picked = jnp.sum(jnp.where(classes == labels[:, None], logits, 0.0), axis=-1)
    losses = jax.nn.logsumexp(logits, axis=-1) - picked
    hits = picked >= jnp.max(logits, axis=-1)
    return jnp.sum(losses), jnp.float32(losses.shape[0]), {"accuracy": jnp.mean(hits.astype(jnp.float32))}


def synthetic_images(*, seed: int, experiment) -> SyntheticImages:
    """Return a `[data] source` of images for the experiment's model: a pattern for each class plus noise.

    Raises:
        ValueError: `train.sequence_length` is not the number of tokens of an image.
    """
    overrides = {k: v for k, v in experiment.model.options.items() if k not in ("dtype", "remat")}
    config = make_config(experiment.model.preset or "vit_debug", **overrides)
    length = experiment.train.sequence_length
    if length != config.tokens:
        raise ValueError(f"train.sequence_length = {length}, but an image has {config.tokens} tokens.")
    return SyntheticImages(seed, config.image, config.channels, config.classes)


@dataclass(frozen=True)
class SyntheticImages:
    """Random access to labelled images; an image depends only on the seed and its index.

    Each class has a coarse pattern of at most 4 x 4 blocks. An image is the pattern of its class plus noise of the same
    variance.
    """

    seed: int
    image: int
    channels: int
    classes: int

    def __len__(self) -> int:
        return 16_384

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = int(index)
        blocks = math.gcd(self.image, 4)
        label = index % self.classes
        pattern = np.random.default_rng((self.seed, 0, label)).standard_normal(
            (blocks, blocks, self.channels), np.float32
        )
        scale = self.image // blocks
        image = pattern.repeat(scale, axis=0).repeat(scale, axis=1)
        noise = np.random.default_rng((self.seed, 1, index)).standard_normal(image.shape, np.float32)
        return {"images": (image + noise) / np.float32(math.sqrt(2)), "labels": np.array(label, np.int32)}
