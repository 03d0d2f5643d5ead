"""linen modules in an experiment: wrapped as nnx modules by flax's own bridge.

    linen module -> first call that the loss makes -> ToNNX, initialized by it -> params, batch statistics, RNG streams

The names that `nn.with_partitioning` and `nn.with_logical_partitioning` put on a parameter become the metadata of its
nnx variable, where `meshkit.shardings` reads them. Every other collection (`batch_stats`) is carried in
`TrainState.variables`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors, linen, nnx

from meshkit.config.experiment import Experiment
from meshkit.step.data import abstract_example
from meshkit.step.loss import find_loss

LINEN_FIELDS = ("parent", "name")  # that linen adds to every module
_SAYS_TRAINING = {"train": True, "training": True, "is_training": True, "deterministic": False}
_MOST_STREAMS = 8


class LinenModel(nnx.bridge.ToNNX):
    """A linen module as an nnx module that knows whether it trains.

    In training the collections beside the parameters are mutable. A call that does not say otherwise gets `train`,
    `training`, `is_training` or `deterministic` where the module's `__call__` or its fields have it.

    Args:
        module: unbound.
        rngs: initial weights from its stream `params`, and dropout's and the like from streams of their names.
    """

    def __init__(self, module: linen.Module, rngs: nnx.Rngs | None):
        super().__init__(module, rngs)
        self.to_nnx__training = True

    def train(self, **_: Any) -> None:
        """Dropout on, batch statistics of the batch."""
        self.to_nnx__training = True

    def eval(self, **_: Any) -> None:
        """Dropout off, batch statistics as gathered in training."""
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
        if name in ("matmul_parameters", "attention_shape"):  # questions about the module, not calls of it
            return getattr(object.__getattribute__(self, "to_nnx__module"), name)
        return super().__getattr__(name)

    def _collections(self) -> list[str]:
        """Names of the collections beside the parameters that the module was initialized with."""
        types = {type(v) for _, v in nnx.to_flat_state(nnx.state(self)) if not isinstance(v, nnx.Param | nnx.RngState)}
        return sorted(nnx.variable_name_from_type(t) for t in types)


def wrap_linen(experiment: Experiment, module: linen.Module, rngs: nnx.Rngs) -> LinenModel:
    """The module initialized by the call that the experiment's loss makes of it on a micro-batch.

    Raises:
        ConfigError: the loss raises before it calls the model, or never does.
    """
    args, kwargs = _first_call(experiment)
    model = LinenModel(module, nnx.Rngs(params=rngs.params()))
    model.lazy_init(*args, **kwargs)
    streams = _random_streams(model, args, kwargs)
    model.to_nnx__rngs = nnx.Rngs(**{name: rngs.params() for name in streams}) if streams else None
    return model


def is_linen(make: Any) -> bool:
    """Whether this is a linen module class, or a partial of one."""
    made = make.func if isinstance(make, functools.partial) else make
    return inspect.isclass(made) and issubclass(made, linen.Module)


def linen_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an experiment file as fields of a linen module, which must be hashable: lists become tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


class _Called(BaseException):
    """Ends a trace of the loss with the arguments of its first call of the model; no Exception, so nothing hides it."""

    def __init__(self, args: tuple, kwargs: dict):
        self.arguments = args, kwargs


class _Recorder:
    """Stands in for the model until the first call of it, or of one of its methods."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise _Called(args, kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self(*args, method=name, **kwargs)


def _first_call(experiment: Experiment) -> tuple[tuple, dict[str, Any]]:
    """Arguments that the loss calls the model with, on a micro-batch of zeros."""
    train = experiment.train
    rows = train.global_batch // train.accumulate
    batch = {k: jnp.zeros((rows, *x.shape), x.dtype) for k, x in abstract_example(experiment).items()}
    loss: Any = find_loss(experiment)
    try:
        loss(_Recorder(), batch, jax.random.key(0))
    except _Called as call:
        return call.arguments
    name = train.loss or "next-token cross-entropy"
    raise experiment.error("train.loss", f"{name} never calls the model, so a linen module has nothing to start from.")


def _random_streams(model: LinenModel, args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """Names of the RNG streams that a call in training draws from, found by calling without them."""
    graph, state = nnx.split(model)
    found: dict[str, jax.Array] = {}

    def call(state):
        nnx.merge(graph, state)(*args, rngs=nnx.Rngs(**found), **kwargs)

    for _ in range(_MOST_STREAMS):
        try:
            jax.eval_shape(call, state)
        except errors.InvalidRngError as error:
            missing = str(error).split('PRNG for "')
            if len(missing) < 2:
                raise
            found[missing[1].split('"')[0]] = jax.random.key(0)
        else:
            break
    return sorted(found)
