"""GPT-OSS as a Flax nnx module: a mixture of experts with attention sinks, biases and a clamped SwiGLU (OpenAI, 2025,
arXiv 2508.10925). Its layers alternate between attention over a sliding window and over all tokens.

An experiment names it `models.gpt_oss:GptOss` with a preset, and `[train] loss = "models.moe:next_token_loss"`. A pair
of layers, one with a window and the next without, is one step of the scan over layers and counts as one layer of a
pipeline. Embedding, head, token routing and losses come from `models.moe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import Yarn, rotate, sink_attention, token_order
from models.hf import Layout, gpt_oss_layout
from models.layers import Projection, depth_scale, parameter, project_each
from models.moe import Experts, Moe, MoeBlock, MoeConfig, MoeMlp, Router, make_config

ALPHA = 1.702  # factor in the SwiGLU: x * sigmoid(1.702 x) is close to a GELU


@dataclass(frozen=True)
class GptOssConfig(MoeConfig):
    """The shape of a GPT-OSS.

    Attributes:
        window: how many tokens a query sees in a layer with a sliding window, including its own.
        rope_factor, rope_original_length: `factor` and `original_length` of `models.attention.Yarn`.
        swiglu_limit: bound to which the gate and the linear part of the SwiGLU are clamped.
    """

    window: int = 128
    rope_factor: float = 32.0
    rope_original_length: int = 4096
    swiglu_limit: float = 7.0

    def __post_init__(self):
        super().__post_init__()
        if self.layers % 2:
            raise ValueError(f"layers = {self.layers} is odd; layers with a window and without come in pairs.")

    @property
    def stacked(self) -> int:
        """Number of pairs of layers."""
        return self.layers // 2


# config.json of openai/gpt-oss-20b and -120b on Hugging Face; a test compares counts with table 1 of the model card.
_SHARED = {"rope_theta": 150_000.0, "experts_per_token": 4}
PRESETS = {
    "gpt_oss_debug": GptOssConfig(256, 64, 128, 4, 4, 2, 16, window=8, rope_original_length=32, **_SHARED),
    "gpt_oss_20b": GptOssConfig(201_088, 2880, 2880, 24, 64, 8, 64, experts=32, **_SHARED),
    "gpt_oss_120b": GptOssConfig(201_088, 2880, 2880, 36, 64, 8, 64, experts=128, **_SHARED),
}
_WITHOUT = frozenset({"tied", "dropout", "qk_norm", "shared_experts", "dense_layers", "dense_mlp"})


class Attention(nnx.Module):
    """Grouped-query causal self-attention with biases and sinks, over a window or over all earlier tokens."""

    def __init__(self, c: GptOssConfig, context: str, *, window: int | None, rngs: nnx.Rngs):
        embed, linear = {"embed": c.embed}, partial(Projection, stack=c.stacked, bias=True, rngs=rngs)
        queries = {"heads": c.heads, "head_dim": c.head_dim}
        keys = {"kv_heads": c.kv_heads, "head_dim": c.head_dim}
        self.rope_theta, self.yarn = c.rope_theta, Yarn(c.rope_factor, c.rope_original_length)
        self.window, self.context = window, context
        self.query = linear("query", embed, queries)
        self.key = linear("key", embed, keys)
        self.value = linear("value", embed, keys)
        self.output = linear("output", queries, embed, scale=depth_scale(c.layers))
        self.sinks = parameter(rngs, jax.nn.initializers.normal(0.02), (c.heads,), ("heads",), stack=c.stacked)

    def __call__(self, x: jax.Array) -> jax.Array:
        order = token_order(self.context, x.shape[1])
        positions = order.positions(x.shape[1])
        q, k, v = project_each(x, self.query, self.key, self.value)
        q, k = (rotate(x, self.rope_theta, positions, self.yarn) for x in (q, k))
        return self.output(sink_attention(q, k, v, self.sinks.get_value(), self.context, self.window, order))


class BiasedRouter(Router):
    """A router that scores the experts for each token, in fp32, with a bias for each expert."""

    def __init__(self, c: GptOssConfig, *, rngs: nnx.Rngs):
        super().__init__(c, rngs=rngs)
        self.bias = parameter(rngs, jax.nn.initializers.zeros, (c.experts,), (None,), stack=c.stacked)

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + self.bias.get_value().astype(jnp.float32)


class BiasedExperts(Experts):
    """Kernels and biases of all experts."""

    def __init__(self, c: GptOssConfig, *, rngs: nnx.Rngs):
        super().__init__(c, rngs=rngs)

        def bias(name, size):
            zeros = jax.nn.initializers.zeros
            return parameter(rngs, zeros, (c.experts, size), ("experts", name), stack=c.stacked)

        self.limit = c.swiglu_limit
        self.gate_bias, self.up_bias, self.down_bias = bias("mlp", c.mlp), bias("mlp", c.mlp), bias("embed", c.embed)

    def layer_options(self) -> dict[str, Any]:
        """Return the biases and the activation as arguments of `expert_layer`."""
        biases = (self.gate_bias.get_value(), self.up_bias.get_value(), self.down_bias.get_value())
        return {"biases": biases, "activation": partial(clamped_swiglu, limit=self.limit)}


class GptOssMlp(MoeMlp):
    """Router and experts: [batch, length, embed] -> the same, and `models.moe.routing_values`."""

    router_class, experts_class = BiasedRouter, BiasedExperts


def clamped_swiglu(gate: jax.Array, up: jax.Array, *, limit: float) -> jax.Array:
    """Return gate * sigmoid(1.702 gate) * (up + 1); before, gate is clamped to <= limit, and up to [-limit, limit]."""
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)


class GptOssBlock(MoeBlock):
    """One pre-norm layer: attention, then the experts."""

    attention_class, mlp_class = Attention, GptOssMlp


class Pair(nnx.Module):
    """Two layers: one with a sliding window, then one without. Routing values are means over both."""

    def __init__(self, c: GptOssConfig, context: str, *, rngs: nnx.Rngs):
        self.sliding = GptOssBlock(c, context, window=c.window, rngs=rngs)
        self.full = GptOssBlock(c, context, window=None, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        x, first = self.sliding(x)
        x, second = self.full(x)
        return x, jax.tree.map(lambda a, b: (a + b) / 2, first, second)


class GptOss(Moe):
    """A GPT-OSS: int32 tokens [batch, length] -> logits [batch, length, vocab].

    Args:
        preset: a name in PRESETS.
        rngs: source of the initial weights.
        dtype, remat, options: as in `models.moe.Moe`, but fields are those of GptOssConfig.

    Raises:
        ValueError: no such preset or field, or sizes that do not go together.
    """

    expert_block = Pair

    def __init__(self, preset: str = "gpt_oss_debug", *, rngs: nnx.Rngs, dtype=jnp.bfloat16, remat="none", **options):
        super().__init__(preset, rngs=rngs, dtype=dtype, remat=remat, **options)

    @staticmethod
    def make_config(preset: str, **overrides) -> GptOssConfig:
        """Return `models.moe.make_config` for the presets of this class."""
        return make_config(preset, PRESETS, _WITHOUT, "GptOss", **overrides)

    def attention_windows(self) -> tuple[int, ...]:
        """Return the window, in tokens, of each layer that has a window."""
        return (self.config.window,) * self.config.stacked

    def hf_layout(self) -> Layout:
        """Return how the parameters correspond to those of Hugging Face's `GptOssForCausalLM`."""
        return gpt_oss_layout(self.config)
