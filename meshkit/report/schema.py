"""The report: what plan, rehearse and profile all say, as pydantic models.

`report.json` is the truth. The terminal and the HTML page are views of it, which nothing here knows: a report says one
line of itself, and `meshkit.report.views.report` draws it. Values are SI; a key that holds no value is None (`null`),
never 0 and never NaN. Keys may be added, never renamed. The docstring of a part is the description of its JSON Schema.
What only some sources know (kernels, data quality, single steps, ...) is an object that is null where nobody does: a
plan has no data quality, a run without metrics no history.
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
    """A piece of any JSON output: frozen; unknown keys of a later version are kept, non-finite values refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="allow",
        allow_inf_nan=False,
        serialize_by_alias=True,
        protected_namespaces=(),
        json_schema_serialization_defaults_required=True,
        defer_build=True,  # of many parts a process makes few
    )

    @classmethod
    def of(cls, *sources: object, **values: Any) -> Self:
        """The part with what the sources call by the names of its fields (the first that has it), and the values."""
        for name in cls.model_fields.keys() - values.keys():
            if (source := next((s for s in sources if hasattr(s, name)), None)) is not None:
                values[name] = getattr(source, name)
        return cls(**values)

    def to_json(self) -> str:
        """The text that `--json` prints, and that lies in a run folder."""
        return self.model_dump_json(indent=2)


class ClusterPart(Part):
    """The machines."""

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
    """What the means are taken over."""

    steps: int
    devices: int
    processes_seen: int = 1
    processes_expected: int = 1
    aggregation: Literal["mean"] = "mean"


class StepPart(Part):
    """One step: `compute_s + exposed_s + other_s + idle_s == time_s`, `overlapped_s + exposed_s == communication_s`.

    A measured `idle_s` lies inside the step, between steps, or before a step's input has come from the host.
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
    """Spread of the step's main quantities; all None in a prediction."""

    time_s: SpreadPart = SpreadPart()
    compute_s: SpreadPart = SpreadPart()
    exposed_s: SpreadPart = SpreadPart()
    idle_s: SpreadPart = SpreadPart()


class OpPart(Part):
    """One collective instruction; `key` survives a recompile, `name` does not.

    Attributes:
        transfer_s: of `busy_s` what moves data, without waiting for peers; null where that is not known.
        causes: of `arrays`, their bytes.
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
        """`24 arrays: 62 % models/llama.py:88 attention/dot_general, ...`; "" of a collective of one.

        An origin that all arrays have stands alone.
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
    """Collectives of one kind over the same axes, link, dtype and shape of group; `axes == []` maps to no axis.

    `replica_groups` (`{0,1},{2,3}`) tells rows apart where no mesh is known.

    `bus_bandwidth_peak_bytes_per_s` is what the links of such a group allow; reductions inside switches can exceed it.
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
    """A change of an experiment, as a compile of it has shown: one by which a step fits, or another option of XLA.

    Attributes:
        settings: what to give to `--set`.
        what: in words.
        time_s: predicted, of the step with it.
        cost_s: by how much that is longer than the step as it is, if there were room for it; less than 0: shorter.
    """

    settings: tuple[str, ...]
    what: str
    time_s: float | None = None
    cost_s: float | None = None
    peak_bytes: int | None = None
    margin_bytes: int | None = None


class MemoryPart(Part):
    """Memory of the fullest GPU, against what the client may take.

    `reserved_bytes` is what the compiler does not count: `context_bytes` and `nccl_bytes` outside of the pool,
    `cudnn_workspace_bytes` and `fragmentation_bytes` inside of it. `remedies` is null where nobody looked for any. Of a
    program that ran, `peak_bytes` is the allocator's since the process began, `program_bytes` XLA's count for it.
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


class OptionPart(Part):
    """A compiler option, and why it is set; `[xla]` where the user set it."""

    name: str
    value: bool | int | float | str
    why: str


class ProgramPart(Part):
    """Which compiled program this is about; `alternatives`, null unless asked for, are others of XLA's options."""

    fingerprint: str | None = None
    options_hash: str | None = None
    options: tuple[OptionPart, ...] | None = None
    alternatives: tuple[RemedyPart, ...] | None = None
    jax: str | None = None
    jaxlib: str | None = None
    partitioner: str | None = None


class CompilePart(Part):
    """What compiling took."""

    lower_s: float | None = None
    compile_s: float | None = None
    cached: bool | None = None


