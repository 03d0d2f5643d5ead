"""Make the charts of a report, as dictionaries for Plotly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from meshkit.report.schema import GoodputPart, PipelinePart, Report
from meshkit.report.views import words
from meshkit.report.views.words import Share
from meshkit.timeline import DeviceStep, Timeline, exposed_spans
from meshkit.units import GIB, format_bytes, format_seconds

COLORS = {key: look.color for key, look in words.LOOKS.items()}
COLORS |= {"overlapped": "#95c5e8", "copies": COLORS["other"]}
AXIS_COLORS = ("#4c9f70", "#8f6bb0", "#c77d2e", "#2a9d9d", "#b5678a", "#7a8b3a", "#5b6fb5", "#8d6e63")
# Column of a run's metrics -> (label, scale, unit).
HISTORY = {
    "step_time_s": ("step time", 1e3, " ms"),
    "exposed_s": ("exposed", 1e3, " ms"),
    "mfu": ("MFU", 1e2, " %"),
    "tokens_per_s": ("tokens/s", 1.0, ""),
    "examples_per_s": ("examples/s", 1.0, ""),
    "data_wait_s": ("data wait", 1e3, " ms"),
    "host_s": ("host", 1e3, " ms"),
    "loss": ("loss", 1.0, ""),
}
_PARTS = {"overlapped": "overlapped", "exposed": "exposed", "wait": "exposed, waiting"}  # Parts of a row's bar.
# Labels of the parts if compute is unknown.
_HEARD = {"exposed": "in collectives, overlapped or not", "wait": "waiting for peers"}
_MAX_ROWS = 8
_VISIBLE = 2e-3  # A bar with a smaller share of all communication is narrower than a pixel.
GRID = {"gridcolor": "#e6e9ee", "zeroline": False}
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": "#28323c"}
# Lanes of the timeline.
_LANE, _EXPOSED_PART = 0.72, 0.2  # Heights, as shares of the distance between lanes.
_MAX_SPANS = 1500  # The most spans of a lane that a browser pans smoothly.
_RESOLUTION = 3000  # If a lane has more, spans with gaps of at most 1 / 3000 of the step between them are joined.
_MAX_DEVICES = 8
# The picture of a pipeline.
_MASKED = "#d9dde3"
_FORWARD, _BACKWARD = ("#1f5a8a", "#9cc7e8"), ("#2f7d4f", "#a9dcb8")  # Colours of the first and of the last chunk.
_READABLE_TICKS = 44  # The most ticks with which a cell of a 1280 pixels wide page has room for a microbatch number.


def step_chart(reports: Sequence[Report]) -> dict:
    """Draw the step's time, one stacked bar per report."""
    names = words.names_of([r.source for r in reports])
    scale, unit = unit_of(max(r.step.time_s or 0.0 for r in reports))
    data = []
    of_report = [{share.key: share for share in words.report_shares(r)} for r in reports]
    for share in step_parts(reports):
        values = [of[share.key].value if share.key in of else None for of in of_report]
        percents = [words.share_text(v or None, r.step.time_s, unknown="") for v, r in zip(values, reports)]
        texts = [f"{format_seconds(v)}<br>{p}" for v, p in zip(values, percents)]
        data.append(bar(share.label, _scaled(values, scale), names, share.look.color, texts))
    return bars(data, names, names, unit, bar_height=50)


def step_parts(reports: Sequence[Report]) -> list[Share]:
    """Return all parts of the reports' steps, in the order of the bar; a value is from the last report that has it."""
    found = {share.key: share for r in reports for share in words.report_shares(r)}
    return sorted(found.values(), key=lambda share: list(words.LOOKS).index(share.key) if share.key != "wait" else 1.5)


def communication_parts(reports: Sequence[Report]) -> dict[str, str]:
    """Return the parts of the bars of communication: key in `COLORS` -> label."""
    rows = [row for r in reports for row in r.communication]
    parts, wait = (_PARTS, "exposed_wait_s") if any(r.exposed_s is not None for r in rows) else (_HEARD, "wait_s")
    return {key: label for key, label in parts.items() if key != "wait" or any(getattr(r, wait) for r in rows)}


