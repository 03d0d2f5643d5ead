"""What a search found, as `tune/1`, on a terminal and as a page: every outcome, the winner, and why it wins.

outcomes of the experiment as it is and of the winner -> differences -> sentences
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

import rich.table
from pydantic import Field
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from meshkit.console import Printed
from meshkit.errors import RunError
from meshkit.report.schema import Part
from meshkit.report.views.charts import legend_frame, limit
from meshkit.report.views.page import (
    Cell,
    Page,
    Table,
    card,
    cards,
    heading,
    listed,
    number_columns,
    section,
    text_columns,
)
from meshkit.report.views.words import axes_text
from meshkit.search.variants import Outcome, OutcomeRow, mesh_text
from meshkit.units import GIB, format_bytes, format_percent, format_seconds

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

    def __rich__(self) -> RenderableType:
        """Return its tables."""
        return render(self)


@dataclass(frozen=True)
class SearchProgress:
    """What hears how a search goes."""

    pruning: Callable[[int], None]  # number of variants looked at so far
    started: Callable[[int, int], None]  # candidates that were not ruled out; how many variants will be compiled
    done: Callable[[Outcome, bool, Outcome | None], None]
    """An outcome, whether an earlier run had it, and the best so far."""


SILENT = SearchProgress(lambda _: None, lambda *_: None, lambda *_: None)


def report_of(outcomes: Sequence[Outcome], winner: Outcome | None, **known: Any) -> TuneReport:
    """The report of a search, whose first outcome is the step as it is; `known`: its other fields.

    Args:
        outcomes: in the order in which they were asked for.
        winner: one of them that fits; None where none does.
        known: fields of `TuneReport` that do not follow from these.

    Raises:
        RunError: not one variant could be planned.
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
    """Seconds of compute and of each row's exposed communication, the largest saving first.

    Args:
        base: the step as it is; what could not be planned counts as 0 s.
        winner: may be of another size of the cluster.
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


_SHOWN = 12
_OFTEN = 50  # variants between two signs of the progress
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "pentagon")  # of sizes, the experiment's own first
_FITS, _TOO_LARGE, _WINNER, _BASE = "#3f7cac", "#d1495b", "#4c9f70", "#28323c"
RULE_WORDS = {
    "divisibility": "a dim or the batch does not divide",
    "memory": "state, and gradients or saved activations, exceed the pool",
    "host_memory": "what is offloaded exceeds a host's memory",
    "time": "FLOP at peak or weights moved once take longer than the best",
}


def render(report: TuneReport) -> RenderableType:
    """The whole search, for `rich.print`."""
    parts: list[RenderableType] = [_headline(report)]
    if report.winner is not None and not report.winner_is_base:
        parts += [heading("why it wins"), *listed(report.why), heading("the winner")]
        parts += [Text(line) for line in _how(report)]
    else:
        parts += listed(report.why)
    parts += [heading("variants"), _counts(report)]
    parts += [
        heading("the best that were compiled"),
        variants_table(report, best_first(report.outcomes)[:_SHOWN]).terminal(),
    ]
    return Group(*parts)


def write_tune_html(report: TuneReport, path: str | Path) -> Path:
    """Writes the page, which opens offline, and returns its path.

    Raises:
        ConfigError: Plotly, which draws the charts, is not installed.
    """
    sub = f"{report.num_gpus} x {report.gpu}" + (
        f" · global batch {report.global_batch}" if report.global_batch else ""
    )
    page = Page(f"{report.experiment}: {report.compiled} variants", sub)
    note = (
        "Each point is a compiled variant, its form says on how many GPUs. The line joins those that no other of the "
        "same size beats in both; what lies right of the dashed line does not fit."
    )
    drawn = page.chart("pareto", pareto_chart(report))
    page.add(_cards(report), _why(report), section("Step time against memory", note, drawn))
    page.add(_differences(report), _pruned(report))
    page.add(section("Variants", "The fastest first.", variants_table(report, best_first(report.outcomes)).html()))
    return page.write(path)


def best_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that fit by time, then those that do not, then errors."""
    order = {"fits": 0, "does_not_fit": 1, "error": 2}
    return sorted(outcomes, key=lambda o: (order[o.status], o.time_s or 0.0, o.settings))


def what_text(outcome: Outcome) -> str:
    """The settings in words as short as a table needs."""
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
        elif key == "train.remat":
            words.append(f"remat {_remat_text(value)}")
        elif key == "rules.gradients.embed":
            words.append("reduced each")
        elif section in ("train", "pipeline", "xla", ""):  # the last of a choice of somebody's own
            name = name.removeprefix("xla_").removeprefix("gpu_") if section == "xla" else name
            words.append(f"{name} {value.strip(chr(34))}")
    return ", ".join(words)


def _how(report: TuneReport) -> list[str]:
    """What to write to have the winner: options of the command line, or what a function that builds a step takes."""
    settings = report.winner.settings if report.winner is not None else ()
    if report.global_batch is not None:
        return [f"--set '{setting}'" for setting in settings]
    changed = [item for setting in settings for item in tomllib.loads(setting).items()]
    return [f"{key} = " + (f"MeshSpec.parse({value!r})" if key == "mesh" else repr(value)) for key, value in changed]


def _remat_text(value: str) -> str:
    """`offload gate up, keep key value`, or what else the setting says."""
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
    """Some of the variants that were compiled; the winner stands out."""
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


