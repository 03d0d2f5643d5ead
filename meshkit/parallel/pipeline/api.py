"""`mk.pipeline`: the loss and gradients of anyone's layers, pipelined, in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from meshkit.errors import ConfigError
from meshkit.parallel.pipeline.engine import make_pipeline
from meshkit.parallel.pipeline.residuals import Residuals
from meshkit.sharding.constrain import current_scope
from meshkit.sharding.mesh import AnyMesh


def pipeline(
    stage_fn: Callable[..., Any],
    loss_fn: Callable[..., Any],
    params: Mapping[str, Any],
    batch: Any,
    *,
    first_fn: Callable[..., Any],
    mesh: AnyMesh | None = None,
    axis: str = "pipeline",
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    layout: str | Sequence[int] | None = None,
    residuals: Residuals = "recompute",
    head: str = "replicated",
    batch_spec: PartitionSpec | None = None,
    specs: Mapping[str, Any] | None = None,
    rng: jax.Array | None = None,
    has_metrics: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Loss over a whole batch and its gradients, computed by a pipeline; call it inside `jax.jit`.

        def stage_fn(layers, x, ctx):                 # arrays [layers of the chunk, ...]
            return scan_layers(layer, layers, x, ctx)  # of meshkit.parallel.pipeline
        def first_fn(outer, microbatch, ctx):
            return outer["table"][microbatch["tokens"]]
        def loss_fn(outer, y, microbatch, ctx):
            return loss_sum, weight                   # or loss_sum, weight, metrics

        loss, grads = mk.pipeline(stage_fn, loss_fn, {"stages": layers, "outer": outer}, batch,
                                  first_fn=first_fn, mesh=mesh, schedule="1f1b")

    Layers go in and gradients come out in the model's own order, [layers, ...]. With virtual stages or uneven layers
    they travel between stages for that in every call: a training step keeps them as `Stack.arrange` returns them, and
    calls `Pipeline.value_and_gradients`, which does not.

    Args:
        stage_fn, loss_fn, first_fn: see `Pipeline`.
        params: `{"stages": arrays [layers, ...], "outer": everything else}`.
        batch: arrays [microbatches, batch, ...].
        mesh: attached or described; None takes that of the sharding scope.
        axis: its axis that cuts the layers.
        schedule: `gpipe`, `circular`, `1f1b` or `interleaved_1f1b`.
        virtual_stages: chunks of layers on each stage.
        layout: layers of each virtual stage, see `parse_layout`.
        residuals: `recompute`, `stash`, or a policy of `jax.checkpoint`.
        head: `replicated` or `vocab_parallel`, see `Pipeline`.
        batch_spec: PartitionSpec of the batch's arrays, [microbatches, batch, ...].
        specs: PartitionSpecs of the parameters.
        rng: a key, from which `StageContext.layer_keys` come.
        has_metrics: whether to return metrics.
        options: further fields of `Pipeline`, and `kept` of `Placement`.

    Returns:
        loss and gradients; with `has_metrics`, (loss, metrics) and gradients.

    Raises:
        ConfigError: more stages than layers, a number of microbatches that the schedule cannot have, or sizes and
            names that do not go together.
    """
    scope = current_scope()
    mesh = mesh if mesh is not None else scope and scope.mesh
    if mesh is None:
        raise ConfigError("a pipeline needs a mesh.", hint="mesh=mk.build_mesh(...), or a sharding_scope around it")
    layers = {x.shape[0] for x in jax.tree.leaves(params.get("stages")) if x.shape}
    if len(layers) != 1:
        raise ConfigError(f"the arrays of stages have {sorted(layers) or 'no'} layers: one number is needed.")
    made = make_pipeline(
        stage_fn,
        loss_fn,
        first_fn,
        mesh=mesh,
        axis=axis,
        layers=layers.pop(),
        schedule=schedule,
        virtual_stages=virtual_stages,
        layout=layout,
        residuals=residuals,
        head=head,
        batch_spec=PartitionSpec() if batch_spec is None else batch_spec,
        specs=specs,
        **options,
    )
    arranged = {**params, "stages": made.stack.arrange(params["stages"])}
    loss, metrics, gradients = made.value_and_gradients(arranged, batch, rng)
    gradients = {**gradients, "stages": made.stack.restore(gradients["stages"])}
    return ((loss, metrics) if has_metrics else loss), gradients