def communication_chart(reports: Sequence[Report]) -> dict:
    """Draw overlapped and exposed time of each axis, link and collective, with one bar per report."""
    parts = communication_parts(reports)
    found = [_seconds_by_label(report, heard="overlapped" not in parts) for report in reports]
    y, ticks, places = _places(_largest_labels(reports, found), words.names_of([r.source for r in reports]))
    scale, unit = unit_of(max((float(sums.sum()) for of in found for sums in of.values()), default=0.0))
    data = []
    for key, name in parts.items():
        at = list(_PARTS).index(key)
        values = [found[i][label][at] if label in found[i] else None for label, i in places]
        texts = [f"{tick}: {name} {format_seconds(v)}" for tick, v in zip(ticks, values)]
        data.append(bar(name, _scaled(values, scale), y, COLORS[key], texts, inside=False))
    return bars(data, y, ticks, unit, bar_height=30 if len(reports) == 1 else 24)


def _seconds_by_label(report: Report, *, heard: bool) -> dict[str, np.ndarray]:
    """Map axis, link and collective to [3] seconds: overlapped, exposed transfer, exposed waiting.

    Args:
        heard: whether compute is unknown; all seconds in collectives then count as exposed.
    """
    found: dict[str, np.ndarray] = {}
    for row in report.communication:
        label = f"{words.axes_text(row.axes)} · {words.link_text(row)} · {words.row_name(row)}"
        known = (row.busy_s, row.wait_s) if heard else (row.exposed_s, row.exposed_wait_s)
        exposed_s, wait_s = (seconds or 0.0 for seconds in known)
        found[label] = found.get(label, 0.0) + np.array([row.overlapped_s or 0.0, exposed_s - wait_s, wait_s])
    return found


def _largest_labels(reports: Sequence[Report], found: Sequence[dict[str, np.ndarray]]) -> list[str]:
    """Return the at most eight labels to draw, the most exposed first; bars too small to see are left out."""
    labels = dict.fromkeys(label for sums in found for label in sums)
    total = {label: sum((sums[label] for sums in found if label in sums), np.zeros(3)) for label in labels}
    shortest_s = _VISIBLE * max(r.step.communication_s or 0.0 for r in reports)
    seen = [label for label in labels if total[label].sum() >= shortest_s] or list(labels)
    return sorted(seen, key=lambda label: (-total[label][1:].sum(), -total[label].sum()))[:_MAX_ROWS]


def _places(labels: Sequence[str], names: Sequence[str]) -> tuple[list[str], list[str], list[tuple[str, int]]]:
    places = [(label, i) for label in labels for i in range(len(names))]
    ticks = [label if len(names) == 1 else names[i] if i else f"{label} · {names[i]}" for label, i in places]
    return [f"{label}|{i}" for label, i in places], ticks, places


def memory_chart(reports: Sequence[Report]) -> dict:
    """Draw the memory of the fullest GPU by its parts, with lines at its capacity and at the program's budget."""
    names = words.names_of([r.source for r in reports])
    data = []
    for part in memory_parts(reports):
        values = [next((s.value for s in words.memory_shares(r) if s.key == part.key), None) for r in reports]
        texts = [format_bytes(v) if v else "" for v in values]
        data.append(bar(part.label, [(v or 0) / GIB for v in values], names, part.look.color, texts))
    figure = bars(data, names, names, "GiB", bar_height=50)
    m = reports[0].memory
    drawn = [(v / GIB, dash) for v, dash in ((m.capacity_bytes, "solid"), (m.pool_bytes, "dash")) if v]
    figure["layout"]["shapes"] = [limit(x, dash) for x, dash in drawn]
    if drawn:
        peak = max(sum(s.value or 0 for s in words.memory_shares(r)) for r in reports) / GIB
        figure["layout"]["xaxis"]["range"] = [0, 1.04 * max(peak, *(x for x, _ in drawn))]
    return figure


