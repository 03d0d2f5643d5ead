"""A pipeline over a mesh: parameters and a batch of microbatches -> loss, metrics and gradients.

    gather FSDP once -> the ticks of a schedule -> reduce once -> divide by the weight of the whole batch

in a `jax.shard_map` that is manual over the pipeline's axis and those of the batch, and leaves all others (tensor) to
the partitioner. To be called inside `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.errors import ConfigError
from meshkit.hlo.pipeline_report import PipelineReport
from meshkit.parallel.pipeline.lockstep import lockstep_gradients
from meshkit.parallel.pipeline.reference import loop_gradients, loop_sums
from meshkit.parallel.pipeline.report import make_report
from meshkit.parallel.pipeline.residuals import Residuals, find_policy
from meshkit.parallel.pipeline.schedules import Tables, check_sizes, make_tables
from meshkit.parallel.pipeline.shard import Placement
from meshkit.parallel.pipeline.stack import Stack
from meshkit.parallel.pipeline.worker import Sums, Worker
from meshkit.sharding.constrain import current_scope, sharding_scope

HEADS = ("replicated", "vocab_parallel")
# Of the GPU compiler. By default it lets no two collectives run at once, so the permute of gradients waits for those of
# a head over the pipeline's axis, and ends before the matmuls that should hide it.
XLA_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}


@dataclass(frozen=True)
class Pipeline:
    """A model cut into stages, with its loss.

    Parameters are `{"stages": ..., "outer": ...}`: arrays of layers as `stack.arrange` returns them, and everything
    else (embedding, final norm, head; a tied table once). A batch is any tree of arrays [microbatches, batch, ...].

    The functions see one device's part of the data, and whole parameters but for the axes that the partitioner has;
    `outer` also stays cut where its specs name the pipeline's axis. They must not communicate over axes of the batch,
    nor, in a stage, over the pipeline's. A stage runs on garbage now and then: it must be finite for finite input.

    Attributes:
        stage_fn: (chunk's params [chunk_layers, ...], x, StageContext) -> x or StageOutput; `scan_layers` helps.
        loss_fn: (outer, y, microbatch, StageContext) -> loss_sum, weight[, metrics].
        first_fn: (outer, microbatch, StageContext) -> x, floating point arrays, as stages take and return them.
        stack: how many layers each virtual stage has.
        placement: the mesh, and which axes cut what.
        specs: PartitionSpecs of the parameters; None: layers over the pipeline's axis, the rest replicated.
        schedule: `gpipe`, `circular`, `1f1b` or `interleaved_1f1b`.
        residuals: `recompute`, `stash`, or a policy of `jax.checkpoint`, see `residuals`.
        head: `replicated`: loss_fn runs on every device and counts on the last stage. `vocab_parallel`: all devices
            get the last stage's activations, and loss_fn cuts the work over the pipeline's axis.
        accumulators: dtype that gradients are summed, reduced and returned in; None is that of each parameter.
        reduced: dtype that they are reduced in, if another one.
    """

    stage_fn: Callable[..., Any]
    loss_fn: Callable[..., Any]
    first_fn: Callable[..., Any]
    stack: Stack
    placement: Placement
    specs: Mapping[str, Any] | None = None
    schedule: str = "1f1b"
    residuals: Residuals = "recompute"
    head: str = "replicated"
    accumulators: Any = jnp.float32
    reduced: Any = None
    _made: dict = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self):
        if self.head not in HEADS:
            raise ConfigError(f"no pipeline head '{self.head}'.", hint=f"one of {', '.join(HEADS)}")
        if self.stack.stages != self.placement.stages:
            raise ConfigError(
                f"the layers are stacked for {self.stack.stages} stages, but mesh axis '{self.axis}' has "
                f"{self.placement.stages}."
            )
        find_policy(self.residuals)
        stages = self.stack.stages
        check_sizes(self.schedule, stages, self.stack.virtual_stages, stages)

    @property
    def axis(self) -> str:
        """The mesh axis of the pipeline."""
        return self.placement.axis

    def tables(self, microbatches: int) -> Tables:
        """The schedule of a batch.

        Raises:
            ConfigError: not a number of microbatches that it can have.
        """
        if microbatches not in self._made:
            args = (self.schedule, self.stack.stages, self.stack.virtual_stages, microbatches)
            self._made[microbatches] = make_tables(*args)
        return self._made[microbatches]

    def report(self, microbatches: int) -> PipelineReport:
        """What the schedule of a batch costs."""
        shared = self.head == "vocab_parallel"
        return make_report(self.tables(microbatches), self.stack, axis=self.axis, shared_head=shared)

    def value_and_gradients(self, params: Mapping[str, Any], batch: Any, rng: Any = None) -> tuple[Any, dict, Any]:
        """loss_sum / weight over the whole batch, metrics, and the gradients of that quotient.

        Raises:
            ConfigError: parameters or a batch that do not fit the pipeline.
        """
        tables = self.tables(_microbatches(batch))
        find = loop_gradients if self.schedule in ("gpipe", "circular") else lockstep_gradients
        specs = self._specs(params)

        def local(params, batch, rng):
            worker = self._worker(params, specs, batch, rng)
            sums, stages, outer = find(worker, tables)
            loss, metrics, weight = self._finish(sums, tables)
            return loss, metrics, self._reduce({"stages": stages, "outer": outer}, specs, weight)

        loss, metrics, gradients = self._run(local, params, specs, batch, rng, gradients=True)
        return loss, metrics, self._laid_out(gradients, specs)

    def value(self, params: Mapping[str, Any], batch: Any, rng: Any = None) -> tuple[Any, dict]:
        """loss_sum / weight over the whole batch, and metrics: forward only, by the schedule without backward.

        Raises:
            ConfigError: parameters or a batch that do not fit the pipeline.
        """
        chunks = self.stack.virtual_stages
        name = "circular" if chunks > 1 else "gpipe"
        tables = make_tables(name, self.stack.stages, chunks, _microbatches(batch))
        specs = self._specs(params)

        def local(params, batch, rng):
            worker = self._worker(params, specs, batch, rng)
            return self._finish(loop_sums(worker, tables, worker.weights, worker.outer), tables)[:2]

        return self._run(local, params, specs, batch, rng, gradients=False)

    def shardings(self, params: Mapping[str, Any]) -> Any:
        """NamedShardings of parameters, and of the gradients that come back."""
        return self._by_spec(lambda _, s: NamedSharding(self.placement.mesh, s), params, self._specs(params))

    def zero_gradients(self, weights: Any, outer: Any) -> tuple[Any, Any]:
        """Accumulators of gradients, cut as the parameters are. Inside the shard_map."""
        specs = self._specs({"stages": weights, "outer": outer})

        def zeros(x, spec):
            return self.placement.constrain(jnp.zeros(x.shape, self._dtype(x)), spec)

        stages = self._by_spec(lambda x, s: zeros(x, _chunked(s)), weights, specs["stages"])
        return stages, self._by_spec(zeros, outer, specs["outer"])

    def for_accumulation(self, tree: Any) -> Any:
        """Parameters in the dtype of their accumulators."""
        return jax.tree.map(lambda x: x.astype(self._dtype(x)), tree)

    def _dtype(self, x: jax.Array) -> Any:
        return self.accumulators or x.dtype

    def _worker(self, params: Any, specs: Any, batch: Any, rng: Any) -> Worker:
        gathered = self._by_spec(self.placement.gather, params, specs)
        chunks = self.stack.virtual_stages
        weights = jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), gathered["stages"])
        return Worker(self, weights, gathered["outer"], batch, rng)

    def _finish(self, sums: Sums, tables: Tables) -> tuple[Any, dict, Any]:
        """Loss, metrics and weight of the whole batch from each device's sums."""
        sums = lax.psum(sums, (self.axis, *self.placement.data))
        pieces = tables.microbatches * self.placement.shards
        metrics = jax.tree.map(lambda m: m / pieces, {**sums["stages"], **sums["last"]})
        return sums["loss"] / sums["weight"], metrics, sums["weight"]

    def _reduce(self, gradients: Any, specs: Any, weight: Any) -> Any:
        stages = jax.tree.map(self._flat, gradients["stages"])

        def reduce(g, spec):
            return self.placement.reduce(g.astype(self.reduced or g.dtype), spec).astype(g.dtype)

        summed = self._by_spec(reduce, {"stages": stages, "outer": gradients["outer"]}, specs)
        return jax.tree.map(lambda g: g / weight.astype(g.dtype), summed)

    def _flat(self, gradient: jax.Array) -> jax.Array:
        """[v, chunk_layers, ...] as the parameter is, exact zeros for inactive layers."""
        if self.stack.padded:
            active = jnp.asarray(self.stack.table >= 0)[:, lax.axis_index(self.axis)]
            gradient = jnp.where(active.reshape(*active.shape, *[1] * (gradient.ndim - 2)), gradient, 0)
        return gradient.reshape(-1, *gradient.shape[2:])

    def _run(self, local: Callable, params: Any, specs: Any, batch: Any, rng: Any, *, gradients: bool) -> Any:
        place = self.placement
        self._check_batch(batch)
        inside = self._by_spec(lambda _, s: place.inside(s), params, specs)
        parts = jax.tree.map(lambda x: PartitionSpec(*place.batch[: x.ndim]), batch)

        def run(params, batch, rng):
            with _without(place.manual):
                return local(params, batch, rng)

        whole = PartitionSpec()
        return jax.shard_map(
            run,
            mesh=place.mesh,
            in_specs=(inside, parts, whole),
            out_specs=(whole, whole, inside) if gradients else (whole, whole),
            axis_names=place.manual,
            check_vma=False,  # with it, jax.vjp sums over the pipeline before invalid gradients are masked
        )(params, batch, rng)

    def _laid_out(self, gradients: Any, specs: Any) -> Any:
        def one(g, spec):
            return lax.with_sharding_constraint(g, NamedSharding(self.placement.mesh, spec))

        return self._by_spec(one, gradients, specs)

    def _specs(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """PartitionSpecs as a flat list in the order of the leaves, so that no tree has to match another's type."""
        if set(params) != {"stages", "outer"}:
            raise ConfigError(f"a pipeline's parameters are stages and outer, not {', '.join(sorted(params))}.")
        found = {}
        for part, default in (("stages", PartitionSpec(self.axis)), ("outer", PartitionSpec())):
            paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params[part])]
            specs = [default] * len(paths)
            if self.specs is not None:
                specs = jax.tree.leaves(self.specs[part], is_leaf=lambda s: isinstance(s, PartitionSpec))
            if len(specs) != len(paths):
                raise ConfigError(f"{len(specs)} PartitionSpecs are given for {len(paths)} arrays of {part}.")
            found[part] = specs
            if part == "stages":
                for spec, path in zip(specs, paths):
                    self.placement.check_stages(spec, path)
        return found

    def _by_spec(self, fn: Callable, tree: Any, specs: Any) -> Any:
        """fn(leaf, spec) over a tree, or over both parts of the parameters."""
        if isinstance(specs, dict):
            return {part: self._by_spec(fn, tree[part], specs[part]) for part in ("stages", "outer")}
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten([fn(leaf, spec) for leaf, spec in zip(leaves, specs)])

    def _check_batch(self, batch: Any) -> None:
        place = self.placement
        for path, x in jax.tree_util.tree_leaves_with_path(batch):
            shown = jax.tree_util.keystr(path, simple=True, separator="/")
            for dim, entry in enumerate(place.batch[: x.ndim]):
                names = (entry,) if isinstance(entry, str) else entry or ()
                ways = int(np.prod([place.mesh.shape[a] for a in names]))
                if x.shape[dim] % ways:
                    raise ConfigError(
                        f"dim {dim} of {shown}, {x.shape[dim]} in each microbatch, does not divide into the {ways} "
                        f"parts of {' x '.join(names)}."
                    )


