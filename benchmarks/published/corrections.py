"""What the replay knows of frameworks that a plan does not, in one list. Part of replica.py and replay.py.

They apply the corrections that are true of a run in the order of the list: those of its program, then seconds of a
layer and micro-batch, of the output head, of a step. `pieces.py` leaves out one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.published.blocks import as_mxfp8, as_nvfp4, casts_s, is_mxfp8, slowed_s, travel_s
from benchmarks.published.eager import COUNTS, between_matmuls, between_s, eager_s, logits_s, step_s
from benchmarks.published.experiments import Run
from benchmarks.published.experts import (
    as_in_megatron,
    beside_s,
    exchange_s,
    heads_norms_s,
    is_routing,
    operators_s,
    passes_s,
    quantization_s,
    window_s,
)
from benchmarks.published.fsdp import (
    as_eager,
    as_engine,
    as_wide,
    engine_logits_s,
    is_carried,
    is_engine,
    rest_s,
    scatters_wide,
    with_fsdp,
)
from benchmarks.published.fsdp import is_counted as is_eager
from benchmarks.published.housekeeping import housekeeping_s, largest_s, tied_s
from benchmarks.published.ours import (
    casts_weights,
    fused_scores,
    has_wide_heads,
    is_filled,
    is_loop_copy,
    is_stacked_gradient,
    repeats,
    rerun,
    without,
)
from benchmarks.published.prefetch import prefetched
from benchmarks.published.reduction import accumulation_s, copies_s, gradients_s
from benchmarks.published.transformer_engine import as_dropped, as_launched, drops_scores, is_counted, passes_logits
from benchmarks.published.transformer_engine import logits_s as te_logits_s
from benchmarks.published.userbuffers import find_overlap, tensor_s, without_tensor
from meshkit.config.cluster import Cluster
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.network import collective_time_s

_LIKE_A_COPY = 0.9  # of device memory's peak, as the catalog has it


@dataclass(frozen=True)
class Step:
    """A step as far as it is known where a correction is applied.

    Attributes:
        readers: instruction of the program -> those that need its result.
        windows: whether the framework may hide communication under compute.
        forward_s: of a layer and micro-batch, forward, as compiled.
        layer_s: of a layer and micro-batch, both passes, with the corrections before.
        window_s: of a micro-batch on the slowest stage, backward and forward, under which gradients and weights travel.
    """

    run: Run
    cluster: Cluster
    readers: Mapping[str, frozenset[str]]
    windows: bool = True
    forward_s: float = 0.0
    layer_s: float = 0.0
    window_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True)
class Correction:
    """Something that the replay has beyond a plan.

    Attributes:
        name: and, after the colon, what stands in its place where it is left out.
        of: the runs that it is true of.
        program: another schedule of the compiled program.
        layer: seconds of a layer and micro-batch, forward and backward.
        head: seconds of a micro-batch on the stage of the output head.
        step: seconds of a step.
        travels: communication of the framework's own, which does not count where all is hidden.
        off: a run without it, where it is one of the run's properties.
        instead: other fields than these, where something else stands in its place.
    """

    name: str
    of: Callable[[Run], object]
    program: Callable[[Step, Schedule], Schedule] | None = None
    layer: Callable[[Step], tuple[float, float]] | None = None
    head: Callable[[Step], float] | None = None
    step: Callable[[Step], float] | None = None
    travels: bool = False
    off: Callable[[Run], Run] | None = None
    instead: Mapping[str, Any] = field(default_factory=dict)


def corrections_of(run: Run) -> Iterator[Correction]:
    """Those that are applied to a run, in order."""
    for c in CORRECTIONS:
        if c.of(run):
            if c.name != run.left_out:
                yield c
            elif c.instead:
                yield replace(c, **c.instead)


def corrected(at: Step, schedule: Schedule) -> Schedule:
    """A program as its run's framework runs it."""
    for c in corrections_of(at.run):
        schedule = c.program(at, schedule) if c.program else schedule
    return schedule


def leave_out(run: Run, c: Correction) -> Run:
    """The run without a correction."""
    return c.off(run) if c.off else replace(run, left_out=c.name)


def _unfused(run: Run) -> bool:
    return run.whole and run.framework.prefetches


def _stage(run: Run) -> bool:
    return not run.whole


def _of_framework(run: Run) -> bool:
    return _stage(run) or _unfused(run)


def _counted(run: Run) -> bool:
    return _stage(run) and run.framework.between in COUNTS


