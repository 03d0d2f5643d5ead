"""The scheduled HLO of a compiled program -> a Schedule: what each instruction does, in order.

    serialized module -> load_module -> read_schedule -> Schedule

Opcodes, operands and shapes come from the runtime's instruction objects, everything else (schedule order, called
computations, replica groups, trip counts) from the message that the module is kept as; nothing from printed text.

XLA forgets a loop's trip count when it takes iterations out of it (collective pipelining), but not its induction
variable: the loop runs while `counter + a < limit`; the counter starts at a constant and grows by one in the body.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from meshkit.config.mesh import Placement
from meshkit.errors import MeshkitError, ProgramError
from meshkit.hlo.costs import FREE_CALLS, Cost, CostModel, opcode
from meshkit.hlo.instructions import Shape, shape_of
from meshkit.hlo.proto import (
    Attributes,
    Fields,
    ModuleAttributes,
    attributes_of,
    integer,
    ints,
    message,
    text,
    with_dense_ids,
)
from meshkit.hlo.schedule import Collective, Instruction, Schedule, group_shape, read_groups

__all__ = [
    "Instruction",
    "Schedule",
    "load_module",
    "read_collectives",
    "read_program",
    "read_schedule",
]

COLLECTIVES = {
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
}
_FREE = {
    "add-dependency",
    "after-all",
    "async-update",
    "bitcast",
    "constant",
    "domain",
    "get-dimension-size",
    "get-tuple-element",
    "optimization-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
_CONTROL = {"while", "conditional", "call"}
_CALLING = {*_CONTROL, "fusion", "async-start"}
_HEADER = re.compile(r"^(?:ENTRY )?%?[\w.\-]+ \(.*\{$", re.MULTILINE)
# Where a send and a receive that XLA made of a permute keep its pairs.
_SEND_PAIRS = "_xla_send_recv_source_target_pairs"
_ALIASES = ("copy", "bitcast", "convert", "reshape", "broadcast")
_MIRRORED = {"GT": "LT", "GE": "LE", "LT": "GT", "LE": "GE", "NE": "NE"}
_LITERALS = (4, 5, 6, 7)  # s32s, s64s, u32s, u64s of xla.LiteralProto


def load_module(serialized: bytes) -> Any:
    """The runtime's HloModule of a serialized `HloModuleProto`, in memory in proportion to its size.

    Raises:
        ProgramError: the bytes are not a module.
    """
    serialized = with_dense_ids(serialized)
    module_type = _hlo_bindings().HloModule
    try:
        return module_type.from_serialized_hlo_module_proto(serialized)
    except Exception as e:  # the binding raises several types for a malformed proto
        raise ProgramError(f"not a serialized HLO module ({len(serialized)} bytes): {e}") from None


def parse_hlo(text: str) -> Any:
    """The runtime's HloModule of HLO written by hand; XLA does not parse all that it prints of optimized modules."""
    return _hlo_bindings().hlo_module_from_text(text)


def _hlo_bindings() -> Any:
    try:
        return importlib.import_module("jaxlib._hlo")
    except ImportError:  # jax 0.11 keeps the bindings in another extension module
        return importlib.import_module("jaxlib._jax")


@dataclass(frozen=True)
class Program:
    """A compiled module, read once: its schedule, and what each of its instructions communicates."""

    schedule: Schedule | None
    """None where this version does not know a form of HLO in it."""
    collectives: Mapping[str, Collective]
    """By the instruction name under which a trace shows it."""
    participants: Mapping[str, np.ndarray]
    """Collective's name -> partition ids [groups, members], or [pairs, 2] of a permute."""


def read_program(module: Any, placement: Placement) -> Program:
    """What a trace of a compiled HloModule, of any backend, is read with.

    Args:
        module: as the runtime has it.
        placement: partition id -> place on the mesh and in NVLink domains.

    Raises:
        ProgramError: it has no entry computation, or a collective whose groups cannot be read or are not on the mesh.
    """
    reader = _Reader(module, placement)
    try:
        schedule = reader.schedule()
    except MeshkitError:
        schedule = None  # the collectives can still be read
    return Program(schedule, *reader.communication())


