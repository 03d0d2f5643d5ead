"""Mixtral's and Qwen3's mixture of experts as a Flax nnx module: a Llama in which a router chooses k of many experts as
the feed-forward block of each token (Shazeer et al., 2017; Jiang et al., 2024; Yang et al., 2025).

An experiment names it `models.moe:Moe` with a preset, and `[train] loss = "models.moe:next_token_loss"`, which adds the
losses that keep the experts evenly loaded. `meshkit.parallel.expert` sends tokens to their experts. Everything else
comes from `models.llama`.
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
from jaxtyping import Array, Bool, Float, Int

from meshkit.parallel.expert import GATHERED, expert_layer
from meshkit.parallel.pipeline import StageContext
from meshkit.sharding import constrain, current_scope, shard_over
from models.attention import check_context, token_order
from models.embedding import lookup
from models.hf import Layout, moe_layout
from models.layers import PROJECTION, RESIDUAL_AXES, Projection, RMSNorm, depth_scale, for_matmuls, parameter
from models.llama import Attention, Block, LlamaConfig, SwiGLU
from models.losses import next_token_losses
from models.options import check_option, suggest
from models.remat import check_remat, recompute, run_layers


@dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """The shape of a mixture of experts; `mlp` is the width of one expert.

    Attributes:
        experts, experts_per_token: number of experts, and k, the number that each token goes to.
        shared_experts: width, in experts, of a dense block that every token also passes through (Dai et al., 2024).
        capacity_factor: an expert's slots on each sending GPU, as a multiple of an even load; rows beyond the slots are
            dropped. None drops nothing ("dropless").
        buffer_factor: size of the dropless buffers as a multiple of an even load; None is the worst case.
        hierarchical_dispatch: sends one copy of a token to each NVLink domain that holds one of its experts, over the
            outer of two mesh axes of the experts; the inner axis then carries the copies to the experts.
        dispatch_parts: in how many parts a GPU exchanges its tokens; exchanges of one part can run during another's
            matmuls.
        load_balance_weight: weight of the load-balance loss.
        z_loss_weight: weight of the router z-loss (Zoph et al., 2022).
        dense_layers: number of layers without experts before the `layers` with experts (Dai et al., 2024).
        dense_mlp: width of the dense layers' feed-forward block; None makes it as wide as all experts of a token.
    """

    experts: int = 8
    experts_per_token: int = 2
    shared_experts: int = 0
    capacity_factor: float | None = None
    buffer_factor: float | None = None
    hierarchical_dispatch: bool = False
    dispatch_parts: int = 1
    load_balance_weight: float = 0.01
    z_loss_weight: float = 0.0
    dense_layers: int = 0
    dense_mlp: int | None = None

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"a token cannot go to {self.experts_per_token} of {self.experts} experts.")
        if self.capacity_factor is not None and self.buffer_factor is not None:
            raise ValueError("capacity_factor bounds the rows of each expert already: leave buffer_factor out.")

    @property
    def stacked(self) -> int:
        """How many blocks with experts a scan runs: the leading dim of their parameters."""
        return self.layers

    @property
    def choice_groups(self) -> tuple[int, int]:
        """How many groups of neighbouring experts there are, and how many of them a token may choose from."""
        return 1, 1

    @property
    def dense(self) -> LlamaConfig:
        """Config of the layers without experts, which are a Llama's."""
        width = self.dense_mlp or self.mlp * (self.experts_per_token + self.shared_experts)
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(LlamaConfig)}
        return LlamaConfig(**{**fields, "layers": self.dense_layers, "mlp": width})


OF_LLAMA = frozenset({"tied", "dropout"})  # fields of LlamaConfig that a Moe does not have
MIXTRAL = {"rope_theta": 1e6, "experts": 8, "experts_per_token": 2, "load_balance_weight": 0.02}
QWEN3 = {"kv_heads": 4, "head_dim": 128, "rope_theta": 1e6, "norm_eps": 1e-6, "qk_norm": True}
QWEN3 |= {"experts": 128, "experts_per_token": 8, "load_balance_weight": 1e-3}
PRESETS = {
    "moe_debug": MoeConfig(256, 64, 128, 2, 4, 2, 16, experts=8, experts_per_token=2),
    "mixtral_8x7b": MoeConfig(32_000, 4096, 14_336, 32, 32, 8, 128, **MIXTRAL),
    "mixtral_8x22b": MoeConfig(32_000, 6144, 16_384, 56, 48, 8, 128, **MIXTRAL),
    "qwen3_30b_a3b": MoeConfig(151_936, 2048, 768, 48, 32, **QWEN3),
    "qwen3_235b_a22b": MoeConfig(151_936, 4096, 1536, 94, 64, **QWEN3),
}


