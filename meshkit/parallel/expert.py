"""Expert parallelism: tokens travel to the GPUs that hold their experts, and back.

Experts are cut over the mesh axes of `act_experts`, over which the tokens are cut as well (they are axes of
`act_batch`, so outside of the experts the axis is one more data axis). A layer then is

    routing -> dispatch (all-to-all) -> grouped SwiGLU -> combine (all-to-all) -> sum over the k choices

by hand on each GPU's own shards, with its own backward pass. That keeps what the experts computed where it is, needs
no combine again when the forward pass is recomputed, and reduces a weight's gradient over the token axes only.

| per layer, of [slots, embed] rows | dispatch | combine | small (4 bytes a row) |
|---|---|---|---|
| forward | 1 | 1 | |
| recomputed forward (remat) | 1 | | |
| backward | 1 (gradients of outputs) | 1 (of inputs) | 1 (of routing weights) |

**Dropless** (no capacity): on GPUs `lax.ragged_all_to_all` moves the rows there are; its buffers are static, though,
and hold the worst case, `ways x tokens x min(k, experts a GPU)` rows on each GPU (tokens: of one GPU). `buffer_factor`
bounds them to that many times an even load; a GPU then takes at most 1 / ways of it from each sender, and what is above
is dropped. XLA:CPU has no ragged all-to-all: there each pair of GPUs exchanges that bound, with equal results.
**Capacity**: each GPU has `ceil(capacity_factor x tokens x k / experts)` slots for each expert (Lepikhin et al., 2021;
Fedus et al., 2022; the capacity is that of a sending GPU), a plain all-to-all moves them all, and rows beyond are
dropped.

A dropped row adds nothing to its token. First choices win over second ones, then earlier tokens over later ones.
Tensor parallelism cuts `act_mlp` inside of each expert; each GPU along it then exchanges the same tokens.
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
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from meshkit.errors import ConfigError
from meshkit.parallel.dispatch import Dispatch, Routing, one_by_one, worst_case_rows
from meshkit.sharding.constrain import (
    Scope,
    current_scope,
    manual_here,
    mesh_here,
    partition_spec,
    shard_map_here,
    sharding_scope,
)

Axes = tuple[str, ...]
Tokens = Float[Array, "batch length embed"]
Wide = Float[Array, "experts embed mlp"]
Kernels = tuple[Wide, Wide, Float[Array, "experts mlp embed"]]  # gate, up and down
GATHERED = "gathered_experts"  # the name of the gathered kernels, which a policy should not save


def expert_layer(
    x: Tokens,
    weights: Float[Array, "batch length k"],
    choices: Int[Array, "batch length k"],
    kernels: Kernels,
    *,
    capacity_factor: float | None = None,
    buffer_factor: float | None = None,
    saved_name: str | None = None,
) -> tuple[Tokens, Bool[Array, "batch length k"]]:
    """The sum over a token's k choices of weight * down(silu(gate(x)) * up(x)) of the chosen expert; which were kept.

    Outside of a sharding scope the same on one device, without an exchange.

    Args:
        x: in the dtype to compute in.
        weights: fp32; a weight of exactly 0 gets no gradient.
        choices: numbers of experts, all different for one token.
        kernels: their gradients have their dtype.
        capacity_factor: slots of an expert over those of a balanced load; None is dropless.
        buffer_factor: rows of the dropless buffers over those of a balanced load; None is the worst case.
        saved_name: name for `jax.checkpoint` policies of what gate and up give, besides `gate` and `up`.

    Returns:
        The layer's output in the dtype of x, and whether each choice was kept.

    Raises:
        ConfigError: axes that cut experts but not tokens, or sizes that the axes do not divide.
    """
    layout = _Layout.of(current_scope())
    layout.check(x.shape, kernels[0].shape)
    batch, length, _ = x.shape
    tokens, k, ways = batch * length // layout.pieces(layout.tokens), choices.shape[-1], layout.size(layout.experts)
    experts = kernels[0].shape[0] * ways // layout.pieces(layout.experts)
    worst = worst_case_rows(tokens, k, experts // ways)
    capacity = None if capacity_factor is None else math.ceil(capacity_factor * tokens * k / experts)
    bound = worst if buffer_factor is None else min(worst, math.ceil(buffer_factor * tokens * k / ways))
    dispatch = Dispatch(tokens, k, experts, layout.experts, ways, capacity, bound, layout.ragged)
    casts = tuple(
        layout.gather(lax.stop_gradient(w.astype(x.dtype)), spec) for w, spec in zip(kernels, layout.kernels())
    )
    with jax.named_scope("experts"):
        return _experts(x, weights, choices, kernels, casts, _Layer(layout, dispatch, saved_name))


@dataclass(frozen=True)
class _Layout:
    """Mesh axes of a layer's arrays, taken from the rules; without a mesh there are none.

    In a stage of a pipeline some are manual already: arrays come in pieces, and what gathers the kernels before the
    stage and reduces their gradients after it is the pipeline.

    Attributes:
        batch, length: cut the tokens; `residual_length` cuts the length of what the layer gives.
        experts, mlp: cut the experts, and each expert.
        scatter: cut the embed dim of the kernels' gradients (FSDP).
        manual: cut the arrays already.
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
    def of(cls, scope: Scope | None) -> _Layout:
        if scope is None:
            return cls(None)
        names = ("act_batch", "act_length", "act_residual_length", "act_experts", "act_mlp")
        rules = scope.whole or scope.rules
        # One by one, since the axis of the experts cuts tokens too.
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
        """Whether the target's collectives have a ragged all-to-all: GPUs do, attached or described."""
        return self.scope is not None and self.scope.compute_capability is not None

    @property
    def splits_length(self) -> bool:
        """Whether the sum over `mlp` can leave each GPU its own part of the length (sequence parallelism)."""
        return bool(self.mlp) and self.residual_length == self.length + self.mlp

    def size(self, axes: Axes) -> int:
        """GPUs along axes."""
        return math.prod(self.scope.mesh.shape[a] for a in axes) if self.scope else 1

    def pieces(self, axes: Axes) -> int:
        """Pieces that an array is still to be cut into over axes."""
        return self.size(self._left(axes))

    def check(self, x: Sequence[int], gate: Sequence[int]) -> None:
        """Refuses sizes that the axes do not divide: each GPU works on shards of one shape."""
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

    def kernels(self, embed: Axes = ()) -> tuple[tuple[Axes, ...], ...]:
        """Axes of gate, up and down, with these along embed."""
        wide = (self.experts, embed, self.mlp)
        return wide, wide, (self.experts, self.mlp, embed)

    def gather(self, kernel: jax.Array, spec: Sequence[Axes]) -> jax.Array:
        """A kernel as the experts use it, under the name by which a policy can choose to gather it again.

        Outside of the custom_vjp, so that a recomputed forward pass and the backward pass share one gather.
        """
        if self.scope is None:
            return kernel
        rest = partition_spec([self._left(axes) for axes in spec])
        whole = lax.with_sharding_constraint(kernel, NamedSharding(mesh_here(self.scope.mesh), rest))
        return checkpoint_name(whole, GATHERED)

    def reduce_mlp(self, y: jax.Array) -> jax.Array:
        """[batch, length, embed] parts of a sum over `mlp`, added up and laid out as the residual stream."""
        if not self.mlp:
            return y
        if self.splits_length:
            return lax.psum_scatter(y, self.mlp, scatter_dimension=1, tiled=True)
        return lax.psum(y, self.mlp)

    def reduce_tokens(self, gradient: jax.Array, embed_dim: int) -> jax.Array:
        """A kernel's gradient of this GPU's tokens, added up over all GPUs that have the same experts."""
        rest = tuple(a for a in self._left(self.tokens) if a not in self.experts + self.scatter)
        if self.scatter:
            gradient = lax.psum_scatter(gradient, self.scatter, scatter_dimension=embed_dim, tiled=True)
        return lax.psum(gradient, rest) if rest else gradient

    def _left(self, axes: Axes) -> Axes:
        return tuple(a for a in axes if a not in self.manual)


