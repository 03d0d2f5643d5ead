"""Make rows of communication from the files of NCCL Inspector, which times each collective of a job without a trace.

HOST-pidN.log of every process (JSON lines, formats v4.0 to v4.3; NVIDIA/nccl plugins/profiler/inspector)
  -> records by communicator, collective and sequence number -> instances: one collective on all its ranks
  -> counts, bytes, seconds, and the part of the seconds in which ranks waited for the last rank

Inspector records completed operations above a size (8 KiB by default) in a ring buffer, which can overflow. If it
reports dropped operations, counts are lower bounds.
"""

from __future__ import annotations

import itertools
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from meshkit.config.files import open_regular
from meshkit.config.mesh import Placement
from meshkit.errors import TraceError
from meshkit.hlo.schedule import GroupShape, group_shape
from meshkit.trace.reader import Note
from meshkit.trace.skew import Skew, stragglers
from meshkit.units import format_percent

FORMATS = ("v4.0", "v4.1", "v4.2", "v4.3")
_SUFFIXES = (".log", ".json", ".jsonl")
_BODIES = ("coll_perf", "p2p_perf", "proxy_trace", "dump_stats")
_LONGEST_LINE = 2**20
_LARGEST, _MOST_RANKS = 2**53, 2**22  # The largest number that a float holds exactly; the most ranks of a communicator.
# NCCL's name -> HLO's name, and whether the payload is the message size times the number of ranks.
_KINDS = {
    "AllReduce": ("all-reduce", False),
    "AllGather": ("all-gather", True),
    "ReduceScatter": ("reduce-scatter", True),
    "AlltoAll": ("all-to-all", True),
    "Broadcast": ("collective-broadcast", False),
    "Reduce": ("reduce", False),
    "Send": ("send", False),
    "Recv": ("recv", False),
}
_MOST_UNSEEN = 0.05  # With a larger share of a row's seconds in instances that lack a rank, waiting is unknown.


@dataclass(frozen=True)
class Communicator:
    """The size of an NCCL communicator."""

    ranks: int
    nodes: int


@dataclass
class _Recording:
    """The records of all files; its dictionaries number their keys in the order in which they were first read."""

    hosts: list[str] = field(default_factory=list)
    communicators: dict[tuple[str, int, int], int] = field(default_factory=dict)
    """Keys are (id, ranks, nodes)."""
    places: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """Keys are (file, communicator, rank)."""
    kinds: dict[str, int] = field(default_factory=dict)
    table: array = field(default_factory=lambda: array("d"))
    """Five numbers per operation on one rank: place, kind, NCCL's sequence number, message bytes, microseconds."""
    dropped: int = 0
    unread: int = 0
    """Number of lines that are not a record, or belong to no communicator."""
    by_cpu: int = 0
    """Number of operations timed by the host's clock."""

    @property
    def operations(self) -> int:
        return len(self.table) // 5


@dataclass(frozen=True)
class InspectedRow:
    """Collectives of one kind in communicators of one size; all numbers are sums over all files."""

    collective: str
    communicator: Communicator
    communicators: int
    count: int
    payload_bytes: float
    busy_s: float
    wait_s: float | None
    """Seconds of waiting in `busy_s`; None if too many instances lack a rank."""


@dataclass(frozen=True)
class Inspected:
    """A job's communication, and notes for its reader."""

    hosts: tuple[str, ...]
    devices: int
    operations: int
    dropped: int
    rows: tuple[InspectedRow, ...]
    skew: Skew
    """Skew between files. Without stragglers if a process has several GPUs, since the files do not tell them apart."""
    notes: tuple[Note, ...]


def find_inspector_files(path: Path) -> list[Path]:
    """Return the files of Inspector: the given file, or all in the given folder; empty if there are none."""
    candidates = [path] if path.is_file() else sorted(path.iterdir(), key=_numbered) if path.is_dir() else []
    return [file for file in candidates if file.suffix in _SUFFIXES and file.is_file() and _is_record(file)]


