"""The report as one HTML page that opens offline: a panel each for what it knows, with charts and tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from meshkit.report.schema import Report
from meshkit.report.views import tables
from meshkit.report.views.charts import (
    COLORS,
    communication_chart,
    communication_parts,
    goodput_chart,
    history_chart,
    kernels_chart,
    memory_chart,
    memory_parts,
    per_step_chart,
    schedule_chart,
    schedule_legend,
    step_chart,
    step_parts,
    timeline_charts,
)
from meshkit.report.views.compare import compared_section
from meshkit.report.views.page import Page, below, card, cards, folded, legend, section, warning_panel
from meshkit.report.views.table import inline
from meshkit.report.views.tables import Shown
from meshkit.report.views.words import (
    WORD,
    goodput_shares,
    gpus_text,
    interval_text,
    machines,
    memory_text,
    mesh_text,
    names_of,
    plural,
    share_text,
    step_shares,
    training_text,
    trend_text,
)
from meshkit.timeline import Timeline
from meshkit.units import format_bytes, format_count, format_percent, format_seconds

_MAX_OPS = 40
_FEW_FINDINGS = 3  # that are shown at first, however little they cost


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
        other, other_timeline: a second report to compare with: the measurement, where the first is its prediction.
        title: what it is about: an experiment, a run.
        trace_file: name of the Perfetto trace in the page's folder, if there is one.

    Raises:
        ConfigError: Plotly, which draws the charts, is not installed.
    """
    reports = [report] if other is None else [report, other]
    names = names_of([r.source for r in reports])
    shown = [Shown(r, name) for r, name in zip(reports, names)]
    headline = f"{title}: {_title(reports)}" if title else _title(reports).capitalize()
    page = Page(headline, " · ".join(_header(reports, names)), reports[-1].verdict)
    page.add(_cards(shown), _step(shown, page), _findings(shown[-1]), _warnings(reports))
    for s, spans in zip(shown, (timeline, other_timeline)):
        page.add(_timeline(s, spans, page, trace_file))
    page.add(_communication(shown, page))
    if other is not None:
        page.add(compared_section(report, other))
    page.add(_pipeline(shown, page))
    page.add(_kernels(shown, page), _stragglers(shown), _over_steps(shown, page), _goodput(shown, page))
    page.add(_memory(shown, page), _quality(shown), _footer(reports))
    return page.write(path)


def _title(reports: Sequence[Report]) -> str:
    """`predicted beside measured step on 8 x h100_sxm`."""
    words = " beside ".join(dict.fromkeys(WORD[r.source] for r in reports))
    return f"{words} step on {gpus_text(reports[-1])}"


def _header(reports: Sequence[Report], names: Sequence[str]) -> list[str]:
    """Machines, meshes and what was measured: said once where the reports agree."""
    lines = list(dict.fromkeys(machines(r) for r in reports))
    lines += list(dict.fromkeys(f"mesh {mesh_text(r.mesh)}" for r in reports if r.mesh))
    if len(reports) > 1 and len(lines) > 2:
        lines = [
            f"{name}: {machines(r)}, mesh {mesh_text(r.mesh)}"
            for name, r in zip(names_of([r.source for r in reports]), reports)
        ]
    if any(r.source != "plan" for r in reports):
        measured = next(r for r in reports if r.source != "plan").window
        lines.append(f"{plural(measured.steps, 'step')} on {plural(measured.devices, 'device')} measured")
    return lines


def _cards(shown: Sequence[Shown]) -> str:
    """The numbers of the headline, of both reports in one box."""
    names = [s.name for s in shown] if len(shown) > 1 else []

    def box(label: str, key: str, form: Callable[[Any], str], css: str = "") -> str:
        return card(label, *(s.number(key, form) for s in shown), names=names, css=css)

    reports = [s.report for s in shown]
    known = {key for r in reports for part in ("step", "memory") for key, v in getattr(r, part) if v is not None}
    fits = reports[0].memory.fits
    judged = "" if fits is None else "good" if fits else "bad"
    memory_label = "of " + memory_text(reports[0]).partition(" of ")[2] if fits is not None else "memory per GPU"
    boxes = [box("step time", "step.time_s", format_seconds)]
    if "exposed_s" in known:
        boxes += [
            box(f"exposed communication{_share_of_step(reports)}", "step.exposed_s", format_seconds),
            card("of communication overlapped", *map(_overlapped, reports), names=names),
        ]
    if "mfu" in known:
        hfus = " and ".join(format_percent(r.step.hfu) for r in reports if r.step.hfu is not None)
        boxes.append(box(f"MFU (HFU {hfus})" if hfus else "MFU", "step.mfu", format_percent))
    if "tokens_per_s_per_gpu" in known:
        boxes.append(box("tokens/s per GPU", "step.tokens_per_s_per_gpu", format_count))
    if "peak_bytes" in known:
        boxes.append(box(memory_label, "memory.peak_bytes", format_bytes, judged))
    if reports[0].training.hours is not None:
        length, _, rest = training_text(reports[0]).partition(" for ")
        boxes.append(card(f"for {rest}", length))
    return cards(boxes, "two" if len(reports) > 1 else "")


