"""Resolve sharding rules on a pytree to NamedShardings.

Names of dims come from the tree itself: from nnx variables (`out_sharding` metadata) and linen boxes (`nn.Partitioned`,
`nn.LogicallyPartitioned`). Path overrides have priority and need no names, so any pytree can be sharded.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import combinations, takewhile
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.tree_util import GetAttrKey

from meshkit.config.rules import AutoRule, ShardingRules, Spec, path_matches
from meshkit.errors import ConfigError, a_type, check_kinds
from meshkit.sharding.constrain import Sharded, partition_spec, sharding_scope, warn_misspelt
from meshkit.sharding.mesh import AnyMesh
from meshkit.units import format_bytes

Names = tuple[str | None, ...] | None
# The states that a parameter can be in, each with rules of its own.
STATES = ("parameters", "compute", "gradients", "optimizer")


@dataclass(frozen=True)
class Placed(Sharded):
    """One leaf of a pytree and where the rules put it."""

    path: str
    """`layers/attention/query/kernel`."""
    shape: tuple[int, ...]
    dtype: str
    logical_axes: tuple[str | None, ...] | None
    """A name or None per dim; None when the leaf carries no names."""
    spec: tuple[tuple[str, ...], ...]
    """Mesh axes per dim."""
    rule: str
    """`override`, `logical`, `auto`, or `none` (replicated, since no rule applies)."""
    model_path: str = ""
    """The path within the model, if the tree holds more than the model; overrides match either path."""

    def shards(self, mesh: AnyMesh) -> int:
        """Return the number of distinct pieces over the mesh."""
        return math.prod(mesh.shape[a] for a in self.axes)


def shardings(tree: Any, mesh: AnyMesh, rules: ShardingRules, *, kind: str = "parameters") -> Any:
    """Return the tree with a NamedSharding in place of each array.

    Leaves may be abstract or concrete. An nnx variable stays a variable, so `jit` takes the result as shardings of the
    same state. A linen box becomes one sharding.

    Args:
        tree: nnx state or module state, linen variables (boxed or not), or plain containers of arrays.
        rules: logical axes and path overrides. If the tree holds more than a model, such as `(model, optimizer)`, an
            override may name a parameter by its path within the model, and then also places the parameter's moments.
        kind: `parameters`, `gradients`, `optimizer` or `compute`: which mapping of the rules applies.

    Raises:
        ConfigError: a rule names an axis that the mesh lacks, an override has the wrong rank, two dims share a mesh
            axis, or the axes do not divide a dim.
    """
    check_kinds(shardings, mesh=mesh, rules=rules)
    return _shardings(tree, mesh, rules, kind, stacklevel=4)


def abstract(make: Callable[[], Any], mesh: AnyMesh, rules: ShardingRules) -> Any:
    """Return the abstract result of a function, as ShapeDtypeStructs with the shardings of the rules.

    Modules stay modules and boxes stay boxes, so `mk.plan(step, (*mk.abstract(make, mesh, rules), batch), ...)` takes
    them.

    Args:
        make: a function that makes nnx modules and optimizers, linen variables or any other pytree of arrays.

    Raises:
        ConfigError: as `shardings` does; or `make` is a model and not a function that makes it.
    """
    check_kinds(abstract, mesh=mesh, rules=rules)
    with nnx.use_eager_sharding(False):
        graph, tree = _abstract_of(make)
    placed = _with_layout(tree, _shardings(tree, mesh, rules, "parameters", stacklevel=4))
    return placed if graph is None else nnx.merge(graph, placed)


def _with_layout(tree: Any, layout: Any) -> Any:
    """Return the tree with ShapeDtypeStructs, which have shardings, in place of arrays; other leaves stay."""

    def place(leaf: Any, sharding: Any) -> Any:
        if isinstance(leaf, nnx.Variable):
            return leaf.replace(place(leaf.get_raw_value(), sharding.get_raw_value()))
        if isinstance(leaf, meta.AxisMetadata):
            return leaf.replace_boxed(place(array_of(leaf), sharding))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) if hasattr(leaf, "shape") else leaf

    return jax.tree.map(place, tree, layout, is_leaf=is_named)


def _shardings(tree: Any, mesh: AnyMesh, rules: ShardingRules, kind: str, *, stacklevel: int) -> Any:
    """Return the tree with a NamedSharding for each leaf; warn of names that look misspelt."""
    rules.check(mesh.axis_names)
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)
    placed = _place_all(leaves, mesh, rules, kind)
    if leaves and not any(placed):
        raise ConfigError(
            f"the tree holds no array: its first leaf is {a_type(leaves[0][1])}.", hint="jax.eval_shape(make)"
        )
    warn_misspelt(
        {n for p in placed if p and p.rule == "logical" for n in p.logical_axes or () if n is not None},
        rules,
        stacklevel=stacklevel,
    )
    if rules.where is None:  # The lint checks the rules of a file.
        for pattern, near in unmatched_overrides(rules, [p for p in placed if p]):
            message = f"the override for path '{pattern}' matches none of these {len(leaves)} arrays"
            if rules.strict:
                raise ConfigError(f"{message}.", hint=f'"{near}"' if near else "rules without it")
            warnings.warn(message + (f': did you mean "{near}"?' if near else ""), stacklevel=stacklevel - 1)

    def place(leaf, placed):
        sharding = NamedSharding(mesh, partition_spec(placed.spec) if placed else PartitionSpec())
        return leaf.replace(sharding) if isinstance(leaf, nnx.Variable) else sharding

    return structure.unflatten(place(leaf, p) for (_, leaf), p in zip(leaves, placed))


def placements(
    tree: Any,
    mesh: AnyMesh,
    rules: ShardingRules,
    *,
    kind: str = "parameters",
    within: Mapping[str, str] | None = None,
) -> list[Placed]:
    """Return every array of the tree with its path, names and mesh axes, in tree order.

    It raises the errors of `shardings`.

    Args:
        tree, mesh, rules, kind: as `shardings` takes them.
        within: path -> path within the model, known from a larger tree of which this tree is a part.
    """
    rules.check(mesh.axis_names)
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)[0]
    return [p for p in _place_all(leaves, mesh, rules, kind, within) if p is not None]


def unmatched_overrides(rules: ShardingRules, placed: Sequence[Placed]) -> list[tuple[str, str | None]]:
    """Return the path patterns of the rules that match no array, each with the path probably meant, or None."""
    paths = {path for p in placed for path in (p.model_path, p.path) if path}
    unmatched = [glob for glob, _ in rules.overrides if not any(path_matches(glob, path) for path in paths)]
    known = sorted({p.model_path or p.path for p in placed})
    return [(glob, next(iter(get_close_matches(glob, known, n=1, cutoff=0.5)), None)) for glob in unmatched]


def placements_by_state(
    tree: Any, mesh: AnyMesh, rules: ShardingRules, *, within: Mapping[str, str] | None = None
) -> dict[str, list[Placed]]:
    """Return the `placements` of parameters in each of STATES."""
    return {state: placements(tree, mesh, rules, kind=state, within=within) for state in STATES}


def shard_model(make_model: Callable[[], Any], mesh: AnyMesh, rules: ShardingRules) -> Any:
    """Make a model so that each device makes only its own shards, and return the model.

    Args:
        make_model: a function that makes an nnx module, `lambda: MyModel(rngs=nnx.Rngs(0))`, a tuple of modules and
            optimizers, linen variables, or any other pytree of arrays.

    Raises:
        ConfigError: as `abstract` does.
    """
    check_kinds(shard_model, mesh=mesh, rules=rules)
    with nnx.use_eager_sharding(False):
        graph, tree = _abstract_of(make_model)

        def init():
            with sharding_scope(mesh, rules):
                made = make_model()
                return made if graph is None else nnx.state(made)

        state = jax.jit(init, out_shardings=_shardings(tree, mesh, rules, "parameters", stacklevel=4))()
        return state if graph is None else nnx.merge(graph, state)


def keep_shardings(mesh: AnyMesh, rules: ShardingRules) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a step that changes nnx modules: after each call they have the shardings of the rules.

    Without the decorator XLA chooses the shardings of changed arrays, so the second call gets other shardings than the
    first.

        @functools.partial(nnx.jit, donate_argnums=(0, 1))
        @mk.keep_shardings(mesh, rules)
        def train_step(model, optimizer, batch): ...

    Args:
        mesh: an attached mesh to train on, or a described one to plan for.

    Raises:
        ConfigError: a call of the step has no module among its arguments.
    """
    check_kinds(keep_shardings, mesh=mesh, rules=rules)

    def decorate(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def kept(*args: Any, **kwargs: Any) -> Any:
            is_module = nnx.graphlib.is_graph_node
            modules = [leaf for leaf in jax.tree.leaves((args, kwargs), is_leaf=is_module) if is_module(leaf)]
            if not modules:
                raise ConfigError(
                    f"the step got {', '.join(map(a_type, args)) or 'no arguments'}, but none is an nnx module.",
                    hint="jax.jit(step, out_shardings=(meshkit.shardings(state, mesh, rules), None))",
                )
            returned = step(*args, **kwargs)
            if AxisType.Explicit not in mesh.axis_types:  # Explicit types already fix the shardings.
                state = nnx.state(modules)
                layout = _shardings(state, mesh, rules, "parameters", stacklevel=4)
                nnx.update(modules, jax.lax.with_sharding_constraint(state, layout))
            return returned

        return kept

    return decorate


def _abstract_of(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Return `_graph_and_tree` of a function's abstract result; raise an error if it holds more than arrays."""
    try:
        if not callable(make):
            raise TypeError("it cannot be called")
        if inspect.isclass(make):  # The signature of flax's classes accepts any arguments.
            inspect.signature(make.__init__).bind(None)
        else:
            inspect.signature(make).bind()
    except TypeError as error:
        given = make.__name__ if inspect.isclass(make) or inspect.isfunction(make) else a_type(make)
        raise ConfigError(
            f"the model must be made by a function without arguments, which {given} is not: {error}.",
            hint="lambda: Model(rngs=nnx.Rngs(0)); jax.device_put(state, meshkit.shardings(state, mesh, rules)) for "
            "arrays that exist already",
        ) from None
    try:
        return _graph_and_tree(nnx.eval_shape(make))
    except TypeError as error:
        if "not a valid JAX type" not in str(error):
            raise
        raise ConfigError(
            f"the model holds more than arrays: {str(error).splitlines()[0]}.",
            hint="lambda: equinox.filter(make(), equinox.is_array), and equinox.combine(arrays, the rest) in the loss",
        ) from None


def _graph_and_tree(made: Any) -> tuple[Any, Any]:
    """Return the graph and the state of the modules; None and the tree itself if it has no modules."""
    is_module = nnx.graphlib.is_graph_node
    modules = any(is_module(leaf) for leaf in jax.tree.leaves(made, is_leaf=is_module))
    return nnx.split(made) if modules else (None, made)


def kept_spec(spec: Sequence[tuple[str, ...]], whole: Sequence[int], shape: Sequence[int]) -> Spec:
    """Return the mesh axes of a statistic that keeps some dims of a parameter, such as a factored optimizer's rows.

    Args:
        spec, whole: mesh axes per dim, and shape, of the parameter.
        shape: shape of the statistic. A dim that may be any of several dims of the parameter is sharded only if all of
            these are sharded alike.
    """
    fits = [dims for dims in combinations(range(len(whole)), len(shape)) if tuple(whole[d] for d in dims) == (*shape,)]
    choices = [{tuple(spec[dims[i]]) for dims in fits} for i in range(len(shape))]
    return tuple(only.pop() if len(only) == 1 else () for only in choices)


def path_name(path: tuple) -> str:
    """Return a jax key path as `a/b/c`, without the `value` that a variable adds."""
    parts = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    if len(parts) > 1 and parts[-1] in ("value", "raw_value", "<flat index 0>"):
        parts.pop()
    return "/".join(parts)


def is_named(leaf: Any) -> bool:
    """Return whether a leaf is a variable or a box, which may have names for the dims of its array."""
    return isinstance(leaf, nnx.Variable | meta.AxisMetadata)


def _names_of(leaf: Any) -> tuple[str | None, ...] | None:
    if isinstance(leaf, nnx.Variable):
        names = leaf.get_metadata().get("out_sharding")
        return tuple(names) if names else None
    names = getattr(leaf, "names", None)
    return tuple(names) if isinstance(leaf, meta.AxisMetadata) and names is not None else None


def array_of(leaf: Any) -> Any:
    """Return the array in a variable or a box; return any other leaf unchanged."""
    if isinstance(leaf, nnx.Variable):
        return leaf.get_raw_value()
    if isinstance(leaf, meta.Partitioned):
        return leaf.unbox(apply_constraint=False)
    return leaf.unbox() if isinstance(leaf, meta.AxisMetadata) else leaf


def _place_all(
    leaves: Sequence[tuple[tuple, Any]],
    mesh: AnyMesh,
    rules: ShardingRules,
    kind: str,
    within: Mapping[str, str] | None = None,
) -> list[Placed | None]:
    """Return the placement of every leaf, None if it is no array. `within` gives paths within the model, if known."""
    shapes = [(path_name(path).split("/"), tuple(getattr(array_of(leaf), "shape", ()))) for path, leaf in leaves]

    def whole_of(path: str, rank: int) -> tuple[int, ...]:
        """Return the shape of a statistic's parameter, which shares the longest end with the statistic's path."""
        segments = path.split("/")
        alike = [(_common_end(segments, other), shape) for other, shape in shapes if len(shape) == rank]
        longest = max((length for length, _ in alike), default=0)
        found = {shape for length, shape in alike if length == longest}
        return found.pop() if longest and len(found) == 1 else ()

    names = [path_name(path) for path, _ in leaves]
    if within is not None:
        names = [within.get(name, name) for name in names]
    elif rules.overrides:
        names = _overridden_paths(leaves, paths_within_model(leaves, kind), rules, kind)
    return [_place(path, leaf, mesh, rules, kind, whole_of, name) for (path, leaf), name in zip(leaves, names)]


def _overridden_paths(
    leaves: Sequence[tuple[tuple, Any]], names: Sequence[str], rules: ShardingRules, kind: str
) -> list[str]:
    """Return the paths within the model; a statistic that no override names gets the path of its parameter.

    So an override for `params/wi` also places the moments in a TrainState. If several parameters have the same path
    within the model, a statistic belongs to the one whose full path begins most like its own.
    """
    parameters: dict[str, list[str]] = {}
    for (path, leaf), name in zip(leaves, names):
        if not is_statistic(path, leaf, kind):
            parameters.setdefault(name, []).append(path_name(path))

    def resolved(path: str, name: str) -> str:
        if rules.override_for(path, name) is not None:
            return name
        alike = lambda other: _common_end(path.split("/")[::-1], other.split("/")[::-1])
        near = sorted(parameters.get(name, ()), key=alike, reverse=True)
        return next((other for other in near if rules.override_for(other) is not None), name)

    return [resolved(path_name(path), name) for (path, _), name in zip(leaves, names)]


def paths_within_model(leaves: Sequence[tuple[tuple, Any]], kind: str = "parameters") -> list[str]:
    """Return the path of every leaf within its model; if the tree is the model, that is the leaf's own path.

    Positions in tuples at the start of a path do not belong to the model. An optimizer in the tree shows which other
    segments do not: `optimizer/opt_state/0/mu/wi` and `model/wi` both end with the path within the model, `wi`.
    Parameters without a statistic, such as frozen ones, belong to the model that the other parameters show.
    """
    paths = [tuple(path_name(path).split("/")) for path, _ in leaves]
    statistics = [is_statistic(path, leaf, kind) for path, leaf in leaves]
    ends = {path[i:] for path, statistic in zip(paths, statistics) if statistic for i in range(len(path))}
    before: dict[str, int] = {}  # First segment -> number of segments before the model.
    shown: list[tuple[str, ...]] = []
    for path, statistic in zip(paths, statistics):
        known = None if statistic else next((i for i in range(len(path)) if path[i:] in ends), None)
        if known is not None:
            before[path[0]] = min(before.get(path[0], known), known)
            shown.append(path)
    models = {path[: before[path[0]]] for path in shown}

    def root_of(key_path: tuple, path: tuple[str, ...]) -> int:
        known = before.get(path[0])
        if known is not None and path[:known] in models:
            return known
        return sum(1 for _ in takewhile(_is_position, key_path[: len(path) - 1]))

    roots = [root_of(key_path, path) for (key_path, _), path in zip(leaves, paths)]
    parameters = {path[root:] for path, statistic, root in zip(paths, statistics, roots) if not statistic}

    def model_path(path: tuple[str, ...], statistic: bool, root: int) -> tuple[str, ...]:
        if not statistic:
            return path[root:]
        return next((path[i:] for i in range(len(path)) if path[i:] in parameters), path)

    return ["/".join(segments) for segments in map(model_path, paths, statistics, roots)]


def _is_position(key: Any) -> bool:
    return isinstance(getattr(key, "idx", getattr(key, "key", None)), int)


def _common_end(first: Sequence[str], second: Sequence[str]) -> int:
    pairs = zip(reversed(first), reversed(second))
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def is_statistic(key_path: tuple, leaf: Any, kind: str = "parameters") -> bool:
    """Return whether a leaf belongs to an optimizer's state, whose arrays may have other shapes than the parameters.

    Args:
        key_path: jax's path to the leaf. It leads to a parameter if it has keys but no attributes, if its last
            attribute is `params`, or if a key before its first attribute is `params`.
        kind: the mapping of the rules that applies; with `optimizer`, every leaf is a statistic.
    """
    # Attributes of optax's named tuples, or of a TrainState.
    fields = [key.name for key in key_path if isinstance(key, GetAttrKey)]
    keys = [getattr(key, "key", None) for key in takewhile(lambda key: not isinstance(key, GetAttrKey), key_path)]
    within = bool(fields) and fields[-1] != "params" and "params" not in keys
    return kind == "optimizer" or isinstance(leaf, nnx.OptState) or within


def _place(
    key_path: tuple,
    leaf: Any,
    mesh: AnyMesh,
    rules: ShardingRules,
    kind: str,
    whole_of: Callable[[str, int], tuple[int, ...]],
    model_path: str,
) -> Placed | None:
    """Return the placement of one array; None for anything else. Raise an error if GPUs do not divide a dim."""
    array, path = array_of(leaf), path_name(key_path)
    if not hasattr(array, "shape"):
        return None
    names, shape = _names_of(leaf), tuple(array.shape)
    spec, rule = _spec_of((path, model_path), names, array, mesh, rules, kind)
    if is_statistic(key_path, leaf, kind):
        if len(spec) > len(shape):
            whole = whole_of(path, len(spec))
            spec = kept_spec(spec, whole, shape) if whole else ((),) * len(shape)
            names = None
        spec = tuple(axes if n > 1 else () for axes, n in zip(spec, shape))  # A mesh axis of size 1 shards nothing.
    elif len(spec) != len(shape):
        raise _wrong_rank((path, model_path), shape, names, spec, rules if rule == "override" else None)
    placed = Placed(path, shape, str(array.dtype), names, spec, rule, model_path if model_path != path else "")
    for dim, (axes, size) in enumerate(zip(spec, shape)):
        pieces = math.prod(mesh.shape[a] for a in axes)
        if size % pieces:
            raise _not_divided(placed, dim, pieces, mesh, rules, kind)
    return placed


def _not_divided(placed: Placed, dim: int, pieces: int, mesh: AnyMesh, rules: ShardingRules, kind: str) -> ConfigError:
    """Return an error that points at the user's rule, or at the mesh axis if the rule is a preset's."""
    path, size, axes = placed.path, placed.shape[dim], placed.spec[dim]
    name = (placed.logical_axes or {dim: None})[dim]
    if placed.rule == "override":
        at = rules.place_of_override(path, placed.model_path)
    else:
        at = rules.place((name and rules.written(name, kind)) or ("mesh", axes[-1]))
    smaller = f"mesh.{axes[0]} = {math.gcd(size, pieces)}" if len(axes) == 1 and rules.where else "a smaller axis"
    return ConfigError(
        f"dim {dim}{f" ('{name}')" if name else ''} of {path} has size {size}, which the {pieces} GPUs of mesh axis "
        f"{' x '.join(repr(a) for a in axes)} do not divide; {_padding(placed, dim, pieces, mesh)}.",
        at=at,
        hint=f'{smaller}, a size that {pieces} divides, or [[rules.override]] path = "{path}" with this dim replicated',
    )


def _padding(placed: Placed, dim: int, pieces: int, mesh: AnyMesh) -> str:
    size = placed.shape[dim]
    padded = -(-size // pieces) * pieces
    more = placed.bytes / placed.shards(mesh) * (padded - size) / size
    return f"padding it to {padded} would cost {format_bytes(math.ceil(more))} more a GPU"


def _spec_of(
    paths: tuple[str, str], names: Names, array: Any, mesh: AnyMesh, rules: ShardingRules, kind: str
) -> tuple[tuple[tuple[str, ...], ...], str]:
    override = rules.override_for(*paths)
    if override is not None:
        return override, "override"
    if names is None:
        return _automatic(array, mesh, rules)
    return rules.spec_for(names, kind=kind), "logical"


def _wrong_rank(
    paths: tuple[str, str], shape: tuple[int, ...], names: Names, spec: Spec, overridden_by: ShardingRules | None
) -> ConfigError:
    if overridden_by is not None:
        message = f"the override for {paths[0]} names {len(spec)} dims, but the array has shape {shape}."
        return ConfigError(message, at=overridden_by.place_of_override(*paths), hint=f"a spec of {len(shape)} entries")
    return ConfigError(f"{paths[0]} has shape {shape} but carries {len(names or ())} dim names: {names}.")


def _automatic(array: Any, mesh: AnyMesh, rules: ShardingRules) -> tuple[tuple[tuple[str, ...], ...], str]:
    """Return the spec of an array without names: the automatic rule shards its largest dim that the axes divide.

    Of equally large dims the last is sharded: it is contiguous, so each shard of a matrix stays one block of columns.
    """
    whole = ((),) * len(array.shape)
    auto = rules.auto
    if not isinstance(auto, AutoRule) or not auto.axes:
        return whole, "none"
    ways = math.prod(mesh.shape[a] for a in auto.axes)
    fits = [dim for dim, size in enumerate(array.shape) if size and size % ways == 0]
    if not fits or math.prod(array.shape) * jnp.dtype(array.dtype).itemsize < auto.min_bytes:
        return whole, "auto"
    largest = max(fits, key=lambda dim: (array.shape[dim], dim))
    return tuple(auto.axes if dim == largest else () for dim in range(len(array.shape))), "auto"
