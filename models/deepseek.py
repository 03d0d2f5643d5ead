"""DeepSeek-V3 as a Flax nnx module: a mixture of experts (`models.moe`) with latent attention and many small experts. A
token chooses them in groups by sigmoid scores, and a bias keeps them evenly loaded (DeepSeek-AI, 2024, arXiv
2412.19437).

An experiment names it `models.deepseek:DeepSeek` with a preset, and `[train] loss = "models.moe:next_token_loss"`,
which adds the balance loss of each sequence.

**Balance.** The bias of an expert is added to its score only for the choice of experts. A step moves the bias by
`balance_step`: down if the expert had more than its even share of the step's choices, up if it had less. The bias is a
parameter without a gradient of its own. In place of the gradient, the backward pass returns the load beyond an even
load, which is then summed over micro-batches, replicas and stages like gradients. `sign_step` in the bias's metadata
makes the training step move the bias by the sign of that sum, without the optimizer
(`meshkit.step.train_step.sign_steps`).

**Multi-token prediction** (section 2.2). With `mtp_depth` = D, training adds D modules behind the layers. Module k
turns the hidden state of position i and the embedding of token i + k into the hidden state from which the shared output
head predicts token i + k + 1. The input of module 1 is normalized as for the head, as in vLLM and SGLang
(`DeepseekV2Model.forward` in their `deepseek_v2.py`). Evaluation and logits do not use the modules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from meshkit.sharding import constrain, current_scope
from models.attention import Yarn, causal_attention, token_order
from models.deepseek_hf import deepseek_layout
from models.hf import Layout
from models.layers import (
    PLAIN,
    RESIDUAL_AXES,
    Matmuls,
    Projection,
    RMSNorm,
    depth_scale,
    for_matmuls,
    parameter,
    project_each,
)
from models.llama import Block
from models.losses import next_token_losses
from models.moe import (
    OF_LLAMA,
    Moe,
    MoeBlock,
    MoeConfig,
    MoeMlp,
    Router,
    axes_of_shared_tokens,
    choose,
    make_config,
    name_apart,
    routing_values,
)
from models.options import Rate

LATENT_AXES = ("act_batch", "act_length", None)


@dataclass(frozen=True)
class DeepSeekConfig(MoeConfig):
    """The shape of a DeepSeek-V3.

    `mlp` is the width of one expert, `head_dim` the size of a head's part without rotary positions.

    Attributes:
        query_rank, kv_rank: widths of two latents: one makes the queries, the other makes keys and values.
        rope_dim: size of a head's part with rotary positions; all heads share this part of the keys.
        value_dim: size of a head of values.
        groups, groups_per_token: number of groups of neighbouring experts, and in how many groups a token may choose.
        routed_scale: factor on the weights of the chosen experts, which add up to one without it.
        balance_step: how far a step moves the bias, see the module's docstring.
        yarn_factor: longest sequence divided by `yarn_length`; also the divisor of slow rotary frequencies (Peng et
            al., 2023). 1 is plain rotary positions.
        yarn_length: sequence length, in tokens, that the undivided frequencies were made for.
        yarn_fast, yarn_slow: `fast` and `slow` of `models.attention.Yarn`, for a sequence of `yarn_length`.
        yarn_scale: attention's scores are multiplied by (1 + yarn_scale ln(yarn_factor) / 10) squared.
        mtp_depth: number of modules for multi-token prediction, `num_nextn_predict_layers` of config.json.
        mtp_weight: weight of the mean of these modules' losses; the report has 0.3 for 10 trillion tokens, then 0.1.
    """

    query_rank: int = 1536
    kv_rank: int = 512
    rope_dim: int = 64
    value_dim: int = 128
    groups: int = 1
    groups_per_token: int = 1
    routed_scale: float = 1.0
    balance_step: Rate = 1e-3
    yarn_factor: float = 1.0
    yarn_length: int = 4096
    yarn_fast: float = 32.0
    yarn_slow: float = 1.0
    yarn_scale: float = 1.0
    mtp_depth: int = 0
    mtp_weight: float = 0.3

    def __post_init__(self):
        object.__setattr__(self, "kv_heads", self.heads)
        super().__post_init__()
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim = {self.rope_dim} is odd; rotary positions need pairs.")
        if self.experts % self.groups or self.experts < 2 * self.groups:
            raise ValueError(f"experts = {self.experts} are not {self.groups} equal groups of two or more.")
        if not self.groups_per_token <= self.groups:
            raise ValueError(f"a token cannot go to {self.groups_per_token} of {self.groups} groups.")
        if self.experts_per_token > self.groups_per_token * (self.experts // self.groups):
            raise ValueError(f"{self.groups_per_token} groups have fewer than {self.experts_per_token} experts.")

    def check_pipeline(self) -> None:
        super().check_pipeline()
        if self.mtp_depth:
            raise ValueError(
                f"mtp_depth = {self.mtp_depth}: every stage of a pipeline would compute all modules for multi-token "
                "prediction; leave mtp_depth out."
            )

    @property
    def choice_groups(self) -> tuple[int, int]:
        return self.groups, self.groups_per_token

    @property
    def dense(self) -> DeepSeekConfig:
        """Config of the layers without experts."""
        width = self.dense_mlp or self.mlp * (self.experts_per_token + self.shared_experts)
        return dataclasses.replace(self, layers=self.dense_layers, mlp=width)

    @property
    def score_scale(self) -> float:
        """Return the factor by which YaRN multiplies attention's scores."""
        return (1.0 + 0.1 * self.yarn_scale * math.log(max(1.0, self.yarn_factor))) ** 2


