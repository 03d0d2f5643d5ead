"""Expert parallelism: tokens travel to the GPUs that hold their experts, and back.

Experts are cut over the mesh axes of `act_experts`. These axes must cut the tokens as well: they are part of
`act_batch`, so outside of the experts they act as data axes. A layer takes these steps:

    routing -> dispatch (all-to-all) -> grouped SwiGLU -> combine (all-to-all) -> sum over the k choices

They are written for each GPU's own shards (`shard_map`), with a custom backward pass (`custom_vjp`). The backward pass
reads the experts' activations on the GPUs that computed them, and reduces a weight's gradient over the token axes only.
A recomputed forward pass needs no second combine.

| exchanges per layer, of [slots, embed] | dispatch | combine | small (4 bytes per row) |
|---|---|---|---|
| forward | 1 | 1 | |
| recomputed forward (remat) | 1 | | |
| backward | 1 (gradients of outputs) | 1 (gradients of inputs) | 1 (gradients of routing weights) |

**Dropless** (no capacity): on GPUs `lax.ragged_all_to_all` moves only the rows that exist. Its buffers have static
sizes, though, for the worst case. If `ways` GPUs share the experts and each has `tokens` tokens, a GPU's buffer has
`ways x tokens x min(k, experts per GPU)` rows. `buffer_factor` limits it to that many times the rows of an even load.
Each sender may then fill 1 / ways of the buffer, and its rows beyond that are dropped. A pair of GPUs cuts its rows
into at least `SLICES` slices, for the speed of XLA's kernel (docs/concepts/network.md). XLA:CPU has no ragged
all-to-all. There a device pads its rows for another device to the most that it may send, with the same results.
**Capacity**: each sending GPU has `ceil(capacity_factor x tokens x k / experts)` slots for each expert (Lepikhin et
al., 2021; Fedus et al., 2022). A plain all-to-all moves all slots, and rows that find no slot are dropped.

A *row* is one token for one of its k experts. Rows are numbered choice by choice (all first choices, then all second
choices). If rows must be dropped, first choices are kept before second choices, and earlier tokens before later ones.
The sending GPU decides this without the others. A dropped row adds nothing to its token. A *slot* is a place in the
buffer that a GPU sends from, where rows are grouped by expert.

**Hierarchical** (`groups` is not None): of the two axes of the experts the outer one crosses the network and the inner
one is NVLink. A token crosses the network once for each block of experts that it chooses from, and one sum comes back
(`meshkit.parallel.exchange`). Capacity and buffer factors apply to both stages, each relative to its own even load.

| per layer | outer axis, of [blocks x slots, embed] | inner axis | small ones over the outer axis, bytes per slot |
|---|---|---|---|
| forward | 1 dispatch, 1 combine | 1 dispatch, 1 combine | 8 k (choices, weights), k more if rows may be dropped |
| recomputed forward | 1 dispatch | 1 dispatch | 8 k |
| backward | 1 dispatch, 1 combine | 1 dispatch, 1 combine, 1 of 4 bytes per row | 4 k (gradients of the weights) |

Tensor parallelism cuts `act_mlp` inside of each expert. All GPUs along its axis then exchange the same tokens.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from meshkit.errors import ConfigError
from meshkit.parallel.exchange import (
    Axes,
    Dispatch,
    HierarchicalDispatch,
    one_by_one,
    worst_case_rows,
)
from meshkit.sharding.constrain import (
    Scope,
    current_scope,
    manual_here,
    mesh_here,
    partition_spec,
    shard_map_here,
    sharding_scope,
)

Tokens = Float[Array, "batch length embed"]
Wide = Float[Array, "experts embed mlp"]
Kernels = tuple[Wide, Wide, Float[Array, "experts mlp embed"]]  # gate, up and down
Narrow = Float[Array, "experts mlp"]
Biases = tuple[Narrow, Narrow, Float[Array, "experts embed"]]  # of gate, up and down
GATHERED = "gathered_experts"  # the name of the gathered kernels, which a policy should not save


def silu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up (Shazeer, 2020)."""
    return jax.nn.silu(gate) * up


