"""Search for the fastest fitting variant of an experiment, or of a step that a user's function builds.

experiment -> variants -> bounds -> search (plans in parallel processes) -> TuneReport, winner.toml
build(mesh, **choices), a mesh, a cluster -> every mesh x every choice -> search -> TuneReport
"""

from __future__ import annotations

import contextlib
import itertools
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, ProgramExperiment, load, load_any
from meshkit.config.mesh import MeshAxis, MeshSpec
from meshkit.config.toml import inline
from meshkit.console import notebook_line
from meshkit.errors import ConfigError, check_kinds
from meshkit.planning.planner import check_has_gpus
from meshkit.search.bounds import Bounds
from meshkit.search.candidate import Candidate
from meshkit.search.order import Journal, Pruned, Search, candidates
from meshkit.search.scaling import parse_sizes
from meshkit.search.tune_report import SILENT, SearchProgress, TuneReport, make_tune_report
from meshkit.search.variants import REMATS, Options, Size, Space, Variant, make_space, meshes_over
from meshkit.search.workers import (
    Build,
    Workers,
    WorkersHere,
    default_jobs,
    file_request,
    import_name,
    open_workers,
    step_request,
)
from meshkit.units import format_seconds

WINNER_FILE = "winner.toml"
REPORT_FILE = "tune.json"
LOG_FILE = "workers.log"
_HEADER = "# Written by `meshkit tune`: the best variant that fits, every default filled in.\n"
OBJECTIVES = ("time", "gpu_hours")
_SHARE = 12  # Each other size gets this fraction of the variants, and at least `_LEAST`.
_LEAST = 2


@dataclass(frozen=True)
class Sizes:
    """Further sizes of the cluster, with the same model and global batch, and the objective of the search.

    The experiment's own size is searched first. If its NVLink domains span hosts, a size with a power of two GPUs of
    each domain (64 of 72) is searched, too. Each other size gets a small share of the budget. Its candidates have all
    meshes and recomputation policies, but only the XLA options of the best so far. They have a pipeline only if the
    best so far has one.
    """

    hosts: tuple[int, ...] = ()
    """The numbers of hosts to search in addition to the experiment's own."""
    objective: str = "time"
    """`time`: the winner is the fastest on the experiment's hosts; `gpu_hours`: it has the fewest GPU hours at any
    size."""


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
    vary: Sequence[str] = (),
    progress: SearchProgress = SILENT,
) -> TuneReport:
    """Search the variants of an experiment and return the report.

    With `out`, also write `tune.json`, `winner.toml`, and the outcomes from which a later call resumes.

    Args:
        out: a folder that exists.
        budget: the most variants to compile, including those of earlier calls with the same `out`.
        jobs: planning processes at a time, or an executor; None: one process for each CPU.
        axes: mesh axes that may be larger than 1; None: the axes that the rules know.
        sizes: the sizes of the cluster to search, and the objective.
        vary: `key=[values]` for a `[program]`: options of its function, or of XLA.

    Raises:
        ConfigError: the experiment is invalid, the cluster has no GPUs, a size is impossible, or the folder holds
            another search.
        RunError: neither the experiment nor any variant of it could be planned.
    """
    asked = _Request(str(experiment), tuple(overrides), out, budget, jobs, sizes, progress)
    loaded = load_any(asked.path, asked.overrides)
    if isinstance(loaded, ProgramExperiment):
        report = _tune_program(loaded, asked, _space_of_program(loaded, axes, vary))
    elif vary:
        raise ConfigError(
            "--vary is for a [program]; this experiment has a [model].", at="--vary", hint="--axes, or [xla]"
        )
    else:
        report = _tune_own(loaded, asked, axes)
    if out is not None:
        (out / REPORT_FILE).write_text(report.to_json() + "\n", encoding="utf-8")
        if report.winner is not None:
            winner = load_any(asked.path, (*asked.overrides, *report.winner.settings))
            (out / WINNER_FILE).write_text(_HEADER + winner.to_toml(), encoding="utf-8")
    return report


class _Request(NamedTuple):
    """The arguments of `tune_experiment`."""

    path: str
    overrides: tuple[str, ...]
    out: Path | None
    budget: int
    jobs: int | Executor | None
    sizes: Sizes
    progress: SearchProgress


