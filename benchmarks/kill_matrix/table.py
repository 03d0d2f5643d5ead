"""Read and write the results: a CSV file, with which a stopped campaign can go on, and a Markdown page of it."""

from __future__ import annotations

import csv
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.metadata import version
from pathlib import Path

from benchmarks.kill_matrix.cells import DOWN_S, FAULTS, PHASES, Row

_PACKAGES = ("meshkit", "jax", "jaxlib", "flax", "orbax-checkpoint")
_NAMES = [f.name for f in fields(Row)]


def read_rows(path: Path) -> list[Row]:
    """Return the results of the cells that were run before."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_row(record) for record in csv.DictReader(file)]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write all results, in the order of the matrix."""
    order = {(fault, phase): i for i, (fault, phase) in enumerate((f, p) for f in FAULTS for p in PHASES)}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, _NAMES, lineterminator="\n")
        writer.writeheader()
        for row in sorted(rows, key=lambda r: order[r.fault, r.phase]):
            writer.writerow(asdict(row))


def page(rows: Sequence[Row]) -> str:
    """Return the matrix as Markdown."""
    by_cell = {(row.fault, row.phase): row for row in rows}
    good = sum(not row.wrong for row in rows)
    equal = sum(row.losses_equal for row in rows)
    down, back = _range([r.detection_s for r in rows]), _range([r.recovery_s for r in rows])
    lines = [
        f"{good} of {len(rows)} cells are as promised; {equal} have the losses of an undisturbed run, bit for bit.",
        f"Detection {down} s (promised: {DOWN_S:g} s), recovery {back} s.",
        "",
        "| fault | " + " | ".join(PHASES) + " |",
        "|---|" + "---|" * len(PHASES),
    ]
    for fault in FAULTS:
        cells = [_cell(by_cell.get((fault, phase))) for phase in PHASES]
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def machine() -> str:
    """Return a line with the date, the versions and the machine of this run."""
    versions = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    load = os.getloadavg()[1]
    return (
        f"{time.strftime('%Y-%m-%d')}, Python {platform.python_version()}, {versions}; {os.cpu_count()} CPU cores, "
        f"load average {load:.1f} at the end."
    )


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    seconds = ["-" if s is None else f"{s:.1f}" for s in (row.detection_s, row.recovery_s)]
    text = f"{' / '.join(seconds)}, {row.restarts}"
    return text if not row.wrong else f"**{text}: {row.wrong}**"


def _range(found: Sequence[float | None]) -> str:
    values = [value for value in found if value is not None]
    return f"{min(values):.1f} to {max(values):.1f}" if values else "-"


def _row(record: dict[str, str]) -> Row:
    seconds = [float(record[name]) if record[name] else None for name in ("detection_s", "recovery_s")]
    return Row(
        record["fault"],
        record["phase"],
        *seconds,
        int(record["restarts"]),
        record["pulse"],
        record["losses_equal"] == "True",
        record["wrong"],
    )
