"""Muon (Jordan et al., 2024): momentum with orthogonalized matrices, for stacks of matrices that a mesh cuts.

    logical axes of the parameters -> stacks of matrices -> Newton-Schulz on each matrix, AdamW for other parameters

Updates equal those of `optax.contrib.muon` with `consistent_rms` (Liu et al., 2025, section 2.2), so that AdamW's
learning rate and weight decay are suitable. With optax, matrices stay cut as their moments are, so each iteration needs
collectives. optax also merges all dims of a stack, which loses the sharding over an axis that cuts the experts of every
layer. Here the mesh axes that cut matrices move to the stack, which is padded to a multiple of their size. Each GPU
then orthogonalizes whole matrices of its own, between two all-to-alls for each axis. A matrix that is in no stack stays
cut.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from meshkit.config.rules import ShardingRules
from meshkit.sharding.constrain import partition_spec
from meshkit.sharding.mesh import AnyMesh
from meshkit.sharding.resolve import Placed, path_name, placements
from meshkit.sharding.strategy import MUON_SCOPE

_STACKED = ("layers", "dense_layers", "mtp_layers", "experts", None)  # dims of a stack, not of its matrices
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # the defaults of optax.contrib.muon, as are the next two
_STEPS = 5
_EPS = 1e-8
_RMS = 0.2  # root mean square of an update, similar to AdamW's
_MERGED = ("heads", "head_dim"), ("kv_heads", "head_dim")  # dims that together are one dim of a matrix


@dataclass(frozen=True)
class MatrixStack:
    """A parameter that is a stack of matrices."""

    stacked: int
    """Number of leading dims that are the stack's."""
    inner: int
    """Number of dims after them that are a matrix's rows; the remaining dims are its columns."""
    pieces: tuple[int, ...]
    """Number of pieces that each dim of the stack is cut into."""
    matrices: int
    """Number of matrices in one piece, including padding."""
    stored: NamedSharding
    """Sharding of the parameter's moment."""
    moves: tuple[NamedSharding, ...]
    """Shardings of [pieces..., matrices, rows, columns], from the stored sharding to Newton-Schulz's. Each differs in
    one axis from its predecessor: XLA moves one axis by an all-to-all, but copies the whole array to move two."""

    def to_rows(self, x: jax.Array) -> jax.Array:
        """Return x as [pieces..., matrices, rows, columns], still sharded like its moment."""
        dims, kept = x.shape[self.stacked :], len(self.pieces)
        shape = (math.prod(dims[: self.inner]), math.prod(dims[self.inner :]))
        y = x.reshape(*(n for c, size in zip(self.pieces, x.shape) for n in (c, size // c)), *shape)
        y = y.transpose(*range(0, 2 * kept, 2), *range(1, 2 * kept, 2), 2 * kept, 2 * kept + 1)
        y = y.reshape(*self.pieces, -1, *shape)
        return jnp.pad(y, [(0, 0)] * kept + [(0, self.matrices - y.shape[kept]), (0, 0), (0, 0)])

    def from_rows(self, y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Undo `to_rows`, for a parameter of this shape."""
        kept, each = len(self.pieces), [size // c for c, size in zip(self.pieces, shape)]
        y = y[(*(slice(None),) * kept, slice(0, math.prod(each)))].reshape(*self.pieces, *each, *y.shape[-2:])
        order = [dim for pair in zip(range(kept), range(kept, 2 * kept)) for dim in pair]
        return y.transpose(*order, 2 * kept, 2 * kept + 1).reshape(shape)


class MuonState(NamedTuple):
    """The number of steps done, and the momentum of each parameter."""

    count: jax.Array
    mu: Any


def find_matrices(params: Any, mesh: AnyMesh, rules: ShardingRules) -> dict[str, MatrixStack]:
    """Return path -> MatrixStack of every parameter that Muon updates, found by the names of its dims.

    Such a parameter has two dims besides those of layers and experts, neither of them `vocab`; heads and head_dim count
    as one dim. So AdamW updates embeddings, the head, norms, biases and parameters without names.
    """
    placed = placements(params, mesh, rules, kind="optimizer")
    return {p.path: matrix for p in placed if (matrix := _matrix_of(p, mesh)) is not None}


def matrix_dims(names: Sequence[str | None]) -> tuple[int, int] | None:
    """Return how many leading dims of a parameter are a stack's, and how many after them are a matrix's rows.

    Return None if Muon does not update parameters with these logical axes.
    """
    stacked = next((dim for dim, name in enumerate(names) if name not in _STACKED), len(names))
    groups: list[list[str | None]] = []
    for name in names[stacked:]:
        if groups and (*groups[-1], name) in _MERGED:
            groups[-1].append(name)
        else:
            groups.append([name])
    if len(groups) != 2 or any(name in ("vocab", *_STACKED) for group in groups for name in group):
        return None
    return stacked, len(groups[0])


def _matrix_of(p: Placed, mesh: AnyMesh) -> MatrixStack | None:
    dims = matrix_dims(p.logical_axes or ())
    if dims is None:
        return None
    stacked, inner = dims
    stack, rows, columns = p.spec[:stacked], [*p.spec[stacked]], [*p.spec[stacked + inner]]
    ways = lambda axes: math.prod(mesh.shape[a] for a in axes)
    pieces = tuple(map(ways, stack))
    moved: list[str] = []
    steps = [partition_spec((*stack, moved, rows, columns))]
    each = math.prod(p.shape[:stacked]) // math.prod(pieces)
    for left in (rows, columns) if stacked else ():
        while left:
            moved.append(left.pop())  # the innermost axis first, so that the others keep their order
            steps.append(partition_spec((*stack, moved, rows, columns)))
    matrices = math.ceil(each / ways(moved)) * ways(moved)
    stored, moves = NamedSharding(mesh, partition_spec(p.spec)), tuple(NamedSharding(mesh, s) for s in steps)
    return MatrixStack(stacked, inner, pieces, matrices, stored, moves)


def exchanged_elements(params: Any, mesh: AnyMesh, rules: ShardingRules) -> dict[str, float]:
    """Return mesh axis -> elements that each GPU sends over it in a step, by two all-to-alls for each stack.

    An axis that cuts a matrix outside of all stacks gets infinity, because this matrix is multiplied in pieces.
    """
    found: dict[str, float] = defaultdict(float)
    for p in placements(params, mesh, rules, kind="optimizer"):
        if (matrix := _matrix_of(p, mesh)) is None:
            continue
        axes = [axis for cut in p.spec[matrix.stacked :] for axis in cut]
        here = matrix.matrices * math.prod(p.shape[matrix.stacked :]) // math.prod(mesh.shape[a] for a in axes)
        for axis in axes:
            found[axis] += 2 * here if matrix.stacked else math.inf
    return found


def muon(
    matrices: Mapping[str, MatrixStack],
    schedule: optax.Schedule,
    *,
    momentum: float,
    weight_decay: float,
    dtype: Any,
    others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Return an optimizer: Muon for the matrices, `others` for all other parameters.

    `momentum` is the decay of the first moment, Muon's only one; `others` has a learning rate of its own.
    """

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda at, _: "muon" if path_name(at) in matrices else "others", params)

    own = optax.chain(
        _orthogonal_momentum(matrices, momentum, dtype),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.partition({"muon": own, "others": others}, labels)


def _orthogonal_momentum(matrices: Mapping[str, MatrixStack], beta: float, dtype: Any) -> optax.GradientTransformation:
    """Return Nesterov momentum, each matrix orthogonalized and scaled to the root mean square of AdamW's updates."""

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params, dtype=dtype))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        ahead = optax.tree.bias_correction(mu, beta, count + 1)
        now = optax.tree.bias_correction(updates, beta, count)
        with jax.named_scope(MUON_SCOPE):
            directions = jax.tree_util.tree_map_with_path(
                lambda at, m, g: orthogonalize(beta * m + (1 - beta) * g, matrices[path_name(at)]), ahead, now
            )
        return directions, MuonState(count, optax.tree.cast(mu, dtype))

    return optax.GradientTransformation(init, cast(Any, update))


def orthogonalize(x: jax.Array, matrix: MatrixStack) -> jax.Array:
    """Bring each matrix's singular values near one by five Newton-Schulz steps, then scale the matrix."""
    pin = jax.lax.with_sharding_constraint
    y = matrix.to_rows(pin(x, matrix.stored))
    rows, columns = y.shape[-2:]
    for sharding in matrix.moves:
        y = pin(y, sharding)
    y = jnp.swapaxes(y, -1, -2) if rows > columns else y
    y /= jnp.linalg.norm(y, axis=(-2, -1), keepdims=True) + _EPS
    a, b, c = _COEFFICIENTS

    def step(_: Any, y: jax.Array) -> jax.Array:
        square = y @ jnp.swapaxes(y, -1, -2)
        return a * y + (b * square + c * square @ square) @ y

    y = jax.lax.fori_loop(0, _STEPS, step, y)
    y = jnp.swapaxes(y, -1, -2) if rows > columns else y
    y = y * (_RMS * math.sqrt(max(rows, columns)))
    for sharding in reversed(matrix.moves):
        y = pin(y, sharding)
    return pin(matrix.from_rows(y, x.shape), matrix.stored)
