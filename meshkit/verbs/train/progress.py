"""Progress of a run on a terminal: step, loss, tokens per second, MFU, time left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshkit.units import format_count, format_percent

_LINES_WITHOUT_TERMINAL = 10


class StepProgress:
    """A progress bar; where the console is no terminal, some ten plain lines in its place.

    Args:
        console: where to print.
        steps: of the whole run.
        enabled: False prints nothing.
    """

    def __init__(self, console: Console, steps: int, *, enabled: bool = True):
        self._console, self._steps, self._enabled = console, steps, enabled
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
        )
        bar = enabled and console.is_terminal
        self._bar = Progress(*columns, console=console) if bar else None
        self._task = self._bar.add_task("train", total=steps, numbers="compiled") if self._bar else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._enabled:
            self._console.print(text, highlight=False, markup=False)  # a path or a message may hold brackets

    def start(self, step: int) -> None:
        """Puts the bar at the step that the run resumes from."""
        if self._bar and self._task is not None:
            self._bar.reset(self._task, total=self._steps, completed=step, numbers="first step")

    def update(self, record: Mapping[str, Any]) -> None:
        """Shows a step's record as metrics.jsonl has it."""
        step, numbers = record["step"], describe(record)
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
        elif step == 1 or step == self._steps or step % max(1, self._steps // _LINES_WITHOUT_TERMINAL) == 0:
            self.say(f"step {step}/{self._steps}  {numbers}")
        if "evaluation_loss" in record:
            self.say(f"step {step}: held-out loss {record['evaluation_loss']:.4f}")


def describe(record: Mapping[str, Any]) -> str:
    """`loss 2.4889  25.6 ktokens/s  MFU 41.2 %`; MFU only where a peak is known."""
    parts = [f"loss {record['loss']:.4f}", f"{format_count(record['tokens_per_s'])}tokens/s"]
    if record.get("mfu") is not None:
        parts.append(f"MFU {format_percent(record['mfu'])}")
    return "  ".join(parts)
