"""A comparison on a terminal: 80 columns are enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshkit.report.compare import ComparedRow, Comparison, Pair
from meshkit.report.views.words import WORD, axes_text
from meshkit.units import format_bytes, format_count, format_percent, format_seconds

Form = Callable[[float | None], str]
# label, values, how they are written, and whether what is not there is zero (else it is unknown)
Line = tuple[str, Pair, Form, bool]
_MAX_OPS = 12
_NOTABLE = 0.1  # a ratio further than this from one is printed in bold
STEP: Sequence[tuple[str, str, Form]] = (
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
MEMORY: Sequence[tuple[str, str, Form]] = (("peak memory per GPU", "peak_bytes", format_bytes),)


def render(comparison: Comparison) -> RenderableType:
    """The whole comparison, for `rich.print`; what is unknown in both reports is left out."""
    sides = side_names(comparison)
    named: list[Line] = [(label, comparison.step[key], form, False) for label, key, form in STEP]
    named += [(label, comparison.memory[key], form, False) for label, key, form in MEMORY]
    parts: list[RenderableType] = [_side_by_side("step", sides, named)]

    def add(title: str, rows: Sequence[Line]) -> None:
        if rows:
            parts.append(Padding(_side_by_side(title, sides, rows), (1, 0, 0, 0)))

    rows = comparison.communication
    add("communication: time of each kind", [(row_text(r), r.time_s, format_seconds, r.one_sided) for r in rows])
    add("  of it exposed", [(row_text(r), r.exposed_s, format_seconds, r.one_sided) for r in rows])
    add("collectives, busy", [(op.b_name, op.busy_s, format_seconds, True) for op in comparison.ops[:_MAX_OPS]])
    add("compute: time of each kind", [(k.kind, k.time_s, format_seconds, True) for k in comparison.kernels])
    kernels = [(f"{op.b_name} ({op.kind})", op.busy_s, format_seconds, True) for op in comparison.kernel_ops[:_MAX_OPS]]
    add("operations, busy", kernels)
    parts.append(Padding(Text(joined_text(comparison), "dim"), (1, 0, 0, 0)))
    return Group(*parts)


def side_names(comparison: Comparison) -> tuple[str, str]:
    """`predicted`, `measured`; two of a kind are A and B."""
    a, b = WORD[comparison.a.source], WORD[comparison.b.source]
    return (f"{a} A", f"{b} B") if a == b else (a, b)


def joined_text(comparison: Comparison) -> str:
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
    how = "the same program: joined by name" if comparison.joined_by == "name" else "different programs: joined by key"
    text = " and ".join(shares)
    return f"In both reports: {text} ({how}). The largest difference comes first."


def row_text(row: ComparedRow) -> str:
    """`fsdp, nvlink: all-gather bf16`."""
    kind = " ".join(part for part in (row.collective or "unknown", row.dtype) if part)
    return f"{axes_text(row.axes)}, {row.link or '-'}: {kind}"


def difference_text(values: Pair, form: Form, *, absent_is_zero: bool = True) -> str:
    """`+12.0 ms`; an operation that only one side has counts as zero on the other, a quantity that is unknown not."""
    if not absent_is_zero and (values.a is None or values.b is None):
        return "-"
    text = form(abs(values.difference)).strip()
    return f"{'+' if values.difference > 0 else '-'}{text}" if values.difference else text


def ratio_text(ratio: float | None) -> str:
    """`1.20 x`."""
    if ratio is None:
        return "-"
    if ratio >= 10_000:
        return ">9999 x"
    return f"{ratio:.2f} x" if ratio < 100 else f"{ratio:.0f} x"


def _side_by_side(title: str, sides: tuple[str, str], rows: Iterable[Line]) -> RenderableType:
    table = Table(box=None, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column(title, width=36, overflow="fold")
    for name in sides:
        table.add_column(name, width=10, justify="right", no_wrap=True)
    table.add_column("B - A", width=9, justify="right", no_wrap=True)
    table.add_column("B / A", width=8, justify="right")
    for label, values, form, absent_is_zero in rows:
        if values.a is not None or values.b is not None:
            notable = values.ratio is not None and abs(values.ratio - 1) > _NOTABLE
            ratio = Text(ratio_text(values.ratio), "bold" if notable else "dim" if values.ratio is None else "")
            difference = difference_text(values, form, absent_is_zero=absent_is_zero)
            numbers = (form(values.a).strip(), form(values.b).strip(), difference)
            table.add_row(label, *numbers, ratio)
    return table
