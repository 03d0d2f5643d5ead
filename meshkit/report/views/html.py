"""The report as one HTML page that opens offline.

Charts are drawn by Plotly, whose JavaScript is embedded. It zooms and pans thousands of spans, its Python package
brings the script (so nothing is fetched when a page is written or read), and a company and a large community keep it.
The script is embedded compressed: a page has 2 MB, not 5; browsers since 2023 unpack it. Every number on a chart is in
a table or a note as well, and says where in report.json it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from meshkit.report.goodput_part import goodput_section
from meshkit.report.schema import Report
from meshkit.report.views import panels
from meshkit.report.views.charts import (
    COLORS,
    communication_chart,
    history_chart,
    kernels_chart,
    memory_chart,
    memory_parts,
    names_of,
    per_step_chart,
    step_chart,
)
from meshkit.report.views.page import Value, chart, inline, legend, section, warning_panel, write_page
from meshkit.report.views.panels import Shown
from meshkit.report.views.pipeline_view import pipeline_section
from meshkit.report.views.side_by_side import beside_section
from meshkit.report.views.timeline_chart import timeline_charts
from meshkit.report.views.words import (
    WORD,
    machines,
    memory_text,
    mesh_text,
    plural,
    step_shares,
    training_text,
    trend_text,
)
from meshkit.timeline import Timeline
from meshkit.units import format_bytes, format_count, format_percent, format_seconds

Figures = dict[str, dict]


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
    """Writes the page and returns its path.

    Args:
        report: what the page is about.
        path: the file.
        timeline: what the report summarizes; without it the page has no timeline.
        other, other_timeline: a second report to stand beside the first: the measurement beside its prediction.
        title: what it is about: an experiment, a run.
        trace_file: name of the Perfetto trace beside the page, if there is one.

    Raises:
        ConfigError: Plotly, which draws the charts, is not installed.
    """
    reports = [report] if other is None else [report, other]
    shown = [Shown(r, name) for r, name in zip(reports, names_of(reports))]
    figures: Figures = {}
    headline = f"{title}: {_title(reports)}" if title else _title(reports).capitalize()
    body = [_header(reports, headline), _cards(shown), _warnings(reports), _step(shown, figures)]
    if other is not None:
        body.append(beside_section(report, other))
    body += [_communication(shown, figures), pipeline_section(shown, figures)]
    for s, spans in zip(shown, (timeline, other_timeline)):
        body.append(_timeline(s, spans, figures, trace_file))
    body += [_kernels(shown, figures), _stragglers(shown), _over_steps(shown, figures)]
    body.append(goodput_section(shown, figures))
    body += [_memory(shown, figures), _quality(shown), _footer(reports)]
    return write_page(path, headline, body, figures)


def _title(reports: Sequence[Report]) -> str:
    words = " beside ".join(dict.fromkeys(WORD[r.source] for r in reports))
    c = reports[-1].cluster
    return f"{words} step on {c.num_gpus or '?'} x {c.gpu or 'unknown'}"


def _header(reports: Sequence[Report], headline: str) -> str:
    lines = list(dict.fromkeys(machines(r) for r in reports))
    lines += list(dict.fromkeys(f"mesh {mesh_text(r)}" for r in reports))
    if len(reports) > 1 and len(lines) > 2:
        lines = [f"{name}: {machines(r)}, mesh {mesh_text(r)}" for name, r in zip(names_of(reports), reports)]
    if any(r.source != "plan" for r in reports):
        measured = next(r for r in reports if r.source != "plan").window
        lines.append(f"{plural(measured.steps, 'step')} on {plural(measured.devices, 'device')} measured")
    return f'<h1>{escape(headline)}</h1>\n<p class="sub">{escape(" · ".join(lines))}</p>'


def _cards(shown: Sequence[Shown]) -> str:
    def card(label: str, values: Sequence[str | Value], css: str = "") -> str:
        names = [f'<span class="which">{escape(s.name)}</span>' if len(shown) > 1 else "" for s in shown]
        lines = [f"<b>{inline(v)}{name}</b>" for v, name in zip(values, names)]
        return f'<div class="card {css}">{"".join(lines)}<span>{escape(label)}</span></div>'

    def values(key: str, form: Callable[[Any], str]) -> list[str | Value]:
        return [s.number(key, form) for s in shown]

    reports = [s.report for s in shown]
    known = {key for r in reports for part in ("step", "memory") for key, v in getattr(r, part) if v is not None}
    fits = reports[0].memory.fits
    judged = "" if fits is None else "good" if fits else "bad"
    memory_label = "of " + memory_text(reports[0]).partition(" of ")[2] if fits is not None else "memory per GPU"
    cards = [
        card("step time", values("step.time_s", format_seconds)),
        card(f"exposed communication{_share_of_step(reports)}", values("step.exposed_s", format_seconds)),
        card("of communication overlapped", [_overlapped(r) for r in reports]),
    ]
    if "mfu" in known:
        cards.append(card(_mfu_label(reports[0]), values("step.mfu", format_percent)))
    if "tokens_per_s_per_gpu" in known:
        cards.append(card("tokens/s per GPU", values("step.tokens_per_s_per_gpu", format_count)))
    if "peak_bytes" in known:
        cards.append(card(memory_label, values("memory.peak_bytes", format_bytes), judged))
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


def _step(shown: Sequence[Shown], figures: Figures) -> str:
    reports = [s.report for s in shown]
    if reports[0].step.time_s is None:
        return section("Step time", "No step was seen.")
    note = "Communication under compute costs no time and is inside compute; only its exposed part lengthens the step."
    for r in reports:
        if r.step.all_overlapped_s is not None and r.step.all_exposed_s is not None:
            low, high = format_seconds(r.step.all_overlapped_s), format_seconds(r.step.all_exposed_s)
            note += f" The {WORD[r.source]} step would take {low} if all communication hid, {high} if none did."
    colors = legend((s.label, COLORS[s.key]) for s in step_shares(reports[0]))
    tables = _each(shown, panels.step_table)
    return section("Step time", note, colors, chart("step", step_chart(reports), figures), tables, _feedback(shown))


def _feedback(shown: Sequence[Shown]) -> str:
    """What a recompile with measured costs changed, where one was done."""
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
    """A part for every report that has it, under the report's name where there are several."""
    parts = [(s.name, part(s)) for s in shown]
    title = "<h3>{}</h3>" if len(shown) > 1 else ""
    return "".join(title.format(escape(name)) + html for name, html in parts if html)


