"""Handle the parts of one attempt outside its loop: experiment file, progress, metrics, captures, and signals.

    record of a step -> a progress bar | metrics.jsonl, TensorBoard, the user's function
    capture -> read in a thread of its own -> metrics of the captured steps -> metrics.jsonl, TensorBoard, ...

A trace is read after its steps have been recorded, so their lines in metrics.jsonl are amended. It is the trace of this
process, so the numbers are those of its devices; `meshkit profile` reads the traces of all processes. A failure to read
a trace or to write a metric does not stop training.

Before the first step, SIGINT and SIGTERM end the process at once. After that, they end the run between two steps:

    SIGTERM in start, compile, restore -> exit 75 now: nothing has been made since the last checkpoint
    SIGTERM in the training loop       -> all processes stop after the same step, save, exit 75

All processes of a job must stop after the same step, whichever of them gets the signal: a process that goes on would
wait for the others in a collective forever. They agree on the step by jax's preemption service
(`reached_preemption_sync_point`). The service takes SIGTERM as its notice. So it handles this signal from the first
step on, and SIGINT is turned into SIGTERM. Before the first step the service is off, because it would act on a notice
only after compilation, which may take minutes.
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
from meshkit.errors import DRAINED, INTERRUPTED, PREEMPTED, ConfigError, RunError
from meshkit.report.schema import Report
from meshkit.runs.metrics import MetricsLog, SinkCode, open_sinks, read_metrics
from meshkit.runs.phases import PULSE_VARIABLE
from meshkit.step.train_step import make_schedule
from meshkit.units import format_count, format_percent
from meshkit.verbs.profile.live import describe_overlap
from meshkit.verbs.profile.profiler import measure_run

_SERVICE = "jax_enable_preemption_service"
_EXPERIMENT_FILE = "experiment.toml"
# Keys that must not change during a run: they define its arrays, its objective, and the order of its data.
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
# Seconds that a run waits at its end for the measurement of a capture, and for its sinks.
MEASURE_S, _SINKS_S = 30.0, 5.0
_LINES_WITHOUT_TERMINAL = 10


def check_experiment_file(experiment: Experiment, folder: Path) -> list[str]:
    """Return the differences from the experiment file in the run folder, one sentence per key; none for a new run.

    Args:
        experiment: the experiment of this attempt.
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
    """Describe how a new number of steps changes the learning rates; [] if the schedule does not depend on it.

    Args:
        experiment: the experiment of this attempt.
        records: the records of the steps that were made.
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
        text += f"; a run of {steps} steps would have had {there} there, and other rates from step {first} on"
    return [text]


def write_experiment_file(experiment: Experiment, folder: Path) -> None:
    """Write the resolved experiment into the run folder, atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0:
        partial = folder / f"{_EXPERIMENT_FILE}.tmp"
        partial.write_text(experiment.to_toml())
        os.replace(partial, folder / _EXPERIMENT_FILE)


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return `{"train": {"seed": 0}}` as `{"train.seed": 0}`."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


