"""Find out which processes of a job are there: a roll call on the coordinator's port, before jax listens on it.

    process 0 listens <- every other process sends its number, the job's size, its host and its time, and is greeted
                      <- if the job has a secret, the process proves that it knows the secret
    process 0 sends the result to every process, with its own proof of the secret -> Attendance, the same everywhere

If a process does not come, comes twice, or belongs to another job, jax's own start does the same in all three cases:
after the timeout it ends all other processes, without naming the one at fault.

With certificates (certificates.py) the roll call runs over mutual TLS. With a secret (MESHKIT_SECRET) process 0 and
every other process prove to each other that they know the secret, which itself is never sent. Anybody who reaches the
port may connect to it. Process 0 therefore waits for no single connection, closes connections that stay silent, and
ignores processes that lack the job's certificate or secret. Without certificates a claim counts only as long as its
connection is open.
"""

from __future__ import annotations

import hmac
import json
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any
from weakref import WeakKeyDictionary

from pydantic import AfterValidator, BaseModel, Field, FiniteFloat, TypeAdapter, ValidationError

from meshkit.distributed.certificates import Certificates
from meshkit.distributed.environment import FIRST_PORT, NUM_PORTS, SECRET, Gang, split_address
from meshkit.errors import ConfigError, RunError

LOOPBACK = "127.0.0.1"
_ANSWER_BYTES, _LINE_BYTES = 1 << 24, 1024
_RETRY_S, _CONNECT_S = 0.1, 5.0
# Process 0 greets each process at once. Another program that happens to listen on this port does not, so a process that
# gets no greeting within GREETING_S seconds tries again.
_GREETING, GREETING_S = b"meshkit", 10.0
_MOST_NAMED = 16
# How many connections may be silent at a time beyond one for each process, and for how many seconds. A process of the
# job sends its line as soon as it is connected.
_SPARE, _SILENT_S = 128, 20.0
# If claims contradict each other, or if anybody could have made them (no certificates, no secret), the roll call ends
# only after so many seconds without a new claim. An unrelated program that only probes the port has hung up by then.
_STANDS_S = 0.3
_MOST_REFUSED = 64
# The search for another process 0 that listens in place of this one: the time limit of a try, which is also the time
# between two tries, and the number of tries.
OTHER_S, _LOOKS = 3.0, 10
# Seconds of waiting until the first log line about it; for each further line the wait has doubled.
FIRST_WORD_S = 10.0
# Seconds after which a coordinator's name that cannot be looked up counts as wrong. In Kubernetes it does not, since a
# pod's name is known only once the pod has started.
NAME_S = 20.0
# The largest allowed difference of two clocks, in seconds. With a larger difference certificates fail, and time stamps
# of logs and checkpoints mislead. The limit cannot be much smaller, since a message takes seconds on a busy machine.
_CLOCK_S = 60.0

Log = Callable[[str], None]
_Contexts = tuple[ssl.SSLContext, ssl.SSLContext] | tuple[None, None]


class _Introduction(BaseModel):
    """A process's description of itself."""

    id: int
    of: int
    host: Annotated[str, Field(max_length=255), AfterValidator(lambda host: _printable(host))]
    token: Annotated[str, Field(max_length=64)]
    """A random text, by which process 0 recognizes a process that connects a second time."""
    time: FiniteFloat


@dataclass(frozen=True)
class Attendance:
    """The result of a roll call. The keys of every table are numbers of processes."""

    expected: int
    """The number of processes of the job."""
    hosts: dict[int, str]
    """The host of each process that came."""
    clocks_s: dict[int, float]
    """Each process's clock minus process 0's clock, too small by the travel time of a message."""
    twice: dict[int, list[str]]
    """Numbers that more than one process claims, with the hosts of all claims."""
    others: dict[int, int]
    """The job's size according to each process whose size or number does not fit this job."""
    refused: int = 0
    """The number of processes that came without the job's secret; their claims are ignored."""
    session: str = ""
    """A text that is new in every roll call; `session_key` derives a key from it and the secret."""

    @property
    def missing(self) -> list[int]:
        """The numbers of the processes that did not come."""
        return [i for i in range(self.expected) if i not in self.hosts]

    @property
    def problem(self) -> str | None:
        """One sentence about the problem; None if every process is there once and the clocks agree."""
        if self.twice:
            number, hosts = next(iter(self.twice.items()))
            return f"{len(hosts)} processes say that they are number {number}: on {', '.join(sorted(hosts))}."
        if self.others:
            number, size = next(iter(self.others.items()))
            return f"process {number} says that the job has {size} processes, and process 0 says {self.expected}."
        if missing := self.missing:
            absent = f"{len(missing)} of {self.expected} processes did not come: {named(missing)}."
            return f"{absent} {self.refused} came without the job's secret ({SECRET})." if self.refused else absent
        late = max(self.clocks_s, key=lambda i: abs(self.clocks_s[i]))
        if abs(self.clocks_s[late]) > _CLOCK_S:
            off = f"{self.clocks_s[late]:+.0f} s off from that of process 0 ({self.hosts[0]})"
            return f"the clock of process {late} ({self.hosts[late]}) is {off}."
        return None

    @property
    def is_final(self) -> bool:
        """Whether a new attempt would have the same problem: processes contradict each other, or none is missing."""
        return bool(self.twice or self.others) or not self.missing