def _experts(run: Run) -> bool:
    return _stage(run) and run.shape.experts > 0


def _nvfp4(run: Run) -> bool:
    return _stage(run) and run.precision == "nvfp4"


def _framework(**fields: Any) -> Callable[[Run], Run]:
    return lambda run: replace(run, framework=replace(run.framework, **fields))


def _recipe(**fields: Any) -> Callable[[Run], Run]:
    return lambda run: replace(run, recipe=replace(run.recipe, **fields))


def _kernels(**fields: Any) -> Callable[[Run], Run]:
    return lambda run: replace(run, kernels=replace(run.kernels, **fields))


def _program(found: Callable[[Run, Schedule], Schedule]) -> Callable[[Step, Schedule], Schedule]:
    return lambda at, schedule: found(at.run, schedule)


def _without(unwanted: Callable[[Instruction], bool]) -> Callable[[Step, Schedule], Schedule]:
    return lambda _, schedule: without(schedule, unwanted)


def _without_names(found: Callable[[Run, Schedule], set[str]]) -> Callable[[Step, Schedule], Schedule]:
    def program(at: Step, schedule: Schedule) -> Schedule:
        names = found(at.run, schedule)
        return without(schedule, lambda i: i.name in names)

    return program


def _seconds(found: Callable[[Run, Cluster], float]) -> Callable[[Step], float]:
    return lambda at: found(at.run, at.cluster)


def _layer(found: Callable[..., float], **options: Any) -> Callable[[Step], tuple[float, float]]:
    return lambda at: (found(at.run, at.cluster, **options), 0.0)


def _reduces_gradients(i: Instruction) -> bool:
    """A gradient summed over context or replicas with every micro-batch: frameworks sum it once, with all replicas."""
    c = i.collective
    return c is not None and c.collective == "all-reduce" and set(c.axes) <= {"context", "expert"}


def _without_ring(at: Step, schedule: Schedule) -> Schedule:
    """Hops of ring attention are sent under the attention of the piece before (Liu et al., 2023)."""

    def is_hop(i: Instruction) -> bool:
        c = i.collective
        return c is not None and c.collective == "collective-permute" and tuple(c.axes) == ("context",)

    return without(schedule, is_hop) if at.windows else schedule


def _exchange(at: Step) -> tuple[float, float]:
    found = beside_s(at.run, at.cluster, at.layer_s) if at.windows else exchange_s(at.run, at.cluster)
    return found, 0.0


def _casts(at: Step) -> tuple[float, float]:
    forward, backward = (casts_s(at.run, at.cluster, forward=way) for way in (True, False))
    return (1 + at.run.recomputed) * forward + backward, 0.0


def _travel(at: Step) -> tuple[float, float]:
    def one(*, forward: bool) -> float:
        blocking, beside = travel_s(at.run, at.cluster, forward=forward)
        return blocking + (slowed_s(beside, at.cluster) if at.windows else beside)

    return (1 + at.run.recomputed) * one(forward=True) + one(forward=False), 0.0


def _tensor(at: Step) -> tuple[float, float]:
    forward, backward = (tensor_s(at.run, at.cluster, forward=way, beside=at.windows) for way in (True, False))
    return (1 + at.run.recomputed) * forward, backward


def _sends_s(at: Step) -> float:
    """Seconds of sends between stages that a stage waits for: one forward and one backward a micro-batch and chunk.

    Where other micro-batches hide them those that fill and drain the pipeline stay: the first micro-batch passes all
    chunks of all stages before the first backward pass, the last one goes back through all of them. In Megatron-LM
    stages without chunks wait for each (core_v0.8.0, pipeline_parallel/schedules.py).
    """
    run, cluster = at.run, at.cluster
    payload = 2 * run.micro_batch * run.length * run.shape.hidden / run.tensor / run.context
    replica = run.tensor * run.context * run.data
    crosses = replica >= cluster.gpus_used_per_domain and cluster.num_nvlink_domains > 1
    inside, domains = (1, 2) if crosses else (2, 1)
    one = collective_time_s(
        "collective-permute", payload_bytes=payload, gpus_per_domain=inside, domains=domains, cluster=cluster
    )
    if run.framework.overlaps_stages and run.chunks > 1 and at.windows:
        return 2 * (run.chunks * run.stages - 1) * one
    return 2 * run.chunks * run.micro_batches * one


