"""Exchange rows between GPUs: each row goes to the GPU of one expert, and a result comes back to its token.

`Dispatch` exchanges over all axes of the experts at once. `HierarchicalDispatch` exchanges in two stages:

    copies of tokens -> outer axis (network) -> rows -> inner axis (NVLink) -> experts -> back through both

In the first stage a token goes once to each block of experts that has one of its choices, where a block is what the
GPUs along the inner axis hold. It goes to the GPU with the sender's own place along the inner axis. That GPU sends one
row to each chosen expert of its block. On the way back it adds up the weighted outputs of these experts, so one row for
each token and block crosses the outer axis. The sum is rounded to the dtype of the rows.

The first stage always moves fixed buffers by a plain all-to-all: XLA would gather the rows of a ragged all-to-all on
all hosts. Without a factor that limits it, the buffer to each block has room for all tokens of a GPU: none is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import custom_batching, lax
from jaxtyping import Array, Bool, Float, Int, Shaped

Axes = tuple[str, ...]
# Slices of a ragged exchange for each pair of GPUs. XLA's kernel runs one block of 128 threads for each slice, and a
# block carries 2 GB/s. On 16 GPUs (GB200) the kernel was 17.8 times as fast with 32 slices as with one slice
# (marin-community/marin#8077). On 64 GPUs it was as fast with 64 slices as with 32, and slower with 16 (marin#8317).
SLICES = 32


@jax.tree_util.register_dataclass
@dataclass
class Routing:
    """Where the rows of one GPU go.

    Attributes:
        slot: the slot of each row; `Dispatch.slots` for a row that is dropped.
        counts: how many rows each GPU along the experts' axes sends to each expert.
    """

    slot: Int[Array, " rows"]
    counts: Int[Array, "ways experts"]


@dataclass(frozen=True)
class Dispatch:
    """The static facts of an exchange over the experts' axes: sizes and axes.

    Attributes:
        tokens, choices: tokens on this GPU, and experts for each of them (k).
        experts: number of experts of the whole layer.
        axes: mesh axes that cut the experts; () where every GPU has all of them.
        ways: GPUs along axes.
        capacity: slots that each GPU has for each expert; None is dropless.
        buffer_rows: the most rows that one GPU may receive from another in a dropless exchange.
        ragged: whether `lax.ragged_all_to_all` exchanges only existing rows (GPUs); otherwise the rows are padded to
            `buffer_rows` (CPUs).
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
        if self.capacity is not None:
            return self.experts * self.capacity
        rows = self.tokens * self.choices
        return rows if self.ways == 1 else min(rows, self.ways * self.buffer_rows)

    @property
    def drops(self) -> bool:
        """Whether rows may be dropped."""
        if self.capacity is not None:
            return self.capacity < self.tokens
        return self.buffer_rows < worst_case_rows(self.tokens, self.choices, self.local_experts)

    @property
    def received_rows(self) -> int:
        """Length of the buffer that a GPU's experts read: exact with a capacity, otherwise the most that may arrive."""
        if self.capacity is not None:
            return self.ways * self.local_experts * self.capacity
        return self.slots if self.ways == 1 else self.ways * self.buffer_rows

    def route(self, choices: Int[Array, "{self.tokens} {self.choices}"], weights: jax.Array | None = None) -> Routing:
        """Return where each row goes. Dropless GPUs exchange counts (4 bytes per GPU and expert).

        Args:
            choices: numbers of experts; the number of experts stands for no choice.
            weights: not used; `HierarchicalDispatch` sends them.
        """
        del weights
        expert = choices.T.reshape(-1)
        if self.capacity is not None:
            rank, _, _ = _rank(expert, self.experts + 1)
            slot = jnp.where(
                (rank < self.capacity) & (expert < self.experts), expert * self.capacity + rank, self.slots
            )
            return Routing(slot, jnp.zeros((self.ways, self.experts), jnp.int32))
        if self.drops:
            rank, _, _ = _rank(expert // self.local_experts, self.ways + 1)
            expert = jnp.where(rank < self.buffer_rows, expert, self.experts)
        rank, start, counts = _rank(expert, self.experts + 1)
        slot = jnp.where(expert < self.experts, start[expert] + rank, self.slots)
        mine = counts[: self.experts]
        return Routing(slot, lax.all_gather(mine, self.axes) if self.ways > 1 else mine[None])

    def send(
        self,
        routing: Routing,
        x: Float[Array, "{self.tokens} embed"],
        weights: Float[Array, "{self.tokens} {self.choices}"] | None = None,
    ) -> Float[Array, "{self.received_rows} embed"]:
        """Send each token to its experts, times the weight of the choice if there are weights."""
        values = x[:, None]
        if weights is not None:
            values = (weights[..., None] * values.astype(jnp.float32)).astype(x.dtype)
        return self.to_experts(routing, self.fill(routing, values))

    def collect(
        self,
        routing: Routing,
        rows: Float[Array, "{self.received_rows} embed"],
        weights: Float[Array, "{self.tokens} {self.choices}"] | None = None,
    ) -> Float[Array, "{self.tokens} embed"]:
        """Return the sum in fp32 of the rows that come back to each token, times the weights if there are any."""
        values = self.each(routing, rows).astype(jnp.float32)
        return jnp.sum(values if weights is None else weights[..., None] * values, axis=1)

    def each(
        self, routing: Routing, rows: Shaped[Array, "{self.received_rows} *rest"]
    ) -> Shaped[Array, "{self.tokens} {self.choices} *rest"]:
        """Return the value that comes back for each choice of each token; 0 where a row was dropped."""
        return self.read(routing, self.from_experts(routing, rows))

    def kept(self, routing: Routing) -> Bool[Array, "{self.tokens} {self.choices}"]:
        """Return whether each choice has a slot."""
        return (routing.slot < self.slots).reshape(self.choices, self.tokens).T

    def fill(
        self, routing: Routing, values: Shaped[Array, "{self.tokens} k *rest"]
    ) -> Shaped[Array, "{self.slots} *rest"]:
        """Return the buffer to send: the values (k or 1 per token) in their slots, 0 in empty slots."""
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
        """Return a buffer's values by token and choice; 0 where a row was dropped."""
        rows = buffer.at[routing.slot].get(mode="fill", fill_value=0)
        return jnp.swapaxes(rows.reshape(self.choices, self.tokens, *buffer.shape[1:]), 0, 1)

    def to_experts(
        self, routing: Routing, buffer: Shaped[Array, "{self.slots} *rest"]
    ) -> Shaped[Array, "{self.received_rows} *rest"]:
        """Send the buffer's rows to their experts. Return the rows received, by expert, then by sending GPU."""
        with jax.named_scope("dispatch"):
            return self._move(routing, buffer, back=False)

    def from_experts(
        self, routing: Routing, rows: Shaped[Array, "{self.received_rows} *rest"]
    ) -> Shaped[Array, "{self.slots} *rest"]:
        """Send rows back to the GPUs that sent them in `to_experts`. Return the buffer of this GPU, by slot."""
        with jax.named_scope("combine"):
            return self._move(routing, rows, back=True)

    def _move(self, routing: Routing, rows: jax.Array, *, back: bool) -> jax.Array:
        """Exchange rows in order of slots for received rows in order of experts; with `back`, the other way round."""
        if self.ways == 1:
            return rows
        if self.capacity is None:
            sent, received = self._slices(routing)
            out, into, size = (received, sent, self.slots) if back else (sent, received, self.received_rows)
            return self._exchange(rows, out, into, size)
        by_slot, by_expert = (self.ways, self.local_experts), (self.local_experts, self.ways)
        pieces = rows.reshape(*(by_expert if back else by_slot), self.capacity, *rows.shape[1:])
        pieces = lax.all_to_all(pieces, self.axes, split_axis=int(back), concat_axis=int(not back))
        return pieces.reshape(rows.shape)

    def group_sizes(self, routing: Routing) -> Int[Array, " {self.local_experts}"]:
        """Return the number of rows that each expert of this GPU received (dropless)."""
        return self._mine(jnp.sum(routing.counts, axis=0, keepdims=True))[0]

    def _mine(self, table: jax.Array) -> jax.Array:
        """Return the columns of a table [ways, experts] for this GPU's experts."""
        if self.ways == 1:
            return table
        return lax.dynamic_slice_in_dim(table, lax.axis_index(self.axes) * self.local_experts, self.local_experts, 1)

    def _slices(self, routing: Routing) -> tuple[Slices, Slices]:
        """Return the slices that this GPU sends to the experts, and those that its experts receive.

        There is one slice for each pair of GPU and expert. The sender's buffer has its slices in the order of experts.
        The receiver's buffer has them in the order of experts, then of senders, so that the rows of an expert are
        contiguous without a further sort.
        """
        me, counts = lax.axis_index(self.axes), routing.counts
        sent = _exclusive_sum(counts, axis=1)
        totals = jnp.sum(counts, axis=0).reshape(self.ways, self.local_experts)
        received = _exclusive_sum(totals, axis=1).reshape(-1) + _exclusive_sum(counts, axis=0)
        shape = (self.ways, self.local_experts)
        there = Slices(sent[me].reshape(shape), counts[me].reshape(shape), received[me].reshape(shape))
        return there, Slices(self._mine(received), self._mine(counts), self._mine(sent))

    def _exchange(self, operand: jax.Array, out: Slices, into: Slices, rows: int) -> jax.Array:
        """Send the slices `out` of `operand`. Return `rows` rows with the slices `into` received, and 0 elsewhere."""
        result = jnp.zeros((rows, *operand.shape[1:]), operand.dtype)
        if self.ragged:
            pieces = -(-SLICES // self.local_experts)
            out, into = out.cut(pieces), into.cut(pieces)
            offsets = (o.reshape(-1) for o in (out.here, out.sizes, out.there, into.sizes))
            return one_by_one(partial(lax.ragged_all_to_all, axis_name=self.axes))(operand, result, *offsets)
        padded = operand.at[out.rows(self.buffer_rows)].get(mode="fill", fill_value=0)
        padded = lax.all_to_all(padded, self.axes, split_axis=0, concat_axis=0, tiled=True)
        return result.at[into.rows(self.buffer_rows)].set(padded, mode="drop")


@jax.tree_util.register_dataclass
@dataclass
class HierarchicalRouting:
    """Where the rows of one GPU go in both stages, and the weights of the rows that it passes on."""

    outer: Routing
    inner: Routing
    weights: Float[Array, "received k"]


@dataclass(frozen=True)
class HierarchicalDispatch:
    """The static facts of an exchange in two stages; its methods are those of `Dispatch`.

    Attributes:
        outer: exchange of tokens between blocks of experts; its experts are the blocks.
        inner: exchange of received tokens inside a block.
    """

    outer: Dispatch
    inner: Dispatch

    @property
    def capacity(self) -> int | None:
        """Slots that each GPU has for each expert of its block; None is dropless."""
        return self.inner.capacity

    @property
    def local_experts(self) -> int:
        """Experts of one GPU."""
        return self.inner.local_experts

    def route(self, choices: Int[Array, "tokens k"], weights: Float[Array, "tokens k"]) -> HierarchicalRouting:
        """Return where the rows go. Choices and weights travel to the blocks (8 bytes per choice)."""
        to_blocks = self.outer.route(self._blocks(choices))
        sent = jnp.concatenate([choices + 1, lax.bitcast_convert_type(weights, jnp.int32)], axis=1)  # 0: an empty slot
        choices, weights = jnp.split(self.outer.to_experts(to_blocks, self.outer.fill(to_blocks, sent[:, None])), 2, 1)
        local = choices - 1 - lax.axis_index(self.outer.axes) * self.inner.experts
        local = jnp.where((local >= 0) & (local < self.inner.experts), local, self.inner.experts)
        return HierarchicalRouting(to_blocks, self.inner.route(local), lax.bitcast_convert_type(weights, jnp.float32))

    def send(self, routing: HierarchicalRouting, x: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Send each token to its experts, times the weight of the choice if there are weights."""
        arrived = self.outer.send(routing.outer, x)
        return self.inner.send(routing.inner, arrived, None if weights is None else routing.weights)

    def collect(self, routing: HierarchicalRouting, rows: jax.Array, weights: jax.Array | None = None) -> jax.Array:
        """Return the sum in fp32 of the rows that come back to each token, times the weights if there are any."""
        of_block = self.inner.collect(routing.inner, rows, None if weights is None else routing.weights)
        return self.outer.collect(routing.outer, of_block.astype(rows.dtype))

    def each(self, routing: HierarchicalRouting, rows: Shaped[Array, " rows"]) -> Float[Array, "tokens k"]:
        """Return the number that comes back for each choice of each token; 0 where a row was dropped."""
        return self.outer.collect(routing.outer, self.inner.each(routing.inner, rows))

    def kept(self, routing: HierarchicalRouting) -> Bool[Array, "tokens k"]:
        """Return whether each choice has a slot in both stages; if rows may be dropped, the blocks report it."""
        if not (self.outer.drops or self.inner.drops):
            return jnp.ones((self.outer.tokens, self.inner.choices), bool)
        of_block = self.inner.kept(routing.inner).astype(jnp.int8)
        return jnp.any(self.outer.each(routing.outer, of_block), axis=1)

    def group_sizes(self, routing: HierarchicalRouting) -> Int[Array, " experts"]:
        """Return the number of rows that each expert of this GPU received (dropless)."""
        return self.inner.group_sizes(routing.inner)

    def _blocks(self, choices: Int[Array, "tokens k"]) -> Int[Array, "tokens {self.outer.choices}"]:
        """Return the different blocks of each token's choices in their order; the number of blocks fills the rest."""
        block = choices // self.inner.experts
        same = block[:, :, None] == block[:, None, :]
        first = ~jnp.any(jnp.tril(same, -1), axis=2)
        place = jnp.where(first, jnp.cumsum(first, axis=1) - 1, -1)
        column = jnp.arange(self.outer.choices, dtype=place.dtype)
        return jnp.min(jnp.where(place[..., None] == column, block[..., None], self.outer.experts), axis=1)


@dataclass(frozen=True)
class Slices:
    """Slices of a buffer, several for each peer; a slice is a run of rows. All arrays are int32 [ways, slices].

    Attributes:
        here: where each slice begins in this GPU's buffer.
        sizes: rows of each slice.
        there: where each slice begins in the peer's buffer.
    """

    here: jax.Array
    sizes: jax.Array
    there: jax.Array

    def cut(self, pieces: int) -> Slices:
        """Cut each slice into `pieces` slices, whose sizes differ by one row at most."""
        edges = self.sizes[..., None] * jnp.arange(pieces + 1, dtype=jnp.int32) // pieces
        begins, sizes = edges[..., :-1], jnp.diff(edges, axis=-1)
        ways = self.sizes.shape[0]
        here, there = (o[..., None] + begins for o in (self.here, self.there))
        return Slices(here.reshape(ways, -1), sizes.reshape(ways, -1), there.reshape(ways, -1))

    def rows(self, most: int) -> jax.Array:
        """Return int32 [ways, most]: row numbers of each peer's slices, in order, then padding beyond all rows."""
        ends = jnp.cumsum(self.sizes, axis=1)
        i = jnp.arange(most, dtype=jnp.int32)
        inside = jnp.sum(i[None, :, None] >= ends[:, None, :], axis=-1)  # the slice of the i-th row
        begin = jnp.take_along_axis(self.here - (ends - self.sizes), inside, axis=1, mode="clip")
        return jnp.where(i < ends[:, -1:], begin + i, jnp.iinfo(jnp.int32).max)


def one_by_one(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Wrap fn so that `vmap` calls it once for each element, for operations that jax cannot map over every dim.

    A `vmap` over the replicas of a mesh axis has one element on each GPU.
    """

    @custom_batching.custom_vmap
    def mapped(*arrays: jax.Array) -> jax.Array:
        return fn(*arrays)

    @mapped.def_vmap
    def _(_axis_size: int, in_batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        count = next(a.shape[0] for a, batched in zip(arrays, in_batched) if batched)
        calls = ([a[i] if batched else a for a, batched in zip(arrays, in_batched)] for i in range(count))
        return jnp.stack([mapped(*call) for call in calls]), True

    return mapped


def worst_case_rows(tokens: int, choices: int, local_experts: int) -> int:
    """Return the most rows that one GPU may send to another: a token goes to an expert at most once."""
    return tokens * min(choices, local_experts)


def _rank(group: jax.Array, groups: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return each row's rank in its group, and each group's first place and size, from the rows' group numbers."""
    order = jnp.argsort(group, stable=True)
    sizes = jnp.zeros(groups, jnp.int32).at[group].add(1)
    start = _exclusive_sum(sizes, axis=0)
    ranks = jnp.arange(group.shape[0], dtype=jnp.int32) - start[group[order]]
    return jnp.zeros_like(ranks).at[order].set(ranks), start, sizes


def _exclusive_sum(x: jax.Array, axis: int) -> jax.Array:
    return jnp.cumsum(x, axis=axis) - x