def inspect(files: Sequence[Path], placement: Placement | None = None) -> Inspected:
    """Read Inspector's files of one job.

    Args:
        placement: placement of the job's mesh, which limits the number of GPUs; None if unknown.

    Raises:
        TraceError: a file has another version, or no file has an operation.
    """
    recording = _Recording()
    for file in files:
        _read(file, recording)
    if not recording.operations:
        raise TraceError(
            "these files of NCCL Inspector have no collective.",
            at=str(files[0].parent),
            hint="a run to its end, or NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS=1000000 for a dump each second",
        )
    devices, alone = _devices(recording, placement)
    rows, skew, whole = _rows(recording, alone)
    return Inspected(
        hosts=tuple(recording.hosts),
        devices=devices,
        operations=recording.operations,
        dropped=recording.dropped,
        rows=tuple(rows),
        skew=skew,
        notes=tuple(_notes(recording, devices, whole, declared=placement is not None)),
    )


def shape_on(placement: Placement, communicator: Communicator) -> GroupShape | None:
    """Return the shape of the groups along the mesh axes that fit a communicator; None unless one choice of axes fits.

    Args:
        placement: placement of the job's mesh. Axes of size 1 are ignored.
        communicator: axes fit if their groups have `ranks` members, and the group that spans most hosts, or most NVLink
            domains, spans `nodes` of them.
    """
    sizes = dict(zip(placement.axis_names, placement.shape))
    real = [name for name, size in sizes.items() if size > 1]
    found = []
    for count in range(1, len(real) + 1):
        for names in itertools.combinations(real, count):
            groups = _groups_along(placement, names)
            nodes = {int(np.max(_distinct(where[groups]))) for where in (placement.hosts, placement.domains)}
            if groups.shape[1] == communicator.ranks and communicator.nodes in nodes:
                found.append(group_shape(groups, placement))
    return found[0] if len(found) == 1 else None


def _groups_along(placement: Placement, names: Sequence[str]) -> np.ndarray:
    along = [placement.axis_names.index(name) for name in names]
    ids = np.arange(placement.num_partitions).reshape(placement.shape)
    return np.moveaxis(ids, along, range(-len(along), 0)).reshape(-1, math.prod(placement.shape[i] for i in along))


def _numbered(file: Path) -> list[tuple[int, str]]:
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d{1,9})", file.name)]


def _distinct(rows: np.ndarray) -> np.ndarray:
    return 1 + (np.diff(np.sort(rows, axis=1), axis=1) > 0).sum(axis=1)


