"""Score the network model on measured collectives.

    python -m benchmarks.nccl_sweeps [--rows FILE...] [--out CSV] [--table] [--figure SVG]

Sweep files (by default the two in tests/data) are scored row by row. `--out` writes measured beside predicted times, or
why a row has no prediction. `--table` prints the errors by source, collective, system and size, and the same with each
system left out of the fit. It also prints every fitted constant with what it is worth and, without `--rows`, the errors
on XLA's own collective table. `--figure` draws measured and predicted times.
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
from benchmarks.nccl_sweeps.figure import draw
from benchmarks.nccl_sweeps.fit import CLASSES, by_hand_lines, by_kind, by_place, constant_lines, leave_one_out, misses
from benchmarks.nccl_sweeps.rows import Measured, Row, read_rows
from meshkit.config.cluster import Cluster
from meshkit.errors import ConfigError, MeshkitError

DATA = Path(__file__).parents[2] / "tests" / "data"
SWEEPS, TABLE = (DATA / "nccl_sweeps.csv", DATA / "nccl_sweeps_multinode.csv"), DATA / "xla_collective_table.csv.gz"
OUT_COLUMNS = ("system", "collective", "algo", "bytes", "measured_us", "predicted_us", "note")
_LEAST_SYSTEMS = 3  # With fewer, leaving one out leaves too little to fit.
_XLA_FROM = 2**24
_XLA_CLUSTERS = {"sm_90": "dgx_h100", "sm_100_B200": "dgx_b200", "sm_100_GB200": "gb200_nvl72", "sm_103": "gb300_nvl72"}


def write_scores(found: Sequence[Measured], path: Path) -> None:
    """Write every row: the measured time, and the predicted one or why there is none."""
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
    """Yield Markdown tables of the errors by class, collective and system, with sources apart, and of unpriced rows."""
    priced = [line for line in found if line.predicted_s is not None]
    small = sum(line.understood.payload_bytes < CLASSES[0][1] for line in priced)
    yield f"{len(found)} rows, {len(priced)} priced, {small} of them below 8 KiB and in no class."
    yield "Error = predicted / measured - 1; each cell: median of its size, 90th percentile of that, its median (rows)."
    yield from ["", "By class", ""]
    yield from _grouped(priced, ("source", "where"), lambda line: (line.source, line.understood.place))
    yield from [
        "",
        "By class, all sources: median over systems of each system's median, 90th percentile of all (systems)",
        "",
    ]
    rows = [line.understood for line in priced]
    yield from by_place(rows, misses(rows))
    if len({row.system for row in rows}) >= _LEAST_SYSTEMS:
        yield from ["", "The same, each system left out of the fit in turn", ""]
        left_out = leave_one_out(rows)
        yield from by_place(*left_out)
        yield from ["", "And over all places", "", *by_kind(*left_out)]
        yield from ["", "What is fitted", "", *constant_lines(rows), "", "Set by hand", "", *by_hand_lines()]
    yield from ["", "By collective", ""]
    key = ("source", "collective", "where")
    yield from _grouped(priced, key, lambda line: (line.source, line.understood.collective, line.understood.place))
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


def _grouped(
    lines: Sequence[Measured], names: Sequence[str], key: Callable[[Measured], tuple[str, ...]]
) -> Iterator[str]:
    """Yield a table with a line for each value of the key, by size class."""
    yield "| " + " | ".join([*names, *(name for name, _, _ in CLASSES)]) + " |"
    yield "|---" * (len(names) + len(CLASSES)) + "|"
    groups: dict[tuple[str, ...], list[Measured]] = {}
    for line in lines:
        if line.understood.payload_bytes >= CLASSES[0][1]:
            groups.setdefault(key(line), []).append(line)
    for group, members in sorted(groups.items()):
        cells = (_cell(_errors(members, low, high)) for _, low, high in CLASSES)
        yield "| " + " | ".join([*group, *cells]) + " |"


def _errors(lines: Iterable[Measured], low: int, high: int) -> np.ndarray:
    """Return the signed errors of the rows of a size class."""
    return np.array([line.error for line in lines if low <= line.understood.payload_bytes < high])


def read_xla_table() -> list[Row]:
    """Return the rows from 16 MiB of XLA's own table of collectives."""
    clusters = {key: Cluster.load(name) for key, name in _XLA_CLUSTERS.items()}
    rows = []
    with gzip.open(TABLE, "rt", newline="") as file:
        for record in csv.DictReader(file):
            if int(record["tensor_bytes"]) < _XLA_FROM:
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
    """Return whether a row of sm_103 is of the machine of 8 GPUs, not of a rack; its permutes name no pattern."""
    if record["op"] == "collective-permute":
        return not record["cp_pattern"]
    return int(record["n_groups"]) * int(record["group_size"]) == 8


def _cell(errors: np.ndarray) -> str:
    if not len(errors):
        return ""
    size = np.abs(errors)
    return f"{np.median(size):.1%}, {np.percentile(size, 90):.1%}, {np.median(errors):+.1%} ({len(errors)})"


def table_lines(rows: Sequence[Row]) -> list[str]:
    """Return a Markdown table of the errors on XLA's table, by operation and device."""
    errors = misses(rows)
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


def score(paths: Sequence[Path], out: Path | None, *, table: bool) -> list[Measured]:
    """Score sweep files; print each system that is not understood once.

    Raises:
        ConfigError: a file cannot be read, or none of its rows can be priced.
    """
    found = [line for path in paths for line in read_rows(path)]
    if out is not None:
        write_scores(found, out)
    for line in {line.record["system"]: line for line in reversed(found) if line.row is None}.values():
        print(f"nccl_sweeps: not priced: '{line.record['system']}': {line.note}\n  at {line.where}", file=sys.stderr)
    print(f"meshkit {meshkit.__version__}, Python {platform.python_version()}, numpy {np.__version__}")
    if table:
        print("\n".join(score_lines(found)))
    if all(line.predicted_s is None for line in found):
        hint = "names like 'B200 x32, 4 nodes, 8x400G NDR'"
        raise ConfigError(f"none of the {len(found)} rows could be priced: {found[0].note}.", hint=hint)
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables; return 2 if the input is wrong."""
    parser = argparse.ArgumentParser(description="The network model beside measured collectives.")
    parser.add_argument("--rows", type=Path, nargs="+", metavar="FILE", help="sweeps; default: the two of tests/data")
    parser.add_argument("--out", type=Path, metavar="CSV", help="where measured beside predicted is written")
    parser.add_argument("--figure", type=Path, metavar="SVG", help="where measured and predicted times are drawn")
    parser.add_argument("--table", action="store_true", help="print the errors and the fitted constants")
    arguments = parser.parse_args(words)
    if not (arguments.out or arguments.figure or arguments.table):
        parser.error("nothing to do: --out CSV, --figure SVG or --table")
    try:
        found = score(arguments.rows or SWEEPS, arguments.out, table=arguments.table)
        if arguments.figure:
            _write_figure(found, arguments.figure)
        if arguments.table and not arguments.rows:
            print("\n".join(["", "XLA's collective table, from 16 MiB", "", *table_lines(read_xla_table())]))
    except MeshkitError as error:
        print(f"nccl_sweeps: {error.render()}", file=sys.stderr)
        return error.exit_code
    return 0


def _write_figure(found: Sequence[Measured], path: Path) -> None:
    """Write the figure of the rows that are priced."""
    try:
        path.write_text(draw([line.understood for line in found if line.predicted_s is not None]))
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error}.", hint="--figure with another path") from None


if __name__ == "__main__":
    sys.exit(main())
