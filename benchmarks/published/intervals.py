"""Write the table of intervals that plan prints, and print what they cover: `python -m benchmarks.published.intervals`.

The script reads predictions.csv and rows.csv beside this module (or those of `--predictions` and `--rows`). It also
reads own.csv beside the rows, if there is one: our measurements on one GPU, which own.py writes. It writes
meshkit/config/intervals.csv and prints the coverage of the intervals of 50 and 80 % with each group left out, so that
the quantiles are those of the stratum's other groups. A group counts only if all of its rows are predicted. `--check`
only prints. meshkit/predict/interval.py has the method.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.experiments import Unplannable, experiment_of
from benchmarks.published.rows import measured_step_s, read_rows
from meshkit.config import catalog
from meshkit.errors import MeshkitError
from meshkit.predict.interval import LEVELS, least_groups, stratum_of

HERE = Path(__file__).parent
OUT = Path(catalog.__file__).with_name("intervals.csv")


@dataclass(frozen=True)
class Residual:
    """One run whose step was predicted and measured."""

    id: str
    """The id of the row."""
    error: float
    """Predicted over measured, less one."""
    group: tuple[str, ...]
    """The key that correlated runs share."""
    publisher: str
    """The publisher of the run's page."""
    stratum: str
    """The name of the run's stratum."""

    @property
    def distance(self) -> float:
        """Return |ln(measured / predicted)|."""
        return abs(math.log1p(self.error))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table and print its coverage; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.intervals", description=__doc__)
    parser.add_argument("--predictions", type=Path, default=HERE / "predictions.csv", help="the predictions to use")
    parser.add_argument("--rows", type=Path, default=HERE / "rows.csv", help="the rows that were predicted")
    parser.add_argument("--check", action="store_true", help="print the coverage, write nothing")
    options = parser.parse_args(arguments)
    try:
        residuals = read_residuals(options.predictions, options.rows) + read_own(options.rows.with_name("own.csv"))
    except (MeshkitError, OSError) as error:
        print(f"intervals: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"intervals: '{options.predictions}' has no column {error}.", file=sys.stderr)
        return 2
    if not options.check:
        OUT.write_text(table_text(residuals), encoding="utf-8")
    print("\n".join((*scores_text(residuals), "", *coverage_text(residuals))))
    return 0


def read_residuals(predictions: Path, rows: Path) -> list[Residual]:
    """Return the residual of every prediction with both times, from groups whose rows are all predicted.

    A group that lacks some sizes is left out, because the sizes that it has may be those that are easy to plan.
    """
    by_id, found = {row.id: row for row in read_rows(rows)}, []
    with predictions.open(encoding="utf-8", errors="replace", newline="") as file:
        for p in csv.DictReader(file):
            predicted, measured = p["predicted_step_time_s"], p["measured_step_time_s"]
            if predicted and measured and p["id"] in by_id:
                row = by_id[p["id"]]
                try:
                    stratum = stratum_name(experiment_of(row).document)
                except Unplannable:
                    continue
                error = float(predicted) / float(measured) - 1
                found.append(Residual(row.id, error, row.group, row.publisher, stratum))
    predicted = {r.id for r in found}
    torn = {row.group for row in by_id.values() if measured_step_s(row)[0] and row.id not in predicted}
    return [r for r in found if r.group not in torn]


def read_own(path: Path) -> list[Residual]:
    """Return the residual of every training that we measured on one GPU, by its blind prediction; none without a file.

    Trainings on one card are one group: they share its libraries, its clock and its power.
    """
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Residual(
                row["id"],
                float(row["predicted_step_time_s"]) / float(row["measured_step_time_s"]) - 1,
                ("meshkit", row["gpu"]),
                "meshkit",
                stratum_of(catalog.gpu(row["gpu"]), row["precision"], row["experts"] == "yes", one_gpu=True).name,
            )
            for row in csv.DictReader(file)
        ]


def stratum_name(document: dict) -> str:
    """Return the stratum of an experiment, as a plan of it names it."""
    experts, cluster = "moe" in document["model"]["class"].lower(), document["cluster"]
    alone = cluster["hosts"] * cluster["gpus_per_host"] == 1
    return stratum_of(catalog.gpu(cluster["gpu"]), document["train"]["precision"], experts, one_gpu=alone).name


