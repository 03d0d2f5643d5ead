"""Goodput: what every second of a run's wall time went to, over all its attempts. Layer 4.

    Phases of each attempt -> goodput/<when it began>.json -> Goodput: productive seconds / wall seconds

Productive is the time in training steps that count. Steps that a later attempt made again are lost; what lies between
two attempts is restart. An attempt that is killed leaves what it wrote last, a few seconds before.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from meshkit.training.phases import Phases

_FOLDER = "goodput"
_EVERY_S = 5.0
_PRODUCTIVE = "step"


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a run went.

    Attributes:
        wall_s: from the start of the first attempt to the last sign of the last one.
        seconds: phase -> seconds, `lost` and `restart` among them; they add up to the wall time.
        attempts: how many there were.
        lost_steps: made more than once.
    """

    wall_s: float
    seconds: dict[str, float]
    attempts: int
    lost_steps: int

    @property
    def share(self) -> float:
        """Productive seconds over wall seconds."""
        return self.seconds.get(_PRODUCTIVE, 0.0) / self.wall_s if self.wall_s else 0.0

    def to_dict(self) -> dict:
        """As JSON has it."""
        return {"share": self.share, **asdict(self)}


class GoodputLog:
    """Writes down one attempt's seconds as it goes; of several processes the first does.

    Args:
        folder: the run folder; None writes nothing.
        phases: of this process.
        resumed_step: where the attempt began.
    """

    def __init__(self, folder: Path | None, phases: Phases, resumed_step: int):
        self._phases, self._resumed, self._written = phases, resumed_step, 0.0
        began = time.time() - sum(phases.totals().values())
        self._began = began
        self._path = folder / _FOLDER / f"{began:.3f}.json" if folder else None

    def update(self, *, now: bool = False) -> None:
        """Writes, unless it did so less than five seconds ago. A disk that is full stops nothing."""
        if self._path is None or (not now and time.monotonic() - self._written < _EVERY_S):
            return
        self._written = time.monotonic()
        record = {
            "began": self._began,
            "resumed_step": self._resumed,
            "last_step": max(self._resumed, self._phases.step),
            "seconds": self._phases.totals(),
        }
        with suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps(record))
            os.replace(temporary, self._path)


def read_goodput(folder: Path) -> Goodput | None:
    """The goodput of a run folder; None where no attempt has written any."""
    attempts = [a for path in (folder / _FOLDER).glob("*.json") if (a := _read(path)) is not None]
    if not attempts:
        return None
    attempts.sort(key=lambda a: a["began"])
    seconds: dict[str, float] = {"lost": 0.0, "restart": 0.0}
    lost_steps = 0
    for attempt, after in zip(attempts, [*attempts[1:], None]):
        for phase, spent in attempt["seconds"].items():
            seconds[phase] = seconds.get(phase, 0.0) + spent
        if after is None:
            continue
        again = max(0, attempt["last_step"] - after["resumed_step"])
        made = attempt["last_step"] - attempt["resumed_step"]
        spent = attempt["seconds"].get(_PRODUCTIVE, 0.0) * min(1.0, again / made) if made else 0.0
        seconds["lost"] += spent
        seconds[_PRODUCTIVE] = seconds.get(_PRODUCTIVE, 0.0) - spent
        lost_steps += again
        seconds["restart"] += max(0.0, after["began"] - attempt["began"] - sum(attempt["seconds"].values()))
    return Goodput(sum(seconds.values()), seconds, len(attempts), lost_steps)


def _read(path: Path) -> Mapping | None:
    try:
        found = json.loads(path.read_text())
        return {
            "began": float(found["began"]),
            "resumed_step": int(found["resumed_step"]),
            "last_step": int(found["last_step"]),
            "seconds": {str(k): float(v) for k, v in found["seconds"].items()},
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