class Router(nnx.Module):
    """A router that scores the experts for each token in fp32: bf16 scores would tie and flip choices."""

    def __init__(self, c: MoeConfig, *, rngs: nnx.Rngs):
        init = jax.nn.initializers.normal(1 / math.sqrt(c.embed))
        self.kernel = parameter(rngs, init, (c.embed, c.experts), ("embed", None), stack=c.stacked)

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
            return parameter(rngs, init, shape, axes, stack=c.stacked)

        embed, mlp = ("embed", c.embed), ("mlp", c.mlp)
        self.gate, self.up = kernel(embed, mlp), kernel(embed, mlp)
        self.down = kernel(mlp, embed, depth_scale(c.layers))

    def layer_options(self) -> dict[str, Any]:
        """Return the further arguments of `expert_layer` about the experts, besides their kernels."""
        return {}


class MoeMlp(nnx.Module):
    """Router, experts, and the shared experts if there are any."""

    router_class: Any = Router
    experts_class: Any = Experts

    def __init__(self, c: MoeConfig, *, rngs: nnx.Rngs):
        self.config = c
        self.router = self.router_class(c, rngs=rngs)
        self.experts = self.experts_class(c, rngs=rngs)
        if c.shared_experts:
            self.shared = SwiGLU(dataclasses.replace(c, mlp=c.shared_experts * c.mlp), rngs=rngs)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Return each token's scores of all experts, its choices, the choices as one-hot, and their weights."""
        c = self.config
        scores = self.router(x)
        choices = choose(scores, c.experts_per_token)
        chosen = jax.nn.one_hot(choices, c.experts, dtype=jnp.float32)
        weights = jax.nn.softmax(jnp.sum(scores[..., None, :] * chosen, axis=-1), axis=-1)
        return scores, choices, chosen, weights

    def values(self, scores: jax.Array, chosen: jax.Array, kept: jax.Array) -> dict[str, jax.Array]:
        """Return `routing_values` for the results of `route`."""
        return routing_values(scores, chosen, kept)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        c = self.config
        with jax.named_scope("router"):
            scores, choices, chosen, weights = self.route(x)
        kernels = tuple(k.get_value() for k in (self.experts.gate, self.experts.up, self.experts.down))
        y, kept = expert_layer(
            x,
            weights,
            choices,
            kernels,
            capacity_factor=c.capacity_factor,
            buffer_factor=c.buffer_factor,
            groups=c.choice_groups if c.hierarchical_dispatch else None,
            parts=c.dispatch_parts,
            saved_name=PROJECTION,
            **self.experts.layer_options(),
        )
        if c.shared_experts:
            y = y + self.shared(x)
        return y, self.values(scores, chosen, kept)


def choose(
    scores: Float[Array, "batch length experts"], k: int, groups: int = 1, groups_per_token: int = 1
) -> Int[Array, "batch length {k}"]:
    """Return the k experts with the highest scores of each token; of equal scores, the lower index comes first.

    With groups of neighbouring experts, a token chooses only within its best groups, which are those with the highest
    sum of a group's two highest scores (DeepSeek-AI, 2024).

    Each GPU sorts its own tokens: the partitioner would flatten batch and length for a sort, and gather both.
    """
    axes, scope = ("act_batch", "act_length", None), current_scope()

    def largest(scores: jax.Array) -> jax.Array:
        if groups > groups_per_token:
            grouped = scores.reshape(*scores.shape[:-1], groups, -1)
            best = jax.lax.top_k(jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1), groups_per_token)[1]
            taken = jnp.any(best[..., None] == jnp.arange(groups), axis=-2)
            scores = jnp.where(taken[..., None], grouped, -jnp.inf).reshape(scores.shape)
        return jax.lax.top_k(scores, k)[1]

    if scope is not None and all(n % scope.shard_count(name) == 0 for n, name in zip(scores.shape, axes)):
        largest = shard_over(largest, [axes], axes)
    return largest(jax.lax.stop_gradient(scores))


