"""One device's share of a pipeline, inside its shard_map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshkit.parallel.pipeline.functions import Functions, StageContext, StageOutput
from meshkit.parallel.pipeline.manual import ManualAxes, psum
from meshkit.parallel.pipeline.report import FIRST, LAST, STAGE
from meshkit.parallel.pipeline.stack import Stack

Sums = dict[str, Any]


@dataclass(frozen=True)
class Worker:
    """What a device has of a pipeline, and what it can do with it."""

    functions: Functions
    stack: Stack
    axes: ManualAxes
    shared_head: bool  # all devices work on the loss of each microbatch
    weights: Any  # arrays [v, chunk_layers, ...] of this stage, whole but for the partitioner's axes
    outer: Any  # the parameters outside of stages
    batch: Any  # this device's part of the data, [microbatches, ...]
    rng: Any  # a key, or None

    @property
    def stage(self) -> jax.Array:
        """This device's stage."""
        return lax.axis_index(self.axes.axis)

    @property
    def last(self) -> int:
        """The last stage."""
        return self.axes.stages - 1

    def chunk_of(self, weights: Any, chunk: Any) -> Any:
        """One chunk of arrays [v, ...]."""
        return jax.tree.map(lambda w: pick(w, chunk), weights)

    def run_stage(self, weights: Any, x: Any, chunk: Any, microbatch: Any) -> tuple[tuple[Any, Any], Mapping[str, Any]]:
        """((activations, loss_sum), metrics) of a chunk; weights are those of the chunk."""
        with jax.named_scope(STAGE):
            out = self.functions.stage(weights, x, self._context(chunk, microbatch, self.stack.table))
        if not isinstance(out, StageOutput):
            out = StageOutput(out)
        return (out.x, _fp32(out.loss_sum)), jax.tree.map(_fp32, dict(out.metrics))

    def enter(self, outer: Any, microbatch: Any) -> Any:
        """What comes before the first layer."""
        with jax.named_scope(FIRST):
            ctx = self._context(0, microbatch, offset=1)
            return self.functions.first(outer, ctx.batch, ctx)

    def score(self, outer: Any, y: Any, microbatch: Any, mine: Any) -> tuple[Any, tuple[Any, Mapping[str, Any]]]:
        """loss_sum, (weight, metrics) of a microbatch; with the vocabulary over the pipeline every device computes it.

        Args:
            outer: parameters.
            y: activations of the last layer, on the last stage.
            microbatch: its number.
            mine: whether this device is the one that has them.
        """
        with jax.named_scope(LAST):
            if self.shared_head:
                axis, mesh = self.axes.axis, self.axes.mesh
                y = jax.tree.map(lambda a: psum(where(mine, a, jnp.zeros_like(a)), axis, mesh), y)
            ctx = self._context(self.stack.virtual_stages - 1, microbatch, offset=2)
            loss_sum, weight, *metrics = self.functions.last(outer, y, ctx.batch, ctx)
        return _fp32(loss_sum), (_fp32(weight), jax.tree.map(_fp32, dict(metrics[0]) if metrics else {}))

    def _context(
        self, chunk: Any, microbatch: Any, table: np.ndarray | None = None, *, offset: int = 0
    ) -> StageContext:
        stage, data = self.stage, self.axes.data
        layers = jnp.zeros((0,), jnp.int32) if table is None else jnp.asarray(table)[chunk, stage]
        rng = self.rng
        if rng is not None:
            rng = jax.random.fold_in(rng, microbatch)
            rng = jax.random.fold_in(rng, lax.axis_index(data) if data else 0)
            rng = jax.random.fold_in(rng, self.stack.layers + offset) if offset else rng
        batch = self.chunk_of(self.batch, microbatch)
        return StageContext(self.axes.axis, stage, chunk, microbatch, batch, layers, rng, self.stack.padded)

    def pass_on(self, tree: Any, step: int) -> Any:
        """Activations to the next stage (step 1), or gradients to the one before (-1).

        One chunk needs no way from the last stage back to the first. What arrives must go through `lax.
        optimization_barrier`: without it, XLA's collective-permute-motion moves the permute to the head of the loop,
        where nothing hides it.
        """
        s, ring = self.axes.stages, self.stack.virtual_stages > 1
        pairs = [(i, (i + step) % s) for i in range(s) if ring or 0 <= i + step < s]
        with jax.named_scope("pass_on"):
            return jax.tree.map(lambda a: lax.ppermute(a, self.axes.axis, pairs), tree)

    def empty_sums(self, x: Any) -> Sums:
        """Zeros, of the shape of all sums of a step."""
        chunk = self.chunk_of(self.weights, 0)
        _, stage_metrics = jax.eval_shape(lambda: self.run_stage(chunk, x, 0, 0))
        _, (_, loss_metrics) = jax.eval_shape(lambda: self.score(self.outer, x, 0, True))
        zero = jnp.zeros((), jnp.float32)
        metrics = {"stages": stage_metrics, "last": loss_metrics}
        return {"loss": zero, "weight": zero, **jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), metrics)}


def add(sums: Sums, valid: Any, **more: Any) -> Sums:
    """Sums with those of a chunk (`loss`, `stages`), or of a microbatch's loss (`loss`, `weight`, `last`)."""
    return sums | {k: jax.tree.map(lambda a, b: a + where(valid, b, 0.0), sums[k], v) for k, v in more.items()}


def pick(x: jax.Array, i: Any) -> jax.Array:
    """x[i], i traced and in bounds."""
    return x[0] if x.shape[0] == 1 else lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def put(x: jax.Array, value: jax.Array, i: Any) -> jax.Array:
    """x with x[i] = value, in place where XLA can."""
    return lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), i, 0)


def where(mask: Any, a: Any, b: Any) -> Any:
    """`jnp.where` over trees: garbage is left out, never multiplied by zero."""
    return jax.tree.map(lambda x, y: jnp.where(mask, x, y), a, b)


def _fp32(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32)
