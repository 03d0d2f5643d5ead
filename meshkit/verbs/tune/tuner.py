"""tune: the fastest variant of an experiment that fits, and why it is faster.

experiment -> space -> bounds -> search (plans in parallel processes) -> TuneReport, winner.toml
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from meshkit.config.experiment import Experiment, load
from meshkit.errors import ConfigError, RunError
from meshkit.verbs.plan.bounds import Bounds
from meshkit.verbs.plan.outcome import SILENT, Outcome, Told, TuneReport
from meshkit.verbs.plan.space import REMATS, make_space
from meshkit.verbs.plan.workers import default_jobs, open_workers
from meshkit.verbs.tune.journal import Journal
from meshkit.verbs.tune.reasons import differences, why
from meshkit.verbs.tune.search import Pruned, Search, candidates
from meshkit.verbs.tune.sizes import at_size, like, shares

WINNER_FILE = "winner.toml"
REPORT_FILE = "tune.json"
LOG_FILE = "workers.log"
OBJECTIVES = ("time", "gpu_hours")


def tune(
    experiment: str | Path,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    budget: int = 64,
    jobs: int | None = None,
    axes: Sequence[str] | None = None,
    hosts: Sequence[int] = (),
    objective: str = "time",
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
        hosts: sizes of the cluster to look at beside the experiment's own, with the same global batch.
        objective: of the winner: `time`, the fastest on as many GPUs as the experiment has; `gpu_hours`, the one that
            takes the fewest, of any size.
        progress: told how it goes.

    Raises:
        ConfigError: no valid experiment, a cluster without GPUs, a size that cannot be, or a folder with another
            search.
        RunError: not even the experiment as it is could be planned, nor any variant of it.
    """
    start = time.perf_counter()
    path, overrides = str(experiment), tuple(overrides)
    loaded = load(path, overrides)
    _check(loaded, budget, jobs, objective)
    others = [n for n in hosts if n != loaded.cluster.hosts]
    sizes = {n: at_size(path, overrides, loaded, n) for n in others}
    share = shares(budget, len(others))
    journal, pruned, workers = Journal(out, loaded), Pruned(), jobs or default_jobs()
    searches: list[Search] = []

    def tell(outcome: Outcome, known: bool) -> None:
        progress.done(outcome, known, _best(searches, objective))

    own = _Sized(path, overrides, loaded, axes)
    found = candidates(path, overrides, own.space, own.bounds, pruned, progress.pruning)
    left = sum(1 for c in found if c.settings)
    progress.started(len(found), min(share.own, left + 1) + share.other * len(others))
    searches.append(Search(path, overrides, found, own.space.base, journal, share.own, pruned))
    number = sum(1 for _ in own.space.variants())
    with open_workers(workers, out / LOG_FILE if out else None) as pool:
        searches[0].run(pool, workers, tell)
        for other, sized in sizes.items():
            its = _Sized(path, overrides, sized, axes, hosts=other)
            space = like(its.space, searches[0].variant_of(searches[0].best()))
            found = candidates(path, overrides, space, its.bounds, pruned, progress.pruning)
            search = Search(path, overrides, found, space.base, journal, share.other, pruned, searches[0].wrong)
            searches.append(search)
            search.run(pool, workers, tell, base_first=False)
            number += sum(1 for _ in space.variants())
    report = _report(loaded, searches, pruned, number, workers, objective)
    report = report.model_copy(update={"wall_s": time.perf_counter() - start})
    if out is not None:
        (out / REPORT_FILE).write_text(report.to_json() + "\n", encoding="utf-8")
        if report.winner is not None:
            winner = load(path, (*overrides, *report.winner.settings))
            (out / WINNER_FILE).write_text(_HEADER + winner.to_toml(), encoding="utf-8")
    return report


_HEADER = "# Written by `meshkit tune`: the best variant that fits, every default filled in.\n"


class _Sized:
    """Bounds and space of the experiment on one size of the cluster."""

    def __init__(
        self,
        path: str,
        overrides: Sequence[str],
        experiment: Experiment,
        axes: Sequence[str] | None,
        hosts: int | None = None,
    ):
        self.bounds = Bounds(experiment)
        self.space = make_space(
            experiment,
            axes=axes,
            logical_axes=self.bounds.logical_axes,
            remats=self.bounds.remats(REMATS),
            may_be_cut=self.bounds.may_be_cut,
            hosts=hosts,
        )


def _check(experiment: Experiment, budget: int, jobs: int | None, objective: str) -> None:
    if experiment.cluster.is_cpu:
        raise ConfigError(
            f"cluster '{experiment.cluster.name}' has no GPUs, and tune predicts GPUs.",
            hint="--set cluster=dgx_h100 (or any shipped cluster), with --set mesh... to match it",
        )
    if budget < 1 or (jobs is not None and jobs < 1):
        raise ConfigError("a search compiles one variant at least, in one process at least.", hint="--candidates 64")
    if objective not in OBJECTIVES:
        raise ConfigError(f"'{objective}' is no objective.", at="--objective", hint=" or ".join(OBJECTIVES))


def _best(searches: Sequence[Search], objective: str) -> Outcome | None:
    """The fastest of the experiment's own size, or of all sizes the one that takes the fewest GPU hours."""
    if objective == "time":
        return searches[0].best()
    found = [best for search in searches if (best := search.best()) is not None]
    return min(found, key=lambda o: ((o.time_s or 0.0) * (o.num_gpus or 0), o.settings), default=None)


def _report(
    experiment: Experiment, searches: Sequence[Search], pruned: Pruned, space: int, jobs: int, objective: str
) -> TuneReport:
    outcomes = [outcome for search in searches for outcome in search.outcomes]
    base, winner = outcomes[0], _best(searches, objective)
    if all(outcome.status == "error" for outcome in outcomes):
        raise RunError(f"none of {len(outcomes)} variants could be planned; the first: {base.error}")
    parts = differences(base, winner) if winner else ()
    return TuneReport(
        experiment=experiment.name,
        gpu=experiment.cluster.gpu.key,
        num_gpus=experiment.cluster.num_gpus,
        global_batch=experiment.train.global_batch,
        objective=objective,
        base=base,
        winner=winner,
        winner_is_base=winner is not None and not winner.settings,
        why=why(base, winner, parts),
        differences=parts,
        outcomes=tuple(outcomes),
        pareto=pareto(outcomes),
        space=space,
        pruned=pruned.parts(),
        compiled=len(outcomes),
        reused=sum(search.reused for search in searches),
        left=sum(search.left for search in searches),
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