class StepProgress:
    """A progress bar, or about ten plain lines if the console is not a terminal.

    Args:
        console: the console to print to.
        steps: the number of steps of the whole run.
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
        self._told: int | None = None  # the last captured step for which a line was printed

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._enabled:
            self._console.print(text, highlight=False, markup=False)  # a path or a message may hold brackets

    def start(self, step: int) -> None:
        """Set the bar to the step from which the run resumes."""
        if self._bar and self._task is not None:
            self._bar.reset(self._task, total=self._steps, completed=step, numbers="first step")

    def tell_capture(self, record: Mapping[str, Any]) -> None:
        """Print a line on the last captured step, once for each captured step.

        Args:
            record: a step's record. After a capture was read it has `captured_step`, `exposed_share` and, if a device
                is late, `late_device` and `late_share`.
        """
        step = record.get("captured_step")
        if step is None or step == self._told:
            return
        self._told = step
        self.say(
            describe_overlap(step, record["exposed_share"], record.get("late_device"), record.get("late_share", 0.0))
        )

    def update(self, record: Mapping[str, Any]) -> None:
        """Show a step's record.

        Args:
            record: `step`, `loss`, `tokens_per_s` or `examples_per_s`, and if they are known `mfu` (a share) and
                `evaluation_loss`, as in metrics.jsonl.
        """
        step, mfu = record["step"], record.get("mfu")
        what = "tokens" if "tokens_per_s" in record else "examples"
        numbers = f"loss {record['loss']:.4f}  {format_count(record[f'{what}_per_s'])}{what}/s"
        numbers += f"  MFU {format_percent(mfu)}" if mfu is not None else ""  # None if the peak is not known
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=step, numbers=numbers)
        elif step == 1 or step == self._steps or step % max(1, self._steps // _LINES_WITHOUT_TERMINAL) == 0:
            self.say(f"step {step}/{self._steps}  {numbers}")
        if "evaluation_loss" in record:
            self.say(f"step {step}: held-out loss {record['evaluation_loss']:.4f}")


class RunLog(MetricsLog):
    """The metrics of a run. Process 0 writes them; in other processes the methods do nothing.

    Args:
        sinks: the code for the sinks of `train.metrics` and `train.tensorboard`.
        folder: the run folder.
        resumed_step: the last step whose line is kept.
        say: prints one line.

    Raises:
        ConfigError: a sink cannot be opened.
    """

    def __init__(self, sinks: SinkCode, folder: Path, resumed_step: int, say: Callable[[str], None]):
        self._first = jax.process_index() == 0
        self._folder, self._say = folder, say
        self.measuring: threading.Thread | None = None
        self._warned = False
        self._sinks = open_sinks(sinks, folder, say) if self._first else None
        super().__init__(folder / "metrics.jsonl" if self._first else None, resumed_step)

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one step. A full or missing disk causes only a warning, because checkpoints may be saved anyway."""
        try:
            super().write(record)
        except OSError as error:
            self._warn_of_file(error)
        if self._sinks:
            self._sinks.put(record)

    def measure_capture(self) -> None:
        """Start a thread that measures the capture which has just ended; return at once."""
        if self._first:
            self.measuring = threading.Thread(target=self._measure, name="meshkit-capture", daemon=True)
            self.measuring.start()

    def close(self) -> None:
        """Wait a limited time for a running measurement and for the sinks, and flush the file to disk.

        In a failed process of a job with several processes this does not wait, because the others wait for its end.
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
    """Return whether an exception is a failure, not the end after a signal (KeyboardInterrupt, Preempted)."""
    return isinstance(error, Exception) and getattr(error, "exit_code", None) != PREEMPTED


def metrics_of(report: Report) -> dict[int, dict[str, float]]:
    """Return {step: metrics}: `exposed_s`, `overlapped_share` of communication, and the bytes sent per GPU and link.

    Args:
        report: a measured report. Seconds and shares are of the captured step itself; bytes are the mean of all steps.
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
    """Raised after SIGTERM, when everything is saved. The same command resumes the run."""

    exit_code = PREEMPTED


class Drained(RunError):
    """Raised where a spare is to replace this host, after a snapshot that all processes have."""

    exit_code = DRAINED


class StopRequest:
    """Handle SIGINT and SIGTERM during a run. A context manager. Before `arm` a signal ends the process.

    After `arm` the first signal only sets a flag, and a second SIGINT interrupts at once. Outside the main thread this
    handles no signals, because Python allows no signal handlers there.
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
        """Whether a signal was received."""
        return self._signal is not None

    def arm(self) -> None:
        """Handle signals between steps from now on, because there is a state to save. All processes must call this."""
        self._several = jax.process_count() > 1
        self._armed = True
        self._stop_waking()
        if self._several:
            _start_preemption_service()
            if self.requested:  # a signal came just before the service started
                os.kill(os.getpid(), signal.SIGTERM)

    def agreed(self, first: int, last: int) -> bool:
        """Return whether the job stops after this call of the step. The answer is the same on all processes.

        Args:
            first, last: the training steps of the call. All processes must ask about every call, in order.
        """
        if not self._several:
            return self.requested
        # Ask about every step of the call, since the processes may have agreed on any of them.
        reached = [multihost_utils.reached_preemption_sync_point(step) for step in range(first, last + 1)]
        if any(reached) and self._signal is None:
            self._signal = signal.SIGTERM
        return any(reached)

    @property
    def preempted(self) -> bool:
        """Whether the received signal was SIGTERM."""
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
            if number == signal.SIGINT or not (self._several and self._armed):  # else jax's handler stays
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
        """Start a thread that gets signals at once. Handlers run in the main thread, which may be compiling in XLA."""
        self._wakes = reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._leave_at_once, args=(reader,), name="meshkit-signals", daemon=True).start()

    def _stop_waking(self) -> None:
        if self._wakes is not None:
            signal.set_wakeup_fd(-1)
            self._wakes[1].close()  # ends the thread
            self._wakes = None

    def _leave_at_once(self, reader: socket.socket) -> None:
        """End this process if a signal comes before the first step; Python's normal exit would wait for the others."""
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
    """Enable jax's preemption service, and start it as `jax.distributed.initialize` does, unless it runs already."""
    jax.config.update(_SERVICE, True)
    if jax_runtime().preemption_sync_manager is None:
        jax_runtime().initialize_preemption_sync_manager()
