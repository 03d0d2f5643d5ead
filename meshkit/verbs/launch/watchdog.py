"""Finds processes that are alive and do not get on: stopped, or waiting for what never comes.

    Pulse of each process (runs/phases.py), what the kernel says -> Watchdog.look() -> the one that holds up the others

jax's heartbeats see a process that is gone. They do not see one that is stopped for less than their own time, nor one
that waits for data or in a collective, which keeps all the others waiting for ever.

The processes are on this machine, so the kernel says whether one lives, is stopped, or has used the CPU: none of them
has to prove it by a thread, which a library that keeps the interpreter would keep as well. What a process says itself
is how far it is. One that says nothing new is stuck after the limit of its phase, busy or not, and no sooner.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshkit.errors import ConfigError
from meshkit.runs.phases import PHASES, Pulse
from meshkit.verbs.launch.processes import Ending, LocalGang, Member

# A process that somebody has stopped says so itself (its state is T), however busy the machine is.
_STOPPED_S, _STOPPED = 10.0, "stopped"
_LOOK_EVERY_S = 0.5
# Longer between two looks: it was this process that was stopped (a job that is suspended), or had no CPU.
_AWAY_S = 5.0
# For the processes to print their stacks; on Linux the kernel says when each has.
_STACKS_S, _STACKS_ELSEWHERE_S, _POLL_S = 10.0, 2.0, 0.02
# What takes long by its nature: the limit of a step does not hold there.
_PATIENT = ("start", "compile", "restore", "init", "trace", "save", "end")
_PATIENCE = 6.0
# Before the first step nothing has been made since the last checkpoint; with these a checkpoint is on its way.
_BEFORE_STEPS, _FINISHING = ("start", "compile", "restore", "init"), ("save", "end")
_NEVER = float("inf")


@dataclass(frozen=True)
class Limits:
    """When a process is called stuck."""

    stall_s: float = 600.0
    """Seconds in one phase of the loop (data, step, evaluate, check); six times that for start, compile, restore, init,
    trace, save and end, and for the first pulse to come. 0 watches nothing that has no limit of its own."""
    of_phase: Mapping[str, float] = field(default_factory=dict)
    """Seconds in a phase, in place of the above; 0 for no limit."""
    stopped_s: float = _STOPPED_S
    """Seconds in the state that SIGSTOP brings; 0 for no limit. Seen on Linux alone; elsewhere it is the phase's."""
    silent_too: bool = True
    """Whether one that has never said what it does can be stuck in its start; a command of the user's need not."""

    def of(self, phase: str) -> float:
        """Seconds that a process may stay in a phase."""
        by_nature = self.stall_s * (_PATIENCE if phase in _PATIENT else 1.0)
        return self.of_phase.get(phase, by_nature) or _NEVER


def read_limits(texts: Sequence[str], *, own: bool = False) -> Limits:
    """The limits that options give: `SECONDS` for all phases, `PHASE=SECONDS` for one or for `stopped`.

    Args:
        texts: the options.
        own: whether they are of a command of the user's, which need not say what it does.

    Raises:
        ConfigError: one is no number from 0 on, or of no phase.
    """
    stall_s, of_phase = Limits.stall_s, {}
    for text in texts:
        phase, sign, number = text.rpartition("=")
        try:
            seconds = float(number)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < _NEVER or (sign and phase not in (*PHASES, _STOPPED)):
            raise ConfigError(
                f"'{text:.80}' is no limit.",
                at="--stall-timeout",
                hint=f"SECONDS from 0 on, or PHASE=SECONDS for one of {', '.join(PHASES)}, {_STOPPED}",
            )
        if sign:
            of_phase[phase] = seconds
        else:
            stall_s = seconds
    stopped_s = of_phase.pop(_STOPPED, _STOPPED_S if stall_s else 0.0)
    return Limits(stall_s, of_phase, silent_too=not own, stopped_s=stopped_s)


