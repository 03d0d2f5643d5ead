"""Show a report as one HTML page that opens offline, and on a terminal with 80 columns, with or without colour."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Group, RenderableType
from rich.text import Text

from meshkit.console import Rendered
from meshkit.errors import check_kinds
from meshkit.report.compare import Comparison
from meshkit.report.schema import CommunicationPart, GoodputPart, Report
from meshkit.report.views import charts, tables, words
from meshkit.report.views.page import (
    Column,
    Page,
    Source,
    Table,
    Value,
    below,
    below_titles,
    card,
    cards,
    folded,
    heading,
    inline,
    labelled,
    legend,
    listed,
    section,
    warning_panel,
)
from meshkit.report.views.tables import Shown
from meshkit.timeline import Timeline
from meshkit.units import format_bytes, format_count, format_percent, format_seconds

_MAX_OPS = 40
_FEW_FINDINGS = 3  # Number of findings that are not folded away, even if they cost little.


def write_html(
    report: Report,
    path: str | Path,
    timeline: Timeline | None = None,
    *,
    other: Report | None = None,
    other_timeline: Timeline | None = None,
    title: str | None = None,
    trace_file: str | None = None,
) -> Path:
    """Write the page of a report, which opens offline, and return the file.

    Args:
        path: the file to write, or an existing folder for `report.html`.
        timeline: the timeline that the report summarizes; None draws no timeline.
        other, other_timeline: a second report to compare with, e.g. the measurement if `report` is its prediction.
        trace_file: name of the Perfetto trace in the page's folder, if there is one.

    Raises:
        ConfigError: Plotly, which draws the charts, is not installed.
    """
    check_kinds(write_html, report=report, path=path)
    path = Path(path) / "report.html" if Path(path).is_dir() else Path(path)
    reports = [report] if other is None else [report, other]
    names = words.names_of([r.source for r in reports])
    shown = [Shown(r, name) for r, name in zip(reports, names)]
    headline = f"{title}: {_title(reports)}" if title else _title(reports).capitalize()
    page = Page(headline, " · ".join(_header(reports)), reports[-1].verdict)
    page.add(_cards(shown), _step(shown, page), _findings_section(shown[-1]))
    page.add(warning_panel(list(dict.fromkeys(w.message for r in reports for w in r.warnings))))
    for s, spans in zip(shown, (timeline, other_timeline)):
        page.add(_timeline(s, spans, page, trace_file))
    page.add(_communication_section(shown, page))
    if other is not None:
        page.add(tables.compared_section(report, other))
    page.add(_pipeline(shown, page))
    page.add(_kernels(shown, page), _stragglers(shown), _over_steps(shown, page), _goodput_section(shown, page))
    page.add(_failures_section(shown))
    page.add(_memory_section(shown, page), _quality(shown), _footer(reports))
    return page.write(path)


def _title(reports: Sequence[Report]) -> str:
    said = " and ".join(dict.fromkeys(words.WORD[r.source] for r in reports))
    return f"{said} step on {reports[-1].devices}"


def _header(reports: Sequence[Report]) -> list[str]:
    lines = list(dict.fromkeys(words.machines(r) for r in reports))
    lines += list(dict.fromkeys(f"mesh {words.mesh_text(r.cluster, r.mesh)}" for r in reports if r.mesh))
    if len(reports) > 1 and len(lines) > 2:
        lines = [
            f"{name}: {words.machines(r)}, mesh {words.mesh_text(r.cluster, r.mesh)}"
            for name, r in zip(words.names_of([r.source for r in reports]), reports)
        ]
    if any(r.source != "plan" for r in reports):
        measured = next(r for r in reports if r.source != "plan").window
        lines.append(f"{words.plural(measured.steps, 'step')} on {words.plural(measured.devices, 'device')} measured")
    return lines


def _cards(shown: Sequence[Shown]) -> str:
    names = [s.name for s in shown] if len(shown) > 1 else []

    def box(label: str, key: str, form: Callable[[Any], str], css: str = "") -> str:
        return card(label, *(s.number(key, form) for s in shown), names=names, css=css)

    reports = [s.report for s in shown]
    known = {key for r in reports for part in ("step", "memory") for key, v in getattr(r, part) if v is not None}
    fits = reports[0].memory.fits
    judged = "" if fits is None else "good" if fits else "bad"
    device = reports[0].device
    boxes = [box("step time", "step.time_s", format_seconds)]
    if "exposed_s" in known:
        shares = [r.step.exposed_s / r.step.time_s for r in reports if r.step.exposed_s is not None and r.step.time_s]
        share = f", {' and '.join(map(format_percent, shares))} of the step" if shares else ""
        overlapped = (words.share_text(r.step.overlapped_s, r.step.communication_s) for r in reports)
        boxes.append(box(f"exposed communication{share}", "step.exposed_s", format_seconds))
        boxes.append(card("of communication overlapped", *overlapped, names=names))
    if "mfu" in known:
        hfus = " and ".join(format_percent(r.step.hfu) for r in reports if r.step.hfu is not None)
        boxes.append(box(f"MFU (HFU {hfus})" if hfus else "MFU", "step.mfu", format_percent))
    what = "tokens" if "tokens_per_s_per_gpu" in known else "examples"
    if f"{what}_per_s_per_gpu" in known:
        boxes.append(box(f"{what}/s per {device}", f"step.{what}_per_s_per_gpu", format_count))
    if "peak_bytes" in known:
        label = f"memory per {device}" if fits is None else f"of {words.memory_text(reports[0]).partition(' of ')[2]}"
        boxes.append(box(label, "memory.peak_bytes", format_bytes, judged))
    if reports[0].training.hours is not None:
        length, _, rest = words.training_text(reports[0]).partition(" for ")
        boxes.append(card(f"for {rest}", length))
    return cards(boxes, "two" if len(reports) > 1 else "")


def _findings_section(shown: Shown) -> str:
    """Return the findings. A click on a finding shows what to try, and the keys of its numbers in report.json."""
    folds = []
    for i, f in enumerate(shown.report.findings):
        seconds = inline(shown.number(f"findings.{i}.seconds", format_seconds))
        more = f'<p class="note">Try {escape(f.hint)}.</p>' if f.hint else ""
        if f.step_s is not None:
            without = inline(shown.number(f"findings.{i}.step_s", format_seconds))
            more += f'<p class="note">Without it the step would take {without}.</p>'
        where = ", ".join(f"<code>{escape(path)}</code>" for path in f.evidence)
        more += f'<p class="note">{escape(f.code)}: {where} in report.json.</p>'
        title = f"<b>{seconds}</b> {escape(f.message)}"
        folds.append(f'<details class="finding {f.severity}s"><summary>{title}</summary>{more}</details>')
    warnings = sum(f.severity == "warning" for f in shown.report.findings)
    shown_first = max(warnings, min(len(folds), _FEW_FINDINGS))
    rest = folds[shown_first:]
    smaller = [folded(f"{len(rest)} that cost less", *rest)] if rest else []
    return section("Where the step loses time", "", *folds[:shown_first], *smaller) if folds else ""


def _step(shown: Sequence[Shown], page: Page) -> str:
    reports = [s.report for s in shown]
    if reports[0].step.time_s is None:
        return section("Step time", "The trace has no whole step.")
    if all(r.step.compute_s is None for r in reports):
        return ""
    note = (
        "Overlapped communication costs no time and counts as compute; only exposed communication lengthens the step."
    )
    for r in reports:
        if r.step.all_overlapped_s is not None and r.step.all_exposed_s is not None:
            low, high = format_seconds(r.step.all_overlapped_s), format_seconds(r.step.all_exposed_s)
            note += f" The {words.WORD[r.source]} step would take {low} if all communication hid, {high} if none did."
        if interval := words.interval_text(r):
            note += f" Expected: {interval}."
    time_s = reports[-1].step.time_s
    alone = len(reports) == 1
    colors = legend(
        (
            f"{s.label} {format_seconds(s.value)}, {words.share_text(s.value, time_s)}" if alone else s.label,
            s.look.color,
        )
        for s in charts.step_parts(reports)
    )
    numbers = folded("In numbers", _each(shown, lambda s: tables.step_table(s).html()))
    return section("Step time", note, colors, page.chart("step", charts.step_chart(reports)), numbers, _feedback(shown))


def _feedback(shown: Sequence[Shown]) -> str:
    lines = []
    for s in shown:
        if s.report.feedback is not None:
            before = [s.number(f"feedback.before_{key}", format_seconds) for key in ("time_s", "exposed_s")]
            after = [s.number(f"step.{key}", format_seconds) for key in ("time_s", "exposed_s")]
            lines.append(
                "Recompiled with measured costs: the step went from "
                f"{inline(before[0])} to {inline(after[0])}, exposed communication from "
                f"{inline(before[1])} to {inline(after[1])}."
            )
    return "".join(f'<p class="note">{line}</p>' for line in lines)


def _each(shown: Sequence[Shown], part: Callable[[Shown], str]) -> str:
    parts = [(s.name, part(s)) for s in shown]
    title = "<h3>{}</h3>" if len(shown) > 1 else ""
    return "".join(title.format(escape(name)) + html for name, html in parts if html)


def _communication_section(shown: Sequence[Shown], page: Page) -> str:
    reports = [s.report for s in shown]
    if not any(r.communication for r in reports):
        return section("Communication by axis and link", "No collective ran.")
    largest = f"Time per step on one {reports[0].device}, for the eight kinds of communication that take the most."
    note = f"{largest} Where several collectives run at once, each has an equal share, so that the bars add up."
    parts = charts.communication_parts(reports)
    if "overlapped" not in parts:
        note = f"{largest} It is unknown how much of this time compute overlaps."
    colors = legend((label, charts.COLORS[key]) for key, label in parts.items())
    picture = page.chart("communication", charts.communication_chart(reports))
    return section("Communication by axis and link", note, colors, picture, _each(shown, _communication_tables))


def _communication_tables(shown: Shown) -> str:
    if not shown.report.communication:
        return ""
    links = folded("By axis and link", tables.links_table(shown).html())
    alone = "Alone: time in which nothing else ran. A faster collective saves no more than that."
    known = any(row.sole_exposed_s is not None for row in shown.report.communication)
    note = f'<p class="note">{alone}</p>' if known else ""
    links += folded("By kind of collective", note, tables.rows_table(shown).html())
    ops = tables.ops_table(shown)
    if not ops.rows:
        return links
    more = len(ops.rows) - _MAX_OPS
    rest = f'<p class="note">and {more} more, in report.json</p>' if more > 0 else ""
    title = f"Exposed seconds of the {len(ops.rows)} single collectives, ranked"
    return links + folded(title, replace(ops, rows=ops.rows[:_MAX_OPS]).html(), rest)


def _pipeline(shown: Sequence[Shown], page: Page) -> str:
    found = [s for s in shown if s.report.pipeline is not None]
    part = found[0].report.pipeline if found else None
    if part is None:
        return ""
    note = (
        f"{part.schedule}: {part.stages} stages, {part.virtual_stages} chunks of layers on each, {part.microbatches} "
        "microbatches. In a tick every stage runs one chunk forward (upper row) and one backward (lower row). Grey is "
        "the bubble: the stage has nothing to do and computes on garbage. All ticks are drawn equally wide, but a tick "
        "that runs both directions takes longer."
    )
    figure = charts.schedule_chart(part)
    drawn = page.chart("pipeline", figure, "wide") if figure else ""
    colors = legend(charts.schedule_legend(part)) if figure else ""
    return section("Pipeline", note, colors, drawn, _each(found, lambda s: tables.pipeline_table(s).html()))


def _timeline(shown: Shown, timeline: Timeline | None, page: Page, trace_file: str | None) -> str:
    of_gpus = charts.timeline_charts(timeline, shown.report.device) if timeline else []
    if not of_gpus:
        return ""
    report = shown.report
    names = [f"timeline-{report.source}-{i}" for i in range(len(of_gpus))]
    options = "".join(f'<option value="{n}">{escape(label)}</option>' for n, (label, _) in zip(names, of_gpus))
    select = f"<select data-timeline>{options}</select>" if len(of_gpus) > 1 else ""
    drawn = [page.chart(n, c, "timeline", hidden=i > 0) for i, (n, (_, c)) in enumerate(zip(names, of_gpus))]
    title = f"<h2>Timeline of one {words.WORD[report.source]} step{select}</h2>"
    note = (
        "Drag to move, scroll or pinch to zoom, double-click to see all. A paler span is shorter than a pixel. Red in "
        "an axis's lane marks exposed communication, under which nothing computes."
    )
    if trace_file:
        note += f" All steps are in {trace_file}, which ui.perfetto.dev and chrome://tracing open."
    return f'<section>{title}<p class="note">{escape(note)}</p>{"".join(drawn)}</section>'


def _kernels(shown: Sequence[Shown], page: Page) -> str:
    figure = charts.kernels_chart([s.report for s in shown])
    if figure is None:
        return ""
    note = "Time: the kinds add up to the step's compute. Busy: each kernel's own duration, added up."
    return below("Compute by kind of work", note, page.chart("kernels", figure), _each(shown, _kernel_tables))


def _kernel_tables(shown: Shown) -> str:
    kinds, kernels = tables.kinds_table(shown), tables.kernels_table(shown)
    title = f"The {len(kernels.rows)} operations with the most busy seconds"
    return kinds.html() + folded(title, kernels.html()) if kinds.rows else ""


def _stragglers(shown: Sequence[Shown]) -> str:
    found = _each(shown, lambda s: table.html() if (table := tables.stragglers_table(s)).rows else "")
    note = "Devices that others waited for, by the wait they caused."
    return below("Stragglers", note, found) if found else ""


def _over_steps(shown: Sequence[Shown], page: Page) -> str:
    parts = []
    for s in shown:
        steps, history = charts.per_step_chart(s.report), charts.history_chart(s.report)
        if steps is not None:
            colors = legend((share.label, share.look.color) for share in words.step_shares(s.report.step))
            parts.append("<h3>the captured steps, means over their devices</h3>" + colors)
            parts.append(page.chart(f"per-step-{s.report.source}", steps))
        if history is not None:
            parts.append("<h3>the whole run, from its metrics</h3>")
            trend = words.trend_text(s.report)
            parts.append(f'<p class="note">{escape(trend)}</p>' if trend else "")
            parts.append(page.chart(f"history-{s.report.source}", history, "wide"))
    return below("Over the steps", "", *parts) if parts else ""


def _goodput_section(shown: Sequence[Shown], page: Page) -> str:
    known = [s for s in shown if s.report.goodput is not None]
    part = known[-1].report.goodput if known else None
    if part is None:
        return ""
    note = (
        "What every second of the run's wall time went to, over all its attempts. Goodput is the share of this time in "
        "steps that count. Lost steps are those that a later attempt made again. Restart is the time between two "
        "attempts."
    )
    colors = legend((share.label, share.look.color) for share in words.goodput_shares(part))
    numbers = tables.goodput_table(known[-1]).html()
    return below("Goodput of the run", note, colors, page.chart("goodput", charts.goodput_chart(part)), numbers)


def _failures_section(shown: Sequence[Shown]) -> str:
    parts = []
    for s in shown:
        if lines := words.failures_lines(s.report):
            notes = "".join(f'<p class="note">{escape(line)}</p>' for line in [*lines, "Goodput by spare hosts:"])
            parts.append(notes + tables.spares_table(s).html())
    return below("Goodput under failures", "", *parts) if parts else ""


def _memory_section(shown: Sequence[Shown], page: Page) -> str:
    known = [s.report for s in shown if s.report.memory.peak_bytes is not None]
    if not known:
        return ""
    lines = [f"{words.WORD[r.source]}: {words.memory_text(r)}." for r in known]
    m = known[0].memory
    limits = [
        f"{mark}: {word} {format_bytes(v)}"
        for mark, word, v in (("Line", "capacity", m.capacity_bytes), ("Dashed", "budget", m.pool_bytes))
        if v
    ]
    note = " ".join(lines) + f" {', '.join(limits)}. The budget is what the program may take; the rest is left to CUDA "
    note += "and NCCL."
    colors = legend((part.label, part.look.color) for part in charts.memory_parts(known))
    numbers = _each(shown, lambda s: folded("In numbers", tables.memory_table(s).html()))
    drawn = page.chart("memory", charts.memory_chart(known))
    return below(f"Memory of the fullest {known[0].device}", note, colors, drawn, numbers)


def _quality(shown: Sequence[Shown]) -> str:
    measured = [s for s in shown if s.report.source != "plan"]
    found = _each(measured, lambda s: tables.quality_table(s).html())
    return below("Data quality", "How far the measurement can be trusted.", found) if found else ""


def _footer(reports: Sequence[Report]) -> str:
    parts = []
    for r in reports:
        p, c = r.program, r.compile
        known = [f"jax {p.jax}" if p.jax else "", f"jaxlib {p.jaxlib}" if p.jaxlib else "", p.partitioner or ""]
        known.append(f"program {p.fingerprint}" if p.fingerprint else "")
        known.append(f"compiled in {format_seconds(c.compile_s)}" if c.compile_s is not None else "")
        parts.append(f"{words.WORD[r.source]}: {', '.join(k for k in known if k) or '-'}")
    return f"<footer>meshkit.report/1 · {escape(' · '.join(parts))}</footer>"


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


def render(report: Report | Comparison, *, title: str | None = None) -> Rendered:
    """Return a report or a comparison as the command line prints it, for `print`, a notebook's cell or `rich.print`.

    Args:
        report: a report from `mk.plan`, `mk.profile` or `mk.read_report`, or a comparison from `mk.compare`.
        title: name of the experiment or the run.
    """
    check_kinds(render, report=report)
    if isinstance(report, Comparison):
        return Rendered(tables.render_comparison(report))
    shown, planned = Shown(report), report.source == "plan"
    # A plan's verdict is shortened here; the HTML page has the whole verdict.
    said = words.shorten_verdict(report, WIDTH) if planned else report.verdict
    parts: list[RenderableType] = [Text(said, "bold"), Text()] if said else []
    parts.append(_headline(report, title))
    if report.findings and not planned:
        parts += [heading("findings, by the time that a fix saves in a step"), *_findings(report)]
    if report.step.time_s and report.step.compute_s is not None:
        parts += [heading("step time"), _step_bar(report)]
    parts += [heading(f"communication a step, per {report.device}"), _communication(shown)]
    if exposed := _exposed_ops(shown):
        parts += [heading("the most exposed, and what caused it"), exposed]
    if waiting := words.waiting_lines(report):
        parts += [heading("waiting for peers"), *(Text(line, overflow="fold") for line in waiting)]
    if report.kernels and report.step.compute_s:
        parts += [heading("compute by kind of work"), _kinds(shown, report.step.compute_s)]
    if report.pipeline is not None:
        parts += [heading("pipeline"), *map(Text, words.pipeline_lines(report))]
    if report.memory.peak_bytes is not None:
        parts += [heading(f"memory of the fullest {report.device}"), _memory(report)]
    if report.goodput is not None:
        parts += [heading("goodput of the run"), _goodput(report.goodput)]
    if lines := words.failures_lines(report):
        parts += [heading("goodput under failures"), *listed(lines), tables.spares_table(shown).terminal()]
    if found := words.quality_text(report):
        parts += [heading("data quality"), Text(found, overflow="fold")]
    if report.warnings:
        parts += [heading("warnings"), *listed((w.message for w in report.warnings), "!", "bold yellow")]
    return Rendered(Group(*parts))


def _findings(report: Report) -> Iterator[RenderableType]:
    said: set[str] = set()
    for f in report.findings[:_MAX_FINDINGS]:
        mark, style = ("!", "bold yellow") if f.severity == "warning" else ("-", "cyan")
        text = Text.assemble((f"{format_seconds(f.seconds)} {f.code}", style), f": {f.message}")
        if f.hint and f.hint not in said:
            text.append(f" Try {f.hint}.", "dim")
            said.add(f.hint)
        yield from listed([text], mark, style)


def bar(shares: Sequence[words.Share], total: float, width: int = WIDTH) -> Text:
    """Return a bar of one line. A part above zero has at least one cell, which is taken from the largest part.

    A value of None counts as zero.
    """
    cells = [max(1, round(width * (s.value or 0) / total)) if (s.value or 0) > 0 else 0 for s in shares]
    if cells:
        cells[cells.index(max(cells))] -= max(0, sum(cells) - width)
    text = Text()
    for share, n in zip(shares, cells):
        text.append(share.look.mark * n, share.look.style)
    return text


def _headline(report: Report, title: str | None) -> RenderableType:
    unfit = report.memory.fits is False
    rows = [
        (label, Text(text, "bold red" if label == "memory" and unfit else "")) for label, text in words.facts(report)
    ]
    headline = Text(f"{title}, {words.WORD[report.source]}" if title else words.WORD[report.source], "bold underline")
    return Group(headline, labelled(rows, WIDTH - 12))


def _step_bar(report: Report) -> RenderableType:
    total = report.step.time_s or 0.0
    shares = words.report_shares(report)
    hidden = (
        f"{format_seconds(report.step.overlapped_s)} of {format_seconds(report.step.communication_s)} communication"
    )
    legend = _legend(shares, total, format_seconds)
    lines = [Text(f"{hidden} is under compute", "dim")]
    if spread := words.spread_text(report):
        lines.append(Text(spread, "dim"))
    return Group(bar(shares, total), legend, *lines)


def _legend(shares: Sequence[words.Share], total: float | None, form) -> RenderableType:
    table = rich.table.Table.grid(padding=(0, 1))
    for share in shares:
        percent = words.share_text(share.value, total, unknown="")
        numbers = (Text(form(share.value), justify="right"), Text(percent, "dim"))
        table.add_row(Text(share.look.mark, share.look.style), share.label, *numbers)
    return table


def _communication(shown: Shown) -> RenderableType:
    communication = shown.report.communication
    if not communication:
        return Text("none", "dim")
    groups: dict[tuple, list[int]] = {}
    for i, row in enumerate(communication):
        shape = (row.group_size, row.num_groups, row.gpus_per_domain, row.axes_complete, row.replica_groups)
        key = (row.axes, row.link, row.fabric, *shape)
        groups.setdefault(key, []).append(i)
    rows = tables.rows_table(shown).pick(*_COLUMNS).rows
    ordered = sorted(groups.values(), key=lambda members: -sum(communication[i].exposed_s or 0 for i in members))
    return below_titles(
        _COLUMNS,
        [
            (_group_title(communication[m[0]], shown.report.device), Table(_COLUMNS, [rows[i] for i in m]))
            for m in ordered
        ],
    )


def _exposed_ops(shown: Shown) -> RenderableType | None:
    """Return the single collectives with the most exposed seconds; None if the source of none of them is known."""
    rows = tables.ops_table(shown).pick(*_EXPOSED_COLUMNS).rows
    exposed = [row for row in rows if isinstance(row[0], Value) and row[0].value][:_MAX_EXPOSED]
    known = any(isinstance(row[-1], Source) and row[-1].text != "-" for row in exposed)
    return Table(_EXPOSED_COLUMNS, exposed).terminal(gap=1, header=None) if known else None


def _group_title(row: CommunicationPart, device: str) -> Text:
    title = Text(words.axes_text(row.axes), "bold cyan" if row.axes else "bold yellow")
    details = [text for text in (words.link_text(row), words.group_text(row, device)) if text and text != "-"]
    return title.append(f"  {', '.join(details)}" if details else "", "dim")


def _kinds(shown: Shown, compute_s: float) -> RenderableType:
    columns = (Column("kind of work", words=True, width=20), Column("time", width=8))
    rows = []
    for kind, time in tables.kinds_table(shown).pick(*columns).rows[:_MAX_KINDS]:
        share = (time.value or 0.0) / compute_s if isinstance(time, Value) else 0.0
        rows.append((kind, time, format_percent(share), Text("█" * round(36 * share), "green")))
    return Table((*columns, Column(width=8), Column(words=True, width=41, clip=True)), rows).terminal(
        gap=1, header=None
    )


def _memory(report: Report) -> RenderableType:
    m = report.memory
    shares = words.memory_shares(report)
    used = sum(s.value or 0 for s in shares)
    total = max(used, m.capacity_bytes or m.pool_bytes or used)
    free = [words.Share("free", "free", total - used)] if total > used else []
    limits = f"capacity {format_bytes(m.capacity_bytes)}, of which the program may take {format_bytes(m.pool_bytes)}"
    return Group(bar([*shares, *free], total), _legend(shares, total, format_bytes), Text(limits, "dim"))


def _goodput(part: GoodputPart) -> RenderableType:
    shares = words.goodput_shares(part)
    total = part.wall_s or 0.0
    return Group(bar(shares, total), _legend(shares, total, format_seconds), Text(words.goodput_text(part), "dim"))
