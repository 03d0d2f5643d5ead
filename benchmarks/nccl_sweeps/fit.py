"""Refit the network model's constants, measure what each is worth, and score systems that a fit leaves out.

A fit minimizes the sum of |log(predicted / measured)| over rows from 8 KiB, in which every system and size class weighs
the same. How predictions change with each constant is measured once, at the shipped values. A refit without a system
solves that linear problem without its rows; then the model itself prices these rows with the refitted constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from benchmarks.nccl_sweeps.rows import PCIE, RACKS, Row
from meshkit.predict.nccl import fitted_values, nccl_constants
from meshkit.predict.refit import Sensitivity

CLASSES = (("8 KiB to 1 MiB", 2**13, 2**20), ("1 to 16 MiB", 2**20, 2**24), ("from 16 MiB", 2**24, 2**63))
# Sources whose script times single calls of torch.distributed with their launch (all_reduce_bench.py). Their rows are
# scored but not fitted.
TIMED_BY_TORCH = ("stas00",)


def size_class(row: Row) -> int | None:
    """Return the index in CLASSES of a row's size; None below them."""
    return next((i for i, (_, low, high) in enumerate(CLASSES) if low <= row.payload_bytes < high), None)


def sensitivity(rows: Sequence[Row]) -> tuple[list[Row], Sensitivity]:
    """Return the rows that a fit may use, and how their predictions change around the shipped constants.

    These are rows from 8 KiB that are not over PCIe inside a host.
    """
    kept = [row for row in rows if size_class(row) is not None and row.place != PCIE]
    found = Sensitivity.measure(
        lambda constants: [row.predicted_s(constants) for row in kept],
        [row.measured_s for row in kept],
        fitted_values(),
        [(row.system, size_class(row)) for row in kept],
    )
    found.weights[[any(f"[{name}]" in row.system for name in TIMED_BY_TORCH) for row in kept]] = 0.0
    return kept, found


def leave_one_out(rows: Sequence[Row]) -> tuple[list[Row], np.ndarray]:
    """Return the rows, and their signed relative errors with constants refitted without the rows of their system."""
    kept, found = sensitivity(rows)
    systems = np.array([row.system for row in kept])
    shipped, errors = fitted_values(), np.zeros(len(kept))
    for system in dict.fromkeys(systems):
        factors = found.refit(systems != system)
        values = {name: shipped[name] * factor for name, factor in factors.items()}
        for i in np.flatnonzero(systems == system):
            errors[i] = kept[i].predicted_s(values) / kept[i].measured_s - 1
    return kept, errors


def by_place(rows: Sequence[Row], errors: np.ndarray) -> Iterator[str]:
    """Yield a Markdown table of the errors by place and size class.

    Each cell has the median over systems, the 90th percentile, and the number of systems.
    """
    yield "| where | " + " | ".join(name for name, _, _ in CLASSES) + " |"
    yield "|---" * (1 + len(CLASSES)) + "|"
    for where in sorted({row.place for row in rows}):
        cells = []
        for number in range(len(CLASSES)):
            kept = [i for i, row in enumerate(rows) if row.place == where and size_class(row) == number]
            numbers = over_systems([rows[i] for i in kept], errors[kept]) if kept else ()
            cells.append("{:.1%}, {:.1%} ({})".format(*numbers) if numbers else "")
        yield f"| {where} | " + " | ".join(cells) + " |"


def by_kind(rows: Sequence[Row], errors: np.ndarray) -> Iterator[str]:
    """Yield a Markdown table of the same numbers, by size where sizes decide and by place where links do."""
    large, inside = [size_class(row) == len(CLASSES) - 1 for row in rows], [row.domains == 1 for row in rows]
    racks = [row.place == RACKS for row in rows]
    kinds = {
        "from 16 MiB, one host or one NVLink domain": [a and b for a, b in zip(large, inside, strict=True)],
        "1 to 16 MiB": [size_class(row) == 1 for row in rows],
        "8 KiB to 1 MiB": [size_class(row) == 0 for row in rows],
        "from 16 MiB, between hosts": [a and row.place == "between hosts" for a, row in zip(large, rows, strict=True)],
        "GB200, GB300: several hosts, all sizes": racks,
    }
    yield "| class | median, 90th percentile (systems) |\n|---|---|"
    for name, member in kinds.items():
        if kept := [i for i, one in enumerate(member) if one and rows[i].place != PCIE]:
            found = over_systems([rows[i] for i in kept], errors[kept])
            yield f"| {name} | {found[0]:.1%}, {found[1]:.1%} ({found[2]}) |"


def misses(rows: Sequence[Row], values: Mapping[str, float] | None = None) -> np.ndarray:
    """Return the signed relative errors."""
    return np.array([row.predicted_s(values) / row.measured_s - 1 for row in rows])


def over_systems(rows: Sequence[Row], errors: np.ndarray) -> tuple[float, float, int]:
    """Return the median over systems of their median |error|, the 90th percentile of all, and the number of systems."""
    systems: dict[str, list[float]] = {}
    for row, error in zip(rows, errors, strict=True):
        systems.setdefault(row.system, []).append(abs(float(error)))
    middle = float(np.median([np.median(found) for found in systems.values()]))
    return middle, float(np.percentile(np.abs(errors), 90)), len(systems)


def constant_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a Markdown table of every fitted constant, what it is fitted to, and the error with NCCL's own value."""
    table, shipped = nccl_constants()["fitted"], fitted_values()
    rows = [row for row in rows if size_class(row) is not None and row.place != PCIE]
    here = misses(rows)
    yield f"{len(shipped)} fitted constants. Worth: the mean |error| of the rows that it moves, with it and without."
    yield ""
    yield "| constant | value | unit | what | fitted to | without it | rows | error | error without |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, value in shipped.items():
        row = table[name.partition(".")[0]]
        there = misses(rows, {name: row["without"]})
        moved = np.abs(there - here) > 1e-9
        cells = f"{np.abs(here[moved]).mean():.1%} | {np.abs(there[moved]).mean():.1%}" if moved.any() else " | "
        yield (
            f"| {name} | {value:.4g} | {row['unit']} | {row['what']} | {row['fit']} | {row['without']:.4g} | "
            f"{moved.sum()} | {cells} |"
        )


def by_hand_lines() -> Iterator[str]:
    """Yield a Markdown table of every number that is set by hand, and why."""
    yield "| number | value | unit | what | why |"
    yield "|---|---|---|---|---|"
    for name, row in nccl_constants()["by_hand"].items():
        yield f"| {name} | {row['value']:.4g} | {row['unit']} | {row['what']} | {row['why']} |"