def expert_layer(
    x: Tokens,
    weights: Float[Array, "batch length k"],
    choices: Int[Array, "batch length k"],
    kernels: Kernels,
    *,
    capacity_factor: float | None = None,
    buffer_factor: float | None = None,
    groups: tuple[int, int] | None = None,
    parts: int = 1,
    saved_name: str | None = None,
    biases: Biases | tuple[()] = (),
    activation: Callable[[jax.Array, jax.Array], jax.Array] = silu_gate,
) -> tuple[Tokens, Bool[Array, "batch length k"]]:
    """Return the output of a layer of experts: for each token, the weighted sum of its chosen experts' outputs.

    An expert computes down(activation(gate(x), up(x))). Outside of a sharding scope the layer runs on one device,
    without an exchange.

    Args:
        x: tokens; the layer computes in their dtype.
        weights: fp32; a weight of exactly 0 gets no gradient.
        choices: numbers of experts, all different for one token.
        kernels: of gate, up and down; each gradient has the dtype of its kernel.
        capacity_factor: slots of an expert, as a multiple of its rows under an even load; None is dropless.
        buffer_factor: rows of a dropless buffer, as a multiple of its rows under an even load; None: the worst case.
        groups: for a hierarchical dispatch, the number of groups of neighbouring experts and from how many of them a
            token may choose, (1, 1) if it may choose any. None dispatches directly.
        parts: exchanges a GPU's tokens in so many parts, each with its share of the slots. Exchanges of one part can
            then run during matmuls of another.
        saved_name: a further name by which `jax.checkpoint` policies find the outputs of gate and up; their own names
            are `gate` and `up`.
        biases: of gate, up and down, or none; each gradient has the dtype of its bias.
        activation: (output of gate, output of up) -> input of down; it has no parameters of its own.

    Returns:
        The layer's output in the dtype of x, and whether each choice was kept.

    Raises:
        ConfigError: an axis cuts the experts but not the tokens, the axes do not divide a size, or a hierarchical
            dispatch lacks an axis across NVLink domains or one inside them.
    """
    layout = ExchangeLayout.of(current_scope())
    layout.check(x.shape, kernels[0].shape)
    batch, length, _ = x.shape
    tokens, k, ways = batch * length // layout.pieces(layout.tokens), choices.shape[-1], layout.size(layout.experts)
    experts = kernels[0].shape[0] * ways // layout.pieces(layout.experts)
    if tokens % parts:
        message = f"the {tokens} tokens of a GPU cannot be exchanged in {parts} equal parts."
        raise ConfigError(message, hint=f"dispatch_parts = {math.gcd(tokens, parts)}")
    dispatch = _make_dispatch(layout, tokens // parts, k, experts, capacity_factor, buffer_factor, groups)
    parameters = kernels + biases
    casts = tuple(
        layout.gather(lax.stop_gradient(w.astype(x.dtype)), spec)
        for w, spec in zip(parameters, layout.kernels() + layout.biases())
    )
    with jax.named_scope("experts"):
        return _experts(x, weights, choices, parameters, casts, _Layer(layout, dispatch, saved_name, activation, parts))


def _make_dispatch(
    layout: ExchangeLayout,
    tokens: int,
    k: int,
    experts: int,
    capacity_factor: float | None,
    buffer_factor: float | None,
    groups: tuple[int, int] | None,
) -> Dispatch | HierarchicalDispatch:
    """Return the exchange of a layer, from one GPU's number of tokens and the layer's number of experts."""

    def one_level(rows: int, experts: int, axes: Axes) -> Dispatch:
        """Return the exchange of `rows` tokens over axes that cut `experts`; an even load is `tokens` x k rows."""
        ways = layout.size(axes)
        worst = worst_case_rows(rows, k, experts // ways)
        capacity = None if capacity_factor is None else math.ceil(capacity_factor * tokens * k / experts)
        bound = worst if buffer_factor is None else min(worst, math.ceil(buffer_factor * tokens * k / ways))
        return Dispatch(rows, k, experts, axes, ways, capacity, bound, layout.ragged)

    if groups is None or layout.size(layout.experts) == 1:
        return one_level(tokens, experts, layout.experts)
    outer, inner = layout.two_levels()
    blocks, factor, (count, of_token) = layout.size(outer), capacity_factor or buffer_factor, groups
    straddles = max(blocks, count) % min(blocks, count) > 0  # A group may begin inside a block.
    most = min(k, blocks, of_token * (-(-blocks // count) + straddles))
    room = tokens if factor is None else min(tokens, math.ceil(factor * tokens * most / blocks))
    between = Dispatch(tokens, most, blocks, outer, blocks, room, 0, layout.ragged)
    return HierarchicalDispatch(between, one_level(between.received_rows, experts // blocks, inner))


@dataclass(frozen=True)
class ExchangeLayout:
    """The mesh axes that cut a layer's arrays, from the sharding rules; without a mesh there are none.

    In a stage of a pipeline some axes are manual already, and arrays arrive as the pieces of one GPU along them. The
    pipeline gathers the kernels over these axes before the stage, and reduces their gradients after it.

    Attributes:
        batch, length: axes that cut the tokens.
        residual_length: axes that cut the length of the layer's output.
        experts, mlp: axes that cut the experts from each other, and axes that cut every single expert.
        scatter: axes that cut the embed dim of the kernels' gradients (FSDP).
        manual: axes over which the arrays are cut already.
    """

    scope: Scope | None
    batch: Axes = ()
    length: Axes = ()
    residual_length: Axes = ()
    experts: Axes = ()
    mlp: Axes = ()
    scatter: Axes = ()
    manual: frozenset[str] = frozenset()

    @classmethod
    def of(cls, scope: Scope | None) -> ExchangeLayout:
        if scope is None:
            return cls(None)
        names = ("act_batch", "act_length", "act_residual_length", "act_experts", "act_mlp")
        rules = scope.whole or scope.rules
        # Each name is resolved on its own, since the axis of the experts cuts tokens too.
        batch, length, residual, experts, mlp = (rules.spec_for((name,), kind="activations")[0] for name in names)
        (embed,) = scope.rules.spec_for(("embed",), kind="gradients")
        stray = [a for a in experts if a not in batch + length]
        if stray:
            raise ConfigError(
                f"mesh axis '{stray[0]}' cuts the experts (act_experts), but not the tokens: each of its "
                f"{scope.mesh.shape[stray[0]]} GPUs would send the same ones.",
                hint=f"act_batch = {[*batch, *stray]}",
            )
        inner = tuple(a for a in mlp if a not in batch + length)
        scatter = tuple(a for a in embed if a in batch + length and a not in experts)
        return cls(scope, batch, length, residual, experts, inner, scatter, manual_here())

    @property
    def tokens(self) -> Axes:
        """Every axis that cuts tokens."""
        return self.batch + self.length

    @property
    def ragged(self) -> bool:
        """Whether the target has a ragged all-to-all: all GPUs do, also those that only the cluster file describes."""
        return self.scope is not None and self.scope.compute_capability is not None

    @property
    def splits_length(self) -> bool:
        """Whether the sum over `mlp` can leave each GPU its own part of the length (sequence parallelism)."""
        return bool(self.mlp) and self.residual_length == self.length + self.mlp

    def size(self, axes: Axes) -> int:
        """Return the number of GPUs along these axes."""
        return math.prod(self.scope.mesh.shape[a] for a in axes) if self.scope else 1

    def pieces(self, axes: Axes) -> int:
        """Return how many pieces these axes still cut an array into; the manual axes have already cut it."""
        return self.size(self._left(axes))

    def check(self, x: Sequence[int], gate: Sequence[int]) -> None:
        """Refuse sizes that the axes do not divide: shards have one shape on all GPUs."""
        length = self.residual_length if self.splits_length else self.length
        dims = (("batch", x[0], self.batch), ("length", x[1], length), ("experts", gate[0], self.experts))
        for name, size, axes in (*dims, ("embed", gate[1], self.scatter), ("mlp", gate[2], self.mlp)):
            ways = self.pieces(axes)
            if size % ways:
                along = ", ".join(axes)
                raise ConfigError(
                    f"{name} = {size} of an expert layer cannot be cut evenly over {ways} GPUs ({along}).",
                    hint=f"a multiple of {ways}",
                )

    def two_levels(self) -> tuple[Axes, Axes]:
        """Return the axis of the experts that crosses NVLink domains, and the axis inside them.

        Raises:
            ConfigError: there are not two such axes. Only described devices know their domains.
        """
        assert self.scope is not None
        devices, names = self.scope.mesh.devices, self.scope.mesh.axis_names
        sizes = [devices.shape[names.index(a)] for a in self.experts]
        domains: list[int] = []
        for axis in self.experts if self.ragged and hasattr(devices.flat[0], "domain") else ():
            along = np.moveaxis(devices, names.index(axis), 0).reshape(devices.shape[names.index(axis)], -1)[:, 0]
            domains.append(len({d.domain for d in along}))
        if len(sizes) == 2 and min(sizes) > 1 and domains in ([], [sizes[0], 1]):
            return self.experts[:1], self.experts[1:]
        over = [f"{n} over {d} NVLink domain{'s' * (d > 1)}" for n, d in zip(sizes, domains)] or sizes
        told = ", ".join(f"'{a}' ({n})" for a, n in zip(self.experts, over))
        raise ConfigError(
            "a hierarchical dispatch needs two mesh axes for the experts, an outer one with each GPU in another NVLink "
            f"domain and an inner one inside a domain, but act_experts has {told}.",
            hint="[mesh] expert_outer = { infiniband = 4 } and expert = 8, with experts and act_experts = "
            '["expert_outer", "expert"], both in act_batch',
        )

    def kernels(self, embed: Axes = ()) -> tuple[tuple[Axes, ...], ...]:
        """Return the axes of the kernels of gate, up and down; `embed` cuts their embed dim."""
        wide = (self.experts, embed, self.mlp)
        return wide, wide, (self.experts, self.mlp, embed)

    def biases(self, embed: Axes = ()) -> tuple[tuple[Axes, ...], ...]:
        """Return the axes of the biases of gate, up and down; `embed` cuts the embed dim of down's."""
        return (self.experts, self.mlp), (self.experts, self.mlp), (self.experts, embed)

    def gather(self, kernel: jax.Array, spec: Sequence[Axes]) -> jax.Array:
        """Return a kernel gathered as the experts use it, named so that a remat policy may have it gathered again.

        The gather is outside of the custom_vjp, so that a recomputed forward pass and the backward pass share it.
        """
        if self.scope is None:
            return kernel
        rest = partition_spec([self._left(axes) for axes in spec])
        whole = lax.with_sharding_constraint(kernel, NamedSharding(mesh_here(self.scope.mesh), rest))
        return checkpoint_name(whole, GATHERED)

    def reduce_mlp(self, y: jax.Array) -> jax.Array:
        """Add up [batch, length, embed] partial sums over `mlp`, and lay the result out as the residual stream."""
        if not self.mlp:
            return y
        if self.splits_length:
            return lax.psum_scatter(y, self.mlp, scatter_dimension=1, tiled=True)
        return lax.psum(y, self.mlp)

    def reduce_tokens(self, gradient: jax.Array, embed_dim: int | None) -> jax.Array:
        """Add a gradient up over all GPUs that have the same experts.

        Args:
            gradient: of a kernel or a bias, from this GPU's tokens.
            embed_dim: the gradient's embed dim, which FSDP cuts; None for a bias without one.
        """
        scatter = () if embed_dim is None else self.scatter
        rest = tuple(a for a in self._left(self.tokens) if a not in self.experts + scatter)
        if scatter and embed_dim is not None:
            gradient = lax.psum_scatter(gradient, scatter, scatter_dimension=embed_dim, tiled=True)
        return lax.psum(gradient, rest) if rest else gradient

    def _left(self, axes: Axes) -> Axes:
        return tuple(a for a in axes if a not in self.manual)


@dataclass(frozen=True, eq=False)
class _Layer:
    """The layer's forward and backward pass, written out for the shards of one GPU.

    The layout keeps the sharding scope, since jax traces the backward pass outside of that scope.
    """

    layout: ExchangeLayout
    dispatch: Any
    """A Dispatch or HierarchicalDispatch; `routing` below is what it returns."""
    saved_name: str | None
    activation: Callable[[jax.Array, jax.Array], jax.Array]
    parts: int

    def forward(self, x, weights, choices, casts):
        """Return (y, whether each choice was kept, residuals)."""
        outputs = (self._stream, self._tokens, self._saved)
        inputs = (self._tokens, self._tokens, self._tokens, self._weights(casts))
        return self._manual(self._forward, inputs, outputs)(x, weights, choices, casts)

    def backward(self, saved, weights, casts, g, dtypes):
        """Return the gradients of x, weights, the kernels and their biases."""
        inputs = (self._saved, self._tokens, self._weights(casts), self._tokens)
        outputs = (self._stream, self._tokens, self._weights(casts, self.layout.scatter))
        return self._manual(partial(self._backward, dtypes=dtypes), inputs, outputs)(saved, weights, casts, g)

    def _forward(self, x, weights, choices, casts):
        parts = [self._forward_part(a, b, c, casts) for a, b, c in self._parts(x, weights, choices)]
        y, kept, saved = (list(each) for each in zip(*parts))
        y = self.layout.reduce_mlp(jnp.concatenate(y).astype(x.dtype).reshape(x.shape))
        return y, jnp.concatenate(kept).reshape(choices.shape), dict(enumerate(saved))

    def _forward_part(self, x, weights, choices, casts):
        d, (gate, up, down, *biases) = self.dispatch, casts
        routing = d.route(choices, weights)
        rows = d.send(routing, x)
        matmul = self._grouped(routing)
        a, b = matmul(rows, gate), matmul(rows, up)
        if biases:
            a, b = (y + self._spread(routing, rows, bias) for y, bias in zip((a, b), biases))
        out = matmul(self.activation(a, b), down)
        if biases:
            out += self._spread(routing, rows, self._once(biases[2]))
        saved = {"routing": routing, "rows": rows, "gate": a, "up": b}
        return d.collect(routing, out, weights), d.kept(routing), saved

    def _backward(self, saved, weights, casts, g, dtypes):
        parts = zip(saved.values(), self._parts(weights, g))
        g_x, g_weights, g_kernels = zip(*(self._backward_part(kept, a, b, casts, dtypes) for kept, (a, b) in parts))
        g_x = jnp.concatenate(g_x).astype(g.dtype).reshape(g.shape)
        g_weights = jnp.concatenate(g_weights)
        g_weights = lax.psum(g_weights, self.layout.mlp) if self.layout.mlp else g_weights
        w2 = _flat(weights)
        g_weights = jnp.where(w2 == 0, 0.0, g_weights / jnp.where(w2 == 0, 1.0, w2)).reshape(weights.shape)
        dims = (1, 1, 2, None, None, 1)
        g_kernels = tuple(
            self.layout.reduce_tokens(reduce(operator.add, each), dim) for each, dim in zip(zip(*g_kernels), dims)
        )
        return self.layout.reduce_mlp(g_x), g_weights.astype(weights.dtype), g_kernels

    def _backward_part(self, saved, weights, g, casts, dtypes):
        d, (gate, up, down, *biases) = self.dispatch, casts
        routing, rows = saved["routing"], saved["rows"]
        g_rows = d.send(routing, g, weights)
        matmul, outer = self._grouped(routing), self._grouped_outer(routing)
        h, gated = jax.vjp(self.activation, saved["gate"], saved["up"])
        g_h = matmul(g_rows, down, transposed=True)
        # A routing weight's gradient is <g, output of the expert>, g being the gradient of y. That equals
        # <gradient of h, h>, so the output need not be kept. `g_h` is multiplied by the weight, which is divided out
        # in `_backward`.
        g_weight = jnp.sum(g_h.astype(jnp.float32) * h.astype(jnp.float32), axis=-1)
        if biases:
            added = self._spread(routing, rows, self._once(biases[2]))
            g_weight += jnp.sum(g_rows.astype(jnp.float32) * added.astype(jnp.float32), axis=-1)
        g_a, g_b = gated(g_h)
        g_x = d.collect(routing, matmul(g_a, gate, transposed=True) + matmul(g_b, up, transposed=True))
        g_kernels = [outer(*pair, dtype) for pair, dtype in zip(((rows, g_a), (rows, g_b), (h, g_rows)), dtypes)]
        if biases:
            ones = jnp.ones((rows.shape[0], 1), rows.dtype)
            g_kernels += [outer(ones, g, dtype)[:, 0] for g, dtype in zip((g_a, g_b, g_rows), dtypes[3:])]
        return g_x, d.each(routing, g_weight), g_kernels

    def _parts(self, *arrays: jax.Array) -> Iterator[tuple[Any, ...]]:
        """Yield arrays of tokens [batch, length, ...] as [tokens, ...], part by part."""
        return zip(*(jnp.split(_flat(a), self.parts) for a in arrays))

    def _weights(self, casts: Sequence[jax.Array], embed: Axes = ()) -> tuple[tuple[Axes, ...], ...]:
        """Return the axes of the kernels, and of the biases if there are any; `embed` cuts their embed dims."""
        return self.layout.kernels(embed) + (self.layout.biases(embed) if len(casts) > 3 else ())

    def _spread(self, routing: Any, rows: jax.Array, bias: jax.Array) -> jax.Array:
        """Return [rows, out], the bias of each row's expert, from [experts, out], by a grouped product with ones."""
        return self._grouped(routing)(jnp.ones((rows.shape[0], 1), rows.dtype), bias[:, None])

    def _once(self, bias: jax.Array) -> jax.Array:
        """Return the bias on the first GPU along `mlp` and zero on the others: a sum over `mlp` then adds it once."""
        axes = self.layout.mlp
        return jnp.where(lax.axis_index(axes) == 0, bias, 0) if axes else bias

    def _grouped(self, routing: Any) -> Callable[..., jax.Array]:
        """Return the matmul [rows, in] x [experts, in, out] -> [rows, out] of each row and its expert's kernel."""

        def matmul(rows: jax.Array, kernel: jax.Array, transposed: bool = False) -> jax.Array:
            inner = 2 if transposed else 1
            if self._by_sizes:
                numbers = lax.RaggedDotDimensionNumbers((((1,), (inner,)), ((), ())), (0,), (0,))
                return _ragged_dot(numbers, rows.dtype)(rows, kernel, self.dispatch.group_sizes(routing))
            pieces = rows.reshape(self.dispatch.local_experts, -1, rows.shape[-1])
            numbers = (((2,), (inner,)), ((0,), (0,)))
            out = lax.dot_general(pieces, kernel, numbers, preferred_element_type=rows.dtype)
            return out.reshape(rows.shape[0], out.shape[-1])

        return matmul

    def _grouped_outer(self, routing: Any) -> Callable[..., jax.Array]:
        """Return the matmul [rows, in] x [rows, out] -> [experts, in, out], summed over the rows of each expert."""

        def outer(left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
            if self._by_sizes:
                numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
                return _ragged_dot(numbers, dtype)(left, right, self.dispatch.group_sizes(routing))
            left, right = (a.reshape(self.dispatch.local_experts, -1, a.shape[-1]) for a in (left, right))
            return lax.dot_general(left, right, (((1,), (1,)), ((0,), (0,))), preferred_element_type=dtype)

        return outer

    @property
    def _by_sizes(self) -> bool:
        """Whether the experts' rows come in groups of unequal sizes. A single expert takes the whole buffer."""
        return self.dispatch.capacity is None and self.dispatch.local_experts > 1

    @property
    def _saved(self):
        """Layout of the residuals that the backward pass reads. The arrays of the routing are cut as the rows are."""
        rows, hidden = (self.layout.tokens,), (self.layout.tokens, self.layout.mlp)
        return {part: {"routing": rows, "rows": rows, "gate": hidden, "up": hidden} for part in range(self.parts)}

    @property
    def _tokens(self):
        return (self.layout.batch, self.layout.length, ())

    @property
    def _stream(self):
        """Layout of the layer's output: the tokens' layout, or the residual stream's where that is cut further."""
        length = self.layout.residual_length if self.layout.splits_length else self.layout.length
        return (self.layout.batch, length, ())

    def _manual(self, fn: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
        """Return fn wrapped to run on every GPU's own shards; without a mesh, fn itself."""
        scope = self.layout.scope
        if scope is None:
            return fn

        def local(*args):
            with sharding_scope(None, None):
                return fn(*args)

        return shard_map_here(local, scope.mesh, _specs(in_axes), _specs(out_axes))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _experts(x, weights, choices, kernels, casts, layer: _Layer):
    del kernels  # an argument only so that they get a gradient: the forward pass computes with `casts`
    y, kept, _ = layer.forward(x, weights, choices, casts)
    return y, kept


def _experts_forward(x, weights, choices, kernels, casts, layer: _Layer):
    y, kept, saved = layer.forward(x, weights, choices, casts)
    if layer.saved_name:
        for part, name in itertools.product(saved.values(), ("gate", "up")):
            part[name] = checkpoint_name(checkpoint_name(part[name], name), layer.saved_name)
    like = tuple(jnp.zeros((), w.dtype) for w in kernels)
    return (y, kept), (saved, weights, casts, like)


def _experts_backward(layer: _Layer, residuals, g):
    saved, weights, casts, like = residuals
    g_x, g_weights, g_kernels = layer.backward(saved, weights, casts, g[0], [a.dtype for a in like])
    return g_x, g_weights, None, g_kernels, None


_experts.defvjp(_experts_forward, _experts_backward)


def _ragged_dot(numbers: lax.RaggedDotDimensionNumbers, dtype: Any) -> Callable[..., jax.Array]:
    """Return the function (left, right, sizes of the groups) -> ragged dot product."""
    return one_by_one(lambda a, b, n: lax.ragged_dot_general(a, b, n, numbers, preferred_element_type=dtype))


def _flat(x: jax.Array) -> jax.Array:
    """Return [batch, length, ...] as [tokens, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _specs(axes: Any) -> Any:
    """Return mesh axes per dim, in any nesting of tuples and dicts, as PartitionSpecs."""
    if isinstance(axes, dict):
        return {name: _specs(value) for name, value in axes.items()}
    if all(isinstance(a, str) for dim in axes for a in dim):
        return partition_spec(axes)
    return tuple(_specs(value) for value in axes)
