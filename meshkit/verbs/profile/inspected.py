"""The measured report of a job that NCCL Inspector watched: communication rows, and nothing that needs a trace."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec, Placement
from meshkit.console import run_folder
from meshkit.errors import ConfigError
from meshkit.hlo.schedule import Collective
from meshkit.predict.algorithms import wire_factor
from meshkit.report.causes import judged_by_communication
from meshkit.report.folder import write_folder
from meshkit.report.measured import METRICS_FILE, noted, stragglers_part
from meshkit.report.rows import infiniband_share, peak_bus_bandwidth_bytes_per_s
from meshkit.report.schema import (
    CommunicationPart,
    QualityPart,
    Report,
    StepPart,
    WindowPart,
)
from meshkit.report.summarize import cluster_part, mesh_part
from meshkit.runs.metrics import read_metrics
from meshkit.trace.checks import Note
from meshkit.trace.inspector import InspectedRow, inspect, shape_on


def profile_inspector(
    files: Sequence[Path],
    *,
    mesh: MeshSpec | None = None,
    cluster: Cluster | None = None,
    out: str | Path | None = None,
    predicted: Report | None = None,
) -> Report:
    """The measured report of Inspector's files; see `trace.inspector`.

    Args:
        files: of all processes of one job.
        mesh: its axes, which communicators of their shape are named by; without it rows go by communicators' size.
        cluster: where its GPUs are; without it links have no name.
        out: a folder for the report's files; None writes nothing.
        predicted: a plan's report, which the page shows next to the measurement.

    Raises:
        TraceError: a file is of another version, or no operation is in any.
        ConfigError: a mesh without a cluster, or a cluster without a mesh.
    """
    if (mesh is None) != (cluster is None):
        raise ConfigError(
            "Inspector's communicators are told apart by their ranks and the hosts that these are on.",
            hint="--mesh and --cluster, --experiment, or none of them",
        )
    placement = mesh.placement(cluster) if mesh is not None and cluster is not None else None
    found = inspect(files, placement)
    times = _step_times_s(files[0].parent)
    steps = len(times) or 1
    per = 1 / (found.devices * steps)
    rows = [_part(row, per, placement, cluster) for row in found.rows]
    hosts = dict(enumerate(found.hosts))
    notes = [*found.notes, _note_of_steps(times), *_unnamed(rows, placement)]
    report = Report(
        source="profile",
        cluster=cluster_part(cluster, found.devices),
        mesh=mesh_part(placement) if placement is not None else (),
        window=WindowPart(
            steps=steps,
            devices=found.devices,
            processes_seen=len(found.hosts),
            processes_expected=len(found.hosts),
        ),
        step=StepPart(time_s=statistics.median(times) if times else None),
        communication=tuple(rows),
        quality=QualityPart(events=found.operations, dropped_events=found.dropped, wait_method="clock_free"),
        stragglers=stragglers_part(found.skew, hosts, {}, steps) if found.skew.stragglers else None,
        warnings=tuple(noted(notes)),
    )
    report = judged_by_communication(report, cluster)
    if out is None:
        return report
    return write_folder(report, run_folder(Path(out)), predicted=predicted, title=files[0].parent.name)


def _part(row: InspectedRow, per: float, placement: Placement | None, cluster: Cluster | None) -> CommunicationPart:
    """A row of the report: means a step and GPU; what one GPU's NVLink and InfiniBand carry where the mesh is known."""
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
    wire = payload * wire_factor(row.collective, group.ranks)
    wait_s = None if row.wait_s is None else row.wait_s * per
    moving_s = busy_s if wait_s is None else busy_s - wait_s
    across = wire * infiniband_share(like)
    return CommunicationPart.of(
        like,
        axes_complete=None if placement is None else shape is not None,
        link=like.link or None,
        dtype=None,
        gpus_per_domain=like.gpus_per_domain if shape else None,
        count=row.count * per,
        payload_bytes=payload,
        wire_bytes=wire,
        wire_bytes_nvlink=wire - across if shape else None,
        wire_bytes_infiniband=across if shape else None,
        busy_s=busy_s,
        transfer_s=None if wait_s is None else moving_s,
        wait_s=wait_s,
        bus_bandwidth_bytes_per_s=wire / moving_s if wire and moving_s > 0 and wait_s is not None else None,
        bus_bandwidth_peak_bytes_per_s=peak_bus_bandwidth_bytes_per_s(like, cluster) if shape and wire else None,
    )


def _step_times_s(folder: Path) -> list[float]:
    """The steps' seconds by the metrics.jsonl in the folder, or beside it; empty without one."""
    for at in (folder, folder.absolute().parent):
        times = [r.get("step_time_s") for r in read_metrics(at / METRICS_FILE)]
        if known := [float(t) for t in times if isinstance(t, int | float) and t > 0]:
            return known
    return []


def _note_of_steps(times: Sequence[float]) -> Note:
    if times:
        message = (
            f"Means are over the {len(times)} steps in {METRICS_FILE}, all of which Inspector is taken to have seen."
        )
        return Note("steps_found", message)
    message = (
        f"No {METRICS_FILE} is in the folder or above it: numbers are of the whole recording, as if it were one step."
    )
    return Note("no_steps", message)


def _unnamed(rows: Sequence[CommunicationPart], placement: Placement | None) -> list[Note]:
    """Which communicators no single set of mesh axes explains."""
    without = sorted({r.group_size or 0 for r in rows if not r.axes}) if placement is not None else []
    if not without:
        return []
    sizes = ", ".join(map(str, without))
    message = f"Communicators of {sizes} ranks have the shape of no mesh axes, or of several: their rows have no axes."
    return [Note("unmapped_communication", message, sum(r.busy_s or 0.0 for r in rows if not r.axes))]
