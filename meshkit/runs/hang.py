"""A hang gets a name: which collective or phase holds a training up, who has come to it, and where the others are.

    pulse and stack of each process -> Witness; collectives of the step, in their order -> StepOrder -> Hang

In lockstep, whoever is behind is what the others wait for. A process that has not entered the step has come to none of
its collectives, so the first that needs it is the one in which the others wait: that is exact. Where all have entered
the step nobody but the device knows how far each is: then the collectives that it may be are told, three at most, and
that they are candidates. Imports no jax: the launcher names hangs, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from meshkit.config.files import read_regular
from meshkit.runs.phases import PHASES
from meshkit.units import format_bytes

FOLDER = "hang"
MOST_LINES, _MOST_CANDIDATES, _MOST_MISSING, _MOST_FRAMES, _MOST_SPANS = 12, 3, 2, 3, 8
_LARGEST_BYTES = 16 * 2**20
_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)$')
_THREADS = re.compile(r"(?m)^(?=(?:Current thread|Thread) 0x)")  # the main one is the last
_CALLBACK, _READER = "/jax/_src/callback.py", "/meshkit/step/data.py"
_WAITS = ("/jax/_src/array.py", "/jax/_src/distributed.py", "/meshkit/distributed/join.py")
_LIBRARIES = ("/site-packages/", "/lib/python3")
_STEP = PHASES.index("step")


@dataclass(frozen=True)
class StepCollective:
    """A collective of the step that goes from one process to another."""

    name: str
    """The HLO instruction name."""
    collective: str
    """`all-reduce`, `all-gather`, ..."""
    axes: tuple[str, ...]
    """Mesh axes along which it goes; () where it maps to none."""
    link: str
    """The slowest link that it crosses, and what that is made of: `infiniband, ndr400`."""
    payload_bytes: int
    line: str
    """Source line of the model's code, or its op_name path; "" where neither is known."""
    grouping: int
    """Which of the step's `groupings`."""
    after_callback: bool = False
    """Whether a callback into Python runs between the collective before and this one."""

    def __str__(self) -> str:
        over = f"over {', '.join(self.axes)}" if self.axes else "over no mesh axis"
        what = f"{self.collective} {over}, {self.link or 'unknown link'}, {format_bytes(self.payload_bytes)}"
        return f"{self.name} ({what})" + (f" of {self.line}" if self.line else "")


