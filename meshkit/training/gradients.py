"""Sums of loss and gradients over micro-batches, and what of them is reduced when. Layer 4.

The partitioner reduces a gradient over the mesh as soon as a micro-batch has produced it. For axes that shard the
gradient (FSDP) that is what one wants: the unreduced gradient of a large model fits in no GPU. For axes over which the
gradient is replicated (plain data parallelism) it is waste: the same buffer could collect all micro-batches first. So
those *deferred* axes become a dim of their own: `vmap` over the replicas, with `spmd_axis_name` to keep each replica on
its GPUs. Gradients then carry a leading replica dim, nothing is reduced inside the loop, and one reduction follows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.sharding.mesh import AnyMesh


@jax.tree_util.register_dataclass
@dataclass
class Sums:
    """What micro-batches add up: all sums but `metrics`, which the caller divides by their number."""

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


def deferred_axes(batch_axes: tuple[str, ...], gradient_shardings: Any, mesh: AnyMesh) -> tuple[str, ...]:
    """The batch axes that shard no gradient, outermost first."""
    sharding: set[str] = set()
    for leaf in jax.tree.leaves(gradient_shardings):
        for axes in leaf.spec:
            sharding.update((axes,) if isinstance(axes, str) else axes or ())
    return tuple(a for a in batch_axes if a not in sharding and mesh.shape[a] > 1)


def sum_over_micro_batches(
    loss_and_gradients: Callable[..., tuple[Sums, Any]],
    micro: MicroBatches,
    batch: Mapping[str, jax.Array],
    variables: Any,
    rng: jax.Array,
    *,
    reduce_dtype: Any,
) -> tuple[Sums, Any]:
    """Sums of a whole batch, and the model's variables after it.

    Args:
        loss_and_gradients: (variables, batch, rng) -> (Sums of a micro-batch, variables).
        micro: how the batch is cut.
        batch: the global batch.
        variables: the model's non-parameter state, handed from each micro-batch to the next.
        rng: key; each micro-batch and replica gets its own.
        reduce_dtype: in which the deferred reduction sums.
    """
    if micro.count == 1:
        return loss_and_gradients(variables, batch, rng)
    keys = jax.random.split(rng, (micro.count, micro.replicas))
    replicated = jax.vmap(loss_and_gradients, in_axes=(None, 0, 0), spmd_axis_name=micro.deferred or None)
    pieces = micro.split(batch)

    def one(variables, piece, key):
        if micro.deferred:
            return replicated(variables, piece, key)
        sums, variables = loss_and_gradients(variables, jax.tree.map(lambda x: x[0], piece), key[0])
        return jax.tree.map(lambda x: x[None], sums), variables

    def body(carry, inputs):
        total, variables = carry
        sums, variables = one(variables, *inputs)
        return (jax.tree.map(jnp.add, total, sums), variables), None

    first = jax.eval_shape(lambda: one(variables, jax.tree.map(lambda x: x[0], pieces), keys[0])[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first)
    (total, variables), _ = jax.lax.scan(body, (zeros, variables), (pieces, keys))
    return jax.tree.map(lambda x: _sum_replicas(x, reduce_dtype), total), variables


def _sum_replicas(x: jax.Array, dtype: Any) -> jax.Array:
    """Sum over the leading replica dim; lax.reduce, since jnp.sum would widen bf16 before it goes on the wire."""
    narrow = dtype if x.ndim > 1 else x.dtype
    x = x.astype(narrow)
    return jax.lax.reduce(x, jnp.zeros((), x.dtype), jax.lax.add, (0,))
