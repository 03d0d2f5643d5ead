"""Run a job under failures at drawn times, and measure what they cost: through /proc, and from the run's own record.

seed -> Failure(at, kind) ... -> fault -> all processes of the attempt gone (detection) -> first new step -> Soak

The kinds are those of the kill matrix. An exception is raised when the process next enters a phase.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from random import Random

from benchmarks.kill_matrix.cells import FAULTS, SIGNALS, leftovers
from benchmarks.kill_matrix.gang import RAISE, Launch, are_gone, descendants, resident_bytes, send
from benchmarks.kill_matrix.soak import still_listening
from meshkit.predict.failures import Failure, draw
from meshkit.runs.phases import Goodput, read_attempts, read_goodput

EXPERIMENT = Path(__file__).with_name("experiment.toml")
SECONDS, EVERY, MEAN_S = 1800.0, 25, 20.0
_LONGEST_S, _LOOK_S, _MANY = 7200.0, 0.005, 10**6
_SENT = SIGNALS | {"raise": RAISE}


@dataclass(frozen=True)
class Hit:
    """A failure, and what followed it."""

    kind: str
    at_s: float
    """Time from the start of the first attempt's process 0."""
    detection_s: float
    """Time until the last process of the attempt was gone."""
    up_s: float | None
    """Time from then until the first step of the next attempt; None if that attempt made none."""


@dataclass
class Soak:
    """A run under failures."""

    goodput: Goodput
    first_s: float | None
    """Time from the start of process 0 to the first step; None if a failure came before it."""
    hits: list[Hit] = field(default_factory=list)
    skipped: int = 0
    """Failures that were drawn for a moment at which nothing ran."""
    launches: int = 1
    step_s: float = 0.0
    """Time of a step that counts."""
    launcher_bytes: tuple[int, int] = (0, 0)
    """Resident memory of the launcher at the first failure, and the largest at any failure."""
    left: list[str] = field(default_factory=list)
    """Files, processes and ports that remain after the end."""


def schedule(seed: int, mean_s: float = MEAN_S) -> list[Failure]:
    """Return the failures of two hours, which depend only on the seed; each kind is equally likely."""
    kinds = Random(f"kinds of {seed}")
    drawn = takewhile(lambda failure: failure.at_s < _LONGEST_S, draw(seed, 1 / mean_s))
    return [failure._replace(kind=kinds.choice(list(FAULTS))) for failure in drawn]


def ends_launcher(kind: str) -> bool:
    """Return whether the launcher ends after a failure of this kind, so that the same command must run again."""
    fault, rank = FAULTS[kind]
    return fault == "term" or rank is None


def soak(folder: Path, failures: list[Failure], *, steps: int = _MANY, seconds: float = _LONGEST_S) -> Soak:
    """Return what a run with these failures costs. A launcher that has ended is started again.

    Args:
        folder: a folder for the run.
        failures: the failures, with times from the start of the first attempt.
        steps: the last step, after which the run ends.
        seconds: the time after which SIGTERM ends the run, if it still trains.
    """
    launch = Launch(folder, options=_options(steps), experiment=EXPERIMENT)
    launch.start()
    try:
        began = launch.wait(lambda: next((a.began for a in read_attempts(launch.out)), None), "the first attempt")
        attempt, skipped, gone_at, ends = 0, 0, 0.0, began + seconds
        hits: list[tuple[str, float, float, int]] = []
        memory: list[int] = []
        coordinators: set[str | None] = set()
        for failure in failures:
            if began + failure.at_s < gone_at:
                skipped += 1
                continue
            _run_until(launch, min(ends, began + failure.at_s))
            if began + failure.at_s >= ends or _has_finished(launch):
                break
            coordinators.add(launch.coordinator())
            assert launch.process is not None
            memory.append(resident_bytes(launch.process.pid))
            attempt, at, gone_at = _hit(launch, failure.kind)
            hits.append((failure.kind, at - began, gone_at - at, attempt))
        _run_until(launch, ends)
        if not _has_finished(launch):
            _wait_for_process(launch, 0)
            assert launch.process is not None
            send(launch.process.pid, signal.SIGTERM)
            launch.end()
        goodput = read_goodput(launch.out)
        assert goodput is not None
        stepped = {i: found["time"] for i in range(attempt + 2) if (found := launch.mark(i, "stepped"))}
        found = [
            Hit(kind, at, down, stepped[i + 1] - (began + at + down) if i + 1 in stepped else None)
            for kind, at, down, i in hits
        ]
        return Soak(
            goodput, stepped[0] - began if 0 in stepped else None, found, skipped, launch.starts,
            goodput.seconds["step"] / launch.losses()[-1][0], (memory[0], max(memory)) if memory else (0, 0),
            leftovers(launch) + still_listening(coordinators - {None}),
        )  # fmt: skip
    finally:
        launch.kill()


def _options(steps: int) -> tuple[str, ...]:
    return ("--max-restarts", "1000", "--set", f"train.steps={steps}", "--set", f"checkpoint.every={EVERY}")


def _run_until(launch: Launch, moment: float) -> None:
    """Wait until then or until the run has finished. A launcher that ends early is started again."""
    while time.time() < moment and not _has_finished(launch):
        _start_again(launch)
        time.sleep(_LOOK_S)


def _hit(launch: Launch, kind: str) -> tuple[int, float, float]:
    """Inject a fault; return the attempt, the time of the fault, and the time when its last process is gone."""
    fault, rank = FAULTS[kind]
    _wait_for_process(launch, rank or 0)
    attempt, gang = launch.attempt(), launch.ranks()
    everyone = sorted({*gang.values(), *(child for pid in gang.values() for child in descendants(pid))})
    assert launch.process is not None
    at = time.time()
    send(launch.process.pid if rank is None else gang[rank], _SENT[fault])
    launch.wait(lambda: are_gone(everyone), f"the end of attempt {attempt} after {kind}")
    return attempt, at, time.time()


def _wait_for_process(launch: Launch, rank: int) -> None:
    def look() -> int | None:
        _start_again(launch)  # The launcher may still have been ending after an earlier failure.
        return launch.ranks().get(rank)

    launch.wait(look, f"process {rank}")


def _has_finished(launch: Launch) -> bool:
    assert launch.process is not None
    return launch.process.poll() == 0


def _start_again(launch: Launch) -> None:
    """Start a launcher again if it has ended early."""
    assert launch.process is not None
    if launch.process.poll() not in (None, 0):
        launch.start()