@dataclass(frozen=True)
class StepOrder:
    """The collectives of the step between processes, in the order in which each process enters them."""

    processes: int
    groupings: tuple[tuple[tuple[int, ...], ...], ...]
    """Processes that wait for each other, by group; groups within one process are left out."""
    collectives: tuple[StepCollective, ...]
    read_from: str = ""
    """A digest of the compiled step, where its partitions lie, and the launch."""

    def blocked(self, missing: Collection[int]) -> dict[int, int]:
        """Process -> index of the collective in which it waits, where some never come to any.

        Who waits in one does not come to the next, so the others wait for it there in turn.
        """
        stopped: dict[int, int] = dict.fromkeys(missing, -1)
        for index, each in enumerate(self.collectives):
            for group in self.groupings[each.grouping]:
                if any(p in stopped for p in group):
                    for p in group:
                        stopped.setdefault(p, index)
        return {p: index for p, index in stopped.items() if index >= 0}

    def candidates(self, missing: Collection[int], *, in_callback: bool) -> list[StepCollective]:
        """Return the collectives that need one of the missing processes (all collectives where none is known).

        Args:
            missing: processes of which something says that they are what the others wait for.
            in_callback: whether they are in a callback into Python, so that it is one that follows such a callback.
        """
        found = [
            c
            for c in self.collectives
            if not missing or any(p in missing for group in self.groupings[c.grouping] for p in group)
        ]
        after = [c for c in found if c.after_callback]
        return after if in_callback and after else sorted(found, key=lambda c: -c.payload_bytes)

    @property
    def signature(self) -> list[list[Any]]:
        """What has to be the same in every process, by collective: what it does, with how much, between which. JSON."""
        groupings = [[list(group) for group in each] for each in self.groupings]
        return [[c.collective, c.payload_bytes, groupings[c.grouping]] for c in self.collectives]

    def to_json(self) -> str:
        """As `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> StepOrder:
        """Return the order that `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: it is none.
        """
        said = json.loads(text)
        groupings = tuple(tuple(tuple(int(p) for p in group) for group in each) for each in said["groupings"])
        rows = (StepCollective(**{**row, "axes": tuple(row["axes"])}) for row in said["collectives"])
        return cls(int(said["processes"]), groupings, tuple(rows), str(said.get("read_from", "")))

    def write(self, folder: Path) -> None:
        """Leaves the order in a run folder, for the launcher. A disk that is full stops nothing."""
        try:
            path = folder / FOLDER / "step.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".tmp")
            partial.write_text(self.to_json())
            os.replace(partial, path)
        except OSError:
            pass


def read_order(folder: Path) -> StepOrder | None:
    """Return the order that a training has left in its run folder; None where there is none that can be read."""
    try:
        return StepOrder.from_json(read_regular(folder / FOLDER / "step.json", _LARGEST_BYTES))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class Witness:
    """What is known of one process while nothing gets on."""

    process: int
    phase: str | None = None
    """The last phase that it has entered; None where it says nothing."""
    step: int = 0
    age_s: float = 0.0
    """Seconds in that phase."""
    moves: int = 0
    """Phases entered so far."""
    host: str = ""
    stack: str = ""
    """Of its threads, as faulthandler prints them."""
    note: str = ""
    """What else is known, as a clause: `stopped (SIGSTOP)`."""

    @property
    def place(self) -> tuple[int, int, int]:
        """How far it is: step, phase of the step, and before the first step phases entered."""
        if self.phase is None:
            return -1, -1, -1
        order = PHASES.index(self.phase) if self.phase in PHASES else _STEP
        return self.step, order, self.moves if order < PHASES.index("data") else 0

    @property
    def where(self) -> str:
        """Its phase, step and time in words."""
        if self.phase is None:
            return self.note or "it gave no answer: it is stopped or gone, or a library keeps its interpreter"
        return f"in phase '{self.phase}' at step {self.step} for {self.age_s:.0f} s{self.note and f', {self.note}'}"

    @property
    def in_callback(self) -> bool:
        """Whether a device waits for a callback into Python in it."""
        return any(_CALLBACK in line for line in self.stack.splitlines())

    @property
    def waits(self) -> bool:
        """Whether its main thread waits for the other processes: for a device, or for what they agree on."""
        innermost = _frames_of(self._threads[-1:])[:_MOST_FRAMES]
        return any(m["file"].endswith(_WAITS) for m in innermost)

    def frames(self) -> list[str]:
        """Where it is in Python, innermost first: its main thread, or what that waits for.

        That is a callback for which a device waits, or while it waits for data the thread that reads them.
        """
        threads = self._threads
        called = [block for block in threads if _CALLBACK in block]
        reads = [block for block in threads[:-1] if _READER in block] if self.phase == "data" else []
        found = _frames_of([*called, *reads, *threads[-1:]][:1])
        own = [m for m in found if not any(part in m["file"] for part in _LIBRARIES)]
        inner = [m for m in found[:1] if m not in own]
        shown = [*inner, *own][:_MOST_FRAMES]
        return [f"{'/'.join(Path(m['file']).parts[-3:])}:{m['line']} in {m['function']}" for m in shown]

    @property
    def _threads(self) -> list[str]:
        return [block for block in _THREADS.split(self.stack) if "  File " in block]


def _frames_of(blocks: Sequence[str]) -> list[re.Match[str]]:
    """Return the frames of threads, innermost first."""
    return [m for block in blocks for line in block.splitlines() if (m := _FRAME.match(line))]


def write_witnesses(path: Path, witnesses: Sequence[Witness]) -> None:
    """Leaves what is known of each process, and the flags of XLA and NCCL here. A disk that is full stops nothing."""
    flags = {name: value for name, value in os.environ.items() if name == "XLA_FLAGS" or name.startswith("NCCL_")}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"flags": flags, "processes": [asdict(w) for w in witnesses]}, indent=1))
    except OSError:
        pass


@dataclass(frozen=True)
class Hang:
    """A hang with its name."""

    head: str
    """What is known, in a sentence."""
    missing: tuple[int, ...] = ()
    """Processes that the others wait for, as far as is known."""
    candidates: tuple[StepCollective, ...] = ()
    """Collectives in which the others may wait: one where it is exact, none where they wait in no collective."""
    details: tuple[str, ...] = ()
    """Further lines on the collectives."""
    exact: bool = False
    """Whether the collective or phase, and who is missing, is known."""

    def lines(self, witnesses: Sequence[Witness], evidence: str, most: int = MOST_LINES) -> list[str]:
        """Return the message: what is known, the collectives, and where the missing processes are, in `most` lines.

        Args:
            witnesses: as of `name_hang`.
            evidence: where stacks and pulses are.
            most: lines.
        """
        told = [w for w in witnesses if w.process in self.missing][:_MOST_MISSING]
        room = most - 2 - len(self.details)
        each = min(_MOST_FRAMES, max(1, room // max(1, len(told)) - 1))
        lines = [self.head, *self.details]
        for w in told:
            lines.append(f"  process {w.process}{w.host and f' on {w.host}'}: {w.where}")
            lines += [f"    {frame}" for frame in w.frames()[:each] or ["no stack of it is known"]]
        return [*lines[: most - 1], f"  evidence: {evidence}"]


def name_hang(witnesses: Sequence[Witness], order: StepOrder | None) -> Hang:
    """Return the name of a hang, by what is known of each process.

    Args:
        witnesses: of every process of the job, or of those of this machine.
        order: of the step; None where it is not known, as before the first step.
    """
    furthest = max(w.place for w in witnesses)
    ahead = [w for w in witnesses if w.place == furthest]
    behind = sorted((w for w in witnesses if w.place < furthest), key=lambda w: w.place)
    in_step = furthest[1] == _STEP
    if behind and not (in_step and all(w.phase is None for w in behind)):
        return _behind(ahead, behind, order if in_step else None)
    return _inside(witnesses, order) if in_step else _in_phase(witnesses)


def _behind(ahead: Sequence[Witness], behind: Sequence[Witness], order: StepOrder | None) -> Hang:
    """Some have not come to where the others wait; with `order` that is the step."""
    missing, there = tuple(w.process for w in behind), ahead[0]
    have, wait = "has" if len(missing) == 1 else "have", "waits" if len(ahead) == 1 else "wait"
    others = _processes(w.process for w in ahead)
    if there.phase == "step":
        head = f"{_processes(missing)} {have} not entered step {there.step}, in which {others} {wait}"
    else:
        at = f" at step {there.step}" if there.step else ""
        head = f"{_processes(missing)} {have} not come as far as {others}, which {wait} in phase '{there.phase}'{at}"
    if order is None:
        return Hang(head, missing, exact=all(w.phase not in (None, "step") for w in behind))
    if late := [w.process for w in behind if w.phase == "step"]:  # its devices may be in any collective of that step
        candidates = order.candidates(late, in_callback=any(w.in_callback for w in behind))
        return _with_candidates(Hang(head, missing), candidates)
    blocked = order.blocked(missing)
    if not blocked:
        return Hang(head, missing, details=("  no collective of the step goes between them",), exact=True)
    index = min(blocked.values())
    details = [
        f"  collective {index + 1} of {len(order.collectives)} of the step: {order.collectives[index]}",
        f"  {_processes(p for p, i in blocked.items() if i == index)} entered it, {_processes(missing)} did not",
    ]
    if later := {p: i for p, i in blocked.items() if i != index}:
        details[1] += f"; {_processes(later)} wait in turn, first in {order.collectives[min(later.values())].name}"
    known = all(w.phase is not None for w in behind)
    return Hang(head, missing, (order.collectives[index],), tuple(details), exact=known)


def _inside(witnesses: Sequence[Witness], order: StepOrder | None) -> Hang:
    """All that say anything have entered the step."""
    step = max(w.step for w in witnesses)
    silent = [w for w in witnesses if w.phase is None]
    noted = [w for w in witnesses if w.note]
    called = [w for w in witnesses if w.in_callback]
    # Callbacks that all are in make nobody late.
    known = silent or noted or (called if len(called) < len(witnesses) else [])
    missing = tuple(w.process for w in known)
    head = f"all processes have entered step {step} and wait in it"
    if silent:
        head = f"{_processes(missing)} gave no answer; the others have entered step {step} and wait in it"
    elif noted:
        head += f"; {_processes(missing)} {noted[0].note}"
    elif missing:
        head += f"; in {_processes(missing)} a device waits for a callback into Python"
    if order is None:
        return Hang(head, missing)
    in_callback = any(w.in_callback for w in known)
    return _with_candidates(Hang(head, missing), order.candidates(missing, in_callback=in_callback))


def _in_phase(witnesses: Sequence[Witness]) -> Hang:
    """All are in one phase, which is not the step."""
    there = witnesses[0]
    if len(witnesses) == 1:
        return Hang(f"the process does not get on in phase '{there.phase}'", (there.process,), exact=True)
    head = f"all processes are in phase '{there.phase}' at step {there.step}"
    if noted := [w for w in witnesses if w.note]:
        missing = tuple(w.process for w in noted)
        return Hang(f"{head}; {_processes(missing)} {noted[0].note}", missing, exact=True)
    odd = [w.process for w in witnesses if not w.waits]
    if odd and len(odd) < len(witnesses):
        who = "does" if len(odd) == 1 else "do"
        return Hang(f"{head}; {_processes(odd)} {who} not wait for the others in it", tuple(odd), exact=True)
    by_place: dict[tuple[str, ...], list[int]] = {}
    for w in witnesses:
        by_place.setdefault(tuple(w.frames()), []).append(w.process)
    most = max(by_place.values(), key=len)
    odd = sorted({w.process for w in witnesses} - set(most)) if 2 * len(most) > len(witnesses) else []
    if odd:
        return Hang(f"{head}, {_processes(odd)} elsewhere in it than the others", tuple(odd), exact=True)
    return Hang(head, tuple(w.process for w in witnesses))


def _with_candidates(hang: Hang, found: Sequence[StepCollective]) -> Hang:
    """Return the hang with the collectives that it may be, the first three of them; nobody says how far a device is."""
    shown = tuple(found[:_MOST_CANDIDATES])
    head = (
        f"candidates, one of {len(found)} collectives" if len(found) > 1 else "candidate" if found else "no candidate"
    )
    if len(found) > len(shown):
        head += f", those {len(shown)} with the most bytes"
    return replace(hang, candidates=shown, details=(f"  {head}:", *(f"    {c}" for c in shown)))


def _processes(found: Iterable[int]) -> str:
    """`process 3`, or `processes 0-2, 5`, cut where it is long."""
    spans: list[list[int]] = []
    numbers = sorted(found)
    for n in numbers:
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    more = " and more" if len(texts) > _MOST_SPANS else ""
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(texts[:_MOST_SPANS])}{more}"
