"""The report of plan, rehearse and profile, as pydantic models.

`meshkit.report.views` draws the terminal's text and the HTML page from `report.json`. Values are in SI units. A key
without a value is None (`null`), never 0 and never NaN. Keys may be added, never renamed. The docstring of a part is
its description in the JSON Schema. A part without data is null: a plan has no data quality, and a run without metrics
has no history.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from meshkit.config.files import write_file
from meshkit.hlo.pipeline_report import ScheduleCost
from meshkit.predict.interval import StepInterval
from meshkit.units import format_bytes, format_percent, format_seconds

SCHEMA = "meshkit.report/1"
REPORT_FILE = "report.json"
Source = Literal["plan", "rehearse", "profile"]
WORD: dict[Source, str] = {"plan": "predicted", "rehearse": "rehearsed", "profile": "measured"}
LinkName = Literal["nvlink", "infiniband"]
WaitMethod = Literal["clocked", "clock_free"]


class Part(BaseModel):
    """A piece of any JSON output. It is frozen, keeps unknown keys of later versions and refuses non-finite values."""

    model_config = ConfigDict(
        frozen=True,
        extra="allow",
        allow_inf_nan=False,
        serialize_by_alias=True,
        protected_namespaces=(),
        json_schema_serialization_defaults_required=True,
        defer_build=True,  # Most processes use only a few of the many parts.
    )

    @classmethod
    def from_sources(cls, *sources: object, **values: Any) -> Self:
        """Make the part from `values`; other fields are from the first source with an attribute of that name."""
        for name in cls.model_fields.keys() - values.keys():
            if (source := next((s for s in sources if hasattr(s, name)), None)) is not None:
                values[name] = getattr(source, name)
        return cls(**values)

    def to_json(self) -> str:
        """Return the JSON text, as `--json` prints it and as it is in run folders."""
        return self.model_dump_json(indent=2)


class ClusterPart(Part):
    """The hosts, GPUs and links."""

    gpu: str | None = None
    hosts: int | None = None
    gpus_per_host: int | None = None
    num_gpus: int | None = None
    nvlink_domain_size: int | None = None
    num_nvlink_domains: int | None = None
    scale_up: str | None = None
    fabric: str | None = None


class MeshAxisPart(Part):
    """One mesh axis with its factors on each link, outermost axis first."""

    axis: str
    size: int
    nvlink: int | None = None
    infiniband: int | None = None


class WindowPart(Part):
    """The steps and devices that the means are taken over."""

    steps: int
    devices: int
    processes_seen: int = 1
    processes_expected: int = 1
    aggregation: Literal["mean"] = "mean"


class StepPart(Part):
    """One step: `compute_s + exposed_s + other_s + idle_s == time_s`, `overlapped_s + exposed_s == communication_s`.

    A measured `idle_s` is split into idle time inside the step, between steps, and before a step's input arrives.
    """

    time_s: float | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    overlapped_s: float | None = None
    exposed_s: float | None = None
    other_s: float | None = None
    idle_s: float | None = None
    bubble_s: float | None = None
    bubble_fraction: float | None = None
    model_flops: float | None = None
    mfu: float | None = None
    mfu_causal: float | None = None
    hfu: float | None = None
    tokens_per_s_per_gpu: float | None = None
    examples_per_s_per_gpu: float | None = None
    all_overlapped_s: float | None = None
    all_exposed_s: float | None = None
    idle_inside_s: float | None = None
    idle_between_s: float | None = None
    idle_input_s: float | None = None
    time_interval: StepInterval | None = None
    time_interval_reason: str | None = None


class SpreadPart(Part):
    """How one quantity varies over the devices and steps of the window."""

    min: float | None = None
    median: float | None = None
    p90: float | None = None
    max: float | None = None
    worst_device: int | None = None
    worst_step: int | None = None


class SpreadsPart(Part):
    """The spread of the step's main quantities; all None in a prediction."""

    time_s: SpreadPart = SpreadPart()
    compute_s: SpreadPart = SpreadPart()
    exposed_s: SpreadPart = SpreadPart()
    idle_s: SpreadPart = SpreadPart()


