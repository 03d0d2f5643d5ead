"""What a process is doing: seconds of wall time by phase, and a pulse for who watches it.

    trainer -> Phases.enter(phase, step) -> seconds by phase (goodput) | Pulse -> the supervisor

The pulse is memory that both share. The main thread writes it as it moves, so no other thread has to run for it: a
library that keeps the interpreter, storage that hangs and a full disk change nothing. It says how far a process is;
whether it lives, is stopped or computes, the kernel knows.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

PULSE_VARIABLE = "MESHKIT_PULSE"
Phase = Literal["start", "compile", "restore", "init", "data", "step", "evaluate", "check", "trace", "save", "end"]
PHASES: tuple[Phase, ...] = get_args(Phase)
_PULSE_BYTES = 128


class Move(NamedTuple):
    """The last phase that a process has entered."""

    number: int
    """Phases entered so far."""
    phase: str
    step: int


class Pulse:
    """Memory in which one process says what it does, to which it inherits a descriptor. It has no name to be left."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("meshkit-pulse")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        os.truncate(self.descriptor, _PULSE_BYTES)
        self.path = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd", str(self.descriptor))
        """What a process that has the descriptor opens."""

    def read(self) -> Move | None:
        """None before the first one; one that is just being written may be mixed of two."""
        try:
            said = json.loads(os.pread(self.descriptor, _PULSE_BYTES, 0))
            return Move(int(said["moves"]), str(said["phase"]), int(said["step"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def close(self) -> None:
        """Nobody reads it any more."""
        os.close(self.descriptor)


class Phases:
    """The phases of one process, and the seconds spent in each. A context manager around a run.

    Args:
        pulse: path of what tells the supervisor; by default the one that MESHKIT_PULSE names, None for no pulse.
        clock: seconds.
    """

    seconds: dict[str, float]
    """Phase -> seconds so far, without the present stay."""

    def __init__(self, pulse: Path | None = None, *, clock: Callable[[], float] = time.monotonic):
        named = os.environ.get(PULSE_VARIABLE)
        self._pulse = pulse or (Path(named) if named else None)
        self._clock, self._entered = clock, clock()
        self.phase: Phase = "start"
        self.step, self._moves = 0, 0
        self.seconds = {"start": _age_s()}
        self._moving = threading.Lock()  # another thread may ask for the totals in the middle of a move
        self._shared: mmap.mmap | None = None

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """The main thread begins something else; `step` is the training step it belongs to."""
        now = self._clock()
        with self._moving:
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._entered
            self.phase, self._entered, self._moves = phase, now, self._moves + 1
        if step is not None:
            self.step = step
        self._tell()

    def count_as(self, phase: Phase) -> None:
        """The seconds of the present stay belong to another phase: devices were busy while the host waited."""
        with self._moving:
            self.phase = phase

    def totals(self) -> dict[str, float]:
        """Phase -> seconds, the present stay included. They add up to the age of the process."""
        with self._moving:
            now = {self.phase: self.seconds.get(self.phase, 0.0) + self._clock() - self._entered}
            return self.seconds | now

    def __enter__(self) -> Self:
        if self._pulse is not None:
            with suppress(ValueError, OSError, AttributeError):  # no real stderr, or no such signal
                faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr, all_threads=True)
            self._shared = _mapped(self._pulse)
            self._tell()
        return self

    def __exit__(self, *_: object) -> None:
        """The phase `end`."""
        self.enter("end")
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _tell(self) -> None:
        if self._shared is not None:
            record = json.dumps({"moves": self._moves, "phase": self.phase, "step": self.step})
            self._shared[:] = record.encode().ljust(_PULSE_BYTES)


def _mapped(path: Path) -> mmap.mmap | None:
    """The memory of a pulse; None where the path leads to something else, as in a process that has not inherited it."""
    with suppress(OSError, ValueError):
        file = os.open(path, os.O_RDWR)
        try:
            if os.fstat(file).st_size == _PULSE_BYTES:
                return mmap.mmap(file, _PULSE_BYTES)
        finally:
            os.close(file)
    return None


def _age_s() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
