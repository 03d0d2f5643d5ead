"""`metrics.jsonl`: one JSON object a step, and never a broken or repeated one."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from meshkit.config.bounded import open_regular

LARGEST = 1e40  # no quantity of a run is near it
_LONGEST_LINE, _LONGEST_INTEGER, _LARGEST_BYTES = 2**20, 18, 2**30


class MetricsLog:
    """Appends to a run's metrics.jsonl.

    Opening it drops what an earlier attempt wrote after `resumed_step` (those steps will be done again), and a last
    line that a crash cut short. The file is replaced as a whole, so that a crash while opening loses nothing either.

    Args:
        path: the file; made if missing. None writes nothing: of several processes one keeps the log.
        resumed_step: the last step whose line is kept.
    """

    def __init__(self, path: Path | None, resumed_step: int):
        self._path = path
        self._file: TextIO | None = None
        self._lock = threading.Lock()  # a capture is measured in another thread, which then amends its steps
        if path is None:
            return
        self._replace([r for r in read_metrics(path) if r["step"] <= resumed_step])

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds one line. JSON has no NaN: a number that is not finite is written as null."""
        with self._lock:
            if self._file:
                self._file.write(_line(record))

    def amend(self, values: Mapping[int, Mapping[str, Any]]) -> None:
        """Adds to the lines of steps that were written before; a step without a line gets one.

        Args:
            values: step -> what is known of it now.
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
        """Writes the file anew, as a whole or not at all, and opens it to append."""
        assert self._path is not None
        partial = self._path.with_suffix(".tmp")
        partial.write_text("".join(map(_line, records)))
        os.replace(partial, self._path)
        old, self._file = self._file, open(self._path, "a", buffering=1)  # noqa: SIM115  (closed by close)
        if old:
            old.close()

    def close(self) -> None:
        """Flushes to disk."""
        with self._lock:
            if self._file:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._file = None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps({k: finite(v) for k, v in record.items()}) + "\n"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The complete records of a metrics.jsonl; empty for no file. A line cut short by a crash is left out.

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
    """The lines of a file; one of more than a mebibyte, which no record is, in pieces."""
    if not path.exists():
        return
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > _LARGEST_BYTES:
            raise OSError(errno.EFBIG, f"it is larger than {_LARGEST_BYTES / 2**30:g} GiB", str(path))
        while line := file.readline(_LONGEST_LINE):
            yield line.decode(errors="replace")


def _float(text: str) -> float | None:
    """A number of a record; None for one that sums and ratios could not hold."""
    return within(float(text))


def _int(text: str) -> int | None:
    return int(text) if len(text) <= _LONGEST_INTEGER else None


_DECODER = json.JSONDecoder(parse_float=_float, parse_int=_int, parse_constant=lambda _: None)


def within(number: float | None) -> float | None:
    """The number, or None for one that is not finite, or so large that its sums and ratios may not be."""
    return number if number is not None and abs(number) <= LARGEST else None


def finite(value: Any) -> Any:
    """The value, or None for a number that JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
