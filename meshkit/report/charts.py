"""The page's charts, as the plain dictionaries that Plotly draws. Layer 6; no jax."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshkit.report.lanes import lanes, step_to_draw
from meshkit.report.schema import CommunicationPart, Report
from meshkit.report.view import WORD, axes_text, memory_shares, row_name, step_shares
from meshkit.timeline.spans import DeviceStep, Timeline
from meshkit.units import GIB, format_bytes, format_percent, format_seconds

COLORS = {
    "compute": "#3f7cac",
    "overlapped": "#95c5e8",
    "exposed": "#d1495b",
    "other": "#edae49",
    "copies": "#edae49",
    "idle": "#d9dde3",
    "parameters": "#30638e",
    "optimizer": "#5b9bc9",
    "gradients": "#8f6bb0",
    "activations": "#4c9f70",
    "temporary": "#edae49",
    "rest": "#a9b4c2",
    "reserved": "#6c757d",
}
AXIS_COLORS = ("#4c9f70", "#8f6bb0", "#c77d2e", "#2a9d9d", "#b5678a", "#7a8b3a", "#5b6fb5", "#8d6e63")
_MAX_ROWS = 14
_VISIBLE = 2e-3  # of all communication: a shorter bar is no wider than a pixel
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": "#28323c"}


def step_chart(reports: Sequence[Report]) -> dict:
    """The step's time, one stacked bar per report."""
    names = [_name(r, reports) for r in reports]
    scale, unit = _unit(max(r.step.time_s or 0.0 for r in reports))
    data = []
    for i, share in enumerate(step_shares(reports[0])):
        parts = [step_shares(r)[i].value for r in reports]
        percents = [format_percent(v / r.step.time_s) if v and r.step.time_s else "" for v, r in zip(parts, reports)]
        texts = [f"{format_seconds(v)}<br>{p}" for v, p in zip(parts, percents)]
        data.append(_bar(share.label, [_scaled(v, scale) for v in parts], names, COLORS[share.key], texts))
    return {"data": data, "layout": _layout(88 + 56 * len(reports), unit, barmode="stack", reverse=True)}


def communication_chart(reports: Sequence[Report]) -> dict:
    """Overlapped and exposed time of each axis, link and collective; two bars each where there are two reports."""
    labels = _largest_labels(reports)
    scale, unit = _unit(max((r.time_s or 0.0 for report in reports for r in report.communication), default=0.0))
    data = []
    for report in reports:
        found = _seconds_by_label(report)
        name = _name(report, reports)
        y = labels if len(reports) == 1 else [labels, [name] * len(labels)]
        for key in ("overlapped", "exposed"):
            values = [found.get(label, {}).get(key) for label in labels]
            texts = [f"{key} {format_seconds(v)}" for v in values]
            bar = _bar(key, [_scaled(v, scale) for v in values], y, COLORS[key], texts, inside=False)
            data.append(bar | {"legendgroup": key, "showlegend": report is reports[0]})
    height = 84 + (34 if len(reports) == 1 else 26 * len(reports)) * len(labels)
    return {"data": data, "layout": _layout(height, unit, barmode="stack", reverse=True)}


def memory_chart(reports: Sequence[Report]) -> dict | None:
    """What the fullest GPU holds, against its capacity and what the program may take; None where unknown."""
    known = [r for r in reports if r.memory.peak_bytes is not None]
    if not known:
        return None
    names = [_name(r, reports) for r in known]
    parts = {s.key: s.label for r in known for s in memory_shares(r)}
    data = []
    for key, label in parts.items():
        values = [next((s.value for s in memory_shares(r) if s.key == key), None) for r in known]
        texts = [format_bytes(v) if v else "" for v in values]
        data.append(_bar(label, [(v or 0) / GIB for v in values], names, COLORS[key], texts))
    layout = _layout(108 + 56 * len(known), "GiB", barmode="stack", reverse=True)
    m = known[0].memory
    limits = [("capacity", m.capacity_bytes, "solid"), ("budget", m.pool_bytes, "dash")]
    # two limits lie close together: their names stand on either side, so that they do not overlap
    drawn = [(text, v / GIB, dash) for text, v, dash in limits if v]
    layout["shapes"] = [_line(x, dash) for _, x, dash in drawn]
    layout["annotations"] = [_limit_text(text, x, "left" if text == "capacity" else "right") for text, x, _ in drawn]
    if drawn:
        peak = max((r.memory.peak_bytes or 0) for r in known) / GIB
        layout["xaxis"]["range"] = [0, 1.12 * max(peak, *(x for _, x, _ in drawn))]
    return {"data": data, "layout": layout}


def timeline_charts(timeline: Timeline) -> list[tuple[str, dict]]:
    """One chart per GPU of one step, with the GPU's name; the page shows one at a time."""
    drawn = step_to_draw(timeline) if timeline.steps else []
    return [(f"GPU {step.device}, step {step.step}", _timeline_chart(timeline, step)) for step in drawn]


def _timeline_chart(timeline: Timeline, step: DeviceStep) -> dict:
    length_s = step.window[1] - step.window[0]
    scale, unit = _unit(length_s)
    data, ticks = [], []
    colors = iter(AXIS_COLORS * 4)
    for lane in lanes(timeline, step):
        color = COLORS[lane.kind] if lane.kind in COLORS else next(colors)
        ticks.append(lane.name)
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": lane.name,
                "y": [lane.name] * len(lane.spans),
                "base": _rounded(lane.spans[:, 0] * scale),
                "x": _rounded((lane.spans[:, 1] - lane.spans[:, 0]) * scale),
                "customdata": list(lane.labels),
                "hovertemplate": f"%{{customdata}}<br>at %{{base:.4~f}} {unit}, %{{x:.4~f}} {unit}<extra></extra>",
                "marker": {"color": color, "line": {"width": 0}},
                "width": 0.72,
                "showlegend": False,
            }
        )
    layout = _layout(72 + 36 * len(ticks), unit, barmode="overlay", reverse=True)
    layout["margin"] |= {"t": 34}
    layout["modebar"] = {"bgcolor": "rgba(0,0,0,0)", "color": "#a9b4c2", "activecolor": "#28323c"}
    layout["xaxis"] |= {"range": [0, length_s * scale]}
    layout["yaxis"] |= {"fixedrange": True}
    return {"data": data, "layout": layout | {"dragmode": "pan"}}


def _rounded(values) -> list[float]:
    """Six digits are finer than a pixel, and a third of the bytes."""
    return [float(f"{v:.6g}") for v in values]


def _name(report: Report, reports: Sequence[Report]) -> str:
    word = WORD[report.source]
    if len(reports) > 1 and reports[0].source == reports[-1].source:
        return f"{word} {'A' if report is reports[0] else 'B'}"
    return word


def _label(row: CommunicationPart) -> str:
    return f"{axes_text(row.axes)} · {row.link or '-'} · {row_name(row)}"


def _seconds_by_label(report: Report) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    for row in report.communication:
        sums = found.setdefault(_label(row), {"overlapped": 0.0, "exposed": 0.0})
        sums["overlapped"] += row.overlapped_s or 0.0
        sums["exposed"] += row.exposed_s or 0.0
    return found


def _largest_labels(reports: Sequence[Report]) -> list[str]:
    """Labels of all reports, in the order of the tables: the most exposed first."""
    total: dict[str, np.ndarray] = {}
    for report in reports:
        for row in report.communication:
            seconds = np.array([row.exposed_s or 0.0, row.time_s or 0.0])
            total[_label(row)] = total.get(_label(row), np.zeros(2)) + seconds
    shortest_s = _VISIBLE * max(r.step.communication_s or 0.0 for r in reports)
    seen = [label for label, (_, time_s) in total.items() if time_s >= shortest_s] or list(total)
    return sorted(seen, key=lambda label: tuple(-total[label]))[:_MAX_ROWS]


def _unit(longest_s: float) -> tuple[float, str]:
    """The unit in which the longest time reads well, as (units per second, name)."""
    return next(((scale, name) for scale, name in ((1.0, "s"), (1e3, "ms")) if longest_s * scale >= 2), (1e6, "us"))


def _scaled(seconds: float | None, scale: float) -> float | None:
    return None if seconds is None else seconds * scale


def _bar(name: str, x: list, y: list, color: str, texts: list[str], *, inside: bool = True) -> dict:
    shown = {"text": texts, "textposition": "inside", "insidetextanchor": "middle", "textangle": 0} if inside else {}
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": x,
        "y": y,
        "marker": {"color": color},
        "customdata": texts,
        "hovertemplate": f"{name}: %{{customdata}}<extra></extra>",
        **shown,
    }


def _layout(height: int, unit: str, *, barmode: str, reverse: bool = False) -> dict:
    return {
        "height": height,
        "barmode": barmode,
        "bargap": 0.25,
        "font": FONT,
        "margin": {"l": 10, "r": 20, "t": 10, "b": 30},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "uniformtext": {"minsize": 10, "mode": "hide"},
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
        "xaxis": {"ticksuffix": f" {unit}", "gridcolor": "#e6e9ee", "zeroline": False, "rangemode": "tozero"},
        "yaxis": {
            "automargin": True,
            "autorange": "reversed" if reverse else True,
            "ticklabelstandoff": 8,
            "dividercolor": "#e6e9ee",
        },
        "hoverlabel": {"font": {"size": 12}},
    }


def _line(x: float, dash: str) -> dict:
    style = {"color": "#28323c", "width": 1.5, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": style}


def _limit_text(text: str, x: float, side: str) -> dict:
    shown = f"{text} {x:.1f} GiB"
    return {"x": x, "y": 1, "yref": "paper", "text": shown, "showarrow": False, "xanchor": side, "yanchor": "bottom"}
