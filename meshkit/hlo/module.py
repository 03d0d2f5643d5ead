"""Read the scheduled HLO of a compiled program into a Schedule: the work of each instruction, in order.

    serialized module -> Module -> read_schedule -> Schedule

XLA drops the trip count of a loop when it peels off iterations (collective pipelining), but keeps the induction
variable. The trip count then follows from the condition `counter + a < limit`, the constant at which the counter
starts, and its step in the body.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshkit.config.mesh import Placement
from meshkit.errors import MeshkitError, ProgramError
from meshkit.hlo.costs import FREE_CALLS, Cost, additions_by_swap, cost_of, cost_of_copy, cost_of_start
from meshkit.hlo.instructions import plain_path
from meshkit.hlo.proto import Computation, HloInstruction, Module, Shape, ints, message, refusing_malformed, text
from meshkit.hlo.schedule import Collective, Instruction, Schedule, group_shape, read_groups

COLLECTIVES = {
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
}  # fmt: skip
_FREE = {
    "add-dependency", "after-all", "async-update", "bitcast", "constant", "domain", "get-dimension-size",
    "get-tuple-element", "optimization-barrier", "parameter", "partition-id", "replica-id", "tuple",
}  # fmt: skip
CONTROL = {"while", "conditional", "call"}
# A send and a receive that XLA made of a permute have the permute's pairs in this attribute.
_SEND_PAIRS = "_xla_send_recv_source_target_pairs"
_ALIASES = ("copy", "bitcast", "convert", "reshape", "broadcast")
_MIRRORED = {"GT": "LT", "GE": "LE", "LT": "GT", "LE": "GE", "NE": "NE"}
# A scatter with at least this mean number of additions to an element gets a note. If a GPU adds its tens of thousands
# of tokens to a table of as many ids, each id gets a few additions, which are priced. Tables of types or distances have
# only a few hundred entries, so each gets many.
_CROWDED = 256
_LITERALS = (4, 5, 6, 7)  # Fields s32s, s64s, u32s and u64s of xla.LiteralProto.


@dataclass(frozen=True)
class ReadProgram:
    """A compiled module, read once: its schedule, and the communication of each of its instructions."""

    schedule: Schedule | None
    """None if the program has a form of HLO that this version does not know."""
    collectives: Mapping[str, Collective]
    """Name of an instruction in a trace -> its collective."""
    participants: Mapping[str, np.ndarray]
    """Collective's name -> partition ids [groups, members]; for a permute [pairs, 2]."""


def read_program(module: Module, placement: Placement) -> ReadProgram:
    """Return the schedule and collectives of a program, for the reader of its trace; on any backend.

    Args:
        placement: partition id -> place on the mesh and in NVLink domains.

    Raises:
        ProgramError: a collective's groups cannot be read or are not on the mesh.
    """
    reader = _Reader(module, placement)
    try:
        schedule = reader.schedule()
    except MeshkitError:
        schedule = None  # The collectives can still be read.
    return ReadProgram(schedule, *reader.communication())


def read_schedule(module: Module, placement: Placement) -> Schedule:
    """Return a scheduled program as a Schedule, whose `notes` name what it could not price or count.

    Raises:
        ProgramError: the program has a form of HLO that this version does not know.
    """
    return _Reader(module, placement).schedule()


