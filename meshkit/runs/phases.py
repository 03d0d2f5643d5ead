"""Measure the seconds in each phase of a process, report its progress as a pulse, and compute a run's goodput.

    trainer -> Phases.enter(phase, step) -> seconds by phase (goodput) | Pulse -> the supervisor

The pulse is memory that the process shares with the supervisor. The main thread writes it when it enters a phase, so it
depends on no other thread, and works while a library holds the GIL, storage hangs, or a disk is full. It holds the
phase and step, and after the first step also the seconds of each part of the start. The kernel reports whether the
process is alive, stopped or computing.

    phases of each attempt -> goodput/<when it began>.json, once a second -> read_goodput -> Goodput

Productive time is the time of the training steps that count. The time of steps that a later attempt made again is
`lost`; the time between two attempts is `restart`. A thread writes the record every second, so it includes an attempt
that is killed, except its last second. A pause is not part of the wall time if it follows an attempt that was done,
that the user ended, or that failed because of the user's input.
"""

from __future__ import annotations

import faulthandler
import json
import math
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

from meshkit.config.files import read_regular
from meshkit.errors import PREEMPTED, USER_ERROR
from meshkit.runs.standby import turn_came_at

PULSE_VARIABLE = "MESHKIT_PULSE"
WATCHED_VARIABLE = "MESHKIT_WATCHED"  # the number of processes that the launcher of this process watches
Phase = Literal["start", "compile", "restore", "init", "data", "step", "evaluate", "check", "trace", "save", "end"]
PHASES: tuple[Phase, ...] = get_args(Phase)
_MOVE_BYTES, _PARTS_BYTES = 128, 896  # of a pulse: the last `Move`, and behind it the parts of the start
_PULSE_BYTES = _MOVE_BYTES + _PARTS_BYTES
_FOLDER = "goodput"
_EVERY_S = 1.0
_MARKS = 16  # recorded saved steps of an attempt, the newest; the next attempt usually resumes from one of the last few
_LARGEST_BYTES, _MOST_ATTEMPTS = 2**20, 10_000
_MOST = 1e15  # seconds, steps
PRODUCTIVE = "step"
# The phases of which a step consists: the time of both is lost if a step is made again.
_OF_A_STEP = (PRODUCTIVE, "data")
AttemptOutcome = Literal["done", "interrupted", "refused", "preempted", "failed"]
_WANTED_PAUSE = ("done", "interrupted", "refused")


class Move(NamedTuple):
    """The last phase that a process has entered."""

    number: int
    """Phases entered so far."""
    phase: str
    step: int


