"""How a run went: its metrics.jsonl as columns over the steps with their trend, and what its wall time went to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshkit.report.schema import GoodputPart, HistoryPart, Warning_
from meshkit.runs.goodput import Goodput, read_goodput
from meshkit.runs.metrics import read_metrics, within
from meshkit.units import format_percent

METRICS_FILE = "metrics.jsonl"
COLUMNS = (
    "loss",
    "evaluation_loss",
    "step_time_s",
    "tokens_per_s",
    "mfu",
    "data_wait_s",
    "device_wait_s",
    "host_s",
    "exposed_s",
    "overlapped_share",
)
# phase of the trainer -> key of the part and what it is called, in the order in which a run goes through them
PHASES = {
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
_MAX_POINTS = 300  # about one per pixel column of a small chart
_WARM_UP = 0.05  # share of the steps that the trend leaves out: caches fill, clocks rise
_FEWEST_UNTRACED = 3  # steps, to say what one takes without a trace
_FEWEST = 9  # steps for a trend: three in each third
_NOTABLE, _FEWEST_TO_WARN = 0.1, 30  # below, a busy neighbour or one slow step makes a trend


def read_history(run: str | Path) -> HistoryPart | None:
    """The history of a run folder; None where it has no metrics."""
    return history_of(read_metrics(Path(run) / METRICS_FILE))


def history_of(records: Sequence[Mapping[str, Any]]) -> HistoryPart | None:
    """Records of metrics as columns, thinned out evenly to 300 points; the trend is of all records."""
    if not records:
        return None
    present = [c for c in COLUMNS if any(_number(r.get(c)) is not None for r in records)]
    shown = records[:: -(-len(records) // _MAX_POINTS)]
    return HistoryPart(
        steps=tuple(int(r["step"]) for r in shown),
        values={c: tuple(_number(r.get(c)) for r in shown) for c in present},
        trend={c: _trend([_number(r.get(c)) for r in records]) for c in present},
    )


def untraced_step_s(history: HistoryPart | None, first_traced: int) -> float | None:
    """The median step before a trace began, but for the first, which warms up; None of fewer than three."""
    if history is None:
        return None
    each = zip(history.steps, history.values.get("step_time_s", ()))
    before = [s for step, s in each if 1 < step < first_traced and s is not None]
    return statistics.median(before) if len(before) >= _FEWEST_UNTRACED else None


def trend_warnings(history: HistoryPart | None) -> list[Warning_]:
    """Says that the steps of a run got longer, where they did by more than a tenth and the run is long enough."""
    grown = history.trend.get("step_time_s") if history else None
    if history is None or grown is None or grown <= _NOTABLE or len(history.steps) < _FEWEST_TO_WARN:
        return []
    message = (
        f"The steps of this run got {format_percent(grown)} longer from its first third to its last; the captured ones "
        "show one moment of it."
    )
    return [Warning_(code="step_time_trend", message=message)]


def read_goodput_part(run: str | Path) -> GoodputPart | None:
    """The goodput of a run folder; None where it has none."""
    found = read_goodput(Path(run))
    return goodput_part(found) if found else None


def goodput_part(goodput: Goodput) -> GoodputPart:
    """As the report has it: the parts add up to the wall time."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for phase, spent in goodput.seconds.items():
        seconds[phase if phase in PHASES else "other"] += spent
    values = {f"{PHASES[phase][0]}_s": spent for phase, spent in seconds.items()}
    wall_s = math.fsum(values.values())
    share = goodput.seconds.get("step", 0.0) / wall_s if wall_s else None
    return GoodputPart(share=share, wall_s=wall_s, attempts=goodput.attempts, lost_steps=goodput.lost_steps, **values)


def _trend(values: Sequence[float | None]) -> float | None:
    """Relative change of the median from the first third to the last; None where there are too few values."""
    known = [v for v in values[max(1, int(len(values) * _WARM_UP)) :] if v is not None]
    if len(known) < _FEWEST:
        return None
    third = len(known) // 3
    before, after = statistics.median(known[:third]), statistics.median(known[-third:])
    return within(after / before - 1) if before else None


def _number(value: Any) -> float | None:
    return within(float(value)) if isinstance(value, int | float) and not isinstance(value, bool) else None
