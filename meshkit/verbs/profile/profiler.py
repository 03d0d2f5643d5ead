"""Turn a captured run, any JAX traces, or files of NCCL Inspector into the measured report.

trace + compiled program + mesh   (meshkit.trace.capture wrote them)
  -> the communication of each operation, with its axes and link
  -> Timeline -> Report

A report from NCCL Inspector's files has rows of communication, and no values that need a trace.
"""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshkit.config.calibration import CALIBRATION_FILE
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec, Placement
from meshkit.console import run_folder
from meshkit.errors import ConfigError
from meshkit.hlo.instructions import InstructionInfo, read_instructions
from meshkit.hlo.pipeline_report import useful_flops
from meshkit.hlo.schedule import Collective, Schedule
from meshkit.predict.simulate import simulate
from meshkit.report import schema
from meshkit.report.causes import add_communication_findings
from meshkit.report.compare import with_predicted
from meshkit.report.folder import feedback_part, find_prediction, write_folder
from meshkit.report.late import late_devices
from meshkit.report.measured import (
    METRICS_FILE,
    bandwidth_notes,
    captured_program,
    gpu_of_trace,
    machine_notes,
    quality_part,
    read_history,
    stragglers_part,
    to_warnings,
    untraced_step_s,
    withhold_axes,
)
from meshkit.report.schema import CommunicationPart, Report
from meshkit.report.summarize import (
    Machines,
    cluster_part,
    group_rows,
    mesh_part,
    summarize,
    summarize_simulation,
    wire_numbers,
)
from meshkit.report.verdict import Known, add_findings
from meshkit.runs.metrics import read_metrics
from meshkit.step.program import NO_FACTS, StepFacts
from meshkit.timeline import Timeline
from meshkit.trace.captured import Captured, CaptureRecord, notes_of_capture, open_capture, read_captured
from meshkit.trace.inspector import InspectedRow, inspect, shape_on
from meshkit.trace.loose import Loose, open_loose
from meshkit.trace.measured import PGLE_FILE, measured_costs, write_calibration, write_pgle
from meshkit.trace.reader import Note, Trace, read_trace

_UNCOUNTED = {"unknown trip count", "conditional", "opaque custom call"}  # With such a note, FLOP cannot be counted.


@dataclass(frozen=True)
class TracedJob:
    """The known facts of a job of which there are only traces, without a run folder (bare traces)."""

    mesh: MeshSpec | None = None
    cluster: Cluster | None = None
    facts: StepFacts = NO_FACTS
    devices: Mapping[int, int] | None = None
    """Number of a device in a trace of one process -> its id in the job; None if these numbers are the ids."""


@dataclass(frozen=True)
class MeasuredTraces:
    """The measured report and the measured steps of bare traces; `price` predicts them."""

    report: Report
    timeline: Timeline
    name: str
    schedule: Schedule | None
    """Schedule of the traced program on GPUs, if the trace has its HLO."""
    instructions: Mapping[str, InstructionInfo]
    machines: Machines
    facts: StepFacts
    num_devices: int
    gpu: Cluster | None

    def price(self) -> Report | None:
        """Return the prediction of the traced program by plan's models, instruction by instruction.

        It is None if the trace lacks the program's HLO, or if no cluster is given and the trace names no GPU of the
        catalog. Without a given cluster, links are unknown, so collectives and steps with collectives have no predicted
        time.
        """
        schedule, known = self.schedule, self.machines.cluster
        cluster = known or self.gpu
        if schedule is None or cluster is None or cluster.is_cpu:
            return None
        simulation = simulate(schedule, cluster, gpus=self.num_devices, network=known is not None)
        # Show measured collectives in place of simulated ones: the measured have axes only if a mesh is known.
        named = {c.name: c for c in self.timeline.collectives}
        collectives = tuple(named.get(c.name, c) for c in simulation.timeline.collectives)
        priced = summarize_simulation(
            replace(simulation, timeline=replace(simulation.timeline, collectives=collectives)),
            schedule,
            source="plan",
            machines=replace(self.machines, cluster=cluster, processes_seen=0),
            facts=self.facts,
            instructions=self.instructions,
            warnings=[],
        )
        communicates = any(i.collective for body in schedule.computations.values() for i in body)
        without = {"step": schema.StepPart()} if communicates and known is None else {}
        return priced.model_copy(update={"program": self.report.program} | without)

    def write(self, out: str | Path | None, predicted: Report | None) -> Report:
        """Return the report with a prediction, and write its files into a folder if one is given."""
        if out is not None:
            return write_folder(self.report, run_folder(Path(out)), self.timeline, predicted=predicted, title=self.name)
        return with_predicted(self.report, predicted)


