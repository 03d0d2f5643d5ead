"""The processes of one attempt on this machine, started and killed together, and what the end of each means.

commands, environments -> start -> poll until one fails or all are done -> kill every process group
exit code or signal -> Ending -> final, or what a restart may mend (also the batch scripts' and pod policies' rule)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from meshkit.errors import ConfigError

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02

DONE, BUG, USER_ERROR, CONDITION, RUN_FAILED, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 4, 75, 130
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
    """One process of the gang, which leads a process group of its own."""

    rank: int
    """Its number in the job."""
    process: subprocess.Popen
    """As subprocess knows it; not reaped before its group is killed, so that its number stays its own."""
    log: Path
    """What it and its children print."""
    ending: Ending | None = None
    """None while it runs."""
    ended_s: float = 0.0
    """Seconds after the start of the gang."""


@dataclass
class LocalGang:
    """The processes of one attempt. A context manager: on leaving it, none of them and of their children is left.

    Args:
        command: what every process runs.
        environments: of each process, by rank.
        logs: folder of `rank0.log`, `rank1.log`, ...; made if missing.
        first_rank: of the processes here, where other machines run the ones before.
    """

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    logs: Path
    first_rank: int = 0
    members: list[Member] = field(default_factory=list)
    _started: float = 0.0

    def __enter__(self) -> LocalGang:
        """Starts them all.

        Raises:
            ConfigError: a log cannot be written, or the program is not there.
        """
        self._started = time.monotonic()
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            for i, environment in enumerate(self.environments):
                rank = self.first_rank + i
                log = self.logs / f"rank{rank}.log"
                with log.open("wb") as output:
                    self.members.append(Member(rank, _start(self.command, environment, output), log))
        except OSError as e:
            self.kill()
            raise ConfigError(f"process {len(self.members)} cannot be started: {e}.") from None
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> list[Member]:
        """The processes that have ended since the last call."""
        ended = []
        for member in self.members:
            if member.ending is None and (ending := _ending(member.process)) is not None:
                member.ending, member.ended_s = ending, time.monotonic() - self._started
                ended.append(member)
        return ended

    @property
    def running(self) -> list[Member]:
        """Those that have not ended, by the last poll."""
        return [member for member in self.members if member.ending is None]

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to every process group, also to what is left of one whose leader has ended."""
        for member in self.members:
            if member.process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left, or (macOS) zombies only
                    os.killpg(member.process.pid, number)

    def stop(self, grace_s: float) -> None:
        """SIGTERM, at most `grace_s` seconds for the processes to end, then SIGKILL."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.running and time.monotonic() < deadline:
            self.poll()
            time.sleep(_POLL_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process group, then reaps the processes. A stopped process (SIGSTOP) dies of it too."""
        self.signal(signal.SIGKILL)
        for member in self.members:
            if member.process.returncode is None:
                code = member.process.wait()
                member.ending = member.ending or Ending(code)


def _start(command: Sequence[str], environment: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen:
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_dies_with_parent(),
    )


def _dies_with_parent():
    """Run in the new process: the kernel kills it when the supervisor is gone. None where the system is not Linux."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it was gone before the kernel knew
            os._exit(1)

    return in_child


def _ending(process: subprocess.Popen) -> Ending | None:
    """How the process ended, if it has; it stays a zombie, so that nobody else gets its number."""
    if not hasattr(os, "waitid"):  # macOS
        code = process.poll()
        return None if code is None else Ending(code)
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return Ending(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)
