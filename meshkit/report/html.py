"""The report as one HTML page that opens offline. Layer 6; no jax.

Charts are drawn by Plotly, whose JavaScript is embedded. It zooms and pans thousands of spans, its Python package
brings the script (so nothing is fetched when a page is written or read), and a company and a large community keep it.
The script is embedded compressed: a page has 2 MB, not 5; browsers since 2023 unpack it. Every number on a chart is in
a table or a note as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from meshkit.report.charts import communication_chart, memory_chart, step_chart, timeline_charts
from meshkit.report.page import cells, chart, section, table, warning_panel, write_page
from meshkit.report.schema import CommunicationPart, Report
from meshkit.report.view import (
    WORD,
    axes_text,
    group_text,
    link_text,
    machines,
    memory_text,
    mesh_text,
    row_cells,
    row_name,
    training_text,
)
from meshkit.timeline.spans import Timeline
from meshkit.units import format_bytes, format_percent, format_seconds

_MAX_OPS = 60
_COLUMNS = ("count", "payload", "time", "overlapped", "exposed", "bus bw")


def write_html(
    report: Report,
    path: str | Path,
    timeline: Timeline | None = None,
    *,
    other: Report | None = None,
    other_timeline: Timeline | None = None,
    title: str | None = None,
) -> Path:
    """Writes the page and returns its path.

    Args:
        report: what the page is about.
        path: the file.
        timeline: what the report summarizes; without it the page has no timeline.
        other, other_timeline: a second report to stand beside the first: the measurement beside its prediction.
        title: what it is about: an experiment, a run.

    Raises:
        ConfigError: Plotly, which draws the charts, is not installed.
    """
    reports = [report] if other is None else [report, other]
    figures: dict[str, dict] = {}
    headline = f"{title}: {_title(reports)}" if title else _title(reports).capitalize()
    body = [_header(reports, headline), _cards(reports), _warnings(reports), _step(reports, figures)]
    body.append(_communication(reports, figures))
    for r, spans in zip(reports, (timeline, other_timeline)):
        body.append(_timeline(r, spans, figures))
    body += [_memory(reports, figures), _footer(reports)]
    return write_page(path, headline, body, figures)


def _title(reports: Sequence[Report]) -> str:
    words = " beside ".join(dict.fromkeys(WORD[r.source] for r in reports))
    c = reports[0].cluster
    return f"{words} step on {c.num_gpus or '?'} x {c.gpu or 'unknown'}"


def _header(reports: Sequence[Report], headline: str) -> str:
    first = reports[0]
    lines = [machines(first), f"mesh {mesh_text(first)}"]
    if any(r.source != "plan" for r in reports):
        measured = next(r for r in reports if r.source != "plan").window
        lines.append(f"{measured.steps} steps on {measured.devices} devices measured")
    return f'<h1>{escape(headline)}</h1>\n<p class="sub">{escape(" · ".join(lines))}</p>'


def _cards(reports: Sequence[Report]) -> str:
    def card(label: str, values: Sequence[str], css: str = "") -> str:
        words = [WORD[r.source] for r in reports]
        lines = [
            f"<b>{escape(v)}{f'<span class=which>{escape(w)}</span>' if len(reports) > 1 else ''}</b>"
            for v, w in zip(values, words)
        ]
        return f'<div class="card {css}">{"".join(lines)}<span>{escape(label)}</span></div>'

    fits = reports[0].memory.fits
    judged = "" if fits is None else "good" if fits else "bad"
    memory_label = "of " + memory_text(reports[0]).partition(" of ")[2] if fits is not None else "memory per GPU"
    cards = [
        card("step time", [format_seconds(r.step.time_s) for r in reports]),
        card(f"exposed communication{_share_of_step(reports)}", [format_seconds(r.step.exposed_s) for r in reports]),
        card("of communication overlapped", [_overlapped(r) for r in reports]),
        card(_mfu_label(reports[0]), [format_percent(r.step.mfu) for r in reports]),
        card(memory_label, [format_bytes(r.memory.peak_bytes) for r in reports], judged),
    ]
    if reports[0].training.hours is not None:
        length, _, rest = training_text(reports[0]).partition(" for ")
        cards.append(f'<div class="card"><b>{escape(length)}</b><span>for {escape(rest)}</span></div>')
    return f'<div class="cards{" two" if len(reports) > 1 else ""}">{"".join(cards)}</div>'


def _share_of_step(reports: Sequence[Report]) -> str:
    shares = [r.step.exposed_s / r.step.time_s for r in reports if r.step.exposed_s is not None and r.step.time_s]
    return f", {' and '.join(map(format_percent, shares))} of the step" if shares else ""


def _overlapped(report: Report) -> str:
    overlapped_s, communication_s = report.step.overlapped_s, report.step.communication_s
    return format_percent(overlapped_s / communication_s if overlapped_s is not None and communication_s else None)


def _mfu_label(report: Report) -> str:
    return "MFU" if report.step.hfu is None else f"MFU (HFU {format_percent(report.step.hfu)})"


def _warnings(reports: Sequence[Report]) -> str:
    messages = dict.fromkeys(w.message for r in reports for w in r.warnings)
    return warning_panel(messages)


def _step(reports: Sequence[Report], figures: dict[str, dict]) -> str:
    if reports[0].step.time_s is None:
        return section("Step time", "No step was seen.")
    note = "Communication under compute costs no time and is inside compute; only its exposed part lengthens the step."
    step = reports[0].step
    if step.all_overlapped_s is not None and step.all_exposed_s is not None:
        low, high = format_seconds(step.all_overlapped_s), format_seconds(step.all_exposed_s)
        note += f" The step would take {low} if all communication hid, {high} if none did."
    return section("Step time", note, chart("step", step_chart(reports), figures))


def _communication(reports: Sequence[Report], figures: dict[str, dict]) -> str:
    if not any(r.communication for r in reports):
        return section("Communication", "No collective ran.")
    note = (
        "Time per step and GPU. Where several run at once, each has an equal share, so that the bars add up; those too "
        "short to see are in the table only."
    )
    parts = [chart("communication", communication_chart(reports), figures)]
    for report in reports:
        if len(reports) > 1:
            parts.append(f"<h3>{WORD[report.source]}</h3>")
        parts += [_rows_table(report), _ops_table(report)]
    return section("Communication by axis and link", note, *parts)


def _rows_table(report: Report) -> str:
    head = cells("th", ("axes", "link", "groups", "collective"), _COLUMNS)
    rows = [
        cells("td", (axes_text(row.axes), link_text(row), group_text(row), row_name(row)), row_cells(row))
        for row in report.communication
    ]
    return table(head, rows)


def _ops_table(report: Report) -> str:
    ops = [(row, op) for row in report.communication for op in row.ops]
    ops.sort(key=lambda item: (-(item[1].exposed_s or 0), -(item[1].busy_s or 0)))
    head = cells("th", ("operation", "axes", "caused by"), ("count", "payload", "busy", "exposed"))
    rows = [_op_cells(row, op) for row, op in ops[:_MAX_OPS]]
    more = len(ops) - _MAX_OPS
    rest = f'<p class="note">and {more} more, in report.json</p>' if more > 0 else ""
    title = f"The {len(ops)} collectives of the program, the most exposed first"
    return f"<details><summary>{title}</summary>{table(head, rows)}{rest}</details>" if ops else ""


def _op_cells(row: CommunicationPart, op) -> str:
    values = (
        f"{op.count:g}",
        format_bytes(op.payload_bytes),
        format_seconds(op.busy_s),
        format_seconds(op.exposed_s),
    )
    source = f'<td class="source"><code>{escape(op.source or "-")}</code></td>'
    named = cells("td", (op.name, axes_text(row.axes)), ())
    return named + source + cells("td", (), values)


def _timeline(report: Report, timeline: Timeline | None, figures: dict[str, dict]) -> str:
    charts = timeline_charts(timeline) if timeline else []
    if not charts:
        return ""
    prefix = f"timeline-{report.source}"
    names = [f"{prefix}-{i}" for i in range(len(charts))]
    options = "".join(f'<option value="{n}">{escape(label)}</option>' for n, (label, _) in zip(names, charts))
    select = f"<select data-timeline>{options}</select>" if len(charts) > 1 else ""
    drawn = [chart(n, c, figures, "timeline", hidden=i > 0) for i, (n, (_, c)) in enumerate(zip(names, charts))]
    title = f"<h2>Timeline of one {WORD[report.source]} step{select}</h2>"
    note = "Drag to move, scroll to zoom, double-click to see all. Exposed: a collective runs and nothing computes."
    return f'<section>{title}<p class="note">{note}</p>{"".join(drawn)}</section>'


def _memory(reports: Sequence[Report], figures: dict[str, dict]) -> str:
    figure = memory_chart(reports)
    if figure is None:
        return ""
    lines = [f"{WORD[r.source]}: {memory_text(r)}." for r in reports if r.memory.peak_bytes is not None]
    note = " ".join(lines) + " Budget: what the program may take; the rest of the capacity is left to CUDA and NCCL."
    return section("Memory of the fullest GPU", note, chart("memory", figure, figures))


def _footer(reports: Sequence[Report]) -> str:
    parts = []
    for r in reports:
        p, c = r.program, r.compile
        known = [f"jax {p.jax}" if p.jax else "", f"jaxlib {p.jaxlib}" if p.jaxlib else "", p.partitioner or ""]
        known.append(f"program {p.fingerprint}" if p.fingerprint else "")
        known.append(f"compiled in {format_seconds(c.compile_s)}" if c.compile_s is not None else "")
        parts.append(f"{WORD[r.source]}: {', '.join(k for k in known if k) or '-'}")
    return f"<footer>meshkit.report/1 · {escape(' · '.join(parts))}</footer>"
