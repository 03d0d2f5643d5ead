"""The training step: one jitted function that `train` runs and `plan` compiles.

Data, fully sharded and tensor parallelism are only shardings: those that the rules give the state, and the constraints
inside the model. Building a step uses no device, so a described mesh works as well as an attached one.

    weights   = params, cast and laid out for compute          [rules.compute]
    gradients = d(loss_sum)/d(weights), summed over the micro-batches in the layout of [rules.gradients]
    params, opt_state = optimizer(gradients / weight)          [rules.optimizer]

Over the axes that `deferred_axes` returns, weights are gathered and gradients reduced once a step; see loss.py. Over
the axis of `[compression]`, gradients are sent in 8 or 16 bits. With `[local_sgd]`, the program makes several steps of
each replica (local_sgd.py). With `[pipeline]`, a pipeline computes loss and gradients (pipelined.py).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType

from meshkit.config.places import UserCode
from meshkit.config.rules import ShardingRules
from meshkit.config.sections import OptimizerTable
from meshkit.config.toml import did_you_mean
from meshkit.errors import ConfigError, a_type, check_kinds
from meshkit.parallel.compression import WIRES, Exchange, zero_residuals
from meshkit.sharding import sharding_scope, shardings
from meshkit.sharding.mesh import AnyMesh, DescribedMesh
from meshkit.sharding.resolve import keep_shardings
from meshkit.step.data import abstract_batch
from meshkit.step.local_sgd import LocalSgdStep, check_replicas, find_local_sgd, wait_before_backward
from meshkit.step.loss import (
    Loss,
    MicroBatches,
    Sums,
    checked_loss,
    deferred_axes,
    reduce_replicas,
    residual_shardings,
    strip_axes,
    sum_over_micro_batches,
)
from meshkit.step.muon import MatrixStack, find_matrices, muon
from meshkit.step.pipelined import Arrangement, Pipelined, arrange_description, find_stack, make_pipelined
from meshkit.step.program import TrainProgram, find_facts, find_notes
from meshkit.step.spec import StepSpec
from meshkit.step.state import (
    DTYPES,
    ModelDescription,
    StateLayout,
    TrainState,
    cast,
    describe_model,
    in_fp32,
    init_state,
    lay_out,
    map_moments,
    returned_kinds,
    split_rng,
    state_shardings,
)

__all__ = ["TrainProgram", "build_train_step"]
_NOT_DECAYED = ("scale", "bias", "sinks")


def update_params(
    optimizer: optax.GradientTransformation, layout: StateLayout, gradients: Any, state: TrainState
) -> tuple[Any, Any]:
    """Return parameters and optimizer state after a step.

    State in host memory is moved to the device and back here. It is moved only once the gradients exist, since
    activations need the GPU's memory until then.

    Returns:
        Parameters, and the optimizer's state in the memory that `layout.opt_state` names.
    """
    opt_state = state.opt_state
    if layout.opt_on_device is not None:
        gradients, opt_state = jax.lax.optimization_barrier((gradients, opt_state))
        opt_state = jax.device_put(opt_state, layout.opt_on_device)
    # The optimizer gets fp32 parameters, whatever dtype they are kept in, since its moments were initialized for fp32.
    updates, opt_state = optimizer.update(gradients, opt_state, jax.tree.map(in_fp32, state.params))
    if layout.opt_on_device is not None:
        opt_state = jax.device_put(opt_state, layout.opt_state)
    return optax.apply_updates(state.params, updates), opt_state


@dataclass(frozen=True)
class StepFunctions:
    """The functions of one training step on a mesh, with the values that they close over, which are no arrays."""

    spec: StepSpec
    mesh: AnyMesh
    rules: ShardingRules
    inside: ShardingRules
    """The rules inside one replica, without the deferred axes."""
    model: ModelDescription
    """With a pipeline, its layers and those of the layout are arranged in stages."""
    loss: Loss
    optimizer: optax.GradientTransformation
    layout: StateLayout
    micro: MicroBatches
    described: ModelDescription
    """The model as it is without a pipeline."""
    exchange: Exchange | None = None
    pipelined: Pipelined | None = None

    @property
    def _keeps_residuals(self) -> bool:
        return self.exchange is not None and self.spec.compression.error_feedback

    def init(self) -> TrainState:
        """Return the state before the first step."""
        state = init_state(self.spec, self.optimizer, self.pipelined.stack if self.pipelined else None)
        if self.exchange is None or not self._keeps_residuals:
            return state
        return replace(state, extra={"residuals": zero_residuals(state.params, self.exchange.replicas)})

    def shardings(self, params: Any) -> TrainState:
        """Return the NamedShardings of the state that `train` takes and returns."""
        shards, layout = state_shardings(self.layout), self.layout
        if self.exchange is None or not self._keeps_residuals:
            return shards
        residuals = residual_shardings(params, self.micro, layout.gradients, layout.reduced, self.exchange.axis)
        return replace(shards, extra={"residuals": residuals})

    def gradients_bytes(self, params: Any) -> int:
        """Return the fp32 bytes of one GPU's gradients, which are whole over axes that are reduced once a step."""
        shards = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), params, self.layout.gradients)
        return 4 * sum(jax.tree.leaves(shards))

    def train(
        self, state: TrainState, batch: Mapping[str, jax.Array], exchanged: Any = None
    ) -> tuple[TrainState, dict]:
        """Return the state after a step and its metrics; `exchanged` is that of `LocalSgd.outer_step`."""
        sums, gradients, variables, extra = self.mean_gradients(state, batch, exchanged)
        with jax.named_scope("optimizer"):
            params, opt_state = update_params(self.optimizer, self.layout, gradients, state)
        schedule = make_schedule(self.spec.optimizer, self.spec.train.steps)
        metrics = {
            **sums.metrics,
            "loss": sums.loss_sum / sums.weight,
            "grad_norm": optax.tree.norm(without_signed(gradients, sign_steps(self.model.params))),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
            "weight": sums.weight,
        }
        step = state.step + 1
        after = replace(state, step=step, params=params, opt_state=opt_state, variables=variables, extra=extra)
        return after, metrics

    def mean_gradients(
        self, state: TrainState, batch: Mapping[str, jax.Array], exchanged: Any = None
    ) -> tuple[Sums, Any, Any, Any]:
        """Return Sums over the batch (metrics averaged), gradients of the mean loss, new variables and new extra."""
        if self.pipelined:
            return *self.pipelined.mean_gradients(state, batch), state.variables, state.extra
        weights = self._compute_weights(state.params)
        sums, variables = sum_over_micro_batches(
            lambda variables, batch, rng: self._loss_and_gradients(weights, variables, batch, rng, exchanged),
            self.micro,
            batch,
            state.variables,
            split_rng(state),
        )
        gradients, reduced, extra = sums.gradients, self.layout.reduced, state.extra
        if self.micro.deferred:
            gradients, residuals = reduce_replicas(
                gradients,
                self.micro,
                self.layout.gradients,
                reduced,
                DTYPES[self.spec.train.reduce_precision],
                exchange=self.exchange,
                residuals=extra.get("residuals"),
            )
            extra = extra if residuals is None else {"residuals": residuals}
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32) / sums.weight, gradients)
        gradients = jax.lax.with_sharding_constraint(gradients, reduced)
        pieces = self.micro.count * self.micro.replicas
        sums = replace(sums, metrics=jax.tree.map(lambda m: m / pieces, sums.metrics))
        return sums, gradients, self._with_histories(variables, sums.histories), extra

    def evaluate(self, state: TrainState, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return sums over the batch, a micro-batch at a time: whatever fits into memory in training fits here."""
        if self.pipelined:
            return self.pipelined.evaluate(state, batch)
        weights = self._compute_weights(state.params)
        micro = MicroBatches(self.micro.count, self.mesh, self.micro.batch_axes)

        def score_piece(piece):
            piece, rng = jax.tree.map(lambda x: x[0], piece), split_rng(state)
            loss_sum, (weight, _, _) = self._forward(self.rules, weights, state.variables, piece, rng, training=False)
            return {"loss_sum": loss_sum, "weight": weight}

        return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(score_piece, micro.split(batch)))

    def _loss_and_gradients(self, weights, given, batch, rng, exchanged) -> tuple[Sums, Any]:
        """Return the Sums of a micro-batch, with fp32 gradients in the accumulators' layout, and the new variables.

        All micro-batches of a step use the histories of fp8 scaling in `given`; the sums have the next step's.
        """
        histories = jax.tree.map(lambda kept, x: x if kept else None, self.model.histories, given)

        def forward(weights, histories):
            variables = self._with_histories(given, histories)
            loss_sum, rest = self._forward(self.inside, weights, variables, batch, rng)
            return (loss_sum if exchanged is None else wait_before_backward(loss_sum, exchanged)), rest

        differentiate = jax.value_and_grad(forward, (0, 1), has_aux=True)
        (loss_sum, (weight, metrics, variables)), (gradients, after) = differentiate(weights, histories)
        gradients = jax.lax.with_sharding_constraint(gradients, self.layout.gradients)
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        sums = Sums(loss_sum, jnp.asarray(weight, jnp.float32), metrics, gradients, after)
        return sums, self._with_histories(variables, histories)

    def _with_histories(self, variables: Any, histories: Any) -> Any:
        choose = lambda kept, history, x: history if kept else x
        return jax.tree.map(choose, self.model.histories, histories, variables)

    def _forward(self, rules: ShardingRules, weights, variables, batch, rng, *, training: bool = True):
        """Return loss_sum, (weight, metrics, new variables) of the user's loss, run inside the sharding scope."""
        with sharding_scope(self.mesh, rules):
            model = self.model.merge(weights, variables)
            model.train() if training else model.eval()
            loss_sum, weight, metrics = self.loss(model, batch, rng)
        _, _, variables = nnx.split(model, nnx.Param, ...)
        return loss_sum, (weight, dict(metrics), nnx.to_pure_dict(variables))

    def _compute_weights(self, params: Any) -> Any:
        """Return the weights that the model gets, laid out by `[rules.compute]` and in the compute dtype.

        A model that does its own casts gets them in the dtype of the reduction instead: fp32 for an fp32 reduction (see
        the precision rule in models/layers.py). The gathers of `[rules.compute]` always use the compute dtype.
        """
        train, layout = self.spec.train, self.layout
        compute, reduce = DTYPES[train.precision], DTYPES[train.reduce_precision]
        given = reduce if self.model.takes_dtype and train.precision != "fp32" else compute
        weights = params
        if layout.compute is not None:
            weights = jax.tree.map(lambda w: cast(w, compute), weights)
            # The first constraint keeps the cast weights cut, so that the partitioner casts before it gathers.
            weights = jax.lax.with_sharding_constraint(weights, layout.params)
            weights = jax.lax.with_sharding_constraint(weights, layout.compute)
        return jax.tree.map(lambda w: cast(w, given), weights)


def build_train_step(spec: StepSpec, mesh: AnyMesh, rules: ShardingRules) -> TrainProgram:
    """Return the training step of a spec on a mesh, attached or described, that has the axes which the rules name.

    Raises:
        ConfigError: the model or loss is none, raises or does not take its options, or the rules do not fit the model.
    """
    if not isinstance(mesh, DescribedMesh):
        spec.train.check_runs(spec.places)
    step = inner = _build_step(spec, mesh, rules)
    local = None
    if (algorithm := find_local_sgd(spec.local_sgd, spec.places, mesh, step.layout)) is not None:
        inner = _build_step(spec, mesh, rules.without((algorithm.axis,)))
        local = LocalSgdStep(algorithm, inner.train, step.micro.batch_axes)
    params = nnx.to_pure_dict(step.model.params)
    shards = step.shardings(params)
    if local:
        shards = local.shardings(shards, params)

    def train_step(state: TrainState, batch: Mapping[str, jax.Array]):
        return local.run(state, batch) if local else step.train(state, batch)

    def gradients(state: TrainState, batch: Mapping[str, jax.Array]):
        sums, gradients, _, _ = step.mean_gradients(state, batch)
        return sums.loss_sum / sums.weight, gradients

    def evaluate(state: TrainState, batch: Mapping[str, jax.Array]):
        return step.evaluate(state, batch)

    def init():
        return local.extend(step.init()) if local else step.init()

    def stack(batches: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
        return {name: jnp.stack([batch[name] for batch in batches]) for name in batches[0]}

    shapes = jax.eval_shape(init)
    state = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shards)
    batch = abstract_batch(spec, mesh, rules)
    stacked = local.stack(batch) if local else batch
    pipelined = step.pipelined
    facts = find_facts(
        spec,
        step.described,
        state,
        batch,
        gradients_bytes=inner.gradients_bytes(params),
        steps_per_call=local.local.every if local else 1,
        pipeline=pipelined and pipelined.train,
    )
    wishes = local or pipelined
    return TrainProgram(
        step=jax.jit(train_step, donate_argnums=0, out_shardings=(shards, None)),
        gradients=jax.jit(gradients),
        evaluate=jax.jit(evaluate),
        init=jax.jit(init, out_shardings=shards),
        abstract_state=state,
        abstract_batch=stacked,
        abstract_step_batch=batch,
        spec=spec,
        mesh=mesh,
        rules=rules,
        facts=facts,
        model=step.model,
        deferred=(*([local.local.axis] if local else []), *inner.micro.deferred),
        notes=find_notes(spec, step.model),
        xla_options=wishes.xla_options if wishes else {},
        stack=jax.jit(stack, out_shardings={n: x.sharding for n, x in stacked.items()}) if local else None,
        pipeline=pipelined and pipelined.train,
        arrangement=pipelined and Arrangement(pipelined.stack, pipelined.train.axis, step.optimizer, state),
    )


def _build_step(spec: StepSpec, mesh: AnyMesh, rules: ShardingRules) -> StepFunctions:
    described = model = describe_model(spec)
    if spec.train.remat != "none" and not model.takes_remat:
        message = f"{spec.model_class.name} takes no `remat` argument, so it cannot recompute."
        raise spec.places.error("train.remat", message)
    stack = find_stack(spec.pipeline, spec.model_class, mesh, described)
    if stack is not None:
        model = arrange_description(described, stack)
    matrices = find_matrices(model.params, mesh, rules) if spec.optimizer.algorithm == "muon" else {}
    optimizer = make_optimizer(spec.optimizer, spec.optimizer_class, spec.train.steps, matrices)
    optimizer = move_by_sign(optimizer, sign_steps(model.params))
    layout = lay_out(model, optimizer, mesh, rules, memory=spec.optimizer.memory)
    if stack is not None and spec.optimizer_class is not None:
        _check_whole(spec.optimizer_class, optimizer, model)
    (batch_axes,) = rules.spec_for(("act_batch",), kind="activations")
    loss = checked_loss(spec.loss, spec.model_class)
    if stack is not None:
        pipelined = make_pipelined(spec, mesh, rules, described, loss, stack, layout)
        micro = MicroBatches(spec.pipeline.microbatches, mesh, batch_axes, pipelined.data)
        layout = pipelined.layout
        return StepFunctions(
            spec, mesh, rules, rules, model, loss, optimizer, layout, micro, described, pipelined=pipelined
        )
    count = spec.train.accumulate
    # A model with state of its own (batch statistics) must see its micro-batches one after the other.
    separable = all(jax.tree.leaves(model.histories))
    deferred = deferred_axes(rules, mesh) if separable and count > 1 else ()
    exchange = _find_exchange(spec, mesh, layout, separable) if spec.local_sgd.axis is None else None
    if exchange:
        deferred = tuple(a for a in batch_axes if a in (*deferred, exchange.axis))
    if deferred:
        compute = layout.params if layout.compute is None else layout.compute
        compute = strip_axes(compute, deferred)
        if compute == layout.params:
            compute = None
        layout = replace(layout, compute=compute, gradients=strip_axes(layout.gradients, deferred))
    micro = MicroBatches(count, mesh, batch_axes, deferred)
    inside = rules.without(deferred) if deferred else rules
    return StepFunctions(spec, mesh, rules, inside, model, loss, optimizer, layout, micro, described, exchange)


def _check_whole(code: UserCode, optimizer: optax.GradientTransformation, model: ModelDescription) -> None:
    """Refuse an optimizer for a pipeline unless its statistics have the shapes of the parameters."""
    params = nnx.to_pure_dict(model.params)
    state = jax.eval_shape(optimizer.init, params)

    def check(leaf, param):
        if leaf.shape != param.shape:
            raise code.error(
                f"{code.name} keeps an array of shape {leaf.shape} for a parameter of shape {param.shape}, "
                "which stages of a pipeline cannot share out.",
                hint="an optimizer whose state has the parameters' shapes, or no [pipeline]",
            )

    map_moments(optimizer, check, state, params)


def _find_exchange(spec: StepSpec, mesh: AnyMesh, layout: StateLayout, separable: bool) -> Exchange | None:
    """Return the exchange of `[compression]`; None without one, or over an axis of one GPU.

    Raises:
        ConfigError: the axis cuts more than the batch, or the model has state that its replicas would not share.
    """
    axis = spec.compression.axis
    if axis is None or mesh.shape[axis] == 1:
        return None
    check_replicas(spec.places, "compression.axis", axis, layout)
    if not separable:
        name = spec.model_class.name
        message = f"{name} has state beside its parameters (batch statistics), which compression would not reduce."
        raise spec.places.error("compression", message, hint="a model without such state, or no [compression]")
    return Exchange(axis, mesh.shape[axis], WIRES[spec.compression.dtype])


def sign_steps(params: nnx.State) -> Any:
    """Return a nested dict with the `sign_step` of each parameter; 0 for parameters that the optimizer updates.

    A parameter with `sign_step` in its metadata moves by that much against its gradient's sign in each step. An example
    is the bias that balances a mixture of experts: `nnx.Param(..., sign_step=1e-3)`. Its gradient is summed over
    micro-batches and replicas like any other. Optimizer, weight decay and norm of gradients leave it out.
    """
    steps = jax.tree.map(
        lambda leaf: leaf.replace(float(leaf.get_metadata().get("sign_step", 0.0))),
        params,
        is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
    )
    return nnx.to_pure_dict(steps)


def without_signed(gradients: Any, steps: Any) -> Any:
    """Return gradients with zeros for the parameters that have a sign step."""
    return jax.tree.map(lambda g, step: jnp.zeros_like(g) if step else g, gradients, steps)


def move_by_sign(optimizer: optax.GradientTransformation, steps: Any) -> optax.GradientTransformation:
    """Wrap the optimizer: parameters that have a sign step move by it against their gradient's sign instead."""
    if not any(jax.tree.leaves(steps)):
        return optimizer

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        gradients = updates
        updates, state = optimizer.update(without_signed(gradients, steps), state, params)

        def replace_signed(update: jax.Array, gradient: jax.Array, step: float) -> jax.Array:
            return -step * jnp.sign(gradient).astype(update.dtype) if step else update

        return jax.tree.map(replace_signed, updates, gradients, steps), state

    return optax.GradientTransformation(optimizer.init, update)


def make_schedule(spec: OptimizerTable, steps: int) -> optax.Schedule:
    """Return a schedule: linear warm-up from 0, then constant, or down to a tenth (cosine) or to 0 (linear).

    `steps` are those of the whole training; a longer warm-up is shortened to them.

    Returns:
        A function step, from 0, -> learning rate. Step i of w warm-up steps has (i + 1) / w of the full learning rate.
    """
    warmup = min(spec.warmup_steps, steps)
    rest = max(1, steps - warmup)
    if spec.schedule == "cosine":
        body = optax.cosine_decay_schedule(spec.learning_rate, rest, alpha=0.1)
    elif spec.schedule == "linear":
        body = optax.linear_schedule(spec.learning_rate, 0.0, rest)
    else:
        body = optax.constant_schedule(spec.learning_rate)
    if not warmup:
        return body
    # The warm-up counts from 1: a first step with learning rate 0 would have no effect.
    ramp = optax.linear_schedule(spec.learning_rate / warmup, spec.learning_rate, max(1, warmup - 1))
    return optax.join_schedules([ramp, body], [warmup])


def make_optimizer(
    spec: OptimizerTable, code: UserCode | None, steps: int, matrices: Mapping[str, MatrixStack] | None = None
) -> optax.GradientTransformation:
    """Return clipping by global norm, then AdamW, Muon or the optimizer that `optimizer.class` names.

    Raises:
        ConfigError: the function is not annotated to return an optax transformation, lacks a parameter for an
            option, or raises.
    """
    clip = [optax.clip_by_global_norm(spec.clip)] if spec.clip else []
    own = make_adamw(spec, steps) if code is None else _named(spec, code, steps)
    if code is None and spec.algorithm == "muon":
        if not matrices:
            raise ConfigError(
                "no parameter of the model is a matrix by the names of its dims, so Muon has nothing to do.",
                at="optimizer.algorithm",
                hint='algorithm = "adamw", or parameters that carry logical axes',
            )
        own = muon(
            matrices,
            make_schedule(spec, steps),
            momentum=spec.momentum,
            weight_decay=spec.weight_decay,
            dtype=DTYPES[spec.dtype],
            others=own,
        )
    return optax.chain(*clip, own)


def make_adamw(spec: OptimizerTable, steps: int) -> optax.GradientTransformation:
    """Return AdamW (Loshchilov and Hutter, 2019).

    Weight decay skips norms, biases and sinks, which `decayed` finds by the end of their names. The first moment has
    the dtype `spec.dtype`. The second stays fp32, since bf16 cannot hold its small updates (1 - b2 is below bf16's
    resolution).
    """
    return optax.adamw(
        make_schedule(spec, steps),
        b1=spec.b1,
        b2=spec.b2,
        eps=spec.eps,
        mu_dtype=DTYPES[spec.dtype],
        weight_decay=spec.weight_decay,
        mask=decayed,
    )


def decayed(params: Any) -> Any:
    """Return the tree with True where weight decay applies."""

    def is_decayed(path, _leaf):
        return not str(getattr(path[-1], "key", path[-1])).endswith(_NOT_DECAYED)

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def _named(spec: OptimizerTable, code: UserCode, steps: int) -> optax.GradientTransformation:
    make, name = code.found, code.name
    kinds = returned_kinds(make)
    if not kinds or not all(issubclass(kind, optax.GradientTransformation) for kind in kinds):
        raise code.error(
            f"{name} is not annotated to return an optax.GradientTransformation.",
            hint='"optax:lion", or def NAME(learning_rate, ...) -> optax.GradientTransformation',
        )
    taken, options = inspect.signature(make).parameters, dict(spec.options or {})
    if "learning_rate" not in taken:
        raise code.error(f"{name} takes no `learning_rate`, which gets the schedule.", hint="such a parameter")
    for key in options:
        if key not in taken or key == "learning_rate":
            known = [one for one in taken if one != "learning_rate"]
            message = f"{name} takes no option '{key}' here."
            raise code.places.error(f"optimizer.options.{key}", message, hint=did_you_mean(key, known))
    for key, parameter in taken.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not variadic and key not in ("learning_rate", *options):
            raise code.error(f"{name} needs the option '{key}'.", hint=f"optimizer.options.{key} = ...")
    with code.calling():
        return make(learning_rate=make_schedule(spec, steps), **options)


def sharded_step(
    loss: Callable[..., Any],
    mesh: AnyMesh,
    rules: ShardingRules,
    *,
    optimizer: optax.GradientTransformation | None = None,
) -> Callable[..., Any]:
    """Return a jitted training step: gradients of the loss inside a `sharding_scope`, and an update in place.

    For nnx, pass no optimizer: the step is `step(model, optimizer, *batch) -> loss`, and updates the model and its
    `nnx.Optimizer`. For linen and any other pytree, pass one: the step is `step(state, *batch) -> (state, loss)`, where
    the state is `{"params": ..., "opt_state": optimizer.init(params)}`. The step donates the arguments that it updates.

    Args:
        loss: `loss(model, *batch)`, or `loss(params, *batch)`: a scalar, or a tuple whose first member is the scalar.
            The step returns the same as the loss.
        mesh: attached, to train on; described, to plan for.
        rules: where parameters and constrained activations go.
        optimizer: the optimizer of a step without nnx modules.
    """

    check_kinds(sharded_step, mesh=mesh, rules=rules, optimizer=optimizer)

    def with_rest(*args: Any) -> tuple[Any, Any]:
        returned = loss(*args)
        return (returned[0], returned) if isinstance(returned, tuple) else (returned, returned)

    @functools.partial(nnx.jit, donate_argnums=(0, 1))
    @keep_shardings(mesh, rules)
    def of_modules(model: Any, optimizer: nnx.Optimizer, *batch: Any) -> Any:
        if not isinstance(optimizer, nnx.Optimizer):
            raise ConfigError(
                f"the step's second argument is {a_type(optimizer)}, not an nnx.Optimizer.",
                hint="step(model, optimizer, *batch); for arrays, sharded_step(..., optimizer=optax.adamw(1e-3))",
            )
        with sharding_scope(mesh, rules):
            (_, returned), gradients = nnx.value_and_grad(with_rest, has_aux=True)(model, *batch)
        optimizer.update(model, gradients)
        return returned

    if optimizer is None:
        return of_modules

    @functools.partial(jax.jit, donate_argnums=0)
    def of_arrays(state: Any, *batch: Any) -> Any:
        with sharding_scope(mesh, rules):
            (_, returned), gradients = jax.value_and_grad(with_rest, has_aux=True)(state["params"], *batch)
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        state = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        if AxisType.Explicit not in mesh.axis_types:  # with explicit axes, the arrays' types fix their shardings
            state = jax.lax.with_sharding_constraint(state, shardings(state, mesh, rules))
        return state, returned

    return of_arrays
