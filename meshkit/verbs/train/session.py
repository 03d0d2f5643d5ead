"""One attempt at a run, but for its loop: its experiment file, what it says of its steps, and the signals that end it.

    record of a step -> a progress bar | metrics.jsonl, TensorBoard, the user's function
    capture -> profiler, in a thread of its own -> metrics of the captured steps -> the same

A trace is read after the steps it is of: their lines are amended. It is this process's own trace, so the numbers are of
its devices; `meshkit profile` reads those of all processes. Nothing that fails here reaches training.

SIGINT and SIGTERM are honoured at once before the first step, and between two steps from then on:

    SIGTERM in start, compile, restore -> exit 75 now: nothing has been made since the last checkpoint
    SIGTERM in the training loop       -> all processes stop after the same step, save, exit 75

Of several processes all must stop after the same step, whichever of them got the signal: one that goes on waits for
the others in a collective for ever. jax's preemption service brings them to agree (`reached_preemption_sync_point`). It
takes SIGTERM as its notice, so from the first step on this process leaves that signal to it, and turns SIGINT into one.
Before that the service is off: its notice would wait until a compilation of minutes is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshkit.config.experiment import Experiment
from meshkit.config.files import TomlDocument
from meshkit.config.places import describe_error
from meshkit.distributed.environment import read_gang
from meshkit.distributed.join import jax_runtime
from meshkit.errors import INTERRUPTED, PREEMPTED, ConfigError, RunError
from meshkit.report.schema import Report
from meshkit.runs.metrics import MetricsLog, SinkCode, open_sinks, read_metrics
from meshkit.runs.phases import PULSE_VARIABLE
from meshkit.step.train_step import make_schedule
from meshkit.units import format_count, format_percent
from meshkit.verbs.profile.live import describe_overlap
from meshkit.verbs.profile.profiler import measure_run

_SERVICE = "jax_enable_preemption_service"
_EXPERIMENT_FILE = "experiment.toml"
# What a run cannot change on the way: its arrays, its objective, and the order of its data.
_FIXED = (
    "model.",
    "data.",
    "optimizer.dtype",
    "train.global_batch",
    "train.sequence_length",
    "train.seed",
    "train.loss",
    "local_sgd.",
    "compression.",
)
# A run that ends waits this long for what is still being measured and handed on.
MEASURE_S, _SINKS_S = 30.0, 5.0
_LINES_WITHOUT_TERMINAL = 10


def check_experiment_file(experiment: Experiment, folder: Path) -> list[str]:
    """Return the differences from the run's own experiment file, one sentence a key; none for a new run.

    Args:
        experiment: as it is to run now.
        folder: the run folder.

    Raises:
        ConfigError: the file cannot be read, or a key differs that the state or the order of the data depends on.
    """
    path = folder / _EXPERIMENT_FILE
    if not path.exists():
        return []
    try:
        saved = _flat(TomlDocument.read(path, what="experiment file of this run").table)
    except ConfigError as error:
        hint = "the file that the run began with, copied there; or another --out"
        raise ConfigError(error.message, at=error.at, hint=hint) from None
    wanted = _flat(tomllib.loads(experiment.to_toml()))
    changed = [key for key in {**saved, **wanted} if saved.get(key) != wanted.get(key)]
    for key in changed:
        if key.startswith(_FIXED):
            raise ConfigError(
                f"this run has {key} = {saved.get(key)!r}, but the experiment now says {wanted.get(key)!r}.",
                at=str(path),
                hint="another --out, or the value that the run began with",
            )
    told = [f"{key} was {saved.get(key)!r} in this run and is now {wanted.get(key)!r}" for key in changed]
    if "train.steps" in changed:
        told += _changed_rates(experiment, read_metrics(folder / "metrics.jsonl"))
    return told


def _changed_rates(experiment: Experiment, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which learning rates are others now that the run has another length; none of a schedule without an end.

    Args:
        experiment: as it is to run now.
        records: of the steps that were made.
    """
    optimizer, steps = experiment.optimizer, experiment.train.steps
    last = records[-1] if records else {}
    done, rate = last.get("step", 0), last.get("learning_rate")
    if optimizer.schedule == "constant" or optimizer.class_path is not None or rate is None or done >= steps:
        return []
    schedule = make_schedule(optimizer, steps)
    there, then = (f"{np.asarray(schedule(step)):.3g}" for step in (done - 1, done))
    text = f"the {optimizer.schedule} now ends at step {steps}: step {done + 1} has a learning rate of {then}, after "
    text += f"{rate:.3g} at step {done}"
    first = min(optimizer.warmup_steps, steps) + 1
    if first <= done:
        text += f"; a run of {steps} steps would have had {there} there, and others from step {first} on"
    return [text]


