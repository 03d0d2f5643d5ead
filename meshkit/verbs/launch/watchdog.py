"""Finds processes that are alive and do not get on: stopped, or waiting for what never comes.

    pulse file of each process (runs/phases.py) -> Watchdog.look() -> the one that holds up the others

jax's heartbeats see a process that is gone. They do not see one that is stopped for less than their own time, nor one
that waits for data or in a collective, which keeps all the others waiting for ever.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from meshkit.verbs.launch.processes import Ending, LocalGang, Member

# A thread that writes once a second is this late only where the machine is; a busy one starves it for seconds.
_SILENCE_S = 30.0
# A process that somebody has stopped says so itself (its state is T), however busy the machine is.
_STOPPED_S = 10.0
_LOOK_EVERY_S = 0.5
# For the processes to print their stacks, which they do thread by thread, the main one last.
_STACKS_S, _QUIET_S, _POLL_S = 2.0, 0.2, 0.02
# What takes long by its nature: the limit of a step does not hold there.
_PATIENT = ("start", "compile", "restore", "init", "trace", "save", "end")
_PATIENCE = 6.0
# Before the first step nothing has been made since the last checkpoint; with these a checkpoint is on its way.
_BEFORE_STEPS, _FINISHING = ("start", "compile", "restore", "init"), ("save", "end")


@dataclass(frozen=True)
class Limits:
    """When a process is called stuck."""

    stall_s: float = 600.0
    """Seconds in one phase of the loop (data, step, evaluation); six times that for start, compile, restore, save and
    the end, and for the first pulse to come. 0 watches nothing."""
    silence_s: float = _SILENCE_S
    """Seconds without a pulse."""
    stopped_s: float = _STOPPED_S
    """Seconds in the state that SIGSTOP brings. Seen on Linux alone; elsewhere it is silence."""


@dataclass
class _Seen:
    """The last pulse of a process, and when it changed; since when it is stopped, if it is."""

    sign: int | None = None
    moves: int = -1
    phase: str = "start"
    step: int = 0
    beat_at: float = 0.0
    moved_at: float = 0.0
    stopped_at: float | None = None


@dataclass(frozen=True)
class Stuck:
    """A process that holds up the job."""

    member: Member
    """The process."""
    why: str
    """One line for the person who waits."""


class Watchdog:
    """Reads the pulses of a gang.

    Args:
        pulses: the file of each member, in its order.
        limits: when to call.
        clock: seconds.
    """

    def __init__(self, pulses: list[Path], limits: Limits, *, clock: Callable[[], float] = time.monotonic):
        self._pulses, self._limits, self._clock = pulses, limits, clock
        self._seen = [_Seen(beat_at=clock(), moved_at=clock()) for _ in pulses]
        self._next = 0.0

    def look(self, gang: LocalGang) -> Stuck | None:
        """The process that holds up the others, if one does. Cheap: looks twice a second at most."""
        now = self._clock()
        if not self._limits.stall_s or now < self._next:
            return None
        self._next = now + _LOOK_EVERY_S
        running = [(m, self._last(m, gang)) for m in gang.running]
        return self._stopped(running, now) or self._silent(running, now) or self._late(running, now)

    def where(self, member: Member, gang: LocalGang) -> str:
        """What a process did when it last said so."""
        seen = self._last(member, gang)
        return _where(seen) if seen.sign is not None else "before its first sign of life"

    def before_steps(self, gang: LocalGang) -> bool:
        """Whether no process has reached the training loop, so that there was nothing to save."""
        return all(self._before_steps(member, gang) for member in gang.members)

    def _before_steps(self, member: Member, gang: LocalGang) -> bool:
        """One without a pulse has not come so far only if SIGTERM could end it: a full disk takes no pulses."""
        seen = self._last(member, gang)
        known = seen.sign is not None or member.ending == Ending(-signal.SIGTERM)
        return known and seen.phase in _BEFORE_STEPS

    def finishing(self, gang: LocalGang) -> bool:
        """Whether a process that still runs is writing a checkpoint, or about to end."""
        return any(self._last(member, gang).phase in _FINISHING for member in gang.running)

    def forget(self) -> None:
        """Removes the pulses of an attempt that is over."""
        for pulse in self._pulses:
            with suppress(OSError):
                pulse.unlink(missing_ok=True)

    def _stopped(self, running: list[tuple[Member, _Seen]], now: float) -> Stuck | None:
        stopped = [(s.stopped_at, m, s) for m, s in running if s.stopped_at is not None]
        since, member, seen = min(stopped, key=lambda found: found[0], default=(now, None, None))
        if member is None or seen is None or now - since <= self._limits.stopped_s:
            return None
        return Stuck(member, f"has been stopped (SIGSTOP) for {now - since:.0f} s, {_where(seen)}")

    def _silent(self, running: list[tuple[Member, _Seen]], now: float) -> Stuck | None:
        silent = [(m, s) for m, s in running if s.sign is not None and now - s.beat_at > self._limits.silence_s]
        if not silent:
            return None
        member, seen = max(silent, key=lambda pair: now - pair[1].beat_at)
        silence = f"gives no sign of life for {now - seen.beat_at:.0f} s, {_where(seen)}"
        return Stuck(member, f"{silence}: it is stopped, or its machine is")

    def _late(self, running: list[tuple[Member, _Seen]], now: float) -> Stuck | None:
        if not any(now - s.moved_at > self._limit(s) for _, s in running):
            return None
        # The others wait for the one that is furthest behind; of equals, for one that is not in the step itself.
        member, seen = min(running, key=lambda pair: (pair[1].step, pair[1].phase == "step", pair[1].moved_at))
        others = f"; {len(running) - 1} others wait" if len(running) > 1 else ""
        return Stuck(member, f"has not moved for {now - seen.moved_at:.0f} s, {_where(seen)}{others}")

    def stacks(self, gang: LocalGang) -> None:
        """Has every process print the stacks of its threads into its log; one that is stopped goes on, just for it."""
        sizes = before = [_size(member.log) for member in gang.members]
        gang.signal(signal.SIGUSR1)
        gang.signal(signal.SIGCONT)
        grew_at = time.monotonic()
        deadline = grew_at + _STACKS_S
        while (now := time.monotonic()) < deadline:
            time.sleep(_POLL_S)
            found = [_size(member.log) for member in gang.members]
            if found != sizes:
                sizes, grew_at = found, now
            if all(size > was for size, was in zip(sizes, before)) and now - grew_at > _QUIET_S:
                return

    def _limit(self, seen: _Seen) -> float:
        return self._limits.stall_s * (_PATIENCE if seen.phase in _PATIENT else 1.0)

    def _last(self, member: Member, gang: LocalGang) -> _Seen:
        """What is known of a process, with its present pulse taken in."""
        index, now = gang.members.index(member), self._clock()
        path, seen = self._pulses[index], self._seen[index]
        if not _is_stopped(member):
            seen.stopped_at = None
        elif seen.stopped_at is None:
            seen.stopped_at = now
        try:
            sign = path.stat().st_mtime_ns
            pulse = json.loads(path.read_text())
            moves, step, phase = int(pulse["moves"]), int(pulse["step"]), str(pulse["phase"])
        except (OSError, ValueError, KeyError, TypeError):  # none yet, or just being written
            return seen
        if sign != seen.sign:
            seen.sign, seen.beat_at = sign, now
        if moves != seen.moves:
            seen.moves, seen.phase, seen.step, seen.moved_at = moves, phase, step, now
        return seen


def _is_stopped(member: Member) -> bool:
    """Whether the process is in the state T of Linux, which SIGSTOP brings; a debugger brings another one, t."""
    try:
        return Path(f"/proc/{member.process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _where(seen: _Seen) -> str:
    return f"in phase '{seen.phase}' at step {seen.step}"
