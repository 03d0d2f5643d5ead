"""Sums over manual axes, in a dtype that the compiler of the target can add.

XLA's CPU compiler (jaxlib 0.12) aborts on a 16-bit all-reduce or reduce-scatter inside a `jax.shard_map` that leaves
axes to the partitioner, as a pipeline does: "Invalid binary instruction opcode copy", from the copy that lowering puts
into the reduction. On CPU devices they are added in fp32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshkit.sharding.constrain import current_scope
from meshkit.sharding.mesh import AnyMesh


def psum(x: jax.Array, axes: Any, mesh: AnyMesh | None = None) -> jax.Array:
    """`lax.psum`.

    Args:
        x: an array.
        axes: manual mesh axes.
        mesh: says which devices these are; None takes that of the sharding scope.
    """
    return lax.psum(_widened(x, mesh), axes).astype(x.dtype)


def psum_scatter(x: jax.Array, axes: Any, dim: int, mesh: AnyMesh | None = None) -> jax.Array:
    """`lax.psum_scatter` along a dim, in tiles."""
    return lax.psum_scatter(_widened(x, mesh), axes, scatter_dimension=dim, tiled=True).astype(x.dtype)


def _widened(x: jax.Array, mesh: AnyMesh | None) -> jax.Array:
    scope = current_scope()
    mesh = mesh if mesh is not None else scope and scope.mesh
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    on_cpu = mesh is None or mesh.devices.flat[0].platform == "cpu"
    return x.astype(jnp.float32) if narrow and on_cpu else x
