"""The report: what plan, rehearse and profile all say, as pydantic models.

`report.json` is the truth, the terminal and the HTML page are views of it. Values are SI; a key that holds no value
is None (`null`), never 0 and never NaN. Keys may be added, never renamed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from meshkit.errors import TraceError
from meshkit.report.parts import (
    FeedbackPart,
    GoodputPart,
    HistoryPart,
    KernelsPart,
    Part,
    PipelinePart,
    QualityPart,
    StepSample,
    StragglersPart,
)

SCHEMA = "meshkit.report/1"
REPORT_FILE = "report.json"
Source = Literal["plan", "rehearse", "profile"]
LinkName = Literal["nvlink", "infiniband"]


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
    """One step: `compute_s + exposed_s + other_s + idle_s == time_s`, `overlapped_s + exposed_s == communication_s`."""

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
    all_overlapped_s: float | None = None
    all_exposed_s: float | None = None


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
    """One collective instruction; `key` survives a recompile, `name` does not; `line` is of the model's source."""

    name: str
    key: str
    source: str | None = None
    line: str | None = None
    count: int | float
    payload_bytes: int | float | None = None
    busy_s: float | None = None
    exposed_s: float | None = None


class CommunicationPart(Part):
    """Collectives of one kind over the same axes, link, dtype and shape of group; `axes == []` maps to no axis.

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
    count: int | float
    payload_bytes: int | float | None = None
    wire_bytes: int | float | None = None
    wire_bytes_nvlink: int | float | None = None
    wire_bytes_infiniband: int | float | None = None
    time_s: float | None = None
    overlapped_s: float | None = None
    exposed_s: float | None = None
    sole_exposed_s: float | None = None
    busy_s: float | None = None
    transfer_s: float | None = None
    wait_s: float | None = None
    bus_bandwidth_bytes_per_s: float | None = None
    bus_bandwidth_peak_bytes_per_s: float | None = None
    ops: tuple[OpPart, ...] = ()


class RemedyPart(Part):
    """A change by which a step fits, as a compile of it has shown.

    Attributes:
        settings: what to give to `--set`.
        what: in words.
        time_s: predicted, of the step with it.
    """

    settings: tuple[str, ...]
    what: str
    time_s: float | None = None
    peak_bytes: int | None = None
    margin_bytes: int | None = None


class MemoryPart(Part):
    """Memory of the fullest GPU, against what the client may take.

    `reserved_bytes` is what the compiler does not count: `context_bytes` and `nccl_bytes` outside of the pool,
    `cudnn_workspace_bytes` and `fragmentation_bytes` inside of it. `remedies` is null where nobody looked for any.
    """

    capacity_bytes: int | None = None
    pool_bytes: int | None = None
    peak_bytes: int | None = None
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
    """Which compiled program this is about."""

    fingerprint: str | None = None
    options_hash: str | None = None
    options: tuple[OptionPart, ...] | None = None
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


class Report(Part):
    """The whole report; `Report.model_json_schema(mode="serialization")` is its JSON Schema."""

    schema_: Literal["meshkit.report/1"] = Field(default=SCHEMA, alias="schema")
    source: Source
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
    feedback: FeedbackPart | None = None
    warnings: tuple[Warning_, ...] = ()

    def to_dict(self) -> dict:
        """The report as plain values, every key present."""
        return self.model_dump(mode="json")

    def to_json(self, *, indent: int | None = 2) -> str:
        """The text of `report.json`."""
        return self.model_dump_json(indent=indent)

    def write(self, path: str | Path) -> Path:
        """Writes `report.json` into a run folder, or to a file that ends in `.json`; returns the file."""
        path = Path(path)
        file = path if path.suffix == ".json" else path / REPORT_FILE
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}.tmp")  # a crash leaves the old file, not half of a new one
        partial.write_text(self.to_json() + "\n", encoding="utf-8")
        os.replace(partial, file)
        return file


def read_report(path: str | Path) -> Report:
    """Reads the report of a run.

    Args:
        path: a run folder that holds `report.json`, or that file.

    Raises:
        TraceError: there is no such file, or it is no report of this version.
    """
    path = Path(path)
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as e:
        hint = "a run folder with report.json, or `meshkit profile RUN` to write one from its trace"
        raise TraceError(f"there is no report to read: {e.strerror}.", at=str(file), hint=hint) from None
    except UnicodeDecodeError:
        raise TraceError("this file is not a report: it is not text.", at=str(file)) from None
    try:
        return Report.model_validate_json(text)
    except ValidationError as e:
        raise TraceError(f"this file is not a {SCHEMA}: {_first_error(e)}.", at=str(file)) from None


def report_json_schema() -> dict:
    """JSON Schema of `report.json`, with every key required."""
    return Report.model_json_schema(mode="serialization")


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(p) for p in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where + ': ' if where else ''}{first['msg'].rstrip('.')}{more}"
