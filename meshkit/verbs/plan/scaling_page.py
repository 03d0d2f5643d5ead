"""Show the result of `meshkit plan --sweep`: a table for the terminal, and an HTML page with charts.

The page shows the efficiency and the parts of a step (compute, exposed communication, idle) at each number of GPUs.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from meshkit.report.views.charts import COLORS, legend_frame
from meshkit.report.views.page import Page, Table, number_columns, section, text_columns
from meshkit.search.candidate import mesh_text
from meshkit.search.scaling import ScalingReport
from meshkit.units import format_bytes, format_percent, format_seconds


def render(report: ScalingReport) -> RenderableType:
    """Return the sweep as a renderable for `rich.print`."""
    title = f"{report.experiment} on {report.gpu}: {_kind(report)}, axis '{report.axis}' grows"
    notes = [Text(f"{p.num_gpus} GPUs: {p.outcome.error}", "red") for p in report.points if p.outcome.error]
    return Group(Text(title, "bold underline"), _sizes(report).terminal(), *notes)


def write_scaling_html(report: ScalingReport, path: str | Path) -> Path:
    """Write the HTML page of a sweep and return its path.

    Raises:
        ConfigError: Plotly, which draws the charts, is not installed.
    """
    batches = {p.global_batch for p in report.points}
    batch = f" · batch {report.points[0].global_batch}{'' if len(batches) == 1 else ' at the smallest size'}"
    known = "" if batches == {None} else batch
    page = Page(f"{report.experiment}: {_kind(report)}", f"{report.gpu} · axis {report.axis} grows{known}")
    note = "Above: tokens per second per GPU, relative to the smallest size. Below: the parts of the step."
    charts = page.chart("efficiency", efficiency_chart(report)), page.chart("steps", steps_chart(report))
    page.add(section("Efficiency", note, *charts), section("Sizes", "", _sizes(report).html()))
    return page.write(path)


def _kind(report: ScalingReport) -> str:
    return "its own batch at each size" if report.kind == "program" else f"{report.kind} scaling"


def _sizes(report: ScalingReport) -> Table:
    columns = number_columns("GPUs", "batch", "step", "exposed", "of step", "MFU", "efficiency", "memory")
    rows, styles = [], []
    for point in report.points:
        outcome = point.outcome
        too_large = " (too large)" if outcome.status == "does_not_fit" else ""
        rows.append(
            (
                mesh_text(outcome),
                str(point.num_gpus),
                "-" if point.global_batch is None else str(point.global_batch),
                format_seconds(outcome.time_s),
                format_seconds(outcome.exposed_s),
                format_percent(point.exposed_share),
                format_percent(outcome.mfu),
                format_percent(point.efficiency),
                f"{format_bytes(outcome.peak_bytes)}{too_large}",
            )
        )
        styles.append("" if outcome.fits else "red")
    return Table([*text_columns("mesh"), *columns], rows, styles)


def efficiency_chart(report: ScalingReport) -> dict:
    """Return a Plotly chart of the efficiency against the number of GPUs."""
    points = [p for p in report.points if p.efficiency is not None]
    line = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "efficiency",
        "x": [p.num_gpus for p in points],
        "y": [100 * (p.efficiency or 0.0) for p in points],
        "hovertemplate": "%{x} GPUs: %{y:.1f} %<extra></extra>",
        "line": {"color": COLORS["compute"]},
    }
    layout = legend_frame(300)
    layout["xaxis"] |= {"type": "log", "tickvals": [p.num_gpus for p in points], "title": {"text": "GPUs"}}
    layout["yaxis"] |= {"ticksuffix": " %", "rangemode": "tozero"}
    return {"data": [line], "layout": layout}


def steps_chart(report: ScalingReport) -> dict:
    """Return a Plotly chart of the parts of a step at each number of GPUs."""
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
    layout = legend_frame(320)
    layout["barmode"] = "stack"
    layout["xaxis"] |= {"type": "category", "title": {"text": "GPUs"}}
    layout["yaxis"] |= {"ticksuffix": " s"}
    return {"data": data, "layout": layout}
