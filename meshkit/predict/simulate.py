"""Simulate a schedule on a cluster: predict when each instruction runs.

One GPU represents all (SPMD). Kernels and blocking collectives run on the compute stream in schedule order.
Asynchronous collectives run on one or two other streams in the order of their starts. Collectives in flight share
links, and kernels beside them are slower (pricing.py). Asynchronous copies over the host link have their own stream,
except copies in CUDA graphs. Copies on the device, asynchronous or not, are kernels that fill the GPU and run in order
on the compute stream. A `done` waits for its start. In a loop of XLA, an instruction starts and ends in the same
iteration (a pipelined collective runs one iteration earlier, and its result is in the loop's state), so all iterations
are alike. Those during which a collective from before the loop is still in flight are simulated one by one. After them,
one iteration is simulated and repeated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from meshkit.config.cluster import Cluster
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.nccl import model_constant
from meshkit.predict.pricing import Flow, InFlight, Pricer, Transfer, host_bytes_per_s
from meshkit.timeline import Collective, DeviceStep, Timeline

# A body is simulated iteration by iteration while something is in flight, up to this many iterations.
_MOST_SINGLE = 256
_GRAPHED = ("dynamic-slice", "dynamic-update-slice", "fusion")  # CUDA graphs contain these, but no whole copies.
_ROUNDS = 2  # The clock depends on the time of tensor cores, and this time on the clock.


@dataclass(frozen=True)
class Simulation:
    """A simulated step."""

    timeline: Timeline
    """One step of one GPU."""
    all_overlapped_s: float
    """Seconds of the step if every collective hid under compute and slowed nothing."""
    all_exposed_s: float
    """Seconds of the step if no collective overlapped with compute."""
    flops: dict[str, float]
    """dtype of the operands -> matmul and attention FLOP that one GPU executes."""
    notes: Mapping[str, list[str]]
    """Kind of assumption -> the instructions for which it was made."""
    host_bytes: float = 0.0
    """Bytes that cross the link between one GPU and its host's memory."""
    host_transfer_s: float = 0.0
    """Seconds that these bytes take, with the two directions one after the other."""
    contention_s: float = 0.0
    """Seconds by which collectives slow kernels."""
    noted_s: Mapping[str, float] = field(default_factory=dict)
    """Name of control flow in `notes` -> its seconds in the step: of the longest branch of a conditional, and of one
    iteration of a loop of unknown length."""


def simulate(
    schedule: Schedule,
    cluster: Cluster,
    *,
    seconds: Callable[[Instruction], float] | None = None,
    assumptions: Assumptions | None = None,
    gpus: int | None = None,
    network: bool = True,
) -> Simulation:
    """Simulate the step that a schedule describes on a cluster.

    Args:
        seconds: function that returns the duration of a kernel that runs alone, a collective or a copy; None: the
            roofline and the network model price them.
        assumptions: effects to take into account. By default all effects, except contention and the slowest GPU if
            `seconds` is given.
        gpus: GPUs of the whole job, which wait for each other; default the cluster's.
        network: False: collectives take no time, for use if their links are not known.

    Raises:
        ConfigError: the calibration that the cluster names cannot be read, or the network model lacks one of the
            collectives.
    """
    chosen = assumptions or (Assumptions() if seconds is None else Assumptions(contention=False, slowest=False))
    pricer = (
        step_pricer(schedule, cluster, chosen, gpus=gpus)
        if seconds is None
        else Pricer(cluster, chosen, seconds, gpus=gpus)
    )
    run = _Simulator(schedule, pricer, chosen, network=network)
    segment = run.computation(schedule.entry)
    free = _Simulator(schedule, pricer, chosen, network=False).computation(schedule.entry)
    blocking = _Simulator(schedule, pricer, chosen, overlap=False, network=network).computation(schedule.entry)
    step = DeviceStep(
        device=0,
        step=0,
        window=(0.0, segment.duration_s),
        compute=segment.spans("compute"),
        compute_op=segment.labels("compute"),
        communication=segment.spans("communication"),
        collective=segment.labels("communication"),
        copies=segment.spans("copy"),
    )
    timeline = Timeline((step,), tuple(run.collectives), tuple(run.op_names))
    return Simulation(
        timeline,
        free.duration_s,
        blocking.duration_s,
        dict(segment.flops),
        schedule.notes,
        segment.host_bytes,
        segment.host_bytes / host_bytes_per_s(cluster),
        segment.contention_s,
        dict(segment.noted_s),
    )