@dataclass(frozen=True)
class Measurement(MeasuredTraces):
    """The measured report and the measured steps of a run folder, and the sources of both."""

    captured: Captured
    trace: Trace

    def write_run(self, folder: Path, plan: Report | None = None) -> tuple[Report, Report | None]:
        """Return the report with a prediction, and the prediction; write the report's files into its run folder.

        It also writes two files for later compiles. A cluster file may name `calibration.toml`, which is written if the
        run had messages or kernels large enough to measure. XLA schedules a recompile by `pgle.pbtxt` (`--set
        xla.xla_gpu_pgle_profile_file_or_directory_path=...`).

        Args:
            plan: a plan's report; None looks for one in the folder, or else prices the captured program.
        """
        write_calibration(folder / CALIBRATION_FILE, self.captured, self.trace)
        write_pgle(folder / PGLE_FILE, measured_costs(self.trace, self.captured.schedule))
        plan = plan or find_prediction(folder)
        predicted = plan or self.price()
        keep = plan is not None  # A price is not kept as a plan, since the next capture may be of another program.
        return write_folder(self.report, folder, self.timeline, predicted=predicted, keep=keep), predicted


def profile_run(run: str | Path, *, predicted: Report | None = None, steps: Container[int] | None = None) -> Report:
    """Return the measured report of a run folder with a capture, and write its files into the folder.

    Args:
        run: the folder, or the `report.json` in it.
        predicted: a plan's report, which the page shows next to the measurement; None looks for one in the folder, or
            else prices the captured program.
        steps: numbers of the steps that count; None leaves out warm-up steps and outliers.

    Raises:
        TraceError: there is no capture, or it cannot be read.
    """
    folder = Path(run).parent if Path(run).suffix == ".json" else Path(run)
    return measure_run(folder, steps=steps).write_run(folder, predicted)[0]


def measure_run(
    run: str | Path, *, only_process: int | None = None, steps: Container[int] | None = None
) -> Measurement:
    """Return the measured report of a run folder, and its timeline.

    Args:
        only_process: the process whose trace is read; None for all.
        steps: numbers of the steps that count; None leaves out warm-up steps and outliers.

    Raises:
        TraceError: there is no capture, or it cannot be read.
    """
    captured = open_capture(run, only_process=only_process)
    record, each = captured.record, captured.record.work.steps_per_call
    trace = read_captured(captured, group_rows(captured.program.distinct_collectives)[0], steps)
    notes = machine_notes(captured.cluster, trace.facts, record.device_kind)
    seen = len(captured.records) - len(trace.facts.damaged)
    instructions = read_instructions(captured.module, also=trace.timeline.op_names)
    machines = Machines(captured.placement, captured.cluster, seen, len(captured.expected))
    report = summarize(
        trace.steps,
        source="profile",
        machines=machines,
        facts=_executed(record.work, captured.schedule),
        instructions=instructions,
        swept=trace,
        warnings=to_warnings([*notes_of_capture(captured), *notes, *trace.notes]),
    )
    history = read_history(Path(run))
    untraced_s = _untraced_s(captured.records, history)
    traced = [r.cost.traced_step_s for r in captured.records if r.cost and r.cost.traced_step_s]
    overhead_s = None
    # The host's time of the traced steps includes starting the trace and waiting for the last step, so bound it.
    if traced and untraced_s and report.step.time_s:
        overhead_s = max(0.0, min(max(traced), report.step.time_s) - untraced_s)
    parts = {
        "memory": _memory(captured.records, captured.cluster),
        "program": captured_program(record, captured.schedule),
        "quality": quality_part(trace, missing=captured.missing, overhead_s=overhead_s, steps_per_execution=each),
        "stragglers": find_stragglers(trace, {r.process: r.host for r in captured.records}, instructions, each),
        "feedback": feedback_part(record.options),
    }
    report = _with_bandwidths(withhold_axes(report.model_copy(update=parts), trace))
    known = Known(
        trace,
        captured.program,
        captured.schedule,
        instructions,
        captured.cluster,
        record.options,
        untraced_step_s=untraced_s,
        steps_per_execution=each,
        gpu=gpu_of_trace(trace.facts),
    )
    return Measurement(
        add_findings(report, known, history),
        trace.timeline,
        Path(run).name,
        None if trace.facts.cpu else captured.schedule,
        instructions,
        machines,
        record.work,
        len(record.mesh.device_ids),
        known.gpu,
        captured,
        trace,
    )


