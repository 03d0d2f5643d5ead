"""The sharding of context parallel attention's arrays, the checks of their sizes, and the order of their tokens.

**Balanced order.** If each GPU held consecutive tokens, under a causal mask the last GPU would have the most work. So
the sequence is cut into 2 n chunks for n GPUs, and GPU i holds chunks i and 2 n - 1 - i. Every GPU then has the same
work against every other GPU's keys. A model reorders its tokens once, before the first layer, and its hidden states
once, after the last. These are 2 swaps of chunks per step; attention that reorders by itself needs 4 per layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

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
Queries = Float[Array, "batch length heads head_dim"]
Keys = Float[Array, "batch length kv_heads head_dim"]


@dataclass(frozen=True)
class ContextLayout:
    """The mesh axes that cut q, k and v of shape [batch, length, heads, head_dim].

    Inside a `jax.shard_map` that is manual over some of these axes (a pipeline stage), arrays arrive cut over the
    manual axes, with the dims of one piece.

    Attributes:
        mesh: attached or described.
        length: the axes of context parallelism, outermost first.
        batch, heads: axes that cut those dims. Over the mesh's remaining axes the arrays are replicated.
    """

    mesh: AnyMesh
    length: Axes
    batch: Axes = ()
    heads: Axes = ()

    @classmethod
    def of(cls, mesh: AnyMesh, axis: str | Sequence[str], batch: str | Sequence[str], heads: str | Sequence[str]):
        """Return the layout, from one axis name or several for each dim.

        Args:
            mesh: attached or described.
            axis: axes that cut the length, outermost first.
            batch, heads: axes that cut those dims; () for none.

        Raises:
            ConfigError: the mesh lacks an axis, or two dims have the same axis.
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
        """Number of pieces that the length is cut into."""
        return self.size(self.length)

    @property
    def array(self) -> PartitionSpec:
        """The spec of [batch, length, heads, head_dim]."""
        return partition_spec((self.batch, self.length, self.heads, ()))

    @property
    def statistics(self) -> PartitionSpec:
        """The spec of [batch, heads, length]."""
        return partition_spec((self.batch, self.heads, self.length))

    def size(self, axes: Axes) -> int:
        """Return the number of GPUs along these axes."""
        return math.prod(self.mesh.shape[a] for a in axes)

    def pieces(self, axes: Axes) -> int:
        """Return how many pieces these axes still cut an array into; the manual axes have already cut it."""
        return self.size(tuple(a for a in axes if a not in manual_here()))

    def run(self, fn: Callable[..., Any], inputs: Any, outputs: Any) -> Callable[..., Any]:
        """Return fn as it runs on the shards of every GPU.

        Args:
            fn: takes and returns local arrays, and may communicate over the axes by name.
            inputs, outputs: PartitionSpecs in the trees of fn's arguments and of its result, see `shard_map_here`.
        """
        return shard_map_here(fn, self.mesh, inputs, outputs)

    def check(self, q: jax.Array, k: jax.Array, v: jax.Array) -> None:
        """Refuse shapes that do not match, or that the axes do not divide.

        Args:
            q: [batch, length, heads, head_dim]; one piece where axes are manual.
            k, v: [batch, length, kv_heads, head_dim], with as many tokens as q; kv_heads divides heads.

        Raises:
            ConfigError: the shapes do not match, or a dim does not divide. The message has the sizes.
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
        """Refuse a length that does not divide into the two chunks per GPU of the balanced order.

        Args:
            length: of an array, or of its piece where axes are manual.

        Raises:
            ConfigError: the length does not divide. The message has the sizes.
        """
        length *= self.ways // self.pieces(self.length)
        if length % (2 * self.ways):
            raise ConfigError(
                f"length = {length} does not divide into the {2 * self.ways} chunks of causal context parallelism "
                f"over {_shown(self.length)}: two per GPU.",
                hint=f"a sequence_length that is a multiple of {2 * self.ways}",
            )


def choose_implementation(mesh: AnyMesh, q: jax.Array, block: int) -> str:
    """Return `cudnn` if the mesh's GPUs have it and it accepts these queries and blocks; otherwise `xla`.

    `cudnn` needs bf16 or fp16, a head_dim that is a multiple of 8 and at most 128, and blocks of a multiple of 64.

    Args:
        mesh: attached or described; the process's own backend does not matter.
        q: the queries; their dtype and their last dim, head_dim, decide.
        block: in tokens; every length that a kernel gets is a multiple of it.
    """
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


def balanced_positions(length: int, ways: int) -> Int[Array, " {length}"]:
    """Return the position in the sequence of each token, for tokens in balanced order over `ways` GPUs.

    With one GPU they are 0, 1, ..., length - 1.

    Args:
        length: of the whole sequence, in tokens; a multiple of 2 * ways if there is more than one way.
        ways: GPUs along the axes that cut the length.
    """
    index = jnp.arange(length, dtype=jnp.int32)
    if ways == 1:
        return index
    chunk = length // (2 * ways)
    gpu, second, within = index // (2 * chunk), index // chunk % 2, index % chunk
    return jnp.where(second == 1, 2 * ways - 1 - gpu, gpu) * chunk + within


def positions_here(length: int, layout: ContextLayout, *, balanced: bool) -> Int[Array, " {length}"]:
    """Return the position in the sequence of each token of an array.

    Inside a pipeline stage that is manual over the length's axes, the array is this GPU's piece.

    Args:
        length: of the array.
        layout: the axes that cut it.
        balanced: whether the tokens are in balanced order; otherwise they are in natural order.
    """
    pieces = layout.ways // layout.pieces(layout.length)
    positions = balanced_positions(length * pieces, layout.ways if balanced else 1)
    if pieces == 1:
        return positions
    return lax.dynamic_slice_in_dim(positions, lax.axis_index(layout.length) * length, length)


def balance(x: Shaped[Array, "*dims"], layout: ContextLayout, spec: PartitionSpec) -> Shaped[Array, "*dims"]:
    """Reorder x from natural into balanced order, by two collective-permutes of half of x each.

    Args:
        x: any array whose second dim the length axes of the layout cut.
        spec: PartitionSpec of x.

    Raises:
        ConfigError: the length does not divide into two chunks per GPU.
    """
    return _reordered(x, layout, spec, (_to_balanced, _to_natural))


def restore(x: Shaped[Array, "*dims"], layout: ContextLayout, spec: PartitionSpec) -> Shaped[Array, "*dims"]:
    """Reorder x from balanced back into natural order, with the arguments and the communication of `balance`."""
    return _reordered(x, layout, spec, (_to_natural, _to_balanced))


def _reordered(x: jax.Array, layout: ContextLayout, spec: PartitionSpec, directions: Sequence[Callable]):
    """Reorder x in the first direction, its gradient in the second: jax's transpose would sum over replicated axes."""
    layout.check_balanced(x.shape[1])

    def run(direction, x):
        return layout.run(partial(direction, layout), spec, spec)(x)

    forth, back = (partial(run, direction) for direction in directions)
    reorder = jax.custom_vjp(forth)
    reorder.defvjp(lambda x: (reorder(x), None), lambda _, g: (back(g),))
    return reorder(x)