def _is_record(file: Path) -> bool:
    try:
        with open_regular(file) as opened:
            first = from_json(opened.readline(_LONGEST_LINE))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and any(body in first for body in _BODIES)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line of a file; an empty one for a line that has none."""
    with open_regular(file) as opened:
        while line := opened.readline(_LONGEST_LINE):
            if line.isspace():
                continue
            try:
                value = from_json(line)
            except ValueError:
                value = None
            yield value if isinstance(value, dict) else {}


def _read(file: Path, recording: _Recording) -> None:
    """Add the records of one file; every line has header and metadata, or from v4.3 on, one line before each dump."""
    index, host, place, checked = len(recording.hosts), "", None, False
    kinds, places = recording.kinds, recording.places
    for record in _lines(file):
        metadata = record.get("metadata")
        if isinstance(metadata, dict):
            _check_version(metadata, file)
            checked = True
            host = host or str(metadata.get("hostname", ""))[:256]
        if "header" in record:
            place = _place(record["header"], index, recording)
        if isinstance(stats := record.get("dump_stats"), dict):
            for key in ("coll_dropped_since_last_dump", "p2p_dropped_since_last_dump"):
                recording.dropped += int(_number(stats.get(key)) or 0)
            continue
        if "proxy_trace" in record:
            continue
        operation = _operation(record) if checked and place is not None else None
        if operation is None or place is None:
            recording.unread += 1
            continue
        name, number, size, time_us, by_cpu = operation
        kind = kinds.setdefault(name, len(kinds))
        recording.table.extend((places.setdefault(place, len(places)), kind, number, size, time_us))
        recording.by_cpu += by_cpu
    recording.hosts.append(host or file.stem)


def _check_version(metadata: Mapping[str, Any], file: Path) -> None:
    version = metadata.get("inspector_output_format_version")
    if version not in FORMATS:
        raise TraceError(
            f"this file of NCCL Inspector has format {str(version)[:20]!r}, but meshkit reads {FORMATS[0]} to "
            f"{FORMATS[-1]}.",
            at=str(file),
            hint="an Inspector of NCCL 2.28 to 2.30, or a newer meshkit",
        )


def _place(header: Any, file: int, recording: _Recording) -> tuple[int, int, int] | None:
    """Return the file, communicator and rank of a header; None if the header is not valid."""
    if not isinstance(header, dict) or not isinstance(header.get("id"), str):
        return None
    rank, ranks, nodes = (_number(header.get(key), _MOST_RANKS) for key in ("rank", "n_ranks", "nnodes"))
    if rank is None or ranks is None or nodes is None or not rank < ranks or not 1 <= nodes <= ranks:
        return None
    known = recording.communicators
    return file, known.setdefault((header["id"], int(ranks), int(nodes)), len(known)), int(rank)


def _operation(record: Mapping[str, Any]) -> tuple[str, int, float, float, bool] | None:
    """Return an operation's name, number, bytes, microseconds, and whether the host timed it; None if not valid."""
    body, prefix = record.get("coll_perf"), "coll"
    if body is None:
        body, prefix = record.get("p2p_perf"), "p2p"
    if not isinstance(body, dict) or not isinstance(name := body.get(prefix), str):
        return None
    number, size = _number(body.get(f"{prefix}_sn")), _number(body.get(f"{prefix}_msg_size_bytes"))
    time_us = _number(body.get(f"{prefix}_exec_time_us"))
    if number is None or size is None or time_us is None:
        return None
    return name[:64], int(number), size, time_us, body.get(f"{prefix}_timing_source", "kernel_gpu") != "kernel_gpu"


def _number(value: Any, most: int = _LARGEST) -> int | float | None:
    """Return a number from 0 to `most`; None for anything else."""
    return value if type(value) in (int, float) and 0 <= value <= most else None


def _devices(recording: _Recording, placement: Placement | None) -> tuple[int, bool]:
    """Return the number of GPUs in the files, and whether each file has only one.

    A process has at least as many GPUs as it has ranks in any one communicator. If its GPUs are in different
    communicators of one size, the number of its (communicator, rank) pairs of that size is a multiple of its GPUs.
    """
    shapes = [shape for _, *shape in recording.communicators]
    inside = Counter((file, c) for file, c, _ in recording.places)
    shaped = Counter((file, *shapes[c]) for file, c, _ in recording.places)
    total, alone = 0, True
    for file in {file for file, *_ in recording.places}:
        at_least = max(n for (of, _), n in inside.items() if of == file)
        gpus = max(at_least, min(n for (of, *_), n in shaped.items() if of == file))
        total, alone = total + gpus, alone and gpus == 1
    if placement is not None:
        total = min(total, placement.num_partitions)
    return total, alone


