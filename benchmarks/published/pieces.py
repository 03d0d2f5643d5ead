"""What a user's plan does not get, piece by piece: `python -m benchmarks.published.pieces --rows FILE.csv --out DIR`.

The replay knows of other frameworks what a plan of one's own step does not: each such piece is left out in turn, on all
rows whose program is compiled in DIR, and those that it changes are counted. Prints a table in markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.published import replay, replica
from benchmarks.published.corrections import CORRECTIONS, Correction, leave_out
from benchmarks.published.experiments import Run, resolve
from benchmarks.published.programs import Program, get_program, has_program
from benchmarks.published.replay import Prediction
from benchmarks.published.rows import Row, measured_step_time_s, read_rows
from benchmarks.published.statistics import groups
from meshkit.config.cluster import Cluster

_CHANGED = 1e-4  # of a step


def step_s(run: Run, program: Program) -> float:
    """Seconds of the predicted step of a row."""
    if not run.whole:
        return replica.replica_step_s(run, program, Cluster.load(run.machines.table), replica.framework_view(run))
    simulation, more = replay.whole_step(run, program)
    return simulation.timeline.steps[0].window[1] + more


def errors_without(
    rows: Sequence[Row], folder: Path, pieces: Sequence[Correction]
) -> list[tuple[Prediction, list[float]]]:
    """Each row whose program is compiled: its prediction, and the step without each of the pieces."""
    found = []
    for row in rows:
        run = resolve(row)
        if isinstance(run, str) or not has_program(run.toml, folder / "programs"):
            continue
        measured_s, _ = measured_step_time_s(row, run.model_flops)
        if not measured_s:
            continue
        program, _ = get_program(run.toml, folder / "programs")
        whole = Prediction(row.id, row.source, replay.family_of(run), run.precision, measured_s=measured_s,
                           predicted_s=step_s(run, program))  # fmt: skip
        found.append((whole, [step_s(leave_out(run, c), program) if c.of(run) else whole.predicted_s for c in pieces]))
    return found


def table_line(name: str, found: Sequence[tuple[Prediction, float]], rows: Mapping[str, Row]) -> str:
    """One line of the table.

    Args:
        name: of the piece.
        found: of every row its prediction, and the step in seconds without the piece.
        rows: by id.
    """
    pairs = [(p, replace(p, predicted_s=seconds)) for p, seconds in found]
    changes = {p.id: q.predicted_s / p.predicted_s - 1 for p, q in pairs if p.predicted_s and q.predicted_s}
    touched = [(p, q) for p, q in pairs if abs(changes[p.id]) > _CHANGED]
    if not touched:
        return f"| {name} | 0 | 0 | | | | |"
    base, other = ([pair[n] for pair in touched] for n in (0, 1))
    few = [changes[p.id] for p in base]
    parts = [name, len(touched), len(groups(base, rows)), medians(other, rows), medians(base, rows),
             medians([q for _, q in pairs], rows), f"{min(few):+.1%} to {max(few):+.1%}"]  # fmt: skip
    return f"| {' | '.join(map(str, parts))} |"


def medians(found: Iterable[Prediction], rows: Mapping[str, Row]) -> str:
    """Medians over groups of their median error, without and with its sign."""
    errors = [[p.error or 0.0 for p in members] for members in groups(found, rows).values()]
    plain = statistics.median(statistics.median(abs(e) for e in group) for group in errors)
    return f"{plain:.1%}, {statistics.median(statistics.median(group) for group in errors):+.1%}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.pieces", description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="CSV with the columns of the published runs")
    parser.add_argument("--out", type=Path, required=True, help="folder of `python -m benchmarks.published`")
    parser.add_argument("--only", default="", help="pieces whose name holds this text")
    options = parser.parse_args(arguments)
    rows = {row.id: row for row in read_rows(options.rows)}
    pieces = [piece for piece in CORRECTIONS if options.only in piece.name]
    found = errors_without(list(rows.values()), options.out, pieces)
    base = [p for p, _ in found]
    print(f"{len(base)} rows, {len(groups(base, rows))} groups: {medians(base, rows)}\n")
    print("| without it | rows | groups | those rows without it | with it | all rows without it | one row |")
    print("|---|---|---|---|---|---|---|")
    for n, piece in enumerate(pieces):
        print(table_line(piece.name, [(p, seconds[n]) for p, seconds in found], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
