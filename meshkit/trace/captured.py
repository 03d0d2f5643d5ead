"""Open the capture of a run folder: check its records, the compiled program and the traces before they are read.

`meshkit.trace.capture` writes the files. Files that are mixed up, cut short or missing are reported here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_serializer, field_validator, model_validator

from meshkit.config.cluster import Cluster
from meshkit.config.files import gunzip, inside, open_regular, read_regular
from meshkit.config.mesh import MeshSpec, Placement
from meshkit.errors import MeshkitError, TraceError
from meshkit.hlo.module import CONTROL, Module, ReadProgram, read_program
from meshkit.hlo.schedule import Schedule
from meshkit.step.program import NO_FACTS, StepFacts
from meshkit.trace.graphs import graph_nodes
from meshkit.trace.operations import TracedProgram, TraceFile
from meshkit.trace.reader import Note, Trace, read_trace, some
from meshkit.trace.xspace import named_format
from meshkit.units import format_bytes

TRACE_FOLDER = "trace"  # A folder inside a run folder.
_LARGEST_RECORD_BYTES = 16 * 2**20
LARGEST_PROGRAM_BYTES = 2**30  # Limit on the unpacked file, below the 2 GiB that a proto may have.
# Numbers in a sidecar set the sizes of arrays and ranges. They are limited, since the sidecar may be malicious.
Id = Annotated[int, Field(ge=0, lt=2**31)]
ProcessId = Annotated[int, Field(ge=0, lt=2**20)]
_MOST_ENTRIES = 6  # The most files of a folder that a message names.
_TRACES = "*.xplane.pb, *.sqlite of nsys, or trace.parquet of nsys-jax"
_HINT = "`meshkit train` with [profile] steps = [first, last], or mk.profile(...)"


# The fields of `StepFacts` that a sidecar has.
_WORK = {
    *("model_flops", "model_flops_causal", "hardware_flops_per_gpu", "tokens", "peak_flops_per_gpu", "training_steps"),
    *("steps_per_call", "pipeline"),
}


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class CapturedMesh(_Record):
    """A jax mesh: axis names, their sizes, and the global device ids in row-major order."""

    axes: tuple[str, ...]
    shape: tuple[Annotated[int, Field(gt=0)], ...]
    device_ids: tuple[Id, ...]

    def placement(self, cluster: Cluster | None, spec: MeshSpec | None) -> Placement:
        """Return the placement of the mesh's devices on GPUs.

        Args:
            cluster: GPUs and links. With None, or with a cluster of another size and no spec, all devices are in one
                NVLink domain.
            spec: the mesh as declared on that cluster; with None, devices are on GPUs in the order of their ids.
        """
        if spec is not None and cluster is not None:
            return spec.resolve(cluster).placement(cluster)
        gpus = np.argsort(np.argsort(self.device_ids))
        if cluster is None or cluster.num_gpus != gpus.size:
            return Placement.from_shape(self.axes, self.shape)
        return Placement.of_gpus(self.axes, self.shape, gpus, cluster)


class CapturedDevice(_Record):
    """A device of one process: its id in the job, and its number in this process's trace."""

    id: Id
    ordinal: Id


class CapturedMemory(_Record):
    """The allocator of the local device with the highest peak; peaks count from the start of the process."""

    pool_bytes: int | None = None
    peak_bytes: int | None = None
    before_bytes: int | None = None
    """The peak before the first step, after XLA has tried kernels and the state has been made."""
    program_bytes: int | None = None
    """Bytes that XLA counts for the compiled program."""

    @property
    def before_steps(self) -> bool:
        """Whether the peak was reached before the first step."""
        return self.peak_bytes is not None and self.peak_bytes == self.before_bytes


class CapturedTrace(_Record):
    """The trace file as it was written, to check that the same file is read later."""

    file: str
    bytes: int
    blake2b: str


class CapturedCost(_Record):
    """Time that the capture itself took."""

    start_s: float
    stop_s: float
    traced_step_s: float | None = None
    """Mean time of a step during the capture."""
    untraced_step_s: float | None = None
    """Median time of a step before the capture, in the same run; None if there was no such step."""


