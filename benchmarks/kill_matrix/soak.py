"""`make soak`: compare a run of 300 steps with ten faults at random moments with an undisturbed run, and write a page.

seed -> Planned: one fault for each attempt -> one run folder, launched until it is done -> losses, what is left, memory
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.kill_matrix.cells import DOWN_S, FAULTS, PHASES, Hit, baseline, hit_at_gate, leftovers
from benchmarks.kill_matrix.gang import MEMORY_EVERY, Gate, Launch, resident_bytes
from benchmarks.kill_matrix.table import machine

STEPS, COUNT, SEED = 300, 10, 20261121
_EARLY = ("start", "compile", "restore")
_MOST_DELAY_S = 0.5
_OPTIONS = ("--max-restarts", str(COUNT), "--set", f"train.steps={STEPS}", "--set", "checkpoint.every=5")
_MIB = 1 << 20
_MEMORY = (
    "Memory is the resident set (VmRSS): of the launcher when the fault came, and of the processes after their "
    f"first {MEMORY_EVERY} steps (more where the step was compiled than where it came from the cache). In the "
    "undisturbed run, by number of steps:"
)


@dataclass(frozen=True)
class Planned:
    """The fault of one attempt.

    Attributes:
        fault: the name of the fault in `FAULTS`.
        phase: the phase in which the process reaches its gate.
        step: the first step at which it may reach the gate.
        delay_s: seconds from then until the fault.
    """

    fault: str
    phase: str
    step: int
    delay_s: float

    @property
    def gate(self) -> Gate:
        kind, rank = FAULTS[self.fault]
        return Gate(self.phase, rank or 0, self.step, kind == "raise", False, 0.3 if kind == "term" else 0.0)


@dataclass
class Found:
    """The result of a soak.

    Attributes:
        plan: the planned faults.
        hits: the injected faults, in the same order.
        codes: exit codes of the launches; the last one should be 0.
        equal: whether the losses equal those of the undisturbed run, bit for bit.
        left: files, processes and ports that should not be left.
        launcher_bytes: resident memory of the launcher at the fault of each attempt.
        after: attempt -> resident bytes of processes 0 and 1 after the first `MEMORY_EVERY` steps of the attempt.
        alone: number of steps -> resident bytes of processes 0 and 1 of the undisturbed run.
    """

    plan: list[Planned]
    hits: list[Hit] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    equal: bool = False
    left: list[str] = field(default_factory=list)
    launcher_bytes: list[int] = field(default_factory=list)
    after: dict[int, tuple[int, int]] = field(default_factory=dict)
    alone: dict[int, tuple[int, int]] = field(default_factory=dict)


# The launcher's own memory is measured over the whole run, so it is not killed.
_DRAWN = [fault for fault, hit in FAULTS.items() if hit != ("kill", None)]


def plan(seed: int, *, count: int = COUNT, steps: int = STEPS) -> list[Planned]:
    """Return faults that are drawn at random; the same seed gives the same faults.

    Two faults in a row never come before the first step, because the launcher gives up after two attempts that reach no
    new step. A fault in `restore` comes only after an attempt that has made steps, so that a checkpoint may exist. An
    exception in a commit of process 0 is never drawn, because it does not end the attempt.
    """
    draw = random.Random(seed)
    due = sorted(draw.sample(range(10, steps - 40), count))
    planned: list[Planned] = []
    while len(planned) < count:
        fault, phase = draw.choice(_DRAWN), draw.choice(PHASES)
        early = phase in _EARLY and planned and planned[-1].phase in _EARLY
        nothing = phase == "restore" and not any(p.phase not in _EARLY for p in planned)
        if early or nothing or (FAULTS[fault] == ("raise", 0) and phase == "commit"):
            continue
        planned.append(Planned(fault, phase, due[len(planned)], round(draw.uniform(0, _MOST_DELAY_S), 3)))
    return planned


def soak(folder: Path, planned: Sequence[Planned]) -> Found:
    """Make the undisturbed run and the run with the planned faults, and return the result."""
    found = Found(list(planned))
    losses = baseline(folder / "alone", _OPTIONS)
    alone = Launch(folder / "alone")
    found.alone = {made: (first, alone.memory(0, 1)[made]) for made, first in alone.memory(0, 0).items()}
    launch = Launch(folder / "soak", {i: p.gate for i, p in enumerate(planned)}, _OPTIONS)
    coordinators = set()
    launch.start()
    try:
        for i, p in enumerate(planned):
            kind, rank = FAULTS[p.fault]
            launch.wait(lambda i=i: launch.mark(i, "at"), f"attempt {i}")
            coordinators.add(launch.coordinator())
            assert launch.process is not None
            found.launcher_bytes.append(resident_bytes(launch.process.pid))
            found.hits.append(hit_at_gate(launch, i, p.gate, kind, rank, p.delay_s))
            if kind == "term":
                found.codes.append(launch.end())
                launch.start()
        found.codes.append(launch.end())
        found.equal = launch.losses() == losses
        found.left = leftovers(launch) + still_listening(coordinators - {None})
        for i in range(len(planned) + 1):
            first, second = (launch.memory(i, rank).get(MEMORY_EVERY) for rank in (0, 1))
            if first and second:
                found.after[i] = first, second
    finally:
        launch.kill()
    return found


def problems(found: Found) -> list[str]:
    """Return what is not as promised."""
    wrong = list(found.left)
    wrong += [] if found.equal else ["the losses differ"]
    expected = [75] * sum(FAULTS[p.fault][0] == "term" for p in found.plan) + [0]
    wrong += [] if found.codes == expected else [f"exit codes {found.codes} instead of {expected}"]
    slow = [h.detection_s for h in found.hits if h.detection_s is None or h.detection_s > 2 * DOWN_S]
    return wrong + [f"a gang was down after {s} s" for s in slow]


def page(found: Found, seed: int) -> str:
    """Return the result as Markdown."""
    wrong = "; ".join(problems(found))
    verdict = f"**{wrong}**." if wrong else "the losses of an undisturbed run, bit for bit; no file or process is left."
    codes = ", ".join(map(str, found.codes))
    heads = ("attempt", "fault", "planned", "phase at fault", "gang down after s", "launcher MiB", "processes 0, 1 MiB")
    lines = [
        f"{STEPS} steps, {len(found.plan)} faults (seed {seed}), launches with exit codes {codes}: {verdict}",
        "",
        f"| {' | '.join(heads)} |",
        "|---" * len(heads) + "|",
    ]
    for i, (p, hit) in enumerate(zip(found.plan, found.hits)):
        when = f"{p.phase} from step {p.step} on, {p.delay_s:g} s later" if p.phase not in _EARLY else p.phase
        memory = ", ".join(f"{b / _MIB:.0f}" for b in found.after.get(i, ())) or "-"
        lines.append(
            f"| {i} | {p.fault} | {when} | {hit.pulse or '-'} | {hit.detection_s:.1f} | "
            f"{found.launcher_bytes[i] / _MIB:.1f} | {memory} |"
        )
    lines += [
        "",
        _MEMORY,
        "",
        "| steps | process 0 MiB | process 1 MiB |",
        "|---|---|---|",
        *(
            f"| {made} | {a / _MIB:.1f} | {b / _MIB:.1f} |"
            for made, (a, b) in sorted(found.alone.items())
            if made % 50 == 0 or made == MEMORY_EVERY
        ),
    ]
    return "\n".join(lines) + "\n"


def still_listening(coordinators: set) -> list[str]:
    """Return the ports of these coordinators on which something still listens."""
    left = []
    for coordinator in sorted(coordinators):
        host, port = coordinator.rsplit(":", 1)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are closing do not count
            try:
                probe.bind((host, int(port)))
            except OSError:
                left.append(f"left: port {port}")
    return left


def main() -> int:
    """Run the soak and write the page.

    Returns:
        The exit code: 1 if something is not as promised, else 0.
    """
    parser = argparse.ArgumentParser(prog="benchmarks.kill_matrix.soak", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=SEED)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="meshkit-soak-") as scratch:
        os.environ.setdefault("MESHKIT_CACHE", f"{scratch}/cache")
        found = soak(Path(scratch), plan(chosen.seed))
    text = page(found, chosen.seed)
    (chosen.out / "soak.md").write_text(f"# Soak\n\n`make soak`: {machine()}\n\n{text}")
    print(text)
    return int(bool(problems(found)))


if __name__ == "__main__":
    sys.exit(main())
