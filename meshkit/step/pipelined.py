"""`[pipeline]`: the loss, gradients and evaluation of a training step, computed by a pipeline.

    batch [B, ...] -> microbatches [M, B / M, ...] -> meshkit.parallel.pipeline -> loss, metrics, mean gradients

This replaces the sums over micro-batches and their reduction. Over every axis that cuts the batch, the pipeline gathers
weights (in the compute dtype) once a step and reduces gradients (summed in fp32) once a step.

A model that can be pipelined has these members besides `__call__`:

    model.layers                          its layers, parameters stacked in arrays [layers, ...]
    first(batch, ctx) -> x                the input of the first layer: one array [batch, ...]
    layer(parameters, x, ctx, key) -> x   runs one layer; parameters is a nested dict of arrays, key a random key for
                                          this layer and microbatch; may return x and a dict of scalars, (x, values)
    last(x, ctx) -> logits                the logits, from the output of the last layer

`ctx` is the StageContext of `meshkit.parallel.pipeline`. Only `first` and `last` may use other modules with parameters.
With `head = "vocab_parallel"` these two get only their stage's part of every parameter with a `vocab` dim. So `first`
must look tokens up as `vocabulary.lookup` does, and `last` returns the logits of its stage's part.

The default loss is the cross-entropy of these logits. A `train.loss` that is a plain function is called with a model
whose `model(...)` returns the logits (the head must be replicated). A loss that needs more is an object with methods
besides `__call__`:

    of_hidden(model, x, batch, ctx) -> loss_sum, weight, metrics      from the output of the last layer
    of_layer(model, values, batch) -> loss_sum, metrics               from one layer's values, summed over the layers
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.config.places import Places, UserCode
from meshkit.config.rules import ShardingRules
from meshkit.config.sections import PipelineTable
from meshkit.errors import ConfigError
from meshkit.parallel.pipeline import (
    XLA_OPTIONS,
    Functions,
    ManualAxes,
    Pipeline,
    Stack,
    StageContext,
    StageOutput,
    scan_layers,
    vocabulary,
)
from meshkit.parallel.pipeline.loops import find_policy
from meshkit.sharding import sharding_scope
from meshkit.sharding.constrain import partition_spec, spec_axes
from meshkit.sharding.mesh import AnyMesh
from meshkit.step.loss import Loss, Sums, cross_entropy, strip_axes
from meshkit.step.spec import StepSpec
from meshkit.step.state import (
    DTYPES,
    HOST_MEMORY,
    LAYERS,
    ModelDescription,
    StateLayout,
    TrainState,
    cast,
    map_moments,
    split_rng,
)

WEIGHT = "weight"  # the metric that returns a microbatch's weight from the pipeline
_METHODS = ("first", "layer", "last")


@dataclass(frozen=True)
class Pipelined:
    """The pipeline of a training step, called with the step's state and batch.

    Attributes:
        train, evaluation: pipelines with the model in training and in evaluation mode.
        layout: layout of the state, with gradients as the pipeline sums them.
    """

    spec: StepSpec
    rules: ShardingRules
    train: Pipeline
    evaluation: Pipeline
    layout: StateLayout

    @property
    def stack(self) -> Stack:
        """The order of the layers."""
        return self.train.stack

    @property
    def data(self) -> tuple[str, ...]:
        """Mesh axes over which weights are gathered and gradients reduced once a step."""
        axes = self.train.axes
        return tuple(a for a in axes.data if axes.mesh.shape[a] > 1)

    @property
    def xla_options(self) -> dict[str, object]:
        """Options of the GPU compiler."""
        return dict(XLA_OPTIONS)

    def mean_gradients(self, state: TrainState, batch: Mapping[str, jax.Array]) -> tuple[Sums, Any]:
        """Return Sums over the whole batch (its metrics averaged), and gradients of the mean loss.

        Returns:
            Sums of fp32 scalars, without gradients; and fp32 gradients, a nested dict like `state.params`, laid out for
            the optimizer.
        """
        with sharding_scope(self.train.axes.mesh, self.rules):
            found = self.train.value_and_gradients(self._weights(state), self._cut(batch), split_rng(state))
        loss, metrics, gradients = found
        weight = self._weight(metrics)
        gradients = {**gradients["outer"], LAYERS: gradients["stages"]}
        gradients = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        gradients = jax.lax.with_sharding_constraint(gradients, self.layout.reduced)
        metrics = {name: value for name, value in metrics.items() if name != WEIGHT}
        return Sums(loss * weight, weight, metrics, None), gradients

    def evaluate(self, state: TrainState, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return sums over the batch, forward only.

        Returns:
            `loss_sum` (0 if the weight is 0) and `weight`, fp32 scalars.
        """
        with sharding_scope(self.train.axes.mesh, self.rules):
            loss, metrics = self.evaluation.value(self._weights(state), self._cut(batch), split_rng(state))
        weight = self._weight(metrics)
        return {"loss_sum": jnp.where(weight > 0, loss * weight, 0.0), "weight": weight}

    def _weight(self, metrics: Mapping[str, jax.Array]) -> jax.Array:
        return metrics[WEIGHT] * (self.spec.pipeline.microbatches * self.train.axes.shards)

    def _weights(self, state: TrainState) -> dict[str, Any]:
        """Return parameters for the pipeline, cast to the compute dtype before they are gathered."""
        weights = jax.tree.map(lambda w: cast(w, DTYPES[self.spec.train.precision]), state.params)
        weights = jax.lax.with_sharding_constraint(weights, self.layout.params)
        return by_stages(weights)

    def _cut(self, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return each [B, ...] as [M, B / M, ...]; microbatches take rows in strides, so no row changes its GPU."""
        axes, count = self.train.axes, self.spec.pipeline.microbatches

        def cut_leaf(x):
            pieces = jnp.moveaxis(x.reshape(-1, count, *x.shape[1:]), 1, 0)
            spec = PartitionSpec(*axes.batch[: pieces.ndim])
            return jax.lax.with_sharding_constraint(pieces, NamedSharding(axes.mesh, spec))

        return {name: cut_leaf(x) for name, x in batch.items()}


def find_stack(spec: PipelineTable, model_class: UserCode, mesh: AnyMesh, model: ModelDescription) -> Stack | None:
    """Return the order of the model's layers in the pipeline; None without a pipeline.

    Raises:
        ConfigError: a model without layers to cut, more stages than layers, or a layout that does not fit.
    """
    if spec.axis is None:
        return None
    check_model(model_class, model)
    try:
        return Stack.of(layer_count(model), mesh.shape[spec.axis], spec.virtual_stages, spec.layout)
    except ConfigError as error:
        key = "layout" if spec.layout else "virtual_stages" if spec.virtual_stages > 1 else "axis"
        raise _at(model_class.places, key, error) from None


def make_pipelined(
    spec: StepSpec,
    mesh: AnyMesh,
    rules: ShardingRules,
    model: ModelDescription,
    loss: Loss,
    stack: Stack,
    layout: StateLayout,
) -> Pipelined:
    """Return the pipeline of a spec that has one.

    Raises:
        ConfigError: rules, a head or residuals that the pipeline cannot have.
    """
    table = spec.pipeline
    axis = table.axis
    assert axis is not None
    batch, length = rules.spec_for(("act_batch", "act_length"), kind="activations")
    data = (*batch, *length)
    layout = _whole_gradients(spec.places, layout, data)
    specs = jax.tree.map(lambda s: s.spec, layout.params)
    if table.head == "vocab_parallel" and not vocab_sizes(model):
        raise spec.places.error(
            "pipeline.head",
            f"{spec.model_class.name} has no parameter with a `vocab` dim that stages could share.",
            hint='head = "replicated"',
        )
    (experts,) = rules.spec_for(("experts",))

    def build(axes: ManualAxes, training: bool) -> Pipeline:
        functions = StageFunctions(spec, model, loss, training=training)
        return Pipeline(
            Functions(functions.first, functions.stage, functions.last),
            stack,
            axes,
            schedule=table.schedule,
            residuals=table.residuals,
            head=table.head,
            specs=by_stages(specs),
            reduced=jnp.bfloat16 if spec.train.reduce_precision == "bf16" else None,
        )

    try:
        find_policy(table.residuals)
    except ConfigError as error:
        raise _at(spec.places, "residuals", error) from None
    try:
        axes = ManualAxes(mesh, axis, partition_spec([(), batch, length]), tuple(a for a in experts if a in data))
        train, evaluation = (build(axes, training) for training in (True, False))
    except ConfigError as error:
        raise _at(spec.places, "axis", error) from None
    return Pipelined(spec, rules, train, evaluation, layout)


def _whole_gradients(places: Places, layout: StateLayout, data: tuple[str, ...]) -> StateLayout:
    """Return the layout with gradients as a pipeline sums them: whole over the axes of the batch."""
    strip = functools.partial(strip_axes, axes=data)
    gradients = strip(layout.params)
    for table, wanted in (("compute", layout.compute), ("gradients", layout.gradients)):
        if wanted is not None and strip(wanted) != gradients:
            raise places.error(
                f"rules.{table}",
                f"in a pipeline [rules.{table}] can only leave out axes of the batch ({', '.join(data)}).",
                hint="the same axes as in [rules.logical] otherwise",
            )
    return replace(layout, gradients=gradients, compute=None)


def _at(places: Places, key: str, error: ConfigError) -> ConfigError:
    return places.error(f"pipeline.{key}", error.message, hint=error.hint)


@dataclass(frozen=True)
class Arrangement:
    """The order and sharding of layers in a pipeline's state, in memory and in checkpoints."""

    stack: Stack
    """The order of the layers in memory."""
    axis: str
    optimizer: optax.GradientTransformation
    """The optimizer; its moments are arranged like the parameters."""
    abstract: TrainState
    """The state in memory: ShapeDtypeStructs with shardings."""
    compiled: dict = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def saved(self) -> TrainState:
        """The state in checkpoints: ShapeDtypeStructs with shardings."""

        def saved_leaf(x):
            shape = (self.stack.layers, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=_on_other_dims(x.sharding, shape, self.axis))

        return self._over_layers(saved_leaf, self.abstract)

    def to_saved(self, state: TrainState) -> TrainState:
        """Return a state in memory as it is in checkpoints; the same object if both are equal."""
        return self._move("restore", state, self.abstract, self.saved)

    def from_saved(self, state: TrainState) -> TrainState:
        """Return a state of a checkpoint as it is in memory."""
        return self._move("arrange", state, self.saved, self.abstract)

    def params_from_saved(self, params: Any) -> Any:
        """Return the parameters of a checkpoint, without other state, as they are in memory."""
        if self.stack.natural:
            return params
        given, wanted = (self._uncut(state).params[LAYERS] for state in (self.saved, self.abstract))

        def run(params):
            layers = self.stack.arrange(_constrain(params[LAYERS], given))
            return {**params, LAYERS: _constrain(layers, wanted)}

        return jax.jit(run, out_shardings=jax.tree.map(lambda x: x.sharding, self.abstract.params))(params)

    def _move(self, way: str, state: TrainState, given: TrainState, wanted: TrainState) -> TrainState:
        if self.stack.natural:
            return state
        if way not in self.compiled:
            order = getattr(self.stack, way)

            def run(state):
                state = _constrain(_on_device(state, given), self._uncut(given))
                return _constrain(self._over_layers(order, state), self._uncut(wanted))

            self.compiled[way] = jax.jit(run, out_shardings=jax.tree.map(lambda x: x.sharding, wanted))
        return self.compiled[way](state)

    def _uncut(self, abstract: TrainState) -> TrainState:
        """Return the state with shardings that do not cut the dim of layers, to reorder layers on each device.

        To reorder them across devices would be a gather along a cut dim. XLA makes whole copies for that, or crashes.
        """

        def uncut_leaf(x):
            sharding = _on_other_dims(x.sharding, x.shape, self.axis, always=True)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return self._over_layers(uncut_leaf, abstract)

    def _over_layers(self, fn: Callable[[Any], Any], state: TrainState) -> TrainState:
        of_layers = {
            name: jax.tree.map(lambda _, layered=name == LAYERS: layered, tree) for name, tree in state.params.items()
        }

        def map_layered(x, layered):
            return fn(x) if layered else x

        params = jax.tree.map(map_layered, state.params, of_layers)
        return replace(
            state, params=params, opt_state=map_moments(self.optimizer, map_layered, state.opt_state, of_layers)
        )


def arrange_description(model: ModelDescription, stack: Stack) -> ModelDescription:
    """Return the model with arrays of as many layers as the pipeline has, padding included."""

    def arranged_leaf(leaf: nnx.Variable) -> nnx.Variable:
        x = leaf.get_raw_value()
        return leaf.replace(jax.ShapeDtypeStruct((stack.size, *x.shape[1:]), x.dtype))

    layers = jax.tree.map(arranged_leaf, model.params[LAYERS], is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    params = nnx.State({**model.params, LAYERS: layers})
    return ModelDescription(model.graph, params, model.variables, model.takes_dtype, model.takes_remat)


def _on_other_dims(
    sharding: NamedSharding, shape: tuple[int, ...], axis: str, *, always: bool = False
) -> NamedSharding:
    """Return a sharding in which the axis does not cut dim 0, but the first other dim that it divides.

    The sharding is unchanged if the axis already cuts another dim, or if it divides dim 0 and not `always`.
    """
    mesh, spec = sharding.mesh, spec_axes(sharding.spec, len(shape))
    ways = mesh.shape[axis]
    cut = [dim for dim, axes in enumerate(spec) if axis in axes]
    if (cut and cut != [0]) or (not always and shape[0] % ways == 0):
        return sharding
    spec[0] = ()
    for dim in range(1, len(shape)):
        if shape[dim] % (ways * math.prod(mesh.shape[a] for a in spec[dim])) == 0:
            spec[dim] = (*spec[dim], axis)
            break
    return NamedSharding(mesh, partition_spec(spec), memory_kind=sharding.memory_kind)


def _on_device(state: TrainState, given: TrainState) -> TrainState:
    """Return the state with arrays in host memory moved to the device, inside `jax.jit`."""

    def fetch_leaf(x, like):
        host = like.sharding.memory_kind == HOST_MEMORY
        return jax.device_put(x, like.sharding.with_memory_kind("device")) if host else x

    return jax.tree.map(fetch_leaf, state, given)


def _constrain(tree: Any, like: Any) -> Any:
    return jax.tree.map(
        lambda x, to: jax.lax.with_sharding_constraint(x, to.sharding.with_memory_kind("device")), tree, like
    )


class StageFunctions:
    """The functions of a pipeline.

    `check_model` must accept the model; each call gets the model's arrays as arguments.

    Raises:
        ConfigError: a loss that cannot be pipelined with this head.
    """

    def __init__(self, spec: StepSpec, model: ModelDescription, loss: Loss, *, training: bool = True):
        self.spec, self.model, self.training = spec, model, training
        self._loss, self._own = loss, _own_loss(spec)

    def first(self, outer: Mapping[str, Any], batch: Any, ctx: StageContext) -> Any:
        """Return the input of the first layer."""
        with self._calling("first"):
            return self._model(outer).first(batch, ctx)

    def stage(self, layers: Mapping[str, Any], x: Any, ctx: StageContext) -> Any:
        """Run a chunk of layers; return a StageOutput if they return values and the loss has `of_layer`."""
        model = self._model({})

        def layer(parameters, x, key):
            with self._calling("layer"):
                out = model.layer(parameters, x, ctx, key)
            x, values = out if isinstance(out, tuple) else (out, {})
            of_layer = getattr(self._own, "of_layer", None)
            if not values or of_layer is None:
                return x
            loss_sum, metrics = of_layer(model, values, ctx.batch)
            return StageOutput(x, loss_sum, metrics)

        return scan_layers(layer, layers, x, ctx)

    def last(self, outer: Mapping[str, Any], x: Any, batch: Any, ctx: StageContext) -> tuple[Any, Any, dict[str, Any]]:
        """Return loss_sum, weight, and metrics including the weight, from the output of the last layer.

        Raises:
            ConfigError: the model or the loss raises, or the logits are not a stage's part of the vocabulary.
        """
        model = self._model(outer)
        with self._calling("last"):
            if self._own is None:
                loss_sum, weight, metrics = self._next_token(model, x, batch, ctx)
            elif hasattr(self._own, "of_hidden"):
                loss_sum, weight, metrics = self._own.of_hidden(model, x, batch, ctx)
            else:
                loss_sum, weight, metrics = self._loss(_WithLogits(model, x, ctx), batch, ctx.rng)
        return loss_sum, weight, {**metrics, WEIGHT: weight}

    def _next_token(self, model: Any, x: Any, batch: Any, ctx: StageContext) -> tuple[Any, Any, dict]:
        logits = model.last(x, ctx)
        if self.spec.pipeline.head == "vocab_parallel":
            self._check_pieces(logits, ctx)
            losses = vocabulary.cross_entropy(logits, batch["targets"], ctx.axis)
        else:
            losses = cross_entropy(logits, batch["targets"])
        return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"]), {}

    def _check_pieces(self, logits: jax.Array, ctx: StageContext) -> None:
        """Refuse logits that are not a stage's part of a `vocab` dim: their cross-entropy would be wrong."""
        sizes, stages = vocab_sizes(self.model), jax.lax.axis_size(ctx.axis)
        if logits.shape[-1] * stages not in sizes:
            name, shown = self.spec.model_class.name, " or ".join(map(str, sorted(sizes))) or "not named"
            raise self.spec.places.error(
                "pipeline.head",
                f"{name} gives {logits.shape[-1]} logits on each of {stages} stages, but its vocabulary is {shown}.",
                hint='head = "replicated"',
            )

    def _model(self, outer: Mapping[str, Any]) -> Any:
        """Return the module with the given arrays; its other arrays are abstract and must not be used."""
        abstract = nnx.to_pure_dict(self.model.params)
        model = self.model.merge({**abstract, **outer}, nnx.to_pure_dict(self.model.variables))
        model.train() if self.training else model.eval()
        return model

    def _calling(self, method: str) -> Any:
        return self.spec.model_class.calling(f"{method} of {self.spec.model_class.name}")


class _WithLogits:
    """A model whose layers have run: a call returns the logits; its attributes are the model's own."""

    def __init__(self, model: Any, x: Any, ctx: StageContext):
        self._model, self._x, self._ctx = model, x, ctx

    def __call__(self, *_args: Any, **_kwargs: Any) -> jax.Array:
        return self._model.last(self._x, self._ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def check_model(model_class: UserCode, model: ModelDescription) -> None:
    """Refuse a model that cannot be cut into stages.

    Raises:
        ConfigError: naming what it lacks.
    """
    name, made = model_class.name, model.abstract_model()
    missing = [method for method in _METHODS if not callable(getattr(made, method, None))]
    if LAYERS not in model.params or missing:
        lacks = f"has no stacked `{LAYERS}`" if LAYERS not in model.params else f"has no {', '.join(missing)}()"
        raise model_class.places.error(
            "pipeline.axis",
            f"{name} cannot be cut into stages: it {lacks}.",
            hint="models.llama:Llama or models.moe:Moe, the methods that meshkit.step.pipelined describes, or "
            "mk.pipeline in a step of your own",
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params[LAYERS], is_leaf=_is_variable):
        names = leaf.get_metadata().get("out_sharding") if _is_variable(leaf) else None
        if not names or names[0] != LAYERS:
            shown = jax.tree_util.keystr(path, simple=True, separator="/")
            raise model_class.places.error(
                "pipeline.axis",
                f"{LAYERS}/{shown} of {name} has the dims {names}, of which the first must be '{LAYERS}'.",
                hint="parameters stacked over all layers, named with out_sharding",
            )
    if jax.tree.leaves(model.variables):
        raise model_class.places.error(
            "pipeline.axis",
            f"{name} has state beside its parameters (batch statistics), which stages cannot hand on.",
            hint="a model without such state, or no [pipeline]",
        )


def layer_count(model: ModelDescription) -> int:
    """Return the number of layers of a model that `check_model` accepts."""
    return jax.tree.leaves(nnx.to_pure_dict(model.params)[LAYERS])[0].shape[0]


def _own_loss(spec: StepSpec) -> Any:
    if spec.loss is None:
        return None
    if spec.pipeline.head == "vocab_parallel" and not hasattr(spec.loss.found, "of_hidden"):
        raise spec.loss.error(
            f"{spec.loss.name} takes whole logits, but each stage has a part of the vocabulary.",
            hint='pipeline.head = "replicated", or a loss with the method of_hidden of meshkit.step.pipelined',
        )
    return spec.loss.found


def by_stages(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a model in the tree that a pipeline takes."""
    return {"stages": params[LAYERS], "outer": {name: tree for name, tree in params.items() if name != LAYERS}}


def vocab_sizes(model: ModelDescription) -> set[int]:
    """Return the sizes of the `vocab` dims of parameters outside of the layers."""
    leaves = jax.tree.leaves(by_stages(model.params)["outer"], is_leaf=_is_variable)
    named = [zip(leaf.get_metadata().get("out_sharding") or (), leaf.shape) for leaf in leaves]
    return {size for dims in named for name, size in dims if name == "vocab"}


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
