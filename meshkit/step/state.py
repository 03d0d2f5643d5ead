"""StepSpec -> its model, the model's abstract state, and the sharding of every array of the state.

Describing a model allocates no arrays: shapes come from tracing, so it takes seconds on a laptop for a 405B model.

A linen module is wrapped as an nnx module by flax's own bridge:

    linen module -> the loss's first call of it -> ToNNX, initialized by that call -> params, statistics, RNG streams

The names that `nn.with_partitioning` and `nn.with_logical_partitioning` put on a parameter become the metadata of its
nnx variable, where `meshkit.shardings` reads them. Every other collection (`batch_stats`) is carried in
`TrainState.variables`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import optax
from flax import errors, linen, nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.config.places import UserCode, raised_by_user
from meshkit.config.precisions import PRECISIONS
from meshkit.config.rules import ShardingRules
from meshkit.config.sections import RematMix
from meshkit.errors import ConfigError, a_type
from meshkit.parallel.pipeline import Stack
from meshkit.sharding import shardings
from meshkit.sharding.constrain import partition_spec, spec_axes
from meshkit.sharding.mesh import AnyMesh
from meshkit.sharding.resolve import kept_spec
from meshkit.step.data import abstract_example
from meshkit.step.loss import checked_loss
from meshkit.step.spec import StepSpec

LAYERS = "layers"  # a model's attribute, and the key of its parameters, that a pipeline cuts into stages
HOST_MEMORY = "pinned_host"  # jax's name for host memory that the GPU can access directly
# The dtype of activations in each precision.
DTYPES = {name: jnp.float32 if p.item_bytes == 4 else jnp.bfloat16 for name, p in PRECISIONS.items()}


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    """All that a training step carries over to the next one."""

    step: Any
    """Int32 scalar, number of steps done."""
    params: Any
    """Nested dict of arrays in `train.parameter_precision`, `{"layers": {"attention": ...}}`."""
    opt_state: Any
    variables: Any
    """The model's other state (batch statistics and the like); empty for a Llama."""
    rng: Any
    """Key data (uint32) that each step folds its number into."""
    extra: Any = field(default_factory=dict)
    """State of `[compression]` (`residuals`) or `[local_sgd]` (`outer`); otherwise empty."""


@dataclass(frozen=True)
class ModelDescription:
    """A model without its arrays.

    Attributes:
        graph: nnx graph definition.
        params, variables: abstract nnx states; the variables in them carry the logical axes.
        takes_dtype: the model was given the compute dtype and does its own casts.
        takes_remat: the model was given the remat policy.
    """

    graph: Any
    params: nnx.State
    variables: nnx.State
    takes_dtype: bool
    takes_remat: bool

    def abstract_model(self) -> nnx.Module:
        """Return the module with abstract arrays, to call its methods that need no values."""
        return nnx.merge(self.graph, self.params, self.variables)

    @functools.cached_property
    def histories(self) -> Any:
        """A nested dict like that of the variables, True for histories of fp8 scaling and False for all others.

        The gradient of a history is its next value. Flax's modules keep histories in a collection of their own.
        """
        kind = nnx.variable_type_from_name(OVERWRITE_WITH_GRADIENT, allow_register=True)
        marked = jax.tree.map(lambda leaf: leaf.replace(isinstance(leaf, kind)), self.variables, is_leaf=_is_variable)
        return nnx.to_pure_dict(marked)

    def merge(self, params: Any, variables: Any) -> nnx.Module:
        """Return the module with these arrays, given as nested dicts."""
        return nnx.merge(self.graph, nnx.State(params), nnx.State(variables))


