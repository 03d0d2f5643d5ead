"""The launchers of a job on several hosts: they begin every attempt together, end it together, and keep copies.

    launcher of host 0 listens on the coordinator's port <- the others come, by mutual TLS, and wait
    all are there -> the port of this attempt's processes, and where each launcher keeps copies -> the attempt
    a process fails, a host is lost, a launcher gives up -> all others hear of it -> the next meeting, or the end

A launcher that is gone is waited for: whoever starts the same command again, on this or another machine, takes its
place. Its memory is then empty, and its neighbour has what its processes had (copies.py).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

from meshkit.distributed.certificates import MAKE_HINT, read_certificates
from meshkit.distributed.environment import MTLS, Gang, join_timeout_s, split_address
from meshkit.distributed.roll_call import Connections, Progress, bind_address, free_port, named, open_server
from meshkit.errors import INTERRUPTED, PREEMPTED, ConfigError, RunError
from meshkit.runs.snapshots import SnapshotMemory
from meshkit.verbs.launch.copies import Address, Channel, Keeper, SnapshotCopies, fetch_copies, keep_alive

_JOIN_S, _SAY_S, _AGAIN_S, _POLL_S = 300.0, 10.0, 0.2, 0.05
_LEAVE_S = 10.0  # for the others to hear that a launcher has given up
_LONGEST_LINE = 1 << 16


class EndedElsewhere(Exception):
    """Another launcher has ended the job, or a signal has ended this one while it waited for the others."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class Hosts:
    """This launcher's place among those of the other hosts. A context manager.

    Args:
        index: of this host, from 0.
        count: hosts of the job.
        processes: of each host.
        coordinator: host:port on which the launcher of host 0 listens.
        certificates: folder of them, which all hosts share.
        show: takes a line for the person who waits.

    Raises:
        ConfigError: there are no certificates, or they do not fit.
    """

    coordinator: str
    """Host:port of the first process of this attempt."""
    attempt: int
    """Number of this attempt, as host 0 counts."""

    def __init__(
        self,
        index: int,
        count: int,
        processes: int,
        coordinator: str,
        certificates: str | None,
        show: Callable[[str], None],
    ):
        if not certificates:
            raise ConfigError(
                "the launchers of several hosts meet by certificates, and there are none.",
                at=MTLS,
                hint=f"{MAKE_HINT}, and {MTLS}=DIR on every host; or --max-restarts 0",
            )
        self.index, self.count, self._processes, self._show = index, count, processes, show
        self._name = split_address(coordinator)[0]
        found = read_certificates(certificates, coordinator_host=self._name if index == 0 else None)
        self._channel = Channel(found.client(), found.server(), self._name)
        self._place = Gang(coordinator, count, index)  # of this launcher among the launchers
        self._wait_s = join_timeout_s(os.environ, otherwise=_JOIN_S)
        self._peers: dict[int, _Peer] = {}  # of host 0 all others, of another one host 0
        self._done: set[int] = set()  # hosts whose attempt is over, or that know that the job is
        self._is_new = True
        self._keepers: Sequence[Address] = ()  # by host, where it keeps copies
        self._keeper: Keeper | None = None
        self._server: socket.socket | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        """Listens, where this is host 0.

        Raises:
            RunError: the port is taken.
        """
        if self.index == 0:
            bind = bind_address(self._place.coordinator)
            try:
                self._server = self._stack.enter_context(open_server(self._place, bind))
            except OSError as e:
                raise RunError(
                    f"the launcher of host 0 cannot listen on {self._place.coordinator}: {e.strerror or e}.",
                    hint="a port that is free on its host",
                ) from None
            self._keep(split_address(bind)[0] if bind else "")
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()
        self._stack.close()

    @property
    def _settled(self) -> bool:
        """Whether no other host waits for a word of this one."""
        return len(self._done) == (self.count - 1 if self.index == 0 else 1)

    def _keep(self, host: str) -> Keeper:
        """Keeps copies of the processes of the host before this one, listening on this address."""
        if self._keeper is None:
            first = (self.index - 1) % self.count * self._processes
            ranks = range(first, first + self._processes)
            self._keeper = self._stack.enter_context(Keeper(host, self._channel, ranks))
        return self._keeper

    # ------------------------------------------------------------------------------------------ the meeting

    def meet(self, attempt: int, signals: Sequence[signal.Signals]) -> None:
        """Waits until the launchers of all hosts are there to begin an attempt.

        Args:
            attempt: its number, as this launcher counts.
            signals: that this launcher gets; the first ends the waiting.

        Raises:
            EndedElsewhere: a launcher has given up, or a signal has come.
            RunError: they do not come in time.
        """
        self._hang_up()
        self._done = set()
        self._meet({"host": self.index, "of": self.count, "attempt": attempt}, signals, self._wait_s)

    def withdraw(self, code: int) -> None:
        """Tells the others, who wait to begin another attempt, that this launcher has ended with an exit code."""
        if self._settled:
            return
        self._hang_up()
        with suppress(EndedElsewhere, RunError):
            self._meet({"host": self.index, "of": self.count, "attempt": 0, "stop": code}, (), _LEAVE_S)

    def _meet(self, mine: dict[str, Any], signals: Sequence[signal.Signals], wait_s: float) -> None:
        ends, progress = time.monotonic() + wait_s, Progress(self._show, wait_s)
        for missing in self._receive_all(mine) if self.index == 0 else self._come(mine):
            if signals:
                code = INTERRUPTED if signals[0] == signal.SIGINT else PREEMPTED
                raise EndedElsewhere(code, f"{signals[0].name} while the other hosts are waited for")
            if time.monotonic() > ends:
                raise RunError(
                    f"host {self.index} of {self.count} has waited {wait_s:.0f} s for {missing}.",
                    hint="the same `meshkit launch local` on every host, each with its own --host-index",
                )
            progress.say(f"host {self.index} waits for {missing}")

    def _receive_all(self, mine: dict[str, Any]) -> Iterator[str]:
        """Host 0: takes in the others; yields whom it misses, until all know how to begin or that it is over."""
        assert self._server is not None
        assert self._keeper is not None
        said = {0: mine | {"keeper": (self._name, self._keeper.port)}}
        with Connections(self._server, self._channel.server, keep=self.count) as connections:
            while len(said.keys() | self._done) < self.count:
                for line, connection in connections.lines(_POLL_S):
                    if (word := self._checked(line, connection)) is not None:
                        said[word["host"]] = word
                        self._peers[word["host"]] = _Peer(connection)
                for host in [host for host, peer in self._peers.items() if not peer.words() and peer.gone]:
                    del said[host], self._peers[host]
                self._tell_stop(said)
                yield f"hosts {named([i for i in range(self.count) if i not in said])}"
        if "stop" in mine:
            return
        coordinator = f"{self._place.coordinator.rpartition(':')[0]}:{free_port(self._name)}"
        keepers = [said[i]["keeper"] for i in range(self.count)]
        start = {"attempt": mine["attempt"], "coordinator": coordinator, "keepers": keepers}
        for peer in self._peers.values():
            peer.say(start=start)
        self._begin(**start)

    def _checked(self, line: bytes, connection: Any) -> dict[str, Any] | None:
        """Return a launcher's introduction; hang up and return None if it is not of this job."""
        try:
            word = json.loads(line)
            if word["of"] != self.count or word["host"] not in range(1, self.count):
                self._show(
                    f"a launcher says that it is host {word['host']} of {word['of']}, and is none of {self.count}"
                )
            elif word["host"] not in self._peers:  # else it is another one, or comes again before the first is gone
                keep_alive(connection)
                return word | {"keeper": (connection.getpeername()[0], word["keeper"])}
        except (ValueError, KeyError, TypeError, OSError):
            pass
        connection.close()
        return None

    def _tell_stop(self, said: dict[int, dict[str, Any]]) -> None:
        """Tells all who are there that it is over, where one says so."""
        host = next((host for host, word in sorted(said.items()) if "stop" in word), None)
        if host is None:
            return
        for peer in self._peers.values():
            peer.say(stop=said[host]["stop"], host=host)
        self._done |= self._peers.keys()
        if host != 0:
            raise _ended(host, said[host]["stop"])

    def _come(self, mine: dict[str, Any]) -> Iterator[str]:
        """Another host: goes to host 0, and waits for its word; yields what it waits for."""
        while True:
            try:
                connection = self._channel.connect(self._place.address)
                self._peers[0] = peer = _Peer(connection)
                peer.say(**mine, keeper=self._keep(connection.getsockname()[0]).port)
                while not peer.gone:
                    for word in peer.words():
                        if "stop" in word:
                            self._done.add(0)
                            raise _ended(word["host"], word["stop"])
                        if "start" in word:
                            self._begin(**word["start"])
                            return
                    yield "the launchers of the other hosts"
                    time.sleep(_POLL_S)
                why = "it hung up"
            except (OSError, ValueError) as e:
                why = getattr(e, "verify_message", None) or getattr(e, "strerror", None) or str(e)
            self._hang_up()
            yield f"the launcher of host 0 at {self._place.coordinator} ({why})"
            time.sleep(_AGAIN_S)

    def _begin(self, attempt: int, coordinator: str, keepers: Sequence[Address]) -> None:
        self.attempt, self.coordinator, self._keepers = attempt, coordinator, keepers

    # ------------------------------------------------------------------------------------------ the attempt

    def news(self) -> str | None:
        """Why this attempt ends, where another host has ended it; None while it goes on. Cheap."""
        for host, peer in list(self._peers.items()):
            for word in peer.words():
                if "failed" in word:
                    return self._pass_on(word["failed"])
                if "over" in word:
                    self._done.add(host)
            if peer.gone and host not in self._done:
                return self._pass_on(f"host {host} is lost")
        return None

    def failed(self, why: str) -> None:
        """Ends this attempt on all hosts.

        Args:
            why: one line for the others.
        """
        self._pass_on(f"host {self.index}: {why}")

    def _pass_on(self, why: str) -> str:
        for peer in self._peers.values():
            peer.say(failed=why)
        self._hang_up()
        self._done = set()
        return why

    def settle(self, timeout_s: float) -> str | None:
        """Waits until the processes of all hosts have ended well.

        Returns:
            Why they have not, where another host has failed meanwhile.
        """
        ends = time.monotonic() + timeout_s
        if self.index != 0:
            self._peers[0].say(over=True)
        while not self._settled:
            if (why := self.news()) is not None:
                return why
            if time.monotonic() > ends:
                self._done = set()  # all of them are yet to hear how this one ends
                return None
            time.sleep(_POLL_S)
        if self.index == 0:
            for peer in self._peers.values():
                peer.say(over=True)
        return None

    @contextmanager
    def sharing(self, memory: Sequence[SnapshotMemory]) -> Iterator[None]:
        """Fetches what a new launcher lacks, and copies what its processes take meanwhile to the next host.

        Args:
            memory: of each process here.
        """
        first, neighbour = self.index * self._processes, self._keepers[(self.index + 1) % self.count]
        held = {first + i: m for i, m in enumerate(memory) if m.slots}
        if held and self._is_new:  # once: what processes drop later is not to come back
            self._is_new = False
            try:
                if steps := fetch_copies(held, neighbour, self._channel):
                    which = f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
                    self._show(f"host {self.index} has its share of the snapshots of {which} from the next host")
            except (OSError, ValueError) as error:
                self._show(f"host {self.index} got no snapshots from the next host: {error}")
        with SnapshotCopies(held, neighbour, self._channel, self._show) if held else nullcontext():
            yield

    def _hang_up(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers = {}


class _Peer:
    """A connection to another launcher, of which no read waits."""

    def __init__(self, connection: ssl.SSLSocket):
        self._connection, self._data, self.gone = connection, b"", False
        connection.setblocking(False)

    def say(self, **words: Any) -> None:
        """Says a word of JSON; one that is gone does not hear it."""
        with suppress(OSError):
            self._connection.settimeout(_SAY_S)
            self._connection.sendall(json.dumps(words).encode() + b"\n")
        with suppress(OSError):
            self._connection.setblocking(False)

    def words(self) -> list[dict[str, Any]]:
        """Return the messages since the last call."""
        while not self.gone:
            try:
                piece = self._connection.recv(1 << 14)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                break
            except OSError:
                piece = b""
            self._data += piece
            self.gone = not piece or len(self._data) > _LONGEST_LINE
        *lines, self._data = self._data.split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            self.gone = True
            return []

    def close(self) -> None:
        with suppress(OSError):
            self._connection.close()


def _ended(host: int, code: int) -> EndedElsewhere:
    return EndedElsewhere(code, f"the launcher of host {host} has ended the job with exit code {code}; it says why")
