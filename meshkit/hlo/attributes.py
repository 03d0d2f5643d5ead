"""What a module says about its instructions beyond opcode, operands and shape.

    serialized HloModuleProto -> ModuleAttributes: entry, schedule order, and by instruction name: called computations,
    replica groups, backend configuration, op_name path

The runtime's instruction objects print these and nothing more; here they are read from the message that XLA writes
(xla/service/hlo.proto, xla/xla_data.proto), whose field numbers hold across jaxlib 0.11 and 0.12.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshkit.hlo.wire import Fields, integer, ints, messages, read_fields, text


@dataclass(frozen=True)
class Attributes:
    """Attributes of one instruction."""

    name: str  # as XLA prints it
    opcode: str  # as XLA prints it
    called: tuple[str, ...]
    """Names of the computations it calls: of a loop (body, condition), of a conditional its branches."""
    fields: Fields

    @property
    def source(self) -> str:
        """The op_name path of the model code that caused it; "" if XLA kept none."""
        return clean_path(self.op_name)

    @property
    def op_name(self) -> str:
        """`metadata.op_name` as XLA keeps it."""
        return text(read_fields(next(messages(self.fields, 7), b"")), 2)

    @property
    def target(self) -> str:
        """`custom_call_target`; "" of anything else."""
        return text(self.fields, 28)

    @property
    def frontend(self) -> Mapping[str, str]:
        """`frontend_attributes`."""
        pairs = (read_fields(p) for m in messages(self.fields, 68) for p in messages(read_fields(m), 1))
        return {text(pair, 1): text(pair, 2) for pair in pairs}

    @functools.cached_property
    def backend(self) -> Mapping[str, Any]:
        """`backend_config` of XLA:GPU; empty where there is none, or it is no JSON object."""
        try:
            found = json.loads(next(messages(self.fields, 43), b"") or b"{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def is_sync(self) -> bool | None:
        """Whether a collective blocks the stream it is issued on; None where XLA does not say."""
        return self.backend.get("collective_backend_config", {}).get("is_sync")

    @property
    def trip_count(self) -> int | None:
        """Iterations of a loop; None where XLA does not know."""
        known = self.backend.get("known_trip_count", {}).get("n")
        return None if known is None else int(known)


class ModuleAttributes:
    """Attributes of a module, each computation's read when it is first asked for.

    Args:
        module: a serialized `HloModuleProto`.

    Attributes:
        entry: name of the computation that runs.
        scheduled: whether the module has a schedule.

    Raises:
        ProgramError: the bytes are no message.
    """

    def __init__(self, module: bytes):
        top = read_fields(module)
        self._computations = {text(c, 1): c for c in map(read_fields, messages(top, 3))}
        self._names = {integer(c, 5): name for name, c in self._computations.items()}
        self._sequences = dict(_sequences(top))
        self._instructions: dict[str, Attributes] = {}
        self._order: dict[str, list[str]] = {}
        self._parents: dict[str, str] = {}
        self.entry = text(top, 2)
        self.scheduled = bool(self._sequences)

    def order(self, computation: str) -> list[str]:
        """Names of a computation's instructions as scheduled; operands first where the module has no schedule."""
        if computation not in self._order:
            self._order[computation] = self._read(computation)
        return self._order[computation]

    def root(self, computation: str) -> int:
        """The id of the instruction whose value a computation gives."""
        return integer(self._computations[computation], 6)

    def of(self, instruction: str) -> Attributes:
        """The attributes of an instruction; names are unique in a module."""
        if instruction not in self._instructions:
            for computation in self._computations:
                self.order(computation)
        return self._instructions[instruction]

    def parent(self, instruction: str) -> str:
        """The computation that an instruction stands in."""
        self.of(instruction)
        return self._parents[instruction]

    def _read(self, name: str) -> list[str]:
        computation = self._computations[name]
        ids: dict[int, str] = {}
        for message in messages(computation, 2):
            fields = read_fields(message)
            instruction = text(fields, 1)
            called = tuple(self._names[i] for i in ints(fields, 38) if i in self._names)
            self._instructions[instruction] = Attributes(instruction, text(fields, 2), called, fields)
            self._parents[instruction] = name
            ids[integer(fields, 35)] = instruction
        sequence = self._sequences.get(integer(computation, 5), [])
        complete = len(sequence) == len(ids) and all(i in ids for i in sequence)
        return [ids[i] for i in sequence] if complete else list(ids.values())


def clean_path(op_name: str) -> str:
    """An op_name path without what the way through `jax.export` put in front of it."""
    path = re.sub(r"(?:jit\(call\)/)?(?:call_exported/)?jit\(exported_step\)/", "", op_name)
    path = re.sub(r"(?:jit\(call\)/)?call_exported(?:[:/]|(?=[)]|$))", "", path)
    return path.replace("jit(call)", "").strip("/:") if path else ""


def _sequences(top: Fields) -> list[tuple[int, list[int]]]:
    """Computation id -> instruction ids in schedule order."""
    schedule = read_fields(next(messages(top, 7), b""))
    pairs = (read_fields(pair) for pair in messages(schedule, 1))
    return [(integer(p, 1), ints(read_fields(next(messages(p, 2), b"")), 1)) for p in pairs]