def _tune_own(experiment: Experiment, asked: _Request, axes: Sequence[str] | None) -> TuneReport:
    start = time.perf_counter()
    path, overrides, out, budget, jobs, sizes, progress = asked
    _check(experiment, budget, jobs, sizes.objective)
    parts = _parts_of_domains(experiment.cluster) if budget > _LEAST * (1 + len(sizes.hosts)) else []
    others = [*parts, *(("hosts", n) for n in sizes.hosts if n != experiment.cluster.hosts)]
    at_sizes = {size: _at_size(path, overrides, experiment, size) for size in others}
    own_share, other_share = shares(budget, len(others))
    journal, pruned = Journal(out, experiment), Pruned()
    searches: list[Search] = []

    def tell(candidate: Candidate, known: bool) -> None:
        progress.done(candidate, known, _best(searches, sizes.objective, 1 + len(parts)))

    space, bounds = _space(experiment, axes)
    found = candidates(path, overrides, space, bounds, pruned, progress.pruning)
    left = sum(1 for c in found if c.settings)
    progress.started(len(found), min(own_share, left + 1) + other_share * len(others))
    searches.append(Search(found, space.base, own_share, journal, pruned))
    log = out / LOG_FILE if out else None
    with open_workers(file_request(path, overrides), jobs, log) as workers:
        searches[0].run(workers, tell)
        for size, sized in at_sizes.items():
            best = searches[0].best()
            space, bounds = _space(sized, axes, size=size, like=best.variant if best else None)
            found = candidates(path, overrides, space, bounds, pruned, progress.pruning)
            # Few variants may divide over whole domains. What they leave of their budget goes to parts of domains.
            share = other_share + (own_share - searches[0].compiled if size in parts else 0)
            search = Search(found, space.base, share, journal, pruned, searches[0].wrong)
            searches.append(search)
            search.run(workers, tell, base_first=False)
    return _report(
        searches,
        _best(searches, sizes.objective, 1 + len(parts)),
        experiment.cluster,
        start,
        experiment=experiment.name,
        global_batch=experiment.train.global_batch,
        objective=sizes.objective,
        space=pruned.variants,
        pruned=pruned.parts(),
        jobs=workers.jobs,
    )


def _tune_program(experiment: ProgramExperiment, asked: _Request, space: Space) -> TuneReport:
    start = time.perf_counter()
    cluster, jobs = experiment.cluster, asked.jobs
    check_has_gpus(cluster, "tune")
    if asked.sizes != OWN_SIZE:
        raise experiment.error(
            "program", "a [program] is tuned at the size of its cluster.", hint="--set cluster.hosts=4"
        )
    workers = open_workers(file_request(asked.path, asked.overrides), jobs)
    search = _run_search(space, asked.budget, Journal(asked.out, experiment), workers, asked.progress)
    variants, jobs = len(space.meshes) * len(space.options), jobs if isinstance(jobs, int) else default_jobs()
    known = {"experiment": experiment.name, "space": variants, "pruned": (), "jobs": jobs}
    return _report([search], search.best(), cluster, start, **known)


def _space_of_program(experiment: ProgramExperiment, axes: Sequence[str] | None, vary: Sequence[str]) -> Space:
    """Return every mesh of the program's axes with every combination of the values of `--vary`.

    The value in the file comes first. If the file does not set a key, the function's default comes first.
    """
    names = experiment.mesh.axis_names
    if other := [name for name in axes or () if name not in names]:
        raise ConfigError(f"the mesh has no axis '{other[0]}'.", at="--axes", hint=f"of {', '.join(names)}")
    said = {"program.options": experiment.program.options, "xla": experiment.xla}
    sets: list[Options] = [()]
    for text in vary:
        key, values = _varied(text)
        section, _, name = key.rpartition(".")
        own = ((key, said[section][name]),) if name in said[section] else ()
        each = [own, *(((key, value),) for value in values if ((key, value),) != own)]
        sets = [(*before, *more) for before in sets for more in each]
    meshes = [experiment.mesh]
    for mesh in meshes_over(experiment.cluster, [n for n in names if axes is None or n in axes], names):
        sized = {axis.name: axis for axis in mesh.axes}
        meshes.append(MeshSpec(tuple(sized.get(name) or MeshAxis(name, 1, 1) for name in names)))
    base = Variant(experiment.mesh, 1, False, None, sets[0])
    return Space(
        base=base,
        preset=None,
        meshes=tuple(dict.fromkeys(meshes)),
        accumulates=(1,),
        remats=(None,),
        options=tuple(sets),
    )


def _varied(text: str) -> tuple[str, list[Any]]:
    key, _, values = text.partition("=")
    found = None
    with contextlib.suppress(tomllib.TOMLDecodeError):
        found = tomllib.loads(f"values = {values}")["values"]
    if key.rpartition(".")[0] not in ("program.options", "xla") or not isinstance(found, list) or not found:
        hint = '--vary \'program.options.remat=["full", "none"]\', or a key of [xla]'
        raise ConfigError(f"'{text}' is not a list of values of an option.", at="--vary", hint=hint)
    return key, found