def pareto_chart(report: TuneReport) -> dict:
    """Time against memory of what was compiled, and the front."""
    drawn = [o for o in report.outcomes if o.time_s is not None and o.peak_bytes is not None]
    sizes = sorted({o.num_gpus or 0 for o in drawn}, key=lambda n: (n != report.num_gpus, n))
    fitting = [(n, [o for o in drawn if o.fits and (o.num_gpus or 0) == n]) for n in sizes]
    groups = [
        *((f"{n} GPUs", members, _FITS, _SYMBOLS[min(i, 4)], 9) for i, (n, members) in enumerate(fitting)),
        ("does not fit", [o for o in drawn if not o.fits], _TOO_LARGE, "x", 8),
        ("as it is", [o for o in drawn if not o.settings], _BASE, "diamond-open", 15),
        ("the winner", [o for o in drawn if o == report.winner], _WINNER, "star", 15),
    ]
    data = [_points(name, members, color, symbol, size) for name, members, color, symbol, size in groups if members]
    data += [line for n in sizes if (line := _front(report, n))]
    layout: dict[str, Any] = legend_frame(460) | {"hoverlabel": {"font": {"size": 12}}}
    layout["xaxis"]["ticksuffix"], layout["yaxis"]["ticksuffix"] = " GiB", " s"
    if report.base.pool_bytes:
        layout["shapes"] = [limit(report.base.pool_bytes / GIB, "dash", 1.2)]
    return {"data": data, "layout": layout}


def _front(report: TuneReport, gpus: int) -> dict | None:
    """The line through those of one size that no other beats; None where there is none of them."""
    front = [report.outcomes[i] for i in report.pareto if (report.outcomes[i].num_gpus or 0) == gpus]
    front.sort(key=lambda o: o.peak_bytes or 0)
    if not front:
        return None
    return {
        "type": "scatter",
        "mode": "lines",
        "name": f"no other beats them, {gpus} GPUs",
        "x": [(o.peak_bytes or 0) / GIB for o in front],
        "y": [o.time_s for o in front],
        "line": {"color": _WINNER, "width": 1.2, "shape": "hv"},
        "hoverinfo": "skip",
    }


def _points(name: str, outcomes: list[Outcome], color: str, symbol: str, size: int) -> dict:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [(o.peak_bytes or 0) / GIB for o in outcomes],
        "y": [o.time_s for o in outcomes],
        "customdata": [f"{what_text(o)}<br>{o.num_gpus} GPUs" for o in outcomes],
        "hovertemplate": "%{y:.4~g} s, %{x:.3~g} GiB<br>%{customdata}<extra></extra>",
        "marker": {"color": color, "size": size, "symbol": symbol},
    }


def _cards(report: TuneReport) -> str:
    boxes = []
    if report.winner is not None:
        boxes.append(card(f"a step: {mesh_text(report.winner)}", format_seconds(report.winner.time_s), css="good"))
        boxes.append(card("MFU", format_percent(report.winner.mfu)))
        boxes.append(card(f"of {format_bytes(report.winner.pool_bytes)}", format_bytes(report.winner.peak_bytes)))
    boxes.append(card("as it is", format_seconds(report.base.time_s)))
    boxes.append(card(f"variants, {report.compiled} of them compiled", f"{report.space:,}"))
    return cards(boxes)


def _why(report: TuneReport) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in report.why)
    settings = " ".join(_how(report))
    shown = f"<p><code>{escape(settings)}</code></p>" if settings else ""
    return section("Why it wins", "Against the step as it is.", f"<ul>{items}</ul>{shown}")


def _differences(report: TuneReport) -> str:
    rows = [(d.name, *map(format_seconds, (d.base_s, d.winner_s, d.saved_s))) for d in report.differences]
    if not rows:
        return ""
    table = Table([*text_columns(""), *number_columns("as it is", "the winner", "saved")], rows)
    return section("Where the time went", "Seconds of a step; they add up to the difference.", table.html())


def _pruned(report: TuneReport) -> str:
    rows = [(RULE_WORDS.get(p.rule, p.rule), p.example or "", f"{p.count:,}") for p in report.pruned]
    table = Table([*text_columns("why", "for example"), *number_columns("variants")], rows)
    return section("Ruled out without a compile", "By closed forms.", table.html())


@contextmanager
def progress_bar(console: Console) -> Iterator[SearchProgress]:
    """What to tell a search; where there is no terminal, one line for every variant."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    shown = console.is_terminal
    with bar if shown else nullcontext():
        pruning = bar.add_task("bounds of variants", total=None)
        compiling = bar.add_task("compiling", total=None, visible=False)

        def looked_at(number: int) -> None:
            if number % _OFTEN == 0:
                bar.update(pruning, completed=number)

        def started(candidates: int, total: int) -> None:
            bar.update(pruning, visible=False)
            bar.update(compiling, total=total, visible=True)
            if not shown:
                console.print(f"{candidates} variants were not ruled out; compiling up to {total}", highlight=False)

        def done(outcome: Outcome, known: bool, best: Outcome | None) -> None:
            text = f"best {format_seconds(best.time_s)}" if best else "none fits yet"
            bar.update(compiling, advance=1, description=f"compiling, {text}")
            if not shown:
                console.print(_result_line(outcome, known), highlight=False, soft_wrap=True)

        yield SearchProgress(looked_at, started, done)


def _result_line(outcome: Outcome, known: bool) -> str:
    what = " ".join(outcome.settings) or "as it is"
    result = outcome.error.splitlines()[0] if outcome.error else format_seconds(outcome.time_s)
    verdict = {"fits": "", "does_not_fit": ", does not fit", "error": ""}[outcome.status]
    return f"{result}{verdict}{' (known)' if known else ''}: {what}"
