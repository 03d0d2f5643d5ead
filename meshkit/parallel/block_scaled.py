"""Block-scaled matmuls over a mesh: `jax.nn.scaled_matmul` for arrays with any number of dims and any sharding.

`jax.nn.scaled_matmul` takes [batch, m, k]. Batch and length must be merged into one dim, which loses their sharding.
It sums over the mesh only where both operands have the same sharding along k, with one collective over all axes that
cut k. Here every GPU merges the dims of its own shard and multiplies. If both operands are cut over the same axes along
a summed dim, the products are summed over these axes, by a reduce-scatter where the result is cut over them. Operands
with other shardings are gathered as 8-bit values and scales.
"""

from __future__ import annotations

import itertools
import math
import string
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.errors import ConfigError

type Axes = tuple[str, ...]


def block_scaled_matmul(
    a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array], summed: int, dtype: Any
) -> jax.Array:
    """Return the product [*rows, *columns] of a [*rows, *summed] and b [*columns, *summed].

    Args:
        a, b: values and scales; a scale applies to a block along the last dim.
        summed: number of dims to sum over, the last ones of both operands.
        dtype: dtype of the product and of its sum over the mesh.
    """
    return _matmul(*a, *b, summed, jax.numpy.dtype(dtype).name)


def _local(a, a_scales, b, b_scales, summed: int, dtype: str) -> jax.Array:
    rows, columns = (x.shape[: x.ndim - summed] for x in (a, b))
    flat = [
        x.reshape(1, math.prod(x.shape[: x.ndim - summed]), math.prod(x.shape[x.ndim - summed :]))
        for x in (a, b, a_scales, b_scales)
    ]
    return jax.nn.scaled_matmul(*flat, preferred_element_type=jax.numpy.dtype(dtype)).reshape(*rows, *columns)


_matmul = custom_partitioning(_local, static_argnums=(4, 5))


def _rule(summed: int, dtype: str, mesh: Any, values: Any, results: Any) -> str:
    """Return the sharding rule, written like an einsum; a scale is cut as its block is."""
    del dtype, mesh, results
    letters = iter(string.ascii_lowercase)
    rows, columns = (list(itertools.islice(letters, values[i].rank - summed)) for i in (0, 2))
    inner = list(itertools.islice(letters, summed))
    a, b, out = (" ".join(dims) for dims in (rows + inner, columns + inner, rows + columns))
    return f"{a}, {a}, {b}, {b} -> {out}"


def _partition(summed: int, dtype: str, mesh: Any, args: Any, result: Any) -> Any:
    """Return what each GPU computes on its shards, with the shardings of the result and the arguments."""
    (a, b), out = (_cuts(args[i]) for i in (0, 2)), _cuts(result)
    (rows, left), (columns, right) = _split(a, len(a) - summed), _split(b, len(b) - summed)
    # An axis that cuts only the first operand is kept: the second is sliced. One that cuts only the second (FSDP) is
    # gathered.
    taken = {axis for cut in columns for axis in cut}
    inner = [k if other in (k, ()) and not taken & {*k} else () for k, other in zip(left, right)]
    _check_whole_blocks(args[0], args[1], inner[-1])
    added = tuple(axis for cut in inner for axis in cut)
    kept, scattered = [], []  # for each dim of the result: axes that cut the product, axes of its reduce-scatter
    for wanted, has in zip(out, rows + columns):
        before, then = _free(wanted or has, {*added}.union(*kept))
        kept.append(before)
        scattered.append(then if wanted and {*then} <= {*added}.difference(*scattered) else ())
    rows, columns = _split(kept, len(rows))

    def multiply(*parts: jax.Array) -> jax.Array:
        product, left_over = _local(parts[0], parts[1], parts[2], parts[3], summed, dtype), added
        for dim, axes in enumerate(scattered):
            if axes:
                product = lax.psum_scatter(product, axes, scatter_dimension=dim, tiled=True)
                left_over = tuple(axis for axis in left_over if axis not in axes)
        return lax.psum(product, left_over) if left_over else product

    def sharding(cuts: list[Axes]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(cut or None for cut in cuts)))

    first, second = sharding(rows + inner), sharding(columns + inner)
    return mesh, multiply, sharding([k + s for k, s in zip(kept, scattered)]), (first, first, second, second)


def _check_whole_blocks(values: Any, scales: Any, cut: Axes) -> None:
    """Raise an error if a GPU's part of the last summed dim ends inside a block, whose scale another GPU then has.

    Raises:
        ConfigError: the blocks do not divide among the mesh axes that cut the dim.
    """
    sizes, (size, blocks) = values.sharding.mesh.shape, (values.shape[-1], scales.shape[-1])
    ways = math.prod(sizes[axis] for axis in cut)
    if blocks % ways:
        each, axes = size // blocks, " x ".join(f"{axis} {sizes[axis]}" for axis in cut)
        raise ConfigError(
            f"a block-scaled matmul sums over a dim of {size}, which is {blocks} blocks of {each}, and the mesh cuts "
            f"it over {axes}: {blocks / ways:g} blocks a GPU, where {math.gcd(blocks, ways)} instead of {ways} ways "
            "would give whole ones.",
        )


def _free(cut: Axes, used: set[str]) -> tuple[Axes, Axes]:
    """Return the leading axes of a cut that are not in `used`, and the rest."""
    free = next((i for i, axis in enumerate(cut) if axis in used), len(cut))
    return cut[:free], cut[free:]


def _cuts(array: Any) -> list[Axes]:
    """Return the mesh axes that cut each dim, without axes of size 1."""
    spec, sizes = array.sharding.spec, array.sharding.mesh.shape
    names = [(cut,) if isinstance(cut, str) else tuple(cut or ()) for cut in spec]
    names += [()] * (len(array.shape) - len(names))
    return [tuple(axis for axis in cut if sizes[axis] > 1) for cut in names]


def _split(cuts: list[Axes], at: int) -> tuple[list[Axes], list[Axes]]:
    return cuts[:at], cuts[at:]


_matmul.def_partition(partition=_partition, sharding_rule=_rule)
