"""Read the GPU operations from files of Nsight Systems, into the same columns as from an XSpace file.

    FILE.sqlite    `nsys export --type sqlite`: kernels and copies, the CUDA calls that launched them, NVTX ranges
    trace.parquet  `nsys-jax`, or nsys' recipe nvtx_gpu_proj_trace: XLA's ranges, with the time of their GPU work

XLA opens an NVTX range around the launches of a thunk (`Thunk:#...,hlo_op=OP#`), inside a range around each execution
of a module (`XlaModule:#...,hlo_module=MODULE,program_id=ID#`). An operation gets the instruction of the innermost
thunk range, and the module of the innermost module range, around the call that launched it. Recent versions of XLA run
asynchronous thunks outside their module's range; their operations get the module of the operations before and after
them. Neither file contains the program: `loose` looks for XLA's dump beside it.

Tables and columns are those of nsys' "SQLite Export Schema Reference"
(docs.nvidia.com/nsight-systems/2021.5/nsys-exporter/exported_data.html).
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from meshkit.config.files import LEAST_ROOM_BYTES, MOST_TIMES, open_regular, short
from meshkit.errors import TraceError
from meshkit.trace.operations import DROPPED, DeviceOperations, Label, Operations, TraceFile, distinct_rows
from meshkit.trace.xspace import CHUNK, concatenated

_SQLITE, _PARQUET = b"SQLite format 3\0", b"PAR1"
_THUNK = re.compile(r"(?:TSL:)?Thunk:#(?:.*,)?hlo_op=([^,#]+)", re.DOTALL)
_MODULE = re.compile(r"(?:TSL:)?XlaModule:#(?:.*,)?hlo_module=([^,#]+)(?:,program_id=(\d{1,18}))?", re.DOTALL)
_NCCL = "NCCL:"
_OF_THUNK, _OF_MODULE, _OF_NCCL = range(3)
_LAUNCHER = re.compile(r"XlaLauncher:#global=(\d{1,9}),local=(\d{1,9}),")
_KERNEL, _COPY, _FILL, _GRAPH = (
    f"CUPTI_ACTIVITY_KIND_{name}" for name in ("KERNEL", "MEMCPY", "MEMSET", "GRAPH_TRACE")
)
_GPU = "TARGET_INFO_GPU"
_OF_GPU = {  # Column -> its name in an XSpace file.
    "name": "gpu_device_name",
    "computeMajor": "compute_cap_major",
    "computeMinor": "compute_cap_minor",
    "totalMemory": "memory_size",
}
_COPY_NAMES = {1: "MemcpyH2D", 2: "MemcpyD2H", 8: "MemcpyD2D", 10: "MemcpyP2P"}  # CUpti_ActivityMemcpyKind
_THREAD_BITS = 24  # The low bits of a globalTid are the thread, the bits above them the process.
_ID_BITS = 40  # The low bits of a range's id; the bits above them get the rank of its report.
_WARNING = 2  # The severity of a diagnostic.
_LONGEST_TEXT = 1 << 20
# The fewest bytes of an event and of a text in a file; a file that claims more of them than fit is damaged.
_EVENT_BYTES, _TEXT_BYTES = 24, 4
_WHOLE_GRAPH = -2  # The node of an operation that is a whole CUDA graph.
_DEEPEST = 64  # Limit on the depth of nested ranges; XLA nests about ten.
_LATEST_NS = 1 << 53  # Limit on times: 104 days from the start of the session, which in ps still fits into 64 bits.
_NEVER = np.iinfo(np.int64).max
_EXPORT = "nsys export --type sqlite REPORT.nsys-rep"
_OLDER = ("Projected Start", "Projected Duration", "RangeId", "ParentId")
_RECENT = ("Start", "End", "Range ID", "Parent ID")  # Column names of the recipe since nsys 2024.5.

_Launchers = dict[int, dict[int, tuple[int, int]]]
"""Process -> launching thread -> (local number, global id) of the device that the thread launches on."""


def home(path: Path) -> Path:
    """Return the folder of a trace; for nsys-jax, the folder above nvtx_gpu_proj_trace, where XLA's dump is.

    If nsys-jax-combine has merged processes, trace.parquet is a folder with a file per process.
    """
    folder = path.absolute().parent
    folder = folder.parent if folder.suffix == ".parquet" else folder
    return folder.parent if folder.name == "nvtx_gpu_proj_trace" else folder


def is_nsys(path: Path) -> bool:
    """Return whether a file is SQLite or Parquet, by its first bytes."""
    try:
        with open_regular(path) as file:
            return file.read(len(_SQLITE)).startswith((_SQLITE, _PARQUET))
    except (OSError, ValueError):
        return False


def read_nsys(file: TraceFile) -> Operations:
    """Return the GPU operations of all processes in one export; devices are numbered across the processes.

    Raises:
        TraceError: the file cannot be read, is not an export of nsys, or has no operation of a GPU; or pyarrow is
            missing.
    """
    try:
        with open_regular(file.path) as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            parquet = opened.read(len(_PARQUET)) == _PARQUET
            opened.seek(0)
            events = _read_parquet(file.path, opened, size) if parquet else _read_sqlite(file.path, size)
    except OSError as error:
        raise TraceError(f"the trace cannot be read: {error.strerror or error}.", at=str(file.path)) from None
    except (sqlite3.Error, UnicodeDecodeError) as error:  # UnicodeDecodeError: a name is not text.
        raise TraceError(f"this SQLite file is damaged: {error}.", at=str(file.path), hint=_EXPORT) from None
    if not len(events.start_ns):
        message = "nsys recorded no operation of a GPU."
        raise TraceError(message, at=str(file.path), hint=f"nsys profile --trace cuda,nvtx, then {_EXPORT}")
    return events.operations(file)


@dataclass
class _Names:
    """Assigns numbers to kernels, instructions and modules."""

    values: list[Any] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)

    def number(self, value: Any) -> int:
        found = self._numbers.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


@dataclass
class _Events:
    """Operations of all devices of a file, in any order, and the tables that their columns index.

    `op` is -1 outside a thunk, `module` outside a module, `node` outside a graph. `execution` indexes modules' ranges.
    """

    start_ns: np.ndarray
    end_ns: np.ndarray
    device: np.ndarray
    name: np.ndarray
    op: np.ndarray
    module: np.ndarray
    execution: np.ndarray
    launch: np.ndarray
    node: np.ndarray
    copy: np.ndarray
    ordinals: Sequence[int]
    names: list[str]
    ops: list[str]
    modules: Sequence[tuple[str, int]]
    """(name, the runtime's id of the program)."""
    found: Operations

    def operations(self, file: TraceFile) -> Operations:
        """Return the operations by device, for the devices in `file.devices`."""
        found = self.found
        good = (self.end_ns >= self.start_ns) & (self.start_ns >= 0) & (self.end_ns <= _LATEST_NS)
        found.discarded = int((~good).sum())
        origin = int(self.start_ns[good].min(initial=_LATEST_NS))
        if found.clock_ns is not None:
            found.clock_ns += origin
        order = np.flatnonzero(good)
        order = order[np.lexsort((self.start_ns[order], self.device[order]))]
        self._place_thunks(order)
        graph = self.node != -1
        label, first = distinct_rows((self.op, self.module, self.name, self.copy + 2 * graph))
        kinds = (self.name, self.op, self.module, self.copy, graph)
        for name, op, number, copy, in_graph in zip(*(column[first].tolist() for column in kinds)):
            module, program = self.modules[number] if number >= 0 else ("", -1)
            found.labels.append(
                Label(self.names[name], self.ops[op] if op >= 0 else "", module, copy, in_graph, program)
            )
        run, bounds = self._runs(order), np.searchsorted(self.device[order], np.arange(len(self.ordinals) + 1)).tolist()
        for ordinal, first_row, end_row in zip(self.ordinals, bounds, bounds[1:]):
            rows = order[first_row:end_row]
            if not len(rows) or ordinal not in file.devices:
                continue
            start, end = ((times[rows] - origin) * 1000 for times in (self.start_ns, self.end_ns))
            nodes = np.stack([self.launch[rows], self.node[rows]], axis=1) if graph[rows].any() else None
            found.devices[file.devices[ordinal]] = DeviceOperations(start, end, label[rows], run[rows], nodes)
        return found

    def _place_thunks(self, order: np.ndarray) -> None:
        """Set the module of operations without one: that of the operations before and after them, if these agree.

        Args:
            order: rows of operations, sorted by device and start.
        """
        known = self.module[order] >= 0
        count, at = len(order), np.arange(len(order))
        before = np.maximum.accumulate(np.where(known, at, -1))
        after = np.minimum.accumulate(np.where(known, at, count)[::-1])[::-1]
        between = np.flatnonzero(~known & (self.op[order] >= 0) & (before >= 0) & (after < count))
        first, last = order[before[between]], order[after[between]]
        same = (self.module[first] == self.module[last]) & (self.device[first] == self.device[last])
        rows = order[between[same]]
        self.module[rows], self.execution[rows] = self.module[first[same]], self.execution[first[same]]

    def _runs(self, order: np.ndarray) -> np.ndarray:
        """Return [n] the number of each operation's execution, from 0 per device and module; -1 outside a module."""
        run = np.full(len(self.start_ns), -1, np.int64)
        rows = order[self.execution[order] >= 0]
        _, first, inverse = np.unique(self.execution[rows], return_index=True, return_inverse=True)
        names = _Names()
        name = np.array([names.number(module) for module, _ in self.modules], np.int64)
        of = self.device[rows[first]] * len(name) + name[self.module[rows[first]]]
        order = np.lexsort((first, of))
        begins = np.flatnonzero(np.diff(of[order], prepend=-1))
        number = np.empty(len(order), np.int64)
        number[order] = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
        run[rows] = number[inverse]
        return run


# SQLite


class _Database:
    """A SQLite file, opened read-only, whose tables (but not views) are read in their stored order."""

    def __init__(self, path: Path, size: int):
        self.path, self._size = path, size
        self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_TEXT)
        self._connection.text_factory = lambda text: text.decode("utf-8", "replace")
        self._connection.execute("PRAGMA trusted_schema = OFF")
        tables = self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' LIMIT 10000")
        self.tables = {name for (name,) in tables}

    def close(self) -> None:
        self._connection.close()

    def columns(self, table: str) -> set[str]:
        """Return the columns of a table; none for a missing table."""
        if table not in self.tables:
            return set()
        return {row[1] for row in self._connection.execute(f'PRAGMA table_info("{table}")')}

    def rows(self, table: str, *columns: str, where: str = "TRUE") -> Iterator[tuple]:
        """Yield the rows of a table for which an SQL condition holds; none if the table is missing.

        Raises:
            TraceError: the table lacks one of the columns, or has more rows than the file has room for.
        """
        if not self._has(table, columns):
            return
        chosen = ", ".join(f'"{column}"' for column in columns)
        for i, row in enumerate(self._connection.execute(f'SELECT {chosen} FROM "{table}" WHERE {where}')):
            self._check(table, i + 1)
            yield row

    def numbers(self, table: str, *columns: str) -> list[np.ndarray]:
        """Return the columns as whole numbers, [rows] each; -1 where a row has no value.

        Raises:
            TraceError: as for `rows`.
        """
        if not self._has(table, columns):
            return concatenated([], len(columns))
        # SQLite joins a column's cells of some rows into one text, since Python takes three times as long to make an
        # object of every cell.
        texts = ", ".join(f'group_concat(CAST(IFNULL("{column}", -1) AS INTEGER))' for column in columns)
        read, rows, last = self._connection.execute, 0, -(2**63)
        count = read(f'SELECT count(*) FROM "{table}"').fetchone()[0]
        self._check(table, count)
        found = tuple(np.empty(count, np.int64) for _ in columns)
        while rows < count:
            first = read(f'SELECT min(rowid) FROM "{table}" WHERE rowid > {last}').fetchone()[0]
            if first is None or first <= last:
                raise sqlite3.DatabaseError(f"the rows of {table} are not in the order of their ids")
            last = first + CHUNK - 1
            cells = read(f'SELECT {texts} FROM "{table}" WHERE rowid BETWEEN {first} AND {last}').fetchone()
            if cells[0] is None or rows + (more := cells[0].count(",") + 1) > count:
                raise sqlite3.DatabaseError(f"the rows of {table} are not in the order of their ids")
            for column, text in zip(found, cells):
                column[rows : rows + more] = np.fromstring(text, np.int64, sep=",")
            rows += more
        return concatenated([found], len(columns))

    def _has(self, table: str, columns: Sequence[str]) -> bool:
        """Return whether the file has a table.

        Raises:
            TraceError: the table lacks one of the columns.
        """
        if table not in self.tables:
            return False
        if missing := {*columns} - self.columns(table):
            message = f"table {table} of this SQLite file has no column {min(missing)}: it has another schema."
            raise TraceError(message, at=str(self.path), hint=f"a recent nsys, and {_EXPORT}")
        return True

    def _check(self, table: str, count: int) -> None:
        if count > self._size // (_TEXT_BYTES if table == "StringIds" else _EVENT_BYTES):
            message = f"table {table} has more rows than this file has room for: it is damaged."
            raise TraceError(message, at=str(self.path), hint=_EXPORT)