class TrainingPart(Part):
    """The whole training: how long, and what it costs; `checkpoint_s` is one checkpoint, beside the steps."""

    steps: int | None = None
    hours: float | None = None
    gpu_hours: float | None = None
    cost: float | None = None
    checkpoint_s: float | None = None


class Warning_(Part):
    """What a reader must know before believing a number; `seconds` of a step that it concerns, if known."""

    code: str
    message: str
    seconds: float | None = None


class FindingPart(Part):
    """Why a step takes so long: seconds of it that mending saves, where in the report it stands, what to try, and the
    step without it (`step_s`), shorter by these seconds."""

    model_config = ConfigDict(populate_by_name=True)
    code: str
    severity: Literal["note", "warning"]
    message: str
    seconds: float | None = None
    evidence: tuple[str, ...] = ()
    hint: str | None = Field(default=None, alias="try")
    step_s: float | None = None


class PipelinePart(ScheduleCost, Part):
    """A pipeline's schedule and what it costs; closed forms of the schedule, but for the permutes.

    Attributes:
        axis: mesh axis that cuts the layers.
        schedule, stages, virtual_stages, microbatches: name, S, v, M.
        layers, padding_layers: of the model; inactive ones that are computed all the same.
        warmup_ticks, steady_ticks, drain_ticks: in which stages only go forward, go both ways, only go back.
        slots: inputs of chunks that each stage keeps at most.
        bubble_fraction: share of the layers' work that does nothing useful, padding included.
        executed_over_useful: of the layers' FLOP.
        permute_count: messages between stages a step and GPU.
        permute_s, permute_exposed_s: their time, and the part under which nothing computes.
        picture: by stage and tick `F3`, `B1` or both, `F3.1` with the chunk; null where it would be very large.
    """

    permute_count: int | float | None = None
    permute_s: float | None = None
    permute_exposed_s: float | None = None
    picture: tuple[tuple[str, ...], ...] | None = None


