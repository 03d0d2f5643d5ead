"""Goodput: what every second of a run's wall time went to, over all its attempts.

    Phases of each attempt -> goodput/<when it began>.json, once a second -> read_goodput -> Goodput

Productive is the time of training steps that count. Steps that a later attempt made again are lost; what lies between
two attempts is restart. A thread writes, so that an attempt that is killed while it compiles or restores is seen too,
with what it did until a second before. A pause after an attempt that was done, that a person ended or has to mend, is
nobody's loss and no part of the wall time.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self, get_args

from meshkit.config.bounded import read_regular
from meshkit.errors import PREEMPTED, USER_ERROR
from meshkit.runs.phases import Phases

_FOLDER = "goodput"
_EVERY_S = 1.0
_MARKS = 16  # saved steps of an attempt that are remembered, the newest: an attempt resumes from one of the last few
_LARGEST_BYTES, _MOST_ATTEMPTS = 2**20, 10_000
_MOST = 1e15  # seconds, steps
PRODUCTIVE = "step"
# What a step costs besides its own time: both are lost where a step is made again.
_OF_A_STEP = (PRODUCTIVE, "data")
AttemptOutcome = Literal["done", "interrupted", "refused", "preempted", "failed"]
_WANTED_PAUSE = ("done", "interrupted", "refused")


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a run went."""

    wall_s: float
    """Seconds of all attempts and of the restarts between them; the sum of `seconds`."""
    seconds: dict[str, float]
    """Phase -> seconds: `start`, `compile`, `restore` or `init`, `data` (waiting for a batch), `step`, `evaluate`,
    `save` (what a checkpoint keeps the loop from doing), `trace`, `check`, `end`, and `lost` and `restart`."""
    attempts: int
    """How many there were."""
    lost_steps: int
    """That were made and had to be made again, counted each time."""

    @property
    def share(self) -> float:
        """Productive seconds over wall seconds."""
        return self.seconds.get(PRODUCTIVE, 0.0) / self.wall_s if self.wall_s else 0.0

    def to_dict(self) -> dict:
        """As JSON has it."""
        return {"share": self.share, **asdict(self)}


@dataclass(frozen=True)
class RunAttempt:
    """One attempt's record."""

    began: float
    """When its process was started, in seconds of the system's clock."""
    seconds: Mapping[str, float]
    """Phase -> seconds until its last sign."""
    resumed_step: int | None = None
    """Where it began; None if it ended before it knew."""
    last_step: int = 0
    """The last one that it made."""
    marks: tuple[tuple[int, Mapping[str, float]], ...] = ()
    """A step that was saved -> the seconds by phase at that moment."""
    outcome: AttemptOutcome | None = None
    """None where it was killed."""

    @property
    def wall_s(self) -> float:
        """From its start to its last sign."""
        return math.fsum(self.seconds.values())

    def lost_after(self, step: int) -> tuple[int, dict[str, float]]:
        """What it did beyond a step that a later attempt began from: steps, and the seconds of them by phase."""
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
            # where nothing was saved at that step (an older checkpoint was asked for), all steps count as equal
            before = total * (1 - again / made) if marked is None else marked.get(phase, 0.0)
            spent[phase] = min(total, max(0.0, total - before))
        return again, spent


class GoodputLog:
    """Writes down one attempt's seconds as it goes, in a thread. A context manager around the attempt.

    Args:
        folder: the run folder; None writes nothing: of several processes the first does.
        phases: of this process.
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
        """The attempt begins from this step; 0 from the start."""
        self._attempt = replace(self._attempt, resumed_step=step, last_step=step)
        now = self._now()
        known = goodput_of([*self._before, now]) if self._path is not None else None
        self._at_loop = (known, now.seconds) if known else None

    def made(self, step: int) -> None:
        """The step is done."""
        self._attempt = replace(self._attempt, last_step=step)

    def mark(self, step: int) -> None:
        """A checkpoint of this step is being written: a later attempt may begin from it."""
        marks = (*self._attempt.marks, (step, self._phases.totals()))[-_MARKS:]
        self._attempt = replace(self._attempt, marks=marks)

    def share(self) -> float | None:
        """Productive seconds over wall seconds so far, of all attempts; None before it is known where this one began.

        From there on only this attempt's seconds grow.
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
        """Writes the record as it is now. A disk that is full stops nothing."""
        # storage that hangs in the thread must not keep the run from ending
        if self._path is None or not self._lock.acquire(timeout=2 * _EVERY_S):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_suffix(".tmp")
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
    """The goodput of a run folder; None where no attempt has written any."""
    return goodput_of(read_attempts(folder))


def read_attempts(folder: Path) -> list[RunAttempt]:
    """The attempts at a run, the first one first; what cannot be read is left out."""
    files = sorted((folder / _FOLDER).glob("*.json"))[-_MOST_ATTEMPTS:]
    return sorted((a for path in files if (a := _read(path)) is not None), key=lambda a: a.began)


def goodput_of(attempts: Sequence[RunAttempt]) -> Goodput | None:
    """The sums over the attempts of a run, in the order in which they began; None for none."""
    if not attempts:
        return None
    seconds: dict[str, float] = {"lost": 0.0, "restart": 0.0}
    lost_steps, resumed = 0, math.inf
    for i in range(len(attempts) - 1, -1, -1):
        attempt = attempts[i]
        for phase, spent in attempt.seconds.items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
        if i + 1 < len(attempts):
            # the lowest step that any later attempt began from: what was made beyond it was made again
            again, lost = attempt.lost_after(int(resumed)) if math.isfinite(resumed) else (0, {})
            lost_steps += again
            for phase, spent in lost.items():
                seconds[phase] -= spent
                seconds["lost"] += spent
            if attempt.outcome not in _WANTED_PAUSE:
                # clocks of two machines may differ by more than the pause: no time runs backwards
                seconds["restart"] += max(0.0, attempts[i + 1].began - attempt.began - attempt.wall_s)
        if attempt.resumed_step is not None:
            resumed = min(resumed, attempt.resumed_step)
    return Goodput(math.fsum(seconds.values()), seconds, len(attempts), lost_steps)


def _outcome(error: BaseException | None) -> AttemptOutcome:
    if error is None:
        return "done"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    code = getattr(error, "exit_code", None)  # of an error of meshkit's
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
    """A number of seconds or steps; it is written down by others, and sums of it have to hold."""
    number = float(value)  # pyright: ignore[reportArgumentType]  a TypeError is what says so
    if not abs(number) <= _MOST:  # also what is no number
        raise ValueError("out of range")
    return number
