"""Two reports side by side, on a terminal (80 columns are enough) and as a panel of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from meshkit.report.compare import Comparison, Pair, compare
from meshkit.report.schema import Report
from meshkit.report.views.page import folded, section
from meshkit.report.views.table import Cell, Column, Numbers, Source, Table, text_columns
from meshkit.report.views.words import axes_text, names_of, row_name
from meshkit.units import format_bytes, format_count, format_percent, format_seconds

DOCUMENT = "compare"
Form = Callable[[float | None], str]
# label, where the pair stands, how it is written, and whether what is not there is zero (else it is unknown)
Line = tuple[str, str, Form, bool]
_MAX_OPS = 12  # on a terminal
_MAX_OPS_OF_PAGE = 30
_NOTABLE = 0.1  # a ratio further than this from one is printed in bold
_QUANTITIES: Sequence[Line] = (
    ("step time", "step.time_s", format_seconds, False),
    ("  compute", "step.compute_s", format_seconds, False),
    ("  exposed communication", "step.exposed_s", format_seconds, False),
    ("  memory copies", "step.other_s", format_seconds, False),
    ("  idle", "step.idle_s", format_seconds, False),
    ("communication", "step.communication_s", format_seconds, False),
    ("  of it overlapped", "step.overlapped_s", format_seconds, False),
    ("MFU", "step.mfu", format_percent, False),
    ("HFU", "step.hfu", format_percent, False),
    ("tokens/s per GPU", "step.tokens_per_s_per_gpu", format_count, False),
    ("peak memory per GPU", "memory.peak_bytes", format_bytes, False),
)


def render(comparison: Comparison) -> RenderableType:
    """The whole comparison, for `rich.print`; what is unknown in both reports is left out."""
    kernels = [f"{op.b_name} ({op.kind})" for op in comparison.kernel_ops[:_MAX_OPS]]
    ops = [op.b_name for op in comparison.ops[:_MAX_OPS]]
    tables = [
        _known(comparison, "communication: time of each kind", _rows(comparison, "time_s")),
        _known(comparison, "  of it exposed", _rows(comparison, "exposed_s")),
        _known(comparison, "collectives, busy", _numbered("ops.{}.busy_s", ops)),
        _known(comparison, "compute: time of each kind", _kinds(comparison)),
        _known(comparison, "operations, busy", _numbered("kernel_ops.{}.busy_s", kernels)),
    ]
    below = [*(table.terminal() for table in tables if table.rows), Text(_joined_text(comparison), "dim")]
    first = [Text(comparison.verdict, "bold"), Text()] if comparison.verdict else []
    return Group(
        *first, _known(comparison, "step", _QUANTITIES).terminal(), *(Padding(part, (1, 0, 0, 0)) for part in below)
    )


def compared_section(a: Report, b: Report) -> str:
    """The page's panel: step, rows, kinds of work and single operations, the largest difference first."""
    found = compare(a, b)
    sides = _sides(found)
    parts = [_known(found, "per step and GPU", _QUANTITIES).html()]
    for table in (
        _known(found, "exposed communication", _rows(found, "exposed_s")),
        _known(found, "communication, overlapped or not", _rows(found, "time_s")),
        _known(found, "compute by kind of work", _kinds(found)),
    ):
        parts.append(table.html() if table.rows else "")
    ops = [((op.b_name,), Source(op.source, op.line)) for op in found.ops]
    parts.append(_operations(found, "collectives", text_columns("collective"), "ops.{}.exposed_s", ops))
    kernels = [((op.b_name, op.kind), Source(op.source, op.line)) for op in found.kernel_ops]
    heads = text_columns("operation", "kind")
    parts.append(_operations(found, "compute operations", heads, "kernel_ops.{}.busy_s", kernels))
    said = f"{found.verdict} " if found.verdict else ""
    note = f"{said}{_joined_text(found)} Difference: what the second has more than the first."
    return section(f"{sides[0][0].upper()}{sides[0][1:]} beside {sides[1]}", note, *parts)


