"""Name a hang: the collective or phase in which processes wait, and the missing processes for which they wait.

    pulse and stack of each process -> Witness; collectives of the step in their order -> StepOrder; both -> Hang

Processes train in lockstep, so they wait for a process that is behind. If this process has not entered the step, it has
reached none of the step's collectives. The others then wait in the first collective that needs this process, so the
name is exact. If all processes have entered the step, the host cannot tell how far each device is. The name is then a
list of at most three candidates: collectives in which the processes may wait.

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
_THREADS = re.compile(r"(?m)^(?=(?:Current thread|Thread) 0x)")  # the main thread is the last
_CALLBACK, _READER = "/jax/_src/callback.py", "/meshkit/step/data.py"
_WAITS = ("/jax/_src/array.py", "/jax/_src/distributed.py", "/meshkit/distributed/join.py")
_LIBRARIES = ("/site-packages/", "/lib/python3")
_STEP = PHASES.index("step")


@dataclass(frozen=True)
class StepCollective:
    """A collective of the step that connects different processes."""

    name: str
    """The HLO instruction name."""
    collective: str
    """`all-reduce`, `all-gather`, ..."""
    axes: tuple[str, ...]
    """Mesh axes over which it communicates; () if it maps to none."""
    link: str
    """The slowest link that it crosses, and the hardware of that link: `infiniband, ndr400`."""
    payload_bytes: int
    line: str
    """Source line in the model's code, or the instruction's op_name path; "" if neither is known."""
    grouping: int
    """Index into `StepOrder.groupings` of its groups of processes."""
    after_callback: bool = False
    """Whether a Python callback runs between the previous collective and this one."""

    def __str__(self) -> str:
        over = f"over {', '.join(self.axes)}" if self.axes else "over no mesh axis"
        what = f"{self.collective} {over}, {self.link or 'unknown link'}, {format_bytes(self.payload_bytes)}"
        return f"{self.name} ({what})" + (f" of {self.line}" if self.line else "")


@dataclass(frozen=True)
class StepOrder:
    """The collectives of the step between processes, in the order in which each process enters them."""

    processes: int
    groupings: tuple[tuple[tuple[int, ...], ...], ...]
    """Each grouping holds the groups of processes that wait for each other; groups of one process are left out."""
    collectives: tuple[StepCollective, ...]
    read_from: str = ""
    """A digest of the order's sources: the compiled step, the processes of its partitions, and the launch."""

    def blocked(self, missing: Collection[int]) -> dict[int, int]:
        """Return {process: index of the collective in which it waits} if the missing processes enter no collective.

        A process that waits in one collective does not reach the next one. So the other processes of the next
        collective wait for it there.
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
            missing: processes that seem to hold up the others. If it is empty, all collectives are returned.
            in_callback: whether a missing process is in a Python callback. Then only collectives that follow such a
                callback are returned, in the order of the step, if there are any.
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
        """Each collective's operation, bytes and groups as JSON values, which must be equal in every process."""
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
        """Write the order into a run folder, for the launcher. A full disk raises no error."""
        try:
            path = folder / FOLDER / "step.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".tmp")
            partial.write_text(self.to_json())
            os.replace(partial, path)
        except OSError:
            pass


def read_order(folder: Path) -> StepOrder | None:
    """Return the order that a training has written into its run folder; None if it cannot be read."""
    try:
        return StepOrder.from_json(read_regular(folder / FOLDER / "step.json", _LARGEST_BYTES))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@dataclass(frozen=True)
