"""A hang gets a name: which collective or phase holds a training up, who has come to it, and where the others are.

    pulse and stack of each process -> Witness; collectives of the step, in their order -> StepOrder -> Hang

Processes train in lockstep, so the others wait for whichever is behind. A process that has not entered the step has
come to none of its collectives. The others then wait in the first collective that needs this process: the name is
exact. Where all have entered the step, only the devices know how far each process is. The name then is a list of three
collectives at most in which the processes may wait, called candidates.

Imports no jax, since the launcher names hangs too.
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
    """The slowest link that it crosses, and the hardware of that link: `infiniband, ndr400`."""
    payload_bytes: int
    line: str
    """Source line of the model's code, or its op_name path; "" where neither is known."""
    grouping: int
    """Index of its groups in `StepOrder.groupings`."""
    after_callback: bool = False
    """Whether a callback into Python runs between the previous collective and this one."""

    def __str__(self) -> str:
        over = f"over {', '.join(self.axes)}" if self.axes else "over no mesh axis"
        what = f"{self.collective} {over}, {self.link or 'unknown link'}, {format_bytes(self.payload_bytes)}"
        return f"{self.name} ({what})" + (f" of {self.line}" if self.line else "")


@dataclass(frozen=True)
class StepOrder:
    """The collectives of the step between processes, in the order in which each process enters them."""

    processes: int
    groupings: tuple[tuple[tuple[int, ...], ...], ...]
    """Each: the groups of processes that wait for each other. Groups within one process are left out."""
    collectives: tuple[StepCollective, ...]
    read_from: str = ""
    """A digest of what the order was read from: the compiled step, its partitions' processes, and the launch."""

    def blocked(self, missing: Collection[int]) -> dict[int, int]:
        """Return for each blocked process the index of its collective, where the missing processes never enter any.

        A process that waits in one collective does not come to the next one. The other processes of that next
        collective then wait in turn.
        """
        stopped: dict[int, int] = dict.fromkeys(missing, -1)
        for index, each in enumerate(self.collectives):
            for group in self.groupings[each.grouping]:
                if any(p in stopped for p in group):
                    for p in group:
                        stopped.setdefault(p, index)
        return {p: index for p, index in stopped.items() if index >= 0}

    def candidates(self, missing: Collection[int], *, in_callback: bool) -> list[StepCollective]:
        """Return the collectives in which the others may wait for the missing processes, most bytes first.

        Args:
            missing: processes that seem to hold up the others; empty where none is known, which leaves all collectives.
            in_callback: whether a missing process is in a callback into Python. Then only collectives that follow such
                a callback are returned, in the order of the step, if there are any.
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
        """Return what must be equal in every process: each collective's operation, bytes and groups, as JSON values."""
        groupings = [[list(group) for group in each] for each in self.groupings]
        return [[c.collective, c.payload_bytes, groupings[c.grouping]] for c in self.collectives]

    def to_json(self) -> str:
        """Return the order as text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> StepOrder:
        """Return the order that `to_json` wrote.

        Raises:
            ValueError, KeyError, TypeError: the text is no such order.
        """
        said = json.loads(text)
        groupings = tuple(tuple(tuple(int(p) for p in group) for group in each) for each in said["groupings"])
        rows = (StepCollective(**{**row, "axes": tuple(row["axes"])}) for row in said["collectives"])
        return cls(int(said["processes"]), groupings, tuple(rows), str(said.get("read_from", "")))

    def write(self, folder: Path) -> None:
        """Writes the order into a run folder, for the launcher. A full disk raises no error."""
        try:
            path = folder / FOLDER / "step.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".tmp")
            partial.write_text(self.to_json())
            os.replace(partial, path)
        except OSError:
            pass


def read_order(folder: Path) -> StepOrder | None:
    """Return the order that a training has written into its run folder; None where it cannot be read."""
    try:
        return StepOrder.from_json(read_regular(folder / FOLDER / "step.json", _LARGEST_BYTES))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class Witness:
    """The state of one process during a hang."""

    process: int
    phase: str | None = None
    """The last phase that it has entered; None where the process says nothing."""
    step: int = 0
    age_s: float = 0.0
    """Seconds in that phase."""
    moves: int = 0
    """Phases entered so far."""
    host: str = ""
    stack: str = ""
    """Stacks of its threads, as faulthandler prints them."""
    note: str = ""
    """A further clause, such as `stopped (SIGSTOP)`."""

    @property
    def place(self) -> tuple[int, int, int]:
        """How far it is: step, phase, and, in a phase before `data`, how many phases it has entered."""
        if self.phase is None:
            return -1, -1, -1
        order = PHASES.index(self.phase) if self.phase in PHASES else _STEP
        return self.step, order, self.moves if order < PHASES.index("data") else 0

    @property
    def where(self) -> str:
        """The process's phase, step and time in words."""
        if self.phase is None:
            return self.note or "it gave no answer: it is stopped or gone, or a library holds the GIL"
        return f"in phase '{self.phase}' at step {self.step} for {self.age_s:.0f} s{self.note and f', {self.note}'}"

    @property
    def in_callback(self) -> bool:
        """Whether this process runs a callback into Python, for which a device waits."""
        return any(_CALLBACK in line for line in self.stack.splitlines())

    @property
    def waits(self) -> bool:
        """Whether its main thread waits for the other processes: for a device, or to agree with them."""
        innermost = _frames_of(self._threads[-1:])[:_MOST_FRAMES]
        return any(m["file"].endswith(_WAITS) for m in innermost)

    def frames(self) -> list[str]:
        """Return the Python frames of the thread that tells where the process is, innermost first.

        That is a thread that runs a callback for which a device waits. Without one it is, in phase `data`, the thread
        that reads the data; else it is the main thread.
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
    """Return the frames of these threads, each thread's innermost first."""
    return [m for block in blocks for line in block.splitlines() if (m := _FRAME.match(line))]


