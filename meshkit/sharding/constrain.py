"""Constrain activations by logical axis, inside a scope that sets the mesh and the rules.

A model calls `constrain(x, "act_batch", "act_length", "act_embed")`. Outside a scope the call returns x unchanged, so
the same model runs unsharded. Inside a scope the call is a sharding constraint for XLA's partitioner, and so are flax's
own constraints.

Without flax's rules and a mesh set in jax, flax's `nn.with_logical_constraint` does nothing, and a variable with
`out_sharding` cannot be created. Inside a scope both use the scope's mesh. The rule for a name is the first one found
in: rules passed as an argument (`rules=`, the variable's `sharding_rules`), `nn.logical_axis_rules`, meshkit's rules.
Two functions, through which all constraints of flax go, are wrapped: outside any scope they behave as flax's own.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta
from flax.core import spmd as variables
from flax.linen import spmd as linen
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from meshkit.config.rules import ShardingRules
from meshkit.errors import ConfigError, a_type, check_kinds
from meshkit.sharding.mesh import AnyMesh

LogicalAxes = Sequence[str | None]
Spec = Sequence[Sequence[str]]
_SPELT_ALIKE = 0.87  # "embd" and "embed" score 0.89. "act_kv_heads" and "act_heads", both in one model, score 0.86.
Axes = tuple[str, ...]


class Sharded:
    """An array, and the mesh axes that shard each of its dims."""

    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(axis for axes in self.spec for axis in axes)


@dataclass(frozen=True)
class Activation(Sharded):
    """One constrained activation, as `explain` lists it."""

    logical_axes: tuple[str | None, ...]
    """One name, or None, for each dim, as passed to `constrain`."""
    shape: tuple[int, ...]
    """Shape of the whole array; in a pipeline, of one microbatch."""
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    """Mesh axes that shard each dim."""
    dropped: tuple[str, ...]
    """Mesh axes of the rules that `constrain` left out."""
    wanted: tuple[tuple[str, ...], ...] | None = None
    """The spec with the dropped axes, if the constraint is flax's; otherwise None."""


@dataclass(frozen=True)
class Scope:
    """The mesh and rules that constraints refer to."""

    mesh: AnyMesh
    rules: ShardingRules
    """Rules of the arrays in the scope; inside a pipeline they lack the axes that are already manual."""
    whole: ShardingRules | None = None
    """The rules with the manual axes; None if no axis is manual."""
    seen: set[str] = field(default_factory=set, compare=False)
    """Logical axes that constraints have named so far."""
    left_out: set[str] = field(default_factory=set, compare=False)
    """Warnings so far about axes that do not divide their dim."""

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Compute capability of the target GPUs, attached or described; None on CPUs."""
        device = self.mesh.devices.flat[0]
        if device.platform not in ("gpu", "cuda"):
            return None
        major, minor = str(device.compute_capability).split(".")
        return int(major), int(minor)

    def shard_count(self, logical_axis: str | None) -> int:
        """Return the number of pieces into which the rules shard an activation's logical axis."""
        (axes,) = self.rules.spec_for((logical_axis,), kind="activations")
        return math.prod(self.mesh.shape[a] for a in axes)

    def manual_axes(self, logical_axis: str) -> tuple[str, ...]:
        """Return the manual mesh axes that shard a logical axis here; arrays hold one piece along these axes."""
        if self.whole is None:
            return ()
        before, after = (rules.spec_for((logical_axis,), kind="activations")[0] for rules in (self.whole, self.rules))
        return tuple(axis for axis in before if axis not in after)


_SCOPE: ContextVar[Scope | None] = ContextVar("meshkit_scope", default=None)
_RECORD: ContextVar[list[Activation] | None] = ContextVar("meshkit_record", default=None)


def current_scope() -> Scope | None:
    """Return the innermost `sharding_scope`, or None outside any (and inside `shard_over`)."""
    return _SCOPE.get()


@contextmanager
def sharding_scope(
    mesh: AnyMesh | None, rules: ShardingRules | None, *, manual: Iterable[str] = ()
) -> Iterator[Scope | None]:
    """Make `constrain` use this mesh and these rules; with None for either, `constrain` does nothing.

    A mesh with explicit axes becomes jax's mesh, as by `jax.set_mesh`.

    Args:
        manual: manual mesh axes of the surrounding `jax.shard_map`, which already shard arrays.
    """
    check_kinds(sharding_scope, mesh=mesh, rules=rules)
    if mesh is None or rules is None:
        scope = None
    else:
        rules.check(mesh.axis_names)
        manual = frozenset(manual)
        scope = Scope(mesh, rules.without(manual), rules) if manual else Scope(mesh, rules)
    token = _SCOPE.set(scope)
    try:
        mapping = None if scope is None else scope.rules.mapping("activations")
        with _entered(mesh), flax_follows(mapping, _constrain_flax, _place_flax):
            yield scope
    finally:
        _SCOPE.reset(token)
    if scope is not None:
        warn_misspelt(scope.seen, scope.rules, stacklevel=4)
        for message in sorted(scope.left_out):
            warnings.warn(message, stacklevel=3)


