"""A search as an HTML page that opens offline: time against memory, and every variant."""

from __future__ import annotations

from html import escape
from pathlib import Path

from meshkit.report.views.charts import FONT
from meshkit.report.views.page import cells, chart, section, table, write_page
from meshkit.units import GIB, format_bytes, format_percent, format_seconds
from meshkit.verbs.plan.outcome import Outcome, mesh_text
from meshkit.verbs.tune.tune_report import TuneReport
from meshkit.verbs.tune.tune_views import COLUMNS, RULE_WORDS, best_first, cells_of, what_text

SIZE_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "pentagon")  # the experiment's own size first
_FITS, _TOO_LARGE, _WINNER, _BASE = "#3f7cac", "#d1495b", "#4c9f70", "#28323c"


def write_tune_html(report: TuneReport, path: str | Path) -> Path:
    """Writes the page and returns its path.

    Raises:
        ConfigError: Plotly, which draws the charts, is not installed.
    """
    figures: dict[str, dict] = {}
    headline = f"{report.experiment}: {report.compiled} variants"
    sub = f"{report.num_gpus} x {report.gpu} · global batch {report.global_batch}"
    body = [f'<h1>{escape(headline)}</h1>\n<p class="sub">{escape(sub)}</p>', _cards(report), _why(report)]
    note = (
        "Each point is a compiled variant, its form says on how many GPUs. The line joins those that no other of the "
        "same size beats in both; what lies right of the dashed line does not fit."
    )
    body.append(section("Step time against memory", note, chart("pareto", pareto_chart(report), figures)))
    body.append(_differences(report))
    body.append(_pruned(report))
    rows = [cells("td", (what_text(o),), cells_of(o)) for o in best_first(report.outcomes)]
    body.append(section("Variants", "The fastest first.", table(cells("th", ("variant",), COLUMNS), rows)))
    return write_page(path, headline, body, figures)


def pareto_chart(report: TuneReport) -> dict:
    """Time against memory of what was compiled, and the front."""
    drawn = [o for o in report.outcomes if o.time_s is not None and o.peak_bytes is not None]
    sizes = sorted({o.num_gpus or 0 for o in drawn}, key=lambda n: (n != report.num_gpus, n))
    fitting = [(n, [o for o in drawn if o.fits and (o.num_gpus or 0) == n]) for n in sizes]
    groups = [
        *((f"{n} GPUs", members, _FITS, SIZE_SYMBOLS[min(i, 4)], 9) for i, (n, members) in enumerate(fitting)),
        ("does not fit", [o for o in drawn if not o.fits], _TOO_LARGE, "x", 8),
        ("as it is", [o for o in drawn if not o.settings], _BASE, "diamond-open", 15),
        ("the winner", [o for o in drawn if o == report.winner], _WINNER, "star", 15),
    ]
    data = [_points(name, members, color, symbol, size) for name, members, color, symbol, size in groups if members]
    data += [line for n in sizes if (line := _front(report, n))]
    return {"data": data, "layout": _layout(report)}


def _front(report: TuneReport, gpus: int) -> dict | None:
    """The line through those of one size that no other beats; None where there is none of them."""
    front = [report.outcomes[i] for i in report.pareto if (report.outcomes[i].num_gpus or 0) == gpus]
    front.sort(key=lambda o: o.peak_bytes or 0)
    if not front:
        return None
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"no other beats them, {gpus} GPUs",
        "x": [(o.peak_bytes or 0) / GIB for o in front],
        "y": [o.time_s for o in front],
        "line": {"color": _WINNER, "width": 1.2, "shape": "hv"},
        "hoverinfo": "skip",
    }


def _points(name: str, outcomes: list[Outcome], color: str, symbol: str, size: int) -> dict:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [(o.peak_bytes or 0) / GIB for o in outcomes],
        "y": [o.time_s for o in outcomes],
        "customdata": [f"{what_text(o)}<br>{o.num_gpus} GPUs" for o in outcomes],
        "hovertemplate": "%{y:.4~g} s, %{x:.3~g} GiB<br>%{customdata}<extra></extra>",
        "marker": {"color": color, "size": size, "symbol": symbol},
    }


def _layout(report: TuneReport) -> dict:
    grid = {"gridcolor": "#e6e9ee", "zeroline": False, "automargin": True}
    layout = {
        "height": 460,
        "font": FONT,
        "margin": {"l": 10, "r": 20, "t": 10, "b": 30},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": {**grid, "ticksuffix": " GiB"},
        "yaxis": {**grid, "ticksuffix": " s"},
        "hoverlabel": {"font": {"size": 12}},
    }
    if report.base.pool_bytes:
        x = report.base.pool_bytes / GIB
        style = {"color": _BASE, "width": 1.2, "dash": "dash"}
        layout["shapes"] = [{"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": style}]
    return layout


def _cards(report: TuneReport) -> str:
    def card(value: str, label: str, css: str = "") -> str:
        return f'<div class="card {css}"><b>{escape(value)}</b><span>{escape(label)}</span></div>'

    found = []
    if report.winner is not None:
        found.append(card(format_seconds(report.winner.time_s), f"a step: {mesh_text(report.winner)}", "good"))
        found.append(card(format_percent(report.winner.mfu), "MFU"))
        found.append(card(format_bytes(report.winner.peak_bytes), f"of {format_bytes(report.winner.pool_bytes)}"))
    found.append(card(format_seconds(report.base.time_s), "as the experiment is"))
    found.append(card(f"{report.space:,}", f"variants, {report.compiled} of them compiled"))
    return f'<div class="cards">{"".join(found)}</div>'


def _why(report: TuneReport) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in report.why)
    settings = " ".join(f"--set '{s}'" for s in report.winner.settings) if report.winner else ""
    shown = f"<p><code>{escape(settings)}</code></p>" if settings else ""
    return section("Why it wins", "Against the experiment as it is.", f"<ul>{items}</ul>{shown}")


def _differences(report: TuneReport) -> str:
    rows = [
        cells("td", (d.name,), tuple(format_seconds(x) for x in (d.base_s, d.winner_s, d.saved_s)))
        for d in report.differences
    ]
    if not rows:
        return ""
    head = cells("th", ("",), ("as it is", "the winner", "saved"))
    return section("Where the time went", "Seconds of a step; they add up to the difference.", table(head, rows))


def _pruned(report: TuneReport) -> str:
    rows = [cells("td", (RULE_WORDS.get(p.rule, p.rule), p.example or ""), (f"{p.count:,}",)) for p in report.pruned]
    head = cells("th", ("why", "for example"), ("variants",))
    return section("Ruled out without a compile", "By closed forms.", table(head, rows))
