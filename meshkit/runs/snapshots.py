"""Host memory that outlives a process: the launcher holds it, and the process of the next attempt finds it as it was.

    launcher: SnapshotMemory -> MESHKIT_SNAPSHOTS -> process: Slot.write(record, blocks) | Slot.read() after a failure

The memory has no name (memfd), so nothing of it is left once the launcher and the processes are gone. Each process has
two slots: while one is written, the other one is whole. A slot says that it is whole only after all of it was written.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SNAPSHOTS_VARIABLE = "MESHKIT_SNAPSHOTS"
_SLOTS = 2
_HEAD = struct.Struct("<8sQQ")  # mark, bytes of the data, bytes of the record behind it
_WHOLE, _LARGEST_RECORD = b"meshkit1", 1 << 28
_AHEAD = 4096  # the data begins on a page


class SnapshotMemory:
    """The slots of one process, held by its launcher; empty until the process writes one.

    Where the system has no memory without a name there are no descriptors, and the process takes no snapshots.
    """

    def __init__(self) -> None:
        known = hasattr(os, "memfd_create")
        self.descriptors = [os.memfd_create("meshkit-snapshot") for _ in range(_SLOTS)] if known else []
        self.value = os.pathsep.join(f"/proc/self/fd/{descriptor}" for descriptor in self.descriptors)
        """Of MESHKIT_SNAPSHOTS, for the process that inherits the descriptors."""

    def close(self) -> None:
        """The memory goes with the last process that has it open."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def slots_here() -> list[Slot]:
    """The slots that this process has inherited; none where nobody holds any for it."""
    paths = filter(None, os.environ.get(SNAPSHOTS_VARIABLE, "").split(os.pathsep))
    return [Slot(path) for path in map(Path, paths) if path.exists()]


class Slot:
    """Memory for one snapshot of one process.

    Args:
        path: of an inherited descriptor.
    """

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDWR)

    def reserve(self, size: int) -> memoryview:
        """Memory to fill, all of it there; what the slot held is gone from now on.

        Raises:
            OSError: the memory is not there.
        """
        os.pwrite(self._file, bytes(_HEAD.size), 0)
        os.posix_fallocate(self._file, 0, _AHEAD + max(1, size))
        return memoryview(mmap.mmap(self._file, _AHEAD + max(1, size)))[_AHEAD : _AHEAD + size]

    def seal(self, data: memoryview, record: Mapping[str, Any]) -> None:
        """Makes what was filled in a snapshot: its sha256 and the record stand behind it, and it counts as whole."""
        said = json.dumps({**record, "sha256": hashlib.sha256(data).hexdigest()}).encode()
        end = _AHEAD + data.nbytes
        os.ftruncate(self._file, end)
        os.pwrite(self._file, said, end)
        os.pwrite(self._file, _HEAD.pack(_WHOLE, data.nbytes, len(said)), 0)

    def record(self) -> dict[str, Any] | None:
        """What stands behind the snapshot; None where none is whole."""
        try:
            mark, size, length = _HEAD.unpack(os.pread(self._file, _HEAD.size, 0))
            if mark != _WHOLE or length > _LARGEST_RECORD:
                return None
            found = json.loads(os.pread(self._file, length, _AHEAD + size))
            return found if isinstance(found, dict) else None
        except (OSError, ValueError, struct.error, RecursionError):
            return None

    def read(self) -> bytes | None:
        """The bytes of a whole snapshot, a copy of them; None where they are not those that were sealed."""
        record = self.record()
        if record is None:
            return None
        size = _HEAD.unpack(os.pread(self._file, _HEAD.size, 0))[1]
        with mmap.mmap(self._file, _AHEAD + max(1, size), prot=mmap.PROT_READ) as mapped:
            data = mapped[_AHEAD : _AHEAD + size]
        return data if hashlib.sha256(data).hexdigest() == record.get("sha256") else None