class _Reader:
    def __init__(self, module: Module, placement: Placement):
        self.module, self.placement = module, placement
        self.notes: dict[str, list[str]] = {}
        self._occurrences: Counter = Counter()
        self._collectives: dict[str, tuple[Collective, ...]] = {}
        self._sends: dict[int, str] = {}

    def walk(self) -> Iterator[Computation]:
        """Yield the computations that run, from the entry through control flow, each once."""
        pending, seen = [self.module.entry], set()
        while pending:
            computation = pending.pop(0)
            if computation not in seen:
                seen.add(computation)
                yield computation
                pending += [body for i in computation.order for body in _bodies(i)]

    @refusing_malformed("the program")
    def schedule(self) -> Schedule:
        computations = {c.name: tuple(read for i in c.order for read in self.instructions(i)) for c in self.walk()}
        module = self.module
        return Schedule(module.name, computations, module.entry.name, module.fingerprint, dict(self.notes))

    @refusing_malformed("the communication of the program")
    def communication(self) -> tuple[dict[str, Collective], dict[str, np.ndarray]]:
        outer: dict[str, Collective] = {}
        inside: dict[str, Collective] = {}
        participants: dict[str, np.ndarray] = {}
        for i in (i for c in self.walk() for i in c.order):
            collectives = self.collectives(i)
            if collectives:
                outer[i.name] = collectives[0]
            for inner, collective in zip(_communicating(i), collectives):
                inside[inner.name] = collective
                participants[collective.name] = self.groups(inner)
        return inside | outer, participants  # A trace may name the collective that an async start wraps.

    def instructions(self, i: HloInstruction) -> list[Instruction]:
        """Return the schedule's instruction for `i`, or one for each of several collectives that it starts."""
        op = i.opcode
        if op in _FREE or i.target in FREE_CALLS:
            return [Instruction(i.name, op, "free")]
        if _bodies(i):
            return [self._control(i)]
        if op in ("send", "recv", "send-done", "recv-done"):
            return [self._transfer(i)]
        if op.endswith("-done"):
            return [Instruction(i.name, op, "done", i.source, starts=_start_of(i))]
        collectives = self.collectives(i)
        if collectives:
            kind = "start" if op.endswith("-start") and not _is_sync(i) else "collective"
            return [Instruction(c.name, c.collective, kind, c.source, collective=c) for c in collectives]
        return [self._work(i)]

    def collectives(self, i: HloInstruction) -> tuple[Collective, ...]:
        """Return the collectives that `i` is, wraps or fuses; the last of several has the name of `i`."""
        if i.name not in self._collectives:
            inner = _communicating(i)
            names = [f"{i.name}/{c.name}" for c in inner[:-1]] + [i.name]
            found = [self._collective(i, c, n) for c, n in zip(inner, names)]
            over = [str(self.groups(c).tolist()) for c in inner] if len(inner) > 1 else [""]
            self._collectives[i.name] = tuple(replace(c, grouped=over[n] in over[n + 1 :]) for n, c in enumerate(found))
        return self._collectives[i.name]

    def _work(self, i: HloInstruction) -> Instruction:
        """Return a kernel, or the start of a copy or of a kernel on another stream."""
        op = i.opcode
        if op == "async-start":
            return Instruction(i.name, i.called[0].root.opcode, "start", i.source, cost_of_start(i))
        if op == "copy-start":
            return Instruction(i.name, op, "start", i.source, cost_of_copy(i))
        if op in ("infeed", "outfeed"):
            return Instruction(i.name, op, "kernel", i.source, Cost(host_bytes=_host_bytes(i)))
        cost = cost_of(i)
        if cost.priced_by == "bytes":
            self._note("opaque custom call", f"{i.name} ({i.target or op})")
        additions, dtype = additions_by_swap(i)
        if additions >= _CROWDED:
            self._note("crowded scatter", f"{i.name} ({additions:.0f} additions in {dtype} to each element)")
        if cost.attention_sequences > 1:
            most = f"at most {cost.attention_sequences} sequences in {cost.attention_length} tokens"
            self._note("packed attention", f"{i.name} ({most})")
        elif cost.attention_padded:
            self._note("padded attention", f"{i.name} ({cost.attention_length} tokens)")
        return Instruction(i.name, op, "kernel", i.source, cost)

    def _control(self, i: HloInstruction) -> Instruction:
        op, trips = i.opcode, None
        if op == "while":
            trips = _count_trips(i) if i.trip_count is None else i.trip_count
            if trips is None:
                self._note("unknown trip count", i.name)
        if op == "conditional":
            self._note("conditional", i.name)
        if op == "async-start":
            self._note("side stream", i.name)
        kind = "call" if op == "async-start" else op
        return Instruction(i.name, op, kind, i.source, bodies=tuple(c.name for c in _bodies(i)), trip_count=trips)

    def _transfer(self, i: HloInstruction) -> Instruction:
        """Return half of a send and receive: of a permute between GPUs that the send starts, or of a host transfer."""
        op = i.opcode
        if op.endswith("-done"):
            between = op == "recv-done" and i.channel in self._sends
            start = self._sends[i.channel] if between else _start_of(i)
            return Instruction(i.name, op, "done", i.source, starts=start)
        collectives = self.collectives(i)
        if op == "send" and collectives:
            self._sends[i.channel] = i.name
            return Instruction(i.name, "collective-permute", "start", i.source, collective=collectives[0])
        if _SEND_PAIRS in i.frontend:
            return Instruction(i.name, op, "free", i.source)
        return Instruction(i.name, op, "start", i.source, Cost(host_bytes=_host_bytes(i)))

    def _collective(self, i: HloInstruction, inner: HloInstruction, name: str) -> Collective:
        op = "collective-permute" if inner.opcode == "send" else inner.opcode.removesuffix("-start")
        where = group_shape(self.groups(inner), self.placement, permute=op == "collective-permute")
        shapes = _moved(op, [o.shape for o in inner.operands])
        dtypes = {s.dtype for s in shapes}
        operand_bytes = sum(s.bytes for s in shapes)
        element = dtypes.pop() if len(dtypes) == 1 else "mixed"
        source = i.source or inner.source
        base = "|".join([op, "+".join(where.axes), element, ",".join(map(str, shapes)), plain_path(source)])
        self._occurrences[base] += 1
        return Collective(
            name=name,
            key=f"{base}|{self._occurrences[base]}",
            collective=op,
            axes=where.axes,
            axes_complete=where.axes_complete,
            link=where.link,
            fabric=self.placement.fabric.get(where.link),
            dtype=element,
            group_size=where.group_size,
            num_groups=where.num_groups,
            gpus_per_domain=where.gpus_per_domain,
            payload_bytes=operand_bytes * (where.group_size if op == "all-gather" else 1),
            source=source,
            **(_ragged([o.shape for o in inner.operands], where.group_size) if op == "ragged-all-to-all" else {}),
        )

    def groups(self, inner: HloInstruction) -> np.ndarray:
        """Return the partition ids of a collective's groups, or the pairs of a permute."""
        return _send_pairs(inner) if inner.opcode == "send" else read_groups(inner, self.placement.num_partitions)

    def _note(self, kind: str, name: str) -> None:
        self.notes.setdefault(kind, []).append(name)


