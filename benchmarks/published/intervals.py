"""`python -m benchmarks.published.intervals --details DIR/details.csv --rows FILE.csv`: the intervals that plan prints.

Split conformal: the residual of a run is measured over predicted. Rows of one page, model and precision are
correlated, so that a group weighs one, shared by its rows, and groups are what is exchangeable: of n of them the end of
an interval is the first residual with a share (1 + level) / 2 of n + 1 groups on its inner side, so that a run of one
more group lies in it with at least that level, and at most 2 / (n + 1) more (Lee, Barber, Willett, 2306.06342). Written
to meshkit/config/intervals.csv by stratum, from its own width to all runs of its kind.

Printed: the coverage with each source left out, by stratum: the quantiles are those of all other sources, and the
rows of the source are looked up in them. A stratum that falls below 20 groups when its source is left out takes the
next wider one, as in a plan. Groups weigh one; beside it the same with every source weighing one, which is what a
source may expect that errs in a way of its own.
"""

from __future__ import annotations

import argparse
import csv
import io
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.rows import read_rows
from meshkit.config import catalog
from meshkit.errors import MeshkitError
from meshkit.predict.interval import Stratum, enough, stratum_of

OUT = Path(catalog.__file__).with_name("intervals.csv")
ENDS = ("q10", "q25", "q75", "q90")
LEVELS = {0.8: ("q10", "q90"), 0.5: ("q25", "q75")}


@dataclass(frozen=True)
class Residual:
    """One published run: measured over predicted."""

    ratio: float
    source: str  # who published it, all of their pages
    group: tuple[str, ...]
    stratum: Stratum


@dataclass(frozen=True)
class _Looked:
    """A run beside the interval that the other sources give it."""

    residual: Residual
    weight: float
    ends: dict[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table and prints its coverage; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.intervals", description=__doc__)
    parser.add_argument("--details", type=Path, required=True, help="details.csv of a replay")
    parser.add_argument("--rows", type=Path, required=True, help="the published runs that it is of")
    parser.add_argument("--check", action="store_true", help="print the coverage, write nothing")
    options = parser.parse_args(arguments)
    try:
        residuals = read_residuals(options.details, options.rows)
    except (MeshkitError, OSError, KeyError) as error:
        print(f"intervals: {error}", file=sys.stderr)
        return 2
    if not options.check:
        OUT.write_text(table_text(residuals), encoding="utf-8")
    print(coverage_text(residuals))
    return 0


def read_residuals(details: Path, rows: Path) -> list[Residual]:
    """Of every row of a replay that has both times."""
    by_id = {row.id: row for row in read_rows(rows)}
    found = []
    with details.open(encoding="utf-8", newline="") as file:
        for p in csv.DictReader(file):
            if p["predicted_s"] and p["measured_s"] and p["gpu"] and p["id"] in by_id:
                row, experts = by_id[p["id"]], p["family"].endswith("experts")
                group = (p["family"], row.source, row.say("model"), p["precision"])
                stratum = stratum_of(catalog.gpu(p["gpu"]), p["precision"], experts)
                ratio = float(p["measured_s"]) / float(p["predicted_s"])
                found.append(Residual(ratio, row.source.partition(" ")[0], group, stratum))
    return found


def quantiles(residuals: Sequence[Residual]) -> dict[str, float]:
    """The ends of the 50 and 80 % intervals, groups weighing alike."""
    sizes = Counter(r.group for r in residuals)
    ordered = sorted((r.ratio, 1 / sizes[r.group]) for r in residuals)
    found = {}
    for level, (low, high) in LEVELS.items():
        inner = (1 + level) / 2 * (len(sizes) + 1)
        found |= {low: _reached(ordered[::-1], inner), high: _reached(ordered, inner)}
    return {name: found[name] for name in ENDS}


def _reached(ordered: Sequence[tuple[float, float]], weight: float) -> float:
    """The first value, in this order, up to which there is so much weight; the last one where there is less."""
    total = 0.0
    for value, more in ordered:
        total += more
        if total >= weight - 1e-9:
            return value
    return ordered[-1][0]


def by_stratum(residuals: Iterable[Residual]) -> dict[str, list[Residual]]:
    """Name of a stratum, of every width, -> its runs."""
    found: dict[str, list[Residual]] = defaultdict(list)
    for r in residuals:
        for name in r.stratum.names:
            found[name].append(r)
    return dict(sorted(found.items()))


def table_text(residuals: Sequence[Residual]) -> str:
    """The text of intervals.csv."""
    out = io.StringIO()
    out.write(
        "# Quantiles of measured over predicted step times of published runs, by stratum; a group of correlated runs\n"
        "# weighs one. Written by `python -m benchmarks.published.intervals`; read by meshkit/predict/interval.py.\n"
    )
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["stratum", "groups", "sources", "rows", *ENDS])
    for name, members in by_stratum(residuals).items():
        ends = (f"{value:.4f}" for value in quantiles(members).values())
        counts = (len({r.group for r in members}), len({r.source for r in members}), len(members))
        writer.writerow([name, *counts, *ends])
    return out.getvalue()


def coverage_text(residuals: Sequence[Residual]) -> str:
    """Coverage of both intervals with each source left out, by stratum."""
    found: dict[str, list[_Looked]] = defaultdict(list)
    sizes = Counter(r.group for r in residuals)
    for source in sorted({r.source for r in residuals}):
        others = by_stratum(r for r in residuals if r.source != source)
        ends = {n: quantiles(m) for n, m in others.items() if "," not in n or _enough(m)}
        for r in residuals:
            if r.source == source and (name := next((n for n in r.stratum.names if n in ends), None)):
                for wide in (r.stratum.names[0], r.stratum.names[-1]):
                    found[wide].append(_Looked(r, 1 / sizes[r.group], ends[name]))
    lines = ["| stratum | groups | rows | 50 % covers | 80 % covers | by source | half of 80 % | median error | |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    whole = by_stratum(residuals)
    for name in sorted(found, key=lambda n: (n.count(","), n)):
        members, looked = whole[name], found[name]
        count, sources = len({r.group for r in members}), len({r.source for r in members})
        note = "" if _enough(members) else f"uncalibrated: {count} groups of {sources} sources"
        alike = [_covered(looked, source) for source in {one.residual.source for one in looked}]
        shares = [_covered(looked, level=0.5), _covered(looked), statistics.fmean(alike)]
        width = statistics.median((one.ends["q90"] - one.ends["q10"]) / 2 for one in looked)
        cells = (name, count, len(members), *(f"{x:.0%}" for x in shares), f"{width:.1%}",
                 f"{_median_error(members):.1%}", note)  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _covered(looked: Iterable[_Looked], source: str = "", level: float = 0.8) -> float:
    """Share of the weight, of one source or of all, that lies in its interval."""
    low, high = LEVELS[level]
    some = [one for one in looked if source in ("", one.residual.source)]
    inside = sum(one.weight for one in some if one.ends[low] <= one.residual.ratio <= one.ends[high])
    return inside / sum(one.weight for one in some)


def _enough(members: Sequence[Residual]) -> bool:
    return enough(len({r.group for r in members}), len({r.source for r in members}))


def _median_error(residuals: Iterable[Residual]) -> float:
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for r in residuals:
        groups[r.group].append(abs(1 / r.ratio - 1))
    return statistics.median(statistics.median(errors) for errors in groups.values())


if __name__ == "__main__":
    sys.exit(main())