# Sizes and the weight of the balance loss are from sections 4.2 and 2.1.2 of the report and from config.json of
# deepseek-ai/DeepSeek-V3 on Hugging Face, whose positions cover 40 x 4096 tokens.
_YARN = {"rope_theta": 10_000.0, "yarn_factor": 40.0}
_BALANCE = {"load_balance_weight": 1e-4, "norm_eps": 1e-6, "shared_experts": 1, "routed_scale": 2.5}
PRESETS = {
    "deepseek_debug": DeepSeekConfig(
        256, 64, 32, 2, 4, 4, 16, experts=8, experts_per_token=2, dense_layers=1, dense_mlp=128, query_rank=48,
        kv_rank=32, rope_dim=8, value_dim=16, groups=4, groups_per_token=2, **_BALANCE,
    ),
    "deepseek_v3": DeepSeekConfig(
        129_280, 7168, 2048, 58, 128, 128, 128, experts=256, experts_per_token=8, dense_layers=3, dense_mlp=18_432,
        groups=8, groups_per_token=4, **_YARN, **_BALANCE,
    ),
}  # fmt: skip


def frequencies(c: DeepSeekConfig) -> Float[Array, " half"]:
    """Return the fp32 frequency of each pair of rotary dims, in radians a token; YaRN if `yarn_factor` is above 1."""
    half = c.rope_dim // 2
    plain = c.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    yarn = Yarn(c.yarn_factor, c.yarn_length, c.yarn_fast, c.yarn_slow, truncate=True)
    return yarn.frequencies(plain, c.rope_theta) if c.yarn_factor > 1.0 else plain