def make_pipeline(
    stage_fn: Callable[..., Any],
    loss_fn: Callable[..., Any],
    first_fn: Callable[..., Any],
    *,
    mesh: Any,
    layers: int,
    axis: str = "pipeline",
    batch_spec: PartitionSpec = PartitionSpec(),  # noqa: B008 a constant
    kept: tuple[str, ...] = (),
    virtual_stages: int = 1,
    layout: str | Sequence[int] | None = None,
    **options: Any,
) -> Pipeline:
    """A Pipeline from plain values; options are its remaining fields.

    Raises:
        ConfigError: more stages than layers, or sizes and names that do not go together.
    """
    placement = Placement(mesh, axis, batch_spec, kept)
    stack = Stack.of(layers, placement.stages, virtual_stages, layout)
    return Pipeline(stage_fn, loss_fn, first_fn, stack, placement, **options)


def _chunked(spec: PartitionSpec) -> PartitionSpec:
    """Of [v, chunk_layers, ...] where the parameter is [layers, ...]."""
    return PartitionSpec(None, *spec)


def _microbatches(batch: Any) -> int:
    """The first dim of all arrays of a batch.

    Raises:
        ConfigError: they differ.
    """
    sizes = {x.shape[:1] for x in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        raise ConfigError("the arrays of a pipeline's batch need one number of microbatches as their first dim.")
    return sizes.pop()[0]


@contextmanager
def _without(axes: frozenset[str]) -> Iterator[None]:
    """The sharding scope as a stage sees it: constraints cannot name axes that are manual here."""
    scope = current_scope()
    with sharding_scope(scope and scope.mesh, scope and scope.rules, manual=axes):
        yield
