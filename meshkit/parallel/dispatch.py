"""Which row of which GPU goes to which expert, and the exchange that brings it there and back.

Everything here runs on one GPU's own arrays, inside a `shard_map`. A *row* is one token for one of its k experts; rows
are numbered choice by choice (all first choices, then all second ones), so that where something must be dropped, first
choices win over second ones and earlier tokens over later ones: deterministic, and decided by the sending GPU alone.
A *slot* is a place in the buffer that a GPU sends from; rows lie in it grouped by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import custom_batching, lax
from jaxtyping import Array, Int, Shaped

Axes = tuple[str, ...]


@jax.tree_util.register_dataclass
@dataclass
class Routing:
    """Where the rows of one GPU go.

    Attributes:
        slot: the slot of each row; `Dispatch.slots` for one that is dropped.
        counts: how many rows each GPU along the experts' axes sends to each expert.
    """

    slot: Int[Array, " rows"]
    counts: Int[Array, "ways experts"]


@dataclass(frozen=True)
class Dispatch:
    """The static side of an exchange over the experts' axes.

    Attributes:
        tokens, choices: n tokens on this GPU, each for k experts.
        experts: of the whole layer.
        axes: mesh axes that cut the experts; () where every GPU has all of them.
        ways: GPUs along axes.
        capacity: slots that each GPU has for each expert; None is dropless.
        buffer_rows: of a dropless exchange, rows that a GPU may receive from one other; the worst case drops nothing.
        ragged: exchange exact sizes with `lax.ragged_all_to_all` (GPUs), else padded to the worst case (CPUs).
    """

    tokens: int
    choices: int
    experts: int
    axes: Axes
    ways: int
    capacity: int | None
    buffer_rows: int
    ragged: bool

    @property
    def local_experts(self) -> int:
        """Experts of one GPU."""
        return self.experts // self.ways

    @property
    def slots(self) -> int:
        """Length of the buffer that a GPU sends from."""
        return self.tokens * self.choices if self.capacity is None else self.experts * self.capacity

    @property
    def received_rows(self) -> int:
        """Length of the buffer that a GPU's experts work on: a bound for dropless, exact with a capacity."""
        if self.capacity is not None:
            return self.ways * self.local_experts * self.capacity
        return self.slots if self.ways == 1 else self.ways * self.buffer_rows

    def route(self, choices: Int[Array, "{self.tokens} {self.choices}"]) -> Routing:
        """The routing of expert numbers; communicates the counts (4 bytes a GPU and expert)."""
        expert = choices.T.reshape(-1)
        if self.capacity is not None:
            rank, _, _ = _rank(expert, self.experts)
            slot = jnp.where(rank < self.capacity, expert * self.capacity + rank, self.slots)
            return Routing(slot, jnp.zeros((self.ways, self.experts), jnp.int32))
        if self.buffer_rows < worst_case_rows(self.tokens, self.choices, self.local_experts):
            rank, _, _ = _rank(expert // self.local_experts, self.ways)
            expert = jnp.where(rank < self.buffer_rows, expert, self.experts)
        rank, start, counts = _rank(expert, self.experts + 1)
        slot = jnp.where(expert < self.experts, start[expert] + rank, self.slots)
        counts = counts[: self.experts]
        return Routing(slot, lax.all_gather(counts, self.axes) if self.ways > 1 else counts[None])

    def fill(
        self, routing: Routing, values: Shaped[Array, "{self.tokens} k *rest"]
    ) -> Shaped[Array, "{self.slots} *rest"]:
        """Values by slot, k or 1 of each token; 0 in empty slots."""
        rows = self.tokens * self.choices
        row = jnp.full(self.slots, rows, jnp.int32).at[routing.slot].set(jnp.arange(rows, dtype=jnp.int32), mode="drop")
        if values.shape[1] == 1:
            index, table = jnp.where(row < rows, row % self.tokens, self.tokens), values[:, 0]
        else:
            index, table = row, jnp.swapaxes(values, 0, 1).reshape(rows, *values.shape[2:])
        return table.at[index].get(mode="fill", fill_value=0)

    def read(
        self, routing: Routing, buffer: Shaped[Array, "{self.slots} *rest"]
    ) -> Shaped[Array, "{self.tokens} {self.choices} *rest"]:
        """A buffer by token and choice; 0 where a row was dropped."""
        rows = buffer.at[routing.slot].get(mode="fill", fill_value=0)
        return jnp.swapaxes(rows.reshape(self.choices, self.tokens, *buffer.shape[1:]), 0, 1)

    def to_experts(
        self, routing: Routing, buffer: Shaped[Array, "{self.slots} *rest"]
    ) -> Shaped[Array, "{self.received_rows} *rest"]:
        """The buffers of every GPU, grouped by this GPU's experts, sources in order."""
        if self.ways == 1:
            return buffer
        with jax.named_scope("dispatch"):
            if self.capacity is None:
                there, back = self._slices(routing)
                return self._exchange(buffer, there, back, self.received_rows)
            pieces = buffer.reshape(self.experts, self.capacity, *buffer.shape[1:])
            pieces = lax.all_to_all(pieces, self.axes, split_axis=0, concat_axis=0, tiled=True)
            pieces = pieces.reshape(self.ways, self.local_experts, self.capacity, *buffer.shape[1:])
            return jnp.swapaxes(pieces, 0, 1).reshape(self.received_rows, *buffer.shape[1:])

    def from_experts(
        self, routing: Routing, rows: Shaped[Array, "{self.received_rows} *rest"]
    ) -> Shaped[Array, "{self.slots} *rest"]:
        """The way back of `to_experts`."""
        if self.ways == 1:
            return rows
        with jax.named_scope("combine"):
            if self.capacity is None:
                there, back = self._slices(routing)
                return self._exchange(rows, back, there, self.slots)
            pieces = rows.reshape(self.local_experts, self.ways, self.capacity, *rows.shape[1:])
            pieces = jnp.swapaxes(pieces, 0, 1).reshape(self.experts, self.capacity, *rows.shape[1:])
            pieces = lax.all_to_all(pieces, self.axes, split_axis=0, concat_axis=0, tiled=True)
            return pieces.reshape(self.slots, *rows.shape[1:])

    def group_sizes(self, routing: Routing) -> Int[Array, " {self.local_experts}"]:
        """Rows that each expert of this GPU received (dropless)."""
        return self._mine(jnp.sum(routing.counts, axis=0, keepdims=True))[0]

    def _mine(self, table: jax.Array) -> jax.Array:
        """The columns of this GPU's experts."""
        if self.ways == 1:
            return table
        return lax.dynamic_slice_in_dim(table, lax.axis_index(self.axes) * self.local_experts, self.local_experts, 1)

    def _slices(self, routing: Routing) -> tuple[Slices, Slices]:
        """What this GPU sends to the experts, and what its experts receive.

        One slice for each pair of GPU and expert. On the sending side slices lie by expert; on the receiving side by
        expert, then by source, so that an expert's rows are contiguous without sorting them again.
        """
        me, counts = lax.axis_index(self.axes), routing.counts
        sent = _exclusive_sum(counts, axis=1)
        totals = jnp.sum(counts, axis=0).reshape(self.ways, self.local_experts)
        received = _exclusive_sum(totals, axis=1).reshape(-1) + _exclusive_sum(counts, axis=0)
        shape = (self.ways, self.local_experts)
        there = Slices(sent[me].reshape(shape), counts[me].reshape(shape), received[me].reshape(shape))
        return there, Slices(self._mine(received), self._mine(counts), self._mine(sent))

    def _exchange(self, operand: jax.Array, out: Slices, into: Slices, rows: int) -> jax.Array:
        """`operand`'s slices `out` sent, and `rows` rows with the slices `into` received; 0 elsewhere."""
        result = jnp.zeros((rows, *operand.shape[1:]), operand.dtype)
        if self.ragged:
            offsets = (o.reshape(-1) for o in (out.here, out.sizes, out.there, into.sizes))
            return one_by_one(partial(lax.ragged_all_to_all, axis_name=self.axes))(operand, result, *offsets)
        padded = operand.at[out.rows(self.buffer_rows)].get(mode="fill", fill_value=0)
        padded = lax.all_to_all(padded, self.axes, split_axis=0, concat_axis=0, tiled=True)
        return result.at[into.rows(self.buffer_rows)].set(padded, mode="drop")


@dataclass(frozen=True)
class Slices:
    """Contiguous rows of a buffer, for each peer several; all int32 [ways, slices].

    Attributes:
        here: where each begins in this GPU's buffer.
        sizes: rows of each.
        there: where each begins in the peer's buffer.
    """

    here: jax.Array
    sizes: jax.Array
    there: jax.Array

    def rows(self, most: int) -> jax.Array:
        """int32 [ways, most]: the rows of the slices of each peer, one after the other; out of bounds beyond them."""
        ends = jnp.cumsum(self.sizes, axis=1)
        i = jnp.arange(most, dtype=jnp.int32)
        inside = jnp.sum(i[None, :, None] >= ends[:, None, :], axis=-1)  # the slice of the i-th row
        begin = jnp.take_along_axis(self.here - (ends - self.sizes), inside, axis=1, mode="clip")
        return jnp.where(i < ends[:, -1:], begin + i, jnp.iinfo(jnp.int32).max)


def one_by_one(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """fn, which `vmap` calls once for each element: for operations that jax cannot map over every dim.

    A map over the replicas of a mesh axis has one element on each GPU.
    """

    @custom_batching.custom_vmap
    def mapped(*arrays: jax.Array) -> jax.Array:
        return fn(*arrays)

    @mapped.def_vmap
    def _(axis_size: int, in_batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        del axis_size  # of all GPUs
        count = next(a.shape[0] for a, batched in zip(arrays, in_batched) if batched)
        calls = ([a[i] if batched else a for a, batched in zip(arrays, in_batched)] for i in range(count))
        return jnp.stack([mapped(*call) for call in calls]), True

    return mapped


def worst_case_rows(tokens: int, choices: int, local_experts: int) -> int:
    """Rows that one GPU may have for another: a token goes to an expert at most once."""
    return tokens * min(choices, local_experts)


def _rank(group: jax.Array, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each row's rank in its group, each group's first place, each group's size, from int [rows] group numbers."""
    order = jnp.argsort(group, stable=True)
    sizes = jnp.zeros(groups, jnp.int32).at[group].add(1)
    start = _exclusive_sum(sizes, axis=0)
    ranks = jnp.arange(group.shape[0], dtype=jnp.int32) - start[group[order]]
    return jnp.zeros_like(ranks).at[order].set(ranks), start, sizes


def _exclusive_sum(x: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(x, axis=axis) - x