def memory_parts(reports: Sequence[Report]) -> list[Share]:
    """Return all parts of the reports' memory."""
    return list({share.key: share for r in reports for share in words.memory_shares(r)}.values())


def per_step_chart(report: Report) -> dict | None:
    """Draw the parts of each captured step; None if there are fewer than two steps."""
    samples = report.per_step or ()
    if len(samples) < 2:
        return None
    scale, unit = unit_of(max(s.time_s for s in samples))
    names = [f"step {s.step}" + (f" ({s.left_out})" if s.left_out else "") for s in samples]
    data = []
    for shares in zip(*map(words.step_shares, samples)):
        values = [share.value for share in shares]
        texts = [format_seconds(v) for v in values]
        data.append(bar(shares[0].label, _scaled(values, scale), names, shares[0].look.color, texts))
    return bars(data, names, names, unit, bar_height=26)


def kernels_chart(reports: Sequence[Report]) -> dict | None:
    """Draw compute by kind of work, the longest first; None if no report has kernels."""
    names = words.names_of([r.source for r in reports])
    known = [(name, r.kernels.classes) for name, r in zip(names, reports) if r.kernels]
    if not known:
        return None
    seconds = [{c.kind: c.time_s for c in classes} for _, classes in known]
    longest = {kind: max(s.get(kind) or 0.0 for s in seconds) for kind in dict.fromkeys(k for s in seconds for k in s)}
    y, ticks, places = _places(sorted(longest, key=lambda kind: -longest[kind]), [name for name, _ in known])
    scale, unit = unit_of(max(longest.values(), default=0.0))
    values = [seconds[i].get(kind) for kind, i in places]
    texts = [f"{tick}: {format_seconds(v)}" for tick, v in zip(ticks, values)]
    drawn = bar("compute", _scaled(values, scale), y, COLORS["compute"], texts, inside=False)
    return bars([drawn], y, ticks, unit, bar_height=26)


def history_chart(report: Report) -> dict | None:
    """Draw the run's metrics over its steps, one line each; None without metrics."""
    history = report.history
    shown = [name for name in HISTORY if history and any(v is not None for v in history.values.get(name, ()))]
    if not history or not shown:
        return None
    data, layout = [], layout_of(60 + 110 * len(shown), "")
    for i, name in enumerate(shown):
        label, scale, unit = HISTORY[name]
        axis = "y" if i == 0 else f"y{i + 1}"
        values = [None if v is None else float(f"{v * scale:.6g}") for v in history.values[name]]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(values) < 60 else "lines",
                "name": name,
                "x": list(history.steps),
                "y": values,
                "yaxis": axis,
                "line": {"color": AXIS_COLORS[i % len(AXIS_COLORS)], "width": 1.6},
                "marker": {"size": 4},
                "hovertemplate": f"step %{{x}}: %{{y:.4~g}}{unit}<extra>{label}</extra>",
                "showlegend": False,
            }
        )
        high, low = 1 - i / len(shown), 1 - (i + 0.78) / len(shown)
        layout["yaxis" + axis[1:]] = {
            "domain": [low, high],
            "title": {"text": label, "font": {"size": 12}},
            "automargin": True,
            "nticks": 4,
            **GRID,
            "ticksuffix": unit,
            "fixedrange": True,
        }
    title = {"text": "step", "font": {"size": 12}}
    layout["xaxis"] = {"title": title, **GRID, "anchor": "free", "position": 0}
    layout["margin"]["b"] = 44
    return {"data": data, "layout": layout}


def goodput_chart(part: GoodputPart) -> dict:
    """Draw the wall time of a run as one bar with a part for each activity."""
    wall_s = part.wall_s or 0.0
    scale, unit = (1 / 3600, "h") if wall_s >= 2 * 3600 else unit_of(wall_s)
    data = []
    for share in words.goodput_shares(part):
        texts = [f"{format_seconds(share.value)}<br>{words.share_text(share.value, part.wall_s)}"]
        data.append(bar(share.label, [(share.value or 0.0) * scale], ["run"], share.look.color, texts))
    return bars(data, ["run"], ["run"], unit, bar_height=50)