def step_pricer(schedule: Schedule, cluster: Cluster, assumptions: Assumptions, *, gpus: int | None = None) -> Pricer:
    """Return a pricer for a program's instructions, with tensor cores at the clock that they reach in this program.

    The clock is found in rounds. Prices give the share of the time, without communication, in which tensor cores work,
    and this share gives new prices.

    Args:
        assumptions: effects to take into account; `copy_engines` is set here, by the program's collectives.
        gpus: GPUs of the whole job, which wait for each other; default the cluster's.

    Raises:
        ConfigError: the calibration that the cluster names cannot be read.
    """
    assumptions = replace(assumptions, copy_engines=assumptions.symmetric and _mostly_asynchronous(schedule))
    pricer = Pricer(cluster, assumptions, gpus=gpus, busy=0.0 if assumptions.full_clock else 1.0)
    for _ in range(0 if cluster.is_cpu or assumptions.full_clock or not assumptions.sustained else _ROUNDS):
        step = _Simulator(schedule, pricer, assumptions, network=False).computation(schedule.entry)
        busy = step.tensor_s / step.duration_s if step.duration_s else 1.0
        pricer = Pricer(cluster, assumptions, gpus=gpus, busy=busy)
    return pricer


def _mostly_asynchronous(schedule: Schedule) -> bool:
    """Return whether a program has at least as many asynchronous as blocking collectives, by number or by bytes."""
    numbers, sizes = [0, 0], [0.0, 0.0]
    for i in (i for body in schedule.computations.values() for i in body):
        if i.collective is not None and i.kind != "done":
            numbers[i.kind == "start"] += 1
            sizes[i.kind == "start"] += i.collective.payload_bytes
    return numbers[0] <= numbers[1] or sizes[0] <= sizes[1]


@dataclass
class _Segment:
    """The simulated run of one computation from time 0: for each lane, spans (start_s, end_s) and a label for each."""

    duration_s: float = 0.0
    host_bytes: float = 0.0
    contention_s: float = 0.0
    tensor_s: float = 0.0
    """Seconds of matmuls and attention, weighted by the power that they draw."""
    flops: Counter = field(default_factory=Counter)
    noted_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Name of control flow that is not fully known -> its seconds."""
    lanes: dict[str, list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)
    _open: dict[str, tuple[list[tuple[float, float]], list[int]]] = field(default_factory=dict)

    def add(self, lane: str, start: float, end: float, label: int) -> None:
        spans, labels = self._open.setdefault(lane, ([], []))
        spans.append((start, end))
        labels.append(label)

    def repeat(self, inner: _Segment, start: float, times: int) -> None:
        """Append `times` runs of `inner`, one after the other from `start`."""
        offsets = start + inner.duration_s * np.arange(times)
        for lane in {**inner.lanes, **inner._open}:
            self._close(lane)
            spans, labels = inner.spans(lane), inner.labels(lane)
            tiled = (spans[None] + offsets[:, None, None]).reshape(-1, 2)
            self.lanes.setdefault(lane, []).append((tiled, np.tile(labels, times)))
        self.flops.update({dtype: flops * times for dtype, flops in inner.flops.items()})
        for name, seconds in inner.noted_s.items():
            self.noted_s[name] += seconds * times
        self.host_bytes += inner.host_bytes * times
        self.contention_s += inner.contention_s * times
        self.tensor_s += inner.tensor_s * times

    def spans(self, lane: str) -> np.ndarray:
        """Return the [n, 2] spans of a lane."""
        self._close(lane)
        parts = self.lanes.get(lane)
        return np.concatenate([s for s, _ in parts]) if parts else np.zeros((0, 2))

    def labels(self, lane: str) -> np.ndarray:
        """Return the [n] labels of a lane's spans."""
        self._close(lane)
        parts = self.lanes.get(lane)
        return np.concatenate([x for _, x in parts]) if parts else np.zeros(0, dtype=int)

    def _close(self, lane: str) -> None:
        spans, labels = self._open.pop(lane, ([], []))
        if spans:
            self.lanes.setdefault(lane, []).append((np.array(spans), np.array(labels)))


class _Streams:
    """The time that each stream has reached, in seconds from the start of a computation, and their common output."""

    def __init__(self, out: _Segment):
        self.out = out
        self.now = 0.0  # Time that the compute stream has reached.
        self.traffic = InFlight(lambda start, end, label: out.add("communication", start, end, label))
        self.host = 0.0  # Time from which the stream of copies over the host link is free.
        self.in_flight: dict[str, Flow] = {}  # Name of a start -> its collective, before its `done`.
        self.copying: dict[str, float] = {}  # Name of a copy's start -> time of its end.


