"""The HTML page of a search, and its progress bar in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshkit.report.views.charts import legend_frame, limit
from meshkit.report.views.page import Page, Table, card, cards, number_columns, section, text_columns
from meshkit.search.candidate import Candidate, Outcome, mesh_text
from meshkit.search.tune_report import (
    RULE_WORDS,
    SearchProgress,
    TuneReport,
    best_first,
    how_to_have,
    variants_table,
    what_text,
)
from meshkit.units import GIB, format_bytes, format_percent, format_seconds

_OFTEN = 50  # Variants between two updates of the progress.
_SYMBOLS = ("circle", "square", "triangle-up", "diamond", "pentagon")  # By number of GPUs, the experiment's own first.
_FITS, _TOO_LARGE, _WINNER, _BASE = "#3f7cac", "#d1495b", "#4c9f70", "#28323c"


def write_tune_html(report: TuneReport, path: str | Path) -> Path:
    """Write the HTML page of a search, which opens offline, and return its path.

    Raises:
        ConfigError: Plotly, which draws the charts, is not installed.
    """
    sub = f"{report.num_gpus} x {report.gpu}" + (
        f" · global batch {report.global_batch}" if report.global_batch else ""
    )
    page = Page(f"{report.experiment}: {report.compiled} variants", sub)
    note = (
        "Each point is a compiled variant; its symbol shows the number of GPUs. The line joins those that no other "
        "with as many GPUs beats in both time and memory. Right of the dashed line a variant does not fit."
    )
    drawn = page.chart("pareto", pareto_chart(report))
    page.add(_cards(report), _why(report), section("Step time against memory", note, drawn))
    page.add(_differences(report), _pruned(report))
    page.add(section("Variants", "The fastest first.", variants_table(report, best_first(report.outcomes)).html()))
    return page.write(path)


def pareto_chart(report: TuneReport) -> dict:
    """Draw step time against memory for all compiled variants, and the Pareto front of each number of GPUs."""
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
    settings = " ".join(how_to_have(report))
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
    """Yield callbacks that move a progress bar, or print one line per variant if the console is no terminal."""
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

        def done(candidate: Candidate, known: bool, best: Candidate | None) -> None:
            text = f"best {format_seconds(best.time_s)}" if best else "none fits yet"
            bar.update(compiling, advance=1, description=f"compiling, {text}")
            if not shown:
                console.print(_result_line(candidate, known), highlight=False, soft_wrap=True)

        yield SearchProgress(looked_at, started, done)


def _result_line(candidate: Candidate, known: bool) -> str:
    outcome = candidate.outcome
    what = " ".join(candidate.settings) or "as it is"
    result = outcome.error.splitlines()[0] if outcome and outcome.error else format_seconds(candidate.time_s)
    verdict = ", does not fit" if outcome and outcome.status == "does_not_fit" else ""
    return f"{result}{verdict}{' (known)' if known else ''}: {what}"
