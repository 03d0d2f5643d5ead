"""A run folder's capture, as files on disk -> checked records, the compiled program, and the traces to read.

Everything that can be mixed up, cut short or missing is found here, before a number is computed from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from meshkit.config.bounded import gunzip, inside
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec, Placement
from meshkit.errors import MeshkitError, TraceError
from meshkit.hlo.costs import opcode
from meshkit.hlo.module import Schedule, load_module, read_collectives, read_participants, read_schedule
from meshkit.hlo.schedule import Collective
from meshkit.trace.capture import TRACE_FOLDER, digest, mesh_placement
from meshkit.trace.capture_record import CaptureRecord
from meshkit.trace.checks import Note, some
from meshkit.trace.operations import TracedProgram, TraceFile
from meshkit.trace.reader import Trace, read_trace

_CONTAINERS = {"while", "conditional", "call"}
_LARGEST_PROGRAM_BYTES = 2**30  # unpacked; a proto cannot have more than twice that
_HINT = "`meshkit train` with [profile] steps = [first, last], or mk.profile(...)"


@dataclass(frozen=True)
class Captured:
    """One capture."""

    folder: Path
    """`trace/` of the run."""
    records: tuple[CaptureRecord, ...]
    """The sidecars, by process."""
    cluster: Cluster | None
    """What the mesh was built from, if that was recorded."""
    mesh_spec: MeshSpec | None
    placement: Placement
    """Where the partitions of the program were."""
    module: Any
    """The compiled program."""
    schedule: Schedule | None
    """The same, read; None where this version does not know a form of HLO in it."""
    broken: dict[int, str]
    """Process -> what is wrong with its trace file, of those that cannot be used."""

    @property
    def record(self) -> CaptureRecord:
        """The first process's; what concerns the whole job is in all of them."""
        return self.records[0]

    @property
    def expected(self) -> tuple[int, ...]:
        """The processes that should have captured."""
        chosen = self.record.captured_processes
        return tuple(range(self.record.processes)) if chosen is None else chosen

    @property
    def missing(self) -> tuple[int, ...]:
        """The processes that should have, and have left nothing."""
        return tuple(sorted(set(self.expected) - {r.process for r in self.records}))


def open_capture(run: str | Path, *, only_process: int | None = None) -> Captured:
    """The capture of a run folder, checked.

    Args:
        run: the folder.
        only_process: of a capture by several processes, whose part is read; None all.

    Raises:
        TraceError: there is none, its files contradict each other, or none of its traces can be used.
    """
    folder = _trace_folder(Path(run))
    records = read_records(folder)
    if only_process is not None:
        records = [r for r in records if r.process == only_process] or records
    record = records[0]
    cluster = Cluster.load(record.cluster) if record.cluster else None
    spec = MeshSpec.parse(record.mesh_spec).resolve(cluster) if record.mesh_spec and cluster else None
    placement = mesh_placement(record.mesh.axes, record.mesh.shape, record.mesh.device_ids, cluster, spec)
    module = _read_module(folder, record)
    try:
        schedule = read_schedule(module, placement)
    except MeshkitError:
        schedule = None  # the collectives can still be read
    broken: dict[int, str] = {}
    errors: list[TraceError] = []
    for each in records:
        try:
            _check_trace(folder, each)
        except TraceError as error:
            errors.append(error)
            broken[each.process] = error.message
    if len(broken) == len(records):
        raise errors[0]
    return Captured(folder, tuple(records), cluster, spec, placement, module, schedule, broken)


def read_captured(captured: Captured, rows: np.ndarray | None = None) -> Trace:
    """Reads the traces of a capture.

    Args:
        captured: from `open_capture`.
        rows: report row of each collective, see `read_trace`.

    Raises:
        TraceError: no trace can be read, or none is of the program.
    """
    record = captured.record
    ids = np.asarray(record.mesh.device_ids)
    groups = {name: ids[g] for name, g in read_participants(captured.module, captured.placement).items()}
    instructions = [i for c in captured.module.computations() for i in c.instructions()]
    program = TracedProgram(
        record.module,
        collectives_of(captured),
        containers={i.name for i in instructions if opcode(i) in _CONTAINERS},
        fused=_fused(captured),
        groups=groups,
        expected=_expected_counts(captured.schedule) if captured.schedule else {},
    )
    files = [
        TraceFile(trace_file(captured.folder, r), {d.ordinal: d.id for d in r.devices}, r.process)
        for r in captured.records
        if r.process not in captured.broken
    ]
    trace = read_trace(files, program, rows=rows, first_step=record.first_step, num_steps=record.num_steps or None)
    trace.facts.damaged.update(captured.broken)
    return trace


def collectives_of(captured: Captured) -> dict[str, Collective]:
    """What the program's instructions communicate, by the names that a trace has for them."""
    return read_collectives(captured.module, captured.placement)