def named(numbers: list[int]) -> str:
    """Return a list of process numbers as text, cut after 16 numbers."""
    return ", ".join(map(str, numbers[:_MOST_NAMED])) + (" and more" if len(numbers) > _MOST_NAMED else "")


def session_key(gang: Gang, attendance: Attendance) -> bytes | None:
    """Return a key that only the processes of this roll call share.

    Returns:
        64 hexadecimal digits, as ASCII; None if the job has no secret, or has certificates instead.
    """
    return prove(gang, b"session", attendance.session.encode()) or None


def prove(gang: Gang, what: bytes, *words: bytes) -> bytes:
    """Return a proof that this process knows the job's secret: an HMAC of `what` and `words`.

    The proof is empty if the job has no secret, or has certificates instead.
    """
    if gang.secret is None or gang.mtls is not None:
        return b""
    said = b"".join(b"%d:%s," % (len(word), word) for word in (what, *words))
    return hmac.digest(gang.secret.encode(), said, "sha256").hex().encode()


def call_roll(
    gang: Gang,
    timeout_s: float,
    *,
    bind: str | None = None,
    certificates: Certificates | None = None,
    log: Log = lambda _: None,
) -> Attendance:
    """Find out which processes of the job are there; every process of the job must call it.

    Args:
        gang: the job, as this process reads it.
        timeout_s: seconds in which all processes have to come.
        bind: host:port on which process 0 listens; None for all interfaces.
        certificates: the certificates of this process; None connects without TLS.
        log: gets a line about the missing processes after 10 s, 20 s, 40 s, ... of waiting.

    Raises:
        ConfigError: the coordinator's name cannot be looked up, or the certificates cannot be used.
        RunError: process 0 cannot listen, or cannot be reached in time.
    """
    try:
        contexts = (certificates.server(), certificates.client()) if certificates else (None, None)
    except OSError as e:
        raise ConfigError(f"the certificates cannot be used: {e.strerror or e}.", at=str(gang.mtls)) from None
    wait_for_name(gang, timeout_s, log)
    if gang.process_id == 0:
        return _listen(gang, timeout_s, bind, contexts, log)
    return _answer(gang, timeout_s, contexts[1], log)


def wait_for_name(gang: Gang, timeout_s: float, log: Log = lambda _: None) -> None:
    """Wait until this machine can look up the coordinator's name.

    Args:
        gang: the job, as this process reads it.
        timeout_s: the longest wait, in seconds. Outside of Kubernetes the wait ends after 20 s at most, since a name
            that cannot be looked up by then is wrong.
        log: gets a line after 10 s, 20 s, 40 s, ... of waiting.

    Raises:
        ConfigError: the name cannot be looked up in that time.
    """
    host, port = gang.address
    progress, began = Progress(log, timeout_s), time.monotonic()
    patience_s = timeout_s if gang.in_kubernetes else min(timeout_s, NAME_S)
    while True:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return
        except (OSError, UnicodeError) as e:  # UnicodeError: IDNA cannot encode the name
            why = getattr(e, "strerror", None) or str(e)
        if time.monotonic() - began > patience_s:
            raise ConfigError(
                f"this machine knows no host by the name of the coordinator {gang.coordinator} ({why.lower()}).",
                at="environment",
                hint="its address, or a name that is in /etc/hosts or DNS here",
            )
        progress.say(f"the coordinator's name {host} cannot be looked up yet: {why.lower()}")
        time.sleep(_RETRY_S)


class Progress:
    """Log what this process waits for, after 10 s and then each time that the wait has doubled."""

    def __init__(self, log: Log, timeout_s: float):
        self._log, self._timeout_s = log, timeout_s
        self._began, self._next = time.monotonic(), FIRST_WORD_S

    def say(self, text: str) -> None:
        waited = time.monotonic() - self._began
        if waited >= self._next:
            self._next *= 2
            self._log(f"{text} ({waited:.0f} s so far, {self._timeout_s:g} s at most)")


