"""Losses, the sums of losses and gradients over micro-batches, and the reduction of gradients over the mesh.

A loss is `(model, batch, rng) -> (loss_sum, weight, metrics)`: the default next-token cross-entropy, or the
experiment's own. It returns sums, so that micro-batches and shards of unequal weight add up to exactly the mean over
the whole batch: loss = sum of loss_sum / sum of weight.

By default the partitioner gathers FSDP's weights for each micro-batch anew, and reduces the gradients over the mesh
after each. With several micro-batches this is waste: a buffer can first sum all gradients. The axes over which
gradients are then reduced once a step are the *deferred* axes. They become a dim of their own: a `vmap` over the
replicas, with `spmd_axis_name` to keep each replica on its GPUs. Gradients get a leading replica dim. Nothing is
reduced or gathered inside the loop, and one reduction follows it. The price is memory: each GPU has whole weights (in
the compute dtype) and whole gradients. If `[rules.gradients]` cuts the accumulators over an axis of N GPUs, the
gradients are reduced over it after every micro-batch instead, and take 1/N of the memory.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.config.places import UserCode
from meshkit.config.rules import ShardingRules
from meshkit.errors import a_type
from meshkit.parallel.compression import Exchange
from meshkit.sharding.constrain import spec_axes
from meshkit.sharding.mesh import AnyMesh

Loss = Callable[[Any, Mapping[str, jax.Array], jax.Array], tuple[jax.Array, jax.Array, Mapping[str, jax.Array]]]

# Metrics that meshkit itself writes into a step's line; a loss may not use these names for its own metrics.
_MEASURED = ("step_time_s", "tokens_per_s", "examples_per_s", "mfu", "evaluation_loss", "evaluation_s")
_CAPTURED = ("exposed_s", "overlapped_share", "bytes_nvlink", "bytes_infiniband")
_LIVE = ("captured_step", "exposed_share", "late_device", "late_share")
RESERVED_METRICS = frozenset(("step", "loss", "grad_norm", "learning_rate", "weight", *_MEASURED, *_CAPTURED, *_LIVE))
_SHAPE_OF_A_LOSS = "return loss_sum, weight, metrics: two scalars and a dict of scalars"


def checked_loss(own: UserCode | None, model_class: UserCode) -> Loss:
    """Return the user's loss, or next-token cross-entropy, with checks that run while it is traced.

    Returns:
        A loss that, when traced, raises ConfigError if it or the model raises or returns something invalid.
    """
    if own is None:
        return _checked_next_token(model_class)

    def loss(model: Any, batch: Mapping[str, jax.Array], rng: jax.Array):
        takes = f"{own.name} is called with (model, batch, rng); the batch has {', '.join(batch)}"
        with own.calling(hint=f"the line it names; {takes}"):
            result = own.found(model, batch, rng)
        return _check_result(own, result)

    return loss


def _checked_next_token(model_class: UserCode) -> Loss:
    """Return `next_token` with checks of the model and the batch, whose errors name the experiment's keys."""
    name = model_class.name

    def loss(model: Any, batch: Mapping[str, jax.Array], rng: jax.Array):
        missing = [key for key in ("tokens", "targets", "weights") if key not in batch]
        if missing:
            message = f"next-token cross-entropy needs {', '.join(missing)}, but the examples have {', '.join(batch)}."
            hint = 'train.loss = "package.module:function" of your own'
            raise model_class.places.error("train.loss", message, hint=hint)
        tokens = batch["tokens"]
        with model_class.calling(f"the forward pass of {name}"):
            takes_key = "key" in inspect.signature(model.__call__).parameters
            logits = model(tokens, key=rng) if takes_key else model(tokens)
        shape = getattr(logits, "shape", None)
        if shape is None or len(shape) != tokens.ndim + 1 or shape[:-1] != tokens.shape:
            got = type(logits).__name__ if shape is None else f"an array {list(shape)}"
            message = f"{name} gives {got} for tokens {list(tokens.shape)}, not [batch, length, vocab]."
            raise model_class.error(message, hint="logits for each token, or a train.loss of your own")
        return next_token(lambda _: logits, batch, rng)

    return loss


def _check_result(own: UserCode, result: Any) -> tuple[jax.Array, jax.Array, dict]:
    def refuse(problem: str, hint: str = _SHAPE_OF_A_LOSS):
        return own.error(f"{own.name} {problem}.", hint=hint)

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
    return "None" if value is None else a_type(value)