def notes_of_capture(captured: Captured) -> list[Note]:
    """What is known to be missing before a trace is opened."""
    found: list[Note] = []
    expected, missing, broken = captured.expected, captured.missing, captured.broken
    if missing:
        message = (
            f"The traces of {len(missing)} of {len(expected)} processes are missing ({some(missing)}); the means are "
            "of the others."
        )
        found.append(Note("missing_processes", message))
    if broken:
        first, reason = next(iter(broken.items()))
        message = f"The traces of {len(broken)} of {len(expected)} processes cannot be used; process {first}: {reason}"
        found.append(Note("damaged_traces", message))
    if len(expected) < captured.record.processes:
        message = (
            f"{len(expected)} of {captured.record.processes} processes captured, as [profile] processes asks: the "
            "means are of their devices, and waiting is unknown in groups with others."
        )
        found.append(Note("process_subset", message))
    return found


def read_records(folder: Path) -> list[CaptureRecord]:
    """The sidecars of a capture, by process.

    Raises:
        TraceError: there are none, one is garbage, or they are of different captures.
    """
    records = []
    for file in sorted(folder.glob("capture-p*.json")):
        try:
            records.append(CaptureRecord.model_validate_json(file.read_bytes()))
        except ValidationError as e:
            first = e.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise TraceError(f"this file does not describe a capture: {where} {first['msg']}.", at=str(file)) from None
        except OSError as e:
            raise TraceError(f"this file cannot be read: {e.strerror}.", at=str(file)) from None
    if not records:
        raise TraceError("there is no captured trace.", at=str(folder), hint=_HINT)
    records.sort(key=lambda r: r.process)
    # a smaller job that ran again in the same folder leaves the files of the larger one's other processes behind
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
    """The trace of a process.

    Raises:
        TraceError: there is none.
    """
    session = folder / "plugins" / "profile" / f"p{record.process}"
    named = inside(folder, record.trace.file) if record.trace else None
    if record.trace and named is None:
        raise TraceError(
            f"process {record.process} names the trace {record.trace.file!r}, which is not in this folder.",
            at=str(folder),
            hint="a capture from a source that you trust: this one is not honest",
        )
    found = [named] if named is not None and named.is_file() else sorted(session.glob("*.xplane.pb"))
    if not found:
        raise TraceError(f"process {record.process} left no trace.", at=str(session), hint="capturing again")
    if len(found) > 1:
        names = ", ".join(f.name for f in found)
        raise TraceError(f"process {record.process} has {len(found)} traces ({names}).", at=str(session))
    return found[0]


def _check_trace(folder: Path, record: CaptureRecord) -> None:
    """Whether the trace is there, and the one that was captured."""
    file = trace_file(folder, record)
    if record.trace is None:
        return
    size = file.stat().st_size
    if size != record.trace.bytes:
        what = "is cut short" if size < record.trace.bytes else "is another one"
        raise TraceError(
            f"this trace {what}: it has {size} bytes of the {record.trace.bytes} that process {record.process} wrote.",
            at=str(file),
            hint="copying it again, or capturing again",
        )
    if digest(file) != record.trace.blake2b:
        raise TraceError(
            f"this trace is not the one that process {record.process} wrote: its {size} bytes differ.",
            at=str(file),
            hint="copying it again, or capturing again",
        )


def _trace_folder(run: Path) -> Path:
    folder = run / TRACE_FOLDER
    if folder.is_dir():
        return folder
    if run.name == TRACE_FOLDER and run.is_dir():
        return run
    message = "there is no captured trace in this run." if run.is_dir() else "there is no such run folder."
    raise TraceError(message, at=str(run), hint=_HINT)


def _read_module(folder: Path, record: CaptureRecord) -> Any:
    file = folder / Path(record.program_file).name
    try:
        module = load_module(gunzip(file.read_bytes(), _LARGEST_PROGRAM_BYTES))
    except (OSError, ValueError, MeshkitError) as e:
        raise TraceError(f"the captured program cannot be read: {e}", at=str(file)) from None
    if module.name != record.module:
        raise TraceError(
            f"the captured program is '{module.name}', but the capture is of '{record.module}'.", at=str(file)
        )
    return module


def _expected_counts(schedule: Schedule) -> dict[str, int]:
    """How often one execution runs each collective, where that is known."""
    communicating = {i.name for body in schedule.computations.values() for i in body if i.collective is not None}
    return {name: count for name, count in schedule.known_runs().items() if name in communicating}


def _fused(captured: Captured) -> set[str]:
    """Instructions that are one kernel which computes a matmul and communicates."""
    names = set(collectives_of(captured))
    computations = {c.name: c for c in captured.module.computations()}
    found = set()
    for computation in computations.values():
        for i in computation.instructions():
            if i.name in names and opcode(i) == "fusion":
                called = re.search(r"calls=%?([\w.\-]+)", i.to_string())
                body = computations.get(called[1]) if called else None
                if body is not None and any(opcode(j) in ("dot", "convolution") for j in body.instructions()):
                    found.add(i.name)
    return found
