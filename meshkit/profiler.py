"""A captured run -> the measured report. Layer 7.

trace + compiled program + mesh   (meshkit.training.capture wrote them)
  -> what each operation communicates, over which axes and link
  -> Timeline -> Report
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic import ValidationError

from meshkit.errors import MeshkitError, TraceError
from meshkit.report.html import write_html
from meshkit.report.schema import MemoryPart, MeshAxisPart, ProgramPart, Report, Warning_
from meshkit.report.summarize import Work, summarize, training_cost
from meshkit.spec.cluster import Cluster
from meshkit.spec.mesh import MeshSpec, Placement
from meshkit.timeline.spans import Timeline
from meshkit.timeline.trace import Note, Trace, TraceFile, read_trace
from meshkit.training.capture import TRACE_FOLDER, Capture, CaptureRecord
from meshkit.xla.costs import opcode
from meshkit.xla.hlo import load_module, read_collectives, read_schedule

_CONTAINERS = {"while", "conditional", "call"}


@dataclass(frozen=True)
class Measurement:
    """The measured report, and the timeline it summarizes (which the HTML page draws)."""

    report: Report
    timeline: Timeline


class ProfileCapture:
    """What `mk.profile` yields: `.report` and `.timeline` once the block is left."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._measurement: Measurement | None = None

    def _measured(self) -> Measurement:
        if self._measurement is None:
            self._measurement = measure_run(self.folder)
            self._measurement.report.write(self.folder)
        return self._measurement

    @property
    def report(self) -> Report:
        """The measured report; reading it writes `report.json` into the folder.

        Raises:
            TraceError: the block is still running, or ran no step of the program.
        """
        return self._measured().report

    @property
    def timeline(self) -> Timeline:
        """The measured steps."""
        return self._measured().timeline


@contextmanager
def profile(
    folder: str | Path,
    *,
    program: Any,
    mesh: jax.sharding.Mesh,
    cluster: Cluster | None = None,
    mesh_spec: MeshSpec | None = None,
    model_flops: float | None = None,
    tokens: float | None = None,
) -> Iterator[ProfileCapture]:
    """Traces what runs inside the block, and measures the executions of one compiled program in it.

        with mk.profile("runs/mine", program=compiled, mesh=mesh, cluster=cluster) as capture:
            for batch in batches:
                state, loss = compiled(state, batch)
        print(capture.report.step.exposed_s)

    Args:
        folder: the run folder; the trace goes to `trace/` in it.
        program: the compiled step that the block calls (`jitted.lower(...).compile()`).
        mesh: the mesh it was compiled for.
        cluster: where the devices are; without it the link of each collective is that of one domain.
        mesh_spec: the spec the mesh was built from, if it was.
        model_flops, tokens: of one step over all devices, for MFU and tokens per second.

    Raises:
        ConfigError: `program` is not compiled.
    """
    folder = Path(folder)
    capture = Capture(
        folder / TRACE_FOLDER,
        program=program,
        mesh=mesh,
        steps=(0, 0),
        cluster=cluster,
        mesh_spec=mesh_spec,
        work={"model_flops": model_flops, "tokens": tokens},
    )
    capture.start()
    try:
        yield ProfileCapture(folder)
    except BaseException:
        capture.abandon()
        raise
    capture.stop()


def profile_run(run: str | Path, *, predicted: Report | None = None) -> Report:
    """The measured report of a run folder that holds a capture; writes `report.json` and `report.html` into it.

    Args:
        run: the folder, or the `report.json` in it.
        predicted: a plan's report, which the page shows beside the measurement.

    Raises:
        TraceError: there is no capture, or it cannot be read.
    """
    folder = Path(run).parent if Path(run).suffix == ".json" else Path(run)
    measured = measure_run(folder)
    report, timeline = measured.report, measured.timeline
    report.write(folder)
    page = folder / "report.html"
    if predicted is None:
        write_html(report, page, timeline, title=folder.resolve().name)
    else:
        write_html(predicted, page, other=report, other_timeline=timeline, title=folder.resolve().name)
    return report


def measure_run(run: str | Path) -> Measurement:
    """The measured report of a run folder, and its timeline.

    Raises:
        TraceError: there is no capture, or it cannot be read.
    """
    folder = _trace_folder(Path(run))
    records = read_records(folder)
    record = records[0]
    cluster = Cluster.load(record.cluster) if record.cluster else None
    spec = MeshSpec.parse(record.mesh_spec).resolve(cluster) if record.mesh_spec and cluster else None
    placement = spec.placement(cluster) if spec and cluster else placement_of(record, cluster)
    module = _read_module(folder, record)
    trace = _read_traces(folder, records, module, placement)
    report = summarize(
        trace.timeline,
        source="profile",
        cluster=cluster,
        mesh=spec,
        mesh_axes=mesh_axes_of(placement),
        processes_seen=len(records),
        processes_expected=record.processes,
        work=_work(record),
        steps_per_execution=record.work.steps_per_execution,
        memory=_memory(records, cluster),
        program=ProgramPart(
            fingerprint=_fingerprint(module, placement),
            options_hash=record.options_hash,
            jax=record.jax,
            jaxlib=record.jaxlib,
            partitioner=record.partitioner,
        ),
        warnings=[*_missing_processes(records), *(_warning(note) for note in trace.notes)],
    )
    return Measurement(_with_training(report, record, cluster), trace.timeline)


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
    if not records:
        raise TraceError(
            "there is no captured trace.",
            at=str(folder),
            hint="`meshkit train` with [profile] steps = [first, last], or mk.profile(...)",
        )
    records.sort(key=lambda r: r.process)
    # a smaller job that ran again in the same folder leaves the files of the larger one's other processes behind
    records = [r for r in records if r.processes == records[0].processes]
    if len({r.process for r in records}) < len(records):
        raise TraceError("two files describe the capture of one process.", at=str(folder))
    if len({(r.module, r.mesh.device_ids) for r in records}) > 1:
        raise TraceError("the processes captured different programs or meshes.", at=str(folder))
    return records


