"""A scan over layers that moves offloaded values to the host one layer late, and fetches them one layer early.

`jax.checkpoint` moves a value to host memory in the iteration that makes it, and back in the iteration that needs it.
XLA keeps every copy inside its iteration. The widest values are made last and needed first, so no work is left in the
iteration to hide their copies. Here the values of layer i - 1 leave the GPU while layer i computes forward, and come
back while layer i computes backward:

    forward    carry (x, values of i - 1)    compute layer i              send the values of i - 1 to host memory
    backward   carry (g, values of i)        compute layer i's gradient   fetch the values of i - 1

So the GPU holds the values of two layers at a time. Each pass makes as many copies as there are layers, one of them of
zeros. Layers compute the same values and gradients as with `jax.checkpoint` under the same policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import memory

Layer = Callable[[Any, Any], tuple[Any, Any]]


def scan_offloaded(layer: Layer, kept: Layer, x: Any, stacked: Any) -> tuple[Any, Any]:
    """Run `jax.lax.scan(layer, x, stacked)` for a layer under a policy that offloads.

    The scan stays plain if some value is not floating-point, or varies over the axes of a `shard_map`.

    Args:
        layer: the layer under `jax.checkpoint` with that policy: (x, parameters of one layer) -> (x, values).
        kept: the same layer with a policy that keeps on the GPU what `layer` offloads.
        x: input of the first layer.
        stacked: parameters of all layers; the first dim is over layers.
    """
    residuals = _residuals(layer, kept, x, stacked)
    if residuals is None:
        return jax.lax.scan(layer, x, stacked)
    trees: list[Any] = []  # tree structure of the residuals, from the forward pass for the backward pass

    @jax.custom_vjp
    def run(x, stacked):
        return jax.lax.scan(layer, x, stacked)

    def forward(x, stacked):
        def body(carry, parameters):
            x, made = carry
            (x, values), backward = jax.vjp(kept, x, parameters)
            found, tree = jax.tree.flatten(backward)
            trees[:] = [tree]
            sent = [jax.device_put(value, memory.Space.Host) for value in made]
            return (x, residuals.pick(found, "offload")), (values, residuals.pick(found, "keep"), sent)

        (x, last), (values, held, sent) = jax.lax.scan(body, (x, residuals.nothing()), stacked)
        return (x, values), (stacked, held, sent, last)

    def backward(found, gradients):
        stacked, held, sent, last = found
        g, of_values = gradients

        def body(carry, of_layer):
            g, needed = carry
            parameters, of_values, held, sent = of_layer
            fetched = [jax.device_put(value, memory.Space.Device) for value in sent]
            joined = residuals.join(jax.tree.leaves(parameters), held, needed)
            g, of_parameters = jax.tree.unflatten(trees[0], joined)((g, of_values))
            return (g, fetched), of_parameters

        (g, _), of_stacked = jax.lax.scan(body, (g, last), (stacked, of_values, held, sent), reverse=True)
        return g, of_stacked

    run.defvjp(forward, backward)
    return run(x, stacked)


@dataclass(frozen=True)
class _Residuals:
    """The values that the backward pass of one layer needs, in order.

    Attributes:
        avals: shapes and dtypes.
        kinds: for each value `keep`, `offload` or, if the value is a parameter, the parameter's index.
    """

    avals: Sequence[Any]
    kinds: Sequence[str | int]

    def pick(self, found: Sequence[Any], kind: str) -> list[Any]:
        return [value for value, its in zip(found, self.kinds, strict=True) if its == kind]

    def join(self, parameters: Sequence[Any], held: Sequence[Any], fetched: Sequence[Any]) -> list[Any]:
        streams = {"keep": iter(held), "offload": iter(fetched)}
        return [parameters[kind] if isinstance(kind, int) else next(streams[kind]) for kind in self.kinds]

    def nothing(self) -> list[jax.Array]:
        return [jnp.zeros(aval.shape, aval.dtype) for aval in self.pick(self.avals, "offload")]


def _residuals(layer: Layer, kept: Layer, x: Any, stacked: Any) -> _Residuals | None:
    """Return the residuals of `kept`; those that `layer` has in host memory get the kind `offload`. Return None if the
    residuals of `layer` and `kept` differ in shape or dtype, or if `scan_offloaded` cannot carry them."""
    parameters = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    there, _, values = _trace(layer, x, parameters)
    here, are_parameters, _ = _trace(kept, x, parameters)
    carried = (*jax.tree.leaves((x, stacked)), *values, *here)
    if any(not jnp.issubdtype(leaf.dtype, jnp.floating) or getattr(_aval(leaf), "vma", ()) for leaf in carried):
        return None
    if [(a.shape, a.dtype) for a in there] != [(a.shape, a.dtype) for a in here]:
        return None
    kinds: list[str | int] = [
        index if index is not None else "offload" if aval.memory_space == memory.Space.Host else "keep"
        for index, aval in zip(are_parameters, there)
    ]
    return _Residuals(here, kinds)


def _trace(layer: Layer, x: Any, parameters: Any) -> tuple[list[Any], list[int | None], list[Any]]:
    """Return the avals of a layer's residuals, the index of each that is a parameter, and the avals of its values."""
    are_parameters: list[int | None] = []

    def residuals(x, parameters):
        (_, values), backward = jax.vjp(layer, x, parameters)
        places = {id(leaf): index for index, leaf in enumerate(jax.tree.leaves(parameters))}
        found = jax.tree.leaves(backward)
        are_parameters.extend(places.get(id(leaf)) for leaf in found)
        return found, values

    avals: list[Any] = list(jax.make_jaxpr(residuals)(x, parameters).out_avals)
    count = len(are_parameters)
    return avals[:count], are_parameters, avals[count:]


def _aval(leaf: Any) -> Any:
    return getattr(leaf, "aval", leaf)