class Pulse:
    """Memory in which one process reports its phase. It has no file name; the process inherits its descriptor."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("meshkit-pulse")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        os.truncate(self.descriptor, _PULSE_BYTES)
        self.path = Path("/proc/self/fd" if sys.platform == "linux" else "/dev/fd", str(self.descriptor))
        """The path with which a process that has inherited the descriptor opens the memory."""

    def read(self) -> Move | None:
        """Return the last move; None before the first. A read during a write may mix two moves."""
        try:
            said = json.loads(os.pread(self.descriptor, _MOVE_BYTES, 0))
            return Move(int(said["moves"]), str(said["phase"]), int(said["step"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def read_parts(self) -> dict[str, float] | None:
        """Return the seconds by part of the start, in the order of the parts; None until the first step is made."""
        try:
            said = json.loads(os.pread(self.descriptor, _PARTS_BYTES, _MOVE_BYTES))
            return {str(part): float(seconds) for part, seconds in said.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class Phases:
    """The phases of one process, and the seconds spent in each. A context manager around a run.

    Args:
        pulse: path of the pulse; by default the value of MESHKIT_PULSE, and without it there is no pulse.
        clock: returns seconds.
    """

    seconds: dict[str, float]
    """Phase -> seconds so far, without the time since the present phase was entered."""
    parts: dict[str, float]
    """Part of the start -> seconds, from the beginning of the process to the end of its first step."""

    def __init__(self, pulse: Path | None = None, *, clock: Callable[[], float] = time.monotonic):
        named = os.environ.get(PULSE_VARIABLE)
        self._pulse = pulse or (Path(named) if named else None)
        self._clock, self._entered = clock, clock()
        self.phase: Phase = "start"
        self.step, self._moves = 0, 0
        self.seconds = {"start": _age_s()}
        self.parts = dict(self.seconds)
        self._part, self._part_began, self._has_stepped = "start", self._entered, False
        self._moving = threading.Lock()  # another thread may call `totals` during a move
        self._shared: mmap.mmap | None = None

    def enter(self, phase: Phase, step: int | None = None, *, part: str | None = None) -> None:
        """Enter a phase. Called by the main thread.

        Args:
            phase: the phase that begins; the seconds until now count for the phase before.
            step: the training step to which the phase belongs; None keeps the present step.
            part: the part of the start that begins, if it has a more precise name than the phase.
        """
        now = self._clock()
        self.begin_part(part or phase)
        leaves_step = self.phase == "step" and (phase != "step" or step not in (None, self.step))
        if leaves_step and not self._has_stepped:
            self._has_stepped = True
            self._tell_parts()
        with self._moving:
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self._entered
            self.phase, self._entered, self._moves = phase, now, self._moves + 1
        if step is not None:
            self.step = step
        self._tell()

    def begin_part(self, name: str, *, ago_s: float = 0.0) -> None:
        """Begin another part of the start, in the same phase. After the first step this does nothing.

        Args:
            name: the name of the part that has begun.
            ago_s: seconds since it began.
        """
        if self._has_stepped:
            return
        now = self._clock() - ago_s
        self.parts[self._part] = self.parts.get(self._part, 0.0) + now - self._part_began
        self._part, self._part_began = name, now

    @property
    def move(self) -> Move:
        """The present phase."""
        return Move(self._moves, self.phase, self.step)

    @property
    def age_s(self) -> float:
        """Seconds in the present phase."""
        return self._clock() - self._entered

    def count_as(self, phase: Phase) -> None:
        """Count the seconds since the last `enter` for another phase, such as `step` if devices were busy meanwhile."""
        with self._moving:
            self.phase = phase

    def totals(self) -> dict[str, float]:
        """Return the seconds by phase, including the present one. Their sum is the age of the process."""
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
        """Enter the phase `end`, and close the pulse."""
        self.enter("end")
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def _tell(self) -> None:
        if self._shared is not None:
            record = json.dumps({"moves": self._moves, "phase": self.phase, "step": self.step})
            self._shared[:_MOVE_BYTES] = record.encode().ljust(_MOVE_BYTES)

    def _tell_parts(self) -> None:
        if self._shared is not None:
            record = json.dumps({part: round(seconds, 3) for part, seconds in self.parts.items()})
            self._shared[_MOVE_BYTES:] = record.encode().ljust(_PARTS_BYTES)


def _mapped(path: Path) -> mmap.mmap | None:
    """Return the memory of a pulse, or None if this process has not inherited it."""
    with suppress(OSError, ValueError):
        file = os.open(path, os.O_RDWR)
        try:
            if os.fstat(file).st_size == _PULSE_BYTES:
                return mmap.mmap(file, _PULSE_BYTES)
        finally:
            os.close(file)
    return None


def _age_s() -> float:
    """Return the seconds since this process was started or left standby; 0 if the system does not provide them."""
    if (turn := turn_came_at()) is not None:
        return time.monotonic() - turn
    try:
        started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


@dataclass(frozen=True)
class Goodput:
    """The wall time of a run, by phase."""

    wall_s: float
    """Seconds of all attempts and of the restarts between them; the sum of `seconds`."""
    seconds: dict[str, float]
    """Phase -> seconds: `start`, `compile`, `restore` or `init`, `data` (waiting for a batch), `step`, `evaluate`,
    `save` (the loop waits for a checkpoint), `trace`, `check`, `end`, and `lost` and `restart`."""
    attempts: int
    """The number of attempts."""
    lost_steps: int
    """The number of steps that had to be made again; a step that was lost twice counts twice."""

    @property
    def share(self) -> float:
        """Productive seconds divided by wall seconds."""
        return self.seconds.get(PRODUCTIVE, 0.0) / self.wall_s if self.wall_s else 0.0

    def to_dict(self) -> dict:
        """Return the goodput as a JSON object."""
        return {"share": self.share, **asdict(self)}


@dataclass(frozen=True)
class RunAttempt:
    """The record of one attempt."""

    began: float
    """When its process was started, in seconds of the system's clock."""
    seconds: Mapping[str, float]
    """Phase -> seconds until its record was last written."""
    resumed_step: int | None = None
    """The step from which it began; None if it ended before that was known."""
    last_step: int = 0
    """The last step that it made."""
    marks: tuple[tuple[int, Mapping[str, float]], ...] = ()
    """Pairs of a saved step and the seconds by phase at that moment."""
    outcome: AttemptOutcome | None = None
    """How it ended; None if it was killed or still runs."""

    @property
    def wall_s(self) -> float:
        """Seconds from its start until its record was last written."""
        return math.fsum(self.seconds.values())

    def lost_after(self, step: int) -> tuple[int, dict[str, float]]:
        """Return the steps that were lost because a later attempt began from `step`.

        Returns:
            The number of lost steps, and their seconds in `step` and `data`. 0 and {} if the attempt made no step after
            `step`, or if its first step is unknown.
        """
        if self.resumed_step is None or self.last_step <= max(step, self.resumed_step):
            return 0, {}
        kept = max(step, self.resumed_step)
        made, again = self.last_step - self.resumed_step, self.last_step - kept
        marked = dict(self.marks).get(kept, {} if kept == self.resumed_step else None)
        spent = {}
        for phase in _OF_A_STEP:
            if phase not in self.seconds:
                continue
            total = self.seconds[phase]
            # Without a mark at that step (the user resumed from an older checkpoint), all steps count as equally long.
            before = total * (1 - again / made) if marked is None else marked.get(phase, 0.0)
            spent[phase] = min(total, max(0.0, total - before))
        return again, spent


