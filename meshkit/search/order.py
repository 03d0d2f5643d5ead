"""Decide which candidates are planned, and in which order.

The unchanged experiment comes first. Candidates whose lower bound is longer than its step then need not be compiled.
Half of the budget goes to the best estimates, with few candidates of any one mesh. The other half goes to neighbours of
the best so far, which differ from it in one choice. Compiled candidates correct the estimates of their family
(pipelines, tensor parallelism, accumulation, offloading).

A step that the user's function builds has no estimates. Its next candidate is always the one that differs least from
the best so far.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from meshkit.config.experiment import Experiment, ExperimentFile, load
from meshkit.config.files import read_bounded, read_regular
from meshkit.config.mesh import MeshSpec
from meshkit.errors import ConfigError
from meshkit.search.bounds import Bound, Bounds, pool_bytes, ruled_out
from meshkit.search.candidate import Candidate, Outcome, Settings, fastest_first
from meshkit.search.tune_report import RULE_WORDS, PrunedPart
from meshkit.search.variants import PipelineChoice, Space, Variant
from meshkit.search.workers import Workers
from meshkit.units import format_seconds

JOURNAL_FILE = "candidates.jsonl"
_LARGEST_BYTES = 256 * 2**20
_SCHEMA = "meshkit.candidates/1"

# The most variants of one mesh that are compiled in the first half of the budget.
_PER_MESH = 3
# A neighbour of the best comes before other candidates if its estimate is at most this multiple of the best step time.
_NEAR = 1.1

# Four answers: are the layers pipeline stages, does an axis named `tensor` shard them, does the step accumulate, are
# activations offloaded to host memory? The estimates of all candidates of a family are wrong in the same direction.
Family = tuple[bool, bool, bool, bool]


@dataclass
class Pruned:
    """The number of variants, and how many of them each rule removed."""

    variants: int = 0
    counts: Counter = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, rule: str, settings: Callable[[], Settings], why: str) -> None:
        """Count a variant that a rule removed.

        `settings` is called only for the first variant of a rule, which becomes the rule's example.
        """
        self.counts[rule] += 1
        if rule not in self.examples:
            self.examples[rule] = f"{' '.join(settings()) or 'the experiment'}: {why}"

    def parts(self) -> tuple[PrunedPart, ...]:
        """Return the counts for the report, in the order of the rules."""
        return tuple(PrunedPart(rule=r, count=self.counts[r], example=self.examples.get(r)) for r in RULE_WORDS)


def candidates(
    path: str, overrides: Settings, space: Space, bounds: Bounds, pruned: Pruned, progress: Callable[[int], None]
) -> list[Candidate]:
    """Return the variants whose mesh and batch divide evenly and that may fit, the most promising first.

    Args:
        pruned: counts all variants, and the variants that each rule removes.
        progress: is called with the number of each variant, from 0.

    Returns:
        Candidates in order of `guess_s`, which is the bound's `estimate_s`. If `estimate_bytes` exceeds the pool,
        `guess_s` is multiplied by the fourth power of their ratio.
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
        if broken := ruled_out(experiment, bound):
            pruned.add(broken[0], settings, broken[1])
            continue
        guess_s = bound.estimate_s * max(1.0, bound.estimate_bytes / pool_bytes(experiment)) ** 4
        found.append(Candidate(settings(), variant, bound=bound, guess_s=guess_s))
    return sorted(found, key=lambda c: (c.guess_s, c.settings))


def _plainest(space: Space, variant: Variant) -> Variant:
    """Return a variant of the same mesh with one micro-batch, on which other choices can then be set."""
    stages = PipelineChoice(1, "1f1b") if variant.stages else None
    return replace(space.base, mesh=variant.mesh, accumulate=1, each_micro_batch=False, stages=stages)


def _load(path: str, overrides: Settings) -> Experiment | ConfigError:
    try:
        return load(path, overrides)
    except ConfigError as e:
        return e


def _bound(
    space: Space, variant: Variant, loaded: Experiment | ConfigError, bounds: Bounds
) -> tuple[Experiment, Bound] | ConfigError:
    if isinstance(loaded, ConfigError):
        return loaded
    try:
        experiment = space.changed(loaded, variant)
        return experiment, bounds.bound(experiment)
    except ConfigError as e:
        return e


