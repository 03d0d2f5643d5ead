"""XLA options that follow from what a step communicates and what its links take.

    weights, rules, mesh, links -> derive_options -> CompileChoices -> loop.py (plan and train alike)

A loop over layers that gathers its weights has nothing to hide the gathers of its first matmul under, nor the
reductions of its last gradients, unless XLA moves them into the iteration before or after (collective pipelining), and
copies of the weights in flight unless two iterations share a body (double buffering). Messages are combined up to the
size at which they use half of the link's bandwidth: below it latency dominates, beyond it waiting for the last array
of a larger message costs more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshkit.compile.options import CompileChoices, Option
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment
from meshkit.hlo.groups import domains_spanned
from meshkit.predict.network import collective_time_s
from meshkit.sharding.mesh import AnyMesh
from meshkit.sharding.resolve import placements_by_state
from meshkit.sharding.strategy import BYTES_OF, AxisRoles, Weight, make_weights
from meshkit.step.program import TrainProgram
from meshkit.units import format_bytes

# XLA's own: 30 MiB of output. Messages are not combined less than that.
_DEFAULT_BYTES = 30 * 2**20
# Sizes between which the bandwidth of large messages is taken.
_LARGE_BYTES = (2**32, 2**33)
# XLA plans for this share of the memory, times the option of memory_option in percent (95 by default); seen in the
# limit that its rematerialization prints: 33.9 GB of 85.9 GB at 50 percent, less arguments and results.
_XLA_FRACTION = 0.8
LIMIT = "xla_gpu_memory_limit_slop_factor"
NO_LIMIT = 10_000  # percent
_ON = "COLLECTIVE_PIPELINING_MODE_ON"
# Llama 1B on one H100, jaxlib 0.11.2, 2026-11-22: 158.6 s of compile and 491.5 ms a step with it, 5.2 s and 490.5 ms
# without. In bf16 it is worth its time: 575 ms a step with it, 624 ms without.
_FP8 = Option(
    "xla_gpu_enable_triton_gemm",
    False,
    "XLA would make and time many kernels of its own for each fp8 matmul, minutes of compile, to take cuBLAS's",
)


@dataclass(frozen=True)
class LoopTraffic:
    """What one iteration of the loop over layers communicates over the axes that shard its weights."""

    axes: tuple[str, ...]  # mesh axes, of most of the bytes
    gathered_bytes: float  # weights of one layer, whole over these axes, in the compute precision
    gpus_per_domain: int  # of a group
    domains: int  # that a group spans


def choices_for(experiment: Experiment, program: TrainProgram, mesh: AnyMesh) -> CompileChoices:
    """What an experiment's step is compiled with, by plan, by a rehearsal and on GPUs."""
    return CompileChoices(
        options={**program.xla_options, **experiment.xla},
        derived=derive_options(experiment, program, mesh),
        memory_fraction=experiment.train.memory_fraction,
        pgle=experiment.train.pgle,
    )


def derive_options(experiment: Experiment, program: TrainProgram, mesh: AnyMesh) -> tuple[Option, ...]:
    """Options for the step of an experiment: its memory, and what its loop over layers gathers."""
    if experiment.cluster.is_cpu:
        return ()
    options = [memory_option(experiment.train.memory_fraction, offloads=experiment.train.offloads)]
    if experiment.train.precision == "fp8":
        options.append(_FP8)
    traffic = None if _waits_in_every_layer(experiment, mesh) else loop_traffic(experiment, program, mesh)
    return tuple(options) if traffic is None else (*options, *options_for(traffic, experiment.cluster))


def memory_option(memory_fraction: float, *, offloads: bool = False) -> Option:
    """XLA's own limit, beyond which it recomputes and runs collectives one by one, out of reach of a step that fits.

    XLA counts before it knows which buffers share memory, so that a step can be over the limit and fit: Llama 3 70B on
    64 H100s (data 2 x fsdp 32, whole layers recomputed) is counted as 79.8 GiB and takes 70.0. A step that does not fit
    is compiled again with the limit at what the client may take, but where activations wait in host memory: XLA counts
    them, some twice, as if they lay on the GPU, and would make room that they do not take.
    """
    why = "XLA counts what waits in host memory as the GPU's, and would make room for it"
    tight = None
    if not offloads:
        why = "XLA counts more than a step takes, and would recompute and serialize one that fits"
        percent = round(100 * memory_fraction / _XLA_FRACTION)
        tight = (percent, f"memory_fraction gives the step {memory_fraction:.0%} of the memory, and it needs more")
    return Option(LIMIT, NO_LIMIT, why, tight=tight)


