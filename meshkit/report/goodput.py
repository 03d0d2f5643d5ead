"""Make the `goodput` part of a report from the wall time of a run's phases."""

from __future__ import annotations

import math

from meshkit.report.schema import GoodputPart
from meshkit.runs.phases import Goodput

# Phase of the trainer -> (key in the part without `_s`, label), in the order of a run.
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


def goodput_part(goodput: Goodput) -> GoodputPart:
    """Return the goodput of a run as a part of the report; the seconds of its phases add up to the wall time."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for phase, spent in goodput.seconds.items():
        seconds[phase if phase in PHASES else "other"] += spent
    values = {f"{PHASES[phase][0]}_s": spent for phase, spent in seconds.items()}
    wall_s = math.fsum(values.values())
    share = goodput.seconds.get("step", 0.0) / wall_s if wall_s else None
    return GoodputPart(share=share, wall_s=wall_s, attempts=goodput.attempts, lost_steps=goodput.lost_steps, **values)
