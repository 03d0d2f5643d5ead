"""Keep snapshots in host memory that the launcher holds, so that the processes of the next attempt can read them.

    launcher: SnapshotMemory -> MESHKIT_SNAPSHOTS -> process: Slot.reserve, Slot.seal | after a failure: Slot.read

The memory has no file name (memfd), so the kernel frees it once the launcher and the processes have ended. Each process
has two slots: while it writes one, the other holds a whole snapshot. A slot is marked as whole only after all of it was
written. Later the launcher marks in the slot whether another host has a copy.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SNAPSHOTS_VARIABLE = "MESHKIT_SNAPSHOTS"
COPY_VARIABLE = "MESHKIT_SNAPSHOT_COPY"
"""The variable that is set if the launcher copies each snapshot to another host."""
SPARE_VARIABLE = "MESHKIT_SPARE"
"""Path of a file that exists while a spare waits that may replace this host; unset if this host cannot be replaced."""
SNAPSHOTS = "snapshots"
"""The subfolder of the run folder for the files of `write_snapshots`."""
_SLOTS = 2
_HEAD = struct.Struct("<8sQQ")  # mark, size of the data, size of the record behind the data; in bytes
_WHOLE, LARGEST_RECORD = b"meshkit1", 1 << 16
_COPY_AT, _COPIED, _REFUSED = _HEAD.size, b"c", b"r"
_AHEAD = 4096  # offset of the data: it begins on a page
_POLL_S = 0.05
_PIECE = 1 << 24


def snapshots_held(hosts: int) -> int:
    """Return the largest number of snapshots in a host's memory, each as large as one host's share of the state.

    Two are of its own share. With several hosts, two more are of its neighbour's share. jax keeps one more, from
    the time it is copied off the devices until the next step.

    Example:
        >>> snapshots_held(1), snapshots_held(8)
        (3, 5)
    """
    return _SLOTS * (2 if hosts > 1 else 1) + 1


class SnapshotMemory:
    """The slots of one process, held by its launcher. A slot is empty until the process writes a snapshot into it.

    On a system without memfd there are no slots, and the process takes no snapshots.
    """

    def __init__(self) -> None:
        known = hasattr(os, "memfd_create")
        self.descriptors = [os.memfd_create("meshkit-snapshot") for _ in range(_SLOTS)] if known else []
        self.slots = [Slot(descriptor) for descriptor in self.descriptors]
        self.value = os.pathsep.join(f"/proc/self/fd/{descriptor}" for descriptor in self.descriptors)
        """The value of MESHKIT_SNAPSHOTS for the process that inherits the descriptors."""

    def clear(self) -> None:
        """Mark all slots as empty."""
        for slot in self.slots:
            slot.clear()

    def close(self) -> None:
        """Close the descriptors. The memory is freed when the last process that has it open ends."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def write_snapshots(memory: Mapping[int, SnapshotMemory], processes: int, folder: Path) -> None:
    """Write whole snapshots as files, for a next attempt whose processes hold different parts of the state.

    Args:
        memory: the snapshot memory by rank.
        processes: number of processes that took the snapshots together.
        folder: the target, on a file system that all hosts share. It gets `<step>/<rank>` with the bytes, and then
            `<step>/<rank>.json` with the record.

    Raises:
        OSError: the folder cannot be written.
    """
    for rank, held in memory.items():
        for slot in held.slots:
            if (record := slot.record()) is None:
                continue
            target, size = folder / str(record["step"]) / str(rank), slot.size
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                for at in range(0, size, _PIECE):
                    file.write(slot.piece(at, min(_PIECE, size - at)))
                file.flush()
                os.fsync(file.fileno())
            partial = target.with_suffix(".json.tmp")
            partial.write_text(json.dumps(record | {"processes": processes}))
            partial.replace(target.with_suffix(".json"))


def slots_here() -> list[Slot]:
    """Return the slots that this process has inherited from its launcher; an empty list if there are none."""
    paths = filter(None, os.environ.get(SNAPSHOTS_VARIABLE, "").split(os.pathsep))
    return [Slot(os.open(path, os.O_RDWR)) for path in map(Path, paths) if path.exists()]


class Slot:
    """Memory for one snapshot of one process.

    Args:
        descriptor: the file descriptor of the memory; it stays open.
    """

    def __init__(self, descriptor: int):
        self._file = descriptor

    def clear(self) -> None:
        """Mark the slot as empty."""
        os.pwrite(self._file, bytes(_COPY_AT + 1), 0)

    def reserve(self, size: int) -> memoryview:
        """Allocate memory for a snapshot of `size` bytes, and return it. The slot's earlier snapshot is lost.

        Raises:
            OSError: the machine has not enough memory left.
        """
        self.clear()
        os.posix_fallocate(self._file, 0, _AHEAD + max(1, size))
        return memoryview(mmap.mmap(self._file, _AHEAD + max(1, size)))[_AHEAD : _AHEAD + size]

    def seal(self, data: memoryview, record: Mapping[str, Any]) -> None:
        """Complete a snapshot: write the record and the sha256 of the data behind the data, and mark it as whole."""
        said = json.dumps({**record, "sha256": hashlib.sha256(data).hexdigest()}).encode()
        end = _AHEAD + data.nbytes
        os.ftruncate(self._file, end)
        os.pwrite(self._file, said, end)
        os.pwrite(self._file, _HEAD.pack(_WHOLE, data.nbytes, len(said)) + bytes(1), 0)

    def record(self) -> dict[str, Any] | None:
        """Return the record of the snapshot; None if the slot has no whole snapshot."""
        try:
            mark, size, length = _HEAD.unpack(os.pread(self._file, _HEAD.size, 0))
            if mark != _WHOLE or length > LARGEST_RECORD:
                return None
            found = json.loads(os.pread(self._file, length, _AHEAD + size))
            return found if isinstance(found, dict) else None
        except (OSError, ValueError, struct.error, RecursionError):
            return None

    @property
    def sha256(self) -> str | None:
        """The sha256 in the record of a whole snapshot; None if the slot has none."""
        return (self.record() or {}).get("sha256")

    @property
    def size(self) -> int:
        """Number of bytes of a whole snapshot."""
        return _HEAD.unpack(os.pread(self._file, _HEAD.size, 0))[1]

    def piece(self, at: int, count: int) -> bytes:
        """Return `count` bytes of a snapshot from byte `at` on. They must lie before its end: the record follows."""
        return os.pread(self._file, count, _AHEAD + at)

    def read(self) -> memoryview | None:
        """Return the bytes of a whole snapshot without copying them; None if there is none or its sha256 is wrong."""
        if (record := self.record()) is None:
            return None
        size = self.size
        data = memoryview(mmap.mmap(self._file, _AHEAD + max(1, size), prot=mmap.PROT_READ))[_AHEAD : _AHEAD + size]
        return data if hashlib.sha256(data).hexdigest() == record.get("sha256") else None

    def say_copied(self, copied: bool | None) -> None:
        """Mark whether another host has a copy (True) or has refused it (False); None removes the mark."""
        os.pwrite(self._file, {True: _COPIED, False: _REFUSED, None: bytes(1)}[copied], _COPY_AT)

    def said_copied(self) -> bool | None:
        """Return whether another host has a copy; None while the launcher has made no mark."""
        return {_COPIED: True, _REFUSED: False}.get(os.pread(self._file, 1, _COPY_AT))

    def wait_until_copied(self, timeout_s: float) -> bool:
        """Wait until the launcher has marked whether another host has a copy; return the mark, or False at timeout."""
        deadline = time.monotonic() + timeout_s
        while (said := self.said_copied()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return bool(said)