# ---------------------------------------------------------------------------------------------- process 0


def _listen(gang: Gang, timeout_s: float, bind: str | None, contexts: _Contexts, log: Log) -> Attendance:
    """Collect the claims of the other processes, as process 0, until all are there or the time is over."""
    roll = _Roll(gang, in_the_open=contexts[0] is None and gang.secret is None)
    progress, rival = Progress(log, timeout_s), _Rival(gang, contexts[1])
    try:
        server = open_server(gang, bind)
    except OSError as e:
        rival.look(1)  # a process 0 that listens in place of this one answers, and names both
        if rival.found is not None:
            return rival.found
        what = f"process 0 cannot listen on {gang.coordinator}: {e.strerror or e}."
        raise RunError(what, hint="a port that is free on its host") from None
    if not bind:  # another process 0 may listen on the machine that has the coordinator's name
        threading.Thread(target=rival.look, args=(_LOOKS, roll.token), daemon=True).start()
    with server, Connections(server, contexts[0], keep=gang.num_processes) as connections:
        deadline = time.monotonic() + timeout_s
        while not roll.settled and (left := deadline - time.monotonic()) > 0:
            if rival.found is not None:
                return rival.found
            for line, connection in connections.lines(min(left, _STANDS_S)):
                if roll.hear(line, connection):
                    connections.watch(connection)
            missing = roll.found.missing
            progress.say(f"waiting for {len(missing)} of {gang.num_processes} processes: {named(missing)}")
        rival.over.set()
        return roll.close()


def bind_address(coordinator: str) -> str | None:
    """Return the host:port on which process 0 listens: the one interface that has the coordinator's address.

    Returns:
        None for all interfaces, as jax listens by default, in two cases. Either the coordinator's address does not
        belong to this machine, for example behind a proxy. Or its name is a loopback address here, while other
        machines look up another address.
    """
    host, port = split_address(coordinator)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return None
    ip = str(address[0])
    if ip != host and host != "localhost" and (ip.startswith("127.") or ip == "::1"):
        return None
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def free_port(host: str = LOOPBACK) -> int:
    """Return a random port that nothing listens on, outside of Linux's ephemeral ports.

    Args:
        host: a name or address of this machine.

    Raises:
        RunError: no free port was found.
    """
    for _ in range(100):
        port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
        if is_free(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"):
            return port
    raise RunError(f"no port from {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1} is free on {host}.")


def is_free(address: str) -> bool:
    """Return whether nothing listens at host:port of this machine."""
    host, port = split_address(address)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore ended connections on this port
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def open_server(gang: Gang, bind: str | None) -> socket.socket:
    """Return the socket that process 0 listens on: at `bind`, or on every interface at the coordinator's port."""
    host, port = split_address(bind) if bind else ("", gang.address[1])
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    dual = not host and family == socket.AF_INET6
    backlog = gang.num_processes + _SPARE
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=dual)


class _Rival:
    """Looks for another process 0, which listens at the coordinator's address in place of this one.

    This process introduces itself there, so that both processes learn of each other. The address may also lead back to
    this process (through a proxy, say), which then recognizes its own token.
    """

    def __init__(self, gang: Gang, context: ssl.SSLContext | None):
        self.found: Attendance | None = None
        self.over = threading.Event()
        self._ask = lambda token: _ask(gang, token, OTHER_S, OTHER_S, context)

    def look(self, times: int, token: str | None = None) -> None:
        for left in reversed(range(times)):
            try:
                found = self._ask(token or secrets.token_hex(8))
            except (OSError, ValueError):
                if left and self.over.wait(OTHER_S):
                    return
                continue
            self.found = found if found.twice else None
            return


