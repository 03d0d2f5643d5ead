"""Local SGD and DiLoCo: replicas that train on their own and are averaged once in H steps.

Over a slow axis of R replicas, an *outer step* is (Stich 2019, arXiv:1805.09767; Douillard et al. 2023,
arXiv:2311.08105):

    every replica r starts at the anchor a_t and makes H inner steps on its own part of each batch -> w_t,r
    outer gradient      G_t = a_t - mean_r w_t,r                    the one exchange of the outer step
    outer optimizer     m_t = momentum * m_(t-1) + G
                        a_(t+1) = a_t - learning_rate * (G + momentum * m_t   if nesterov else   m_t)

with G = G_t when `staleness` is 0. The inner optimizer's state stays with its replica and is never exchanged. With
learning_rate = 1 and momentum = 0 the new anchor is the mean of the replicas: plain local SGD.

**staleness = 1** uses the same formulas with G = G_(t-1) and G_(-1) = 0. The outer gradient that outer step t applies
was measured in outer step t-1, at a_(t-1). Its exchange does not depend on outer step t, so it overlaps with the inner
steps of t (the naive delayed update that Kale et al. 2025, arXiv:2502.12996, compare with). Outer step 0 leaves the
anchor unchanged, and the last outer gradient is not applied. The delay makes the stable range smaller. Let the inner
steps multiply the distance to the optimum by 1 - c. Without delay the recurrence is stable (its roots are inside the
unit circle) for learning_rate * c below 2 without momentum, and below 1.35 with Nesterov momentum 0.9. With delay the
limits are 1 without momentum, 0.56 with Nesterov momentum 0.5, and 0.25 with Nesterov momentum 0.9.

Everything is one jitted program: a `scan` over the inner steps. Each inner step is a `vmap` over the replicas with
`spmd_axis_name`, so every replica stays on its own GPUs and no collective of an inner step crosses the axis.

XLA hides a collective under the kernels of its own computation, not under nested loops
(docs/adr/0007-stale-exchange.md). So the stale outer gradient is cut into H pieces. Inner step h exchanges piece h, and
waits for it before its backward pass (`wait_before_backward`).

`[local_sgd]` builds this program from the training step of one replica. Its state is:

    state.params              the anchor, the same for all replicas: what is evaluated, and where all inner steps start
    state.opt_state           the inner optimizer's state of each replica: [R, ...] sharded over the axis
    state.extra["outer"]      the outer optimizer's momentum, and the pending outer gradients of staleness = 1

The model's other variables (batch statistics) start equal on all replicas and are averaged over them at the end. Each
replica has its own random stream.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.config.places import Places
from meshkit.config.sections import LocalSgdTable
from meshkit.sharding.constrain import spec_axes
from meshkit.sharding.mesh import AnyMesh
from meshkit.step.state import StateLayout, TrainState

InnerStep = Callable[..., tuple[Any, Any, Any]]


@jax.tree_util.register_dataclass
@dataclass
class OuterState:
    """The state of the outer optimizer between outer steps."""

    optimizer: Any
    """State of optax's optimizer; its momentum has the anchor's shapes and shardings."""
    pending: Any
    """With staleness 1, a_(t-1) - w_(t-1),r in fp32 [R, ...], not exchanged yet; otherwise None."""


@dataclass(frozen=True)
class LocalSgd:
    """Local SGD along one axis, by the formulas in the module's docstring.

    Attributes:
        mesh: attached or described.
        axis: the slow axis, of R replicas.
        every: H, the number of inner steps in an outer step.
        specs: tree of the parameters' PartitionSpecs, none of which may name the axis.
        learning_rate, momentum, nesterov: options of the outer optimizer.
        staleness: 0 or 1 outer steps between an outer gradient and its use.
    """

    mesh: AnyMesh
    axis: str
    every: int
    specs: Any
    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    staleness: int = 0

    @property
    def replicas(self) -> int:
        """R, the number of replicas."""
        return self.mesh.shape[self.axis]

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The outer optimizer."""
        return optax.sgd(self.learning_rate, self.momentum or None, self.nesterov)

    def init(self, anchor: Any) -> OuterState:
        """Return the outer state before the first outer step."""
        pending = None
        if self.staleness:
            pending = jax.tree.map(lambda a: jnp.zeros((self.replicas, *a.shape), jnp.float32), anchor)
        return OuterState(self.optimizer.init(anchor), pending)

    def outer_shardings(self, anchor: Any) -> OuterState:
        """Return the NamedShardings of the outer state of an (abstract) anchor."""
        whole = NamedSharding(self.mesh, PartitionSpec())
        like = self._map_specs(lambda s: NamedSharding(self.mesh, s))
        abstract = jax.eval_shape(self.optimizer.init, anchor)
        optimizer = optax.tree.map_params(
            self.optimizer, lambda _, s: s, abstract, like, transform_non_params=lambda _: whole
        )
        return OuterState(optimizer, self.replicated_shardings() if self.staleness else None)

    def replicated_shardings(self) -> Any:
        """Return the NamedShardings of parameters with a leading replica dim."""
        return self._map_specs(lambda s: NamedSharding(self.mesh, PartitionSpec(self.axis, *s)))

    def replicate(self, tree: Any) -> Any:
        """Return each array with a leading replica dim, the same for every replica."""
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (self.replicas, *jnp.shape(x))), tree)

    def outer_step(self, inner: InnerStep, anchor: Any, outer: OuterState, carry: Any, batches: Any):
        """Run H inner steps and one outer step; call it inside `jit`.

        Args:
            inner: one replica's step, (params, carry, batch, exchanged) -> (params, carry, metrics). `exchanged` is the
                result of the exchange during the step, the same for all replicas, or None. A step hides the exchange
                under its forward pass if it passes its loss through `wait_before_backward(loss, exchanged)`.
            anchor: parameters without replica dim, fp32.
            outer: from `init`, or from the outer step before.
            carry: all other state of `inner` (its optimizer's state): every array [R, ...].
            batches: every array [H, R, ...].

        Returns:
            The new anchor, outer state and carry, and the metrics, whose arrays are all [H, R, ...].
        """
        replicated = jax.vmap(inner, in_axes=(0, 0, 0, None), spmd_axis_name=self.axis)
        shardings = self.replicated_shardings()
        pieces = self._cut(outer.pending) if self.staleness else None

        def body(state, inputs):
            batch, piece = inputs
            stale = None if piece is None else self._exchange(piece)
            params, carry, metrics = replicated(*state, batch, stale)
            params = jax.lax.with_sharding_constraint(params, shardings)
            return (params, carry), (metrics, stale)

        start = jax.lax.with_sharding_constraint(self.replicate(anchor), shardings)
        (params, carry), (metrics, stale) = jax.lax.scan(body, (start, carry), (batches, pieces), length=self.every)
        with jax.named_scope("outer_optimizer"):
            local = jax.tree.map(lambda a, w: a.astype(jnp.float32) - w.astype(jnp.float32), anchor, params)
            local = jax.lax.with_sharding_constraint(local, shardings)
            gradient = self._join(stale, anchor) if self.staleness else self._mean(local)
            updates, optimizer = self.optimizer.update(gradient, outer.optimizer, anchor)
            anchor = optax.apply_updates(anchor, updates)
        return anchor, OuterState(optimizer, local if self.staleness else None), carry, metrics

    def _mean(self, deltas: Any) -> Any:
        """Return means over the leading replica dim: this exchange is one fp32 all-reduce over the axis."""
        with jax.named_scope("outer_gradient"):
            means = jax.tree.map(lambda d: jnp.sum(d, axis=0) / self.replicas, deltas)
            return jax.lax.with_sharding_constraint(means, self._map_specs(lambda s: NamedSharding(self.mesh, s)))

    @property
    def _others(self) -> tuple[str, ...]:
        return tuple(a for a in self.mesh.axis_names if a != self.axis)

    def _cut(self, deltas: Any) -> jax.Array:
        """Return a tree of [R, ...] as [H, R, GPUs of a replica, n]: each GPU's shards of all leaves, in H pieces."""

        def local(*leaves):
            flat = jnp.concatenate([leaf.reshape(-1) for leaf in leaves])
            return jnp.pad(flat, (0, -flat.size % (2 * self.every))).reshape(self.every, 1, 1, -1)

        specs = [PartitionSpec(self.axis, *s) for s in jax.tree.leaves(self.specs, is_leaf=_is_spec)]
        return self._manual(local, specs, PartitionSpec(None, self.axis, self._others))(*jax.tree.leaves(deltas))

    def _exchange(self, piece: jax.Array) -> jax.Array:
        """Return the mean over R of [R, GPUs of a replica, n], by two all-reduces, one after the other.

        XLA overestimates the speed of the slow axis, and starts an all-reduce too late to hide all of it. It schedules
        two all-reduces separately, so the first of them starts one kernel earlier.
        """

        def local(piece):
            first, second = jnp.split(piece[0], 2, axis=-1)
            first = jax.lax.psum(first, self.axis)
            second = jax.lax.psum(_after(second, first), self.axis)
            return jnp.concatenate([first, second], axis=-1) / self.replicas

        with jax.named_scope("outer_gradient"):
            return self._manual(local, [PartitionSpec(self.axis, self._others)], PartitionSpec(self._others))(piece)

    def _join(self, pieces: Any, like: Any) -> Any:
        """Return [H, GPUs of a replica, n] as a tree like the one that `_cut` took, without its replica dim."""
        leaves, tree = jax.tree.flatten(like)
        specs = tree.flatten_up_to(self.specs)
        shapes = [NamedSharding(self.mesh, s).shard_shape(x.shape) for x, s in zip(leaves, specs)]
        ends = np.cumsum([math.prod(shape) for shape in shapes])

        def local(pieces):
            parts = jnp.split(pieces.reshape(-1), ends)[: len(shapes)]
            return [part.reshape(shape) for part, shape in zip(parts, shapes)]

        return tree.unflatten(self._manual(local, [PartitionSpec(None, self._others)], specs)(pieces))

    def _manual(self, fn: Callable, inputs: list[PartitionSpec], output: Any) -> Callable:
        return jax.shard_map(fn, mesh=self.mesh, in_specs=tuple(inputs), out_specs=output, check_vma=False)

    def _map_specs(self, fn: Callable[[PartitionSpec], Any]) -> Any:
        return jax.tree.map(fn, self.specs, is_leaf=_is_spec)


