"""One process's trace file -> the operations of its devices as columns, what each is, and in which execution it ran.

Operations that have the same kernel name, HLO instruction and module share a `Label`, so that whatever must be decided
about them by name is decided once: compute, communication, copies, containers, or compute and communication at once.
An operation communicates if its HLO instruction does, or, where the trace has lost the instruction, if its kernel is
one of a communication library's; never because of the stream it ran on.
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
# Bounded: a message is as long as somebody likes.
DROPPED = re.compile(
    r"(?<![0-9])([0-9]{1,15})[^.;\n]{0,80}\bdropped\b|\bdropped\b[^0-9]{0,80}([0-9]{1,15})", re.IGNORECASE
)
_GRAPH_STATS = ("correlation_id", "cuda_graph_node_id")  # launch and node
_GPU_STATS = ("hlo_op", "hlo_module", "memcpy_details", "cuda_graph_id", *_GRAPH_STATS, "run_id", "program_id")
_HARDWARE = ("gpu_device_name", "device_vendor", "compute_cap_major", "compute_cap_minor", "memory_size")
_CPU_STATS = ("hlo_op", "hlo_module", "run_id", "program_id", "device_ordinal", "_pt", "_p", "_ct", "_c")
_PS_PER_NS = 1000
_MOST_DECIDED = 1 << 22  # ids of a plane; others are decided anew in every block
BLOCK = 1 << 17  # events of which all columns are in memory at a time
_LONGEST_TRACE_NS = 86_400 * 10**9  # a day; a time further from the start is no time of this trace


@dataclass(frozen=True)
class TraceFile:
    """One process's XSpace file."""

    path: Path  # the `.xplane.pb` file
    devices: Mapping[int, int]  # ordinal in the file -> global device id; operations of other devices are ignored
    process: int = 0  # the process of the job that wrote it


class Label(NamedTuple):
    """What operations of the same kind have in common; a tuple, since a trace may have a hundred thousand."""

    name: str  # of the kernel, or of the thunk on a CPU
    op: str  # the HLO instruction; empty where the trace has lost it
    module: str  # and its module
    copy: bool  # a memory copy or a memset
    graph: bool  # ran as a node of a CUDA graph
    program: int = -1  # the runtime's id of the program; -1 where the trace has none


@dataclass(frozen=True)
class DeviceOperations:
    """Operations of one device, sorted by start; [n] each, times in ps on the clock of the process."""

    start_ps: np.ndarray  # from the start of the profile
    end_ps: np.ndarray
    label: np.ndarray  # indices into `Operations.labels`
    run: np.ndarray  # the runtime's id of the execution; -1 where the trace has none
    nodes: np.ndarray | None = None  # [n, 2] launch and node of a CUDA graph, -1 outside of one; None where none ran


@dataclass
class Operations:
    """What one file holds about the devices of interest."""

    labels: list[Label] = field(default_factory=list)  # the kinds of operations
    devices: dict[int, DeviceOperations] = field(default_factory=dict)  # global device id -> its operations
    clock_ns: int | None = None  # time since the epoch at which this process's clock reads zero; None if unknown
    messages: list[str] = field(default_factory=list)  # what the profiler reports about itself
    dropped: int | None = None  # events that it says it lost; None if it does not say
    discarded: int = 0  # events with impossible times, left out
    cpu: bool = False  # the devices are CPUs
    hardware: dict[str, int | float | str] = field(default_factory=dict)  # what the trace says of a GPU

    @property
    def events(self) -> int:
        """Operations read."""
        return sum(len(d.start_ps) for d in self.devices.values())


