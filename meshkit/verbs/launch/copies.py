"""Send copies of each host's snapshots over mutual TLS to its neighbour, the next host, which keeps them in memory.

    a process of host i seals a snapshot -> SnapshotCopies of host i -> Keeper of host i+1 -> slot marked as copied
    host i is replaced -> its new launcher calls fetch_copies -> Keeper of host i+1 -> memory of host i's processes

The launchers send the copies, so that no training process waits for the network. Each snapshot is sent with its sha256,
and a copy counts only if its bytes have the same sha256.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedRWPair
from typing import Any

from meshkit.runs.snapshots import LARGEST_RECORD, Slot, SnapshotMemory

_LOOK_S, _CONNECT_S, _TIMEOUT_S, _AGAIN_S = 0.1, 10.0, 30.0, 1.0
_PIECE, _FAILURES = 1 << 20, 5
_KEPT, _SEND = "kept", "send"

Address = tuple[str, int]


@dataclass(frozen=True)
class Channel:
    """The TLS contexts by which the launchers of a job connect to each other."""

    client: ssl.SSLContext
    server: ssl.SSLContext
    name: str
    """The host name in the certificate that all launchers share: the name of the coordinator's host."""

    def connect(self, address: Address, *, handshake: bool = True) -> ssl.SSLSocket:
        """Return a connection to another launcher; without `handshake` the first message starts the TLS handshake.

        Raises:
            OSError: nobody listens there, or the other end does not show the job's certificate.
        """
        with socket.create_connection(address, timeout=_CONNECT_S) as plain:  # closed if wrapping fails
            keep_alive(plain)
            found = self.client.wrap_socket(plain, server_hostname=self.name, do_handshake_on_connect=handshake)
        found.settimeout(_TIMEOUT_S)
        return found


