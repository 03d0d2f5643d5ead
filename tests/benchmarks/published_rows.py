"""Rows of the published and the blind runs, as they are or with other cells."""

from __future__ import annotations

import csv
from pathlib import Path

from benchmarks.published.experiments import Run, resolve
from benchmarks.published.rows import parse_row

_DATA = Path(__file__).parent.parent / "data"
RUNS = _DATA / "published_runs.csv"
CELLS: dict[str, dict[str, str]] = {}
for _path in (RUNS, _DATA / "blind_runs.csv"):
    with _path.open(encoding="utf-8") as _file:
        CELLS |= {cells["id"]: cells for cells in csv.DictReader(_file)}


def changed(name: str, **cells: object) -> Run:
    """The run of a row with other cells."""
    run = resolve(parse_row({**CELLS[name], **{k: str(v) for k, v in cells.items()}}, "changed"))
    assert isinstance(run, Run), run
    return run