def _read_sqlite(path: Path, size: int) -> _Events:
    with closing(_Database(path, size)) as database:
        if not database.tables & {_KERNEL, _GRAPH}:
            listed = ", ".join(sorted(database.tables)[:6]) or "none"
            message = f"this SQLite file has no kernels of nsys (no table {_KERNEL}); tables: {listed}."
            raise TraceError(message, at=str(path), hint=f"nsys profile --trace cuda,nvtx, then {_EXPORT}")
        strings, names = dict(database.rows("StringIds", "id", "value")), _Names()
        tables = [tuple(_table(database, table, strings, names)) for table in (_KERNEL, _COPY, _FILL, _GRAPH)]
        start, end, local, process, correlation, name, node, copy = concatenated(tables, 8)
        thread, called = _launches(database, process, correlation)
        ops, modules = _Names(), _Names()
        thunks, around = _ranges(database, strings, ops, modules)
        threads = database.rows("ThreadNames", "nameId", "globalTid")
        launchers = _launchers((strings.get(id_), thread) for id_, thread in threads)
        found = Operations(clock_ns=_clock_ns(database), hardware=_hardware(database), messages=_messages(database))
    lost = [int(m[1] or m[2]) for text in found.messages for m in DROPPED.finditer(text)]
    found.dropped = sum(lost) if lost else None
    execution = around.innermost(thread, called)
    module, op = _pick(around.meaning, execution), _pick(thunks.meaning, thunks.innermost(thread, called))
    del thread, called, thunks, around  # These columns take as much memory as the events do.
    number, _ = distinct_rows((process >> _THREAD_BITS,))
    local_number, local_first = distinct_rows((local,))
    device, first = distinct_rows((number * len(local_first) + local_number,))
    del number, local_number
    return _Events(
        start, end, device, name,
        op=op,
        module=module,
        execution=execution,
        launch=correlation,
        node=node,
        copy=copy,
        ordinals=_ordinals(list(zip((process[first] >> _THREAD_BITS).tolist(), local[first].tolist())), launchers),
        names=names.values,
        ops=ops.values,
        modules=modules.values,
        found=found,
    )  # fmt: skip