def next_token(model: Any, batch: Mapping[str, jax.Array], rng: jax.Array) -> tuple[jax.Array, jax.Array, dict]:
    """Return the weighted sum of -log p(target | tokens so far) in nats, the sum of weights, and no metrics.

    Args:
        model: tokens [batch, length] -> logits [batch, length, vocab].
        batch: `tokens` and `targets`, ids, and `weights`, all [batch, length].
        rng: not used.
    """
    del rng
    losses = cross_entropy(model(batch["tokens"]), batch["targets"])
    return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"]), {}


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Return logsumexp(logits) - logits[target] in fp32, for each position.

    The target's logit is picked by comparison with an iota, not by indexing. If the vocab is sharded, each GPU then
    sums its own part, and one all-reduce of [batch, length] replaces a gather of the logits.

    Args:
        logits: [..., vocab], of any floating dtype.
        targets: int [...], ids below vocab; for any other id the target's logit counts as 0.

    Returns:
        fp32 [...], in nats.
    """
    logits = logits.astype(jnp.float32)
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked


@jax.tree_util.register_dataclass
@dataclass
class Sums:
    """Sums over micro-batches and replicas, and the maximum of `histories`.

    The caller divides `metrics` by the number of summed parts, count * replicas.

    The gradients that `sum_over_micro_batches` returns have a leading replica dim if any axis is deferred.
    """

    loss_sum: Any
    weight: Any
    metrics: Any
    gradients: Any
    histories: Any = None
    """Histories of fp8 scaling. Micro-batches differ only in the newest row, the largest numbers of their tensors."""


@dataclass(frozen=True)
class MicroBatches:
    """The cut of a global batch into `count` micro-batches, and of each over the replicas of the deferred axes."""

    count: int
    mesh: AnyMesh
    batch_axes: tuple[str, ...]
    """Mesh axes that cut the batch."""
    deferred: tuple[str, ...] = ()
    """Axes among `batch_axes` over which gradients are summed once per step."""

    @property
    def replicas(self) -> int:
        """Number of pieces over the deferred axes."""
        return math.prod(self.mesh.shape[a] for a in self.deferred)

    def split(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return each [B, ...] as [count, replicas, B / count / replicas, ...]; no row moves to another GPU.

        Micro-batches take rows in strides, since contiguous rows would all be on the first GPUs.
        """
        kept = tuple(a for a in self.batch_axes if a not in self.deferred)
        sharding = NamedSharding(self.mesh, PartitionSpec(None, self.deferred or None, kept or None))

        def split_leaf(x):
            x = x.reshape(self.replicas, -1, self.count, *x.shape[1:])
            return jax.lax.with_sharding_constraint(jnp.moveaxis(x, 2, 0), sharding)

        return {name: split_leaf(x) for name, x in batch.items()}


def deferred_axes(rules: ShardingRules, mesh: AnyMesh) -> tuple[str, ...]:
    """Return the axes over which gradients of several micro-batches are reduced once a step, outermost first.

    They cut the batch and no other activation, and `[rules.gradients]` does not cut the accumulators over them. So the
    experts' axis, whose weights are not gathered, is not deferred. Axes of one GPU are left out.
    """
    (batch,) = rules.spec_for(("act_batch",), kind="activations")
    activations = {a for name, axes in rules.logical.items() if name.startswith("act_") and name != "act_batch"
                   for a in axes}  # fmt: skip
    cut = {a for axes in (rules.gradients or {}).values() for a in axes}
    return tuple(a for a in batch if mesh.shape[a] > 1 and a not in activations | cut)


