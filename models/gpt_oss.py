"""GPT-OSS as a Flax nnx module: a mixture of experts whose layers attend by turns over a sliding window and over all
tokens, with attention sinks, biases and a clamped SwiGLU (OpenAI, 2025, arXiv 2508.10925).

An experiment names it `models.gpt_oss:GptOss` with a preset, and `[train] loss = "models.moe:next_token_loss"`. Two
layers that follow each other, one with a window and one without, are one step of the scan over layers, and one layer of
a pipeline. Embedding, head, routing of tokens and losses are `models.moe`'s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from meshkit.parallel.expert import expert_layer
from meshkit.sharding import constrain
from models.attention import Yarn, rotate, sink_attention, token_order
from models.hf import Layout, gpt_oss_layout
from models.layers import (
    PROJECTION,
    RESIDUAL_AXES,
    Projection,
    RMSNorm,
    depth_scale,
    for_matmuls,
    parameter,
    project_each,
)
from models.moe import Moe, MoeConfig, Router, choose, make_config, routing_values

ALPHA = 1.702  # of the SwiGLU: x * sigmoid(1.702 x) is close to a GELU


@dataclass(frozen=True)
class GptOssConfig(MoeConfig):
    """The shape of a GPT-OSS.

    Attributes:
        window: how many tokens a layer with a sliding window sees, a query's own among them.
        rope_factor, rope_original_length: of `models.attention.Yarn`.
        swiglu_limit: where the gate and the linear part of the SwiGLU are clamped.
    """

    window: int = 128
    rope_factor: float = 32.0
    rope_original_length: int = 4096
    swiglu_limit: float = 7.0

    def __post_init__(self):
        super().__post_init__()
        if self.layers % 2:
            raise ValueError(f"layers = {self.layers} is odd; layers with a window and without come in pairs.")


# config.json of openai/gpt-oss-20b and -120b on Hugging Face; a test holds the counts to table 1 of the model card.
_SHARED = {"rope_theta": 150_000.0, "experts_per_token": 4}
PRESETS = {
    "gpt_oss_debug": GptOssConfig(256, 64, 128, 4, 4, 2, 16, window=8, rope_original_length=32, **_SHARED),
    "gpt_oss_20b": GptOssConfig(201_088, 2880, 2880, 24, 64, 8, 64, experts=32, **_SHARED),
    "gpt_oss_120b": GptOssConfig(201_088, 2880, 2880, 36, 64, 8, 64, experts=128, **_SHARED),
}
_WITHOUT = frozenset({"tied", "dropout", "qk_norm", "shared_experts", "dense_layers", "dense_mlp"})


class Attention(nnx.Module):
    """Grouped-query causal self-attention with biases and sinks, over a window or all tokens before."""

    def __init__(self, c: GptOssConfig, window: int | None, context: str, *, rngs: nnx.Rngs):
        stack = c.layers // 2
        embed, linear = {"embed": c.embed}, partial(Projection, stack=stack, bias=True, rngs=rngs)
        queries = {"heads": c.heads, "head_dim": c.head_dim}
        keys = {"kv_heads": c.kv_heads, "head_dim": c.head_dim}
        self.rope_theta, self.yarn = c.rope_theta, Yarn(c.rope_factor, c.rope_original_length)
        self.window, self.context = window, context
        self.query = linear("query", embed, queries)
        self.key = linear("key", embed, keys)
        self.value = linear("value", embed, keys)
        self.output = linear("output", queries, embed, scale=depth_scale(c.layers))
        self.sinks = parameter(rngs, jax.nn.initializers.normal(0.02), (c.heads,), ("heads",), stack=stack)

    def __call__(self, x: jax.Array) -> jax.Array:
        positions = token_order(self.context, x.shape[1]).positions(x.shape[1])
        q, k, v = project_each(x, self.query, self.key, self.value)
        q, k = (rotate(x, self.rope_theta, positions, self.yarn) for x in (q, k))
        return self.output(sink_attention(q, k, v, self.sinks.get_value(), self.context, self.window))


class BiasedRouter(Router):
    """Scores of the experts for each token, in fp32, with a bias for each expert."""

    def __init__(self, c: GptOssConfig, *, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(1 / math.sqrt(c.embed))
        self.kernel = parameter(rngs, init, (c.embed, c.experts), ("embed", None), stack=c.layers // 2)
        self.bias = parameter(rngs, jax.nn.initializers.zeros, (c.experts,), (None,), stack=c.layers // 2)

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + self.bias.get_value().astype(jnp.float32)


class Experts(nnx.Module):
    """Kernels and biases of all experts."""

    def __init__(self, c: GptOssConfig, *, rngs: nnx.Rngs):
        def kernel(inner, outer, scale=1.0):
            init = jax.nn.initializers.normal(scale / math.sqrt(inner[1]))
            shape, axes = (c.experts, inner[1], outer[1]), ("experts", inner[0], outer[0])
            return parameter(rngs, init, shape, axes, stack=c.layers // 2)

        def bias(outer):
            zeros = jax.nn.initializers.zeros
            return parameter(rngs, zeros, (c.experts, outer[1]), ("experts", outer[0]), stack=c.layers // 2)

        embed, mlp = ("embed", c.embed), ("mlp", c.mlp)
        self.gate, self.up = kernel(embed, mlp), kernel(embed, mlp)
        self.down = kernel(mlp, embed, depth_scale(c.layers))
        self.gate_bias, self.up_bias, self.down_bias = bias(mlp), bias(mlp), bias(embed)


class GptOssMlp(nnx.Module):
    """Router and experts: [batch, length, embed] -> the same, and `models.moe.routing_values`."""

    def __init__(self, c: GptOssConfig, *, rngs: nnx.Rngs):
        self.config = c
        self.router = BiasedRouter(c, rngs=rngs)
        self.experts = Experts(c, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        c, e = self.config, self.experts
        with jax.named_scope("router"):
            scores = self.router(x)
            choices = choose(scores, c.experts_per_token)
            chosen = jax.nn.one_hot(choices, c.experts, dtype=jnp.float32)
            weights = jax.nn.softmax(jnp.sum(scores[..., None, :] * chosen, axis=-1), axis=-1)
        y, kept = expert_layer(
            x,
            weights,
            choices,
            (e.gate.get_value(), e.up.get_value(), e.down.get_value()),
            capacity_factor=c.capacity_factor,
            buffer_factor=c.buffer_factor,
            saved_name=PROJECTION,
            biases=(e.gate_bias.get_value(), e.up_bias.get_value(), e.down_bias.get_value()),
            activation=partial(clamped_swiglu, limit=c.swiglu_limit),
        )
        return y, routing_values(scores, chosen, kept)


def clamped_swiglu(gate: jax.Array, up: jax.Array, *, limit: float) -> jax.Array:
    """gate * sigmoid(1.702 gate) * (up + 1), of a gate of at most `limit` and an up between -limit and limit."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)