def _known(comparison: Comparison, title: str, lines: Iterable[Line]) -> Table:
    """The lines of which either report knows the quantity."""
    number = Numbers(DOCUMENT, comparison)
    known = [line for line in lines if (values := number.value(line[1])).a is not None or values.b is not None]
    columns = [Column(title, words=True, width=36), *_columns(*_sides(comparison))]
    return Table(columns, [(label, *_cells(number, key, form, zero)) for label, key, form, zero in known])


def _rows(comparison: Comparison, key: str) -> list[Line]:
    found = []
    for i, row in enumerate(comparison.communication):
        label = f"{axes_text(row.axes)}, {row.link or '-'}: {row_name(row)}"
        found.append((label, f"communication.{i}.{key}", format_seconds, row.one_sided))
    return found


def _kinds(comparison: Comparison) -> list[Line]:
    return _numbered("kernels.{}.time_s", [k.kind for k in comparison.kernels])


def _numbered(key: str, labels: Iterable[str]) -> list[Line]:
    return [(label, key.format(i), format_seconds, True) for i, label in enumerate(labels)]


def _operations(
    comparison: Comparison, what: str, heads: list[Column], key: str, ops: Sequence[tuple[tuple[str, ...], Source]]
) -> str:
    """Single operations, folded, with what caused them; empty without any."""
    if not ops:
        return ""
    number, sides = Numbers(DOCUMENT, comparison), _sides(comparison)
    quantity = "exposed" if key.endswith("exposed_s") else "busy"
    rows = [
        (*names, *_cells(number, key.format(i), format_seconds, True), source)
        for i, (names, source) in enumerate(ops[:_MAX_OPS_OF_PAGE])
    ]
    columns = [*heads, *_columns(f"{quantity}, {sides[0]}", sides[1]), *text_columns("caused by")]
    return folded(f"The {len(rows)} {what} whose {quantity} seconds differ most", Table(columns, rows).html())


def _columns(a: str, b: str) -> list[Column]:
    sides = [Column(name, width=10, clip=True) for name in (a, b)]
    return [*sides, Column("difference", short="B - A", width=9, clip=True), Column("ratio", short="B / A", width=8)]


def _cells(number: Numbers, key: str, form: Form, absent_is_zero: bool) -> list[Cell]:
    values: Pair = number.value(key)
    ratio = number(f"{key}.ratio", _ratio_text)
    style = "dim" if values.ratio is None else "bold" if abs(values.ratio - 1) > _NOTABLE else ""
    difference = _difference_text(values, form, absent_is_zero)
    return [number(f"{key}.a", form), number(f"{key}.b", form), difference, replace(ratio, style=style)]


def _sides(comparison: Comparison) -> list[str]:
    return names_of([comparison.a.source, comparison.b.source])


def _joined_text(comparison: Comparison) -> str:
    """How much of the seconds of single operations found their other half."""
    shares = [
        f"{format_percent(share)} of the seconds of single {what}"
        for share, what in (
            (comparison.joined_share, "collectives"),
            (comparison.kernels_joined_share, "compute operations"),
        )
        if share is not None
    ]
    if not shares:
        return "No single operations to join."
    if not comparison.joined_share and not comparison.kernels_joined_share:
        return "No single operation is in both reports: they are of different programs."
    how = "the same program: joined by name" if comparison.joined_by == "name" else "different programs: joined by key"
    text = " and ".join(shares)
    return f"In both reports: {text} ({how}). The largest difference comes first."


def _difference_text(values: Pair, form: Form, absent_is_zero: bool) -> str:
    """`+12.0 ms`; an operation that only one side has counts as zero on the other, a quantity that is unknown not."""
    if not absent_is_zero and (values.a is None or values.b is None):
        return "-"
    text = form(abs(values.difference)).strip()
    return f"{'+' if values.difference > 0 else '-'}{text}" if values.difference else text


def _ratio_text(ratio: float | None) -> str:
    """`1.20 x`."""
    if ratio is None:
        return "-"
    if ratio >= 10_000:
        return ">9999 x"
    return f"{ratio:.2f} x" if ratio < 100 else f"{ratio:.0f} x"
