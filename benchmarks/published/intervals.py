"""`python -m benchmarks.published.intervals --details DIR/details.csv --rows FILE.csv`: the intervals that plan prints.

Conformal: the residual of a run is the logarithm of measured over predicted, and an interval lies around the middle of
dense residuals, their weighted median. Rows of one page, model and precision are correlated, so that a group weighs
one, shared by its rows, and groups are what is exchangeable: of n of them the quantile is the first distance from the
middle with a share `level` of n + 1 groups up to it, so that a run of one more group lies inside with at least that
level, and at most 1 / (n + 1) more (Lee, Barber, Willett, 2306.06342). The middle that a source's residuals are held
against is that of all other sources. Written to meshkit/config/intervals.csv: the numbers by kind, counts by stratum
too. Last stands how far the errors of two runs of one group on as many GPUs, of one batch and sequence, lie apart, by
the same counting: what a choice between two such predictions may be wrong by.

Printed: the coverage with each source left out, by stratum: middle and quantiles are those of all other sources. Groups
weigh one; `by source`, every source weighs one, which is what a source may expect that errs in a way of its own. Then
other ways to make an interval of the same residuals, with their score (Winkler's, of the 80 % interval in shares of the
predicted step: its width, and ten times how far the measured step lies outside of it; the less, the better), and how
many of such pairs the others' quantiles cover.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.published.rows import read_rows
from meshkit.config import catalog
from meshkit.errors import MeshkitError
from meshkit.predict.interval import LEVELS, PAIRS, Law, Stratum, enough, stratum_of

OUT = Path(catalog.__file__).with_name("intervals.csv")
_CELLS = "50 % covers | 80 % covers | by source | half of 80 % | median error | ratio | score"


@dataclass(frozen=True)
class Residual:
    """One published run: measured over predicted."""

    ratio: float
    source: str  # who published it, all of their pages
    group: tuple[str, ...]
    stratum: Stratum
    work: tuple[str, ...] = ()  # the GPU, numbers of GPUs and of sequences, their length


@dataclass(frozen=True)
class _Looked:
    """A run beside the intervals that the other sources give it."""

    residual: Residual
    weight: float
    ends: Mapping[float, tuple[float, float]]

    def inside(self, level: float) -> bool:
        low, high = self.ends[level]
        return low <= self.residual.ratio <= high

    @property
    def half(self) -> float:
        """Of the 80 % interval."""
        return (self.ends[0.8][1] - self.ends[0.8][0]) / 2

    @property
    def score(self) -> float:
        """Winkler's, of the 80 % interval."""
        low, high = self.ends[0.8]
        return high - low + 10 * max(0.0, low - self.residual.ratio, self.residual.ratio - high)


