"""Turn the measured seconds of instructions into inputs of a simulation, of later plans, and of XLA's scheduler.

trace -> seconds of every instruction -> simulation of `meshkit rehearse`: real kernels on one GPU, no real collectives
      -> pgle.pbtxt                                             input of XLA's profile-guided latency estimator
      -> fits of collectives, sustained rates -> calibration.toml    input of later plans of this cluster
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from meshkit.compile.cache import profile_text
from meshkit.config import calibration
from meshkit.config.calibration import Calibration, Fit, MeasuredOn, Rates
from meshkit.config.cluster import Cluster, Gpu
from meshkit.config.files import write_file
from meshkit.errors import TraceError
from meshkit.hlo.schedule import Collective, Instruction, Schedule
from meshkit.predict.algorithms import wire_factor
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.kernels import (
    attention_gain,
    attention_share,
    full_clock,
    power_share,
    precision_of,
    shape_share,
    step_gain,
)
from meshkit.predict.pricing import Pricer
from meshkit.trace.captured import Captured
from meshkit.trace.reader import Trace

PGLE_FILE = "pgle.pbtxt"
_LEAST_FLOPS = 1e9  # FLOP of one kernel; launch and ramp-up dominate the time of a smaller one.
_LEAST_BYTES = 16 * 2**20
# Latency dominates the time of a smaller collective, so it gives no bandwidth.
_LEAST_MESSAGE_BYTES = 2**20


def kernel_runs(trace: Trace, schedule: Schedule | None) -> dict[str, float]:
    """Return instruction -> runs in one execution, as a mean over the captured steps.

    A trace counts kernels, and one instruction may launch several: cuDNN's attention backward three, a sort some
    dozens. So the number of runs comes from the schedule. If the schedule does not know it, or if it exceeds the number
    of kernels because the trace lost some, each kernel counts as one run.
    """
    known = schedule.known_runs() if schedule is not None else {}
    counts = zip(trace.timeline.op_names, trace.kernels.count.tolist())
    return {name: min(count, known.get(name, count)) for name, count in counts if count > 0}


def kernel_seconds(trace: Trace, schedule: Schedule | None) -> dict[str, float]:
    """Return instruction -> mean seconds of one run over the captured steps; a run is the sum of its kernels."""
    busy = dict(zip(trace.timeline.op_names, trace.kernels.busy_s.tolist()))
    return {name: busy[name] / runs for name, runs in kernel_runs(trace, schedule).items()}


class MeasuredKernels:
    """Gives the seconds of an instruction: measured for kernels, modelled for collectives and copies.

    Args:
        times: instruction -> seconds of one run, from `kernel_seconds`.
    """

    def __init__(self, times: Mapping[str, float], cluster: Cluster):
        self._times, self._model = times, Pricer(cluster, Assumptions(contention=False, slowest=False))
        self.missing: dict[str, float] = {}
        """Kernels that the trace does not have -> their seconds by the kernel model."""
        self.known_s = 0.0

    def __call__(self, i: Instruction) -> float:
        if i.collective is not None:
            return self._model.collective_s(i)
        if i.kind == "kernel" and (measured := self._times.get(i.name)) is not None:
            self.known_s += measured
            return measured
        seconds = self._model.work(i).alone_s
        if i.kind == "kernel":
            self.missing[i.name] = seconds
        return seconds


def measured_costs(trace: Trace, schedule: Schedule | None = None) -> dict[str, float]:
    """Return instruction -> seconds of one run, for all instructions that ran, without collectives' known waits."""
    found = kernel_seconds(trace, schedule)
    for collective, _, seconds in _collective_times(trace):
        found[collective.name] = seconds
    return found


def write_pgle(path: str | Path, costs: Mapping[str, float]) -> Path:
    """Write measured costs as the text form of `tensorflow.profiler.ProfiledInstructionsProto`.

    Set XLA's flag `xla_gpu_pgle_profile_file_or_directory_path` to the file, whose name must end in .pbtxt: the latency
    hiding scheduler then uses these times of collectives and kernels.

    Raises:
        TraceError: the file cannot be written.
    """
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, profile_text(costs))
    except OSError as error:
        raise TraceError(f"the profile cannot be written: {error.strerror}.", at=str(target)) from None
    return target


def write_calibration(path: str | Path, captured: Captured, trace: Trace) -> Path | None:
    """Write a file for `cluster.calibration` with fits of a run's collectives and rates of its kernels.

    Without a cluster, or if the run has neither fits nor rates, nothing is written and the result is None.

    Raises:
        ConfigError: the file cannot be written.
    """
    cluster, record = captured.cluster, captured.record
    if cluster is None:
        return None
    fits = tuple(_fits(trace))
    rates, schedule = Rates(), captured.schedule
    if schedule is not None:
        runs, times = kernel_runs(trace, schedule), kernel_seconds(trace, schedule)
        rates = rates_of(schedule, times, cluster, busy=tensor_share(trace, schedule, cluster.gpu), runs=runs)
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
    return calibration.write(path, Calibration(fits, measured_on, rates))


