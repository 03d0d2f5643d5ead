"""Measured costs, for what comes next: a calibration that plan reads, and a profile that XLA schedules by.

trace -> seconds of every instruction -> pgle.pbtxt         XLA's profile-guided latency estimator
      -> fits of collectives, sustained rates -> calibration.toml    later plans of this cluster
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from meshkit.compile.loop import profile_text
from meshkit.config import calibration
from meshkit.config.calibration import Calibration, Fit, MeasuredOn, Rates
from meshkit.config.cluster import Cluster
from meshkit.errors import TraceError
from meshkit.hlo.module import Schedule
from meshkit.hlo.schedule import Collective
from meshkit.predict.kernels import precision_of
from meshkit.predict.network import wire_factor
from meshkit.trace.captured import Captured
from meshkit.trace.measured import kernel_runs, kernel_seconds
from meshkit.trace.reader import Trace

PGLE_FILE = "pgle.pbtxt"
_LEAST_FLOPS = 1e9  # of one kernel: below, its launch and ramp are what is measured
_LEAST_BYTES = 16 * 2**20
_LEAST_MESSAGE_BYTES = 2**20  # below, a collective's time is its latency, and a bandwidth made of it is wrong


def measured_costs(trace: Trace, schedule: Schedule | None = None) -> dict[str, float]:
    """Seconds of one run of every instruction of a program: of a collective what moves data, where waiting is known."""
    found = kernel_seconds(trace, schedule)
    for collective, _, seconds in _collective_times(trace):
        found[collective.name] = seconds
    return found


def write_pgle(path: str | Path, costs: Mapping[str, float]) -> Path:
    """Writes measured costs as the text form of `tensorflow.profiler.ProfiledInstructionsProto`.

    XLA reads it from `xla_gpu_pgle_profile_file_or_directory_path` (whose name must end in .pbtxt): the latency hiding
    scheduler then knows how long each collective and each kernel takes.

    Args:
        path: the file.
        costs: instruction -> seconds.

    Raises:
        TraceError: it cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(profile_text(costs), encoding="utf-8")
    except OSError as error:
        raise TraceError(f"the profile cannot be written: {error.strerror}.", at=str(target)) from None
    return target


def write_calibration(path: str | Path, captured: Captured, trace: Trace) -> Path | None:
    """Writes what a run measured of its machine, for `cluster.calibration`; None where that is nothing.

    Raises:
        ConfigError: it cannot be written.
    """
    found = calibration_of(captured, trace)
    if found is None:
        return None
    return calibration.write(path, found)


def calibration_of(captured: Captured, trace: Trace) -> Calibration | None:
    """Fits of the collectives and sustained rates of the kernels of a run; None without a cluster, or with neither."""
    cluster, record = captured.cluster, captured.record
    if cluster is None:
        return None
    fits = tuple(_fits(trace))
    rates = _rates(trace, captured.schedule, cluster) if captured.schedule else Rates()
    if not fits and rates == Rates():
        return None
    measured_on = MeasuredOn(
        gpu=cluster.gpu.key,
        scale_up=cluster.scale_up,
        fabric=cluster.fabric,
        devices=len(record.mesh.device_ids),
        date=time.strftime("%Y-%m-%dT%H:%M:%S"),
        jax=record.jax,
        jaxlib=record.jaxlib,
    )
    return Calibration(fits, measured_on, rates)


def _collective_times(trace: Trace) -> list[tuple[Collective, float, float]]:
    """(collective, runs a step, seconds of one) of each that ran."""
    if not trace.sweeps:
        return []
    count, busy = (np.mean([getattr(s, name) for s in trace.sweeps], axis=0) for name in ("count", "busy_s"))
    known = [s.transfer_s for s in trace.sweeps if s.transfer_s is not None]
    transfer = np.mean(known, axis=0) if len(known) == len(trace.sweeps) else np.full(len(count), np.nan)
    moving = np.where(np.isnan(transfer), busy, transfer)
    return [
        (c, float(count[i]), float(moving[i] / count[i]))
        for i, c in enumerate(trace.steps.collectives)
        if count[i] and moving[i] > 0
    ]


