"""Let the launchers of several hosts, one on each, begin and end every attempt together and keep copies of snapshots.

    the launcher of host 0 listens on the coordinator's port <- the others connect by mutual TLS, and wait
    enough launchers are connected -> each gets a place or becomes a spare, and gets the port of the attempt -> attempt
    a process fails, a host is lost, or a launcher gives up -> all others get a message -> next meeting, or the end

An attempt is one start of all processes of the job, up to their end. A place is the number that a host has in one
attempt. When a launcher is lost, the others wait until the same command is started again, on the same or another
machine. The memory of the new launcher is empty, so it fetches its processes' snapshots from the launcher of the next
place, which keeps copies of them (copies.py).

A spare is a launcher without a place. It replaces a lost launcher in the next attempt. If there is no spare and the
lost launcher does not come back, the others go on with fewer hosts, if the experiment allows it. The mesh then changes,
so all launchers first write the snapshots that they hold into the run folder. The processes of the next attempt read
the parts that they need from there.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from meshkit.children import Child, ChildFailed
from meshkit.config.experiment import Experiment
from meshkit.config.sections import LaunchTable
from meshkit.distributed.certificates import MAKE_HINT, read_certificates
from meshkit.distributed.environment import MTLS, Gang, join_timeout_s, split_address
from meshkit.distributed.roll_call import Connections, Progress, bind_address, free_port, named, open_server
from meshkit.errors import DONE, INTERRUPTED, PREEMPTED, ConfigError, RunError
from meshkit.runs.snapshots import SNAPSHOTS, SnapshotMemory, write_snapshots
from meshkit.verbs.launch.copies import Address, Channel, Keeper, SnapshotCopies, fetch_copies, keep_alive

_JOIN_S, _SAY_S, _AGAIN_S, _POLL_S = 300.0, 10.0, 0.2, 0.05
_LEAVE_S = 10.0  # time limit for telling the others that this launcher has given up
_SPARE_S = 10.0  # how long a spare leaves a place to its launcher, whose processes may still be ending
_LONGEST_LINE = 1 << 16
_FEWER_HOSTS, _FIND_S = "meshkit.planning.fewer_hosts", 3600.0


class EndedElsewhere(Exception):
    """Another launcher has ended the job, or this launcher has received a signal while it waited for the others."""

    def __init__(self, code: int, text: str):
        super().__init__(text)
        self.code = code


class FewerHosts:
    """Finds the smaller numbers of hosts with which an experiment can go on, down to `launch.min_hosts`.

    This needs jax and the model, and may take minutes. So a child process computes the numbers while the job starts,
    and a thread waits for it.

    Args:
        experiment: the experiment of the job.
        show: prints a line for the user.
    """

    def __init__(self, experiment: Experiment, show: Callable[[str], None]):
        self._experiment, self._show = experiment, show
        self._numbers: Sequence[int] = ()
        threading.Thread(target=self._find, name="meshkit-fewer-hosts", daemon=True).start()

    def __call__(self) -> Sequence[int]:
        """Return the numbers, the largest first; none as long as they are not known."""
        return self._numbers

    def _find(self) -> None:
        document = self._experiment.document
        overrides = [override.raw for override in document.overrides] if document else []
        try:
            with Child(_FEWER_HOSTS) as child:
                request = {"file": self._experiment.file, "overrides": overrides}
                self._numbers = tuple(child.ask(request, timeout_s=_FIND_S))
        except (ChildFailed, TimeoutError, OSError) as error:
            why = str(error) or f"no answer within {_FIND_S:.0f} s"
            self._show(f"warning: this job cannot go on with fewer hosts; their meshes could not be computed: {why}")
        else:
            numbers = " or ".join(map(str, self._numbers)) or "no fewer"
            self._show(f"after the loss of hosts this job can go on with {numbers} hosts")


class Hosts:
    """The connections of this launcher to the launchers of the other hosts. A context manager.

    Args:
        index: the number of this launcher, from 0; for a spare it is `count` or more.
        count: the number of hosts of the job.
        processes: the number of processes on each host.
        coordinator: host:port on which the launcher of host 0 listens.
        certificates: folder of the job's certificates, which are the same on all hosts.
        show: prints a line for the user.
        folder: the run folder, on a file system that all hosts share.
        launch: how the job goes on after it has lost hosts; the same for all launchers.
        fewer: at host 0, returns the smaller numbers of hosts with which the job can go on, the largest first.

    Raises:
        ConfigError: there are no certificates, or they are not valid here.
    """

    coordinator: str
    """Host:port of the first process of this attempt."""
    attempt: int
    """Number of this attempt, as counted by host 0."""
    place: int
    """Place of this launcher in this attempt, from 0 to `size` - 1."""
    size: int
    """Number of hosts of this attempt."""

    def __init__(
        self,
        index: int,
        count: int,
        *,
        processes: int,
        coordinator: str,
        certificates: str | None,
        show: Callable[[str], None],
        folder: Path,
        launch: LaunchTable,
        fewer: Callable[[], Sequence[int]] = tuple,
    ):
        if not certificates:
            raise ConfigError(
                "the launchers of several hosts need certificates to connect, but there are none.",
                at=MTLS,
                hint=f"{MAKE_HINT}, and {MTLS}=DIR on every host; or --max-restarts 0",
            )
        self.index, self.count, self._processes, self._show = index, count, processes, show
        self._folder, self._launch, self._fewer = folder, launch, fewer
        self._name = split_address(coordinator)[0]
        found = read_certificates(certificates, coordinator_host=self._name if index == 0 else None)
        self._channel = Channel(found.client(), found.server(), self._name)
        self._among = Gang(coordinator, count + launch.spares, index)  # a gang of launchers, not of processes
        self._wait_s = join_timeout_s(os.environ, otherwise=max(_JOIN_S, 2 * launch.wait_s))
        self._peers: dict[int, _Peer] = {}  # At host 0: the launchers with a place. At others: host 0.
        self._present: dict[int, tuple[dict[str, Any], _Peer]] = {}  # At host 0: the launchers that wait for a place.
        self._done: set[int] = set()  # hosts whose processes have all ended well in this attempt
        self._members = set(range(count))  # hosts of the last attempt that do not know yet how the job has ended
        self._lost: set[int] = set()  # hosts of the last attempt whose launcher has disconnected
        self._over = False  # whether all other launchers know that the job is over
        self._was: tuple[int, int, int] | None = None  # attempt, place and size, when this launcher last had a place
        self._fetches = False  # whether this launcher, whose memory is empty, has to fetch snapshots
        self._is_sick = False  # whether `step_back` has been called
        self._memory: Sequence[SnapshotMemory] = ()
        self._keepers: Sequence[Address] = ()  # by place: the address of the launcher's `Keeper`
        self._keeper: Keeper | None = None
        self._connections: Connections | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Hosts:
        """Start to listen, if this is host 0.

        Raises:
            RunError: the port is taken.
        """
        if self.index == 0:
            bind = bind_address(self._among.coordinator)
            try:
                server = self._stack.enter_context(open_server(self._among, bind))
            except OSError as e:
                raise RunError(
                    f"the launcher of host 0 cannot listen on {self._among.coordinator}: {e.strerror or e}.",
                    hint="a port that is free on its host",
                ) from None
            keep = self.count + self._launch.spares
            self._connections = self._stack.enter_context(Connections(server, self._channel.server, keep=keep))
            self._open_keeper(split_address(bind)[0] if bind else "")
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()
        for waiting in self._present.values():
            waiting[1].close()
        self._present.clear()
        if self.index == 0:
            self._mark_spare()
        self._stack.close()

    @property
    def spare_file(self) -> str:
        """The file that exists while a healthy spare waits; empty for host 0, which no spare can replace."""
        return str(self._folder.absolute() / "spare") if self.index else ""

    def _mark_spare(self) -> None:
        """Host 0: make or remove the file that tells the processes of the other hosts whether a healthy spare waits."""
        path = self._folder / "spare"
        with suppress(OSError):
            if any(not message.get("sick") for message, _ in self._present.values()):
                path.touch()
            else:
                path.unlink(missing_ok=True)

    @property
    def overrides(self) -> list[str]:
        """The options of `meshkit train` that set the number of hosts of this attempt; none if it has all hosts."""
        return ["--set", f"launch.hosts={self.size}"] if self.size < self.count else []

    def _open_keeper(self, host: str) -> Keeper:
        """Return this launcher's `Keeper`; the first call opens it, listening on this address."""
        if self._keeper is None:
            self._keeper = self._stack.enter_context(Keeper(host, self._channel))
        return self._keeper

    def _ranks(self, place: int, size: int) -> range:
        first = place % size * self._processes
        return range(first, first + self._processes)

    # ------------------------------------------------------------------------------------------ the meeting

    def meet(self, attempt: int, signals: Sequence[signal.Signals]) -> None:
        """Wait until this launcher has a place in an attempt.

        Args:
            attempt: the number of the attempt, as counted by this launcher.
            signals: the signals that this launcher has received; the first one ends the waiting.

        Raises:
            EndedElsewhere: a launcher has given up, the job is done, or a signal has come.
            RunError: not enough launchers come in time.
        """
        self._hang_up()
        self._done = set()
        mine = {"host": self.index, "of": self.count, "attempt": attempt, "was": self._was, "sick": self._is_sick}
        self._meet(mine, signals, self._wait_s)

    def step_back(self) -> None:
        """From the next attempt on, take a place only if no other launcher can."""
        self._is_sick = True

    def withdraw(self, code: int) -> None:
        """Tell the other launchers that this one has ended with an exit code, so that none waits for it."""
        for _, peer in self._present.values():
            peer.send(stop=code, host=self.index)
        if self._over or code == DONE:
            return
        self._hang_up()
        with suppress(EndedElsewhere, RunError):
            mine = {"host": self.index, "of": self.count, "attempt": 0, "was": self._was, "stop": code}
            self._meet(mine, (), _LEAVE_S)

    def _meet(self, mine: dict[str, Any], signals: Sequence[signal.Signals], wait_s: float) -> None:
        ends, progress = time.monotonic() + wait_s, Progress(self._show, wait_s)
        for missing in self._gather(mine) if self.index == 0 else self._come(mine):
            if signals:
                code = INTERRUPTED if signals[0] == signal.SIGINT else PREEMPTED
                raise EndedElsewhere(code, f"{signals[0].name} while waiting for the other hosts")
            if missing is None:  # host 0 has answered this launcher, or launchers write snapshots: no time limit
                ends, progress = time.monotonic() + wait_s, Progress(self._show, wait_s)
                continue
            if time.monotonic() > ends:
                raise RunError(
                    f"host {self.index} of {self.count} has waited {wait_s:.0f} s for {missing}.",
                    hint="the same `meshkit launch local` on every host, each with its own --host-index",
                )
            progress.say(f"host {self.index} waits for {missing}")

    # -------------------------------------------------------------------------------- the meeting, at host 0

    def _gather(self, mine: dict[str, Any]) -> Iterator[str | None]:
        """Yield the missing hosts until the attempt has begun, or until all know that the job is over.

        While the launchers write their snapshots, this yields None.
        """
        assert self._keeper is not None
        began, mine = time.monotonic(), mine | {"keeper": (self._name, self._keeper.port)}
        while True:
            self._admit(_POLL_S)
            messages = {0: mine} | {host: message for host, (message, _) in self._present.items()}
            self._tell_stop(messages)
            missing: str | None = f"hosts {named([i for i in range(self.count) if i not in messages])}"
            if "stop" in mine:
                if self._members <= messages.keys():
                    return
            elif members := self._chosen(messages, time.monotonic() - began):
                if self._have_written(len(members), messages):
                    self._begin_with(members, messages)
                    return
                missing = None
            yield missing

    def _admit(self, timeout_s: float) -> None:
        """Add new launchers to `_present`, read the messages of all launchers in it, and remove disconnected ones."""
        assert self._connections is not None
        for line, connection in self._connections.lines(timeout_s):
            if (message := self._checked(line, connection)) is not None:
                self._present[message["host"]] = message, _Peer(connection)
        for host, (message, peer) in list(self._present.items()):
            for answer in peer.messages():
                message |= answer
            if peer.gone:
                del self._present[host]

    def _checked(self, line: bytes, connection: Any) -> dict[str, Any] | None:
        """Return a launcher's first message.

        If it is not of this job, or if its host is connected already, close the connection and return None.
        """
        try:
            message = json.loads(line)
            most = self.count + self._launch.spares
            if message["of"] != self.count or message["host"] not in range(1, most):
                said = f"--hosts {message['of']} --host-index {message['host']}"
                fits = f"--hosts {self.count} and an index of 1 to {most - 1}"
                self._show(f"refused a launcher with {said}: this job needs {fits}")
            elif message["host"] not in self._peers.keys() | self._present.keys():
                keep_alive(connection)
                return message | {"keeper": (connection.getpeername()[0], message["keeper"])}
        except (ValueError, KeyError, TypeError, OSError):
            pass
        connection.close()
        return None

    def _tell_stop(self, messages: dict[int, dict[str, Any]]) -> None:
        """If a launcher has reported that the job is over, pass this on to all present launchers.

        Raises:
            EndedElsewhere: a launcher of another host has reported it.
        """
        host = next((host for host, message in sorted(messages.items()) if "stop" in message), None)
        if host is None:
            return
        for peer in (peer for _, peer in self._present.values()):
            peer.send(stop=messages[host]["stop"], host=host)
        self._members -= self._present.keys()
        if host != 0:
            self._over = self._members <= {0}
            raise _ended(host, messages[host]["stop"])

    def _chosen(self, messages: dict[int, dict[str, Any]], waited_s: float) -> list[int]:
        """Return the hosts that get a place, host 0 first; an empty list while more hosts are waited for."""
        last, had_place = _last_places(messages)
        order = sorted(
            messages,
            key=lambda host: (host != 0, messages[host].get("sick", False), host not in had_place.values(), host),
        )
        complete = len(had_place) == (last[1] if last else -1)  # all hosts of the last attempt are here
        if len(messages) >= self.count:
            all_come = self._members - messages.keys() <= self._lost
            if all_come or complete or waited_s > (self._launch.wait_s if last is None else _SPARE_S):
                return order[: self.count]
        elif complete or (last is not None and waited_s > self._launch.wait_s):
            fits = next((size for size in self._fewer() if size <= len(messages)), 0)
            return order[:fits]
        return []

    def _have_written(self, size: int, messages: dict[int, dict[str, Any]]) -> bool:
        """If the next attempt has another size, have all launchers write their snapshots; return whether all have."""
        last, had_place = _last_places(messages)
        if last is None or last[1] == size:
            return True
        lost = [place for place in range(last[1]) if place not in had_place]
        for message, peer in self._present.values():
            if message.get("asked") != lost:
                message["asked"] = lost
                peer.send(write=lost)
        if messages[0].get("written") != lost:
            self._write(lost)
            messages[0]["written"] = lost
        return all(message.get("written") == lost for message in messages.values())

    def _begin_with(self, members: Sequence[int], messages: dict[int, dict[str, Any]]) -> None:
        """Assign the places, and send every launcher its place (None for a spare) and the attempt's settings."""
        last, had_place = _last_places(messages)
        size, stay = len(members), last is not None and last[1] == len(members)
        places = {place: host for place, host in had_place.items() if host in members} if stay else {}
        others = iter(sorted(host for host in members if host not in places.values()))
        places = {place: places[place] if place in places else next(others) for place in range(size)}
        coordinator = f"{self._among.coordinator.rpartition(':')[0]}:{free_port(self._name)}"
        keepers = [messages[places[place]]["keeper"] for place in range(size)]
        start = {"attempt": messages[0]["attempt"], "coordinator": coordinator, "keepers": keepers}
        start["moved"] = last is not None and not stay
        by_host = {host: place for place, host in places.items()}
        for host, (_, peer) in self._present.items():
            peer.send(start=start | {"place": by_host.get(host)})
        self._peers = {host: self._present.pop(host)[1] for host in by_host if host != 0}
        for message, _ in self._present.values():  # these are spares, which stay connected
            message["was"] = None
        self._members, self._lost = set(by_host), set()
        self._mark_spare()
        self._begin(**start, place=by_host[0])

    # ------------------------------------------------------------------------- the meeting, at another host

    def _come(self, mine: dict[str, Any]) -> Iterator[str | None]:
        """Connect to host 0 and wait for a place; yield what is missing, or None once host 0 has sent a message."""
        while True:
            try:
                connection = self._channel.connect(self._among.address)
                self._peers[0] = peer = _Peer(connection)
                peer.send(**mine, keeper=self._open_keeper(connection.getsockname()[0]).port)
                missing: str | None = "the launchers of the other hosts"
                while not peer.gone:
                    for message in peer.messages():
                        if "stop" in message:
                            self._over = True
                            raise _ended(message["host"], message["stop"])
                        if "start" in message and self._begin(**message["start"]):
                            return
                        if "write" in message:
                            self._write(message["write"])
                            peer.send(written=message["write"])
                        missing = None
                    yield missing
                    time.sleep(_POLL_S)
                why = "it hung up"
            except (OSError, ValueError) as e:
                why = getattr(e, "verify_message", None) or getattr(e, "strerror", None) or str(e)
            self._hang_up()
            yield f"the launcher of host 0 at {self._among.coordinator} ({why})"
            time.sleep(_AGAIN_S)

    def _begin(
        self, attempt: int, coordinator: str, keepers: Sequence[Address], moved: bool, place: int | None
    ) -> bool:
        """Take this launcher's place in an attempt; return False if it has none, because it is a spare."""
        if place is None:
            self._show(f"host {self.index} is a spare")
            for memory in self._memory:  # the job goes on without this launcher, whose snapshots become outdated
                memory.clear()
            self._was = None
            return False
        self.attempt, self.coordinator, self._keepers = attempt, coordinator, keepers
        self.place, self.size = place, len(keepers)
        if place != self.index:
            self._show(f"host {self.index} takes place {place} of {self.size}")
        if self.size < self.count and self.index == 0:
            self._show(f"{self.size} of {self.count} hosts go on, on a smaller mesh (launch.hosts = {self.size})")
        self._fetches, self._was = self._was is None and not moved, (attempt, place, self.size)
        assert self._keeper is not None
        self._keeper.keep(self._ranks(place - 1, self.size), anew=moved)
        return True

    def _write(self, lost: Sequence[int]) -> None:
        """Write this host's snapshots, and its copies of the previous host's if that is lost, into the run folder."""
        if self._was is None or self._keeper is None:
            return
        _, place, size = self._was
        held = dict(zip(self._ranks(place, size), self._memory))
        if (place - 1) % size in lost:
            held |= self._keeper.memory
        try:
            write_snapshots(held, size * self._processes, self._folder / SNAPSHOTS)
        except OSError as error:
            self._show(f"host {self.index} cannot write its snapshots to {self._folder / SNAPSHOTS}: {error}")

    # ------------------------------------------------------------------------------------------ the attempt

    def news(self) -> str | None:
        """Return why another host has ended this attempt; None while it goes on. Does not wait, so it may be polled."""
        for host, peer in list(self._peers.items()):
            for message in peer.messages():
                if "failed" in message:
                    return self._pass_on(message["failed"])
                if "over" in message:
                    self._done.add(host)
            if peer.gone and host not in self._done:
                self._lost.add(host)
                return self._pass_on(f"host {host} is lost")
        if self.index == 0:
            known = set(self._present)
            self._admit(0.0)
            for host in self._present.keys() - known:  # it can join at the next meeting
                self._present[host][1].send(wait=True)
            if self._present.keys() != known:
                self._mark_spare()
        return None

    def failed(self, why: str) -> None:
        """End this attempt on all hosts.

        Args:
            why: the reason, in one line, for the other hosts.
        """
        self._pass_on(f"host {self.index}: {why}")

    def _pass_on(self, why: str) -> str:
        for peer in self._peers.values():
            peer.send(failed=why)
        self._hang_up()
        return why

    def settle(self, timeout_s: float) -> str | None:
        """Wait until the processes of all hosts have ended well, or for `timeout_s`.

        Returns:
            The reason if another host has failed or is lost meanwhile, else None.
        """
        ends = time.monotonic() + timeout_s
        if self.index != 0:
            self._peers[0].send(over=True)
        while not self._done >= self._peers.keys():
            if (why := self.news()) is not None:
                return why
            if time.monotonic() > ends:
                return None
            time.sleep(_POLL_S)
        if self.index == 0:
            for peer in self._peers.values():
                peer.send(over=True)
        self._over = True
        return None

    @contextmanager
    def sharing(self, memory: Sequence[SnapshotMemory]) -> Iterator[None]:
        """Copy new snapshots to the next host while the block runs. A new launcher first fetches old ones from there.

        Args:
            memory: the snapshot memory of each process here.
        """
        self._memory, neighbour = memory, self._keepers[(self.place + 1) % self.size]
        alone = self.size == 1
        held = {r: m for r, m in zip(self._ranks(self.place, self.size), memory) if m.slots and not alone}
        if held and self._fetches:  # not in later attempts: the next host may keep what processes here have dropped
            try:
                if steps := fetch_copies(held, neighbour, self._channel):
                    which = f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"
                    self._show(f"host {self.index} received its share of the snapshots of {which} from the next host")
            except (OSError, ValueError) as error:
                self._show(f"host {self.index} got no snapshots from the next host: {error}")
        with SnapshotCopies(held, neighbour, self._channel, self._show) if held else nullcontext():
            yield

    def _hang_up(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers = {}


def _last_places(messages: dict[int, dict[str, Any]]) -> tuple[tuple[int, int] | None, dict[int, int]]:
    """Return (number, size) of the last attempt in which launchers had a place, or None, and its {place: host}."""
    had = {host: message["was"] for host, message in messages.items() if message["was"]}
    last = max(((attempt, size) for attempt, _, size in had.values()), default=None)
    return last, {place: host for host, (attempt, place, size) in had.items() if (attempt, size) == last}


class _Peer:
    """A connection to another launcher, with non-blocking reads."""

    def __init__(self, connection: ssl.SSLSocket):
        self._connection, self._data, self.gone = connection, b"", False
        connection.setblocking(False)

    def send(self, **message: Any) -> None:
        """Send a message as one line of JSON; errors of a broken connection are ignored."""
        with suppress(OSError):
            self._connection.settimeout(_SAY_S)
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        with suppress(OSError):
            self._connection.setblocking(False)

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages received since the last call."""
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
    return EndedElsewhere(code, f"the launcher of host {host} ended the job with exit code {code}; its output says why")