def build_model(spec: StepSpec, rngs: nnx.Rngs) -> nnx.Module:
    """Return the model of a spec: `make(preset=..., rngs=..., **options)`; a linen module is wrapped as an nnx module.

    A model that takes `dtype`, `fp8`, `fp8_scaling`, `mxfp8`, `nvfp4` or `remat` gets the precision and remat policy of
    `[train]`, unless its options set them.

    An nnx model gets the rngs. For a linen module, their stream `params` gives the initial weights and all other keys.

    Raises:
        ConfigError: the class is no model, does not take an option, or raises.
    """
    make, name, places = _checked_class(spec.model_class), spec.model_class.name, spec.places
    accepted = _parameters(make)
    options = _model_options(spec, accepted)
    short = name.partition(":")[2]
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    for key in options:
        if key not in accepted and not open_ended:
            known = ", ".join(k for k in accepted if k != "rngs")
            raise places.error(f"model.{key}", f"{short} takes no option '{key}'.", hint=f"one of: {known}")
    for key in _required(accepted):
        if key not in options and key != "rngs":
            raise places.error("model", f"{name} needs the option '{key}'.", hint=f"model.{key} = ...")
    linen_class = is_linen(make)
    takes_rngs = not linen_class and ("rngs" in accepted or open_ended)
    if linen_class:
        options = linen_options(options)
    elif takes_rngs:
        options["rngs"] = rngs
    elif inspect.isclass(make):
        raise _takes_no_rngs(spec.model_class)
    with spec.model_class.calling(), nnx.use_eager_sharding(False):
        try:
            model = make(**options)
            if isinstance(model, linen.Module):
                return wrap_linen(spec, model, rngs)
        except ValueError as error:
            if (place := raised_by_user(error)) is None:
                raise
            said, hint = _split_hint(str(error))
            key = _option_named(said, options, ["preset", *spec.model.options])
            own = key == "preset" or key in spec.model.options
            written = f"model.{key}" if own else "train.remat" if key == "remat" else "model"
            hint = hint or (f"another {written}, or the model's own without it" if key else None)
            raise places.error(written, f"{short} refuses its options: {said} ({place}).", hint) from error
    if not isinstance(model, nnx.Module):
        raise spec.model_class.error(f"{name} makes {a_type(model)}, which is not a flax.nnx.Module.")
    if not takes_rngs:
        raise _takes_no_rngs(spec.model_class)
    return model


def _split_hint(message: str) -> tuple[str, str | None]:
    """Split the message of a model's error from the proposal at its end: `Did you mean 'x'?`, `Known: x, y.`"""
    said, *proposed = re.split(r" (Did you mean|Known):? ", message, maxsplit=1)
    if not proposed:
        return said.rstrip("."), None
    return said.rstrip("."), ("one of: " if proposed[0] == "Known" else "") + proposed[1].rstrip(".?")


def _option_named(message: str, options: Mapping[str, Any], written: Sequence[str]) -> str | None:
    """Return the option that a message names first, or None; options that the user wrote come before others."""
    for names in (written, options):
        patterns = {
            name: rf"\b{re.escape(name)}\b|'{re.escape(str(options[name]))}'" for name in names if name in options
        }
        if named := {name: match.start() for name, p in patterns.items() if (match := re.search(p, message))}:
            return min(named, key=lambda name: named[name])
    return None


def _model_options(spec: StepSpec, accepted: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    train, options = spec.train, dict(spec.model.options)
    if spec.model.preset is not None:
        options["preset"] = spec.model.preset
    if "dtype" in accepted:
        options.setdefault("dtype", DTYPES[train.precision])
    if PRECISIONS[name := train.precision].few_bits:
        if name not in accepted:
            message = f"{spec.model_class.name} takes no `{name}` argument, so its linear layers cannot compute in it."
            raise spec.places.error("train.precision", message, hint='precision = "bf16"')
        options.setdefault(name, True)
    if train.fp8_scaling != "current":
        if "fp8_scaling" not in accepted:
            message = f"{spec.model_class.name} takes no `fp8_scaling` argument, so its scales cannot be delayed."
            raise spec.places.error("train.fp8_scaling", message, hint='fp8_scaling = "current"')
        options.setdefault("fp8_scaling", train.fp8_scaling)
    if "remat" in accepted:
        remat = train.remat
        options.setdefault("remat", remat.to_dict() if isinstance(remat, RematMix) else remat)
    return options


def _takes_no_rngs(model_class: UserCode) -> ConfigError:
    hint = "a keyword argument `rngs`, from which flax.nnx draws the initial weights"
    return model_class.error(f"{model_class.name} takes no `rngs`.", hint=hint)


def describe_model(spec: StepSpec) -> ModelDescription:
    """Return the model of a spec without arrays. Raises as `build_model` does."""
    with spec.model_class.calling():
        abstract = nnx.eval_shape(lambda: build_model(spec, nnx.Rngs(spec.train.seed)))
        graph, params, variables = nnx.split(abstract, nnx.Param, ...)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, kept_dtype(spec, leaf)), params)
    accepted = _parameters(spec.model_class.found)
    return ModelDescription(graph, params, variables, "dtype" in accepted, "remat" in accepted)