class OpPart(Part):
    """One collective instruction; `key` survives a recompile, `name` does not.

    Attributes:
        transfer_s: the part of `busy_s` that moves data, without waiting for peers; null if unknown.
        causes: place in the model's code -> bytes of the `arrays` that come from it.
    """

    name: str
    key: str
    source: str | None = None
    line: str | None = None
    count: int | float
    payload_bytes: int | float | None = None
    busy_s: float | None = None
    transfer_s: float | None = None
    exposed_s: float | None = None
    arrays: int = 1
    causes: dict[str, float] = {}

    def combined_text(self, most: int = 3) -> str:
        """Return `24 arrays: 62 % models/llama.py:88 attention/dot_general, ...`; empty for a collective of one array.

        If all arrays come from one place in the code, return only that place.
        """
        whole = sum(self.causes.values())
        if not whole or self.arrays < 2:
            return ""
        if len(self.causes) == 1:
            return next(iter(self.causes))
        listed = [f"{format_percent(size / whole)} {cause}" for cause, size in list(self.causes.items())[:most]]
        rest = len(self.causes) - len(listed)
        return f"{self.arrays} arrays: {', '.join(listed)}" + (f", {rest} other{'s' * (rest > 1)}" if rest else "")


class CommunicationPart(Part):
    """Collectives of one kind with the same axes, link, dtype and group shape; `axes == []` means no known axis.

    `replica_groups` (`{0,1},{2,3}`) distinguishes rows if no mesh is known.

    `bus_bandwidth_peak_bytes_per_s` is the limit of the group's links; reductions inside switches can exceed it.
    """

    axes: tuple[str, ...]
    axes_complete: bool | None = None
    link: LinkName | None = None
    fabric: str | None = None
    collective: str | None = None
    dtype: str | None = None
    group_size: int | None = None
    num_groups: int | None = None
    gpus_per_domain: int | None = None
    replica_groups: str | None = None
    count: int | float
    payload_bytes: int | float | None = None
    wire_bytes: int | float | None = None
    wire_bytes_nvlink: int | float | None = None
    wire_bytes_infiniband: int | float | None = None
    time_s: float | None = None
    overlapped_s: float | None = None
    exposed_s: float | None = None
    sole_exposed_s: float | None = None
    exposed_wait_s: float | None = None
    busy_s: float | None = None
    transfer_s: float | None = None
    wait_s: float | None = None
    bus_bandwidth_bytes_per_s: float | None = None
    bus_bandwidth_peak_bytes_per_s: float | None = None
    ops: tuple[OpPart, ...] = ()


class RemedyPart(Part):
    """A change to an experiment that was compiled: it makes the step fit, or sets another XLA option.

    Attributes:
        settings: values for `--set`.
        what: the change in words.
        time_s: the predicted step time with the change.
        cost_s: `time_s` minus the step time without the change (with enough memory); below 0 it is a gain.
    """

    settings: tuple[str, ...]
    what: str
    time_s: float | None = None
    cost_s: float | None = None
    peak_bytes: int | None = None
    margin_bytes: int | None = None


class CliffPoint(Part):
    """The step, compiled for a memory pool of `pool_bytes`.

    Attributes:
        arena_bytes: size of all temporaries, which are one contiguous allocation.
        recomputed_kernels: number of kernels that run twice because XLA saves memory.
        recomputed_s: seconds of the second runs per step.
    """

    pool_bytes: int
    time_s: float
    exposed_s: float
    peak_bytes: int
    arena_bytes: int
    fits: bool
    recomputed_kernels: int
    recomputed_s: float


class CliffPart(Part):
    """The pool size below which XLA recomputes or serializes to save memory, from compiles with other pools.

    Attributes:
        distance_bytes: bytes from that size to the pool; below 0 if XLA saves memory already.
        before, beyond: nearest compiles above and below that size; if one is missing, both and the distance are null.
        points: all compiles, most memory first.
    """

    distance_bytes: int | None = None
    before: CliffPoint | None = None
    beyond: CliffPoint | None = None
    points: tuple[CliffPoint, ...]