def routing_values(
    scores: Float[Array, "batch length experts"],
    chosen: Float[Array, "batch length k experts"],
    kept: Bool[Array, "batch length k"],
) -> dict[str, Float[Array, ""]]:
    """Return how evenly one layer loads its experts, from means over all tokens.

    `load_balance_loss` is E sum_e f_e P_e for E experts, where f_e is the share of the choices that went to expert e
    and P_e the expert's mean probability. It is 1 when even (Fedus et al., 2022, eq. 4, with k choices).
    `router_z_loss` is the mean square of the scores' logsumexp.

    Args:
        scores: the router's scores.
        chosen: the choices as one-hot.
        kept: whether each choice was kept; the others were dropped.
    """
    means = {
        "share": jnp.mean(chosen, axis=(0, 1, 2)),
        "probability": jnp.mean(jax.nn.softmax(scores, axis=-1), axis=(0, 1)),
        "z": jnp.mean(jax.nn.logsumexp(scores, axis=-1) ** 2),
        "kept": jnp.mean(kept.astype(jnp.float32)),
    }
    axes = axes_of_shared_tokens()
    means = jax.lax.pmean(means, axes) if axes else means
    return {
        "load_balance_loss": scores.shape[-1] * jnp.sum(means["share"] * means["probability"]),
        "router_z_loss": means["z"],
        "dropped_fraction": 1.0 - means["kept"],
        "largest_expert_share": jnp.max(means["share"]),
    }


def axes_of_shared_tokens() -> tuple[str, ...]:
    """Return the mesh axes of experts and length over which a pipeline cuts the tokens of one micro-batch by hand.

    Over the other axes of the batch each GPU balances its own tokens, as with accumulated micro-batches.
    """
    scope = current_scope()
    if scope is None or scope.whole is None:
        return ()
    (experts,) = scope.whole.spec_for(("act_experts",), kind="activations")
    shared = tuple(a for a in scope.manual_axes("act_batch") if a in experts)
    return shared + scope.manual_axes("act_length")