class GoodputLog:
    """Write the record of a running attempt every second, in a thread. A context manager around the attempt.

    Args:
        folder: the run folder; None writes nothing. Only the first process of a job writes.
        phases: the phases of this process.
    """

    def __init__(self, folder: Path | None, phases: Phases):
        self._phases = phases
        self._attempt = RunAttempt(time.time() - sum(phases.totals().values()), {})
        self._path = folder / _FOLDER / f"{self._attempt.began:.3f}.json" if folder else None
        self._before = read_attempts(folder) if folder else []
        self._at_loop: tuple[Goodput, Mapping[str, float]] | None = None
        self._lock, self._ends = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="meshkit-goodput", daemon=True)

    def resumed(self, step: int) -> None:
        """Record the step from which the attempt resumes; 0 for a new run."""
        self._attempt = replace(self._attempt, resumed_step=step, last_step=step)
        now = self._now()
        known = goodput_of([*self._before, now]) if self._path is not None else None
        self._at_loop = (known, now.seconds) if known else None

    def made(self, step: int) -> None:
        """Record that a step is done."""
        self._attempt = replace(self._attempt, last_step=step)

    def mark(self, step: int) -> None:
        """Record that this step is being saved, so that a later attempt may begin from it."""
        marks = (*self._attempt.marks, (step, self._phases.totals()))[-_MARKS:]
        self._attempt = replace(self._attempt, marks=marks)

    def share(self) -> float | None:
        """Return `Goodput.share` of all attempts so far; None before `resumed` is called.

        After that call only the seconds of this attempt change.
        """
        if self._at_loop is None:
            return None
        known, then = self._at_loop
        now = self._phases.totals()
        productive = known.seconds.get(PRODUCTIVE, 0.0) + now.get(PRODUCTIVE, 0.0) - then.get(PRODUCTIVE, 0.0)
        wall_s = known.wall_s + math.fsum(now.values()) - math.fsum(then.values())
        return productive / wall_s if wall_s else None

    def _now(self) -> RunAttempt:
        return replace(self._attempt, seconds=self._phases.totals())

    def write(self) -> None:
        """Write the present record. A full disk raises no error."""
        # A thread that hangs in a write must not keep the run from ending.
        if self._path is None or not self._lock.acquire(timeout=2 * _EVERY_S):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name("attempt.tmp")  # the next attempt replaces a partial file
            temporary.write_text(json.dumps(asdict(self._now())))
            os.replace(temporary, self._path)
        except OSError:
            pass
        finally:
            self._lock.release()

    def _run(self) -> None:
        while not self._ends.wait(_EVERY_S):
            self.write()

    def __enter__(self) -> Self:
        self.write()
        if self._path is not None:
            self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._ends.set()
        if self._path is not None:
            self._thread.join(timeout=2 * _EVERY_S)
        self._attempt = replace(self._attempt, outcome=_outcome(error))
        self.write()


