"""GPT-2 and GPT-3 style decoders as a Flax nnx module: LayerNorm, learned positions, attention and a GELU feed-forward
block without gate (Radford et al., 2019; Brown et al., 2020). Megatron-LM's GPT, MPT and Nemotron-4 have this shape.

Layers are stacked and scanned as in models/llama.py, and dims carry the same logical axes. Matmuls have a bias only
with `bias`: biases are few numbers, but the backward pass sums each of their gradients over all tokens.
An experiment names it `models.gpt:GPT` with a preset; every field of `GPTConfig` can be overridden.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from meshkit.parallel.layout import Keys, Queries
from meshkit.sharding import constrain
from models.attention import HEAD_AXES, causal_attention, check_context
from models.embedding import lookup
from models.layers import (
    PLAIN,
    RESIDUAL_AXES,
    Matmuls,
    Projection,
    dropout,
    for_matmuls,
    layer_keys,
    parameter,
    project_each,
    training_key,
)
from models.matmul import project
from models.options import Rate, check_option
from models.remat import check_remat, run_layers
from models.vit import LayerNorm

ATTENTIONS = ("fused", "materialized")
DROPOUTS = ("branches", "inputs")


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT.

    Attributes:
        length: number of learned positions, which is the length of the longest sequence.
        kv_heads: heads of keys and values; 0 means as many as `heads`.
        tied: the output head is the embedding table.
        attention: `fused` is one kernel; `materialized` writes the scores of every head to memory, as all frameworks
            did before FlashAttention (Dao et al., 2022).
        bias: every projection of the layers has a bias, as in GPT-2 and GPT-3.
        one_hot_lookup: the embedding table is multiplied by one-hot ids, see `models.embedding.lookup`.
        dropout: share of the numbers that training drops, see `models.layers.dropout`. Attention's probabilities are
            not dropped: `jax.nn.dot_product_attention` has no dropout.
        dropout_at: `branches` drops from the embeddings and from what attention and the feed-forward block add to
            them, as in GPT-2 (`resid_pdrop`, `embd_pdrop`) and Megatron-LM (`hidden_dropout`). `inputs` drops from the
            input of each layer, as in Praxis (`input_dropout_prob` of a repeated block).
        scan_layers, fp32_logits: as in `models.llama.LlamaConfig`.
    """

    vocab: int
    embed: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int = 0
    length: int = 2048
    norm_eps: float = 1e-5
    tied: bool = True
    attention: str = "fused"
    bias: bool = False
    one_hot_lookup: bool = False
    dropout: Rate = 0.0
    dropout_at: str = "branches"
    scan_layers: bool = True
    fp32_logits: bool = True

    def __post_init__(self):
        for name in ("vocab", "embed", "mlp", "layers", "heads", "length"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} = {size!r} must be a whole number of at least 1.")
        if self.embed % self.heads:
            raise ValueError(f"embed = {self.embed} is not a multiple of heads = {self.heads}.")
        if self.kv_heads < 0 or (self.kv_heads and self.heads % self.kv_heads):
            raise ValueError(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}.")
        for name in ("bias", "one_hot_lookup", "scan_layers", "fp32_logits"):
            check_option(name, getattr(self, name), "bool")
        check_option("dropout", self.dropout, "Rate")
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention = {self.attention!r} is not one of {', '.join(ATTENTIONS)}.")
        if self.dropout_at not in DROPOUTS:
            raise ValueError(f"dropout_at = {self.dropout_at!r} is not one of {', '.join(DROPOUTS)}.")

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.embed // self.heads


PRESETS = {
    "gpt_debug": GPTConfig(vocab=256, embed=128, mlp=512, layers=2, heads=8, length=64),
    "gpt2": GPTConfig(50_304, 768, 3072, 12, 12, length=1024),
    "gpt3_175b": GPTConfig(51_200, 12_288, 49_152, 96, 96),
}


def _linear(c: GPTConfig, matmuls: Matmuls, rngs: nnx.Rngs) -> Callable[..., Projection]:
    return partial(Projection, stack=c.layers, matmuls=matmuls, bias=c.bias, rngs=rngs)


class Attention(nnx.Module):
    """Causal self-attention that adds no positions: the embeddings have them."""

    def __init__(self, c: GPTConfig, context: str, *, matmuls: Matmuls = PLAIN, rngs: nnx.Rngs):
        embed, linear = {"embed": c.embed}, _linear(c, matmuls, rngs)
        queries = {"heads": c.heads, "head_dim": c.head_dim}
        keys = {"kv_heads": c.kv_heads or c.heads, "head_dim": c.head_dim}
        self.context, self.kind = context, c.attention
        self.query = linear("query", embed, queries)
        self.key = linear("key", embed, keys)
        self.value = linear("value", embed, keys)
        self.output = linear("output", queries, embed, scale=1 / math.sqrt(2 * c.layers))

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = project_each(x, self.query, self.key, self.value)
        if self.kind == "materialized":
            return self.output(materialized_attention(q, k, v))
        return self.output(causal_attention(q, k, v, self.context))