def measure_traces(
    path: str | Path, job: TracedJob, *, program: str | None = None, steps: Container[int] | None = None
) -> MeasuredTraces:
    """Measure the traces of any JAX job; return the report, and what `MeasuredTraces.price` needs.

    Args:
        path: a `.xplane.pb` file (or `.gz`), an export of nsys (`.sqlite`), a folder of them, a folder that
            `jax.profiler` has written into, or the folder of nsys-jax; see `trace.loose`.
        job: known facts of the job. Without a mesh, rows are by replica groups; without a cluster, links have no name.
        program: the program to measure, by name; None is the one with the most time.
        steps: numbers of the steps that count, from 0; None leaves out warm-up steps and outliers.

    Raises:
        TraceError: there is no trace, it cannot be read, or it lacks the program.
        ConfigError: the mesh or the cluster has another number of devices than the program.
    """
    cluster = job.cluster
    loose = open_loose(path, mesh=job.mesh, cluster=cluster, program=program, devices=job.devices)
    rows = group_rows(loose.program.distinct_collectives)[0]
    trace = read_trace(loose.files, loose.program, rows=rows, chosen=steps, operations=loose.operations)
    trace.facts.damaged.update(loose.damaged)
    module = loose.module
    instructions = {} if module is None else read_instructions(module, also=trace.timeline.op_names)
    schedule = loose.read.schedule if loose.read and not trace.facts.cpu else None
    gpu = gpu_of_trace(trace.facts) if cluster is None and schedule is not None else None
    machines = Machines(loose.placement, cluster, len(loose.hosts), len(loose.hosts) + len(loose.damaged))
    report = summarize(
        trace.steps,
        source="profile",
        machines=machines,
        facts=job.facts,
        instructions=instructions or None,
        swept=trace,
        warnings=to_warnings([*loose.notes, *_priced(gpu, loose), *machine_notes(cluster, trace.facts), *trace.notes]),
    )
    quality = quality_part(trace)
    if loose.placement is None:
        unknown = {} if module else {"mapped_share": None, "kernels_mapped_share": None}
        quality = quality.model_copy(update={"axis_mapped_share": None, "axes_withheld": False} | unknown)
        known = all(row.collective for row in report.communication)
        warnings = [w for w in report.warnings if not (known and w.code == "unmapped_communication")]
        report = report.model_copy(update={"warnings": tuple(warnings)})
    else:
        report = withhold_axes(report, trace)
    read = loose.read.schedule if loose.read else None
    compiled = schema.ProgramPart(
        fingerprint=read.fingerprint if read else None,
        jax=loose.versions.get("jax"),
        jaxlib=loose.versions.get("jaxlib"),
    )
    parts = {"quality": quality, "program": compiled, "stragglers": find_stragglers(trace, loose.hosts, instructions)}
    report = _with_bandwidths(report.model_copy(update=parts))
    known = Known(trace, loose.program, read, instructions, cluster, gpu=gpu)
    return MeasuredTraces(
        add_findings(report, known),
        trace.timeline,
        Path(path).name,
        schedule,
        instructions,
        machines,
        job.facts,
        loose.num_devices,
        gpu,
    )


def _priced(gpu: Cluster | None, loose: Loose) -> Iterator[Note]:
    """Yield a note if, without a given cluster, the predicted times are for the GPU that the trace names."""
    if gpu is None:
        return
    message = f"Kernels are priced as on {gpu.gpu.name}, which the trace names."
    if loose.read and loose.read.collectives:
        message = f"{message[:-1]}; collectives have no price, since their links are not known (--cluster names them)."
    yield Note("gpu_of_trace", message)


