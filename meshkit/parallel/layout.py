"""How the arrays of context parallel attention lie on a mesh, and what sizes go together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshkit.config.rules import ShardingRules
from meshkit.errors import ConfigError
from meshkit.sharding.constrain import (
    attention_implementation,
    manual_here,
    partition_spec,
    shard_map_here,
    sharding_scope,
)
from meshkit.sharding.mesh import AnyMesh

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """The mesh axes that cut q, k and v of shape [batch, length, heads, head_dim].

    Inside a `jax.shard_map` that is manual over some of them (a stage of a pipeline), arrays are cut over those as they
    come: their dims are those of a piece.

    Attributes:
        mesh: attached or described.
        length: the axes of context parallelism, outermost first.
        batch, heads: axes that cut those dims; axes of the mesh named nowhere hold copies.
    """

    mesh: AnyMesh
    length: Axes
    batch: Axes = ()
    heads: Axes = ()

    @classmethod
    def of(cls, mesh: AnyMesh, axis: str | Sequence[str], batch: str | Sequence[str], heads: str | Sequence[str]):
        """A layout of axes that are each a name or several.

        Raises:
            ConfigError: an axis that the mesh does not have, or one on two dims.
        """
        layout = cls(mesh, _names(axis), _names(batch), _names(heads))
        named = [*layout.batch, *layout.length, *layout.heads]
        for name in named:
            if name not in mesh.axis_names:
                raise ConfigError(f"the mesh has axes {', '.join(mesh.axis_names)}, not '{name}'.")
            if named.count(name) > 1:
                raise ConfigError(f"mesh axis '{name}' cannot cut two dims of attention.")
        return layout

    @property
    def ways(self) -> int:
        """Pieces of the length."""
        return self.size(self.length)

    @property
    def array(self) -> PartitionSpec:
        """Of [batch, length, heads, head_dim]."""
        return partition_spec((self.batch, self.length, self.heads, ()))

    @property
    def statistics(self) -> PartitionSpec:
        """Of [batch, heads, length]."""
        return partition_spec((self.batch, self.heads, self.length))

    def size(self, axes: Axes) -> int:
        """GPUs along axes."""
        return math.prod(self.mesh.shape[a] for a in axes)

    def pieces(self, axes: Axes) -> int:
        """Pieces that a dim of an array is still to be cut into over axes, those that are manual here left out."""
        return self.size(tuple(a for a in axes if a not in manual_here()))

    def run(self, fn: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """fn on the shards of every GPU; it communicates over axes by name."""
        return shard_map_here(fn, self.mesh, inputs, outputs)

    def check(self, q: jax.Array, k: jax.Array, v: jax.Array) -> None:
        """Refuses shapes that do not go together, or that the axes do not divide.

        Raises:
            ConfigError: with the sizes.
        """
        if q.ndim != 4 or k.shape != v.shape or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
            raise ConfigError(
                "attention takes q [batch, length, heads, head_dim] and k, v [batch, length, kv_heads, head_dim], not "
                f"{q.shape}, {k.shape} and {v.shape}."
            )
        if q.shape[2] % k.shape[2]:
            raise ConfigError(f"{q.shape[2]} heads are not a multiple of {k.shape[2]} kv_heads.")
        sizes = (("batch", q.shape[0], self.batch), ("length", q.shape[1], self.length))
        for name, size, axes in (*sizes, ("heads", q.shape[2], self.heads), ("kv_heads", k.shape[2], self.heads)):
            if size % self.pieces(axes):
                raise ConfigError(
                    f"{name} = {size} does not divide into the {self.pieces(axes)} pieces of {_shown(axes)}."
                )

    def check_balanced(self, length: int) -> None:
        """Refuses a length that does not divide into the two chunks per GPU of the balanced order.

        Args:
            length: of an array as it is here.

        Raises:
            ConfigError: with the sizes.
        """
        length *= self.ways // self.pieces(self.length)
        if length % (2 * self.ways):
            raise ConfigError(
                f"length = {length} does not divide into the {2 * self.ways} chunks of causal context parallelism "
                f"over {_shown(self.length)}: two per GPU.",
                hint=f"a sequence_length that is a multiple of {2 * self.ways}",
            )


def choose_implementation(mesh: AnyMesh, q: jax.Array, block: int) -> str:
    """`cudnn` where the GPUs of the mesh have it and it takes blocks of this many queries and keys; else `xla`."""
    with sharding_scope(mesh, ShardingRules({})):
        found = attention_implementation()
    half_precision = q.dtype in (jnp.bfloat16, jnp.float16)
    head_dim = q.shape[-1]
    takes = half_precision and head_dim % 8 == 0 and head_dim <= 128 and block % 64 == 0
    return found if takes else "xla"


def _names(axes: str | Sequence[str]) -> Axes:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _shown(axes: Axes) -> str:
    return " x ".join(f"'{a}'" for a in axes) or "no axis"