def _communication(shown: Sequence[Shown], figures: Figures) -> str:
    reports = [s.report for s in shown]
    if not any(r.communication for r in reports):
        return section("Communication by axis and link", "No collective ran.")
    note = (
        "Time per step and GPU. Where several run at once, each has an equal share, so that the bars add up; those too "
        "short to see are in the table only. Alone: nothing else ran, so this is what a faster one would save at most."
    )
    colors = legend((key, COLORS[key]) for key in ("overlapped", "exposed"))

    def tables(s: Shown) -> str:
        every = f"<details><summary>By kind of collective</summary>{panels.rows_table(s)}</details>"
        return panels.links_table(s) + every + panels.ops_table(s) if s.report.communication else ""

    picture = chart("communication", communication_chart(reports), figures)
    return section("Communication by axis and link", note, colors, picture, _each(shown, tables))


def _timeline(shown: Shown, timeline: Timeline | None, figures: Figures, trace_file: str | None) -> str:
    charts = timeline_charts(timeline) if timeline else []
    if not charts:
        return ""
    report = shown.report
    names = [f"timeline-{report.source}-{i}" for i in range(len(charts))]
    options = "".join(f'<option value="{n}">{escape(label)}</option>' for n, (label, _) in zip(names, charts))
    select = f"<select data-timeline>{options}</select>" if len(charts) > 1 else ""
    drawn = [chart(n, c, figures, "timeline", hidden=i > 0) for i, (n, (_, c)) in enumerate(zip(names, charts))]
    title = f"<h2>Timeline of one {WORD[report.source]} step{select}</h2>"
    note = (
        "Drag to move, scroll or pinch to zoom, double-click to see all. Red in an axis's lane: its exposed parts, "
        "under which nothing computes."
    )
    if trace_file:
        note += f" All steps are in {trace_file}, which ui.perfetto.dev and chrome://tracing open."
    return f'<section>{title}<p class="note">{escape(note)}</p>{"".join(drawn)}</section>'


