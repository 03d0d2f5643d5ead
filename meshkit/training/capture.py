"""Capture of real steps: a profiler trace, and beside it what the trace does not say. Layer 4.

    trace/plugins/profile/p0/HOST.xplane.pb   what ran (TensorBoard and XProf open `trace/` as well)
    trace/program-p0.hlo.pb.gz                the compiled program: what each operation communicates
    trace/capture-p0.json                     mesh, devices, cluster, steps, work: where, and how much of it

Each process writes its own files. Nothing is measured here: `meshkit.profiler` reads the files, on any machine.
"""

from __future__ import annotations

import gzip
import math
import shutil
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import jax
from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshkit.errors import ConfigError
from meshkit.spec.cluster import Cluster
from meshkit.spec.mesh import MeshSpec

TRACE_FOLDER = "trace"
_HOST_TRACER_LEVEL = 1  # the lowest level at which XLA:CPU's operations are traced; GPU kernels need none


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


class CapturedWork(_Record):
    """What one step computes (see `meshkit.report.summarize.Work`), and the length of the training.

    One execution of the program makes `steps_per_execution` steps.
    """

    model_flops: float | None = None
    model_flops_causal: float | None = None
    hardware_flops_per_gpu: float | None = None
    tokens: float | None = None
    peak_flops_per_gpu: float | None = None
    training_steps: int | None = None
    steps_per_execution: Annotated[int, Field(ge=1)] = 1


class CaptureRecord(_Record):
    """The sidecar of one process: `capture-pN.json`."""

    schema_name: Literal["meshkit.capture/1"] = "meshkit.capture/1"
    process: int
    processes: int
    host: str
    platform: str
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
    work: CapturedWork = CapturedWork()
    memory: CapturedMemory = CapturedMemory()
    jax: str
    jaxlib: str

    @model_validator(mode="after")
    def _mesh_holds_its_devices(self) -> Self:
        ids, shape = self.mesh.device_ids, self.mesh.shape
        if len(set(ids)) != len(ids) or len(ids) != math.prod(shape) or len(shape) != len(self.mesh.axes):
            raise ValueError(f"the mesh of shape {shape} over {self.mesh.axes} does not hold devices {ids}")
        return self