class MemoryPart(Part):
    """Memory of the fullest GPU, compared with the client's pool.

    `reserved_bytes` is memory that the compiler does not count: `context_bytes` and `nccl_bytes` outside of the pool,
    `cudnn_workspace_bytes` and `fragmentation_bytes` inside of it. `remedies` and `cliff` are null unless requested.
    For a program that ran, `peak_bytes` is the allocator's peak since the process began, and `program_bytes` is XLA's
    count.
    """

    capacity_bytes: int | None = None
    pool_bytes: int | None = None
    peak_bytes: int | None = None
    program_bytes: int | None = None
    reserved_bytes: int | None = None
    margin_bytes: int | None = None
    fits: bool | None = None
    parameters_bytes: int | None = None
    optimizer_bytes: int | None = None
    gradients_bytes: int | None = None
    activations_bytes: int | None = None
    temporary_bytes: int | None = None
    context_bytes: int | None = None
    nccl_bytes: int | None = None
    nccl_communicators: int | None = None
    cudnn_workspace_bytes: int | None = None
    fragmentation_bytes: int | None = None
    remedies: tuple[RemedyPart, ...] | None = None
    cliff: CliffPart | None = None


class OptionPart(Part):
    """A compiler option; `why` is the reason why it is set, `[xla]` if the user set it."""

    name: str
    value: bool | int | float | str
    why: str


class ProgramPart(Part):
    """The compiled program; `alternatives` are other XLA options (null unless requested).

    `fewer_hosts`, null without `launch.min_hosts`, is the step after the loss of hosts.
    """

    fingerprint: str | None = None
    options_hash: str | None = None
    options: tuple[OptionPart, ...] | None = None
    alternatives: tuple[RemedyPart, ...] | None = None
    fewer_hosts: tuple[RemedyPart, ...] | None = None
    jax: str | None = None
    jaxlib: str | None = None
    partitioner: str | None = None


class CompilePart(Part):
    """Seconds of lowering and compiling."""

    lower_s: float | None = None
    compile_s: float | None = None
    cached: bool | None = None


class TrainingPart(Part):
    """Duration and cost of the whole training; `checkpoint_s` is one checkpoint, not included in the duration."""

    steps: int | None = None
    hours: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    checkpoint_s: float | None = None


class Warning_(Part):
    """A reason to read a number with care; `seconds` is the affected time of the step, if known."""

    code: str
    message: str
    seconds: float | None = None


class FindingPart(Part):
    """A cause of a long step.

    Attributes:
        seconds: seconds per step that a fix saves.
        evidence: keys of the report that show the cause.
        hint: a fix to try.
        step_s: the step time without the cause.
    """

    model_config = ConfigDict(populate_by_name=True)
    code: str
    severity: Literal["note", "warning"]
    message: str
    seconds: float | None = None
    evidence: tuple[str, ...] = ()
    hint: str | None = Field(default=None, alias="try")
    step_s: float | None = None


class PipelinePart(ScheduleCost, Part):
    """A pipeline's schedule and its cost; all numbers but those of permutes are closed forms of the schedule.

    Attributes:
        axis: the mesh axis that splits the layers.
        schedule, stages, virtual_stages, microbatches: name, number of stages, chunks of layers on each, microbatches.
        layers, padding_layers: number of the model's layers, and of inactive layers that are computed too.
        warmup_ticks, steady_ticks, drain_ticks: ticks in which stages run only forward, both ways, only backward.
        slots: the most inputs of chunks that a stage keeps.
        bubble_fraction: share of the layers' work that is not useful, padding included.
        executed_over_useful: executed FLOP of the layers divided by their useful FLOP.
        permute_count: messages between stages per step and GPU.
        permute_s, permute_exposed_s: time of these messages, and the part that no compute hides.
        picture: microbatch in each stage and tick: `F3` forward, `B1` backward, or both; `F3.1` in chunk 1; null if too
            large.
    """

    permute_count: int | float | None = None
    permute_s: float | None = None
    permute_exposed_s: float | None = None
    picture: tuple[tuple[str, ...], ...] | None = None


