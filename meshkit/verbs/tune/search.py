"""The search itself: which variants the closed forms rule out, and in which order the others are compiled.

The experiment as it is comes first: what provably takes longer need not be compiled. Half of the budget then goes to
the best guesses, few of any one mesh; the other half to neighbours of the best so far, which differ in one choice. What
was compiled says by how much the guesses are wrong, of pipelines, of tensor parallelism and of accumulation apart.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from meshkit.config.experiment import Experiment, load
from meshkit.config.files import read_regular
from meshkit.config.mesh import MeshSpec
from meshkit.errors import ConfigError
from meshkit.search.bounds import Bound, Bounds, host_pool_bytes, pool_bytes
from meshkit.search.variants import Outcome, PipelineChoice, Space, Variant
from meshkit.search.workers import Settings, Workers
from meshkit.units import format_bytes, format_seconds
from meshkit.verbs.tune.tune_report import RULE_WORDS, PrunedPart

JOURNAL_FILE = "candidates.jsonl"
_LARGEST_BYTES = 256 * 2**20
_SCHEMA = "meshkit.candidates/1"

# Of the first half of the budget: variants of one mesh.
_PER_MESH = 3
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
    """How many variants there were, and how many of them each rule took away."""

    variants: int = 0
    counts: Counter = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, rule: str, settings: Callable[[], tuple[str, ...]], why: str) -> None:
        """Counts a variant.

        Args:
            rule: a key of `RULE_WORDS`.
            settings: called for the first variant of a rule alone, which becomes its example.
            why: with the numbers.
        """
        self.counts[rule] += 1
        if rule not in self.examples:
            self.examples[rule] = f"{' '.join(settings()) or 'the experiment'}: {why}"

    def parts(self) -> tuple[PrunedPart, ...]:
        """For the report, in the order in which the rules are asked."""
        return tuple(PrunedPart(rule=r, count=self.counts[r], example=self.examples.get(r)) for r in RULE_WORDS)


def candidates(
    path: str, overrides: tuple[str, ...], space: Space, bounds: Bounds, pruned: Pruned, progress: Callable[[int], None]
) -> list[Candidate]:
    """The variants that divide and may fit, the most promising first.

    Args:
        path, overrides: the experiment.
        space: whose variants are looked at, one by one.
        bounds: of the experiment at the space's size of the cluster.
        pruned: counts all variants, and those that a rule takes away.
        progress: hears the number of each variant, from 0.

    Returns:
        In order of `estimate_s`; where `estimate_bytes` exceeds the pool, times the fourth power of their ratio.
    """
    found = []
    known: dict[tuple, tuple[Experiment, Bound] | ConfigError] = {}
    meshes: dict[tuple[MeshSpec, bool], Experiment | ConfigError] = {}
    for number, variant in enumerate(space.variants()):
        progress(number)
        pruned.variants += 1
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
        there = host_pool_bytes(experiment)
        if bound.needed_bytes > pool:
            needed = f"{format_bytes(bound.needed_bytes)} at least, of {format_bytes(pool)}"
            pruned.add("memory", settings, needed)
            continue
        if there is not None and bound.host_bytes > there:
            needed = f"{format_bytes(bound.host_bytes)} a GPU at least, of {format_bytes(there)}"
            pruned.add("host_memory", settings, needed)
            continue
        excess = max(1.0, bound.estimate_bytes / pool)
        found.append(Candidate(variant, named := settings(), bound, (bound.estimate_s * excess**4, named)))
    return sorted(found, key=lambda c: c.order)


def _plainest(space: Space, variant: Variant) -> Variant:
    """A variant of the same mesh that anything else can be laid over: one micro-batch, through a pipeline or not."""
    stages = PipelineChoice(1, "1f1b") if variant.stages else None
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


class Journal:
    """Outcomes of a search by settings, kept as lines of `candidates.jsonl`, so that one that was killed goes on.

    The first line says what was searched: a file of another experiment, or of other versions, is not read. A line is
    written whole by one call and synced; the torn last line of a process that was killed is cut off.

    Args:
        folder: of the search; None keeps them in memory.
        experiment: as it is without settings.

    Raises:
        ConfigError: the folder holds a search of something else, or a file that is none.
    """

    def __init__(self, folder: Path | None, experiment: Experiment):
        self.outcomes: dict[Settings, Outcome] = {}
        self._path = folder / JOURNAL_FILE if folder else None
        if self._path is None:
            return
        header = _header(experiment)
        if self._path.exists():
            self._read(self._path, header)
        if not self._path.exists() or not self._path.stat().st_size:
            self._append(json.dumps(header))

    def add(self, outcome: Outcome) -> None:
        """Keeps an outcome."""
        self.outcomes[outcome.settings] = outcome
        self._append(outcome.model_dump_json())

    def _append(self, line: str) -> None:
        """Writes one line whole, and waits until it is on disk."""
        if self._path is None:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, path: Path, header: Mapping[str, str]) -> None:
        """Takes the outcomes of earlier runs, but for errors; cuts off a torn last line."""
        content = read_regular(path, _LARGEST_BYTES)
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        lines = whole.splitlines()
        if not lines:
            return
        hint = "another --out, or remove the file"
        try:
            found = json.loads(lines[0])
            if found.get("schema") != _SCHEMA:
                raise ValueError("no header")
        except (ValueError, AttributeError):
            raise ConfigError("this file is no record of a search.", at=str(path), hint=hint) from None
        other = [name for name, value in header.items() if found.get(name) != value]
        if other:
            what = "another experiment" if "experiment" in other else f"another version ({', '.join(other)})"
            raise ConfigError(f"this folder holds a search of {what}.", at=str(path), hint=hint)
        for number, line in enumerate(lines[1:], start=2):
            try:
                outcome = Outcome.model_validate_json(line)
            except ValidationError:
                raise ConfigError("this line is no outcome of a search.", at=f"{path}:{number}", hint=hint) from None
            if outcome.status != "error":  # what went wrong may not do so again
                self.outcomes[outcome.settings] = outcome


def _header(experiment: Experiment) -> dict[str, str]:
    """What a journal is of: the resolved experiment, its calibration, and the versions that plan it."""
    versions = {name: metadata.version(name) for name in ("meshkit", "jax", "jaxlib")}
    text = experiment.to_toml()
    if experiment.cluster.calibration is not None:
        text += Path(experiment.cluster.calibration).read_text(encoding="utf-8")
    return {"schema": _SCHEMA, "experiment": hashlib.sha256(text.encode()).hexdigest()[:16], **versions}


class Search:
    """One run of a search, at one size of the cluster.

    Args:
        found: from `candidates`.
        base: its own variant.
        journal: outcomes of this and of earlier runs.
        budget: variants to compile at most, those of earlier runs among them.
        pruned: takes those that the time rule drops.
        wrong: by how much guesses were wrong at another size, by family.
    """

    def __init__(
        self,
        found: list[Candidate],
        base: Variant,
        journal: Journal,
        budget: int,
        pruned: Pruned,
        wrong: Mapping[Family, list[float]] | None = None,
    ):
        self._base = base
        self._left = {c.settings: c for c in found if c.settings}
        self._known = {c.settings: c for c in found}
        self._journal, self._budget, self._pruned = journal, budget, pruned
        self._tried: dict[Settings, str] = {}
        self._meshes: Counter = Counter()
        self.wrong: defaultdict[Family, list[float]] = defaultdict(list, {k: list(v) for k, v in (wrong or {}).items()})
        self._done: dict[Settings, Outcome] = {}
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

    def run(self, workers: Workers, report: Callable[[Outcome, bool], None], *, base_first: bool = True) -> None:
        """Compiles until the budget is spent or nothing is left.

        Args:
            workers: that plan.
            report: hears every outcome, and whether an earlier run had it.
            base_first: whether the experiment as it is begins: nothing that must be slower need be compiled.
        """

        def take(outcome: Outcome) -> None:
            candidate = self._known.get(outcome.settings)
            estimate = candidate.bound.estimate_s if candidate else None
            outcome = outcome.model_copy(update={"stage": self._tried[outcome.settings], "estimate_s": estimate})
            self._journal.add(outcome)
            self._keep(outcome)
            report(outcome, False)

        def choose() -> Settings | None:
            while len(self._tried) < self._budget and (chosen := self._choose()) is not None:
                if not self._is_known(*chosen, report):
                    return chosen[0]
            return None

        first = [()] if base_first and not self._is_known((), "base", report) else []
        for settings, outcome in self._journal.outcomes.items():
            if settings in self._left:
                self._is_known(settings, outcome.stage or "estimate", report)
        workers.run(lambda: first.pop() if first else None, take)
        workers.run(choose, take)

    def _is_known(self, settings: Settings, stage: str, report: Callable[[Outcome, bool], None]) -> bool:
        """Notes that a variant is tried; whether an earlier run has its outcome, which is then kept."""
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
        return known is not None

    def _keep(self, outcome: Outcome) -> None:
        """Notes an outcome; one that is the best so far rules out all that must be slower."""
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

    def _choose(self) -> tuple[Settings, str] | None:
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
