"""NCCL Inspector's files: what NCCL measured of each collective while a job ran -> communication rows, without a trace.

HOST-pidN.log of every process (JSON lines, formats v4.0 to v4.3; NVIDIA/nccl plugins/profiler/inspector)
  -> records by communicator, collective and sequence number -> instances: one collective on all its ranks
  -> counts, bytes, seconds, and what of them was waiting for the last rank

Inspector keeps completed operations above a size (8 KiB by default) in a ring that overflows: counts are lower bounds
where it says that it dropped some.
"""

from __future__ import annotations

import itertools
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshkit.config.bounded import open_regular
from meshkit.config.mesh import Placement
from meshkit.errors import TraceError
from meshkit.trace.checks import Note
from meshkit.units import format_percent

FORMATS = ("v4.0", "v4.1", "v4.2", "v4.3")
_SUFFIXES = (".log", ".json", ".jsonl")
_BODIES = ("coll_perf", "p2p_perf", "proxy_trace", "dump_stats")
_LONGEST_LINE = 2**20
_LARGEST = 2**62  # of a number in a record: sums of them are floats
# NCCL's name -> HLO's; of what the payload is counted in: a rank's message, or the message of each rank
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
_MOST_UNSEEN = 0.05  # of a row's seconds that may be in instances of which a rank is missing, for waiting to be told


@dataclass(frozen=True)
class Communicator:
    """A group of ranks, as NCCL has it."""

    ranks: int
    nodes: int


@dataclass
class Recording:
    """The records of all files; column i of each array is one operation on one rank."""

    hosts: list[str] = field(default_factory=list)  # of each file
    communicators: list[Communicator] = field(default_factory=list)
    communicator: array = field(default_factory=lambda: array("q"))
    file: array = field(default_factory=lambda: array("q"))
    rank: array = field(default_factory=lambda: array("q"))
    kind: array = field(default_factory=lambda: array("q"))  # index into `kinds`
    number: array = field(default_factory=lambda: array("q"))  # NCCL's sequence number
    message_bytes: array = field(default_factory=lambda: array("d"))
    time_us: array = field(default_factory=lambda: array("d"))
    kinds: list[str] = field(default_factory=list)  # NCCL's names
    dropped: int = 0  # operations that Inspector lost
    unread: int = 0  # lines that are no record, or belong to no communicator
    by_cpu: int = 0  # operations whose time is of the host's clock


@dataclass(frozen=True)
class InspectedRow:
    """Collectives of one kind in communicators of one shape; sums over all files."""

    collective: str
    communicator: Communicator
    communicators: int
    count: int
    payload_bytes: float
    busy_s: float
    wait_s: float | None  # None where too many instances lack a rank


@dataclass(frozen=True)
class Late:
    """What a process waited, and what the others waited for it, in seconds over the whole recording."""

    file: int
    caused_wait_s: float
    waited_s: float
    last_share: float


@dataclass(frozen=True)
class Inspected:
    """A job's communication, and what a reader of it must know."""

    hosts: tuple[str, ...]
    devices: int
    operations: int
    instances: int  # collectives that all their ranks recorded
    dropped: int
    rows: tuple[InspectedRow, ...]
    late: tuple[Late, ...]  # the worst first; empty where a process has several GPUs, which the files do not tell apart
    notes: tuple[Note, ...]


def find_inspector_files(path: Path) -> list[Path]:
    """The files that Inspector wrote: that one, or those in a folder; empty where there is none."""
    candidates = [path] if path.is_file() else sorted(path.iterdir(), key=_numbered) if path.is_dir() else []
    return [file for file in candidates if file.suffix in _SUFFIXES and file.is_file() and _is_record(file)]


