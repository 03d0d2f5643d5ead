"""A pipeline over a mesh: parameters and a batch of microbatches -> loss, metrics and gradients.

    gather FSDP's shards once -> run the ticks of a schedule -> reduce gradients once -> divide by the batch's weight

These steps run in a `jax.shard_map`, which is manual over the pipeline's axis and the batch's axes. All other axes
(tensor) are left to the partitioner. Call a pipeline inside `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.errors import ConfigError
from meshkit.hlo.pipeline_report import PipelineReport
from meshkit.parallel.pipeline.loops import Lockstep, Residuals, find_policy, loop_sums
from meshkit.parallel.pipeline.manual import ManualAxes
from meshkit.parallel.pipeline.schedules import Tables, check_sizes, make_report, make_tables
from meshkit.parallel.pipeline.stack import Stack
from meshkit.parallel.pipeline.worker import Functions, Sums, Worker
from meshkit.sharding.constrain import current_scope, sharding_scope, spec_axes
from meshkit.sharding.mesh import AnyMesh

HEADS = ("replicated", "vocab_parallel")
# Options of the GPU compiler. By default it runs one collective at a time. So the permute of gradients would wait for
# the collectives of a head that the pipeline's axis cuts, and end before the matmuls that should hide it.
XLA_OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}


@dataclass(frozen=True)
class Pipeline:
    """A model cut into stages, on a mesh.

    Parameters are `{"stages": ..., "outer": ...}`. `stages` has the layers' arrays as `stack.arrange` returns them,
    `outer` everything else (embedding, final norm, head; a tied table appears once). A batch is any tree of arrays
    [microbatches, batch, ...].
    """

    functions: Functions
    stack: Stack
    """How many layers each virtual stage has."""
    axes: ManualAxes
    specs: Mapping[str, Any] | None = None
    """PartitionSpecs of the parameters; None: the pipeline's axis cuts the layers, all else is replicated."""
    schedule: str = "1f1b"
    """`1f1b` or `interleaved_1f1b`."""
    residuals: Residuals = "recompute"
    """`recompute`, `stash`, or a policy of `jax.checkpoint`, see loops.py."""
    head: str = "replicated"
    """`replicated`: every device computes the loss, and only the last stage's counts. `vocab_parallel`: all devices
    get the last stage's activations and share the work of the loss."""
    accumulators: Any = jnp.float32
    """Dtype in which gradients are summed, reduced and returned; None: each parameter's own."""
    reduced: Any = None
    """Dtype in which gradients are reduced; None: `accumulators`."""

    def __post_init__(self):
        if self.head not in HEADS:
            raise ConfigError(f"no pipeline head '{self.head}'.", hint=f"one of {', '.join(HEADS)}")
        stages = self.stack.stages
        if stages != self.axes.stages:
            raise ConfigError(
                f"the layers are stacked for {stages} stages, but mesh axis '{self.axis}' has {self.axes.stages}."
            )
        find_policy(self.residuals)
        check_sizes(self.schedule, stages, self.stack.virtual_stages, stages)

    @property
    def axis(self) -> str:
        """The mesh axis of the pipeline."""
        return self.axes.axis

    @property
    def shared_head(self) -> bool:
        """Whether all stages work on the loss of each microbatch."""
        return self.head == "vocab_parallel"

    def tables(self, microbatches: int) -> Tables:
        """Return the schedule of a batch; with several virtual stages, the stages must divide its microbatches.

        Raises:
            ConfigError: the schedule cannot have this number of microbatches.
        """
        return make_tables(self.schedule, self.stack.stages, self.stack.virtual_stages, microbatches)

    def report(self, microbatches: int) -> PipelineReport:
        """Return the cost of the schedule of a batch: ticks, bubble and memory."""
        return make_report(self.tables(microbatches), self.stack, axis=self.axis, shared_head=self.shared_head)

    def value_and_gradients(self, params: Mapping[str, Any], batch: Any, rng: Any = None) -> tuple[Any, dict, Any]:
        """Return the loss (loss_sum / weight over the whole batch), the metrics, and the gradients of the loss.

        Args:
            params: global arrays, in the tree that the class describes; FSDP gathers them in the dtype given here.
            batch: arrays [microbatches, batch, ...], all with the same first dim.
            rng: a key, from which each microbatch's `StageContext.rng` is derived; None if no function draws from it.

        Returns:
            The loss, an fp32 scalar. The metrics, fp32 scalars by name; those of stages are summed over stages, and all
            are averaged over microbatches and data shards. The gradients, with the tree and shardings of params, in
            dtype `accumulators`.

        Raises:
            ConfigError: parameters or a batch that do not fit the pipeline.
        """
        tables = self.tables(_microbatches(batch))
        specs = self._specs(params)

        def local(params, batch, rng):
            worker = self._worker(params, specs, batch, rng)
            zeros = partial(self._zero_gradients, specs)
            sums, stages, outer = Lockstep(worker, tables, self.residuals).gradients(zeros)
            loss, metrics, weight = self._finish(sums, tables)
            return loss, metrics, self._reduce({"stages": stages, "outer": outer}, specs, weight)

        loss, metrics, gradients = self._run(local, params, specs, batch, rng, gradients=True)
        return (
            loss,
            metrics,
            _by_part(lambda g, s: lax.with_sharding_constraint(g, NamedSharding(self.axes.mesh, s)), gradients, specs),
        )

    def value(self, params: Mapping[str, Any], batch: Any, rng: Any = None) -> tuple[Any, dict]:
        """Return loss_sum / weight over the whole batch, and the metrics, without the schedule's backward work.

        Raises:
            ConfigError: parameters or a batch that do not fit the pipeline.
        """
        tables = self.tables(_microbatches(batch))
        specs = self._specs(params)

        def local(params, batch, rng):
            worker = self._worker(params, specs, batch, rng)
            return self._finish(loop_sums(worker, tables), tables)[:2]

        return self._run(local, params, specs, batch, rng, gradients=False)

    def shardings(self, params: Mapping[str, Any]) -> Any:
        """Return the NamedShardings of parameters, which the returned gradients have as well.

        Raises:
            ConfigError: parts other than `stages` and `outer`, a number of PartitionSpecs that is not the number of
                arrays, or layers that the pipeline's axis does not cut first.
        """
        return _by_part(lambda _, s: NamedSharding(self.axes.mesh, s), params, self._specs(params))

    def _zero_gradients(self, specs: Any, weights: Any, outer: Any) -> tuple[Any, Any]:
        def zeros(x, spec):
            return self.axes.constrain(jnp.zeros(x.shape, self.accumulators or x.dtype), spec)

        chunked = jax.tree.map(lambda x, s: zeros(x, PartitionSpec(None, *s)), weights, specs["stages"])
        return chunked, jax.tree.map(zeros, outer, specs["outer"])

    def _worker(self, params: Any, specs: Any, batch: Any, rng: Any) -> Worker:
        gathered = _by_part(self.axes.gather, params, specs)
        chunks = self.stack.virtual_stages
        weights = jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), gathered["stages"])
        return Worker(self.functions, self.stack, self.axes, self.shared_head, weights, gathered["outer"], batch, rng)

    def _finish(self, sums: Sums, tables: Tables) -> tuple[Any, dict, Any]:
        sums = lax.psum(sums, (self.axis, *self.axes.data))
        pieces = tables.microbatches * self.axes.shards
        metrics = jax.tree.map(lambda m: m / pieces, {**sums["stages"], **sums["last"]})
        return sums["loss"] / sums["weight"], metrics, sums["weight"]

    def _reduce(self, gradients: Any, specs: Any, weight: Any) -> Any:
        stages = jax.tree.map(self._flat, gradients["stages"])

        def reduce(g, spec):
            return self.axes.reduce(g.astype(self.reduced or g.dtype), spec).astype(g.dtype)

        summed = _by_part(reduce, {"stages": stages, "outer": gradients["outer"]}, specs)
        return jax.tree.map(lambda g: g / weight.astype(g.dtype), summed)

    def _flat(self, gradient: jax.Array) -> jax.Array:
        """Return a gradient [chunks, chunk_layers, ...] in the parameter's shape, exact zeros for inactive layers."""
        if self.stack.padded:
            active = jnp.asarray(self.stack.table >= 0)[:, lax.axis_index(self.axis)]
            gradient = jnp.where(active.reshape(*active.shape, *[1] * (gradient.ndim - 2)), gradient, 0)
        return gradient.reshape(-1, *gradient.shape[2:])

    def _run(self, local: Callable, params: Any, specs: Any, batch: Any, rng: Any, *, gradients: bool) -> Any:
        axes, whole = self.axes, PartitionSpec()
        self._check_batch(batch)
        inside = _by_part(lambda _, s: axes.inside(s), params, specs)
        parts = jax.tree.map(lambda x: PartitionSpec(*axes.batch[: x.ndim]), batch)

        def run(params, batch, rng):
            with _without(axes.names):
                return local(params, batch, rng)

        return jax.shard_map(
            run,
            mesh=axes.mesh,
            in_specs=(inside, parts, whole),
            out_specs=(whole, whole, inside) if gradients else (whole, whole),
            axis_names=axes.names,
            check_vma=False,  # if True, jax.vjp sums over the pipeline before invalid gradients are masked
        )(params, batch, rng)

    def _specs(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the PartitionSpecs in the parameters' tree, whatever containers `self.specs` is built of."""
        if set(params) != {"stages", "outer"}:
            raise ConfigError(f"a pipeline's parameters are stages and outer, not {', '.join(sorted(params))}.")
        found = {}
        for part, default in (("stages", PartitionSpec(self.axis)), ("outer", PartitionSpec())):
            leaves, structure = jax.tree_util.tree_flatten_with_path(params[part])
            specs = [default] * len(leaves)
            if self.specs is not None:
                specs = jax.tree.leaves(self.specs[part], is_leaf=lambda s: isinstance(s, PartitionSpec))
            if len(specs) != len(leaves):
                raise ConfigError(f"{len(specs)} PartitionSpecs are given for {len(leaves)} arrays of {part}.")
            found[part] = structure.unflatten(specs)
            if part == "stages":
                for spec, (path, _) in zip(specs, leaves):
                    self.axes.check_stages(spec, jax.tree_util.keystr(path))
        return found

    def _check_batch(self, batch: Any) -> None:
        for path, x in jax.tree_util.tree_leaves_with_path(batch):
            shown = jax.tree_util.keystr(path, simple=True, separator="/")
            for dim, names in enumerate(spec_axes(self.axes.batch)[: x.ndim]):
                ways = int(np.prod([self.axes.mesh.shape[a] for a in names]))
                if x.shape[dim] % ways:
                    raise ConfigError(
                        f"dim {dim} of {shown}, {x.shape[dim]} in each microbatch, does not divide into the {ways} "
                        f"parts of {' x '.join(names)}."
                    )


def make_pipeline(
    functions: Functions,
    *,
    mesh: AnyMesh,
    layers: int,
    axis: str = "pipeline",
    batch_spec: PartitionSpec | None = None,
    kept: tuple[str, ...] = (),
    virtual_stages: int = 1,
    layout: str | Sequence[int] | None = None,
    **options: Any,
) -> Pipeline:
    """Return a Pipeline from plain values; options are its remaining fields.

    Args:
        axis: mesh axis whose size is the number of stages.
        batch_spec: PartitionSpec of the batch's arrays, [microbatches, batch, ...]; None: they are replicated.
        layout: layers of each virtual stage, see `Stack.of`; None: as evenly as possible.
        options: `specs`, `schedule`, `residuals`, `head`, `accumulators` and `reduced` of `Pipeline`.

    Raises:
        ConfigError: more stages than layers, or sizes and names that do not go together.
    """
    axes = ManualAxes(mesh, axis, PartitionSpec() if batch_spec is None else batch_spec, kept)
    return Pipeline(functions, Stack.of(layers, axes.stages, virtual_stages, layout), axes, **options)


def pipeline(
    stage_fn: Callable[..., Any],
    loss_fn: Callable[..., Any],
    params: Mapping[str, Any],
    batch: Any,
    *,
    first_fn: Callable[..., Any],
    mesh: AnyMesh | None = None,
    axis: str = "pipeline",
    schedule: str = "1f1b",
    virtual_stages: int = 1,
    layout: str | Sequence[int] | None = None,
    residuals: Residuals = "recompute",
    head: str = "replicated",
    batch_spec: PartitionSpec | None = None,
    specs: Mapping[str, Any] | None = None,
    rng: jax.Array | None = None,
    has_metrics: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Return the loss over a whole batch and its gradients, computed by a pipeline; call it inside `jax.jit`.

        def stage_fn(layers, x, ctx):                 # arrays [layers of the chunk, ...]
            return scan_layers(layer, layers, x, ctx)  # of meshkit.parallel.pipeline
        def first_fn(outer, microbatch, ctx):
            return outer["table"][microbatch["tokens"]]
        def loss_fn(outer, y, microbatch, ctx):
            return loss_sum, weight                   # or loss_sum, weight, metrics

        loss, grads = mk.pipeline(stage_fn, loss_fn, {"stages": layers, "outer": outer}, batch,
                                  first_fn=first_fn, mesh=mesh, schedule="1f1b")

    Layers and their gradients have the model's own order, [layers, ...]. With virtual stages or uneven layers, every
    call moves them between stages to reorder them. A training step avoids that: it keeps layers as `Stack.arrange`
    returns them, and calls `Pipeline.value_and_gradients`.

    Args:
        stage_fn, loss_fn, first_fn: see `Functions`.
        params: `{"stages": arrays [layers, ...], "outer": everything else}`.
        batch: arrays [microbatches, batch, ...].
        mesh: attached or described; None: the mesh of the sharding scope.
        axis: the mesh axis that cuts the layers.
        schedule: `1f1b` or `interleaved_1f1b`.
        virtual_stages: chunks of layers on each stage.
        layout: layers of each virtual stage, see `parse_layout`.
        residuals: `recompute`, `stash`, or a policy of `jax.checkpoint`.
        head: `replicated` or `vocab_parallel`, see `Pipeline`.
        batch_spec: PartitionSpec of the batch's arrays, [microbatches, batch, ...].
        specs: PartitionSpecs of the parameters.
        rng: a key, from which `StageContext.layer_keys` are derived.
        options: further fields of `Pipeline`, and `kept` of `ManualAxes`.

    Returns:
        loss and gradients; with `has_metrics`, (loss, metrics) and gradients.

    Raises:
        ConfigError: more stages than layers, a number of microbatches that the schedule cannot have, or sizes and
            names that do not go together.
    """
    scope = current_scope()
    mesh = mesh if mesh is not None else scope and scope.mesh
    if mesh is None:
        raise ConfigError("a pipeline needs a mesh.", hint="mesh=mk.build_mesh(...), or a sharding_scope around it")
    layers = {x.shape[0] for x in jax.tree.leaves(params.get("stages")) if x.shape}
    if len(layers) != 1:
        raise ConfigError(f"the arrays of stages have {sorted(layers) or 'no'} layers: one number is needed.")
    options |= {"schedule": schedule, "residuals": residuals, "head": head, "specs": specs}
    made = make_pipeline(
        Functions(first_fn, stage_fn, loss_fn),
        mesh=mesh,
        layers=layers.pop(),
        axis=axis,
        batch_spec=batch_spec,
        virtual_stages=virtual_stages,
        layout=layout,
        **options,
    )
    arranged = {**params, "stages": made.stack.arrange(params["stages"])}
    loss, metrics, gradients = made.value_and_gradients(arranged, batch, rng)
    gradients = {**gradients, "stages": made.stack.restore(gradients["stages"])}
    return ((loss, metrics) if has_metrics else loss), gradients


def _by_part(fn: Callable[[Any, Any], Any], params: Mapping[str, Any], specs: Mapping[str, Any]) -> dict[str, Any]:
    return {part: jax.tree.map(fn, params[part], specs[part]) for part in ("stages", "outer")}


def _microbatches(batch: Any) -> int:
    """Return the first dim of all arrays of a batch; ConfigError where they differ."""
    sizes = {x.shape[:1] for x in jax.tree.leaves(batch)}
    if len(sizes) != 1 or () in sizes:
        raise ConfigError("the arrays of a pipeline's batch need one number of microbatches as their first dim.")
    return sizes.pop()[0]


@contextmanager
def _without(axes: frozenset[str]) -> Iterator[None]:
    """Enter the sharding scope without these manual axes, which constraints in a stage cannot name."""
    scope = current_scope()
    with sharding_scope(scope and scope.mesh, scope and scope.rules, manual=axes):
        yield
