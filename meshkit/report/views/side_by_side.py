"""The panel of two reports side by side: where B (the measurement) differs from A, by seconds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from meshkit.report.compare import Comparison, Pair, compare
from meshkit.report.schema import Report
from meshkit.report.views.compare_terminal import (
    MEMORY,
    STEP,
    Form,
    difference_text,
    joined_text,
    ratio_text,
    row_text,
    side_names,
)
from meshkit.report.views.page import Document, Text, cells, section, table
from meshkit.report.views.panels import source_cell
from meshkit.units import format_seconds

DOCUMENT = "compare"
_MAX_OPS = 30


def beside_section(a: Report, b: Report) -> str:
    """Step, rows, kinds of work and single operations of both reports, the largest difference first."""
    found = compare(a, b)
    number = Document(DOCUMENT, found)
    sides = side_names(found)
    parts = [_step(found, number, sides)]
    communication = list(enumerate(found.communication))
    rows = [(row_text(r), f"communication.{i}.exposed_s", r.exposed_s, r.one_sided) for i, r in communication]
    parts.append(_pairs("exposed communication", rows, number, sides))
    rows = [(row_text(r), f"communication.{i}.time_s", r.time_s, r.one_sided) for i, r in communication]
    parts.append(_pairs("communication, overlapped or not", rows, number, sides))
    kinds = [(k.kind, f"kernels.{i}.time_s", k.time_s, True) for i, k in enumerate(found.kernels)]
    parts.append(_pairs("compute by kind of work", kinds, number, sides))
    parts += [_ops(found, number, sides), _kernels(found, number, sides)]
    note = f"{joined_text(found)} Difference: what the second has more than the first."
    return section(f"{sides[0][0].upper()}{sides[0][1:]} beside {sides[1]}", note, *parts)


def _step(found: Comparison, number: Document, sides: Sequence[str]) -> str:
    rows = []
    for label, part, key, form in _lines():
        values: Pair = getattr(found, part)[key]
        if values.a is None and values.b is None:
            continue
        rows.append(cells("td", (label,), _numbers(f"{part}.{key}", values, number, form, absent_is_zero=False)))
    return table(cells("th", ("per step and GPU",), (*sides, "difference", "ratio")), rows)


def _lines() -> list[tuple[str, str, str, Form]]:
    step = [(label.strip(), "step", key, form) for label, key, form in STEP]
    return step + [(label, "memory", key, form) for label, key, form in MEMORY]


def _pairs(title: str, rows: Sequence[tuple[str, str, Pair, bool]], number: Document, sides: Sequence[str]) -> str:
    shown = [
        cells("td", (label,), _numbers(key, values, number, format_seconds, absent_is_zero=zero))
        for label, key, values, zero in rows
        if values.a is not None or values.b is not None
    ]
    return table(cells("th", (title,), (*sides, "difference", "ratio")), shown) if shown else ""


def _numbers(
    key: str, values: Pair, number: Document, form: Form, *, absent_is_zero: bool = True
) -> tuple[Text, Text, Text, Text]:
    difference = difference_text(values, form, absent_is_zero=absent_is_zero)
    return (number(f"{key}.a", form), number(f"{key}.b", form), difference, number(f"{key}.ratio", ratio_text))


def _ops(found: Comparison, number: Document, sides: Sequence[str]) -> str:
    head = cells("th", ("collective",), (f"exposed, {sides[0]}", sides[1], "difference", "ratio"))
    rows = [
        cells("td", (op.b_name,), _numbers(f"ops.{i}.exposed_s", op.exposed_s, number, format_seconds))
        + source_cell(op.source, op.line)
        for i, op in enumerate(found.ops[:_MAX_OPS])
    ]
    return _folded(f"The {len(rows)} collectives whose exposed seconds differ most", head, rows)


def _kernels(found: Comparison, number: Document, sides: Sequence[str]) -> str:
    head = cells("th", ("operation", "kind"), (f"busy, {sides[0]}", sides[1], "difference", "ratio"))
    rows = [
        cells("td", (op.b_name, op.kind), _numbers(f"kernel_ops.{i}.busy_s", op.busy_s, number, format_seconds))
        + source_cell(op.source, op.line)
        for i, op in enumerate(found.kernel_ops[:_MAX_OPS])
    ]
    return _folded(f"The {len(rows)} compute operations whose busy seconds differ most", head, rows)


def _folded(title: str, head: str, rows: Sequence[str]) -> str:
    head += cells("th", ("caused by",), ())
    return f"<details><summary>{escape(title)}</summary>{table(head, rows)}</details>" if rows else ""
