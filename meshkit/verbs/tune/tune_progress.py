"""A progress bar of a search: how far it is, how long it will take, and the best so far."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshkit.units import format_seconds
from meshkit.verbs.plan.outcome import Outcome
from meshkit.verbs.tune.tune_report import SearchProgress

_OFTEN = 50


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
    with bar if shown else _nothing():
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
                console.print(_line(outcome, known), highlight=False, soft_wrap=True)

        yield SearchProgress(looked_at, started, done)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _line(outcome: Outcome, known: bool) -> str:
    what = " ".join(outcome.settings) or "as it is"
    result = outcome.error.splitlines()[0] if outcome.error else format_seconds(outcome.time_s)
    verdict = {"fits": "", "does_not_fit": ", does not fit", "error": ""}[outcome.status]
    return f"{result}{verdict}{' (known)' if known else ''}: {what}"
