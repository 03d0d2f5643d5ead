"""Flax's own constraints, where they stand inside a `sharding_scope`.

`nn.with_logical_constraint` does nothing without flax's rules and a mesh of jax's, and a variable with `out_sharding`
cannot even be made. Inside a scope both are about the scope's mesh. What a name means is said, first to last, by the
rules handed over (`rules=`, the variable's `sharding_rules`), by `nn.logical_axis_rules`, by meshkit's rules.

Flax is asked at the two functions that all of its constraints go through. Outside of any scope they are flax's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from flax.core import meta
from flax.core import spmd as variables
from flax.linen import spmd as linen
from jax.sharding import PartitionSpec

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Asked:
    """What flax asks of an array: a name, or None, and mesh axes for each dim."""

    names: tuple[str | None, ...]
    axes: tuple[Axes, ...]
    free: tuple[int, ...] = ()  # dims that are nobody's business (`PartitionSpec.UNCONSTRAINED`)


Answer = Callable[[Any, Asked], Any]


@dataclass(frozen=True)
class _Listener:
    """Who answers flax here."""

    mapping: Mapping[str, Axes]  # meshkit's rules
    constrain: Answer
    place: Answer


class _OurRules(tuple):
    """meshkit's rules as flax spells them, told apart from rules of the user's own."""


_LISTENER: ContextVar[_Listener | None] = ContextVar("meshkit_flax", default=None)


@contextmanager
def flax_follows(mapping: Mapping[str, Axes] | None, constrain: Answer, place: Answer) -> Iterator[None]:
    """Answers flax's constraints on activations by `constrain`, and on new variables by `place`; with None, neither.

    Flax's rules are the mapping meanwhile, unless the user has set some: `nn.logical_to_mesh_axes` agrees with it.
    """
    _intercept()
    before = variables.get_logical_axis_rules()
    own = before if before and not isinstance(before, _OurRules) else _OurRules((mapping or {}).items())
    token = _LISTENER.set(None if mapping is None else _Listener(mapping, constrain, place))
    try:
        with variables.logical_axis_rules(own):
            yield
    finally:
        _LISTENER.reset(token)


@functools.cache
def _intercept() -> None:
    """Once in a process: flax's two functions ask here first."""
    constrain, place = linen._with_sharding_constraint_one_fallback, variables.shard_value

    @functools.wraps(constrain)
    def constrained(axis_resources, x, fallback=linen.RulesFallback.AXIS_IS_UNSHARDED, rules=None, mesh=None):
        listener = _LISTENER.get()
        if listener is None or mesh is not None or axis_resources is None:
            return constrain(axis_resources, x, fallback=fallback, rules=rules, mesh=mesh)
        asked, unknown = _asked(tuple(axis_resources), listener.mapping, rules or ())
        if unknown and fallback == linen.RulesFallback.RAISE_ERROR:
            raise ValueError(f"Axis names {axis_resources} did not match a rule")
        if unknown and fallback == linen.RulesFallback.NO_CONSTRAINT:
            return x
        return listener.constrain(x, asked)

    @functools.wraps(place)
    def placed(value, out_sharding, sharding_rules, mesh):
        listener = _LISTENER.get()
        names = out_sharding if isinstance(out_sharding, tuple | list | PartitionSpec) else None
        if listener is None or not names or mesh is not None or meta.global_mesh_defined():
            return place(value, out_sharding, sharding_rules, mesh)
        around = variables.get_logical_axis_rules()
        rules = (*(sharding_rules or ()), *(() if isinstance(around, _OurRules) else around))
        return listener.place(value, _asked(tuple(names), listener.mapping, rules)[0])

    linen._with_sharding_constraint_one_fallback = constrained
    variables.shard_value = placed


def _asked(names: tuple, mapping: Mapping[str, Axes], rules: Sequence[tuple[str, Any]]) -> tuple[Asked, bool]:
    """Mesh axes of each dim, and whether no rule is about one of the names.

    Rules of the user's own go by flax's order of precedence. Of meshkit's, which have no order, the first dim that
    wants an axis has it.
    """
    given = () if isinstance(rules, _OurRules) else rules
    by_flax = linen._logical_to_mesh_axes(names, given) if given else [None] * len(names)
    found = [_axes(entry) for entry in by_flax or ()]
    ruled = {name for name, _ in given}
    taken = {axis for axes in found for axis in axes}
    for dim, name in enumerate(names):
        if isinstance(name, str) and name not in ruled:
            found[dim] = tuple(axis for axis in mapping.get(name, ()) if axis not in taken)
            taken.update(found[dim])
    free = tuple(dim for dim, name in enumerate(names) if name is PartitionSpec.UNCONSTRAINED)
    words = tuple(name if isinstance(name, str) else None for name in names)
    unknown = any(name is not None and name not in ruled and name not in mapping for name in words)
    return Asked(words, tuple(found), free), unknown


def _axes(entry: Any) -> Axes:
    return (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple | list) else ()