def _table(database: _Database, table: str, strings: Mapping[int, Any], names: _Names) -> list[np.ndarray]:
    """Return columns of a table: start, end, device, process, correlation, name, node, and whether it is a copy."""
    kind = {_KERNEL: "demangledName", _COPY: "copyKind"}.get(table)
    node = "graphNodeId" if "graphNodeId" in database.columns(table) else "correlationId"
    columns = ("start", "end", "deviceId", "globalPid", "correlationId", kind or "start", node)
    *numbers, kinds, nodes = database.numbers(table, *columns)
    kinds = kinds if kind else np.zeros_like(kinds)
    inverse, first = distinct_rows((kinds,))
    texts = [_operation_name(table, id_, strings) for id_ in kinds[first].tolist()]
    name = np.array([names.number(text) for text in texts], np.int32)[inverse]
    if table == _GRAPH or node != "graphNodeId":
        nodes = np.broadcast_to(np.int64(_WHOLE_GRAPH if table == _GRAPH else -1), len(name))
    elif (nodes == 0).any():
        nodes = np.where(nodes == 0, -1, nodes)
    return [*numbers, name, nodes, np.broadcast_to(table in (_COPY, _FILL), len(name))]


def _operation_name(table: str, id_: int, strings: Mapping[int, Any]) -> str:
    if table == _KERNEL:
        return str(strings.get(id_, ""))
    return _COPY_NAMES.get(id_, "Memcpy") if table == _COPY else "Memset" if table == _FILL else "CUDA graph"


