"""Llama 2 and 3 as a Flax nnx module: RMSNorm, rotary positions, grouped-query attention, SwiGLU (Touvron et al., 2023;
Grattafiori et al., 2024); and Qwen3, which also normalizes queries and keys (Yang et al., 2025).

Layers are stacked in one set of parameters and scanned: the program of 126 layers is no larger than that of two.
An experiment names it `models.llama:Llama` with a preset; every field of `LlamaConfig` can be overridden.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from meshkit.parallel.pipeline import StageContext
from meshkit.sharding import constrain
from models.attention import causal_attention, check_context, rotate, token_order
from models.embedding import lookup
from models.hf import Layout, llama_layout
from models.layers import (
    PLAIN,
    RESIDUAL_AXES,
    Matmuls,
    Projection,
    RMSNorm,
    depth_scale,
    dropout,
    for_matmuls,
    layer_keys,
    parameter,
    project,
    project_each,
    training_key,
)
from models.options import Rate, check_option, suggest
from models.remat import check_remat, recompute, run_layers


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama.

    Attributes:
        tied: the output head is the embedding table.
        qk_norm: each head of queries and keys is normalized before it is rotated, as in Qwen3.
        rope_theta: base of the rotary frequencies.
        one_hot_lookup: the embedding table is multiplied by one-hot ids, see `models.embedding.lookup`.
        fp32_head: the output head multiplies in fp32 (on GPUs as TF32); otherwise in the dtype of activations.
        dropout: share of the embeddings, and of what each block adds to them, that training drops (Megatron-LM's
            `hidden_dropout`), see `models.layers.dropout`. Attention's probabilities are not dropped.
        scan_layers: layers are a loop of the program. Otherwise each layer has its own instructions: XLA copies nothing
            in and out of a loop's arrays, but its compile time grows in proportion to the layers.
        fp32_logits: logits are fp32. Otherwise they have the dtype of activations, and half the size in bf16. The loss
            is fp32 either way.
    """

    vocab: int
    embed: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    tied: bool = False
    qk_norm: bool = False
    one_hot_lookup: bool = False
    fp32_head: bool = False
    dropout: Rate = 0.0
    scan_layers: bool = True
    fp32_logits: bool = True

    def __post_init__(self):
        sizes = (self.vocab, self.embed, self.mlp, self.layers, self.heads, self.kv_heads, self.head_dim)
        if min(sizes) < 1:
            raise ValueError(f"every size of a Llama is at least 1, got {self}.")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}.")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary positions need pairs.")

    def check_pipeline(self) -> None:
        """Refuse unscanned layers: a pipeline always scans the layers of a stage."""
        if not self.scan_layers:
            raise ValueError("scan_layers = false: a pipeline scans the layers of a stage; leave scan_layers out.")