def _communicating(i: HloInstruction) -> list[HloInstruction]:
    """Return the collective instructions that `i` is or contains; empty for a `done`."""
    if i.opcode.removesuffix("-start") in COLLECTIVES or (i.opcode == "send" and _SEND_PAIRS in i.frontend):
        return [i]
    if i.opcode not in ("fusion", "async-start"):
        return []
    return [found for c in i.called for inner in c.instructions for found in _communicating(inner)]


def _is_sync(i: HloInstruction) -> bool:
    said = (x.configured("collective_backend_config", "is_sync") for x in (i, *_communicating(i)))
    return next((sync for sync in said if sync is not None), False)


def _bodies(i: HloInstruction) -> Sequence[Computation]:
    """Return the computations that control flow runs, also in an async start; for a loop, only the body."""
    if i.opcode == "async-start":
        return _bodies(i.called[0].root)
    if i.opcode not in CONTROL:
        return ()
    return i.called[:1] if i.opcode == "while" else i.called


def _start_of(done: HloInstruction) -> str | None:
    operand = done.operands[0] if done.operands else None
    while operand is not None and operand.opcode == "async-update":
        operand = operand.operands[0]
    return operand.name if operand is not None else None


def _send_pairs(send: HloInstruction) -> np.ndarray:
    pairs = re.findall(r"\{(\d+),\s*(\d+)\}", send.frontend[_SEND_PAIRS])
    if not pairs:
        raise ProgramError(f"the send {send.name} names no pairs of GPUs: {send.frontend[_SEND_PAIRS]!r}.")
    return np.array([[int(source), int(target)] for source, target in pairs])