class QualityPart(Part):
    """How reliable a measurement is.

    Attributes:
        events: number of operations that were read, over all processes.
        dropped_events: number of events that the profiler reports as lost.
        mapped_share: share of the communication's busy seconds whose instruction is known.
        axis_mapped_share: share of the communication's busy seconds that runs along known mesh axes.
        kernels_mapped_share: share of the kernels' busy seconds whose instruction is known.
        graph_s: seconds per step of kernels inside CUDA graphs whose instruction is unknown.
        fused_s: seconds per step in kernels that compute and communicate at once.
        axes_withheld: whether seconds by axis are null because too few instructions are known.
        missing_processes: processes without a trace.
        damaged_processes: processes whose trace ends early or cannot be read.
        partial_steps: number of executions that were left out, since not every device has them whole.
        clocks: number of different clocks in the traces; 1 needs no alignment.
        clock_residual_s: median spread of the ends of one collective over its processes, after alignment.
        clock_offset_s: the largest offset between clocks that was corrected.
        wait_method: how waits were measured: from start times (`clocked`), or the shortest duration (`clock_free`).
        overhead_s: seconds that the capture added to a step (traced step time - untraced median).
        wait_clock_free_s, wait_clocked_s: waiting per step by each method; null if it could not be used.
    """

    events: int | None = None
    dropped_events: int | None = None
    mapped_share: float | None = None
    axis_mapped_share: float | None = None
    kernels_mapped_share: float | None = None
    graph_s: float | None = None
    fused_s: float | None = None
    axes_withheld: bool | None = None
    missing_processes: tuple[int, ...] = ()
    damaged_processes: tuple[int, ...] = ()
    partial_steps: int | None = None
    clocks: int | None = None
    clock_residual_s: float | None = None
    clock_offset_s: float | None = None
    wait_method: WaitMethod | None = None
    overhead_s: float | None = None
    wait_clock_free_s: float | None = None
    wait_clocked_s: float | None = None


class KernelPart(Part):
    """One compute instruction; `key` survives a recompile, `name` does not.

    Attributes:
        line: source file and line of the model code.
        busy_s: sum of the durations of its runs (not additive if kernels overlap).
    """

    name: str
    key: str | None = None
    source: str | None = None
    line: str | None = None
    count: int | float
    busy_s: float | None = None


class KernelClassPart(Part):
    """Compute of one kind in a step.

    Attributes:
        kind: `matmul`, `attention`, `convolution`, `elementwise`, ..., or `unmapped`.
        time_s: share of `step.compute_s`; each of k operations that run at once gets 1/k of the time.
        busy_s: sum of the durations of all runs.
        ops: the instructions with the most busy seconds.
    """

    kind: str
    count: int | float
    time_s: float | None = None
    busy_s: float | None = None
    ops: tuple[KernelPart, ...] = ()


class KernelsPart(Part):
    """Compute by kind, the kind with the most time first."""

    classes: tuple[KernelClassPart, ...] = ()


class LateKernelPart(Part):
    """An instruction that takes longer on a late device.

    Attributes:
        usual_s: seconds per step on the median device.
        excess_s: seconds per step above `usual_s`.
        least_s, most_s: its seconds on the late device in the step with the fewest and with the most.
    """

    name: str
    line: str | None = None
    excess_s: float
    usual_s: float
    least_s: float
    most_s: float


class LatePart(Part):
    """Why a device takes longer than the usual (median) device; means over the steps.

    Attributes:
        behind_s: seconds per step above the usual device's time, without waiting for peers.
        late_share: share of the steps in which the device was late.
        causes: cause -> seconds, the most first: `kernels` (listed in `kernels`), `clock` (compute-bound kernels are
            slower by one factor), `memory` (only memory-bound kernels are), `copies`, `communication` (moving data),
            `input` (waiting for the next batch), `host` (idle between steps), `launch_gaps` (idle between kernels),
            `not_known`. Parts in which the device is faster are left out.
        compute_bound_ratio, memory_bound_ratio: median ratio of such kernels' seconds to the usual device's.
        kernels: kernels that are slower for no common cause, the largest excess first.
    """

    behind_s: float
    late_share: float
    causes: dict[str, float] = {}
    compute_bound_ratio: float | None = None
    memory_bound_ratio: float | None = None
    kernels: tuple[LateKernelPart, ...] = ()


