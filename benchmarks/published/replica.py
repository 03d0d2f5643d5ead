"""The step of a framework that runs whole replicas, from the program of one of its pipeline stages. Sixth in the flow.

    step = m t_slow + (p - 1) / v t_layers + sends + gradients and weights + optimizer

m micro-batches on p stages of v chunks each (1F1B: Narayanan et al., 2021, section 2.2). The last stage has the output
head too: t_slow; the others fill and drain the pipeline: t_layers. All of it is read off one compiled micro-batch,
whose loops over layers are stretched to the layers of a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.published.blocks import as_mxfp8, as_nvfp4, casts_s, slowed_s, travel_s
from benchmarks.published.eager import between_matmuls, between_s, logits_s, step_s
from benchmarks.published.experiments import Run
from benchmarks.published.experts import as_in_megatron, beside_s, exchange_s, is_routing, passes_s, quantization_s
from benchmarks.published.kernels import kernels_of
from benchmarks.published.ours import is_ours, repeats, rerun
from benchmarks.published.programs import Program
from benchmarks.published.reduction import copies_s, gradients_s, optimizer_ways, stage_experts, stage_parameters
from meshkit.config.cluster import Cluster
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.network import collective_time_s
from meshkit.predict.simulate import Simulation

_OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class View:
    """How collectives are taken.

    Attributes:
        pick: reads seconds off a simulation.
        outside: whether communication of the framework's own counts.
        windows: whether the framework may hide it under compute.
    """

    pick: Callable[[Simulation], float]
    outside: bool = True
    windows: bool = False


SCHEDULED = View(lambda s: s.timeline.steps[0].window[1], windows=True)
HIDDEN = View(lambda s: s.all_overlapped_s, outside=False)
BLOCKING = View(lambda s: s.all_exposed_s)
BLOCKING_INSIDE = View(lambda s: s.all_exposed_s, windows=True)  # collectives of tensor and context parallelism block


def framework_view(run: Run) -> View:
    """The view that predicts a run."""
    if run.framework.chunked_tensor and run.tensor > 1:
        scheduled = SCHEDULED.pick
        return replace(SCHEDULED, pick=lambda s: s.all_overlapped_s + (scheduled(s) - s.all_overlapped_s) / run.tensor)
    return SCHEDULED if run.framework.overlaps_tensor else BLOCKING_INSIDE


def replica_step_s(run: Run, program: Program, cluster: Cluster, view: View) -> float:
    """Seconds of the step.

    Args:
        run: the row.
        program: of one micro-batch on one stage.
        cluster: of the whole run.
        view: how collectives are taken.
    """
    again = repeats(program.schedule)
    schedule = without(program.schedule, lambda i: i.name in again)
    schedule = rerun(run, without(schedule, is_ours(run)))
    replaced = between_matmuls(run, schedule)
    schedule = without(schedule, lambda i: i.name in replaced)
    if run.context * run.experts > 1:
        schedule = without(schedule, _reduces_gradients)
        schedule = without(schedule, _sends_around_ring) if view.windows else schedule
    if run.shape.experts:
        schedule = without(as_in_megatron(run, schedule), is_routing)
    schedule = as_mxfp8(run, as_nvfp4(run, schedule))
    loops = layer_loops(schedule)
    compute = without(schedule, lambda i: _OPTIMIZER in i.source)
    share = run.stage_layers if run.stages > 1 else None

    def seconds(schedule: Schedule, forward: int | None = share, backward: int | None = share) -> float:
        trips = dict(zip(loops, (forward, *[backward] * (len(loops) - 1))))
        kernels = kernels_of(run.row, run.framework)
        return view.pick(program.simulate(kernels, _stretched(schedule, trips), gpus=run.gpus))

    last = run.last_layers if run.stages > 1 else None
    edges, backward_s = seconds(compute, 0, 0), seconds(compute, 0)
    layers = seconds(compute) - edges
    rerun_s = run.recomputed * (layers + edges - backward_s) / run.stage_layers  # forward, of some layers
    more = rerun_s + _around_experts_s(run, cluster, view, layers / run.stage_layers) + _in_blocks_s(run, cluster, view)
    more += run.recomputed * _in_blocks_s(run, cluster, view, backward=False)
    forward, backward = between_s(run, cluster)
    more, backward_s = more + forward + backward, backward_s + run.stage_layers * backward
    layers += run.stage_layers * more
    slow = max(layers, seconds(compute, last, last) + run.last_layers * more + logits_s(run, cluster))
    bubble = (run.stages - 1) / run.chunks * layers
    optimizer = (seconds(schedule, None, None) - seconds(compute, None, None)) * _optimizer_share(run)
    step = run.micro_batches * slow + bubble + optimizer + step_s(run, cluster) + copies_s(run, cluster)
    if not view.outside:
        return step
    window = (backward_s, slow - backward_s) if view.windows else (0.0, 0.0)
    sends = 0.0 if run.framework.overlaps_stages and view.windows else _sends_s(run, cluster)
    return step + gradients_s(run, cluster, *window) + sends


def _around_experts_s(run: Run, cluster: Cluster, view: View, matmuls_s: float) -> float:
    """Seconds of a layer and micro-batch of what Megatron does for experts beside the matmuls of `matmuls_s`."""
    if not run.shape.experts:
        return 0.0
    more = quantization_s(run, cluster) + passes_s(run, cluster)
    if not view.outside:
        return more
    return more + (beside_s(run, cluster, matmuls_s + more) if view.windows else exchange_s(run, cluster))


def _in_blocks_s(run: Run, cluster: Cluster, view: View, *, backward: bool = True) -> float:
    """Seconds of a layer and micro-batch of what TransformerEngine does beside block-scaled matmuls; 0 without them."""
    total = 0.0
    for forward in (True, False) if backward else (True,):
        total += casts_s(run, cluster, forward=forward)
        blocking, beside = travel_s(run, cluster, forward=forward)
        if view.outside:
            total += blocking + (slowed_s(beside, cluster) if view.windows else beside)
    return total


def layer_loops(schedule: Schedule) -> list[str]:
    """Names of the loops over layers in the entry, forward first."""
    return [i.name for i in schedule.computations[schedule.entry] if i.kind == "while" and (i.trip_count or 0) > 1]


def _stretched(schedule: Schedule, trips: dict[str, int | None]) -> Schedule:
    """The schedule with other trip counts of loops of its entry; None leaves one as it is."""

    def one(i: Instruction) -> Instruction:
        wanted = trips.get(i.name)
        return i if wanted is None else replace(i, trip_count=wanted)

    entry = tuple(one(i) for i in schedule.computations[schedule.entry])
    return replace(schedule, computations={**schedule.computations, schedule.entry: entry})


def without(schedule: Schedule, unwanted: Callable[[Instruction], bool]) -> Schedule:
    """The schedule without some of its instructions; what waits for one of them no longer does."""
    gone = {i.name for body in schedule.computations.values() for i in body if unwanted(i) and not i.bodies}
    kept = {
        name: tuple(i for i in body if i.name not in gone and i.starts not in gone)
        for name, body in schedule.computations.items()
    }
    return replace(schedule, computations=kept)


def _reduces_gradients(i: Instruction) -> bool:
    """A gradient summed over context or replicas with every micro-batch: frameworks sum it once, with all replicas."""
    c = i.collective
    return c is not None and c.collective == "all-reduce" and set(c.axes) <= {"context", "expert"}


def _sends_around_ring(i: Instruction) -> bool:
    """A hop of ring attention: frameworks send it under the attention of the piece before (Liu et al., 2023)."""
    c = i.collective
    return c is not None and c.collective == "collective-permute" and tuple(c.axes) == ("context",)


def _optimizer_share(run: Run) -> float:
    """What of the compiled optimizer runs on one GPU: that of the stage's layers, cut over replicas by ZeRO-1.

    Experts have fewer replicas to be cut over than the rest.
    """
    layers = run.stage_layers / run.document["model"]["layers"]
    rest, experts = stage_parameters(run), stage_experts(run)
    ways = optimizer_ways(run)
    return layers * (rest / ways + experts / max(1, ways // run.experts)) / (rest + experts)


def _sends_s(run: Run, cluster: Cluster) -> float:
    """Seconds of sends between stages that a stage waits for: one forward and one backward a micro-batch and chunk."""
    if run.stages == 1:
        return 0.0
    payload = 2 * run.micro_batch * run.length * run.shape.hidden / run.tensor / run.context
    replica = run.tensor * run.context * run.data
    crosses = replica >= cluster.gpus_used_per_domain and cluster.num_nvlink_domains > 1
    inside, domains = (1, 2) if crosses else (2, 1)
    one = collective_time_s(
        "collective-permute", payload_bytes=payload, gpus_per_domain=inside, domains=domains, cluster=cluster
    )
    return 2 * run.chunks * run.micro_batches * one
