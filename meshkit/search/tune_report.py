"""Report the result of a search as JSON (`tune/1`) and on a terminal: all outcomes, the winner, and why it wins.

outcomes of the unchanged experiment and of the winner -> differences -> sentences
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import rich.table
from pydantic import Field
from rich.console import Group, RenderableType
from rich.text import Text

from meshkit.console import Printed
from meshkit.errors import RunError
from meshkit.report.schema import Part
from meshkit.report.views.page import Cell, Table, heading, listed, number_columns, text_columns
from meshkit.report.views.words import axes_text
from meshkit.search.candidate import Candidate, Outcome, OutcomeRow, mesh_text
from meshkit.units import format_bytes, format_percent, format_seconds

TUNE_SCHEMA = "meshkit.tune/1"
# Smaller shares of the step are left out of the reasons, except for the largest.
_NOTABLE = 0.005
# A collective counts as gone if less than this share of its exposed time is left.
_GONE = 0.1
# A collective that saves a smaller share of the step is not a reason.
_WORTH_NAMING = 1e-4


class PrunedPart(Part):
    """The number of variants that one rule removed, with an example."""

    rule: str
    count: int
    example: str | None = None


class DifferencePart(Part):
    """One part of the step: its seconds in the unchanged experiment and in the winner, and the seconds saved."""

    name: str
    base_s: float | None
    winner_s: float | None
    saved_s: float


class TuneReport(Printed, Part):
    """The result of a search.

    Attributes:
        num_gpus: the GPUs of the experiment; an outcome at another size has its own number.
        global_batch: the experiment's global batch; None for a step that a function builds.
        objective: `time`: the winner is the fastest at the experiment's size. `gpu_hours`: it has the fewest GPU hours
            at any size.
        base: the outcome of the unchanged experiment.
        winner: the best outcome that fits; None if none fits.
        why: sentences about the gains of the winner.
        differences: compute, idle time, and every row of communication, the largest saving first.
        pareto: indices of fitting outcomes that no other outcome equals or beats in all of time, memory and GPUs.
        space: the number of variants before any rule removed some.
        compiled: the number of variants compiled in this and in earlier runs; `reused` of them in earlier runs.
        left: the number of variants that were neither ruled out nor compiled.
        wall_s: the seconds of this run.
    """

    schema_: Literal["meshkit.tune/1"] = Field(default=TUNE_SCHEMA, alias="schema")
    experiment: str
    gpu: str
    num_gpus: int
    global_batch: int | None = None
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

    def __rich__(self) -> RenderableType:
        return render(self)


@dataclass(frozen=True)
class SearchProgress:
    """Callbacks that follow a search."""

    pruning: Callable[[int], None]
    """Called with the number of variants that the closed forms have checked so far."""
    started: Callable[[int, int], None]
    """Called with the number of candidates that were not ruled out, and the number that will be compiled at most."""
    done: Callable[[Candidate, bool, Candidate | None], None]
    """Called with a candidate, with whether its outcome comes from an earlier run, and with the best so far."""


SILENT = SearchProgress(lambda _: None, lambda *_: None, lambda *_: None)


def make_tune_report(outcomes: Sequence[Outcome], winner: Outcome | None, **known: Any) -> TuneReport:
    """Return the report of a search, whose first outcome is that of the unchanged step.

    Raises:
        RunError: no variant could be planned.
    """
    base = outcomes[0]
    if all(outcome.status == "error" for outcome in outcomes):
        raise RunError(f"none of {len(outcomes)} variants could be planned; the first: {base.error}")
    parts = differences(base, winner) if winner else ()
    return TuneReport(
        base=base,
        winner=winner,
        winner_is_base=winner is not None and not winner.settings,
        why=why(base, winner, parts),
        differences=parts,
        outcomes=tuple(outcomes),
        pareto=pareto(outcomes),
        **known,
    )


def pareto(outcomes: Sequence[Outcome]) -> tuple[int, ...]:
    """Return the indices of fitting outcomes that none equals or beats in time, memory and GPUs, fastest first."""
    found: list[int] = []
    fitting = [i for i, o in enumerate(outcomes) if o.fits and o.time_s is not None]
    for i in sorted(fitting, key=lambda i: _costs(outcomes[i])):
        if not any(all(a <= b for a, b in zip(_costs(outcomes[j]), _costs(outcomes[i]))) for j in found):
            found.append(i)
    return tuple(found)


def _costs(outcome: Outcome) -> tuple[float, int, int]:
    return outcome.time_s or 0.0, outcome.peak_bytes or 0, outcome.num_gpus or 0


def differences(base: Outcome, winner: Outcome) -> tuple[DifferencePart, ...]:
    """Return the seconds of compute, of idle time, and of each row's exposed communication, the largest saving first.

    A part that one of the two outcomes does not have counts as 0 s.
    """

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
    """Return sentences about the gains of the winner over the unchanged experiment."""
    if winner is None:
        return ("no compiled variant fits.",)
    if not winner.settings:
        return ("no compiled variant is faster than the experiment as it is.",)
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
    if winner.num_gpus != base.num_gpus:
        said.append(_gpus(base, winner))
    said += _recomputation(base, winner)
    largest = max((abs(part.saved_s) for part in parts), default=0.0)
    for part in parts:
        if base.time_s is not None and part.saved_s and _is_reason(part, step, largest):
            said.append(_sentence(part))
    named = any(part.saved_s > 0 and _is_gone(part) for part in parts if _is_reason(part, step, largest))
    return (*said, *_collectives(base, winner, named))


def _is_reason(part: DifferencePart, step: float, largest: float) -> bool:
    if abs(part.saved_s) >= min(_NOTABLE * step, largest):
        return True
    return _is_gone(part) and part.saved_s > _WORTH_NAMING * step


def _is_gone(part: DifferencePart) -> bool:
    return part.name.startswith("exposed") and (part.winner_s or 0.0) < _GONE * (part.base_s or 0.0)


def _gpus(base: Outcome, winner: Outcome) -> str:
    seconds = [(o.time_s or 0.0) * (o.num_gpus or 0) for o in (winner, base)]
    return (
        f"{winner.num_gpus} GPUs instead of {base.num_gpus}: a step takes {seconds[0]:,.0f} GPU seconds instead of "
        f"{seconds[1]:,.0f}."
    )


def _recomputation(base: Outcome, winner: Outcome) -> list[str]:
    if base.num_gpus != winner.num_gpus or not (base.hfu and winner.hfu and base.time_s and winner.time_s):
        return []
    fewer = 1 - winner.hfu * winner.time_s / (base.hfu * base.time_s)
    if fewer < _NOTABLE:
        return []
    where = f"; {format_bytes(winner.host_bytes)} of each GPU wait in host memory instead" if winner.host_bytes else ""
    return [f"{format_percent(fewer)} of the matmul FLOP, which the model itself does not need, no longer run{where}."]


def _collectives(base: Outcome, winner: Outcome, named: bool) -> list[str]:
    """Return a sentence that no exposed collective went away, unless one did."""
    if named or base.exposed_s is None or winner.exposed_s is None:
        return []
    before, after = format_seconds(base.exposed_s), format_seconds(winner.exposed_s)
    return [f"no exposed collective went away: communication was exposed for {before} in all, and is for {after}."]


def _row_name(row: OutcomeRow) -> str:
    words = [word for word in (row.collective, row.dtype) if word]
    return f"exposed {' '.join(words)} over {axes_text(row.axes)} on {row.link or '-'}"


def _rest(outcome: Outcome) -> float | None:
    """Return the seconds of a step without compute and without exposed communication."""
    if outcome.time_s is None or outcome.compute_s is None or outcome.exposed_s is None:
        return None
    return outcome.time_s - outcome.compute_s - outcome.exposed_s


def _sentence(part: DifferencePart) -> str:
    before, after = format_seconds(part.base_s or 0.0), format_seconds(part.winner_s or 0.0)
    if not part.winner_s:
        return f"{part.name} went away: {before}."
    if not part.base_s:
        return f"{part.name} is new: {after}."
    if _is_gone(part):
        return f"{part.name} went away but for {after}: {before} before."
    verb = "fell" if part.saved_s > 0 else "rose"
    return f"{part.name} {verb} from {before} to {after}."


_SHOWN = 12
RULE_WORDS = {
    "divisibility": "a dim or the batch does not divide",
    "memory": "state, and gradients or saved activations, exceed the pool",
    "host_memory": "what is offloaded exceeds a host's memory",
    "time": "FLOP at peak or weights moved once take longer than the best",
}


def render(report: TuneReport) -> RenderableType:
    """Return the report for printing with rich."""
    parts: list[RenderableType] = [_headline(report)]
    if report.winner is not None and not report.winner_is_base:
        parts += [heading("why it wins"), *listed(report.why), heading("the winner")]
        parts += [Text(line) for line in how_to_have(report)]
    else:
        parts += listed(report.why)
    parts += [heading("variants"), _counts(report)]
    parts += [
        heading("the best that were compiled"),
        variants_table(report, best_first(report.outcomes)[:_SHOWN]).terminal(),
    ]
    return Group(*parts)


def best_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return outcomes in order: those that fit, then those that do not fit, then errors; each group by time."""
    order = {"fits": 0, "does_not_fit": 1, "error": 2}
    return sorted(outcomes, key=lambda o: (order[o.status], o.time_s or 0.0, o.settings))


