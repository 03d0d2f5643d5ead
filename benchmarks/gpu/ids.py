"""Which ids look-ups and scatters of a rehearsal had, and what they take with those.

A price is of ids that are spread over the table. A rehearsal has those of its own batch; where a mocked collective
would have brought them, what memory held: ids beyond the table, of which nothing is read or added, or all alike.
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

# Additions to one row take turns, a row of any width at once: to 2,048 neighbours of 4 bytes, 64 lines, an H100 makes
# 165.4 a ns for 16 threads each, where 16,384 take 525.6 (catalog, `atomics`). A turn lasts as long as so many others.
TURN = 64 * 32 * 525.6 / 165.4
_DRAWN = 256  # what rehearsals drew their ids from before they wrote them down
_HANDS_ON = {
    "add", "and", "bitcast", "broadcast", "clamp", "concatenate", "convert", "copy", "copy-done", "copy-start",
    "dynamic-slice", "fusion", "get-tuple-element", "maximum", "minimum", "multiply", "reshape", "select",
    "shift-right-logical", "slice", "subtract", "transpose",
}  # fmt: skip


@dataclass(frozen=True)
class Ids:
    """Those of a batch: how many, how many different ones, the most of one."""

    count: int
    different: int
    most: int


@dataclass(frozen=True)
class Use:
    """A kernel that looks up rows of a table or adds to them."""

    name: str
    adds: bool
    rows: int  # ids
    row_bytes: float  # of the table
    table_rows: int
    mocked: bool  # a mocked collective would have brought the ids


def ids_of(run: Path) -> Ids | None:
    """What a rehearsal wrote down of its tokens; None before it did so."""
    path = run / IDS_FILE
    found = json.loads(path.read_text(encoding="utf-8")).get("tokens") if path.exists() else None
    return Ids(**found) if found else None


def as_it_ran(
    schedule: Schedule, module: Module, gpu: Gpu, measured: Report, own: Ids | None
) -> tuple[Schedule, dict[str, str]]:
    """A program's schedule with what its look-ups and scatters take with the ids that they had.

    Returns:
        the schedule, and by kernel what memory held instead of ids: nothing but the measured time tells which.
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
    """With ids of the batch: a row of the table is read once, or read and written; additions to the most frequent one
    take turns."""
    ids = own or Ids(use.rows, min(use.rows, _DRAWN), max(1, use.rows // _DRAWN))
    different, share = min(ids.different, use.table_rows), ids.most / ids.count
    counted = min(use.rows, use.table_rows) if use.adds else use.rows
    again = 0.0 if cost.sectors else (1 + use.adds) * use.row_bytes * max(0, counted - different)
    along, apart = cost.added
    turns = share * use.rows * TURN if along else 0.0
    return replace(cost, bytes_accessed=cost.bytes_accessed - again, added=((1 - share) * along + turns, apart))


def _missing(cost: Cost, use: Use) -> dict[str, Cost]:
    """What memory held instead: ids beyond the table, so that blocks start and end, or all of them alike."""
    held = {"ids beyond the table": 0.0, "ids all alike": use.rows * TURN}
    return {way: replace(cost, bytes_accessed=0.0, added=(added, 0.0)) for way, added in held.items()}


def uses(module: Module) -> Iterator[Use]:
    """The look-ups and scatters of a module that take tokens; not those whose ids are sorted or counted in between."""
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
    """Where ids come from: `parameter` of the program or of a loop, `collective`, or the opcode of what made them."""
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
