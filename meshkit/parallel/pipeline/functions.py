"""What a pipeline is made of: the functions that the user writes, what they are given, and what they may return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Functions:
    """A model cut into stages, with its loss.

    They see one device's part of the data, and whole parameters but for the axes that the partitioner has; `outer` also
    stays cut where its specs name the pipeline's axis. They must not communicate over axes of the batch, nor, in a
    stage, over the pipeline's. A stage runs on garbage now and then: it must be finite for finite input.

    Attributes:
        first: (outer, microbatch, StageContext) -> x, floating point arrays, as stages take and return them.
        stage: (chunk's params [chunk_layers, ...], x, StageContext) -> x or StageOutput; `scan_layers` helps.
        last: (outer, y, microbatch, StageContext) -> loss_sum, weight[, metrics].
    """

    first: Callable[..., Any]
    stage: Callable[..., Any]
    last: Callable[..., Any]


@jax.tree_util.register_dataclass
@dataclass
class StageOutput:
    """What a stage returns that has more to say than its activations.

    Attributes:
        x: activations for the next stage, of the shape that came in.
        loss_sum: added to the sum that is divided by the weight of the whole batch: a router's load-balance loss, times
            the weight of its microbatch.
        metrics: scalars; summed over stages, averaged over microbatches.
    """

    x: Any
    loss_sum: Any = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageContext:
    """Where a function of the pipeline runs, and for what. Numbers are traced: they differ between the devices.

    Attributes:
        axis: the mesh axis of the pipeline, over which `first_fn` and `loss_fn` may communicate (a stage may not).
        stage, chunk: of this device and this call.
        microbatch: its number in the batch.
        batch: its part of the batch.
        layers: int32 [chunk_layers], the model's numbers of the chunk's layers, -1 for an inactive one; empty outside
            of stages.
        rng: a key of this microbatch on this part of the data, the same whatever the schedule; None without one.
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
        """Keys [chunk_layers]: `fold_in(rng, layer)`, so that dropout does not depend on stages or schedule."""
        if self.rng is None:
            return None
        return jax.vmap(lambda i: jax.random.fold_in(self.rng, i))(jnp.maximum(self.layers, 0))


def scan_layers(
    layer_fn: Callable[..., Any], params: Any, x: Any, ctx: StageContext, *, wrap: Callable = lambda layer: layer
) -> Any:
    """A chunk's layers one after the other, inactive ones passed over.

    Args:
        layer_fn: (one layer's params, x, key or None) -> x, or StageOutput.
        params: arrays [chunk_layers, ...].
        x: activations.
        ctx: of the stage.
        wrap: put around the body of the scan, (x, inputs) -> (x, outputs): `jax.checkpoint`, to recompute.

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
