"""The network model beside measured collectives: `python -m benchmarks.nccl_sweeps --rows FILE... --out CSV [--table]`.

Any number of sweep files are scored row by row with the shipped model: `--out` writes measured beside predicted, and
why a row has no prediction; `--table` prints the errors. Without `--rows`: each system of `--csv` predicted with the
model's two fitted numbers refitted on the other systems, and with `--table` XLA's own collective table.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

import meshkit
from benchmarks.nccl_rows import Measured, Row, read_rows
from benchmarks.nccl_systems import describe
from meshkit.config.cluster import Cluster
from meshkit.errors import ConfigError, MeshkitError
from meshkit.predict.network import nccl_constants

__all__ = ["BANDS", "describe", "in_band", "leave_one_out", "read_sweeps", "read_xla_table", "with_shipped_numbers"]

DATA = Path(__file__).parent.parent / "tests" / "data"
SWEEPS, TABLE = DATA / "nccl_sweeps.csv", DATA / "xla_collective_table.csv.gz"
BANDS = (("< 1 MiB", 0, 2**20), ("1 to 16 MiB", 2**20, 2**24), (">= 16 MiB", 2**24, 2**63))
CLASSES = (("8 KiB to 1 MiB", 2**13, 2**20), ("1 to 16 MiB", 2**20, 2**24), ("from 16 MiB", 2**24, 2**63))
OUT_COLUMNS = ("system", "collective", "algo", "bytes", "measured_us", "predicted_us", "note")
TURNAROUND = tuple(np.arange(0, 0.65, 0.05))
LAUNCH_S = tuple(np.arange(0, 42.5e-6, 2.5e-6))
_XLA_CLUSTERS = {"sm_90": "dgx_h100", "sm_100_B200": "dgx_b200", "sm_100_GB200": "gb200_nvl72", "sm_103": "gb300_nvl72"}


def read_sweeps(path: Path = SWEEPS) -> tuple[list[Row], dict[str, str]]:
    """Rows of a sweep file, and why systems of it could not be read."""
    found = read_rows(path)
    rows = [line.row for line in found if line.row is not None and line.predicted_s is not None]
    return rows, {line.record["system"]: line.note for line in found if line.predicted_s is None}


def place(row: Row) -> str:
    """Where a collective ran: inside a host or NVLink domain, over PCIe inside a host, or between."""
    if row.domains > 1:
        return "between hosts"
    return "inside a host or domain" if row.cluster.scale_up == "nvlink" else "inside a PCIe host"


def write_scores(found: Sequence[Measured], path: Path) -> None:
    """Every row: measured, predicted, or why not."""
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(OUT_COLUMNS)
            for line in found:
                predicted = "" if line.predicted_s is None else f"{line.predicted_s * 1e6:.3f}"
                values = [line.record[name] for name in ("system", "collective", "algo", "bytes", "time_us")]
                writer.writerow([*values, predicted, line.note])
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error}.", hint="--out with another path") from None


def score_lines(found: Sequence[Measured]) -> Iterator[str]:
    """Tables in Markdown: errors by class, collective and system, sources apart, and what was not understood."""
    priced = [line for line in found if line.row is not None and line.predicted_s is not None]
    small = sum(_bytes(line) < CLASSES[0][1] for line in priced)
    yield f"{len(found)} rows, {len(priced)} priced, {small} of them below 8 KiB and in no class."
    yield "Error = predicted / measured - 1; each cell: median of its size, 90th percentile of that, its median (rows)."
    yield from ["", "By class", ""]
    yield from _grouped(priced, ("source", "where"), lambda line: (line.source, _place(line)))
    yield from [
        "",
        "By class, all sources: median over systems of each system's median, 90th percentile of all (systems)",
        "",
    ]
    yield from _over_systems(priced)
    yield from ["", "By collective", ""]
    key = ("source", "collective", "where")
    yield from _grouped(priced, key, lambda line: (line.source, line.row.collective if line.row else "", _place(line)))
    yield from ["", "By system", ""]
    yield from _grouped(priced, ("source", "system"), lambda line: (line.source, line.record["system"]))
    yield from ["", "Not priced", "", "| reason | rows | systems |", "|---|---|---|"]
    rows = Counter(line.note for line in found if line.predicted_s is None)
    for note, n in rows.most_common():
        names = dict.fromkeys(line.record["system"] for line in found if line.note == note)
        shown = "; ".join(itertools.islice(names, 3))
        yield f"| {note} | {n} | {shown}{f' and {len(names) - 3} more' if len(names) > 3 else ''} |"
    if notes := Counter(line.note for line in priced if line.note):
        yield from ["", "Priced on an assumption", "", "| assumed | rows |", "|---|---|"]
        yield from (f"| {note} | {n} |" for note, n in notes.most_common())


def _bytes(line: Measured) -> int:
    """The size of a row that is priced."""
    assert line.row is not None
    return line.row.payload_bytes


def _place(line: Measured) -> str:
    """The place of a row that is priced."""
    assert line.row is not None
    return place(line.row)


def _grouped(
    lines: Sequence[Measured], names: Sequence[str], key: Callable[[Measured], tuple[str, ...]]
) -> Iterator[str]:
    """A table with a line for each value of the key, by size class."""
    yield "| " + " | ".join([*names, *(name for name, _, _ in CLASSES)]) + " |"
    yield "|---" * (len(names) + len(CLASSES)) + "|"
    groups: dict[tuple[str, ...], list[Measured]] = {}
    for line in lines:
        if _bytes(line) >= CLASSES[0][1]:
            groups.setdefault(key(line), []).append(line)
    for group, members in sorted(groups.items()):
        cells = (_cell(_errors(members, low, high), signed=True) for _, low, high in CLASSES)
        yield "| " + " | ".join([*group, *cells]) + " |"


def _errors(lines: Iterable[Measured], low: int, high: int) -> np.ndarray:
    """Signed errors of the rows of a size."""
    return np.array([line.error for line in lines if low <= _bytes(line) < high])


def _over_systems(lines: Sequence[Measured]) -> Iterator[str]:
    """By place: the median over systems, a source's each, of the median in a size class, and the 90th percentile."""
    yield "| where | " + " | ".join(name for name, _, _ in CLASSES) + " |"
    yield "|---" * (1 + len(CLASSES)) + "|"
    for where in sorted({_place(line) for line in lines}):
        cells = []
        for _, low, high in CLASSES:
            systems: dict[str, list[float]] = {}
            for line in lines:
                if _place(line) == where and low <= _bytes(line) < high and line.row is not None:
                    systems.setdefault(line.row.system, []).append(abs(line.error))
            every = list(itertools.chain.from_iterable(systems.values()))
            middle = np.median([np.median(errors) for errors in systems.values()]) if systems else 0.0
            cells.append(f"{middle:.1%}, {np.percentile(every, 90):.1%} ({len(systems)})" if systems else "")
        yield f"| {where} | " + " | ".join(cells) + " |"


