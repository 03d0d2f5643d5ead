"""`[pipeline]`: loss, gradients and evaluation of a training step by a pipeline.

    batch [B, ...] -> microbatches [M, B / M, ...] -> meshkit.parallel.pipeline -> loss, metrics, mean gradients

In place of the sums over micro-batches and their reduction: the engine gathers weights (in the compute dtype) once and
reduces gradients (added up in fp32) once a step, over every axis that cuts the batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.config.experiment import Experiment
from meshkit.config.rules import ShardingRules
from meshkit.errors import ConfigError
from meshkit.parallel.pipeline import XLA_OPTIONS, Pipeline, Stack, make_pipeline
from meshkit.sharding import sharding_scope
from meshkit.sharding.constrain import partition_spec
from meshkit.sharding.mesh import AnyMesh
from meshkit.step.gradients import Sums, strip_axes
from meshkit.step.loss import Loss
from meshkit.step.stages import WEIGHT, StageFunctions, check_model, is_variable, layer_count
from meshkit.step.state import DTYPES, LAYERS, Layout, ModelDescription, TrainState, cast, split_rng


@dataclass(frozen=True)
class Pipelined:
    """The pipeline of an experiment, in the terms of its training step.

    Attributes:
        train, evaluation: the pipelines; they differ in the mode of the model.
        layout: of the state, gradients as the pipeline adds them up.
    """

    experiment: Experiment
    rules: ShardingRules
    train: Pipeline
    evaluation: Pipeline
    layout: Layout

    @property
    def stack(self) -> Stack:
        """Where each layer is."""
        return self.train.stack

    @property
    def data(self) -> tuple[str, ...]:
        """Mesh axes over which weights are gathered and gradients reduced once a step."""
        placement = self.train.placement
        return tuple(a for a in placement.data if placement.mesh.shape[a] > 1)

    @property
    def xla_options(self) -> dict[str, object]:
        """Of the GPU compiler."""
        return dict(XLA_OPTIONS)

    def mean_gradients(self, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[Sums, Any]:
        """Sums over the whole batch (its metrics averaged), and gradients of the mean loss."""
        with sharding_scope(self.train.placement.mesh, self.rules):
            found = self.train.value_and_gradients(self._weights(state), self._cut(batch), split_rng(state))
        loss, metrics, gradients = found
        weight = self._weight(metrics)
        gradients = {**gradients["outer"], LAYERS: gradients["stages"]}
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        gradients = jax.lax.with_sharding_constraint(gradients, self.layout.reduced)
        metrics = {name: value for name, value in metrics.items() if name != WEIGHT}
        return Sums(loss * weight, weight, metrics, None), gradients

    def evaluate(self, state: TrainState, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Sums over the batch, forward only."""
        with sharding_scope(self.train.placement.mesh, self.rules):
            loss, metrics = self.evaluation.value(self._weights(state), self._cut(batch), split_rng(state))
        weight = self._weight(metrics)
        return {"loss_sum": jnp.where(weight > 0, loss * weight, 0.0), "weight": weight}

    def _weight(self, metrics: Mapping[str, jax.Array]) -> jax.Array:
        """Of the whole batch; the pipeline gives the mean over its pieces."""
        return metrics[WEIGHT] * (self.experiment.pipeline.microbatches * self.train.placement.shards)

    def _weights(self, state: TrainState) -> dict[str, Any]:
        """Parameters as the pipeline takes them, in the compute dtype: what is gathered is cast already."""
        weights = jax.tree.map(lambda w: cast(w, DTYPES[self.experiment.train.precision]), state.params)
        weights = jax.lax.with_sharding_constraint(weights, self.layout.params)
        return {"stages": weights[LAYERS], "outer": {k: v for k, v in weights.items() if k != LAYERS}}

    def _cut(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Each [B, ...] as [M, B / M, ...]: rows in strides, so that none moves to another GPU."""
        place, count = self.train.placement, self.experiment.pipeline.microbatches

        def one(x):
            pieces = jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)
            spec = PartitionSpec(*place.batch[: pieces.ndim])
            return jax.lax.with_sharding_constraint(pieces, NamedSharding(place.mesh, spec))

        return {name: one(x) for name, x in batch.items()}


def find_stack(experiment: Experiment, mesh: AnyMesh, model: ModelDescription) -> Stack | None:
    """Which layer of the model stands where in the experiment's pipeline; None without one.

    Raises:
        ConfigError: a model without layers to cut, more stages than layers, or a layout that does not fit.
    """
    spec = experiment.pipeline
    if spec.axis is None:
        return None
    check_model(experiment, model)
    try:
        return Stack.of(layer_count(model), mesh.shape[spec.axis], spec.virtual_stages, spec.layout)
    except ConfigError as error:
        key = "layout" if spec.layout else "virtual_stages" if spec.virtual_stages > 1 else "axis"
        raise _at(experiment, key, error) from None


def make_pipelined(
    experiment: Experiment,
    mesh: AnyMesh,
    rules: ShardingRules,
    model: ModelDescription,
    loss: Loss,
    stack: Stack,
    layout: Layout,
) -> Pipelined:
    """The pipeline of an experiment that has one.

    Args:
        experiment: its `[pipeline]` table.
        mesh, rules: of the step.
        model: as it is without a pipeline.
        loss: as `find_loss` gives it.
        stack: from `find_stack`.
        layout: of the state, its layers arranged.

    Raises:
        ConfigError: rules, a head or residuals that the pipeline cannot have.
    """
    spec = experiment.pipeline
    axis = spec.axis
    assert axis is not None
    batch, length = rules.spec_for(("act_batch", "act_length"), kind="activations")
    data = (*batch, *length)
    layout = _whole_gradients(experiment, layout, data)
    specs = jax.tree.map(lambda s: s.spec, layout.params)
    _check_head(experiment, model)
    (experts,) = rules.spec_for(("experts",))

    def build(functions: StageFunctions) -> Pipeline:
        return make_pipeline(
            functions.stage,
            functions.last,
            functions.first,
            mesh=mesh,
            axis=axis,
            layers=stack.layers,
            batch_spec=partition_spec([(), batch, length]),
            kept=tuple(a for a in experts if a in data),
            virtual_stages=stack.virtual_stages,
            layout=stack.counts,
            schedule=spec.schedule,
            residuals=spec.residuals,
            head=spec.head,
            specs={"stages": specs[LAYERS], "outer": {k: v for k, v in specs.items() if k != LAYERS}},
            reduced=jnp.bfloat16 if experiment.train.reduce_precision == "bf16" else None,
        )

    modes = (StageFunctions(experiment, model, loss, training=training) for training in (True, False))
    try:
        train, evaluation = map(build, modes)
    except ConfigError as error:
        raise _at(experiment, "residuals" if "residuals" in str(error) else "axis", error) from None
    return Pipelined(experiment, rules, train, evaluation, layout)


def _whole_gradients(experiment: Experiment, layout: Layout, data: tuple[str, ...]) -> Layout:
    """The layout with gradients as a pipeline adds them up: whole over the axes of the batch.

    Raises:
        ConfigError: `[rules.compute]` or `[rules.gradients]` ask for more than that.
    """
    strip = functools.partial(strip_axes, axes=data)
    gradients = strip(layout.params)
    for table, wanted in (("compute", layout.compute), ("gradients", layout.gradients)):
        if wanted is not None and strip(wanted) != gradients:
            raise experiment.error(
                f"rules.{table}",
                f"in a pipeline [rules.{table}] can only leave out axes of the batch ({', '.join(data)}).",
                hint="the same axes as in [rules.logical] otherwise",
            )
    return dataclasses.replace(layout, gradients=gradients, compute=None)


def _check_head(experiment: Experiment, model: ModelDescription) -> None:
    """Refuses a head over the stages of a model that names no `vocab` dim outside of its layers."""
    if experiment.pipeline.head != "vocab_parallel":
        return
    leaves = jax.tree.leaves({k: v for k, v in model.params.items() if k != LAYERS}, is_leaf=is_variable)
    if not any("vocab" in (leaf.get_metadata().get("out_sharding") or ()) for leaf in leaves):
        raise experiment.error(
            "pipeline.head",
            f"{experiment.model.class_path} has no parameter with a `vocab` dim that stages could share.",
            hint='head = "replicated"',
        )


def _at(experiment: Experiment, key: str, error: ConfigError) -> ConfigError:
    """The error, pointing at a key of `[pipeline]`."""
    return experiment.error(f"pipeline.{key}", error.message, hint=error.hint)
