"""The training step: one jitted function that `train` runs and `plan` compiles.

Data, fully sharded and tensor parallelism are nothing but the shardings that the rules give the state and the
constraints inside the model. Building a step touches no device: a described mesh does as well as an attached one.

    weights   = params, cast and laid out for compute          [rules.compute]
    gradients = d(loss_sum)/d(weights), micro-batch by micro-batch, accumulated as [rules.gradients] lay them out
    params, opt_state = optimizer(gradients / weight)          [rules.optimizer]

Weights are gathered and gradients reduced once a step over the axes that `deferred_axes` names; see gradients.py. Over
the axis of `[compression]` gradients travel in few bits, and with `[local_sgd]` the program is a round of several steps
(rounds.py). With `[pipeline]` loss and gradients come from stages (pipelined.py).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from meshkit.config.experiment import Experiment
from meshkit.config.rules import ShardingRules
from meshkit.parallel.compression import WIRES, Exchange, zero_residuals
from meshkit.parallel.local_sgd import LocalSgd, wait_before_backward
from meshkit.sharding import sharding_scope
from meshkit.sharding.mesh import AnyMesh
from meshkit.step.data import abstract_batch
from meshkit.step.gradients import (
    MicroBatches,
    Sums,
    deferred_axes,
    reduce_replicas,
    residual_shardings,
    strip_axes,
    sum_over_micro_batches,
)
from meshkit.step.local_sgd import Rounds, check_replicas, find_local_sgd
from meshkit.step.loss import Loss, find_loss
from meshkit.step.optimizer import make_optimizer, make_schedule, update_params
from meshkit.step.pipelined import Arrangement, Pipelined, arrange_description, find_stack, make_pipelined
from meshkit.step.program import TrainProgram, find_facts, find_notes
from meshkit.step.state import (
    DTYPES,
    Layout,
    ModelDescription,
    TrainState,
    cast,
    describe_model,
    init_state,
    lay_out,
    replace,
    split_rng,
    state_shardings,
)

__all__ = ["TrainProgram", "make_train_step"]


@dataclass(frozen=True)
class _Parts:
    """What the traced functions close over; no arrays.

    Attributes:
        inside: the rules as one replica of the deferred axes sees them.
        exchange: of `[compression]`.
        described: the model as it is without a pipeline.
        pipelined: of `[pipeline]`; `model` and `layout` have its stages' layers then.
    """

    experiment: Experiment
    mesh: AnyMesh
    rules: ShardingRules
    inside: ShardingRules
    model: ModelDescription
    loss: Loss
    optimizer: optax.GradientTransformation
    layout: Layout
    micro: MicroBatches
    described: ModelDescription
    exchange: Exchange | None = None
    pipelined: Pipelined | None = None


def make_train_step(experiment: Experiment, mesh: AnyMesh, rules: ShardingRules | None = None) -> TrainProgram:
    """The experiment's training step on a mesh, attached or described.

    Args:
        experiment: names the model, loss, optimizer and precision.
        mesh: its axes must be those that the rules name.
        rules: in place of the experiment's own.

    Raises:
        ConfigError: a model or loss that cannot be imported, options it does not take, or rules that do not fit it.
    """
    rules = rules or experiment.rules
    parts = _gather_parts(experiment, mesh, rules)
    local, inner = _find_rounds(parts)
    rounds = Rounds(local, functools.partial(_train_step, inner), parts.micro.batch_axes) if local else None
    params = nnx.to_pure_dict(parts.model.params)
    shards = _state_shardings(parts, params)
    if rounds:
        shards = rounds.shardings(shards, params)

    def train_step(state: TrainState, batch: Mapping[str, jax.Array]):
        return rounds.run(state, batch) if rounds else _train_step(parts, state, batch)

    def gradients(state: TrainState, batch: Mapping[str, jax.Array]):
        sums, gradients, _, _ = _mean_gradients(parts, state, batch)
        return sums.loss_sum / sums.weight, gradients

    def evaluate(state: TrainState, batch: Mapping[str, jax.Array]):
        return _evaluate(parts, state, batch)

    def init():
        stack = parts.pipelined.stack if parts.pipelined else None
        state = _with_residuals(parts, init_state(experiment, parts.optimizer, stack))
        return rounds.extend(state) if rounds else state

    shapes = jax.eval_shape(init)
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shards)
    batch = abstract_batch(experiment, mesh, parts.rules)
    stacked = rounds.stack(batch) if rounds else batch
    pipeline = parts.pipelined.train if parts.pipelined else None
    facts = find_facts(
        experiment,
        parts.described,
        state,
        gradients_bytes=_accumulated_bytes(inner, params),
        steps_per_call=rounds.local.every if rounds else 1,
        pipeline=pipeline,
    )
    return TrainProgram(
        step=jax.jit(train_step, donate_argnums=0, out_shardings=(shards, None)),
        gradients=jax.jit(gradients),
        evaluate=jax.jit(evaluate),
        init=jax.jit(init, out_shardings=shards),
        abstract_state=state,
        abstract_batch=stacked,
        abstract_step_batch=batch,
        mesh=mesh,
        rules=parts.rules,
        facts=facts,
        model=parts.model,
        deferred=(*([local.axis] if local else []), *inner.micro.deferred),
        notes=find_notes(experiment, parts.model),
        xla_options=rounds.xla_options if rounds else parts.pipelined.xla_options if parts.pipelined else {},
        stack=jax.jit(_stack, out_shardings={n: x.sharding for n, x in stacked.items()}) if rounds else None,
        pipeline=pipeline,
        arrangement=_arrangement(parts, state),
    )


def _arrangement(parts: _Parts, state: TrainState) -> Arrangement | None:
    if parts.pipelined is None:
        return None
    return Arrangement(parts.pipelined.stack, parts.experiment.pipeline.axis or "", parts.optimizer, state)


def _accumulated_bytes(parts: _Parts, abstract_params: Any) -> int:
    """fp32 bytes of one GPU's gradients, whole over the axes that are reduced once a step."""
    shards = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), abstract_params, parts.layout.gradients)
    return 4 * sum(jax.tree.leaves(shards))


