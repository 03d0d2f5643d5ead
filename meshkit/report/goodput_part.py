"""Goodput in the report: what every second of the run went to, in JSON, words, a bar and a panel.

goodput/ of the run folder -> training.goodput.Goodput -> GoodputPart -> terminal | page | last line of a training
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshkit.report.parts import GoodputPart
from meshkit.report.views.charts import COLORS, bar, bars, unit_of
from meshkit.report.views.page import cells, chart, legend, section, table
from meshkit.report.views.panels import Shown, count
from meshkit.report.views.words import Share, plural
from meshkit.runs.goodput import Goodput, read_goodput
from meshkit.units import format_percent, format_seconds

# phase of the trainer -> key of the part and what it is called, in the order in which a run goes through them
_PHASES = {
    "step": ("step", "steps that count"),
    "data": ("data_wait", "waiting for data"),
    "evaluate": ("evaluate", "evaluation"),
    "save": ("checkpoint", "blocked by checkpoints"),
    "start": ("start", "start"),
    "compile": ("compile", "compile"),
    "restore": ("restore", "restore"),
    "init": ("init", "initial state"),
    "lost": ("lost", "lost steps"),
    "restart": ("restart", "restart"),
    "other": ("other", "other"),
}


def read_goodput_part(run: str | Path) -> GoodputPart | None:
    """The goodput of a run folder; None where it has none."""
    found = read_goodput(Path(run))
    return goodput_part(found) if found else None


def goodput_part(goodput: Goodput) -> GoodputPart:
    """As the report has it: the parts add up to the wall time."""
    seconds = dict.fromkeys(_PHASES, 0.0)
    for phase, spent in goodput.seconds.items():
        seconds[phase if phase in _PHASES else "other"] += spent
    values = {f"{_PHASES[phase][0]}_s": spent for phase, spent in seconds.items()}
    wall_s = math.fsum(values.values())
    share = goodput.seconds.get("step", 0.0) / wall_s if wall_s else None
    return GoodputPart(share=share, wall_s=wall_s, attempts=goodput.attempts, lost_steps=goodput.lost_steps, **values)


def goodput_shares(part: GoodputPart) -> list[Share]:
    """The parts of the wall time that are not zero."""
    shares = [Share(key, label, getattr(part, f"{key}_s")) for key, label in _PHASES.values()]
    return [share for share in shares if share.value]


def goodput_text(part: GoodputPart) -> str:
    """`93.1 % of 11h 24m, 3 attempts, 12 steps made again`."""
    attempts = f", {plural(part.attempts, 'attempt')}" if part.attempts else ""
    again = f", {plural(part.lost_steps, 'step')} made again" if part.lost_steps else ""
    return f"{format_percent(part.share)} of {format_seconds(part.wall_s)}{attempts}{again}"


def goodput_summary(goodput: Mapping[str, Any] | None) -> str:
    """A sentence for the end of a training, with every part; empty where nothing is known.

    Args:
        goodput: as `Goodput.to_dict` gives it.
    """
    if not goodput or not goodput["wall_s"]:
        return ""
    part = goodput_part(
        Goodput(goodput["wall_s"], dict(goodput["seconds"]), goodput["attempts"], goodput["lost_steps"])
    )
    parts = [f"{s.label} {format_seconds(s.value)}" for s in goodput_shares(part)]
    return f"goodput {goodput_text(part)}: {', '.join(parts)}"


def goodput_section(shown: Sequence[Shown], figures: dict[str, dict]) -> str:
    """The panel of the page; empty where no report knows it."""
    known = [s for s in shown if s.report.goodput is not None]
    if not known:
        return ""
    s, part = known[-1], known[-1].report.goodput
    assert part is not None
    shares = goodput_shares(part)
    wall_s = part.wall_s or 0.0
    scale, unit = (1 / 3600, "h") if wall_s >= 2 * 3600 else unit_of(wall_s)
    data = []
    for share in shares:
        texts = [f"{format_seconds(share.value)}<br>{_percent(share, part)}"]
        data.append(bar(share.label, [(share.value or 0.0) * scale], ["run"], _color(share), texts))
    figure = bars(data, ["run"], ["run"], unit, bar_height=50)
    rows = [
        cells("td", (share.label,), (s.number(f"goodput.{share.key}_s", format_seconds), _percent(share, part)))
        for share in shares
    ]
    rows.append(cells("td", ("wall time",), (s.number("goodput.wall_s", format_seconds), "")))
    rows.append(cells("td", ("goodput",), (s.number("goodput.share", format_percent), "")))
    rows.append(cells("td", ("attempts",), (s.number("goodput.attempts", count), "")))
    rows.append(cells("td", ("steps made again",), (s.number("goodput.lost_steps", count), "")))
    note = (
        "What every second of the run's wall time went to, over all its attempts. Goodput is the share of steps that "
        "count; lost steps were made again by a later attempt, restart lies between two attempts."
    )
    colors = legend((share.label, _color(share)) for share in shares)
    numbers = table(cells("th", ("of the run",), ("", "of the wall time")), rows)
    return section("Goodput of the run", note, colors, chart("goodput", figure, figures), numbers)


def _percent(share: Share, part: GoodputPart) -> str:
    return format_percent((share.value or 0.0) / part.wall_s) if part.wall_s else "-"


def _color(share: Share) -> str:
    return COLORS[f"goodput_{share.key}"]