class CaptureRecord(_Record):
    """A process's record of its capture: the sidecar `capture-pN.json`. Keys may be added, never renamed."""

    schema_name: Literal["meshkit.capture/1"] = "meshkit.capture/1"
    process: ProcessId
    processes: Annotated[int, Field(ge=1, le=2**20)]
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
    captured_processes: tuple[ProcessId, ...] | None = None
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

    @field_validator("cluster")
    @classmethod
    def _names_no_file(cls, table: dict[str, Any] | None) -> dict[str, Any] | None:
        """Refuse the path of a cluster file in a sidecar: its author could make this machine read any file."""
        if table and table.get("file") is not None:
            raise ValueError("holds the machines of the capture, and may not name a file")
        return table and {**table, "calibration": None}

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


@dataclass(frozen=True)
class Captured:
    """One capture, opened and checked."""

    folder: Path
    """`trace/` of the run."""
    records: tuple[CaptureRecord, ...]
    cluster: Cluster | None
    placement: Placement
    module: Module
    schedule: Schedule | None
    """The module's schedule; None if it has a form of HLO that this version cannot read."""
    program: TracedProgram
    broken: dict[int, str]
    """Process -> the reason why its trace file cannot be used."""

    @property
    def record(self) -> CaptureRecord:
        """The first process's record; the records agree on all facts about the whole job."""
        return self.records[0]

    @property
    def expected(self) -> tuple[int, ...]:
        """The processes that should have captured."""
        chosen = self.record.captured_processes
        return tuple(range(self.record.processes)) if chosen is None else chosen

    @property
    def missing(self) -> tuple[int, ...]:
        """The processes that should have captured, but have no record."""
        return tuple(sorted(set(self.expected) - {r.process for r in self.records}))


def open_capture(run: str | Path, *, only_process: int | None = None) -> Captured:
    """Return the checked capture of a run folder; with `only_process`, that process's part only.

    Raises:
        TraceError: there is no capture, its files contradict each other, or none of its traces can be used.
    """
    captured = open_program(run, only_process=only_process)
    errors: dict[int, TraceError] = {}
    for each in captured.records:
        try:
            _check_trace(captured.folder, each)
        except TraceError as error:
            errors[each.process] = error
    if len(errors) == len(captured.records):
        raise next(iter(errors.values()))
    return replace(captured, broken={process: error.message for process, error in errors.items()})


def open_program(run: str | Path, *, only_process: int | None = None) -> Captured:
    """Return the program and the sidecars of a capture, like `open_capture`, but without a check of the traces.

    Raises:
        TraceError: there is no capture, or its files contradict each other.
    """
    folder = _trace_folder(Path(run))
    records = read_records(folder)
    if only_process is not None:
        records = [r for r in records if r.process == only_process] or records
    record = records[0]
    cluster = Cluster.load(record.cluster) if record.cluster else None
    spec = MeshSpec.parse(record.mesh_spec) if record.mesh_spec and cluster else None
    placement = record.mesh.placement(cluster, spec)
    module = _read_module(folder, record)
    read = read_program(module, placement)
    program = traced_program(module, read, record.mesh.device_ids)
    return Captured(folder, tuple(records), cluster, placement, module, read.schedule, program, {})


def read_captured(captured: Captured, rows: np.ndarray | None = None, chosen: Container[int] | None = None) -> Trace:
    """Read the traces of a capture from `open_capture`; `rows` and `chosen` are passed to `read_trace`.

    Raises:
        TraceError: no trace can be read, or none contains the program.
    """
    first_step, num_steps = captured.record.first_step, captured.record.num_steps or None
    files = [
        TraceFile(trace_file(captured.folder, r), {d.ordinal: d.id for d in r.devices}, r.process)
        for r in captured.records
        if r.process not in captured.broken
    ]
    trace = read_trace(
        files,
        captured.program,
        rows=rows,
        first_step=first_step,
        num_steps=num_steps,
        steps_per_execution=captured.record.work.steps_per_call,
        chosen=chosen,
    )
    trace.facts.damaged.update(captured.broken)
    return trace