class QualityPart(Part):
    """How far a measurement can be believed.

    Attributes:
        events: operations of the program that were read, over all processes and steps.
        dropped_events: events that the profiler says it lost.
        mapped_share: share of the communication's busy seconds whose instruction is known.
        axis_mapped_share: share of them that also lies on mesh axes.
        kernels_mapped_share: share of the kernels' busy seconds whose instruction is known.
        graph_s: seconds a step of kernels inside CUDA graphs whose instruction is not known.
        fused_s: seconds a step in kernels that compute and communicate at once.
        axes_withheld: whether rows by axis were left out because too much maps to nothing.
        missing_processes: whose trace is not there.
        damaged_processes: whose trace ends early or cannot be read.
        partial_steps: executions at the edges of the trace that were left out.
        clocks: clocks that the processes' traces were on before they were aligned; 1 needs no alignment.
        clock_residual_s: median spread of the ends of one collective over its processes, once aligned.
        clock_offset_s: the largest offset that was taken out.
        wait_method: how waiting was told from transfer: by start times (`clocked`), or by the shortest instance.
        overhead_s: seconds that the capture added to a step (traced against untraced median).
        wait_clock_free_s, wait_clocked_s: waiting a step by either method, where both could be used.
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
    """One compute instruction a step; `key` (as of collectives) survives a recompile, `name` does not.

    Attributes:
        line: source file and line of the model code.
        busy_s: sum of its instances' own durations (not additive where kernels overlap).
    """

    name: str
    key: str | None = None
    source: str | None = None
    line: str | None = None
    count: int | float
    busy_s: float | None = None


class KernelClassPart(Part):
    """Compute of one kind a step.

    Attributes:
        kind: `matmul`, `attention`, `convolution`, `elementwise`, ..., or `unmapped`.
        time_s: share (an instant with k operations running gives each 1/k): adds up to `step.compute_s`.
        busy_s: sum of the instances' own durations.
        ops: the instructions with the most busy seconds.
    """

    kind: str
    count: int | float
    time_s: float | None = None
    busy_s: float | None = None
    ops: tuple[KernelPart, ...] = ()


class KernelsPart(Part):
    """What computes, by kind; the kind with the most time first."""

    classes: tuple[KernelClassPart, ...] = ()


class LateKernelPart(Part):
    """An instruction that a late device takes longer for.

    Attributes:
        excess_s: seconds a step by which it exceeds `usual_s`, those of the usual device.
        least_s, most_s: the shortest and the longest step of it, on the late device.
    """

    name: str
    line: str | None = None
    excess_s: float
    usual_s: float
    least_s: float
    most_s: float


class LatePart(Part):
    """What a device does longer than the usual (median) one: means over the steps.

    Attributes:
        behind_s: seconds a step of all but waiting for peers, over the usual device's.
        late_share: share of the steps in which it was late.
        causes: `kernels` (those that are named), `clock` (compute-bound kernels are slower alike), `memory`
            (memory-bound ones alone are), `copies`, `communication` (moving data), `input` (waiting for the next
            batch), `host` (idle between steps), `launch_gaps` (idle between kernels), `not_known` -> seconds, the most
            first; what it does in less time than the usual device is not in it.
        compute_bound_ratio, memory_bound_ratio: seconds of such kernels over the usual device's, their median.
        kernels: that exceed the usual by themselves, the most first.
    """

    behind_s: float
    late_share: float
    causes: dict[str, float] = {}
    compute_bound_ratio: float | None = None
    memory_bound_ratio: float | None = None
    kernels: tuple[LateKernelPart, ...] = ()


class StragglerPart(Part):
    """A device that others waited for.

    Attributes:
        device, process, host: which.
        caused_wait_s: seconds a step that the other members of its groups spent waiting for it, all added up.
        waited_s: seconds a step that it waited itself.
        last_share: share of its collectives that it was the last to reach.
        delay_s: seconds a step that each of the others waited for it, as a mean.
        compute_s: its own compute a step.
        late: what it does longer than the usual device; null where that is less than 1 % of the step.
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
        method: how waiting was told from transfer.
        instances: collectives that every member of their group was seen in, and are judged.
    """

    method: WaitMethod | None = None
    instances: int | None = None
    devices: tuple[StragglerPart, ...] = ()


class StepSample(Part):
    """One captured step: means over its devices, and the slowest of them; and why no other number is of it."""

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
    """How the run went, from its metrics: columns of equal length, thinned out evenly where the run is long.

    Attributes:
        steps: step numbers.
        values: column -> its value at each step, null where it was not recorded.
        trend: column -> relative change from the first third of the steps to the last (medians); the first steps,
            which warm up, are left out.
    """

    steps: tuple[int, ...] = ()
    values: dict[str, tuple[float | None, ...]] = {}
    trend: dict[str, float | None] = {}


class GoodputPart(Part):
    """What every second of a run's wall time went to, over all its attempts; the parts in seconds add up to `wall_s`.

    Attributes:
        share: `step_s` / `wall_s`.
        wall_s: of all attempts and of the restarts between them. A pause that a person wanted (after an attempt that
            was done, interrupted, or refused for what was written in its experiment) is not in it.
        attempts: how many there were.
        lost_steps: that a later attempt made again, counted each time.
        step_s: of steps that count.
        data_wait_s: the host waited for a batch and devices had nothing to do.
        checkpoint_s: a checkpoint kept the steps from going on.
        start_s: from the start of the process to the compile: imports, the meeting of the processes, tracing.
        init_s: the first state of a new run; `restore_s`: of a resumed one.
        lost_s: of the lost steps, with their waits for data.
        restart_s: between the last sign of an attempt and the start of the next.
        other_s: all else: starting and ending a capture, comparing replicas, closing files.
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
    """What goodput is with so many spare hosts.

    Attributes:
        hosts: spare ones of each pool.
        pools: whose hosts cannot take each other's place: NVLink domains that span hosts; else 1.
        gpus: spare ones, over all pools.
        goodput: where a lost host whose place nobody takes is waited for until it is mended.
        goodput_of_all: the same, times the GPUs that train over those and the spare ones.
    """

    hosts: int
    pools: int
    gpus: int
    goodput: float
    goodput_of_all: float


