"""A search on a terminal, as a page and while it runs: the winner and why, what was ruled out, and the variants."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from html import escape
from pathlib import Path

import rich.table
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from meshkit.report.views.charts import GRID, frame, limit
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
from meshkit.units import GIB, format_bytes, format_percent, format_seconds
from meshkit.verbs.plan.outcome import Outcome, mesh_text
from meshkit.verbs.tune.tune_report import SearchProgress, TuneReport

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
        if key == "mesh":
            words.append(mesh_text(outcome))
        elif key == "cluster.hosts":
            words.append(f"{value} hosts")
        elif key == "train.remat":
            words.append(f"remat {_remat_text(value)}")
        elif key == "train.accumulate":
            words.append(f"accumulate {value}")
        elif key == "rules.gradients.embed":
            words.append("reduced each")
        elif key == "train.pgle":
            words.append(f"pgle {value.strip(chr(34))}")
        elif key.startswith("pipeline."):
            words.append(f"{key.removeprefix('pipeline.')} {value.strip(chr(34))}")
        elif key.startswith("xla."):
            words.append(f"{key.removeprefix('xla.xla_').removeprefix('gpu_')} {value.strip(chr(34))}")
        elif "." not in key:  # a choice of somebody's own
            words.append(f"{key} {value.strip(chr(34))}")
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
    return {"data": data, "layout": _layout(report)}


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


def _layout(report: TuneReport) -> dict:
    layout = frame(
        460,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        xaxis={**GRID, "automargin": True, "ticksuffix": " GiB"},
        yaxis={**GRID, "automargin": True, "ticksuffix": " s"},
        hoverlabel={"font": {"size": 12}},
    )
    if report.base.pool_bytes:
        layout["shapes"] = [limit(report.base.pool_bytes / GIB, "dash", 1.2)]
    return layout


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