def read_operations(file: TraceFile, space: XSpace | None = None) -> Operations:
    """Reads one file, or what of it was read already.

    Args:
        file: whose devices are read, and no others.
        space: the same file from `read_xspace`, no events of which were read yet; None opens it.

    Returns:
        the operations of its GPUs, or of XLA:CPU's devices where it has no GPU.

    Raises:
        TraceError: it cannot be read, is no trace, or has two planes of one device.
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
    """How long the profile ran, with a second to spare; notes its beginning."""
    for plane in space.planes:
        if plane.name == "Task Environment":
            start, stop = plane.stats.get("profile_start_time"), plane.stats.get("profile_stop_time")
            if isinstance(start, int) and start > 0:
                found.clock_ns = start
                if isinstance(stop, int) and stop > start:
                    return stop - start + 10**9
    return _LONGEST_TRACE_NS


class _Reader:
    """Gathers the operations of planes into one table of labels."""

    def __init__(self, found: Operations, duration_ns: int):
        self.found, self.duration_ns = found, duration_ns
        self.known: dict[tuple[str, str, str, int, int], int] = {}
        self.decided = _Decided()

    def gpu_plane(self, space: XSpace, plane: Plane, device: int) -> None:
        """Raw files hold stream lines only; lines such as "XLA Ops" are derived by viewers, and would count twice."""
        lines = [line for line in plane.lines if line.name.startswith("Stream #")]
        blocks = self._blocks(space, plane, lines, _GPU_STATS)
        self._add(device, [self._columns(plane, e, start, start + e.duration_ps) for e, start in blocks])

    def cpu_plane(self, space: XSpace, plane: Plane, devices: Mapping[int, int]) -> None:
        """XLA:CPU's thunks, whatever thread they ran on.

        The event of a thunk that hands its work to a thread pool ends at the hand-over; the `end: ` marker that
        carries its id says when the work was done.
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
        """The events of some lines with when each starts, in ps; so many together that little memory is taken."""
        parts, count = [], 0
        limit = 2 * _LONGEST_TRACE_NS * _PS_PER_NS  # of what 64 bits hold; times beyond are discarded later
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
        """Time of a line since the profile began; some writers count from the epoch."""
        since = line.timestamp_ns
        if since > _LONGEST_TRACE_NS and self.found.clock_ns:
            since -= self.found.clock_ns
        return min(max(since, -_LONGEST_TRACE_NS), 2 * _LONGEST_TRACE_NS)

    def _columns(self, plane: Plane, events: Events, start, end) -> tuple[np.ndarray, ...]:
        """What is kept of those whose times are possible: start, end, label, run, and launch and node of a graph."""
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
        return tuple(concatenated([part], len(part)))  # where none has a run or a node, these take no room

    def _add(self, device: int, parts: list[tuple[np.ndarray, ...]]) -> None:
        """Keeps the operations of one device, sorted by start."""
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
        """[n] index of each event's label."""
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
        """[n] index of the label of each of some distinct rows."""
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
    """Labels of a plane's rows of ids that were decided before, by the instruction's id.

    Args:
        plane: whose ids they are.
    """

    def __init__(self, plane: Plane | None = None):
        self.plane = plane
        self._columns: list[np.ndarray] = []  # each [ids + 2]: the last row decided that has this instruction
        self._label = np.zeros(0, np.int32)

    def labels(self, columns: Sequence[np.ndarray]) -> np.ndarray:
        """[n] the index of each row's label; -1 where it was not decided."""
        if not self._columns:
            return np.full(len(columns[0]), -1, np.int32)
        slot = self._slot(columns[0])
        label = self._label[slot]
        for column, decided in zip(columns, self._columns):
            label[column != decided[slot]] = -1
        return label

    def add(self, columns: Sequence[np.ndarray], label: np.ndarray) -> None:
        """Keeps the labels of some distinct rows."""
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
        """[n] where a row with this instruction is; what is beyond all that were decided shares a place."""
        return np.clip(op, -1, len(self._label) - 2) + 1


def _joined(parts: list[tuple[Events, np.ndarray]], wanted: Sequence[str]) -> tuple[Events, np.ndarray]:
    """Some parts, which are taken out of the list, as one: events and when each starts."""
    events, start = [e for e, _ in parts], [s for _, s in parts]
    parts.clear()
    return Events.joined(events, wanted), np.concatenate(start or [np.zeros(0, np.int64)])


def _done(events: Events, start: np.ndarray, marker: np.ndarray) -> np.ndarray:
    """[n] when each event's work was done: at its end marker, found by the id both carry, else at its own end."""
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
    """A number for a flow: its id, with its kind in the top bits."""
    return id_ ^ (np.where(kind == NO_VALUE, 0, kind) << 58)


