"""A benchmark as an HTML page that opens offline: bus bandwidth against size per axis."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

from meshkit.report.views.charts import AXIS_COLORS, FONT
from meshkit.report.views.page import cells, chart, section, table, warning_panel, write_page
from meshkit.units import format_bytes, format_percent, format_rate, format_seconds
from meshkit.verbs.bench.bench_report import BenchFit, BenchReport, BenchRow
from meshkit.verbs.bench.bench_views import (
    COLUMNS,
    UNITS,
    collective_words,
    fit_texts,
    group_words,
    grouped,
    machine,
    mesh_words,
    rates_lines,
    row_texts,
    summary,
)

# beyond the colours of the mesh axes, so that each of ten collectives has its own
_COLORS = (*AXIS_COLORS, "#3f7cac", "#d1495b", "#6c757d")
_POINTS_OF_A_LINE = 60


def write_html(report: BenchReport, path: str | Path, *, title: str | None = None) -> Path:
    """Writes the page and returns its path.

    Raises:
        ConfigError: Plotly, which draws the charts, is not installed.
    """
    headline = f"{title}: measured links" if title else "Measured links"
    figures: dict[str, dict] = {}
    sub = " · ".join((machine(report), f"mesh {mesh_words(report)}", report.date))
    body = [f'<h1>{escape(headline)}</h1>\n<p class="sub">{escape(sub)}</p>', _cards(report)]
    body.append(warning_panel(w.message for w in report.warnings))
    for index, axes in enumerate(dict.fromkeys(row.axes for row in report.rows if row.axes)):
        body.append(_axis_section(report, axes, f"axis-{index}", figures))
    body += [_copy_section(report, figures), _rates_section(report)]
    body.append(f"<footer>meshkit.bench/1 · {escape(summary(report))}</footer>")
    return write_page(path, headline, body, figures)


def bandwidth_chart(rows: Sequence[BenchRow], fits: Sequence[BenchFit]) -> dict:
    """Bus bandwidth against size, one colour per collective: marks where measured, a dotted line where fitted."""
    data = []
    measured = [group for group in grouped(rows) if group[0].bus_bandwidth_bytes_per_s is not None]
    for group, color in zip(measured, _COLORS * 2):
        name = collective_words(group[0])
        data.append(_marks(group, name, color))
        fit = next((f for f in fits if _is_fit_of(f, group[0])), None)
        if fit is not None:
            data.append(_line(group, fit, name, color))
    return {"data": data, "layout": _layout()}


def _is_fit_of(fit: BenchFit, row: BenchRow) -> bool:
    shapes = ((x.link, x.collective, x.gpus_per_domain, x.domains) for x in (fit, row))
    return len(set(shapes)) == 1


def _marks(rows: Sequence[BenchRow], name: str, color: str) -> dict:
    texts = [f"{format_bytes(r.size_bytes)}, {format_seconds(r.time_s)}, {r.wrong} wrong" for r in rows]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "legendgroup": name,
        "x": [r.size_bytes for r in rows],
        "y": [(r.bus_bandwidth_bytes_per_s or 0.0) / 1e9 for r in rows],
        "customdata": texts,
        "hovertemplate": "%{y:.3~g} GB/s at %{customdata}<extra>" + escape(name) + "</extra>",
        "marker": {"color": color, "size": 7},
        "line": {"color": color, "width": 1.2},
    }


def _line(rows: Sequence[BenchRow], fit: BenchFit, name: str, color: str) -> dict:
    sizes = np.geomspace(rows[0].size_bytes, rows[-1].size_bytes, _POINTS_OF_A_LINE)
    wire = sizes * (rows[0].wire_bytes or 0.0) / rows[0].size_bytes
    rates = wire / (fit.latency_s + wire / fit.bytes_per_s) / 1e9
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"{name}, fitted",
        "legendgroup": name,
        "showlegend": False,
        "x": [float(f"{s:.6g}") for s in sizes],
        "y": [float(f"{r:.6g}") for r in rates],
        "hoverinfo": "skip",
        "line": {"color": color, "width": 1.5, "dash": "dot"},
    }


def _layout() -> dict:
    sizes = [2**exponent for exponent in range(10, 37, 4)]
    grid = {"gridcolor": "#e6e9ee", "zeroline": False, "type": "log"}
    return {
        "height": 430,
        "font": FONT,
        "margin": {"l": 10, "r": 20, "t": 10, "b": 30},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "v"},
        "xaxis": {**grid, "tickvals": sizes, "ticktext": [_tick(s) for s in sizes]},
        "yaxis": {**grid, "ticksuffix": " GB/s", "automargin": True, "dtick": 1},
        "hoverlabel": {"font": {"size": 12}},
    }


def _tick(size_bytes: int) -> str:
    """`16 KiB`: sizes on the axis are whole numbers of their unit."""
    number, unit = format_bytes(size_bytes).split(" ")
    return f"{float(number):g} {unit}"


def _cards(report: BenchReport) -> str:
    def card(value: str, label: str, css: str = "") -> str:
        return f'<div class="card {css}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'

    cards = [card(f"{report.wrong}", f"wrong results in {len(report.rows)} cases", "bad" if report.wrong else "good")]
    cards.append(card(format_percent(report.residual_median), "median error of latency + bandwidth"))
    fastest: dict[str, BenchFit] = {}
    for fit in report.fits:
        if fit.collective == "all-reduce" and fit.bytes_per_s > getattr(fastest.get(fit.link), "bytes_per_s", 0.0):
            fastest[fit.link] = fit
    cards += [card(format_rate(fit.bytes_per_s), f"all-reduce on {link}, bus") for link, fit in fastest.items()]
    return f'<div class="cards">{"".join(cards)}</div>'


def _axis_section(report: BenchReport, axes: tuple[str, ...], name: str, figures: dict[str, dict]) -> str:
    rows = [row for row in report.rows if row.axes == axes]
    fits = [fit for fit in report.fits if any(_is_fit_of(fit, row) for row in rows)]
    note = (
        f"{group_words(rows[0])}, {rows[0].num_groups} groups at once. Bus bandwidth per GPU, one direction, as "
        "nccl-tests counts it. Dotted: latency + bandwidth as fitted."
    )
    fit_rows = [cells("td", (collective_words(fit),), fit_texts(fit)) for fit in fits]
    fit_table = table(cells("th", ("collective",), ("latency", "bus bw", "points", "median error")), fit_rows)
    drawn = chart(name, bandwidth_chart(rows, fits), figures)
    return section(f"Axis {', '.join(axes)}", note, drawn, fit_table, _all_rows(rows))


def _copy_section(report: BenchReport, figures: dict[str, dict]) -> str:
    rows = [row for row in report.rows if not row.axes]
    if not rows:
        return ""
    note = "Size over time, on all devices at once; memory carries twice that, read and written."
    return section("Copy on the device", note, chart("copy", bandwidth_chart(rows, ()), figures), _all_rows(rows))


def _rates_section(report: BenchReport) -> str:
    lines = [line.split(": ", 1) for line in rates_lines(report)]
    if not lines:
        return ""
    rows = [cells("td", (name,), (value,)) for name, value in lines]
    note = "One device alone, on random data, long enough to reach its sustained clock."
    return section("Sustained rates", note, table(cells("th", ("work",), ("rate",)), rows))


def _all_rows(rows: Sequence[BenchRow]) -> str:
    heads = [f"{name} ({unit})" if unit else name for name, unit in zip(COLUMNS, UNITS)]
    body = [cells("td", (collective_words(row),), row_texts(row)) for group in grouped(rows) for row in group]
    listed = table(cells("th", ("collective",), heads), body)
    return f"<details><summary>All {len(rows)} measurements</summary>{listed}</details>"
