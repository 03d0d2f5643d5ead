"""Nine trainings of other projects' models, each sized to keep one H100 of 80 GB busy; rows.py plans and runs them.

No model here names meshkit. Parameters are fp32 and layers compute in bf16, under AdamW. `toy` asks for sizes that a
CPU trains in a second.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

import meshkit as mk
from benchmarks.third_party.models import Foreign, first_key

TYPES: Any = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}
linear: Any = functools.partial(nnx.Linear, **TYPES)
matrix: Any = functools.partial(nnx.Linear, use_bias=False, **TYPES)
conv: Any = functools.partial(nnx.Conv, **TYPES)
layer_norm: Any = functools.partial(nnx.LayerNorm, **TYPES)
rms_norm: Any = functools.partial(nnx.RMSNorm, **TYPES)
embedding: Any = functools.partial(nnx.Embed, **TYPES)
attention: Any = functools.partial(nnx.MultiHeadAttention, decode=False, **TYPES)
RULES = mk.ShardingRules({"act_batch": ["data"]})


def _training(what: str, make: Callable[[], nnx.Module], loss: Any, batch: Any, wrt: Any = nnx.Param) -> Foreign:
    """Return the training of an nnx model with AdamW, unsharded on one device."""
    tx = optax.adamw(1e-3)  # One optimizer for all calls, because a compiled step accepts no other.

    def both():
        model = make()
        return model, nnx.Optimizer(model, tx, wrt=wrt)

    return Foreign(what, both, loss, batch, rules=RULES, axes=(("data", 1),))


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def _next_token(model: Any, tokens: jax.Array) -> jax.Array:
    return _cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def _tokens(batch: int, length: int, vocabulary: int) -> tuple[jax.Array]:
    """Return random tokens, one more in each row than a model reads."""
    return (jax.random.randint(first_key(), (batch, length + 1), 0, vocabulary),)


def _attend(q: Any, k: Any, v: Any, heads: int, bias: Any = 0.0) -> jax.Array:
    """Return softmax attention in its textbook form, on arrays of (batch, tokens, width)."""
    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * q.shape[-1] ** -0.5 + bias
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits).astype(q.dtype), v).reshape(*q.shape[:2], -1)


def _attend_before(q: jax.Array, k: jax.Array, v: jax.Array, heads: int) -> jax.Array:
    """Return causal attention with rotary positions."""
    length, half = q.shape[1], q.shape[2] // heads // 2
    angles = jnp.arange(length)[:, None, None] * 10000.0 ** (-jnp.arange(half) / half)

    def rotate(x):
        a, b = jnp.split(x.reshape(*x.shape[:2], heads, -1).astype(jnp.float32), 2, axis=-1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

    return _attend(rotate(q), rotate(k), v, heads, jnp.where(jnp.tri(length, dtype=bool), 0.0, -1e9))


class Decoder(nnx.Module):
    """Token embedding, layers, norm, and logits by the same table; each layer is made from random streams."""

    def __init__(self, vocabulary: int, width: int, layers: list[Any], norm: Any):
        rngs = nnx.Rngs(0)
        self.embed, self.norm = embedding(vocabulary, width, rngs=rngs), norm(rngs=rngs)
        self.layers = nnx.List([layer(rngs=rngs) for layer in layers])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


def _waves(time: jax.Array, width: int) -> jax.Array:
    """Return sines and cosines of a time in [0, 1]."""
    angles = 1000 * time[:, None] * jnp.exp(jnp.linspace(0, -9, width // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def _flow(model: Any, images: jax.Array, noise: jax.Array, time: jax.Array) -> jax.Array:
    """Return the loss of flow matching: the model predicts the velocity from images to noise."""
    t = time[:, None, None, None]
    return jnp.mean((model((1 - t) * images + t * noise, time).astype(jnp.float32) - (noise - images)) ** 2)


def _noisy(batch: int, size: int, channels: int) -> tuple[jax.Array, ...]:
    images = jax.random.normal(first_key(), (batch, size, size, channels))
    return images, images[::-1], jnp.linspace(0.1, 0.9, batch)


def resnet50(toy: bool) -> Foreign:
    """Return ResNet-50: bottlenecks with batch norm, whose averages are state."""
    stages, first, size, batch, classes = ((1, 1), 8, 32, 8, 10) if toy else ((3, 4, 6, 3), 64, 224, 256, 1000)

    class ConvNorm(nnx.Module):
        def __init__(self, inside, out, kernel, stride, rngs):
            self.conv = conv(inside, out, (kernel, kernel), strides=stride, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(out, rngs=rngs, **TYPES)

        def __call__(self, x):
            return self.norm(self.conv(x))

    class Bottleneck(nnx.Module):
        def __init__(self, inside, width, stride, rngs):
            self.reduce = ConvNorm(inside, width, 1, 1, rngs)
            self.conv = ConvNorm(width, width, 3, stride, rngs)
            self.widen = ConvNorm(width, 4 * width, 1, 1, rngs)
            self.skip = ConvNorm(inside, 4 * width, 1, stride, rngs) if inside != 4 * width else None

        def __call__(self, x):
            y = self.widen(nnx.relu(self.conv(nnx.relu(self.reduce(x)))))
            return nnx.relu(y + (x if self.skip is None else self.skip(x)))

    class ResNet(nnx.Module):
        def __init__(self, rngs):
            self.stem, blocks, inside = ConvNorm(3, first, 7, 2, rngs), [], first
            for stage, count in enumerate(stages):
                for i in range(count):
                    blocks.append(Bottleneck(inside, first << stage, 2 if stage and not i else 1, rngs))
                    inside = 4 * (first << stage)
            self.blocks = nnx.List(blocks)
            self.head = linear(inside, classes, rngs=rngs)

        def __call__(self, x):
            x = nnx.max_pool(nnx.relu(self.stem(x)), (3, 3), (2, 2), "SAME")
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((1, 2)))

    images = jax.random.normal(first_key(), (batch, size, size, 3), jnp.bfloat16)
    loss = lambda model, x, labels: _cross_entropy(model(x), labels)
    return _training("ResNet-50", lambda: ResNet(nnx.Rngs(0)), loss, (images, jnp.arange(batch) % classes))


def unet(toy: bool) -> Foreign:
    """Return a diffusion U-Net: residual convolutions with group norms, down to a quarter and up again with skips."""
    widths, size, batch = ((8, 16), 8, 4) if toy else ((192, 384, 768), 64, 128)
    norm = lambda width, rngs: nnx.GroupNorm(width, num_groups=min(32, width // 4), rngs=rngs, **TYPES)
    conv3 = lambda inside, out, rngs, **how: conv(inside, out, (3, 3), rngs=rngs, **how)

    class Block(nnx.Module):
        def __init__(self, inside, out, rngs):
            self.norm1, self.conv1 = norm(inside, rngs), conv3(inside, out, rngs)
            self.norm2, self.conv2 = norm(out, rngs), conv3(out, out, rngs)
            self.time = linear(widths[0], out, rngs=rngs)
            self.skip = conv(inside, out, (1, 1), rngs=rngs)

        def __call__(self, x, time):
            y = self.conv1(nnx.silu(self.norm1(x))) + self.time(time)[:, None, None]
            return self.skip(x) + self.conv2(nnx.silu(self.norm2(y)))

    class UNet(nnx.Module):
        def __init__(self, rngs):
            w, pairs = widths, list(itertools.pairwise(widths))
            self.first, self.time = conv3(4, w[0], rngs), linear(w[0], w[0], rngs=rngs)
            self.down = nnx.List([nnx.List([Block(a, a, rngs), Block(a, a, rngs)]) for a in w[:-1]])
            self.shrink = nnx.List([conv3(a, b, rngs, strides=2) for a, b in pairs])
            self.middle = nnx.List([Block(w[-1], w[-1], rngs) for _ in range(3)])
            self.grow = nnx.List([conv3(b, a, rngs) for a, b in pairs])
            self.up = nnx.List([nnx.List([Block(2 * a, a, rngs), Block(a, a, rngs)]) for a in w[:-1]])
            self.norm, self.last = norm(w[0], rngs), conv3(w[0], 4, rngs)

        def __call__(self, x, time):
            x, skips, time = self.first(x), [], nnx.silu(self.time(_waves(time, widths[0])))
            for blocks, shrink in zip(self.down, self.shrink):
                for block in blocks:
                    x = block(x, time)
                skips.append(x)
                x = shrink(x)
            for block in self.middle:
                x = block(x, time)
            for blocks, grow in zip(self.up[::-1], self.grow[::-1]):
                x = grow(jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2))
                x = jnp.concatenate([x, skips.pop()], axis=-1)
                for block in blocks:
                    x = block(x, time)
            return self.last(nnx.silu(self.norm(x)))

    return _training("diffusion U-Net", lambda: UNet(nnx.Rngs(0)), _flow, _noisy(batch, size, 4))


def mamba(toy: bool) -> Foreign:
    """Return a selective state space model.

    An associative scan in fp32 computes the states of a chunk; the chunks follow one another.
    """
    width, layers, length, chunk, batch, vocabulary = (16, 2, 16, 8, 4, 64) if toy else (1024, 12, 2048, 256, 4, 32000)
    inner, states, rank = 2 * width, 16, max(1, width // 16)

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    class Mixer(nnx.Module):
        def __init__(self, rngs):
            self.norm = rms_norm(width, rngs=rngs)
            self.up, self.down = matrix(width, 2 * inner, rngs=rngs), matrix(inner, width, rngs=rngs)
            self.conv = conv(inner, inner, (4,), feature_group_count=inner, padding="CAUSAL", rngs=rngs)
            self.select, self.step = matrix(inner, rank + 2 * states, rngs=rngs), linear(rank, inner, rngs=rngs)
            self.log_rate = nnx.Param(jnp.tile(jnp.log(jnp.arange(1.0, states + 1)), (inner, 1)))
            self.through = nnx.Param(jnp.ones(inner))

        @nnx.remat
        def __call__(self, x):
            y, gate = jnp.split(self.up(self.norm(x)), 2, axis=-1)
            y = nnx.silu(self.conv(y))
            step, into, out = jnp.split(self.select(y), (rank, rank + states), axis=-1)
            step = jax.nn.softplus(self.step(step).astype(jnp.float32) - 4)
            y = self.scan(y.astype(jnp.float32), step, into.astype(jnp.float32), out.astype(jnp.float32))
            return x + self.down(y.astype(x.dtype) * nnx.silu(gate))

        def scan(self, y, step, into, out):
            rate = -jnp.exp(self.log_rate[...])

            @jax.checkpoint
            def of_a_chunk(state, parts):
                y, step, into, out = parts  # (batch, chunk, inner or states)
                decay = jnp.exp(step[..., None] * rate)
                fed = (step * y)[..., None] * into[:, :, None]
                decay, fed = jax.lax.associative_scan(combine, (decay, fed), axis=1)
                state = decay * state[:, None] + fed
                return state[:, -1], jnp.einsum("blds,bls->bld", state, out)

            chunks = lambda x: x.reshape(batch, length // chunk, chunk, -1).swapaxes(0, 1)
            parts = jax.tree.map(chunks, (y, step, into, out))
            _, found = jax.lax.scan(of_a_chunk, jnp.zeros((batch, inner, states)), parts)
            return found.swapaxes(0, 1).reshape(batch, length, inner) + y * self.through[...]

    make = lambda: Decoder(vocabulary, width, [Mixer] * layers, functools.partial(rms_norm, width))
    return _training("Mamba", make, _next_token, _tokens(batch, length, vocabulary))


def t5(toy: bool) -> Foreign:
    """Return T5: encoder and decoder whose attention adds a bias for each distance, which no fused kernel accepts."""
    width, heads, mlp, layers, length, batch = (32, 4, 64, 1, 8, 4) if toy else (1024, 16, 2816, 6, 512, 32)
    vocabulary = 64 if toy else 32128

    class Attention(nnx.Module):
        def __init__(self, rngs):
            self.norm = rms_norm(width, rngs=rngs)
            self.q, self.k, self.v, self.out = (matrix(width, width, rngs=rngs) for _ in range(4))

        def __call__(self, x, bias, other=None):
            y = self.norm(x)
            other = y if other is None else other
            return x + self.out(_attend(self.q(y), self.k(other), self.v(other), heads, bias))

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.norm = rms_norm(width, rngs=rngs)
            self.gate, self.up = (matrix(width, mlp, rngs=rngs) for _ in range(2))
            self.down = matrix(mlp, width, rngs=rngs)

        def __call__(self, x):
            y = self.norm(x)
            return x + self.down(nnx.gelu(self.gate(y)) * self.up(y))

    class Distances(nnx.Module):
        """A bias of each head for each of 32 ranges of distances, log spaced beyond 8."""

        def __init__(self, rngs):
            self.table = embedding(32, heads, rngs=rngs)

        def __call__(self, causal):
            ahead = jnp.arange(length) - jnp.arange(length)[:, None]
            far = 8 + (8 * jnp.log2(jnp.maximum(jnp.abs(ahead), 8) / 8) / 4).astype(jnp.int32)
            bucket = jnp.where(jnp.abs(ahead) < 8, jnp.abs(ahead), jnp.minimum(far, 15)) + 16 * (ahead > 0)
            bias = self.table(bucket).transpose(2, 0, 1).astype(jnp.float32)
            return jnp.where(ahead > 0, -1e9, bias) if causal else bias

    class T5(nnx.Module):
        def __init__(self, rngs):
            self.embed = embedding(vocabulary, width, rngs=rngs)
            self.near, self.near_before = Distances(rngs), Distances(rngs)
            self.encoder: Any = nnx.List([nnx.List([Attention(rngs), Mlp(rngs)]) for _ in range(layers)])
            self.decoder: Any = nnx.List(
                [nnx.List([Attention(rngs), Attention(rngs), Mlp(rngs)]) for _ in range(layers)]
            )
            self.norm, self.last = (rms_norm(width, rngs=rngs) for _ in range(2))

        def __call__(self, source, target):
            x, bias = self.embed(source), self.near(causal=False)
            for attention, mlp in self.encoder:
                x = mlp(attention(x, bias))
            read, x, bias = self.norm(x), self.embed(target), self.near_before(causal=True)
            for attention, cross, mlp in self.decoder:
                x = mlp(cross(attention(x, bias), 0.0, read))
            return self.embed.attend(self.last(x))

    (tokens,) = _tokens(batch, length, vocabulary)
    loss = lambda model, source, target: _cross_entropy(model(source, target[:, :-1]), target[:, 1:])
    return _training("T5", lambda: T5(nnx.Rngs(0)), loss, (tokens[:, :-1], tokens[::-1]))


def lora(toy: bool) -> Foreign:
    """Return a Llama with weights frozen in bf16; only its adapters of rank 16 have gradients and moments."""
    width, heads, mlp, layers, length, batch = (32, 4, 64, 2, 8, 4) if toy else (4096, 32, 11008, 8, 2048, 4)
    vocabulary = 64 if toy else 32000

    class Frozen(nnx.Module):
        """A bf16 matrix that is no nnx.Param."""

        def __init__(self, inside, out, rngs):
            self.kernel = nnx.Variable(jax.random.normal(rngs.params(), (inside, out), jnp.bfloat16) * inside**-0.5)

        def __call__(self, x):
            return x @ self.kernel[...]

    def adapted(inside, out, rngs):
        return nnx.LoRA(inside, 16, out, base_module=Frozen(inside, out, rngs), rngs=rngs, **TYPES)

    def norm(x):
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)).astype(x.dtype)

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.q, self.k, self.v, self.out = (adapted(width, width, rngs) for _ in range(4))
            self.gate, self.up = (adapted(width, mlp, rngs) for _ in range(2))
            self.down = adapted(mlp, width, rngs)

        def __call__(self, x):
            y = norm(x)
            x = x + self.out(_attend_before(self.q(y), self.k(y), self.v(y), heads))
            y = norm(x)
            return x + self.down(nnx.silu(self.gate(y)) * self.up(y))

    class Llama(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.head = Frozen(vocabulary, width, rngs), Frozen(width, vocabulary, rngs)
            self.layers = nnx.List([Layer(rngs) for _ in range(layers)])

        def __call__(self, tokens):
            x = self.embed.kernel[...][tokens]
            for layer in self.layers:
                x = layer(x)
            return self.head(norm(x))

    tokens = _tokens(batch, length, vocabulary)
    return _training("LoRA of a Llama", lambda: Llama(nnx.Rngs(0)), _next_token, tokens, nnx.LoRAParam)


def pallas(toy: bool) -> Foreign:
    """Return a decoder whose RMS norms are Pallas kernels (Triton) forward and plain jax backward."""
    width, heads, layers, length, batch, vocabulary = (32, 4, 2, 8, 4, 64) if toy else (1024, 16, 12, 1024, 16, 32000)
    rows = 4

    def plain(x, scale):
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6) * scale).astype(x.dtype)

    def kernel(x, scale, out):
        out[...] = plain(x[...], scale[...])

    @jax.custom_vjp
    def norm(x, scale):
        flat, block = x.reshape(-1, width), pl.BlockSpec((rows, width), lambda i: (i, 0))
        call = pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(flat.shape, x.dtype),
            grid=(len(flat) // rows,),
            in_specs=[block, pl.BlockSpec((width,), lambda i: (0,))],
            out_specs=block,
            compiler_params=triton.CompilerParams(num_warps=4),
            interpret=toy,
        )
        return call(flat, scale).reshape(x.shape)

    norm.defvjp(lambda *args: (norm(*args), args), lambda args, up: jax.vjp(plain, *args)[1](up))

    class Norm(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(width))

        def __call__(self, x):
            return norm(x, self.scale[...])

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.norm1, self.norm2 = Norm(rngs), Norm(rngs)
            self.qkv, self.out = matrix(width, 3 * width, rngs=rngs), matrix(width, width, rngs=rngs)
            self.up, self.down = matrix(width, 4 * width, rngs=rngs), matrix(4 * width, width, rngs=rngs)

        def __call__(self, x):
            q, k, v = jnp.split(self.qkv(self.norm1(x)), 3, axis=-1)
            x = x + self.out(_attend_before(q, k, v, heads))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    make = lambda: Decoder(vocabulary, width, [Layer] * layers, Norm)
    return _training("decoder with a Pallas kernel", make, _next_token, _tokens(batch, length, vocabulary))


def dit(toy: bool) -> Foreign:
    """Return DiT-L/2: adaptive norms that start at zero, and layers by nnx.vmap and nnx.scan."""
    width, heads, layers, size, batch = (32, 4, 2, 8, 4) if toy else (1024, 16, 24, 32, 64)
    patches = (size // 2) ** 2

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = layer_norm(width, use_bias=False, use_scale=False, rngs=rngs)
            self.attention = attention(heads, width, rngs=rngs)
            self.up, self.down = linear(width, 4 * width, rngs=rngs), linear(4 * width, width, rngs=rngs)
            self.adapt = linear(width, 6 * width, kernel_init=nnx.initializers.zeros, rngs=rngs)

        def __call__(self, x, time):
            shift, scale, gate, shift2, scale2, gate2 = jnp.split(self.adapt(time)[:, None], 6, axis=-1)
            x = x + gate * self.attention(self.norm(x) * (1 + scale) + shift)
            return x + gate2 * self.down(nnx.gelu(self.up(self.norm(x) * (1 + scale2) + shift2)))

    class DiT(nnx.Module):
        def __init__(self, rngs):
            self.patches = conv(4, width, (2, 2), strides=2, rngs=rngs)
            self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (patches, width)))
            self.time = linear(256, width, rngs=rngs)
            self.blocks = nnx.vmap(Block)(rngs.fork(split=layers))
            self.last = linear(width, 16, rngs=rngs)

        def __call__(self, images, time):
            x = self.patches(images).reshape(len(images), patches, width) + self.positions[...].astype(jnp.bfloat16)
            run = nnx.scan(lambda block, x, time: block(x, time), in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)
            x = self.last(run(self.blocks, x, nnx.silu(self.time(_waves(time, 256)))))
            return x.reshape(len(images), size // 2, size // 2, 2, 2, 4).swapaxes(2, 3).reshape(images.shape)

    return _training("DiT-L/2", lambda: DiT(nnx.Rngs(0)), _flow, _noisy(batch, size, 4))


def lstm(toy: bool) -> Foreign:
    """Return two recurrent layers over an embedding, whose table is also the head."""
    width, length, batch, vocabulary = (32, 8, 4, 64) if toy else (2048, 256, 256, 32000)
    layer = lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs, **TYPES), rngs=rngs)
    make = lambda: Decoder(vocabulary, width, [layer, layer], functools.partial(layer_norm, width))
    return _training("LSTM", make, _next_token, _tokens(batch, length, vocabulary))


def gpt_flax(toy: bool) -> Foreign:
    """Return GPT-2 medium of nnx's own layers, with a mask instead of a fused kernel."""
    width, heads, layers, length, batch, vocabulary = (32, 4, 2, 8, 4, 64) if toy else (1024, 16, 24, 1024, 8, 50257)

    class Positions(nnx.Module):
        def __init__(self, rngs):
            self.table = embedding(length, width, rngs=rngs)

        def __call__(self, x):
            return x + self.table(jnp.arange(length))

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm1, self.norm2 = layer_norm(width, rngs=rngs), layer_norm(width, rngs=rngs)
            self.attention = attention(heads, width, rngs=rngs)
            self.up, self.down = linear(width, 4 * width, rngs=rngs), linear(4 * width, width, rngs=rngs)

        def __call__(self, x):
            x = x + self.attention(self.norm1(x), mask=nnx.make_causal_mask(x[..., 0]))
            return x + self.down(nnx.gelu(self.up(self.norm2(x))))

    make = lambda: Decoder(vocabulary, width, [Positions, *[Block] * layers], functools.partial(layer_norm, width))
    return _training("GPT-2 medium of nnx's layers", make, _next_token, _tokens(batch, length, vocabulary))


PROGRAMS: dict[str, Callable[[bool], Foreign]] = {
    make.__name__: make for make in (resnet50, unet, mamba, t5, lora, pallas, dit, lstm, gpt_flax)
}
