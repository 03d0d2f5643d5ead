"""Run the cells of the matrix: a fault in a phase, what follows from it, and whether that is right.

undisturbed run -> losses
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
# Name -> what is done, and the rank of the process that it hits. None is the launcher, which passes SIGTERM on to all.
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
# A gang should be gone 15 s after the fault. A stopped process counts as stuck only after 10 s. A cell fails if its
# gang needs twice this time.
DOWN_S = 15.0
_RESTORED, _HIT = 8, 12
# Fault -> seconds that are added to each step of the process that is hit, after its gate. After SIGTERM a step must
# take longer than jax needs to tell all processes of the signal. A stopped process is continued so that it prints its
# stack. Its steps must then be so long that the run does not end within the grace of 5 s.
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
    """The result of a cell.

    Attributes:
        fault: the cell's fault.
        phase: the cell's phase.
        detection_s: seconds from the fault until the last process of the gang is gone; None if the gang goes on.
        recovery_s: seconds from the fault until the first step of the next attempt is made; None if there is none.
        restarts: number of attempts after the one that was hit.
        pulse: the phase that the pulse of the hit process named at the fault; "" if the process raised the exception.
        losses_equal: whether the losses equal those of the undisturbed run, bit for bit.
        wrong: what went wrong; "" if nothing did.
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
    """Return the losses of an undisturbed run. Its files stay in the folder.

    Raises:
        RuntimeError: the run fails.
    """
    launch = Launch(folder, options=options)
    launch.start()
    if launch.end() != 0:
        raise RuntimeError(f"the undisturbed run has failed ({launch.process}):\n{launch.said[-4000:]}")
    return launch.losses()


def run_cell(cell: Cell, folder: Path, alone: Path, losses: list[tuple[int, float]]) -> Row:
    """Return the result of one cell.

    Args:
        cell: the cell.
        folder: a folder for its run, which is created.
        alone: the folder of the undisturbed run, from which a cell in `restore` gets its checkpoint.
        losses: the losses of the undisturbed run.
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
    """A fault that was injected, and the end of the gang after it.

    Attributes:
        attempt: number of the attempt that was hit.
        kind: what was done: `kill`, `term`, `stop` or `raise`.
        at: time of the fault, in seconds since the epoch.
        detection_s: as in `Row`.
        pulse: as in `Row`.
    """

    attempt: int
    kind: str
    at: float
    detection_s: float | None
    pulse: str


def hit_at_gate(launch: Launch, attempt: int, gate: Gate, kind: str, rank: int | None, delay_s: float = 0.0) -> Hit:
    """Inject a fault into a process at its gate, and return the hit once the gang is gone.

    Args:
        launch: the launch under test.
        attempt: number of the attempt that has the gate.
        gate: the gate. The fault waits until the pulse of its process names the phase.
        kind: what is done: `kill`, `term`, `stop` or `raise`.
        rank: rank of the process that is hit; None for the launcher.
        delay_s: seconds between that pulse and the fault.
    """
    at = launch.wait_for_mark(attempt, "at")["time"]
    gang = list(launch.ranks().values())
    pulse = ""
    if kind != "raise":
        victim = rank or 0
        # A commit runs in the background of any phase, and a process that does not wait at its gate may have gone on.
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
    raise RuntimeError("the process that is to be hit is gone")


def _judge(cell: Cell, launch: Launch, hit: Hit, losses: list[tuple[int, float]]) -> Row:
    """Wait for the end of the run, and return the cell's result."""
    kind, rank = FAULTS[cell.fault]
    wrong = []
    code, ends_with = launch.end(), 75 if kind == "term" else -signal.SIGKILL if rank is None else 0
    if code != ends_with:
        wrong.append(f"exit code {code} instead of {ends_with}")
    elif code:  # run the same command again, as a scheduler does
        launch.start()
        code = launch.end()
    if code != 0:
        wrong.append(f"exit code {code} at the end")
    said, attempts = launch.said, _attempts(launch.out)
    if hit.detection_s is None:  # a failed save costs its checkpoint, but no restart
        wrong += [] if "could not be saved" in said and attempts == 1 else ["the failed checkpoint is not reported"]
    elif rank is not None and kind != "term":
        wrong += _unsaid(said, kind, rank, hit.attempt)
    wrong += leftovers(launch)
    if hit.detection_s is not None and hit.detection_s > 2 * DOWN_S:
        wrong.append(f"the gang was down after {hit.detection_s:.1f} s")
    if not (equal := launch.losses() == losses):
        wrong.append("the losses differ")
    stepped = launch.mark(hit.attempt + 1, "stepped")
    recovery_s = stepped["time"] - hit.at if stepped else None
    return Row(
        cell.fault, cell.phase, hit.detection_s and round(hit.detection_s, 2), recovery_s and round(recovery_s, 2),
        attempts - hit.attempt - 1, hit.pulse, equal, "; ".join(wrong),
    )  # fmt: skip


def _unsaid(said: str, kind: str, rank: int | None, attempt: int) -> list[str]:
    """Return what the launcher should have reported of a fault, but has not."""
    expected = {
        "kill": rf"process {rank} ended first: killed by SIGKILL",
        "raise": rf"process {rank} ended first: exit code 1 [^\n]*\n(  \| [^\n]*\n)*  \| [^\n]*InjectedError",
        "stop": rf"process {rank} is stuck in attempt {attempt}: it has been stopped \(SIGSTOP\)",
    }[kind]
    found = re.search(expected, said)
    return [] if found else [f"not reported: {expected}"]


def leftovers(launch: Launch) -> list[str]:
    """Return a description of the files and the processes that a run has left, but should not have."""
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
    """Copy a run folder, as it was after a step that has a checkpoint.

    Returns:
        The number of the copy's next attempt.
    """
    shutil.copytree(source, target)
    for checkpoint in (target / "checkpoints").iterdir():
        if checkpoint.name.isdigit() and int(checkpoint.name) > step:
            shutil.rmtree(checkpoint)
    metrics = target / "metrics.jsonl"
    lines = [line for line in metrics.read_text().splitlines() if json.loads(line)["step"] <= step]
    metrics.write_text("".join(f"{line}\n" for line in lines))
    return _attempts(target)