class GptOssBlock(nnx.Module):
    """One pre-norm layer: attention, then the experts."""

    def __init__(self, c: GptOssConfig, window: int | None, context: str, *, rngs: nnx.Rngs):
        norm = partial(RMSNorm, c.embed, eps=c.norm_eps, stack=c.layers // 2, rngs=rngs)
        self.attention_norm, self.attention = norm(), Attention(c, window, context, rngs=rngs)
        self.mlp_norm, self.moe = norm(), GptOssMlp(c, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        with jax.named_scope("attention"):
            x = constrain(x + self.attention(self.attention_norm(x)), *RESIDUAL_AXES)
        with jax.named_scope("moe"):
            y, values = self.moe(for_matmuls(self.mlp_norm(x)))
            return constrain(x + y, *RESIDUAL_AXES), values


class Pair(nnx.Module):
    """Two layers: one with a sliding window, then one without. Values are the means of both."""

    def __init__(self, c: GptOssConfig, context: str, *, rngs: nnx.Rngs):
        self.sliding = GptOssBlock(c, c.window, context, rngs=rngs)
        self.full = GptOssBlock(c, None, context, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        x, first = self.sliding(x)
        x, second = self.full(x)
        return x, jax.tree.map(lambda a, b: (a + b) / 2, first, second)


class GptOss(Moe):
    """A GPT-OSS: int32 tokens [batch, length] -> logits [batch, length, vocab].

    Args:
        preset: a name in PRESETS.
        rngs: source of the initial weights.
        options: `dtype` and `remat` of `models.moe.Moe`, and fields of GptOssConfig.

    Raises:
        ValueError: no such preset or field, or sizes that do not go together.
    """

    expert_block = Pair

    def __init__(self, preset: str = "gpt_oss_debug", *, rngs: nnx.Rngs, dtype=jnp.bfloat16, remat="none", **options):
        super().__init__(preset, rngs=rngs, dtype=dtype, remat=remat, **options)

    @staticmethod
    def make_config(preset: str, **overrides) -> GptOssConfig:
        """`models.moe.make_config` of the presets of this class."""
        return make_config(preset, PRESETS, _WITHOUT, "GptOss", **overrides)

    @property
    def stacked(self) -> int:
        """Pairs of layers."""
        return self.config.layers // 2

    def attention_windows(self) -> tuple[int, ...]:
        """The window of each layer that has one, in tokens."""
        return (self.config.window,) * self.stacked

    def hf_layout(self) -> Layout:
        """How the parameters correspond to those of Hugging Face's `GptOssForCausalLM`."""
        return gpt_oss_layout(self.config)
