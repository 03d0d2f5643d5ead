"""Read files up to a size limit, and TOML files with the position of each key."""

from __future__ import annotations

import copy
import errno
import gzip
import io
import lzma
import os
import re
import stat
import tomllib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshkit.config.toml import (
    FUNCTION_PATTERN,
    Key,
    SpecError,
    did_you_mean,
    dotted,
    find_duplicate,
    kind,
    locate,
    split_key,
)
from meshkit.errors import ConfigError, MeshkitError, TraceError

LARGEST_FILE_BYTES = 4 * 2**20
PIECE_BYTES = 33 * 2**20
# Programs and traces unpack to some 5 to 20 times their size, a decompression bomb to 1000 times.
MOST_TIMES = 100
LEAST_ROOM_BYTES = 64 * 2**20  # Any file may unpack to this size, however small it is.
_XZ_MEMORY_BYTES = 256 * 2**20  # xz -9 takes 65 MiB
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
STDLIB_SOURCE = "python-stdlib"
# The keys of an experiment whose value may be a path. A cluster may also be a name. A data source may also be a
# function or `python-stdlib`.
PATH_KEYS: tuple[Key, ...] = (
    ("cluster",),
    ("cluster", "file"),
    ("cluster", "calibration"),
    ("checkpoint", "initial"),
    ("data", "source"),
)
_TOML_POSITION = re.compile(r"^(.*?) \(at (?:line (\d+), column (\d+)|end of document)\)$", re.DOTALL)
_LONGEST_VALUE = 80
_LARGEST_DOCUMENT_BYTES = 2**20  # The parser takes seconds for this size; nobody writes more by hand.
_REMOVED = object()
_STARTS_A_STRUCTURE = ("[", "{", '"', "'")


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file to read; a pipe raises an error instead of blocking.

    Raises:
        OSError: the file cannot be opened, or is not a regular file.
        ValueError: the path has a NUL byte.
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
    """Return the bytes of a regular file that has at most `largest` bytes; a larger file is never read whole.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger.
        ValueError: the path has a NUL byte.
    """
    with open_regular(path) as file:
        data = file.read(largest + 1) if os.fstat(file.fileno()).st_size <= largest else b""
        if len(data) > largest or os.fstat(file.fileno()).st_size > largest:
            raise OSError(errno.EFBIG, f"it is larger than {largest / 2**20:g} MiB", os.fspath(path))
    return data


