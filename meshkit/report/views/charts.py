"""The page's charts, as the plain dictionaries that Plotly draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshkit.report.schema import CommunicationPart, GoodputPart, KernelClassPart, Report
from meshkit.report.views.words import WORD, axes_text, goodput_shares, memory_shares, row_name, share_text, step_shares
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
    "cudnn": "#c9a0dc",
    "fragmentation": "#bfc5cd",
    "context": "#6c757d",
    "nccl": "#4a5260",
    "reserved": "#6c757d",
    "goodput_step": "#4c9f70",
    "goodput_data_wait": "#edae49",
    "goodput_evaluate": "#5b9bc9",
    "goodput_checkpoint": "#8f6bb0",
    "goodput_start": "#a9b4c2",
    "goodput_compile": "#30638e",
    "goodput_restore": "#c9a0dc",
    "goodput_init": "#6c757d",
    "goodput_lost": "#d1495b",
    "goodput_restart": "#8c2f39",
    "goodput_other": "#d9dde3",
}
AXIS_COLORS = ("#4c9f70", "#8f6bb0", "#c77d2e", "#2a9d9d", "#b5678a", "#7a8b3a", "#5b6fb5", "#8d6e63")
# column of a run's metrics -> its label, and what its value is shown in
HISTORY = {
    "step_time_s": ("step time", 1e3, " ms"),
    "exposed_s": ("exposed", 1e3, " ms"),
    "mfu": ("MFU", 1e2, " %"),
    "tokens_per_s": ("tokens/s", 1.0, ""),
    "data_wait_s": ("data wait", 1e3, " ms"),
    "host_s": ("host", 1e3, " ms"),
    "loss": ("loss", 1.0, ""),
}
_MAX_ROWS = 14
_VISIBLE = 2e-3  # of all communication: a shorter bar is no wider than a pixel
GRID = {"gridcolor": "#e6e9ee", "zeroline": False}
FONT = {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 13, "color": "#28323c"}


def step_chart(reports: Sequence[Report]) -> dict:
    """The step's time, one stacked bar per report."""
    names = names_of(reports)
    scale, unit = unit_of(max(r.step.time_s or 0.0 for r in reports))
    data = []
    for i, share in enumerate(step_shares(reports[0])):
        parts = [step_shares(r)[i].value for r in reports]
        percents = [format_percent(v / r.step.time_s) if v and r.step.time_s else "" for v, r in zip(parts, reports)]
        texts = [f"{format_seconds(v)}<br>{p}" for v, p in zip(parts, percents)]
        data.append(bar(share.label, [_scaled(v, scale) for v in parts], names, COLORS[share.key], texts))
    return bars(data, names, names, unit, bar_height=50)


def communication_chart(reports: Sequence[Report]) -> dict:
    """Overlapped and exposed time of each axis, link and collective; a bar each where there are two reports."""
    labels = _largest_labels(reports)
    names = names_of(reports)
    scale, unit = unit_of(max((r.time_s or 0.0 for report in reports for r in report.communication), default=0.0))
    places = [(label, i) for label in labels for i in range(len(reports))]
    y = [f"{label}|{i}" for label, i in places]
    ticks = [label if len(reports) == 1 else names[i] if i else f"{label} · {names[i]}" for label, i in places]
    found = [_seconds_by_label(report) for report in reports]
    data = []
    for key in ("overlapped", "exposed"):
        values = [found[i].get(label, {}).get(key) for label, i in places]
        texts = [f"{tick}: {key} {format_seconds(v)}" for tick, v in zip(ticks, values)]
        data.append(bar(key, [_scaled(v, scale) for v in values], y, COLORS[key], texts, inside=False))
    return bars(data, y, ticks, unit, bar_height=30 if len(reports) == 1 else 24)


def memory_chart(reports: Sequence[Report]) -> dict | None:
    """What the fullest GPU holds, against its capacity and what the program may take; None where unknown."""
    known = [r for r in reports if r.memory.peak_bytes is not None]
    if not known:
        return None
    names = names_of(known)
    data = []
    for key, label in memory_parts(known):
        values = [next((s.value for s in memory_shares(r) if s.key == key), None) for r in known]
        texts = [format_bytes(v) if v else "" for v in values]
        data.append(bar(label, [(v or 0) / GIB for v in values], names, COLORS[key], texts))
    figure = bars(data, names, names, "GiB", bar_height=50)
    m = known[0].memory
    limits = [("capacity", m.capacity_bytes, "solid"), ("budget", m.pool_bytes, "dash")]
    drawn = [(text, v / GIB, dash) for text, v, dash in limits if v]
    figure["layout"]["shapes"] = [limit(x, dash) for _, x, dash in drawn]
    if drawn:
        peak = max(sum(s.value or 0 for s in memory_shares(r)) for r in known) / GIB
        figure["layout"]["xaxis"]["range"] = [0, 1.04 * max(peak, *(x for _, x, _ in drawn))]
    return figure


def memory_parts(reports: Sequence[Report]) -> list[tuple[str, str]]:
    """(key, label) of everything that any of the reports' memory holds."""
    return list({s.key: s.label for r in reports for s in memory_shares(r)}.items())


