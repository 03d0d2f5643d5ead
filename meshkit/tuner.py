"""tune: the fastest variant of an experiment that fits, and why it is faster. Layer 8.

experiment -> space -> bounds -> search (plans in parallel processes) -> TuneReport, winner.toml
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from meshkit.errors import ConfigError, RunError
from meshkit.report.view import axes_text
from meshkit.spec.experiment import Experiment, load
from meshkit.tuning.bounds import Bounds
from meshkit.tuning.journal import Journal
from meshkit.tuning.schema import SILENT, DifferencePart, Outcome, OutcomeRow, Told, TuneReport
from meshkit.tuning.search import Pruned, Search, candidates
from meshkit.tuning.space import REMATS, make_space
from meshkit.tuning.workers import default_jobs, open_workers
from meshkit.units import format_bytes, format_percent, format_seconds

WINNER_FILE = "winner.toml"
REPORT_FILE = "tune.json"
LOG_FILE = "workers.log"
# Differences below this share of the step are left out of what says why, but for the largest.
_NOTABLE = 0.005


def tune(
    experiment: str | Path,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    budget: int = 64,
    jobs: int | None = None,
    axes: Sequence[str] | None = None,
    progress: Told = SILENT,
) -> TuneReport:
    """The search's report; with `out` also `tune.json`, `winner.toml`, and what a later call resumes from.

    Args:
        experiment: the file.
        overrides: `key=value`, laid over it.
        out: a folder that exists.
        budget: variants to compile at most, those of earlier calls with the same `out` among them.
        jobs: planning processes at a time; None: one for each CPU.
        axes: names of mesh axes that may have a size; None: those that the rules know.
        progress: told how it goes.

    Raises:
        ConfigError: no valid experiment, a cluster without GPUs, or a folder with another search.
        RunError: not even the experiment as it is could be planned, nor any variant of it.
    """
    start = time.perf_counter()
    path, overrides = str(experiment), tuple(overrides)
    loaded = load(path, overrides)
    _check(loaded, budget, jobs)
    journal = Journal(out, loaded)
    bounds = Bounds(loaded)
    space = make_space(
        loaded,
        axes=axes,
        logical_axes=bounds.logical_axes,
        remats=bounds.remats(REMATS),
        may_be_cut=bounds.may_be_cut,
    )
    pruned = Pruned()
    found = candidates(path, overrides, space, bounds, pruned, progress.pruning)
    progress.started(len(found), min(budget, len(found) + 1))
    search = Search(path, overrides, found, space.base, journal, budget, pruned)
    workers = jobs or default_jobs()
    with open_workers(workers, out / LOG_FILE if out else None) as pool:
        search.run(pool, workers, lambda outcome, known: progress.done(outcome, known, search.best()))
    report = _report(loaded, search, pruned, sum(1 for _ in space.variants()), workers)
    report = report.model_copy(update={"wall_s": time.perf_counter() - start})
    if out is not None:
        (out / REPORT_FILE).write_text(report.to_json() + "\n", encoding="utf-8")
        if report.winner is not None:
            winner = load(path, (*overrides, *report.winner.settings))
            (out / WINNER_FILE).write_text(_HEADER + winner.to_toml(), encoding="utf-8")
    return report


_HEADER = "# Written by `meshkit tune`: the fastest variant that fits, every default filled in.\n"


def _check(experiment: Experiment, budget: int, jobs: int | None) -> None:
    if experiment.cluster.is_cpu:
        raise ConfigError(
            f"cluster '{experiment.cluster.name}' has no GPUs, and tune predicts GPUs.",
            hint="--set cluster=dgx_h100 (or any shipped cluster), with --set mesh... to match it",
        )
    if budget < 1 or (jobs is not None and jobs < 1):
        raise ConfigError("a search compiles one variant at least, in one process at least.", hint="--candidates 64")


def _report(experiment: Experiment, search: Search, pruned: Pruned, space: int, jobs: int) -> TuneReport:
    outcomes = search.outcomes
    base, winner = outcomes[0], search.best()
    if all(outcome.status == "error" for outcome in outcomes):
        raise RunError(f"none of {len(outcomes)} variants could be planned; the first: {base.error}")
    differences = _differences(base, winner) if winner else ()
    return TuneReport(
        experiment=experiment.name,
        gpu=experiment.cluster.gpu.key,
        num_gpus=experiment.cluster.num_gpus,
        global_batch=experiment.train.global_batch,
        base=base,
        winner=winner,
        winner_is_base=winner is not None and not winner.settings,
        why=_why(base, winner, differences),
        differences=differences,
        outcomes=outcomes,
        pareto=pareto(outcomes),
        space=space,
        pruned=pruned.parts(),
        compiled=len(outcomes),
        reused=search.reused,
        left=search.left,
        wall_s=0.0,
        jobs=jobs,
    )


def pareto(outcomes: Sequence[Outcome]) -> tuple[int, ...]:
    """Indices of outcomes that fit and that no other beats in time, memory and GPUs at once; the fastest first."""
    found: list[int] = []
    fitting = [i for i, o in enumerate(outcomes) if o.fits and o.time_s is not None]
    for i in sorted(fitting, key=lambda i: _costs(outcomes[i])):
        if not any(all(a <= b for a, b in zip(_costs(outcomes[j]), _costs(outcomes[i]))) for j in found):
            found.append(i)
    return tuple(found)


def _costs(outcome: Outcome) -> tuple[float, int, int]:
    return outcome.time_s or 0.0, outcome.peak_bytes or 0, outcome.num_gpus or 0


def _row_name(row: OutcomeRow) -> str:
    words = [word for word in (row.collective, row.dtype) if word]
    return f"exposed {' '.join(words)} over {axes_text(row.axes)} on {row.link or '-'}"


def _differences(base: Outcome, winner: Outcome) -> tuple[DifferencePart, ...]:
    """Seconds of compute and of each row's exposed communication, the largest saving first."""

    def seconds(outcome: Outcome) -> dict[str, float]:
        found: dict[str, float] = {}
        for row in outcome.rows:
            found[_row_name(row)] = found.get(_row_name(row), 0.0) + (row.exposed_s or 0.0)
        return found

    pairs: dict[str, tuple[float | None, float | None]] = {"compute": (base.compute_s, winner.compute_s)}
    pairs["idle and copies"] = (_rest(base), _rest(winner))
    before, after = seconds(base), seconds(winner)
    for name in dict.fromkeys((*before, *after)):
        pairs[name] = (before.get(name), after.get(name))
    parts = [
        DifferencePart(name=name, base_s=b, winner_s=w, saved_s=(b or 0.0) - (w or 0.0))
        for name, (b, w) in pairs.items()
    ]
    return tuple(sorted(parts, key=lambda part: -part.saved_s))