class Witness:
    """The state of one process during a hang."""

    process: int
    phase: str | None = None
    """The last phase that it has entered; None if the process has reported none."""
    step: int = 0
    age_s: float = 0.0
    """Seconds in that phase."""
    moves: int = 0
    """Phases entered so far."""
    host: str = ""
    pid: int = 0
    stack: str = ""
    """Stacks of its threads, as faulthandler prints them."""
    note: str = ""
    """A further clause, such as `stopped (SIGSTOP)`."""

    @property
    def place(self) -> tuple[int, int, int]:
        """A sort key of its progress: step, index of the phase, and, in a phase before `data`, `moves`."""
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
        """Whether this process runs a Python callback, for which a device waits."""
        return any(_CALLBACK in line for line in self.stack.splitlines())

    @property
    def waits(self) -> bool:
        """Whether its main thread waits for a device or for an agreement with the other processes."""
        innermost = _frames_of(self._threads[-1:])[:_MOST_FRAMES]
        return any(m["file"].endswith(_WAITS) for m in innermost)

    def frames(self) -> list[str]:
        """Return the Python frames, innermost first, of the thread that shows what the process does.

        This is a thread that runs a Python callback, if there is one. If not, it is the thread that reads the data in
        phase `data`, and the main thread in other phases.
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
    """Return the frames of these threads; those of a thread are ordered innermost first."""
    return [m for block in blocks for line in block.splitlines() if (m := _FRAME.match(line))]


def write_witnesses(path: Path, witnesses: Sequence[Witness], nccl_ras: str = "") -> None:
    """Write the state of each process, and this machine's flags of XLA and NCCL. A full disk raises no error.

    Args:
        path: the file.
        witnesses: the processes.
        nccl_ras: the answer of NCCL's RAS service; "" for none.
    """
    flags = {name: value for name, value in os.environ.items() if name == "XLA_FLAGS" or name.startswith("NCCL_")}
    said: dict[str, Any] = {"flags": flags, "processes": [asdict(w) for w in witnesses]}
    if nccl_ras:
        said["nccl_ras"] = nccl_ras.splitlines()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(said, indent=1))
    except OSError:
        pass


@dataclass(frozen=True)
class Hang:
    """The description of a hang."""

    head: str
    """The hang in one sentence."""
    missing: tuple[int, ...] = ()
    """Processes for which the others wait, as far as they are known."""
    candidates: tuple[StepCollective, ...] = ()
    """Collectives in which the others may wait. Only one if `exact`; none if they wait in no collective."""
    details: tuple[str, ...] = ()
    """Further lines on the collectives."""
    exact: bool = False
    """Whether the collective or phase and the missing processes are certain."""

    def lines(self, witnesses: Sequence[Witness], evidence: str, most: int = MOST_LINES) -> list[str]:
        """Return the message: `head`, the collectives, and the states and stacks of missing processes.

        Args:
            witnesses: the argument of `name_hang`.
            evidence: path of the file with all stacks and phases.
            most: the largest number of lines.
        """
        told = [w for w in witnesses if w.process in self.missing][:_MOST_MISSING]
        room = most - 2 - len(self.details)
        each = min(_MOST_FRAMES, max(1, room // max(1, len(told)) - 1))
        lines = [self.head, *self.details]
        for w in told:
            lines.append(f"  process {w.process}{w.host and f' on {w.host}'}: {w.where}")
            lines += [f"    {frame}" for frame in w.frames()[:each] or ["no stack of it is known"]]
        return [*lines[: most - 1], f"  evidence: {evidence}"]


def name_hang(witnesses: Sequence[Witness], order: StepOrder | None, *, elsewhere: bool = False) -> Hang:
    """Find out where processes wait and for which processes, from the state of each.

    Args:
        witnesses: the states of all processes of the job, or of those on this host.
        order: the collectives of the step; None if they are not known, as before the first step.
        elsewhere: whether the job has processes on other hosts, of which nothing is known.
    """
    furthest = max(w.place for w in witnesses)
    ahead = [w for w in witnesses if w.place == furthest]
    behind = sorted((w for w in witnesses if w.place < furthest), key=lambda w: w.place)
    in_step = furthest[1] == _STEP
    if behind and not (in_step and all(w.phase is None for w in behind)):
        hang = _behind(ahead, behind, order if in_step and not elsewhere else None)
    else:
        hang = _inside(witnesses, order) if in_step else _in_phase(witnesses)
    if not elsewhere:
        return hang
    head = hang.head.replace("all processes", "all processes of this host")
    return replace(hang, head=f"{head}; nothing is known here of the other hosts", exact=False)


def _behind(ahead: Sequence[Witness], behind: Sequence[Witness], order: StepOrder | None) -> Hang:
    """Name a hang in which some processes are behind the others.

    Args:
        ahead: the processes that are furthest, and wait.
        behind: all other processes.
        order: the collectives of the step in which `ahead` wait; None if they wait in another phase, or if unknown.
    """
    missing, there = tuple(w.process for w in behind), ahead[0]
    have, wait = "has" if len(missing) == 1 else "have", "waits" if len(ahead) == 1 else "wait"
    others = _processes(w.process for w in ahead)
    if there.phase == "step":
        # On GPUs the others may have dispatched later steps, too. They wait in the first step that a process behind
        # them has not entered.
        first = [w.step + (w.place[1] > _STEP) for w in behind if w.phase == "data" or w.place[1] > _STEP]
        head = f"{_processes(missing)} {have} not entered step {min([there.step, *first])}, in which {others} {wait}"
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
    """Name a hang in which every process that has reported a phase is in the same step."""
    step = max(w.step for w in witnesses)
    silent = [w for w in witnesses if w.phase is None]
    noted = [w for w in witnesses if w.note]
    called = [w for w in witnesses if w.in_callback]
    # If every process is in a callback, the callbacks do not show which process is late.
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
    """Name a hang in which all processes are in the same phase other than `step`."""
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
    """Return the hang with at most three candidates of the order, because no device reports how far it is."""
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
    """Return `process 3`, or `processes 0-2, 5`; a long list is cut."""
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