_Way = Callable[[Sequence[Residual]], Callable[[Residual], Mapping[float, tuple[float, float]]]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the table and prints its coverage; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.intervals", description=__doc__)
    parser.add_argument("--details", type=Path, required=True, help="details.csv of a replay")
    parser.add_argument("--rows", type=Path, required=True, help="the published runs that it is of")
    parser.add_argument("--check", action="store_true", help="print the coverage, write nothing")
    options = parser.parse_args(arguments)
    try:
        residuals = read_residuals(options.details, options.rows)
    except (MeshkitError, OSError) as error:
        print(f"intervals: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"intervals: {options.details} has no column {error}: replay the runs again", file=sys.stderr)
        return 2
    if not options.check:
        OUT.write_text(table_text(residuals), encoding="utf-8")
    print(coverage_text(residuals))
    print(f"\n{ways_text(residuals)}\n\n{pairs_text(residuals)}")
    return 0


def read_residuals(details: Path, rows: Path) -> list[Residual]:
    """Of every row of a replay that has both times."""
    by_id = {row.id: row for row in read_rows(rows)}
    found = []
    with details.open(encoding="utf-8", newline="") as file:
        for p in csv.DictReader(file):
            if p["predicted_s"] and p["measured_s"] and p["id"] in by_id:
                row, experts = by_id[p["id"]], p["family"].endswith("experts")
                group = (p["family"], row.source, row.say("model"), p["precision"])
                stratum = stratum_of(catalog.gpu(p["gpu"]), p["precision"], experts)
                ratio = float(p["measured_s"]) / float(p["predicted_s"])
                work = (p["gpu"], p["num_gpus"], row.say("global_batch_seqs"), row.say("seq_len"))
                found.append(Residual(ratio, row.source.partition(" ")[0], group, stratum, work))
    return found


def law_of(residuals: Sequence[Residual], name: str = "dense") -> Law:
    """The law of a kind of runs: the middle of dense ones, where there are any, and the quantiles of its own.

    Args:
        residuals: of every kind.
        name: `dense`, `experts` or a stratum's.
    """
    fitted = [r for r in residuals if r.stratum.kind == "dense"] or residuals
    members = by_stratum(residuals).get(name, residuals)
    sources = {r.source for r in members}
    middles = {s: _middle([r for r in fitted if r.source != s] or fitted) for s in sources}
    weights = _weights(members)
    scores = sorted((abs(math.log(r.ratio) - middles[r.source]), weight) for r, weight in zip(members, weights))
    return Law(_middle(fitted), _quantiles(scores, len({r.group for r in members})))


def pairs_of(residuals: Sequence[Residual]) -> list[Residual]:
    """Any two dense runs of one group and of the same work: the larger of their ratios over the smaller one."""
    return [
        Residual(max(a.ratio, b.ratio) / min(a.ratio, b.ratio), a.source, a.group, a.stratum)
        for a, b in itertools.combinations(residuals, 2)
        if (a.group, a.work, a.stratum) == (b.group, b.work, b.stratum) and a.stratum.kind == "dense"
    ]


def apart_of(pairs: Sequence[Residual]) -> dict[float, float]:
    """Level -> the logarithm of the ratio that so many pairs do not exceed."""
    scores = sorted((math.log(r.ratio), weight) for r, weight in zip(pairs, _weights(pairs)))
    return _quantiles(scores, len({r.group for r in pairs}))


def _quantiles(ordered: Sequence[tuple[float, float]], groups: int) -> dict[float, float]:
    return {level: _reached(ordered, level * (groups + 1)) for level in LEVELS}


def _middle(residuals: Sequence[Residual]) -> float:
    weights = _weights(residuals)
    return _reached(sorted((math.log(r.ratio), weight) for r, weight in zip(residuals, weights)), sum(weights) / 2)


def _weights(residuals: Sequence[Residual]) -> list[float]:
    sizes = Counter(r.group for r in residuals)
    return [1 / sizes[r.group] for r in residuals]


def _reached(ordered: Sequence[tuple[float, float]], weight: float) -> float:
    """The first value, in this order, up to which there is so much weight; the last one where there is less."""
    total = 0.0
    for value, more in ordered:
        total += more
        if total >= weight - 1e-9:
            return value
    return ordered[-1][0]


def by_stratum(residuals: Iterable[Residual]) -> dict[str, list[Residual]]:
    """Name of a stratum, or of a kind -> its runs."""
    found: dict[str, list[Residual]] = defaultdict(list)
    for r in residuals:
        found[r.stratum.kind].append(r)
        found[r.stratum.name].append(r)
    return dict(sorted(found.items()))


def table_text(residuals: Sequence[Residual]) -> str:
    """The text of intervals.csv."""
    out = io.StringIO()
    out.write(
        "# How measured step times of published runs lie around predicted ones: `Law` in meshkit/predict/interval.py.\n"
        "# A group of correlated runs weighs one. Written by `python -m benchmarks.published.intervals`.\n"
    )
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["stratum", "groups", "sources", "rows", "middle", "q50", "q80"])
    for name, members in by_stratum(residuals).items():
        law = law_of(residuals, name) if "," not in name else None
        numbers = [f"{x:.4f}" for x in (law.middle, *law.quantiles.values())] if law else [""] * 3
        writer.writerow([name, *_counts(members), len(members), *numbers])
    if pairs := pairs_of(residuals):
        numbers = [f"{x:.4f}" for x in apart_of(pairs).values()]
        writer.writerow([PAIRS, *_counts(pairs), len(pairs), "", *numbers])
    return out.getvalue()


def coverage_text(residuals: Sequence[Residual]) -> str:
    """Coverage of both intervals with each source left out, by stratum."""
    looked = _left_out(residuals, _around)
    lines = [f"| stratum | groups | rows | {_CELLS} | |", f"|{'---|' * 11}"]
    for name, members in by_stratum(residuals).items():
        groups, sources = _counts(members)
        note = "" if enough(groups, sources) else f"uncalibrated: {groups} groups of {sources} sources"
        some = _among(looked, members)
        lines.append(f"| {name} | {groups} | {len(members)} | {_cells(some)} | {note} |")
    return "\n".join(lines)


def pairs_text(residuals: Sequence[Residual]) -> str:
    """How far apart the errors of two runs of one model are, and how many pairs of a source the others' cover."""
    pairs = pairs_of(residuals)
    sources = {r.source for r in pairs}
    if len(sources) < 2:
        return f"{PAIRS}: {len(pairs)} of {len(sources)} sources"
    others = {s: apart_of([r for r in pairs if r.source != s]) for s in sources}
    groups, weights = len({r.group for r in pairs}), _weights(pairs)
    said = [
        f"{apart:.1%} for {level:.0%} (covers "
        f"{statistics.fmean([math.log(r.ratio) <= others[r.source][level] for r in pairs], weights):.0%})"
        for level, apart in apart_of(pairs).items()
    ]
    return f"{PAIRS}: {len(pairs)} of {groups} groups of {len(sources)} sources: {', '.join(said)}"


def ways_text(residuals: Sequence[Residual]) -> str:
    """What other ways to make an interval give dense runs, each source left out."""
    dense = [r for r in residuals if r.stratum.kind == "dense"]
    ways: dict[str, _Way] = {
        "two ends of each stratum": _two_ends(lambda r: r.stratum.name),
        "two ends": _two_ends(lambda r: r.stratum.kind),
        "one quantile of each stratum": _around_each,
        "one quantile around the middle": _around,
    }
    lines = [f"| dense runs | {_CELLS} | least stratum |", f"|{'---|' * 9}"]
    for name, way in ways.items():
        looked = _left_out(dense, way)
        strata = [members for members in by_stratum(dense).values() if enough(*_counts(members))]
        least = min((_covered(_among(looked, members)) for members in strata), default=math.nan)
        lines.append(f"| {name} | {_cells(looked)} | {least:.0%} |")
    return "\n".join(lines)


def _around(residuals: Sequence[Residual]):
    """The way of a plan."""
    laws = {kind: law_of(residuals, kind) for kind in ("dense", "experts")}
    return lambda r: {level: laws[r.stratum.kind].ends(level) for level in LEVELS}


def _around_each(residuals: Sequence[Residual]):
    """Of each stratum its own quantile, around the middle of all; of one that is not calibrated that of all."""
    strata = {name: members for name, members in by_stratum(residuals).items() if enough(*_counts(members))}
    laws = {name: law_of(residuals, name) for name in strata}
    whole = law_of(residuals)
    return lambda r: {level: laws.get(r.stratum.name, whole).ends(level) for level in LEVELS}


def _two_ends(name_of: Callable[[Residual], str]) -> _Way:
    """Of each stratum its own low and high quantile; of one that is not calibrated those of all."""

    def ends(some: Sequence[Residual]) -> Mapping[float, tuple[float, float]]:
        ordered = sorted((r.ratio, weight) for r, weight in zip(some, _weights(some)))
        groups = len({r.group for r in some})
        inner = {level: (1 + level) / 2 * (groups + 1) for level in LEVELS}
        return {level: (_reached(ordered[::-1], x), _reached(ordered, x)) for level, x in inner.items()}

    def way(residuals: Sequence[Residual]):
        strata: dict[str, list[Residual]] = defaultdict(list)
        for r in residuals:
            strata[name_of(r)].append(r)
        found = {name: ends(members) for name, members in strata.items() if enough(*_counts(members))}
        whole = ends(residuals)
        return lambda r: found.get(name_of(r), whole)

    return way


def _left_out(residuals: Sequence[Residual], way: _Way) -> list[_Looked]:
    """Every run beside the intervals that a way makes of the runs of all other sources."""
    weights = _weights(residuals)
    ends = {s: way([r for r in residuals if r.source != s] or residuals) for s in {r.source for r in residuals}}
    return [_Looked(r, weight, ends[r.source](r)) for r, weight in zip(residuals, weights)]


def _among(looked: Sequence[_Looked], members: Sequence[Residual]) -> list[_Looked]:
    """Those of a stratum, in which each of its groups weighs one, though it may have rows of another."""
    some = [one for one in looked if one.residual in members]
    weights = _weights([one.residual for one in some])
    return [replace(one, weight=weight) for one, weight in zip(some, weights, strict=True)]


def _cells(looked: Sequence[_Looked]) -> str:
    """What `_CELLS` names; half of the 80 % interval is the mean over groups, its ratio that to the median error."""
    alike = [_covered([o for o in looked if o.residual.source == s]) for s in {o.residual.source for o in looked}]
    weights = [one.weight for one in looked]
    half = statistics.fmean([one.half for one in looked], weights)
    score = statistics.fmean([one.score for one in looked], weights)
    error = _median_error(one.residual for one in looked)
    shares = (_covered(looked, 0.5), _covered(looked), statistics.fmean(alike))
    cells = (*(f"{x:.0%}" for x in shares), f"{half:.1%}", f"{error:.1%}", f"{half / error:.2f}", f"{score:.3f}")
    return " | ".join(cells)


def _covered(looked: Sequence[_Looked], level: float = 0.8) -> float:
    """Share of the weight that lies in its interval."""
    return sum(one.weight for one in looked if one.inside(level)) / sum(one.weight for one in looked)


def _counts(members: Sequence[Residual]) -> tuple[int, int]:
    """Groups, and sources."""
    return len({r.group for r in members}), len({r.source for r in members})


def _median_error(residuals: Iterable[Residual]) -> float:
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for r in residuals:
        groups[r.group].append(abs(1 / r.ratio - 1))
    return statistics.median(statistics.median(errors) for errors in groups.values())


if __name__ == "__main__":
    sys.exit(main())
