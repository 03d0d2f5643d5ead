"""The balanced token order of causal context parallelism.

Under a causal mask the last GPU of a cut sequence would have nearly all the work. So the sequence is cut into 2 n
chunks for n GPUs, and GPU i holds chunks i and 2 n - 1 - i: every GPU then has the same work against every other GPU's
keys. A model reorders its tokens once, before the first layer, and its hidden states once, after the last: 2 swaps of
chunks per step, where attention by itself would need 4 per layer.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshkit.parallel.layout import Axes, Layout


def balanced_positions(length: int, ways: int) -> jax.Array:
    """Positions in the sequence of the tokens in balanced order over `ways` GPUs: int32 [length].

    With one way they are 0, 1, ..., length - 1.
    """
    index = jnp.arange(length, dtype=jnp.int32)
    if ways == 1:
        return index
    chunk = length // (2 * ways)
    gpu, second, within = index // (2 * chunk), index // chunk % 2, index % chunk
    return jnp.where(second == 1, 2 * ways - 1 - gpu, gpu) * chunk + within


def positions_here(length: int, layout: Layout, *, balanced: bool) -> jax.Array:
    """Positions in the sequence of the tokens of an array as it is here: int32 [length].

    Inside a stage of a pipeline that is manual over the length's axes, those of this GPU's piece.

    Args:
        length: of the array.
        layout: what cuts it.
        balanced: whether the tokens are in balanced order, or in natural order.
    """
    pieces = layout.ways // layout.pieces(layout.length)
    positions = balanced_positions(length * pieces, layout.ways if balanced else 1)
    if pieces == 1:
        return positions
    return lax.dynamic_slice_in_dim(positions, lax.axis_index(layout.length) * length, length)


def balance(x: jax.Array, layout: Layout, spec: PartitionSpec, dim: int = 1) -> jax.Array:
    """x from natural into balanced order; two collective-permutes of half of x each.

    Args:
        x: any array with a dim that the length axes of the layout cut.
        spec: how it lies on the mesh.
        dim: its length.

    Raises:
        ConfigError: the length does not divide into two chunks per GPU.
    """
    layout.check_balanced(x.shape[dim])
    return _reordered(x, layout, spec, _to_balanced(layout, dim), _to_natural(layout, dim))


def restore(x: jax.Array, layout: Layout, spec: PartitionSpec, dim: int = 1) -> jax.Array:
    """x from balanced back into natural order; arguments and bytes as in `balance`."""
    layout.check_balanced(x.shape[dim])
    return _reordered(x, layout, spec, _to_natural(layout, dim), _to_balanced(layout, dim))


def _reordered(x: jax.Array, layout: Layout, spec: PartitionSpec, forth: Callable, back: Callable) -> jax.Array:
    """forth(x), with back for its gradient: jax would add a sum over the axes that hold copies of x."""

    @jax.custom_vjp
    def reorder(x):
        return layout.run(forth, spec, spec)(x)

    reorder.defvjp(lambda x: (reorder(x), None), lambda _, g: (layout.run(back, spec, spec)(g),))
    return reorder(x)


def _to_balanced(layout: Layout, dim: int) -> Callable[[jax.Array], jax.Array]:
    def local(x):
        even, odd = jnp.split(x, 2, axis=dim)  # chunks 2 i and 2 i + 1 of GPU i
        even = lax.ppermute(even, layout.length, _moves(layout.ways, 0))
        odd = lax.ppermute(odd, layout.length, _moves(layout.ways, 1))
        return _swapped_on_odd_gpus(even, odd, layout.length, dim)

    return local


def _to_natural(layout: Layout, dim: int) -> Callable[[jax.Array], jax.Array]:
    def local(x):
        first, second = jnp.split(x, 2, axis=dim)
        even, odd = jnp.split(_swapped_on_odd_gpus(first, second, layout.length, dim), 2, axis=dim)
        even = lax.ppermute(even, layout.length, [(b, a) for a, b in _moves(layout.ways, 0)])
        odd = lax.ppermute(odd, layout.length, [(b, a) for a, b in _moves(layout.ways, 1)])
        return jnp.concatenate([even, odd], axis=dim)

    return local


def _moves(ways: int, half: int) -> list[tuple[int, int]]:
    """(from, to) of the first or the second chunk of every GPU in natural order."""
    chunks = [2 * i + half for i in range(ways)]
    return [(i, c if c < ways else 2 * ways - 1 - c) for i, c in enumerate(chunks)]


def _swapped_on_odd_gpus(even: jax.Array, odd: jax.Array, axes: Axes, dim: int) -> jax.Array:
    """GPU i holds chunks i and 2 n - 1 - i, so the even one comes first where i is even."""
    swap = lax.axis_index(axes) % 2 == 1
    return jnp.concatenate([jnp.where(swap, odd, even), jnp.where(swap, even, odd)], axis=dim)
