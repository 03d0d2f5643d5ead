"""tune: the fastest variant that fits of an experiment, or of a step of anybody's, and why it is faster.

    experiment -> variants -> bounds -> search (plans in parallel processes) -> TuneReport, winner.toml
    build(mesh, **choices), a mesh, a cluster -> every mesh x every choice -> nearest to the best so far -> TuneReport

No closed form knows a step of anybody's. The one on the given mesh comes first, then always what differs least from the
best.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, load
from meshkit.config.mesh import MeshAxis, MeshSpec
from meshkit.config.toml import inline
from meshkit.console import notebook_line
from meshkit.errors import ConfigError
from meshkit.planning.planner import check_has_gpus
from meshkit.search.bounds import Bounds
from meshkit.search.variants import REMATS, Outcome, Space, Variant, make_space, meshes_over
from meshkit.search.workers import Build, BuiltStep, Settings, Workers, open_workers, opened, plan_built
from meshkit.units import format_seconds
from meshkit.verbs.tune.search import Journal, Pruned, Search, candidates
from meshkit.verbs.tune.tune_report import SILENT, SearchProgress, TuneReport, report_of

WINNER_FILE = "winner.toml"
REPORT_FILE = "tune.json"
LOG_FILE = "workers.log"
_HEADER = "# Written by `meshkit tune`: the best variant that fits, every default filled in.\n"
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


def tune_experiment(
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

    Args:
        budget: variants to compile at most, of all sizes.
        others: how many sizes there are beside the experiment's own.

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
    return report_of(
        outcomes,
        _best(searches, objective),
        experiment=experiment.name,
        gpu=experiment.cluster.gpu.key,
        num_gpus=experiment.cluster.num_gpus,
        global_batch=experiment.train.global_batch,
        objective=objective,
        space=pruned.variants,
        pruned=pruned.parts(),
        compiled=len(outcomes),
        reused=sum(search.reused for search in searches),
        left=sum(search.left for search in searches),
        wall_s=0.0,
        jobs=jobs,
    )


def tune(
    what: Build | str | Path,
    mesh: MeshSpec | None = None,
    cluster: Cluster | None = None,
    *,
    choices: Mapping[str, Sequence[Any]] | None = None,
    out: str | Path | None = None,
    budget: int = 64,
    jobs: int | Executor | None = None,
) -> TuneReport:
    """The fastest variant that fits of a step on a cluster that is not there, and why it is faster.

    Args:
        what: `build(mesh, **choices) -> (step, args)`, which makes what `mk.plan` takes for a described mesh; or the
            file of an experiment, which is searched as `meshkit tune` does.
        mesh: of the step as it is; every way to share the cluster's GPUs among its axes is a variant.
        cluster: the GPUs and links.
        choices: values for further parameters of `build`, the step's own first: numbers, texts, lists or booleans.
        out: a folder for the search of an experiment, which a later call resumes from.
        budget: variants to compile at most.
        jobs: processes at a time, None for one of each CPU; or any `concurrent.futures.Executor`. A request names
            `build`, a function of a module; one of a notebook or of `__main__` is planned in this process.

    Raises:
        ConfigError: nothing that can be searched, or a function that an executor could not find.
        RunError: not one variant could be planned.
    """
    if not callable(what):
        folder = Path(out) if out is not None else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return tune_experiment(what, out=folder, budget=budget, jobs=jobs, progress=_progress())
    if mesh is None or cluster is None:
        raise ConfigError("a step is tuned on a mesh of a cluster.", hint="mk.tune(build, mesh, cluster)")
    check_has_gpus(cluster, "tune")
    if budget < 1:
        raise ConfigError("a search compiles one variant at least.", hint="budget=64")
    start, base = time.perf_counter(), mesh.resolve(cluster)
    search = _Search(base, cluster, choices or {}, budget)
    values = {name: some[0] for name, some in (choices or {}).items()}
    with _workers(what, BuiltStep(cluster, base, values), jobs) as workers:
        first = [()]
        workers.run(lambda: first.pop() if first else None, search.take)
        workers.run(search.choose, search.take)
    return report_of(
        search.outcomes,
        search.best(),
        experiment=getattr(what, "__name__", type(what).__name__),
        gpu=cluster.gpu.key,
        num_gpus=cluster.num_gpus,
        space=search.space,
        pruned=(),
        compiled=sum(outcome.time_s is not None for outcome in search.outcomes),
        reused=0,
        left=search.left,
        wall_s=time.perf_counter() - start,
        jobs=workers.jobs,
    )


class _Search:
    """Which variant is next: of those that are left, the one that differs least from the best so far.

    Args:
        base: the mesh of the step as it is.
        cluster: whose GPUs every other mesh shares out as well.
        choices: values of further parameters, the step's own first.
        budget: how many may be compiled; what cannot be built, or is too large before that, costs nothing.
    """

    def __init__(self, base: MeshSpec, cluster: Cluster, choices: Mapping[str, Sequence[Any]], budget: int):
        for name, values in choices.items():
            _check_choice(name, values)
        names = base.axis_names
        meshes = [base, *(m for m in meshes_over(cluster, names, names) if m != base)]
        self._known: dict[Settings, tuple[Any, ...]] = {}
        for chosen, *values in itertools.product(meshes, *choices.values()):
            changed = [f"mesh={inline(chosen.to_dict())}"] if chosen != base else []
            pairs = zip(choices, values, choices.values())
            changed += [f"{name}={inline(value)}" for name, value, all_ in pairs if value != all_[0]]
            self._known[tuple(changed)] = (chosen, *values)
        self.space, self._budget = len(self._known), budget
        self._left = dict(self._known)
        del self._left[()]
        self._asked = 1
        self.outcomes: list[Outcome] = []
        self._tell = _progress(total=min(budget, self.space)).done

    @property
    def left(self) -> int:
        """Variants that nobody asked about."""
        return len(self._left)

    def best(self) -> Outcome | None:
        """The fastest that fits."""
        fitting = [o for o in self.outcomes if o.fits and o.time_s is not None]
        return min(fitting, key=lambda o: o.time_s or math.inf, default=None)

    def choose(self) -> Settings | None:
        """The next variant; None where the budget is spent or nothing is left."""
        if not self._left or self._asked >= self._budget:
            return None
        best = self.best()
        near = self._known[best.settings if best else ()]
        settings = min(self._left, key=lambda s: _distance(self._left[s], near))
        del self._left[settings]
        self._asked += 1
        return settings

    def take(self, outcome: Outcome) -> None:
        """Notes an outcome."""
        self.outcomes.append(outcome)
        self._asked -= outcome.time_s is None
        self._tell(outcome, False, self.best())


def _distance(one: tuple[Any, ...], other: tuple[Any, ...]) -> float:
    """How far two variants are apart: factors of two that moved to another axis or link, and choices that differ."""
    moved = 0.0
    for a, b in zip(one[0].axes, other[0].axes):
        moved += abs(math.log2(a.nvlink / b.nvlink)) + abs(math.log2(a.infiniband / b.infiniband))
    return moved / 2 + sum(a != b for a, b in zip(one[1:], other[1:]))


def _check_choice(name: str, values: Any) -> None:
    """Stops at values that a request cannot say.

    Raises:
        ConfigError: no list, or a value that TOML has not.
    """
    said = []
    with contextlib.suppress(Exception):
        said = [tomllib.loads(f"value = {inline(value)}")["value"] for value in values]
    if isinstance(values, str) or not said or said != list(values) or name == "mesh":
        hint = f'choices={{"{name}": ["none", "full"]}}'
        raise ConfigError(f"choice '{name}' must be a list of numbers, texts, lists or booleans.", hint=hint)


def _name_of(build: Any) -> str | None:
    """The name by which another process finds a function, `pkg.mod:fn`; None where there is none."""
    module, path = getattr(build, "__module__", None), getattr(build, "__qualname__", "<")
    if module in (None, "__main__") or "<" in path:
        return None
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in path.split("."):
        found = getattr(found, part, None)
    return f"{module}:{path}" if found is build else None


def _workers(build: Build, base: BuiltStep, jobs: int | Executor | None) -> Any:
    """What plans: processes or an executor where the function has a name, else this process.

    Raises:
        ConfigError: an executor that could not find the function.
    """
    name = _name_of(build)
    if name is not None:
        return opened({"build": name, **base.to_dict()}, jobs)
    if isinstance(jobs, Executor):
        what = getattr(build, "__qualname__", type(build).__name__)
        raise ConfigError(f"an executor cannot import '{what}' by its name.", hint="a function of a module of yours")
    return contextlib.nullcontext(_Here(lambda settings: plan_built(build, base, settings)))


class _Here(Workers):
    """Plans in this process, one variant after the other."""

    def __init__(self, plan: Callable[[Settings], Outcome]):
        self.jobs, self._plan, self._waiting = 1, plan, list[Settings]()

    def submit(self, settings: Settings) -> None:
        """Notes what is to be planned."""
        self._waiting.append(settings)

    def next(self) -> Outcome:
        """Plans it."""
        return self._plan(self._waiting.pop(0))


def _progress(total: int | None = None) -> SearchProgress:
    """What a notebook shows of a search while it runs."""
    show, count = notebook_line(), itertools.count(1)
    totals = [total]

    def done(_: Outcome, known: bool, best: Outcome | None) -> None:
        of = f" of {totals[0]}" if totals[0] else ""
        show(f"{next(count)}{of} variants, {f'best {format_seconds(best.time_s)}' if best else 'none fits yet'}")

    def started(_: int, compiled: int) -> None:
        totals[0] = compiled

    return SearchProgress(lambda _: None, started, done)