def _share_of_step(reports: Sequence[Report]) -> str:
    shares = [r.step.exposed_s / r.step.time_s for r in reports if r.step.exposed_s is not None and r.step.time_s]
    return f", {' and '.join(map(format_percent, shares))} of the step" if shares else ""


def _overlapped(report: Report) -> str:
    return share_text(report.step.overlapped_s, report.step.communication_s)


def _findings(shown: Shown) -> str:
    """What the step loses its time to: a fold each, with what to try and where its numbers stand."""
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
    return section("What the step loses its time to", "", *folds[:shown_first], *smaller) if folds else ""


def _warnings(reports: Sequence[Report]) -> str:
    return warning_panel(list(dict.fromkeys(w.message for r in reports for w in r.warnings)))


def _step(shown: Sequence[Shown], page: Page) -> str:
    reports = [s.report for s in shown]
    if reports[0].step.time_s is None:
        return section("Step time", "No step was seen.")
    if all(r.step.compute_s is None for r in reports):
        return ""
    note = "Communication under compute costs no time and is inside compute; only its exposed part lengthens the step."
    for r in reports:
        if r.step.all_overlapped_s is not None and r.step.all_exposed_s is not None:
            low, high = format_seconds(r.step.all_overlapped_s), format_seconds(r.step.all_exposed_s)
            note += f" The {WORD[r.source]} step would take {low} if all communication hid, {high} if none did."
        if interval := interval_text(r):
            note += f" Measured it will take {interval}."
    time_s = reports[-1].step.time_s
    alone = len(reports) == 1
    colors = legend(
        (f"{s.label} {format_seconds(s.value)}, {share_text(s.value, time_s)}" if alone else s.label, s.look.color)
        for s in step_parts(reports)
    )
    numbers = folded("In numbers", _each(shown, lambda s: tables.step_table(s).html()))
    return section("Step time", note, colors, page.chart("step", step_chart(reports)), numbers, _feedback(shown))


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


def _communication(shown: Sequence[Shown], page: Page) -> str:
    reports = [s.report for s in shown]
    if not any(r.communication for r in reports):
        return section("Communication by axis and link", "No collective ran.")
    note = (
        "Time per step and GPU, of the eight largest. Where several run at once, each has an equal share, so that the "
        "bars add up. Alone: nothing else ran, so this is what a faster one would save at most."
    )
    parts = communication_parts(reports)
    if "overlapped" not in parts:
        note = "Time per step and GPU, of the eight largest. What of it compute covers is unknown."
    colors = legend((label, COLORS[key]) for key, label in parts.items())
    picture = page.chart("communication", communication_chart(reports))
    return section("Communication by axis and link", note, colors, picture, _each(shown, _communication_tables))


def _communication_tables(shown: Shown) -> str:
    if not shown.report.communication:
        return ""
    links = folded("By axis and link", tables.links_table(shown).html())
    links += folded("By kind of collective", tables.rows_table(shown).html())
    ops = tables.ops_table(shown)
    if not ops.rows:
        return links
    more = len(ops.rows) - _MAX_OPS
    rest = f'<p class="note">and {more} more, in report.json</p>' if more > 0 else ""
    title = f"Exposed seconds of the {len(ops.rows)} single collectives, ranked"
    return links + folded(title, replace(ops, rows=ops.rows[:_MAX_OPS]).html(), rest)


def _pipeline(shown: Sequence[Shown], page: Page) -> str:
    """The schedule of a pipeline as a picture, and what it costs."""
    found = [s for s in shown if s.report.pipeline is not None]
    part = found[0].report.pipeline if found else None
    if part is None:
        return ""
    note = (
        f"{part.schedule}: {part.stages} stages, {part.virtual_stages} chunks of layers on each, {part.microbatches} "
        "microbatches. In a tick every stage runs one chunk forward (upper row) and one backward (lower row); grey: "
        "it has nothing to do there and computes on garbage, which is the bubble. Ticks are drawn alike; one that "
        "goes both ways takes longer."
    )
    figure = schedule_chart(part)
    drawn = page.chart("pipeline", figure, "wide") if figure else ""
    colors = legend(schedule_legend(part)) if figure else ""
    return section("Pipeline", note, colors, drawn, _each(found, lambda s: tables.pipeline_table(s).html()))


