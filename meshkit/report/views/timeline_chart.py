"""One step of one GPU as the plain dictionaries that Plotly draws: lanes of compute, exposed, each axis and copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshkit.report.views.charts import AXIS_COLORS, COLORS, layout_of, narrow_layout, unit_of
from meshkit.report.views.words import axes_text
from meshkit.timeline import DeviceStep, Timeline, exposed_spans

_LANE, _EXPOSED_PART = 0.72, 0.2  # heights, of the distance between lanes
_MAX_SPANS = 1500  # per lane: what a browser still pans smoothly
_RESOLUTION = 3000  # of a step: gaps shorter than this part of it are closed where there are too many spans
_MAX_DEVICES = 8


@dataclass(frozen=True)
class Lane:
    """Spans that are drawn on one line."""

    name: str  # what the axis of the chart says
    kind: str  # `compute`, `communication`, `exposed` or `copies`
    spans: np.ndarray  # [n, 2] seconds from the start of the step
    labels: Sequence[str]  # [n] what each span is
    exposed: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    """[k, 2] the parts of communication under which nothing computes."""


def step_to_draw(timeline: Timeline) -> list[DeviceStep]:
    """One step of up to eight devices: the one whose slowest device is the median, so neither a hiccup nor luck."""
    numbers = sorted({s.step for s in timeline.steps})
    longest = {n: max(s.window[1] - s.window[0] for s in timeline.steps if s.step == n) for n in numbers}
    chosen = sorted(numbers, key=longest.__getitem__)[len(numbers) // 2]
    return sorted((s for s in timeline.steps if s.step == chosen), key=lambda s: s.device)[:_MAX_DEVICES]


def lanes(timeline: Timeline, step: DeviceStep) -> list[Lane]:
    """The lanes of one device step, from top to bottom; lanes without spans are left out."""
    start = step.window[0]
    found = [_lane("compute", "compute", step.compute - start, step.compute_op, timeline.op_names, step)]
    exposed = exposed_spans(step)
    found.append(_lane("exposed", "exposed", exposed, None, (), step))
    names = [f"{c.name} ({c.collective} {c.dtype})" for c in timeline.collectives] + ["unmapped communication"]
    axes = [f"{axes_text(c.axes)} · {c.link}" for c in timeline.collectives] + [axes_text(())]
    present = list(dict.fromkeys(axes[i] for i in step.collective))
    for axis in sorted(present):
        mine = np.array([axes[i] == axis for i in step.collective], bool)
        spans = step.communication[mine] - start
        lane = _lane(axis, "communication", spans, step.collective[mine], names, step)
        found.append(replace(lane, exposed=_lane(axis, "exposed", common(spans, exposed), None, (), step).spans))
    found.append(_lane("copies", "copies", step.copies - start, None, (), step))
    return [lane for lane in found if len(lane.spans)]


def common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """[n, 2] where spans of a and spans of b both run; b is sorted and does not overlap itself.

    Spans of a may overlap each other: they are joined first.
    """
    if not len(a) or not len(b):
        return np.zeros((0, 2))
    joined, _ = _joined(a[np.argsort(a[:, 0], kind="stable")], 0.0)
    # every piece of the intersection starts where a span of one starts inside a span of the other
    starts = np.unique(np.r_[joined[:, 0], b[:, 0]])
    ends = np.minimum(*(_end_of_span_at(spans, starts) for spans in (joined, b)))
    return np.stack([starts, ends], axis=1)[ends > starts]


def _joined(spans: np.ndarray, shortest: float) -> tuple[np.ndarray, np.ndarray]:
    """Sorted spans as one where no gap longer than the shortest lies between, and the index of the first in each."""
    ended = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.r_[True, spans[1:, 0] - ended[:-1] > shortest])
    return np.stack([spans[first, 0], np.r_[ended[first[1:] - 1], ended[-1]]], axis=1), first


def _end_of_span_at(spans: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The end of the span that covers each time (disjoint, sorted); minus infinity where none does."""
    at = np.searchsorted(spans[:, 0], times, "right") - 1
    ends = np.where(at >= 0, spans[np.maximum(at, 0), 1], -np.inf)
    return np.where(ends > times, ends, -np.inf)


def _lane(
    name: str, kind: str, spans: np.ndarray, index: np.ndarray | None, names: Sequence[str], step: DeviceStep
) -> Lane:
    """Spans in time order, joined to their neighbours where there are too many to draw."""
    order = np.argsort(spans[:, 0], kind="stable")
    spans = spans[order]
    labels = [name] * len(spans) if index is None or not names else [names[int(i)] for i in index[order]]
    if len(spans) <= _MAX_SPANS:
        return Lane(name, kind, spans, labels)
    shortest = (step.window[1] - step.window[0]) / _RESOLUTION
    joined, first = _joined(spans, shortest)
    counts = np.diff(np.r_[first, len(spans)])
    texts = [labels[i] if n == 1 else f"{labels[i]} and {n - 1} more" for i, n in zip(first, counts)]
    return Lane(name, kind, joined, texts)


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
