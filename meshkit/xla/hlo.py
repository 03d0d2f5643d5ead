"""The scheduled HLO of a compiled program -> a Schedule: what each instruction does, in order. Layer 4.

Structure (opcodes, operands, shapes, called computations) comes from the runtime's instruction objects; only
attributes that those do not expose (replica groups, trip counts) are read from an instruction's own text.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshkit.errors import ProgramError
from meshkit.spec.mesh import Placement
from meshkit.xla.collective import Collective
from meshkit.xla.costs import Cost, CostModel, custom_call_target, opcode
from meshkit.xla.groups import group_shape, parse_groups
from meshkit.xla.shapes import shape_of

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
    "bitcast",
    "constant",
    "domain",
    "get-tuple-element",
    "optimization-barrier",
    "parameter",
    "partition-id",
    "replica-id",
    "tuple",
}
_HOST = {"send", "send-done", "recv", "recv-done", "infeed", "outfeed"}
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_HEADER = re.compile(r"^(?:ENTRY )?%?[\w.\-]+ \(.*\{$", re.MULTILINE)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass(frozen=True)
class Instruction:
    """One instruction of a schedule.

    Attributes:
        name, opcode: as XLA prints them; an asynchronous one has the opcode of what it starts.
        kind: `kernel`, `collective` (blocks), `start` and `done` (asynchronous), `copy`, `while`, `conditional`,
            `call`, `free` (no time), `host` (not priced).
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
        notes: what could not be read, by kind: instruction names.
    """

    name: str
    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    fingerprint: str
    notes: Mapping[str, list[str]] = field(default_factory=dict)


def load_module(serialized: bytes) -> Any:
    """The runtime's HloModule of a serialized `HloModuleProto`.

    Raises:
        ProgramError: the bytes are not a module.
    """
    module_type = _hlo_module_type()
    try:
        return module_type.from_serialized_hlo_module_proto(serialized)
    except Exception as e:  # the binding raises several types for a malformed proto
        raise ProgramError(f"not a serialized HLO module ({len(serialized)} bytes): {e}") from None


def _hlo_module_type() -> Any:
    try:
        return importlib.import_module("jaxlib._hlo").HloModule
    except ImportError:  # jax 0.11 keeps the bindings in another extension module
        return importlib.import_module("jaxlib._jax").HloModule


def read_collectives(module: Any, placement: Placement) -> dict[str, Collective]:
    """Every collective of a module by the instruction name under which a trace shows it.

    Args:
        module: a compiled HloModule, of any backend.
        placement: partition id -> place on the mesh and in NVLink domains.
    """
    reader = _Reader(module, placement)
    found = {i.name: reader.collective(i) for _, instructions in reader.walk() for i in instructions}
    return {name: collective for name, collective in found.items() if collective is not None}


def read_schedule(module: Any, placement: Placement) -> Schedule:
    """A scheduled HloModule as a Schedule.

    Raises:
        ProgramError: a form of HLO that this version does not know.
    """
    reader = _Reader(module, placement)
    computations = {name: tuple(reader.instruction(i) for i in instructions) for name, instructions in reader.walk()}
    entry = reader.entry()
    return Schedule(module.name, computations, entry, reader.fingerprint(), dict(reader.notes))


class _Reader:
    def __init__(self, module: Any, placement: Placement):
        self.computations = {c.name: c for c in module.computations()}
        self.placement = placement
        self.notes: dict[str, list[str]] = {}
        self._text = module.to_string()
        self._order: dict[str, list[str]] | None = None
        self._occurrences: Counter = Counter()
        self._collectives: dict[str, Collective | None] = {}
        self._model = CostModel(self.computations, _called)

    def entry(self) -> str:
        found = re.search(r"^ENTRY %?([\w.\-]+)", self._text, re.MULTILINE)
        if not found:
            raise ProgramError("the HLO module has no entry computation.")
        return found[1]

    def fingerprint(self) -> str:
        """A hash of every computation as printed, without metadata (which names files and lines)."""
        first = _HEADER.search(self._text)
        body = re.sub(r",? metadata=\{[^}]*\}", "", self._text[first.start() if first else 0 :])
        return hashlib.sha256(body.encode()).hexdigest()[:16]

    def walk(self) -> Iterator[tuple[str, list[Any]]]:
        """Computations that run, from the entry through control flow, each once; instructions in schedule order."""
        pending, seen = [self.entry()], set()
        while pending:
            name = pending.pop(0)
            if name in seen:
                continue
            seen.add(name)
            instructions = self.ordered(name)
            yield name, instructions
            control = (i for i in instructions if opcode(i) in ("while", "conditional", "call"))
            pending += [body for i in control for body in _bodies(i) if body in self.computations]

    def ordered(self, name: str) -> list[Any]:
        """Instructions in schedule order: the order in which a scheduled module prints them."""
        if self._order is None:
            self._order = _printed_order(self._text)
        instructions = {i.name: i for i in self.computations[name].instructions()}
        order = self._order.get(name, [])
        return [instructions[n] for n in order] if len(order) == len(instructions) else list(instructions.values())

    def instruction(self, i: Any) -> Instruction:
        op = opcode(i)
        if op in _FREE:
            return Instruction(i.name, op, "free")
        text = i.to_string()
        source = source_path(text)
        if op in ("while", "conditional", "call"):
            return self._control(i, op, text, source)
        if op.endswith("-done") or op == "async-update":
            return Instruction(i.name, op, "done", source, starts=_start_of(i))
        if op in _HOST:
            self._note("host", i.name)
            return Instruction(i.name, op, "host", source)
        collective = self.collective(i)
        if collective is not None:
            asynchronous = op.endswith("-start") and '"is_sync":true' not in text
            return Instruction(i.name, collective.collective, "start" if asynchronous else "collective", source,
                               collective=collective)  # fmt: skip
        if op == "async-start":
            root = i.async_wrapped_root()
            return Instruction(i.name, opcode(root), "start", source, self._model.asynchronous(i, root))
        if op == "copy-start":
            return Instruction(i.name, op, "start", source, self._model.copy(i))
        if 'custom_call_target="AllocateBuffer"' in text:
            return Instruction(i.name, op, "free")
        cost = self._model.cost(i)
        if cost.priced_by == "bytes":
            self._note("opaque custom call", f"{i.name} ({custom_call_target(text)})")
        return Instruction(i.name, op, "kernel", source, cost)

    def _control(self, i: Any, op: str, text: str, source: str) -> Instruction:
        if op == "while":
            found = re.search(r'"known_trip_count":\{"n":"(\d+)"', text)
            if not found:
                self._note("unknown trip count", i.name)
            return Instruction(i.name, op, op, source, bodies=_bodies(i), trip_count=int(found[1]) if found else None)
        bodies = tuple(n for n in _bodies(i) if n in self.computations)
        if op == "conditional":
            self._note("conditional", i.name)
        return Instruction(i.name, op, op, source, bodies=bodies)

    def collective(self, i: Any) -> Collective | None:
        """What an instruction communicates: directly, wrapped by an async start, or inside a fusion."""
        if i.name not in self._collectives:
            self._collectives[i.name] = self._read_collective(i)
        return self._collectives[i.name]

    def _read_collective(self, i: Any) -> Collective | None:
        inner = self._communicating(i)
        if inner is None:
            return None
        op = opcode(inner).removesuffix("-start")
        text = inner.to_string()
        permute = op == "collective-permute"
        where = group_shape(parse_groups(text, self.placement.num_partitions), self.placement, permute=permute)
        shapes = [shape_of(o) for o in inner.operands()]
        if op == "ragged-all-to-all":
            # operand and result are buffers with room to spare: what moves fits in both
            shapes = [min(shapes[:2], key=lambda s: s.bytes)]
        dtypes = {s.dtype for s in shapes}
        operand_bytes = sum(s.bytes for s in shapes)
        element = dtypes.pop() if len(dtypes) == 1 else "mixed"
        source = source_path(i.to_string()) or source_path(text)
        printed = ",".join(map(str, shapes))
        # A bare name is an argument's, which differs with how the function was called.
        path = re.sub(r"[._]\d+(?=/|$)", "", source) if "/" in source else ""
        base = "|".join([op, "+".join(where.axes), element, printed, path])
        self._occurrences[base] += 1
        return Collective(
            name=i.name,
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

    def _communicating(self, i: Any) -> Any | None:
        """The collective instruction that i is or holds; None if none (and for the done half)."""
        op = opcode(i)
        if op.removesuffix("-start") in COLLECTIVES:
            return i
        if op == "async-start":
            return self._communicating(i.async_wrapped_root())
        if op in ("fusion", "call"):
            for name in _called(i):
                if name in self.computations:
                    for inner in self.computations[name].instructions():
                        if opcode(inner) in COLLECTIVES:
                            return inner
        return None

    def _note(self, kind: str, name: str) -> None:
        self.notes.setdefault(kind, []).append(name)


def source_path(text: str) -> str:
    """The op_name of a printed instruction, without what the way through `jax.export` put in front of it."""
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', text)
    if not found:
        return ""
    path = re.sub(r"(?:jit\(call\)/)?(?:call_exported/)?jit\(exported_step\)/", "", found[1])
    path = re.sub(r"(?:jit\(call\)/)?call_exported(?:[:/]|(?=[)]|$))", "", path)
    return path.replace("jit(call)", "").strip("/:") if path else ""


def _called(instruction: Any) -> list[str]:
    if opcode(instruction) not in ("fusion", "call", "while", "conditional", "async-start"):
        return []
    if opcode(instruction) == "async-start":
        return _called(instruction.async_wrapped_root())
    return _called_text(instruction.to_string())


def _called_text(text: str) -> list[str]:
    names = _CALLED.findall(text)
    if m := _BRANCHES.search(text):
        names += [n.strip().lstrip("%") for n in m[1].split(",")]
    return names


def _bodies(instruction: Any) -> tuple[str, ...]:
    """Computations that control flow runs: the body of a loop, the branches of a conditional, the callee of a call."""
    text = instruction.to_string()
    if opcode(instruction) == "while":
        body = re.search(r"body=%?([\w.\-]+)", text)
        return (body[1],) if body else ()
    return tuple(_called_text(text))


def _start_of(done: Any) -> str | None:
    """The start that a done (or an update between) belongs to."""
    operand = done.operands()[0] if done.operands() else None
    while operand is not None and opcode(operand) == "async-update":
        operand = operand.operands()[0]
    return operand.name if operand is not None else None


def _printed_order(text: str) -> dict[str, list[str]]:
    order: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if line and not line[0].isspace():
            header = re.match(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
            current = order.setdefault(header[1], []) if header else None
        elif current is not None and (m := re.match(r"^\s+(?:ROOT )?%?([\w.\-]+) = ", line)):
            current.append(m[1])
    return order