def inspect(files: Sequence[Path], placement: Placement | None = None) -> Inspected:
    """Reads Inspector's files of one job.

    Args:
        files: of all its processes, from `find_inspector_files`.
        placement: of its mesh, which says how many GPUs a host has.

    Raises:
        TraceError: a file is of another version, or no operation is in any.
    """
    recording = Recording()
    known: dict[tuple[str, int, int], int] = {}
    for file in files:
        _read(file, recording, known)
    if not recording.time_us:
        raise TraceError(
            "no collective is in these files of NCCL Inspector.",
            at=str(files[0].parent),
            hint="a run to its end, or NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS=1000000 for a dump each second",
        )
    devices, alone = _devices(recording, placement)
    rows, late, instances, whole = _rows(recording, alone)
    return Inspected(
        hosts=tuple(recording.hosts),
        devices=devices,
        operations=len(recording.time_us),
        instances=instances,
        dropped=recording.dropped,
        rows=tuple(rows),
        late=tuple(late),
        notes=tuple(_notes(recording, devices, whole, declared=placement is not None)),
    )


def axes_of(communicator: Communicator, placement: Placement) -> tuple[str, ...] | None:
    """The mesh axes along which groups have the communicator's ranks and nodes; None where none or several do."""
    sizes = dict(zip(placement.axis_names, placement.shape))
    real = [name for name, size in sizes.items() if size > 1]
    found = []
    for count in range(1, len(real) + 1):
        for names in itertools.combinations(real, count):
            groups = groups_along(placement, names)
            nodes = {int(np.max(_distinct(where[groups]))) for where in (placement.hosts, placement.domains)}
            if groups.shape[1] == communicator.ranks and communicator.nodes in nodes:
                found.append(names)
    return found[0] if len(found) == 1 else None


def groups_along(placement: Placement, names: Sequence[str]) -> np.ndarray:
    """[groups, members] the partitions of each group along some axes."""
    along = [placement.axis_names.index(name) for name in names]
    ids = np.arange(placement.num_partitions).reshape(placement.shape)
    moved = np.moveaxis(ids, along, range(ids.ndim - len(along), ids.ndim))
    return moved.reshape(-1, int(np.prod([placement.shape[i] for i in along])))


def _numbered(file: Path) -> list[tuple[int, str]]:
    """Sorts pid99 before pid100."""
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d{1,9})", file.name)]


def _distinct(rows: np.ndarray) -> np.ndarray:
    """[rows] how many different values each row has."""
    return 1 + (np.diff(np.sort(rows, axis=1), axis=1) > 0).sum(axis=1)


def _is_record(file: Path) -> bool:
    """Whether a file's first line is one of Inspector's."""
    try:
        with open_regular(file) as opened:
            first = json.loads(opened.readline(_LONGEST_LINE))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and any(body in first for body in _BODIES)


def _lines(file: Path) -> Iterator[dict[str, Any] | None]:
    """The objects of a file, line by line; None for a line that is none."""
    with open_regular(file) as opened:
        while line := opened.readline(_LONGEST_LINE):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            yield value if isinstance(value, dict) else None


def _read(file: Path, recording: Recording, known: dict[tuple[str, int, int], int]) -> None:
    """Adds the records of one file.

    From v4.3 on the header and the metadata stand once, before the operations of a dump; earlier in each line.
    """
    index, host, header, checked = len(recording.hosts), "", None, False
    kinds = {name: i for i, name in enumerate(recording.kinds)}
    for record in _lines(file):
        record = record or {}
        metadata = record.get("metadata")
        if isinstance(metadata, dict):
            _check_version(metadata, file)
            checked = True
            host = host or str(metadata.get("hostname", ""))[:256]
        if "header" in record:
            header = record["header"]
        if isinstance(stats := record.get("dump_stats"), dict):
            for key in ("coll_dropped_since_last_dump", "p2p_dropped_since_last_dump"):
                recording.dropped += int(_number(stats.get(key)) or 0)
            continue
        if "proxy_trace" in record:
            continue
        operation = _operation(record, header) if checked else None
        if operation is None:
            recording.unread += 1
            continue
        key, rank, name, number, size, time_us, by_cpu = operation
        if key not in known:
            known[key] = len(recording.communicators)
            recording.communicators.append(Communicator(key[1], key[2]))
        if name not in kinds:
            kinds[name] = len(recording.kinds)
            recording.kinds.append(name)
        recording.communicator.append(known[key])
        recording.file.append(index)
        recording.rank.append(rank)
        recording.kind.append(kinds[name])
        recording.number.append(number)
        recording.message_bytes.append(size)
        recording.time_us.append(time_us)
        recording.by_cpu += by_cpu
    recording.hosts.append(host or file.stem)


