"""The search itself: which variants the closed forms rule out, and in which order the others are compiled.

The experiment as it is comes first: what provably takes longer need not be compiled. Half of the budget then goes to
the best guesses, few of any one mesh; the other half to neighbours of the best so far, which differ in one choice. What
was compiled says by how much the guesses are wrong, of pipelines, of tensor parallelism and of accumulation apart.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from meshkit.config.experiment import Experiment, load
from meshkit.config.mesh import MeshSpec
from meshkit.errors import ConfigError
from meshkit.units import format_bytes, format_seconds
from meshkit.verbs.plan.bounds import Bound, Bounds, host_pool_bytes, pool_bytes
from meshkit.verbs.plan.outcome import Outcome, PrunedPart
from meshkit.verbs.plan.space import Space, Stages, Variant
from meshkit.verbs.plan.workers import Workers
from meshkit.verbs.tune.journal import Journal

# Of the first half of the budget: variants of one mesh.
_PER_MESH = 3

RULES = {
    "divisibility": "a dim, or the batch, does not divide",
    "memory": "parameters, moments, and gradients or saved activations, already exceed the pool",
    "host_memory": "what is offloaded exceeds the memory of a host",
    "time": "the FLOP at peak, or every weight moved once, already takes longer than the best so far",
}


# A neighbour of the best is compiled before another good guess while its guess is no worse than this times the best.
_NEAR = 1.1

# Whether layers are stages of a pipeline, whether an axis named `tensor` cuts them, whether a step accumulates, and
# whether activations wait in host memory.
Family = tuple[bool, bool, bool, bool]


@dataclass(frozen=True)
class Candidate:
    """A variant that was not ruled out."""

    variant: Variant
    settings: tuple[str, ...]
    bound: Bound
    order: tuple[float, tuple[str, ...]]

    @property
    def family(self) -> Family:
        """Variants whose guesses are wrong in the same direction."""
        tensor = any(axis.name == "tensor" and axis.size > 1 for axis in self.variant.mesh.axes)
        return self.variant.stages is not None, tensor, self.variant.accumulate > 1, self.bound.host_bytes > 0


@dataclass
class Pruned:
    """How many variants each rule took away."""

    counts: Counter = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, rule: str, settings: Callable[[], tuple[str, ...]], why: str) -> None:
        """Counts a variant."""
        self.counts[rule] += 1
        if rule not in self.examples:
            self.examples[rule] = f"{' '.join(settings()) or 'the experiment'}: {why}"

    def parts(self) -> tuple[PrunedPart, ...]:
        """For the report, in the order in which the rules are asked."""
        return tuple(PrunedPart(rule=rule, count=self.counts[rule], example=self.examples.get(rule)) for rule in RULES)


def candidates(
    path: str, overrides: tuple[str, ...], space: Space, bounds: Bounds, pruned: Pruned, progress: Callable[[int], None]
) -> list[Candidate]:
    """The variants that divide and may fit, the most promising first."""
    found = []
    known: dict[tuple, tuple[Experiment, Bound] | ConfigError] = {}
    meshes: dict[tuple[MeshSpec, bool], Experiment | ConfigError] = {}
    for number, variant in enumerate(space.variants()):
        progress(number)
        settings = functools.partial(space.settings, variant)
        place = variant.mesh, variant.stages is None
        if place not in meshes:
            meshes[place] = _load(path, (*overrides, *space.settings(_plainest(space, variant))))
        key = variant.mesh, variant.accumulate, variant.each_micro_batch, variant.remat, variant.stages
        if key not in known:
            known[key] = _bound(space, variant, meshes[place], bounds)
        result = known[key]
        if isinstance(result, ConfigError):
            pruned.add("divisibility", settings, result.message)
            continue
        experiment, bound = result
        pool = pool_bytes(experiment)
        if bound.needed_bytes > pool:
            needed = f"{format_bytes(bound.needed_bytes)} at least, of {format_bytes(pool)}"
            pruned.add("memory", settings, needed)
            continue
        if (there := host_pool_bytes(experiment)) is not None and bound.host_bytes > there:
            needed = f"{format_bytes(bound.host_bytes)} a GPU at least, of {format_bytes(there)}"
            pruned.add("host_memory", settings, needed)
            continue
        excess = max(1.0, bound.estimate_bytes / pool)
        found.append(Candidate(variant, named := settings(), bound, (bound.estimate_s * excess**4, named)))
    return sorted(found, key=lambda c: c.order)


def _plainest(space: Space, variant: Variant) -> Variant:
    """A variant of the same mesh that anything else can be laid over: one micro-batch, through a pipeline or not."""
    stages = Stages(1, "1f1b") if variant.stages else None
    return replace(space.base, mesh=variant.mesh, accumulate=1, each_micro_batch=False, stages=stages)


def _load(path: str, overrides: tuple[str, ...]) -> Experiment | ConfigError:
    """A variant, or why it cannot be."""
    try:
        return load(path, overrides)
    except ConfigError as e:
        return e


def _bound(
    space: Space, variant: Variant, loaded: Experiment | ConfigError, bounds: Bounds
) -> tuple[Experiment, Bound] | ConfigError:
    """A variant with its bounds, or why it cannot be."""
    if isinstance(loaded, ConfigError):
        return loaded
    try:
        experiment = space.changed(loaded, variant)
        return experiment, bounds.of(experiment)
    except ConfigError as e:
        return e


class Search:
    """One sitting of a search, of one size of the cluster.

    Args:
        path, overrides: the experiment.
        found: from `candidates`.
        base: its own variant.
        journal: outcomes of this and of earlier sittings.
        budget: variants to compile at most, those of earlier sittings among them.
        pruned: takes those that the time rule drops.
        wrong: by how much guesses were wrong at another size, by family.
    """

    def __init__(
        self,
        path: str,
        overrides: tuple[str, ...],
        found: list[Candidate],
        base: Variant,
        journal: Journal,
        budget: int,
        pruned: Pruned,
        wrong: Mapping[Family, list[float]] | None = None,
    ):
        self._path, self._overrides, self._base = path, overrides, base
        self._left = {c.settings: c for c in found if c.settings}
        self._known = {c.settings: c for c in found}
        self._journal, self._budget, self._pruned = journal, budget, pruned
        self._tried: dict[tuple[str, ...], str] = {}
        self._meshes: Counter = Counter()
        self.wrong: defaultdict[Family, list[float]] = defaultdict(list, {k: list(v) for k, v in (wrong or {}).items()})
        self._done: dict[tuple[str, ...], Outcome] = {}
        self.reused = 0

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """What is known, in the order in which it was asked for."""
        return tuple(self._done[settings] for settings in self._tried if settings in self._done)

    @property
    def left(self) -> int:
        """Candidates that were neither tried nor ruled out."""
        return len(self._left)

    def variant_of(self, outcome: Outcome | None) -> Variant | None:
        """The choices behind an outcome; those of the experiment as it is where no candidate is."""
        if outcome is None:
            return None
        known = self._known.get(outcome.settings)
        return known.variant if known else self._base

    def best(self) -> Outcome | None:
        """The fastest that fits."""
        fitting = [o for o in self._done.values() if o.fits and o.time_s is not None]
        return min(fitting, key=lambda o: (o.time_s or 0.0, o.settings), default=None)

    def run(
        self, workers: Workers, jobs: int, report: Callable[[Outcome, bool], None], *, base_first: bool = True
    ) -> None:
        """Compiles until the budget is spent or nothing is left.

        Args:
            workers: that plan.
            jobs: how many there are.
            report: told of every outcome, and whether an earlier sitting had it.
            base_first: whether the experiment as it is begins.
        """
        waiting = self._ask(workers, (), "base", report) if base_first else 0
        for settings, outcome in self._journal.outcomes.items():
            if settings in self._left:
                self._ask(workers, settings, outcome.stage or "estimate", report)
        while waiting:  # the base first: nothing that must be slower need be compiled
            waiting = self._receive(workers, waiting, report)
        while True:
            while waiting < jobs and len(self._tried) < self._budget:
                chosen = self._choose()
                if chosen is None:
                    break
                waiting += self._ask(workers, *chosen, report)
            if not waiting:
                return
            waiting = self._receive(workers, waiting, report)

    def _ask(
        self, workers: Workers, settings: tuple[str, ...], stage: str, report: Callable[[Outcome, bool], None]
    ) -> int:
        """Asks for a variant; 0 where an earlier sitting has the answer."""
        self._tried[settings] = stage
        candidate = self._known.get(settings)
        self._left.pop(settings, None)
        if candidate:
            self._meshes[candidate.variant.mesh] += 1
        known = self._journal.outcomes.get(settings)
        if known is not None:
            self.reused += 1
            self._keep(known)
            report(known, True)
            return 0
        workers.submit(self._path, self._overrides, settings)
        return 1

    def _receive(self, workers: Workers, waiting: int, report: Callable[[Outcome, bool], None]) -> int:
        outcome = workers.next()
        candidate = self._known.get(outcome.settings)
        estimate = candidate.bound.estimate_s if candidate else None
        outcome = outcome.model_copy(update={"stage": self._tried[outcome.settings], "estimate_s": estimate})
        self._journal.add(outcome)
        self._keep(outcome)
        report(outcome, False)
        return waiting - 1

    def _keep(self, outcome: Outcome) -> None:
        self._done[outcome.settings] = outcome
        candidate = self._known.get(outcome.settings)
        if candidate and outcome.time_s and candidate.bound.estimate_s:
            self.wrong[candidate.family].append(outcome.time_s / candidate.bound.estimate_s)
        best = self.best()
        if best is None or best is not outcome or best.time_s is None:
            return
        slower = [c for c in self._left.values() if c.bound.time_s > best.time_s]
        for candidate in slower:
            del self._left[candidate.settings]
            why = f"{format_seconds(candidate.bound.time_s)} at least, {format_seconds(best.time_s)} is known"
            self._pruned.add("time", lambda c=candidate: c.settings, why)

    def _choose(self) -> tuple[tuple[str, ...], str] | None:
        """The next variant, and why it is next."""
        if not self._left:
            return None
        ranked = self._ranked()
        if len(self._tried) <= self._budget // 2:
            for candidate in ranked:
                plain = candidate.variant.options == self._base.options
                if plain and self._meshes[candidate.variant.mesh] < _PER_MESH:
                    return candidate.settings, "estimate"
        best, wrong = self.best(), self._wrong()
        for near in self._neighbours(ranked):
            if best is None or near.order[0] * wrong[near.family] <= _NEAR * (best.time_s or 0.0):
                return near.settings, "neighbour"
        return ranked[0].settings, "estimate"

    def _ranked(self) -> list[Candidate]:
        """What is left, the most promising first: by its guess, times what the guesses of its family were wrong by."""
        wrong = self._wrong()
        return sorted(self._left.values(), key=lambda c: (c.order[0] * wrong[c.family], c.order[1]))

    def _wrong(self) -> Mapping[Family, float]:
        """What a guess is to be multiplied by; an untried family's by the least, so that it is looked at soon."""
        known = {family: statistics.median(ratios) for family, ratios in self.wrong.items()}
        untried = min(known.values(), default=1.0)
        return defaultdict(lambda: untried, known)

    def _neighbours(self, ranked: list[Candidate]) -> Iterator[Candidate]:
        """Candidates one choice away from the best so far, then from the second best, ..."""
        fitting = sorted((o for o in self._done.values() if o.fits), key=lambda o: o.time_s or 0.0)
        for outcome in fitting:
            variant = self.variant_of(outcome)
            assert variant is not None
            yield from (c for c in ranked if c.variant.differences(variant) == 1)
