"""A sweep over sizes, on a terminal and as an HTML page."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshkit.report.views.charts import COLORS, FONT
from meshkit.report.views.page import cells, chart, section, table, write_page
from meshkit.units import format_bytes, format_percent, format_seconds
from meshkit.verbs.plan.outcome import mesh_text

_COLUMNS = ("GPUs", "batch", "step", "exposed", "of step", "MFU", "efficiency", "memory")


def render(report: Any) -> RenderableType:
    """The sweep (a ScalingReport), for `rich.print`."""
    title = f"{report.experiment} on {report.gpu}: {report.kind} scaling, axis '{report.axis}' grows"
    drawn = Table(box=None, padding=(0, 1), show_edge=False, pad_edge=False)
    drawn.add_column("mesh", overflow="fold", ratio=1)
    for name in _COLUMNS:
        drawn.add_column(name, justify="right", no_wrap=True)
    for point in report.points:
        drawn.add_row(_mesh(point), *_cells(point), style="" if point.outcome.fits else "red")
    notes = [Text(f"{p.num_gpus} GPUs: {p.outcome.error}", "red") for p in report.points if p.outcome.error]
    return Group(Text(title, "bold underline"), drawn, *notes)


def write_scaling_html(report: Any, path: str | Path) -> Path:
    """Writes the page and returns its path.

    Raises:
        ConfigError: Plotly, which draws the charts, is not installed.
    """
    figures: dict[str, dict] = {}
    headline = f"{report.experiment}: {report.kind} scaling"
    sub = f"{report.gpu} · axis {report.axis} grows · {_batch_words(report)}"
    rows = [cells("td", (_mesh(p),), _cells(p)) for p in report.points]
    note = "Tokens per second per GPU, relative to the smallest size; the step below, by what it is made of."
    body = [
        f'<h1>{escape(headline)}</h1>\n<p class="sub">{escape(sub)}</p>',
        section(
            "Efficiency",
            note,
            chart("efficiency", efficiency_chart(report), figures),
            chart("steps", steps_chart(report), figures),
        ),
        section("Sizes", "", table(cells("th", ("mesh",), _COLUMNS), rows)),
    ]
    return write_page(path, headline, body, figures)


def efficiency_chart(report: Any) -> dict:
    """Efficiency against GPUs; with a line where one NVLink domain ends."""
    points = [p for p in report.points if p.efficiency is not None]
    line = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "efficiency",
        "x": [p.num_gpus for p in points],
        "y": [100 * p.efficiency for p in points],
        "hovertemplate": "%{x} GPUs: %{y:.1f} %<extra></extra>",
        "line": {"color": COLORS["compute"]},
    }
    layout = _layout(300)
    layout["xaxis"] |= {"type": "log", "tickvals": [p.num_gpus for p in points], "title": {"text": "GPUs"}}
    layout["yaxis"] |= {"ticksuffix": " %", "rangemode": "tozero"}
    return {"data": [line], "layout": layout}


def steps_chart(report: Any) -> dict:
    """What a step is made of at every size."""
    points = [p for p in report.points if p.outcome.time_s]
    names = [str(p.num_gpus) for p in points]
    parts = {
        "compute": [p.outcome.compute_s for p in points],
        "exposed": [p.outcome.exposed_s for p in points],
        "idle": [p.outcome.idle_s for p in points],
    }
    labels = {"compute": "compute", "exposed": "exposed communication", "idle": "idle"}
    data = [
        {"type": "bar", "name": labels[key], "x": names, "y": values, "marker": {"color": COLORS[key]},
         "hovertemplate": f"{labels[key]}: %{{y:.4~g}} s<extra></extra>"}
        for key, values in parts.items()
    ]  # fmt: skip
    layout = _layout(320)
    layout["barmode"] = "stack"
    layout["xaxis"] |= {"type": "category", "title": {"text": "GPUs"}}
    layout["yaxis"] |= {"ticksuffix": " s"}
    return {"data": data, "layout": layout}


def _layout(height: int) -> dict[str, Any]:
    grid = {"gridcolor": "#e6e9ee", "zeroline": False, "automargin": True}
    return {
        "height": height,
        "font": FONT,
        "margin": {"l": 10, "r": 20, "t": 10, "b": 30},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "xaxis": dict(grid),
        "yaxis": dict(grid),
    }


def _batch_words(report: Any) -> str:
    batches = {p.global_batch for p in report.points}
    first = report.points[0]
    return f"batch {first.global_batch}" if len(batches) == 1 else f"batch {first.global_batch} at the smallest size"


def _mesh(point: Any) -> str:
    return mesh_text(point.outcome)


def _cells(point: Any) -> tuple[str, ...]:
    outcome = point.outcome
    fits = " (too large)" if outcome.status == "does_not_fit" else ""
    return (
        str(point.num_gpus),
        str(point.global_batch),
        format_seconds(outcome.time_s),
        format_seconds(outcome.exposed_s),
        format_percent(point.exposed_share),
        format_percent(outcome.mfu),
        format_percent(point.efficiency),
        f"{format_bytes(outcome.peak_bytes)}{fits}",
    )