def materialized_attention(q: Queries, k: Keys, v: Keys) -> Queries:
    """Return softmax(q k^T / sqrt(head_dim)) v under a causal mask, with scores and probabilities in memory.

    Both are stored in the dtype of q, and the softmax is computed in fp32, as in the fused softmax of Megatron-LM and
    Transformer Engine: a pass reads the scores once and writes them once. The masked half of them is computed too.

    Args:
        q: [batch, length, heads, head_dim].
        k, v: [batch, length, kv_heads, head_dim]; kv_heads divides heads.
    """
    repeats = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (k, v))
    return constrain(_attend(*(constrain(x, *HEAD_AXES) for x in (q, k, v))), *HEAD_AXES)


@jax.custom_vjp
def _attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _attend_kept(q, k, v)[0]


def _attend_kept(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    # The barrier keeps the mask inside the layer: a scan would otherwise store it, as a loop invariant, at full size.
    made = jnp.einsum("bqhd,bkhd->bhqk", q, k), jnp.arange(q.shape[1]), jnp.float32(-jnp.inf)
    scores, place, hidden = jax.lax.optimization_barrier(made)
    scores = scores.astype(jnp.float32) / math.sqrt(q.shape[-1])
    probabilities = jax.nn.softmax(jnp.where(place[:, None] >= place, scores, hidden), axis=-1).astype(q.dtype)
    result = jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)
    return result, (q, k, v, probabilities, result)


def _attend_gradients(kept: tuple[jax.Array, ...], gradient: jax.Array) -> tuple[jax.Array, ...]:
    """Return the gradients of q, k and v. A row's sum of probabilities times their gradients is taken as its sum of
    outputs times their gradients (Dao, arXiv 2307.08691), which needs no pass over the scores."""
    q, k, v, probabilities, result = kept
    total = jnp.einsum("bqhd,bqhd->bhq", result, gradient, preferred_element_type=jnp.float32)[..., None]
    of_probabilities = jnp.einsum("bqhd,bkhd->bhqk", gradient, v).astype(jnp.float32)
    of_scores = probabilities.astype(jnp.float32) * (of_probabilities - total) / math.sqrt(q.shape[-1])
    of_scores = of_scores.astype(q.dtype)
    return (
        jnp.einsum("bhqk,bkhd->bqhd", of_scores, k),
        jnp.einsum("bhqk,bqhd->bkhd", of_scores, q),
        jnp.einsum("bhqk,bqhd->bkhd", probabilities, gradient),
    )


_attend.defvjp(_attend_kept, _attend_gradients)


class Block(nnx.Module):
    """One pre-norm transformer layer; its parameters are stacked over all layers until a scan takes them apart."""

    def __init__(self, c: GPTConfig, context: str, *, matmuls: Matmuls = PLAIN, rngs: nnx.Rngs):
        embed, mlp = {"embed": c.embed}, {"mlp": c.mlp}
        linear = _linear(c, matmuls, rngs)
        self.attention_norm = LayerNorm(c.embed, eps=c.norm_eps, stack=c.layers, rngs=rngs)
        self.attention = Attention(c, context, matmuls=matmuls, rngs=rngs)
        self.mlp_norm = LayerNorm(c.embed, eps=c.norm_eps, stack=c.layers, rngs=rngs)
        self.up = linear("up", embed, mlp)
        self.down = linear("down", mlp, embed, scale=1 / math.sqrt(2 * c.layers))
        self.dropout, self.drops_inputs = c.dropout, c.dropout_at == "inputs"

    def __call__(self, x: jax.Array, key: Any = None) -> jax.Array:
        if self.drops_inputs:
            x, key = dropout(x, self.dropout, key), None
        with jax.named_scope("attention"):
            branch = dropout(self.attention(self.attention_norm(x)), self.dropout, key)
            x = constrain(x + branch, *RESIDUAL_AXES)
        with jax.named_scope("mlp"):
            (hidden,) = project_each(self.mlp_norm(x), self.up)
            hidden = constrain(jax.nn.gelu(hidden), "act_batch", "act_length", "act_mlp")
            return constrain(x + dropout(self.down(hidden), self.dropout, key, 1), *RESIDUAL_AXES)