class MoeBlock(nnx.Module):
    """One pre-norm layer: attention, then the experts."""

    attention_class: Any = Attention
    mlp_class: Any = MoeMlp

    def __init__(self, c: MoeConfig, context: str, *, rngs: nnx.Rngs, **of_attention):
        norm = partial(RMSNorm, c.embed, eps=c.norm_eps, stack=c.stacked, rngs=rngs)
        self.attention_norm, self.attention = norm(), self.attention_class(c, context, rngs=rngs, **of_attention)
        self.mlp_norm = norm()
        self.moe = self.mlp_class(c, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        with jax.named_scope("attention"):
            x = constrain(x + self.attention(self.attention_norm(x)), *RESIDUAL_AXES)
        with jax.named_scope("moe"):
            y, values = self.moe(for_matmuls(self.mlp_norm(x)))
            return constrain(x + y, *RESIDUAL_AXES), values


class Moe(nnx.Module):
    """A mixture of experts: int32 tokens [batch, length] -> logits [batch, length, vocab].

    Args:
        preset: a name in PRESETS.
        rngs: source of the initial weights.
        dtype: dtype of activations and matmuls. Parameters are fp32, and the router computes in fp32.
        remat: what the backward pass recomputes, see `models.remat.recompute`.
        context: how attention works over a cut `act_length`, see `models.attention.causal_attention`.
        overrides: fields of MoeConfig.

    Raises:
        ValueError: no such preset or field, or sizes that do not go together.
    """

    dense_block: Any = Block
    expert_block: Any = MoeBlock
    """Class of the layers with experts; a scan runs `config.stacked` of them."""

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
        self.config = c = self.make_config(preset, **overrides)
        self.dtype, self.remat, self.context = jnp.dtype(dtype), check_remat(remat, context), check_context(context)
        self.deterministic = False  # nnx's `eval()` sets True, which means: not in training
        self.embedding = parameter(
            rngs, jax.nn.initializers.normal(1.0), (c.vocab, c.embed), ("vocab", "embed"), stack=None
        )
        if c.dense_layers:
            self.prefix = self.dense_block(c.dense, context, rngs=rngs)
            name_apart(self.prefix, "dense_layers")
        self.layers = self.expert_block(c, context, rngs=rngs)
        self.norm = RMSNorm(c.embed, eps=c.norm_eps, rngs=rngs)
        self.head = Projection("head", {"embed": c.embed}, {"vocab": c.vocab}, rngs=rngs)

    @staticmethod
    def make_config(preset: str, **overrides) -> Any:
        """Return `make_config` for the presets of this class."""
        return make_config(preset, **overrides)

    def __call__(self, tokens: Int[Array, "batch length"]) -> Float[Array, "batch length vocab"]:
        return self.with_routing(tokens)[0]

    def with_routing(self, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return logits, and `routing_values` averaged over the layers."""
        x, values = self.hidden(tokens)
        return self.last(x), values

    def hidden(self, tokens: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the output of the layers for `last`, and `routing_values` averaged over the layers."""
        x = self.first({"tokens": tokens})
        with jax.named_scope("layers"):
            graph, stacked = nnx.split(self.layers)
            x, values = self._scan(graph, x, stacked)
        return x, {name: jnp.mean(value) for name, value in values.items()}

    def first(self, batch: Mapping[str, jax.Array], ctx: StageContext | None = None) -> jax.Array:
        """Return the input of the layers with experts: activations [batch, length, embed].

        In a pipeline this is the part before the first stage. All stages take part in it, for every microbatch.
        """
        x = self.embed(batch["tokens"], ctx)
        if not self.config.dense_layers:
            return x
        with jax.named_scope("prefix"):
            graph, stacked = nnx.split(self.prefix)
            layer = lambda x, one: (nnx.merge(graph, one)(x), None)
            return run_layers(layer, x, stacked, self.remat, self.config.scan_layers)[0]

    def embed(self, tokens: jax.Array, ctx: StageContext | None = None) -> jax.Array:
        """Return the embeddings of tokens [batch, length], in the order in which layers see the tokens."""
        order = token_order(self.context, tokens.shape[1])
        with jax.named_scope("embedding"):
            tokens = order.enter(tokens, "act_batch", "act_length")
            x = lookup(self.embedding.get_value(), tokens, self.dtype, self.config.vocab, ctx and ctx.axis)
            return constrain(x, *RESIDUAL_AXES)

    def layer(self, parameters: Mapping[str, Any], x: jax.Array, ctx: StageContext, key: Any = None):
        """Run one layer of a pipeline's stage on parameters in a nested dict; return x and `routing_values`."""
        del ctx, key
        self.config.check_pipeline()
        graph, _ = nnx.split(self.layers)
        return self.one_layer(graph)(x, nnx.State(parameters))

    def last(
        self, x: Float[Array, "batch length embed"], ctx: StageContext | None = None
    ) -> Float[Array, "batch length some_vocab"]:
        """Return the logits of the layers' output; in a pipeline, those of the stage's part of the vocabulary."""
        del ctx
        return self.logits(self.norm(x))

    def logits(self, x: Float[Array, "batch length embed"]) -> Float[Array, "batch length some_vocab"]:
        """Return the logits of hidden states that are normalized already."""
        order, dtype = token_order(self.context, x.shape[1]), jnp.float32 if self.config.fp32_logits else self.dtype
        with jax.named_scope("logits"):
            x = order.leave(for_matmuls(x), "act_batch", "act_length", "act_embed")
            return constrain(self.head(x, out_dtype=dtype), "act_batch", "act_length", "act_vocab")

    def _scan(self, graph: Any, x: jax.Array, stacked: Any):
        if self.remat == "none":
            one = self.one_layer(graph, self.config.scan_layers)
            return jax.lax.scan(one, x, stacked, unroll=not self.config.scan_layers)
        return run_layers(self._plain_layer(graph), x, stacked, self.remat, self.config.scan_layers)

    @staticmethod
    def _plain_layer(graph: Any):
        return lambda x, parameters, *more: nnx.merge(graph, parameters)(x, *more)

    def one_layer(self, graph: Any, scanned: bool = True):
        """Return a layer, recomputed as `remat` says: (x, parameters, further arguments) -> (x, values).

        Args:
            graph: nnx graph of a layer with experts.
            scanned: whether the layer is the body of a loop over layers.
        """
        layer = self._plain_layer(graph)
        if self.remat == "none":  # keeps all but the gathered kernels of experts, which are gathered again
            policy = jax.checkpoint_policies.save_anything_except_these_names(GATHERED)
            return jax.checkpoint(layer, policy=policy, prevent_cse=not scanned)
        return recompute(layer, self.remat, scanned)

    def further_loss(self, x: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        """Return a sum, from the layers' output, that training adds to the sum of next-token losses, and metrics."""
        del x, batch
        return 0.0, {}

    def auxiliary_loss(self, values: Mapping[str, jax.Array]) -> jax.Array:
        """Return what training adds to the loss per token, from the values that `with_routing` returns."""
        c = self.config
        return c.load_balance_weight * values["load_balance_loss"] + c.z_loss_weight * values["router_z_loss"]

    def matmul_parameters(self) -> int:
        """Return N in model FLOP = 6 N tokens: parameters that multiply a token, so of all experts only its own."""
        c = self.config
        dense = c.dense_layers * (self.attention_parameters() + 3 * c.embed * c.dense.mlp) if c.dense_layers else 0
        return c.layers * self.active_parameters() + dense + c.embed * c.vocab

    def active_parameters(self) -> int:
        """Return the number of parameters of one layer with experts that multiply a token's activations."""
        c = self.config
        experts = 3 * c.embed * c.mlp * (c.experts_per_token + c.shared_experts)
        return self.attention_parameters() + experts + c.embed * c.experts

    def attention_parameters(self) -> int:
        """Return the number of parameters of one layer's attention."""
        c = self.config
        return c.embed * c.head_dim * (2 * c.heads + 2 * c.kv_heads)

    def hf_layout(self) -> Layout:
        """Return how the parameters correspond to Hugging Face's `MixtralForCausalLM` or `Qwen3MoeForCausalLM`; both
        have experts in every layer."""
        if self.config.dense_layers:
            raise ValueError("Mixtral and Qwen3 have experts in every layer: no layout for dense_layers.")
        return moe_layout(self.config)

    def attention_shape(self) -> tuple[int, int, int]:
        """Return (L, heads, head_dim) in attention FLOP = 12 L heads head_dim T tokens, for L layers and length T."""
        c = self.config
        return c.layers + c.dense_layers, c.heads, c.head_dim


def name_apart(block: nnx.Module, name: str) -> None:
    """Rename the stacked dim of a block's parameters from `layers` to `name`: a pipeline must not cut them."""
    for _, leaf in nnx.iter_graph(block):
        if isinstance(leaf, nnx.Param):
            leaf.set_metadata(out_sharding=(name, *leaf.get_metadata()["out_sharding"][1:]))


class NextTokenLoss:
    """Next-token cross-entropy plus, in training, the auxiliary losses. Routing values are metrics.

    The loss is a sum over tokens. An auxiliary loss is a mean over the tokens of a micro-batch, so it is multiplied by
    the sum of their weights. In a pipeline each layer adds its own share on its stage (`of_layer`).
    """

    def __call__(self, model: Moe, batch: Mapping[str, jax.Array], rng: jax.Array):
        del rng
        x, values = model.hidden(batch["tokens"])
        loss_sum, weight, metrics = self.of_hidden(model, x, batch)
        if not model.deterministic:
            loss_sum = loss_sum + weight * model.auxiliary_loss(values)
        return loss_sum, weight, {**values, **metrics}

    def of_hidden(self, model: Moe, x: jax.Array, batch: Mapping[str, jax.Array], ctx: StageContext | None = None):
        """Return loss_sum, weight and metrics of the last layer's output; `ctx` is given in a pipeline."""
        losses = next_token_losses(model.last(x, ctx), batch["targets"], model.config.vocab, ctx)
        further, metrics = (0.0, {}) if model.deterministic else model.further_loss(x, batch)
        return jnp.sum(losses * batch["weights"]) + further, jnp.sum(batch["weights"]), metrics

    def of_layer(self, model: Moe, values: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]):
        """Return loss_sum and metrics of one layer's values, to be summed over the layers."""
        share = 1 / model.config.stacked
        metrics = {name: share * value for name, value in values.items()}
        return 0.0 if model.deterministic else jnp.sum(batch["weights"]) * model.auxiliary_loss(metrics), metrics


next_token_loss = NextTokenLoss()


def make_config(
    preset: str,
    presets: Mapping[str, MoeConfig] = PRESETS,
    absent: frozenset[str] = OF_LLAMA,
    kind: str = "Moe",
    **overrides,
) -> Any:
    """Return a preset with some fields replaced.

    Args:
        preset: a name in `presets`.
        presets: presets of the model's class.
        absent: fields of the config that the model does not have.
        kind: name of the model in messages.
        overrides: fields to replace.

    Raises:
        ValueError: no such preset or field, or a value of another type.
    """
    if preset not in presets:
        raise ValueError(f"no {kind} preset '{preset}'.{suggest(preset, presets)}")
    types = {f.name: str(f.type) for f in dataclasses.fields(presets[preset])}
    zeros = ("shared_experts", "load_balance_weight", "z_loss_weight", "dense_layers", "mtp_depth", "mtp_weight")
    checked = {}
    for name, value in overrides.items():
        if name not in types or name in absent:
            raise ValueError(f"a {kind} has no option '{name}'.{suggest(name, types.keys() - absent)}")
        zero = name in zeros and not isinstance(value, bool) and value == 0
        checked[name] = value if zero else check_option(name, value, types[name].removesuffix(" | None"))
    return dataclasses.replace(presets[preset], **checked)
