"""A compiled program as its instructions run: what the reader makes and the simulator takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from meshkit.hlo.collective import Collective
from meshkit.hlo.costs import Cost


@dataclass(frozen=True)
class Instruction:
    """One instruction of a schedule.

    Attributes:
        name, opcode: as XLA prints them; an asynchronous one has the opcode of what it starts.
        kind: `kernel`, `collective` (blocks), `start` and `done` (asynchronous), `while`, `conditional`, `call`,
            `free` (no time).
        source: op_name path of the model code that caused it.
        cost: work on one GPU; None for control flow and communication.
        collective: what it communicates; None if it does not.
        starts: for `done`, the name of the start it waits for.
        bodies: computations it runs: the body of a loop, the branches of a conditional.
        trip_count: iterations of a loop; None if XLA does not know.
    """

    name: str
    opcode: str
    kind: str
    source: str = ""
    cost: Cost | None = None
    collective: Collective | None = None
    starts: str | None = None
    bodies: tuple[str, ...] = ()
    trip_count: int | None = None


@dataclass(frozen=True)
class Schedule:
    """A compiled program as its instructions run: computations in schedule order.

    Attributes:
        computations: name -> instructions, of the entry and all that it reaches through control flow.
        entry: name of the computation that runs.
        fingerprint: equal for equal programs.
        notes: what could not be read or priced, by kind: instruction names, with what they call in parentheses.
    """

    name: str
    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    fingerprint: str
    notes: Mapping[str, list[str]] = field(default_factory=dict)

    def known_runs(self) -> dict[str, int]:
        """How often one execution runs each instruction: once, or once per iteration of the loops it is in.

        What is in a branch, or in a loop whose iterations XLA does not know, is left out.
        """
        found: dict[str, int] = {}
        unknown: set[str] = set()

        def visit(computation: str, times: int | None) -> None:
            for i in self.computations[computation]:
                if times is None:
                    unknown.add(i.name)
                else:
                    found[i.name] = found.get(i.name, 0) + times
                each = {"while": i.trip_count, "call": 1}.get(i.kind)
                inner = None if times is None or each is None else times * each
                for body in i.bodies:
                    visit(body, inner)

        visit(self.entry, 1)
        return {name: count for name, count in found.items() if name not in unknown}

    def walk(self, name: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Every instruction with how often a run executes it; of a conditional every branch, of a loop whose number of
        iterations XLA does not know one iteration."""
        for i in self.computations.get(name or self.entry, ()):
            yield i, times
            for body in i.bodies:
                yield from self.walk(body, times * (1 if i.trip_count is None else i.trip_count))
