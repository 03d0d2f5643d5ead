"""The report: what plan, rehearse and profile all say, as pydantic models. Layer 6; never imports jax.

`report.json` is the truth, the terminal and the HTML page are views of it. Values are SI; a key that holds no value
is None (`null`), never 0 and never NaN. Keys may be added, never renamed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from meshkit.errors import TraceError

SCHEMA = "meshkit.report/1"
REPORT_FILE = "report.json"
Source = Literal["plan", "rehearse", "profile"]
LinkName = Literal["nvlink", "infiniband"]


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
    """One collective instruction; `key` survives a recompile, `name` does not."""

    name: str
    key: str
    source: str | None = None
    count: int | float
    payload_bytes: int | float | None = None
    busy_s: float | None = None
    exposed_s: float | None = None


class CommunicationPart(Part):
    """Collectives of one kind over the same axes, link, dtype and shape of group; `axes == []` maps to no axis."""

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
    ops: tuple[OpPart, ...] = ()


class MemoryPart(Part):
    """Memory of the fullest GPU, against what the client may take."""

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


class ProgramPart(Part):
    """Which compiled program this is about."""

    fingerprint: str | None = None
    options_hash: str | None = None
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
        file.write_text(self.to_json() + "\n", encoding="utf-8")
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
