"""A perceptron whose collectives can be written down by hand: the smallest model with a known answer.

Tests compare the plan with its closed forms. It is also a template for a new model: it has names on the parameters,
constraints on the activations, a loss and a source of examples. The experiment file names all of them by import path.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshkit.sharding import constrain
from models.layers import Projection


class Pair(nnx.Module):
    """Two layers: gelu(x up) down, from embed through mlp back to embed."""

    def __init__(self, embed: int, mlp: int, *, rngs: nnx.Rngs):
        self.up = Projection("up", {"embed": embed}, {"mlp": mlp}, rngs=rngs)
        self.down = Projection("down", {"mlp": mlp}, {"embed": embed}, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = constrain(jax.nn.gelu(self.up(x)), "act_batch", "act_mlp")
        return constrain(self.down(hidden), "act_batch", "act_embed")


class MLP(nnx.Module):
    """[batch, embed] -> [batch, embed] through `layers` linear maps, a gelu inside each pair of them.

    Raises:
        ValueError: a size that is no whole number of at least 1, or an odd number of layers.
    """

    def __init__(self, *, rngs: nnx.Rngs, embed: int = 64, mlp: int = 256, layers: int = 2, dtype=jnp.bfloat16):
        for name, size in (("embed", embed), ("mlp", mlp), ("layers", layers)):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} = {size!r} must be a whole number of at least 1.")
        if layers < 2 or layers % 2:
            raise ValueError(f"layers = {layers}, but layers come in pairs.")
        self.embed, self.mlp, self.dtype = embed, mlp, jnp.dtype(dtype)
        self.pairs = nnx.List([Pair(embed, mlp, rngs=rngs) for _ in range(layers // 2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = constrain(x.astype(self.dtype), "act_batch", "act_embed")
        for index, pair in enumerate(self.pairs):
            with jax.named_scope(f"pairs/{index}"):
                x = pair(x)
        return x

    def matmul_parameters(self) -> int:
        """Return the number of parameters in all kernels."""
        return 2 * self.embed * self.mlp * len(self.pairs)


def regression_loss(model: MLP, batch: dict, rng: jax.Array) -> tuple[jax.Array, jax.Array, dict]:
    """Return the sum over examples of the mean squared error, the number of examples, and no further metrics."""
    del rng
    error = model(batch["inputs"]).astype(jnp.float32) - batch["targets"]
    return jnp.sum(jnp.mean(error * error, axis=-1)), jnp.float32(error.shape[0]), {}


def random_examples(*, seed: int, experiment) -> Mirrored:
    """Return a `[data] source` of examples as wide as the experiment's `model.embed`."""
    return Mirrored(seed, experiment.model.options.get("embed", 64))


@dataclass(frozen=True)
class Mirrored:
    """Random access to examples: inputs are normal, of size `embed`, and a target is its input reversed."""

    seed: int
    embed: int

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        x = np.random.default_rng((self.seed, int(index))).standard_normal(self.embed, dtype=np.float32)
        return {"inputs": x, "targets": x[::-1].copy()}