class FailuresPart(Part):
    """What failures leave of a training, predicted: `meshkit plan --failures`.

    Attributes:
        per_host_day: failures of a host in a day.
        rate_source: where that is from: `given`, or a study of the catalog.
        hosts: that train.
        between_s: mean time between failures of the whole job.
        host_share: of failures after which a host is replaced.
        detection_s: from a failure until the last process is gone; restart_s: from then until the next attempt could
            make a step, without `read_s`, which reads the state.
        repair_hours: until a lost host is back.
        storage_bytes_per_s: over all hosts.
        blocked_s: a save keeps steps from going on; write_s: from then until a checkpoint can be restored.
        every: steps between checkpoints of the experiment; null where it writes none: what follows is of `best_every`.
        goodput: share of the time that goes into steps that count, a host always at hand.
        goodput_low, goodput_high: of a month of 30 days; one in ten is lower, one in ten higher.
        saving_share, lost_share, down_share: the rest: saves, steps that are made again, detection and restarts.
        best_every: steps between checkpoints with which goodput is highest, `best_goodput`.
        best_snapshot_every, snapshot_goodput: the same of snapshots in host memory, each with a copy on another host,
            which takes `snapshot_write_s`; they hold `snapshot_host_bytes` of a host's memory.
        spares: by their number.
        published: study -> goodput at its rate of failures.
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
    """What a recompile with measured costs changed (XLA's profile-guided latency estimator).

    Attributes:
        profile: the file of measured costs that the program was compiled with.
        before_fingerprint: the program before.
        before_time_s, before_exposed_s: a step of it; `step` holds those of the program after.
    """

    profile: str | None = None
    before_fingerprint: str | None = None
    before_time_s: float | None = None
    before_exposed_s: float | None = None


class BesidePart(Part):
    """Seconds a step that were measured, beside those that were predicted; null where they are not known.

    Attributes:
        kind: `step`, a kind of compute, or a collective.
        name, source, line: of a single instruction; null of a whole kind.
        axes, dtype, replica_groups: of a row of communication, as there.
        ratio: measured over predicted.
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
    """What a plan, or the price of the traced program, predicts of the step that was measured.

    Attributes:
        kernels: each kind of compute.
        communication: each row, without waiting for peers; `collectives`: the single instructions of them.
        worst_ratios: single instructions whose seconds differ by the largest factors, of a plan of the same program.
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
    change: str | None = None  # the sentence of a plan's verdict that names one
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
        """What a device is called: virtual ones of a CPU are no GPUs."""
        return "device" if self.cluster.gpu == "cpu" else "GPU"

    @property
    def devices(self) -> str:
        """`16 x h100_sxm`; `16 devices` where nobody says of what kind."""
        count = self.cluster.num_gpus or self.window.devices
        if self.cluster.gpu:
            return f"{count} x {self.cluster.gpu}"
        return f"{count} device{'' if count == 1 else 's'}"

    def __repr__(self) -> str:
        """`<Report: predicted step of 1.04 s on 16 x h100_sxm, MFU 41.2 %, 123 ms of communication exposed, fits>`."""
        from meshkit.predict.coverage import NOT_PREDICTED  # brings numpy, which `meshkit schema` does without

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
        """The same line, and below it the verdict."""
        return f"{self!r}\n{self.verdict}" if self.verdict else repr(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same for a notebook and a shell of IPython."""
        printer.text(str(self))

    def to_dict(self) -> dict:
        """The report as plain values, every key present."""
        return self.model_dump(mode="json")

    def to_rows(self) -> list[dict[str, Any]]:
        """The rows of communication as flat dicts, as pandas and the like take them."""
        return [_flat(row.model_dump(mode="json")) for row in self.communication]

    def to_row(self) -> dict[str, Any]:
        """The step and its memory as one flat dict: a row of a table of several reports."""
        memory = _flat(self.memory.model_dump(mode="json"))
        row = {"source": self.source, **_flat(self.step.model_dump(mode="json"))}
        return row | {f"memory_{key}": value for key, value in memory.items()}

    def write(self, path: str | Path) -> Path:
        """Writes `report.json` into a run folder, or to a file that ends in `.json`; returns the file."""
        path = Path(path)
        file = path if path.suffix == ".json" else path / REPORT_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.tmp")  # a crash leaves the old file, not half of a new one
        write_file(partial, self.to_json() + "\n")
        os.replace(partial, file)
        return file


def _flat(part: dict[str, Any]) -> dict[str, Any]:
    """The plain values of a part: a list of texts as one, and nothing that is a table itself."""
    joined = {key: "+".join(map(str, v)) if isinstance(v, list) else v for key, v in part.items()}
    tables = {key for key, v in part.items() if isinstance(v, dict) or (isinstance(v, list) and dict in map(type, v))}
    return {key: v for key, v in joined.items() if key not in tables}
