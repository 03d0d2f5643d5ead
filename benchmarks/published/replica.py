"""The step of a framework that runs whole replicas, from the program of one of its pipeline stages. Sixth in the flow.

    step = m t_slow + (p - 1) / v t_layers + sends + gradients and weights + optimizer

m micro-batches on p stages of v chunks each (1F1B: Narayanan et al., 2021, section 2.2). The last stage has the output
head too: t_slow; the others fill and drain the pipeline: t_layers. All of it is read off one compiled micro-batch,
whose loops over layers are stretched to the layers of a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.published.corrections import Step, corrected, corrections_of
from benchmarks.published.experiments import Run
from benchmarks.published.ours import without
from benchmarks.published.programs import Program
from benchmarks.published.reduction import optimizer_ways, stage_experts, stage_parameters
from meshkit.config.cluster import Cluster
from meshkit.hlo.module import Instruction, Schedule
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
    return SCHEDULED if run.framework.overlaps_tensor else BLOCKING_INSIDE


def replica_step_s(run: Run, program: Program, cluster: Cluster, view: View) -> float:
    """Seconds of the step.

    Args:
        run: the row.
        program: of one micro-batch on one stage.
        cluster: of the whole run.
        view: how collectives are taken.
    """
    at = Step(run, cluster, program.readers, view.windows)
    corrections = [c for c in corrections_of(run) if view.outside or not c.travels]
    schedule = corrected(at, program.schedule)
    loops = layer_loops(schedule)
    compute = without(schedule, lambda i: _OPTIMIZER in i.source)
    share = run.stage_layers if run.stages > 1 else None

    def seconds(schedule: Schedule, forward: int | None = share, backward: int | None = share) -> float:
        trips = dict(zip(loops, (forward, *[backward] * (len(loops) - 1))))
        return view.pick(program.simulate(run.kernels, _stretched(schedule, trips), gpus=run.gpus))

    last = run.last_layers if run.stages > 1 else None
    edges, backward_s = seconds(compute, 0, 0), seconds(compute, 0)
    layers, more = seconds(compute) - edges, 0.0
    at = replace(at, layer_s=layers / run.stage_layers, forward_s=(layers + edges - backward_s) / run.stage_layers)
    for c in corrections:
        if c.layer:
            forward, backward = c.layer(at)
            at = replace(at, layer_s=at.layer_s + forward + backward)
            more, backward_s = more + forward + backward, backward_s + run.stage_layers * backward
    layers += run.stage_layers * more
    head = sum(c.head(at) for c in corrections if c.head)
    slow = max(layers, seconds(compute, last, last) + run.last_layers * more + head)
    bubble = (run.stages - 1) / run.chunks * layers
    optimizer = (seconds(schedule, None, None) - seconds(compute, None, None)) * _optimizer_share(run)
    at = replace(at, window_s=(backward_s, slow - backward_s) if view.windows else (0.0, 0.0))
    return run.micro_batches * slow + bubble + optimizer + sum(c.step(at) for c in corrections if c.step)


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


def _optimizer_share(run: Run) -> float:
    """What of the compiled optimizer runs on one GPU: that of the stage's layers, cut over replicas by ZeRO-1.

    Experts have fewer replicas to be cut over than the rest.
    """
    layers = run.stage_layers / run.document["model"]["layers"]
    rest, experts = stage_parameters(run), stage_experts(run)
    ways = optimizer_ways(run)
    return layers * (rest / ways + experts / max(1, ways // run.experts)) / (rest + experts)