def _launches(database: _Database, process: np.ndarray, correlation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return [n] thread and time of the CUDA call with each operation's correlation id; -1 if there is none."""
    columns = ("start", "globalTid", "correlationId")
    start, thread, ids = database.numbers("CUPTI_ACTIVITY_KIND_RUNTIME", *columns)
    if not len(start):
        return np.full(len(process), -1), np.full(len(process), -1)
    processes = np.unique(process >> _THREAD_BITS)  # Without return_inverse, np.unique need not sort the events.

    def key(process: np.ndarray, id_: np.ndarray) -> np.ndarray:
        return np.searchsorted(processes, process >> _THREAD_BITS) << 32 | id_ & 0xFFFFFFFF

    calls, wanted = key(thread, ids), key(process, correlation)
    order = np.argsort(calls, kind="stable")
    at = order[np.minimum(np.searchsorted(calls[order], wanted), len(order) - 1)]
    met = (calls[at] == wanted) & (thread[at] >> _THREAD_BITS == process >> _THREAD_BITS)
    return np.where(met, thread[at], -1), np.where(met, start[at], -1)


@dataclass
class Ranges:
    """NVTX ranges of one kind; two ranges of a thread are disjoint or nested."""

    start: np.ndarray
    end: np.ndarray
    thread: np.ndarray
    meaning: np.ndarray
    """[n] index of each range's instruction or module."""

    def innermost(self, thread: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Return [m] the innermost range on each thread at each time; -1 where there is none."""
        threads, latest = np.unique(self.thread), int(self.start.max(initial=0)) + 1

        def key(thread: np.ndarray, time: np.ndarray) -> np.ndarray:  # It sorts by thread, then by time.
            return np.searchsorted(threads, thread) << latest.bit_length() | np.clip(time, 0, latest)

        begin = key(self.thread, self.start)
        order = np.argsort(begin, kind="stable").astype(np.int32)
        begin = begin[order]
        closed = np.searchsorted(np.sort(key(self.thread, self.end)), begin, "right")
        # The depth of a range is the number of open ranges on its thread, itself included.
        depth = (np.arange(1, len(begin) + 1) - closed).astype(np.int32)
        del closed
        found, wanted = np.full(len(time), -1, np.int32), key(thread, time)
        for level in np.unique(depth)[:_DEEPEST]:
            same = depth == level
            rows, at = order[same], np.searchsorted(begin[same], wanted, "right") - 1
            row = rows[np.maximum(at, 0)]
            inside = (at >= 0) & (self.thread[row] == thread) & (self.end[row] >= time)
            found[inside] = row[inside]
        return found


def _ranges(database: _Database, strings: Mapping[int, Any], ops: _Names, modules: _Names) -> tuple[Ranges, Ranges]:
    start, end, thread, id_ = database.numbers("NVTX_EVENTS", "start", "end", "globalTid", "textId")
    said = database.rows("NVTX_EVENTS", "text", where='CAST(IFNULL("textId", -1) AS INTEGER) = -1')
    number, first = distinct_rows((id_,))
    registered = [strings.get(i, "") for i in id_[first].tolist()]
    own = _Names()
    others = np.array([own.number(text) for (text,) in said], np.int64)
    if len(others) != np.count_nonzero(id_ == -1):
        raise sqlite3.DatabaseError("rows of NVTX_EVENTS are found in one way and not in another")
    number[id_ == -1] = len(registered) + others
    meanings = [_meaning(str(text), ops, modules) for text in (*registered, *own.values)]
    kind, meaning = np.array(meanings, np.int32).reshape(-1, 2)[number].T
    end = np.where(end < 0, _NEVER, end)

    def ranges_of(wanted: int) -> Ranges:
        rows = (kind == wanted) & (start >= 0) & (start <= _LATEST_NS) & (thread >= 0)
        return Ranges(start[rows], end[rows], thread[rows], meaning[rows])

    return ranges_of(_OF_THUNK), ranges_of(_OF_MODULE)


def _meaning(text: str, ops: _Names, modules: _Names) -> tuple[int, int]:
    if thunk := _THUNK.match(text):
        return _OF_THUNK, ops.number(thunk[1])
    if module := _MODULE.match(text):
        return _OF_MODULE, modules.number((module[1], int(module[2] or -1)))
    if text.startswith(_NCCL):
        return _OF_NCCL, ops.number(text.removeprefix(_NCCL))
    return -1, -1


def _pick(values: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.append(values, np.int32(-1))[np.maximum(at, -1)]


def _launchers(threads: Iterable[tuple[Any, Any]]) -> _Launchers:
    found: _Launchers = defaultdict(dict)
    for name, thread in threads:
        if (launcher := _LAUNCHER.match(str(name))) and isinstance(thread, int):
            found[thread >> _THREAD_BITS][thread] = int(launcher[2]), int(launcher[1])
    return found


def _ordinals(devices: Sequence[tuple[int, int]], launchers: _Launchers) -> list[int]:
    """Return the global id of each (process, local number) device, from the names of XLA's launching threads.

    If the names do not give each device its own id, devices are numbered in order. A process whose launching threads
    name a single device has only that device, whatever its local number is.
    """
    found = []
    for process, local in devices:
        of = dict(launchers.get(process, {}).values())
        found.append(of.get(local, -1) if len(of) != 1 else next(iter(of.values())))
    if -1 in found or len(set(found)) < len(found):
        # If the local numbers are distinct, the processes share one machine, and the local number orders the devices.
        by_gpu = len({local for _, local in devices}) == len(devices)
        rank = {device: i for i, device in enumerate(sorted(devices, key=lambda d: d[1] if by_gpu else d))}
        found = [rank[device] for device in devices]
    return found


def _clock_ns(database: _Database) -> int | None:
    begun = database.numbers("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")[0]
    return int(begun[0]) if len(begun) and begun[0] > 0 else None


def _hardware(database: _Database) -> dict[str, int | float | str]:
    there = [column for column in _OF_GPU if column in database.columns(_GPU)]
    first = next(database.rows(_GPU, *there), ()) if there else ()
    return {_OF_GPU[column]: value for column, value in zip(there, first) if isinstance(value, int | str)}


def _messages(database: _Database) -> list[str]:
    if not {"severity", "text"} <= database.columns("DIAGNOSTIC_EVENT"):
        return []
    rows = database.rows("DIAGNOSTIC_EVENT", "severity", "text")
    return [str(text) for severity, text in rows if isinstance(severity, int) and severity >= _WARNING]


# Parquet


def _read_parquet(path: Path, opened: BinaryIO, size: int) -> _Events:
    """Return one operation per innermost thunk (its first to last GPU work) and per NCCL call outside thunks."""
    read = _Columns(path, opened, size)
    recent = "Text" in read.names  # The recipe has these names since nsys 2024.5.
    texts, text = read.texts("Text" if recent else "Name")
    names = (*(_RECENT if recent else _OLDER), "PID", "TID")
    start, end, id_, above, process, thread = (read.numbers(name) for name in names)
    end = end if recent else start + end
    # A recipe over several reports has a rank for each report.
    rank = read.numbers("Rank") if "Rank" in read.names else np.zeros_like(id_)
    id_, above = id_ | rank << _ID_BITS, np.where(above >= 0, above | rank << _ID_BITS, -1)
    thread = thread | (process | rank << _THREAD_BITS) << _THREAD_BITS
    ops, modules = _Names(), _Names()
    kind, meaning = np.array([_meaning(text, ops, modules) for text in texts], np.int64).reshape(-1, 2)[text].T
    parent = _parents(id_, above)
    thunk, around, nccl = (_nearest(kind == of, parent) for of in (_OF_THUNK, _OF_MODULE, _OF_NCCL))
    holds = np.isin(np.arange(len(kind)), _pick(thunk, parent)[kind == _OF_THUNK])
    alone = (kind == _OF_NCCL) & (thunk < 0) & (_pick(nccl, parent) < 0)
    rows = np.flatnonzero((kind == _OF_THUNK) & ~holds | alone)
    if not (kind == _OF_THUNK).any():
        message = "this Parquet file has no ranges of XLA's thunks."
        raise TraceError(message, at=str(path), hint="nsys-jax, or nsys profile --trace cuda,nvtx around a job of JAX")
    execution = around[rows]
    module = _pick(meaning, execution)
    launchers = _launchers(_thread_names(path))
    devices, device = _devices(thread[rows], module, modules.values, launchers)
    found = Operations(hardware=_sidecar_hardware(path))
    if lost := int((device < 0).sum()):
        found.messages.append(f"{lost} ranges of XLA are on threads without a known GPU, and are left out.")
    return _Events(
        start[rows], end[rows], device, meaning[rows],
        op=np.where(kind[rows] == _OF_THUNK, meaning[rows], -1),
        module=module,
        execution=execution,
        launch=np.full(len(rows), -1),
        node=np.full(len(rows), -1),
        copy=np.zeros(len(rows), bool),
        ordinals=_ordinals(devices, launchers),
        names=ops.values,
        ops=ops.values,
        modules=modules.values,
        found=found,
    )  # fmt: skip


class _Columns:
    """Reads columns of a Parquet file.

    Raises:
        TraceError: pyarrow is missing, or the file is damaged or too large when unpacked.
    """

    def __init__(self, path: Path, opened: BinaryIO, size: int):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            message = "Parquet is read with pyarrow, which is not installed."
            raise TraceError(message, at=str(path), hint=f"pip install 'meshkit[nsys]', or {_EXPORT}") from None
        self.path, self._pyarrow = path, pyarrow
        with self._errors():
            self._file = pyarrow.parquet.ParquetFile(opened)
            about = self._file.metadata
            unpacked = sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))
            self.names = {*self._file.schema_arrow.names}
        if about.num_rows > size or not 0 <= unpacked <= max(LEAST_ROOM_BYTES, MOST_TIMES * size):
            raise TraceError("this Parquet file unpacks to more than any trace needs.", at=str(path))

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (self._pyarrow.ArrowException, OSError, ValueError) as error:
            raise TraceError(f"this Parquet file is damaged: {short(str(error))}", at=str(self.path)) from None

    def _column(self, name: str) -> Any:
        if name not in self.names:
            listed = ", ".join(sorted(self.names)[:6])
            message = (
                f"this Parquet file is not an nvtx_gpu_proj_trace of nsys: it has no column '{name}', but {listed}."
            )
            raise TraceError(message, at=str(self.path), hint="trace.parquet, as nsys-jax writes it")
        return self._file.read([name])[name]

    def numbers(self, name: str) -> np.ndarray:
        """Return [rows] whole numbers; -1 where a row has no value."""
        with self._errors():
            column = self._column(name).fill_null(-1).cast("int64", safe=False)
            return self._whole(column.to_numpy())

    def texts(self, name: str) -> tuple[list[str], np.ndarray]:
        """Return the distinct texts of a column, and [rows] the index of each row's text; a missing text is ""."""
        with self._errors():
            column = self._column(name).cast("string").fill_null("").dictionary_encode().combine_chunks()
            return column.dictionary.to_pylist(), self._whole(column.indices.to_numpy())

    def _whole(self, column: np.ndarray) -> np.ndarray:
        if len(column) != self._file.metadata.num_rows:
            raise ValueError("its columns have different lengths")
        return column


def _parents(id_: np.ndarray, above: np.ndarray) -> np.ndarray:
    """Return [n] the row of each range's parent, the range whose id is in `above`; -1 for none."""
    order = np.argsort(id_, kind="stable")
    at = order[np.minimum(np.searchsorted(id_[order], above), len(order) - 1)] if len(order) else order
    return np.where((id_[at] == above) & (above >= 0), at, -1)


def _nearest(wanted: np.ndarray, parent: np.ndarray) -> np.ndarray:
    """Return [n] the row of the innermost wanted range among each range and its ancestors; -1 for none."""
    at = np.arange(len(parent))
    for _ in range(_DEEPEST):
        beside = (at >= 0) & ~wanted[at]
        if not beside.any():
            break
        at = np.where(beside, parent[at], at)
    return np.where((at >= 0) & wanted[at], at, -1)


def _devices(
    thread: np.ndarray, module: np.ndarray, modules: Sequence[tuple[str, int]], launchers: _Launchers
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """Return (process, local number) of each device, and [n] the device of each operation, from its launching thread.

    A process without names of launching threads gets one device per thread that runs the same program as another
    thread, in the order of thread ids. Operations of any other thread belong to the process's first device. But if the
    process has several devices, the device of such an operation outside modules is unknown (-1).
    """
    threads, inverse = np.unique(thread, return_inverse=True)
    launching = {t: local for of in launchers.values() for t, (local, _) in of.items()}
    together: dict[tuple[int, int], set[int]] = defaultdict(set)  # (process, program) -> threads that run it.
    for t, m in {*zip(inverse.tolist(), module.tolist())}:
        if m >= 0 and modules[m][1] >= 0:  # Modules without a program id are XLA's, made to compare kernels.
            together[int(threads[t]) >> _THREAD_BITS, m].add(int(threads[t]))
    several: dict[int, set[int]] = defaultdict(set)
    for (process, _), of in together.items():
        if len(of) > 1 and process not in launchers:
            several[process] |= of
    for of in several.values():
        launching |= {t: i for i, t in enumerate(sorted(of))}
    locals_: dict[int, set[int]] = defaultdict(set)
    for t, local in launching.items():
        locals_[t >> _THREAD_BITS].add(local)
    devices, sure, device = _Names(), [], []
    for t in threads.tolist():
        there = locals_[t >> _THREAD_BITS]
        device.append(devices.number((t >> _THREAD_BITS, launching.get(t, min(there, default=0)))))
        sure.append(t in launching or len(there) < 2)
    known = np.array(sure, bool)[inverse] | (module >= 0)
    return devices.values, np.where(known, np.array(device, np.int64)[inverse], -1)


@contextmanager
def _sidecar(path: Path, name: str) -> Iterator[_Columns | None]:
    """Open a file that nsys-jax writes beside a trace; yield None if it is missing."""
    found = home(path) / name
    if found.is_dir():  # nsys-jax-combine writes a folder with a file per process.
        found /= path.name
    if not is_nsys(found):
        yield None
        return
    with open_regular(found) as opened:
        yield _Columns(found, opened, opened.seek(0, 2))


def _thread_names(path: Path) -> Iterator[tuple[str, int]]:
    with _sidecar(path, "thread-metadata.parquet") as read:
        if read is not None:
            texts, text = read.texts("Name")
            threads = read.numbers("PID") << _THREAD_BITS | read.numbers("TID")
            yield from ((texts[i], thread) for i, thread in zip(text.tolist(), threads.tolist()))


def _sidecar_hardware(path: Path) -> dict[str, int | float | str]:
    found: dict[str, int | float | str] = {}
    with _sidecar(path, "device-metadata.parquet") as read:
        for column, word in _OF_GPU.items():
            name = str((_GPU, column))  # pandas writes the name of a two-level column as this text.
            if read is not None and name in read.names:
                texts, text = read.texts(name)
                for value in [texts[i] for i in text[:1].tolist()]:
                    found[word] = int(value) if value.isdecimal() else value
    return found
