"""What a process is doing: seconds of wall time by phase, and a pulse for who watches it.

    trainer -> Phases.enter(phase, step) -> seconds by phase (goodput) | a pulse file that the supervisor reads

The pulse is written by a thread of its own, so it goes on while the main thread waits in a collective: a pulse that
stops is a process that is stopped (SIGSTOP, a machine that hangs), a pulse whose phase stands still is one that waits.
It comes once a second, and at once when a phase begins that comes seldom: start, compile, restore, save, end.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

PULSE_VARIABLE = "MESHKIT_PULSE"
_EVERY_S = 1.0
# Entered at every step: a file for each of them would cost more than it tells.
_FREQUENT = ("data", "step")
_PULSE_BYTES = 128


class Phases:
    """The phases of one process, and the seconds spent in each. A context manager around a run.

    Args:
        pulse: the file that tells the supervisor; by default the one that MESHKIT_PULSE names, None for no pulse.
        clock: seconds.
    """

    seconds: dict[str, float]
    """Phase -> seconds so far, without the present stay."""

    def __init__(self, pulse: Path | None = None, *, clock: Callable[[], float] = time.monotonic):
        named = os.environ.get(PULSE_VARIABLE)
        self._pulse = pulse or (Path(named) if named else None)
        self._clock, self._entered = clock, clock()
        self.phase, self.step, self._moves = "start", 0, 0
        self.seconds = {"start": _age_s()}
        self._moving = threading.Lock()  # another thread may ask for the totals in the middle of a move
        self._news, self._ends = threading.Event(), False
        self._thread: threading.Thread | None = None

    def enter(self, phase: str, step: int | None = None) -> None:
        """The main thread begins something else; `step` is the training step it belongs to."""
        now = self._clock()
        with self._moving:
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._entered
            self.phase, self._entered, self._moves = phase, now, self._moves + 1
        if step is not None:
            self.step = step
        if phase not in _FREQUENT:
            self._news.set()

    def count_as(self, phase: str) -> None:
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
            self._thread = threading.Thread(target=self._beat, name="meshkit-pulse", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """The phase `end`. A supervised process beats on until it is gone: its way out waits for the others."""
        self.enter("end")
        if self._thread is not None and os.environ.get(PULSE_VARIABLE) != str(self._pulse):
            self._ends = True
            self._news.set()
            self._thread.join(timeout=2 * _EVERY_S)

    def _beat(self) -> None:
        assert self._pulse is not None
        beats = 0
        while True:
            beats += 1
            record = {"beats": beats, "moves": self._moves, "phase": self.phase, "step": self.step}
            _overwrite(self._pulse, json.dumps(record))
            self._news.wait(_EVERY_S)
            self._news.clear()
            if self._ends:
                return


def _overwrite(path: Path, text: str) -> None:
    """Writes over what is there, so that a disk that is full has room for it; who cannot read it whole reads again."""
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.pwrite(file, text.encode().ljust(_PULSE_BYTES), 0)
        except OSError:  # one that copies what it writes over has none: the time alone is a sign of life
            os.utime(path)
        finally:
            os.close(file)


def _age_s() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
