"""Schedule x cluster -> Timeline: when each instruction would run. Layer 5; imports no jax.

One GPU stands for all (SPMD). Kernels run on one stream in schedule order; asynchronous collectives on a second, in
order of their starts; asynchronous copies on a third. A `done` waits for its start. XLA lets no start outlive its loop
body, so every iteration of a loop is alike: it is simulated once and repeated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from meshkit.spec.cluster import Cluster
from meshkit.timeline.kernels import kernel_time_s, measured_rates
from meshkit.timeline.network import collective_time_s, nccl_constants
from meshkit.timeline.spans import Collective, DeviceStep, Timeline
from meshkit.xla.hlo import Instruction, Schedule


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
        timeline: one step of one GPU.
        all_overlapped_s: the step if every collective hid under compute.
        all_exposed_s: the step if none did.
        flops: dtype of the operands -> matmul and attention FLOP that one GPU executes.
        host_bytes: what crosses the link between one GPU and its host's memory.
        host_transfer_s: seconds that this takes, both ways one after the other.
        notes: assumptions made about single instructions, by kind.
    """

    timeline: Timeline
    all_overlapped_s: float
    all_exposed_s: float
    flops: dict[str, float]
    notes: dict[str, list[str]]
    host_bytes: float = 0.0
    host_transfer_s: float = 0.0


def simulate(
    schedule: Schedule, cluster: Cluster, *, seconds: Callable[[Instruction], float] | None = None
) -> Simulation:
    """The step that a schedule describes, on a cluster.

    Args:
        schedule: of the compiled program.
        cluster: GPUs and links.
        seconds: duration of a kernel, collective or copy; None prices it by roofline and network model.
    """
    price = seconds or _Pricer(cluster)
    run = _Simulator(schedule, price)
    segment = run.computation(schedule.entry)
    free = _Simulator(schedule, lambda i: 0.0 if i.collective else price(i)).computation(schedule.entry)
    blocking = _Simulator(schedule, price, overlap=False).computation(schedule.entry)
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
    notes = {**schedule.notes, **run.notes}
    return Simulation(
        timeline,
        free.duration_s,
        blocking.duration_s,
        dict(segment.flops),
        notes,
        segment.host_bytes,
        segment.host_bytes / _host_bytes_per_s(cluster),
    )


def _host_bytes_per_s(cluster: Cluster) -> float:
    link = cluster.offload_link()
    return link.bytes_per_s * link.achieved


class _Pricer:
    """Seconds of an instruction by roofline and network model, each shape priced once."""

    def __init__(self, cluster: Cluster):
        self._cluster, self._rates = cluster, measured_rates(cluster)
        self._host = _host_bytes_per_s(cluster)
        self._known: dict[tuple, float] = {}

    def __call__(self, i: Instruction) -> float:
        c = i.collective
        if c is None:
            if i.cost is None:
                return 0.0
            return kernel_time_s(i.cost, self._cluster.gpu, self._rates, host_bytes_per_s=self._host)
        key = (c.collective, c.payload_bytes, c.gpus_per_domain, c.group_size)
        if key not in self._known:
            self._known[key] = collective_time_s(
                c.collective,
                payload_bytes=c.payload_bytes,
                gpus_per_domain=c.gpus_per_domain,
                domains=c.group_size // c.gpus_per_domain,
                cluster=self._cluster,
            )
        return self._known[key]