def what_text(outcome: Outcome) -> str:
    """Return the settings as a text that is short enough for a table."""
    if not outcome.settings:
        return "as it is"
    words = []
    for setting in outcome.settings:
        key, _, value = setting.partition("=")
        section, _, name = key.rpartition(".")
        if key == "mesh":
            words.append(mesh_text(outcome))
        elif key == "cluster.hosts":
            words.append(f"{value} hosts")
        elif key == "cluster.gpus_used_per_domain":
            words.append(f"{value} GPUs of each NVLink domain")
        elif key == "train.remat":
            words.append(f"remat {_remat_text(value)}")
        elif key == "rules.gradients.embed":
            words.append("reduced each")
        elif section in ("train", "pipeline", "xla", ""):  # "" for a choice of the user's function
            name = name.removeprefix("xla_").removeprefix("gpu_") if section == "xla" else name
            words.append(f"{name} {value.strip(chr(34))}")
    return ", ".join(words)


def how_to_have(report: TuneReport) -> list[str]:
    """Return the winner's settings as command-line options, or as arguments of the function that builds the step."""
    settings = report.winner.settings if report.winner is not None else ()
    if report.global_batch is not None:
        return [f"--set '{setting}'" for setting in settings]
    changed = [item for setting in settings for item in tomllib.loads(setting).items()]
    return [f"{key} = " + (f"MeshSpec.parse({value!r})" if key == "mesh" else repr(value)) for key, value in changed]