class Journal:
    """The outcomes of a search by settings, stored as lines of `candidates.jsonl`, so that a killed search can resume.

    The first line identifies the experiment and the versions, and a file with another first line is refused. Each line
    is written by one call and synced. An incomplete last line, from a killed process, is cut off.

    Args:
        folder: the folder of the search; None keeps the outcomes in memory.

    Raises:
        ConfigError: the folder holds another search, or its `candidates.jsonl` is not the record of a search.
    """

    def __init__(self, folder: Path | None = None, experiment: ExperimentFile | None = None):
        self.outcomes: dict[Settings, Outcome] = {}
        self._path = folder / JOURNAL_FILE if folder else None
        if self._path is None or experiment is None:
            return
        header = _header(experiment)
        if self._path.exists():
            self._read(self._path, header)
        if not self._path.exists() or not self._path.stat().st_size:
            self._append(json.dumps(header))

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.settings] = outcome
        self._append(outcome.model_dump_json())

    def _append(self, line: str) -> None:
        if self._path is None:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode() + b"\n")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _read(self, path: Path, header: Mapping[str, str]) -> None:
        """Read the outcomes of earlier runs except errors, and cut off an incomplete last line."""
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
            raise ConfigError("this file is not the record of a search.", at=str(path), hint=hint) from None
        other = [name for name, value in header.items() if found.get(name) != value]
        if other:
            what = "another experiment" if "experiment" in other else f"another version ({', '.join(other)})"
            raise ConfigError(f"this folder holds a search of {what}.", at=str(path), hint=hint)
        for number, line in enumerate(lines[1:], start=2):
            try:
                outcome = Outcome.model_validate_json(line)
            except ValidationError:
                raise ConfigError(
                    "this line is not the outcome of a search.", at=f"{path}:{number}", hint=hint
                ) from None
            if outcome.status != "error":  # An error may not happen again.
                self.outcomes[outcome.settings] = outcome


def _header(experiment: ExperimentFile) -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("meshkit", "jax", "jaxlib")}
    text = experiment.to_toml()
    if experiment.cluster.calibration is not None:
        text += read_bounded(experiment.cluster.calibration, "calibration file").decode("utf-8", "replace")
    return {"schema": _SCHEMA, "experiment": hashlib.sha256(text.encode()).hexdigest()[:16], **versions}


