"""Who of a job's processes is there: a roll call on the coordinator's port, before jax listens on it. Layer 2.

    process 0 listens <- every other process says its number, the job's size, its host and its time
    process 0 answers all with what it has seen -> Attendance, the same on all

jax's own meeting knows one answer to a process that does not come, comes twice, or belongs to another job: it ends all
others after the timeout, and names none.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Any

from meshkit.errors import RunError
from meshkit.spec.environment import Gang

_LINE_BYTES, _ANSWER_BYTES = 1024, 1 << 24
_RETRY_S = 0.1
_MOST_NAMED = 16


@dataclass(frozen=True)
class Attendance:
    """What a roll call found.

    Attributes:
        expected: processes of the job.
        hosts: number -> host, of those that came.
        clocks_s: number -> its clock less that of process 0, off by what a message takes.
        twice: numbers that more than one process claims, with the hosts of all claims.
        others: sizes of the job by those who say another one, by number.
    """

    expected: int
    hosts: dict[int, str]
    clocks_s: dict[int, float]
    twice: dict[int, list[str]]
    others: dict[int, int]

    @property
    def missing(self) -> list[int]:
        """Numbers that did not come."""
        return [i for i in range(self.expected) if i not in self.hosts]

    @property
    def problem(self) -> str | None:
        """One sentence with the numbers; None if all are there once."""
        if self.twice:
            number, hosts = next(iter(self.twice.items()))
            return f"{len(hosts)} processes say that they are number {number}: on {', '.join(sorted(hosts))}."
        if self.others:
            number, size = next(iter(self.others.items()))
            return f"process {number} says that the job has {size} processes, and process 0 says {self.expected}."
        if missing := self.missing:
            shown = ", ".join(map(str, missing[:_MOST_NAMED])) + (" and more" if len(missing) > _MOST_NAMED else "")
            return f"{len(missing)} of {self.expected} processes did not come: {shown}."
        return None


def call_roll(gang: Gang, timeout_s: float, *, bind: str | None = None) -> Attendance:
    """Meets the other processes of the job; all of them call it.

    Args:
        gang: of this process.
        timeout_s: for all to come.
        bind: host:port on which process 0 listens; None for all interfaces.

    Raises:
        RunError: process 0 cannot listen, or cannot be reached in time.
    """
    if gang.process_id == 0:
        return _listen(gang, timeout_s, bind)
    return _answer(gang, timeout_s)


def _listen(gang: Gang, timeout_s: float, bind: str | None) -> Attendance:
    host, port = _split(bind or f":{_split(gang.coordinator)[1]}")
    family = _family(host, port) if host else socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    dual = not host and family == socket.AF_INET6
    try:
        server = socket.create_server((host, port), family=family, backlog=gang.num_processes, dualstack_ipv6=dual)
    except OSError as e:
        raise RunError(
            f"process 0 cannot listen on {gang.coordinator}: {e.strerror or e}.", hint="a port that is free on its host"
        ) from None
    roll = _Roll(gang)
    with server, selectors.DefaultSelector() as selector:
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)
        deadline = time.monotonic() + timeout_s
        while not roll.settled and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is server:
                    connection, _ = server.accept()
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ, b"")
                elif (line := _read(selector, key)) is not None:
                    roll.note(line, key.fileobj)
        return roll.close()


class _Roll:
    """What process 0 has heard."""

    def __init__(self, gang: Gang):
        self._gang = gang
        self._hosts, self._clocks = {0: socket.gethostname()}, {0: 0.0}
        self._twice: dict[int, list[str]] = {}
        self._others: dict[int, int] = {}
        self._connections: list[Any] = []

    @property
    def settled(self) -> bool:
        return len(self._hosts) == self._gang.num_processes or bool(self._twice or self._others)

    def note(self, line: bytes, connection: Any) -> None:
        try:
            said = json.loads(line)
            number, size, host, clock = int(said["id"]), int(said["of"]), str(said["host"])[:255], float(said["time"])
        except (ValueError, KeyError, TypeError):  # a stranger on this port
            connection.close()
            return
        self._connections.append(connection)
        if size != self._gang.num_processes or not 0 <= number < size:
            self._others[number] = size
        elif number in self._hosts:
            self._twice.setdefault(number, [self._hosts[number]]).append(host)
        else:
            self._hosts[number], self._clocks[number] = host, clock - time.time()

    def close(self) -> Attendance:
        found = Attendance(self._gang.num_processes, self._hosts, self._clocks, self._twice, self._others)
        answer = json.dumps(found.__dict__).encode() + b"\n"
        for connection in self._connections:
            try:
                connection.setblocking(True)
                connection.settimeout(5)
                connection.sendall(answer)
                connection.close()
            except OSError:  # it has gone meanwhile
                continue
        return found


def _answer(gang: Gang, timeout_s: float) -> Attendance:
    deadline = time.monotonic() + timeout_s
    said = {"id": gang.process_id, "of": gang.num_processes, "host": socket.gethostname()}
    why: object = "nobody listens"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(_split(gang.coordinator), timeout=min(left, 5.0)) as connection:
                connection.sendall(json.dumps({**said, "time": time.time()}).encode() + b"\n")
                # Process 0 began at another moment: its answer may come a whole timeout later than this process's own.
                connection.settimeout(left + timeout_s)
                if (line := _read_line(connection)) is not None:
                    return _parse(line)
                why = "it closed the connection"
        except (OSError, ValueError, KeyError, TypeError) as e:
            why = e
        time.sleep(_RETRY_S)
    raise RunError(
        f"process {gang.process_id} of {gang.num_processes} did not reach the coordinator {gang.coordinator} within "
        f"{timeout_s:g} s: {why}.",
        hint="whether process 0 runs there, and whether the port is open between the machines",
    )


def _parse(line: bytes) -> Attendance:
    found = json.loads(line)
    tables = {name: {int(k): v for k, v in found[name].items()} for name in ("hosts", "clocks_s", "twice", "others")}
    return Attendance(int(found["expected"]), **tables)


def _read(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> bytes | None:
    """The line of a connection once it is whole; a connection that ends or says too much is dropped."""
    connection: Any = key.fileobj
    try:
        data = key.data + connection.recv(_LINE_BYTES)
    except OSError:
        data = key.data
    if b"\n" in data:
        selector.unregister(connection)
        return data.split(b"\n", 1)[0]
    if len(data) == len(key.data) or len(data) > _LINE_BYTES:
        selector.unregister(connection)
        connection.close()
    else:
        selector.modify(connection, selectors.EVENT_READ, data)
    return None


def _read_line(connection: socket.socket) -> bytes | None:
    data = b""
    while b"\n" not in data:
        piece = connection.recv(1 << 16)
        data += piece
        if not piece or len(data) > _ANSWER_BYTES:
            return None
    return data.split(b"\n", 1)[0]


def _split(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