def leave_one_out(rows: Sequence[Row], *, key: str = "system") -> tuple[np.ndarray, dict[str, dict[str, float]]]:
    """Signed relative errors, each with numbers fitted on rows of another `key`; and those numbers.

    The fit is least absolute log error over rows from 1 MiB up.
    """
    grid = [{"turnaround_steps": float(t), "launch_s": float(s)} for t, s in itertools.product(TURNAROUND, LAUNCH_S)]
    predicted = np.array([[row.predicted_s(fitted) for row in rows] for fitted in grid])
    ratio = predicted / np.array([row.measured_s for row in rows])
    misfit = np.abs(np.log(ratio))
    groups = np.array([getattr(row, key) for row in rows])
    counted = np.array([row.payload_bytes >= BANDS[1][1] for row in rows])
    errors, numbers = np.zeros(len(rows)), {}
    for group in dict.fromkeys(groups):
        others = counted & (groups != group)
        best = int(misfit[:, others].mean(axis=1).argmin()) if others.any() else 0
        numbers[str(group)] = grid[best] if others.any() else dict(nccl_constants()["fitted"])
        errors[groups == group] = ratio[best, groups == group] - 1
    return errors, numbers


def with_shipped_numbers(rows: Sequence[Row]) -> np.ndarray:
    """Signed relative errors with the numbers of nccl.toml."""
    return np.array([row.predicted_s() / row.measured_s - 1 for row in rows])


def in_band(rows: Sequence[Row], low: int, high: int) -> np.ndarray:
    """Which rows are of a size."""
    return np.array([low <= row.payload_bytes < high for row in rows], dtype=bool)


def read_xla_table(path: Path = TABLE) -> list[Row]:
    """Rows of XLA's own table of all-gather, all-reduce, reduce-scatter, all-to-all, permute, from 16 MiB."""
    clusters = {key: Cluster.load(name) for key, name in _XLA_CLUSTERS.items()}
    rows = []
    with gzip.open(path, "rt", newline="") as file:
        for record in csv.DictReader(file):
            if int(record["tensor_bytes"]) < BANDS[2][1]:
                continue
            key, cluster = record["device_key"], clusters[record["device_key"]]
            n = int(record["group_size"] or cluster.gpus_used_per_domain)
            slow = key == "sm_103" and (record["n_groups"] in ("", "1", "2", "4")) and _eight_gpus(record)
            rows.append(
                Row(
                    system=f"{key}{', 8 GPUs' if slow else ''}",
                    gpu=key,
                    collective=record["op"],
                    payload_bytes=int(record["tensor_bytes"]),
                    measured_s=float(record["time_us"]) * 1e-6,
                    gpus_per_domain=n,
                    domains=1,
                    cluster=cluster,
                )
            )
    return rows


def _eight_gpus(record: Mapping[str, str]) -> bool:
    """Whether a row of sm_103 is of the machine of 8 GPUs, not of a rack. Its permutes name no pattern."""
    if record["op"] == "collective-permute":
        return not record["cp_pattern"]
    return int(record["n_groups"]) * int(record["group_size"]) == 8


