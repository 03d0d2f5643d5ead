"""A compiled program as its instructions run: what the reader makes and the simulator takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from meshkit.hlo.costs import Cost


@dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program, with what it moves and where."""

    name: str  # the HLO instruction name, unique within its program
    key: str  # `opcode|axes|dtype|shapes|op_name path|occurrence`; survives a recompile
    collective: str  # the HLO opcode without `-start` (`all-gather`, `collective-permute`, ...)
    axes: tuple[str, ...]  # mesh axes along which the participants of a group differ; () when they map to no axis
    axes_complete: bool  # False where the groups cover only part of an axis
    link: str  # the slowest link a group crosses: `nvlink` or `infiniband`; "" where no cluster is known
    fabric: str | None  # what that link is made of (`nvlink4_nvswitch`, `shared_memory`, ...); None if unknown
    dtype: str  # element type on the wire, as XLA spells it; `mixed` for a combined collective of several
    group_size: int  # participants of a group; 0 where only the name of a kernel is known
    num_groups: int
    gpus_per_domain: int  # participants of one group that share an NVLink domain
    payload_bytes: int  # bytes of one instance on one GPU (operand; result for all-gather)
    source: str = ""  # the op_name path of the model code that caused it
    replica_groups: str | None = None  # `{0,1},{2,3}`, where no mesh is known that has axes for them
    grouped: bool = False  # whether NCCL runs it in the kernel of another one, which starts with it over the same GPUs


@dataclass(frozen=True)
class Instruction:
    """One instruction of a schedule."""

    name: str  # as XLA prints it
    opcode: str  # as XLA prints it; an asynchronous one has the opcode of what it starts
    kind: str
    """`kernel`, `collective` (blocks), `start` and `done` (asynchronous), `while`, `conditional`, `call`, `free` (no
    time)."""
    source: str = ""  # op_name path of the model code that caused it
    cost: Cost | None = None  # work on one GPU; None for control flow and communication
    collective: Collective | None = None  # what it communicates; None if it does not
    starts: str | None = None  # for `done`, the name of the start it waits for
    bodies: tuple[str, ...] = ()  # computations it runs: the body of a loop, the branches of a conditional
    trip_count: int | None = None  # iterations of a loop; None if XLA does not know


@dataclass(frozen=True)
class Schedule:
    """A compiled program as its instructions run: computations in schedule order."""

    name: str
    computations: Mapping[str, tuple[Instruction, ...]]
    """Name -> instructions, of the entry and all that it reaches through control flow."""
    entry: str  # name of the computation that runs
    fingerprint: str  # equal for equal programs
    notes: Mapping[str, list[str]] = field(default_factory=dict)
    """What could not be read or priced, by kind: instruction names, with what they call in parentheses."""

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