@dataclass(frozen=True, eq=False)
class _Layer:
    """The layer's forward and backward pass, by hand on local shards.

    It keeps the scope, since a backward pass is traced outside of it.
    """

    layout: _Layout
    dispatch: Dispatch
    saved_name: str | None

    def forward(self, x, weights, choices, casts):
        """(y, kept, residuals)."""
        outputs = (self._stream, self._tokens, self._saved)
        inputs = (self._tokens, self._tokens, self._tokens, self.layout.kernels())
        return self._manual(self._forward, inputs, outputs)(x, weights, choices, casts)

    def backward(self, saved, weights, casts, g, dtypes):
        """Gradients of x, weights and the kernels."""
        inputs = (self._saved, self._tokens, self.layout.kernels(), self._tokens)
        outputs = (self._stream, self._tokens, self.layout.kernels(self.layout.scatter))
        return self._manual(partial(self._backward, dtypes=dtypes), inputs, outputs)(saved, weights, casts, g)

    def _forward(self, x, weights, choices, casts):
        d, (gate, up, down) = self.dispatch, casts
        x2, w2, c2 = (_flat(a) for a in (x, weights, choices))
        routing = d.route(c2)
        rows = d.to_experts(routing, d.fill(routing, x2[:, None]))
        matmul = self._grouped(routing)
        a, b = matmul(rows, gate), matmul(rows, up)
        out = d.read(routing, d.from_experts(routing, matmul(jax.nn.silu(a) * b, down)))
        y = jnp.sum(w2[..., None] * out.astype(jnp.float32), axis=1)
        y = self.layout.reduce_mlp(y.astype(x.dtype).reshape(x.shape))
        kept = (routing.slot < d.slots).reshape(d.choices, *choices.shape[:-1])
        return y, jnp.moveaxis(kept, 0, -1), {"routing": routing, "rows": rows, "gate": a, "up": b}

    def _backward(self, saved, weights, casts, g, dtypes):
        d, (gate, up, down), (routing, rows) = self.dispatch, casts, (saved["routing"], saved["rows"])
        w2, g2 = _flat(weights), _flat(g)
        weighted = (w2[..., None] * g2[:, None].astype(jnp.float32)).astype(g.dtype)
        g_rows = d.to_experts(routing, d.fill(routing, weighted))
        matmul, outer = self._grouped(routing), self._grouped_outer(routing)
        h, gated = jax.vjp(lambda a, b: jax.nn.silu(a) * b, saved["gate"], saved["up"])
        g_h = matmul(g_rows, down, transposed=True)
        # <gradient of the output, output> without the output: <gradient of hidden, hidden>, here times the weight.
        g_weight = jnp.sum(g_h.astype(jnp.float32) * h.astype(jnp.float32), axis=-1)
        g_a, g_b = gated(g_h)
        g_x = d.from_experts(routing, matmul(g_a, gate, transposed=True) + matmul(g_b, up, transposed=True))
        g_x = jnp.sum(d.read(routing, g_x).astype(jnp.float32), axis=1).astype(g.dtype).reshape(g.shape)
        g_weight = d.read(routing, d.from_experts(routing, g_weight))
        g_weight = lax.psum(g_weight, self.layout.mlp) if self.layout.mlp else g_weight
        g_weight = jnp.where(w2 == 0, 0.0, g_weight / jnp.where(w2 == 0, 1.0, w2)).reshape(weights.shape)
        pairs = ((rows, g_a, 1), (rows, g_b, 1), (h, g_rows, 2))
        g_kernels = tuple(
            self.layout.reduce_tokens(outer(left, right, dtype), dim)
            for (left, right, dim), dtype in zip(pairs, dtypes)
        )
        return self.layout.reduce_mlp(g_x), g_weight.astype(weights.dtype), g_kernels

    def _grouped(self, routing: Routing) -> Callable[..., jax.Array]:
        """[rows, in] x [experts, in, out] -> [rows, out], each row by the kernel of its expert."""
        groups, ragged = self.dispatch.local_experts, self._by_sizes

        def matmul(rows: jax.Array, kernel: jax.Array, transposed: bool = False) -> jax.Array:
            inner = 2 if transposed else 1
            if ragged:
                numbers = lax.RaggedDotDimensionNumbers((((1,), (inner,)), ((), ())), (0,), (0,))
                sizes = self.dispatch.group_sizes(routing)
                return _ragged_dot(numbers, rows.dtype)(rows, kernel, sizes)
            pieces = rows.reshape(groups, -1, rows.shape[-1])
            numbers = (((2,), (inner,)), ((0,), (0,)))
            out = lax.dot_general(pieces, kernel, numbers, preferred_element_type=rows.dtype)
            return out.reshape(rows.shape[0], out.shape[-1])

        return matmul

    def _grouped_outer(self, routing: Routing) -> Callable[..., jax.Array]:
        """[rows, in] x [rows, out] -> [experts, in, out], summed over the rows of each expert."""
        groups, ragged = self.dispatch.local_experts, self._by_sizes

        def outer(left: jax.Array, right: jax.Array, dtype: Any) -> jax.Array:
            if ragged:
                numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
                sizes = self.dispatch.group_sizes(routing)
                return _ragged_dot(numbers, dtype)(left, right, sizes)
            left, right = (a.reshape(groups, -1, a.shape[-1]) for a in (left, right))
            return lax.dot_general(left, right, (((1,), (1,)), ((0,), (0,))), preferred_element_type=dtype)

        return outer

    @property
    def _by_sizes(self) -> bool:
        """Whether the experts' rows come in groups of unequal sizes; with one expert the rest of its buffer is 0."""
        return self.dispatch.capacity is None and self.dispatch.local_experts > 1

    @property
    def _saved(self):
        """Layout of what the backward pass reads again; every array of the routing lies as its rows."""
        rows, hidden = (self.layout.tokens,), (self.layout.tokens, self.layout.mlp)
        return {"routing": rows, "rows": rows, "gate": hidden, "up": hidden}

    @property
    def _tokens(self):
        return (self.layout.batch, self.layout.length, ())

    @property
    def _stream(self):
        """Layout of what the layer gives: tokens, or the residual stream where that is cut further."""
        length = self.layout.residual_length if self.layout.splits_length else self.layout.length
        return (self.layout.batch, length, ())

    def _manual(self, fn: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
        """fn on every GPU's shards; without a mesh fn itself."""
        scope = self.layout.scope
        if scope is None:
            return fn

        def local(*args):
            with sharding_scope(None, None):
                return fn(*args)

        inputs, outputs = _specs(in_axes), _specs(out_axes)
        return shard_map_here(local, scope.mesh, inputs, outputs)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _experts(x, weights, choices, kernels, casts, layer: _Layer):
    del kernels  # take the gradient
    y, kept, _ = layer.forward(x, weights, choices, casts)
    return y, kept


def _experts_forward(x, weights, choices, kernels, casts, layer: _Layer):
    y, kept, saved = layer.forward(x, weights, choices, casts)
    if layer.saved_name:
        named = {name: checkpoint_name(saved[name], name) for name in ("gate", "up")}
        saved |= {name: checkpoint_name(value, layer.saved_name) for name, value in named.items()}
    like = tuple(jnp.zeros((), w.dtype) for w in kernels)
    return (y, kept), (saved, weights, casts, like)


def _experts_backward(layer: _Layer, residuals, g):
    saved, weights, casts, like = residuals
    g_x, g_weights, g_kernels = layer.backward(saved, weights, casts, g[0], [a.dtype for a in like])
    return g_x, g_weights, None, g_kernels, None


_experts.defvjp(_experts_forward, _experts_backward)


def _ragged_dot(numbers: lax.RaggedDotDimensionNumbers, dtype: Any) -> Callable[..., jax.Array]:
    def dot(left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(left, right, sizes, numbers, preferred_element_type=dtype)

    return one_by_one(dot)


def _flat(x: jax.Array) -> jax.Array:
    """[batch, length, ...] -> [tokens, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _specs(axes: Any) -> Any:
    """Mesh axes per dim, in any nesting of tuples and dicts, as PartitionSpecs."""
    if isinstance(axes, dict):
        return {name: _specs(value) for name, value in axes.items()}
    if all(isinstance(a, str) for dim in axes for a in dim):
        return partition_spec(axes)
    return tuple(_specs(value) for value in axes)
