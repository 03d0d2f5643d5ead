"""A run under failures at drawn times, and what they cost: from outside, through /proc, and by the run's own record.

seed -> Failure(at, kind) ... -> signal to a process -> gang gone (detection) -> first new step -> Soak
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from random import Random

from benchmarks.kill_matrix.gang import Launch, are_gone, descendants, send
from meshkit.predict.failures import Failure, draw
from meshkit.runs.phases import Goodput, read_attempts, read_goodput

EXPERIMENT = Path(__file__).with_name("experiment.toml")
SECONDS, EVERY, MEAN_S = 480.0, 25, 60.0
# Kind -> signal and rank. A process that is stopped is seen 10 s later, by the launcher's watchdog.
KINDS = {
    "kill -9 of rank 0": (signal.SIGKILL, 0),
    "kill -9 of rank 1": (signal.SIGKILL, 1),
    "SIGSTOP of rank 0": (signal.SIGSTOP, 0),
    "SIGSTOP of rank 1": (signal.SIGSTOP, 1),
}
_LONGEST_S, _LOOK_S, _MANY = 3600.0, 0.005, 10**6


@dataclass(frozen=True)
class Hit:
    """A failure that came, and what followed.

    Attributes:
        kind: of the failure.
        at_s: from the start of the first attempt's process 0.
        detection_s: until the last process of the gang was gone.
        up_s: from then until the first step of the next attempt was made; None where it made none.
    """

    kind: str
    at_s: float
    detection_s: float
    up_s: float | None


@dataclass
class Soak:
    """What a run under failures came to."""

    goodput: Goodput
    first_s: float | None
    """From the start of process 0 until the first step was made; None where a failure came before it."""
    hits: list[Hit] = field(default_factory=list)
    skipped: int = 0
    """Failures that were drawn for a moment at which nothing ran."""
    launches: int = 1
    step_s: float = 0.0
    """Of a step that counts, as this run made them."""


def schedule(seed: int, mean_s: float = MEAN_S) -> list[Failure]:
    """Failures of an hour, the same for the same seed; each of a kind drawn evenly."""
    kinds = Random(f"kinds of {seed}")
    drawn = takewhile(lambda failure: failure.at_s < _LONGEST_S, draw(seed, 1 / mean_s))
    return [failure._replace(kind=kinds.choice(list(KINDS))) for failure in drawn]


def soak(folder: Path, failures: list[Failure], *, steps: int = _MANY, seconds: float = _LONGEST_S) -> Soak:
    """Runs it to its last step, or for so many seconds; one that its launcher gives up is started again."""
    options = ("--max-restarts", "1000", "--set", f"train.steps={steps}", "--set", f"checkpoint.every={EVERY}")
    launch = Launch(folder, options=options, experiment=EXPERIMENT)
    launch.start()
    try:
        began = launch.wait(lambda: next((a.began for a in read_attempts(launch.out)), None), "the first attempt")
        attempt, skipped, launches, gone_at, ends = 0, 0, 1, 0.0, began + seconds
        hits: list[tuple[str, float, float, int]] = []
        for failure in failures:
            if began + failure.at_s < gone_at:
                skipped += 1
                continue
            launches += _run_until(launch, min(ends, began + failure.at_s))
            if began + failure.at_s >= ends or _ended(launch):
                break
            number, rank = KINDS[failure.kind]
            at, gone_at = _hit(launch, number, rank)
            hits.append((failure.kind, at - began, gone_at - at, attempt))
            attempt += 1
        launches += _run_until(launch, ends)
        launch.kill()
        goodput = read_goodput(launch.out)
        assert goodput is not None
        stepped = {i: found["time"] for i in range(attempt + 1) if (found := launch.mark(i, "stepped"))}
        found = [
            Hit(kind, at, down, stepped[i + 1] - (began + at + down) if i + 1 in stepped else None)
            for kind, at, down, i in hits
        ]
        step_s = goodput.seconds["step"] / launch.losses()[-1][0]
        return Soak(goodput, stepped[0] - began if 0 in stepped else None, found, skipped, launches, step_s)
    finally:
        launch.kill()


def _run_until(launch: Launch, moment: float) -> int:
    """Waits until then, or until the run is over; how often a launcher had to be started again."""
    again = 0
    while time.time() < moment and not _ended(launch):
        again += _start_again(launch)
        time.sleep(_LOOK_S)
    return again


def _hit(launch: Launch, number: signal.Signals, rank: int) -> tuple[float, float]:
    """Sends the signal; when, and when the last process of the gang is gone."""
    victim = launch.wait(lambda: launch.ranks().get(rank), f"process {rank}")
    gang = list(launch.ranks().values())
    everyone = sorted({*gang, *(child for pid in gang for child in descendants(pid))})
    at = time.time()
    send(victim, number)
    launch.wait(lambda: are_gone(everyone), "the end of the gang")
    return at, time.time()


def _ended(launch: Launch) -> bool:
    assert launch.process is not None
    return launch.process.poll() == 0


def _start_again(launch: Launch) -> int:
    """Starts a launcher that has given up; 1 if it did."""
    assert launch.process is not None
    if launch.process.poll() in (None, 0):
        return 0
    launch.start()
    return 1
