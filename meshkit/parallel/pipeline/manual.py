"""The layout of parameters and batch inside a pipeline: manual axes, what is gathered and what is reduced.

The pipeline's axis and the axes that cut the batch are *manual* (`jax.shard_map`). If they were left to the
partitioner, their reductions would run in every tick. All other axes (tensor) are left to it. FSDP is a manual axis in
a parameter's spec: the parameter is gathered once before the first tick, and its gradient is reduce-scattered once
after the last.

XLA's CPU compiler (jaxlib 0.12) aborts on a 16-bit all-reduce or reduce-scatter inside a `jax.shard_map` that leaves
axes to the partitioner: "Invalid binary instruction opcode copy", from the copy that lowering puts into the reduction.
So `psum` and `psum_scatter` add in fp32 on CPU devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.errors import ConfigError
from meshkit.sharding.constrain import current_scope, partition_spec, spec_axes
from meshkit.sharding.mesh import AnyMesh


@dataclass(frozen=True)
class ManualAxes:
    """The manual axes of a pipeline, and the communication of arrays over them."""

    mesh: AnyMesh
    axis: str
    batch: PartitionSpec
    """PartitionSpec of a batch's arrays [microbatches, batch, ...]."""
    kept: tuple[str, ...] = ()
    """Axes of the batch over which parameters stay cut, since stages communicate over them (experts)."""

    def __post_init__(self):
        for name in (self.axis, *self.data, *self.kept):
            if name not in self.mesh.axis_names:
                shape = " x ".join(f"{name} {size}" for name, size in self.mesh.shape.items())
                raise ConfigError(f"the pipeline is laid out over mesh axis '{name}', which the mesh ({shape}) lacks.")
        if self.axis in self.data:
            raise ConfigError(
                f"mesh axis '{self.axis}' cuts the batch and cannot be the pipeline's axis as well.",
                hint="rules in which it cuts `layers`, not the batch",
            )

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.mesh.shape[self.axis]

    @property
    def data(self) -> tuple[str, ...]:
        """The axes that cut the batch."""
        return tuple(a for axes in spec_axes(self.batch) for a in axes)

    @property
    def shards(self) -> int:
        """Number of parts that a microbatch is cut into."""
        return math.prod(self.mesh.shape[a] for a in self.data)

    @property
    def names(self) -> frozenset[str]:
        """All manual axes."""
        return frozenset((self.axis, *self.data))

    def inside(self, spec: PartitionSpec) -> PartitionSpec:
        """Keep the manual axes of a spec, the only ones that a shard_map's in_specs and out_specs may name."""
        return partition_spec([[a for a in axes if a in self.names] for axes in spec_axes(spec)])

    def _outside(self, spec: PartitionSpec) -> PartitionSpec:
        return partition_spec([[a for a in axes if a not in self.names] for axes in spec_axes(spec)])

    def constrain(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Constrain x, inside the shard_map, to the axes of its spec that are left to the partitioner."""
        rest = self._outside(spec)
        if not any(rest):
            return x
        return lax.with_sharding_constraint(x, NamedSharding(jax.sharding.get_abstract_mesh(), rest))

    def check_stages(self, spec: PartitionSpec, path: str) -> None:
        """Refuse a parameter of the stages unless the pipeline's axis cuts its layers first.

        Raises:
            ConfigError: naming the parameter.
        """
        if not spec or spec_axes(spec)[0][:1] != (self.axis,):
            raise ConfigError(
                f"the pipeline's mesh axis '{self.axis}' must cut the layers of {path} first, but its sharding is "
                f"{tuple(spec)}.",
                hint=f'[rules.logical] layers = "{self.axis}"',
            )

    def gather(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """All-gather x over the batch's axes in its spec (FSDP).

        Args:
            x: this device's piece of a parameter, inside the shard_map.
            spec: PartitionSpec of the whole parameter; the pipeline's axis and `kept` axes still cut the result.

        Raises:
            ConfigError: the axes to gather are not the innermost manual ones of their dim.
        """

        def local(x):
            for dim, axes in self._gathered(spec):
                x = lax.all_gather(x, axes, axis=dim, tiled=True)
            return x

        return self._fully_manual(local, spec)(x) if self._gathered(spec) else x

    def reduce(self, gradient: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Return the sum of a gradient over devices, laid out as its parameter is.

        A reduce-scatter over the axes that cut the parameter comes first, then an all-reduce over the other axes.

        Args:
            gradient: this device's part of the sum, in the shape that `gather` gave the parameter. It is sent in its
                own dtype (16-bit dtypes in fp32 on CPUs) and returned in it.
            spec: PartitionSpec of the whole parameter.

        Raises:
            ConfigError: as `gather` does.
        """
        cut = {a for axes in spec_axes(spec) for a in axes}
        left = tuple(a for a in (self.axis, *self.data) if a not in cut)

        def local(gradient):
            for dim, axes in self._gathered(spec):
                gradient = psum_scatter(gradient, axes, dim, self.mesh)
            return psum(gradient, left, self.mesh) if left else gradient

        return self._fully_manual(local, spec)(gradient)

    def _fully_manual(self, fn: Callable, spec: PartitionSpec) -> Callable:
        """Make fn manual over all axes of the spec: the partitioner would gather over its axes before a collective."""
        rest = self._outside(spec)
        names = frozenset(a for axes in spec_axes(rest) for a in axes)
        if not names:
            return fn
        mesh = jax.sharding.get_abstract_mesh()
        return jax.shard_map(fn, mesh=mesh, in_specs=rest, out_specs=rest, axis_names=names, check_vma=False)

    def _gathered(self, spec: PartitionSpec) -> list[tuple[int, tuple[str, ...]]]:
        """Return the (dim, axes) to gather. The axes must be innermost, or pieces would be joined in wrong order."""
        found = []
        for dim, cut in enumerate(spec_axes(spec)):
            axes = tuple(a for a in cut if a in self.data and a not in self.kept)
            inner = tuple(a for a in cut if a in self.names)[-len(axes) :] if axes else ()
            if axes != inner:
                raise ConfigError(
                    f"dim {dim} of a parameter is cut over {' x '.join(cut)}: a pipeline gathers "
                    f"{' x '.join(axes)}, which must come last.",
                )
            if axes:
                found.append((dim, axes))
        return found


def psum(x: jax.Array, axes: Any, mesh: AnyMesh | None = None) -> jax.Array:
    """Return `lax.psum` over manual axes; `mesh` defaults to the mesh of the sharding scope."""
    return lax.psum(_widened(x, mesh), axes).astype(x.dtype)


def psum_scatter(x: jax.Array, axes: Any, dim: int, mesh: AnyMesh | None = None) -> jax.Array:
    """Return the tiled `lax.psum_scatter` along a dim that the manual axes divide; mesh as in `psum`."""
    return lax.psum_scatter(_widened(x, mesh), axes, scatter_dimension=dim, tiled=True).astype(x.dtype)


def _widened(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    scope = current_scope()
    mesh = mesh if mesh is not None else scope and scope.mesh
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    on_cpu = mesh is None or mesh.devices.flat[0].platform == "cpu"
    return x.astype(jnp.float32) if narrow and on_cpu else x
