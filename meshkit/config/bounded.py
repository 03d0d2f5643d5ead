"""Reading what somebody else made, within bounds: sizes, text, numbers, compressed data, names that lead elsewhere.

A capture, a bundle, a topology or a checkpoint travels between machines and people. Under any of their names there may
be a pipe that nobody writes to, or a device without an end: regular files are read, and nothing else.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path

from meshkit.errors import ConfigError, TraceError

LARGEST_FILE_BYTES = 4 * 2**20
_PIECE_BYTES = 33 * 2**20
_SHORT_INTEGER = re.compile(r"[0-9]{1,12}", re.ASCII)
DEEPEST_KEY = 32
_KEY_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+"""
_DEEP_KEY = re.compile(rf"""(?<![A-Za-z0-9_."'-])(?:{_KEY_PART}\.[ \t]*+){{{DEEPEST_KEY}}}""")
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """A file opened to read. Waits for nobody: a pipe is refused, also one that was put there a moment ago.

    Raises:
        OSError: it cannot be opened, or is no regular file.
        ValueError: a NUL byte in the path.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        reason = f"it is {_KINDS.get(kind, 'something else')}, not a regular file"
        number = errno.EISDIR if kind == stat.S_IFDIR else errno.ENXIO
        raise OSError(number, reason, os.fspath(path))
    return open(descriptor, "rb")


def read_regular(path: str | os.PathLike[str], largest: int = LARGEST_FILE_BYTES) -> bytes:
    """The bytes of a regular file that is not larger than `largest`; no more than that is ever read.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
        ValueError: a NUL byte in the path.
    """
    with open_regular(path) as file:
        data = file.read(largest + 1) if os.fstat(file.fileno()).st_size <= largest else b""
        if len(data) > largest or os.fstat(file.fileno()).st_size > largest:
            raise OSError(errno.EFBIG, f"it is larger than {largest / 2**20:g} MiB", os.fspath(path))
    return data


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes a file, which may be there. Waits for nobody: a pipe in its place that nobody reads is refused.

    Raises:
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def find_deep_key(toml: str) -> int | None:
    """The line of the first dotted key of more than 32 parts: parsing one takes memory by the square of its length."""
    found = _DEEP_KEY.search(toml)
    return toml.count("\n", 0, found.start()) + 1 if found else None


def read_bounded(path: Path, what: str, largest: int = LARGEST_FILE_BYTES) -> bytes:
    """The bytes of a file that is not larger than `largest`.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
        TraceError: it is too large to be what it should be.
    """
    try:
        if path.is_dir():
            raise ConfigError(f"the {what} is a folder.", at=str(path), hint=f"the {what} in it")
        with open_regular(path) as file:
            data = file.read(largest + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no such {what}.", at=str(path), hint="a path that exists") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the {what} cannot be read: {reason}.", at=str(path), hint="a readable file") from None
    if len(data) > largest:
        raise TraceError(
            f"the {what} is larger than {largest // 2**20} MiB.", at=str(path), hint=f"a {what}: a few pages of text"
        )
    return data


def decode(data: bytes, what: str, at: str) -> str:
    """UTF-8 text.

    Raises:
        TraceError: it is something else.
    """
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise TraceError(
            f"the {what} is not UTF-8 text (byte 0x{data[error.start]:02x}).", at=f"{at}:{line}", hint="a text file"
        ) from None


def integer(text: str | None) -> int | None:
    """A non-negative integer of plain digits; None for anything else, such as `N/A`, or nothing."""
    text = (text or "").strip()
    return int(text) if _SHORT_INTEGER.fullmatch(text) else None


def short(text: str, length: int = 60) -> str:
    """A piece of a file, printable and on one line, for an error message."""
    line = "".join(char if char.isprintable() else " " for char in text).strip()
    return line if len(line) <= length else line[: length - 3] + "..."


def gunzip(data: bytes, most_bytes: int) -> bytes:
    """The content of gzip data (all of its members).

    Raises:
        ValueError: it is damaged or incomplete, or has more than `most_bytes`; no more than that is ever unpacked.
    """
    return b"".join(unpacked(io.BytesIO(data), most_bytes))


def unpacked(packed: io.BufferedReader | io.BytesIO, most_bytes: int) -> Iterator[bytes]:
    """`gunzip` in pieces, each so large that its memory goes back to the system with it.

    Raises:
        ValueError: as of `gunzip`.
    """
    left = most_bytes + 1
    try:
        with gzip.GzipFile(fileobj=packed) as file:
            while piece := file.read(min(left, _PIECE_BYTES)):
                if (left := left - len(piece)) == 0:
                    raise ValueError(f"it unpacks to more than {most_bytes / 2**20:g} MiB")
                yield piece
    except EOFError:
        raise ValueError("it ends before its content does") from None
    except (OSError, zlib.error) as error:
        raise ValueError(f"it is no gzip data: {error}") from None


def inside(folder: Path, name: str) -> Path | None:
    """The path of a file that a document in a folder names; None where it leads out of it, by `..`, `/` or a link."""
    if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        return None
    path = folder / name
    home = os.path.realpath(folder)
    return path if os.path.realpath(path).startswith(home.rstrip(os.sep) + os.sep) else None
