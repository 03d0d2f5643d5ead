"""Two reports side by side: predicted beside measured, or this run beside the last. Layer 6; no jax.

Rows of communication are joined by axes, link, collective and dtype; single ops by name where both reports are about
the same compiled program, else by key, which survives a recompile. How many seconds could be joined is said.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from pydantic import Field
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshkit.errors import ConfigError
from meshkit.report.schema import CommunicationPart, LinkName, OpPart, Part, ProgramPart, Report, Source, StepPart
from meshkit.report.view import WORD, axes_text
from meshkit.units import format_bytes, format_count, format_percent, format_seconds

_ROW_QUANTITIES = ("count", "payload_bytes", "time_s", "overlapped_s", "exposed_s", "busy_s")
_CONDITION = re.compile(r"^\s*([a-z_0-9.]+)\s*(>=|<=|>|<)\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(x?)\s*$")
_HOLDS = {
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
}
_MAX_OPS = 12
_NOTABLE = 0.1  # a ratio further than this from one is printed in bold
_STEP = (
    ("step time", "time_s", format_seconds),
    ("  compute", "compute_s", format_seconds),
    ("  exposed communication", "exposed_s", format_seconds),
    ("  memory copies", "other_s", format_seconds),
    ("  idle", "idle_s", format_seconds),
    ("communication", "communication_s", format_seconds),
    ("  of it overlapped", "overlapped_s", format_seconds),
    ("MFU", "mfu", format_percent),
    ("HFU", "hfu", format_percent),
    ("tokens/s per GPU", "tokens_per_s_per_gpu", format_count),
)
_MEMORY = (("peak memory per GPU", "peak_bytes", format_bytes),)


class Pair(Part):
    """One quantity in both reports; `ratio` is b / a, None where either is unknown or a is zero."""

    a: float | None = None
    b: float | None = None
    ratio: float | None = None


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


class ComparedOp(Part):
    """One collective instruction that is in both reports."""

    key: str
    a_name: str
    b_name: str
    count: Pair
    busy_s: Pair
    exposed_s: Pair


class Comparison(Part):
    """Two reports; sorted so that what differs by the most seconds comes first.

    Attributes:
        step, memory: every number of the two parts.
        joined_by: what ops were joined by.
        joined_share: share of the busy seconds of both reports' ops that found their other half; None without ops.
    """

    schema_: Literal["meshkit.compare/1"] = Field(default="meshkit.compare/1", alias="schema")
    a: ComparedSide
    b: ComparedSide
    step: dict[str, Pair]
    memory: dict[str, Pair]
    communication: tuple[ComparedRow, ...]
    ops: tuple[ComparedOp, ...]
    joined_by: Literal["name", "key"]
    joined_share: float | None

    def to_json(self, *, indent: int | None = 2) -> str:
        """The text that `meshkit compare --json` prints."""
        return self.model_dump_json(indent=indent)


def compare(a: Report, b: Report) -> Comparison:
    """Both reports side by side, b relative to a."""
    fingerprint = a.program.fingerprint
    same_program = fingerprint is not None and fingerprint == b.program.fingerprint
    ops, share = _joined_ops(a, b, by_name=same_program)
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
        joined_by="name" if same_program else "key",
        joined_share=share,
    )


def pair(a: float | None, b: float | None) -> Pair:
    """One quantity of both reports."""
    return Pair(a=a, b=b, ratio=b / a if a and b is not None else None)


def evaluate_condition(comparison: Comparison, text: str) -> bool:
    """Whether a condition such as `exposed_s>1.1x` holds for b.

    Args:
        comparison: of the reference (a) with what is judged (b).
        text: `QUANTITY OP NUMBER`, the quantity a key of `step` or `memory`; an `x` after the number makes it a
            multiple of what a has.

    Raises:
        ConfigError: another form, a quantity that does not exist, or one that is unknown in a report that is needed.
    """
    found = _CONDITION.match(text)
    if not found:
        raise ConfigError(
            f"the condition '{text}' cannot be read.", at=f"--fail-if '{text}'", hint="exposed_s>1.1x, or mfu<0.4"
        )
    name, operator, number, relative = found.groups()
    values = _quantity(comparison, name, text)
    try:
        limit = float(number)
    except ValueError:
        raise ConfigError(f"'{number}' is not a number.", at=f"--fail-if '{text}'") from None
    if relative:
        limit *= _known(values.a, name, "first", text)
    return _HOLDS[operator](_known(values.b, name, "second", text), limit)


def _known(value: float | None, name: str, which: str, text: str) -> float:
    if value is None:
        raise ConfigError(f"{name} is unknown in the {which} report, so '{text}' cannot be judged.")
    return value


def _quantity(comparison: Comparison, name: str, text: str) -> Pair:
    known: dict[str, Pair] = {**comparison.memory, **comparison.step}
    qualified = {f"{part}.{key}": v for part in ("step", "memory") for key, v in getattr(comparison, part).items()}
    if name not in known and name not in qualified:
        close = difflib.get_close_matches(name, known, n=1)
        hint = close[0] if close else ", ".join(list(comparison.step)[:7])
        raise ConfigError(f"there is no quantity '{name}' to compare.", at=f"--fail-if '{text}'", hint=hint)
    return qualified.get(name) or known[name]


def _joined_rows(a: Report, b: Report) -> tuple[ComparedRow, ...]:
    sides = [_rows_by_key(r.communication) for r in (a, b)]
    rows = []
    for key in dict.fromkeys([*sides[0], *sides[1]]):
        values = {
            name: pair(_total(sides[0].get(key), name), _total(sides[1].get(key), name)) for name in _ROW_QUANTITIES
        }
        axes, link, collective, dtype = key
        rows.append(ComparedRow(axes=axes, link=link, collective=collective, dtype=dtype, **values))
    return tuple(sorted(rows, key=lambda row: -_difference(row.time_s)))


def _rows_by_key(rows: Sequence[CommunicationPart]) -> dict[tuple, list[CommunicationPart]]:
    found: dict[tuple, list[CommunicationPart]] = {}
    for row in rows:
        found.setdefault((row.axes, row.link, row.collective, row.dtype), []).append(row)
    return found


def _total(rows: Sequence[CommunicationPart] | None, name: str) -> float | None:
    """The sum over rows that differ only in the shape of their groups; None if there are none, or one is unknown."""
    values = [getattr(row, name) for row in rows or ()]
    return None if not values or None in values else sum(values)


def _joined_ops(a: Report, b: Report, *, by_name: bool) -> tuple[tuple[ComparedOp, ...], float | None]:
    sides = [_ops(r, by_name) for r in (a, b)]
    total = sum(op.busy_s or 0.0 for side in sides for op in side.values())
    common = [key for key in sides[0] if key in sides[1]]
    joined = sum(side[key].busy_s or 0.0 for side in sides for key in common)
    ops = []
    for key in common:
        left, right = sides[0][key], sides[1][key]
        ops.append(
            ComparedOp(
                key=left.key,
                a_name=left.name,
                b_name=right.name,
                count=pair(left.count, right.count),
                busy_s=pair(left.busy_s, right.busy_s),
                exposed_s=pair(left.exposed_s, right.exposed_s),
            )
        )
    ops.sort(key=lambda op: -_difference(op.busy_s))
    return tuple(ops), joined / total if total else None


def _ops(report: Report, by_name: bool) -> Mapping[str, OpPart]:
    return {op.name if by_name else op.key: op for row in report.communication for op in row.ops}


def _difference(values: Pair) -> float:
    return abs((values.b or 0.0) - (values.a or 0.0))


def render(comparison: Comparison) -> RenderableType:
    """The whole comparison, for `rich.print`; what is unknown in both reports is left out."""
    sides = _side_names(comparison)
    named = [(label, comparison.step[key], form) for label, key, form in _STEP]
    named += [(label, comparison.memory[key], form) for label, key, form in _MEMORY]
    parts: list[RenderableType] = [_side_by_side("step", sides, named)]
    if comparison.communication:
        rows = [(_row_name(row), row.time_s, format_seconds) for row in comparison.communication]
        parts.append(_below(_side_by_side("communication: time of each kind", sides, rows)))
        rows = [(_row_name(row), row.exposed_s, format_seconds) for row in comparison.communication]
        parts.append(_below(_side_by_side("  of it exposed", sides, rows)))
    if comparison.ops:
        rows = [(op.b_name, op.busy_s, format_seconds) for op in comparison.ops[:_MAX_OPS]]
        parts.append(_below(_side_by_side("ops that differ by the most seconds", sides, rows)))
    parts.append(_below(Text(_joined_text(comparison), "dim")))
    return Group(*parts)


def _side_names(comparison: Comparison) -> tuple[str, str]:
    a, b = WORD[comparison.a.source], WORD[comparison.b.source]
    return (f"{a} A", f"{b} B") if a == b else (a, b)


def _joined_text(comparison: Comparison) -> str:
    if comparison.joined_share is None:
        return "No single ops to join."
    how = "the same program: joined by name" if comparison.joined_by == "name" else "different programs: joined by key"
    return f"{format_percent(comparison.joined_share)} of the seconds of single ops are in both reports ({how})."


def _row_name(row: ComparedRow) -> str:
    kind = " ".join(part for part in (row.collective or "unknown", row.dtype) if part)
    return f"{axes_text(row.axes)}, {row.link or '-'}: {kind}"


def _side_by_side(title: str, sides: tuple[str, str], rows: Iterable[tuple[str, Pair, Callable]]) -> RenderableType:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column(title, width=44, overflow="fold")
    for name in sides:
        table.add_column(name, width=11, justify="right", no_wrap=True)
    table.add_column("B / A", width=8, justify="right")
    for label, values, form in rows:
        if values.a is not None or values.b is not None:
            table.add_row(label, form(values.a).strip(), form(values.b).strip(), _ratio(values.ratio))
    return table


def _ratio(ratio: float | None) -> Text:
    if ratio is None:
        return Text("-", "dim")
    return Text(f"{ratio:.2f} x" if ratio < 100 else f"{ratio:.0f} x", "bold" if abs(ratio - 1) > _NOTABLE else "")


def _below(renderable: RenderableType) -> RenderableType:
    return Padding(renderable, (1, 0, 0, 0))