class StragglerPart(Part):
    """A device that others waited for, or that is late.

    Attributes:
        device, process, host: the device's id, its process and its host.
        caused_wait_s: seconds per step that other devices waited for this one, as a sum over these devices.
        waited_s: seconds per step that this device waited.
        last_share: share of its collectives that it reached last.
        delay_s: seconds per step that other devices waited for this one, as a mean over these devices.
        compute_s: seconds of compute per step.
        late: why it takes longer than the usual device; null if that is less than 1 % of the step.
    """

    device: int
    process: int | None = None
    host: str | None = None
    caused_wait_s: float | None = None
    waited_s: float | None = None
    last_share: float | None = None
    delay_s: float | None = None
    compute_s: float | None = None
    late: LatePart | None = None


class StragglersPart(Part):
    """Devices ranked by the wait that they cause, the worst first.

    Attributes:
        method: how waits were measured, as in `QualityPart.wait_method`.
        instances: number of collectives that were compared: those with a trace of every member of the group.
    """

    method: WaitMethod | None = None
    instances: int | None = None
    devices: tuple[StragglerPart, ...] = ()


class StepSample(Part):
    """One captured step: means over its devices, the slowest device, and why the step is left out of other numbers."""

    step: int
    time_s: float
    compute_s: float
    communication_s: float
    overlapped_s: float
    exposed_s: float
    other_s: float
    idle_s: float
    slowest_device: int
    slowest_time_s: float
    left_out: str | None = None


class HistoryPart(Part):
    """The metrics of a run, in columns of equal length; of a long run, evenly spaced steps.

    Attributes:
        steps: step numbers.
        values: column -> its value at each step; null if it was not recorded.
        trend: column -> relative change of the median from the first third of the steps to the last third, without
            warm-up steps.
    """

    steps: tuple[int, ...] = ()
    values: dict[str, tuple[float | None, ...]] = {}
    trend: dict[str, float | None] = {}


class GoodputPart(Part):
    """A run's wall time by activity, over all attempts; the parts add up to `wall_s`.

    Attributes:
        share: `step_s` / `wall_s`.
        wall_s: time of all attempts and of the restarts between them. Intended pauses do not count: those after an
            attempt that finished, was interrupted, or was refused for an error in its experiment.
        attempts: number of attempts.
        lost_steps: steps that a later attempt repeated, counted each time.
        step_s: time of the steps that were not lost.
        data_wait_s: time in which the host waited for a batch and the devices were idle.
        checkpoint_s: time in which a checkpoint blocked the steps.
        start_s: from the start of the process to the compile: imports, rendezvous, tracing.
        init_s, restore_s: time to make the state of a new run, and to restore the state of a resumed run.
        lost_s: time of the lost steps, with their waits for data.
        restart_s: from the last recorded activity of an attempt to the start of the next.
        other_s: the rest: starting and ending a capture, comparing replicas, closing files.
    """

    share: float | None = None
    wall_s: float | None = None
    attempts: int | None = None
    lost_steps: int | None = None
    step_s: float | None = None
    data_wait_s: float | None = None
    evaluate_s: float | None = None
    checkpoint_s: float | None = None
    start_s: float | None = None
    compile_s: float | None = None
    restore_s: float | None = None
    init_s: float | None = None
    lost_s: float | None = None
    restart_s: float | None = None
    other_s: float | None = None


class SparesPart(Part):
    """Goodput with a number of spare hosts.

    Attributes:
        hosts: spare hosts of each pool.
        pools: groups of hosts that cannot replace each other: NVLink domains that span hosts; else 1.
        gpus: spare GPUs of all pools.
        goodput: goodput, where the job waits for the repair of a lost host if there is no spare host.
        goodput_of_all: `goodput` x training GPUs / all GPUs.
    """

    hosts: int
    pools: int
    gpus: int
    goodput: float
    goodput_of_all: float