def notes_of_capture(captured: Captured) -> Iterator[Note]:
    """Yield notes on problems that are known before a trace is opened."""
    expected, missing, broken = captured.expected, captured.missing, captured.broken
    if 0 < captured.record.num_steps < 3:  # The last step of a trace is never whole, and is not counted.
        yield Note(
            "one_step",
            "The trace has one whole step, the first that ran in it, which is often the slowest: capture four steps "
            "([profile] steps) for a mean.",
        )
    if missing:
        yield Note(
            "missing_processes",
            f"The traces of {len(missing)} of {len(expected)} processes are missing ({some(missing)}); means are over "
            "the others.",
        )
    if broken:
        first, reason = next(iter(broken.items()))
        message = f"The traces of {len(broken)} of {len(expected)} processes cannot be used; process {first}: {reason}"
        yield Note("damaged_traces", message)
    if len(expected) < captured.record.processes:
        yield Note(
            "process_subset",
            f"{len(expected)} of {captured.record.processes} processes captured, as [profile] processes asks: means "
            "are over their devices, and waiting is unknown in groups with other processes.",
        )
    memory = captured.record.memory
    if memory.before_steps:
        counted = f"; XLA counts {format_bytes(memory.program_bytes)} for the step" if memory.program_bytes else ""
        yield Note(
            "peak_before_steps",
            f"The allocator's peak, {format_bytes(memory.peak_bytes)}, was reached before the first step, when XLA "
            f"tries kernels and the state is made{counted}.",
        )


def read_records(folder: Path) -> list[CaptureRecord]:
    """Return the sidecars of a capture, sorted by process.

    Raises:
        TraceError: there are none, one is damaged, or they belong to different captures.
    """
    records = []
    for file in sorted(folder.glob("capture-p*.json")):
        try:
            records.append(CaptureRecord.model_validate_json(read_regular(file, _LARGEST_RECORD_BYTES)))
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise TraceError(f"this file does not describe a capture: {where} {first['msg']}.", at=str(file)) from None
        except OSError as e:
            raise TraceError(f"this file cannot be read: {e.strerror}.", at=str(file)) from None
    if not records:
        raise TraceError(f"there is no captured trace; {contents(folder)}.", at=str(folder), hint=_HINT)
    records.sort(key=lambda r: r.process)
    # A smaller job that ran again in the same folder leaves the files of the larger job's other processes behind.
    records = [r for r in records if r.processes == records[0].processes]
    _check_one_job(folder, records)
    return records


def _check_one_job(folder: Path, records: Sequence[CaptureRecord]) -> None:
    if len({r.process for r in records}) < len(records):
        raise TraceError("two files describe the capture of one process.", at=str(folder))
    if len({(r.module, r.mesh.device_ids) for r in records}) > 1:
        raise TraceError("the processes captured different programs or meshes.", at=str(folder))
    if len({(r.first_step, r.num_steps) for r in records}) > 1:
        steps = ", ".join(sorted({f"{r.num_steps} from step {r.first_step}" for r in records}))
        raise TraceError(f"the processes captured different steps ({steps}).", at=str(folder), hint="capturing again")
    devices = [d.id for r in records for d in r.devices]
    if len(set(devices)) < len(devices):
        twice = next(d for d in devices if devices.count(d) > 1)
        raise TraceError(f"two processes captured device {twice}.", at=str(folder))


def trace_file(folder: Path, record: CaptureRecord) -> Path:
    """Return the trace of a process.

    Args:
        record: the process's sidecar. If the trace that it names is missing, the only trace in the process's session
            folder is returned.

    Raises:
        TraceError: there is no trace, there are several, or the sidecar names a file outside the folder.
    """
    session = folder / "plugins" / "profile" / f"p{record.process}"
    named = inside(folder, record.trace.file) if record.trace else None
    if record.trace and named is None:
        raise TraceError(
            f"process {record.process} names the trace {record.trace.file!r}, which is not in this folder.",
            at=str(folder),
            hint="a capture from a source that you trust",
        )
    found = [named] if named is not None and named.is_file() else sorted(session.glob("*.xplane.pb"))
    if not found:
        raise TraceError(f"process {record.process} left no trace.", at=str(session), hint="capturing again")
    if len(found) > 1:
        names = ", ".join(f.name for f in found)
        raise TraceError(f"process {record.process} has {len(found)} traces ({names}).", at=str(session))
    return found[0]


def _check_trace(folder: Path, record: CaptureRecord) -> None:
    file = trace_file(folder, record)
    if record.trace is None:
        return
    size, written, process = file.stat().st_size, record.trace.bytes, record.process
    if size != written:
        what = "is cut short" if size < written else "is another one"
        message = f"this trace {what}: it has {size} bytes of the {written} that process {process} wrote."
    elif digest(file) != record.trace.blake2b:
        message = f"this trace is not the one that process {process} wrote: its {size} bytes differ."
    else:
        return
    raise TraceError(message, at=str(file), hint="copying it again, or capturing again")


