"""The report on a terminal: 80 columns are enough, and colour is not needed to read it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshkit.report.goodput_part import goodput_shares, goodput_text
from meshkit.report.parts import GoodputPart
from meshkit.report.schema import CommunicationPart, OpPart, Report
from meshkit.report.views.pipeline_view import pipeline_lines
from meshkit.report.views.words import (
    WORD,
    Share,
    axes_text,
    facts,
    group_text,
    grouped_rows,
    link_text,
    memory_shares,
    most_exposed,
    quality_text,
    row_cells,
    row_name,
    short_source,
    spread_text,
    step_shares,
    waiting_lines,
)
from meshkit.units import format_bytes, format_percent, format_seconds

WIDTH = 78
# each part differs in shade as well as in colour, so that a log file or a colour-blind reader loses nothing
_STYLES = {
    "compute": ("█", "green"),
    "exposed": ("▓", "red"),
    "other": ("▒", "yellow"),
    "idle": ("░", "bright_black"),
    # of the memory bar each part has a mark of its own, since a pipe has no colour
    "parameters": ("█", "blue"),
    "optimizer": ("▓", "cyan"),
    "gradients": ("▒", "magenta"),
    "activations": ("░", "green"),
    "temporary": ("▚", "yellow"),
    "rest": ("=", "bright_black"),
    "cudnn": ("c", "bright_black"),
    "fragmentation": ("f", "bright_black"),
    "context": ("u", "bright_black"),
    "nccl": ("n", "bright_black"),
    "reserved": ("x", "bright_black"),
    "free": ("·", "bright_black"),
    # of the run's wall time
    "step": ("█", "green"),
    "data_wait": ("d", "yellow"),
    "evaluate": ("e", "cyan"),
    "checkpoint": ("▓", "magenta"),
    "start": ("s", "bright_black"),
    "compile": ("c", "blue"),
    "restore": ("r", "bright_black"),
    "init": ("i", "bright_black"),
    "lost": ("x", "red"),
    "restart": ("░", "red"),
}
_MAX_KINDS = 8
_MAX_EXPOSED = 6
_COLUMNS = (
    ("collective", 24),
    ("count", 5),
    ("payload", 9),
    ("time", 8),
    ("overlapped", 10),
    ("exposed", 8),
    ("bus bw", 9),
)


def render(report: Report, *, title: str | None = None) -> RenderableType:
    """The whole report, for `rich.print`; `title` says what it is about (an experiment, a run)."""
    parts: list[RenderableType] = [_headline(report, title)]
    if report.step.time_s:
        parts += [_heading("step time"), _step_bar(report)]
    parts += [_heading("communication a step, per GPU"), _communication(report)]
    if exposed := most_exposed(report, _MAX_EXPOSED):
        parts += [_heading("the most exposed, and what caused it"), _exposed_ops(exposed)]
    if waiting := waiting_lines(report):
        parts += [_heading("waiting for peers"), *(Text(line, overflow="fold") for line in waiting)]
    if report.kernels and report.step.compute_s:
        parts += [_heading("compute by kind of work"), _kernels(report)]
    if report.pipeline is not None:
        parts += [_heading("pipeline"), *map(Text, pipeline_lines(report))]
    if report.memory.peak_bytes is not None:
        parts += [_heading("memory of the fullest GPU"), _memory(report)]
    if report.goodput is not None:
        parts += [_heading("goodput of the run"), _goodput(report.goodput)]
    if found := quality_text(report):
        parts += [_heading("data quality"), Text(found, overflow="fold")]
    if report.warnings:
        parts += [_heading("warnings"), *(_warning(w.message) for w in report.warnings)]
    return Group(*parts)


def bar(shares: Sequence[Share], total: float, width: int = WIDTH) -> Text:
    """A bar of one line; a part that is not zero shows as one cell at least, and the largest gives way for it."""
    cells = [max(1, round(width * (s.value or 0) / total)) if (s.value or 0) > 0 else 0 for s in shares]
    if cells:
        cells[cells.index(max(cells))] -= max(0, sum(cells) - width)
    text = Text()
    for share, n in zip(shares, cells):
        symbol, style = _STYLES[share.key]
        text.append(symbol * n, style)
    return text


def _heading(text: str) -> RenderableType:
    return Padding(Text(text, "bold"), (1, 0, 0, 0))


def _headline(report: Report, title: str | None) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold", max_width=WIDTH - 12)
    for label, text in facts(report):
        style = "bold red" if label == "memory" and report.memory.fits is False else ""
        table.add_row(label, Text(text, style))
    return Group(Text(f"{title}, {WORD[report.source]}" if title else WORD[report.source], "bold underline"), table)


def _step_bar(report: Report) -> RenderableType:
    total = report.step.time_s or 0.0
    shares = step_shares(report)
    hidden = (
        f"{format_seconds(report.step.overlapped_s)} of {format_seconds(report.step.communication_s)} communication"
    )
    legend = _legend(shares, total, format_seconds)
    lines = [Text(f"{hidden} lie under compute", "dim")]
    if spread := spread_text(report):
        lines.append(Text(spread, "dim"))
    return Group(bar(shares, total), legend, *lines)


def _legend(shares: Sequence[Share], total: float | None, form) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    for share in shares:
        symbol, style = _STYLES[share.key]
        percent = format_percent(share.value / total) if share.value is not None and total else ""
        table.add_row(Text(symbol, style), share.label, Text(form(share.value), justify="right"), Text(percent, "dim"))
    return table


def _communication(report: Report) -> RenderableType:
    groups = grouped_rows(report)
    if not groups:
        return Text("none", "dim")
    parts: list[RenderableType] = [_cells([name for name, _ in _COLUMNS], "dim")]
    for rows in groups:
        parts.append(_group_title(rows[0]))
        parts += [_cells([f"  {row_name(row)}", *row_cells(row)], exposed=bool(row.exposed_s)) for row in rows]
    return Group(*parts)


def _group_title(row: CommunicationPart) -> Text:
    title = Text(axes_text(row.axes), "bold cyan" if row.axes else "bold yellow")
    details = [text for text in (link_text(row), group_text(row)) if text and text != "-"]
    return title.append(f"  {', '.join(details)}" if details else "", "dim")


def _cells(texts: Sequence[str], style: str = "", *, exposed: bool = False) -> RenderableType:
    """One line of the table; all lines have the same fixed widths, so that titles may stand between them."""
    table = Table.grid(padding=(0, 1))
    for i, (name, width) in enumerate(_COLUMNS):
        shown = "red" if exposed and name == "exposed" else style
        table.add_column(width=width, justify="right" if i else "left", style=shown, overflow="fold")
    table.add_row(*texts)
    return table


def _exposed_ops(ops: Sequence[tuple[CommunicationPart, OpPart]]) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=8, justify="right", style="red")
    for width in (13, 17):
        table.add_column(width=width, overflow="ellipsis", no_wrap=True)
    table.add_column(width=WIDTH - 41, overflow="ellipsis", no_wrap=True, style="dim")
    for row, op in ops:
        line = (op.line or "").rpartition(" from ")[2]
        path = "/".join(short_source(op.source).rstrip(")").split("/")[-2:])
        caused = " ".join(text for text in (line, path) if text) or "-"
        table.add_row(format_seconds(op.exposed_s), axes_text(row.axes), op.name, caused)
    return table


def _kernels(report: Report) -> RenderableType:
    """The kinds of work with the most time, each with a bar of its share of compute."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=20)
    for _ in range(2):
        table.add_column(width=8, justify="right")
    total = report.step.compute_s or 0.0
    for c in (report.kernels.classes if report.kernels else ())[:_MAX_KINDS]:
        share = (c.time_s or 0.0) / total
        table.add_row(c.kind, format_seconds(c.time_s), format_percent(share), Text("█" * round(36 * share), "green"))
    return table


def _memory(report: Report) -> RenderableType:
    m = report.memory
    shares = memory_shares(report)
    used = sum(s.value or 0 for s in shares)
    total = max(used, m.capacity_bytes or m.pool_bytes or used)
    free = [Share("free", "free", total - used)] if total > used else []
    limits = f"capacity {format_bytes(m.capacity_bytes)}, of which the program may take {format_bytes(m.pool_bytes)}"
    return Group(bar([*shares, *free], total), _legend(shares, total, format_bytes), Text(limits, "dim"))


def _goodput(part: GoodputPart) -> RenderableType:
    shares = goodput_shares(part)
    total = part.wall_s or 0.0
    return Group(bar(shares, total), _legend(shares, total, format_seconds), Text(goodput_text(part), "dim"))


def _warning(message: str) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("!", "bold yellow"), Text(message))
    return table