def _rows(recording: _Recording, alone: bool) -> tuple[list[InspectedRow], Skew, float]:
    """Return the rows, longest first; the skew; and the share of the seconds in instances with all their ranks."""
    table = np.frombuffer(recording.table).reshape(-1, 5)
    place, kind, number = table[:, :3].astype(np.int64).T
    size, busy_s = table[:, 3], table[:, 4] * 1e-6
    file, communicator, rank = np.array(list(recording.places))[place].T
    ranks = np.array([ranks for _, ranks, _ in recording.communicators])
    names = list(recording.kinds)
    peer = np.array([name in ("Send", "Recv") for name in names])
    # The records of an instance have one communicator, kind and sequence number. Its last rank takes the least time.
    order = np.lexsort((busy_s, number, kind, communicator))
    new = np.ones(len(order), bool)
    new[1:] = np.any([np.diff(a[order]) != 0 for a in (communicator, kind, number)], axis=0)
    instance = np.empty(len(order), np.int64)
    instance[order] = np.cumsum(new) - 1
    first = order[new]
    members = np.bincount(instance)
    distinct = np.bincount(np.unique(instance * ranks.max() + rank) // ranks.max())
    whole = (members == ranks[communicator[first]]) & (distinct == members) & ~peer[kind[first]]
    seen = whole[instance]
    waited_s = np.where(seen, busy_s - busy_s[first][instance], 0.0)
    shapes = [Communicator(*shape) for _, *shape in recording.communicators]
    unique = list(dict.fromkeys(shapes))
    shape = np.array([unique.index(c) for c in shapes])[communicator]
    rows = []
    for s, k in np.unique(np.stack((shape, kind)), axis=1).T.tolist():
        mine = (shape == s) & (kind == k)
        name, each = _KINDS.get(names[k], (names[k].lower(), False))
        total_s, seen_s = float(busy_s[mine].sum()), float(busy_s[mine & seen].sum())
        told = total_s > 0 and seen_s >= (1 - _MOST_UNSEEN) * total_s
        payload = float(size[mine].sum()) * (unique[s].ranks if each else 1)
        communicators = int(np.count_nonzero(np.bincount(communicator[mine])))
        wait_s = float(waited_s[mine].sum()) if told else None
        rows.append(InspectedRow(name, unique[s], communicators, int(mine.sum()), payload, total_s, wait_s))
    rows.sort(key=lambda row: -row.busy_s)
    numbered = (np.cumsum(whole) - 1)[instance]
    late = stragglers(numbered[seen], file[seen], file[seen], waited_s[seen], busy_s[seen]) if alone else ()
    skew = Skew(method="clock_free", instances=int(whole.sum()), stragglers=late)
    collective_s = float(busy_s[~peer[kind]].sum())
    return rows, skew, float(busy_s[seen].sum()) / collective_s if collective_s else 1.0


def _notes(recording: _Recording, devices: int, whole: float, *, declared: bool) -> Iterator[Note]:
    operations = recording.operations
    yield Note(
        "inspector",
        "NCCL Inspector times only the kernels of communication. Compute is unknown, and so is its overlap with "
        "communication.",
    )
    if recording.dropped:
        share = recording.dropped / (operations + recording.dropped)
        yield Note(
            "dropped_events",
            f"Inspector dropped {recording.dropped:,} operations, {format_percent(share)} of all: counts, bytes and "
            "seconds are lower bounds. NCCL_INSPECTOR_DUMP_COLL_RING_SIZE=8192 or a shorter dump interval keeps them.",
        )
    if recording.unread:
        yield Note("unread_lines", f"{recording.unread:,} lines are not complete records and were left out.")
    if recording.by_cpu:
        share = recording.by_cpu / operations
        yield Note(
            "host_clock", f"{format_percent(share)} of the times come from the host's clock, and include its delays."
        )
    if whole < 1 - _MOST_UNSEEN:
        yield Note(
            "waiting_unknown",
            f"{format_percent(whole)} of the collectives' seconds are in collectives that all their ranks recorded; in "
            "the others, waiting cannot be told from transfer.",
        )
    if not declared:
        yield Note(
            "no_mesh",
            f"No mesh is known: rows are by the size of their communicators, and the files have {devices} GPUs; "
            "--experiment names axes and links.",
        )
