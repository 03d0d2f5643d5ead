"""Find the ids that look-ups and scatters of a rehearsal had, and price these kernels with them.

The usual price assumes ids that are spread over the table. A rehearsal has the ids of its own batch. Where a mocked
collective would have brought the ids, the kernels see what memory held: ids beyond the table, for which nothing is read
or added, or ids that are all alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from meshkit.config.cluster import Gpu
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import COLLECTIVES
from meshkit.hlo.proto import HloInstruction, Module, dtype_bits
from meshkit.hlo.schedule import Instruction, Schedule
from meshkit.predict.kernels import kernel_work
from meshkit.report.schema import Report
from meshkit.verbs.rehearse.rehearsal import IDS_FILE

# Additions to one row wait for one another, but all elements of the row are added at once. An H100 makes 165.4
# additions a ns if 16 threads each add to 2,048 neighbouring values of 4 bytes, and 525.6 to 16,384 values (catalog,
# `atomics`). So one wait lasts as long as TURN additions without waits.
TURN = 64 * 32 * 525.6 / 165.4
_DRAWN = 256  # Rehearsals that did not record their ids drew them from so many values.
_HANDS_ON = {
    "add", "and", "bitcast", "broadcast", "clamp", "concatenate", "convert", "copy", "copy-done", "copy-start",
    "dynamic-slice", "fusion", "get-tuple-element", "maximum", "minimum", "multiply", "reshape", "select",
    "shift-right-logical", "slice", "subtract", "transpose",
}  # fmt: skip


@dataclass(frozen=True)
class Ids:
    """The ids of a batch."""

    count: int
    """The number of ids."""
    different: int
    """The number of different ids."""
    most: int
    """The number of times that the most frequent id occurs."""


@dataclass(frozen=True)
class Use:
    """A kernel that looks up rows of a table or adds to them."""

    name: str
    """The name of the kernel's instruction."""
    adds: bool
    """Whether the kernel adds to the rows rather than reading them."""
    rows: int
    """The number of ids."""
    row_bytes: float
    """The bytes of one row of the table."""
    table_rows: int
    """The number of rows of the table."""
    mocked: bool
    """Whether a mocked collective would have brought the ids."""


def ids_of(run: Path) -> Ids | None:
    """Return the ids that a rehearsal recorded of its tokens; None if it recorded none."""
    path = run / IDS_FILE
    found = json.loads(path.read_text(encoding="utf-8")).get("tokens") if path.exists() else None
    return Ids(**found) if found else None


def as_it_ran(
    schedule: Schedule, module: Module, gpu: Gpu, measured: Report, own: Ids | None
) -> tuple[Schedule, dict[str, str]]:
    """Return a program's schedule with its look-ups and scatters priced for the ids that they had.

    Returns:
        the schedule, and for each kernel with mocked ids what memory held instead, by name. Only the measured time
        tells which of the possible contents it was.
    """
    classes = measured.kernels.classes if measured.kernels else ()
    seen = {op.name: op.busy_s / op.count for c in classes for op in c.ops if op.busy_s}
    found, held = {use.name: use for use in uses(module)}, {}

    def priced(i: Instruction) -> Instruction:
        use = found.get(i.name)
        if use is None or i.cost is None or (use.mocked and i.name not in seen):
            return i
        if not use.mocked:
            return replace(i, cost=_present(i.cost, use, own))
        ways = _missing(i.cost, use)
        off = {way: abs(math.log(seen[i.name] / kernel_work(cost, gpu).alone_s)) for way, cost in ways.items()}
        held[i.name] = min(off, key=lambda way: off[way])
        return replace(i, cost=ways[held[i.name]])

    computations = {name: tuple(map(priced, each)) for name, each in schedule.computations.items()}
    return replace(schedule, computations=computations), held


def _present(cost: Cost, use: Use, own: Ids | None) -> Cost:
    """Return the cost with the ids of the batch.

    A row of the table is read once, or read and written. Additions to the most frequent row wait for one another.
    """
    ids = own or Ids(use.rows, min(use.rows, _DRAWN), max(1, use.rows // _DRAWN))
    different, share = min(ids.different, use.table_rows), ids.most / ids.count
    counted = min(use.rows, use.table_rows) if use.adds else use.rows
    again = 0.0 if cost.sectors else (1 + use.adds) * use.row_bytes * max(0, counted - different)
    along, apart = cost.added
    turns = share * use.rows * TURN if along else 0.0
    return replace(cost, bytes_accessed=cost.bytes_accessed - again, added=((1 - share) * along + turns, apart))


def _missing(cost: Cost, use: Use) -> dict[str, Cost]:
    """Return the cost for each content that memory may have held instead of ids.

    Ids beyond the table mean that the kernel's blocks start and end without work; the alternative is that all ids are
    alike.
    """
    held = {"ids beyond the table": 0.0, "ids all alike": use.rows * TURN}
    return {way: replace(cost, bytes_accessed=0.0, added=(added, 0.0)) for way, added in held.items()}


def uses(module: Module) -> Iterator[Use]:
    """Yield the look-ups and scatters of a module that take tokens, except if their ids are sorted or counted first."""
    for i in (i for c in module.computations.values() for i in c.instructions if i.opcode == "fusion"):
        for inner in i.called[0].instructions:
            if inner.opcode not in ("gather", "scatter"):
                continue
            ends = _origins(inner.operands[1], i)
            mocked = "collective" in ends
            if ends and ends <= {"parameter", "collective"} and (inner.opcode == "scatter" or not mocked):
                yield _use(i, inner, mocked)


def _use(fusion: HloInstruction, inner: HloInstruction, mocked: bool) -> Use:
    table, ids = (o.shape for o in inner.operands[:2])
    adds, rows = inner.opcode == "scatter", ids.elements
    width = (inner.operands[-1] if adds else inner).shape.elements // rows
    row_bytes = width * dtype_bits(table.dtype) / 8
    return Use(fusion.name, adds, rows, row_bytes, int(table.bytes / row_bytes), mocked)


def _origins(value: HloInstruction, fusion: HloInstruction | None) -> set[str]:
    """Return where ids come from.

    An origin is `parameter` (of the program or of a loop), `collective`, or the opcode of the instruction that made
    them.
    """
    op = value.opcode
    if op in ("constant", "iota", "partition-id", "compare"):
        return set()
    if op == "parameter" and fusion is not None:
        return _origins(fusion.operands[value.parameter_number], None)
    if op.removesuffix("-start").removesuffix("-done") in {*COLLECTIVES, "async"}:
        return {"collective"}
    if op in _HANDS_ON:
        return set().union(*(_origins(o, fusion) for o in value.operands))
    return {op}