class _Roll:
    """The claims that process 0 has received, and their connections."""

    def __init__(self, gang: Gang, *, in_the_open: bool):
        self._gang, self._session, self._in_the_open = gang, secrets.token_hex(16), in_the_open
        self.token = secrets.token_hex(8)  # of this process
        # Each claim: the introduction, the clock of its process minus this process's, the connection.
        self._claims: list[tuple[_Introduction, float, Any]] = []
        self._asked: WeakKeyDictionary[Any, tuple[_Introduction, bytes]] = WeakKeyDictionary()
        self._refused: set[str] = set()
        self._changed = 0.0  # when the last claim came
        self._count()

    def _count(self) -> None:
        """Rebuild the attendance from the claims whose connections are still open."""
        self.found = Attendance(self._gang.num_processes, {0: socket.gethostname()}, {0: 0.0}, {}, {})
        self._seen = {(0, self.token)}
        for said, clock_s, _ in self._claims:
            self._add(said, clock_s)

    def _add(self, said: _Introduction, clock_s: float) -> None:
        found = self.found
        if (said.id, said.token) in self._seen:  # the same process, whose first connection broke
            return
        self._seen.add((said.id, said.token))
        if said.of != found.expected or not 0 <= said.id < said.of:
            found.others[said.id] = said.of
        elif said.id in found.hosts:
            found.twice.setdefault(said.id, [found.hosts[said.id]]).append(said.host)
        else:
            found.hosts[said.id], found.clocks_s[said.id] = said.host, clock_s

    @property
    def settled(self) -> bool:
        """Whether the roll call can end: all processes are there, or some contradict each other.

        Claims whose connection is closed are dropped first. If a stranger may have made a claim, the roll call ends
        only after `_STANDS_S` seconds without a new claim.
        """
        if not self._has_verdict:
            return False
        gone = [claim for claim in self._claims if _has_hung_up(claim[2])]
        for claim in gone:
            self._claims.remove(claim)
            claim[2].close()
        if gone:
            self._count()
        waits = self._in_the_open or self.found.twice or self.found.others
        return self._has_verdict and (not waits or time.monotonic() - self._changed >= _STANDS_S)

    @property
    def _has_verdict(self) -> bool:
        found = self.found
        return len(found.hosts) == found.expected or bool(found.twice or found.others)

    def hear(self, line: bytes, connection: Any) -> bool:
        """Process the next line of a connection: an introduction, or the proof that follows it.

        Returns:
            Whether this connection must still send its proof.
        """
        said, proof = self._asked.pop(connection, (None, b""))
        try:
            if said is not None:
                if not hmac.compare_digest(line, proof):
                    self._refused |= {said.token} if len(self._refused) < _MOST_REFUSED else set()
                    raise PermissionError
            else:
                said, question = _Introduction.model_validate_json(line), secrets.token_hex(16).encode()
                proof = prove(self._gang, b"member", question, line)
                connection.send(_GREETING + (b" " + question if proof else b"") + b"\n")
                if proof:
                    self._asked[connection] = said, proof
                    return True
        except (OSError, ValidationError):  # it is no process of this job
            connection.close()
            return False
        self._changed = time.monotonic()
        self._claims.append((said, said.time - time.time(), connection))
        self._add(*self._claims[-1][:2])
        return False

    def close(self) -> Attendance:
        found = replace(self.found, refused=len(self._refused), session=self._session)
        answer = json.dumps(asdict(found)).encode()
        for said, _, connection in self._claims:
            try:
                proof = prove(self._gang, b"attendance", said.token.encode(), answer)
                connection.settimeout(5)
                connection.sendall(answer + (b" " + proof if proof else b"") + b"\n")
                connection.close()
            except OSError:  # the process has gone meanwhile
                continue
        return found


def _has_hung_up(connection: Any) -> bool:
    """Return whether the other end has closed the connection, without consuming received bytes."""
    if isinstance(connection, ssl.SSLSocket):  # only a process of the job gets through the handshake
        return False
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except (BlockingIOError, InterruptedError):
        return False
    except OSError:
        return True