@jax.custom_vjp
def wait_before_backward(loss: jax.Array, exchanged: jax.Array) -> jax.Array:
    """Return the loss unchanged; its backward pass waits for `exchanged`, to which no gradient flows.

    Args:
        loss: a floating point scalar.
        exchanged: a floating point array with at least one element.
    """
    return loss


def _wait_forward(loss, exchanged):
    return loss, exchanged


def _wait_backward(exchanged, cotangent):
    return _after(cotangent, exchanged), jnp.zeros_like(exchanged)


wait_before_backward.defvjp(_wait_forward, _wait_backward)


def _after(x: jax.Array, other: jax.Array) -> jax.Array:
    """Return x, computed only after `other`: XLA keeps this dependence, since it cannot know that nothing exceeds inf.

    (XLA removes `optimization_barrier` before its scheduler runs.)
    """
    never = other[(0,) * other.ndim] > jnp.inf
    return x + never.astype(x.dtype)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


@dataclass(frozen=True)
class LocalSgdStep:
    """H inner training steps of every replica, and the outer step that follows."""

    local: LocalSgd
    step: Callable[[TrainState, Any, Any], tuple[TrainState, dict[str, jax.Array]]]
    """One replica's (state, batch, exchanged) -> (state, metrics), built with rules that do not use the axis;
    `LocalSgd.outer_step` describes `exchanged`."""
    batch_axes: tuple[str, ...]

    @property
    def xla_options(self) -> dict[str, object]:
        """XLA's options: a stale exchange is hidden best if it may run beside the collectives of the inner steps."""
        return {"xla_gpu_experimental_parallel_collective_overlap_limit": 2} if self.local.staleness else {}

    def run(self, state: TrainState, batches: Mapping[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        """Run an outer step on batches [H, B, ...].

        Returns:
            The state after H steps, and fp32 metrics [H], averaged over the replicas by weight; `weight` is summed. The
            model's other variables are averaged, but taken from the first replica if they are not floating point.
        """
        local = self.local
        alike = {"step": state.step, "variables": state.variables}
        carry = {"opt_state": state.opt_state, "rng": self._keys(state.rng), **local.replicate(alike)}

        def inner(params, carry, batch, exchanged):
            after, metrics = self.step(TrainState(params=params, **carry), batch, exchanged)
            return after.params, {name: getattr(after, name) for name in carry}, metrics

        anchor, outer, carry, metrics = local.outer_step(
            inner, state.params, state.extra["outer"], carry, self.split(batches)
        )
        after = replace(
            state,
            step=state.step + local.every,
            params=anchor,
            opt_state=carry["opt_state"],
            variables=jax.tree.map(_agree, carry["variables"]),
            extra={"outer": outer},
        )
        return after, self._combine(metrics)

    def extend(self, state: TrainState) -> TrainState:
        """Return the initial state of local SGD, from the initial state of the inner step."""
        opt_state = self.local.replicate(state.opt_state)
        return replace(state, opt_state=opt_state, extra={"outer": self.local.init(state.params)})

    def shardings(self, shards: TrainState, abstract_params: Any) -> TrainState:
        """Return the NamedShardings of the whole state, from those of the inner step's state."""

        def lead(s: NamedSharding) -> NamedSharding:
            spec = PartitionSpec(self.local.axis, *s.spec)
            return NamedSharding(s.mesh, spec, memory_kind=s.memory_kind)

        opt_state = jax.tree.map(lead, shards.opt_state)
        return replace(shards, opt_state=opt_state, extra={"outer": self.local.outer_shardings(abstract_params)})

    def stack(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the abstract batches of an outer step [H, B, ...]."""

        def stack_leaf(x):
            sharding = NamedSharding(x.sharding.mesh, PartitionSpec(None, *x.sharding.spec))
            return jax.ShapeDtypeStruct((self.local.every, *x.shape), x.dtype, sharding=sharding)

        return {name: stack_leaf(x) for name, x in batch.items()}

    def split(self, batches: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Return each [H, B, ...] as [H, R, B / R, ...]; rows stay on their GPU for any order of `batch_axes`."""
        mesh, axis, index = self.local.mesh, self.local.axis, self.batch_axes.index(self.local.axis)
        before, after = self.batch_axes[:index], self.batch_axes[index + 1 :]
        pieces = math.prod(mesh.shape[name] for name in before)
        cut = NamedSharding(mesh, PartitionSpec(None, before or None, axis, after or None))
        kept = NamedSharding(mesh, PartitionSpec(None, axis, (*before, *after) or None))

        def split_leaf(x):
            rest = x.shape[2:]
            x = x.reshape(x.shape[0], pieces, self.local.replicas, -1, *rest)
            x = jnp.moveaxis(jax.lax.with_sharding_constraint(x, cut), 2, 1)
            return jax.lax.with_sharding_constraint(x.reshape(*x.shape[:2], -1, *rest), kept)

        return {name: split_leaf(x) for name, x in batches.items()}

    def _keys(self, rng: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(rng)
        fold = jax.vmap(lambda r: jax.random.key_data(jax.random.fold_in(key, r)))
        return fold(jnp.arange(self.local.replicas))

    def _combine(self, metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Reduce metrics [H, R] to [H]: weights are summed, all others are averaged by weight."""
        weight = metrics["weight"]
        share = weight / jnp.sum(weight, axis=1, keepdims=True)
        return {k: jnp.sum(value if k == "weight" else value * share, axis=1) for k, value in metrics.items()}


def find_local_sgd(spec: LocalSgdTable, places: Places, mesh: AnyMesh, layout: StateLayout) -> LocalSgd | None:
    """Return local SGD as `[local_sgd]` configures it; None if it names no axis.

    Raises:
        ConfigError: the axis shards parameters, gradients or optimizer state.
    """
    if spec.axis is None:
        return None
    check_replicas(places, "local_sgd.axis", spec.axis, layout)
    return LocalSgd(
        mesh=mesh,
        axis=spec.axis,
        every=spec.every,
        specs=jax.tree.map(lambda s: s.spec, layout.params),
        learning_rate=spec.learning_rate,
        momentum=spec.momentum,
        nesterov=spec.nesterov,
        staleness=spec.staleness,
    )


def check_replicas(places: Places, key: str, axis: str, layout: StateLayout) -> None:
    """Raise ConfigError if the axis cuts an array of the state, so that it does not hold whole replicas."""
    for what, tree in (
        ("parameters", layout.params),
        ("gradients", layout.gradients),
        ("optimizer state", layout.reduced),
    ):
        for sharding in jax.tree.leaves(tree):
            if any(axis in axes for axes in spec_axes(sharding.spec)):
                message = (
                    f"{key} = '{axis}', but the rules cut the {what} over '{axis}', so it holds no whole replicas."
                )
                raise places.error(key, message, hint="an axis that cuts only the batch, such as data in HSDP")


def _agree(x: jax.Array) -> jax.Array:
    """Return one value for all replicas from [R, ...]: the mean, or the first if not floating (counters, keys)."""
    return jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]
