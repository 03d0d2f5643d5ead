"""The collectives that bench measures: what runs on the devices, and what numpy says must come out.

Sizes follow nccl-tests: the larger of the buffers a GPU gives and takes. Where a buffer is cut into one piece per GPU
(all-gather, reduce-scatter, all-to-all, scatter, gather), `count` is that of a piece.

XLA has no rooted collective but broadcast, and broadcast on NVIDIA GPUs only. The others are emulated by the
collective that `emulated` names, which may move more bytes than the real one would: nccl-tests' factor of the rooted
one is kept, so their bus bandwidth says what a program gets, not what the link does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshkit.predict.algorithms import wire_factor

# Operands repeat a table of a prime length, so that no two pieces of a buffer are alike; every rank starts elsewhere in
# it. Small integers: a sum over any number of GPUs is exact in float32, and results are compared for equality.
_PERIOD = 8191
_RANK_SHIFT = 577
_TABLE = np.random.default_rng(0).integers(-30, 31, _PERIOD).astype(np.float32)

COPY, BARRIER = "copy", "barrier"


@dataclass(frozen=True)
class Place:
    """Where one device stands in its group."""

    members: np.ndarray
    """Ranks of the group, in the order of the axis."""
    place: int
    """Position of the device among them."""
    piece: int
    """Elements of a piece."""


@dataclass(frozen=True)
class Kind:
    """One collective."""

    name: str
    """HLO opcode; `scatter`, `gather`, `reduce`, `barrier` and `copy` are not opcodes of a collective."""
    run: Callable[[jax.Array, str, int], jax.Array]
    """Maps (operand of one device, mesh axis, group size) to its result."""
    expected: Callable[[Place, np.ndarray], np.ndarray]
    """Maps (place, index array) to the result at these indices."""
    is_split: bool = False
    """Whether the size is that of n pieces."""
    gives: str = "whole"
    """The operand of one device, where cut: `whole` (n pieces) or `piece`."""
    takes: str = "whole"
    """The result of one device."""
    emulated: str | None = None
    """The collective that stands in for it; None where XLA has it."""
    root_only: bool = False
    """Whether only the first member's result means anything."""

    @property
    def is_barrier(self) -> bool:
        """Whether it moves nothing: one element, whatever the size."""
        return self.name == BARRIER

    def bus_factor(self, n: int) -> float | None:
        """Bus bandwidth over algorithm bandwidth, as nccl-tests has it; None where neither means anything."""
        if self.is_barrier:
            return None
        return 1.0 if self.name in ("reduce", COPY) else wire_factor(self.name, n)


def operand_values(rank: int | np.ndarray, index: np.ndarray) -> np.ndarray:
    """The operand of a rank at these indices, with numpy."""
    return _TABLE[(index % _PERIOD + np.asarray(rank) * _RANK_SHIFT) % _PERIOD]


def make_operand(rank: jax.Array, elements: int) -> jax.Array:
    """The same, of one device, made there: large operands never pass through the host."""
    index = lax.iota(jnp.int32, elements) % _PERIOD
    return jnp.asarray(_TABLE)[(index + rank % _PERIOD * _RANK_SHIFT % _PERIOD) % _PERIOD]


def kinds(platform: str) -> tuple[Kind, ...]:
    """Every collective over a mesh axis, as this platform (`cpu`, `gpu`) runs it."""
    if platform == "gpu":
        return _KINDS
    by_sum = replace(_BROADCAST, run=_broadcast_by_sum, emulated="all-reduce")
    return tuple(by_sum if kind is _BROADCAST else kind for kind in _KINDS)


def _sum(p: Place, index: np.ndarray) -> np.ndarray:
    return operand_values(p.members[:, None], index[None]).sum(0) if len(index) else np.zeros(0, np.float32)


def _pieces_of_all(p: Place, index: np.ndarray) -> np.ndarray:
    return operand_values(p.members[index // p.piece], index % p.piece)


def _broadcast_by_sum(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.psum(jnp.where(lax.axis_index(axis) == 0, x, 0), axis)


def _all_to_all(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.all_to_all(x.reshape(n, -1), axis, 0, 0)


def _shift(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


def _all_gather(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.all_gather(x, axis, tiled=True)


def _own(p: Place, index: np.ndarray) -> np.ndarray:
    return operand_values(p.members[p.place], index)


_BROADCAST = Kind(
    "collective-broadcast",
    lambda x, axis, n: lax.pbroadcast(x, (axis,), 0),
    lambda p, index: operand_values(p.members[0], index),
)
_KINDS = (
    Kind("collective-permute", _shift, lambda p, index: operand_values(p.members[p.place - 1], index)),
    _BROADCAST,
    Kind("all-reduce", lambda x, axis, n: lax.psum(x, axis), _sum),
    Kind("all-gather", _all_gather, _pieces_of_all, is_split=True, gives="piece"),
    Kind(
        "reduce-scatter",
        lambda x, axis, n: lax.psum_scatter(x, axis, tiled=True),
        lambda p, index: _sum(p, p.place * p.piece + index),
        is_split=True,
        takes="piece",
    ),
    Kind(
        "all-to-all",
        lambda x, axis, n: _all_to_all(x, axis, n).reshape(-1),
        lambda p, index: operand_values(p.members[index // p.piece], p.place * p.piece + index % p.piece),
        is_split=True,
    ),
    Kind("reduce", lambda x, axis, n: lax.psum(x, axis), _sum, emulated="all-reduce", root_only=True),
    Kind(
        "scatter",
        lambda x, axis, n: _all_to_all(x, axis, n)[0],
        lambda p, index: operand_values(p.members[0], p.place * p.piece + index),
        is_split=True,
        takes="piece",
        emulated="all-to-all",
    ),
    Kind("gather", _all_gather, _pieces_of_all, is_split=True, gives="piece", emulated="all-gather", root_only=True),
    Kind(BARRIER, lambda x, axis, n: lax.psum(x, axis), _sum, emulated="all-reduce"),
)
COPY_KIND = Kind(COPY, lambda x, axis, n: jnp.copy(x), _own)
