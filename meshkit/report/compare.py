"""Two reports side by side: predicted beside measured, or this run beside the last.

Rows of communication are joined by axes, link, collective and dtype; compute by kind of work; single operations by name
where both reports are about the same compiled program, else by key, which survives a recompile. How many seconds could
be joined is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import Field

from meshkit.report.parts import KernelPart
from meshkit.report.schema import CommunicationPart, LinkName, OpPart, Part, ProgramPart, Report, Source, StepPart

_ROW_QUANTITIES = ("count", "payload_bytes", "time_s", "overlapped_s", "exposed_s", "busy_s")


class Pair(Part):
    """One quantity in both reports; `ratio` is b / a, None where either is unknown or a is zero."""

    a: float | None = None
    b: float | None = None
    ratio: float | None = None

    @property
    def difference(self) -> float:
        """b - a, what is unknown or absent counted as zero."""
        return (self.b or 0.0) - (self.a or 0.0)


class ComparedSide(Part):
    """Which report this side is."""

    source: Source
    program: ProgramPart


class ComparedRow(Part):
    """Communication of one kind over the same axes and link, in both reports; one that has none has None."""

    axes: tuple[str, ...]
    link: LinkName | None
    collective: str | None
    dtype: str | None
    count: Pair
    payload_bytes: Pair
    time_s: Pair
    overlapped_s: Pair
    exposed_s: Pair
    busy_s: Pair

    @property
    def one_sided(self) -> bool:
        """Whether only one report has such communication, so that it is zero in the other, not unknown."""
        return self.count.a is None or self.count.b is None


class ComparedOp(Part):
    """One collective instruction that is in both reports."""

    key: str
    a_name: str
    b_name: str
    axes: tuple[str, ...] = ()
    source: str | None = None
    line: str | None = None
    count: Pair
    busy_s: Pair
    exposed_s: Pair


class ComparedKind(Part):
    """Compute of one kind in both reports."""

    kind: str
    count: Pair
    time_s: Pair
    busy_s: Pair


class ComparedKernel(Part):
    """One compute instruction that is in both reports, of those that they list by name."""

    key: str | None
    kind: str
    a_name: str
    b_name: str
    source: str | None = None
    line: str | None = None
    count: Pair
    busy_s: Pair


class JudgedCondition(Part):
    """A condition that was asked for: whether b meets it, its value, and the limit."""

    condition: str
    met: bool
    value: float
    limit: float
    reference: float | None = None


class Comparison(Part):
    """Two reports; sorted so that what differs by the most seconds comes first.

    Attributes:
        step, memory: every number of the two parts.
        kernels, kernel_ops: compute by kind, and single instructions of it.
        joined_by: what ops were joined by.
        joined_share: share of the busy seconds of both reports' collectives that found their other half; None without
            any.
        kernels_joined_share: the same of compute, over all of it (a report lists only the longest operations).
        conditions: what `--fail-if` asked.
    """

    schema_: Literal["meshkit.compare/1"] = Field(default="meshkit.compare/1", alias="schema")
    a: ComparedSide
    b: ComparedSide
    step: dict[str, Pair]
    memory: dict[str, Pair]
    communication: tuple[ComparedRow, ...]
    ops: tuple[ComparedOp, ...]
    kernels: tuple[ComparedKind, ...] = ()
    kernel_ops: tuple[ComparedKernel, ...] = ()
    joined_by: Literal["name", "key"]
    joined_share: float | None
    kernels_joined_share: float | None = None
    conditions: tuple[JudgedCondition, ...] = ()

    def to_json(self, *, indent: int | None = 2) -> str:
        """The text that `meshkit compare --json` prints."""
        return self.model_dump_json(indent=indent)


def compare(a: Report, b: Report) -> Comparison:
    """Both reports side by side, b relative to a."""
    fingerprint = a.program.fingerprint
    same_program = fingerprint is not None and fingerprint == b.program.fingerprint
    ops, share = _joined_ops(a, b, by_name=same_program)
    kernel_ops, kernels_share = _joined_kernels(a, b, by_name=same_program)
    return Comparison(
        a=ComparedSide(source=a.source, program=a.program),
        b=ComparedSide(source=b.source, program=b.program),
        step={name: pair(getattr(a.step, name), getattr(b.step, name)) for name in StepPart.model_fields},
        memory={
            name: pair(getattr(a.memory, name), getattr(b.memory, name))
            for name in type(a.memory).model_fields
            if name.endswith("_bytes")
        },
        communication=_joined_rows(a, b),
        ops=ops,
        kernels=_joined_kinds(a, b),
        kernel_ops=kernel_ops,
        joined_by="name" if same_program else "key",
        joined_share=share,
        kernels_joined_share=kernels_share,
    )


def pair(a: float | None, b: float | None) -> Pair:
    """One quantity of both reports."""
    return Pair(a=a, b=b, ratio=b / a if a and b is not None else None)


def _joined_rows(a: Report, b: Report) -> tuple[ComparedRow, ...]:
    sides = [_rows_by_key(r.communication) for r in (a, b)]
    rows = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        values = {name: pair(*(total(side.get(key), name) for side in sides)) for name in _ROW_QUANTITIES}
        axes, link, collective, dtype = key
        rows.append(ComparedRow(axes=axes, link=link, collective=collective, dtype=dtype, **values))
    return tuple(sorted(rows, key=lambda row: (-abs(row.exposed_s.difference), -abs(row.time_s.difference))))


def _rows_by_key(rows: Sequence[CommunicationPart]) -> dict[tuple, list[CommunicationPart]]:
    found: dict[tuple, list[CommunicationPart]] = {}
    for row in rows:
        found.setdefault((row.axes, row.link, row.collective, row.dtype), []).append(row)
    return found


def total(rows: Sequence[Part] | None, name: str) -> float | None:
    """The sum of a number over parts of a report; None if there are none, or one is unknown."""
    values = [getattr(row, name) for row in rows or ()]
    return None if not values or None in values else sum(values)


def _joined_ops(a: Report, b: Report, *, by_name: bool) -> tuple[tuple[ComparedOp, ...], float | None]:
    sides = [{(op.name if by_name else op.key): (op, row) for row in r.communication for op in row.ops} for r in (a, b)]
    busy = sum(op.busy_s or 0.0 for side in sides for op, _ in side.values())
    common = [key for key in sides[0] if key in sides[1]]
    joined = sum(side[key][0].busy_s or 0.0 for side in sides for key in common)
    ops = []
    for key in common:
        (left, row), (right, _) = sides[0][key], sides[1][key]
        ops.append(
            ComparedOp(
                key=left.key,
                a_name=left.name,
                b_name=right.name,
                axes=row.axes,
                source=right.source or left.source,
                line=right.line or left.line,
                **_pairs(left, right, ("count", "busy_s", "exposed_s")),
            )
        )
    ops.sort(key=lambda op: (-abs(op.exposed_s.difference), -abs(op.busy_s.difference)))
    return tuple(ops), joined / busy if busy else None


def _joined_kinds(a: Report, b: Report) -> tuple[ComparedKind, ...]:
    sides = [{c.kind: c for c in r.kernels.classes} if r.kernels else {} for r in (a, b)]
    if not all(sides):
        return ()
    kinds = [
        ComparedKind(kind=kind, **_pairs(sides[0].get(kind), sides[1].get(kind), ("count", "time_s", "busy_s")))
        for kind in dict.fromkeys([*sides[0], *sides[1]])
    ]
    return tuple(sorted(kinds, key=lambda k: -abs(k.time_s.difference)))


def _joined_kernels(a: Report, b: Report, *, by_name: bool) -> tuple[tuple[ComparedKernel, ...], float | None]:
    sides = [_kernels(r, by_name) for r in (a, b)]
    if not all(sides):
        return (), None
    common = [key for key in sides[0] if key in sides[1]]
    joined = sum(side[key][0].busy_s or 0.0 for side in sides for key in common)
    busy = sum(c.busy_s or 0.0 for r in (a, b) if r.kernels for c in r.kernels.classes)
    ops = []
    for key in common:
        (left, kind), (right, _) = sides[0][key], sides[1][key]
        ops.append(
            ComparedKernel(
                key=left.key,
                kind=kind,
                a_name=left.name,
                b_name=right.name,
                source=right.source or left.source,
                line=right.line or left.line,
                **_pairs(left, right, ("count", "busy_s")),
            )
        )
    ops.sort(key=lambda op: -abs(op.busy_s.difference))
    return tuple(ops), joined / busy if busy else None


def _kernels(report: Report, by_name: bool) -> Mapping[str, tuple[KernelPart, str]]:
    classes = report.kernels.classes if report.kernels else ()
    named = [(op.name if by_name else op.key, op, c.kind) for c in classes for op in c.ops]
    return {key: (op, kind) for key, op, kind in named if key}


def _pairs(a: OpPart | Part | None, b: OpPart | Part | None, names: Iterable[str]) -> dict[str, Pair]:
    return {name: pair(getattr(a, name, None), getattr(b, name, None)) for name in names}