def _moved(op: str, operands: list[Shape]) -> list[Shape]:
    if op == "ragged-all-to-all":
        # Operand and result are buffers that may be too large; the rows that move fit into both.
        return [min(operands[:2], key=lambda s: s.bytes)]
    return [s for s in operands if s.dtype != "token"]


def _ragged(operands: list[Shape], group_size: int) -> dict[str, Any]:
    """Return the fields of `Collective` for ragged all-to-alls; there is one offset for each member and slice."""
    less, more = sorted(s.bytes for s in operands[:2])
    slices = operands[2].dims[0] // group_size if len(operands) > 2 and operands[2].dims else 1
    return {"slices": max(1, slices), "room": more / less if less else 1.0}


def _host_bytes(i: HloInstruction) -> float:
    """Return the bytes between host and GPU: those of a send's or outfeed's operand, or those that arrive."""
    if i.opcode in ("send", "outfeed"):
        return float(i.operands[0].shape.bytes)
    return float((i.shape.parts[0] if i.shape.parts else i.shape).bytes)


@dataclass(frozen=True)
class _Linear:
    """`counter * n + offset`, with n 0 or 1."""

    counter: int
    offset: int


def _count_trips(loop: HloInstruction) -> int | None:
    """Return the iterations of a loop from its induction variable; None if it has no simple one."""
    variable = loop.configured("known_induction_variable", "tuple_index")
    if variable is None or len(loop.called) != 2:
        return None
    index, state = int(variable), loop.operands[0]
    if state.opcode != "tuple":
        return None
    start = _Scope().value(state.operands[index])
    scope, (body, condition) = _Scope(index), (c.root for c in loop.called)
    if body.opcode != "tuple":
        return None
    step, limit = scope.value(body.operands[index]), scope.limit(condition)
    if start is None or start.counter or step is None or not step.counter or step.offset <= 0 or limit is None:
        return None
    return max(0, -(-(limit - start.offset) // step.offset))


class _Scope:
    """The values of a computation's parameters: a loop's state with its counter, or values `given` to a fusion."""

    def __init__(self, counter: int | None = None, given: Sequence[_Linear | None] = ()):
        self._counter, self._given = counter, given

    def value(self, i: HloInstruction) -> _Linear | None:
        """Return an integer scalar in terms of the counter; None if it is something else."""
        if i.opcode == "constant":
            return _literal(i)
        if i.opcode == "parameter":
            number = i.parameter_number
            return self._given[number] if number < len(self._given) else None
        if i.opcode == "get-tuple-element":
            whole = i.operands[0].opcode == "parameter"
            return _Linear(1, 0) if whole and i.tuple_index == self._counter else None
        if i.opcode in _ALIASES:
            return self.value(i.operands[0])
        if i.opcode == "fusion":
            return self._inside(i).value(i.called[0].root)
        if i.opcode == "add":
            left, right = map(self.value, i.operands)
            if left is None or right is None or left.counter + right.counter > 1:
                return None
            return _Linear(left.counter + right.counter, left.offset + right.offset)
        return None

    def limit(self, i: HloInstruction) -> int | None:
        """Return the limit of a condition `counter < limit`, in any form; None for any other condition."""
        if i.opcode == "fusion":
            return self._inside(i).limit(i.called[0].root)
        if i.opcode != "compare":
            return None
        left, right = map(self.value, i.operands)
        direction = text(i.fields, 63)
        if left is None or right is None or left.counter == right.counter:
            return None
        if right.counter:
            left, right, direction = right, left, _MIRRORED.get(direction, "")
        extra = {"LT": 0, "LE": 1}.get(direction)
        return None if extra is None else right.offset - left.offset + extra

    def _inside(self, fusion: HloInstruction) -> _Scope:
        return _Scope(given=[self.value(o) for o in fusion.operands])


def _literal(constant: HloInstruction) -> _Linear | None:
    literal = message(constant.fields, 8)
    values = [v for number in _LITERALS for v in ints(literal, number)]
    if len(values) != 1:  # XLA omits nothing: it writes even a scalar zero.
        return None
    value = values[0]
    return _Linear(0, value - (1 << 64) if value >= 1 << 63 else value)
