"""Finds processes that are alive and do not get on: stopped, or waiting for what never comes. Layer 2.

    pulse file of each process (training/phases.py) -> Watchdog.look() -> the one that holds up the others

jax's heartbeats see a process that is gone. They do not see one that is stopped for less than their own time, nor one
that waits for data or in a collective, which keeps all the others waiting for ever.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshkit.launching.gang import LocalGang, Member

PULSE_VARIABLE = "MESHKIT_PULSE"
# A thread that writes once a second is this late only where the machine is; a busy one starves it for seconds.
_SILENCE_S = 30.0
_LOOK_EVERY_S = 0.5
_STACKS_S = 1.0  # for a process to print its stacks
# What takes long by its nature: the limit of a step does not hold there.
_PATIENT = ("start", "compile", "restore", "save")
_PATIENCE = 6.0


@dataclass(frozen=True)
class Limits:
    """When a process is called stuck.

    Attributes:
        stall_s: seconds in one phase of the loop (data, step, evaluation); six times that for start, compile,
            restore and save. 0 watches nothing.
        silence_s: seconds without a pulse.
    """

    stall_s: float = 600.0
    silence_s: float = _SILENCE_S


@dataclass
class _Seen:
    """The last pulse of a process, and when it changed."""

    beats: int = -1
    moves: int = -1
    phase: str = "start"
    step: int = 0
    beat_at: float = 0.0
    moved_at: float = 0.0


@dataclass(frozen=True)
class Stuck:
    """A process that holds up the job.

    Attributes:
        member: the process.
        why: one line for the person who waits.
    """

    member: Member
    why: str


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
        alive = [(m, s) for m, s, path in zip(gang.members, self._seen, self._pulses) if m.ending is None
                 and self._read(path, s, now)]  # fmt: skip
        silent = [(m, s) for m, s in alive if now - s.beat_at > self._limits.silence_s]
        if silent:
            member, seen = max(silent, key=lambda pair: now - pair[1].beat_at)
            silence = f"gives no sign of life for {now - seen.beat_at:.0f} s, {_where(seen)}"
            return Stuck(member, f"{silence}: it is stopped, or its machine is")
        late = [(m, s) for m, s in alive if now - s.moved_at > self._limit(s)]
        if not late:
            return None
        # The others wait for the one that is furthest behind; of equals, for one that is not in the step itself.
        member, seen = min(alive, key=lambda pair: (pair[1].step, pair[1].phase == "step", pair[1].moved_at))
        others = f"; {len(alive) - 1} others wait" if len(alive) > 1 else ""
        return Stuck(member, f"has not moved for {now - seen.moved_at:.0f} s, {_where(seen)}{others}")

    def stacks(self, gang: LocalGang) -> None:
        """Has every process print the stacks of its threads into its log."""
        gang.signal(signal.SIGUSR1)
        time.sleep(_STACKS_S)

    def _limit(self, seen: _Seen) -> float:
        return self._limits.stall_s * (_PATIENCE if seen.phase in _PATIENT else 1.0)

    def _read(self, path: Path, seen: _Seen, now: float) -> bool:
        """Takes in a pulse; False before the first one, when the process has no handler for signals yet."""
        try:
            pulse = json.loads(path.read_text())
            beats, moves, phase, step = (
                int(pulse["beats"]),
                int(pulse["moves"]),
                str(pulse["phase"]),
                int(pulse["step"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return seen.beats >= 0
        if beats != seen.beats:
            seen.beats, seen.beat_at = beats, now
        if moves != seen.moves:
            seen.moves, seen.phase, seen.step, seen.moved_at = moves, phase, step, now
        return True


def _where(seen: _Seen) -> str:
    return f"in phase '{seen.phase}' at step {seen.step}"