def quantile(residuals: Sequence[Residual], level: float) -> float | None:
    """Return the conformal quantile of the distances, in which each group weighs one; None with too few groups."""
    weights, groups = _weights(residuals), len({r.group for r in residuals})
    if groups < least_groups(level):
        return None
    total = 0.0
    for distance, weight in sorted((r.distance, weight) for r, weight in zip(residuals, weights, strict=True)):
        total += weight
        if total >= level * (groups + 1) - 1e-9:
            return distance
    return max(r.distance for r in residuals)


def left_out(
    residuals: Sequence[Residual], level: float, of: Callable[[Residual], object]
) -> list[tuple[Residual, bool]]:
    """Return each run with whether it lies in the interval made from its stratum's other runs.

    The other runs are those that differ in `of`. Runs with too few others for this level are left out.
    """
    found = []
    for r in residuals:
        others = [o for o in residuals if o.stratum == r.stratum and of(o) != of(r)]
        q = quantile(others, level) if others else None
        if q is not None:
            found.append((r, r.distance <= q))
    return found


def _weights(residuals: Sequence[Residual]) -> list[float]:
    sizes = Counter(r.group for r in residuals)
    return [1 / sizes[r.group] for r in residuals]


def strata_of(residuals: Iterable[Residual]) -> dict[str, list[Residual]]:
    """Return the runs of each stratum by its name."""
    found: dict[str, list[Residual]] = defaultdict(list)
    for r in residuals:
        found[r.stratum].append(r)
    return dict(sorted(found.items()))


def table_text(residuals: Sequence[Residual]) -> str:
    """Return the text of intervals.csv."""
    out = io.StringIO()
    out.write(
        "# Quantiles of |ln(measured / predicted)| over runs of JAX that `plan` predicted from their own files, by\n"
        "# stratum; a group of correlated runs weighs one. meshkit/predict/interval.py says how they are used.\n"
        "# Written by `python -m benchmarks.published.intervals`.\n"
    )
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["stratum", "groups", "publishers", "rows", *(f"q{100 * level:.0f}" for level in LEVELS)])
    for name, members in strata_of(residuals).items():
        counts = (len({r.group for r in members}), len({r.publisher for r in members}), len(members))
        numbers = ("" if (q := quantile(members, level)) is None else f"{q:.4f}" for level in LEVELS)
        writer.writerow([name, *counts, *numbers])
    return out.getvalue()


def scores_text(residuals: Sequence[Residual]) -> list[str]:
    """Return the errors by stratum as a Markdown table."""
    lines = ["| stratum | rows | groups | publishers | median error, by row | by group | bias |", f"|{'---|' * 7}"]
    for name, members in ({"all": list(residuals)} | strata_of(residuals)).items():
        if members:
            groups, publishers = {r.group for r in members}, sorted({r.publisher for r in members})
            by_row = statistics.median(abs(r.error) for r in members)
            by_group, bias = group_medians(members)
            lines.append(f"| {name} | {len(members)} | {len(groups)} | {', '.join(publishers)} | {by_row:.1%} | "
                         f"{by_group:.1%} | {bias:+.1%} |")  # fmt: skip
    return lines


def group_medians(residuals: Sequence[Residual]) -> tuple[float, float]:
    """Return the medians over groups of their medians: of |error|, and of the signed error."""
    groups: dict[object, list[float]] = defaultdict(list)
    for r in residuals:
        groups[r.group, r.stratum].append(r.error)
    absolute = statistics.median(statistics.median(map(abs, errors)) for errors in groups.values())
    return absolute, statistics.median(statistics.median(errors) for errors in groups.values())


def coverage_text(residuals: Sequence[Residual]) -> list[str]:
    """Return a Markdown table of what the intervals cover of runs that they were not made from."""
    lines = ["| left out | stratum | level | rows | covered | groups | covered |", f"|{'---|' * 7}"]
    ways: tuple[tuple[str, Callable[[Residual], object]], ...] = (
        ("each group", lambda r: r.group),
        ("each publisher", lambda r: r.publisher),
    )
    for way, of in ways:
        for name, members in strata_of(residuals).items():
            for level in LEVELS:
                looked = left_out(members, level, of)
                said = "too few others | | |"
                if looked:
                    weights = _weights([r for r, _ in looked])
                    inside = [float(covered) for _, covered in looked]
                    share = statistics.fmean(inside, weights)
                    said = f"{statistics.fmean(inside):.0%} | {len({r.group for r, _ in looked})} | {share:.0%} |"
                lines.append(f"| {way} | {name} | {level:.0%} | {len(looked)} | {said}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
