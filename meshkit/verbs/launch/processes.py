"""The processes of one attempt on this machine, started and killed together, and what the end of each means.

commands, environments -> a reaper for each -> poll until one fails or all are done -> the reapers kill all below them
exit code or signal -> Ending -> final, or what a restart may mend (also the batch scripts' and pod policies' rule)
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from meshkit.errors import BUG, CONDITION, DONE, INTERRUPTED, PREEMPTED, RUN_FAILED, USER_ERROR, ConfigError

_POLL_S, _START_S = 0.02, 60.0
_REAPER = str(Path(__file__).with_name("reaper.py"))

# Nothing that a restart changes: the experiment is wrong, a condition is not met, a person stopped it.
FINAL = (DONE, USER_ERROR, CONDITION, INTERRUPTED)

_MEANINGS = {
    DONE: "done",
    BUG: "an exception; its traceback is in the log",
    USER_ERROR: "what the user gave is wrong",
    CONDITION: "a condition the user asked for is not met",
    RUN_FAILED: "the run failed and may be restarted",
    PREEMPTED: "preempted; a checkpoint is saved",
    INTERRUPTED: "interrupted",
}
_SIGNALS = {
    signal.SIGKILL: "out of memory, or killed from outside",
    signal.SIGABRT: "a fatal error of jax or NCCL, often because another process is gone",
    signal.SIGBUS: "often a full /dev/shm",
}


@dataclass(frozen=True)
class Ending:
    """How a process ended."""

    code: int
    """Its exit code, or minus the signal that killed it."""

    @property
    def is_final(self) -> bool:
        """Whether a restart cannot help, or is not wanted."""
        return self.code in FINAL

    @property
    def is_restartable(self) -> bool:
        """Whether this launcher starts the gang again. Not after a preemption: the machine is about to be taken."""
        return not self.is_final and self.code != PREEMPTED

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code} ({_MEANINGS.get(self.code, 'unknown')})"
        try:
            number = signal.Signals(-self.code)
        except ValueError:
            return f"killed by signal {-self.code}"
        cause = _SIGNALS.get(number)
        return f"killed by {number.name}" + (f" ({cause})" if cause else "")


@dataclass
class Member:
    """One process of the gang, which leads a session of its own below a reaper."""

    rank: int
    """Its number in the job."""
    reaper: subprocess.Popen
    """Its parent, from which it gets what it has."""
    channel: socket.socket
    """To the reaper, which ends everything once this end is closed."""
    log: Path
    """What it and its children print."""
    pid: int = 0
    """Its own for as long as the reaper runs, which leaves it a zombie."""
    ending: Ending | None = None
    """None while it runs."""
    ended_s: float = 0.0
    """Seconds after the start of the gang."""


@dataclass
class LocalGang:
    """The processes of one attempt. A context manager: on leaving it, none of them and of their descendants is left.

    Args:
        command: what every process runs.
        environments: of each process, by rank.
        logs: folder of `rank0.log`, `rank1.log`, ...; made if missing. What is there is not written over.
        first_rank: of the processes here, where other machines run the ones before.
        descriptors: one that each process inherits; none by default.
    """

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    logs: Path
    first_rank: int = 0
    descriptors: Sequence[int] = ()
    members: list[Member] = field(default_factory=list)
    _started: float = 0.0

    def __enter__(self) -> LocalGang:
        """Starts them all.

        Raises:
            ConfigError: a log cannot be written, or the program is not there.
        """
        self._started = time.monotonic()
        rank = self.first_rank
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            for i, environment in enumerate(self.environments):
                rank, log = self.first_rank + i, self.logs / f"rank{self.first_rank + i}.log"
                with log.open("xb") as output:
                    reaper, channel = _start(environment, output, self.descriptors[i : i + 1])
                self.members.append(Member(rank, reaper, channel, log))
                channel.sendall(json.dumps(list(self.command)).encode() + b"\n")
            for member in self.members:
                rank, said = member.rank, _line(member.channel, _START_S)
                if not said.isdecimal():
                    raise OSError(said or f"its reaper has ended; {member.log} may say why")
                member.pid = int(said)
        except OSError as e:
            self.kill()
            raise ConfigError(f"process {rank} cannot be started: {e}.") from None
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> list[Member]:
        """The processes that have ended since the last call, the first of them first."""
        ended = [member for member in self.members if member.ending is None and self._has_ended(member)]
        return sorted(ended, key=lambda member: member.ended_s)

    def _has_ended(self, member: Member) -> bool:
        try:
            code, _, at = _line(member.channel, 0.0).partition(" ")
        except BlockingIOError:
            return False
        if not code:  # the reaper was killed, and the process with it
            code = str(member.reaper.wait() or -signal.SIGKILL)
        member.ending = Ending(int(code))
        member.ended_s = (float(at) if at else time.monotonic()) - self._started
        return True

    @property
    def running(self) -> list[Member]:
        """Those that have not ended, by the last poll."""
        return [member for member in self.members if member.ending is None]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to every process group, also to what is left of one whose leader has ended."""
        for member in self.members:
            if member.pid and member.reaper.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left, or (macOS) zombies only
                    os.killpg(member.pid, number)

    def stop(self, grace_s: float) -> None:
        """SIGTERM, at most `grace_s` seconds for the processes to end, then SIGKILL."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.running and time.monotonic() < deadline:
            self.poll()
            time.sleep(_POLL_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to all that the processes have started and to them, a stopped one too; returns when they are gone."""
        for member in self.members:
            if member.reaper.poll() is None:
                with contextlib.suppress(OSError):
                    member.channel.shutdown(socket.SHUT_WR)
                member.reaper.send_signal(signal.SIGCONT)
        for member in self.members:
            member.reaper.wait()
            if member.ending is None and member.pid:  # what a reaper that has ended wrote, or the end of its socket
                self._has_ended(member)
            member.channel.close()


def _start(
    environment: Mapping[str, str], output: IO[bytes], kept: Sequence[int]
) -> tuple[subprocess.Popen, socket.socket]:
    """A reaper, which waits for its command, and the socket to it."""
    ours, theirs = socket.socketpair()
    with theirs:
        reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", _REAPER, str(theirs.fileno())],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(theirs.fileno(), *kept),
        )
    return reaper, ours


def _line(channel: socket.socket, timeout_s: float) -> str:
    """A line from the reaper, which writes each at once; empty where it has ended.

    Raises:
        BlockingIOError: there is none, and it is not waited for.
        TimeoutError: none came.
    """
    channel.settimeout(timeout_s)
    said = b""
    with contextlib.suppress(ConnectionError):
        while not said.endswith(b"\n") and (more := channel.recv(1)):
            said += more
    return said.decode().strip()
