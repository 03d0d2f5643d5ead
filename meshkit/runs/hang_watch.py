"""Watch for hangs by threads in each process, for jobs in which no launcher sees all processes.

    a phase exceeds its limit -> its process sets `late` in jax's coordination service -> every process publishes its
    phase and stack there -> the process that set `late` names the hang -> all end with exit code 4 (may be restarted)
    a process fails with an exception -> it sets `late` to its number -> all others end with exit code 4

`meshkit launch local` on one host watches its processes from outside, so they need no such threads. On several hosts
and under SLURM, MPI, Kubernetes and users' own launchers no program sees all processes. Until a process is late, each
process only asks the service for `late` every second, and sends nothing else.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import jax

from meshkit.config.places import describe_error
from meshkit.distributed.environment import read_gang
from meshkit.distributed.join import Agreement
from meshkit.errors import PREEMPTED, RUN_FAILED
from meshkit.runs.hang import FOLDER, StepOrder, Witness, name_hang, write_witnesses
from meshkit.runs.limits import AWAY_S, limits_of_environment
from meshkit.runs.nccl_ras import ask, describe
from meshkit.runs.phases import WATCHED_VARIABLE, Phases

_LOOK_S, _ASK_S = 0.5, 1.0
_MEET_S, _ANSWER_S = 2.0, 3.5  # time limits for this process's report, and for the reports of all
_GRACE_S = 5.0  # additional seconds for which the other processes let one process name the hang, before they end
_MOST_OF_A_STACK = 2**14
_LATE, _SAID = "late", "said"
_watches = itertools.count()  # numbers the watches, alike in every process, so that each has messages of its own


class AwakeAge:
    """The seconds in the present phase, without the time in which the machine or the whole job was suspended.

    Args:
        phases: the phases of this process.
        clock: returns seconds.
    """

    def __init__(self, phases: Phases, *, clock: Callable[[], float] = time.monotonic):
        self._phases, self._clock = phases, clock
        self._looked, self._away_s, self._moves = clock(), 0.0, -1

    def look(self) -> float:
        """Return these seconds. Call this every half second: a gap of more than `AWAY_S` is not counted."""
        now, moves = self._clock(), self._phases.move.number
        since_s, self._looked = now - self._looked, now
        self._away_s = (self._away_s if moves == self._moves else 0.0) + (since_s if since_s > AWAY_S else 0.0)
        self._moves = moves
        return self._phases.age_s - self._away_s


class HangWatch:
    """Watch this process for hangs. A context manager, which does nothing in a job with a single process.

    Args:
        phases: the phases of this process, which has joined its job.
        folder: the run folder, for the file with the states of all processes.
        say: prints a line.

    Raises:
        ConfigError: MESHKIT_STALL_TIMEOUT is not a valid limit.
    """

    order: StepOrder | None = None
    """The order of the step's collectives, once the step is compiled."""

    def __init__(self, phases: Phases, folder: Path, say: Callable[[str], None]):
        self._phases, self._folder, self._say = phases, folder, say
        self._limits = limits_of_environment()
        self._line, gang = Agreement(f"hang/{next(_watches)}"), read_gang()
        self._attempt = gang.attempt if gang is not None else 0
        seen_from_outside = os.environ.get(WATCHED_VARIABLE) == str(self._line.size)
        self._watches = self._line.size > 1 and not seen_from_outside
        self._ended, self._heard, self._told = threading.Event(), threading.Event(), threading.Event()
        self._fails = False  # whether an error ends this process
        # A request to a service that does not answer blocks its thread, so `_look` has a thread of its own.
        runs = {"meshkit-hang": self._look, "meshkit-hang-asks": self._ask}
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in runs.items()]

    def __enter__(self) -> Self:
        for thread in self._threads if self._watches else ():
            thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """End the threads. If an error ends this process, they first tell the other processes, which would wait.

        A preemption ends all processes together, so they are not told.
        """
        if self._watches and isinstance(error, Exception) and getattr(error, "exit_code", None) != PREEMPTED:
            self._fails = True
            # Printed first, since the others may end jax's service and so this process.
            self._say(f"meshkit: process {self._line.rank} ends after {describe_error(error)}; the others end, too")
        self._ended.set()
        for thread in self._threads if self._watches else ():  # they must not use jax's client after its end
            thread.join(_GRACE_S)

    def _ask(self) -> None:
        """Ask the service until a process has set `late`; if that one has failed, end this process.

        If this process fails, set `late`. No new thread does that, because a process without memory cannot start one.
        """
        while not self._ended.wait(_ASK_S):
            if not (word := self._line.heard(_LATE)):
                continue
            if not word.isdecimal():
                self._heard.set()
            elif not self._ended.wait(_GRACE_S):  # this process may fail, too, with its own exit code
                self._say(f"meshkit: process {word} has failed, and its log says why; this process ends, too")
                sys.stderr.flush()
                os._exit(RUN_FAILED)
            return
        if self._fails:
            self._line.announce(_LATE, str(self._line.rank))

    def _look(self) -> None:
        """Wait until this or another process is late; then report this process's state."""
        age = AwakeAge(self._phases)
        while not self._ended.wait(_LOOK_S):
            age_s = age.look()
            said = self._phases.move.number > 0  # a user's own loop need not report phases
            late = said and age_s > self._limits.of(self._phases.phase)
            if not late and not self._heard.is_set():
                continue
            threading.Thread(target=self._talk, name="meshkit-hang-talk", daemon=True).start()
            if self._told.wait(_MEET_S):
                return  # `_talk` ends this process
            if not self._ended.is_set():
                self._tell(self._alone())
            return

    def _talk(self) -> None:
        """Publish the state of this process. The process that set `late` then reads all states and names the hang."""
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
        """Return this process's state, and empty states of the others, because the service does not answer."""
        notes = {0: "the coordination service, which it runs, does not answer"}
        others = [Witness(p, note=notes.get(p, "")) for p in range(self._line.size) if p != self._line.rank]
        return sorted([*others, self._witness()], key=lambda w: w.process)

    def _tell(self, witnesses: list[Witness]) -> None:
        """Name the hang, and end this process by `os._exit`, since Python's normal exit would wait for the others."""
        path = self._folder / FOLDER / f"attempt{self._attempt}.json"
        answer = "" if jax.config.jax_platforms == "cpu" else ask(os.environ)
        write_witnesses(path, witnesses, answer)
        hang = name_hang(witnesses, self.order)
        here = {w.pid: w.process for w in witnesses if w.host == socket.gethostname()}
        if line := describe(answer, here):
            hang = replace(hang, details=(*hang.details, f"  {line}"))
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
        return Witness(self._line.rank, move.phase, move.step, phases.age_s, move.number, host, os.getpid(), stack)


def _read(process: int, word: Any) -> Witness:
    try:
        return Witness(**{**word, "process": process})
    except TypeError:  # no report, or an invalid one
        return Witness(process)