def write_witnesses(path: Path, witnesses: Sequence[Witness]) -> None:
    """Writes what is known of each process, and this machine's flags of XLA and NCCL. A full disk raises no error."""
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
    """The hang in a sentence."""
    missing: tuple[int, ...] = ()
    """Processes that the others wait for, as far as that is known."""
    candidates: tuple[StepCollective, ...] = ()
    """Collectives in which the others may wait: one where `exact`; none where they wait in no collective."""
    details: tuple[str, ...] = ()
    """Further lines on the collectives."""
    exact: bool = False
    """Whether the collective or phase and the missing processes are certain."""

    def lines(self, witnesses: Sequence[Witness], evidence: str, most: int = MOST_LINES) -> list[str]:
        """Return the message: what is known, the collectives, and where the missing processes are, in `most` lines.

        Args:
            witnesses: those that `name_hang` got.
            evidence: the file that has stacks and phases.
            most: the most lines.
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
    """Return the name of a hang, from what is known of each process.

    Args:
        witnesses: of every process of the job, or of those of this machine.
        order: the collectives of the step; None where they are not known, as before the first step.
    """
    furthest = max(w.place for w in witnesses)
    ahead = [w for w in witnesses if w.place == furthest]
    behind = sorted((w for w in witnesses if w.place < furthest), key=lambda w: w.place)
    in_step = furthest[1] == _STEP
    if behind and not (in_step and all(w.phase is None for w in behind)):
        return _behind(ahead, behind, order if in_step else None)
    return _inside(witnesses, order) if in_step else _in_phase(witnesses)


def _behind(ahead: Sequence[Witness], behind: Sequence[Witness], order: StepOrder | None) -> Hang:
    """Name a hang in which some processes have not come as far as the others.

    Args:
        ahead: those that have come furthest, and wait.
        behind: the other ones.
        order: of the step in which `ahead` wait; None where they wait in another phase, or the order is not known.
    """
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
    if late := [w.process for w in behind if w.phase == "step"]:  # their devices may be anywhere in the step
        return _with_candidates(Hang(head, missing), order, late, in_callback=any(w.in_callback for w in behind))
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
    """Name a hang in which every process that gave an answer has entered the step."""
    step = max(w.step for w in witnesses)
    silent = [w for w in witnesses if w.phase is None]
    noted = [w for w in witnesses if w.note]
    called = [w for w in witnesses if w.in_callback]
    # Where every process is in a callback, the callbacks do not tell which of them is late.
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
    return _with_candidates(Hang(head, missing), order, missing, in_callback=any(w.in_callback for w in known))


def _in_phase(witnesses: Sequence[Witness]) -> Hang:
    """Name a hang in which all processes are in the same phase, which is not the step."""
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
        who = f"{_processes(odd)} {'is' if len(odd) == 1 else 'are'}"
        return Hang(f"{head}, but {who} elsewhere in the code than the others", tuple(odd), exact=True)
    return Hang(head, tuple(w.process for w in witnesses))


def _with_candidates(hang: Hang, order: StepOrder, missing: Collection[int], *, in_callback: bool) -> Hang:
    """Return the hang with the first three of the order's candidates: no device says how far it is."""
    found = order.candidates(missing, in_callback=in_callback)
    shown = tuple(found[:_MOST_CANDIDATES])
    head = "candidate" if found else "no candidate"
    if len(found) > len(shown):
        behind = in_callback and found[0].after_callback
        lead = "come first, each behind a callback" if behind else "have the most bytes"
        head = f"candidates (the processes wait in one of {len(found)} collectives; these {len(shown)} {lead})"
    elif len(found) > 1:
        head = f"candidates (the processes wait in one of these {len(found)} collectives)"
    return replace(hang, candidates=shown, details=(f"  {head}:", *(f"    {c}" for c in shown)))


def _processes(found: Iterable[int]) -> str:
    """Return `process 3`, or `processes 0-2, 5`, cut where that is long."""
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