def _entered(mesh: AnyMesh | None) -> AbstractContextManager[Any]:
    """Set a mesh with explicit axes as jax's mesh; inside a `jax.shard_map`, keep the mesh of the trace."""
    if mesh is None or AxisType.Explicit not in mesh.axis_types or manual_here():
        return nullcontext()
    if isinstance(mesh, jax.sharding.Mesh):
        try:
            return jax.set_mesh(mesh)
        except ValueError:  # A jit surrounds this call.
            pass
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


@contextmanager
def record_activations() -> Iterator[list[Activation]]:
    """Collect every constraint of the programs that are traced inside the context."""
    record: list[Activation] = []
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def warn_misspelt(names: Collection[str], rules: ShardingRules, *, stacklevel: int) -> None:
    """Warn of a name without a rule that is spelt almost like an unused rule.

    Args:
        rules: rules made in a program; rules of a file (`rules.where`) are left to the lint.
        stacklevel: as in `warnings.warn`; 2 is the caller of this function.
    """
    if rules.where is not None:
        return
    ruled = rules.mapping("activations").keys() | rules.mapping("optimizer").keys()
    for name in sorted(set(names) - ruled):
        for rule in sorted(rules.explicit - set(names)):
            if sorted(name) == sorted(rule) or SequenceMatcher(None, name, rule).ratio() > _SPELT_ALIKE:
                message = f"no rule names the logical axis '{name}', and the rule for '{rule}' matches no dim here"
                warnings.warn(f"{message}: use one spelling if they mean the same", stacklevel=stacklevel)


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """Return x, laid out over the mesh as the rules map its logical axes.

    If the mesh axes of a dim do not divide it together, only the axes that shard it into the most pieces are kept (for
    GQA with fewer key heads than tensor GPUs, none). A warning says so when the scope ends, and `explain` lists it.

    Args:
        logical_axes: one name, or None for a replicated dim, per dim of x.

    Raises:
        ConfigError: x is no array, the names are not one per dim, two dims share a mesh axis, or an axis is left out
            with `strict` rules.
    """
    if not hasattr(x, "ndim"):
        raise ConfigError(f"constrain() got {a_type(x)} as its array.", hint='constrain(x, "act_batch", None)')
    scope = current_scope()
    if scope is None:
        return x
    if len(logical_axes) != x.ndim:
        raise ConfigError(
            f"constrain() got {len(logical_axes)} logical axes {logical_axes} for an array of {x.ndim} dims."
        )
    return _constrained(scope, x, tuple(logical_axes), scope.rules.spec_for(logical_axes, kind="activations"))


def _constrained(
    scope: Scope, x: jax.Array, names: tuple, wanted: Spec, free: Sequence[int] | None = None
) -> jax.Array:
    """Constrain x to mesh axes per dim, record the constraint, and return x; XLA lays out the `free` dims of flax."""
    scope.seen.update(name for name in names if name is not None)
    spec = tuple(dividing_axes(axes, size, scope.mesh) for axes, size in zip(wanted, x.shape))
    dropped = tuple(a for w, s in zip(wanted, spec) for a in w if a not in s)
    if dropped and scope.rules.where is None:  # The lint checks the rules of a file.
        _say_left_out(scope, names, x.shape, wanted, spec)
    record = _RECORD.get()
    if record is not None:
        seen = _activation(scope, names, x, spec, dropped)
        record.append(seen if free is None else replace(seen, wanted=tuple(map(tuple, wanted))))
    return _laid_out(x, spec, mesh_here(scope.mesh), frozenset(free or ()))


def _say_left_out(scope: Scope, names: tuple, shape: Sequence[int], wanted: Spec, spec: Spec) -> None:
    """Store a warning for each dim that its axes do not divide, or raise it as an error with strict rules."""
    for name, size, asked, kept in zip(names, shape, wanted, spec):
        if len(kept) < len(asked):
            ways = math.prod(scope.mesh.shape[a] for a in asked)
            here = " x ".join(map(repr, asked))
            now = f"only {' x '.join(map(repr, kept))} can shard it" if kept else "every GPU holds all of it"
            message = f"'{name}' has size {size}, which the {ways} GPUs of mesh axis {here} do not divide: {now}"
            if scope.rules.strict:
                raise ConfigError(f"{message}.", hint=f"a size that {ways} divides, or a rule for '{name}' that fits")
            scope.left_out.add(message)


