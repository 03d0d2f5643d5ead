"""Parameters that move by the sign of their gradient alone, such as the bias that balances a mixture of experts.

A parameter asks for it by `sign_step` in its metadata, the size of its step: `nnx.Param(..., sign_step=1e-3)`. Its
gradient is summed over micro-batches and replicas like any other, but it is no part of the norm of gradients, and the
optimizer, weight decay and the learning rate do not move it.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from flax import nnx


def sign_steps(params: nnx.State) -> Any:
    """The nested dict of the parameters with each one's `sign_step`; 0 for those of the optimizer."""
    steps = jax.tree.map(
        lambda leaf: leaf.replace(float(leaf.get_metadata().get("sign_step", 0.0))),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    return nnx.to_pure_dict(steps)


def without_signed(gradients: Any, steps: Any) -> Any:
    """Gradients with zeros in the place of those of which only the sign counts."""
    return jax.tree.map(lambda g, step: jnp.zeros_like(g) if step else g, gradients, steps)


def move_by_sign(optimizer: optax.GradientTransformation, steps: Any) -> optax.GradientTransformation:
    """The optimizer, which parameters with a step are kept from: they move by it against their gradient's sign.

    Args:
        optimizer: of the others; its state has all parameters' shapes.
        steps: of `sign_steps`.
    """
    if not any(jax.tree.leaves(steps)):
        return optimizer

    def update(gradients: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = optimizer.update(without_signed(gradients, steps), state, params)

        def one(update: jax.Array, gradient: jax.Array, step: float) -> jax.Array:
            return -step * jnp.sign(gradient).astype(update.dtype) if step else update

        return jax.tree.map(one, updates, gradients, steps), state

    return optax.GradientTransformation(optimizer.init, cast(Any, update))