def _rest(outcome: Outcome) -> float | None:
    if outcome.time_s is None or outcome.compute_s is None or outcome.exposed_s is None:
        return None
    return outcome.time_s - outcome.compute_s - outcome.exposed_s


def _why(base: Outcome, winner: Outcome | None, differences: Sequence[DifferencePart]) -> tuple[str, ...]:
    if winner is None:
        return ("no variant that was compiled fits.",)
    if not winner.settings:
        return ("no variant that was compiled is faster than the experiment as it is.",)
    said = []
    if base.time_s is None:
        said.append(f"the experiment as it is could not be planned: {base.error}")
    elif base.status == "does_not_fit":
        missing = format_bytes(-(base.margin_bytes or 0))
        said.append(f"the experiment as it is does not fit: {missing} too much.")
    step = winner.time_s or 0.0
    if base.time_s:
        share = format_percent(step / base.time_s - 1)
        said.append(f"a step takes {format_seconds(step)} instead of {format_seconds(base.time_s)} ({share}).")
    largest = max((abs(part.saved_s) for part in differences), default=0.0)
    for part in differences:
        if abs(part.saved_s) < min(_NOTABLE * step, largest) or base.time_s is None or not part.saved_s:
            continue
        said.append(_sentence(part))
    return tuple(said)


def _sentence(part: DifferencePart) -> str:
    before, after = format_seconds(part.base_s or 0.0), format_seconds(part.winner_s or 0.0)
    if not part.winner_s:
        return f"{part.name} went away: {before}."
    if not part.base_s:
        return f"{part.name} is new: {after}."
    verb = "fell" if part.saved_s > 0 else "rose"
    return f"{part.name} {verb} from {before} to {after}."