def sum_over_micro_batches(
    loss_and_gradients: Callable[..., tuple[Sums, Any]],
    micro: MicroBatches,
    batch: Mapping[str, jax.Array],
    variables: Any,
    rng: jax.Array,
) -> tuple[Sums, Any]:
    """Return the Sums of a whole batch, and the model's variables after it.

    Args:
        loss_and_gradients: (variables, batch, rng) -> (Sums of a micro-batch, variables).
        variables: the model's non-parameter state, passed from each micro-batch to the next.
        rng: key; each micro-batch and replica gets its own.
    """
    if micro.count == 1 and not micro.deferred:
        return loss_and_gradients(variables, batch, rng)
    keys = jax.random.split(rng, (micro.count, micro.replicas))
    replicated = jax.vmap(loss_and_gradients, in_axes=(None, 0, 0), spmd_axis_name=micro.deferred or None)
    pieces = micro.split(batch)

    def micro_batch_sums(variables, piece, key):
        if micro.deferred:
            sums, _ = replicated(variables, piece, key)
            return sums, variables
        return loss_and_gradients(variables, jax.tree.map(lambda x: x[0], piece), key[0])

    def body(carry, inputs):
        total, variables = carry
        sums, variables = micro_batch_sums(variables, *inputs)
        histories = jax.tree.map(jnp.maximum, total.histories, sums.histories)
        return (replace(jax.tree.map(jnp.add, total, sums), histories=histories), variables), None

    first = jax.eval_shape(lambda: micro_batch_sums(variables, jax.tree.map(lambda x: x[0], pieces), keys[0])[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
    (total, variables), _ = jax.lax.scan(body, (zeros, variables), (pieces, keys))
    if micro.deferred:
        of_replicas = (total.loss_sum, total.weight, total.metrics)
        loss_sum, weight, metrics = jax.tree.map(lambda x: jnp.sum(x, axis=0), of_replicas)
        histories = jax.tree.map(lambda x: jnp.max(x, axis=0), total.histories)
        total = Sums(loss_sum, weight, metrics, total.gradients, histories)
    return total, variables


def reduce_replicas(
    gradients: Any,
    micro: MicroBatches,
    accumulators: Any,
    reduced: Any,
    dtype: Any,
    *,
    exchange: Exchange | None = None,
    residuals: Any = None,
) -> tuple[Any, Any]:
    """Sum gradients [replicas, ...] over the deferred axes, fast axes first, and lay them out for the optimizer.

    A dim that the optimizer cuts over deferred axes is reduce-scattered over these axes. Over other deferred axes the
    gradients are all-reduced. The exchange, if any, sums over its own axis last.

    Args:
        gradients: tree of fp32 arrays, each replica's own sums.
        accumulators: NamedShardings of the gradients without the replica dim.
        reduced: NamedShardings of the result.
        dtype: dtype of the communication and of the sum.
        exchange: a compressed sum over one deferred axis, which cuts nothing in `reduced`.
        residuals: residuals of the exchange in the step before; None: no error feedback.

    Returns:
        The sums, and the new residuals or None.
    """
    leaves, tree = jax.tree.flatten(gradients)
    carried = [None] * len(leaves) if residuals is None else tree.flatten_up_to(residuals)
    compressed = (exchange.axis,) if exchange else ()

    def reduce_leaf(x, residual, accumulator, wanted):
        kept, scattered, out = _scattered(x.ndim - 1, micro, accumulator, wanted)
        whole = tuple(a for a in micro.deferred if not any(a in axes for axes in scattered) and a not in compressed)

        def local(x, residual):
            x = x[0].astype(dtype)
            for dim, axes in enumerate(scattered):
                if axes:
                    x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
            x = jax.lax.psum(x, whole) if whole else x
            return exchange.sum(x.astype(jnp.float32), residual) if exchange else (x, residual)

        spec = PartitionSpec(micro.deferred, *(axes or None for axes in kept))
        left = None if residual is None else PartitionSpec(compressed, *out)
        run = jax.shard_map(local, mesh=micro.mesh, in_specs=(spec, left), out_specs=(out, left), check_vma=False)
        x, residual = run(x, residual)
        # The constraint moves data only where a deferred axis was not innermost.
        return jax.lax.with_sharding_constraint(x, wanted), residual

    done = [
        reduce_leaf(*each)
        for each in zip(leaves, carried, tree.flatten_up_to(accumulators), tree.flatten_up_to(reduced))
    ]
    sums = tree.unflatten([total for total, _ in done])
    return sums, None if residuals is None else tree.unflatten([left for _, left in done])


def residual_shardings(params: Any, micro: MicroBatches, accumulators: Any, reduced: Any, axis: str) -> Any:
    """Return the NamedShardings of the residuals [R, ...] that `reduce_replicas` takes for these parameters.

    Args:
        axis: axis of the exchange; it cuts the leading dim, R.
    """

    def residual_sharding(x, accumulator, wanted):
        _, _, out = _scattered(len(x.shape), micro, accumulator, wanted)
        return NamedSharding(micro.mesh, PartitionSpec(axis, *out))

    return jax.tree.map(residual_sharding, params, accumulators, reduced)


def _scattered(rank: int, micro: MicroBatches, accumulator: NamedSharding, wanted: NamedSharding):
    """Return each dim's axes before the reduction, each dim's deferred axes that scatter it, and a spec of both."""
    kept = spec_axes(accumulator.spec, rank)
    scattered = [tuple(a for a in axes if a in micro.deferred) for axes in spec_axes(wanted.spec, rank)]
    return kept, scattered, PartitionSpec(*((*before, *after) or None for before, after in zip(kept, scattered)))


def strip_axes(shardings: Any, axes: Sequence[str]) -> Any:
    """Return the NamedShardings without these mesh axes; their memory kinds are not kept."""

    def uncut_sharding(sharding):
        kept = [tuple(a for a in dim if a not in axes) for dim in spec_axes(sharding.spec)]
        return NamedSharding(sharding.mesh, PartitionSpec(*(dim or None for dim in kept)))

    return jax.tree.map(uncut_sharding, shardings)