def read_collectives(module: Any, placement: Placement) -> dict[str, Collective]:
    """Every collective of a module; see `Program`.

    Args:
        module, placement: as of `read_program`.

    Returns:
        name of the instruction -> collective; one inside of an async start or a fusion stands under both names.

    Raises:
        ProgramError: as `read_program`.
    """
    return _Reader(module, placement).communication()[0]


def read_schedule(module: Any, placement: Placement) -> Schedule:
    """A scheduled HloModule as a Schedule.

    Args:
        module, placement: as of `read_program`.

    Returns:
        what it could not price, or not count, is in its `notes`.

    Raises:
        ProgramError: a form of HLO that this version does not know.
    """
    return _Reader(module, placement).schedule()


def _fingerprint(module: Any) -> str:
    """A hash of every computation as printed, without metadata (which names files and lines)."""
    text = module.to_string()
    first = _HEADER.search(text)
    body = re.sub(r",? metadata=\{[^}]*\}", "", text[first.start() if first else 0 :])
    return hashlib.sha256(body.encode()).hexdigest()[:16]


class _Reader:
    def __init__(self, module: Any, placement: Placement):
        self._module = module
        self.computations = {c.name: c for c in module.computations()}
        self.placement = placement
        self.notes: dict[str, list[str]] = {}
        self._attributes = attributes_of(module)
        self._occurrences: Counter = Counter()
        self._collectives: dict[str, tuple[Collective, ...]] = {}
        self._sends: dict[int, str] = {}
        self._model = CostModel(self.computations, self._called)
        self.entry = self._attributes.entry
        if self.entry not in self.computations:
            raise ProgramError("the HLO module has no entry computation.")

    def walk(self) -> Iterator[tuple[str, list[Any]]]:
        """Computations that run, from the entry through control flow, each once; instructions in schedule order."""
        pending, seen = [self.entry], set()
        while pending:
            name = pending.pop(0)
            if name in seen:
                continue
            seen.add(name)
            by_name = {i.name: i for i in self.computations[name].instructions()}
            instructions = [by_name[n] for n in self._attributes.order(name)]
            yield name, instructions
            pending += [body for i in instructions for body in self._bodies(i)]

    def schedule(self) -> Schedule:
        """Every computation that runs, as instructions."""
        computations = {
            name: tuple(read for i in instructions for read in self.instructions(i))
            for name, instructions in self.walk()
        }
        return Schedule(self._module.name, computations, self.entry, _fingerprint(self._module), dict(self.notes))

    def communication(self) -> tuple[dict[str, Collective], dict[str, np.ndarray]]:
        """The collectives and the participants of a `Program`."""
        outer: dict[str, Collective] = {}
        inside: dict[str, Collective] = {}
        participants: dict[str, np.ndarray] = {}
        for i in (i for _, instructions in self.walk() for i in instructions):
            collectives = self.collectives(i)
            if collectives:
                outer[i.name] = collectives[0]
            for inner, collective in zip(self.communicating(i), collectives):
                inside[inner.name] = collective
                participants[collective.name] = self.groups(inner)
        return inside | outer, participants  # a trace may name what an async start wraps

    def instructions(self, i: Any) -> list[Instruction]:
        """What an instruction comes to: one, or one for each of several collectives that it starts together."""
        op, at = opcode(i), self._of(i)
        if op in _FREE or at.target in FREE_CALLS:
            return [Instruction(i.name, op, "free")]
        if self._bodies(i):
            return [self._control(i, op, at)]
        if op in ("send", "recv", "send-done", "recv-done"):
            return [self._transfer(i, op, at)]
        if op.endswith("-done"):
            return [Instruction(i.name, op, "done", at.source, starts=self._start_of(i))]
        collectives = self.collectives(i)
        if collectives:
            kind = "start" if op.endswith("-start") and not self._is_sync(i) else "collective"
            return [Instruction(c.name, c.collective, kind, c.source, collective=c) for c in collectives]
        return [self._work(i, op, at)]

    def collectives(self, i: Any) -> tuple[Collective, ...]:
        """What an instruction communicates: itself, wrapped by an async start, or inside a fusion; the last one of
        several bears its name."""
        if i.name not in self._collectives:
            inner = self.communicating(i)
            names = [f"{i.name}/{c.name}" for c in inner[:-1]] + [i.name]
            found = [self._collective(i, c, n) for c, n in zip(inner, names)]
            over = [str(self.groups(c).tolist()) for c in inner] if len(inner) > 1 else [""]
            self._collectives[i.name] = tuple(replace(c, grouped=over[n] in over[n + 1 :]) for n, c in enumerate(found))
        return self._collectives[i.name]

    def _of(self, i: Any) -> Attributes:
        return self._attributes.of(i.name)

    def _work(self, i: Any, op: str, at: Attributes) -> Instruction:
        """A kernel, or the start of a copy or of a kernel on another stream."""
        if op == "async-start":
            root = i.async_wrapped_root()
            return Instruction(i.name, opcode(root), "start", at.source, self._model.asynchronous(i, root))
        if op == "copy-start":
            return Instruction(i.name, op, "start", at.source, self._model.copy(i))
        if op in ("infeed", "outfeed"):
            return Instruction(i.name, op, "kernel", at.source, Cost(host_bytes=_host_bytes(i, op)))
        cost = self._model.cost(i)
        if cost.priced_by == "bytes":
            self._note("opaque custom call", f"{i.name} ({at.target or op})")
        return Instruction(i.name, op, "kernel", at.source, cost)

    def _control(self, i: Any, op: str, at: Attributes) -> Instruction:
        trips = self._trips(i, at) if op == "while" else None
        if op == "conditional":
            self._note("conditional", i.name)
        if op == "async-start":
            self._note("side stream", i.name)
        kind = "call" if op == "async-start" else op
        return Instruction(i.name, op, kind, at.source, bodies=self._bodies(i), trip_count=trips)

    def _trips(self, i: Any, at: Attributes) -> int | None:
        """Iterations of a loop: as XLA says, or as its counter does; noted where neither is known."""
        trips = at.trip_count
        if trips is None:
            trips = count_trips(self._attributes, at, self._attributes.parent(i.name))
        if trips is None:
            self._note("unknown trip count", i.name)
        return trips

    def _transfer(self, i: Any, op: str, at: Attributes) -> Instruction:
        """Half of a send and receive: between GPUs a permute that the send starts, otherwise a transfer to the host."""
        channel = next((c for c in at.fields.get(26, ()) if isinstance(c, int)), 0)
        if op.endswith("-done"):
            between = op == "recv-done" and channel in self._sends
            start = self._sends[channel] if between else self._start_of(i)
            return Instruction(i.name, op, "done", at.source, starts=start)
        collectives = self.collectives(i)
        if op == "send" and collectives:
            self._sends[channel] = i.name
            return Instruction(i.name, "collective-permute", "start", at.source, collective=collectives[0])
        if _SEND_PAIRS in at.frontend:
            return Instruction(i.name, op, "free", at.source)
        return Instruction(i.name, op, "start", at.source, Cost(host_bytes=_host_bytes(i, op)))

    def _collective(self, i: Any, inner: Any, name: str) -> Collective:
        at = self._of(inner)
        op = "collective-permute" if opcode(inner) == "send" else opcode(inner).removesuffix("-start")
        groups = self.groups(inner)
        where = group_shape(groups, self.placement, permute=op == "collective-permute")
        shapes = _moved(op, [shape_of(o) for o in inner.operands()])
        dtypes = {s.dtype for s in shapes}
        operand_bytes = sum(s.bytes for s in shapes)
        element = dtypes.pop() if len(dtypes) == 1 else "mixed"
        source = self._of(i).source or at.source
        # A bare name is an argument's, which differs with how the function was called.
        path = re.sub(r"[._]\d+(?=/|$)", "", source) if "/" in source else ""
        base = "|".join([op, "+".join(where.axes), element, ",".join(map(str, shapes)), path])
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
        )

    def groups(self, inner: Any) -> np.ndarray:
        """Partition ids of the groups of a collective instruction, or the pairs of a permute."""
        at = self._of(inner)
        return _send_pairs(at) if opcode(inner) == "send" else read_groups(at, self.placement.num_partitions)

    def communicating(self, i: Any) -> list[Any]:
        """The collective instructions that i is or holds; none for the done half."""
        op = opcode(i)
        if op.removesuffix("-start") in COLLECTIVES or (op == "send" and _SEND_PAIRS in self._of(i).frontend):
            return [i]
        if op not in ("fusion", "async-start"):
            return []
        inside = (self.computations[name] for name in self._of(i).called if name in self.computations)
        return [found for c in inside for inner in c.instructions() for found in self.communicating(inner)]

    def _is_sync(self, i: Any) -> bool:
        """Whether a started collective blocks all the same."""
        said = (self._of(x).is_sync for x in (i, *self.communicating(i)))
        return next((sync for sync in said if sync is not None), False)

    def _called(self, i: Any) -> list[str]:
        """Computations of a fusion or of control flow; of an async start, those that what it wraps calls."""
        if opcode(i) not in _CALLING:
            return []
        return self._called(i.async_wrapped_root()) if opcode(i) == "async-start" else list(self._of(i).called)

    def _bodies(self, i: Any) -> tuple[str, ...]:
        """Computations that control flow runs: the body of a loop, the branches of a conditional, the callee of a call.

        An async start that wraps a call or a loop is control flow too.
        """
        op = opcode(i)
        if op == "async-start" and opcode(i.async_wrapped_root()) in _CONTROL:
            return self._bodies(i.async_wrapped_root())
        if op not in _CONTROL:
            return ()
        called = self._of(i).called
        return called[:1] if op == "while" else called

    def _start_of(self, done: Any) -> str | None:
        """The start that a done (or an update between) belongs to."""
        operand = done.operands()[0] if done.operands() else None
        while operand is not None and opcode(operand) == "async-update":
            operand = operand.operands()[0]
        return operand.name if operand is not None else None

    def _note(self, kind: str, name: str) -> None:
        self.notes.setdefault(kind, []).append(name)