CORRECTIONS = (
    Correction(
        "attention of its library and year: the catalog's", lambda run: run.kernels.attention,
        off=_kernels(attention=""),
    ),
    Correction(
        "matmuls, memory and power cap of its machine: the catalog's", lambda run: run.kernels.variant,
        off=_kernels(variant=""),
    ),
    Correction(
        "FSDP's stream: gathers and scatters as XLA schedules them", _unfused,
        program=lambda at, schedule: prefetched(schedule, at.readers),
    ),
    Correction(
        "FSDP's gradients in fp32, composer from 0.16.4 on: in 16 bits", scatters_wide,
        program=lambda _, schedule: as_wide(schedule),
    ),
    Correction("XLA's own recomputation: kept", _stage, program=_without_names(lambda _, schedule: repeats(schedule))),
    Correction("copies of XLA's loop over layers: kept", _of_framework, program=_without(is_loop_copy)),
    Correction(
        "zeros and copies of what XLA's loops carry: kept", _unfused, program=_without(is_carried),
    ),
    Correction(
        "casts of weights once a step: with every micro-batch", _stage,
        program=lambda at, schedule: without(schedule, casts_weights(at.run)),
    ),
    Correction("accumulators filled once a step: with every micro-batch", _stage, program=_without(is_filled)),
    Correction(
        "attention of heads wider than 128, fused: scores in memory", lambda run: _stage(run) and has_wide_heads(run),
        program=_program(fused_scores),
    ),
    Correction("dropout of attention's scores in NeMo's GPT-3: none", drops_scores, program=_program(as_dropped)),
    Correction(
        "recomputed layers run whole: without their last matmul",
        lambda run: run.framework.reruns and _of_framework(run), program=_program(rerun),
    ),
    Correction(
        "kernels between matmuls by a framework's source: XLA's", _counted, program=_without_names(between_matmuls),
        layer=lambda at: between_s(at.run, at.cluster),
    ),
    Correction("passes over logits by a framework's source: XLA's", _counted, head=_seconds(logits_s)),
    Correction("the optimizer's step by a framework's source: XLA's", _counted, step=_seconds(step_s)),
    Correction(
        "kernels between matmuls by Megatron-Core's source: XLA's", is_counted,
        program=lambda at, schedule: as_launched(at.run, schedule, at.cluster),
    ),
    Correction(
        "passes over logits by Megatron-Core's source: XLA's", is_counted, head=_seconds(te_logits_s),
        program=lambda at, schedule: without(schedule, passes_logits(at.run)),
    ),
    Correction(
        "kernels between matmuls, of logits and the optimizer by MosaicML's source: XLA's", is_eager,
        program=lambda at, schedule: as_eager(at.run, schedule, at.cluster), step=_seconds(rest_s),
    ),
    Correction(
        "kernels between matmuls and of logits, of FSDP in Megatron-Core by its source: XLA's", is_engine,
        program=lambda at, schedule: as_engine(at.run, schedule, at.cluster), step=_seconds(engine_logits_s),
    ),
    Correction(
        "FSDP's own passes over weights and gradients: none", lambda run: _unfused(run) and any(run.framework.gathered),
        program=lambda at, schedule: with_fsdp(at.run, schedule, at.cluster),
    ),
    Correction("operators that torchtitan does not fuse: fused", _unfused, step=_seconds(eager_s)),
    Correction(
        "gradients over context and experts once a step: with every micro-batch",
        lambda run: _stage(run) and run.context * run.experts > 1, program=_without(_reduces_gradients),
    ),
    Correction(
        "sends of ring attention under attention: as XLA schedules them",
        lambda run: _stage(run) and run.context * run.experts > 1, program=_without_ring,
    ),
    Correction(
        "experts, grouped calls: batched matmuls", _experts, program=_program(as_in_megatron),
        instead={"program": lambda at, schedule: as_in_megatron(at.run, schedule, grouped=False)},
    ),
    Correction("experts, what Megatron does to rows: ours too", _experts, program=_without(is_routing)),
    Correction("NVFP4, linear layers: in 16 bits", _nvfp4, program=_program(as_nvfp4)),
    Correction(
        "MXFP8, rates of matmuls: those of fp8", lambda run: _stage(run) and is_mxfp8(run), program=_program(as_mxfp8)
    ),
    Correction(
        "layers recomputed, as many as a recipe says: none", lambda run: run.recomputed > 0,
        layer=lambda at: (at.run.recomputed * at.forward_s, 0.0), off=lambda run: replace(run, recomputed=0.0),
    ),
    Correction(
        "experts, casts: at the rate of plain copies", _experts, layer=_layer(quantization_s),
        instead={"layer": _layer(quantization_s, share=_LIKE_A_COPY)},
    ),
    Correction(
        "experts, permutations: at the rate of plain copies", _experts, layer=_layer(passes_s),
        instead={"layer": _layer(passes_s, share=_LIKE_A_COPY)},
    ),
    Correction(
        "experts, operators on strided tensors: at the rate of plain copies", _experts, layer=_layer(operators_s),
        instead={"layer": _layer(operators_s, share=_LIKE_A_COPY)},
    ),
    Correction("norms of queries and keys: none", lambda run: run.shape.normed, layer=_layer(heads_norms_s)),
    Correction("attention to a window: none", lambda run: run.shape.window, layer=_layer(window_s)),
    Correction(
        "experts, biases, clamps and rotation of GPT-OSS: none", lambda run: run.shape.biased,
        off=lambda run: replace(run, shape=replace(run.shape, biased=False)),
    ),
    Correction(
        "experts, fused epilogues: kernels of their own", lambda run: run.recipe.fused, off=_recipe(fused=False)
    ),
    Correction(
        "experts, HybridEP: NCCL's all-to-all of every copy", lambda run: run.recipe.dispatcher == "hybridep",
        off=_recipe(dispatcher="alltoall"),
    ),
    Correction(
        "experts, overlap of the exchange: it blocks", lambda run: run.recipe.overlapped, off=_recipe(overlapped=False)
    ),
    Correction("experts, their exchange: none", _experts, layer=_exchange, travels=True),
    Correction("casts to blocks of NVFP4: none", _nvfp4, layer=_casts),
    Correction("NVFP4, what tensor-parallel GPUs send: nothing", _nvfp4, layer=_travel, travels=True),
    Correction(
        "tensor parallelism beside matmuls of weights, Megatron-LM of 2022: it blocks",
        lambda run: "Korthikanti" in run.row.source, off=_framework(overlaps_tensor=False),
    ),
    Correction(
        "what tensor-parallel GPUs send, by userbuffers: as XLA schedules it",
        lambda run: _stage(run) and find_overlap(run) is not None, program=_program(without_tensor), layer=_tensor,
        travels=True,
    ),
    Correction(
        "gradients of weights added up by their matmuls: by a pass of their own",
        lambda run: _stage(run) and run.framework.fused_gradients, program=_without(is_stacked_gradient),
        layer=lambda at: (0.0, accumulation_s(at.run, at.cluster)),
    ),
    Correction(
        "stages in chunks: one chunk a stage", lambda run: run.chunks > 1, off=lambda run: replace(run, chunks=1)
    ),
    Correction("copies into buckets: none", _stage, step=_seconds(copies_s)),
    Correction("passes over gradients and weights once a step: none", _stage, step=_seconds(housekeeping_s)),
    Correction(
        "fp8, largest values over replicas with every chunk: once a step", _stage, travels=True,
        layer=lambda at: (largest_s(at.run, at.cluster), largest_s(at.run, at.cluster)),
    ),
    Correction("gradients of a tied embedding: one copy", _stage, step=_seconds(tied_s), travels=True),
    Correction(
        "gradients under the last backward pass, weights under the next forward: neither",
        lambda run: _stage(run) and run.framework.overlaps_gradients, off=_framework(overlaps_gradients=False),
    ),
    Correction(
        "weights behind the optimizer where a recipe gathers them so: under the next forward",
        lambda run: not run.recipe.overlaps_weights, off=_recipe(overlaps_weights=True),
    ),
    Correction(
        "gradients in buckets: all at once", lambda run: _stage(run) and run.framework.bucket_parameters,
        off=_framework(bucket_parameters=0),
    ),
    Correction(
        "a broadcast for every parameter tensor: one gather", lambda run: run.framework.per_tensor,
        off=_framework(per_tensor=False),
    ),
    Correction(
        "optimizer state cut over replicas: whole on each, gradients all-reduced",
        lambda run: _stage(run) and run.framework.sharded_optimizer, off=_framework(sharded_optimizer=False),
    ),
    Correction(
        "replicas' gradients and weights: nothing travels", _stage, travels=True,
        step=lambda at: gradients_s(at.run, at.cluster, *at.window_s),
    ),
    Correction(
        "sends between stages under other micro-batches: they block",
        lambda run: run.framework.overlaps_stages and run.stages > 1 and run.chunks > 1,
        off=_framework(overlaps_stages=False),
    ),
    Correction("sends between stages: none", lambda run: run.stages > 1, step=_sends_s, travels=True),
)  # fmt: skip