def has_capture(run: Path) -> bool:
    """Return whether a folder is a run folder with a capture, or the `trace/` folder of one."""
    return any(next(folder.glob("capture-p*.json"), None) for folder in (run, run / TRACE_FOLDER))


def no_trace(folder: Path, lead: str, hint: str | None = None) -> TraceError:
    """Return an error for a folder without traces: what it holds, and what to do with a trace of another format."""
    message = f"{lead} trace ({_TRACES}) in it or in plugins/profile/ below; {contents(folder)}"
    own = (folder / "report.json").exists()  # The trace.json.gz of a run folder is meshkit's own.
    for file in (f for pattern in ("*", "plugins/profile/*/*") for f in sorted(folder.glob(pattern)) if not own):
        if (known := named_format(file)) is not None:
            return TraceError(
                f"{message}; {file.name} is {known[0]}.",
                at=str(folder),
                hint=known[1].replace("REPORT.nsys-rep", file.name),
            )
    return TraceError(f"{message}.", at=str(folder), hint=hint)


def contents(folder: Path) -> str:
    """Return what a folder holds: `it holds 12 entries (a, b, c, d, ...)`, or `it is empty`."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        return f"it cannot be listed ({error.strerror})"
    more = ", ..." if len(names) > _MOST_ENTRIES else ""
    return f"it holds {len(names)} entries ({', '.join(names[:_MOST_ENTRIES])}{more})" if names else "it is empty"


def _trace_folder(run: Path) -> Path:
    folder = run / TRACE_FOLDER
    if folder.is_dir():
        return folder
    if run.name == TRACE_FOLDER and run.is_dir():
        return run
    if not run.is_dir():
        raise TraceError("there is no such run folder.", at=str(run), hint=_HINT)
    raise no_trace(run, "there is no captured trace in this run, and no other", _HINT)


def _read_module(folder: Path, record: CaptureRecord) -> Module:
    file = folder / Path(record.program_file).name
    try:
        module = Module(gunzip(read_regular(file, LARGEST_PROGRAM_BYTES), LARGEST_PROGRAM_BYTES))
    except (OSError, ValueError, MeshkitError) as e:
        raise TraceError(f"the captured program cannot be read: {e}", at=str(file)) from None
    if module.name != record.module:
        raise TraceError(
            f"the captured program is '{module.name}', but the capture is of '{record.module}'.", at=str(file)
        )
    return module


def traced_program(module: Module, read: ReadProgram, device_ids: Sequence[int]) -> TracedProgram:
    """Return the facts of a program that are needed to read its traces.

    Args:
        read: the same program, from `read_program`; without a schedule, `expected`, `kernels` and `graph_nodes` of the
            result stay empty.
        device_ids: [partitions] the global id of each partition's device.
    """
    instructions = module.instructions.values()
    fusions = (i for i in instructions if i.opcode == "fusion" and i.name in read.collectives)
    # A fusion with a matmul and a collective is one kernel that computes and communicates.
    fused = {i.name for i in fusions for c in i.called if {"dot", "convolution"} & {j.opcode for j in c.instructions}}
    expected: dict[str, int] = {}
    if read.schedule is not None:
        communicating = {i.name for body in read.schedule.computations.values() for i in body if i.collective}
        expected = {name: n for name, n in read.schedule.known_runs().items() if name in communicating}
    kernels = (i for body in (read.schedule.computations.values() if read.schedule else ()) for i in body)
    ids = np.asarray(device_ids)
    return TracedProgram(
        module.name,
        read.collectives,
        containers={i.name for i in instructions if i.opcode in CONTROL},
        fused=fused,
        groups={name: ids[partitions] for name, partitions in read.participants.items()},
        expected=expected,
        graph_nodes=graph_nodes(module, read.schedule),
        kernels={i.name for i in kernels if i.kind == "kernel" and not (i.cost and i.cost.host_bytes)},
    )


def digest(file: Path) -> str:
    """Return the blake2b digest of a file."""
    with open_regular(file) as f:
        return hashlib.file_digest(f, "blake2b").hexdigest()[:32]