def _check_version(metadata: Mapping[str, Any], file: Path) -> None:
    """Refuses a format that nobody has looked at.

    Raises:
        TraceError: naming it.
    """
    version = metadata.get("inspector_output_format_version")
    if version not in FORMATS:
        raise TraceError(
            f"this file of NCCL Inspector has format {str(version)[:20]!r}; {FORMATS[0]} to {FORMATS[-1]} are read.",
            at=str(file),
            hint="an Inspector of NCCL 2.28 to 2.30, or a newer meshkit",
        )


def _operation(record: Mapping[str, Any], header: Any) -> tuple | None:
    """Communicator, rank, NCCL's name, number, bytes and microseconds of an operation; None where one is missing."""
    body, prefix = record.get("coll_perf"), "coll"
    if body is None:
        body, prefix = record.get("p2p_perf"), "p2p"
    if not isinstance(body, dict) or not isinstance(header, dict):
        return None
    keys = (f"{prefix}_sn", f"{prefix}_msg_size_bytes", f"{prefix}_exec_time_us")
    numbers = [_number(body.get(key)) for key in keys]
    where = [_number(header.get(key)) for key in ("rank", "n_ranks", "nnodes")]
    name, id_ = body.get(prefix), header.get("id")
    if None in numbers or None in where or not isinstance(name, str) or not isinstance(id_, str):
        return None
    rank, ranks, nodes = map(int, where)  # type: ignore[arg-type]
    if not 0 <= rank < ranks or not 1 <= nodes <= ranks:
        return None
    by_cpu = str(body.get(f"{prefix}_timing_source", "kernel_gpu")) != "kernel_gpu"
    return (id_, ranks, nodes), rank, name[:64], int(numbers[0] or 0), numbers[1], numbers[2], by_cpu