def rates_of(
    schedule: Schedule,
    times: Mapping[str, float],
    cluster: Cluster,
    *,
    busy: float,
    runs: Mapping[str, float] | None = None,
) -> Rates:
    """Return the sustained rates of the kernels by class: total work / total time of the class's large kernels.

    The classes are matmuls of one precision, attention forward, attention backward, and memory: kernels without matmul
    or attention. A class without a kernel has no rate. Rates of matmuls and attention are divided by the gain of this
    step's clock (`step_gain`), because plans multiply them by the gain of their own step.

    Args:
        times: instruction -> seconds of one run.
        busy: share of the step in which tensor cores worked, see `step_gain`. Pass 0 for kernels at the full clock.
        runs: instruction -> number of its runs. With it, only large kernels count, once for each run. With None, every
            kernel counts once.
    """
    rates, gpu = _sustained(_samples(schedule, times, cluster, runs)), cluster.gpu
    if gpu.compute_capability is None:
        return rates
    matmuls = {p: x / step_gain(full_clock(gpu, p), busy) for p, x in rates.matmul_flops_per_s.items()}
    passes = {w: x / attention_gain(gpu, w, busy) for w, x in rates.attention_flops_per_s.items()}
    return rates.model_copy(update={"matmul_flops_per_s": matmuls, "attention_flops_per_s": passes})


def tensor_share(trace: Trace, schedule: Schedule, gpu: Gpu) -> float:
    """Return the share (0 to 1) of a step's time in which tensor cores worked; exposed communication is not counted.

    Each kernel's time is weighted with its share of full power (`power_share`). The result is a mean over the device
    steps, and 1 if the steps have only exposed communication.
    """
    kernels = (i for body in schedule.computations.values() for i in body if i.kind == "kernel")
    power = {i.name: power_share(i.cost, gpu) for i in kernels if i.cost}
    busy = zip(trace.timeline.op_names, trace.kernels.busy_s.tolist())
    tensor_s = sum(seconds * power.get(name, 0.0) for name, seconds in busy)
    step_s = sum(s.total.window_s - s.total.exposed_s for s in trace.sweeps) / (len(trace.sweeps) or 1)
    return min(1.0, tensor_s / step_s) if step_s > 0 else 1.0


# (`matmul`, `attention` or `memory`; precision, direction or ""; FLOP or bytes; seconds) of a kernel.
_Sample = tuple[str, str, float, float]


def _sustained(samples: Iterable[_Sample]) -> Rates:
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kind, name, work, seconds in samples:
        if math.isfinite(seconds):
            sums[kind, name][0] += work
            sums[kind, name][1] += seconds

    def rates(wanted: str) -> dict[str, float]:
        return {name: work / s for (kind, name), (work, s) in sums.items() if kind == wanted and s}

    return Rates(
        matmul_flops_per_s=rates("matmul"),
        attention_flops_per_s=rates("attention"),
        memory_bytes_per_s=rates("memory").get(""),
    )


def _samples(
    schedule: Schedule, times: Mapping[str, float], cluster: Cluster, runs: Mapping[str, float] | None
) -> Iterator[_Sample]:
    """Yield a sample of each kernel; with `runs`, only of large kernels, with the sums over their runs."""
    gpu = cluster.gpu
    for i in (i for body in schedule.computations.values() for i in body):
        cost, seconds = i.cost, times.get(i.name)
        if cost is None or i.kind != "kernel" or not seconds or cost.host_bytes:
            continue
        count, large = (1.0, 0.0) if runs is None else (runs[i.name], 1.0)
        flops = sum(cost.matmul_flops.values())
        if cost.attention_flops:
            kind, name = "attention", "backward" if cost.attention_backward else "forward"
            work = cost.attention_flops / attention_share(cost, gpu)  # The model multiplies by this share.
            enough = cost.attention_flops >= large * _LEAST_FLOPS and not (large and flops)
        elif len(cost.matmul_flops) == 1:
            kind, name = "matmul", precision_of(gpu, next(iter(cost.matmul_flops)))
            large_flops = sum(m.flops / shape_share(m, gpu, precision_of(gpu, m.dtype)) for m in cost.matmuls)
            shaped = sum(m.flops for m in cost.matmuls)
            work = flops / (shaped / large_flops) if large_flops else flops
            enough = flops >= large * _LEAST_FLOPS
        else:
            kind, name, work = "memory", "", cost.bytes_accessed
            enough = not cost.matmul_flops and cost.bytes_accessed > large * _LEAST_BYTES
        if enough:
            yield kind, name, count * work, count * seconds


def _collective_times(trace: Trace) -> list[tuple[Collective, float, float]]:
    """Return (collective, runs per step, seconds of one run) of each collective that ran."""
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
    """Return a fit per kind of collective and shape of group, if the largest message is not dominated by latency."""
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
    """Fit seconds = latency_s + bytes / bytes_per_s; return (latency_s, bytes_per_s, residual_median), or None.

    The line has the least squares of the relative error, so that small messages count as much as large ones. Messages
    of a single size do not separate latency from bandwidth: the latency is then 0. `residual_median` is the median of
    |line / measured - 1|. The result is None if all messages are empty.

    Args:
        points: [n] (wire bytes as in `wire_factor`, nonzero seconds of one run, number of runs as the weight).
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
