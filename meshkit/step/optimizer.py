"""`[optimizer]` -> optax transformation: AdamW with clipping and a learning-rate schedule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshkit.config.sections import OptimizerTable
from meshkit.step.state import StateLayout, TrainState

_NOT_DECAYED = ("scale", "bias")


def make_schedule(spec: OptimizerTable, steps: int) -> optax.Schedule:
    """Learning rate by step: linear warm-up from 0, then constant, or down to a tenth (cosine) or to 0 (linear)."""
    warmup = min(spec.warmup_steps, steps)
    rest = max(1, steps - warmup)
    if spec.schedule == "cosine":
        body = optax.cosine_decay_schedule(spec.learning_rate, rest, alpha=0.1)
    elif spec.schedule == "linear":
        body = optax.linear_schedule(spec.learning_rate, 0.0, rest)
    else:
        body = optax.constant_schedule(spec.learning_rate)
    if not warmup:
        return body
    # Counted from 1: a first step with learning rate 0 would be a step lost.
    ramp = optax.linear_schedule(spec.learning_rate / warmup, spec.learning_rate, max(1, warmup - 1))
    return optax.join_schedules([ramp, body], [warmup])


def make_optimizer(spec: OptimizerTable, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW (Loshchilov and Hutter, 2019).

    Weight decay leaves norms and biases alone: parameters whose last name is `scale` or `bias`. `dtype` is that of the
    first moment; the second stays fp32, since bf16 cannot hold its small updates (1 - b2 is below bf16's resolution).

    Args:
        spec: the `[optimizer]` table.
        steps: length of the schedule.
    """
    clip = [optax.clip_by_global_norm(spec.clip)] if spec.clip else []
    adamw = optax.adamw(
        make_schedule(spec, steps),
        b1=spec.b1,
        b2=spec.b2,
        eps=spec.eps,
        mu_dtype=jnp.bfloat16 if spec.dtype == "bf16" else jnp.float32,
        weight_decay=spec.weight_decay,
        mask=decayed,
    )
    return optax.chain(*clip, adamw)


def update_params(
    optimizer: optax.GradientTransformation, layout: StateLayout, gradients: Any, state: TrainState
) -> tuple[Any, Any]:
    """Parameters and optimizer state after a step.

    State that lives in host memory is fetched and brought back here. Not before the gradients are there: until then
    the GPU's memory is the activations'.
    """
    opt_state = state.opt_state
    if layout.opt_on_device is not None:
        gradients, opt_state = jax.lax.optimization_barrier((gradients, opt_state))
        opt_state = jax.device_put(opt_state, layout.opt_on_device)
    updates, opt_state = optimizer.update(gradients, opt_state, state.params)
    if layout.opt_on_device is not None:
        opt_state = jax.device_put(opt_state, layout.opt_state)
    return optax.apply_updates(state.params, updates), opt_state


def decayed(params: Any) -> Any:
    """The tree with True where weight decay applies."""

    def one(path, _leaf):
        return str(getattr(path[-1], "key", path[-1])) not in _NOT_DECAYED

    return jax.tree_util.tree_map_with_path(one, params)
