"""Read one process's trace file into columns of its devices' operations, and find their classes and executions.

Operations with the same kernel name, HLO instruction and module share a `Label`, so that each name is classified once:
compute, communication, copy, container, or compute and communication at once. An operation communicates if its HLO
instruction is a collective, or if its kernel has the name of one of a communication library. The stream that it ran on
does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meshkit.errors import TraceError
from meshkit.hlo.module import COLLECTIVES, CONTROL
from meshkit.hlo.schedule import Collective
from meshkit.trace.xspace import NO_VALUE, Events, Line, Plane, XSpace, concatenated, read_xspace

_GPU_PLANE = re.compile(r"^/device:GPU:(\d+)$")
# The repetitions are bounded, since a message can have any length.
DROPPED = re.compile(
    r"(?<![0-9])([0-9]{1,15})[^.;\n]{0,80}\bdropped\b|\bdropped\b[^0-9]{0,80}([0-9]{1,15})", re.IGNORECASE
)
_GRAPH_STATS = ("correlation_id", "cuda_graph_node_id")
_GPU_STATS = ("hlo_op", "hlo_module", "memcpy_details", "cuda_graph_id", *_GRAPH_STATS, "run_id", "program_id")
_HARDWARE = ("gpu_device_name", "device_vendor", "compute_cap_major", "compute_cap_minor", "memory_size")
_CPU_STATS = ("hlo_op", "hlo_module", "run_id", "program_id", "device_ordinal", "_pt", "_p", "_ct", "_c")
_PS_PER_NS = 1000
_MOST_DECIDED = 1 << 22  # Limit on instruction ids with a stored label; rows with higher ids are labelled per block.
BLOCK = 1 << 17  # Number of events whose columns are all in memory at a time.
_LONGEST_TRACE_NS = 86_400 * 10**9  # A day; times further from the start are damaged.


@dataclass(frozen=True)
class TraceFile:
    """One process's trace file."""

    path: Path
    devices: Mapping[int, int]
    """Device number in the file -> global device id; operations of other devices are ignored."""
    process: int = 0


class Label(NamedTuple):
    """The common properties of some operations; a tuple, since a trace may have a hundred thousand labels."""

    name: str
    """Name of the kernel, or of the thunk on a CPU."""
    op: str
    """The HLO instruction; empty where the trace lost it."""
    module: str
    copy: bool
    """Whether the operation is a memory copy or a memset."""
    graph: bool
    """Whether the operation ran in a CUDA graph."""
    program: int = -1
    """The runtime's id of the program; -1 where the trace has none."""


@dataclass(frozen=True)
class DeviceOperations:
    """Operations of one device, sorted by start: columns [n], with times in ps on the clock of the process."""

    start_ps: np.ndarray
    end_ps: np.ndarray
    label: np.ndarray
    """Indices into `Operations.labels`."""
    run: np.ndarray
    """The runtime's id of the execution; -1 where the trace has none."""
    nodes: np.ndarray | None = None
    """[n, 2] (launch, node) of a CUDA graph, -1 outside graphs; None if no graph ran."""


@dataclass
class Operations:
    """The operations of one file on the wanted devices."""

    labels: list[Label] = field(default_factory=list)
    devices: dict[int, DeviceOperations] = field(default_factory=dict)
    clock_ns: int | None = None
    """Time since the epoch at which this process's clock is zero; None if unknown."""
    messages: list[str] = field(default_factory=list)
    dropped: int | None = None
    """Number of events that the profiler reports as lost; None if it reports none."""
    discarded: int = 0
    """Number of events that were left out since their times are impossible."""
    cpu: bool = False
    hardware: dict[str, int | float | str] = field(default_factory=dict)

    @property
    def events(self) -> int:
        """Number of operations."""
        return sum(len(d.start_ps) for d in self.devices.values())


