"""The report on a terminal: 80 columns are enough, and colour is not needed to read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import rich.table
from rich.console import Group, RenderableType
from rich.text import Text

from meshkit.report.schema import CommunicationPart, GoodputPart, Report
from meshkit.report.views.table import Column, Source, Table, Value, below_titles, heading, labelled, listed
from meshkit.report.views.tables import Shown, kinds_table, ops_table, rows_table
from meshkit.report.views.words import (
    WORD,
    Share,
    axes_text,
    facts,
    goodput_shares,
    goodput_text,
    group_text,
    link_text,
    memory_shares,
    pipeline_lines,
    quality_text,
    report_shares,
    share_text,
    spread_text,
    waiting_lines,
)
from meshkit.units import format_bytes, format_percent, format_seconds

WIDTH = 78
_MAX_KINDS = 8
_MAX_EXPOSED = 6
_MAX_FINDINGS = 6
_COLUMNS = (
    Column("collective", words=True, width=24),
    Column("count", width=5),
    Column("payload", width=9),
    Column("time", width=8),
    Column("overlapped", width=10),
    Column("exposed", width=8),
    Column("bus bw", width=9),
)
_EXPOSED_COLUMNS = (
    Column("exposed", width=8),
    Column("axes", words=True, width=13, clip=True),
    Column("operation", words=True, width=17, clip=True),
    Column("caused by", words=True, width=WIDTH - 41, clip=True),
)


def render(report: Report, *, title: str | None = None) -> RenderableType:
    """The whole report, for `rich.print`; `title` says what it is about (an experiment, a run)."""
    shown = Shown(report)
    said = report.verdict if report.source == "profile" else None  # a plan's stands on its page
    parts: list[RenderableType] = [Text(said, "bold"), Text()] if said else []
    parts.append(_headline(report, title))
    if report.findings:
        parts += [heading("findings, by what they cost a step"), *_findings(report)]
    if report.step.time_s and report.step.compute_s is not None:
        parts += [heading("step time"), _step_bar(report)]
    parts += [heading("communication a step, per GPU"), _communication(shown)]
    if exposed := _exposed_ops(shown):
        parts += [heading("the most exposed, and what caused it"), exposed]
    if waiting := waiting_lines(report):
        parts += [heading("waiting for peers"), *(Text(line, overflow="fold") for line in waiting)]
    if report.kernels and report.step.compute_s:
        parts += [heading("compute by kind of work"), _kinds(shown, report.step.compute_s)]
    if report.pipeline is not None:
        parts += [heading("pipeline"), *map(Text, pipeline_lines(report))]
    if report.memory.peak_bytes is not None:
        parts += [heading("memory of the fullest GPU"), _memory(report)]
    if report.goodput is not None:
        parts += [heading("goodput of the run"), _goodput(report.goodput)]
    if found := quality_text(report):
        parts += [heading("data quality"), Text(found, overflow="fold")]
    if report.warnings:
        parts += [heading("warnings"), *listed((w.message for w in report.warnings), "!", "bold yellow")]
    return Group(*parts)


def _findings(report: Report) -> Iterator[RenderableType]:
    """What the step loses its time to, the most first, each with what to try, which is said once."""
    said: set[str] = set()
    for f in report.findings[:_MAX_FINDINGS]:
        mark, style = ("!", "bold yellow") if f.severity == "warning" else ("-", "cyan")
        text = Text.assemble((f"{format_seconds(f.seconds)} {f.code}", style), f": {f.message}")
        if f.hint and f.hint not in said:
            text.append(f" Try {f.hint}.", "dim")
            said.add(f.hint)
        yield from listed([text], mark, style)


def bar(shares: Sequence[Share], total: float, width: int = WIDTH) -> Text:
    """A bar of one line; a part that is not zero shows as one cell at least, and the largest gives way for it."""
    cells = [max(1, round(width * (s.value or 0) / total)) if (s.value or 0) > 0 else 0 for s in shares]
    if cells:
        cells[cells.index(max(cells))] -= max(0, sum(cells) - width)
    text = Text()
    for share, n in zip(shares, cells):
        text.append(share.look.mark * n, share.look.style)
    return text


def _headline(report: Report, title: str | None) -> RenderableType:
    unfit = report.memory.fits is False
    rows = [(label, Text(text, "bold red" if label == "memory" and unfit else "")) for label, text in facts(report)]
    headline = Text(f"{title}, {WORD[report.source]}" if title else WORD[report.source], "bold underline")
    return Group(headline, labelled(rows, WIDTH - 12))


def _step_bar(report: Report) -> RenderableType:
    total = report.step.time_s or 0.0
    shares = report_shares(report)
    hidden = (
        f"{format_seconds(report.step.overlapped_s)} of {format_seconds(report.step.communication_s)} communication"
    )
    legend = _legend(shares, total, format_seconds)
    lines = [Text(f"{hidden} lie under compute", "dim")]
    if spread := spread_text(report):
        lines.append(Text(spread, "dim"))
    return Group(bar(shares, total), legend, *lines)


def _legend(shares: Sequence[Share], total: float | None, form) -> RenderableType:
    table = rich.table.Table.grid(padding=(0, 1))
    for share in shares:
        percent = share_text(share.value, total, unknown="")
        numbers = (Text(form(share.value), justify="right"), Text(percent, "dim"))
        table.add_row(Text(share.look.mark, share.look.style), share.label, *numbers)
    return table


def _communication(shown: Shown) -> RenderableType:
    """Rows over the same axes, link and shape of group together, the group with the most exposed time first."""
    communication = shown.report.communication
    if not communication:
        return Text("none", "dim")
    groups: dict[tuple, list[int]] = {}
    for i, row in enumerate(communication):
        shape = (row.group_size, row.num_groups, row.gpus_per_domain, row.axes_complete, row.replica_groups)
        key = (row.axes, row.link, row.fabric, *shape)
        groups.setdefault(key, []).append(i)
    rows = rows_table(shown).pick(*_COLUMNS).rows
    ordered = sorted(groups.values(), key=lambda members: -sum(communication[i].exposed_s or 0 for i in members))
    return below_titles(
        _COLUMNS,
        [(_group_title(communication[m[0]]), Table(_COLUMNS, [rows[i] for i in m])) for m in ordered],
    )


def _exposed_ops(shown: Shown) -> RenderableType | None:
    """The single collectives with the most exposed seconds; None where all of them hide, or no cause is known."""
    rows = ops_table(shown).pick(*_EXPOSED_COLUMNS).rows
    exposed = [row for row in rows if isinstance(row[0], Value) and row[0].value][:_MAX_EXPOSED]
    known = any(isinstance(row[-1], Source) and row[-1].text != "-" for row in exposed)
    return Table(_EXPOSED_COLUMNS, exposed).terminal(gap=1, header=None) if known else None


def _group_title(row: CommunicationPart) -> Text:
    title = Text(axes_text(row.axes), "bold cyan" if row.axes else "bold yellow")
    details = [text for text in (link_text(row), group_text(row)) if text and text != "-"]
    return title.append(f"  {', '.join(details)}" if details else "", "dim")


def _kinds(shown: Shown, compute_s: float) -> RenderableType:
    """The kinds of work with the most time, each with a bar of its share of compute."""
    columns = (Column("kind of work", words=True, width=20), Column("time", width=8))
    rows = []
    for kind, time in kinds_table(shown).pick(*columns).rows[:_MAX_KINDS]:
        share = (time.value or 0.0) / compute_s if isinstance(time, Value) else 0.0
        rows.append((kind, time, format_percent(share), Text("█" * round(36 * share), "green")))
    return Table((*columns, Column(width=8), Column(words=True, width=41, clip=True)), rows).terminal(
        gap=1, header=None
    )


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
