"""tune: the fastest variant of an experiment that fits, and why it is faster.

experiment -> space -> bounds -> search (plans in parallel processes) -> TuneReport, winner.toml
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, load
from meshkit.config.mesh import MeshAxis
from meshkit.config.toml_text import inline
from meshkit.errors import ConfigError, RunError
from meshkit.verbs.plan.bounds import Bounds
from meshkit.verbs.plan.outcome import Outcome
from meshkit.verbs.plan.planner import check_has_gpus
from meshkit.verbs.plan.space import REMATS, Space, Variant, make_space
from meshkit.verbs.plan.workers import open_workers
from meshkit.verbs.tune.search import Journal, Pruned, Search, candidates
from meshkit.verbs.tune.tune_report import SILENT, SearchProgress, TuneReport, differences, pareto, why

WINNER_FILE = "winner.toml"
REPORT_FILE = "tune.json"
LOG_FILE = "workers.log"
OBJECTIVES = ("time", "gpu_hours")
_SHARE = 12  # one of so many variants goes to each other size, and two at least
_LEAST = 2


@dataclass(frozen=True)
class Sizes:
    """Other sizes of the cluster in a search, with the same model and global batch, and what decides between them.

    The experiment's own size is searched first. Each other size then gets a small share of the budget: every mesh and
    recomputation of its own, with the options of XLA of the best so far, and a pipeline only where that has one.
    """

    hosts: tuple[int, ...] = ()  # of the cluster, beside the experiment's own
    objective: str = "time"
    """`time`: the winner is the fastest on as many GPUs as the experiment has; `gpu_hours`: the one that takes the
    fewest, of any size."""


OWN_SIZE = Sizes()


def tune(
    experiment: str | Path,
    overrides: Sequence[str] = (),
    *,
    out: Path | None = None,
    budget: int = 64,
    jobs: int | Executor | None = None,
    axes: Sequence[str] | None = None,
    sizes: Sizes = OWN_SIZE,
    progress: SearchProgress = SILENT,
) -> TuneReport:
    """The search's report; with `out` also `tune.json`, `winner.toml`, and what a later call resumes from.

    Args:
        experiment: the file.
        overrides: `key=value`, laid over it.
        out: a folder that exists.
        budget: variants to compile at most, those of earlier calls with the same `out` among them.
        jobs: planning processes at a time, or an executor that plans; None: one process for each CPU.
        axes: names of mesh axes that may have a size; None: those that the rules know.
        sizes: of the cluster to look at, and what decides between them.
        progress: hears how it goes.

    Raises:
        ConfigError: no valid experiment, a cluster without GPUs, a size that cannot be, or a folder with another
            search.
        RunError: not even the experiment as it is could be planned, nor any variant of it.
    """
    start = time.perf_counter()
    path, overrides = str(experiment), tuple(overrides)
    loaded = load(path, overrides)
    _check(loaded, budget, jobs, sizes.objective)
    others = [n for n in sizes.hosts if n != loaded.cluster.hosts]
    at_sizes = {n: _at_size(path, overrides, loaded, n) for n in others}
    own_share, other_share = shares(budget, len(others))
    journal, pruned = Journal(out, loaded), Pruned()
    searches: list[Search] = []

    def tell(outcome: Outcome, known: bool) -> None:
        progress.done(outcome, known, _best(searches, sizes.objective))

    space, bounds = _space(loaded, axes)
    found = candidates(path, overrides, space, bounds, pruned, progress.pruning)
    left = sum(1 for c in found if c.settings)
    progress.started(len(found), min(own_share, left + 1) + other_share * len(others))
    searches.append(Search(found, space.base, journal, own_share, pruned))
    with open_workers(path, overrides, jobs, out / LOG_FILE if out else None) as workers:
        searches[0].run(workers, tell)
        for other, sized in at_sizes.items():
            space, bounds = _space(sized, axes, hosts=other, like=searches[0].variant_of(searches[0].best()))
            found = candidates(path, overrides, space, bounds, pruned, progress.pruning)
            search = Search(found, space.base, journal, other_share, pruned, searches[0].wrong)
            searches.append(search)
            search.run(workers, tell, base_first=False)
    report = _report(loaded, searches, pruned, workers.jobs, sizes.objective)
    report = report.model_copy(update={"wall_s": time.perf_counter() - start})
    if out is not None:
        (out / REPORT_FILE).write_text(report.to_json() + "\n", encoding="utf-8")
        if report.winner is not None:
            winner = load(path, (*overrides, *report.winner.settings))
            (out / WINNER_FILE).write_text(_HEADER + winner.to_toml(), encoding="utf-8")
    return report


_HEADER = "# Written by `meshkit tune`: the best variant that fits, every default filled in.\n"


def _space(
    experiment: Experiment, axes: Sequence[str] | None, *, hosts: int | None = None, like: Variant | None = None
) -> tuple[Space, Bounds]:
    """Variants of the experiment on one size of the cluster, and what bounds them.

    Of another size than the experiment's own: with the options of `like`, and with a pipeline only if that has one.
    """
    bounds = Bounds(experiment)
    space = make_space(
        experiment,
        axes=axes,
        logical_axes=bounds.logical_axes,
        remats=bounds.remats(REMATS),
        may_be_cut=bounds.may_be_cut,
        hosts=hosts,
    )
    if like is not None:
        space = replace(space, options=(like.options,), pipeline=space.pipeline if like.stages else None)
    return space, bounds


def parse_hosts(text: str | None) -> tuple[int, ...]:
    """`4,8,16` as numbers, each once.

    Raises:
        ConfigError: another form.
    """
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"'{text}' is no list of hosts.", at="--hosts", hint="--hosts 4,8,16")
    return tuple(sorted({int(part) for part in parts}))


def shares(budget: int, others: int) -> tuple[int, int]:
    """How many variants are compiled of the experiment's own size, and of each other.

    Raises:
        ConfigError: it is not enough for so many sizes.
    """
    if not others:
        return budget, 0
    other = max(_LEAST, budget // _SHARE)
    if budget - others * other < 1:
        hint = f"--candidates {1 + others * other} or more"
        raise ConfigError(f"{budget} variants are too few for {others + 1} sizes.", at="--hosts", hint=hint)
    return budget - others * other, other


def _at_size(path: str, overrides: Sequence[str], own: Experiment, hosts: int) -> Experiment:
    """The experiment on so many hosts, its largest axis over all GPUs: what the size's own meshes are laid over.

    Its batch is the experiment's, whether or not that divides by this mesh, which need not be among those.

    Raises:
        ConfigError: the cluster cannot have so many hosts, or the mesh cannot be.
    """
    try:
        cluster = Cluster.load(own.cluster.to_dict(), hosts=hosts)
    except ConfigError as error:
        raise ConfigError(f"no cluster of {hosts} hosts: {error.message}", at="--hosts", hint=error.hint) from None
    largest = max(own.mesh.axes, key=lambda axis: axis.size)
    whole = MeshAxis(largest.name, cluster.gpus_used_per_domain, cluster.num_nvlink_domains)
    axes = {a.name: (whole if a.name == largest.name else MeshAxis(a.name, 1, 1)).to_plain() for a in own.mesh.axes}
    batch = own.train.global_batch
    divides = f"train.global_batch={batch * cluster.num_gpus}"
    loaded = load(path, (*overrides, f"cluster.hosts={hosts}", f"mesh={inline(axes)}", divides))
    return replace(loaded, train=loaded.train.model_copy(update={"global_batch": batch}))


def _check(experiment: Experiment, budget: int, jobs: int | Executor | None, objective: str) -> None:
    """Stops at an experiment, a budget or an objective that no search can have."""
    check_has_gpus(experiment.cluster, "tune")
    if budget < 1 or (isinstance(jobs, int) and jobs < 1):
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
    experiment: Experiment, searches: Sequence[Search], pruned: Pruned, jobs: int, objective: str
) -> TuneReport:
    """What all searches found, each at its own size of the cluster."""
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
        space=pruned.variants,
        pruned=pruned.parts(),
        compiled=len(outcomes),
        reused=sum(search.reused for search in searches),
        left=sum(search.left for search in searches),
        wall_s=0.0,
        jobs=jobs,
    )