class FailuresPart(Part):
    """Goodput of a training under failures, predicted by `meshkit plan --failures`.

    Attributes:
        per_host_day: failures per host and day.
        rate_source: source of that rate: `given`, or a study of the catalog.
        hosts: hosts that train.
        between_s: mean time between failures of the whole job.
        host_share: share of failures after which a host is replaced.
        detection_s: from a failure until the last process has ended.
        restart_s: from `detection_s` until the next attempt can make a step, without `read_s`.
        repair_hours: hours until a lost host is back.
        storage_bytes_per_s: storage bandwidth of all hosts together.
        blocked_s: seconds for which a save blocks the steps.
        write_s: from the end of `blocked_s` until the checkpoint can be restored.
        read_s: seconds to read the state.
        every: steps between the experiment's checkpoints; null if it writes none: goodput is then for `best_every`.
        goodput: share of the time in steps that are not lost, if a spare host is always available.
        goodput_low, goodput_high: one month (30 days) in ten has less than the first, one in ten more than the second.
        saving_share, lost_share, down_share: shares of time in saves, in repeated steps, in detection and restarts.
        best_every: steps between checkpoints that give the highest goodput, `best_goodput`.
        best_snapshot_every, snapshot_goodput: the same for snapshots in host memory. Each is copied to another host in
            `snapshot_write_s`; they take `snapshot_host_bytes` of a host's memory.
        spares: goodput by number of spare hosts.
        published: study -> goodput at the study's failure rate.
    """

    per_host_day: float
    rate_source: str
    hosts: int
    between_s: float
    host_share: float
    detection_s: float
    restart_s: float
    repair_hours: float
    storage_bytes_per_s: float
    blocked_s: float
    write_s: float
    read_s: float
    every: int | None = None
    goodput: float
    goodput_low: float
    goodput_high: float
    saving_share: float
    lost_share: float
    down_share: float
    best_every: int
    best_goodput: float
    best_snapshot_every: int
    snapshot_goodput: float
    snapshot_write_s: float
    snapshot_host_bytes: float
    spares: tuple[SparesPart, ...] = ()
    published: dict[str, float] = {}


class FeedbackPart(Part):
    """The step before a recompile with measured costs (XLA's profile-guided latency estimator).

    Attributes:
        profile: the file of measured costs that the program was compiled with.
        before_fingerprint: fingerprint of the program before the recompile.
        before_time_s, before_exposed_s: values of that program's step; `step` is of the recompiled program.
    """

    profile: str | None = None
    before_fingerprint: str | None = None
    before_time_s: float | None = None
    before_exposed_s: float | None = None


class BesidePart(Part):
    """Measured and predicted seconds per step of one item; null if unknown.

    Attributes:
        kind: `step`, a kind of compute, or a collective.
        name, source, line: the single instruction; null for a whole kind.
        axes, dtype, replica_groups: the row of communication.
        ratio: measured / predicted.
    """

    kind: str | None
    name: str | None = None
    source: str | None = None
    line: str | None = None
    axes: tuple[str, ...] = ()
    dtype: str | None = None
    replica_groups: str | None = None
    measured_s: float | None = None
    predicted_s: float | None = None
    ratio: float | None = None


class PredictedPart(Part):
    """The prediction for the measured step, from a plan or from the traced program.

    Attributes:
        kernels: each kind of compute.
        communication: each row, without waiting for peers.
        collectives: the single instructions of the rows.
        worst_ratios: single instructions whose seconds differ by the largest factors, if both programs are the same.
    """

    step: BesidePart
    kernels: tuple[BesidePart, ...] = ()
    communication: tuple[BesidePart, ...] = ()
    collectives: tuple[BesidePart, ...] = ()
    worst_ratios: tuple[BesidePart, ...] = ()