def _with_bandwidths(report: Report) -> Report:
    notes = to_warnings(bandwidth_notes(report.communication))
    return report.model_copy(update={"warnings": (*report.warnings, *notes)})


def _memory(records: Sequence[CaptureRecord], cluster: Cluster | None) -> schema.MemoryPart:
    """Return the allocator's numbers on the GPU with the highest peak; on CPU devices they are unknown."""
    peaks = [r.memory for r in records if r.memory.peak_bytes is not None]
    if not peaks:
        return schema.MemoryPart()
    fullest = max(peaks, key=lambda m: m.peak_bytes or 0)
    pool, peak = fullest.pool_bytes, fullest.peak_bytes
    return schema.MemoryPart(
        capacity_bytes=cluster.gpu.memory_bytes if cluster else None,
        pool_bytes=pool,
        peak_bytes=peak,
        program_bytes=fullest.program_bytes,
        margin_bytes=pool - peak if pool is not None and peak is not None else None,
        fits=True,
    )


def _executed(facts: StepFacts, schedule: Schedule | None) -> StepFacts:
    """Add the FLOP of the compiled program to the facts, if these have none and the schedule counts all FLOP."""
    if schedule is None or facts.hardware_flops_per_gpu is not None or schedule.notes.keys() & _UNCOUNTED:
        return facts
    flops = useful_flops(schedule, facts.pipeline) / facts.steps_per_call
    return facts.model_copy(update={"hardware_flops_per_gpu": flops or None})


def _untraced_s(records: Sequence[CaptureRecord], history: schema.HistoryPart | None) -> float | None:
    """Return the run's step time in seconds without tracing, if it is known.

    It is the median step time in the metrics before the trace; without metrics, the slowest process's measurement.
    """
    if history is not None and "step_time_s" in history.values:
        return untraced_step_s(history, records[0].first_step)
    return max((r.cost.untraced_step_s for r in records if r.cost and r.cost.untraced_step_s), default=None)


def find_stragglers(
    trace: Trace,
    hosts: Mapping[int, str],
    instructions: Mapping[str, InstructionInfo] | None = None,
    steps_per_execution: int = 1,
) -> schema.StragglersPart | None:
    """Return the stragglers, each with its host, its compute time, and the operations that take longer on it.

    It is None if no collective shows a skew and no device is late. Times are per step; one execution of the program
    makes `steps_per_execution` steps.
    """
    late = late_devices(trace, instructions or {}, steps_per_execution)
    if not trace.skew.instances and not late:
        return None
    by_device: dict[int, list[float]] = {}
    for step, swept in zip(trace.steps.steps, trace.sweeps):
        by_device.setdefault(step.device, []).append(swept.total.compute_s / steps_per_execution)
    compute_s = {device: sum(values) / len(values) for device, values in by_device.items()}
    steps = len({step.step for step in trace.steps.steps}) * steps_per_execution
    return stragglers_part(trace.skew, hosts, compute_s, steps, late)


