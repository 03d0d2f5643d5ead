"""Make the parts of a report that only a measurement has: data quality, stragglers, history and goodput of the run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.discover.topology import Match, gpu_by_name
from meshkit.hlo.schedule import Schedule
from meshkit.report import schema
from meshkit.report.goodput import goodput_part
from meshkit.report.schema import CommunicationPart, Report, Warning_
from meshkit.runs.metrics import read_metrics, within
from meshkit.runs.phases import read_goodput
from meshkit.trace.captured import CaptureRecord
from meshkit.trace.reader import COMMAND_BUFFERS_FLAG, MOST_UNMAPPED, Facts, Note, Trace
from meshkit.trace.skew import Skew
from meshkit.units import format_bytes, format_percent

METRICS_FILE = "metrics.jsonl"
COLUMNS = (
    "loss",
    "evaluation_loss",
    "step_time_s",
    "tokens_per_s",
    "examples_per_s",
    "mfu",
    "data_wait_s",
    "device_wait_s",
    "host_s",
    "exposed_s",
    "overlapped_share",
)
_MAX_POINTS = 300  # A small chart is about as many pixels wide.
_WARM_UP = 0.05  # The trend leaves out this share of the records at the start, while caches fill and clocks rise.
_FEWEST_UNTRACED = 3  # The fewest steps before the trace from which their step time is computed.
_FEWEST = 9  # The fewest values for a trend: three in each third.
_NOTABLE, _FEWEST_TO_WARN = 0.1, 30  # A smaller change, or one over fewer steps, may come from a single slow step.
_MAX_STRAGGLERS = 32
_OTHER_MEMORY = 0.15  # Drivers and ECC take a smaller share of a GPU's memory; a larger difference is another GPU.
_SECONDS = (
    "time_s", "overlapped_s", "exposed_s", "sole_exposed_s", "exposed_wait_s", "busy_s", "transfer_s", "wait_s",
    "bus_bandwidth_bytes_per_s",
)  # fmt: skip


def quality_part(
    trace: Trace, *, missing: Sequence[int] = (), overhead_s: float | None = None, steps_per_execution: int = 1
) -> schema.QualityPart:
    """Return the data quality of a trace; seconds of work and of waits are means per training step.

    Args:
        missing: processes without a trace.
        overhead_s: seconds that the capture added to a step, if known.
        steps_per_execution: training steps per execution of the program.
    """
    facts, skew = trace.facts, trace.skew
    each = max(1, facts.device_steps) * steps_per_execution
    clocks = skew.clocks
    swept = max(1, len(trace.sweeps)) * steps_per_execution
    free, clocked = skew.wait_clock_free_s, skew.wait_clocked_s
    return schema.QualityPart.from_sources(
        facts,
        dropped_events=facts.dropped,
        graph_s=facts.graph_s / each,
        fused_s=facts.fused_s / each,
        axes_withheld=not facts.believes_axes,
        missing_processes=tuple(missing),
        damaged_processes=tuple(sorted(facts.damaged)),
        clocks=clocks.count if clocks else 1,
        clock_residual_s=clocks.residual_s if clocks else None,
        clock_offset_s=float(abs(clocks.offset_s).max()) if clocks else None,
        wait_method=skew.method,
        overhead_s=overhead_s,
        wait_clock_free_s=None if free is None else free / swept,
        wait_clocked_s=None if clocked is None or skew.method != "clocked" else clocked / swept,
    )


def stragglers_part(
    skew: Skew,
    hosts: Mapping[int, str],
    compute_s: Mapping[int, float],
    steps: int,
    late: Mapping[int, schema.LatePart] | None = None,
) -> schema.StragglersPart:
    """Return the devices that others wait for, the worst first, and then the other late devices.

    Args:
        hosts: process -> name of its host.
        compute_s: device -> seconds of compute per training step.
        steps: number of training steps over which `skew` sums.
        late: device -> why it is late, from `late_devices`.
    """
    late = late or {}
    devices = [
        schema.StragglerPart.from_sources(
            s,
            host=hosts.get(s.process),
            caused_wait_s=s.caused_wait_s / steps,
            waited_s=s.waited_s / steps,
            delay_s=s.delay_s / steps,
            compute_s=compute_s.get(s.device),
            late=late.get(s.device),
        )
        for s in skew.stragglers[:_MAX_STRAGGLERS]
    ]
    for device in sorted(late.keys() - {d.device for d in devices}, key=lambda d: -late[d].behind_s):
        devices.append(schema.StragglerPart(device=device, compute_s=compute_s.get(device), late=late[device]))
    return schema.StragglersPart.from_sources(skew, devices=tuple(devices))


def machine_notes(cluster: Cluster | None, facts: Facts, device_kind: str | None = None) -> Iterator[Note]:
    """Yield at most one note, `other_gpu`: the trace is of other devices than the cluster's.

    Devices differ if one side has CPUs and the other GPUs, or if their name, vendor or major compute capability
    differs, or if their memory differs by more than 15 %. What the trace does not say counts as equal.
    """
    if cluster is None:
        return
    gpu, hardware, found = cluster.gpu, facts.hardware, ""
    named = gpu_by_name(device_kind) if device_kind else None
    vendor, major, memory = (hardware.get(k) for k in ("device_vendor", "compute_cap_major", "memory_size"))
    if facts.cpu or cluster.is_cpu:
        found = "" if facts.cpu and cluster.is_cpu else "CPU devices" if facts.cpu else "GPUs"
    elif named is not None and named.key and named.key != gpu.key and not named.stand_in:
        found = f"{device_kind}s"
    elif isinstance(vendor, str) and vendor.lower() != "nvidia":
        found = f"GPUs of {vendor}"
    elif major is not None and gpu.compute_capability and gpu.compute_capability[0] != major:
        found = f"GPUs of compute capability {major}.{hardware.get('compute_cap_minor', 0)}"
    elif isinstance(memory, int) and memory and abs(memory / gpu.memory_bytes - 1) > _OTHER_MEMORY:
        found = f"GPUs with {format_bytes(memory)} of memory"
    if found:
        yield Note(
            "other_gpu",
            f"The trace is of {found}, but the cluster has {gpu.key}: the links, peaks and expected times are "
            "those of another machine.",
        )


def gpu_of_trace(facts: Facts) -> Cluster | None:
    """Return a cluster of one GPU of the traced kind, to price kernels; None if the kind is unknown."""
    name = facts.hardware.get("gpu_device_name")
    found = gpu_by_name(name) if isinstance(name, str) else Match()
    if found.key is None or found.stand_in is not None:
        return None
    scale_up = "nvlink" if catalog.gpu(found.key).nvlink_links else "pcie"
    return Cluster.load({"name": f"one {found.key}", "gpu": found.key, "gpus_per_host": 1, "scale_up": scale_up})


def bandwidth_notes(rows: Iterable[CommunicationPart]) -> Iterator[Note]:
    """Yield at most one note: the bus bandwidth of some rows of communication includes waiting."""
    low = [row for row in rows if row.bus_bandwidth_bytes_per_s is not None and row.transfer_s is None]
    if low:
        yield Note(
            "bus_bandwidth_with_waits",
            f"The time of waiting is unknown for {len(low)} rows of communication: their bus bandwidth includes it, "
            "and is a lower bound.",
        )


def to_warnings(notes: Iterable[Note]) -> list[Warning_]:
    """Return the notes of a trace as warnings."""
    return [Warning_(code=n.code, message=n.message, seconds=n.seconds) for n in notes]


def captured_program(record: CaptureRecord, schedule: Schedule | None) -> schema.ProgramPart:
    """Return the captured program as a part of the report."""
    return schema.ProgramPart.from_sources(record, fingerprint=schedule.fingerprint if schedule else None, options=None)


def withhold_axes(report: Report, trace: Trace) -> Report:
    """Return the report without seconds by axis, if the instruction of too much communication is unknown.

    One row without axes then has the seconds of all communication. The other rows keep their counts and bytes, which
    come from the program. Their seconds are None, because an unknown part of them is missing.
    """
    share, hidden = trace.facts.mapped_share, trace.facts.hidden
    if trace.facts.believes_axes:
        return report
    step = report.step
    known = []
    for row in (row for row in report.communication if row.axes):
        ops = tuple(op.model_copy(update={"busy_s": None, "exposed_s": None}) for op in row.ops)
        known.append(row.model_copy(update=dict.fromkeys(_SECONDS) | {"ops": ops}))
    everything = CommunicationPart(
        axes=(),
        count=sum(row.count for row in report.communication),
        time_s=step.communication_s,
        overlapped_s=step.overlapped_s,
        exposed_s=step.exposed_s,
        busy_s=sum(row.busy_s or 0.0 for row in report.communication),
    )
    reason = f"{len(hidden)} collectives of the program ran inside CUDA graphs, which hide them"
    if share is not None and 1 - share > MOST_UNMAPPED:
        reason = f"{format_percent(1 - share)} of the communication maps to no instruction, more than the "
        reason += f"allowed {format_percent(MOST_UNMAPPED)}"
    message = (
        f"{reason}: seconds by axis are withheld. Capture with XLA_FLAGS={COMMAND_BUFFERS_FLAG} (no CUDA graphs) to "
        "see them."
    )
    warning = Warning_(code="axes_withheld", message=message, seconds=step.communication_s)
    return report.model_copy(update={"communication": (everything, *known), "warnings": (warning, *report.warnings)})


def read_history(run: str | Path) -> schema.HistoryPart | None:
    """Return the history of a run folder; None if it has no metrics."""
    return summarize_metrics(read_metrics(Path(run) / METRICS_FILE))


def summarize_metrics(records: Sequence[Mapping[str, Any]]) -> schema.HistoryPart | None:
    """Return a run's metrics as columns of at most 300 evenly spaced records, and trends over all records."""
    if not records:
        return None
    present = [c for c in COLUMNS if any(_number(r.get(c)) is not None for r in records)]
    shown = records[:: -(-len(records) // _MAX_POINTS)]
    return schema.HistoryPart(
        steps=tuple(int(r["step"]) for r in shown),
        values={c: tuple(_number(r.get(c)) for r in shown) for c in present},
        trend={c: _trend([_number(r.get(c)) for r in records]) for c in present},
    )


def untraced_step_s(history: schema.HistoryPart | None, first_traced: int) -> float | None:
    """Return the median step time before the trace, in seconds; None if fewer than three steps are known.

    Step 1 is left out, because it warms up.
    """
    if history is None:
        return None
    each = zip(history.steps, history.values.get("step_time_s", ()))
    before = [s for step, s in each if 1 < step < first_traced and s is not None]
    return statistics.median(before) if len(before) >= _FEWEST_UNTRACED else None


def trend_warnings(history: schema.HistoryPart | None) -> list[Warning_]:
    """Return a warning if the run is long enough, and its steps got longer by more than 10 %; else no warning."""
    grown = history.trend.get("step_time_s") if history else None
    if history is None or grown is None or grown <= _NOTABLE or len(history.steps) < _FEWEST_TO_WARN:
        return []
    message = (
        f"The steps of this run got {format_percent(grown)} longer from its first third to its last; the captured "
        "steps are from one moment of it."
    )
    return [Warning_(code="step_time_trend", message=message)]


def read_goodput_part(run: str | Path) -> schema.GoodputPart | None:
    """Return the goodput of a run folder; None if it has none."""
    found = read_goodput(Path(run))
    return goodput_part(found) if found else None


def _trend(values: Sequence[float | None]) -> float | None:
    """Return the relative change of the median from the first third to the last; None if there are too few values."""
    known = [v for v in values[max(1, int(len(values) * _WARM_UP)) :] if v is not None]
    if len(known) < _FEWEST:
        return None
    third = len(known) // 3
    before, after = statistics.median(known[:third]), statistics.median(known[-third:])
    return within(after / before - 1) if before else None


def _number(value: Any) -> float | None:
    return within(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None