def read_operations(file: TraceFile, space: XSpace | None = None) -> Operations:
    """Return the operations of the GPUs in one file, or of XLA:CPU's devices if the file has no GPU.

    Args:
        space: the same file from `read_xspace`, before its events are read; None opens the file.

    Raises:
        TraceError: the file cannot be read, is not a trace, or has two planes of one device.
    """
    space = space or read_xspace(file.path)
    lost = [int(m[1] or m[2]) for text in space.messages for m in DROPPED.finditer(text)]
    found = Operations(messages=space.messages, dropped=sum(lost) if lost else None)
    reader = _Reader(found, _duration_ns(space, found))
    gpus = [(int(m[1]), plane) for plane in space.planes if (m := _GPU_PLANE.match(plane.name))]
    for ordinal, plane in gpus:
        if ordinal in file.devices:
            reader.gpu_plane(space, plane, file.devices[ordinal])
    found.cpu = not gpus
    found.hardware = {name: value for _, plane in gpus[:1] for name, value in plane.stats.items() if name in _HARDWARE}
    if not gpus:
        for plane in space.planes:
            if plane.name == "/host:CPU":
                reader.cpu_plane(space, plane, file.devices)
    if not space.planes:
        raise TraceError("the trace holds no planes at all.", at=str(file.path), hint="capturing again")
    return found


def _duration_ns(space: XSpace, found: Operations) -> int:
    """Return the duration of the profile plus a second of tolerance, and set `clock_ns` to its beginning."""
    for plane in space.planes:
        if plane.name == "Task Environment":
            start, stop = plane.stats.get("profile_start_time"), plane.stats.get("profile_stop_time")
            if isinstance(start, int) and start > 0:
                found.clock_ns = start
                if isinstance(stop, int) and stop > start:
                    return stop - start + 10**9
    return _LONGEST_TRACE_NS


