"""Everything a run says of its steps: the terminal, metrics.jsonl, the sinks, and what its captured steps measured.

    record of a step -> a progress bar | metrics.jsonl, TensorBoard, the user's function
    capture -> profiler, in a thread of its own -> metrics of the captured steps -> the same

A trace is read after the steps it is of: their lines are amended. It is this process's own trace, so the numbers are of
its devices; `meshkit profile` reads those of all processes. Nothing that fails here reaches training.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshkit.config.experiment import Experiment
from meshkit.config.user_code import describe_error
from meshkit.errors import PREEMPTED
from meshkit.report.schema import Report
from meshkit.runs.metrics import MetricsLog
from meshkit.runs.sinks import open_sinks
from meshkit.units import format_count, format_percent
from meshkit.verbs.profile.profiler import measure_run

# A run that ends waits this long for what is still being measured and handed on.
_MEASURE_S, _SINKS_S = 30.0, 5.0
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
        step, mfu = record["step"], record.get("mfu")
        numbers = f"loss {record['loss']:.4f}  {format_count(record['tokens_per_s'])}tokens/s"
        numbers += f"  MFU {format_percent(mfu)}" if mfu is not None else ""  # None where no peak is known
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
        elif step == 1 or step == self._steps or step % max(1, self._steps // _LINES_WITHOUT_TERMINAL) == 0:
            self.say(f"step {step}/{self._steps}  {numbers}")
        if "evaluation_loss" in record:
            self.say(f"step {step}: held-out loss {record['evaluation_loss']:.4f}")


class RunLog(MetricsLog):
    """The metrics of a run: of several processes the first keeps them, in the others nothing happens.

    Args:
        experiment: whose `train.metrics` and `train.tensorboard` name the sinks.
        folder: the run folder.
        resumed_step: the last step whose line is kept.
        say: prints one line.

    Raises:
        ConfigError: a sink that cannot be opened.
    """

    def __init__(self, experiment: Experiment, folder: Path, resumed_step: int, say: Callable[[str], None]):
        self._first = jax.process_index() == 0
        self._folder, self._say = folder, say
        self._measuring: threading.Thread | None = None
        self._warned = False
        self._sinks = open_sinks(experiment, folder, say) if self._first else None
        super().__init__(folder / "metrics.jsonl" if self._first else None, resumed_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds one step. A disk that is full, or gone, is a warning: the checkpoints say whether training can go on."""
        try:
            super().write(record)
        except OSError as error:
            self._warn_of_file(error)
        if self._sinks:
            self._sinks.put(record)

    def measure_capture(self) -> None:
        """Measures the capture that has just ended, in a thread; returns at once."""
        if self._first:
            self._measuring = threading.Thread(target=self._measure, name="meshkit-capture", daemon=True)
            self._measuring.start()

    def close(self) -> None:
        """Waits for what is on its way, but not for long, and flushes to disk.

        After a failure of one of several processes it does not wait: the others wait for that one to be gone.
        """
        hurries = jax.process_count() > 1 and _is_a_failure(sys.exception())
        if self._measuring:
            self._measuring.join(0 if hurries else _MEASURE_S)
        if self._sinks:
            self._sinks.close(0 if hurries else _SINKS_S)
        try:
            super().close()
        except OSError as error:
            self._warn_of_file(error)

    def _warn_of_file(self, error: OSError) -> None:
        if not self._warned:
            self._warned = True
            with contextlib.suppress(Exception):
                self._say(f"warning: metrics.jsonl cannot be written: {error.strerror}. Training goes on.")

    def _measure(self) -> None:
        try:
            found = metrics_of(measure_run(self._folder, only_process=jax.process_index()).report)
            self.amend(found)
            for step, values in found.items():
                if self._sinks:
                    self._sinks.put({"step": step, **values})
        except BaseException as error:
            with contextlib.suppress(Exception):
                self._say(f"warning: the capture could not be measured: {describe_error(error)}. Training goes on.")


def _is_a_failure(error: BaseException | None) -> bool:
    """Whether an exception is more than a signal that the run has honoured (KeyboardInterrupt, Preempted)."""
    return isinstance(error, Exception) and getattr(error, "exit_code", None) != PREEMPTED


def metrics_of(report: Report) -> dict[int, dict[str, float]]:
    """Step -> its measured metrics: `exposed_s`, `overlapped_share` of communication, and what a GPU sent by link."""
    sent = {
        f"bytes_{link}": float(sum(getattr(row, f"wire_bytes_{link}") or 0 for row in report.communication))
        for link in ("nvlink", "infiniband")
    }
    found = {}
    for sample in report.per_step or ():
        share = {"overlapped_share": sample.overlapped_s / sample.communication_s} if sample.communication_s else {}
        found[sample.step] = {"exposed_s": sample.exposed_s, **share, **sent}
    return found