class GPT(nnx.Module):
    """A GPT: int32 tokens [batch, length] -> logits [batch, length, vocab].

    Args:
        preset: a name in PRESETS.
        rngs: source of the initial weights.
        dtype: dtype of activations and matmuls. Parameters are fp32.
        fp8: the projections of the layers multiply in fp8, see `models.fp8`; the output head does not.
        fp8_scaling: source of fp8's scales: `current`, or `delayed`, the largest numbers of previous steps.
        mxfp8: the projections multiply in MXFP8 instead, see `models.mxfp8`.
        nvfp4: the projections multiply in NVFP4 instead, only for plans, see `models.nvfp4`.
        remat: what the backward pass recomputes, see `models.remat.recompute`.
        context: how fused attention works over a cut `act_length`, see `models.attention.causal_attention`.
        overrides: fields of GPTConfig.

    Raises:
        ValueError: no such preset or field, or sizes that do not go together.
    """

    def __init__(
        self,
        preset: str = "gpt_debug",
        *,
        rngs: nnx.Rngs,
        dtype=jnp.bfloat16,
        fp8: bool = False,
        fp8_scaling: str = "current",
        mxfp8: bool = False,
        nvfp4: bool = False,
        remat="none",
        context="all_gather",
        **overrides,
    ):
        if preset not in PRESETS:
            raise ValueError(f"no GPT preset '{preset}'. Known: {', '.join(sorted(PRESETS))}.")
        fields = {f.name for f in dataclasses.fields(GPTConfig)}
        if unknown := sorted(set(overrides) - fields):
            raise ValueError(f"a GPT has no option '{unknown[0]}'. Known: {', '.join(sorted(fields))}.")
        self.config = c = dataclasses.replace(PRESETS[preset], **overrides)
        self.dtype, self.remat = jnp.dtype(dtype), check_remat(remat, context)
        self.deterministic = False  # nnx's `eval()` sets True, which means: not in training
        context, matmuls = check_context(context), Matmuls(fp8, fp8_scaling, mxfp8, nvfp4)
        table = jax.nn.initializers.normal(1 / math.sqrt(c.embed))
        self.embedding = parameter(rngs, table, (c.vocab, c.embed), ("vocab", "embed"), stack=None)
        self.positions = parameter(rngs, table, (c.length, c.embed), (None, "embed"), stack=None)
        self.layers = Block(c, context, matmuls=matmuls, rngs=rngs)
        self.norm = LayerNorm(c.embed, eps=c.norm_eps, rngs=rngs)
        if not c.tied:
            self.head = Projection("head", {"embed": c.embed}, {"vocab": c.vocab}, rngs=rngs)

    def __call__(self, tokens: Int[Array, "batch length"], key: Any = None) -> Float[Array, "batch length vocab"]:
        """Return logits; `key` is the random key of training's dropout."""
        key = training_key(self.config.dropout, self.deterministic, key)
        if tokens.shape[1] > self.config.length:
            raise ValueError(f"{tokens.shape[1]} tokens are more than the {self.config.length} positions of this GPT.")
        with jax.named_scope("embedding"):
            positions = constrain(self.positions.get_value().astype(self.dtype), None, None)[: tokens.shape[1]]
            rows = lookup(self.embedding.get_value(), tokens, self.dtype, one_hot=self.config.one_hot_lookup)
            x = constrain(rows + positions, *RESIDUAL_AXES)
            if self.config.dropout_at == "branches":
                x = dropout(x, self.config.dropout, key, self.config.layers)
        with jax.named_scope("layers"):
            x = self._run_layers(x, key)
        dtype = jnp.float32 if self.config.fp32_logits else self.dtype
        with jax.named_scope("logits"):
            x = for_matmuls(self.norm(x))
            if self.config.tied:
                logits = project(x, self.embedding.get_value().T, 1, dtype)
            else:
                logits = self.head(x, out_dtype=dtype)
            return constrain(logits, "act_batch", "act_length", "act_vocab")

    def _run_layers(self, x: jax.Array, key: Any) -> jax.Array:
        graph, stacked = nnx.split(self.layers)

        def layer(x, of_layer):
            parameters, key = of_layer
            return nnx.merge(graph, parameters)(x, key), None

        return run_layers(
            layer, x, (stacked, layer_keys(key, self.config.layers)), self.remat, self.config.scan_layers
        )[0]

    def matmul_parameters(self) -> int:
        """Return N in model FLOP = 6 N tokens: parameters of matmuls, a tied table once and look-ups not at all."""
        c = self.config
        attention = c.embed * c.head_dim * 2 * (c.heads + (c.kv_heads or c.heads))
        return c.layers * (attention + 2 * c.embed * c.mlp) + c.embed * c.vocab

    def attention_shape(self) -> tuple[int, int, int]:
        """Return (L, heads, head_dim) in attention FLOP = 12 L heads head_dim T tokens, for L layers and length T."""
        return self.config.layers, self.config.heads, self.config.head_dim