@dataclass(frozen=True)
class StateLayout:
    """NamedShardings of all arrays of a step. Those of parameters, weights and gradients are nested dicts."""

    params: Any
    gradients: Any
    """Shardings of the accumulators over micro-batches."""
    reduced: Any
    """Shardings of the gradients that the optimizer gets, equal to those of its moments."""
    compute: Any | None
    """Shardings of the weights that the model gets, or None if `[rules.compute]` changes nothing."""
    opt_state: Any
    """Shardings of the optimizer's state between steps."""
    variables: Any
    replicated: NamedSharding
    opt_on_device: Any | None = None
    """Shardings of the optimizer's state while the optimizer runs, or None if the state is always on the device."""


def lay_out(
    model: ModelDescription,
    optimizer: optax.GradientTransformation,
    mesh: AnyMesh,
    rules: ShardingRules,
    *,
    memory: str = "device",
) -> StateLayout:
    """Return the StateLayout that the rules give a model's state.

    `memory` is the memory of moments between steps, `device` or `host`; counters stay on the device.

    Raises:
        ConfigError: as `meshkit.shardings` does.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(kind):
        return nnx.to_pure_dict(shardings(model.params, mesh, rules, kind=kind))

    params, moments, compute = place("parameters"), place("optimizer"), place("compute")
    abstract = nnx.to_pure_dict(model.params)
    abstract_opt_state = jax.eval_shape(optimizer.init, abstract)

    def of_moments(kind: str | None):
        def place_moment(leaf, s, param):
            if leaf.shape != param.shape:
                spec = kept_spec(spec_axes(s.spec, len(param.shape)), param.shape, leaf.shape)
                s = NamedSharding(mesh, partition_spec(spec))
            return s if kind is None else s.with_memory_kind(kind)

        try:
            return map_moments(
                optimizer,
                place_moment,
                abstract_opt_state,
                moments,
                abstract,
                transform_non_params=lambda _: replicated,
            )
        except ValueError as error:
            raise ConfigError(
                f"the optimizer's state is not built of trees like the parameters: {str(error).splitlines()[0]}.",
                at="optimizer.class",
                hint="another optimizer of optax, or one of your own whose state has trees like the parameters",
            ) from error

    same = jax.tree.leaves(compute) == jax.tree.leaves(params)
    return StateLayout(
        params=params,
        gradients=place("gradients"),
        reduced=moments,
        compute=None if same else compute,
        opt_state=of_moments(HOST_MEMORY if memory == "host" else None),
        variables=nnx.to_pure_dict(shardings(model.variables, mesh, rules)),
        replicated=replicated,
        opt_on_device=of_moments("device") if memory == "host" else None,
    )


def map_moments(optimizer: optax.GradientTransformation, fn: Callable[..., Any], *trees: Any, **more: Any) -> Any:
    """Apply `optax.tree.map_params`, except to the `MaskedNode`s of an optimizer that has only some parameters."""
    masked = lambda leaf: isinstance(leaf, optax.MaskedNode)
    kept = lambda leaf, *rest: leaf if masked(leaf) else fn(leaf, *rest)
    return optax.tree.map_params(optimizer, kept, *trees, is_leaf=masked, **more)


def state_shardings(layout: StateLayout) -> TrainState:
    """Return a TrainState of NamedShardings."""
    one = layout.replicated
    return TrainState(one, layout.params, layout.opt_state, layout.variables, one)


def init_state(spec: StepSpec, optimizer: optax.GradientTransformation, stack: Stack | None = None) -> TrainState:
    """Return the state before the first step. Jit it with `out_shardings`, so that the state is created sharded."""
    model = build_model(spec, nnx.Rngs(spec.train.seed))
    _, params, variables = nnx.split(model, nnx.Param, ...)
    params = nnx.to_pure_dict(params)
    if stack is not None:
        params = {**params, LAYERS: stack.arrange(params[LAYERS])}
    rng = jax.random.key_data(jax.random.key(spec.train.seed))
    kept = jax.tree.map(lambda leaf: leaf.astype(kept_dtype(spec, leaf)), params)
    return TrainState(
        jnp.int32(0), kept, optimizer.init(jax.tree.map(in_fp32, params)), nnx.to_pure_dict(variables), rng
    )


def kept_dtype(spec: StepSpec, parameter: Any) -> Any:
    """Return the dtype that a parameter has between steps: `train.parameter_precision` in place of fp32."""
    return DTYPES[spec.train.parameter_precision] if parameter.dtype == jnp.float32 else parameter.dtype


def in_fp32(parameter: jax.Array) -> jax.Array:
    """Return a parameter as the optimizer gets it: bf16 cast to fp32, so that its moments are fp32 from the start."""
    return parameter.astype(jnp.float32) if parameter.dtype == jnp.bfloat16 else parameter


def split_rng(state: TrainState) -> jax.Array:
    """Return this step's random key."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    """Cast x to a dtype if x is floating point."""
    return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _checked_class(model_class: UserCode) -> Any:
    make, name, hint = model_class.found, model_class.name, "a subclass of flax.nnx.Module or flax.linen.Module"
    if isinstance(make, linen.Module):
        made = f'model.class = "{name.partition(":")[0]}:{type(make).__name__}", its fields as further keys of [model]'
        raise model_class.error(f"{name} is a linen module already made, not a class.", made)
    if not callable(make):
        raise model_class.error(f"{name} is {a_type(make)}, not a class.", hint)
    called = make
    while isinstance(called, functools.partial):
        called = called.func
    if inspect.isclass(called):
        if not issubclass(called, nnx.Module | linen.Module):
            raise model_class.error(f"{name} is a class that is not a flax.nnx.Module.", hint)
    elif not (kinds := returned_kinds(called)) or not all(
        issubclass(kind, nnx.Module | linen.Module) for kind in kinds
    ):
        message = f"{name} is not a model, nor a function that says that it returns one."
        raise model_class.error(message, f"{hint}, or def {name.partition(':')[2]}(...) -> nnx.Module")
    return make