# Sizes are from config.json of meta-llama/Llama-2-*-hf, codellama/CodeLlama-34b-hf, meta-llama/Meta-Llama-3-*,
# -3.1-405B and Llama-3.2-1B on Hugging Face, as copied in litgpt/config.py of Lightning-AI/litgpt at 0006c97, read
# 2026-11-22. That file also has the sizes of Qwen/Qwen3-*: tables 1 and 2 of the report (arXiv 2505.09388) confirm
# layers, heads and experts, and a test confirms the counts.
_QWEN3 = {"kv_heads": 8, "head_dim": 128, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True}
PRESETS = {
    "llama_debug": LlamaConfig(vocab=256, embed=128, mlp=384, layers=2, heads=8, kv_heads=4, head_dim=16),
    "llama_1b": LlamaConfig(128_256, 2048, 8192, 16, 32, 8, 64, tied=True),
    "llama2_7b": LlamaConfig(32_000, 4096, 11_008, 32, 32, 32, 128, rope_theta=10_000.0),
    "llama2_13b": LlamaConfig(32_000, 5120, 13_824, 40, 40, 40, 128, rope_theta=10_000.0),
    "llama2_70b": LlamaConfig(32_000, 8192, 28_672, 80, 64, 8, 128, rope_theta=10_000.0),
    "codellama_34b": LlamaConfig(32_000, 8192, 22_016, 48, 64, 8, 128, rope_theta=1_000_000.0),
    "llama3_8b": LlamaConfig(128_256, 4096, 14_336, 32, 32, 8, 128),
    "llama3_70b": LlamaConfig(128_256, 8192, 28_672, 80, 64, 8, 128),
    "llama3_405b": LlamaConfig(128_256, 16_384, 53_248, 126, 128, 8, 128),
    "qwen3_0.6b": LlamaConfig(151_936, 1024, 3072, 28, 16, tied=True, **_QWEN3),
    "qwen3_1.7b": LlamaConfig(151_936, 2048, 6144, 28, 16, tied=True, **_QWEN3),
    "qwen3_4b": LlamaConfig(151_936, 2560, 9728, 36, 32, tied=True, **_QWEN3),
    "qwen3_8b": LlamaConfig(151_936, 4096, 12_288, 36, 32, **_QWEN3),
    "qwen3_14b": LlamaConfig(151_936, 5120, 17_408, 40, 40, **_QWEN3),
    "qwen3_32b": LlamaConfig(151_936, 5120, 25_600, 64, 64, **_QWEN3),
}


class Attention(nnx.Module):
    """Grouped-query causal self-attention with rotary positions."""

    def __init__(self, c: LlamaConfig, context: str, *, matmuls: Matmuls = PLAIN, rngs: nnx.Rngs):
        embed, linear = {"embed": c.embed}, partial(Projection, stack=c.layers, matmuls=matmuls, rngs=rngs)
        queries = {"heads": c.heads, "head_dim": c.head_dim}
        keys = {"kv_heads": c.kv_heads, "head_dim": c.head_dim}
        self.rope_theta, self.context = c.rope_theta, context
        self.query = linear("query", embed, queries)
        self.key = linear("key", embed, keys)
        self.value = linear("value", embed, keys)
        self.output = linear("output", queries, embed, scale=depth_scale(c.layers))
        self.qk_norm = c.qk_norm
        if c.qk_norm:
            norm = partial(RMSNorm, c.head_dim, eps=c.norm_eps, stack=c.layers, axis="head_dim", rngs=rngs)
            self.query_norm, self.key_norm = norm(), norm()

    def __call__(self, x: jax.Array) -> jax.Array:
        order = token_order(self.context, x.shape[1])
        positions = order.positions(x.shape[1])
        q, k, v = project_each(x, self.query, self.key, self.value)
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = (rotate(x, self.rope_theta, positions) for x in (q, k))
        return self.output(causal_attention(q, k, v, self.context, order))


