"""Muon: momentum whose matrices are made orthogonal, over stacks of matrices that a mesh cuts (Jordan et al., 2024).

    logical axes of the parameters -> which of them are stacks of matrices -> Newton-Schulz on each, AdamW for the rest

The steps are those of `optax.contrib.muon` with `consistent_rms` (Liu et al., 2025, section 2.2), so that a learning
rate and a weight decay of AdamW serve. That function multiplies matrices cut as the moments are, with collectives in
each of its iterations, and merges all dims of a stack, which an axis that cuts the experts of every layer does not
survive. Here mesh axes that cut matrices move to the stack, padded to a multiple of them: each GPU makes whole matrices
of its own orthogonal, between two all-to-alls for each axis. A matrix that is in no stack stays cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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

SCOPE = "muon"  # the name of its instructions
_STACKED = ("layers", "dense_layers", "mtp_layers", "experts", None)  # dims that are no matrix's
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of optax.contrib.muon, as are the next four
_STEPS = 5
_EPS = 1e-8
_RMS = 0.2  # of an update, as AdamW's are
_MERGED = ("heads", "head_dim"), ("kv_heads", "head_dim")  # one dim of a matrix


@dataclass(frozen=True)
class MatrixStack:
    """A parameter that is a stack of matrices."""

    stacked: int
    """How many leading dims are the stack's."""
    inner: int
    """How many dims after them are contracted; the rest are those of the result."""
    pieces: tuple[int, ...]
    """Pieces that each dim of the stack is cut into."""
    matrices: int
    """Matrices of one piece, padded."""
    stored: NamedSharding
    """The layout of its moment."""
    moves: tuple[NamedSharding, ...]
    """Layouts of [pieces..., matrices, rows, columns] on the way to that in which it is made orthogonal; from each to
    the next one axis moves. XLA makes an all-to-all of one, and of two at once copies the whole."""

    def to_rows(self, x: jax.Array) -> jax.Array:
        """x as [pieces..., matrices, rows, columns], still cut as its moment."""
        dims, kept = x.shape[self.stacked :], len(self.pieces)
        shape = (math.prod(dims[: self.inner]), math.prod(dims[self.inner :]))
        y = x.reshape(*(n for c, size in zip(self.pieces, x.shape) for n in (c, size // c)), *shape)
        y = y.transpose(*range(0, 2 * kept, 2), *range(1, 2 * kept, 2), 2 * kept, 2 * kept + 1)
        y = y.reshape(*self.pieces, -1, *shape)
        return jnp.pad(y, [(0, 0)] * kept + [(0, self.matrices - y.shape[kept]), (0, 0), (0, 0)])

    def from_rows(self, y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the inverse of `to_rows`, of a parameter of this shape."""
        kept, each = len(self.pieces), [size // c for c, size in zip(self.pieces, shape)]
        y = y[(*(slice(None),) * kept, slice(0, math.prod(each)))].reshape(*self.pieces, *each, *y.shape[-2:])
        order = [dim for pair in zip(range(kept), range(kept, 2 * kept)) for dim in pair]
        return y.transpose(*order, 2 * kept, 2 * kept + 1).reshape(shape)


class MuonState(NamedTuple):
    """Steps done, and the momentum of each parameter."""

    count: jax.Array
    mu: Any


def find_matrices(params: Any, mesh: AnyMesh, rules: ShardingRules) -> dict[str, MatrixStack]:
    """Path -> MatrixStack of every parameter that Muon takes, by the names of its dims.

    Two dims beside those of layers and experts, heads and head_dim as one; neither is `vocab`. So embeddings, the head,
    norms, biases and parameters without names are AdamW's.
    """
    placed = placements(params, mesh, rules, kind="optimizer")
    return {p.path: matrix for p in placed if (matrix := _matrix_of(p, mesh)) is not None}


def _matrix_of(p: Placed, mesh: AnyMesh) -> MatrixStack | None:
    names = p.logical_axes or ()
    stacked = next((dim for dim, name in enumerate(names) if name not in _STACKED), len(names))
    groups: list[list[str | None]] = []
    for name in names[stacked:]:
        if groups and (*groups[-1], name) in _MERGED:
            groups[-1].append(name)
        else:
            groups.append([name])
    if len(groups) != 2 or any(name in ("vocab", *_STACKED) for group in groups for name in group):
        return None
    inner = len(groups[0])
    stack, rows, columns = p.spec[:stacked], [*p.spec[stacked]], [*p.spec[stacked + inner]]
    ways = lambda axes: math.prod(mesh.shape[a] for a in axes)
    pieces = tuple(map(ways, stack))
    moved: list[str] = []
    steps = [partition_spec((*stack, moved, rows, columns))]
    each = math.prod(p.shape[:stacked]) // math.prod(pieces)
    for left in (rows, columns) if stacked else ():
        while left:
            moved.append(left.pop())  # the innermost first: what is left keeps its order
            steps.append(partition_spec((*stack, moved, rows, columns)))
    matrices = math.ceil(each / ways(moved)) * ways(moved)
    stored, moves = NamedSharding(mesh, partition_spec(p.spec)), tuple(NamedSharding(mesh, s) for s in steps)
    return MatrixStack(stacked, inner, pieces, matrices, stored, moves)


def muon(
    matrices: Mapping[str, MatrixStack],
    schedule: optax.Schedule,
    *,
    momentum: float,
    weight_decay: float,
    dtype: Any,
    others: optax.GradientTransformation,
) -> optax.GradientTransformation:
    """Muon for the matrices, another optimizer for all other parameters.

    The momentum is the decay of the first moment, its only one; the others have a learning rate of their own.
    """

    def labels(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda at, _: SCOPE if path_name(at) in matrices else "others", params)

    own = optax.chain(
        _orthogonal_momentum(matrices, momentum, dtype),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(schedule),
    )
    return optax.partition({SCOPE: own, "others": others}, labels)


def _orthogonal_momentum(matrices: Mapping[str, MatrixStack], beta: float, dtype: Any) -> optax.GradientTransformation:
    """Nesterov's momentum, each matrix of it orthogonal and scaled to the root mean square of AdamW's updates."""

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros([], jnp.int32), optax.tree.zeros_like(params, dtype=dtype))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        count = state.count + 1
        mu = optax.tree.update_moment(updates, state.mu, beta, 1)
        ahead = optax.tree.bias_correction(mu, beta, count + 1)
        now = optax.tree.bias_correction(updates, beta, count)
        with jax.named_scope(SCOPE):
            directions = jax.tree_util.tree_map_with_path(
                lambda at, m, g: orthogonalize(beta * m + (1 - beta) * g, matrices[path_name(at)]), ahead, now
            )
        return directions, MuonState(count, optax.tree.cast(mu, dtype))

    return optax.GradientTransformation(init, cast(Any, update))


def orthogonalize(x: jax.Array, matrix: MatrixStack) -> jax.Array:
    """Each matrix of a stack with its singular values near one, by five steps of Newton and Schulz, and scaled."""
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