def _timeline(shown: Shown, timeline: Timeline | None, page: Page, trace_file: str | None) -> str:
    """One step of several GPUs, of which one is shown at a time."""
    charts = timeline_charts(timeline) if timeline else []
    if not charts:
        return ""
    report = shown.report
    names = [f"timeline-{report.source}-{i}" for i in range(len(charts))]
    options = "".join(f'<option value="{n}">{escape(label)}</option>' for n, (label, _) in zip(names, charts))
    select = f"<select data-timeline>{options}</select>" if len(charts) > 1 else ""
    drawn = [page.chart(n, c, "timeline", hidden=i > 0) for i, (n, (_, c)) in enumerate(zip(names, charts))]
    title = f"<h2>Timeline of one {WORD[report.source]} step{select}</h2>"
    note = (
        "Drag to move, scroll or pinch to zoom, double-click to see all. Red in an axis's lane: its exposed parts, "
        "under which nothing computes."
    )
    if trace_file:
        note += f" All steps are in {trace_file}, which ui.perfetto.dev and chrome://tracing open."
    return f'<section>{title}<p class="note">{escape(note)}</p>{"".join(drawn)}</section>'


def _kernels(shown: Sequence[Shown], page: Page) -> str:
    figure = kernels_chart([s.report for s in shown])
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
    """The captured steps one by one, and the metrics of the whole run."""
    parts = []
    for s in shown:
        steps, history = per_step_chart(s.report), history_chart(s.report)
        if steps is not None:
            colors = legend((share.label, share.look.color) for share in step_shares(s.report.step))
            parts.append("<h3>the captured steps, means over their devices</h3>" + colors)
            parts.append(page.chart(f"per-step-{s.report.source}", steps))
        if history is not None:
            parts.append("<h3>the whole run, from its metrics</h3>")
            words = trend_text(s.report)
            parts.append(f'<p class="note">{escape(words)}</p>' if words else "")
            parts.append(page.chart(f"history-{s.report.source}", history, "wide"))
    return below("Over the steps", "", *parts) if parts else ""


def _goodput(shown: Sequence[Shown], page: Page) -> str:
    """What the wall time of the run went to; of two reports the measured one's, which stands last."""
    known = [s for s in shown if s.report.goodput is not None]
    part = known[-1].report.goodput if known else None
    if part is None:
        return ""
    note = (
        "What every second of the run's wall time went to, over all its attempts. Goodput is the share of steps that "
        "count; lost steps were made again by a later attempt, restart lies between two attempts."
    )
    colors = legend((share.label, share.look.color) for share in goodput_shares(part))
    numbers = tables.goodput_table(known[-1]).html()
    return below("Goodput of the run", note, colors, page.chart("goodput", goodput_chart(part)), numbers)


def _memory(shown: Sequence[Shown], page: Page) -> str:
    """What the fullest GPU holds, against its capacity and the budget."""
    known = [s.report for s in shown if s.report.memory.peak_bytes is not None]
    if not known:
        return ""
    lines = [f"{WORD[r.source]}: {memory_text(r)}." for r in known]
    m = known[0].memory
    limits = [
        f"{mark}: {word} {format_bytes(v)}"
        for mark, word, v in (("Line", "capacity", m.capacity_bytes), ("Dashed", "budget", m.pool_bytes))
        if v
    ]
    note = " ".join(lines) + f" {', '.join(limits)}. The budget is what the program may take; the rest is left to CUDA "
    colors = legend((part.label, part.look.color) for part in memory_parts(known))
    numbers = _each(shown, lambda s: folded("In numbers", tables.memory_table(s).html()))
    return below(
        "Memory of the fullest GPU", note + "and NCCL.", colors, page.chart("memory", memory_chart(known)), numbers
    )


def _quality(shown: Sequence[Shown]) -> str:
    measured = [s for s in shown if s.report.source != "plan"]
    found = _each(measured, lambda s: tables.quality_table(s).html())
    return below("Data quality", "What the measurement rests on.", found) if found else ""


def _footer(reports: Sequence[Report]) -> str:
    """With what the programs were compiled."""
    parts = []
    for r in reports:
        p, c = r.program, r.compile
        known = [f"jax {p.jax}" if p.jax else "", f"jaxlib {p.jaxlib}" if p.jaxlib else "", p.partitioner or ""]
        known.append(f"program {p.fingerprint}" if p.fingerprint else "")
        known.append(f"compiled in {format_seconds(c.compile_s)}" if c.compile_s is not None else "")
        parts.append(f"{WORD[r.source]}: {', '.join(k for k in known if k) or '-'}")
    return f"<footer>meshkit.report/1 · {escape(' · '.join(parts))}</footer>"