class _Reader:
    """Adds the operations of planes to `found`, with one table of labels for all planes."""

    def __init__(self, found: Operations, duration_ns: int):
        self.found, self.duration_ns = found, duration_ns
        self.known: dict[tuple[str, str, str, int, int], int] = {}
        self.decided = _Decided()

    def gpu_plane(self, space: XSpace, plane: Plane, device: int) -> None:
        """Add a GPU's stream lines. Derived lines such as "XLA Ops" have the same events, which would count twice."""
        lines = [line for line in plane.lines if line.name.startswith("Stream #")]
        blocks = self._blocks(space, plane, lines, _GPU_STATS)
        self._add(device, [self._columns(plane, e, start, start + e.duration_ps) for e, start in blocks])

    def cpu_plane(self, space: XSpace, plane: Plane, devices: Mapping[int, int]) -> None:
        """Add XLA:CPU's thunks, whatever thread they ran on.

        If a thunk passes its work to a thread pool, its event ends at once; the `end: ` marker with the same id has the
        time at which the work ended.
        """
        is_end = np.array(list(plane.event_names.ids(beginning="end: ")), np.int64)
        parts = []
        for events, start in self._blocks(space, plane, plane.lines, _CPU_STATS):
            rows = np.flatnonzero((events.stats["hlo_op"] != NO_VALUE) | np.isin(events.metadata, is_end))
            parts.append((events.rows(rows), start[rows]))
        events, start = _joined(parts, _CPU_STATS)
        marker = np.isin(events.metadata, is_end)
        end = _done(events, start, marker)
        ordinal, mine = events.stats["device_ordinal"], ~marker
        for number in np.unique(ordinal[mine]).tolist():
            if number in devices:
                rows = np.flatnonzero(mine & (ordinal == number))
                self._add(devices[number], [self._columns(plane, events.rows(rows), start[rows], end[rows])])

    def _blocks(
        self, space: XSpace, plane: Plane, lines: Sequence[Line], wanted: Sequence[str]
    ) -> Iterator[tuple[Events, np.ndarray]]:
        """Yield the events of some lines and their starts in ps, in blocks of limited memory."""
        parts, count = [], 0
        limit = 2 * _LONGEST_TRACE_NS * _PS_PER_NS  # Times clipped to this fit into 64 bits; `_columns` drops them.
        for line in lines:
            since = self._since_ns(line) * _PS_PER_NS
            for events in space.events(plane, line, wanted):
                parts.append((events, np.clip(events.offset_ps, -limit, limit) + since))
                count += len(events.metadata)
                if count >= BLOCK:
                    yield _joined(parts, wanted)
                    count = 0
        if parts:
            yield _joined(parts, wanted)

    def _since_ns(self, line: Line) -> int:
        """Return a line's time since the profile began; the file may have it since the epoch."""
        since = line.timestamp_ns
        if since > _LONGEST_TRACE_NS and self.found.clock_ns:
            since -= self.found.clock_ns
        return min(max(since, -_LONGEST_TRACE_NS), 2 * _LONGEST_TRACE_NS)

    def _columns(self, plane: Plane, events: Events, start, end) -> tuple[np.ndarray, ...]:
        """Return start, end, label, run, and launch and node of a graph, for the events with possible times."""
        limit = self.duration_ns * _PS_PER_NS
        good = (end >= start) & (start >= -limit) & (end <= limit)
        if not good.all():
            self.found.discarded += int((~good).sum())
            rows = np.flatnonzero(good)
            start, end, events = start[rows], end[rows], events.rows(rows)
        run = events.stats["run_id"]
        none = np.broadcast_to(np.int64(NO_VALUE), len(start))
        label = self._labels(plane, events) if len(start) else start
        launch, node = (events.stats.get(name, none) for name in _GRAPH_STATS)
        nodes = (np.where(node == NO_VALUE, -1, column) for column in (launch, node))
        part = (start, end, label, np.where(run == NO_VALUE, -1, run), *nodes)
        return tuple(concatenated([part], len(part)))  # A column that is -1 everywhere takes no memory.

    def _add(self, device: int, parts: list[tuple[np.ndarray, ...]]) -> None:
        columns = concatenated(parts, 6)
        if not len(columns[0]):
            return
        if device in self.found.devices:
            raise TraceError(f"the trace has two planes of device {device}.")
        if (columns[0][1:] < columns[0][:-1]).any():
            order = np.argsort(columns[0], kind="stable")
            for i, column in enumerate(columns):
                columns[i] = column if column.strides == (0,) else column[order]
        start, end, label, run, launch, node = columns
        nodes = np.stack([launch, node], axis=1) if (node != -1).any() else None
        self.found.devices[device] = DeviceOperations(start, end, label, run, nodes)

    def _labels(self, plane: Plane, events: Events) -> np.ndarray:
        none = np.full(len(events.metadata), NO_VALUE)
        copy = events.stats.get("memcpy_details", none) != NO_VALUE
        graph = events.stats.get("cuda_graph_id", none)
        flags = copy + 2 * ((graph != NO_VALUE) & (graph != 0))
        stats = events.stats
        columns = (stats["hlo_op"], stats["hlo_module"], events.metadata, flags, stats["program_id"])
        if self.decided.plane is not plane:
            self.decided = _Decided(plane)
        label = self.decided.labels(columns)
        rest = np.flatnonzero(label < 0)
        if len(rest):
            columns = columns if len(rest) == len(label) else tuple(column[rest] for column in columns)
            inverse, first = distinct_rows(columns)
            index = self._decide(plane, [column[first] for column in columns])
            self.decided.add([column[first] for column in columns], index)
            label[rest] = index[inverse]
        return label

    def _decide(self, plane: Plane, columns: Sequence[np.ndarray]) -> np.ndarray:
        op, module, metadata, flags, program = (column.tolist() for column in columns)
        ops, modules = (plane.texts(set(ids)) for ids in (op, module))
        names = {id_: plane.event_names.get(id_) for id_ in set(metadata)}
        texts = (map(of.__getitem__, ids) for of, ids in ((names, metadata), (ops, op), (modules, module)))
        keys = list(zip(*texts, flags, program))
        for key in keys:
            if key not in self.known:
                self.known[key] = len(self.found.labels)
                kernel, instruction, of, flag, number = key
                copy, graph = bool(flag & 1) or kernel.lower().startswith(_COPIES), flag > 1
                number = -1 if number == NO_VALUE else number
                self.found.labels.append(Label(kernel, instruction, of, copy, graph, number))
        return np.array([self.known[key] for key in keys], np.int32)


