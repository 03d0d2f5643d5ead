"""A pipeline on the page and on a terminal: its schedule as a picture, and what it costs in words."""

from __future__ import annotations

from collections.abc import Sequence

from meshkit.report.parts import PipelinePart
from meshkit.report.schema import Report
from meshkit.report.views.charts import FONT
from meshkit.report.views.page import Value, cells, chart, legend, section, table
from meshkit.report.views.panels import Shown
from meshkit.units import format_percent, format_seconds

_MASKED = "#d9dde3"
_FORWARD, _BACKWARD = ("#1f5a8a", "#9cc7e8"), ("#2f7d4f", "#a9dcb8")  # of the first and of the last chunk
_READABLE_TICKS = 44  # at 1280 pixels, a cell is wide enough for the number of its microbatch
_LOOPS = ("gpipe", "circular")


def pipeline_lines(report: Report) -> list[str]:
    """What a pipeline costs, in sentences of at most 78 columns; none without one."""
    p, step = report.pipeline, report.step
    if p is None:
        return []
    chunks = f" x {p.virtual_stages} chunks" if p.virtual_stages > 1 else ""
    flop = f"; layers execute {p.executed_over_useful:.3f} x their useful FLOP"
    ticks = f"{_ticks(p)} ticks: {p.warmup_ticks} warm-up, {p.steady_ticks} steady, {p.drain_ticks} drain"
    lines = [
        f"{p.schedule} over {p.axis}: {p.stages} stages{chunks}, {p.microbatches} microbatches",
        f"{ticks}; at most {p.slots} inputs kept",
        f"bubble {format_seconds(step.bubble_s)}, {format_percent(step.bubble_fraction)} of the step{flop}",
    ]
    if p.padding_layers:
        lines.append(f"{p.padding_layers} layers of padding are computed as well, and count as bubble")
    if p.permute_s is not None:
        exposed = format_seconds(p.permute_exposed_s)
        lines.append(f"{p.permute_count:g} permutes between stages: {format_seconds(p.permute_s)}, {exposed} exposed")
    return lines


def pipeline_section(shown: Sequence[Shown], figures: dict[str, dict]) -> str:
    """The page's panel about the pipeline; "" where no report has one."""
    found = [s for s in shown if s.report.pipeline is not None]
    if not found:
        return ""
    part = found[0].report.pipeline
    assert part is not None
    note = (
        f"{part.schedule}: {part.stages} stages, {part.virtual_stages} chunks of layers on each, {part.microbatches} "
        "microbatches. In a tick every stage runs one chunk forward (upper row) and one backward (lower row); grey: "
        "it has nothing to do there and computes on garbage, which is the bubble. Ticks are drawn alike; one that "
        "goes both ways takes longer."
    )
    drawn, colors = "", ""
    figure = schedule_chart(part)
    if figure is not None:
        drawn = chart("pipeline", figure, figures, "wide")
        colors = legend(_legend(part))
    tables = "".join(f"{f'<h3>{s.name}</h3>' if len(found) > 1 else ''}{_table(s)}" for s in found)
    return section("Pipeline", note, colors, drawn, tables)


def schedule_chart(part: PipelinePart) -> dict | None:
    """Stage by tick: what runs forward and backward, by chunk, and what is masked. None where there is no picture."""
    if part.picture is None:
        return None
    z, texts = [], []
    for row in part.picture:
        for letter in "FB":
            found = [_work(cell, letter) for cell in row]
            z.append([_shade(part, letter, tick, work) for tick, work in enumerate(found)])
            texts.append([work or "" for work in found])
    ticks = _ticks(part)
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
    layout = {
        "font": FONT,
        "height": 90 + 26 * max(2, min(part.stages, 24)),
        "margin": {"l": 70, "r": 10, "t": 10, "b": 45},
        "xaxis": {"title": {"text": "tick"}, "showgrid": False, "zeroline": False},
        "yaxis": {
            "autorange": "reversed",
            "showgrid": False,
            "zeroline": False,
            "tickvals": [2 * s + 0.5 for s in stages[::step]],
            "ticktext": [f"stage {s}" for s in stages[::step]],
        },
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
    }
    return {"data": [trace], "layout": layout}


def _ticks(part: PipelinePart) -> int:
    return part.warmup_ticks + part.steady_ticks + part.drain_ticks


def _work(cell: str, letter: str) -> str | None:
    """`F3.1` of `F3.1 B0.0`."""
    return next((word for word in cell.split() if word[0] == letter), None)


def _shade(part: PipelinePart, letter: str, tick: int, work: str | None) -> int | None:
    """Index of a colour: 0 masked, then the chunks forward, then backward; None where the direction does not run."""
    if work is not None:
        chunk = int(work.partition(".")[2] or 0)
        return 1 + chunk + (part.virtual_stages if letter == "B" else 0)
    runs = tick < part.warmup_ticks + part.steady_ticks if letter == "F" else tick >= part.warmup_ticks
    return 0 if runs else None


def _scale(part: PipelinePart) -> list[list]:
    """A colour for each index, as Plotly spells steps: every colour from one border to the next."""
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


def _legend(part: PipelinePart) -> list[tuple[str, str]]:
    entries = []
    for word, ends in (("forward", _FORWARD), ("backward", _BACKWARD)):
        for chunk, color in enumerate(_shades(ends, part.virtual_stages)):
            entries.append((f"{word}, chunk {chunk}" if part.virtual_stages > 1 else word, color))
    return [*entries, ("masked", _MASKED)]


def _table(shown: Shown) -> str:
    def number(key: str, form) -> Value:
        return shown.number(key, form)

    def plain(value: float | None) -> str:
        return "-" if value is None else f"{value:g}"

    rows = [
        ("bubble, inside compute", number("step.bubble_s", format_seconds)),
        ("bubble, share of the step", number("step.bubble_fraction", format_percent)),
        ("bubble, share of the layers' work", number("pipeline.bubble_fraction", format_percent)),
        ("executed / useful FLOP of the layers", number("pipeline.executed_over_useful", lambda v: f"{v:.4f}")),
        ("warm-up ticks", number("pipeline.warmup_ticks", plain)),
        ("steady ticks", number("pipeline.steady_ticks", plain)),
        ("drain ticks", number("pipeline.drain_ticks", plain)),
        ("inputs of chunks kept, at most", number("pipeline.slots", plain)),
        ("layers of padding", number("pipeline.padding_layers", plain)),
        ("permutes between stages", number("pipeline.permute_count", plain)),
        ("their time", number("pipeline.permute_s", format_seconds)),
        ("of it exposed", number("pipeline.permute_exposed_s", format_seconds)),
    ]
    return table(cells("th", [""], [""]), [cells("td", [label], [value]) for label, value in rows])