def unit_of(longest_s: float) -> tuple[float, str]:
    """Return the largest unit in which the longest time is at least 2, as (units per second, name)."""
    return next(((scale, name) for scale, name in ((1.0, "s"), (1e3, "ms")) if longest_s * scale >= 2), (1e6, "us"))


def _scaled(seconds: Sequence[float | None], scale: float) -> list[float | None]:
    return [None if value is None else value * scale for value in seconds]


def bar(name: str, x: list, y: list, color: str, texts: list[str], *, inside: bool = True) -> dict:
    """Return the parts of one colour in a chart of stacked horizontal bars.

    Args:
        x, y: the length of the part in each bar, and the bars' places on the y axis.
        texts: a text for each part, drawn on it and shown under the pointer.
        inside: whether texts are drawn on the parts; if False, they are only shown under the pointer.
    """
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


def bars(data: list[dict], y: Sequence[str], ticks: Sequence[str], unit: str, *, bar_height: int) -> dict:
    """Return a figure of horizontal bars; on a narrow screen, labels are above the bars.

    Args:
        y, ticks: places of the bars, from the top, and their labels.
        bar_height: pixels of a bar with its gap.
    """
    layout = layout_of(44 + bar_height * len(y), unit)
    layout |= {"barmode": "stack", "bargap": 0.25}
    layout["yaxis"] |= {"tickmode": "array", "tickvals": list(y), "ticktext": list(ticks), "autorange": "reversed"}
    return {"data": data, "layout": layout, "narrow": narrow_layout(y, ticks, 46, 22) | {"bargap": 0.58}}


def narrow_layout(y: Sequence[str], ticks: Sequence[str], row_height: int, top: int, lift: int = 8) -> dict:
    """Return the layout changes for a narrow screen, where labels are above the bars.

    Args:
        y, ticks: places of the bars, and their labels.
        row_height: pixels of a bar with its label.
        top: pixels above the first bar.
        lift: pixels from the middle of a bar to its label.
    """
    above = {"x": 0, "xref": "paper", "showarrow": False, "xanchor": "left", "yanchor": "bottom", "yshift": lift}
    return {
        "height": top + 26 + row_height * len(y),
        "annotations": [{**above, "y": p, "text": tick, "font": {"size": 11.5}} for p, tick in zip(y, ticks)],
        "margin": {"l": 4, "r": 10, "t": top, "b": 26},
        "yaxis": {"showticklabels": False},
        "xaxis": {"nticks": 5, "tickangle": 0},
    }


def frame(height: int, **more: Any) -> dict[str, Any]:
    """Return the layout that all charts share, with the keys `more`."""
    return {
        "height": height,
        "font": FONT,
        "margin": {"l": 10, "r": 20, "t": 10, "b": 30},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        **more,
    }


def legend_frame(height: int) -> dict[str, Any]:
    """Return the layout of charts with two axes and a legend above them."""
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    return frame(height, legend=legend, xaxis={**GRID, "automargin": True}, yaxis={**GRID, "automargin": True})


def layout_of(height: int, unit: str) -> dict[str, Any]:
    """Return the layout of horizontal bars and of lines over the steps of a run."""
    return frame(
        height,
        uniformtext={"minsize": 10, "mode": "hide"},
        showlegend=False,
        xaxis={"ticksuffix": f" {unit}" if unit else "", **GRID, "rangemode": "tozero"},
        yaxis={"automargin": True, "ticklabelstandoff": 8},
        hoverlabel={"font": {"size": 12}},
    )