class Capture:
    """Traces the steps from `first` to `last` of a training loop, both included.

    The loop calls `before(step, state)` and `after(step, outputs)` around every step; all but two of the calls are one
    comparison. Before the first step, and after the last, it waits until the device has nothing left to do.

        capture = Capture(run / "trace", program=compiled, mesh=mesh, steps=(10, 13))
        for step in range(steps):
            capture.before(step, state)
            state, metrics = compiled(state, batch)
            capture.after(step, (state, metrics))

    Args:
        folder: where the files go; what an earlier capture of this process left there is removed.
        program: the compiled step (`jitted.lower(...).compile()`), or anything with the method `runtime_executable`.
        mesh: the mesh it was compiled for.
        steps: (first, last).
        cluster, mesh_spec: what the mesh was built from, if it was.
        work: fields of `CapturedWork`.
        partitioner, options_hash: for the report.

    Raises:
        ConfigError: `last` before `first`, or a program that holds no compiled module.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        program: Any,
        mesh: jax.sharding.Mesh,
        steps: tuple[int, int],
        cluster: Cluster | None = None,
        mesh_spec: MeshSpec | None = None,
        work: Mapping[str, Any] | None = None,
        partitioner: str | None = None,
        options_hash: str | None = None,
    ):
        self.folder = Path(folder)
        self.first, self.last = steps
        if self.last < self.first:
            raise ConfigError(f"[profile] steps = [{self.first}, {self.last}] ends before it starts.")
        self._module = _compiled_module(program)
        self._mesh, self._cluster, self._mesh_spec = mesh, cluster, mesh_spec
        self._known = {"partitioner": partitioner, "options_hash": options_hash, "work": CapturedWork(**(work or {}))}
        self._done = 0
        self.active = False

    def before(self, step: int, pending: Any = None) -> None:
        """Starts the trace if this is the first step to capture, once `pending` arrays are ready."""
        if step == self.first and not self.active:
            self.start(pending)

    def after(self, step: int, pending: Any = None) -> None:
        """Counts a step, and stops the trace after the last one, once `pending` arrays are ready."""
        if self.active:
            self._done += 1
            if step >= self.last:
                self.stop(pending)

    def start(self, pending: Any = None) -> None:
        """Starts the trace."""
        jax.block_until_ready(jax.live_arrays() if pending is None else pending)
        self._clean()
        self.folder.mkdir(parents=True, exist_ok=True)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        options.host_tracer_level = _HOST_TRACER_LEVEL
        options.enable_hlo_proto = False  # recorded beside it, in a form that can be read without the trace
        options.session_id = f"p{jax.process_index()}"  # processes on one host would overwrite each other's file
        jax.profiler.start_trace(str(self.folder), profiler_options=options)
        self.active, self._done = True, 0

    def stop(self, pending: Any = None, *, num_steps: int | None = None) -> None:
        """Stops the trace and writes the files beside it.

        Args:
            pending: arrays to wait for; None waits for every array of this process.
            num_steps: steps in the trace, where `after` did not count them.
        """
        jax.block_until_ready(jax.live_arrays() if pending is None else pending)
        jax.profiler.stop_trace()
        self.active = False
        self._write(self._done if num_steps is None else num_steps)

    def abandon(self) -> None:
        """Stops the trace and keeps nothing: the steps failed."""
        if self.active:
            self.active = False
            jax.profiler.stop_trace()
            self._clean()

    def _clean(self) -> None:
        process = jax.process_index()
        shutil.rmtree(self.folder / "plugins" / "profile" / f"p{process}", ignore_errors=True)
        for name in (f"capture-p{process}.json", f"program-p{process}.hlo.pb.gz"):
            (self.folder / name).unlink(missing_ok=True)

    def _write(self, num_steps: int) -> None:
        process = jax.process_index()
        program_file = f"program-p{process}.hlo.pb.gz"
        serialized = self._module.as_serialized_hlo_module_proto()
        (self.folder / program_file).write_bytes(gzip.compress(serialized, compresslevel=6))
        mesh = self._mesh
        record = CaptureRecord(
            process=process,
            processes=jax.process_count(),
            host=socket.gethostname(),
            platform=mesh.devices.flat[0].platform,
            devices=tuple(CapturedDevice(id=d.id, ordinal=_ordinal(d)) for d in mesh.local_devices),
            mesh=CapturedMesh(
                axes=mesh.axis_names,
                shape=mesh.devices.shape,
                device_ids=tuple(d.id for d in mesh.devices.flat),
            ),
            mesh_spec=self._mesh_spec.to_dict() if self._mesh_spec else None,
            cluster=self._cluster.to_dict() if self._cluster else None,
            module=self._module.name,
            program_file=program_file,
            first_step=self.first,
            num_steps=num_steps,
            memory=_memory(mesh.local_devices),
            jax=jax.__version__,
            jaxlib=metadata.version("jaxlib"),
            **self._known,
        )
        # last, and complete: a reader that finds this file finds the others
        (self.folder / f"capture-p{process}.json").write_text(record.model_dump_json(indent=1))


def _compiled_module(program: Any) -> Any:
    try:
        modules = program.runtime_executable().hlo_modules()
    except AttributeError:
        raise ConfigError(
            f"`program` is a {type(program).__name__}, but a capture needs the compiled program it traces.",
            hint="jitted.lower(*args).compile(), and calling what that returns",
        ) from None
    return modules[0]


def _ordinal(device: Any) -> int:
    """XLA:CPU traces use global ids, the CUDA profiler the process's own numbering."""
    if device.platform == "cpu":
        return device.id
    return device.id if device.local_hardware_id is None else device.local_hardware_id


def _memory(devices: Any) -> CapturedMemory:
    found = [stats for d in devices if (stats := d.memory_stats())]
    if not found:
        return CapturedMemory()
    fullest = max(found, key=lambda stats: stats.get("peak_bytes_in_use", 0))
    return CapturedMemory(pool_bytes=fullest.get("bytes_limit"), peak_bytes=fullest.get("peak_bytes_in_use"))
