"""Write a run's metrics to sinks and to `metrics.jsonl`, which has one JSON object per step, none broken or repeated.

A sink (TensorBoard or the user's own function) never stops or slows training: it runs in a thread of its own, which
reads from a queue of bounded length. Only the first problem of a sink is printed. Records that come while its queue is
full are dropped and counted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from meshkit.config.files import open_regular
from meshkit.config.places import Places, UserCode, describe_error
from meshkit.errors import ConfigError

LARGEST = 1e40  # larger than any quantity of a run
_LONGEST_LINE, _LONGEST_INTEGER, _LARGEST_BYTES = 2**20, 18, 2**30
TENSORBOARD_FOLDER = "tensorboard"
Record = dict[str, Any]
CAPACITY = 1024  # records, which are some minutes of steps


class MetricsLog:
    """Append to a run's metrics.jsonl.

    Opening the log drops the lines after `resumed_step`, whose steps will be made again, and a last line that a crash
    cut short. The file is replaced as a whole, so that a crash during this loses nothing.

    Args:
        path: the file; made if missing. None writes nothing. Only one process of a job keeps the log.
        resumed_step: the last step whose line is kept.

    Raises:
        OSError: the file cannot be read or replaced.
    """

    def __init__(self, path: Path | None, resumed_step: int):
        self._path = path
        self._file: TextIO | None = None
        self._lock = threading.Lock()  # the thread that measures a capture calls `amend`
        if path is None:
            return
        self._replace([r for r in read_metrics(path) if r["step"] <= resumed_step])

    def write(self, record: Mapping[str, Any]) -> None:
        """Add one line. A number that is not finite is written as null, because JSON has no NaN."""
        with self._lock:
            if self._file:
                self._file.write(_line(record))

    def amend(self, values: Mapping[int, Mapping[str, Any]]) -> None:
        """Add values to lines that were written before; a step without a line gets one.

        Args:
            values: step -> its additional values.
        """
        with self._lock:
            if self._file is None or self._path is None:
                return
            self._file.flush()
            records = {r["step"]: r for r in read_metrics(self._path)}
            for step, more in values.items():
                records[step] = {**records.get(step, {"step": step}), **more}
            self._replace([records[step] for step in sorted(records)])

    def _replace(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replace the file atomically, and open it to append."""
        assert self._path is not None
        partial = self._path.with_suffix(".tmp")
        partial.write_text("".join(map(_line, records)))
        os.replace(partial, self._path)
        old, self._file = self._file, open(self._path, "a", buffering=1)  # noqa: SIM115  (closed by close)
        if old:
            old.close()

    def close(self) -> None:
        """Flush the file to disk, and close it."""
        with self._lock:
            if self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._file = None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({k: finite(v) for k, v in record.items()}) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the complete records of a metrics.jsonl, without a line that a crash cut short; [] if there is no file.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than a gibibyte.
    """
    records = []
    for line in _lines(path):
        if not line.startswith("{"):
            continue
        try:
            record = _DECODER.decode(line)
        except (ValueError, RecursionError):
            continue
        step = record.get("step") if isinstance(record, dict) else None
        if isinstance(step, int) and not isinstance(step, bool):
            records.append(record)
    return records


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file; a line of more than a mebibyte, which is no record, comes in pieces."""
    if not path.exists():
        return
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
            raise OSError(errno.EFBIG, f"it is larger than {_LARGEST_BYTES / 2**30:g} GiB", str(path))
        while line := file.readline(_LONGEST_LINE):
            yield line.decode(errors="replace")


def _float(text: str) -> float | None:
    """Return a number of a record; None if it is too large, see `within`."""
    return within(float(text))


def _int(text: str) -> int | None:
    return int(text) if len(text) <= _LONGEST_INTEGER else None


_DECODER = json.JSONDecoder(parse_float=_float, parse_int=_int, parse_constant=lambda _: None)