@dataclass
class _Segment:
    """The simulated run of one computation, from time 0: rows (start_s, end_s) and a label per row, by lane."""

    duration_s: float = 0.0
    host_bytes: float = 0.0
    flops: Counter = field(default_factory=Counter)
    lanes: dict[str, list[tuple[np.ndarray, np.ndarray]]] = field(default_factory=dict)

    def add(self, lane: str, start: float, end: float, label: int) -> None:
        self.lanes.setdefault(lane, []).append((np.array([[start, end]]), np.array([label])))

    def repeat(self, inner: _Segment, start: float, times: int) -> None:
        """Appends `times` runs of inner, back to back from start."""
        offsets = start + inner.duration_s * np.arange(times)
        for lane in inner.lanes:
            spans, labels = inner.spans(lane), inner.labels(lane)
            tiled = (spans[None] + offsets[:, None, None]).reshape(-1, 2)
            self.lanes.setdefault(lane, []).append((tiled, np.tile(labels, times)))
        self.flops.update({dtype: flops * times for dtype, flops in inner.flops.items()})
        self.host_bytes += inner.host_bytes * times

    def spans(self, lane: str) -> np.ndarray:
        """[n, 2] spans of a lane."""
        parts = self.lanes.get(lane)
        return np.concatenate([s for s, _ in parts]) if parts else np.zeros((0, 2))

    def labels(self, lane: str) -> np.ndarray:
        """[n] labels of a lane's spans."""
        parts = self.lanes.get(lane)
        return np.concatenate([x for _, x in parts]) if parts else np.zeros(0, dtype=int)


class _Simulator:
    """Runs a schedule; without `overlap` every collective blocks where it starts."""

    def __init__(self, schedule: Schedule, seconds: Callable[[Instruction], float], *, overlap: bool = True):
        self._schedule, self._seconds, self._overlap = schedule, seconds, overlap
        self._done: dict[str, _Segment] = {}
        self.collectives: list[Collective] = []
        self.op_names: list[str] = []
        self.notes: dict[str, list[str]] = {}
        self._gap = nccl_constants()["kernel"]["gap_s"]

    def computation(self, name: str) -> _Segment:
        """The run of a computation from time 0, every stream drained at its end."""
        if name not in self._done:
            self._done[name] = self._run(self._schedule.computations[name])
        return self._done[name]

    def _run(self, instructions: tuple[Instruction, ...]) -> _Segment:
        out = _Segment()
        now = network_free = copy_free = 0.0
        pending: dict[str, float] = {}
        for i in instructions:
            if i.kind == "free" or i.kind == "host":
                continue
            if i.bodies:
                now = self._nested(i, out, now)
                network_free, copy_free = max(network_free, now), max(copy_free, now)
            elif i.kind == "done":
                now = max(now, pending.pop(i.starts or "", now))
            elif i.kind == "start" and i.collective is not None and self._overlap:
                network_free = self._communicate(i, out, max(now, network_free))
                pending[i.name] = network_free
            elif i.kind == "start" and i.collective is None:
                copy_free = self._copy(i, out, max(now, copy_free))
                pending[i.name] = copy_free
            elif i.collective is not None:
                now = network_free = self._communicate(i, out, max(now, network_free))
            else:
                now = self._kernel(i, out, now)
        out.duration_s = max(now, network_free, copy_free)
        return out

    def _nested(self, i: Instruction, out: _Segment, now: float) -> float:
        inner = max((self.computation(b) for b in i.bodies), key=lambda s: s.duration_s)
        times = 1 if i.trip_count is None else i.trip_count
        out.repeat(inner, now, times)
        return now + inner.duration_s * times

    def _kernel(self, i: Instruction, out: _Segment, now: float) -> float:
        duration = self._seconds(i)
        self.op_names.append(i.name)
        out.add("compute", now + self._gap, now + self._gap + duration, len(self.op_names) - 1)
        if i.cost:
            out.host_bytes += i.cost.host_bytes
            out.flops.update(dict(i.cost.matmul_flops))
            out.flops.update({"bf16": i.cost.attention_flops} if i.cost.attention_flops else {})
        return now + self._gap + duration

    def _communicate(self, i: Instruction, out: _Segment, start: float) -> float:
        assert i.collective is not None
        end = start + self._seconds(i)
        self.collectives.append(i.collective)
        out.add("communication", start, end, len(self.collectives) - 1)
        return end

    def _copy(self, i: Instruction, out: _Segment, start: float) -> float:
        end = start + self._seconds(i)
        out.host_bytes += i.cost.host_bytes if i.cost else 0.0
        out.add("copy", start, end, 0)
        return end