def returned_kinds(make: Any) -> tuple[type, ...]:
    """Return the classes in a Python function's return annotation, a union or one class; () without an annotation."""
    function = getattr(make, "__func__", make)
    function = inspect.unwrap(function)
    if not inspect.isfunction(function) or "return" not in function.__annotations__:
        return ()
    only = SimpleNamespace(__annotations__={"return": function.__annotations__["return"]})
    try:
        returned = get_type_hints(only, globalns=function.__globals__)["return"]
    except (NameError, AttributeError, SyntaxError, TypeError):  # such as a name imported only for type checkers
        return ()
    kinds = get_args(returned) if get_origin(returned) in (Union, UnionType) else (returned,)
    return tuple(kinds) if all(inspect.isclass(kind) for kind in kinds) else ()


def _parameters(make: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function; nnx's metaclass hides those of a class from `inspect.signature`."""
    if isinstance(make, functools.partial):
        return {n: p for n, p in _parameters(make.func).items() if n not in make.keywords}
    parameters = inspect.signature(make.__init__ if inspect.isclass(make) else make).parameters
    hidden = ("self", *LINEN_FIELDS) if is_linen(make) else ("self",)
    return {name: p for name, p in parameters.items() if name not in hidden}


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, p in parameters.items() if p.default is p.empty and p.kind not in variadic]


LINEN_FIELDS = ("parent", "name")  # fields that linen adds to every module
_SAYS_TRAINING = {"train": True, "training": True, "is_training": True, "deterministic": False}
_MOST_STREAMS = 8


