"""The cells of the matrix: a fault in a phase, what follows from it, and whether that is right.

baseline, left alone -> losses
Cell -> Launch -> gate reached -> fault -> gang gone (detection) -> first new step (recovery) -> losses -> Row
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kill_matrix.gang import Gate, Launch, are_gone, descendants, processes_with, send

PHASES = ("start", "compile", "restore", "step", "save", "commit")
# Name -> what is done, and to which process; None: to the launcher, which passes SIGTERM on to all.
FAULTS: dict[str, tuple[str, int | None]] = {
    "kill -9 of rank 1": ("kill", 1),
    "kill -9 of rank 0, the coordinator": ("kill", 0),
    "SIGTERM to the launcher": ("term", None),
    "SIGTERM to rank 1 alone": ("term", 1),
    "SIGTERM to rank 0 alone": ("term", 0),
    "SIGSTOP of rank 1": ("stop", 1),
    "SIGSTOP of rank 0": ("stop", 0),
    "exception on rank 1": ("raise", 1),
    "exception on rank 0": ("raise", 0),
    "kill -9 of the launcher": ("kill", None),
}
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
# Promised: 15 s until the gang is down (10 s of them until a stopped process is called stuck). Held to twice that.
DOWN_S = 15.0
_RESTORED, _HIT = 8, 12
# What a step of the victim takes from its gate on, by fault: longer than jax takes to spread the notice of a SIGTERM;
# and so long that a gang whose stopped process is woken for its stack does not end its run within the grace of 5 s.
SLOW_STEP_S = {"term": 0.3, "stop": 1.5}


@dataclass(frozen=True)
class Cell:
    """A fault in a phase."""

    fault: str
    phase: str

    @property
    def name(self) -> str:
        return f"{self.fault} in {self.phase}"


@dataclass(frozen=True)
class Row:
    """What a cell came to.

    Attributes:
        detection_s: from the fault until the last process of the gang is gone; None where it goes on.
        recovery_s: from the fault until the first step of the next attempt is made; None where there is none.
        restarts: attempts after the one that was hit.
        pulse: phase that the victim's pulse told when it was hit.
        losses_equal: to those of the run that was left alone, bit for bit.
        wrong: what is not as it should be; empty if nothing.
    """

    fault: str
    phase: str
    detection_s: float | None
    recovery_s: float | None
    restarts: int
    pulse: str
    losses_equal: bool
    wrong: str


CELLS = tuple(Cell(fault, phase) for fault in FAULTS for phase in PHASES)


def baseline(folder: Path, options: tuple[str, ...] = ()) -> list[tuple[int, float]]:
    """The losses of a run that is left alone; it stays in the folder.

    Raises:
        RuntimeError: it does not end well.
    """
    launch = Launch(folder, options=options)
    launch.start()
    if launch.end() != 0:
        raise RuntimeError(f"the run that is left alone ends with {launch.process}:\n{launch.said[-4000:]}")
    return launch.losses()


def run_cell(cell: Cell, folder: Path, alone: Path, losses: list[tuple[int, float]]) -> Row:
    """Runs one cell.

    Args:
        cell: which.
        folder: for it; made.
        alone: folder of the run that was left alone, from which a cell in `restore` gets its checkpoint.
        losses: of that run.
    """
    kind, rank = FAULTS[cell.fault]
    gate = Gate(cell.phase, rank or 0, _HIT, kind == "raise", True, SLOW_STEP_S.get(kind, 0.0))
    attempt = 0
    if cell.phase == "restore":
        attempt = _as_after(alone / "run", folder / "run", _RESTORED)
    launch = Launch(folder, {attempt: gate})
    launch.start()
    try:
        hit = hit_at_gate(launch, attempt, gate, kind, rank)
        return _judge(cell, launch, hit, losses)
    finally:
        launch.kill()


@dataclass(frozen=True)
class Hit:
    """A fault that has come, and what followed at once."""

    attempt: int
    kind: str
    at: float
    detection_s: float | None
    pulse: str


def hit_at_gate(launch: Launch, attempt: int, gate: Gate, kind: str, rank: int | None, delay_s: float = 0.0) -> Hit:
    """Waits for a gate and for the pulse that tells of it, injects the fault, and waits until the gang is gone."""
    at = launch.wait_for_mark(attempt, "at")["time"]
    gang = list(launch.ranks().values())
    pulse = ""
    if kind != "raise":
        victim = rank or 0
        # A checkpoint is committed beside the training, whatever that does.
        anything = gate.phase == "commit" or not gate.holds
        right = lambda phase: phase if phase == gate.phase or (phase and anything) else None
        pulse = launch.wait(lambda: right(launch.pulse(victim).get("phase")), f"a pulse of {gate.phase}")
        time.sleep(delay_s)
        at = time.time()
        send(launch.process.pid if rank is None else launch.ranks().get(victim, 0) or _gone(), SIGNALS[kind])
    launch.let_go(attempt)
    if kind == "raise" and rank == 0 and gate.phase == "commit":
        return Hit(attempt, kind, at, None, pulse)
    everyone = {*gang, *(child for pid in gang for child in descendants(pid)), *launch.helpers(attempt)}
    launch.wait(lambda: are_gone(sorted(everyone)), f"the end of the gang of attempt {attempt}")
    return Hit(attempt, kind, at, time.time() - at, pulse)


def _gone() -> int:
    raise RuntimeError("the process that the fault is for is not there")


def _judge(cell: Cell, launch: Launch, hit: Hit, losses: list[tuple[int, float]]) -> Row:
    """Waits for the end of the run, and compares."""
    kind, rank = FAULTS[cell.fault]
    wrong = []
    code, ends_with = launch.end(), 75 if kind == "term" else -signal.SIGKILL if rank is None else 0
    if code != ends_with:
        wrong.append(f"exit code {code} instead of {ends_with}")
    elif code:  # as when the scheduler starts the job again
        launch.start()
        code = launch.end()
    if code != 0:
        wrong.append(f"exit code {code} at the end")
    said, attempts = launch.said, _attempts(launch.out)
    if hit.detection_s is None:  # a save that fails costs that checkpoint, and no restart
        wrong += [] if "could not be saved" in said and attempts == 1 else ["the failed checkpoint is not said"]
    elif rank is not None and kind != "term":
        wrong += _unsaid(said, kind, rank, hit.attempt)
    wrong += leftovers(launch)
    if hit.detection_s is not None and hit.detection_s > 2 * DOWN_S:
        wrong.append(f"the gang was down after {hit.detection_s:.1f} s")
    if not (equal := launch.losses() == losses):
        wrong.append("other losses")
    stepped = launch.mark(hit.attempt + 1, "stepped")
    recovery_s = stepped["time"] - hit.at if stepped else None
    return Row(
        cell.fault, cell.phase, hit.detection_s and round(hit.detection_s, 2), recovery_s and round(recovery_s, 2),
        attempts - hit.attempt - 1, hit.pulse, equal, "; ".join(wrong),
    )  # fmt: skip


def _unsaid(said: str, kind: str, rank: int | None, attempt: int) -> list[str]:
    """What the launcher should have said of a fault, and has not."""
    expected = {
        "kill": rf"process {rank} ended first: killed by SIGKILL",
        "raise": rf"process {rank} ended first: exit code 1 [^\n]*\n(  \| [^\n]*\n)*  \| [^\n]*InjectedError",
        "stop": rf"process {rank} is stuck in attempt {attempt}: it has been stopped \(SIGSTOP\)",
    }[kind]
    found = re.search(expected, said)
    return [] if found else [f"not said: {expected}"]


def leftovers(launch: Launch) -> list[str]:
    """Files and processes that a run should not leave."""
    files = [
        path.relative_to(launch.folder).as_posix()
        for pattern in ("*.tmp", "*.part", "*tmp*")
        for path in launch.out.rglob(pattern)
    ]
    files += [path.name for path in launch.scratch.iterdir()]
    processes = processes_with(str(launch.folder))
    return [f"left: {', '.join(sorted(set(files)))}"] * bool(files) + [f"left: {len(processes)} processes"] * bool(
        processes
    )


def _attempts(out: Path) -> int:
    return len(list((out / "logs").glob("attempt*")))


def _as_after(source: Path, target: Path, step: int) -> int:
    """A run folder as it was after a step that has a checkpoint.

    Returns:
        The number of its next attempt.
    """
    shutil.copytree(source, target)
    for checkpoint in (target / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    metrics = target / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines() if json.loads(line)["step"] <= step]
    metrics.write_text("".join(f"{line}\n" for line in lines))
    return _attempts(target)