@dataclass
class _Seen:
    """The last move of a process, and when it was noticed; since when it is stopped, if it is."""

    moves: int = -1
    phase: str = "start"
    step: int = 0
    moved_at: float = 0.0
    cpu_s: float = 0.0
    cpu_at_move_s: float = 0.0
    stopped_at: float | None = None

    def shift(self, seconds: float) -> None:
        """Nobody looked for so long."""
        self.moved_at += seconds
        if self.stopped_at is not None:
            self.stopped_at += seconds


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
        pulses: of each member, in its order.
        limits: when to call.
        clock: seconds.
    """

    def __init__(self, pulses: Sequence[Pulse], limits: Limits, *, clock: Callable[[], float] = time.monotonic):
        self._pulses, self._limits, self._clock = pulses, limits, clock
        self._seen = [_Seen(moved_at=clock()) for _ in pulses]
        self._looked = clock()

    def look(self, gang: LocalGang) -> Stuck | None:
        """The process that holds up the others, if one does. Cheap: looks twice a second at most."""
        now = self._clock()
        if (since := now - self._looked) < _LOOK_EVERY_S:
            return None
        self._looked = now
        for seen in self._seen if since > _AWAY_S else ():
            seen.shift(since)
        running = [(m, self._last(m, gang)) for m in gang.running]
        return self._stopped(running, now) or self._late(running, now)

    def where(self, member: Member, gang: LocalGang) -> str:
        """What a process did when it last said so."""
        seen = self._last(member, gang)
        return _where(seen) if seen.moves >= 0 else "before its first sign of life"

    def has_left(self, member: Member, gang: LocalGang) -> bool:
        """Whether a process said last that it was in the midst of its work."""
        seen = self._last(member, gang)
        return seen.moves >= 0 and seen.phase != "end"

    def before_steps(self, gang: LocalGang) -> bool:
        """Whether no process has reached the training loop, so that there was nothing to save."""
        return all(self._before_steps(member, gang) for member in gang.members)

    def _before_steps(self, member: Member, gang: LocalGang) -> bool:
        """One without a pulse, which may be no process of meshkit, has not come so far if SIGTERM could end it."""
        seen = self._last(member, gang)
        known = seen.moves >= 0 or member.ending == Ending(-signal.SIGTERM)
        return known and seen.phase in _BEFORE_STEPS

    def finishing(self, gang: LocalGang) -> bool:
        """Whether a process that still runs is writing a checkpoint, or about to end."""
        return any(self._last(member, gang).phase in _FINISHING for member in gang.running)

    def _stopped(self, running: list[tuple[Member, _Seen]], now: float) -> Stuck | None:
        stopped = [(s.stopped_at, m, s) for m, s in running if s.stopped_at is not None]
        since, member, seen = min(stopped, key=lambda found: found[0], default=(now, None, None))
        if member is None or seen is None or now - since <= (self._limits.stopped_s or _NEVER):
            return None
        return Stuck(member, f"has been stopped (SIGSTOP) for {now - since:.0f} s, {_where(seen)}")

    def _late(self, running: list[tuple[Member, _Seen]], now: float) -> Stuck | None:
        if not self._limits.silent_too:
            running = [(member, seen) for member, seen in running if seen.moves >= 0]
        if not any(now - s.moved_at > self._limits.of(s.phase) for _, s in running):
            return None
        # The others wait for the one that is furthest behind; of equals, for one that is not in the step, or stopped.
        behind = lambda seen: (seen.step, seen.phase == "step", seen.stopped_at is None, seen.moved_at)
        member, seen = min(running, key=lambda pair: behind(pair[1]))
        others = f"; {len(running) - 1} others wait" if len(running) > 1 else ""
        cpu_s = seen.cpu_s - seen.cpu_at_move_s
        used = f" ({cpu_s:.1f} s of CPU time)" if sys.platform == "linux" else ""
        return Stuck(member, f"has not moved for {now - seen.moved_at:.0f} s{used}, {_where(seen)}{others}")

    def stacks(self, gang: LocalGang) -> None:
        """Has every process print the stacks of its threads into its log; one that is stopped goes on, just for it."""
        gang.signal(signal.SIGUSR1)
        gang.signal(signal.SIGCONT)
        began = time.monotonic()
        while any(_prints(member, time.monotonic() - began) for member in gang.running):
            time.sleep(_POLL_S)
            gang.poll()

    def _last(self, member: Member, gang: LocalGang) -> _Seen:
        """What is known of a process, with its present pulse taken in."""
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
    """The state of a process and seconds of CPU time so far, as Linux has them; "" and 0 elsewhere, or if it is gone.

    SIGSTOP brings the state T; a debugger another one, t.
    """
    try:
        words = Path(f"/proc/{member.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return words[0], (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return "", 0.0


def _prints(member: Member, since_s: float) -> bool:
    """Whether a process has yet to take SIGUSR1, or is in its handler: there the kernel blocks the signal."""
    if since_s > _STACKS_S:
        return False
    try:
        lines = Path(f"/proc/{member.pid}/status").read_text().splitlines()
    except OSError:
        return sys.platform != "linux" and since_s < _STACKS_ELSEWHERE_S
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:", "SigBlk:"))]
    return any(mask >> (signal.SIGUSR1 - 1) & 1 for mask in masks)


def _where(seen: _Seen) -> str:
    return f"in phase '{seen.phase}' at step {seen.step}"
