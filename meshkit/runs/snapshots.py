"""Host memory that outlives a process: the launcher holds it, and the process of the next attempt finds it as it was.

    launcher: SnapshotMemory -> MESHKIT_SNAPSHOTS -> process: Slot.reserve, seal | Slot.read after a failure

The memory has no name (memfd), so nothing of it is left once the launcher and the processes are gone. Each process has
two slots: while one is written, the other one is whole. A slot is marked as whole only after all of it was written.
Later the launcher marks in it whether another host has a copy.
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
"""Set where the launcher copies each snapshot to another host."""
SNAPSHOTS = "snapshots"
"""Folder of the run folder with the snapshots that `write_snapshots` has written."""
_SLOTS = 2
_HEAD = struct.Struct("<8sQQ")  # mark, bytes of the data, bytes of the record behind it
_WHOLE, LARGEST_RECORD = b"meshkit1", 1 << 16
_COPY_AT, _COPIED, _REFUSED = _HEAD.size, b"c", b"r"
_AHEAD = 4096  # the data begins on a page
_POLL_S = 0.05
_PIECE = 1 << 24


def snapshots_held(hosts: int) -> int:
    """Return how many snapshots a host holds at most, each of one host's share of the state.

    Two are of its own share. With several hosts, two more are of its neighbour's share. jax keeps one more in host
    memory, from the copy off the devices until the next step.

    Example:
        >>> snapshots_held(1), snapshots_held(8)
        (3, 5)
    """
    return _SLOTS * (2 if hosts > 1 else 1) + 1


class SnapshotMemory:
    """The slots of one process, held by its launcher; they are empty until the process writes one.

    Where the system has no memfd there are no descriptors, and the process takes no snapshots.
    """

    def __init__(self) -> None:
        known = hasattr(os, "memfd_create")
        self.descriptors = [os.memfd_create("meshkit-snapshot") for _ in range(_SLOTS)] if known else []
        self.slots = [Slot(descriptor) for descriptor in self.descriptors]
        self.value = os.pathsep.join(f"/proc/self/fd/{descriptor}" for descriptor in self.descriptors)
        """The value of MESHKIT_SNAPSHOTS for the process that inherits the descriptors."""

    def clear(self) -> None:
        """Marks all slots as empty."""
        for slot in self.slots:
            slot.clear()

    def close(self) -> None:
        """Closes the descriptors. The memory is freed with the last process that has it open."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def write_snapshots(memory: Mapping[int, SnapshotMemory], processes: int, folder: Path) -> None:
    """Write whole snapshots as files, for an attempt whose processes hold other parts of the state.

    Args:
        memory: the memory by rank.
        processes: number of processes that took the snapshots together.
        folder: on a file system that all hosts share. Holds `<step>/<rank>` with the bytes and `<step>/<rank>.json`
            with the record, which is written last.

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
    """Return the slots that this process has inherited; none where no launcher holds any for it."""
    paths = filter(None, os.environ.get(SNAPSHOTS_VARIABLE, "").split(os.pathsep))
    return [Slot(os.open(path, os.O_RDWR)) for path in map(Path, paths) if path.exists()]


class Slot:
    """Memory for one snapshot of one process.

    Args:
        descriptor: of the memory; it stays open.
    """

    def __init__(self, descriptor: int):
        self._file = descriptor

    def clear(self) -> None:
        """Marks the slot as empty, whatever it held."""
        os.pwrite(self._file, bytes(_COPY_AT + 1), 0)

    def reserve(self, size: int) -> memoryview:
        """Return memory to fill, all of it allocated. What the slot held is lost.

        Raises:
            OSError: the machine has not enough memory left.
        """
        self.clear()
        os.posix_fallocate(self._file, 0, _AHEAD + max(1, size))
        return memoryview(mmap.mmap(self._file, _AHEAD + max(1, size)))[_AHEAD : _AHEAD + size]

    def seal(self, data: memoryview, record: Mapping[str, Any]) -> None:
        """Completes a snapshot: writes the record and the sha256 of the data behind the data, and marks it as whole."""
        said = json.dumps({**record, "sha256": hashlib.sha256(data).hexdigest()}).encode()
        end = _AHEAD + data.nbytes
        os.ftruncate(self._file, end)
        os.pwrite(self._file, said, end)
        os.pwrite(self._file, _HEAD.pack(_WHOLE, data.nbytes, len(said)) + bytes(1), 0)

    def record(self) -> dict[str, Any] | None:
        """Return the record behind the snapshot; None where the slot has no whole snapshot."""
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
        """The sha256 of a whole snapshot, as it was sealed."""
        return (self.record() or {}).get("sha256")

    @property
    def size(self) -> int:
        """Number of bytes of a whole snapshot."""
        return _HEAD.unpack(os.pread(self._file, _HEAD.size, 0))[1]

    def piece(self, at: int, count: int) -> bytes:
        """Return `count` bytes of a snapshot from byte `at` on; fewer at its end."""
        return os.pread(self._file, count, _AHEAD + at)

    def read(self) -> memoryview | None:
        """Return the bytes of a whole snapshot without a copy; None where they are not those that were sealed."""
        if (record := self.record()) is None:
            return None
        size = self.size
        data = memoryview(mmap.mmap(self._file, _AHEAD + max(1, size), prot=mmap.PROT_READ))[_AHEAD : _AHEAD + size]
        return data if hashlib.sha256(data).hexdigest() == record.get("sha256") else None

    def say_copied(self, copied: bool | None) -> None:
        """Tells the process that another host has a copy, or has refused one; None takes back what was said."""
        os.pwrite(self._file, {True: _COPIED, False: _REFUSED, None: bytes(1)}[copied], _COPY_AT)

    def said_copied(self) -> bool | None:
        """Whether another host has a copy; None while the launcher has not said so."""
        return {_COPIED: True, _REFUSED: False}.get(os.pread(self._file, 1, _COPY_AT))

    def wait_until_copied(self, timeout_s: float) -> bool:
        """Waits for the launcher to say whether another host has a copy, and returns it; False after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (said := self.said_copied()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return bool(said)