class Connections:
    """The connections of a listening socket; no single connection delays the others. A context manager.

    Args:
        server: the socket, which already listens.
        context: the TLS context; None reads plain text.
        keep: how many connections may be silent at the same time, besides `_SPARE` more.
    """

    def __init__(self, server: socket.socket, context: ssl.SSLContext | None, *, keep: int):
        self._server, self._context, self._most = server, context, keep + _SPARE
        self._selector = selectors.DefaultSelector()
        self._silent: dict[Any, tuple[float, bytes]] = {}

    def __enter__(self) -> Connections:
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        return self

    def watch(self, connection: Any) -> None:
        """Let `lines` read this connection, which may be new or may have sent a line before."""
        self._silent[connection] = time.monotonic(), b""
        self._selector.register(connection, selectors.EVENT_READ)

    def __exit__(self, *_: object) -> None:
        for connection in list(self._silent):
            self._release(connection).close()
        self._selector.close()

    def lines(self, timeout_s: float) -> Iterator[tuple[bytes, Any]]:
        """Yield whole lines with their connections, which then belong to the caller; wait up to `timeout_s`."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._server:
                self._accept()
            elif key.fileobj in self._silent and (line := self._read(key.fileobj)) is not None:
                yield line, key.fileobj
        before = time.monotonic() - _SILENT_S
        for connection in [c for c, (since, _) in self._silent.items() if since < before]:
            self._release(connection).close()

    def _accept(self) -> None:
        if len(self._silent) >= self._most:
            self._release(next(iter(self._silent))).close()  # the longest silent connection
        try:
            connection, _ = self._server.accept()
            connection.setblocking(False)
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except OSError:  # the other end has hung up already, or this process has too many files open
            time.sleep(0.01)
            return
        self.watch(connection)

    def _read(self, connection: Any) -> bytes | None:
        """Return the line once it is whole, else None. Drop a connection that ends, sends too much or fails TLS."""
        since, data = self._silent[connection]
        try:
            piece = connection.recv(_LINE_BYTES)  # over TLS this call also continues the handshake
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            return None
        except OSError:
            piece = b""
        data += piece
        if b"\n" in data:
            self._release(connection)
            return data.split(b"\n", 1)[0]
        if not piece or len(data) > _LINE_BYTES:
            self._release(connection).close()
        else:
            self._silent[connection] = since, data
        return None

    def _release(self, connection: Any) -> Any:
        self._selector.unregister(connection)
        del self._silent[connection]
        return connection


# ---------------------------------------------------------------------------------------------- the others


def _answer(gang: Gang, timeout_s: float, context: ssl.SSLContext | None, log: Log) -> Attendance:
    began, token = time.monotonic(), secrets.token_hex(8)
    progress, why = Progress(log, timeout_s), "nobody listens"
    while (left := began + timeout_s - time.monotonic()) > 0:
        try:
            # Process 0 may have started later than this process, so its timeout may end up to `timeout_s` later.
            return _ask(gang, token, min(left, _CONNECT_S), left + timeout_s, context)
        except (OSError, ValueError) as e:
            why = _reason(e)
        progress.say(f"waiting for the coordinator {gang.coordinator}: {why}")
        time.sleep(_RETRY_S)
    raise RunError(
        f"process {gang.process_id} of {gang.num_processes} did not reach the coordinator {gang.coordinator} within "
        f"{timeout_s:g} s: {why}.",
        hint="whether process 0 runs there, and whether the port is open between the machines",
    )


def _ask(gang: Gang, token: str, connect_s: float, answer_s: float, context: ssl.SSLContext | None) -> Attendance:
    """Introduce this process to process 0, and return the attendance that process 0 sends.

    Raises:
        OSError: nothing listens, or the other end hangs up or does not answer.
        ValueError: the answer does not come from a process 0 of this job.
    """
    said = {"id": gang.process_id, "of": gang.num_processes, "host": socket.gethostname()[:255], "token": token}
    with socket.create_connection(gang.address, timeout=connect_s) as plain:
        connection = context.wrap_socket(plain, server_hostname=gang.address[0]) if context else plain
        with connection:
            line = json.dumps({**said, "time": time.time()}).encode()
            connection.sendall(line + b"\n")
            connection.settimeout(min(GREETING_S, answer_s))
            greeting, rest = _read_line(connection)
            word, _, question = greeting.partition(b" ")
            proof = prove(gang, b"member", question, line)
            if word != _GREETING:
                raise ValueError
            if bool(question) != bool(proof):
                lacks = "what listens there does not know" if proof else "it asks for"
                raise _NoSecretError(f"{lacks} the job's secret ({SECRET})")
            if proof:
                connection.sendall(proof + b"\n")
            connection.settimeout(answer_s)
            answer, _ = _read_line(connection, rest)
            if proof:
                answer, _, theirs = answer.rpartition(b" ")
                if not hmac.compare_digest(theirs, prove(gang, b"attendance", token.encode(), answer)):
                    raise _NoSecretError(f"what listens there does not know the job's secret ({SECRET})")
            return TypeAdapter(Attendance).validate_json(answer)


class _NoSecretError(ValueError):
    """This process and the process at the other end do not share the job's secret."""


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not of this job: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError):
        return f"it and this process do not agree on certificates ({error.reason or error})"
    if isinstance(error, _NoSecretError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "what listens there does not answer"
    if isinstance(error, OSError):
        return (error.strerror or str(error)).lower()
    return "what listens there is no process of a job"


def _read_line(connection: socket.socket, data: bytes = b"") -> tuple[bytes, bytes]:
    """Return the next line, and the bytes received after it."""
    while b"\n" not in data:
        piece = connection.recv(1 << 16)
        data += piece
        if not piece:
            raise ConnectionResetError("it closed the connection")
        if len(data) > _ANSWER_BYTES:
            raise ValueError
    line, rest = data.split(b"\n", 1)
    return line, rest


def _printable(host: str) -> str:
    if not host.isprintable():
        raise ValueError
    return host
