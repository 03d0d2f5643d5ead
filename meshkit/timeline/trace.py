"""Profiler traces (XSpace files of GPU or CPU runs) -> a Timeline of measured device steps. Layer 5.

A trace names the HLO instruction of every operation; what those communicate, and where, is known from the compiled
program that was recorded beside the trace. An operation communicates if its instruction does, or, where the trace has
lost the instruction, if its kernel is one of NCCL's; never because of the stream it ran on.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from meshkit.errors import TraceError
from meshkit.timeline.spans import DeviceStep, Timeline
from meshkit.timeline.windows import step_windows
from meshkit.xla.collective import Collective

_GPU_PLANE = re.compile(r"^/device:GPU:(\d+)$")
# ncclKernel (before 2.19), ncclDevKernel, ncclSymk (symmetric memory, 2.27); the other libraries that XLA can call
_COMMUNICATION_KERNEL = re.compile(r"^(?:void )?(?:nccl|nvshmem|rccl|msccl)", re.IGNORECASE)
_COMMUNICATION_OP = re.compile(
    r"^(?:all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|ragged-all-to-all|reduce-scatter)\b"
)
_CONTAINER_OP = re.compile(r"^(?:while|conditional|call)(?:\.\d+)*$")
_COPY_NAME = re.compile(r"^(?:Memcpy|Memset)", re.IGNORECASE)
_COMPUTE, _COMMUNICATION, _COPY, _CONTAINER = range(4)
_NO_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="  # the empty value turns CUDA graphs off


@dataclass(frozen=True)
class TraceFile:
    """One process's XSpace file.

    Attributes:
        path: the `.xplane.pb` file.
        devices: ordinal in the file -> global device id; operations of other devices are ignored.
    """

    path: Path
    devices: Mapping[int, int]


@dataclass(frozen=True)
class Note:
    """What a reader of the numbers must know; `seconds` is a mean per device step."""

    code: str
    message: str
    seconds: float | None = None


@dataclass(frozen=True)
class Trace:
    """What was read, and what could not be."""

    timeline: Timeline
    notes: tuple[Note, ...]


@dataclass(frozen=True)
class _Label:
    """What operations with the same name have in common."""

    name: str
    op: str
    module: str
    copy: bool
    graph: bool


@dataclass(frozen=True)
class _Classes:
    """Per label: kind of work, which collective or op name, whether it is of the program, and lost in a graph."""

    kind: np.ndarray
    target: np.ndarray
    of_program: np.ndarray
    lost: np.ndarray


@dataclass
class _Table:
    """Operations of one file, as columns; times in ns."""

    device: list[int] = field(default_factory=list)
    start_ns: list[float] = field(default_factory=list)
    end_ns: list[float] = field(default_factory=list)
    label: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    labels: dict[_Label, int] = field(default_factory=dict)

    def add(self, device: int, start_ns: float, end_ns: float, label: _Label, run: int) -> None:
        self.device.append(device)
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)
        self.label.append(self.labels.setdefault(label, len(self.labels)))
        self.run.append(run)


def read_trace(
    files: Sequence[TraceFile],
    *,
    module_names: Set[str],
    collectives_by_op: Mapping[str, Collective],
    containers: Set[str] = frozenset(),
    first_step: int = 0,
    num_steps: int | None = None,
) -> Trace:
    """The steps of a program in the traces of its processes.

    Args:
        files: one per process.
        module_names: names of the HLO module whose executions are the steps.
        collectives_by_op: what its instructions communicate.
        containers: its loops, calls and conditionals, whose time is that of the operations inside.
        first_step: number of the first execution in the trace.
        num_steps: executions in the trace, if known; helps where the trace does not number them.

    Raises:
        TraceError: a file cannot be read, or has no operation of the program on these devices.
    """
    collectives = tuple(dict.fromkeys(collectives_by_op.values()))
    reader = _Reader(module_names, collectives_by_op, collectives, containers, first_step, num_steps)
    steps = [step for file in files for step in reader.steps(file)]
    timeline = Timeline(tuple(steps), collectives, tuple(reader.op_names))
    return Trace(timeline, tuple(reader.notes(len(steps))))


class _Reader:
    """Turns files into device steps, and remembers what was lost on the way."""

    def __init__(self, module_names, collectives_by_op, collectives, containers, first_step, num_steps):
        self.module_names, self.collectives_by_op, self.containers = module_names, collectives_by_op, containers
        self.index = {c: i for i, c in enumerate(collectives)}
        self.first_step, self.num_steps = first_step, num_steps
        self.op_names: dict[str, int] = {}
        self.graph_s = 0.0

    def steps(self, file: TraceFile) -> Iterator[DeviceStep]:
        table = _load(file)
        labels = list(table.labels)
        if not any(label.module in self.module_names for label in labels):
            seen = ", ".join(sorted({label.module for label in labels if label.module})) or "none"
            raise TraceError(
                f"the trace has no operation of the program '{', '.join(sorted(self.module_names))}' on devices "
                f"{sorted(file.devices.values())}; programs in it: {seen}.",
                at=str(file.path),
                hint="capturing again: the traced steps must run the program that was recorded",
            )
        classes = self._classify(labels)
        columns = [np.asarray(c) for c in (table.device, table.start_ns, table.end_ns, table.label, table.run)]
        for device in np.unique(columns[0]):
            start, end, label, run = (c[columns[0] == device] for c in columns[1:])
            order = np.argsort(start, kind="stable")
            yield from self._device_steps(int(device), start[order], end[order], label[order], run[order], classes)

    def _classify(self, labels: Sequence[_Label]) -> _Classes:
        kind, target = np.zeros(len(labels), np.intp), np.full(len(labels), -1, np.intp)
        of_program = np.array([label.module in self.module_names for label in labels], bool)
        for i, label in enumerate(labels):
            collective = self.collectives_by_op.get(label.op) if of_program[i] else None
            if (of_program[i] and label.op in self.containers) or _CONTAINER_OP.match(label.op):
                kind[i] = _CONTAINER
            elif collective is not None:
                kind[i], target[i] = _COMMUNICATION, self.index[collective]
            elif _COMMUNICATION_OP.match(label.op) or _COMMUNICATION_KERNEL.match(label.name):
                kind[i] = _COMMUNICATION
            elif label.copy:
                kind[i] = _COPY
            else:
                target[i] = self.op_names.setdefault(label.op or label.name, len(self.op_names))
        return _Classes(kind, target, of_program, np.array([label.graph and not label.op for label in labels], bool))

    def _device_steps(self, device: int, start, end, label, run, classes: _Classes) -> Iterator[DeviceStep]:
        """Cuts the operations of one device (sorted by start) into its executions of the program."""
        mine = classes.of_program[label]
        if not mine.any():
            return
        windows = step_windows(start[mine], end[mine], label[mine], run[mine], self.num_steps)
        ended_ns = np.maximum.accumulate(end)
        for i, (w0, w1) in enumerate(windows):
            inside = slice(np.searchsorted(ended_ns, w0, "right"), np.searchsorted(start, w1, "left"))
            spans = (np.stack([start[inside], end[inside]], axis=1) - w0) * 1e-9
            kind, target = classes.kind[label[inside]], classes.target[label[inside]]
            self.graph_s += float(np.diff(spans[classes.lost[label[inside]]]).sum())
            yield DeviceStep(
                device=device,
                step=self.first_step + i,
                window=(0.0, (w1 - w0) * 1e-9),
                compute=spans[kind == _COMPUTE],
                compute_op=target[kind == _COMPUTE],
                communication=spans[kind == _COMMUNICATION],
                collective=target[kind == _COMMUNICATION],
                copies=spans[kind == _COPY],
            )

    def notes(self, num_device_steps: int) -> list[Note]:
        seconds = self.graph_s / max(1, num_device_steps)
        if not seconds:
            return []
        message = (
            "Kernels ran inside CUDA graphs, where the trace does not say which instruction they belong to; capture "
            f"with XLA_FLAGS={_NO_COMMAND_BUFFERS} to see them by axis (which changes the step time a little)."
        )
        return [Note("command_buffers", message, seconds)]


def _load(file: TraceFile) -> _Table:
    with warnings.catch_warnings():
        # the binding's types come without __module__; where warnings are errors, that aborts the process
        warnings.simplefilter("ignore", DeprecationWarning)
        return _load_planes(file)


def _load_planes(file: TraceFile) -> _Table:
    from jax.profiler import ProfileData

    try:
        profile = ProfileData.from_file(str(file.path))
        planes = list(profile.planes)
    except Exception as e:  # the binding raises several types for a malformed protobuf
        raise TraceError(f"this file is not a profiler trace: {str(e).splitlines()[0]}.", at=str(file.path)) from None
    table = _Table()
    gpus = [(int(m[1]), plane) for plane in planes if (m := _GPU_PLANE.match(plane.name))]
    for ordinal, plane in gpus:
        if ordinal in file.devices:
            _read_gpu_plane(plane, file.devices[ordinal], table)
    if not gpus:
        for plane in planes:
            if plane.name == "/host:CPU":
                _read_cpu_plane(plane, file.devices, table)
    return table


def _read_gpu_plane(plane, device: int, table: _Table) -> None:
    """Raw files hold stream lines only; lines such as "XLA Ops" are derived by viewers, and would count twice."""
    for line in plane.lines:
        if not line.name.startswith("Stream #"):
            continue
        for event in line.events:
            stats = dict(event.stats)
            label = _Label(
                name=event.name,
                op=str(stats.get("hlo_op", "")),
                module=str(stats.get("hlo_module", "")),
                copy="memcpy_details" in stats or bool(_COPY_NAME.match(event.name)),
                graph=bool(stats.get("cuda_graph_id")),
            )
            table.add(device, event.start_ns, event.end_ns, label, int(stats.get("run_id", -1)))


def _read_cpu_plane(plane, devices: Mapping[int, int], table: _Table) -> None:
    """XLA:CPU's thunks, whatever thread they ran on.

    The event of a thunk that hands its work to a thread pool ends at the hand-over; the `end: ` marker that carries its
    id says when the work was done.
    """
    row_of_id: dict[tuple, int] = {}
    done_ns: dict[tuple, float] = {}
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            if event.name.startswith("end: "):
                done_ns[stats.get("_ct"), stats.get("_c")] = event.start_ns
            elif "hlo_op" in stats and stats.get("device_ordinal") in devices:
                op = str(stats["hlo_op"])
                label = _Label(event.name, op, str(stats.get("hlo_module", "")), copy=False, graph=False)
                row_of_id[stats.get("_pt"), stats.get("_p")] = len(table.device)
                run = int(stats.get("run_id", -1))
                table.add(devices[stats["device_ordinal"]], event.start_ns, event.end_ns, label, run)
    for key, row in row_of_id.items():
        if key in done_ns:
            table.end_ns[row] = max(table.start_ns[row], done_ns[key])