def _stack(batches: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
    return {name: jnp.stack([batch[name] for batch in batches]) for name in batches[0]}


def _find_rounds(parts: _Parts) -> tuple[LocalSgd | None, _Parts]:
    """The `[local_sgd]` of an experiment, and the parts of the step that each replica makes on its own."""
    local = find_local_sgd(parts.experiment, parts.mesh, parts.layout)
    if local is None:
        return None, parts
    return local, _gather_parts(parts.experiment, parts.mesh, parts.rules.without((local.axis,)))


def _gather_parts(experiment: Experiment, mesh: AnyMesh, rules: ShardingRules) -> _Parts:
    described = model = describe_model(experiment)
    if experiment.train.remat != "none" and not model.takes_remat:
        name = experiment.model.class_path
        raise experiment.error("train.remat", f"{name} takes no `remat` argument, so it cannot recompute.")
    stack = find_stack(experiment, mesh, described)
    if stack is not None:
        model = arrange_description(described, stack)
    optimizer = make_optimizer(experiment.optimizer, experiment.train.steps)
    layout = lay_out(model, optimizer, mesh, rules, memory=experiment.optimizer.memory)
    (batch_axes,) = rules.spec_for(("act_batch",), kind="activations")
    loss = find_loss(experiment)
    if stack is not None:
        pipelined = make_pipelined(experiment, mesh, rules, described, loss, stack, layout)
        micro = MicroBatches(experiment.pipeline.microbatches, mesh, batch_axes, pipelined.data)
        layout = pipelined.layout
        return _Parts(
            experiment, mesh, rules, rules, model, loss, optimizer, layout, micro, described, pipelined=pipelined
        )
    count = experiment.train.accumulate
    # A model with state of its own (batch statistics) must see its micro-batches one after the other.
    separable = not jax.tree.leaves(layout.variables)
    deferred = deferred_axes(rules, mesh) if separable and count > 1 else ()
    exchange = _find_exchange(experiment, mesh, layout) if experiment.local_sgd.axis is None else None
    if exchange:
        deferred = tuple(a for a in batch_axes if a in (*deferred, exchange.axis))
    if deferred:
        compute = layout.params if layout.compute is None else layout.compute
        compute = strip_axes(compute, deferred)
        if compute == layout.params:
            compute = None
        layout = dataclasses.replace(layout, compute=compute, gradients=strip_axes(layout.gradients, deferred))
    micro = MicroBatches(count, mesh, batch_axes, deferred)
    inside = rules.without(deferred) if deferred else rules
    return _Parts(experiment, mesh, rules, inside, model, loss, optimizer, layout, micro, described, exchange)


def _find_exchange(experiment: Experiment, mesh: AnyMesh, layout: Layout) -> Exchange | None:
    """The exchange of `[compression]`; None without one, or over an axis of one GPU.

    Raises:
        ConfigError: the axis cuts more than the batch, or the model has state that its replicas would not share.
    """
    spec = experiment.compression
    if spec.axis is None or mesh.shape[spec.axis] == 1:
        return None
    check_replicas(experiment, "compression.axis", spec.axis, layout)
    if jax.tree.leaves(layout.variables):
        name = experiment.model.class_path
        message = f"{name} has state beside its parameters (batch statistics), which compression would not reduce."
        raise experiment.error("compression", message, hint="a model without such state, or no [compression]")
    return Exchange(spec.axis, mesh.shape[spec.axis], WIRES[spec.dtype])


def _state_shardings(parts: _Parts, params: Any) -> TrainState:
    """NamedShardings of the state that `_train_step` carries."""
    shards, exchange, layout = state_shardings(parts.layout), parts.exchange, parts.layout
    if exchange is None or not parts.experiment.compression.error_feedback:
        return shards
    residuals = residual_shardings(params, parts.micro, layout.gradients, layout.reduced, exchange.axis)
    return replace(shards, extra={"residuals": residuals})


def _with_residuals(parts: _Parts, state: TrainState) -> TrainState:
    if parts.exchange is None or not parts.experiment.compression.error_feedback:
        return state
    return replace(state, extra={"residuals": zero_residuals(state.params, parts.exchange.replicas)})


def _train_step(
    parts: _Parts, state: TrainState, batch: Mapping[str, jax.Array], beside: Any = None
) -> tuple[TrainState, dict]:
    """The state after a step and its metrics; `beside` is what another computation exchanges during the step."""
    sums, gradients, variables, extra = _mean_gradients(parts, state, batch, beside)
    with jax.named_scope("optimizer"):
        params, opt_state = update_params(parts.optimizer, parts.layout, gradients, state)
    schedule = make_schedule(parts.experiment.optimizer, parts.experiment.train.steps)
    metrics = {
        **sums.metrics,
        "loss": sums.loss_sum / sums.weight,
        "grad_norm": optax.tree.norm(gradients),
        "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
        "weight": sums.weight,
    }
    after = replace(state, step=state.step + 1, params=params, opt_state=opt_state, variables=variables, extra=extra)
    return after, metrics


def _mean_gradients(
    parts: _Parts, state: TrainState, batch: Mapping[str, jax.Array], beside: Any = None
) -> tuple[Sums, Any, Any, Any]:
    """Sums over the whole batch (its metrics averaged), gradients of the mean loss; variables and extra state after."""
    if parts.pipelined:
        return *parts.pipelined.mean_gradients(state, batch), state.variables, state.extra
    weights = _compute_weights(parts, state.params)
    sums, variables = sum_over_micro_batches(
        lambda variables, batch, rng: _loss_and_gradients(parts, weights, variables, batch, rng, beside),
        parts.micro,
        batch,
        state.variables,
        split_rng(state),
    )
    gradients, reduced, extra = sums.gradients, parts.layout.reduced, state.extra
    if parts.micro.deferred:
        gradients, residuals = reduce_replicas(
            gradients,
            parts.micro,
            parts.layout.gradients,
            reduced,
            DTYPES[parts.experiment.train.reduce_precision],
            exchange=parts.exchange,
            residuals=extra.get("residuals"),
        )
        extra = extra if residuals is None else {"residuals": residuals}
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / sums.weight, gradients)
    gradients = jax.lax.with_sharding_constraint(gradients, reduced)
    pieces = parts.micro.count * parts.micro.replicas
    sums = dataclasses.replace(sums, metrics=jax.tree.map(lambda m: m / pieces, sums.metrics))
    return sums, gradients, variables, extra