class Report(Part):
    """The whole report; `Report.model_json_schema(mode="serialization")` is its JSON Schema."""

    schema_: Literal["meshkit.report/1"] = Field(default=SCHEMA, alias="schema")
    source: Source
    verdict: str | None = None
    change: str | None = None
    """The sentence of a plan's verdict that recommends a change."""
    findings: tuple[FindingPart, ...] = ()
    cluster: ClusterPart = ClusterPart()
    mesh: tuple[MeshAxisPart, ...] = ()
    window: WindowPart
    step: StepPart
    spread: SpreadsPart = SpreadsPart()
    communication: tuple[CommunicationPart, ...] = ()
    memory: MemoryPart = MemoryPart()
    program: ProgramPart = ProgramPart()
    compile: CompilePart = CompilePart()
    training: TrainingPart = TrainingPart()
    pipeline: PipelinePart | None = None
    kernels: KernelsPart | None = None
    quality: QualityPart | None = None
    stragglers: StragglersPart | None = None
    per_step: tuple[StepSample, ...] | None = None
    history: HistoryPart | None = None
    goodput: GoodputPart | None = None
    failures: FailuresPart | None = None
    feedback: FeedbackPart | None = None
    predicted: PredictedPart | None = None
    warnings: tuple[Warning_, ...] = ()

    @property
    def device(self) -> str:
        """Return `device` for the virtual devices of a CPU, else `GPU`."""
        return "device" if self.cluster.gpu == "cpu" else "GPU"

    @property
    def devices(self) -> str:
        """Return `16 x h100_sxm`; `16 devices` if the kind is unknown."""
        count = self.cluster.num_gpus or self.window.devices
        if self.cluster.gpu:
            return f"{count} x {self.cluster.gpu}"
        return f"{count} device{'' if count == 1 else 's'}"

    def __repr__(self) -> str:
        """Return `<Report: predicted step of 1.04 s on 16 x h100_sxm, MFU 41.2 %, 123 ms ... exposed, fits>`."""
        from meshkit.predict.coverage import NOT_PREDICTED  # Imports numpy, which `meshkit schema` does not need.

        step, fits = self.step, self.memory.fits
        at_least = "more than " if any(w.code == NOT_PREDICTED for w in self.warnings) else ""
        time = "" if step.time_s is None else f" of {at_least}{format_seconds(step.time_s)}"
        too_much = format_bytes(-(self.memory.margin_bytes or 0))
        said = [
            f"{WORD[self.source]} step{time} on {self.devices}",
            f"MFU {format_percent(step.mfu)}" if step.mfu is not None else "",
            f"{format_seconds(step.exposed_s)} of communication exposed" if step.exposed_s is not None else "",
            "" if fits is None else "fits" if fits else f"does not fit, {too_much} too much",
        ]
        return f"<Report: {', '.join(text for text in said if text)}>"

    def __str__(self) -> str:
        """Return the line of `repr`, and the verdict below it."""
        return f"{self!r}\n{self.verdict}" if self.verdict else repr(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def to_dict(self) -> dict:
        """Return the report as plain values, with every key."""
        return self.model_dump(mode="json")

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the rows of communication as flat dicts, e.g. for pandas."""
        return [_flat(row.model_dump(mode="json")) for row in self.communication]

    def to_row(self) -> dict[str, Any]:
        """Return the step and its memory as one flat dict, as a row for a table of several reports."""
        memory = _flat(self.memory.model_dump(mode="json"))
        row = {"source": self.source, **_flat(self.step.model_dump(mode="json"))}
        return row | {f"memory_{key}": value for key, value in memory.items()}

    def write(self, path: str | Path) -> Path:
        """Write `report.json` into a run folder, or to a file that ends in `.json`, and return the file."""
        path = Path(path)
        file = path if path.suffix == ".json" else path / REPORT_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.tmp")  # A crash leaves the old file, not half of a new one.
        write_file(partial, self.to_json() + "\n")
        os.replace(partial, file)
        return file


def _flat(part: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values of a part. Lists of texts are joined, and nested parts are left out."""
    joined = {key: "+".join(map(str, v)) if isinstance(v, list) else v for key, v in part.items()}
    tables = {key for key, v in part.items() if isinstance(v, dict) or (isinstance(v, list) and dict in map(type, v))}
    return {key: v for key, v in joined.items() if key not in tables}
