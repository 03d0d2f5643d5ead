"""Experiment -> the model it names, its abstract state, and where every array of it lives. Layer 4.

Nothing here allocates an array: shapes come from tracing, so a 405B model is described in seconds on a laptop.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.errors import ConfigError, MeshkitError
from meshkit.sharding import shardings
from meshkit.sharding.mesh import AnyMesh
from meshkit.spec.experiment import Experiment
from meshkit.spec.rules import ShardingRules

DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.bfloat16}  # of activations
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")})
_LONGEST_MESSAGE = 300


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    """All that a training step carries over to the next one.

    Attributes:
        step: int32 scalar, number of steps done.
        params: nested dict of fp32 arrays, `{"layers": {"attention": ...}}`.
        opt_state: of optax.
        variables: the model's other state (batch statistics and the like); empty for a Llama.
        rng: key data (uint32) that each step folds its number into.
    """

    step: Any
    params: Any
    opt_state: Any
    variables: Any
    rng: Any


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
        """The module with abstract arrays, to ask it about itself."""
        return nnx.merge(self.graph, self.params, self.variables)

    def merge(self, params: Any, variables: Any) -> nnx.Module:
        """The module around arrays given as nested dicts."""
        return nnx.merge(self.graph, nnx.State(params), nnx.State(variables))


@contextmanager
def user_code(experiment: Experiment, key: str, what: str, hint: str | None = None) -> Iterator[None]:
    """A block that runs the user's code: what it raises is the user's to mend, so it becomes a ConfigError at `key`.

    Errors of meshkit pass, and so do those of a device or of memory, which say nothing about the code.
    """
    try:
        yield
    except (MeshkitError, MemoryError, jax.errors.JaxRuntimeError):
        raise
    except (Exception, SystemExit) as error:
        raise experiment.error(key, f"{what} raised {describe_error(error)}.", hint=hint) from error


def describe_error(error: BaseException) -> str:
    """An exception on one line: type, first line of its message, and the last line of the user's own that it passed."""
    if isinstance(error, SyntaxError):
        message, place = error.msg, f"{Path(error.filename or '?').name}:{error.lineno}"
    else:
        message, place = str(error), _user_line(error)
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    if len(first) > _LONGEST_MESSAGE:
        first = f"{first[:_LONGEST_MESSAGE]}..."
    text = f"{type(error).__name__}: {first.rstrip('.')}" if first else type(error).__name__
    return f"{text} ({place})" if place else text


def _user_line(error: BaseException) -> str | None:
    """`file:line` of the innermost frame that is neither meshkit's nor of an installed package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_OURS, "<", *_INSTALLED)):
            return f"{Path(frame.filename).name}:{frame.lineno}"
    return None


def load_object(name: str, search_paths: Iterable[Path] = (), *, at: str | None = None) -> Any:
    """What `"pkg.mod:Name"` names, with the experiment's folders importable.

    Raises:
        ConfigError: not of that form, no such module, one that fails to import, or no such name in it.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"'{name}' is not of the form \"package.module:Name\".", at=at)
    for path in map(str, search_paths):
        if path not in sys.path:
            sys.path.append(path)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"importing '{module_name}' failed: {describe_error(error)}.", at=at) from error
        searched = ", ".join(map(str, search_paths)) or "the import path"
        hint = "a path that exists in the working directory or beside the experiment file"
        raise ConfigError(f"no module '{error.name}' in {searched}.", at=at, hint=hint) from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"importing '{module_name}' raised {describe_error(error)}.", at=at) from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, dir(module), n=1)
        hint = f'"{module_name}:{near[0]}"' if near else None
        raise ConfigError(f"module '{module_name}' has no '{attribute}'.", at=at, hint=hint)
    return getattr(module, attribute)


def build_model(experiment: Experiment, rngs: nnx.Rngs) -> nnx.Module:
    """The experiment's model: `cls(preset=..., rngs=..., **options)`.

    A class whose signature has `dtype`, `fp8` or `remat` is given the `[train]` precision and remat policy, unless the
    options say otherwise.

    Raises:
        ConfigError: the class is missing, is no model, does not take an option, or raises.
    """
    cls, name = _model_class(experiment), experiment.model.class_path
    accepted = _parameters(cls)
    options = dict(experiment.model.options)
    if experiment.model.preset is not None:
        options["preset"] = experiment.model.preset
    if "dtype" in accepted:
        options.setdefault("dtype", DTYPES[experiment.train.precision])
    if experiment.train.precision == "fp8":
        if "fp8" not in accepted:
            message = f"{name} takes no `fp8` argument, so its linear layers cannot compute in fp8."
            raise experiment.error("train.precision", message, hint='precision = "bf16"')
        options.setdefault("fp8", True)
    if "remat" in accepted:
        options.setdefault("remat", experiment.train.remat)
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    if "rngs" not in accepted and not open_ended:
        hint = "a keyword argument `rngs`, from which flax.nnx draws the initial weights"
        raise experiment.error("model.class", f"{name} takes no `rngs`.", hint=hint)
    short = name.partition(":")[2]
    for key in options:
        if key not in accepted and not open_ended:
            known = ", ".join(k for k in accepted if k != "rngs")
            raise experiment.error(f"model.{key}", f"{short} takes no option '{key}'.", hint=f"one of: {known}")
    for key in _required(accepted):
        if key not in options and key != "rngs":
            raise experiment.error("model", f"{name} needs the option '{key}'.", hint=f"model.{key} = ...")
    with user_code(experiment, "model.class", name):
        try:
            model = cls(rngs=rngs, **options)
        except ValueError as error:
            if (place := _raised_by_user(error)) is None:
                raise
            message = f"{short} refuses its options: {str(error).rstrip('.')} ({place})."
            raise experiment.error("model", message) from error
    if not isinstance(model, nnx.Module):
        made = type(model).__name__
        raise experiment.error("model.class", f"{name} makes a {made}, which is not a flax.nnx.Module.")
    return model


