"""What a search found, as `tune/1`: every outcome, the winner, and why it wins.

outcomes of the experiment as it is and of the winner -> differences -> sentences
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from meshkit.report.readable import Printed
from meshkit.report.schema import Part
from meshkit.report.views.words import axes_text
from meshkit.units import format_bytes, format_percent, format_seconds
from meshkit.verbs.plan.outcome import Outcome, OutcomeRow

TUNE_SCHEMA = "meshkit.tune/1"
# Differences below this share of the step are left out of what says why, but for the largest.
_NOTABLE = 0.005
# A collective of which less than this share is still exposed went away.
_GONE = 0.1
# A collective that is exposed for less than this share of the step is no reason.
_WORTH_NAMING = 1e-4


class PrunedPart(Part):
    """Variants that one closed form ruled out, and an example of why."""

    rule: str
    count: int
    example: str | None = None


class DifferencePart(Part):
    """A quantity of the experiment as it is and of the winner, in seconds a step, and what was saved of it."""

    name: str
    base_s: float | None
    winner_s: float | None
    saved_s: float


class TuneReport(Printed, Part):
    """What a search found.

    Attributes:
        num_gpus: of the experiment; an outcome of another size has its own.
        objective: of the winner, `time` (at the experiment's size) or `gpu_hours` (of any size).
        base: the experiment as it is.
        winner: the best that fits; None where none does.
        why: one sentence each: what the winner has gained, and where.
        differences: compute, and every row of communication, the largest saving first.
        pareto: indices into `outcomes`: no other fits that is faster with no more memory and no more GPUs.
        space: variants before pruning.
        compiled: variants compiled, in this and in earlier runs; `reused` of them in earlier ones.
        left: variants that nothing ruled out, and that were not compiled.
        wall_s: of this run.
    """

    schema_: Literal["meshkit.tune/1"] = Field(default=TUNE_SCHEMA, alias="schema")
    experiment: str
    gpu: str
    num_gpus: int
    global_batch: int | None = None  # None of what a function builds, whose settings are a mesh and its arguments
    objective: str = "time"
    base: Outcome
    winner: Outcome | None
    winner_is_base: bool
    why: tuple[str, ...]
    differences: tuple[DifferencePart, ...]
    outcomes: tuple[Outcome, ...]
    pareto: tuple[int, ...]
    space: int
    pruned: tuple[PrunedPart, ...]
    compiled: int
    reused: int
    left: int
    wall_s: float
    jobs: int

    def _shown(self) -> Any:
        return importlib.import_module("meshkit.verbs.tune.tune_views").render(self)  # which imports this module


@dataclass(frozen=True)
class SearchProgress:
    """What hears how a search goes."""

    pruning: Callable[[int], None]  # number of variants looked at so far
    started: Callable[[int, int], None]  # candidates that were not ruled out; how many variants will be compiled
    done: Callable[[Outcome, bool, Outcome | None], None]
    """An outcome, whether an earlier run had it, and the best so far."""


SILENT = SearchProgress(lambda _: None, lambda *_: None, lambda *_: None)


def pareto(outcomes: Sequence[Outcome]) -> tuple[int, ...]:
    """Indices of outcomes that fit and that no other beats in time, memory and GPUs at once; the fastest first."""
    found: list[int] = []
    fitting = [i for i, o in enumerate(outcomes) if o.fits and o.time_s is not None]
    for i in sorted(fitting, key=lambda i: _costs(outcomes[i])):
        if not any(all(a <= b for a, b in zip(_costs(outcomes[j]), _costs(outcomes[i]))) for j in found):
            found.append(i)
    return tuple(found)


def _costs(outcome: Outcome) -> tuple[float, int, int]:
    """What an outcome is judged by, less of each being better: seconds, memory, GPUs."""
    return outcome.time_s or 0.0, outcome.peak_bytes or 0, outcome.num_gpus or 0


def differences(base: Outcome, winner: Outcome) -> tuple[DifferencePart, ...]:
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


def why(base: Outcome, winner: Outcome | None, parts: Sequence[DifferencePart]) -> tuple[str, ...]:
    """One sentence each: what the winner has gained, and where."""
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
        error = ", within the error" if _within_the_error(base, winner) else ""
        said.append(f"a step takes {format_seconds(step)} instead of {format_seconds(base.time_s)} ({share}{error}).")
    if winner.num_gpus != base.num_gpus:
        said.append(_gpus(base, winner))
    said += _recomputation(base, winner)
    largest = max((abs(part.saved_s) for part in parts), default=0.0)
    for part in parts:
        if base.time_s is not None and part.saved_s and _is_reason(part, step, largest):
            said.append(_sentence(part))
    named = any(part.saved_s > 0 and _is_gone(part) for part in parts if _is_reason(part, step, largest))
    return (*said, *_collectives(base, winner, named))


def _within_the_error(base: Outcome, winner: Outcome) -> bool:
    """Whether a step is shorter by less than half of the interval in which half of all runs lie."""
    if winner.time_interval is None or not base.time_s or not winner.time_s:
        return False
    low, high = winner.time_interval.p50_s
    return base.time_s - winner.time_s < (high - low) / 2


def _is_reason(part: DifferencePart, step: float, largest: float) -> bool:
    """Whether a difference is large, or an exposed collective that went away."""
    if abs(part.saved_s) >= min(_NOTABLE * step, largest):
        return True
    return _is_gone(part) and part.saved_s > _WORTH_NAMING * step


def _is_gone(part: DifferencePart) -> bool:
    """Whether a row of exposed communication is nearly nothing with the winner."""
    return part.name.startswith("exposed") and (part.winner_s or 0.0) < _GONE * (part.base_s or 0.0)


def _gpus(base: Outcome, winner: Outcome) -> str:
    """How many GPUs the winner takes, and GPU seconds a step."""
    seconds = [(o.time_s or 0.0) * (o.num_gpus or 0) for o in (winner, base)]
    return (
        f"{winner.num_gpus} GPUs instead of {base.num_gpus}: a step takes {seconds[0]:,.0f} GPU seconds instead of "
        f"{seconds[1]:,.0f}."
    )


def _recomputation(base: Outcome, winner: Outcome) -> list[str]:
    """What is no longer computed beyond the model: of the FLOP that run, which HFU counts; the model's are the same."""
    if base.num_gpus != winner.num_gpus or not (base.hfu and winner.hfu and base.time_s and winner.time_s):
        return []
    fewer = 1 - winner.hfu * winner.time_s / (base.hfu * base.time_s)
    if fewer < _NOTABLE:
        return []
    where = f"; {format_bytes(winner.host_bytes)} of each GPU wait in host memory instead" if winner.host_bytes else ""
    return [f"{format_percent(fewer)} of the matmul FLOP, which the model itself does not need, no longer run{where}."]


def _collectives(base: Outcome, winner: Outcome, named: bool) -> list[str]:
    """That no exposed collective went away, where none did."""
    if named or base.exposed_s is None or winner.exposed_s is None:
        return []
    before, after = format_seconds(base.exposed_s), format_seconds(winner.exposed_s)
    return [f"no exposed collective went away: {before} of them were exposed in all, and {after} are."]


def _row_name(row: OutcomeRow) -> str:
    """A row of exposed communication in words, which are its name in `differences`."""
    words = [word for word in (row.collective, row.dtype) if word]
    return f"exposed {' '.join(words)} over {axes_text(row.axes)} on {row.link or '-'}"


def _rest(outcome: Outcome) -> float | None:
    """Seconds of a step in which neither a kernel computes nor a collective is exposed."""
    if outcome.time_s is None or outcome.compute_s is None or outcome.exposed_s is None:
        return None
    return outcome.time_s - outcome.compute_s - outcome.exposed_s


def _sentence(part: DifferencePart) -> str:
    """What became of one quantity."""
    before, after = format_seconds(part.base_s or 0.0), format_seconds(part.winner_s or 0.0)
    if not part.winner_s:
        return f"{part.name} went away: {before}."
    if not part.base_s:
        return f"{part.name} is new: {after}."
    if _is_gone(part):
        return f"{part.name} went away but for {after}: {before} before."
    verb = "fell" if part.saved_s > 0 else "rose"
    return f"{part.name} {verb} from {before} to {after}."