def write_file(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Create or overwrite a file; a pipe that has no reader raises an error instead of blocking.

    Raises:
        OSError: the file cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    os.set_blocking(descriptor, True)
    with open(descriptor, "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)


def find_deep_key(toml: str) -> int | None:
    """Return the line of the first dotted key with over 32 parts; parsing takes memory quadratic in its length."""
    found = _DEEP_KEY.search(toml)
    return toml.count("\n", 0, found.start()) + 1 if found else None


def read_bounded(
    path: str | os.PathLike[str],
    what: str,
    largest: int = LARGEST_FILE_BYTES,
    unfit: type[MeshkitError] = TraceError,
) -> bytes:
    """Return the bytes of a file that is not larger than `largest`.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
        TraceError: the file is too large; `unfit` replaces this class of error.
    """
    at = os.fspath(path)
    try:
        if os.path.isdir(path):
            raise ConfigError(f"the {what} is a folder.", at=at, hint=f"the {what} in it")
        with open_regular(path) as file:
            data = file.read(largest + 1)
    except FileNotFoundError:
        hint = "a path that exists" + (", or `meshkit new` to write one" if what.startswith("experiment") else "")
        raise ConfigError(f"there is no such {what}.", at=at, hint=hint) from None
    except (OSError, ValueError) as error:  # A NUL byte in the path raises ValueError.
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the {what} cannot be read: {reason}.", at=at, hint="a readable file") from None
    if len(data) > largest:
        hint = f"a {what}: a few pages of text"
        raise unfit(f"the {what} is larger than {largest // 2**20} MiB.", at=at, hint=hint)
    return data


def decode(data: bytes, what: str, at: str, unfit: type[MeshkitError] = TraceError) -> str:
    """Decode UTF-8 text, and replace CR LF line ends by LF.

    A byte order mark is dropped. An error points at `at`, followed by the line number.

    Raises:
        TraceError: the data is not UTF-8; `unfit` replaces this class of error.
    """
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        message = f"the {what} is not UTF-8 text (byte 0x{data[error.start]:02x})."
        line = data[: error.start].count(b"\n") + 1
        raise unfit(message, at=f"{at}:{line}", hint="a text file, saved as UTF-8") from None


def integer(text: str | None) -> int | None:
    """Return a non-negative integer of at most 12 digits; None for None and for any other text, such as `N/A`."""
    text = (text or "").strip()
    return int(text) if _SHORT_INTEGER.fullmatch(text) else None


def short(text: str, length: int = 60) -> str:
    """Return a text as one printable line of limited length, for an error message."""
    line = "".join(char if char.isprintable() else " " for char in text).strip()
    return line if len(line) <= length else line[: length - 3] + "..."


def gunzip(data: bytes, most_bytes: int) -> bytes:
    """Return the content of gzip data (all of its members).

    Raises:
        ValueError: the data is damaged or incomplete, or unpacks to more than `most_bytes`, or to more than both 64 MiB
            and 100 times its size. Unpacking stops at the limit.
    """
    return b"".join(unpacked(io.BytesIO(data), most_bytes))


def unxz(data: bytes, most_bytes: int) -> bytes:
    """Return the content of xz data.

    Raises:
        ValueError: as for `gunzip`.
    """
    room = min(most_bytes, max(LEAST_ROOM_BYTES, MOST_TIMES * len(data)))
    reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY_BYTES)
    try:
        content = reader.decompress(data, room + 1)
    except lzma.LZMAError as error:
        raise ValueError(f"it is not xz data: {error}") from None
    if len(content) > room:
        raise ValueError(f"it unpacks to more than {room / 2**20:.4g} MiB")
    if not reader.eof:
        raise ValueError("it ends before its content does")
    return content


def unpacked(packed: io.BufferedReader | io.BytesIO, most_bytes: int) -> Iterator[bytes]:
    """Yield the content of gzip data in pieces, each so large that the allocator returns its memory to the system.

    Raises:
        ValueError: as for `gunzip`.
    """
    size = packed.seek(0, os.SEEK_END)
    packed.seek(0)
    room = min(most_bytes, max(LEAST_ROOM_BYTES, MOST_TIMES * size))
    left = room + 1
    try:
        with gzip.GzipFile(fileobj=packed) as file:
            while piece := file.read(min(left, PIECE_BYTES)):
                if (left := left - len(piece)) == 0:
                    beyond = "" if room == most_bytes else f", more than {MOST_TIMES} times its {size} bytes"
                    raise ValueError(f"it unpacks to more than {room / 2**20:.4g} MiB{beyond}")
                yield piece
    except EOFError:
        raise ValueError("it ends before its content does") from None
    except (OSError, zlib.error) as error:
        raise ValueError(f"it is not gzip data: {error}") from None


def inside(folder: Path, name: str) -> Path | None:
    """Return the path of a file that a document in `folder` names; None if `..`, `/` or a link leads out of it."""
    if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        return None
    path = folder / name
    home = os.path.realpath(folder)
    return path if os.path.realpath(path).startswith(home.rstrip(os.sep) + os.sep) else None


@dataclass(frozen=True)
class Override:
    """One `--set key=value`: the key's path and the text as the user gave it."""

    key: Key
    raw: str

    @classmethod
    def parse(cls, raw: str) -> Override:
        """Parse an override.

        Raises:
            ConfigError: the text is not `key=value`, or has no key.
        """
        key, equals, _ = raw.partition("=")
        hint = "--set mesh.tensor=8"
        if not equals:
            raise ConfigError("an override needs a key and a value.", at=f"--set {raw}", hint=hint)
        try:
            path = split_key(key.strip())
        except ValueError:
            raise ConfigError(f"'{key.strip()}' is not a key.", at=f"--set {raw}", hint=hint) from None
        if len(path) > DEEPEST_KEY or find_deep_key(raw):
            raise ConfigError(
                f"no key of an experiment has more than {DEEPEST_KEY} parts.",
                at=f"--set {short(raw)}",
                hint=hint,
            )
        return cls(path, raw)

    def value(self) -> Any:
        """Return the value parsed as TOML, or as a string if it is not TOML; `_REMOVED` if it is empty.

        Raises:
            ConfigError: the value begins like a string, list or table of TOML but is none, or is out of range.
        """
        text = self.raw.partition("=")[2].strip()
        if not text:
            return _REMOVED
        try:
            table = tomllib.loads(f"value = {text}")
            if set(table) == {"value"}:
                return table["value"]
        except tomllib.TOMLDecodeError as error:
            if text.startswith(_STARTS_A_STRUCTURE):
                problem = str(error).split(" (at ")[0]
                raise self.error(
                    f"the value of {dotted(self.key)} is not TOML: {problem[:1].lower()}{problem[1:]}.",
                    "quoting it for the shell: --set 'mesh.fsdp={ nvlink = 2, infiniband = 4 }'",
                ) from None
        except (RecursionError, ValueError):
            raise self.error(f"the value of {dotted(self.key)} is out of range.", "a smaller value") from None
        return text

    def error(self, message: str, hint: str) -> ConfigError:
        """Return an error that points at the override."""
        return ConfigError(message, at=f"--set {self.raw}", hint=hint)


@dataclass(frozen=True)
class TomlDocument:
    """A parsed TOML file."""

    path: Path
    display: str
    """The file as the user named it."""
    text: str
    """The content of the file, with LF line ends."""
    table: dict[str, Any]
    """The parsed content, with the overrides applied."""
    root: Key = ()
    """Path of the file's table in an experiment: () for an experiment, ("cluster",) for a cluster file."""
    overrides: tuple[Override, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, what: str = "experiment file", root: Key = ()) -> TomlDocument:
        """Read and parse the file at `path`.

        Raises:
            ConfigError: the file cannot be read, or is not TOML.
        """
        display = os.fspath(path)
        try:
            display.encode()
        except UnicodeEncodeError:
            message = f"the name of the {what} is not UTF-8 text, but reports contain it."
            raise ConfigError(message, at=display, hint="another name for the file or its folder") from None
        data = read_bounded(path, what, _LARGEST_DOCUMENT_BYTES, ConfigError)
        text = decode(data, what, display, ConfigError)
        return cls(Path(path).resolve(), display, text, _parse(text, display, what), root)

    def with_overrides(self, raw: Sequence[str]) -> TomlDocument:
        """Return the experiment with every `key=value` applied in order, and its paths made absolute.

        An empty value removes the key. Relative paths in an override start at the working directory, those in the file
        at the file's folder.

        Raises:
            ConfigError: an override is not `key=value`, its key cannot exist, or the key to remove is missing.
        """
        table = copy.deepcopy(absolute_paths((), self.table, self.path.parent))
        overrides = []
        for text in raw:
            override = Override.parse(text)
            value = override.value()
            if isinstance(table.get("cluster"), str) and len(override.key) > 1 and override.key[0] == "cluster":
                table["cluster"] = as_table(table["cluster"])
            _lay(table, override, absolute_paths(override.key, value, Path.cwd()))
            overrides.append(override)
        return replace(self, table=table, overrides=tuple(overrides))

    def where(self, key: Sequence[str]) -> str:
        """Return the place of a key: `file:line: key = value`, `--set key=value`, or `file: key is not set`."""
        key = tuple(key)
        override = self._override_of(key)
        if override is not None:
            return f"--set {override.raw}"
        path = key[len(self.root) :]
        for length in range(len(path), 0, -1):  # The place of an unwritten key is its table.
            position = locate(self.text, path[:length])
            if position is not None:
                statement = _statement(path[:length], position.value) + self._changes_inside(path, position.value)
                is_table = position.value is None or position.value.startswith("{")
                unset = f" ({dotted(path)} is not set)" if length < len(path) and is_table else ""
                return f"{self.display}:{position.line}: {statement}{unset}"
        return self.display if not path else f"{self.display}: {dotted(path)} is not set"

    def is_overridden(self, key: Key) -> bool:
        """Return whether an override set the key, or a table around it."""
        return any(key[: len(override.key)] == override.key for override in self.overrides)

    def locate(self, error: SpecError) -> ConfigError:
        """Return the error with a place in this document, unless it already has a place."""
        if error.located:
            return ConfigError(error.message, at=error.at, hint=error.hint)
        return ConfigError(error.message, at=self.where(error.key), hint=error.hint)

    def _override_of(self, key: Key) -> Override | None:
        """Return the last override of the key or a table around it; if the file lacks the key, also of a key in it."""
        for override in reversed(self.overrides):
            if key[: len(override.key)] == override.key:
                return override
        if locate(self.text, key[len(self.root) :]) is None:
            inside = [o for o in self.overrides if key and o.key[: len(key)] == key]
            return inside[-1] if inside else None
        return None

    def _changes_inside(self, table: Key, value: str | None) -> str:
        inside = [o.raw for o in self.overrides if o.key[: len(table)] == table] if value is None else []
        return f" with {' '.join(f'--set {raw}' for raw in inside)}" if inside else ""


def _statement(path: Key, value: str | None) -> str:
    if value is None:
        return f"[{dotted(path)}]"
    value = " ".join(value.split())
    return f"{dotted(path)} = {value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 3] + '...'}"


def _parse(text: str, display: str, what: str) -> dict[str, Any]:
    if line := find_deep_key(text):
        message = f"no key of the {what} has more than {DEEPEST_KEY} parts."
        raise ConfigError(message, at=f"{display}:{line}", hint="fewer dots")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(text, display, what, str(error)) from None
    except RecursionError:
        raise ConfigError(f"the {what} is nested too deeply.", at=display, hint="fewer brackets") from None
    except ValueError as error:  # Such as an integer of thousands of digits, or a date that does not exist.
        raise ConfigError(
            f"the {what} holds a value out of range: {error}.", at=display, hint="a smaller one"
        ) from None


def _not_toml(text: str, display: str, what: str, message: str) -> ConfigError:
    """Return an error about a text that is not TOML: a key given twice, or tomllib's message with its line."""
    duplicate = find_duplicate(text)
    if duplicate is not None:
        path, first, second = duplicate
        position = text.split("\n")[second - 1].strip()
        return ConfigError(
            f"key '{dotted(path)}' is given twice: on line {first} and on line {second}.",
            at=f"{display}:{second}: {position}",
            hint="removing one of them",
        )
    match = _TOML_POSITION.match(message)
    problem = (match.group(1) if match else message).strip()
    lines = text.rstrip("\n").split("\n")
    line = int(match.group(2)) if match and match.group(2) else len(lines)
    source = lines[line - 1].strip() if line <= len(lines) else ""
    source = source if len(source) <= _LONGEST_VALUE else source[: _LONGEST_VALUE - 3] + "..."
    return ConfigError(
        f"the {what} is not TOML: {problem[:1].lower()}{problem[1:]}.",
        at=f"{display}:{line}: {source}",
        hint='key = value lines below [section] headers, with text in "quotes"',
    )


def _lay(table: dict[str, Any], override: Override, value: Any) -> None:
    """Put the value of an override into the table, or remove its key."""
    *parents, last = override.key
    holder: Any = table
    for depth, part in enumerate(parents):
        holder = _step(holder, part, override, depth, create=value is not _REMOVED)
    if isinstance(holder, list):
        index = _index(holder, last, override)
        holder[index : index + 1] = [] if value is _REMOVED else [value]
    elif not isinstance(holder, dict):
        raise _not_a_table(override, len(parents))
    elif value is not _REMOVED:
        holder[last] = value
    elif last in holder:
        del holder[last]
    else:
        hint = did_you_mean(last, holder, what="one that is there")
        raise override.error(f"there is no {dotted(override.key)} to remove.", hint)


def _step(holder: Any, part: str, override: Override, depth: int, *, create: bool) -> Any:
    if isinstance(holder, list):
        return holder[_index(holder, part, override)]
    if not isinstance(holder, dict):
        raise _not_a_table(override, depth)
    if create:
        return holder.setdefault(part, {})
    return holder.get(part, {})


def _index(holder: list[Any], part: str, override: Override) -> int:
    if part.isascii() and part.isdigit() and len(part) < 6 and int(part) < len(holder):
        return int(part)
    message = f"a list of {len(holder)} entries has no entry '{part}'."
    raise override.error(message, "a number from 0, or the whole list as the value")


def _not_a_table(override: Override, depth: int) -> ConfigError:
    key = dotted(override.key[:depth])
    return override.error(f"{key} is not a table, so it has no key '{override.key[depth]}'.", f"--set {key}=...")


def absolute_paths(key: Sequence[str], value: Any, folder: Path) -> Any:
    """Return a copy of a key's value, with relative paths (those of `PATH_KEYS`) made absolute from `folder`.

    Args:
        key: path of the key from the root of the experiment; () for the whole experiment.
        value: a TOML value. Names of clusters and functions, and `python-stdlib`, are not paths and stay unchanged.
    """
    key = tuple(key)
    if isinstance(value, Mapping):
        around = any(path[: len(key)] == key for path in PATH_KEYS)
        return {name: absolute_paths((*key, name), item, folder) for name, item in value.items()} if around else value
    if not isinstance(value, str) or key not in PATH_KEYS or "\0" in value:
        return value
    if key == ("cluster",) and not is_path(value):
        return value
    if key == ("data", "source") and (value in ("", STDLIB_SOURCE) or re.match(FUNCTION_PATTERN, value)):
        return value
    return absolute(value, folder)


def absolute(path: str, folder: Path) -> str:
    """Return a path made absolute from `folder`, without following links; `~name` of an unknown user stays as it is."""
    return str(folder.absolute() / os.path.expanduser(path))


def is_path(text: str) -> bool:
    """Return whether the string of a cluster is a path and not a name."""
    return text.endswith(".toml") or "/" in text or "\\" in text


def as_table(cluster: Any) -> dict[str, Any]:
    """Return a cluster's table: with `name` or `file` for a bare name or path, or a copy of a mapping."""
    if isinstance(cluster, Mapping):
        return dict(cluster)
    if not isinstance(cluster, str | Path):
        raise SpecError(
            f"cluster must be a name, a path or a table, not {kind(cluster)}.",
            key=("cluster",),
            value=cluster,
            hint='cluster = "dgx_h100"',
        )
    text = str(cluster)
    return {"file": text} if isinstance(cluster, Path) or is_path(text) else {"name": text}