def within(number: float | None) -> float | None:
    """Return the number, or None if it is not finite, or so large that its sums and ratios may not be finite."""
    return number if number is not None and abs(number) <= LARGEST else None


def finite(value: Any) -> Any:
    """Return the value, or None for a number that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Sink:
    """Call a function with every record, in a thread of its own.

    Args:
        name: the name of the sink in messages.
        write: the function, called with a copy of each record, in order.
        say: prints one line.
        finish: called at the end, in the same thread.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[Record], Any],
        say: Callable[[str], None],
        *,
        finish: Callable[[], Any] | None = None,
    ):
        self.name, self._write, self._finish, self._say = name, write, finish, say
        self._queue: queue.Queue[Record | None] = queue.Queue(CAPACITY)
        self._warned = False
        self.failed = self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"meshkit-{name}", daemon=True)
        self._thread.start()

    def put(self, record: Mapping[str, Any]) -> None:
        """Put a record into the queue; return at once."""
        try:
            self._queue.put_nowait(dict(record))
        except queue.Full:
            self.dropped += 1
            self._warn(f"is slower than training: records are dropped while {self._queue.maxsize} wait")

    def close(self, timeout_s: float) -> None:
        """Wait at most this long until the queue is empty, and print how many records were lost."""
        deadline = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._queue.put(None, timeout=0.05)  # ends the thread
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
        except BaseException as error:  # also SystemExit, because a sink must not end the run
            self.failed += 1
            self._warn(f"raised {describe_error(error)}")

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._tell(f"{self.name} {what}. Training goes on; this is reported once.")

    def _tell(self, text: str) -> None:
        with contextlib.suppress(Exception):  # a closed terminal must not end the run either
            self._say(f"warning: {text}")


class Sinks:
    """All sinks of a run."""

    def __init__(self, sinks: Sequence[Sink]):
        self._sinks = tuple(sinks)

    def put(self, record: Mapping[str, Any]) -> None:
        """Put a record into the queue of each sink; return at once."""
        for sink in self._sinks:
            sink.put(record)

    def close(self, timeout_s: float = 10.0) -> None:
        """Close all sinks, which together may take about `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        for sink in self._sinks:
            sink.close(max(0.1, deadline - time.monotonic()))


@dataclass(frozen=True)
class SinkCode:
    """The user's functions for the sinks, imported before anything expensive begins.

    Attributes:
        metrics: the function that `train.metrics` names, or None.
        tensorboard: TensorBoard's writer type, or None if `train.tensorboard` is not set.
    """

    metrics: UserCode | None = None
    tensorboard: Any = None


def tensorboard_writer(places: Places) -> Any:
    """Return TensorBoard's writer type.

    Raises:
        ConfigError: TensorBoard is not installed.
    """
    try:
        from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]  the extra
    except ImportError:
        raise places.error(
            "train.tensorboard",
            "train.tensorboard asks for TensorBoard, which is not installed.",
            hint="pip install 'meshkit[tensorboard]'",
        ) from None
    return Writer


def open_sinks(code: SinkCode, folder: Path, say: Callable[[str], None]) -> Sinks:
    """Return the sinks of a run.

    Args:
        code: the functions that the sinks call.
        folder: the run folder; TensorBoard's files are written to its subfolder `tensorboard`.
        say: prints a warning about a sink.

    Raises:
        ConfigError: TensorBoard cannot write to the folder.
    """
    sinks = []
    if code.tensorboard is not None:
        board = _TensorBoard(code.tensorboard, folder / TENSORBOARD_FOLDER)
        sinks.append(Sink("TensorBoard", board.write, say, finish=board.close))
    if code.metrics is not None:
        write = code.metrics.found
        finish = getattr(write, "close", None)
        sinks.append(Sink(f"train.metrics ({code.metrics.name})", write, say, finish=finish))
    return Sinks(sinks)


class _TensorBoard:
    """Write scalars to TensorBoard's event files, and flush them every ten seconds, so that TensorBoard shows them."""

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