def read_goodput(folder: Path) -> Goodput | None:
    """Return the goodput of a run folder; None if no attempt has written a record."""
    return goodput_of(read_attempts(folder))


def read_attempts(folder: Path) -> list[RunAttempt]:
    """Return the records of a run's attempts in the order of their start, without those that cannot be read."""
    files = sorted((folder / _FOLDER).glob("*.json"))[-_MOST_ATTEMPTS:]
    return sorted((a for path in files if (a := _read(path)) is not None), key=lambda a: a.began)


def goodput_of(attempts: Sequence[RunAttempt]) -> Goodput | None:
    """Return the goodput of a run's attempts, given in the order of their start; None without attempts."""
    if not attempts:
        return None
    seconds: dict[str, float] = {"lost": 0.0, "restart": 0.0}
    lost_steps, resumed = 0, math.inf
    for i in range(len(attempts) - 1, -1, -1):
        attempt = attempts[i]
        for phase, spent in attempt.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
        if i + 1 < len(attempts):
            # `resumed` is the lowest step from which a later attempt began: steps after it were made again.
            again, lost = attempt.lost_after(int(resumed)) if math.isfinite(resumed) else (0, {})
            lost_steps += again
            for phase, spent in lost.items():
                seconds[phase] -= spent
                seconds["lost"] += spent
            if attempt.outcome not in _WANTED_PAUSE:
                # The clocks of two machines may differ by more than the pause, so the difference may be negative.
                seconds["restart"] += max(0.0, attempts[i + 1].began - attempt.began - attempt.wall_s)
        if attempt.resumed_step is not None:
            resumed = min(resumed, attempt.resumed_step)
    return Goodput(math.fsum(seconds.values()), seconds, len(attempts), lost_steps)


def _outcome(error: BaseException | None) -> AttemptOutcome:
    if error is None:
        return "done"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    code = getattr(error, "exit_code", None)  # errors of meshkit have one
    return "preempted" if code == PREEMPTED else "refused" if code == USER_ERROR else "failed"


def _read(path: Path) -> RunAttempt | None:
    try:
        found = json.loads(read_regular(path, _LARGEST_BYTES))
        resumed, outcome = found["resumed_step"], found.get("outcome")
        return RunAttempt(
            began=_number(found["began"]),
            seconds=_seconds(found["seconds"]),
            resumed_step=None if resumed is None else int(_number(resumed)),
            last_step=int(_number(found["last_step"])),
            marks=tuple((int(_number(step)), _seconds(seconds)) for step, seconds in found.get("marks", [])),
            outcome=outcome if outcome in get_args(AttemptOutcome) else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _seconds(found: Mapping) -> dict[str, float]:
    return {str(phase): max(0.0, _number(spent)) for phase, spent in found.items()}


def _number(value: object) -> float:
    """Return a number of seconds or steps from a file, which may hold anything; sums of it must stay finite."""
    number = float(value)  # pyright: ignore[reportArgumentType]  a TypeError is what says so
    if not abs(number) <= _MOST:  # True for NaN as well
        raise ValueError("out of range")
    return number
