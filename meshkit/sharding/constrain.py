"""Constraints on activations by logical axis, inside a scope that says which mesh and rules. Layer 2.

A model calls `constrain(x, "act_batch", "act_length", "act_embed")`. Outside a scope that is the identity, so the same
model runs unsharded; inside, it is a sharding constraint of XLA's partitioner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.errors import ConfigError
from meshkit.sharding.mesh import AnyMesh
from meshkit.spec.rules import ShardingRules

LogicalAxes = Sequence[str | None]
Spec = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Activation:
    """One constrained activation, as `explain` lists it."""

    logical_axes: tuple[str | None, ...]
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    dropped: tuple[str, ...]


@dataclass(frozen=True)
class Scope:
    """The mesh and rules that constraints refer to."""

    mesh: AnyMesh
    rules: ShardingRules

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Of the target GPUs, attached or described; None on CPUs."""
        device = self.mesh.devices.flat[0]
        if device.platform not in ("gpu", "cuda"):
            return None
        major, minor = str(device.compute_capability).split(".")
        return int(major), int(minor)

    def shard_count(self, logical_axis: str | None) -> int:
        """Number of pieces that the rules cut an activation's logical axis into."""
        (axes,) = self.rules.spec_for((logical_axis,), kind="activations")
        return math.prod(self.mesh.shape[a] for a in axes)


_SCOPE: ContextVar[Scope | None] = ContextVar("meshkit_scope", default=None)
_RECORD: ContextVar[list[Activation] | None] = ContextVar("meshkit_record", default=None)


def current_scope() -> Scope | None:
    """The innermost `sharding_scope`, or None outside of any (and inside `shard_over`)."""
    return _SCOPE.get()


@contextmanager
def sharding_scope(mesh: AnyMesh | None, rules: ShardingRules | None) -> Iterator[Scope | None]:
    """Makes `constrain` refer to this mesh and these rules; with None, to nothing."""
    if mesh is None or rules is None:
        scope = None
    else:
        rules.check(mesh.axis_names)
        scope = Scope(mesh, rules)
    token = _SCOPE.set(scope)
    try:
        yield scope
    finally:
        _SCOPE.reset(token)


@contextmanager
def record_activations() -> Iterator[list[Activation]]:
    """Collects every constraint made while a program is traced inside."""
    record: list[Activation] = []
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
    """x, laid out over the mesh as the rules map its logical axes.

    A mesh axis that does not divide its dim is left out (GQA with fewer key heads than tensor GPUs); `explain` lists
    what was left out.

    Args:
        x: any array.
        logical_axes: one name, or None for a replicated dim, per dim of x.

    Raises:
        ConfigError: not one name per dim, or one mesh axis on two dims.
    """
    scope = current_scope()
    if scope is None:
        return x
    if len(logical_axes) != x.ndim:
        raise ConfigError(
            f"constrain() got {len(logical_axes)} logical axes {logical_axes} for an array of {x.ndim} dims."
        )
    wanted = scope.rules.spec_for(logical_axes, kind="activations")
    spec = tuple(_dividing(axes, size, scope.mesh) for axes, size in zip(wanted, x.shape))
    dropped = tuple(a for w, s in zip(wanted, spec) for a in w if a not in s)
    record = _RECORD.get()
    if record is not None:
        record.append(Activation(tuple(logical_axes), tuple(x.shape), str(x.dtype), spec, dropped))
    return jax.lax.with_sharding_constraint(x, NamedSharding(scope.mesh, partition_spec(spec)))


def shard_over(fn: Callable[..., Any], in_axes: Sequence[LogicalAxes], out_axes: LogicalAxes) -> Callable[..., Any]:
    """fn, run by every GPU on its own shards (a `jax.shard_map` manual over every mesh axis).

    For kernels that the partitioner cannot split: cuDNN attention, Pallas. Outside a scope it is fn itself.

    Args:
        fn: takes and returns local arrays.
        in_axes: logical axes of each argument.
        out_axes: logical axes of the result.
    """
    scope = current_scope()
    if scope is None:
        return fn
    *inputs, output = (scope.rules.spec_for(axes, kind="activations") for axes in (*in_axes, out_axes))
    return shard_over_mesh(fn, inputs, output)


def shard_over_mesh(fn: Callable[..., Any], in_specs: Sequence[Spec], out_spec: Spec) -> Callable[..., Any]:
    """`shard_over` with mesh axes per dim in place of logical axes; fn may communicate over them by name."""
    scope = current_scope()
    if scope is None:
        return fn

    def local(*args):
        with sharding_scope(None, None):
            return fn(*args)

    inputs = tuple(partition_spec(s) for s in in_specs)
    return jax.shard_map(local, mesh=scope.mesh, in_specs=inputs, out_specs=partition_spec(out_spec), check_vma=False)


def attention_implementation() -> str:
    """`"cudnn"` where the target GPUs have it (compute capability 8.0 on), else `"xla"`.

    Decided by the scope's mesh, attached or described, never by the backend of this process.
    """
    scope = current_scope()
    capability = scope.compute_capability if scope else None
    return "cudnn" if capability is not None and capability >= (8, 0) else "xla"


def partition_spec(spec: Sequence[Sequence[str]]) -> PartitionSpec:
    """Tuples of mesh axes per dim as jax spells them: None, a name, or a tuple."""
    return PartitionSpec(*(None if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in spec))


def _dividing(axes: Sequence[str], size: int, mesh: AnyMesh) -> tuple[str, ...]:
    """The longest prefix of axes whose product divides size."""
    kept: list[str] = []
    for axis in axes:
        if size % math.prod(mesh.shape[a] for a in [*kept, axis]):
            break
        kept.append(axis)
    return tuple(kept)