def _number(value: Any) -> int | float | None:
    """A number that is not negative and that sums can hold; None for anything else."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _LARGEST
    return value if good else None


def _devices(recording: Recording, placement: Placement | None) -> tuple[int, bool]:
    """How many GPUs the files are of, and whether each is of one.

    A process has at least as many GPUs as ranks in one communicator. Where its GPUs are in different communicators of
    one shape, there are as many pairs of communicator and rank as GPUs, or a multiple of that.
    """
    pairs = set(zip(recording.file, recording.communicator, recording.rank))
    inside = Counter((file, c) for file, c, _ in pairs)
    shaped = Counter((file, recording.communicators[c]) for file, c, _ in pairs)
    total, alone = 0, True
    for file in set(recording.file):
        at_least = max(n for (of, _), n in inside.items() if of == file)
        gpus = max(at_least, min(n for (of, _), n in shaped.items() if of == file))
        total, alone = total + gpus, alone and gpus == 1
    if placement is not None:
        total = min(total, placement.num_partitions)
    return total, alone


def _rows(recording: Recording, alone: bool) -> tuple[list[InspectedRow], list[Late], int, float]:
    """Rows, the longest first; who is late; the instances that have all their ranks, and their share of seconds."""
    communicator, file, rank, kind, number = (
        np.frombuffer(column, np.int64)
        for column in (recording.communicator, recording.file, recording.rank, recording.kind, recording.number)
    )
    size, busy_s = np.frombuffer(recording.message_bytes), np.frombuffer(recording.time_us) * 1e-6
    ranks = np.array([c.ranks for c in recording.communicators])
    peer = np.array([name in ("Send", "Recv") for name in recording.kinds])
    # an instance: the records of one number in one communicator; the last rank to arrive takes the least time
    order = np.lexsort((busy_s, number, kind, communicator))
    new = np.ones(len(order), bool)
    new[1:] = np.any([np.diff(a[order]) != 0 for a in (communicator, kind, number)], axis=0)
    instance = np.cumsum(new) - 1
    first = order[new]
    members = np.bincount(instance)
    widest = int(ranks.max())
    distinct = np.bincount(np.unique(instance * widest + rank[order]) // widest)
    whole = (members == ranks[communicator[first]]) & (distinct == members) & ~peer[kind[first]]
    waited = np.zeros(len(order))
    waited[order] = np.where(whole[instance], busy_s[order] - busy_s[first][instance], 0.0)
    seen = np.zeros(len(order), bool)
    seen[order] = whole[instance]
    shapes = list(dict.fromkeys(recording.communicators))
    shape = np.array([shapes.index(c) for c in recording.communicators])[communicator]
    rows = []
    for s, k in sorted(set(zip(shape.tolist(), kind.tolist()))):
        mine = (shape == s) & (kind == k)
        name, each = _KINDS.get(recording.kinds[k], (recording.kinds[k].lower(), False))
        total_s, seen_s = float(busy_s[mine].sum()), float(busy_s[mine & seen].sum())
        told = total_s > 0 and seen_s >= (1 - _MOST_UNSEEN) * total_s
        payload = float(size[mine].sum()) * (shapes[s].ranks if each else 1)
        communicators = len(np.unique(communicator[mine]))
        wait_s = float(waited[mine].sum()) if told else None
        rows.append(InspectedRow(name, shapes[s], communicators, int(mine.sum()), payload, total_s, wait_s))
    rows.sort(key=lambda row: -row.busy_s)
    late = _late(file, waited, order, whole, first, instance) if alone else []
    collective_s = float(busy_s[~peer[kind]].sum())
    return rows, late, int(whole.sum()), float(busy_s[seen].sum()) / collective_s if collective_s else 1.0


def _late(file, waited, order, whole, first, instance) -> list[Late]:
    """The processes that others waited for, the worst first."""
    if not whole.any():
        return []
    waits = np.bincount(instance, weights=waited[order])  # of an instance's other members for its last
    caused = np.bincount(file[first], weights=waits, minlength=file.max() + 1)
    own = np.bincount(file, weights=waited, minlength=len(caused))
    last = np.bincount(file[first[waits > 0]], minlength=len(caused))
    took_part = np.bincount(file[order][whole[instance]], minlength=len(caused))
    return [
        Late(i, float(caused[i]), float(own[i]), float(last[i] / took_part[i]))
        for i in np.argsort(-caused).tolist()
        if took_part[i]
    ]


def _notes(recording: Recording, devices: int, whole: float, *, declared: bool) -> Iterator[Note]:
    """What was lost, assumed, and cannot be known."""
    operations = len(recording.time_us)
    yield Note(
        "inspector",
        "From NCCL Inspector: communication alone, as long as its kernels ran. Compute is unknown, and so is what of "
        "communication it covers.",
    )
    if recording.dropped:
        share = recording.dropped / (operations + recording.dropped)
        yield Note(
            "dropped_events",
            f"Inspector dropped {recording.dropped:,} operations, {format_percent(share)} of all: counts, bytes and "
            "seconds are lower bounds. NCCL_INSPECTOR_DUMP_COLL_RING_SIZE=8192 or a shorter dump interval keeps them.",
        )
    if recording.unread:
        yield Note("unread_lines", f"{recording.unread:,} lines are no whole record and were left out.")
    if recording.by_cpu:
        share = recording.by_cpu / operations
        yield Note(
            "host_clock", f"{format_percent(share)} of the times are of the host's clock: they include its delays."
        )
    if whole < 1 - _MOST_UNSEEN:
        yield Note(
            "waiting_unknown",
            f"Of the collectives' seconds {format_percent(whole)} are of collectives that all their ranks recorded: in "
            "the others waiting cannot be told from transfer.",
        )
    if not declared:
        yield Note(
            "no_mesh",
            f"No mesh is known: rows go by the size of their communicators, over {devices} GPUs as the files tell; "
            "--experiment names axes and links.",
        )