def summary_lines(rows: Sequence[Row], errors: np.ndarray, *, key: str = "system") -> list[str]:
    """A table in Markdown: median and 90th percentile of |error| by system and size band."""
    lines = ["| system | " + " | ".join(f"{name}: median, p90 (rows)" for name, _, _ in BANDS) + " |"]
    lines.append("|---" * (1 + len(BANDS)) + "|")
    names = np.array([getattr(row, key) for row in rows])
    for name in [*dict.fromkeys(names), "all"]:
        member = np.ones(len(rows), dtype=bool) if name == "all" else names == name
        cells = (_cell(errors[member & in_band(rows, low, high)]) for _, low, high in BANDS)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _cell(errors: np.ndarray, *, signed: bool = False) -> str:
    if not len(errors):
        return ""
    size = np.abs(errors)
    middle = f", {np.median(errors):+.1%}" if signed else ""
    return f"{np.median(size):.1%}, {np.percentile(size, 90):.1%}{middle} ({len(errors)})"


def table_lines(rows: Sequence[Row]) -> list[str]:
    """A table in Markdown: XLA's table by operation and device, and signed median error."""
    errors = with_shipped_numbers(rows)
    lines = ["| operation | device | rows | median abs | p90 abs | median signed |", "|---|---|---|---|---|---|"]
    for operation in sorted({row.collective for row in rows}):
        for system in [*sorted({row.system for row in rows}), "all"]:
            member = np.array([row.collective == operation and system in (row.system, "all") for row in rows])
            found = errors[member]
            if len(found):
                size = np.abs(found)
                numbers = f"{np.median(size):.1%} | {np.percentile(size, 90):.1%} | {np.median(found):+.1%}"
                lines.append(f"| {operation} | {system} | {len(found)} | {numbers} |")
    return lines


def score(paths: Sequence[Path], out: Path | None, *, table: bool) -> None:
    """Scores sweep files; systems that are not understood are named once each.

    Raises:
        ConfigError: a file that cannot be read, or none whose rows could be priced.
    """
    found = [line for path in paths for line in read_rows(path)]
    if out is not None:
        write_scores(found, out)
    for line in {line.record["system"]: line for line in reversed(found) if line.row is None}.values():
        print(f"nccl_sweeps: not priced: '{line.record['system']}': {line.note}\n  at {line.where}", file=sys.stderr)
    if table:
        print(f"meshkit {meshkit.__version__}, Python {platform.python_version()}, numpy {np.__version__}")
        print("\n".join(score_lines(found)))
    if all(line.predicted_s is None for line in found):
        hint = "names like 'B200 x32, 4 nodes, 8x400G NDR'"
        raise ConfigError(f"none of the {len(found)} rows could be priced: {found[0].note}.", hint=hint)


def main(words: Sequence[str] | None = None) -> int:
    """Prints the tables; 2 where the input is wrong."""
    parser = argparse.ArgumentParser(description="The network model beside measured collectives.")
    parser.add_argument("--rows", type=Path, nargs="+", metavar="FILE", help="sweeps to score with the shipped model")
    parser.add_argument("--out", type=Path, metavar="CSV", help="where --rows writes measured beside predicted")
    parser.add_argument("--csv", type=Path, default=SWEEPS, help="sweeps to leave systems out of, one at a time")
    parser.add_argument(
        "--table", action="store_true", help="the errors of --rows; else XLA's own collective table too"
    )
    arguments = parser.parse_args(words)
    if bool(arguments.rows) < bool(arguments.out) or bool(arguments.rows) > bool(arguments.out or arguments.table):
        parser.error("--rows FILE... goes with --out CSV or --table")
    try:
        if arguments.rows:
            score(arguments.rows, arguments.out, table=arguments.table)
        else:
            _left_out(arguments.csv, table=arguments.table)
    except MeshkitError as error:
        print(f"nccl_sweeps: {error.render()}", file=sys.stderr)
        return error.exit_code
    return 0


def _left_out(path: Path, *, table: bool) -> None:
    """Prints the errors with each system, and each GPU, left out of the fit."""
    rows, skipped = read_sweeps(path)
    print(
        f"meshkit {meshkit.__version__}, Python {platform.python_version()}, numpy {np.__version__}; {len(rows)} rows\n"
    )
    for system, why in skipped.items():
        print(f"left out: {system}: {why}")
    if not rows:
        return
    errors, numbers = leave_one_out(rows)
    print("\n".join(["Leave one system out (headline)", "", *summary_lines(rows, errors), ""]))
    for system, fitted in numbers.items():
        print(
            f"- without {system}: turnaround {fitted['turnaround_steps']:.2f} steps, "
            f"launch {fitted['launch_s'] * 1e6:.1f} us"
        )
    strict, _ = leave_one_out(rows, key="gpu")
    print("\n".join(["", "Leave one GPU model out", "", *summary_lines(rows, strict, key="gpu"), ""]))
    shipped = with_shipped_numbers(rows)
    print("\n".join(["Shipped numbers (nccl.toml)", "", *summary_lines(rows, shipped), ""]))
    if table:
        print("\n".join(["XLA's collective table, from 16 MiB, shipped numbers", "", *table_lines(read_xla_table())]))


if __name__ == "__main__":
    sys.exit(main())