def _remat_text(value: str) -> str:
    """Return a remat setting as text, such as `offload gate up and keep key value`."""
    try:
        remat = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value.strip('"')
    if isinstance(remat, list):
        return f"keep {' '.join(remat)}"
    if isinstance(remat, dict):
        return " and ".join(f"{key} {' '.join(names)}" for key, names in remat.items() if names)
    return str(remat)


def variants_table(report: TuneReport, outcomes: Sequence[Outcome]) -> Table:
    """Return a table of some compiled variants, with the winner in bold."""
    columns = number_columns("GPUs", "step", "GPU s", "compute", "exposed", "MFU", "memory", "")
    styles = ["bold" if report.winner and o.settings == report.winner.settings else "" for o in outcomes]
    return Table([*text_columns("variant"), *columns], [_cells(o) for o in outcomes], styles)


def _cells(outcome: Outcome) -> tuple[Cell, ...]:
    verdict = {"fits": "fits", "does_not_fit": "too large", "error": "error"}[outcome.status]
    gpu_seconds = None if outcome.time_s is None or outcome.num_gpus is None else outcome.time_s * outcome.num_gpus
    return (
        what_text(outcome),
        "-" if outcome.num_gpus is None else str(outcome.num_gpus),
        format_seconds(outcome.time_s),
        "-" if gpu_seconds is None else f"{gpu_seconds:,.0f}",
        format_seconds(outcome.compute_s),
        format_seconds(outcome.exposed_s),
        format_percent(outcome.mfu),
        format_bytes(outcome.peak_bytes),
        verdict,
    )


def _headline(report: TuneReport) -> RenderableType:
    title = f"{report.experiment} on {report.num_gpus} x {report.gpu}"
    title += f", global batch {report.global_batch}" if report.global_batch else ""
    lines = [Text(title, "bold underline")]
    winner = report.winner
    if winner is not None and not report.winner_is_base:
        line = f"{mesh_text(winner)}: {format_seconds(winner.time_s)} a step, MFU {format_percent(winner.mfu)}"
        before = "" if report.base.time_s is None else f"; as it is {format_seconds(report.base.time_s)}"
        if winner.num_gpus != report.num_gpus:
            before += f" on {report.num_gpus} GPUs, and the winner on {winner.num_gpus}"
        lines.append(Text(f"{line}{before}", "green"))
    return Group(*lines)


def _counts(report: TuneReport) -> RenderableType:
    table = rich.table.Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column()
    table.add_row(f"{report.space:,}", "in the space")
    for part in report.pruned:
        table.add_row(f"-{part.count:,}", f"ruled out: {RULE_WORDS.get(part.rule, part.rule)}")
    reused = f", {report.reused} of them earlier" if report.reused else ""
    jobs = f"{report.jobs} process{'es' * (report.jobs != 1)}"
    table.add_row(f"{report.compiled:,}", f"compiled{reused}, by {jobs} in {report.wall_s:.0f} s")
    table.add_row(f"{report.left:,}", "left")
    return table
