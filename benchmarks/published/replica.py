"""The step of a framework that runs whole replicas, from the program of one of its pipeline stages. Sixth in the flow.

    step = m t_slow + (p - 1) / v t_layers + sends + gradients and weights + optimizer

m micro-batches on p stages of v chunks each (1F1B: Narayanan et al., 2021, section 2.2). The last stage has the output
head too: t_slow; the others fill and drain the pipeline: t_layers. All of it is read off one compiled micro-batch,
whose loops over layers are stretched to the layers of a stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.published.experiments import Run
from benchmarks.published.kernels import kernels_of
from benchmarks.published.programs import Program
from meshkit.spec import catalog
from meshkit.spec.cluster import Cluster
from meshkit.timeline.network import collective_time_s
from meshkit.timeline.simulate import Simulation
from meshkit.xla.hlo import Instruction, Schedule

_BYTES = {"bf16": 2, "fp32": 4}
_OPTIMIZER = "optimizer"
_WEIGHT_BYTES = 2  # gathered in the compute dtype


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
    schedule = _without(program.schedule, _is_ours)
    if run.context > 1:
        schedule = _without(schedule, _reduces_over_context)
        schedule = _without(schedule, _sends_around_ring) if view.windows else schedule
    loops = layer_loops(schedule)
    compute = _without(schedule, lambda i: _OPTIMIZER in i.source)
    share = run.stage_layers if run.stages > 1 else None

    def seconds(schedule: Schedule, forward: int | None = share, backward: int | None = share) -> float:
        trips = dict(zip(loops, (forward, *[backward] * (len(loops) - 1))))
        return view.pick(program.simulate(kernels_of(run.row, run.framework), _stretched(schedule, trips)))

    last = run.last_layers if run.stages > 1 else None
    edges, backward_s = seconds(compute, 0, 0), seconds(compute, 0)
    layers = seconds(compute) - edges
    slow = max(layers, seconds(compute, last, last))
    bubble = (run.stages - 1) / run.chunks * layers
    optimizer = (seconds(schedule, None, None) - seconds(compute, None, None)) * _optimizer_share(run)
    step = run.micro_batches * slow + bubble + optimizer
    if not view.outside:
        return step
    window = (backward_s, slow - backward_s) if view.windows else (0.0, 0.0)
    sends = 0.0 if run.framework.overlaps_stages and view.windows else _sends_s(run, cluster)
    return step + _gradients_s(run, cluster, *window) + sends


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


def _without(schedule: Schedule, unwanted: Callable[[Instruction], bool]) -> Schedule:
    """The schedule without some of its instructions; what waits for one of them no longer does."""
    gone = {i.name for body in schedule.computations.values() for i in body if unwanted(i) and not i.bodies}
    kept = {
        name: tuple(i for i in body if i.name not in gone and i.starts not in gone)
        for name, body in schedule.computations.items()
    }
    return replace(schedule, computations=kept)


def _reduces_over_context(i: Instruction) -> bool:
    """A gradient summed over the context axis with every micro-batch: frameworks sum it once, with the replicas."""
    c = i.collective
    return c is not None and c.collective == "all-reduce" and tuple(c.axes) == ("context",)


def _is_ours(i: Instruction) -> bool:
    """What only our program does: XLA's own recomputation, and accumulators of gradients filled with zeros.

    XLA recomputes (`.remat` in a name) where the program wants more memory than the GPU has; the framework's fitted.
    Frameworks fill accumulators once a step, not with every micro-batch.
    """
    fills = (
        i.cost is not None and not i.cost.matmul_flops and i.name.startswith(("loop_broadcast", "wrapped_broadcast"))
    )
    return ".remat" in i.name or fills


def _sends_around_ring(i: Instruction) -> bool:
    """A hop of ring attention: frameworks send it under the attention of the piece before (Liu et al., 2023)."""
    c = i.collective
    return c is not None and c.collective == "collective-permute" and tuple(c.axes) == ("context",)


def stage_parameters(run: Run) -> float:
    """Parameters on one GPU of the fullest stage."""
    shape = run.shape
    tables = shape.vocab * shape.hidden * (1 if run.stages > 1 or shape.tied else 2)
    return (run.stage_layers * shape.layer_parameters() + tables) / run.tensor


def _optimizer_share(run: Run) -> float:
    """What of the compiled optimizer runs on one GPU: that of the stage's layers, cut over replicas by ZeRO-1."""
    layers = run.stage_layers / run.document["model"]["layers"]
    return layers / optimizer_ways(run)


