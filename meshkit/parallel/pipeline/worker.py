"""One device's share of a pipeline, inside the shard_map: the user's functions, their context and their calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshkit.parallel.pipeline.manual import ManualAxes, psum
from meshkit.parallel.pipeline.schedules import FIRST, LAST, STAGE
from meshkit.parallel.pipeline.stack import Stack

Sums = dict[str, Any]


@dataclass(frozen=True)
class Functions:
    """A model cut into stages, with its loss.

    Each function gets one device's part of the data. Parameters are cut only over the partitioner's axes and
    `ManualAxes.kept`, and `outer` also over the pipeline's axis where its specs name it. Functions may communicate over
    the batch's axes only if these are `kept`; `stage` may not communicate over the pipeline's axis. `stage` also runs
    on garbage: its output must be finite for finite input.
    """

    first: Callable[..., Any]
    """(outer, microbatch, StageContext) -> x, the floating point arrays that stages take and return."""
    stage: Callable[..., Any]
    """(chunk's params [chunk_layers, ...], x, StageContext) -> x or StageOutput; `scan_layers` helps."""
    last: Callable[..., Any]
    """(outer, y, microbatch, StageContext) -> loss_sum, weight[, metrics]."""


@jax.tree_util.register_dataclass
@dataclass
class StageOutput:
    """The result of a stage that returns a loss or metrics with its activations."""

    x: Any
    """Activations for the next stage, in the shape of the stage's input."""
    loss_sum: Any = 0.0
    """Added to the loss sum, which is divided by the whole batch's weight. An example is a router's load-balance loss
    times the weight of its microbatch."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Scalars; summed over stages, averaged over microbatches."""


@dataclass(frozen=True)
class StageContext:
    """The stage, chunk and microbatch that a function runs for. Numbers are traced, since they differ between devices.

    Attributes:
        axis: the mesh axis of the pipeline, over which `first_fn` and `loss_fn` may communicate (a stage may not).
        stage, chunk: stage of this device and chunk of this call.
        microbatch: the microbatch's number in the batch.
        batch: the microbatch's arrays.
        layers: int32 [chunk_layers], the model's numbers of the chunk's layers, -1 for an inactive one; empty outside
            of stages.
        rng: a key for this microbatch and this part of the data, the same in any schedule; None if none was given.
        padded: whether some layer of the pipeline is inactive.
    """

    axis: str
    stage: Any
    chunk: Any
    microbatch: Any
    batch: Any
    layers: Any
    rng: Any = None
    padded: bool = False

    def layer_keys(self) -> jax.Array | None:
        """Return keys [chunk_layers], `fold_in(rng, layer)`: dropout does not depend on stages or schedule."""
        if self.rng is None:
            return None
        return jax.vmap(lambda i: jax.random.fold_in(self.rng, i))(jnp.maximum(self.layers, 0))


def scan_layers(
    layer_fn: Callable[..., Any], params: Any, x: Any, ctx: StageContext, *, wrap: Callable = lambda layer: layer
) -> Any:
    """Run a chunk's layers one after the other; an inactive layer returns its input.

    Args:
        layer_fn: (one layer's params, x, key or None) -> x, or StageOutput.
        params: arrays [chunk_layers, ...].
        wrap: applied to the body of the scan, (x, inputs) -> (x, outputs), such as `jax.checkpoint` to recompute.

    Returns:
        activations, or a StageOutput where layer_fn returns one.
    """

    def body(x, inputs):
        layer_params, layer, key = inputs
        out = layer_fn(layer_params, x, key)
        more = None
        if isinstance(out, StageOutput):
            out, more = out.x, (jnp.asarray(out.loss_sum, jnp.float32), dict(out.metrics))
        if ctx.padded:
            out = jax.tree.map(lambda new, old: jnp.where(layer >= 0, new, old), out, x)
            more = jax.tree.map(lambda value: jnp.where(layer >= 0, value, 0), more)
        return out, more

    x, more = jax.lax.scan(wrap(body), x, (params, ctx.layers, ctx.layer_keys()))
    if more is None:
        return x
    loss_sum, metrics = jax.tree.map(lambda value: value.sum(0), more)
    return StageOutput(x, loss_sum, metrics)


@dataclass(frozen=True)
class Worker:
    """The part of a pipeline that one device holds, and its computations."""

    functions: Functions
    stack: Stack
    axes: ManualAxes
    shared_head: bool
    """Whether all devices work on the loss of each microbatch."""
    weights: Any
    """This stage's arrays [chunks, chunk_layers, ...], gathered over FSDP's axes."""
    outer: Any
    batch: Any
    """This device's part of the data, [microbatches, ...]."""
    rng: Any

    @property
    def stage(self) -> jax.Array:
        """This device's stage."""
        return lax.axis_index(self.axes.axis)

    @property
    def last(self) -> int:
        """The last stage."""
        return self.axes.stages - 1

    def chunk_of(self, weights: Any, chunk: Any) -> Any:
        """Return one chunk of arrays [chunks, ...]."""
        return jax.tree.map(lambda w: pick(w, chunk), weights)

    def run_stage(self, weights: Any, x: Any, chunk: Any, microbatch: Any) -> tuple[tuple[Any, Any], Mapping[str, Any]]:
        """Return ((activations, loss_sum), metrics) of a chunk.

        Args:
            weights: the chunk's arrays [chunk_layers, ...].

        Returns:
            Activations in the stage's own dtypes; loss_sum and metrics in fp32.
        """
        with jax.named_scope(STAGE):
            out = self.functions.stage(weights, x, self._context(chunk, microbatch, self.stack.table))
        if not isinstance(out, StageOutput):
            out = StageOutput(out)
        return (out.x, _fp32(out.loss_sum)), jax.tree.map(_fp32, dict(out.metrics))

    def enter(self, outer: Any, microbatch: Any) -> Any:
        """Return the input of the first layer."""
        with jax.named_scope(FIRST):
            ctx = self._context(0, microbatch, offset=1)
            return self.functions.first(outer, ctx.batch, ctx)

    def score(self, outer: Any, y: Any, microbatch: Any, mine: Any) -> tuple[Any, tuple[Any, Mapping[str, Any]]]:
        """Return loss_sum, (weight, metrics) of a microbatch; a shared head takes y from where `mine` is True."""
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
        """Send activations to the next stage (step 1), or gradients to the one before (-1).

        With one chunk, the last and the first stage exchange nothing. The caller must pass the result through
        `lax.optimization_barrier`. Otherwise XLA's collective-permute-motion moves the permute to the start of the
        loop, where nothing hides it.

        Returns:
            What the neighbour sent; zeros on a stage to which none sends.
        """
        s, ring = self.axes.stages, self.stack.virtual_stages > 1
        pairs = [(i, (i + step) % s) for i in range(s) if ring or 0 <= i + step < s]
        with jax.named_scope("pass_on"):
            return jax.tree.map(lambda a: lax.ppermute(a, self.axes.axis, pairs), tree)

    def empty_sums(self, x: Any) -> Sums:
        """Return zeros for all sums of a step."""
        chunk = self.chunk_of(self.weights, 0)
        _, stage_metrics = jax.eval_shape(lambda: self.run_stage(chunk, x, 0, 0))
        _, (_, loss_metrics) = jax.eval_shape(lambda: self.score(self.outer, x, 0, True))
        zero = jnp.zeros((), jnp.float32)
        metrics = {"stages": stage_metrics, "last": loss_metrics}
        return {"loss": zero, "weight": zero, **jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), metrics)}


def add(sums: Sums, valid: Any, **more: Any) -> Sums:
    """Add a chunk's values (`loss`, `stages`), or a microbatch's (`loss`, `weight`, `last`), to the sums.

    Nothing is added where the traced `valid` is False.
    """
    return sums | {k: jax.tree.map(lambda a, b: a + where(valid, b, 0.0), sums[k], v) for k, v in more.items()}


def pick(x: jax.Array, i: Any) -> jax.Array:
    """Return x[i] for a traced i that is in bounds."""
    return x[0] if x.shape[0] == 1 else lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def put(x: jax.Array, value: jax.Array, i: Any) -> jax.Array:
    """Return x with x[i] = value, in place where XLA can."""
    return lax.dynamic_update_index_in_dim(x, value.astype(x.dtype), i, 0)


def where(mask: Any, a: Any, b: Any) -> Any:
    """Apply `jnp.where` to trees: garbage is left out, never multiplied by zero."""
    return jax.tree.map(lambda x, y: jnp.where(mask, x, y), a, b)


def _fp32(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float32)
