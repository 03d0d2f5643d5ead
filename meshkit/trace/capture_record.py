"""The sidecar of a trace: `capture-pN.json`, what a process knew when it captured.

`meshkit.trace.capture` writes it, `meshkit.trace.captured` reads it; keys may be added, never renamed.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_serializer, model_validator

from meshkit.step.facts import NO_FACTS, StepFacts

# What of a step's facts a sidecar holds.
_WORK = {
    *("model_flops", "model_flops_causal", "hardware_flops_per_gpu", "tokens", "peak_flops_per_gpu", "training_steps"),
    *("steps_per_call", "pipeline"),
}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class CapturedMesh(_Record):
    """A jax mesh: axis names, their sizes, and the global device ids in row-major order."""

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    device_ids: tuple[int, ...]


class CapturedDevice(_Record):
    """A device of one process: its id in the job, and the number under which this process's trace knows it."""

    id: int
    ordinal: int


class CapturedMemory(_Record):
    """Allocator of the fullest local device: what it may take, and the most it had taken."""

    pool_bytes: int | None = None
    peak_bytes: int | None = None


class CapturedTrace(_Record):
    """The trace file as it was written: what is read later must be the same."""

    file: str
    bytes: int
    blake2b: str


class CapturedCost(_Record):
    """What the capture itself took.

    Attributes:
        start_s, stop_s: to start the profiler; to stop it and write its file.
        traced_step_s: mean step while it ran.
        untraced_step_s: median step of the same run before it started; None if there was none.
    """

    start_s: float
    stop_s: float
    traced_step_s: float | None = None
    untraced_step_s: float | None = None


class CaptureRecord(_Record):
    """The sidecar of one process: `capture-pN.json`."""

    schema_name: Literal["meshkit.capture/1"] = "meshkit.capture/1"
    process: int
    processes: int
    host: str
    platform: str
    device_kind: str | None = None
    devices: tuple[CapturedDevice, ...]
    mesh: CapturedMesh
    mesh_spec: dict[str, Any] | None = None
    cluster: dict[str, Any] | None = None
    module: str
    program_file: str
    first_step: Annotated[int, Field(ge=0)]
    num_steps: Annotated[int, Field(ge=0)]
    partitioner: str | None = None
    options_hash: str | None = None
    work: StepFacts = NO_FACTS
    memory: CapturedMemory = CapturedMemory()
    captured_processes: tuple[int, ...] | None = None
    domains: tuple[int, ...] | None = None
    links: dict[str, str] | None = None
    options: dict[str, Any] | None = None
    xla_flags: str | None = None
    trace: CapturedTrace | None = None
    cost: CapturedCost | None = None
    jax: str
    jaxlib: str
    runtime: str | None = None

    @field_serializer("work")
    def _recorded(self, work: StepFacts) -> dict[str, Any]:
        return work.model_dump(include=_WORK, by_alias=True)

    @model_validator(mode="after")
    def _mesh_holds_its_devices(self) -> Self:
        ids, shape = self.mesh.device_ids, self.mesh.shape
        if len(set(ids)) != len(ids) or len(ids) != math.prod(shape) or len(shape) != len(self.mesh.axes):
            raise ValueError(f"the mesh of shape {shape} over {self.mesh.axes} does not hold devices {ids}")
        if unknown := sorted({d.id for d in self.devices} - set(ids)):
            raise ValueError(f"devices {unknown} of the process are not on the mesh")
        if not 0 <= self.process < self.processes:
            raise ValueError(f"there is no process {self.process} of {self.processes}")
        return self