def _run_search(space: Space, budget: int, journal: Journal, workers: Workers, progress: SearchProgress) -> Search:
    found = {(s := space.settings(variant)): Candidate(s, variant) for variant in space.variants()}
    search = Search([*found.values()], space.base, budget, journal, Pruned())
    progress.started(len(found), min(budget, len(found)))
    with workers:
        search.run(workers, lambda candidate, known: progress.done(candidate, known, search.best()))
    return search


def _space(
    experiment: Experiment, axes: Sequence[str] | None, *, size: Size | None = None, like: Variant | None = None
) -> tuple[Space, Bounds]:
    """Return the variants of the experiment on one size of the cluster, and their bounds."""
    bounds = Bounds(experiment)
    space = make_space(
        experiment,
        axes=axes,
        logical_axes=bounds.logical_axes,
        remats=bounds.remats(REMATS),
        can_pipeline=bounds.can_pipeline,
        size=size,
    )
    if like is not None:
        space = replace(space, options=(like.options,), pipeline=space.pipeline if like.stages else None)
    return space, bounds


def parse_hosts(text: str | None) -> tuple[int, ...]:
    """Return `4,8,16` as sorted numbers, each once.

    Raises:
        ConfigError: the text has another form.
    """
    numbers = parse_sizes(text) if text else ()
    if text and not numbers:
        raise ConfigError(f"'{text}' is not a list of hosts.", at="--hosts", hint="--hosts 4,8,16")
    return numbers