def _laid_out(x: jax.Array, spec: Spec, mesh: Any, free: Collection[int] = ()) -> jax.Array:
    """Return x sharded over mesh axes per dim: resharded over explicit axes, constrained over the others."""
    types = dict(zip(mesh.axis_names, mesh.axis_types))

    def axes_of_type(kind: AxisType) -> list[tuple[str, ...]]:
        return [tuple(axis for axis in axes if types[axis] == kind) for axes in spec]

    if AxisType.Explicit in types.values():
        here = [*jax.typeof(x).sharding.spec, *[None] * x.ndim]
        entries = [here[d] if d in free else e for d, e in enumerate(partition_spec(axes_of_type(AxisType.Explicit)))]
        x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*entries)))
        if AxisType.Auto not in types.values():
            return x
    auto = partition_spec(axes_of_type(AxisType.Auto))
    entries = [PartitionSpec.UNCONSTRAINED if d in free else e for d, e in enumerate(auto)]
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*entries)))


def _constrain_flax(x: Any, asked: Asked) -> Any:
    """Apply a constraint of flax on the scope's mesh, without manual axes."""
    scope = current_scope()
    assert scope is not None
    manual = manual_here()
    _check_axes(asked, scope.mesh)
    if len(asked.names) > x.ndim:
        raise ConfigError(f"flax names {len(asked.names)} dims {asked.names} for an array of {x.ndim} dims.")
    rest = x.ndim - len(asked.names)
    wanted = [tuple(a for a in axes if a not in manual) for axes in asked.axes] + [()] * rest
    return _constrained(scope, x, (*asked.names, *[None] * rest), wanted, asked.free)


def _place_flax(x: Any, asked: Asked) -> Any:
    """Place a variable made inside the scope by its metadata; an abstract variable stays as it is."""
    scope = current_scope()
    assert scope is not None
    if isinstance(x, jax.ShapeDtypeStruct) or manual_here():
        return x
    _check_axes(asked, scope.mesh)
    spec = [dividing_axes(axes, size, scope.mesh) for axes, size in zip(asked.axes, x.shape)]
    return _laid_out(x, spec, scope.mesh)


def _check_axes(asked: Asked, mesh: AnyMesh) -> None:
    """Raise an error for a rule of flax that names an axis which the scope's mesh lacks."""
    for name, axes in zip(asked.names, asked.axes):
        missing = [axis for axis in axes if axis not in mesh.axis_names]
        if missing:
            raise ConfigError(
                f"flax's rule for '{name}' names mesh axis '{missing[0]}', but the mesh of the sharding_scope has "
                f"{', '.join(map(repr, mesh.axis_names))}.",
                hint="nn.logical_axis_rules with axes of this mesh, or none, so that meshkit's rules hold",
            )


def _activation(scope: Scope, names: tuple, x: jax.Array, spec: Sequence[tuple[str, ...]], dropped) -> Activation:
    """Return the record of x for `explain`, with the whole array's shape, also where a pipeline has cut it manually."""
    manual = [scope.manual_axes(name) if name is not None else () for name in names]
    shape = tuple(n * math.prod(scope.mesh.shape[a] for a in axes) for n, axes in zip(x.shape, manual))
    return Activation(names, shape, str(x.dtype), tuple((*m, *s) for m, s in zip(manual, spec)), dropped)


def shard_over(fn: Callable[..., Any], in_axes: Sequence[LogicalAxes], out_axes: LogicalAxes) -> Callable[..., Any]:
    """Return fn as a `jax.shard_map` over every mesh axis, so that every GPU runs it on its own shards.

    Use it for kernels that the partitioner cannot split: cuDNN attention, Pallas. Outside a scope, it returns fn
    unchanged.

    Args:
        fn: a function that takes and returns local arrays.
    """
    scope = current_scope()
    if scope is None:
        return fn
    *inputs, output = (scope.rules.spec_for(axes, kind="activations") for axes in (*in_axes, out_axes))
    return shard_over_mesh(fn, inputs, output)


def shard_over_mesh(fn: Callable[..., Any], in_specs: Sequence[Spec], out_spec: Spec) -> Callable[..., Any]:
    """Do what `shard_over` does, with mesh axes in place of logical axes. fn may communicate over mesh axes by name.

    Args:
        fn: a function that takes and returns local arrays; it runs outside any scope.
        in_specs: for each argument, the mesh axes that shard each of its dims.
        out_spec: the same for the result.
    """
    scope = current_scope()
    if scope is None:
        return fn

    def local(*args):
        with sharding_scope(None, None):
            return fn(*args)

    return shard_map_here(local, scope.mesh, tuple(partition_spec(s) for s in in_specs), partition_spec(out_spec))


