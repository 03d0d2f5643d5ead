"""`[local_sgd]`: the training step of one replica -> a program of H steps and one outer step.

    state.params              the anchor, the same for all replicas: what is evaluated, and where all inner steps start
    state.opt_state           the inner optimizer's, one per replica: [R, ...] cut over the axis
    state.extra["outer"]      the outer optimizer's momentum, and the pending outer gradients of staleness = 1

The model's other variables (batch statistics) start alike and are averaged over the replicas at the end. Each replica
draws from a random stream of its own. The formulas are in meshkit/parallel/local_sgd.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.config.experiment import Experiment
from meshkit.parallel.local_sgd import LocalSgd
from meshkit.sharding.constrain import spec_axes
from meshkit.sharding.mesh import AnyMesh
from meshkit.step.state import StateLayout, TrainState


@dataclass(frozen=True)
class LocalSgdStep:
    """H inner training steps of every replica, and the outer step that follows."""

    local: LocalSgd
    step: Callable[[TrainState, Any, Any], tuple[TrainState, dict[str, jax.Array]]]
    """One replica's (state, batch, exchanged) -> (state, metrics), built for the mesh without the axis; `exchanged` is
    what travels during the step, or None."""
    batch_axes: tuple[str, ...]  # mesh axes that cut the global batch, the axis among them

    @property
    def xla_options(self) -> dict[str, object]:
        """A stale exchange hides best where the scheduler may run it next to the collectives of the inner steps."""
        return {"xla_gpu_experimental_parallel_collective_overlap_limit": 2} if self.local.staleness else {}

    def run(self, state: TrainState, batches: Mapping[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        """The state after batches [H, B, ...], and metrics [H]: means over the replicas, by weight."""
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
        """The state before the first step, from that of the inner step."""
        opt_state = self.local.replicate(state.opt_state)
        return replace(state, opt_state=opt_state, extra={"outer": self.local.init(state.params)})

    def shardings(self, shards: TrainState, abstract_params: Any) -> TrainState:
        """NamedShardings of the whole state, from those of the inner step."""

        def lead(s: NamedSharding) -> NamedSharding:
            spec = PartitionSpec(self.local.axis, *s.spec)
            return NamedSharding(s.mesh, spec, memory_kind=s.memory_kind)

        opt_state = jax.tree.map(lead, shards.opt_state)
        return replace(shards, opt_state=opt_state, extra={"outer": self.local.outer_shardings(abstract_params)})

    def stack(self, batch: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
        """The abstract batches of an outer step [H, B, ...]."""

        def one(x):
            sharding = NamedSharding(x.sharding.mesh, PartitionSpec(None, *x.sharding.spec))
            return jax.ShapeDtypeStruct((self.local.every, *x.shape), x.dtype, sharding=sharding)

        return {name: one(x) for name, x in batch.items()}

    def split(self, batches: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Each [H, B, ...] as [H, R, B / R, ...]; every row stays on its GPU, whatever the order of the axes."""
        mesh, axis, index = self.local.mesh, self.local.axis, self.batch_axes.index(self.local.axis)
        before, after = self.batch_axes[:index], self.batch_axes[index + 1 :]
        pieces = math.prod(mesh.shape[name] for name in before)
        cut = NamedSharding(mesh, PartitionSpec(None, before or None, axis, after or None))
        kept = NamedSharding(mesh, PartitionSpec(None, axis, (*before, *after) or None))

        def one(x):
            rest = x.shape[2:]
            x = x.reshape(x.shape[0], pieces, self.local.replicas, -1, *rest)
            x = jnp.moveaxis(jax.lax.with_sharding_constraint(x, cut), 2, 1)
            return jax.lax.with_sharding_constraint(x.reshape(*x.shape[:2], -1, *rest), kept)

        return {name: one(x) for name, x in batches.items()}

    def _keys(self, rng: jax.Array) -> jax.Array:
        """Key data of every replica."""
        key = jax.random.wrap_key_data(rng)
        fold = jax.vmap(lambda r: jax.random.key_data(jax.random.fold_in(key, r)))
        return fold(jnp.arange(self.local.replicas))

    def _combine(self, metrics: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """[H, R] as [H]: weights added, everything else a mean by weight."""
        weight = metrics["weight"]
        share = weight / jnp.sum(weight, axis=1, keepdims=True)
        return {k: jnp.sum(value if k == "weight" else value * share, axis=1) for k, value in metrics.items()}


def find_local_sgd(experiment: Experiment, mesh: AnyMesh, layout: StateLayout) -> LocalSgd | None:
    """The `[local_sgd]` of an experiment; None if it has none.

    Raises:
        ConfigError: the axis cuts the parameters or what belongs to them.
    """
    spec = experiment.local_sgd
    if spec.axis is None:
        return None
    check_replicas(experiment, "local_sgd.axis", spec.axis, layout)
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


def check_replicas(experiment: Experiment, key: str, axis: str, layout: StateLayout) -> None:
    """Raises ConfigError where the axis does not hold whole replicas: where it cuts an array of the state."""
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
                raise experiment.error(key, message, hint="an axis that cuts the batch alone, such as data in HSDP")


def _agree(x: jax.Array) -> jax.Array:
    """[R, ...] as one value for all replicas: the mean, or the first where there is no mean (counters, keys)."""
    return jnp.mean(x, axis=0) if jnp.issubdtype(x.dtype, jnp.floating) else x[0]
