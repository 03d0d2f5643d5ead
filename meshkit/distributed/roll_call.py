"""Who of a job's processes is there: a roll call on the coordinator's port, before jax listens on it.

    process 0 listens <- every other process says its number, the job's size, its host and its time, and is greeted
    process 0 answers all with what it has seen -> Attendance, the same on all

jax's own meeting knows one answer to a process that does not come, comes twice, or belongs to another job: it ends all
others after the timeout, and names none. With certificates (distributed/mtls.py) the roll call is mutual TLS too.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshkit.distributed.connections import SPARE, Callers
from meshkit.distributed.environment import Gang
from meshkit.distributed.mtls import Certificates
from meshkit.errors import ConfigError, RunError

_ANSWER_BYTES = 1 << 24
_RETRY_S, _CONNECT_S = 0.1, 5.0
# What process 0 says at once to a process of the job, so that one that listens there by accident is told apart.
_GREETING, _GREETING_S = b"meshkit", 10.0
_MOST_NAMED = 16
# For a process 0 that listens in place of this one, on this machine.
_OTHER_S, _LOOKS = 3.0, 10
# A line on who is waited for, after so many seconds, and then each time after twice as many.
_FIRST_WORD_S = 10.0
# A name that nobody knows is wrong; in Kubernetes a pod's name is known once the pod has started.
_NAME_S = 20.0
# Certificates, logs and time stamps of checkpoints are of no use beyond it; a message on a busy machine takes seconds.
CLOCK_S = 60.0

Tell = Callable[[str], None]
_Contexts = tuple[ssl.SSLContext, ssl.SSLContext] | tuple[None, None]


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
        """One sentence with the numbers; None if all are there once, at the same time."""
        if self.twice:
            number, hosts = next(iter(self.twice.items()))
            return f"{len(hosts)} processes say that they are number {number}: on {', '.join(sorted(hosts))}."
        if self.others:
            number, size = next(iter(self.others.items()))
            return f"process {number} says that the job has {size} processes, and process 0 says {self.expected}."
        if missing := self.missing:
            return f"{len(missing)} of {self.expected} processes did not come: {_named(missing)}."
        late = max(self.clocks_s, key=lambda i: abs(self.clocks_s[i]))
        if abs(self.clocks_s[late]) > CLOCK_S:
            off = f"{self.clocks_s[late]:+.0f} s off from that of process 0 ({self.hosts[0]})"
            return f"the clock of process {late} ({self.hosts[late]}) is {off}."
        return None

    @property
    def is_final(self) -> bool:
        """Whether the problem is one that another attempt does not mend: all that did come contradict each other."""
        return bool(self.twice or self.others) or not self.missing


def call_roll(
    gang: Gang,
    timeout_s: float,
    *,
    bind: str | None = None,
    certificates: Certificates | None = None,
    tell: Tell = lambda _: None,
) -> Attendance:
    """Meets the other processes of the job; all of them call it.

    Args:
        gang: of this process.
        timeout_s: for all to come.
        bind: host:port on which process 0 listens; None for all interfaces.
        certificates: of this process; None meets in the open.
        tell: where a line goes on whom this process waits for, when it takes long.

    Raises:
        ConfigError: nobody knows the coordinator's name.
        RunError: process 0 cannot listen, or cannot be reached in time.
    """
    try:
        contexts = (certificates.server(), certificates.client()) if certificates else (None, None)
    except OSError as e:
        raise ConfigError(f"the certificates cannot be used: {e.strerror or e}.", at=str(gang.mtls)) from None
    wait_for_name(gang, timeout_s, tell)
    if gang.process_id == 0:
        return _listen(gang, timeout_s, bind, contexts, tell)
    return _answer(gang, timeout_s, contexts[1], tell)


def wait_for_name(gang: Gang, timeout_s: float, tell: Tell = lambda _: None) -> None:
    """Waits until the coordinator's name can be looked up, for seconds; in Kubernetes for all of `timeout_s`.

    Raises:
        ConfigError: nobody knows it.
    """
    host, port = split_address(gang.coordinator)
    words, began = _Words(tell, timeout_s), time.monotonic()
    patience_s = timeout_s if gang.in_kubernetes else min(timeout_s, _NAME_S)
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as e:  # of names that IDNA does not take
            why = getattr(e, "strerror", None) or str(e)
        if time.monotonic() - began > patience_s:
            raise ConfigError(
                f"this machine knows no host by the name of the coordinator {gang.coordinator} ({why.lower()}).",
                at="environment",
                hint="its address, or a name that is in /etc/hosts or DNS here",
            )
        words.say(f"the coordinator's name {host} cannot be looked up yet: {why.lower()}")
        time.sleep(_RETRY_S)


def _listen(gang: Gang, timeout_s: float, bind: str | None, contexts: _Contexts, tell: Tell) -> Attendance:
    try:
        server = _server(gang, bind)
    except OSError as e:
        if (other := _other_first(gang, contexts[1])) is not None:
            return other
        raise RunError(
            f"process 0 cannot listen on {gang.coordinator}: {e.strerror or e}.", hint="a port that is free on its host"
        ) from None
    roll, words = _Roll(gang), _Words(tell, timeout_s)
    rival = None if bind else _Rival(gang, roll.token, contexts[1])
    with server, Callers(server, contexts[0], keep=gang.num_processes) as callers:
        deadline = time.monotonic() + timeout_s
        while not roll.settled and (left := deadline - time.monotonic()) > 0:
            if rival is not None and rival.found is not None:
                return rival.found
            for line, connection in callers.lines(min(left, 1.0)):
                roll.note(line, connection)
            words.say(f"waiting for {len(roll.missing)} of {gang.num_processes} processes: {_named(roll.missing)}")
        if rival is not None:
            rival.over.set()
        return roll.close()


def _server(gang: Gang, bind: str | None) -> socket.socket:
    host, port = split_address(bind or f":{split_address(gang.coordinator)[1]}")
    family = _family(host, port) if host else socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    dual = not host and family == socket.AF_INET6
    backlog = gang.num_processes + SPARE
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=dual)


def _other_first(gang: Gang, context: ssl.SSLContext | None) -> Attendance | None:
    """What a process that listens in place of this one finds, if it calls a roll too; it then knows of both."""
    try:
        found = _ask(gang, secrets.token_hex(8), _OTHER_S, _OTHER_S, context)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if found.twice else None


class _Rival:
    """Looks, in a thread, whether a process 0 listens where this one cannot: on the machine of the coordinator's name.

    That name may also lead back to this process (through a proxy, say), which then knows its own token.
    """

    def __init__(self, gang: Gang, token: str, context: ssl.SSLContext | None):
        self.found: Attendance | None = None
        self.over = threading.Event()
        self._ask = lambda: _ask(gang, token, _OTHER_S, _OTHER_S, context)
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        for _ in range(_LOOKS):
            try:
                found = self._ask()
            except (OSError, ValueError, KeyError, TypeError):
                if self.over.wait(_OTHER_S):
                    return
                continue
            self.found = found if found.twice else None
            return


class _Roll:
    """What process 0 has heard."""

    def __init__(self, gang: Gang):
        self._gang = gang
        self._hosts, self._clocks = {0: socket.gethostname()}, {0: 0.0}
        self._twice: dict[int, list[str]] = {}
        self._others: dict[int, int] = {}
        self._connections: list[Any] = []
        self.token = secrets.token_hex(8)  # of this process
        self._tokens = {0: self.token}

    @property
    def settled(self) -> bool:
        return len(self._hosts) == self._gang.num_processes or bool(self._twice or self._others)

    @property
    def missing(self) -> list[int]:
        return [i for i in range(self._gang.num_processes) if i not in self._hosts]

    def note(self, line: bytes, connection: Any) -> None:
        try:
            said = json.loads(line)
            number, size, host, clock = int(said["id"]), int(said["of"]), str(said["host"])[:255], float(said["time"])
            token = str(said["token"])[:64]
            connection.send(_GREETING + b"\n")
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # a stranger on this port
            connection.close()
            return
        if not math.isfinite(clock) or not host.isprintable():
            connection.close()
            return
        self._connections.append(connection)
        if size != self._gang.num_processes or not 0 <= number < size:
            self._others[number] = size
        elif self._tokens.get(number) == token:
            return  # the same process, whose first connection broke
        elif number in self._hosts:
            self._twice.setdefault(number, [self._hosts[number]]).append(host)
        else:
            self._hosts[number], self._clocks[number], self._tokens[number] = host, clock - time.time(), token

    def close(self) -> Attendance:
        found = Attendance(self._gang.num_processes, self._hosts, self._clocks, self._twice, self._others)
        answer = json.dumps(found.__dict__).encode() + b"\n"
        for connection in self._connections:
            try:
                connection.settimeout(5)
                connection.sendall(answer)
                connection.close()
            except OSError:  # it has gone meanwhile
                continue
        return found


def _answer(gang: Gang, timeout_s: float, context: ssl.SSLContext | None, tell: Tell) -> Attendance:
    began, token = time.monotonic(), secrets.token_hex(8)  # by which process 0 knows a second try
    words, why = _Words(tell, timeout_s), "nobody listens"
    while (left := began + timeout_s - time.monotonic()) > 0:
        try:
            # Process 0 began at another moment: its answer may come a whole timeout later than this process's own.
            return _ask(gang, token, min(left, _CONNECT_S), left + timeout_s, context)
        except (OSError, ValueError, KeyError, TypeError) as e:
            why = _reason(e)
        words.say(f"waiting for the coordinator {gang.coordinator}: {why}")
        time.sleep(_RETRY_S)
    raise RunError(
        f"process {gang.process_id} of {gang.num_processes} did not reach the coordinator {gang.coordinator} within "
        f"{timeout_s:g} s: {why}.",
        hint="whether process 0 runs there, and whether the port is open between the machines",
    )


def _ask(gang: Gang, token: str, connect_s: float, answer_s: float, context: ssl.SSLContext | None) -> Attendance:
    """Says who this is, and returns what process 0 answers.

    Raises:
        OSError: nobody listens, or hangs up, or says nothing.
        ValueError, KeyError, TypeError: it is no process 0 that answers.
    """
    said = {"id": gang.process_id, "of": gang.num_processes, "host": socket.gethostname(), "token": token}
    host, port = split_address(gang.coordinator)
    with socket.create_connection((host, port), timeout=connect_s) as plain:
        connection = context.wrap_socket(plain, server_hostname=host) if context else plain
        with connection:
            connection.sendall(json.dumps({**said, "time": time.time()}).encode() + b"\n")
            connection.settimeout(min(_GREETING_S, answer_s))
            greeting, rest = _read_line(connection)
            if greeting != _GREETING:
                raise ValueError
            connection.settimeout(answer_s)
            return _parse(_read_line(connection, rest)[0])


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not of this job: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError):
        return f"it and this process do not agree on certificates ({error.reason or error})"
    if isinstance(error, TimeoutError):
        return "what listens there does not answer"
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "what listens there is no process of a job"


def _parse(line: bytes) -> Attendance:
    found = json.loads(line)
    tables = {name: {int(k): v for k, v in found[name].items()} for name in ("hosts", "clocks_s", "twice", "others")}
    return Attendance(int(found["expected"]), **tables)


def _read_line(connection: socket.socket, data: bytes = b"") -> tuple[bytes, bytes]:
    """The line, and what has come after it."""
    while b"\n" not in data:
        piece = connection.recv(1 << 16)
        data += piece
        if not piece:
            raise ConnectionResetError("it closed the connection")
        if len(data) > _ANSWER_BYTES:
            raise ValueError
    line, rest = data.split(b"\n", 1)
    return line, rest


class _Words:
    """Says now and then what is waited for."""

    def __init__(self, tell: Tell, timeout_s: float):
        self._tell, self._timeout_s = tell, timeout_s
        self._began, self._next = time.monotonic(), _FIRST_WORD_S

    def say(self, text: str) -> None:
        waited = time.monotonic() - self._began
        if waited >= self._next:
            self._next *= 2
            self._tell(f"{text} ({waited:.0f} s so far, {self._timeout_s:g} s at most)")


def _named(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:_MOST_NAMED])) + (" and more" if len(numbers) > _MOST_NAMED else "")


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _family(host: str, port: int) -> socket.AddressFamily:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