class Search:
    """One run of a search, at one size of the cluster.

    Args:
        found: the candidates; those of a step that a user's function builds have no bounds.
        base: the unchanged variant, which is planned first at the experiment's own size.
        budget: the most candidates to plan, including those of earlier runs. If no candidate has a bound, those that
            fail or turn out too large before they are compiled do not count.
        journal: the outcomes of this run and of earlier runs.
        pruned: counts the candidates that the time rule removes.
        wrong: planned step times divided by estimated ones, by family, from a search at another size.
    """

    def __init__(
        self,
        found: Sequence[Candidate],
        base: Variant,
        budget: int,
        journal: Journal,
        pruned: Pruned,
        wrong: Mapping[Family, list[float]] | None = None,
    ):
        self._known = {c.settings: c for c in found}
        self._base = self._known.get((), Candidate(variant=base))
        self._left = {settings: c for settings, c in self._known.items() if settings}
        self._bounded = any(c.bound is not None for c in found)
        self._journal, self._budget, self._pruned = journal, budget, pruned
        self._asked: list[Candidate] = []
        self._meshes: Counter = Counter()
        self.wrong: defaultdict[Family, list[float]] = defaultdict(list, {k: list(v) for k, v in (wrong or {}).items()})
        self.reused = 0

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Return the known outcomes, in the order in which their candidates were chosen."""
        return tuple(c.outcome for c in self._asked if c.outcome is not None)

    @property
    def compiled(self) -> int:
        """Return how many candidates count toward the budget."""
        free = () if self._bounded else [c for c in self._asked if c.outcome is not None and c.time_s is None]
        return len(self._asked) - len(free)

    @property
    def left(self) -> int:
        """Return how many candidates were neither planned nor ruled out."""
        return len(self._left)

    def best(self) -> Candidate | None:
        """Return the fastest candidate that fits."""
        return next(iter(fastest_first(self._asked)), None)

    def run(self, workers: Workers, report: Callable[[Candidate, bool], None], *, base_first: bool = True) -> None:
        """Plan candidates until the budget is spent or none is left.

        `report` is called with every planned candidate, and with whether its outcome comes from an earlier run.
        """

        def take(candidate: Candidate) -> None:
            assert candidate.outcome is not None
            estimate_s = candidate.bound.estimate_s if candidate.bound else None
            noted = {"stage": candidate.stage, "estimate_s": estimate_s}
            candidate.outcome = candidate.outcome.model_copy(update=noted)
            self._journal.add(candidate.outcome)
            self._learn(candidate)
            report(candidate, False)

        def choose() -> Candidate | None:
            while self.compiled < self._budget and (chosen := self._choose()) is not None:
                if not self._is_known(*chosen, report):
                    return chosen[0]
            return None

        if base_first and not self._is_known(self._base, "base", report):
            first = iter([self._base])
            workers.plan_chosen(lambda: next(first, None), take)
        for settings, outcome in self._journal.outcomes.items():
            if settings in self._left:
                self._is_known(self._left[settings], outcome.stage or "estimate", report)
        workers.plan_chosen(choose, take)

    def _is_known(self, candidate: Candidate, stage: str, report: Callable[[Candidate, bool], None]) -> bool:
        """Mark a candidate as tried, and return whether the journal has its outcome, which is then used."""
        self._asked.append(candidate)
        candidate.stage = stage
        self._left.pop(candidate.settings, None)
        if candidate.settings in self._known:
            self._meshes[_variant(candidate).mesh] += 1
        candidate.outcome = self._journal.outcomes.get(candidate.settings)
        if candidate.outcome is None:
            return False
        self.reused += 1
        self._learn(candidate)
        report(candidate, True)
        return True

    def _learn(self, candidate: Candidate) -> None:
        """Record the error of a candidate's estimate; a new best one rules out candidates that must be slower."""
        if candidate.time_s and candidate.bound and candidate.bound.estimate_s:
            self.wrong[_family(candidate)].append(candidate.time_s / candidate.bound.estimate_s)
        time_s = candidate.time_s
        if time_s is None or self.best() is not candidate:
            return
        for other in [c for c in self._left.values() if c.bound and c.bound.time_s > time_s]:
            del self._left[other.settings]
            assert other.bound is not None
            why = f"{format_seconds(other.bound.time_s)} at least, {format_seconds(time_s)} is known"
            self._pruned.add("time", lambda c=other: c.settings, why)

    def _choose(self) -> tuple[Candidate, str] | None:
        if not self._left:
            return None
        best = self.best()
        if not self._bounded:
            near = _variant(best or self._base)
            return min(self._left.values(), key=lambda c: _variant(c).distance(near)), "neighbour"
        wrong = self._wrong()
        guesses = {c: (c.guess_s or 0.0) * wrong[_family(c)] for c in self._left.values()}
        ranked = sorted(guesses, key=lambda c: (guesses[c], c.settings))
        if len(self._asked) <= self._budget // 2:
            for candidate in ranked:
                variant = _variant(candidate)
                if variant.options == _variant(self._base).options and self._meshes[variant.mesh] < _PER_MESH:
                    return candidate, "estimate"
        # Candidates that differ in one choice from the best so far, then from the second best, and so on.
        nearby = (c for to in fastest_first(self._asked) for c in ranked if _variant(c).differences(_variant(to)) == 1)
        for near in nearby:
            if best is None or guesses[near] <= _NEAR * (best.time_s or 0.0):
                return near, "neighbour"
        return ranked[0], "estimate"

    def _wrong(self) -> Mapping[Family, float]:
        """Return the factor that corrects the estimates of a family.

        Families without a planned candidate get the smallest factor, so that one of their candidates is planned soon.
        """
        known = {family: statistics.median(ratios) for family, ratios in self.wrong.items()}
        untried = min(known.values(), default=1.0)
        return defaultdict(lambda: untried, known)


def _variant(candidate: Candidate) -> Variant:
    assert candidate.variant is not None
    return candidate.variant


def _family(candidate: Candidate) -> Family:
    variant, bound = _variant(candidate), candidate.bound
    tensor = any(axis.name == "tensor" and axis.size > 1 for axis in variant.mesh.axes)
    return variant.stages is not None, tensor, variant.accumulate > 1, bound is not None and bound.host_bytes > 0