def _kernels(shown: Sequence[Shown], figures: Figures) -> str:
    figure = kernels_chart([s.report for s in shown])
    if figure is None:
        return ""
    note = "Time: the kinds add up to the step's compute. Busy: each kernel's own duration, added up."
    return section(
        "Compute by kind of work", note, chart("kernels", figure, figures), _each(shown, panels.kernels_table)
    )


def _stragglers(shown: Sequence[Shown]) -> str:
    tables = _each(shown, panels.stragglers_table)
    note = "Devices that others waited for, by the wait they caused: the seconds a step of all others, added up."
    return section("Stragglers", note, tables) if tables else ""


def _over_steps(shown: Sequence[Shown], figures: Figures) -> str:
    parts = []
    for s in shown:
        steps, history = per_step_chart(s.report), history_chart(s.report)
        if steps is not None:
            colors = legend((share.label, COLORS[share.key]) for share in step_shares(s.report))
            parts.append("<h3>the captured steps, means over their devices</h3>" + colors)
            parts.append(chart(f"per-step-{s.report.source}", steps, figures))
        if history is not None:
            parts.append("<h3>the whole run, from its metrics</h3>")
            words = trend_text(s.report)
            parts.append(f'<p class="note">{escape(words)}</p>' if words else "")
            parts.append(chart(f"history-{s.report.source}", history, figures, "wide"))
    return section("Over the steps", "", *parts) if parts else ""


def _memory(shown: Sequence[Shown], figures: Figures) -> str:
    known = [s.report for s in shown if s.report.memory.peak_bytes is not None]
    figure = memory_chart(known)
    if figure is None:
        return ""
    lines = [f"{WORD[r.source]}: {memory_text(r)}." for r in known]
    m = known[0].memory
    limits = [
        f"{mark}: {word} {format_bytes(v)}"
        for mark, word, v in (("Line", "capacity", m.capacity_bytes), ("Dashed", "budget", m.pool_bytes))
        if v
    ]
    note = " ".join(lines) + f" {', '.join(limits)}. The budget is what the program may take; the rest is left to CUDA "
    colors = legend((label, COLORS[key]) for key, label in memory_parts(known))
    picture = chart("memory", figure, figures)
    return section("Memory of the fullest GPU", note + "and NCCL.", colors, picture, _each(shown, panels.memory_table))


def _quality(shown: Sequence[Shown]) -> str:
    measured = [s for s in shown if s.report.source != "plan"]
    tables = _each(measured, panels.quality_table)
    return section("Data quality", "What the measurement rests on.", tables) if tables else ""


def _footer(reports: Sequence[Report]) -> str:
    parts = []
    for r in reports:
        p, c = r.program, r.compile
        known = [f"jax {p.jax}" if p.jax else "", f"jaxlib {p.jaxlib}" if p.jaxlib else "", p.partitioner or ""]
        known.append(f"program {p.fingerprint}" if p.fingerprint else "")
        known.append(f"compiled in {format_seconds(c.compile_s)}" if c.compile_s is not None else "")
        parts.append(f"{WORD[r.source]}: {', '.join(k for k in known if k) or '-'}")
    return f"<footer>meshkit.report/1 · {escape(' · '.join(parts))}</footer>"
