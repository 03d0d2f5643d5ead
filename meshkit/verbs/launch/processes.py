"""Start and kill the processes of one attempt on this machine together, and find a process that makes no progress.

    command, environments -> a reaper for each process -> poll until one fails or all are done -> the reapers kill all
    exit code or signal -> Ending -> final, or a restart may help (batch scripts and pod policies use the same rule)
    Pulse of each process (runs/phases.py), its state in /proc -> Watchdog.look() -> the process that others wait for

jax's heartbeats find a process that is gone. They do not find a process that is stopped for less than their timeout, or
one that waits for data or in a collective. Such a process keeps all others waiting forever.

The processes are on this machine, so the kernel reports whether each is running or stopped, and its CPU time. No
process needs a heartbeat thread, which a library that holds the GIL would block. A process itself only reports its
progress. Without new progress it counts as stuck after the limit of its phase, whether it is busy or not.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from meshkit.config.files import open_regular
from meshkit.errors import BUG, CONDITION, DONE, DRAINED, INTERRUPTED, PREEMPTED, RUN_FAILED, USER_ERROR, ConfigError
from meshkit.runs.hang import Witness
from meshkit.runs.limits import AWAY_S, Limits
from meshkit.runs.phases import Pulse

_POLL_S, _START_S = 0.02, 60.0
_REAPER = str(Path(__file__).with_name("reaper.py"))

# Exit codes after which a restart cannot help: done, wrong input, an unmet condition, stopped by the user.
FINAL = (DONE, USER_ERROR, CONDITION, INTERRUPTED)

_MEANINGS = {
    DONE: "done",
    BUG: "an exception; its traceback is in the log",
    USER_ERROR: "what the user gave is wrong",
    CONDITION: "a condition the user asked for is not met",
    RUN_FAILED: "the run failed and may be restarted",
    PREEMPTED: "preempted; a checkpoint is saved",
    DRAINED: "a spare is to replace its host; a snapshot is taken",
    INTERRUPTED: "interrupted",
}
_SIGNALS = {
    signal.SIGKILL: "out of memory, or killed from outside",
    signal.SIGABRT: "a fatal error of jax or NCCL, often because another process is gone",
    signal.SIGBUS: "often a full /dev/shm",
}
_LOOK_EVERY_S = 0.5
# Seconds for the processes to print their stacks. On Linux the kernel reports when each has printed them.
_STACKS_S, _STACKS_ELSEWHERE_S = 10.0, 2.0
_MOST_OF_STACKS = 1 << 20
# Phases before the training loop, in which there is nothing to save, and phases in which a checkpoint may be written.
_BEFORE_STEPS, _FINISHING = ("start", "compile", "restore", "init"), ("save", "end")
_NEVER = float("inf")
STOPPED = "has been stopped (SIGSTOP)"


@dataclass(frozen=True)
class Ending:
    """How a process ended."""

    code: int
    """Its exit code, or minus the signal that killed it."""

    @property
    def is_final(self) -> bool:
        """Whether the code is in `FINAL`."""
        return self.code in FINAL

    @property
    def is_restartable(self) -> bool:
        """Whether this launcher restarts the gang. It does not after a preemption, which takes the machine away."""
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
    """One process of the gang. It is the child of a reaper, and leads its own session."""

    rank: int
    """The rank of the process in the job."""
    reaper: subprocess.Popen
    """The parent, from which the process inherits its environment and descriptors."""
    channel: socket.socket
    """Socket to the reaper, which kills the process and its children once this end is closed."""
    log: Path
    """The log of the process and its children."""
    pid: int = 0
    """Valid as long as the reaper runs, because an ended process stays a zombie."""
    ending: Ending | None = None
    """None while the process runs."""
    ended_s: float = 0.0
    """When the process ended, in seconds after the start of the gang."""


@dataclass
class LocalGang:
    """The processes of one attempt. A context manager: leaving it kills them and all their descendants.

    Args:
        command: the command that every process runs.
        environments: the environment of each process, by rank.
        logs: folder for `rank0.log`, `rank1.log`, ...; made if missing. Existing logs are not overwritten.
        first_rank: the rank of the first process here; other machines run the lower ranks.
        descriptors: for each process, the file descriptors that it inherits; none by default.
    """

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    logs: Path
    first_rank: int = 0
    descriptors: Sequence[Sequence[int]] = ()
    members: list[Member] = field(default_factory=list)
    began: float = 0.0
    """When the processes were started, or left standby, by `time.monotonic`."""

    def __enter__(self) -> LocalGang:
        """Start all processes.

        Raises:
            ConfigError: a log cannot be written, or the program is not there.
        """
        self.began = time.monotonic()
        rank = self.first_rank
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            for i, environment in enumerate(self.environments):
                rank, log = self.first_rank + i, self.logs / f"rank{self.first_rank + i}.log"
                with log.open("xb") as output:
                    reaper, channel = _start(environment, output, self.descriptors[i] if self.descriptors else ())
                self.members.append(Member(rank, reaper, channel, log))
                channel.sendall(json.dumps(list(self.command)).encode() + b"\n")
            for member in self.members:
                rank, said = member.rank, _line(member.channel, _START_S)
                if not said.isdecimal():
                    raise OSError(said or f"its supervising process has ended; {member.log} may say why")
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

    def begin(self, logs: Path) -> None:
        """Set the start to now, because the processes leave standby; their logs have moved to the folder `logs`."""
        self.began = time.monotonic()
        for member in self.members:
            member.log = logs / member.log.name

    def poll(self) -> list[Member]:
        """Return the processes that have ended since the last call, in the order in which they ended."""
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
        member.ended_s = (float(at) if at else time.monotonic()) - self.began
        return True

    @property
    def running(self) -> list[Member]:
        """The processes that had not ended at the last poll."""
        return [member for member in self.members if member.ending is None]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every process group, including groups whose leader has ended."""
        for member in self.members:
            if member.pid and member.reaper.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # none left, or (macOS) only zombies
                    os.killpg(member.pid, number)

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, wait at most `grace_s` seconds for the processes to end, then kill them."""
        self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.running and time.monotonic() < deadline:
            self.poll()
            time.sleep(_POLL_S)
        self.kill()

    def kill(self) -> None:
        """Kill the processes and their descendants, stopped ones included; return when they are gone."""
        for member in self.members:
            if member.reaper.poll() is None:
                with contextlib.suppress(OSError):
                    member.channel.shutdown(socket.SHUT_WR)
                member.reaper.send_signal(signal.SIGCONT)
        for member in self.members:
            member.reaper.wait()
            if member.ending is None and member.pid:  # the reaper's last line or its closed socket tells how
                self._has_ended(member)
            member.channel.close()


def _start(
    environment: Mapping[str, str], output: IO[bytes], kept: Sequence[int]
) -> tuple[subprocess.Popen, socket.socket]:
    """Start a reaper, which then waits for its command; return it and the socket to it."""
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
    """Return a line from the reaper, which writes each line in one piece; "" if the reaper has ended.

    Raises:
        BlockingIOError: there is no line, and `timeout_s` is 0.
        TimeoutError: no line came in time.
    """
    channel.settimeout(timeout_s)
    said = b""
    with contextlib.suppress(ConnectionError):
        while not said.endswith(b"\n") and (more := channel.recv(1)):
            said += more
    return said.decode().strip()


@dataclass
class _Seen:
    """The last pulse of a process and the time at which it changed; `stopped_at` is None unless it is stopped."""

    moves: int = -1
    phase: str = "start"
    step: int = 0
    moved_at: float = 0.0
    cpu_s: float = 0.0
    cpu_at_move_s: float = 0.0
    stopped_at: float | None = None

    def shift(self, seconds: float) -> None:
        """Leave these seconds, in which the watchdog itself did not run, out of all ages."""
        self.moved_at += seconds
        if self.stopped_at is not None:
            self.stopped_at += seconds


@dataclass(frozen=True)
class Stuck:
    """A process that holds up the job."""

    member: Member
    """The process."""
    why: str
    """The reason, in one line for the user."""


class Watchdog:
    """Find stuck processes of a gang by their pulses.

    Args:
        pulses: the pulse of each member, in the order of the gang.
        limits: the limits after which a process counts as stuck.
        wait_s: additional seconds in a phase, in which `HangWatch` can name the hang.
        clock: returns seconds.
    """

    def __init__(
        self,
        pulses: Sequence[Pulse],
        limits: Limits,
        *,
        wait_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._pulses, self._limits, self._wait_s, self._clock = pulses, limits, wait_s, clock
        self._seen = [_Seen(moved_at=clock()) for _ in pulses]
        self._looked = clock()

    def look(self, gang: LocalGang) -> Stuck | None:
        """Return the process that holds up the others, if there is one. Cheap: checks at most twice a second."""
        now = self._clock()
        if (since := now - self._looked) < _LOOK_EVERY_S:
            return None
        self._looked = now
        for seen in self._seen if since > AWAY_S else ():
            seen.shift(since)
        running = [(m, self._last(m, gang)) for m in gang.running]
        return self._stopped(running, now) or self._late(running, now)

    def starts(self) -> list[dict[str, float]] | None:
        """Return for each process the seconds by part of its start; None until all have made their first step."""
        found = [pulse.read_parts() for pulse in self._pulses]
        return [parts for parts in found if parts] if all(found) else None

    def where(self, member: Member, gang: LocalGang) -> str:
        """Return the last reported activity of a process."""
        seen = self._last(member, gang)
        return _where(seen) if seen.moves >= 0 else "before its first sign of life"

    def has_left(self, member: Member, gang: LocalGang) -> bool:
        """Return whether the last reported phase of an ended process is not `end`: it left in the midst of its work."""
        seen = self._last(member, gang)
        return seen.moves >= 0 and seen.phase != "end"

    def before_steps(self, gang: LocalGang) -> bool:
        """Return whether no process has reached the training loop, so that there was nothing to save."""
        return all(self._before_steps(member, gang) for member in gang.members)

    def _before_steps(self, member: Member, gang: LocalGang) -> bool:
        """Return whether a process was before the training loop. Without a pulse, only death by SIGTERM shows it."""
        seen = self._last(member, gang)
        known = seen.moves >= 0 or member.ending == Ending(-signal.SIGTERM)
        return known and seen.phase in _BEFORE_STEPS

    def finishing(self, gang: LocalGang) -> bool:
        """Return whether a running process is writing a checkpoint or about to end."""
        return any(self._last(member, gang).phase in _FINISHING for member in gang.running)

    def _stopped(self, running: list[tuple[Member, _Seen]], now: float) -> Stuck | None:
        stopped = [(s.stopped_at, m, s) for m, s in running if s.stopped_at is not None]
        since, member, seen = min(stopped, key=lambda found: found[0], default=(now, None, None))
        if member is None or seen is None or now - since <= (self._limits.stopped_s or _NEVER):
            return None
        return Stuck(member, f"{STOPPED} for {now - since:.0f} s, {_where(seen)}")

    def _late(self, running: list[tuple[Member, _Seen]], now: float) -> Stuck | None:
        if not self._limits.silent_too:
            running = [(member, seen) for member, seen in running if seen.moves >= 0]
        if not any(now - s.moved_at > self._limits.of(s.phase) + self._wait_s for _, s in running):
            return None
        # The others wait for the process that is furthest behind; among equals, for a stopped one.
        behind = lambda member, seen: (_witness(member, seen, now).place, seen.stopped_at is None, seen.moved_at)
        member, seen = min(running, key=lambda pair: behind(*pair))
        others = f"; {len(running) - 1} others wait" if len(running) > 1 else ""
        cpu_s = seen.cpu_s - seen.cpu_at_move_s
        used = f" ({cpu_s:.1f} s of CPU time)" if sys.platform == "linux" else ""
        return Stuck(member, f"has not moved for {now - seen.moved_at:.0f} s{used}, {_where(seen)}{others}")

    def witnesses(self, gang: LocalGang) -> list[Witness]:
        """Return the state of every running process here. Each prints the stacks of its threads into its log.

        A stopped process is continued for that. On Linux this waits until /proc shows that each process has handled the
        signal, at most 10 s. On other systems it waits 2 s.
        """
        now = self._clock()
        found = [_witness(member, self._last(member, gang), now) for member in gang.running]
        before = [member.log.stat().st_size for member in gang.running]
        members = gang.running
        self._print_stacks(gang)
        return [replace(w, stack=_since(m.log, size)) for w, m, size in zip(found, members, before)]

    def _print_stacks(self, gang: LocalGang) -> None:
        gang.signal(signal.SIGUSR1)
        gang.signal(signal.SIGCONT)
        began = time.monotonic()
        while any(_prints(member, time.monotonic() - began) for member in gang.running):
            time.sleep(_POLL_S)
            gang.poll()

    def _last(self, member: Member, gang: LocalGang) -> _Seen:
        """Return the state of a process after reading its pulse."""
        index, now = gang.members.index(member), self._clock()
        seen, (state, cpu_s) = self._seen[index], _kernel_says(member)
        if state != "T":
            seen.stopped_at = None
        elif seen.stopped_at is None:
            seen.stopped_at = now
        seen.cpu_s = max(seen.cpu_s, cpu_s)
        if (move := self._pulses[index].read()) is not None:
            if move.number != seen.moves:
                seen.moved_at, seen.cpu_at_move_s = now, seen.cpu_s
            seen.moves, seen.phase, seen.step = move
        return seen


def _kernel_says(member: Member) -> tuple[str, float]:
    """Return a process's state and seconds of CPU time from Linux's /proc; "" and 0 if /proc does not have them.

    The state is T after SIGSTOP, and t under a debugger.
    """
    try:
        words = Path(f"/proc/{member.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return words[0], (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return "", 0.0


def _prints(member: Member, since_s: float) -> bool:
    """Return whether SIGUSR1 is pending for a process, or blocked because its handler runs."""
    if since_s > _STACKS_S:
        return False
    try:
        lines = Path(f"/proc/{member.pid}/status").read_text().splitlines()
    except OSError:
        return sys.platform != "linux" and since_s < _STACKS_ELSEWHERE_S
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:", "SigBlk:"))]
    return any(mask >> (signal.SIGUSR1 - 1) & 1 for mask in masks)


def _witness(member: Member, seen: _Seen, now: float) -> Witness:
    """Return what the launcher knows about a running process."""
    note = STOPPED if seen.stopped_at is not None else ""
    if seen.moves < 0:
        return Witness(member.rank, note=note or "it has given no sign of life")
    return Witness(member.rank, seen.phase, seen.step, now - seen.moved_at, seen.moves, note=note)


def _since(log: Path, size: int) -> str:
    """Return the part of a log after byte `size`, at most its last mebibyte."""
    try:
        with open_regular(log) as file:
            end = file.seek(0, 2)
            file.seek(max(size, end - _MOST_OF_STACKS))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _where(seen: _Seen) -> str:
    return f"in phase '{seen.phase}' at step {seen.step}"