def _waits_in_every_layer(experiment: Experiment, mesh: AnyMesh) -> bool:
    """Whether every layer waits for collectives of its own: those of tensor and expert parallelism and of a pipeline.

    They share a stream with the gathers and would queue behind them.
    """
    roles = AxisRoles.of(experiment.rules)
    waited_for = roles.tensor | roles.residual | roles.expert
    return experiment.pipeline.axis is not None or any(mesh.shape.get(axis, 1) > 1 for axis in waited_for)


def loop_traffic(experiment: Experiment, program: TrainProgram, mesh: AnyMesh) -> LoopTraffic | None:
    """What the loop over layers gathers; None if nothing."""
    placed, sizes = placements_by_state(program.model.params, mesh, experiment.rules), mesh.shape
    bytes_each = BYTES_OF[experiment.train.precision]
    moved: dict[tuple[str, ...], float] = {}
    for weight in make_weights(placed, AxisRoles.of(experiment.rules)):
        axes = _gathered_over(weight, program.deferred, sizes)
        if weight.stack > 1 and axes:
            moved[axes] = moved.get(axes, 0.0) + bytes_each * _elements(weight, axes, sizes) / weight.stack
    if not moved:
        return None
    axes = max(moved, key=lambda over: moved[over])
    domains = domains_spanned(experiment.mesh.placement(experiment.cluster), axes)
    return LoopTraffic(axes, sum(moved.values()), math.prod(sizes[name] for name in axes) // domains, domains)


def options_for(traffic: LoopTraffic, cluster: Cluster) -> tuple[Option, ...]:
    """The options for a loop that communicates so much."""
    over, layer = " x ".join(traffic.axes), format_bytes(traffic.gathered_bytes)
    pipelined = f"each layer gathers {layer} over {over}, which can only be hidden under the layer before"
    kinds = ("all-gather", "reduce-scatter", "all-reduce")
    options = [
        Option(f"xla_gpu_pipeline_{kind.replace('-', '_')}", _ON, pipelined, costs_memory=True) for kind in kinds
    ]
    options.append(
        Option(
            "xla_gpu_enable_while_loop_double_buffering",
            True,
            f"the {layer} gathered for the next layer would be copied once a layer",
            costs_memory=True,
        )
    )
    for kind in kinds:
        size = half_bandwidth_bytes(kind, traffic, cluster)
        # XLA counts what a collective leaves on a GPU: of a reduce-scatter, its share.
        limit = size // (traffic.gpus_per_domain * traffic.domains) if kind == "reduce-scatter" else size
        options.append(
            Option(
                f"xla_gpu_{kind.replace('-', '_')}_combine_threshold_bytes",
                limit,
                f"over {over} {kind} of less than {format_bytes(size)} uses less than half of the bandwidth",
                costs_memory=True,
            )
        )
    return tuple(options)


def half_bandwidth_bytes(collective: str, traffic: LoopTraffic, cluster: Cluster) -> int:
    """The smallest message, XLA's default doubled, that uses half of the bandwidth of a large one; at most a layer."""

    def seconds(size: float) -> float:
        return collective_time_s(
            collective,
            payload_bytes=size,
            gpus_per_domain=traffic.gpus_per_domain,
            domains=traffic.domains,
            cluster=cluster,
        )

    small, large = _LARGE_BYTES
    per_byte = (seconds(large) - seconds(small)) / (large - small)
    size = _DEFAULT_BYTES
    while size * per_byte < 0.5 * seconds(size) and size < traffic.gathered_bytes:
        size *= 2
    return size


def _gathered_over(weight: Weight, deferred: Sequence[str], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Axes over which a weight is gathered where it is used: those that cut it and do not work on shards."""
    axes = weight.cuts["compute"] - weight.stays - set(deferred)
    return tuple(name for name in sizes if name in axes and sizes[name] > 1)


def _elements(weight: Weight, gathered: Sequence[str], sizes: Mapping[str, int]) -> float:
    """Elements of a weight on one GPU, whole over the gathered axes."""
    return weight.size / math.prod(sizes[name] for name in weight.cuts["compute"] - set(gathered))