def per_step_chart(report: Report) -> dict | None:
    """What each captured step was made of; None where there is one step at most."""
    samples = report.per_step or ()
    if len(samples) < 2:
        return None
    scale, unit = unit_of(max(s.time_s for s in samples))
    names = [f"step {s.step}" for s in samples]
    data = []
    for share in step_shares(report):
        values = [getattr(s, f"{share.key}_s") for s in samples]
        texts = [format_seconds(v) for v in values]
        data.append(bar(share.label, [v * scale for v in values], names, COLORS[share.key], texts))
    return bars(data, names, names, unit, bar_height=26)


def kernels_chart(reports: Sequence[Report]) -> dict | None:
    """Compute by kind of work; None where no report knows it."""
    known = [r for r in reports if r.kernels]
    if not known:
        return None
    names = names_of(reports)
    labels = kernel_kinds(known)
    scale, unit = unit_of(max((c.time_s or 0.0 for r in known for c in kernel_classes(r)), default=0.0))
    places = [(label, r) for label in labels for r in known]
    y = [f"{label}|{reports.index(r)}" for label, r in places]
    ticks = [
        label if len(known) == 1 else f"{label} · {names[0]}" if r is known[0] else names[reports.index(r)]
        for label, r in places
    ]
    seconds = [next((c.time_s for c in kernel_classes(r) if c.kind == label), None) for label, r in places]
    texts = [f"{tick}: {format_seconds(v)}" for tick, v in zip(ticks, seconds)]
    drawn = bar("compute", [_scaled(v, scale) for v in seconds], y, COLORS["compute"], texts, inside=False)
    return bars([drawn], y, ticks, unit, bar_height=26)


def kernel_classes(report: Report) -> tuple[KernelClassPart, ...]:
    """Compute by kind of work; empty where unknown."""
    return report.kernels.classes if report.kernels else ()


def kernel_kinds(reports: Sequence[Report]) -> list[str]:
    """Kinds of work in any of the reports, the longest first."""
    seconds: dict[str, float] = {}
    for report in reports:
        for c in kernel_classes(report):
            seconds[c.kind] = max(seconds.get(c.kind, 0.0), c.time_s or 0.0)
    return sorted(seconds, key=lambda kind: -seconds[kind])


def history_chart(report: Report) -> dict | None:
    """The run's metrics over its steps, one line each; None where no metrics are known."""
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
    """The wall time of a run, as one bar."""
    wall_s = part.wall_s or 0.0
    scale, unit = (1 / 3600, "h") if wall_s >= 2 * 3600 else unit_of(wall_s)
    data = []
    for share in goodput_shares(part):
        texts = [f"{format_seconds(share.value)}<br>{share_text(share.value, part.wall_s)}"]
        color = COLORS[f"goodput_{share.key}"]
        data.append(bar(share.label, [(share.value or 0.0) * scale], ["run"], color, texts))
    return bars(data, ["run"], ["run"], unit, bar_height=50)


def names_of(reports: Sequence[Report]) -> list[str]:
    """What each report is called: `predicted`, `measured`; two of a kind are A and B."""
    words = [WORD[r.source] for r in reports]
    return [f"{w} {'AB'[i]}" if words.count(w) > 1 else w for i, w in enumerate(words)]


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


def unit_of(longest_s: float) -> tuple[float, str]:
    """The unit in which the longest time reads well, as (units per second, name)."""
    return next(((scale, name) for scale, name in ((1.0, "s"), (1e3, "ms")) if longest_s * scale >= 2), (1e6, "us"))


def _scaled(seconds: float | None, scale: float) -> float | None:
    return None if seconds is None else seconds * scale


def bar(name: str, x: list, y: list, color: str, texts: list[str], *, inside: bool = True) -> dict:
    """One colour of a chart of horizontal bars.

    Args:
        name: of what the colour stands for.
        x, y: its length on each bar, and which bars these are.
        color: as CSS has it.
        texts: what is written on it, and shown under the pointer.
        inside: False only shows them under the pointer.
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
    """A figure of horizontal bars; on a narrow screen their labels stand above them, not beside."""
    layout = layout_of(44 + bar_height * len(y), unit)
    layout |= {"barmode": "stack", "bargap": 0.25}
    layout["yaxis"] |= {"tickmode": "array", "tickvals": list(y), "ticktext": list(ticks), "autorange": "reversed"}
    return {"data": data, "layout": layout, "narrow": narrow_layout(y, ticks, 46, 22) | {"bargap": 0.58}}


def narrow_layout(y: Sequence[str], ticks: Sequence[str], row_height: int, top: int, lift: int = 8) -> dict:
    """What differs on a narrow screen: labels stand above the bars, not beside them.

    Args:
        y, ticks: places of the bars, and their labels.
        row_height, top: pixels of a bar with its label, and above the first.
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
    """The layout that all charts share, and what else one has."""
    return {
        "height": height,
        "font": FONT,
        "margin": {"l": 10, "r": 20, "t": 10, "b": 30},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        **more,
    }


def layout_of(height: int, unit: str) -> dict[str, Any]:
    """The layout of horizontal bars and of lines over the steps of a run."""
    return frame(
        height,
        uniformtext={"minsize": 10, "mode": "hide"},
        showlegend=False,
        xaxis={"ticksuffix": f" {unit}" if unit else "", **GRID, "rangemode": "tozero"},
        yaxis={"automargin": True, "ticklabelstandoff": 8},
        hoverlabel={"font": {"size": 12}},
    )


def limit(x: float, dash: str, width: float = 1.5) -> dict:
    """A line across a chart at a limit of what it shows."""
    style = {"color": "#28323c", "width": width, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": style}
