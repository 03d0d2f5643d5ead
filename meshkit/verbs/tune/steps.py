"""`mk.tune`: the fastest variant of a step of anybody's, or of an experiment, here or on an executor.

    build(mesh, **choices), a mesh, a cluster -> every mesh x every choice -> nearest to the best so far -> TuneReport

No closed form knows such a step. The one on the given mesh comes first, then always what differs least from the best.
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
from pathlib import Path
from typing import Any

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec
from meshkit.config.toml_text import inline
from meshkit.console import notebook_line
from meshkit.errors import ConfigError, RunError
from meshkit.units import format_seconds
from meshkit.verbs.plan.outcome import Outcome
from meshkit.verbs.plan.planner import check_has_gpus
from meshkit.verbs.plan.space import meshes_over
from meshkit.verbs.plan.workers import Build, BuiltStep, Settings, Workers, opened, plan_built
from meshkit.verbs.tune.tune_report import SearchProgress, TuneReport, differences, pareto, why
from meshkit.verbs.tune.tuner import tune as tune_experiment


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
    outcomes, best = search.outcomes, search.best()
    if all(outcome.status == "error" for outcome in outcomes):
        raise RunError(f"none of {len(outcomes)} variants could be planned; the first: {outcomes[0].error}")
    parts = differences(outcomes[0], best) if best else ()
    return TuneReport(
        experiment=getattr(what, "__name__", type(what).__name__),
        gpu=cluster.gpu.key,
        num_gpus=cluster.num_gpus,
        base=outcomes[0],
        winner=best,
        winner_is_base=best is not None and not best.settings,
        why=why(outcomes[0], best, parts),
        differences=parts,
        outcomes=tuple(outcomes),
        pareto=pareto(outcomes),
        space=search.space,
        pruned=(),
        compiled=sum(outcome.time_s is not None for outcome in outcomes),
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