def write_experiment_file(experiment: Experiment, folder: Path) -> None:
    """Writes the resolved experiment into the run folder, as a whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        partial = folder / f"{_EXPERIMENT_FILE}.tmp"
        partial.write_text(experiment.to_toml())
        os.replace(partial, folder / _EXPERIMENT_FILE)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"train": {"seed": 0}}` as `{"train.seed": 0}`."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


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
        self._told: int | None = None  # the captured step of which a line was printed last

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

    def tell_capture(self, record: Mapping[str, Any]) -> None:
        """Prints what a step's record says of the last captured step, once for each of these.

        Args:
            record: with `captured_step`, `exposed_share` and perhaps `late_device` and `late_share` once one was read.
        """
        step = record.get("captured_step")
        if step is None or step == self._told:
            return
        self._told = step
        self.say(
            describe_overlap(step, record["exposed_share"], record.get("late_device"), record.get("late_share", 0.0))
        )

    def update(self, record: Mapping[str, Any]) -> None:
        """Shows a step's record as metrics.jsonl has it.

        Args:
            record: `step`, `loss`, `tokens_per_s` or `examples_per_s`, and where they are known `mfu` (a share) and
                `evaluation_loss`.
        """
        step, mfu = record["step"], record.get("mfu")
        what = "tokens" if "tokens_per_s" in record else "examples"
        numbers = f"loss {record['loss']:.4f}  {format_count(record[f'{what}_per_s'])}{what}/s"
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
        sinks: what `train.metrics` and `train.tensorboard` ask for.
        folder: the run folder.
        resumed_step: the last step whose line is kept.
        say: prints one line.

    Raises:
        ConfigError: a sink that cannot be opened.
    """

    def __init__(self, sinks: SinkCode, folder: Path, resumed_step: int, say: Callable[[str], None]):
        self._first = jax.process_index() == 0
        self._folder, self._say = folder, say
        self.measuring: threading.Thread | None = None
        self._warned = False
        self._sinks = open_sinks(sinks, folder, say) if self._first else None
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
            self.measuring = threading.Thread(target=self._measure, name="meshkit-capture", daemon=True)
            self.measuring.start()

    def close(self) -> None:
        """Waits for what is on its way, but not for long, and flushes to disk.

        After a failure of one of several processes it does not wait: the others wait for that one to be gone.
        """
        hurries = jax.process_count() > 1 and _is_a_failure(sys.exception())
        if self.measuring:
            self.measuring.join(0 if hurries else MEASURE_S)
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
    """Return whether an exception is more than a signal that the run has honoured (KeyboardInterrupt, Preempted)."""
    return isinstance(error, Exception) and getattr(error, "exit_code", None) != PREEMPTED


def metrics_of(report: Report) -> dict[int, dict[str, float]]:
    """Step -> its measured metrics: `exposed_s`, `overlapped_share` of communication, and what a GPU sent by link.

    Args:
        report: measured. Seconds and shares are of each captured step; bytes are the mean of a step, the same for all.
    """
    sent = {
        f"bytes_{link}": float(sum(getattr(row, f"wire_bytes_{link}") or 0 for row in report.communication))
        for link in ("nvlink", "infiniband")
    }
    found = {}
    for sample in report.per_step or ():
        share = {"overlapped_share": sample.overlapped_s / sample.communication_s} if sample.communication_s else {}
        found[sample.step] = {"exposed_s": sample.exposed_s, **share, **sent}
    return found