class _Decided:
    """Remembers, for each instruction id of a plane, the ids and the label of the row that was decided last."""

    def __init__(self, plane: Plane | None = None):
        self.plane = plane
        self._columns: list[np.ndarray] = []  # The ids of these rows: columns with [instruction ids + 2] entries.
        self._label = np.zeros(0, np.int32)

    def labels(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Return [n] the index of each row's label; -1 if it is not known."""
        if not self._columns:
            return np.full(len(columns[0]), -1, np.int32)
        slot = self._slot(columns[0])
        label = self._label[slot]
        for column, decided in zip(columns, self._columns):
            label[column != decided[slot]] = -1
        return label

    def add(self, columns: Sequence[np.ndarray], label: np.ndarray) -> None:
        more = int(np.clip(columns[0].max(), 0, _MOST_DECIDED)) + 3 - len(self._label)
        if more > 0:
            held = self._columns or [np.zeros(0, np.int64)] * len(columns)
            self._columns = [np.pad(column, (0, more), constant_values=NO_VALUE) for column in held]
            self._label = np.pad(self._label, (0, more), constant_values=-1)
        slot = self._slot(columns[0])
        for column, decided in zip(columns, self._columns):
            decided[slot] = column
        self._label[slot] = label

    def _slot(self, op: np.ndarray) -> np.ndarray:
        """Return [n] the slot of each instruction id; all ids above the known ones share the last slot."""
        return np.clip(op, -1, len(self._label) - 2) + 1


def _joined(parts: list[tuple[Events, np.ndarray]], wanted: Sequence[str]) -> tuple[Events, np.ndarray]:
    events, start = [e for e, _ in parts], [s for _, s in parts]
    parts.clear()
    return Events.joined(events, wanted), np.concatenate(start or [np.zeros(0, np.int64)])


def _done(events: Events, start: np.ndarray, marker: np.ndarray) -> np.ndarray:
    """Return [n] the end of each event's work: the time of the end marker with its id, else the event's own end."""
    end = start + events.duration_ps
    stats = events.stats
    if not marker.any():
        return end
    closed = _flow(stats["_ct"][marker], stats["_c"][marker])
    order = np.argsort(closed, kind="stable")
    closed, at = closed[order], start[marker][order]
    flow = _flow(stats["_pt"], stats["_p"])
    i = np.minimum(np.searchsorted(closed, flow), len(closed) - 1)
    found = (closed[i] == flow) & (stats["_p"] != NO_VALUE)
    return np.where(found, np.maximum(start, at[i]), end)


def _flow(kind: np.ndarray, id_: np.ndarray) -> np.ndarray:
    """Return [n] one number for each flow (a link between two events): its id, with its kind in the top bits."""
    return id_ ^ (np.where(kind == NO_VALUE, 0, kind) << 58)


def distinct_rows(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return [n] the index of each row among the distinct rows, and [distinct] the index of one row of each kind.

    The first column (the instruction) nearly always determines the others. So one row is picked for each value of the
    first column, and only rows that differ from their value's row are sorted.
    """
    leader = columns[0]
    if not len(leader):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    code = np.where(leader == NO_VALUE, leader.max(initial=0) + 1, leader)
    code = code - code.min()
    # If ids are so far apart that a table by id would be larger than the events, or if they overflow, renumber them.
    if code.max() > 4 * len(code) + 1024 or code.min() < 0:
        code = np.unique(code, return_inverse=True)[1]
    pick = np.full(int(code.max()) + 1, -1, np.int64)
    pick[code] = np.arange(len(code))
    chosen = pick[code]
    same = np.ones(len(code), bool)
    for column in columns[1:]:
        same &= column == column[chosen]
    used = np.flatnonzero(pick >= 0)
    number = np.zeros(len(pick), np.int64)
    number[used] = np.arange(len(used))
    inverse, first = number[code], pick[used]
    rest = np.flatnonzero(~same)
    if len(rest):
        _, index, again = np.unique(
            np.stack([c[rest] for c in columns]), axis=1, return_index=True, return_inverse=True
        )
        inverse[rest] = len(first) + again.ravel()
        first = np.concatenate([first, rest[index]])
    return inverse, first


COMPUTE, COMMUNICATION, COPY, CONTAINER, FUSED = range(5)
_MOST_FOUND = 10_000  # Limit on executions that are found without the runtime's ids; real traces have some tens.

# Kernels of NCCL (ncclKernel before 2.19, ncclDevKernel, ncclSymk for symmetric memory in 2.27), of other libraries
# that XLA can call, of XLA (one-shot or multimem all-reduce, ragged all-to-all, barrier), of DeepEP (dispatch, combine)
_COMMUNICATION_KERNEL = re.compile(
    r"^(?:void )?(?:nccl|nvshmem|rccl|msccl)|(?:AllReduce|RaggedAllToAll\w{0,40}|MultiGpuBarrier\w{0,20})Kernel"
    r"|(?:one|two)_shot_all_reduce|ragged_all_to_all_\w{0,20}kernel|multi_gpu_barrier"
    r"|multimem_?all_?(?:reduce|gather)|deep_ep::",
    re.IGNORECASE,
)
_COMMUNICATION_OP = re.compile(rf"^(?:{'|'.join(COLLECTIVES)})\b")
_KERNEL_KINDS = (  # (kind, text in the names of its kernels); the first text that a name contains decides.
    ("ragged-all-to-all", "raggedalltoall"),
    ("all-gather", "allgather"),
    ("all-reduce", "allreduce"),
    ("all-to-all", "alltoall"),
    ("all-to-all", "deepep"),
    ("collective-broadcast", "broadcast"),
    ("reduce-scatter", "reducescatter"),
    ("send-recv", "sendrecv"),
)
KINDS = (*dict.fromkeys(kind for kind, _ in _KERNEL_KINDS), "collective-permute")  # Results of `kind_of_collective`.
_COPIES = ("memcpy", "memset", "__amd_rocclr_copy", "__amd_rocclr_fill")  # Prefixes of the names of copies.
_FROM_HOST = re.compile(r"h(?:ost)?_?(?:to|2)_?d", re.IGNORECASE)
_OVER_HOST = re.compile(rf"{_FROM_HOST.pattern}|d(?:evice)?_?(?:to|2)_?h", re.IGNORECASE)
_CONTAINER_OP = re.compile(rf"^(?:{'|'.join(CONTROL)})(?:\.\d+)*$")
# The name of a kernel that fuses a matmul and a collective: gemm_all_reduce, AllGatherMatmul, ...
_MATMUL = re.compile(r"gemm|matmul", re.IGNORECASE)
_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)


@dataclass(frozen=True)
class GraphNode:
    """An instruction that may run inside a CUDA graph."""

    name: str
    """The instruction's name in traces without graphs."""
    kernel: str
    """The name of the kernel that XLA compiles for it; "" for a collective."""
    work: Hashable
    """A value that is equal for instructions that may share a kernel."""
    library: str
    """The kind of a library's work: `matmul`, `attention`, `sort`, ...; "" if XLA compiles the kernel."""
    collective: str
    """The kind of collective; "" if it does not communicate."""
    copies: bool
    """Whether the graph may run it as a plain copy."""
    fills: bool
    """Whether the graph may run it as a plain memset."""

    @property
    def several(self) -> bool:
        """Whether the instruction may launch more than one kernel."""
        return bool(self.library or self.collective)


@dataclass(frozen=True)
class TracedProgram:
    """The facts of a compiled program that are needed to read its trace."""

    module: str
    """Name of the HLO module whose executions are the steps."""
    collectives: Mapping[str, Collective] = field(default_factory=dict)
    containers: Set[str] = frozenset()
    """Loops, calls and conditionals: their time is that of the operations inside."""
    fused: Set[str] = frozenset()
    """Instructions that compute and communicate in one kernel."""
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Instruction name -> [groups, members] global device ids, or [pairs, 2] for a collective-permute."""
    expected: Mapping[str, int] = field(default_factory=dict)
    """Name of a collective instruction -> runs in one execution, if known from the schedule."""
    program_id: int | None = None
    """The runtime's id of the program, since others may have its name; None if unknown."""
    graph_nodes: Sequence[GraphNode] = ()
    """GPU instructions in execution order, if known from the schedule."""
    kernels: Set[str] = frozenset()
    """Instructions that run as kernels on the GPU, without access to host memory; copies on the GPU are included."""
    found: bool = False
    """Whether there is no capture record: the trace may begin or end inside a step; its number of steps is unknown."""
    once: Set[str] = frozenset()
    """Instructions that run once per execution; only set for a `found` program with a schedule."""
    kinds: Mapping[str, Collective] = field(default_factory=dict)
    """Kind of collective -> one entry for all collectives of that kind, if only kernel names are known."""

    @property
    def distinct_collectives(self) -> tuple[Collective, ...]:
        """The distinct collectives, in the order of `Timeline.collectives`."""
        return tuple(dict.fromkeys((*self.collectives.values(), *self.kinds.values())))

    def owns(self, labels: Sequence[Label]) -> np.ndarray:
        """Return [labels] whether each belongs to the program, by its id; if no id is equal, by its module's name."""
        named = np.array([label.module == self.module for label in labels], bool)
        if self.program_id is not None:
            same = named & np.array([label.program == self.program_id for label in labels], bool)
            return same if same.any() else named
        return named


@dataclass(frozen=True)
class Classes:
    """The classes of labels; each array is [labels]."""

    kind: np.ndarray
    """COMPUTE, COMMUNICATION, COPY, CONTAINER or FUSED."""
    collective: np.ndarray
    """Index into the timeline's collectives; -1 without a collective, or if its instruction is unknown."""
    op: np.ndarray
    """Index into the timeline's op names for operations that compute; -1 for others."""
    input: np.ndarray
    """Whether the operation copies from the host."""
    own_copy: np.ndarray
    """Whether the operation is a copy on the GPU by the program."""
    of_program: np.ndarray
    foreign: np.ndarray
    """Whether the operation belongs to another program."""
    lost: np.ndarray
    """Whether the operation ran in a CUDA graph and has no instruction, though others have one."""


class Classifier:
    """Finds the classes of operations; indices of collectives and op names are the same in all files of a program."""

    def __init__(self, program: TracedProgram):
        self._program = program
        self.collectives = program.distinct_collectives
        self.op_names: dict[str, int] = {}
        """Name of an operation that computes -> its index in `Classes.op`."""
        self._index = {c: i for i, c in enumerate(self.collectives)}
        self._decided: dict[tuple, tuple[int, Collective | None]] = {}

    def classify(self, labels: Sequence[Label]) -> Classes:
        own, decided = self._program.owns(labels), self._decided
        named = bool(self._program.kinds)  # Only kernel names are known, inside and outside of graphs.
        kinds, collectives, ops = [], [], []
        for label, mine in zip(labels, own.tolist()):
            key = (label.name, label.op, label.copy, mine)
            if key not in decided:
                decided[key] = _kind(label, self._program, mine)
            kind, collective = decided[key]
            computes = kind in (COMPUTE, FUSED)
            kinds.append(kind)
            collectives.append(-1 if collective is None else self._index[collective])
            ops.append(self.op_names.setdefault(label.op or label.name, len(self.op_names)) if computes else -1)
        copies = [(i, label.name) for i, label in enumerate(labels) if label.copy]
        fed, over = np.zeros((2, len(labels)), bool)
        fed[[i for i, name in copies if _FROM_HOST.search(name)]] = True
        over[[i for i, name in copies if not _OVER_HOST.search(name)]] = True
        return Classes(
            kind=np.array(kinds, np.int8),
            collective=np.array(collectives, np.int32),
            op=np.array(ops, np.int32),
            input=fed,
            own_copy=own & over,
            of_program=own,
            foreign=~own & np.array([bool(label.module) for label in labels], bool),
            lost=np.array([label.graph and not (named or label.op or label.copy) for label in labels], bool),
        )


@lru_cache(maxsize=10_000)
def is_fused(name: str) -> bool:
    """Return whether a kernel's name says that it computes and communicates at once."""
    return bool(_MATMUL.search(name) and _COLLECTIVE.search(name))


def kind_of_collective(label: Label) -> str:
    """Return the kind of collective, from the name of an operation's instruction or else of its kernel; "" for none."""
    if op := _COMMUNICATION_OP.match(label.op):
        return op[0]
    name = label.name.lower().replace("_", "").replace("-", "")
    return next((kind for kind, word in _KERNEL_KINDS if word in name), "")


@lru_cache(maxsize=10_000)
def is_communication(kernel: str) -> bool:
    """Return whether a kernel's name belongs to a communication library."""
    return bool(_COMMUNICATION_KERNEL.search(kernel))


def is_container(label: Label) -> bool:
    """Return whether an operation has the name of a loop, call or conditional, whose time is that of its body."""
    return bool(_CONTAINER_OP.match(label.op))


def _kind(label: Label, program: TracedProgram, of_program: bool) -> tuple[int, Collective | None]:
    if (of_program and label.op in program.containers) or _CONTAINER_OP.match(label.op):
        return CONTAINER, None
    collective = program.collectives.get(label.op) if of_program else None
    if (of_program and label.op in program.fused) or is_fused(label.name):
        return FUSED, collective
    if collective is not None or _COMMUNICATION_OP.match(label.op) or is_communication(label.name):
        return COMMUNICATION, collective or program.kinds.get(kind_of_collective(label))
    inside = of_program and label.op in program.kernels and not _OVER_HOST.search(label.name)
    return (COPY if label.copy and not inside else COMPUTE), None


def step_windows(
    start: np.ndarray, end: np.ndarray, op: np.ndarray, run: np.ndarray, num_steps: int | None = None
) -> list[tuple[float, float]]:
    """Return the windows (start, end) of the executions, in order.

    A window ends where the next execution starts. The last execution is dropped, since no next one shows its end. If it
    is the only one, its window ends with its last operation.

    Args:
        start, end: times of the program's operations on one device, sorted by start.
        op: an id of the instruction of each operation.
        run: the runtime's id of each operation's execution, which may be negative; all -1 if the trace has none.
        num_steps: number of executions in the trace, if known.
    """
    first = runs_in_order(start, run)[1] if (run != -1).any() else _starts_by_count(start, op, num_steps)
    if len(first) == 1:
        return [(float(first[0]), float(end.max()))]
    return list(zip(first[:-1].tolist(), first[1:].tolist()))


def found_windows(start: np.ndarray, end: np.ndarray, op: np.ndarray, once: np.ndarray) -> list[tuple[float, float]]:
    """Return the windows of executions whose ids and number are unknown; empty if none are found.

    The trace may begin and end inside an execution.

    Operations that ran equally often tell where executions begin. These operations are chosen in one of three ways:

    - with `once`: of the operations in it, those with the most frequent count;
    - without `once`: all operations, if their counts have a common divisor;
    - else, if less than 10 % of them ran once, those whose count is a multiple of c, which is the smallest count > 1
      that divides at least a quarter of all counts.

    If this gives too few or too many windows, the whole trace is an execution only if nothing shows a second one: the
    most frequent count in `once` is 1, or without `once`, no operation ran more than once.

    Args:
        start, end, op: as in `step_windows`.
        once: [ids] whether an operation runs once per execution.
    """
    every = np.bincount(op, minlength=len(once))
    ids = np.flatnonzero(every)
    count = every[ids]
    executions = count.max(initial=1)
    chosen, least = np.ones(len(ids), bool), 2  # Two windows need three executions: fewer are no evidence of a period.
    if once[ids].any():
        values, votes = np.unique(count[once[ids]], return_counts=True)
        executions = values[np.argmax(votes)]
        chosen = once[ids] & (count == executions)
        least = 1 if executions == 2 else least
    elif np.gcd.reduce(count) == 1 and (count == 1).mean() < 0.1:
        repeated = (c for c in np.unique(count[count > 1]).tolist() if (count % c == 0).mean() >= 0.25)
        number = next(repeated, 1)
        chosen = (count % number == 0) if number > 1 else chosen
    rows = slice(None) if chosen.all() else np.isin(op, ids[chosen])
    windows = step_windows(start[rows], end[rows], op[rows], np.broadcast_to(-1, len(op[rows])))
    if least <= len(windows) <= _MOST_FOUND:
        return windows
    return [(float(start[0]), float(end.max()))] if executions == 1 else []


def runs_in_order(start: np.ndarray, run: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the runtime's ids and the starts of the executions, sorted by start; empty if the trace has no ids.

    Args:
        start: times of the program's operations on one device, sorted.
        run: the runtime's id of each operation's execution.
    """
    numbered = run != -1
    ids, index = np.unique(run[numbered], return_index=True)  # The index is the earliest of a run: start is sorted.
    starts = start[numbered][index]
    order = np.argsort(starts, kind="stable")
    return ids[order], starts[order]


def _starts_by_count(start: np.ndarray, op: np.ndarray, num_steps: int | None) -> np.ndarray:
    """Return the start of each execution, without the runtime's ids, by counting.

    If an op runs m times per execution, every m-th of its runs is in a new execution; the start is the earliest such
    run of any op. Ops whose count is not a multiple of the number of executions are left out (conditionals, or events
    that the profiler dropped).
    """
    # The order is by op, then by time. Ids are made 16-bit if possible, since numpy sorts those in one radix pass.
    count = np.bincount(op)
    begin = np.cumsum(count) - count
    begin, count = begin[count > 0], count[count > 0]
    order = np.argsort(op.astype(np.uint16) if len(op) and op.max() < 2**16 else op, kind="stable")
    steps = _number_of_runs(count, num_steps)
    regular = count % steps == 0
    begin, every = begin[regular], count[regular] // steps
    if steps < len(begin):
        return np.sort([start[order[begin + every * i]].min() for i in range(steps)])
    return np.sort(reduce(np.minimum, (start[order[b + e * np.arange(steps)]] for b, e in zip(begin, every))))


def _number_of_runs(count: np.ndarray, num_steps: int | None) -> int:
    """Return the number of executions: `num_steps` if it divides most ops' counts, else the counts' common divisor."""
    if num_steps and np.mean(count % num_steps == 0) > 0.5:
        return num_steps
    return int(np.gcd.reduce(count))
