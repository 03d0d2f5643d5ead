"""A training state in the order of a pipeline, and as checkpoints hold it: as without one.

In memory a stage's layers lie together, padded where stages have unequal numbers of them (`parallel.pipeline.stack`).
On disk they have the model's own order, so a run goes on with other stages, or none. Where the layers do not divide
into the stages, an array on its way to disk is cut over the pipeline's axis along another dim.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.parallel.pipeline import Stack
from meshkit.step.state import HOST_MEMORY, LAYERS, ModelDescription, TrainState, replace


@dataclass(frozen=True)
class Arrangement:
    """How the arrays of layers lie in a pipeline's state.

    Attributes:
        stack: where each layer is.
        axis: of the pipeline.
        optimizer: whose moments are arranged as the parameters are.
        abstract: the state in memory, ShapeDtypeStructs with shardings.
    """

    stack: Stack
    axis: str
    optimizer: optax.GradientTransformation
    abstract: TrainState
    _compiled: dict = field(default_factory=dict, repr=False, compare=False)

    @functools.cached_property
    def saved(self) -> TrainState:
        """The state as checkpoints hold it: ShapeDtypeStructs with shardings."""

        def one(x):
            shape = (self.stack.layers, *x.shape[1:])
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=_on_other_dims(x.sharding, shape, self.axis))

        return self._over_layers(one, self.abstract)

    def to_saved(self, state: TrainState) -> TrainState:
        """A state in memory, as checkpoints hold it; itself where that is the same."""
        return self._move("restore", state, self.abstract, self.saved)

    def from_saved(self, state: TrainState) -> TrainState:
        """A state as checkpoints hold it, in memory."""
        return self._move("arrange", state, self.saved, self.abstract)

    def params_from_saved(self, params: Any) -> Any:
        """Parameters alone, in memory."""
        if self.stack.natural:
            return params
        given, wanted = (self._uncut(state).params[LAYERS] for state in (self.saved, self.abstract))

        def run(params):
            layers = self.stack.arrange(_constrain(params[LAYERS], given))
            return {**params, LAYERS: _constrain(layers, wanted)}

        return jax.jit(run, out_shardings=jax.tree.map(lambda x: x.sharding, self.abstract.params))(params)

    def _move(self, way: str, state: TrainState, given: TrainState, wanted: TrainState) -> TrainState:
        """The state after `Stack.arrange` or `Stack.restore`."""
        if self.stack.natural:
            return state
        if way not in self._compiled:
            order = getattr(self.stack, way)

            def run(state):
                state = _constrain(_on_device(state, given), self._uncut(given))
                return _constrain(self._over_layers(order, state), self._uncut(wanted))

            self._compiled[way] = jax.jit(run, out_shardings=jax.tree.map(lambda x: x.sharding, wanted))
        return self._compiled[way](state)

    def _uncut(self, abstract: TrainState) -> TrainState:
        """Shardings under which every device has all layers, of its share of each: to reorder them there.

        Across devices that would be a gather along a dim that is cut, which XLA makes of whole copies, or dies of.
        """

        def one(x):
            sharding = _on_other_dims(x.sharding, x.shape, self.axis, always=True)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return self._over_layers(one, abstract)

    def _over_layers(self, fn: Callable[[Any], Any], state: TrainState) -> TrainState:
        """fn on every array of layers: parameters, and what the optimizer keeps for each of them."""
        of_layers = {
            name: jax.tree.map(lambda _, layered=name == LAYERS: layered, tree) for name, tree in state.params.items()
        }

        def one(x, layered):
            return fn(x) if layered else x

        params = jax.tree.map(one, state.params, of_layers)
        return replace(
            state, params=params, opt_state=optax.tree.map_params(self.optimizer, one, state.opt_state, of_layers)
        )


def arrange_description(model: ModelDescription, stack: Stack) -> ModelDescription:
    """The model with as many layers in its arrays as the pipeline has places for."""

    def one(leaf: nnx.Variable) -> nnx.Variable:
        x = leaf.get_raw_value()
        return leaf.replace(jax.ShapeDtypeStruct((stack.size, *x.shape[1:]), x.dtype))

    layers = jax.tree.map(one, model.params[LAYERS], is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    params = nnx.State({**model.params, LAYERS: layers})
    return ModelDescription(model.graph, params, model.variables, model.takes_dtype, model.takes_remat)


def _on_other_dims(
    sharding: NamedSharding, shape: tuple[int, ...], axis: str, *, always: bool = False
) -> NamedSharding:
    """The sharding of an array whose first dim the axis need not divide: it cuts the first other dim that it can.

    Where the axis does divide the first dim, that is as it was, unless it is `always` to be left whole.
    """
    mesh, spec = sharding.mesh, [*sharding.spec] + [None] * (len(shape) - len(sharding.spec))
    ways = mesh.shape[axis]
    cut = [dim for dim, entry in enumerate(spec) if axis in _names(entry)]
    if (cut and cut != [0]) or (not always and shape[0] % ways == 0):
        return sharding
    spec[0] = None
    for dim in range(1, len(shape)):
        names = _names(spec[dim])
        if shape[dim] % (ways * math.prod(mesh.shape[a] for a in names)) == 0:
            spec[dim] = (*names, axis)
            break
    return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _on_device(state: TrainState, given: TrainState) -> TrainState:
    """The state with what lies in host memory fetched, inside `jax.jit`."""

    def one(x, like):
        host = like.sharding.memory_kind == HOST_MEMORY
        return jax.device_put(x, like.sharding.with_memory_kind("device")) if host else x

    return jax.tree.map(one, state, given)


def _constrain(tree: Any, like: Any) -> Any:
    """The arrays in device memory with the shardings of others, inside `jax.jit`."""
    return jax.tree.map(
        lambda x, to: jax.lax.with_sharding_constraint(x, to.sharding.with_memory_kind("device")), tree, like
    )


def _names(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)