def _evaluate(parts: _Parts, state: TrainState, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums over the batch, a micro-batch at a time: what fits in training fits here."""
    if parts.pipelined:
        return parts.pipelined.evaluate(state, batch)
    weights = _compute_weights(parts, state.params)
    micro = MicroBatches(parts.micro.count, parts.mesh, parts.micro.batch_axes)

    def one(piece):
        piece = jax.tree.map(lambda x: x[0], piece)
        loss_sum, (weight, _, _) = _forward(
            parts, parts.rules, weights, state.variables, piece, split_rng(state), training=False
        )
        return {"loss_sum": loss_sum, "weight": weight}

    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(one, micro.split(batch)))


def _loss_and_gradients(
    parts: _Parts, weights: Any, variables: Any, batch: Any, rng: jax.Array, beside: Any = None
) -> tuple[Sums, Any]:
    """Sums of one micro-batch, gradients laid out as the accumulators are, and fp32."""

    def forward(weights):
        loss_sum, rest = _forward(parts, parts.inside, weights, variables, batch, rng)
        return (loss_sum if beside is None else wait_before_backward(loss_sum, beside)), rest

    (loss_sum, (weight, metrics, variables)), gradients = jax.value_and_grad(forward, has_aux=True)(weights)
    gradients = jax.lax.with_sharding_constraint(gradients, parts.layout.gradients)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
    return Sums(loss_sum, jnp.asarray(weight, jnp.float32), metrics, gradients), variables


def _forward(parts: _Parts, rules: ShardingRules, weights, variables, batch, rng, *, training: bool = True):
    """loss_sum, (weight, metrics, variables after) of the user's loss, inside the sharding scope."""
    with sharding_scope(parts.mesh, rules):
        model = parts.model.merge(weights, variables)
        model.train() if training else model.eval()
        loss_sum, weight, metrics = parts.loss(model, batch, rng)
    _, _, variables = nnx.split(model, nnx.Param, ...)
    return loss_sum, (weight, dict(metrics), nnx.to_pure_dict(variables))


def _compute_weights(parts: _Parts, params: Any) -> Any:
    """The weights as the model gets them: `[rules.compute]` applied, in the dtype that gradients shall be reduced in.

    A model that does its own casts is given fp32 weights for an fp32 reduction (see the precision rule in
    models/layers.py); what `[rules.compute]` gathers still travels in the compute dtype.
    """
    train, layout = parts.experiment.train, parts.layout
    compute, reduce = DTYPES[train.precision], DTYPES[train.reduce_precision]
    given = reduce if parts.model.takes_dtype and train.precision != "fp32" else compute
    weights = params
    if layout.compute is not None:
        weights = jax.tree.map(lambda w: cast(w, compute), weights)
        # Pinned in pieces first, so that the partitioner gathers what was cast and does not cast what it gathered.
        weights = jax.lax.with_sharding_constraint(weights, layout.params)
        weights = jax.lax.with_sharding_constraint(weights, layout.compute)
    return jax.tree.map(lambda w: cast(w, given), weights)