def distinct_rows(columns: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """[n] number of each row among the distinct rows of some columns, and one row of each.

    The first column (the instruction) nearly always determines the others: rows that agree with the one row that was
    picked for their instruction need no sorting.
    """
    leader = columns[0]
    if not len(leader):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    code = np.where(leader == NO_VALUE, leader.max(initial=0) + 1, leader)
    code = code - code.min()
    # ids far apart, or so far that their difference has no room: a table of them would be larger than the events
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
_MOST_FOUND = 10_000  # executions in a trace that numbers none; real ones have some tens

# ncclKernel (before 2.19), ncclDevKernel, ncclSymk (symmetric memory, 2.27); the other libraries that XLA can call;
# XLA's own kernels (one-shot and multimem all-reduce, ragged all-to-all, their barrier); DeepEP's dispatch and combine
_COMMUNICATION_KERNEL = re.compile(
    r"^(?:void )?(?:nccl|nvshmem|rccl|msccl)|(?:AllReduce|RaggedAllToAll\w{0,40}|MultiGpuBarrier\w{0,20})Kernel"
    r"|(?:one|two)_shot_all_reduce|ragged_all_to_all_\w{0,20}kernel|multi_gpu_barrier"
    r"|multimem_?all_?(?:reduce|gather)|deep_ep::",
    re.IGNORECASE,
)
_COMMUNICATION_OP = re.compile(rf"^(?:{'|'.join(COLLECTIVES)})\b")
_KERNEL_KINDS = (  # in the names of kernels that communicate, the first that fits
    ("ragged-all-to-all", "raggedalltoall"),
    ("all-gather", "allgather"),
    ("all-reduce", "allreduce"),
    ("all-to-all", "alltoall"),
    ("all-to-all", "deepep"),
    ("collective-broadcast", "broadcast"),
    ("reduce-scatter", "reducescatter"),
    ("send-recv", "sendrecv"),
)
KINDS = (
    *dict.fromkeys(kind for kind, _ in _KERNEL_KINDS),
    "collective-permute",
)  # what `kind_of_collective` tells apart
_COPIES = ("memcpy", "memset", "__amd_rocclr_copy", "__amd_rocclr_fill")  # how their names begin
_FROM_HOST = re.compile(r"h(?:ost)?_?(?:to|2)_?d", re.IGNORECASE)  # MemcpyH2D, CopyHostToDevice
_OVER_HOST = re.compile(rf"{_FROM_HOST.pattern}|d(?:evice)?_?(?:to|2)_?h", re.IGNORECASE)
_CONTAINER_OP = re.compile(rf"^(?:{'|'.join(CONTROL)})(?:\.\d+)*$")
# a matmul and a collective in one kernel's name: gemm_all_reduce, AllGatherMatmul, ...
_MATMUL = re.compile(r"gemm|matmul", re.IGNORECASE)
_COLLECTIVE = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all", re.IGNORECASE)


@dataclass(frozen=True)
class GraphNode:
    """An instruction as a graph shows it."""

    name: str  # as traces without graphs name it
    kernel: str  # the name of its kernel, if XLA compiles one for it
    work: Hashable  # equal for instructions that may share a kernel
    library: str  # what a library does for it: `matmul`, `attention`, `sort`, ...; "" where XLA compiles its kernel
    collective: str  # what it communicates; "" if it does not
    copies: bool  # whether it may be a plain copy
    fills: bool  # whether it may be a plain memset

    @property
    def several(self) -> bool:
        """Whether it may be more than one kernel."""
        return bool(self.library or self.collective)


@dataclass(frozen=True)
class TracedProgram:
    """What must be known of a compiled program to read its trace."""

    module: str  # name of the HLO module whose executions are the steps
    collectives: Mapping[str, Collective] = field(default_factory=dict)  # instruction name -> what it communicates
    containers: Set[str] = frozenset()  # its loops, calls and conditionals, whose time is that of the operations inside
    fused: Set[str] = frozenset()  # its instructions that compute and communicate in one kernel
    groups: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Instruction name -> [groups, members] global device ids, or [pairs, 2] of a collective-permute."""
    expected: Mapping[str, int] = field(default_factory=dict)
    """Instruction name -> how often one execution runs it, where the program says."""
    program_id: int | None = None  # the runtime's, where several programs bear the name; None if that is not known
    graph_nodes: Sequence[GraphNode] = ()  # its instructions in their order, where the program says
    kernels: Set[str] = frozenset()  # of them those that compute on the GPU itself, what they copy included
    found: bool = False  # nobody said how often the program ran, or whether the trace begins and ends between steps
    once: Set[str] = frozenset()  # of a found program: its instructions that run once an execution, where known
    kinds: Mapping[str, Collective] = field(default_factory=dict)
    """Kind of collective -> what stands for all of that kind, where only names of kernels are known."""

    @property
    def distinct_collectives(self) -> tuple[Collective, ...]:
        """Each collective once: what the indices of a timeline point into."""
        return tuple(dict.fromkeys((*self.collectives.values(), *self.kinds.values())))

    def owns(self, labels: Sequence[Label]) -> np.ndarray:
        """[labels] whether each is one of the program's; ids of programs may differ between processes, names do not."""
        named = np.array([label.module == self.module for label in labels], bool)
        if self.program_id is not None:
            same = named & np.array([label.program == self.program_id for label in labels], bool)
            return same if same.any() else named
        return named


@dataclass(frozen=True)
class Classes:
    """What each label is, [labels]."""

    kind: np.ndarray  # COMPUTE, COMMUNICATION, COPY, CONTAINER or FUSED
    collective: np.ndarray  # index into the timeline's collectives; -1 for none, or for one that maps to no instruction
    op: np.ndarray  # index into the timeline's op names, of what computes; else -1
    input: np.ndarray  # whether it copies from the host
    own_copy: np.ndarray  # whether it copies on the GPU, for an instruction of the program
    of_program: np.ndarray  # whether it is an operation of the program
    foreign: np.ndarray  # whether it is one of another program
    lost: np.ndarray  # ran in a CUDA graph, and its instruction is not known where that of others is


class Classifier:
    """Decides what operations are, the same over all files of a program."""

    def __init__(self, program: TracedProgram):
        self._program = program
        self.collectives = program.distinct_collectives
        """What `Classes.collective` points into."""
        self.op_names: dict[str, int] = {}
        """Names of what computes -> what `Classes.op` says of them."""
        self._index = {c: i for i, c in enumerate(self.collectives)}
        self._decided: dict[tuple, tuple[int, Collective | None]] = {}

    def classify(self, labels: Sequence[Label]) -> Classes:
        """The classes of the labels of one file."""
        own, decided = self._program.owns(labels), self._decided
        named = bool(self._program.kinds)  # nothing but names is known, in graphs and out of them
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
    """Whether a kernel's name says that it computes and communicates at once."""
    return bool(_MATMUL.search(name) and _COLLECTIVE.search(name))


def kind_of_collective(label: Label) -> str:
    """What an operation communicates by the name of its instruction, else of its kernel; "" where neither says."""
    if op := _COMMUNICATION_OP.match(label.op):
        return op[0]
    name = label.name.lower().replace("_", "").replace("-", "")
    return next((kind for kind, word in _KERNEL_KINDS if word in name), "")


@lru_cache(maxsize=10_000)
def is_communication(kernel: str) -> bool:
    """Whether a kernel is one of a communication library's by its name."""
    return bool(_COMMUNICATION_KERNEL.search(kernel))


def is_container(label: Label) -> bool:
    """Whether an operation is a loop, a call or a conditional by its name: its time is that of what is inside."""
    return bool(_CONTAINER_OP.match(label.op))


def _kind(label: Label, program: TracedProgram, of_program: bool) -> tuple[int, Collective | None]:
    """What a label is, and what it communicates."""
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
    """Windows of the executions, in order; the last one is dropped unless it is the only one.

    What follows the last execution is not in the trace, so its idle time is unknown: alone, it ends with its last
    operation.

    Args:
        start, end: times of the program's operations on one device, sorted by start.
        op: an id of the instruction of each operation.
        run: the runtime's id of the execution, negative or positive; -1 everywhere where the trace has none.
        num_steps: executions in the trace, if known.
    """
    first = runs_in_order(start, run)[1] if (run != -1).any() else _starts_by_count(start, op, num_steps)
    if len(first) == 1:
        return [(float(first[0]), float(end.max()))]
    return list(zip(first[:-1].tolist(), first[1:].tolist()))


def found_windows(start: np.ndarray, end: np.ndarray, op: np.ndarray, once: np.ndarray) -> list[tuple[float, float]]:
    """Windows of the executions where nobody numbered or counted them, and the trace may begin and end inside of one.

    The operations that ran equally often tell where executions begin: of those that run once an execution, where
    `once` [ids] knows them, the most; else all where their numbers have a divisor in common, else the rarest that are
    a quarter of all. More than any trace has are no executions: then the trace is one.

    Args:
        start, end, op: as of `step_windows`.
        once: of each id of an operation, whether one execution runs it once.
    """
    every = np.bincount(op, minlength=len(once))
    ids = np.flatnonzero(every)
    count = every[ids]
    chosen, least = np.ones(len(ids), bool), 2  # windows, of three executions: of two that nobody knows there is none
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
    return windows if least <= len(windows) <= _MOST_FOUND else [(float(start[0]), float(end.max()))]


def runs_in_order(start: np.ndarray, run: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The runtime's ids of the executions and when each starts, in time; empty where the trace has none.

    Args:
        start: times of the program's operations on one device, sorted.
        run: the runtime's id of the execution of each.
    """
    numbered = run != -1
    ids, index = np.unique(run[numbered], return_index=True)  # first of each run, as start is sorted
    starts = start[numbered][index]
    order = np.argsort(starts, kind="stable")
    return ids[order], starts[order]


def _starts_by_count(start: np.ndarray, op: np.ndarray, num_steps: int | None) -> np.ndarray:
    """Start of each execution where none is numbered: an op that ran m times per execution opens one every m times.

    Ops whose count is no multiple of the number of executions (a conditional; events that the profiler dropped) are
    left out.
    """
    # by op, in time; numpy sorts 16-bit numbers by radix, in one pass
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
    """The number given, if it fits most ops; else the largest number that fits all."""
    if num_steps and np.mean(count % num_steps == 0) > 0.5:
        return num_steps
    return int(np.gcd.reduce(count))