class Keeper:
    """Keep the newest two snapshots of each process of the previous host, and return them on request.

    Args:
        host: the address on which the context manager listens.
        channel: the TLS contexts of the job.
    """

    def __init__(self, host: str, channel: Channel):
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family)
        self.port: int = self._server.getsockname()[1]
        self._channel, self._lock = channel, threading.Lock()
        self._memory: dict[int, SnapshotMemory] = {}
        self._copying: ssl.SSLSocket | None = None

    def __enter__(self) -> Keeper:
        threading.Thread(target=self._listen, name="meshkit-keeper", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # wakes the thread that accepts
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.keep((), anew=True)

    @property
    def memory(self) -> dict[int, SnapshotMemory]:
        """The snapshot memory by rank."""
        return dict(self._memory)

    def keep(self, ranks: Sequence[int], *, anew: bool) -> None:
        """Keep the snapshots of these ranks from now on; free those of other ranks, or of all ranks if `anew`."""
        self._abort_copy()
        with self._lock:
            for rank in list(self._memory):
                if anew or rank not in ranks:
                    self._memory.pop(rank).close()
            self._memory |= {rank: SnapshotMemory() for rank in ranks if rank not in self._memory}

    def _abort_copy(self) -> None:
        """Abort a copy in progress, so that nothing waits for a sender that has vanished."""
        if (connection := self._copying) is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        while True:
            try:
                plain, _ = self._server.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(plain,), name="meshkit-keeper", daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        """Answer one request of a launcher."""
        with suppress(OSError, ValueError, LookupError, TypeError), plain:
            plain.settimeout(_TIMEOUT_S)
            keep_alive(plain)
            connection = self._channel.server.wrap_socket(plain, server_side=True)
            with connection, connection.makefile("rwb") as file:
                request = _receive_message(file)
                if "give" in request:  # from a new launcher, which replaces the sender
                    self._abort_copy()
                    with self._lock:
                        self._give(file, request["give"])
                    return
                with self._lock:
                    self._copying = connection
                    try:
                        _send_message(file, answer=self._keep(file, **request))
                    finally:
                        self._copying = None

    def _keep(self, file: BufferedRWPair, rank: int, size: int, record: dict[str, Any], whole: list[str]) -> str:
        """Receive a snapshot, unless this host has it, and return the answer for the sender.

        `whole` has the sha256 of each complete snapshot of the process. Copies of other snapshots are dropped.
        """
        memory = self._memory[rank]  # KeyError before `keep` has been called with this rank: the sender tries again
        if record["sha256"] in [slot.sha256 for slot in memory.slots]:
            return _KEPT
        free = [slot for slot in memory.slots if slot.sha256 not in whole]
        for slot in free:
            slot.clear()
        try:
            data = free[0].reserve(size)
        except (OSError, ValueError) as error:
            return f"it does not fit into that host's memory ({error})"
        _send_message(file, answer=_SEND)
        return _KEPT if _receive(file, free[0], data, record) else "it came damaged"

    def _give(self, file: BufferedRWPair, ranks: Sequence[int]) -> None:
        for rank in self._memory.keys() & ranks:
            for slot in self._memory[rank].slots:
                if (record := slot.record()) is not None:
                    _send_message(file, rank=rank, size=(size := slot.size), record=record)
                    _send(file, slot, size)
        _send_message(file, end=True)


class SnapshotCopies:
    """Send every new snapshot of this host's processes to the neighbour, from a thread. A context manager.

    Args:
        memory: rank -> snapshot memory of its process.
        address: the address of the neighbour's `Keeper`.
        channel: the TLS contexts of the job.
        show: prints an error for the user.
    """

    def __init__(
        self, memory: Mapping[int, SnapshotMemory], address: Address, channel: Channel, show: Callable[[str], None]
    ):
        self._memory, self._address, self._channel, self._show = memory, address, channel, show
        for slot in (slot for held in memory.values() for slot in held.slots):
            slot.say_copied(None)  # the neighbour may have changed
        self._ends = threading.Event()
        self._connection: ssl.SSLSocket | None = None
        self._thread = threading.Thread(target=self._run, name="meshkit-copies", daemon=True)

    def __enter__(self) -> SnapshotCopies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        if (connection := self._connection) is not None:
            with suppress(OSError):  # abort a copy in progress
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _run(self) -> None:
        failures = 0
        while not self._ends.wait(_LOOK_S):
            try:
                for rank, memory in self._memory.items():
                    records = [(slot, record) for slot in memory.slots if (record := slot.record()) is not None]
                    whole = [record["sha256"] for _, record in records]
                    for slot, record in sorted(records, key=lambda found: found[1]["step"]):
                        if slot.said_copied() is None and not self._ends.is_set():
                            self._copy(rank, slot, record, whole)
                failures = 0
            except (OSError, ValueError) as error:
                failures += 1
                # If the next host is lost, hosts.py reports that and ends this context manager.
                if failures == _FAILURES and not self._ends.is_set():
                    self._show(f"snapshots cannot be copied to the next host at {self._address[0]}: {error}")
                self._ends.wait(_AGAIN_S)

    def _copy(self, rank: int, slot: Slot, record: dict[str, Any], whole: list[str]) -> None:
        with self._channel.connect(self._address, handshake=False) as connection:
            self._connection = connection
            if self._ends.is_set():  # `__exit__` may have run before it could see this connection
                return
            with connection.makefile("rwb") as file:
                _send_message(file, rank=rank, size=(size := slot.size), record=record, whole=whole)
                if (answer := _receive_message(file)["answer"]) == _SEND:
                    _send(file, slot, size)
                    answer = _receive_message(file)["answer"]
        if slot.record() != record:  # the process has meanwhile begun another snapshot in this slot
            return
        slot.say_copied(answer == _KEPT)
        if answer != _KEPT:
            self._show(f"the next host has no copy of process {rank}'s snapshot of step {record['step']}: {answer}")


def fetch_copies(memory: Mapping[int, SnapshotMemory], address: Address, channel: Channel) -> list[int]:
    """Fetch the snapshots of this host's processes that the neighbour keeps.

    Args:
        memory: rank -> snapshot memory of its process, to be filled.
        address: the address of the neighbour's `Keeper`.
        channel: the TLS contexts of the job.

    Returns:
        The steps of the snapshots that arrived undamaged, sorted, without duplicates.

    Raises:
        OSError: the neighbour is not there, or does not answer.
    """
    free, steps = {rank: list(held.slots) for rank, held in memory.items()}, set()
    with channel.connect(address) as connection, connection.makefile("rwb") as file:
        _send_message(file, give=list(memory))
        while "end" not in (said := _receive_message(file)):
            slot, record = free[said["rank"]].pop(0), said["record"]
            if _receive(file, slot, slot.reserve(said["size"]), record):
                steps.add(record["step"])
    return sorted(steps)


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end a connection some 20 s after the other machine has vanished without closing it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _send(file: BufferedRWPair, slot: Slot, size: int) -> None:
    """Send the bytes of a snapshot. If its process overwrites them meanwhile, the receiver finds a wrong sha256."""
    for at in range(0, size, _PIECE):
        file.write(slot.piece(at, min(_PIECE, size - at)))
    file.flush()


def _receive(file: BufferedRWPair, slot: Slot, data: memoryview, record: dict[str, Any]) -> bool:
    """Receive a snapshot into a slot; return whether its bytes have the sha256 of the record."""
    if file.readinto(data) < data.nbytes:
        raise ConnectionResetError("it closed the connection")
    slot.seal(data, {key: value for key, value in record.items() if key != "sha256"})
    if slot.sha256 == record["sha256"]:
        return True
    slot.clear()
    return False


def _send_message(file: BufferedRWPair, **message: Any) -> None:
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def _receive_message(file: BufferedRWPair) -> dict[str, Any]:
    """Return the next message from the other end."""
    line = file.readline(LARGEST_RECORD)
    if not line.endswith(b"\n"):
        raise ConnectionResetError("it closed the connection")
    return json.loads(line)
