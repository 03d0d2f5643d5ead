"""Mixtral-like mixture of experts as a Flax nnx module: a Llama whose feed-forward block is k of many experts, chosen
for each token by a router (Shazeer et al., 2017; Jiang et al., 2024).

An experiment names it `models.moe:Moe` with a preset, and `[train] loss = "models.moe:next_token_loss"`, which adds the
losses that keep the experts evenly loaded. Tokens travel to their experts by `meshkit.parallel.expert`; everything
else is `models.llama`'s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from meshkit.parallel.expert import GATHERED, expert_layer
from meshkit.sharding import constrain, current_scope, shard_over
from models.attention import check_context, token_order
from models.embedding import lookup
from models.hf import Layout, moe_layout
from models.layers import PROJECTION, Projection, RMSNorm, parameter
from models.llama import RESIDUAL_AXES, Attention, LlamaConfig, SwiGLU, _check_option, _depth_scale, _suggest
from models.llama import _for_matmuls as for_matmuls
from models.remat import check_remat, recompute


@dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """The shape of a mixture of experts; `mlp` is the width of one expert.

    Attributes:
        experts, experts_per_token: how many there are, and k, how many a token goes to.
        shared_experts: width, in experts, of a dense block that every token passes as well (Dai et al., 2024).
        capacity_factor: slots of an expert, on each sending GPU, over those of an even load; rows above are dropped.
            None drops nothing ("dropless").
        buffer_factor: bounds the dropless buffers to that many times an even load; None is the worst case.
        load_balance_weight: of the load-balance loss.
        z_loss_weight: of the router z-loss (Zoph et al., 2022).
    """

    experts: int = 8
    experts_per_token: int = 2
    shared_experts: int = 0
    capacity_factor: float | None = None
    buffer_factor: float | None = None
    load_balance_weight: float = 0.01
    z_loss_weight: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"a token cannot go to {self.experts_per_token} of {self.experts} experts.")
        if self.capacity_factor is not None and self.buffer_factor is not None:
            raise ValueError("capacity_factor bounds the rows of each expert already: leave buffer_factor out.")


MIXTRAL = {"rope_theta": 1e6, "experts": 8, "experts_per_token": 2, "load_balance_weight": 0.02}
PRESETS = {
    "moe_debug": MoeConfig(256, 64, 128, 2, 4, 2, 16, experts=8, experts_per_token=2),
    "mixtral_8x7b": MoeConfig(32_000, 4096, 14_336, 32, 32, 8, 128, **MIXTRAL),
    "mixtral_8x22b": MoeConfig(32_000, 6144, 16_384, 56, 48, 8, 128, **MIXTRAL),
}


class Router(nnx.Module):
    """Scores of the experts for each token, in fp32: a bf16 score would tie and flip choices."""

    def __init__(self, c: MoeConfig, *, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(1 / math.sqrt(c.embed))
        self.kernel = parameter(rngs, init, (c.embed, c.experts), ("embed", None), stack=c.layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = constrain(self.kernel.get_value().astype(jnp.float32), None, None)
        scores = jnp.einsum("bld,de->ble", x.astype(jnp.float32), kernel, precision=jax.lax.Precision.HIGHEST)
        return constrain(scores, "act_batch", "act_length", None)


class Experts(nnx.Module):
    """The kernels of all experts, each a SwiGLU."""

    def __init__(self, c: MoeConfig, *, rngs: nnx.Rngs):
        def kernel(inner, outer, scale=1.0):
            init = jax.nn.initializers.normal(scale / math.sqrt(inner[1]))
            shape, axes = (c.experts, inner[1], outer[1]), ("experts", inner[0], outer[0])
            return parameter(rngs, init, shape, axes, stack=c.layers)

        embed, mlp = ("embed", c.embed), ("mlp", c.mlp)
        self.gate, self.up = kernel(embed, mlp), kernel(embed, mlp)
        self.down = kernel(mlp, embed, _depth_scale(c))


class MoeMlp(nnx.Module):
    """Router, experts, and the shared experts if there are any."""

    def __init__(self, c: MoeConfig, *, rngs: nnx.Rngs):
        self.config = c
        self.router = Router(c, rngs=rngs)
        self.experts = Experts(c, rngs=rngs)
        if c.shared_experts:
            self.shared = SwiGLU(dataclasses.replace(c, mlp=c.shared_experts * c.mlp), rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        c = self.config
        with jax.named_scope("router"):
            scores = self.router(x)
            choices = choose(scores, c.experts_per_token)
            chosen = jax.nn.one_hot(choices, c.experts, dtype=jnp.float32)
            weights = jax.nn.softmax(jnp.sum(scores[..., None, :] * chosen, axis=-1), axis=-1)
        kernels = tuple(k.get_value() for k in (self.experts.gate, self.experts.up, self.experts.down))
        y, kept = expert_layer(
            x,
            weights,
            choices,
            kernels,
            capacity_factor=c.capacity_factor,
            buffer_factor=c.buffer_factor,
            saved_name=PROJECTION,
        )
        if c.shared_experts:
            y = y + self.shared(x)
        return y, routing_values(scores, chosen, kept)


def choose(scores: jax.Array, k: int) -> jax.Array:
    """The k experts with the highest scores of each token, int32 [batch, length, k]; equal ones in order.

    Each GPU sorts its own tokens: the partitioner flattens batch and length for a sort, and gathers both to do so.
    """
    axes, scope = ("act_batch", "act_length", None), current_scope()

    def largest(scores: jax.Array) -> jax.Array:
        return jax.lax.top_k(scores, k)[1]

    if scope is not None and all(n % scope.shard_count(name) == 0 for n, name in zip(scores.shape, axes)):
        largest = shard_over(largest, [axes], axes)
    return largest(jax.lax.stop_gradient(scores))


def routing_values(scores: jax.Array, chosen: jax.Array, kept: jax.Array) -> dict[str, jax.Array]:
    """How evenly one layer loads its experts, each a mean over all tokens.

    `load_balance_loss` is E sum_e f_e P_e, with f_e the share of the choices that fell on expert e and P_e its mean
    probability; 1 when even (Fedus et al., 2022, eq. 4, with k choices). `router_z_loss` is the mean square of the
    scores' logsumexp.

    Args:
        scores: [batch, length, experts].
        chosen: one-hot [batch, length, k, experts].
        kept: bool [batch, length, k].
    """
    share = jnp.mean(chosen, axis=(0, 1, 2))
    probability = jnp.mean(jax.nn.softmax(scores, axis=-1), axis=(0, 1))
    return {
        "load_balance_loss": scores.shape[-1] * jnp.sum(share * probability),
        "router_z_loss": jnp.mean(jax.nn.logsumexp(scores, axis=-1) ** 2),
        "dropped_fraction": 1.0 - jnp.mean(kept.astype(jnp.float32)),
        "largest_expert_share": jnp.max(share),
    }


class MoeBlock(nnx.Module):
    """One pre-norm layer: attention, then the experts."""

    def __init__(self, c: MoeConfig, context: str, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(c.embed, eps=c.norm_eps, stack=c.layers, rngs=rngs)
        self.attention = Attention(c, context, rngs=rngs)
        self.mlp_norm = RMSNorm(c.embed, eps=c.norm_eps, stack=c.layers, rngs=rngs)
        self.moe = MoeMlp(c, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        with jax.named_scope("attention"):
            x = constrain(x + self.attention(self.attention_norm(x)), *RESIDUAL_AXES)
        with jax.named_scope("moe"):
            y, values = self.moe(for_matmuls(self.mlp_norm(x)))
            return constrain(x + y, *RESIDUAL_AXES), values


class Moe(nnx.Module):
    """A mixture of experts: int32 tokens [batch, length] -> fp32 logits [batch, length, vocab].

    Args:
        preset: a name in PRESETS.
        rngs: source of the initial weights.
        dtype: of activations and matmuls; parameters are fp32, and the router computes in fp32.
        remat: what the backward pass recomputes, see `models.remat.recompute`.
        context: how attention works over a cut `act_length`, see `models.attention.causal_attention`.
        overrides: fields of MoeConfig.

    Raises:
        ValueError: no such preset or field, or sizes that do not go together.
    """

    def __init__(
        self,
        preset: str = "moe_debug",
        *,
        rngs: nnx.Rngs,
        dtype=jnp.bfloat16,
        remat="none",
        context="all_gather",
        **overrides,
    ):
        self.config = c = make_config(preset, **overrides)
        self.dtype, self.remat, self.context = jnp.dtype(dtype), check_remat(remat, context), check_context(context)
        self.deterministic = False  # True after `eval()`, by which nnx means: not training
        self.embedding = parameter(
            rngs, jax.nn.initializers.normal(1.0), (c.vocab, c.embed), ("vocab", "embed"), stack=None
        )
        self.layers = MoeBlock(c, context, rngs=rngs)
        self.norm = RMSNorm(c.embed, eps=c.norm_eps, rngs=rngs)
        self.head = Projection("head", {"embed": c.embed}, {"vocab": c.vocab}, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.with_routing(tokens)[0]

    def with_routing(self, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Logits, and `routing_values` averaged over the layers."""
        order = token_order(self.context, tokens.shape[1])
        with jax.named_scope("embedding"):
            tokens = order.enter(tokens, "act_batch", "act_length")
            x = constrain(lookup(self.embedding.get_value(), tokens, self.dtype), *RESIDUAL_AXES)
        with jax.named_scope("layers"):
            x, values = self._scan_layers(x)
        with jax.named_scope("logits"):
            x = order.leave(for_matmuls(self.norm(x)), "act_batch", "act_length", "act_embed")
            logits = self.head(x, out_dtype=jnp.float32)
            logits = constrain(logits, "act_batch", "act_length", "act_vocab")
        return logits, {name: jnp.mean(value) for name, value in values.items()}

    def _scan_layers(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        graph, stacked = nnx.split(self.layers)

        def layer(x, parameters):
            return nnx.merge(graph, parameters)(x)

        if self.remat == "none":  # keeps all, but the kernels of experts in pieces: they are gathered again
            policy = jax.checkpoint_policies.save_anything_except_these_names(GATHERED)
            return jax.lax.scan(jax.checkpoint(layer, policy=policy, prevent_cse=False), x, stacked)
        return jax.lax.scan(recompute(layer, self.remat), x, stacked)

    def auxiliary_loss(self, values: Mapping[str, jax.Array]) -> jax.Array:
        """What training adds to the loss per token, of the values that `with_routing` gives."""
        c = self.config
        return c.load_balance_weight * values["load_balance_loss"] + c.z_loss_weight * values["router_z_loss"]

    def matmul_parameters(self) -> int:
        """N of 6 N tokens: parameters that multiply a token's activations; of the experts those it goes to."""
        c = self.config
        attention = c.embed * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
        active = 3 * c.embed * c.mlp * (c.experts_per_token + c.shared_experts) + c.embed * c.experts
        return c.layers * (attention + active) + c.embed * c.vocab

    def hf_layout(self) -> Layout:
        """How the parameters correspond to those of Hugging Face's `MixtralForCausalLM`."""
        return moe_layout(self.config)

    def attention_shape(self) -> tuple[int, int, int]:
        """(layers, heads, head_dim) of 12 L heads head_dim T tokens."""
        return self.config.layers, self.config.heads, self.config.head_dim


def next_token_loss(model: Moe, batch: Mapping[str, jax.Array], rng: jax.Array):
    """Next-token cross-entropy plus, in training, the auxiliary losses; routing values as metrics.

    A sum over tokens like the cross-entropy: the auxiliary losses, each a mean over the tokens of a micro-batch, count
    once for each of its (weighted) tokens.
    """
    del rng
    logits, values = model.with_routing(batch["tokens"])
    weight = jnp.sum(batch["weights"])
    loss = jnp.sum(_cross_entropy(logits, batch["targets"]) * batch["weights"])
    if not model.deterministic:
        loss = loss + weight * model.auxiliary_loss(values)
    return loss, weight, values


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """logsumexp(logits) - logits[target]; by comparison, not by index, so that a cut vocabulary needs no gather."""
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)


def make_config(preset: str, **overrides) -> MoeConfig:
    """A preset with some fields replaced.

    Raises:
        ValueError: no such preset or field, or a value of another type.
    """
    if preset not in PRESETS:
        raise ValueError(f"no Moe preset '{preset}'.{_suggest(preset, PRESETS)}")
    types = {f.name: str(f.type) for f in dataclasses.fields(MoeConfig)}
    checked = {}
    for name, value in overrides.items():
        if name not in types or name == "tied":
            raise ValueError(f"a Moe has no option '{name}'.{_suggest(name, types.keys() - {'tied'})}")
        may_be_zero = name in ("shared_experts", "load_balance_weight", "z_loss_weight")
        zero = may_be_zero and not isinstance(value, bool) and value == 0
        checked[name] = value if zero else _check_option(name, value, types[name].removesuffix(" | None"))
    return dataclasses.replace(PRESETS[preset], **checked)
