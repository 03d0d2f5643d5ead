"""A thread in each process that notices when training makes no progress, where no launcher sees all processes.

    a phase longer than its limit -> `late`, in jax's coordination service -> every process says its phase and stack
    -> the one that called names the hang, and all end with exit code 4, which whoever started them may restart

`meshkit launch local` on one machine watches its processes from outside, and needs no such thread in them. Under SLURM,
MPI, Kubernetes and launchers of one's own nobody sees all processes. Until somebody is late, each process asks the
service for the word every second, and nothing else is sent.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from meshkit.distributed.environment import read_gang
from meshkit.distributed.join import Agreement
from meshkit.errors import RUN_FAILED
from meshkit.runs.hang import FOLDER, StepOrder, Witness, name_hang, write_witnesses
from meshkit.runs.limits import AWAY_S, Limits, limits_of_environment
from meshkit.runs.phases import PULSE_VARIABLE, Phases

_LOOK_S, _ASK_S = 0.5, 1.0
_MEET_S, _ANSWER_S = 2.0, 3.5  # for this process to say where it is, and for all
_GRACE_S = 5.0  # beyond that, until a process that has not named the hang ends
_MOST_OF_A_STACK = 2**14
_LATE, _SAID = "late", "said"


class AwakeAge:
    """The age of a process's phase, without the time for which its machine or its whole job was suspended.

    Args:
        phases: of this process.
        clock: seconds.
    """

    def __init__(self, phases: Phases, *, clock: Callable[[], float] = time.monotonic):
        self._phases, self._clock = phases, clock
        self._looked, self._away_s, self._moves = clock(), 0.0, -1

    def look(self) -> float:
        """Seconds, from one who looks every half second: a longer time between two looks does not count."""
        now, moves = self._clock(), self._phases.move.number
        since_s, self._looked = now - self._looked, now
        self._away_s = (self._away_s if moves == self._moves else 0.0) + (since_s if since_s > AWAY_S else 0.0)
        self._moves = moves
        return self._phases.age_s - self._away_s


class HangWatch:
    """Watches this process and answers for it. A context manager, within a job that has met; alone it does nothing.

    Args:
        phases: of this process.
        folder: the run folder, for what the hang was named by.
        say: prints a line.
        limits: of each phase; by default what MESHKIT_STALL_TIMEOUT says.

    Raises:
        ConfigError: MESHKIT_STALL_TIMEOUT is no limit.
    """

    order: StepOrder | None = None
    """Of the step's collectives, once it is compiled."""

    def __init__(self, phases: Phases, folder: Path, say: Callable[[str], None], limits: Limits | None = None):
        self._phases, self._folder, self._say = phases, folder, say
        self._limits = limits_of_environment() if limits is None else limits
        self._line, gang = Agreement("hang"), read_gang()
        self._attempt = gang.attempt if gang is not None else 0
        seen_from_outside = PULSE_VARIABLE in os.environ and gang is not None and gang.on_loopback
        self._watches = self._line.size > 1 and not seen_from_outside
        self._ended, self._heard, self._told = threading.Event(), threading.Event(), threading.Event()
        # A service that does not answer holds whoever asks it, and must not hold the one who looks.
        runs = {"meshkit-hang": self._look, "meshkit-hang-asks": self._ask}
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in runs.items()]

    def __enter__(self) -> Self:
        for thread in self._threads if self._watches else ():
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads if self._watches else ():  # jax's client, which they ask, ends with this process
            thread.join(_GRACE_S)

    def _ask(self) -> None:
        """Until somebody has said that he is late."""
        while not self._ended.wait(_ASK_S):
            if self._line.heard(_LATE):
                self._heard.set()
                return

    def _look(self) -> None:
        """Until somebody is late."""
        age = AwakeAge(self._phases)
        while not self._ended.wait(_LOOK_S):
            age_s = age.look()
            said = self._phases.move.number > 0  # a loop of the user's need not say what it does
            late = said and age_s > self._limits.of(self._phases.phase)
            if not late and not self._heard.is_set():
                continue
            threading.Thread(target=self._talk, name="meshkit-hang-talk", daemon=True).start()
            if self._told.wait(_MEET_S):
                return  # it ends this process
            if not self._ended.is_set():
                self._tell(self._alone())
            return

    def _talk(self) -> None:
        """Says where this process is; who was late first hears all others, and names the hang."""
        calls = self._line.announce(_LATE)
        self._line.tell(_SAID, asdict(self._witness()))
        self._told.set()
        if not calls:
            if not self._ended.wait(_ANSWER_S + _GRACE_S):
                os._exit(RUN_FAILED)
            return
        said = self._line.gather(_SAID, timeout_s=_ANSWER_S)
        self._tell([_read(process, word) for process, word in enumerate(said)])

    def _alone(self) -> list[Witness]:
        """Return this process's own knowledge, where the service does not answer."""
        notes = {0: "the coordination service, which it runs, does not answer"}
        others = [Witness(p, note=notes.get(p, "")) for p in range(self._line.size) if p != self._line.rank]
        return sorted([*others, self._witness()], key=lambda w: w.process)

    def _tell(self, witnesses: list[Witness]) -> None:
        """Names the hang, and ends this process; Python's own way out would wait for the others."""
        path = self._folder / FOLDER / f"attempt{self._attempt}.json"
        write_witnesses(path, witnesses)
        hang = name_hang(witnesses, self.order)
        lines = hang.lines(witnesses, str(path))
        for line in [f"meshkit: no progress for {self._phases.age_s:.0f} s: {lines[0]}", *lines[1:]]:
            self._say(line)
        sys.stderr.flush()
        os._exit(RUN_FAILED)

    def _witness(self) -> Witness:
        phases, host = self._phases, socket.gethostname()
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stack = file.read()[-_MOST_OF_A_STACK:]
        move = phases.move
        return Witness(self._line.rank, move.phase, move.step, phases.age_s, move.number, host, stack)


def _read(process: int, word: Any) -> Witness:
    try:
        return Witness(**{**word, "process": process})
    except TypeError:  # it said nothing, or what no process says
        return Witness(process)