def rotate_pairs(
    x: Float[Array, "batch length heads rope"], frequency: Float[Array, " half"], positions: Int[Array, " length"]
) -> Float[Array, "batch length heads rope"]:
    """Rotate pairs of neighbouring dims of x. The result has the first dims of all pairs, then the second dims.

    Queries and keys are reordered alike, so the reordering does not change their dot products.
    """
    angle = positions.astype(jnp.float32)[:, None, None] * frequency
    first, second = x[..., 0::2].astype(jnp.float32), x[..., 1::2].astype(jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


class LatentAttention(nnx.Module):
    """Multi-head latent attention: one small latent makes the queries of all heads, another their keys and values."""

    def __init__(self, c: DeepSeekConfig, context: str, *, matmuls: Matmuls = PLAIN, rngs: nnx.Rngs):
        linear = partial(Projection, stack=c.layers, matmuls=matmuls, rngs=rngs)
        norm = partial(RMSNorm, eps=c.norm_eps, stack=c.layers, axis="embed", rngs=rngs)
        heads = {"heads": c.heads}
        self.config, self.context = c, context
        # Kernels and norms that read a latent name its dim `embed`, so that rules cut them like the others.
        self.query_down = linear("query_down", {"embed": c.embed}, {"latent": c.query_rank})
        self.query_norm = norm(c.query_rank)
        self.query_up = linear("query_up", {"embed": c.query_rank}, heads | {"head_dim": c.head_dim + c.rope_dim})
        self.kv_down = linear("kv_down", {"embed": c.embed}, {"latent": c.kv_rank + c.rope_dim})
        self.kv_norm = norm(c.kv_rank)
        self.kv_up = linear("kv_up", {"embed": c.kv_rank}, heads | {"head_dim": c.head_dim + c.value_dim})
        self.output = linear(
            "output", heads | {"head_dim": c.value_dim}, {"embed": c.embed}, scale=depth_scale(c.layers)
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        c, order = self.config, token_order(self.context, x.shape[1])
        positions, frequency = order.positions(x.shape[1]), frequencies(c)
        of_queries, of_keys = project_each(x, self.query_down, self.kv_down)
        q = self.query_up(constrain(self.query_norm(of_queries), *LATENT_AXES))
        latent, shared = jnp.split(of_keys, [c.kv_rank], axis=-1)
        k, v = jnp.split(self.kv_up(constrain(self.kv_norm(latent), *LATENT_AXES)), [c.head_dim], axis=-1)
        plain, turned = jnp.split(q, [c.head_dim], axis=-1)
        q = jnp.concatenate([plain, rotate_pairs(turned, frequency, positions)], axis=-1)
        if c.score_scale != 1.0:
            q = (q.astype(jnp.float32) * c.score_scale).astype(q.dtype)
        shared = rotate_pairs(shared[:, :, None], frequency, positions)
        k = jnp.concatenate([k, jnp.broadcast_to(shared, (*k.shape[:3], c.rope_dim))], axis=-1)
        return self.output(causal_attention(q, k, v, self.context, order))


class BalancedRouter(Router):
    """A router with the bias that balances the experts' load."""

    def __init__(self, c: DeepSeekConfig, *, rngs: nnx.Rngs):
        super().__init__(c, rngs=rngs)
        self.bias = parameter(rngs, jax.nn.initializers.zeros, (c.experts,), (None,), stack=c.stacked)
        self.bias.set_metadata(sign_step=c.balance_step)


class BalancedMlp(MoeMlp):
    """Router, experts and shared experts; a token chooses experts by their sigmoid scores plus their bias."""

    router_class = BalancedRouter

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        c, bias = cast(DeepSeekConfig, self.config), self.router.bias.get_value()
        scores = jax.nn.sigmoid(self.router(x))
        choices = choose(scores + bias.astype(jnp.float32), c.experts_per_token, c.groups, c.groups_per_token)
        chosen = jax.nn.one_hot(choices, c.experts, dtype=jnp.float32)
        weights = jnp.sum(scores[..., None, :] * chosen, axis=-1)
        weights = c.routed_scale * weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        loads = jnp.sum(chosen, axis=(0, 1, 2))
        return scores, choices, chosen, _steered(weights, bias, loads - jnp.mean(loads))

    def values(self, scores: jax.Array, chosen: jax.Array, kept: jax.Array) -> dict[str, jax.Array]:
        shares = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
        return {**routing_values(scores, chosen, kept), "load_balance_loss": sequence_balance(shares, chosen)}


@jax.custom_vjp
def _steered(weights: jax.Array, bias: jax.Array, excess: jax.Array) -> jax.Array:
    """Return the weights; the backward pass returns the excess as the gradient of the bias."""
    del bias, excess
    return weights


def _steered_forward(weights, bias, excess):
    return weights, excess.astype(bias.dtype)


def _steered_backward(excess, g):
    return g, excess, jnp.zeros(excess.shape, jnp.float32)


_steered.defvjp(_steered_forward, _steered_backward)


def sequence_balance(
    shares: Float[Array, "batch length experts"], chosen: Float[Array, "batch length k experts"]
) -> Float[Array, ""]:
    """Return how evenly sequences load the experts, as a mean over the sequences; 1 when even (equations 17 to 20).

    A sequence's value is E sum_e f_e P_e, where E is the number of experts, f_e the share of the sequence's choices
    that went to expert e, and P_e the mean of the expert's `shares`.
    """
    means = jnp.mean(chosen, axis=(1, 2)), jnp.mean(shares, axis=1)
    scope = current_scope()
    cut = scope.manual_axes("act_length") if scope else ()
    f, p = jax.lax.pmean(means, cut) if cut else means
    balance = shares.shape[-1] * jnp.mean(jnp.sum(f * p, axis=-1))
    # GPUs whose sequences differ in weight still use one mean over the micro-batch, as without a pipeline.
    shared = tuple(axis for axis in axes_of_shared_tokens() if axis not in cut)
    return jax.lax.pmean(balance, shared) if shared else balance


class LatentBlock(Block):
    """A layer without experts."""

    attention_class = LatentAttention


class LatentMoeBlock(MoeBlock):
    """A layer with experts."""

    attention_class, mlp_class = LatentAttention, BalancedMlp


class TokenPredictors(nnx.Module):
    """The stacked modules for multi-token prediction; they share the model's embedding and output head."""

    def __init__(self, c: DeepSeekConfig, context: str, *, rngs: nnx.Rngs):
        stack = c.mtp_depth
        norm = partial(RMSNorm, c.embed, eps=c.norm_eps, stack=stack, rngs=rngs)
        self.embedding_norm, self.hidden_norm = norm(), norm()
        # The output dim is not named `embed`: rules may cut only one dim of a kernel by that name.
        self.join = Projection("join", {"embed": 2 * c.embed}, {"latent": c.embed}, stack=stack, rngs=rngs)
        self.block = LatentMoeBlock(dataclasses.replace(c, layers=stack), context, rngs=rngs)
        self.norm = norm()
        name_apart(self, "mtp_layers")

    def __call__(self, hidden: jax.Array, embedded: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        both = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(hidden)], axis=-1)
        return self.block(constrain(self.join(for_matmuls(both)), *RESIDUAL_AXES))


class DeepSeek(Moe):
    """A DeepSeek-V3: int32 tokens [batch, length] -> logits [batch, length, vocab].

    Args are those of `models.moe.Moe`, but presets and fields are those of PRESETS and DeepSeekConfig in this module.
    """

    dense_block, expert_block = LatentBlock, LatentMoeBlock

    def __init__(self, preset: str = "deepseek_debug", *, rngs: nnx.Rngs, dtype=jnp.bfloat16, remat="none", **options):
        super().__init__(preset, rngs=rngs, dtype=dtype, remat=remat, **options)
        if self.config.mtp_depth:
            self.mtp = TokenPredictors(self.config, self.context, rngs=rngs)

    def further_loss(self, x: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, jax.Array]]:
        """Return the weighted loss of multi-token prediction plus its layers' balance loss, and the metric `mtp_loss`.

        A position's loss has the weight of the token that it predicts. The last positions predict no token and weigh 0.
        """
        c = cast(DeepSeekConfig, self.config)
        if not c.mtp_depth:
            return super().further_loss(x, batch)
        with jax.named_scope("mtp"):
            (graph, stacked), x = nnx.split(self.mtp), self.norm(x)
            loss_sum, balance, targets, weights = 0.0, 0.0, batch["targets"], batch["weights"]
            for number in range(c.mtp_depth):
                parameters = jax.tree.map(lambda p, number=number: p[number], stacked)
                run = self.one_layer(graph, scanned=False)
                x, values = run(x, parameters, self.embed(targets))
                targets, weights = (jnp.pad(y[:, 1:], ((0, 0), (0, 1))) for y in (targets, weights))
                losses = next_token_losses(self.logits(nnx.merge(graph, parameters).norm(x)), targets, c.vocab)
                loss_sum = loss_sum + jnp.sum(losses * weights) / c.mtp_depth
                balance = balance + self.auxiliary_loss(values) / c.layers
        weight = jnp.sum(batch["weights"])
        return c.mtp_weight * loss_sum + weight * balance, {"mtp_loss": loss_sum / jnp.maximum(weight, 1e-9)}

    @staticmethod
    def make_config(preset: str, **overrides) -> DeepSeekConfig:
        """Return a preset with some fields replaced; raise ValueError for an option that a DeepSeek does not have."""
        return make_config(preset, PRESETS, OF_LLAMA | {"kv_heads", "qk_norm"}, "DeepSeek", **overrides)

    def attention_parameters(self) -> int:
        """Return the number of parameters of one layer's attention that multiply activations."""
        c = cast(DeepSeekConfig, self.config)
        down = c.embed * (c.query_rank + c.kv_rank + c.rope_dim)
        up = c.query_rank * (c.head_dim + c.rope_dim) + c.kv_rank * (c.head_dim + c.value_dim)
        return down + c.heads * (up + c.value_dim * c.embed)

    def matmul_parameters(self) -> int:
        """Return N in model FLOP = 6 N tokens; the head counts again for each module of multi-token prediction."""
        c = cast(DeepSeekConfig, self.config)
        module = self.active_parameters() + c.embed * (2 * c.embed + c.vocab)
        return super().matmul_parameters() + c.mtp_depth * module

    def hf_layout(self) -> Layout:
        """Return how the parameters correspond to those of Hugging Face's `DeepseekV3ForCausalLM`."""
        return deepseek_layout(self.config)

    def attention_shape(self) -> tuple[int, int, int]:
        """Return (L, heads, head_dim) in attention FLOP = 12 L heads head_dim T tokens, for L layers and length T.

        Half of the FLOP are for scores and half for values, so head_dim is the mean of their two head sizes.
        """
        layers, heads, _ = super().attention_shape()
        c = cast(DeepSeekConfig, self.config)
        return layers + c.mtp_depth, heads, (c.head_dim + c.rope_dim + c.value_dim) // 2