def shares(budget: int, others: int) -> tuple[int, int]:
    """Return how many variants to compile at the experiment's own size, and at each of the other sizes.

    Raises:
        ConfigError: the budget is too small for this number of sizes.
    """
    if not others:
        return budget, 0
    other = max(_LEAST, budget // _SHARE)
    if budget - others * other < 1:
        hint = f"--candidates {1 + others * other} or more"
        raise ConfigError(
            f"{budget} variants are too few for {others + 1} sizes of the cluster.", at="--hosts", hint=hint
        )
    return budget - others * other, other


def _parts_of_domains(cluster: Cluster) -> list[Size]:
    """Return the size with a power of two GPUs of each NVLink domain, if domains span hosts and use another number.

    Widths, batches and numbers of experts are rarely multiples of 9, as the 72 GPUs of a rack need.
    """
    used = 1 << (cluster.gpus_used_per_domain.bit_length() - 1)
    if cluster.hosts_per_domain == 1 or used == cluster.gpus_used_per_domain:
        return []
    return [("gpus_used_per_domain", used)]


def _at_size(path: str, overrides: Sequence[str], own: Experiment, size: Size) -> Experiment:
    """Return the experiment on a cluster of another size, as a base for the meshes of that size.

    Its largest axis spans all GPUs. Its batch is the experiment's even if this mesh does not divide it, because the
    search need not try this mesh.
    """
    key, value = size
    try:
        cluster = Cluster.load(own.cluster.to_dict() | {key: value})
    except ConfigError as error:
        if key != "hosts":
            raise
        message = f"the cluster cannot have {value} hosts: {error.message}"
        raise ConfigError(message, at="--hosts", hint=error.hint) from None
    largest = max(own.mesh.axes, key=lambda axis: axis.size)
    whole = MeshAxis(largest.name, cluster.gpus_used_per_domain, cluster.num_nvlink_domains)
    axes = {a.name: (whole if a.name == largest.name else MeshAxis(a.name, 1, 1)).to_plain() for a in own.mesh.axes}
    batch = own.train.global_batch
    divides = f"train.global_batch={batch * cluster.num_gpus}"
    loaded = load(path, (*overrides, f"cluster.{key}={value}", f"mesh={inline(axes)}", divides))
    return replace(loaded, train=loaded.train.model_copy(update={"global_batch": batch}))


def _check(experiment: Experiment, budget: int, jobs: int | Executor | None, objective: str) -> None:
    check_has_gpus(experiment.cluster, "tune")
    if budget < 1 or (isinstance(jobs, int) and jobs < 1):
        raise ConfigError("a search needs at least one variant and one process.", hint="--candidates 64")
    if objective not in OBJECTIVES:
        raise ConfigError(f"'{objective}' is not an objective.", at="--objective", hint=" or ".join(OBJECTIVES))


def _best(searches: Sequence[Search], objective: str, own: int) -> Candidate | None:
    """Return the fastest candidate of the first `own` searches, or of all searches the one with fewest GPU hours."""
    fastest = objective == "time"
    found = [best for search in searches[: own if fastest else None] if (best := search.best()) is not None]
    return min(found, key=lambda c: (c.time_s if fastest else c.gpu_seconds, c.settings), default=None)


def _report(
    searches: Sequence[Search], best: Candidate | None, cluster: Cluster, start: float, **known: Any
) -> TuneReport:
    return make_tune_report(
        [outcome for search in searches for outcome in search.outcomes],
        best.outcome if best else None,
        compiled=sum(search.compiled for search in searches),
        reused=sum(search.reused for search in searches),
        left=sum(search.left for search in searches),
        gpu=cluster.gpu.key,
        num_gpus=cluster.num_gpus,
        wall_s=time.perf_counter() - start,
        **known,
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
    """Search for the fastest variant of a step that fits on a described cluster, without its GPUs.

    Args:
        what: a function `build(mesh, **choices)` that returns an `mk.Program`, or a step and its arguments, for a
            described mesh. Or the file of an experiment, which is searched as `meshkit tune` does.
        mesh: the mesh of the unchanged step. Every way to share the cluster's GPUs among its axes is a variant.
        cluster: the GPUs and links.
        choices: values for further parameters of `build`: numbers, texts, lists or booleans. The first value of each
            belongs to the unchanged step.
        out: a folder for the search of an experiment, from which a later call resumes.
        budget: the most variants to compile.
        jobs: processes at a time (None: one for each CPU), or any `concurrent.futures.Executor`. Other processes
            import `build` by its name. A function of a notebook or of `__main__` is planned in this process.

    Raises:
        ConfigError: the arguments are invalid, or an executor could not import the function.
        RunError: no variant could be planned.
    """
    if not callable(what):
        folder = Path(out) if out is not None else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return tune_experiment(what, out=folder, budget=budget, jobs=jobs, progress=_progress())
    if mesh is None or cluster is None:
        raise ConfigError("to tune a step, give a mesh and a cluster.", hint="mk.tune(build, mesh, cluster)")
    check_kinds(tune, mesh=mesh, cluster=cluster)
    check_has_gpus(cluster, "tune")
    if budget < 1:
        raise ConfigError("a search needs at least one variant.", hint="budget=64")
    start, base = time.perf_counter(), mesh.resolve(cluster)
    space = _space_of_step(base, cluster, choices or {})
    workers = _workers(what, step_request(base, cluster, dict(space.base.options)), jobs)
    search = _run_search(space, budget, Journal(), workers, _progress())
    name, variants = getattr(what, "__name__", type(what).__name__), len(list(space.variants()))
    known = {"experiment": name, "space": variants, "pruned": (), "jobs": workers.jobs}
    return _report([search], search.best(), cluster, start, **known)


def _space_of_step(base: MeshSpec, cluster: Cluster, choices: Mapping[str, Sequence[Any]]) -> Space:
    """Return every mesh of a step's axes with every combination of its choices, the unchanged step's first."""
    for name, values in choices.items():
        _check_choice(name, values)
    options = tuple(tuple(zip(choices, values)) for values in itertools.product(*choices.values()))
    names = base.axis_names
    meshes = (base, *(m for m in meshes_over(cluster, names, names) if m != base))
    own = Variant(base, 1, False, None, options[0])
    return Space(base=own, preset=None, meshes=meshes, accumulates=(1,), remats=(None,), options=options)


def _check_choice(name: str, values: Any) -> None:
    said = []
    with contextlib.suppress(Exception):
        said = [tomllib.loads(f"value = {inline(value)}")["value"] for value in values]
    if isinstance(values, str) or not said or said != list(values) or name == "mesh":
        hint = f'choices={{"{name}": ["none", "full"]}}'
        raise ConfigError(f"choice '{name}' must be a list of numbers, texts, lists or booleans.", hint=hint)


def _workers(build: Build, request: Mapping[str, Any], jobs: int | Executor | None) -> Workers:
    """Return processes or an executor if the function can be imported by name, else workers in this process."""
    if (name := import_name(build)) is not None:
        return open_workers({"build": name, **request}, jobs)
    if isinstance(jobs, Executor):
        what = getattr(build, "__qualname__", type(build).__name__)
        raise ConfigError(f"an executor cannot import '{what}' by its name.", hint="a function of a module of yours")
    return WorkersHere(build, request)


def _progress() -> SearchProgress:
    show, count, total = notebook_line(), itertools.count(1), 0

    def started(_: int, compiled: int) -> None:
        nonlocal total
        total = compiled

    def done(_: Candidate, known: bool, best: Candidate | None) -> None:
        found = f"best {format_seconds(best.time_s)}" if best else "none fits yet"
        show(f"{next(count)} of {total} variants, {found}")

    return SearchProgress(lambda _: None, started, done)
