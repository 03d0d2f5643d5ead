"""Losses: the default next-token cross-entropy, and the experiment's own.

A loss is `(model, batch, rng) -> (loss_sum, weight, metrics)`. Sums, so that micro-batches and shards of unequal weight
add up to exactly the mean over the whole batch: loss = sum of loss_sum / sum of weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshkit.config.experiment import Experiment
from meshkit.config.user_code import load_function, user_code

Loss = Callable[[Any, Mapping[str, jax.Array], jax.Array], tuple[jax.Array, jax.Array, Mapping[str, jax.Array]]]

# What meshkit writes into a step's line itself; a loss may not use these names for its own metrics.
_MEASURED = ("step_time_s", "tokens_per_s", "mfu", "evaluation_loss", "evaluation_s")
_CAPTURED = ("exposed_s", "overlapped_share", "bytes_nvlink", "bytes_infiniband")
RESERVED_METRICS = frozenset(("step", "loss", "grad_norm", "learning_rate", "weight", *_MEASURED, *_CAPTURED))
_SHAPE_OF_A_LOSS = "return loss_sum, weight, metrics: two scalars and a dict of scalars"


def find_loss(experiment: Experiment) -> Loss:
    """The experiment's `train.loss`, or next-token cross-entropy; either checks what it gets while it is traced.

    Raises:
        ConfigError: as `load_object` does, or it is not callable; when traced, it or the model raises, or gives
            something else than it should.
    """
    name = experiment.train.loss
    if name is None:
        return _checked_next_token(experiment)
    own = load_function(experiment, "train.loss", name)

    def loss(model: Any, batch: Mapping[str, jax.Array], rng: jax.Array):
        takes = f"{name} is called with (model, batch, rng); the batch has {', '.join(batch)}"
        with user_code(experiment, "train.loss", name, hint=f"the line it names; {takes}"):
            result = own(model, batch, rng)
        return _check_result(experiment, name, result)

    return loss


def _checked_next_token(experiment: Experiment) -> Loss:
    """`next_token`, with what the model and the batch must be said in the experiment's terms."""
    name = experiment.model.class_path

    def loss(model: Any, batch: Mapping[str, jax.Array], rng: jax.Array):
        missing = [key for key in ("tokens", "targets", "weights") if key not in batch]
        if missing:
            message = f"next-token cross-entropy needs {', '.join(missing)}, but the examples have {', '.join(batch)}."
            raise experiment.error("train.loss", message, hint='train.loss = "package.module:function" of your own')
        tokens = batch["tokens"]
        with user_code(experiment, "model.class", f"the forward pass of {name}"):
            logits = model(tokens)
        shape = getattr(logits, "shape", None)
        if shape is None or len(shape) != tokens.ndim + 1 or shape[:-1] != tokens.shape:
            got = type(logits).__name__ if shape is None else f"an array {list(shape)}"
            message = f"{name} gives {got} for tokens {list(tokens.shape)}, not [batch, length, vocab]."
            raise experiment.error("model.class", message, hint="logits for each token, or a train.loss of your own")
        return next_token(lambda _: logits, batch, rng)

    return loss


def _check_result(experiment: Experiment, name: str, result: Any) -> tuple[jax.Array, jax.Array, dict]:
    """What the user's loss returned, as arrays.

    Raises:
        ConfigError: it is not two scalars, the first a float, and a dict of scalars under names that are free.
    """

    def refuse(problem: str, hint: str = _SHAPE_OF_A_LOSS):
        return experiment.error("train.loss", f"{name} {problem}.", hint=hint)

    if not isinstance(result, tuple | list) or len(result) != 3:
        got = f"{len(result)} values" if isinstance(result, tuple | list) else _describe(result)
        raise refuse(f"returned {got}, not three values")
    loss_sum, weight, metrics = result
    if not _is_scalar(loss_sum) or not jnp.issubdtype(jnp.result_type(loss_sum), jnp.floating):
        raise refuse(f"returned {_describe(loss_sum)} as loss_sum, not a scalar float")
    if not _is_scalar(weight):
        raise refuse(f"returned {_describe(weight)} as weight, not a scalar")
    if not isinstance(metrics, Mapping):
        raise refuse(f"returned {_describe(metrics)} as metrics, not a dict")
    for key, value in metrics.items():
        if not isinstance(key, str):
            raise refuse(f"named a metric {key!r}, which is not a string")
        if key in RESERVED_METRICS:
            raise refuse(f"named a metric '{key}', which meshkit writes itself", f"another name, such as 'own_{key}'")
        if not _is_scalar(value):
            raise refuse(f"returned {_describe(value)} as metric '{key}', not a scalar", "its mean")
    return jnp.asarray(loss_sum), jnp.asarray(weight), {key: jnp.asarray(value) for key, value in metrics.items()}


def _is_scalar(value: Any) -> bool:
    numeric = isinstance(value, int | float | jax.Array | np.ndarray | np.generic)
    return numeric and jnp.shape(value) == () and not jnp.issubdtype(jnp.result_type(value), jnp.complexfloating)


def _describe(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array {value.dtype}{list(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"


def next_token(model: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> tuple[jax.Array, jax.Array, dict]:
    """Weighted sum of -log p(target | tokens so far), in nats; the sum of weights; no further metrics."""
    del rng
    losses = cross_entropy(model(batch["tokens"]), batch["targets"])
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"]), {}


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """logsumexp(logits) - logits[target] in fp32, for each position.

    The target's logit is picked by comparison with an iota, not by indexing: over a sharded vocab each GPU then sums
    its own part, and one all-reduce of [batch, length] follows instead of a gather of the logits.
    """
    logits = logits.astype(jnp.float32)
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked
