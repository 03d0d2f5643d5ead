"""The timeline of one step of a GPU, as the plain dictionaries that Plotly draws."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshkit.report.views.charts import AXIS_COLORS, COLORS, layout_of, narrow_layout, unit_of
from meshkit.report.views.lanes import Lane, lanes, step_to_draw
from meshkit.timeline import DeviceStep, Timeline

_LANE, _EXPOSED_PART = 0.72, 0.2  # heights, of the distance between lanes


def timeline_charts(timeline: Timeline) -> list[tuple[str, dict]]:
    """One chart per GPU of one step, with the GPU's name; the page shows one at a time."""
    drawn = step_to_draw(timeline) if timeline.steps else []
    return [(f"GPU {step.device}, step {step.step}", _timeline_chart(timeline, step)) for step in drawn]


def _timeline_chart(timeline: Timeline, step: DeviceStep) -> dict:
    length_s = step.window[1] - step.window[0]
    scale, unit = unit_of(length_s)
    data, ticks = [], []
    colors = iter(AXIS_COLORS * 4)
    for lane in lanes(timeline, step):
        ticks.append(lane.name)
        color = COLORS[lane.kind] if lane.kind in COLORS else next(colors)
        data.append(_spans(lane, lane.spans, lane.labels, color, scale, unit))
        if len(lane.exposed):
            texts = [f"{lane.name}: exposed"] * len(lane.exposed)
            under = _spans(lane, lane.exposed, texts, COLORS["exposed"], scale, unit)
            data.append(under | {"name": f"{lane.name}: exposed", "width": _EXPOSED_PART, "offset": 0.16})
    layout: dict[str, Any] = layout_of(72 + 36 * len(ticks), unit) | {"barmode": "overlay", "dragmode": "pan"}
    layout["margin"] = layout["margin"] | {"t": 34}
    layout["modebar"] = {"bgcolor": "rgba(0,0,0,0)", "color": "#a9b4c2", "activecolor": "#28323c"}
    layout["xaxis"] = layout["xaxis"] | {"range": [0, length_s * scale]}
    # the order of the lanes is fixed, so that one that is hidden (or has a part drawn twice) moves no other
    places = {"categoryorder": "array", "categoryarray": ticks, "range": [len(ticks) - 0.5, -0.5]}
    layout["yaxis"] = layout["yaxis"] | places | {"fixedrange": True}
    return {"data": data, "layout": layout, "narrow": narrow_layout(ticks, ticks, 54, 44, lift=18)}


def _spans(lane: Lane, spans, labels: Iterable[str], color: str, scale: float, unit: str) -> dict:
    return {
        "type": "bar",
        "orientation": "h",
        "name": lane.name,
        "y": [lane.name] * len(spans),
        "base": _rounded(spans[:, 0] * scale),
        "x": _rounded((spans[:, 1] - spans[:, 0]) * scale),
        "customdata": list(labels),
        "hovertemplate": f"%{{customdata}}<br>at %{{base:.4~f}} {unit}, %{{x:.4~f}} {unit}<extra></extra>",
        "marker": {"color": color, "line": {"width": 0}},
        "width": _LANE,
        "showlegend": False,
    }


def _rounded(values) -> list[float]:
    """Six digits are finer than a pixel, and a third of the bytes."""
    return [float(f"{v:.6g}") for v in values]