def manual_here() -> frozenset[str]:
    """Return the manual mesh axes of the surrounding `jax.shard_map`."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def mesh_here(mesh: AnyMesh) -> Any:
    """Return the mesh that shardings refer to here; inside a `jax.shard_map` the trace's mesh, with its manual axes."""
    return jax.sharding.get_abstract_mesh() if manual_here() else mesh


def shard_map_here(fn: Callable[..., Any], mesh: AnyMesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Return fn as a `jax.shard_map` over all axes of the mesh that are not manual here already.

    Args:
        fn: a function that takes and returns local arrays, and may communicate over every axis by name.
        in_specs, out_specs: PartitionSpecs in trees; they may name manual axes, which shard the arrays already.
    """
    mesh, manual = mesh_here(mesh), manual_here()
    names = frozenset(mesh.axis_names) - manual
    if not names:
        return fn

    def seen(spec: PartitionSpec) -> PartitionSpec:
        return partition_spec([[a for a in axes if a not in manual] for axes in spec_axes(spec)])

    inputs, outputs = (
        jax.tree.map(seen, specs, is_leaf=lambda s: isinstance(s, PartitionSpec)) for specs in (in_specs, out_specs)
    )
    return jax.shard_map(fn, mesh=mesh, in_specs=inputs, out_specs=outputs, axis_names=names, check_vma=False)


def attention_implementation() -> str:
    """Return `"cudnn"` if the target GPUs support it (compute capability 8.0 on), otherwise `"xla"`.

    The target is the scope's mesh, attached or described, never the backend of this process.
    """
    scope = current_scope()
    capability = scope.compute_capability if scope else None
    return "cudnn" if capability is not None and capability >= (8, 0) else "xla"


def partition_spec(spec: Sequence[Sequence[str]]) -> PartitionSpec:
    """Return jax's PartitionSpec for tuples of mesh axes per dim: its entries are None, a name, or a tuple."""
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in spec))


def spec_axes(spec: PartitionSpec, rank: int = 0) -> list[tuple[str, ...]]:
    """Return the mesh axes that shard each dim, for at least `rank` dims; it reverses `partition_spec`."""
    dims = [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec]
    return dims + [()] * (rank - len(dims))


def dividing_axes(axes: Sequence[str], size: int, mesh: AnyMesh) -> tuple[str, ...]:
    """Return the first subset of the axes, in their order, that divides a dim into the most pieces."""
    subsets = (some for count in range(len(axes), -1, -1) for some in combinations(axes, count))
    pieces = {some: math.prod(mesh.shape[a] for a in some) for some in subsets}
    return max((some for some, ways in pieces.items() if size % ways == 0), key=pieces.__getitem__)


@dataclass(frozen=True)
class Asked:
    """A constraint of flax on an array: a name (or None) and mesh axes for each dim."""

    names: tuple[str | None, ...]
    axes: tuple[Axes, ...]
    free: tuple[int, ...] = ()
    """Dims that XLA may lay out freely (`PartitionSpec.UNCONSTRAINED`)."""


Answer = Callable[[Any, Asked], Any]


@dataclass(frozen=True)
class _Listener:
    """The functions that answer flax's constraints."""

    mapping: Mapping[str, Axes]
    """Meshkit's rules."""
    constrain: Answer
    place: Answer


class _OurRules(tuple):
    """Meshkit's rules in the form of flax's; the type distinguishes them from the user's rules."""


_LISTENER: ContextVar[_Listener | None] = ContextVar("meshkit_flax", default=None)


@contextmanager
def flax_follows(mapping: Mapping[str, Axes] | None, constrain: Answer, place: Answer) -> Iterator[None]:
    """Pass flax's constraints on activations to `constrain` and new variables to `place`; with None, do neither.

    Inside the context the mapping is set as flax's rules, unless the user has set rules, so that
    `nn.logical_to_mesh_axes` agrees.

    Args:
        constrain: (array, Asked) -> the array that replaces it.
        place: (value of a new variable, Asked) -> the value that the variable gets.
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
    """Wrap flax's two functions so that they call the listener, if there is one; this runs once in a process."""
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
    """Return the mesh axes of each dim, and whether some name has no rule.

    The user's rules have flax's order of precedence. Meshkit's rules have no order: an axis goes to the first dim whose
    rule names it.
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
