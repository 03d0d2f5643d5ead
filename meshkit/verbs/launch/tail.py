"""What a process has printed: its last lines, and the new ones while it runs."""

from __future__ import annotations

import re
from pathlib import Path

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
_MOST_BYTES = 1 << 20
_MOST_OF_A_TRACEBACK = 60
_CHATTER = "[Gloo] Rank"


class Follower:
    """Reads a log that grows, in whole lines."""

    def __init__(self, path: Path):
        self._path, self._offset, self._rest = path, 0, b""

    def new_lines(self, *, last: bool = False) -> list[str]:
        """The lines that came since the last call; with `last` also one that has no end."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            data = b""
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if last and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        return [_printable(line) for line in lines]


def last_lines(path: Path, count: int) -> list[str]:
    """The last non-empty lines of a file; none where there is no file. Reads its last mebibyte at most."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _MOST_BYTES))
            data = file.read()
    except OSError:
        return []
    lines = [_printable(line) for line in data.split(b"\n")]
    return [line for line in lines if line.strip()][-count:]


def last_words(path: Path, count: int) -> list[str]:
    """What a process that failed said last: its last traceback if it ends with one, else `count` lines."""
    lines = [line for line in last_lines(path, _MOST_OF_A_TRACEBACK) if not line.startswith(_CHATTER)]
    starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    return lines[min(starts[-1], max(0, len(lines) - count)) :] if starts else lines[-count:]


def _printable(line: bytes) -> str:
    """Without what moves a terminal's cursor; of a line that was drawn over, the last drawing."""
    text = line.decode(errors="replace").rstrip("\r")
    return _CONTROL.sub("", text.rsplit("\r", 1)[-1])