def optimizer_ways(run: Run) -> int:
    """GPUs that share the optimizer state of a stage: 1 without ZeRO-1."""
    if not run.framework.sharded_optimizer:
        return 1
    return _zero_group(run) or run.data * run.context


def _zero_group(run: Run) -> int | None:
    """The size of InternEvo's ZeRO-1 group, where the notes state one (`zero1=8`; -1: every replica)."""
    text = run.row.notes.replace(" ", "")
    if "zero1=" not in text:
        return None
    digits = text.split("zero1=", 1)[1]
    number = "".join(c for c in digits[:5].split("(")[0].split(",")[0] if c.isdigit() or c == "-")
    size = int(number) if number.lstrip("-").isdigit() else -1
    return run.data if size < 1 else min(size, run.data)


def _gradients_s(run: Run, cluster: Cluster, backward_s: float, forward_s: float) -> float:
    """Seconds that reducing gradients and gathering weights once a step adds to it.

    Args:
        run: the row.
        cluster: of the whole run.
        backward_s: of a micro-batch, under which gradients may be reduced; 0 for none.
        forward_s: the same, for the gather of weights.
    """
    members = run.data * run.context
    if members == 1:
        return 0.0
    if not run.framework.overlaps_gradients:
        backward_s = forward_s = 0.0
    size = stage_parameters(run)
    wire = _BYTES[run.framework.reduce] * size
    if run.framework.per_tensor:
        reduction = _priced(run, cluster, "all-reduce", wire, members)
        return _beside(reduction, backward_s, cluster) + _broadcasts_s(run, cluster)
    if not run.framework.sharded_optimizer:
        return _beside(_priced(run, cluster, "all-reduce", wire, members), backward_s, cluster)
    scatter = _priced(run, cluster, "reduce-scatter", wire, members)
    gather = _priced(run, cluster, "all-gather", _WEIGHT_BYTES * size, members)
    return _beside(scatter, backward_s, cluster) + _beside(gather, forward_s, cluster)


def _beside(seconds: float, window_s: float, cluster: Cluster) -> float:
    """Seconds that a collective adds to compute which it runs beside: it slows it, and may outlast it.

    A kernel beside a collective inside a domain keeps the share of its rate that the catalog has as `contended`, which
    was measured there; beside one over the network it loses the multiprocessors of NCCL's channels.
    """
    left = 1 - catalog.kernels()["nccl_channels"][-1] / cluster.gpu.sms
    if cluster.num_nvlink_domains == 1:
        left = cluster.gpu.achieved.get("contended", left)
    slowed = window_s + seconds * (1 - left) if seconds * left <= window_s else seconds
    return max(slowed, seconds) - window_s


def _broadcasts_s(run: Run, cluster: Cluster) -> float:
    """Seconds of broadcasting every parameter tensor inside the ZeRO-1 group, one after the other.

    A group of fewer GPUs than there are tensors flattens those of an owner into one.
    """
    group, sizes = optimizer_ways(run), _tensor_sizes(run)
    if group < len(sizes):
        sizes = [sum(sizes) / group] * group
    counts = Counter(sizes)
    kind = "collective-broadcast"
    return sum(n * _priced(run, cluster, kind, _WEIGHT_BYTES * size, group) for size, n in counts.items())


def _tensor_sizes(run: Run) -> list[float]:
    """Elements of each parameter tensor on one GPU: queries, keys and values in one, norms and biases apart."""
    s, head_dim = run.shape, run.shape.hidden // run.shape.heads
    qkv = s.hidden * head_dim * (s.heads + 2 * s.kv_heads)
    matrices = [qkv, s.hidden * s.hidden, *[s.hidden * s.ffn] * (3 if s.gated else 2)]
    layer = [m / run.tensor for m in matrices] + [float(s.hidden)] * 4
    return layer * run.stage_layers + [s.vocab * s.hidden / run.tensor] * (1 if s.tied else 2) + [float(s.hidden)]


def _priced(run: Run, cluster: Cluster, kind: str, size: float, members: int) -> float:
    """Seconds of a collective among replicas: neighbours on the mesh are `tensor` GPUs apart."""
    if members == 1:
        return 0.0
    inside = min(members, max(1, cluster.gpus_used_per_domain // run.tensor))
    while members % inside:
        inside -= 1
    return collective_time_s(
        kind, payload_bytes=size, gpus_per_domain=inside, domains=members // inside, cluster=cluster
    )


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
