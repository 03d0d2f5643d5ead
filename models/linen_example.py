"""A small language model in flax.linen, which shows how a linen model names its dims.

flax's own `nn.with_logical_partitioning` names the dims of parameters, and `meshkit.constrain` those of activations. An
experiment names the model `models.linen_example:Decoder`; fields of the class are keys of `[model]`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from meshkit.sharding import constrain

RESIDUAL_AXES = ("act_batch", "act_residual_length", "act_embed")


def named(init: jax.nn.initializers.Initializer, *axes: str):
    """Return an initializer whose result has a logical axis for each dim."""
    return nn.with_logical_partitioning(init, axes)


class Attention(nn.Module):
    """Causal self-attention."""

    heads: int
    head_dim: int
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal()

        def project(name: str) -> jax.Array:
            kernel = named(init, "embed", "heads", "head_dim")
            shape = (self.heads, self.head_dim)
            y = nn.DenseGeneral(shape, use_bias=False, kernel_init=kernel, dtype=self.dtype, name=name)(x)
            return constrain(y, "act_batch", "act_length", "act_heads", None)

        q, k, v = project("query"), project("key"), project("value")
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        out = named(init, "heads", "head_dim", "embed")
        return nn.DenseGeneral(
            x.shape[-1], axis=(-2, -1), use_bias=False, kernel_init=out, dtype=self.dtype, name="output"
        )(attended)


class Block(nn.Module):
    """One pre-norm transformer layer, as the body of a scan: (x, None) -> (x, None)."""

    heads: int
    head_dim: int
    mlp: int
    dropout: float
    train: bool
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        init, scale = nn.initializers.lecun_normal(), named(nn.initializers.ones, "embed")
        drop = nn.Dropout(self.dropout, deterministic=not self.train)
        h = nn.RMSNorm(scale_init=scale, dtype=self.dtype, name="attention_norm")(x)
        h = Attention(self.heads, self.head_dim, self.dtype, name="attention")(h)
        x = constrain(x + drop(h), *RESIDUAL_AXES)
        h = nn.RMSNorm(scale_init=scale, dtype=self.dtype, name="mlp_norm")(x)
        up, down = named(init, "embed", "mlp"), named(init, "mlp", "embed")
        h = nn.Dense(self.mlp, use_bias=False, kernel_init=up, dtype=self.dtype, name="up")(h)
        h = constrain(nn.gelu(h), "act_batch", "act_length", "act_mlp")
        h = nn.Dense(x.shape[-1], use_bias=False, kernel_init=down, dtype=self.dtype, name="down")(h)
        return constrain(x + drop(h), *RESIDUAL_AXES), None


class Decoder(nn.Module):
    """int32 tokens [batch, length] -> fp32 logits [batch, length, vocab]; positions are learned.

    Attributes:
        max_length: longest sequence.
        dropout: share of the outputs of attention and of the MLP that training drops.
        dtype: dtype of activations and matmuls. Parameters are fp32.
    """

    vocab: int = 256
    embed: int = 128
    mlp: int = 512
    layers: int = 2
    heads: int = 4
    head_dim: int = 32
    max_length: int = 128
    dropout: float = 0.1
    dtype: Any = jnp.bfloat16

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
        init = nn.initializers.normal(0.02)
        table: Any = self.param("embedding", named(init, "vocab", "embed"), (self.vocab, self.embed))
        positions: Any = self.param("positions", named(init, "length", "embed"), (self.max_length, self.embed))
        rows = constrain(table.astype(self.dtype), "act_vocab", None)[tokens]
        x = constrain(rows + positions.astype(self.dtype)[: tokens.shape[1]], *RESIDUAL_AXES)
        stacked = nn.scan(
            Block,
            length=self.layers,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            metadata_params={nn.PARTITION_NAME: "layers"},  # the name of the dim that stacking adds
        )
        x, _ = stacked(self.heads, self.head_dim, self.mlp, self.dropout, train, self.dtype, name="layers")(x, None)
        x = nn.RMSNorm(scale_init=named(nn.initializers.ones, "embed"), dtype=self.dtype, name="norm")(x)
        head = named(init, "embed", "vocab")
        logits = nn.Dense(self.vocab, use_bias=False, kernel_init=head, dtype=self.dtype, name="head")(x)
        return constrain(logits.astype(jnp.float32), "act_batch", "act_length", "act_vocab")

    def matmul_parameters(self) -> int:
        """Return N, the number of parameters in matmuls; without attention, model FLOP are 6 x N x tokens."""
        block = 4 * self.embed * self.heads * self.head_dim + 2 * self.embed * self.mlp
        return self.layers * block + self.embed * self.vocab

    def attention_shape(self) -> tuple[int, int, int]:
        """Return (layers, heads, head_dim); their product x 12 x tokens x length is the number of FLOP of attention."""
        return self.layers, self.heads, self.head_dim