class SwiGLU(nnx.Module):
    """The gated feed-forward block: down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, c: LlamaConfig, *, matmuls: Matmuls = PLAIN, rngs: nnx.Rngs):
        embed, mlp = {"embed": c.embed}, {"mlp": c.mlp}
        linear = partial(Projection, stack=c.layers, matmuls=matmuls, rngs=rngs)
        self.gate, self.up = linear("gate", embed, mlp), linear("up", embed, mlp)
        self.down = linear("down", mlp, embed, scale=depth_scale(c.layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = project_each(x, self.gate, self.up)
        hidden = jax.nn.silu(gate) * up
        return self.down(constrain(hidden, "act_batch", "act_length", "act_mlp"))


class Block(nnx.Module):
    """One pre-norm transformer layer; its parameters are stacked over all layers until a scan takes them apart."""

    attention_class: Any = Attention

    def __init__(self, c: LlamaConfig, context: str, *, matmuls: Matmuls = PLAIN, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(c.embed, eps=c.norm_eps, stack=c.layers, rngs=rngs)
        self.attention = self.attention_class(c, context, matmuls=matmuls, rngs=rngs)
        self.mlp_norm = RMSNorm(c.embed, eps=c.norm_eps, stack=c.layers, rngs=rngs)
        self.mlp = SwiGLU(c, matmuls=matmuls, rngs=rngs)
        self.dropout = c.dropout

    def __call__(self, x: jax.Array, key: Any = None) -> jax.Array:
        order = token_order(self.attention.context, x.shape[1])
        with jax.named_scope("attention"):
            branch = dropout(self.attention(self.attention_norm(x)), self.dropout, key, 0, order)
            x = constrain(x + branch, *RESIDUAL_AXES)
        with jax.named_scope("mlp"):
            branch = dropout(self.mlp(self.mlp_norm(x)), self.dropout, key, 1, order)
            return constrain(x + branch, *RESIDUAL_AXES)


class Llama(nnx.Module):
    """A Llama language model: int32 tokens [batch, length] -> logits [batch, length, vocab].

    Args:
        preset: a name in PRESETS.
        rngs: source of the initial weights.
        dtype: dtype of activations and matmuls. Parameters are fp32.
        fp8: the projections of the layers multiply in fp8, see `models.fp8`; the output head does not.
        fp8_scaling: source of fp8's scales: `current`, or `delayed`, the largest numbers of previous steps.
        mxfp8: the projections multiply in MXFP8 instead, see `models.mxfp8`.
        nvfp4: the projections multiply in NVFP4 instead, only for plans, see `models.nvfp4`.
        collective_matmul: hide the collectives of sequence parallelism behind matmuls, see
            `meshkit.parallel.collective_matmul`.
        remat: what the backward pass recomputes, see `models.remat.recompute`.
        context: how attention works over a cut `act_length`, see `models.attention.causal_attention`.
        overrides: fields of LlamaConfig.

    Raises:
        ValueError: no such preset or field, or sizes that do not go together.
    """

    def __init__(
        self,
        preset: str = "llama_debug",
        *,
        rngs: nnx.Rngs,
        dtype=jnp.bfloat16,
        fp8: bool = False,
        fp8_scaling: str = "current",
        mxfp8: bool = False,
        nvfp4: bool = False,
        collective_matmul: bool = False,
        remat="none",
        context="all_gather",
        **overrides,
    ):
        self.config = c = make_config(preset, **overrides)
        self.dtype, self.remat, self.context = jnp.dtype(dtype), check_remat(remat, context), check_context(context)
        self.deterministic = False  # nnx's `eval()` sets True, which means: not in training
        matmuls = Matmuls(fp8, fp8_scaling, mxfp8, nvfp4, collective_matmul)
        table = jax.nn.initializers.normal(1.0 if not c.tied else 1 / math.sqrt(c.embed))
        self.embedding = parameter(rngs, table, (c.vocab, c.embed), ("vocab", "embed"), stack=None)
        self.layers = Block(c, context, matmuls=matmuls, rngs=rngs)
        self.norm = RMSNorm(c.embed, eps=c.norm_eps, rngs=rngs)
        if not c.tied:
            self.head = Projection("head", {"embed": c.embed}, {"vocab": c.vocab}, rngs=rngs)

    @classmethod
    def from_preset(cls, preset: str, *, rngs: nnx.Rngs, **overrides) -> Llama:
        """Return a model, as calling the class does."""
        return cls(preset, rngs=rngs, **overrides)

    def __call__(self, tokens: Int[Array, "batch length"], key: Any = None) -> Float[Array, "batch length vocab"]:
        """Return logits; `key` is the random key of training's dropout."""
        c, x = self.config, self.first({"tokens": tokens}, key=key)
        with jax.named_scope("layers"):
            graph, stacked = nnx.split(self.layers)
            keys = layer_keys(training_key(c.dropout, self.deterministic, key), c.layers)
            x = run_layers(self._plain_layer(graph), x, (stacked, keys), self.remat, c.scan_layers)[0]
        return self.last(x)

    def first(
        self, batch: Mapping[str, jax.Array], ctx: StageContext | None = None, key: Any = None
    ) -> Float[Array, "batch length embed"]:
        """Return the input of the layers; a pipeline runs this before its first stage."""
        tokens, key = batch["tokens"], training_key(self.config.dropout, self.deterministic, ctx.rng if ctx else key)
        order = token_order(self.context, tokens.shape[1])
        with jax.named_scope("embedding"):
            tokens = order.enter(tokens, "act_batch", "act_length")
            table, c = self.embedding.get_value(), self.config
            x = lookup(table, tokens, self.dtype, c.vocab, ctx and ctx.axis, c.one_hot_lookup)
            x = constrain(x, *RESIDUAL_AXES)
            return dropout(x, c.dropout, key, c.layers, order)

    def layer(self, parameters: Mapping[str, Any], x: jax.Array, ctx: StageContext, key: Any = None) -> jax.Array:
        """Run one layer of a pipeline's stage; its parameters are a nested dict of arrays."""
        del ctx
        self.config.check_pipeline()
        graph, _ = nnx.split(self.layers)
        key = training_key(self.config.dropout, self.deterministic, key)
        return recompute(self._plain_layer(graph), self.remat)(x, (nnx.State(parameters), key))[0]

    def last(
        self, x: Float[Array, "batch length embed"], ctx: StageContext | None = None
    ) -> Float[Array, "batch length some_vocab"]:
        """Return the logits of the layers' output; in a pipeline, those of the stage's part of the vocabulary."""
        del ctx
        order, dtype = token_order(self.context, x.shape[1]), jnp.float32 if self.config.fp32_logits else self.dtype
        with jax.named_scope("logits"):
            x = order.leave(for_matmuls(self.norm(x)), "act_batch", "act_length", "act_embed")
            x = x.astype(jnp.float32) if self.config.fp32_head else x
            if self.config.tied:
                logits = project(x, self.embedding.get_value().T, 1, dtype)
            else:
                logits = self.head(x, out_dtype=dtype)
            return constrain(logits, "act_batch", "act_length", "act_vocab")

    def _plain_layer(self, graph: Any):
        """Return the body of a scan over layers: (x, (parameters, key)) -> (x, None)."""

        def layer(x, of_layer):
            parameters, key = of_layer
            return nnx.merge(graph, parameters)(x, key), None

        return layer

    def matmul_parameters(self) -> int:
        """Return N in model FLOP = 6 N tokens: parameters of matmuls, a tied table once and look-ups not at all."""
        c = self.config
        attention = c.embed * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
        return c.layers * (attention + 3 * c.embed * c.mlp) + c.embed * c.vocab

    def hf_layout(self) -> Layout:
        """Return how the parameters correspond to Hugging Face's `LlamaForCausalLM` or `Qwen3ForCausalLM`."""
        return llama_layout(self.config)

    def attention_shape(self) -> tuple[int, int, int]:
        """Return (L, heads, head_dim) in attention FLOP = 12 L heads head_dim T tokens, for L layers and length T."""
        return self.config.layers, self.config.heads, self.config.head_dim


def make_config(preset: str, **overrides) -> LlamaConfig:
    """Return a preset with some fields replaced.

    Raises:
        ValueError: no such preset or field, or a value of another type.
    """
    if preset not in PRESETS:
        raise ValueError(f"no Llama preset '{preset}'.{suggest(preset, PRESETS)}")
    fields = {f.name for f in dataclasses.fields(LlamaConfig)}
    for name in overrides:
        if name not in fields:
            raise ValueError(f"a Llama has no option '{name}'.{suggest(name, fields)}")
    types = {f.name: f.type for f in dataclasses.fields(LlamaConfig)}
    checked = {name: check_option(name, value, str(types[name])) for name, value in overrides.items()}
    return dataclasses.replace(PRESETS[preset], **checked)