def limit(x: float, dash: str, width: float = 1.5) -> dict:
    """Return a vertical line across a chart at `x`."""
    style = {"color": "#28323c", "width": width, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": style}


@dataclass(frozen=True)
class Lane:
    """Spans that are drawn on one line of the timeline."""

    name: str
    kind: str
    """One of `compute`, `communication`, `exposed`, `copies` and `idle`."""
    spans: np.ndarray
    """[n, 2] seconds from the start of the step."""
    labels: Sequence[str]
    exposed: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    """[k, 2] the parts of communication that no compute hides."""
    fill: np.ndarray | None = None
    """[n] the share of each span in which something runs; None if no spans were joined."""


def step_to_draw(timeline: Timeline) -> list[DeviceStep]:
    """Return up to eight devices of the median step; the time of a step is that of its slowest device."""
    numbers = sorted({s.step for s in timeline.steps})
    longest = {n: max(s.window[1] - s.window[0] for s in timeline.steps if s.step == n) for n in numbers}
    chosen = sorted(numbers, key=longest.__getitem__)[len(numbers) // 2]
    return sorted((s for s in timeline.steps if s.step == chosen), key=lambda s: s.device)[:_MAX_DEVICES]


def lanes(timeline: Timeline, step: DeviceStep) -> list[Lane]:
    """Return the lanes of one device step, from top to bottom; lanes without spans are left out."""
    start = step.window[0]
    found = [_lane("compute", "compute", step.compute - start, step.compute_op, timeline.op_names, step)]
    exposed = exposed_spans(step)
    found.append(_lane("exposed", "exposed", exposed, None, (), step))
    names = [f"{c.name} ({c.collective} {c.dtype})" for c in timeline.collectives] + ["unmapped communication"]
    axes = [f"{c.replica_groups or words.axes_text(c.axes)} · {words.link_text(c)}" for c in timeline.collectives]
    axes.append(words.axes_text(()))
    present = list(dict.fromkeys(axes[i] for i in step.collective))
    for axis in sorted(present):
        mine = np.array([axes[i] == axis for i in step.collective], bool)
        spans = step.communication[mine] - start
        lane = _lane(axis, "communication", spans, step.collective[mine], names, step)
        found.append(replace(lane, exposed=_lane(axis, "exposed", common(spans, exposed), None, (), step).spans))
    found.append(_lane("copies", "copies", step.copies - start, None, (), step))
    return [lane for lane in found if len(lane.spans)]


def _idle_lane(step: DeviceStep) -> Lane:
    length_s = step.window[1] - step.window[0]
    spans = np.concatenate([s.reshape(-1, 2) for s in (step.compute, step.communication, step.copies)]) - step.window[0]
    if not len(spans):
        return Lane("idle", "idle", np.array([[0.0, length_s]]), ["idle"])
    joined, _ = _joined(spans[np.argsort(spans[:, 0], kind="stable")], 0.0)
    gaps = np.stack([np.r_[0.0, joined[:, 1]], np.r_[joined[:, 0], length_s]], axis=1)
    gaps = np.clip(gaps, 0.0, length_s)
    return _lane("idle", "idle", gaps[gaps[:, 1] - gaps[:, 0] > 1e-9 * length_s], None, (), step)


def common(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return [n, 2] spans in which both a and b run.

    Args:
        a: [n, 2] spans, which may overlap each other.
        b: [m, 2] spans, sorted and disjoint.
    """
    if not len(a) or not len(b):
        return np.zeros((0, 2))
    joined, _ = _joined(a[np.argsort(a[:, 0], kind="stable")], 0.0)
    # Each piece of the intersection starts at the start of a span of a or of b.
    starts = np.unique(np.r_[joined[:, 0], b[:, 0]])
    ends = np.minimum(*(_end_of_span_at(spans, starts) for spans in (joined, b)))
    return np.stack([starts, ends], axis=1)[ends > starts]


def _joined(spans: np.ndarray, shortest: float) -> tuple[np.ndarray, np.ndarray]:
    """Join sorted spans across gaps of at most `shortest`; return them, and for each the index of its first span."""
    ended = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.r_[True, spans[1:, 0] - ended[:-1] > shortest])
    return np.stack([spans[first, 0], np.r_[ended[first[1:] - 1], ended[-1]]], axis=1), first


def _end_of_span_at(spans: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the end of the span that covers each time, or minus infinity; the spans are disjoint and sorted."""
    at = np.searchsorted(spans[:, 0], times, "right") - 1
    ends = np.where(at >= 0, spans[np.maximum(at, 0), 1], -np.inf)
    return np.where(ends > times, ends, -np.inf)


def _lane(
    name: str, kind: str, spans: np.ndarray, index: np.ndarray | None, names: Sequence[str], step: DeviceStep
) -> Lane:
    """Return a lane with its spans sorted by start; if there are too many to draw, neighbours are joined."""
    order = np.argsort(spans[:, 0], kind="stable")
    spans = spans[order]
    labels = [name] * len(spans) if index is None or not names else [names[int(i)] for i in index[order]]
    if len(spans) <= _MAX_SPANS:
        return Lane(name, kind, spans, labels)
    shortest = (step.window[1] - step.window[0]) / _RESOLUTION
    joined, first = _joined(spans, shortest)
    counts = np.diff(np.r_[first, len(spans)])
    # The latest end of all spans before each span, so that overlaps count once.
    ended = np.r_[0.0, np.maximum.accumulate(spans[:, 1])[:-1]]
    filled = np.add.reduceat(np.maximum(0.0, spans[:, 1] - np.maximum(spans[:, 0], ended)), first)
    texts = [labels[i] if n == 1 else f"{labels[i]} and {n - 1} more" for i, n in zip(first, counts)]
    return Lane(name, kind, joined, texts, fill=filled / (joined[:, 1] - joined[:, 0]))


def timeline_charts(timeline: Timeline, device: str) -> list[tuple[str, dict]]:
    """Return (name, chart) for each drawn device of one step; the page shows one chart at a time."""
    drawn = step_to_draw(timeline) if timeline.steps else []
    return [(f"{device} {step.device}, step {step.step}", _timeline_chart(timeline, step)) for step in drawn]


def _timeline_chart(timeline: Timeline, step: DeviceStep) -> dict:
    length_s = step.window[1] - step.window[0]
    scale, unit = unit_of(length_s)
    data, ticks = [], []
    colors = iter(AXIS_COLORS * 4)
    idle = _idle_lane(step)
    for lane in [*lanes(timeline, step), *([idle] if len(idle.spans) else [])]:
        ticks.append(lane.name)
        color = COLORS[lane.kind] if lane.kind in COLORS else next(colors)
        data.append(_spans(lane, lane.spans, lane.labels, color, scale, unit, lane.fill))
        if len(lane.exposed):
            texts = [f"{lane.name}: exposed"] * len(lane.exposed)
            under = _spans(lane, lane.exposed, texts, COLORS["exposed"], scale, unit)
            data.append(under | {"name": f"{lane.name}: exposed", "width": _EXPOSED_PART, "offset": 0.16})
    layout: dict[str, Any] = layout_of(72 + 36 * len(ticks), unit) | {"barmode": "overlay", "dragmode": "pan"}
    layout["margin"] = layout["margin"] | {"t": 34}
    layout["modebar"] = {"bgcolor": "rgba(0,0,0,0)", "color": "#a9b4c2", "activecolor": "#28323c"}
    layout["xaxis"] = layout["xaxis"] | {"range": [0, length_s * scale]}
    # The places of the lanes are fixed, so that hiding one lane does not move the others.
    places = {"categoryorder": "array", "categoryarray": ticks, "range": [len(ticks) - 0.5, -0.5]}
    layout["yaxis"] = layout["yaxis"] | places | {"fixedrange": True}
    return {"data": data, "layout": layout, "narrow": narrow_layout(ticks, ticks, 54, 44, lift=18)}


def _spans(
    lane: Lane, spans, labels: Iterable[str], color: str, scale: float, unit: str, fill: np.ndarray | None = None
) -> dict:
    return {
        "type": "bar",
        "orientation": "h",
        "name": lane.name,
        "y": [lane.name] * len(spans),
        "base": _rounded(spans[:, 0] * scale),
        "x": _rounded((spans[:, 1] - spans[:, 0]) * scale),
        "customdata": list(labels),
        "hovertemplate": f"%{{customdata}}<br>at %{{base:.4~f}} {unit}, %{{x:.4~f}} {unit}<extra></extra>",
        "marker": {
            "color": color,
            "line": {"width": 0},
            "opacity": [1] * len(spans) if fill is None else [round(v, 3) for v in fill.tolist()],
        },
        "width": _LANE,
        "showlegend": False,
    }


def _rounded(values) -> list[float]:
    """Return values with six digits: finer than a pixel, and a third of the bytes of all digits."""
    return [float(f"{v:.6g}") for v in values]


def schedule_chart(part: PipelinePart) -> dict | None:
    """Draw the chunk that each stage runs in each tick, forward and backward; None if the part has no picture."""
    if part.picture is None:
        return None
    z, texts = [], []
    for row in part.picture:
        for letter in "FB":
            found = [_work(cell, letter) for cell in row]
            z.append([_shade(part, letter, tick, work) for tick, work in enumerate(found)])
            texts.append([work or "" for work in found])
    ticks = part.warmup_ticks + part.steady_ticks + part.drain_ticks
    trace = {
        "type": "heatmap",
        "z": z,
        "text": texts,
        "colorscale": _scale(part),
        "zmin": 0,
        "zmax": 2 * part.virtual_stages,
        "showscale": False,
        "xgap": 1 if ticks <= 4 * _READABLE_TICKS else 0,
        "ygap": 1,
        "hoverongaps": False,
        "hovertemplate": "tick %{x}: %{text}<extra></extra>",
    }
    if ticks <= _READABLE_TICKS:
        trace |= {"texttemplate": "%{text}", "textfont": {"size": 10}}
    stages = list(range(part.stages))
    step = -(-part.stages // 16)
    layout = frame(
        90 + 26 * max(2, min(part.stages, 24)),
        margin={"l": 70, "r": 10, "t": 10, "b": 45},
        xaxis={"title": {"text": "tick"}, "showgrid": False, "zeroline": False},
        yaxis={
            "autorange": "reversed",
            "showgrid": False,
            "zeroline": False,
            "tickvals": [2 * s + 0.5 for s in stages[::step]],
            "ticktext": [f"stage {s}" for s in stages[::step]],
        },
    )
    return {"data": [trace], "layout": layout}


def _work(cell: str, letter: str) -> str | None:
    """Return a cell's word for the forward (F) or backward (B) pass: `F3.1` of `F3.1 B0.0`; None without one."""
    return next((word for word in cell.split() if word[0] == letter), None)


def _shade(part: PipelinePart, letter: str, tick: int, work: str | None) -> int | None:
    """Return the index of a cell's colour; None if no stage runs this direction in the tick.

    Colour 0 means masked. The colours of the chunks forward follow, then those of the chunks backward.
    """
    if work is not None:
        chunk = int(work.partition(".")[2] or 0)
        return 1 + chunk + (part.virtual_stages if letter == "B" else 0)
    runs = tick < part.warmup_ticks + part.steady_ticks if letter == "F" else tick >= part.warmup_ticks
    return 0 if runs else None


def _scale(part: PipelinePart) -> list[list]:
    colors = [_MASKED, *_shades(_FORWARD, part.virtual_stages), *_shades(_BACKWARD, part.virtual_stages)]
    most = len(colors) - 1
    stops: list[list] = []
    for i, color in enumerate(colors):
        stops += [[max(0.0, (i - 0.5) / most), color], [min(1.0, (i + 0.5) / most), color]]
    return stops


def _shades(ends: tuple[str, str], count: int) -> list[str]:
    first, last = ([int(end[i : i + 2], 16) for i in (1, 3, 5)] for end in ends)
    steps = [i / max(1, count - 1) for i in range(count)]
    return ["#" + "".join(f"{round(a + (b - a) * t):02x}" for a, b in zip(first, last)) for t in steps]


def schedule_legend(part: PipelinePart) -> list[tuple[str, str]]:
    """Return (label, colour) of the picture's colours."""
    entries = []
    for word, ends in (("forward", _FORWARD), ("backward", _BACKWARD)):
        for chunk, color in enumerate(_shades(ends, part.virtual_stages)):
            entries.append((f"{word}, chunk {chunk}" if part.virtual_stages > 1 else word, color))
    return [*entries, ("masked", _MASKED)]