def _send_pairs(at: Attributes) -> np.ndarray:
    """[pairs, 2] of a send that XLA made of a permute."""
    pairs = re.findall(r"\{(\d+),\s*(\d+)\}", at.frontend[_SEND_PAIRS])
    if not pairs:
        raise ProgramError(f"the send {at.name} names no pairs of GPUs: {at.frontend[_SEND_PAIRS]!r}.")
    return np.array([[int(source), int(target)] for source, target in pairs])


def _moved(op: str, operands: list[Shape]) -> list[Shape]:
    """The arrays that travel, of a collective's operands."""
    if op == "ragged-all-to-all":
        # operand and result are buffers with room to spare: what moves fits in both
        return [min(operands[:2], key=lambda s: s.bytes)]
    return [s for s in operands if s.dtype != "token"]


def _host_bytes(i: Any, op: str) -> float:
    """Bytes between the host and the GPU: what is sent or fed out, or what arrives with the token."""
    if op in ("send", "outfeed"):
        return float(shape_of(i.operands()[0]).bytes)
    shape = shape_of(i)
    return float((shape.parts[0] if shape.parts else shape).bytes)


@dataclass(frozen=True)
class _Linear:
    """`counter * n + offset`, with n 0 or 1."""

    counter: int
    offset: int


def count_trips(module: ModuleAttributes, loop: Attributes, computation: str) -> int | None:
    """Iterations of a loop of the computation; None where they are not so simple.

    Args:
        module: of the program.
        loop: a `while` whose backend configuration names the induction variable.
        computation: the one that the loop stands in.
    """
    variable = loop.backend.get("known_induction_variable", {}).get("tuple_index")
    if variable is None or len(loop.called) != 2:
        return None
    index = int(variable)
    scope = _Scope(module, computation)
    state = scope.operands(loop)[0]
    if state.opcode != "tuple":
        return None
    start = scope.value(scope.operands(state)[index])
    body, condition = (_Scope(module, name, index) for name in loop.called)
    if body.root.opcode != "tuple" or condition.root.opcode not in ("compare", "fusion"):
        return None
    step = body.value(body.operands(body.root)[index])
    limit = condition.limit()
    if start is None or start.counter or step is None or not step.counter or step.offset <= 0 or limit is None:
        return None
    return max(0, -(-(limit - start.offset) // step.offset))


class _Scope:
    """The instructions of one computation, and what its parameters stand for.

    Args:
        module: of the program.
        name: of the computation.
        counter: index of the induction variable in the tuple that is its parameter; None of a fusion.
        given: of a fusion, what each parameter stands for.
    """

    def __init__(
        self, module: ModuleAttributes, name: str, counter: int | None = None, given: Sequence[_Linear | None] = ()
    ):
        self._module, self._counter, self._given = module, counter, given
        attributes = [module.of(i) for i in module.order(name)]
        self._by_id: Mapping[int, Attributes] = {a.id: a for a in attributes}
        self.root = self._by_id[module.root(name)]

    def operands(self, a: Attributes) -> list[Attributes]:
        return [self._by_id[i] for i in a.operands]

    def value(self, a: Attributes) -> _Linear | None:
        """What an integer scalar is in terms of the counter; None if it is something else."""
        if a.opcode == "constant":
            return _literal(a.fields)
        if a.opcode == "parameter":
            number = integer(a.fields, 9)
            return self._given[number] if number < len(self._given) else None
        if a.opcode == "get-tuple-element":
            whole = self.operands(a)[0].opcode == "parameter"
            return _Linear(1, 0) if whole and a.tuple_index == self._counter else None
        if a.opcode in _ALIASES:
            return self.value(self.operands(a)[0])
        if a.opcode == "fusion":
            inner = self._inside(a)
            return inner.value(inner.root)
        if a.opcode == "add":
            left, right = map(self.value, self.operands(a))
            if left is None or right is None or left.counter + right.counter > 1:
                return None
            return _Linear(left.counter + right.counter, left.offset + right.offset)
        return None

    def limit(self) -> int | None:
        """The limit of a condition `counter < limit`, however it is written; None of any other."""
        if self.root.opcode == "fusion":
            return self._inside(self.root).limit()
        if self.root.opcode != "compare":
            return None
        left, right = map(self.value, self.operands(self.root))
        direction = text(self.root.fields, 63)
        if left is None or right is None or left.counter == right.counter:
            return None
        if right.counter:
            left, right, direction = right, left, _MIRRORED.get(direction, "")
        extra = {"LT": 0, "LE": 1}.get(direction)
        return None if extra is None else right.offset - left.offset + extra

    def _inside(self, fusion: Attributes) -> _Scope:
        return _Scope(self._module, fusion.called[0], given=[self.value(o) for o in self.operands(fusion)])


def _literal(fields: Fields) -> _Linear | None:
    literal = message(fields, 8)
    values = [v for number in _LITERALS for v in ints(literal, number)]
    if len(values) != 1:  # XLA leaves nothing out: a scalar zero is written
        return None
    value = values[0]
    return _Linear(0, value - (1 << 64) if value >= 1 << 63 else value)
