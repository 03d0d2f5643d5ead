"""Document: a TOML file with overrides laid over it, which knows where each key was written."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshkit.config.locate import find_duplicate, locate
from meshkit.config.problems import Key, SpecError, dotted
from meshkit.errors import ConfigError

_TOML_POSITION = re.compile(r"^(.*?) \(at (?:line (\d+), column (\d+)|end of document)\)$", re.DOTALL)
_LONGEST_VALUE = 80
_LARGEST_FILE_BYTES = 4 * 2**20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Override:
    """One `--set key=value`: the key's path and the text as the user gave it."""

    key: Key
    raw: str


@dataclass(frozen=True)
class Document:
    """A parsed TOML file.

    Attributes:
        path: the file, absolute.
        display: the file as the user named it.
        text: its content, lines ended by a line feed.
        table: the parsed content, with the overrides laid over it.
        root: what leads to its keys for the reader: () of an experiment, ("cluster",) of a cluster file.
        overrides: what was laid over it, in order.
    """

    path: Path
    display: str
    text: str
    table: dict[str, Any]
    root: Key = ()
    overrides: tuple[Override, ...] = ()

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, what: str = "experiment file", root: Key = ()) -> Document:
        """The file at `path`.

        Raises:
            ConfigError: it cannot be read, or is not TOML.
        """
        display = os.fspath(path)
        text = _read_text(Path(path), display, what)
        return cls(Path(path).resolve(), display, text, _parse(text, display, what), root)

    def with_overrides(self, table: dict[str, Any], overrides: Sequence[Override]) -> Document:
        """The same file with another table, which the overrides led to."""
        return replace(self, table=table, overrides=tuple(overrides))

    def where(self, key: Sequence[str]) -> str:
        """Where a key was written: `file:line: key = value`, `--set key=value`, or the file that does not set it."""
        key = tuple(key)
        override = self._override_of(key)
        if override is not None:
            return f"--set {override.raw}"
        path = key[len(self.root) :]
        for length in range(len(path), 0, -1):  # an unwritten key is in its table
            position = locate(self.text, path[:length])
            if position is not None:
                statement = _statement(path[:length], position.value) + self._changes_inside(path, position.value)
                is_table = position.value is None or position.value.startswith("{")
                unset = f" ({dotted(path)} is not set)" if length < len(path) and is_table else ""
                return f"{self.display}:{position.line}: {statement}{unset}"
        return self.display if not path else f"{self.display}: {dotted(path)} is not set"

    def locate(self, error: SpecError) -> ConfigError:
        """The error, pointing into this document unless it points elsewhere already."""
        if error.located:
            return ConfigError(error.message, at=error.at, hint=error.hint)
        return ConfigError(error.message, at=self.where(error.key), hint=error.hint)

    def _override_of(self, key: Key) -> Override | None:
        """The last override that set the key or a table around it; of a key that the file lacks, one inside it."""
        for override in reversed(self.overrides):
            if key[: len(override.key)] == override.key:
                return override
        if locate(self.text, key[len(self.root) :]) is None:
            inside = [o for o in self.overrides if key and o.key[: len(key)] == key]
            return inside[-1] if inside else None
        return None

    def _changes_inside(self, table: Key, value: str | None) -> str:
        """The overrides of keys inside a table section."""
        inside = [o.raw for o in self.overrides if o.key[: len(table)] == table] if value is None else []
        return f" with {' '.join(f'--set {raw}' for raw in inside)}" if inside else ""


def _statement(path: Key, value: str | None) -> str:
    if value is None:
        return f"[{dotted(path)}]"
    value = " ".join(value.split())
    return f"{dotted(path)} = {value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 3] + '...'}"


def _read_text(path: Path, display: str, what: str) -> str:
    try:
        if path.is_dir():
            raise ConfigError(f"the {what} is a folder.", at=display, hint="a file in it that ends in .toml")
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE_BYTES + 1)  # bounded: the path may be a device
    except FileNotFoundError:
        hint = "a path that exists, or `meshkit new` to write one" if what.startswith("exp") else "a path that exists"
        raise ConfigError(f"there is no such {what}.", at=display, hint=hint) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the {what} cannot be read: {reason}.", at=display, hint="a readable file") from None
    if len(data) > _LARGEST_FILE_BYTES:
        raise ConfigError(f"the {what} is larger than 4 MiB.", at=display, hint=f"a {what}: a page of TOML text")
    data = data.removeprefix(_BYTE_ORDER_MARK)  # Windows editors write one
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"the {what} is not UTF-8 text (byte 0x{data[error.start]:02x}).",
            at=f"{display}:{line}",
            hint="a TOML text file, saved as UTF-8",
        ) from None


def _parse(text: str, display: str, what: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _not_toml(text, display, what, str(error)) from None
    except RecursionError:
        raise ConfigError(f"the {what} is nested too deeply.", at=display, hint="fewer brackets") from None
    except ValueError as error:  # an integer of thousands of digits, a date that does not exist
        raise ConfigError(
            f"the {what} holds a value out of range: {error}.", at=display, hint="a smaller one"
        ) from None


def _not_toml(text: str, display: str, what: str, message: str) -> ConfigError:
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
