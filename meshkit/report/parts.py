"""Parts of a report beyond the step: kernels, data quality, stragglers, single steps, history.

Each of them is an object that is null where nobody knows: a plan has no data quality, a run without metrics no history.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from meshkit.hlo.pipeline_report import ScheduleCost

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
    )


class PipelinePart(ScheduleCost, Part):
    """A pipeline's schedule and what it costs; closed forms of the schedule, but for the permutes."""

    permute_count: int | float | None = None  # messages between stages a step and GPU
    permute_s: float | None = None
    permute_exposed_s: float | None = None  # the part of them under which nothing computes
    picture: tuple[tuple[str, ...], ...] | None = None  # null where it would be very large


class QualityPart(Part):
    """How far a measurement can be believed.

    Attributes:
        events: operations of the program that were read, over all processes and steps.
        dropped_events: events that the profiler says it lost.
        mapped_share: share of the communication's busy seconds whose instruction is known.
        axis_mapped_share: share of them that also lies on mesh axes.
        kernels_mapped_share: share of the kernels' busy seconds whose instruction is known.
        graph_s: seconds a step inside CUDA graphs, where the trace names no instruction.
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


class StragglerPart(Part):
    """A device that others waited for.

    Attributes:
        device, process, host: which.
        caused_wait_s: seconds a step that the other members of its groups spent waiting for it, all added up.
        waited_s: seconds a step that it waited itself.
        last_share: share of its collectives that it was the last to reach.
        compute_s: its own compute a step.
    """

    device: int
    process: int | None = None
    host: str | None = None
    caused_wait_s: float | None = None
    waited_s: float | None = None
    last_share: float | None = None
    compute_s: float | None = None


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
    """One captured step: means over its devices, and the slowest of them."""

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