def _fits(trace: Trace) -> list[Fit]:
    """One fit for each kind of collective over groups of one shape, where the largest message tells a bandwidth."""
    shapes: dict[tuple, list[tuple[float, float, float]]] = {}
    for c, count, seconds in _collective_times(trace):
        if c.group_size < 2 or c.collective not in calibration.COLLECTIVES or not c.axes:
            continue
        shape = (c.link, c.collective, c.gpus_per_domain, c.group_size // c.gpus_per_domain)
        wire = c.payload_bytes * wire_factor(c.collective, c.group_size)
        shapes.setdefault(shape, []).append((wire, seconds, count))
    found = []
    for (link, collective, local, domains), points in sorted(shapes.items()):
        line = fit_line(points) if max(wire for wire, *_ in points) >= _LEAST_MESSAGE_BYTES else None
        if line is not None:
            latency_s, bytes_per_s, residual = line
            found.append(
                Fit(
                    link=link,
                    collective=collective,
                    gpus_per_domain=local,
                    domains=domains,
                    latency_s=latency_s,
                    bytes_per_s=bytes_per_s,
                    residual_median=residual,
                    points=len({wire for wire, *_ in points}),
                )
            )
    return found


def fit_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float] | None:
    """(latency_s, bytes_per_s, residual_median) of points (wire bytes, seconds, weight); None for no line.

    Least squares of the relative error, so that small messages count as much as large ones. Messages of one size tell
    no latency from bandwidth: all of their time is then bandwidth.
    """
    wire, seconds, weight = np.array(points, float).T
    if not (wire > 0).any():
        return None
    latency, slope = 0.0, 0.0
    if len(np.unique(wire)) > 1:
        scale = np.sqrt(weight) / seconds
        (latency, slope), *_ = np.linalg.lstsq(np.stack([scale, wire * scale], axis=1), np.sqrt(weight), rcond=None)
    if latency < 0 or slope <= 0:
        latency, slope = 0.0, float((seconds * weight).sum() / (wire * weight).sum())
    residual = float(np.median(np.abs((latency + slope * wire) / seconds - 1)))
    return float(latency), 1 / float(slope), residual


def _rates(trace: Trace, schedule: Schedule, cluster: Cluster) -> Rates:
    """FLOP/s and bytes/s over all kernels that are large enough to sustain any."""
    costs = {i.name: i.cost for body in schedule.computations.values() for i in body if i.cost is not None}
    matmul: dict[str, list[float]] = {}
    attention: dict[str, list[float]] = {}
    memory = [0.0, 0.0]
    runs_of, busy_of = kernel_runs(trace, schedule), dict(zip(trace.timeline.op_names, trace.kernels.busy_s.tolist()))
    for name, runs in runs_of.items():
        cost, busy = costs.get(name), busy_of[name]
        if cost is None or not busy:
            continue
        flops = sum(cost.matmul_flops.values())
        if cost.attention_flops >= _LEAST_FLOPS and not flops:
            kind = "backward" if cost.attention_backward else "forward"
            _add(attention.setdefault(kind, [0.0, 0.0]), runs * cost.attention_flops, busy)
        elif flops >= _LEAST_FLOPS and len(cost.matmul_flops) == 1:
            precision = precision_of(cluster.gpu, next(iter(cost.matmul_flops)))
            _add(matmul.setdefault(precision, [0.0, 0.0]), runs * flops, busy)
        elif not flops and not cost.attention_flops and not cost.host_bytes and cost.bytes_accessed >= _LEAST_BYTES:
            _add(memory, runs * cost.bytes_accessed, busy)
    return Rates(
        matmul_flops_per_s={k: work / s for k, (work, s) in matmul.items()},
        attention_flops_per_s={k: work / s for k, (work, s) in attention.items()},
        memory_bytes_per_s=memory[0] / memory[1] if memory[1] else None,
    )


def _add(total: list[float], work: float, seconds: float) -> None:
    if math.isfinite(seconds):
        total[0] += work
        total[1] += seconds
