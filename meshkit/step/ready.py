"""A training step for a model of anybody's and an optimizer of optax, without an experiment file."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import AxisType

from meshkit.config.rules import ShardingRules
from meshkit.sharding import sharding_scope, shardings
from meshkit.sharding.mesh import AnyMesh


def sharded_step(
    loss: Callable[..., Any],
    mesh: AnyMesh,
    rules: ShardingRules,
    *,
    optimizer: optax.GradientTransformation | None = None,
) -> Callable[..., Any]:
    """A jitted step that trains: gradients of the loss inside a `sharding_scope`, an update, a state that stays put.

    For nnx, without an optimizer: `step(model, optimizer, *batch) -> loss`, which changes the model and its
    `nnx.Optimizer`. For linen and any other pytree, with one: `step(state, *batch) -> (state, loss)`, where the state
    is `{"params": ..., "opt_state": optimizer.init(params)}`. What it is given to change is donated.

    Args:
        loss: `loss(model, *batch)`, or `loss(params, *batch)`, a scalar.
        mesh: attached, to train on; described, to plan for.
        rules: where parameters and constrained activations go.
        optimizer: of a step without nnx modules.
    """
    typed = AxisType.Explicit in mesh.axis_types  # where types say where arrays lie, they stay there

    def pinned(state: Any) -> Any:
        return state if typed else jax.lax.with_sharding_constraint(state, shardings(state, mesh, rules))

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    def of_modules(model: Any, optimizer: nnx.Optimizer, *batch: Any) -> Any:
        with sharding_scope(mesh, rules):
            value, gradients = nnx.value_and_grad(loss)(model, *batch)
        optimizer.update(model, gradients)
        for changed in (model, optimizer):
            nnx.update(changed, pinned(nnx.state(changed)))
        return value

    if optimizer is None:
        return of_modules

    @functools.partial(jax.jit, donate_argnums=0)
    def of_arrays(state: Any, *batch: Any) -> Any:
        with sharding_scope(mesh, rules):
            value, gradients = jax.value_and_grad(loss)(state["params"], *batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        return pinned({"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}), value

    return of_arrays
