"""TomlDocument: a TOML file with overrides laid over it, which knows where each key was written.

file -> text, table -> paths made absolute -> `--set key=value` -> table, and `where()` for errors
"""

from __future__ import annotations

import copy
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meshkit.config.bounded import DEEPEST_KEY, find_deep_key, open_regular, short
from meshkit.config.toml_text import find_duplicate, locate, split_key
from meshkit.config.validate import FUNCTION_PATTERN, Key, SpecError, did_you_mean, dotted, kind
from meshkit.errors import ConfigError

STDLIB_SOURCE = "python-stdlib"
# The keys of an experiment that may hold a path. A cluster may also be a name, a source also a function or the standard
# library.
PATH_KEYS: tuple[Key, ...] = (
    ("cluster",),
    ("cluster", "file"),
    ("cluster", "calibration"),
    ("checkpoint", "initial"),
    ("data", "source"),
)
_TOML_POSITION = re.compile(r"^(.*?) \(at (?:line (\d+), column (\d+)|end of document)\)$", re.DOTALL)
_LONGEST_VALUE = 80
_LARGEST_FILE_BYTES = 2**20  # what takes the parser some seconds, and no file that a person has written
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_REMOVED = object()
_STARTS_A_STRUCTURE = ("[", "{", '"', "'")


@dataclass(frozen=True)
class Override:
    """One `--set key=value`: the key's path and the text as the user gave it."""

    key: Key
    raw: str

    @classmethod
    def parse(cls, raw: str) -> Override:
        """The override of a text.

        Raises:
            ConfigError: no `key=value`, or no key.
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
                f"a key of more than {DEEPEST_KEY} parts is no key of an experiment.",
                at=f"--set {short(raw)}",
                hint=hint,
            )
        return cls(path, raw)

    def value(self) -> Any:
        """The value: TOML; what is not is a string; `_REMOVED` where there is none.

        Raises:
            ConfigError: it begins like TOML and is none, or is out of range.
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
        """An error that points at the override."""
        return ConfigError(message, at=f"--set {self.raw}", hint=hint)


@dataclass(frozen=True)
class TomlDocument:
    """A parsed TOML file."""

    path: Path  # absolute
    display: str  # the file as the user named it
    text: str  # its content, lines ended by a line feed
    table: dict[str, Any]  # the parsed content, with the overrides laid over it
    root: Key = ()  # what leads to its keys for the reader: () of an experiment, ("cluster",) of a cluster file
    overrides: tuple[Override, ...] = ()  # what was laid over it, in order

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, what: str = "experiment file", root: Key = ()) -> TomlDocument:
        """The file at `path`.

        Raises:
            ConfigError: it cannot be read, or is not TOML.
        """
        display = os.fspath(path)
        text = _read_text(Path(path), display, what)
        return cls(Path(path).resolve(), display, text, _parse(text, display, what), root)

    def with_overrides(self, raw: Sequence[str]) -> TomlDocument:
        """The experiment with every `key=value` laid over it, in order, and its paths made absolute.

        An empty value removes the key. Relative paths in a value are relative to the working directory, unlike those in
        the file.

        Raises:
            ConfigError: no `key=value`, a key that cannot be, or one to remove that is not there.
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
    """A key with its value as the file has it, on one line, cut where it is long."""
    if value is None:
        return f"[{dotted(path)}]"
    value = " ".join(value.split())
    return f"{dotted(path)} = {value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 3] + '...'}"


def _read_text(path: Path, display: str, what: str) -> str:
    """The text of a file of a size and kind that somebody writes by hand."""
    try:
        if path.is_dir():
            raise ConfigError(f"the {what} is a folder.", at=display, hint="a file in it that ends in .toml")
        with open_regular(path) as file:
            data = file.read(_LARGEST_FILE_BYTES + 1)
    except FileNotFoundError:
        hint = "a path that exists, or `meshkit new` to write one" if what.startswith("exp") else "a path that exists"
        raise ConfigError(f"there is no such {what}.", at=display, hint=hint) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"the {what} cannot be read: {reason}.", at=display, hint="a readable file") from None
    if len(data) > _LARGEST_FILE_BYTES:
        raise ConfigError(f"the {what} is larger than 1 MiB.", at=display, hint=f"a {what}: a page of TOML text")
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
    """The tables of a TOML text."""
    if line := find_deep_key(text):
        message = f"a key of more than {DEEPEST_KEY} parts is no key of the {what}."
        raise ConfigError(message, at=f"{display}:{line}", hint="fewer dots")
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
    """What is wrong with a text that is no TOML: a key given twice, or what tomllib found on which line."""
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
    """Puts the value of an override into the table, or removes its key."""
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
    """The table or list one key deeper."""
    if isinstance(holder, list):
        return holder[_index(holder, part, override)]
    if not isinstance(holder, dict):
        raise _not_a_table(override, depth)
    if create:
        return holder.setdefault(part, {})
    return holder.get(part, {})


def _index(holder: list[Any], part: str, override: Override) -> int:
    """The place in a list that a part of a key names."""
    if part.isascii() and part.isdigit() and len(part) < 6 and int(part) < len(holder):
        return int(part)
    message = f"a list of {len(holder)} entries has no entry '{part}'."
    raise override.error(message, "a number from 0, or the whole list as the value")


def _not_a_table(override: Override, depth: int) -> ConfigError:
    """An error: a key leads through something that has no keys."""
    key = dotted(override.key[:depth])
    return override.error(f"{key} is not a table, so it has no key '{override.key[depth]}'.", f"--set {key}=...")


def absolute_paths(key: Sequence[str], value: Any, folder: Path) -> Any:
    """The value of a key with the relative paths in it (`PATH_KEYS`) made absolute, from `folder`; copies tables."""
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
    """A path from `folder`, without following links."""
    return str(folder.absolute() / Path(path).expanduser())


def is_path(text: str) -> bool:
    """Whether a bare cluster string is a path rather than a name."""
    return text.endswith(".toml") or "/" in text or "\\" in text


def as_table(cluster: Any) -> dict[str, Any]:
    """The table that a cluster's bare name or path stands for, or a copy of the mapping that it is."""
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