class Preempted(RunError):
    """The run got SIGTERM and has saved what there was to save; the same command resumes it."""

    exit_code = PREEMPTED


class StopRequest:
    """A context around a run. Until `arm`, a signal ends it; after that the first one only sets a flag.

    A second SIGINT interrupts at once. Outside of the main thread, where Python allows no handlers, it never asks to
    stop.
    """

    def __init__(self):
        self._signal: int | None = None
        self._armed = False
        self._before: dict[int, Any] = {}
        gang = read_gang()
        self._several = gang is not None and gang.num_processes > 1
        self._supervised = self._several or PULSE_VARIABLE in os.environ
        self._wakes: tuple[socket.socket, socket.socket] | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    def arm(self) -> None:
        """The training loop begins: from now on there is something to save. All processes call it."""
        self._several = jax.process_count() > 1
        self._armed = True
        self._stop_waking()
        if self._several:
            _start_preemption_service()
            if self.requested:  # in the moment before
                os.kill(os.getpid(), signal.SIGTERM)

    def agreed(self, first: int, last: int) -> bool:
        """Return whether the job stops after this call of the step: the same answer on all processes.

        Args:
            first, last: the training steps of the call. All processes ask about every call, in order.
        """
        if not self._several:
            return self.requested
        # Every number is asked about, since the agreed one may be any of them.
        reached = [multihost_utils.reached_preemption_sync_point(step) for step in range(first, last + 1)]
        if any(reached) and self._signal is None:
            self._signal = signal.SIGTERM
        return any(reached)

    @property
    def preempted(self) -> bool:
        """Whether it was SIGTERM."""
        return self._signal == signal.SIGTERM

    def __enter__(self) -> Self:
        if self._several:
            jax.config.update(_SERVICE, False)
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._receive) for s in (signal.SIGINT, signal.SIGTERM)}
            if self._supervised:
                self._start_waking()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_waking()
        for number, handler in self._before.items():
            if number == signal.SIGINT or not (self._several and self._armed):  # jax's handler stays
                signal.signal(number, handler)
        if self._several:
            jax.config.update(_SERVICE, True)

    def _receive(self, number: int, _frame: object) -> None:
        if not self._armed:
            if self._supervised:  # the other thread ends this process
                return
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise Preempted("stopped by SIGTERM before the first step; the last checkpoint, if any, has everything.")
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
        if self._several and number == signal.SIGINT:
            os.kill(os.getpid(), signal.SIGTERM)

    def _start_waking(self) -> None:
        """Signals reach a thread at once; the main one takes them in only when XLA has compiled."""
        self._wakes = reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._leave_at_once, args=(reader,), name="meshkit-signals", daemon=True).start()

    def _stop_waking(self) -> None:
        if self._wakes is not None:
            signal.set_wakeup_fd(-1)
            self._wakes[1].close()  # which ends the thread
            self._wakes = None

    def _leave_at_once(self, reader: socket.socket) -> None:
        """Ends this process when a signal comes before the first step. Python's own way out waits for the others."""
        with reader:
            while data := reader.recv(64):
                number = next((n for n in data if n in (signal.SIGINT, signal.SIGTERM)), None)
                if number is None or self._armed:
                    continue
                with contextlib.suppress(OSError, ValueError):
                    name = signal.Signals(number).name
                    print(f"meshkit: stopped by {name} before the first step: nothing to save.", file=sys.stderr)
                    sys.stderr.flush()
                os._exit(PREEMPTED if number == signal.SIGTERM else INTERRUPTED)


def _start_preemption_service() -> None:
    """Start jax's preemption service as `jax.distributed.initialize` does, unless it runs or is off."""
    jax.config.update(_SERVICE, True)
    if jax_runtime().preemption_sync_manager is None:
        jax_runtime().initialize_preemption_sync_manager()
