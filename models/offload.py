"""A scan over layers whose offloaded values cross the host link one layer later, and come back one layer earlier.

`jax.checkpoint` moves a value to host memory in the iteration that makes it and back in the one that needs it. XLA
keeps every copy inside its iteration, and the widest values are made last and needed first: nothing is left there to
hide their copies under. Here layer i - 1's values leave while layer i computes forward, and come back while layer i
computes backward:

    forward    carry (x, made by i - 1)    layer i              stack what i - 1 made, in host memory
    backward   carry (g, needed by i)      layer i's gradient   fetch what i - 1 needs

So the values of two layers are on the GPU at a time, and one copy more than there are layers is made (of zeros). What
the layers do, and so the gradients, is that of `jax.checkpoint` under the same policy.
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
    """`jax.lax.scan(layer, x, stacked)` for a layer under a policy that offloads.

    That scan itself where something is no floating-point number, or varies over the axes of a `shard_map`.

    Args:
        layer: under `jax.checkpoint` with that policy: (x, parameters of one layer) -> (x, values).
        kept: the same with a policy that keeps on the GPU what `layer` offloads.
        x: what enters the first layer.
        stacked: parameters, their first dim is the layers'.
    """
    residuals = _residuals(layer, kept, x, stacked)
    if residuals is None:
        return jax.lax.scan(layer, x, stacked)
    trees: list[Any] = []  # of the residuals: the forward pass knows it, and the backward pass needs it

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
        kinds: what becomes of each: `keep`, `offload`, or the index of the parameter that it is.
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
    """The residuals of `kept`; what `layer` has in host memory is to be offloaded. None where the two do not need the
    same, one by one, or `scan_offloaded` cannot carry it."""
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
    """Avals of a layer's residuals, which of them are which parameter, and avals of its values."""
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
