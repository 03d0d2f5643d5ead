"""The picture of a pipeline's schedule, as the plain dictionary that Plotly draws."""

from __future__ import annotations

from meshkit.report.schema import PipelinePart
from meshkit.report.views.charts import frame

_MASKED = "#d9dde3"
_FORWARD, _BACKWARD = ("#1f5a8a", "#9cc7e8"), ("#2f7d4f", "#a9dcb8")  # of the first and of the last chunk
_READABLE_TICKS = 44  # at 1280 pixels, a cell is wide enough for the number of its microbatch


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


def schedule_legend(part: PipelinePart) -> list[tuple[str, str]]:
    """What the colours of the picture stand for."""
    entries = []
    for word, ends in (("forward", _FORWARD), ("backward", _BACKWARD)):
        for chunk, color in enumerate(_shades(ends, part.virtual_stages)):
            entries.append((f"{word}, chunk {chunk}" if part.virtual_stages > 1 else word, color))
    return [*entries, ("masked", _MASKED)]
