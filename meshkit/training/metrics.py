"""`metrics.jsonl`: one JSON object a step, and never a broken or repeated one. Layer 4."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends to a run's metrics.jsonl.

    Opening it drops what an earlier attempt wrote after `resumed_step` (those steps will be done again), and a last
    line that a crash cut short. The file is replaced as a whole, so that a crash while opening loses nothing either.

    Args:
        path: the file; made if missing. None writes nothing: of several processes one keeps the log.
        resumed_step: the last step whose line is kept.
    """

    def __init__(self, path: Path | None, resumed_step: int):
        self._file = None
        if path is None:
            return
        kept = [r for r in read_metrics(path) if r["step"] <= resumed_step]
        partial = path.with_suffix(".tmp")
        partial.write_text("".join(json.dumps(r) + "\n" for r in kept))
        os.replace(partial, path)
        self._file = open(path, "a", buffering=1)  # noqa: SIM115  (closed by close)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds one line. JSON has no NaN: a number that is not finite is written as null."""
        if self._file:
            self._file.write(json.dumps({k: finite(v) for k, v in record.items()}) + "\n")

    def close(self) -> None:
        """Flushes to disk."""
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete records of a metrics.jsonl; empty for no file. A line cut short by a crash is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def finite(value: Any) -> Any:
    """The value, or None for a number that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