class LinenModel(nnx.bridge.ToNNX):
    """A linen module as an nnx module with a training and an evaluation mode.

    In training mode the collections besides the parameters are mutable. If the module's `__call__` or fields have
    `train`, `training`, `is_training` or `deterministic`, each call sets it by the mode, unless the caller passes it.

    The stream `params` of the rngs gives the initial weights; other streams, such as `dropout`, are used by name.
    """

    def __init__(self, module: linen.Module, rngs: nnx.Rngs | None):
        super().__init__(module, rngs)
        self.to_nnx__training = True

    def train(self, **_: Any) -> None:
        """Turn dropout on, and use the batch's own statistics."""
        self.to_nnx__training = True

    def eval(self, **_: Any) -> None:
        """Turn dropout off, and use the statistics gathered in training."""
        self.to_nnx__training = False

    def __call__(self, *args: Any, rngs: Any = None, method: Any = None, mutable: Any = None, **kwargs: Any) -> Any:
        module = self.to_nnx__module
        called = getattr(type(module), method) if isinstance(method, str) else method or type(module).__call__
        fields, takes = type(module).__dataclass_fields__, inspect.signature(called).parameters
        says = {k: v is self.to_nnx__training for k, v in _SAYS_TRAINING.items()}
        bound = inspect.signature(called).bind_partial(module, *args, **kwargs).arguments
        kwargs |= {k: v for k, v in says.items() if k in takes and k not in bound}
        own: dict[str, Any] = {k: v for k, v in says.items() if k in fields}
        if own:
            self.to_nnx__module = module.clone(**own)
        if mutable is None and self.to_nnx__training:
            mutable = self._collections()
        return super().__call__(*args, rngs=rngs, method=method, mutable=mutable or False, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("matmul_parameters", "attention_shape", "attention_windows"):  # they need no arrays
            return getattr(object.__getattribute__(self, "to_nnx__module"), name)
        return super().__getattr__(name)

    def _collections(self) -> list[str]:
        types = {type(v) for _, v in nnx.to_flat_state(nnx.state(self)) if not isinstance(v, nnx.Param | nnx.RngState)}
        return sorted(nnx.variable_name_from_type(t) for t in types)


def wrap_linen(spec: StepSpec, module: linen.Module, rngs: nnx.Rngs) -> LinenModel:
    """Return the module, initialized with the arguments of the loss's first call of it on a micro-batch.

    The stream `params` of the rngs gives the initial weights, then a key for each stream that a training call needs.

    Raises:
        ConfigError: the loss raises before it calls the model or never calls it, or the model has too many streams.
    """
    args, kwargs = _first_call(spec)
    model = LinenModel(module, nnx.Rngs(params=rngs.params()))
    model.lazy_init(*args, **kwargs)
    streams = _random_streams(model, args, kwargs)
    if streams is None:
        raise spec.model_class.error(f"{spec.model_class.name} draws from more than {_MOST_STREAMS} RNG streams.")
    model.to_nnx__rngs = nnx.Rngs(**{name: rngs.params() for name in streams}) if streams else None
    return model


def is_linen(make: Any) -> bool:
    """Return whether this is a linen module class, or a partial of one."""
    made = make.func if isinstance(make, functools.partial) else make
    return inspect.isclass(made) and issubclass(made, linen.Module)


def linen_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of an experiment file as fields of a linen module, which must be hashable: lists become tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


class _Called(BaseException):
    """Ends a trace of the loss at its first call of the model; carries its arguments. `except Exception` misses it."""

    def __init__(self, args: tuple, kwargs: dict):
        self.arguments = args, kwargs


class _Recorder:
    """Replaces the model in a trace of the loss; raises `_Called` when it or one of its methods is called."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self(*args, method=name, **kwargs)


def _first_call(spec: StepSpec) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of the loss's first call of the model, on a micro-batch of zeros."""
    train = spec.train
    rows = train.global_batch // train.accumulate
    batch = {k: jnp.zeros((rows, *x.shape), x.dtype) for k, x in abstract_example(spec).items()}
    loss: Any = checked_loss(spec.loss, spec.model_class)
    try:
        loss(_Recorder(), batch, jax.random.key(0))
    except _Called as call:
        return call.arguments
    name = train.loss or "next-token cross-entropy"
    message = f"{name} never calls the model, so a linen module cannot be initialized."
    raise spec.places.error("train.loss", message)


def _random_streams(model: LinenModel, args: tuple, kwargs: dict[str, Any]) -> list[str] | None:
    """Return the names of the RNG streams that a training call draws from, found by calling without them.

    Return None if there are more than `_MOST_STREAMS`.
    """
    graph, state = nnx.split(model)
    found: dict[str, jax.Array] = {}

    def call(state):
        nnx.merge(graph, state)(*args, rngs=nnx.Rngs(**found), **kwargs)

    for _ in range(_MOST_STREAMS + 1):
        try:
            jax.eval_shape(call, state)
        except errors.InvalidRngError as error:
            missing = str(error).split('PRNG for "')
            if len(missing) < 2:
                raise
            found[missing[1].split('"')[0]] = jax.random.key(0)
        else:
            return sorted(found)
    return None