def _to_balanced(layout: ContextLayout, x: jax.Array) -> jax.Array:
    even, odd = jnp.split(x, 2, axis=1)  # chunks 2 i and 2 i + 1 of GPU i
    even = lax.ppermute(even, layout.length, _moves(layout.ways, 0))
    odd = lax.ppermute(odd, layout.length, _moves(layout.ways, 1))
    return _swapped_on_odd_gpus(even, odd, layout.length)


def _to_natural(layout: ContextLayout, x: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=1)
    even, odd = jnp.split(_swapped_on_odd_gpus(first, second, layout.length), 2, axis=1)
    even = lax.ppermute(even, layout.length, [(b, a) for a, b in _moves(layout.ways, 0)])
    odd = lax.ppermute(odd, layout.length, [(b, a) for a, b in _moves(layout.ways, 1)])
    return jnp.concatenate([even, odd], axis=1)


def _moves(ways: int, half: int) -> list[tuple[int, int]]:
    """Return (from, to) GPUs: where the first (half = 0) or second chunk of every GPU goes in balanced order."""
    chunks = [2 * i + half for i in range(ways)]
    return [(i, c if c < ways else 2 * ways - 1 - c) for i, c in enumerate(chunks)]


def _swapped_on_odd_gpus(even: jax.Array, odd: jax.Array, axes: Axes) -> jax.Array:
    """Join both chunks; GPU i holds chunks i and 2 n - 1 - i, so the even chunk comes first where i is even."""
    swap = lax.axis_index(axes) % 2 == 1
    return jnp.concatenate([jnp.where(swap, odd, even), jnp.where(swap, even, odd)], axis=1)