def placement_of(record: CaptureRecord, cluster: Cluster | None) -> Placement:
    """Where the devices of a mesh without a spec are: by id, in the order of the cluster's GPU index."""
    names, shape = record.mesh.axes, record.mesh.shape
    gpus = np.argsort(np.argsort(record.mesh.device_ids))  # rank of each id
    if cluster is None or cluster.num_gpus != gpus.size:
        return Placement.from_shape(names, shape)
    domains = np.array([cluster.domain_of(int(g)) for g in gpus])
    hosts = np.array([cluster.host_of(int(g)) for g in gpus])
    links = ["nvlink"] if cluster.num_nvlink_domains == 1 else ["nvlink", "infiniband"]
    return Placement(names, shape, gpus, domains, hosts, {name: cluster.link(name).fabric for name in links})


def mesh_axes_of(placement: Placement) -> list[dict[str, Any]]:
    """The mesh of a placement with each axis's factors: the domains that a line along it crosses, and the rest."""
    domains = placement.domains.reshape(placement.shape)
    axes = []
    for i, (name, size) in enumerate(zip(placement.axis_names, placement.shape)):
        lines = np.moveaxis(domains, i, -1).reshape(-1, size)
        across = max(len(set(line)) for line in lines.tolist())
        axes.append(MeshAxisPart(axis=name, size=size, nvlink=size // across, infiniband=across).model_dump())
    return axes


def _trace_folder(run: Path) -> Path:
    folder = run / TRACE_FOLDER
    if folder.is_dir():
        return folder
    if run.name == TRACE_FOLDER and run.is_dir():
        return run
    raise TraceError(
        "there is no captured trace in this run." if run.is_dir() else "there is no such run folder.",
        at=str(run),
        hint="`meshkit train` with [profile] steps = [first, last], or mk.profile(...)",
    )


def _read_module(folder: Path, record: CaptureRecord) -> Any:
    file = folder / Path(record.program_file).name
    try:
        return load_module(gzip.decompress(file.read_bytes()))
    except (OSError, EOFError, MeshkitError) as e:
        raise TraceError(f"the captured program cannot be read: {e}", at=str(file)) from None


def _read_traces(folder: Path, records: Sequence[CaptureRecord], module: Any, placement: Placement) -> Trace:
    record = records[0]
    files = [
        TraceFile(path, {d.ordinal: d.id for d in r.devices}) for r in records for path in [_trace_file(folder, r)]
    ]
    containers = {i.name for c in module.computations() for i in c.instructions() if opcode(i) in _CONTAINERS}
    return read_trace(
        files,
        module_names={record.module},
        collectives_by_op=read_collectives(module, placement),
        containers=containers,
        first_step=record.first_step,
        num_steps=record.num_steps or None,
    )


def _trace_file(folder: Path, record: CaptureRecord) -> Path:
    session = folder / "plugins" / "profile" / f"p{record.process}"
    found = sorted(session.glob("*.xplane.pb"))
    if not found:
        raise TraceError(f"process {record.process} left no trace.", at=str(session), hint="capturing again")
    return found[0]


def _work(record: CaptureRecord) -> Work:
    w = record.work
    return Work(
        model_flops=w.model_flops,
        model_flops_causal=w.model_flops_causal,
        hardware_flops_per_gpu=w.hardware_flops_per_gpu,
        tokens=w.tokens,
        peak_flops_per_gpu=w.peak_flops_per_gpu,
        num_gpus=len(record.mesh.device_ids),
    )


def _memory(records: Sequence[CaptureRecord], cluster: Cluster | None) -> MemoryPart:
    """What the allocator counted on the fullest GPU; CPU devices count nothing."""
    peaks = [r.memory for r in records if r.memory.peak_bytes is not None]
    if not peaks:
        return MemoryPart()
    fullest = max(peaks, key=lambda m: m.peak_bytes or 0)
    pool, peak = fullest.pool_bytes, fullest.peak_bytes
    return MemoryPart(
        capacity_bytes=cluster.gpu.memory_bytes if cluster else None,
        pool_bytes=pool,
        peak_bytes=peak,
        margin_bytes=pool - peak if pool is not None and peak is not None else None,
        fits=True,
    )


def _with_training(report: Report, record: CaptureRecord, cluster: Cluster | None) -> Report:
    price = cluster.price_per_gpu_hour if cluster else None
    num_gpus = len(record.mesh.device_ids)
    part = training_cost(report.step.time_s, record.work.training_steps, num_gpus, price)
    return report.model_copy(update={"training": part})


def _fingerprint(module: Any, placement: Placement) -> str | None:
    try:
        return read_schedule(module, placement).fingerprint
    except MeshkitError:
        return None  # a form of HLO we do not know: the collectives could be read, the rest is only for joining


def _missing_processes(records: Sequence[CaptureRecord]) -> list[Warning_]:
    expected = records[0].processes
    missing = sorted(set(range(expected)) - {r.process for r in records})
    if not missing:
        return []
    named = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    message = (
        f"The traces of {len(missing)} of {expected} processes are missing ({named}); the means are of the others."
    )
    return [Warning_(code="missing_processes", message=message)]


def _warning(note: Note) -> Warning_:
    return Warning_(code=note.code, message=note.message, seconds=note.seconds)
