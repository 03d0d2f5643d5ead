"""What PyTorch's FSDP hides though XLA's schedule of the same program does not. Part of replay.py, sixth in the flow.

FSDP gathers the next block and scatters the gradients of the last one on a stream beside that of compute. XLA pipelines
both in the same way, to a place in the loop over layers where nothing of the iteration needs their result, but one at a
time: where its scheduler starts a small one first, or ends a large one at once, that one blocks. Such a collective is
taken as started where it stands and done where its result is first needed, at the latest at the end of the iteration.
Collectives whose result the next kernel needs block here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from meshkit.hlo.costs import opcode
from meshkit.hlo.module import Instruction, Schedule

_THROUGH = {"get-tuple-element", "bitcast", "tuple", "optimization-barrier"}
_FSDP = {"all-gather", "reduce-scatter", "all-reduce"}
_AXES = {"data", "fsdp"}  # collectives of tensor parallelism run in the stream of compute


def users(module: Any) -> dict[str, frozenset[str]]:
    """Instruction -> those that read its result, also through tuples, of a compiled HloModule."""
    direct: dict[str, set[str]] = {}
    free: set[str] = set()
    for computation in module.computations():
        for i in computation.instructions():
            if opcode(i) in _THROUGH:
                free.add(i.name)
            for operand in i.operands():
                direct.setdefault(operand.name, set()).add(i.name)
    return {name: frozenset(_behind(name, direct, free)) for name in direct}


def _behind(name: str, direct: Mapping[str, set[str]], free: set[str]) -> Iterator[str]:
    pending, seen = [name], {name}
    while pending:
        for user in direct.get(pending.pop(), ()):
            if user not in seen:
                seen.add(user)
                if user in free:
                    pending.append(user)
                else:
                    yield user


def prefetched(schedule: Schedule, readers: Mapping[str, frozenset[str]]) -> Schedule:
    """The schedule with blocking collectives of its loops beside what does not need them.

    Args:
        schedule: of a whole training step.
        readers: as `users` gives them.
    """
    loops = {body for i, _ in schedule.walk() if i.kind == "while" and (i.trip_count or 0) > 1 for body in i.bodies}
    computations = {
        name: tuple(_beside(body, readers)) if name in loops else body for name, body in schedule.computations.items()
    }
    return replace(schedule, computations=computations)


def _beside(body: tuple[Instruction, ...], readers: Mapping[str, frozenset[str]]) -> Iterator[Instruction]:
    waiting: list[str] = []
    for i in body:
        for name in [n for n in waiting if i.name in readers.get(n, ())]:
            waiting.remove(name)
            yield _done(name)
        if i.kind == "collective" and _of_fsdp(i):
            waiting.append(i.name)
            yield replace(i, kind="start")
        else:
            yield i
    yield from map(_done, waiting)


def _of_fsdp(i: Instruction) -> bool:
    return i.collective is not None and i.collective.collective in _FSDP and set(i.collective.axes) <= _AXES


def _done(name: str) -> Instruction:
    return Instruction(f"{name}.done", "done", "done", starts=name)