def describe_model(experiment: Experiment) -> ModelDescription:
    """The experiment's model without arrays. Raises as `build_model` does."""
    with user_code(experiment, "model.class", experiment.model.class_path):
        abstract = nnx.eval_shape(lambda: build_model(experiment, nnx.Rngs(experiment.train.seed)))
        graph, params, variables = nnx.split(abstract, nnx.Param, ...)
    accepted = _parameters(_model_class(experiment))
    return ModelDescription(graph, params, variables, "dtype" in accepted, "remat" in accepted)


@dataclass(frozen=True)
class Layout:
    """NamedShardings of everything a step touches; each a nested dict shaped like the parameters, save `opt_state`.

    Attributes:
        gradients: of the accumulators over micro-batches.
        reduced: of the gradients that the optimizer gets: cut as its state is.
        compute: of the weights as the model sees them, or None where `[rules.compute]` changes nothing.
    """

    params: Any
    gradients: Any
    reduced: Any
    compute: Any | None
    opt_state: Any
    variables: Any
    replicated: NamedSharding


def lay_out(model: ModelDescription, optimizer: optax.GradientTransformation, mesh: AnyMesh, rules: ShardingRules):
    """The Layout that the rules give a model's state. Raises ConfigError as `meshkit.shardings` does."""
    replicated = NamedSharding(mesh, PartitionSpec())

    def place(kind):
        return nnx.to_pure_dict(shardings(model.params, mesh, rules, kind=kind))

    params, moments, compute = place("parameters"), place("optimizer"), place("compute")
    abstract_opt_state = jax.eval_shape(optimizer.init, nnx.to_pure_dict(model.params))
    opt_state = optax.tree.map_params(
        optimizer, lambda _, s: s, abstract_opt_state, moments, transform_non_params=lambda _: replicated
    )
    same = jax.tree.leaves(compute) == jax.tree.leaves(params)
    return Layout(
        params=params,
        gradients=place("gradients"),
        reduced=moments,
        compute=None if same else compute,
        opt_state=opt_state,
        variables=nnx.to_pure_dict(shardings(model.variables, mesh, rules)),
        replicated=replicated,
    )


def state_shardings(layout: Layout) -> TrainState:
    """A TrainState of NamedShardings."""
    one = layout.replicated
    return TrainState(one, layout.params, layout.opt_state, layout.variables, one)


def init_state(experiment: Experiment, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step; to be jitted with `out_shardings`, so that it is born sharded."""
    model = build_model(experiment, nnx.Rngs(experiment.train.seed))
    _, params, variables = nnx.split(model, nnx.Param, ...)
    params = nnx.to_pure_dict(params)
    rng = jax.random.key_data(jax.random.key(experiment.train.seed))
    return TrainState(jnp.int32(0), params, optimizer.init(params), nnx.to_pure_dict(variables), rng)


def abstract_state(experiment: Experiment, optimizer: optax.GradientTransformation, layout: Layout) -> TrainState:
    """TrainState of ShapeDtypeStructs that carry their shardings."""
    shapes = jax.eval_shape(lambda: init_state(experiment, optimizer))
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, state_shardings(layout)
    )


def split_rng(state: TrainState) -> jax.Array:
    """This step's random key."""
    return jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)


def replace(state: TrainState, **changes: Any) -> TrainState:
    """The state with some fields replaced."""
    return dataclasses.replace(state, **changes)


def _model_class(experiment: Experiment) -> Any:
    at = experiment.error("model.class", "").at
    name = experiment.model.class_path
    cls = load_object(name, experiment.search_paths, at=at)
    if not callable(cls):
        raise ConfigError(
            f"{name} is a {type(cls).__name__}, not a class.", at=at, hint="a subclass of flax.nnx.Module"
        )
    if inspect.isclass(cls) and not issubclass(cls, nnx.Module):
        hint = "a subclass of flax.nnx.Module"
        raise ConfigError(f"{name} is a class that is not a flax.nnx.Module.", at=at, hint=hint)
    return cls


def _parameters(make: Any) -> Mapping[str, inspect.Parameter]:
    """Parameters of a class or function; nnx's metaclass hides those of a class from `inspect.signature`."""
    parameters = inspect.signature(make.__init__ if inspect.isclass(make) else make).parameters
    return {name: p for name, p in parameters.items() if name != "self"}


def _required(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """Names of those that have no default."""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, p in parameters.items() if p.default is p.empty and p.kind not in variadic]


def _raised_by_user(error: BaseException) -> str | None:
    """`file:line` if the statement that raised is the user's own: a refusal, not an accident in some library."""
    frames = traceback.extract_tb(error.__traceback__)
    refuses = bool(frames) and (frames[-1].line or "").lstrip().startswith("raise ")
    return _user_line(error) if refuses else None
