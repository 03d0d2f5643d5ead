"""`[optimizer]` -> the transformation that a step applies: AdamW, or what `optimizer.class` names."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshkit.config.experiment import Experiment
from meshkit.config.sections import OptimizerTable
from meshkit.config.user_code import load_object, user_code
from meshkit.config.validate import did_you_mean
from meshkit.errors import ConfigError
from meshkit.step.state import returned_kinds

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


def make_optimizer(experiment: Experiment) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW or what `optimizer.class` names.

    Raises:
        ConfigError: the class is missing, is no function that says that it returns an optax transformation, does not
            take an option, or raises.
    """
    spec, steps = experiment.optimizer, experiment.train.steps
    clip = [optax.clip_by_global_norm(spec.clip)] if spec.clip else []
    own = make_adamw(spec, steps) if spec.class_path is None else _named(experiment, spec.class_path)
    return optax.chain(*clip, own)


def make_adamw(spec: OptimizerTable, steps: int) -> optax.GradientTransformation:
    """AdamW (Loshchilov and Hutter, 2019).

    Weight decay leaves norms and biases alone: parameters whose last name is `scale` or `bias`. `dtype` is that of the
    first moment; the second stays fp32, since bf16 cannot hold its small updates (1 - b2 is below bf16's resolution).

    Args:
        spec: the `[optimizer]` table.
        steps: length of the schedule.
    """
    return optax.adamw(
        make_schedule(spec, steps),
        b1=spec.b1,
        b2=spec.b2,
        eps=spec.eps,
        mu_dtype=jnp.bfloat16 if spec.dtype == "bf16" else jnp.float32,
        weight_decay=spec.weight_decay,
        mask=decayed,
    )


def decayed(params: Any) -> Any:
    """The tree with True where weight decay applies."""

    def one(path, _leaf):
        return str(getattr(path[-1], "key", path[-1])) not in _NOT_DECAYED

    return jax.tree_util.tree_map_with_path(one, params)


def _named(experiment: Experiment, name: str) -> optax.GradientTransformation:
    """What the function that the file names makes of the schedule and its options."""
    spec, at = experiment.optimizer, experiment.where("optimizer.class")
    make = load_object(name, experiment.search_paths, at=at, also=("optax",))
    kinds = returned_kinds(make)
    if not kinds or not all(issubclass(kind, optax.GradientTransformation) for kind in kinds):
        raise ConfigError(
            f"{name} is no function that says that it returns an optax transformation.",
            at=at,
            hint='"optax:lion", or def NAME(learning_rate, ...) -> optax.GradientTransformation',
        )
    taken, options = inspect.signature(make).parameters, dict(spec.options or {})
    if "learning_rate" not in taken:
        raise ConfigError(f"{name} takes no `learning_rate`, which gets the schedule.", at=at, hint="such a parameter")
    for key in options:
        if key not in taken or key == "learning_rate":
            known = [one for one in taken if one != "learning_rate"]
            message = f"{name} takes no option '{key}' here."
            raise experiment.error(f"optimizer.options.{key}", message, hint=did_you_mean(key, known))
    for key, parameter in taken.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic and key not in ("learning_rate", *options):
            raise ConfigError(f"{name} needs the option '{key}'.", at=at, hint=f"optimizer.options.{key} = ...")
    with user_code(experiment, "optimizer.class", name):
        return make(learning_rate=make_schedule(spec, experiment.train.steps), **options)