def profile_inspector(
    files: Sequence[Path],
    *,
    mesh: MeshSpec | None = None,
    cluster: Cluster | None = None,
    out: str | Path | None = None,
    predicted: Report | None = None,
) -> Report:
    """Return the measured report of Inspector's files; see `trace.inspector`.

    Args:
        files: files of all processes of one job.
        mesh: the job's mesh. A communicator gets the axes whose groups have its ranks and hosts; without a mesh, rows
            are by communicator size.
        cluster: the cluster of the job's GPUs; without it, links have no name.
        out: a folder for the report's files; None writes nothing.
        predicted: a plan's report, which the page shows next to the measurement.

    Raises:
        TraceError: a file has another version, or no file has an operation.
        ConfigError: a mesh is given without a cluster, or a cluster without a mesh.
    """
    if (mesh is None) != (cluster is None):
        raise ConfigError(
            "a mesh and a cluster are both needed to map the ranks and hosts of Inspector's communicators to axes.",
            hint="--mesh and --cluster, --experiment, or none of them",
        )
    placement = mesh.placement(cluster) if mesh is not None and cluster is not None else None
    found = inspect(files, placement)
    times = _step_times_s(files[0].parent)
    steps, seen = len(times) or 1, len(found.hosts)
    per = 1 / (found.devices * steps)
    rows = [_part(row, per, placement, cluster) for row in found.rows]
    hosts = dict(enumerate(found.hosts))
    notes = [*found.notes, _note_of_steps(times), *_unnamed(rows, placement)]
    report = Report(
        source="profile",
        cluster=cluster_part(cluster, found.devices),
        mesh=mesh_part(placement) if placement is not None else (),
        window=schema.WindowPart(steps=steps, devices=found.devices, processes_seen=seen, processes_expected=seen),
        step=schema.StepPart(time_s=statistics.median(times) if times else None),
        communication=tuple(rows),
        quality=schema.QualityPart(events=found.operations, dropped_events=found.dropped, wait_method="clock_free"),
        stragglers=stragglers_part(found.skew, hosts, {}, steps) if found.skew.stragglers else None,
        warnings=tuple(to_warnings(notes)),
    )
    report = add_communication_findings(report, cluster)
    if out is None:
        return with_predicted(report, predicted)
    return write_folder(report, run_folder(Path(out)), predicted=predicted, title=files[0].parent.name)


def _part(row: InspectedRow, per: float, placement: Placement | None, cluster: Cluster | None) -> CommunicationPart:
    """Return a row of the report: means per step and GPU, and if the mesh is known, its axes and bandwidths.

    Args:
        per: 1 / (devices * steps), which turns the job's sums into these means.
    """
    group = row.communicator
    shape = shape_on(placement, group) if placement is not None else None
    like = Collective(
        name=row.collective, key="", collective=row.collective, axes=shape.axes if shape else (),
        axes_complete=shape is not None, link=shape.link if shape else "",
        fabric=placement.fabric.get(shape.link) if placement is not None and shape else None, dtype="",
        group_size=group.ranks, num_groups=row.communicators,
        gpus_per_domain=shape.gpus_per_domain if shape else group.ranks, payload_bytes=0,
    )  # fmt: skip
    payload, busy_s = row.payload_bytes * per, row.busy_s * per
    wait_s = None if row.wait_s is None else row.wait_s * per
    transfer_s = None if wait_s is None else busy_s - wait_s
    return CommunicationPart.from_sources(
        like,
        axes_complete=None if placement is None else shape is not None,
        link=like.link or None,
        dtype=None,
        gpus_per_domain=like.gpus_per_domain if shape else None,
        count=row.count * per,
        payload_bytes=payload,
        busy_s=busy_s,
        transfer_s=transfer_s,
        wait_s=wait_s,
        **wire_numbers(like, payload, transfer_s, cluster if shape else None),
    )


def _step_times_s(folder: Path) -> list[float]:
    """Return the step times in seconds from metrics.jsonl in the folder or its parent; empty without such a file."""
    for at in (folder, folder.absolute().parent):
        times = [r.get("step_time_s") for r in read_metrics(at / METRICS_FILE)]
        if known := [float(t) for t in times if isinstance(t, int | float) and t > 0]:
            return known
    return []


def _note_of_steps(times: Sequence[float]) -> Note:
    if times:
        message = f"Means are over the {len(times)} steps in {METRICS_FILE}; Inspector is assumed to have seen all."
        return Note("steps_found", message)
    message = (
        f"No {METRICS_FILE} is in the folder or above it: numbers are for the whole recording, as if it were one step."
    )
    return Note("no_steps", message)


def _unnamed(rows: Sequence[CommunicationPart], placement: Placement | None) -> list[Note]:
    """Return a note on the communicators that match no mesh axes, or more than one set of them."""
    without = sorted({r.group_size or 0 for r in rows if not r.axes}) if placement is not None else []
    if not without:
        return []
    sizes = ", ".join(map(str, without))
    message = f"Communicators of {sizes} ranks match no mesh axes, or several: their rows have no axes."
    return [Note("unmapped_communication", message, sum(r.busy_s or 0.0 for r in rows if not r.axes))]