class _Simulator:
    """Simulate the computations of a schedule.

    Args:
        overlap: False: every collective blocks the compute stream.
        network: False: collectives take no time.
    """

    def __init__(
        self,
        schedule: Schedule,
        pricer: Pricer,
        assumptions: Assumptions,
        *,
        overlap: bool = True,
        network: bool = True,
    ):
        self._schedule, self._pricer, self._assumptions = schedule, pricer, assumptions
        self._overlap, self._network = overlap, network
        self._done: dict[str, _Segment] = {}
        self.collectives: list[Collective] = []
        self.op_names: list[str] = []
        self._gap = model_constant("kernel_gap_s")
        starts = (i for body in schedule.computations.values() for i in body if i.kind == "start" and i.collective)
        self._stream = {i.name: n % max(1, assumptions.streams) for n, i in enumerate(starts)}

    def computation(self, name: str) -> _Segment:
        """Return the run of a computation from time 0, with every stream drained at its end."""
        if name not in self._done:
            out = _Segment()
            streams = _Streams(out)
            self._follow(self._schedule.computations[name], streams)
            out.duration_s = max(streams.now, streams.host, streams.traffic.drained())
            self._done[name] = out
        return self._done[name]

    def _follow(self, instructions: tuple[Instruction, ...], streams: _Streams) -> None:
        for i in instructions:
            if i.kind == "free":
                continue
            if i.bodies:
                self._nested(i, streams)
            elif i.kind == "done":
                flow = streams.in_flight.pop(i.starts or "", None)
                ended = streams.traffic.finished(flow) if flow else streams.copying.pop(i.starts or "", 0.0)
                streams.now = max(streams.now, ended)
            elif i.collective is not None:
                self._communicate(i, streams)
            elif i.kind == "start":
                self._copy(i, streams)
            else:
                self._kernel(i, streams)

    def _nested(self, i: Instruction, streams: _Streams) -> None:
        """Run a loop, a branch or a call.

        A body is simulated once for all iterations. Iterations during which an earlier collective is still in flight
        are simulated one by one, because it slows their kernels, and their collectives wait for it.
        """
        name = max(i.bodies, key=lambda body: self.computation(body).duration_s)
        times, began = 1 if i.trip_count is None else i.trip_count, streams.now
        for _ in range(min(times, _MOST_SINGLE)):
            if not streams.traffic.busy(streams.now):
                break
            self._follow(self._schedule.computations[name], streams)
            times -= 1
        inner = self.computation(name)
        streams.out.repeat(inner, streams.now, times)
        streams.now += inner.duration_s * times
        if times:
            streams.host = max(streams.host, streams.now)
        if i.kind != "while" or i.trip_count is None:
            streams.out.noted_s[i.name] += streams.now - began

    def _kernel(self, i: Instruction, streams: _Streams) -> None:
        """Run a kernel on the compute stream, after the gap that its launch leaves."""
        work, out = self._pricer.work(i), streams.out
        start = streams.now + self._gap
        launches = self._gap * (i.cost.launches - 1) if i.cost else 0.0
        end = streams.traffic.run_kernel(work, start) + launches
        self.op_names.append(i.name)
        out.add("compute", start, end, len(self.op_names) - 1)
        out.contention_s += end - start - work.alone_s - launches
        streams.now = end
        if i.cost:
            out.host_bytes += i.cost.host_bytes
            out.tensor_s += (end - start) * self._pricer.power_share(i)
            out.flops.update(dict(i.cost.matmul_flops))
            out.flops.update({"bf16": i.cost.attention_flops} if i.cost.attention_flops else {})

    def _communicate(self, i: Instruction, streams: _Streams) -> None:
        """Run a collective: on its own stream beside the next kernels if asynchronous, else on the compute stream."""
        assert i.collective is not None
        self.collectives.append(i.collective)
        label = len(self.collectives) - 1
        transfer = self._pricer.transfer(i) if self._network else Transfer(0.0)
        if i.kind == "start" and self._overlap:
            flow = streams.traffic.start(transfer, label, streams.now, self._stream[i.name])
            streams.in_flight[i.name] = flow
            if self._assumptions.single_queue:
                streams.now = max(streams.now, streams.traffic.begun(flow))
        else:
            streams.now = streams.traffic.finished(streams.traffic.start(transfer, label, streams.now))

    def _copy(self, i: Instruction, streams: _Streams) -> None:
        """Run an asynchronous copy: over the host link beside the kernels, or on the device as one of them."""
        work, out = self._pricer.work(i), streams.out
        if i.cost and i.cost.host_bytes:
            start = max(streams.now, streams.host)
            end = streams.host = start + work.alone_s
            if self._assumptions.graphed_copies and i.opcode in _GRAPHED:
                streams.now = end
            out.host_bytes += i.cost.host_bytes
        else:
            start = streams.now + self._gap
            end = streams.now = streams.traffic.run_kernel(work, start)
            out.contention_s += end - start - work.alone_s
        streams.copying[i.name] = end
        out.add("copy", start, end, 0)
