"""Where a run's metrics go besides metrics.jsonl: TensorBoard, and the user's own function.

A sink never stops or slows training: it runs in a thread of its own behind a queue of bounded length. What it raises is
said once; what comes while its queue is full is dropped and counted.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshkit.config.experiment import Experiment
from meshkit.config.user_code import describe_error, load_function
from meshkit.errors import ConfigError

TENSORBOARD_FOLDER = "tensorboard"
Record = dict[str, Any]
_CAPACITY = 1024  # records: minutes of steps; beyond it a sink is too slow to wait for


class Sink:
    """A function that is called with every record, in a thread of its own.

    Args:
        name: what messages call it.
        write: called with a copy of each record, in order.
        say: prints one line.
        finish: called at the end, in the same thread.
        capacity: records that may wait.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Record], Any],
        say: Callable[[str], None],
        *,
        finish: Callable[[], Any] | None = None,
        capacity: int = _CAPACITY,
    ):
        self.name, self._write, self._finish, self._say = name, write, finish, say
        self._queue: queue.Queue[Record | None] = queue.Queue(capacity)
        self._warned = False
        self.failed = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"meshkit-{name}", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Hands over a record; returns at once."""
        try:
            self._queue.put_nowait(dict(record))
        except queue.Full:
            self.dropped += 1
            self._warn(f"is slower than training: records are dropped while {self._queue.maxsize} wait")

    def close(self, timeout_s: float) -> None:
        """Waits for what is in the queue, at most this long, and says what was lost."""
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.put(None, timeout=0.05)  # the end
                break
            except queue.Full:
                continue
        self._thread.join(max(0.0, deadline - time.monotonic()))
        waiting = self._queue.qsize() if self._thread.is_alive() else 0
        lost = {"failed": self.failed, "dropped": self.dropped, "left behind": waiting}
        if any(lost.values()):
            counts = ", ".join(f"{n} {what}" for what, n in lost.items() if n)
            self._tell(f"records that did not reach {self.name}: {counts}")

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            self._call(self._write, record)
        if self._finish is not None:
            self._call(self._finish)

    def _call(self, function: Callable[..., Any], *args: Record) -> None:
        try:
            function(*args)
        except BaseException as error:  # also SystemExit: a sink may not end the run
            self.failed += 1
            self._warn(f"raised {describe_error(error)}")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._tell(f"{self.name} {what}. Training goes on; this is said once.")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(Exception):  # a closed terminal is no reason to stop either
            self._say(f"warning: {text}")


class Sinks:
    """All sinks of a run."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = tuple(sinks)

    def put(self, record: Mapping[str, Any]) -> None:
        """Hands a record to each; returns at once."""
        for sink in self._sinks:
            sink.put(record)

    def close(self, timeout_s: float = 10.0) -> None:
        """Waits for all of them, at most this long together."""
        deadline = time.monotonic() + timeout_s
        for sink in self._sinks:
            sink.close(max(0.1, deadline - time.monotonic()))


def open_sinks(experiment: Experiment, folder: Path, say: Callable[[str], None]) -> Sinks:
    """The sinks that an experiment asks for: `train.tensorboard` and `train.metrics`.

    Raises:
        ConfigError: a function that does not exist, or no TensorBoard where it is asked for: before the first step.
    """
    write, writer_type = _find(experiment)
    sinks = []
    if writer_type is not None:
        board = _TensorBoard(writer_type, folder / TENSORBOARD_FOLDER)
        sinks.append(Sink("TensorBoard", board.write, say, finish=board.close))
    if write is not None:
        finish = getattr(write, "close", None)
        sinks.append(Sink(f"train.metrics ({experiment.train.metrics})", write, say, finish=finish))
    return Sinks(sinks)


def check_sinks(experiment: Experiment) -> None:
    """Finds out whether the sinks can be opened, before anything expensive begins.

    Raises:
        ConfigError: a function that does not exist, or no TensorBoard where it is asked for.
    """
    _find(experiment)


def _find(experiment: Experiment) -> tuple[Callable[[Record], Any] | None, Any]:
    """The user's function, and TensorBoard's type of a writer; None for what is not asked for."""
    name, found, writer_type = experiment.train.metrics, None, None
    if name:
        found = load_function(experiment, "train.metrics", name)
    if experiment.train.tensorboard:
        try:
            from tensorboard.summary import Writer as writer_type  # pyright: ignore[reportMissingImports]  the extra
        except ImportError:
            raise experiment.error(
                "train.tensorboard",
                "train.tensorboard asks for TensorBoard, which is not installed.",
                hint="pip install 'meshkit[tensorboard]'",
            ) from None
    return found, writer_type


class _TensorBoard:
    """Scalars in TensorBoard's event files; on disk every ten seconds, where a reader looks for them."""

    _FLUSH_S = 10.0

    def __init__(self, writer_type: Any, folder: Path):
        try:
            self._writer = writer_type(str(folder))
        except OSError as e:
            raise ConfigError(f"{folder} cannot be written: {e.strerror}.") from None
        self._flushed = time.monotonic()

    def write(self, record: Record) -> None:
        for name, value in record.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                self._writer.add_scalar(name, float(value), int(record["step"]))
        if time.monotonic() - self._flushed > self._FLUSH_S:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        self._writer.close()
