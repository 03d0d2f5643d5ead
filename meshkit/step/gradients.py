"""Sums of loss and gradients over micro-batches, and what of them is reduced when.

The partitioner reduces a gradient over the mesh as soon as a micro-batch has produced it, and gathers the weights that
FSDP cuts again for each. With several micro-batches that is waste: one buffer can collect all of them first. So the
*deferred* axes, those over which gradients are to be reduced once a step, become a dim of their own: `vmap` over the
replicas, with `spmd_axis_name` to keep each replica on its GPUs. Gradients then carry a leading replica dim, nothing is
reduced or gathered inside the loop, and one reduction follows it. The price is memory: whole weights (in the compute
dtype) and whole gradients on every GPU. `[rules.gradients]` that cut the accumulators over an axis ask for the other
form: reduced with every micro-batch, 1/N of the memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.config.rules import ShardingRules
from meshkit.parallel.compression import Exchange
from meshkit.sharding.constrain import spec_axes
from meshkit.sharding.mesh import AnyMesh


@jax.tree_util.register_dataclass
@dataclass
class Sums:
    """What micro-batches add up: all sums but `metrics`, which the caller divides by their number.

    Out of `sum_over_micro_batches` the gradients carry a leading replica dim if any axis is deferred.
    """

    loss_sum: Any
    weight: Any
    metrics: Any
    gradients: Any


@dataclass(frozen=True)
class MicroBatches:
    """How a global batch is cut: `count` micro-batches, each over the replicas of the deferred axes.

    Attributes:
        batch_axes: mesh axes that cut the batch.
        deferred: those of them over which gradients are summed once per step.
    """

    count: int
    mesh: AnyMesh
    batch_axes: tuple[str, ...]
    deferred: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """Number of pieces over the deferred axes."""
        return math.prod(self.mesh.shape[a] for a in self.deferred)

    def split(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Each [B, ...] as [count, replicas, B / count / replicas, ...] without moving a row to another GPU.

        Micro-batches take rows in strides, since contiguous ones would all lie on the first GPUs.
        """
        kept = tuple(a for a in self.batch_axes if a not in self.deferred)
        sharding = NamedSharding(self.mesh, PartitionSpec(None, self.deferred or None, kept or None))

        def one(x):
            x = x.reshape(self.replicas, -1, self.count, *x.shape[1:])
            return jax.lax.with_sharding_constraint(jnp.moveaxis(x, 2, 0), sharding)

        return {name: one(x) for name, x in batch.items()}


def deferred_axes(rules: ShardingRules, mesh: AnyMesh) -> tuple[str, ...]:
    """The axes over which gradients of several micro-batches are reduced once a step, outermost first.

    They cut the batch and no other activation (the experts' axis does: its weights are not gathered), and
    `[rules.gradients]` does not cut the accumulators over them.
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
    """Sums of a whole batch, and the model's variables after it.

    Args:
        loss_and_gradients: (variables, batch, rng) -> (Sums of a micro-batch, variables).
        micro: how the batch is cut.
        batch: the global batch.
        variables: the model's non-parameter state, handed from each micro-batch to the next.
        rng: key; each micro-batch and replica gets its own.
    """
    if micro.count == 1 and not micro.deferred:
        return loss_and_gradients(variables, batch, rng)
    keys = jax.random.split(rng, (micro.count, micro.replicas))
    replicated = jax.vmap(loss_and_gradients, in_axes=(None, 0, 0), spmd_axis_name=micro.deferred or None)
    pieces = micro.split(batch)

    def one(variables, piece, key):
        if micro.deferred:
            sums, _ = replicated(variables, piece, key)
            return sums, variables
        return loss_and_gradients(variables, jax.tree.map(lambda x: x[0], piece), key[0])

    def body(carry, inputs):
        total, variables = carry
        sums, variables = one(variables, *inputs)
        return (jax.tree.map(jnp.add, total, sums), variables), None

    first = jax.eval_shape(lambda: one(variables, jax.tree.map(lambda x: x[0], pieces), keys[0])[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
    (total, variables), _ = jax.lax.scan(body, (zeros, variables), (pieces, keys))
    if micro.deferred:
        loss_sum, weight, metrics = (_sum_first(x) for x in (total.loss_sum, total.weight, total.metrics))
        total = Sums(loss_sum, weight, metrics, total.gradients)
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
    """Gradients [replicas, ...] summed over the deferred axes, fast axes first, and laid out as the optimizer wants.

    A dim that the optimizer cuts over deferred axes is reduce-scattered over them; the rest is all-reduced, over the
    axis of the exchange in its own way and last.

    Args:
        accumulators: NamedShardings of the gradients without the replica dim.
        reduced: NamedShardings wanted.
        dtype: on the wire, and of the sum.
        exchange: of one deferred axis, over which `reduced` cuts nothing.
        residuals: what the exchange left at the step before; None for no error feedback.

    Returns:
        The sums, and the new residuals or None.
    """
    leaves, tree = jax.tree.flatten(gradients)
    carried = [None] * len(leaves) if residuals is None else tree.flatten_up_to(residuals)
    compressed = (exchange.axis,) if exchange else ()

    def one(x, residual, accumulator, wanted):
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

    done = [one(*each) for each in zip(leaves, carried, tree.flatten_up_to(accumulators), tree.flatten_up_to(reduced))]
    sums = tree.unflatten([total for total, _ in done])
    return sums, None if residuals is None else tree.unflatten([left for _, left in done])


def residual_shardings(params: Any, micro: MicroBatches, accumulators: Any, reduced: Any, axis: str) -> Any:
    """NamedShardings of the residuals [R, ...] that `reduce_replicas` takes, of parameters with these shapes."""

    def one(x, accumulator, wanted):
        _, _, out = _scattered(len(x.shape), micro, accumulator, wanted)
        return NamedSharding(micro.mesh, PartitionSpec(axis, *out))

    return jax.tree.map(one, params, accumulators, reduced)


def _scattered(rank: int, micro: MicroBatches, accumulator: NamedSharding, wanted: NamedSharding):
    """Per dim: axes that cut it before the reduction, deferred axes that it is scattered over; and both as a spec."""
    kept = spec_axes(accumulator.spec, rank)
    scattered = [tuple(a for a in axes if a in micro.deferred) for axes in spec_axes(wanted.spec, rank)]
    return kept, scattered, PartitionSpec(*((*before, *after) or None for before, after in zip(kept, scattered)))


def _sum_first(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), tree)


def strip_axes(shardings: Any, axes: Sequence[str]) -> Any:
    """NamedShardings in which these mesh axes cut nothing."""

    def one(sharding):
        kept = [tuple(a for a in dim if a not in axes) for dim in spec_axes(sharding.spec)]
        return NamedSharding(sharding.mesh, PartitionSpec(*(dim or None for dim in kept)))

    return jax.tree.map(one, shardings)
