"""A step whose arguments are nnx modules -> the same step over their arrays, as the compiler takes it.

    nnx.jit'ed or plain step, (model, optimizer, batch) -> over_arrays -> pure function of lists of arrays

What such a step changes in its modules is what it is for, and no value that it returns: it becomes an output here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, NamedSharding

from meshkit.errors import ConfigError
from meshkit.sharding.mesh import AnyMesh, DescribedMesh


def traceable(
    step: Callable[..., Any], args: Sequence[Any], mesh: AnyMesh, absent: DescribedMesh
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step over arrays, and its arguments as abstract ones whose NamedShardings are on the described mesh.

    On `mesh` itself where that has explicit axes: types name the very mesh.

    Raises:
        ConfigError: the arguments are no tuple.
    """
    if not isinstance(args, tuple | list):
        raise ConfigError(f"args must be a tuple of arguments, not {type(args).__name__}.", hint="args=(x,)")
    step, args = over_arrays(step, args)
    target = mesh if AxisType.Explicit in mesh.axis_types else absent

    def one(leaf: Any) -> Any:
        if not _is_array(leaf):
            return leaf
        given = getattr(leaf, "sharding", None)
        sharding = None
        if isinstance(given, NamedSharding):
            sharding = NamedSharding(target, given.spec, memory_kind=given.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return step, jax.tree.map(one, args)


def over_arrays(step: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step as a function of arrays, and its arguments: what it is given to overwrite, and the rest.

    Its outputs are what the step returns and every array that it left changed in its modules, as flax's own program has
    them: `nnx.jit` in its default mode gives back all arrays of a module that it is called with. A step under `jax.jit`
    is given back as it is, and so is a plain one without modules: jax says what those are a function of.

    Args:
        step: under `nnx.jit`, plain, or under `jax.jit`.
        args: modules, optimizers and the like, abstract or concrete, and anything else.
    """
    if isinstance(step, functools.partial) and _is_of_nnx(step.func) and not step.keywords:
        step, args = step.func, (*step.args, *args)  # how flax binds a method under `nnx.jit`
    of_nnx = _is_of_nnx(step)
    if hasattr(step, "trace") and not of_nnx:
        return step, tuple(args)
    is_module = nnx.graphlib.is_graph_node if of_nnx else _is_object
    leaves, tree = jax.tree.flatten(tuple(args), is_leaf=is_module)
    modules = [i for i, leaf in enumerate(leaves) if is_module(leaf)]
    if not modules and not of_nnx:
        return step, tuple(args)
    # Split at once, so that what two arguments share stays one; the first key of a path is the place in the list.
    graph, state = nnx.split([leaves[i] for i in modules])
    within, state_tree = jax.tree_util.tree_flatten_with_path(state)
    plain = [i for i, leaf in enumerate(leaves) if not is_module(leaf) and _is_array(leaf)]
    owners = [modules[path[0].key] for path, _ in within] + plain
    arrays = [leaf for _, leaf in within] + [leaves[i] for i in plain]
    overwritten = _leaves_of(args, is_module, _donated(step) if of_nnx else ())
    given = [n for n, owner in enumerate(owners) if owner in overwritten]
    kept = [n for n, owner in enumerate(owners) if owner not in overwritten]

    def step_over_arrays(donated: list[Any], others: list[Any]) -> tuple[list[Any], list[Any]]:
        values: list[Any] = [None] * len(arrays)
        for n, value in zip([*given, *kept], [*donated, *others]):
            values[n] = value
        merged = nnx.merge(graph, jax.tree_util.tree_unflatten(state_tree, values[: len(within)]))
        filled = list(leaves)
        for i, leaf in [*zip(modules, merged), *zip(plain, values[len(within) :])]:
            filled[i] = leaf
        returned = step(*jax.tree.unflatten(tree, filled))
        entered = {id(value) for value in values}
        changed = [leaf for leaf in jax.tree.leaves(nnx.split(merged)[1]) if id(leaf) not in entered]
        return jax.tree.leaves(returned), changed

    pure = jax.jit(step_over_arrays, donate_argnums=0)
    return pure, ([arrays[n] for n in given], [arrays[n] for n in kept])


def _is_of_nnx(step: Any) -> bool:
    """Whether `nnx.jit` made it; what `functools.wraps` a step of `nnx.jit` has its attributes, but not its methods."""
    return hasattr(step, "trace") and hasattr(step, "jitted_fn")


def _is_object(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Pytree)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def _donated(step: Any) -> tuple[int, ...]:
    """Places of the arguments that a step under `nnx.jit` overwrites; flax keeps them nowhere else."""
    return step.jitted_fn._jit_info.donate_argnums


def _leaves_of(args: Sequence[Any], is_leaf: Callable[[Any], bool], places: Sequence[int]) -> set[int]:
    """Numbers of the leaves of all arguments that belong to the arguments at these places."""
    owners = [n for n, arg in enumerate(args) for _ in jax.tree.leaves(arg, is_leaf=is_leaf)]
    return {i for i, owner in enumerate(owners) if owner in places}
