"""TOML text: plain tables written as documents or on one line, and where in a text each key stands.

tomlkit writes documents. The one-line form is our own, since a hint shows any value, also one that is no TOML.
`None` has no TOML form: a key whose value is None is left out.

`tomllib` parses values and gives no positions, so a scanner reads the same text for positions only. It trusts that the
text is valid TOML (tomllib has said so); on invalid text it stops quietly at the first thing it does not know. A path
is the keys from the root, with indices into arrays: `("rules", "override", "0", "path")`.
"""

from __future__ import annotations

import bisect
import contextlib
import datetime
import functools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
Path = tuple[str, ...]
_SPACE = re.compile(r"[ \t]*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_SCALAR = re.compile(r"[^,\]}#\n]*")
_STRINGS = (
    re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}', re.DOTALL),
    re.compile(r"'''.*?'{3,5}", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
)
_LONGEST_VALUE = 400  # of a longer one the beginning
_DEEPEST_KEY = 64  # of a longer dotted key only the first parts are positions: nobody asks for the others


def to_toml(table: Mapping[str, Any]) -> str:
    """A table as a TOML document: plain keys first, then one `[section]` for each table below."""
    import tomlkit  # takes longer to import than an experiment to load

    def fill(section: Any, table: Mapping[str, Any], sections: Sequence[str]) -> Any:
        """A document or section of tomlkit with the keys of a table in it."""
        for key, item in table.items():
            if key not in sections and item is not None:
                section.append(tomlkit.key(key), tomlkit.value(inline(item)))
        if sections and not section:
            section.add(tomlkit.nl())
        for key in sections:
            if isinstance(table[key], Mapping):
                below = fill(tomlkit.table(False), table[key], _sections_of(table[key]))
            else:
                below = tomlkit.aot()
                for element in table[key]:
                    below.append(fill(tomlkit.table(), element, _sections_of(element)))
            section.append(tomlkit.key(key), below)
        return section

    return tomlkit.dumps(fill(tomlkit.document(), table, _tables_at_the_end(table))).removeprefix("\n")


def inline(value: Any) -> str:
    """A value as TOML on one line; tables become inline tables."""
    if isinstance(value, Mapping):
        entries = (f"{key_text(key)} = {inline(item)}" for key, item in value.items() if item is not None)
        body = ", ".join(entries)
        return f"{{ {body} }}" if body else "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(inline(item) for item in value)}]"
    return _scalar(value)


def dotted(key: Sequence[str]) -> str:
    """A key's path as TOML writes it: `mesh.tensor`, `model."odd name"`."""
    return ".".join(key_text(part) for part in key)


def key_text(key: str) -> str:
    """One part of a key, quoted where it must be."""
    return key if _BARE_KEY.fullmatch(key) else string_text(key)


def string_text(text: str) -> str:
    """A basic TOML string."""
    return '"' + "".join(_escape(char) for char in text) + '"'


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    return f"\\u{ord(char):04X}" if ord(char) < 0x20 or ord(char) == 0x7F else char


def _scalar(value: Any) -> str:
    """A value that is neither a table nor a list."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return string_text(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return str(value)


def _is_array_of_tables(value: Any) -> bool:
    """Whether `[[sections]]` can say it."""
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _is_small(value: Any) -> bool:
    """A table that reads best on one line, such as `{ nvlink = 2, infiniband = 4 }`."""
    nested = (Mapping, list, tuple)
    return isinstance(value, Mapping) and len(value) <= 3 and not any(isinstance(v, nested) for v in value.values())


def _tables_at_the_end(table: Mapping[str, Any]) -> list[str]:
    """The keys of tables; none where sections of their own would change the order, which means something."""
    keys = [key for key, item in table.items() if isinstance(item, Mapping) or _is_array_of_tables(item)]
    written_last = [key for key in table if table[key] is not None][-len(keys) :] if keys else []
    return keys if keys == written_last else []


def _sections_of(table: Mapping[str, Any]) -> list[str]:
    """The keys of a section that get one of their own."""
    keys = _tables_at_the_end(table)
    return [] if all(_is_small(table[key]) for key in keys) else keys


@dataclass(frozen=True)
class Position:
    """Where a key stands; an element of an array, where its value does."""

    line: int  # from 1
    column: int  # from 1
    source_line: str  # the whole line
    value: str | None  # the text of the value; None for a table header or an implied table


@dataclass(frozen=True)
class WrittenKey:
    """A key as it was met in the text; `defines` unless it only passes through (the `a` of `a.b = 1`)."""

    path: Path
    start: int
    value: str | None
    defines: bool


class _Unexpected(Exception):
    """The text is not what TOML allows here."""


def locate(text: str, key: str | Path) -> Position | None:
    """The position of a key (dotted text or a path) in a TOML text; None where it is not written."""
    path = split_key(key) if isinstance(key, str) else key
    return _positions(text).get(path)


def find_duplicate(text: str) -> tuple[Path, int, int] | None:
    """The first key that is defined twice, with both lines; tables count, elements of arrays do not."""
    lines, seen = _line_starts(text), dict[Path, int]()
    for entry in entries(text):
        if not entry.defines:
            continue
        if entry.path in seen:
            return entry.path, _line(lines, seen[entry.path]), _line(lines, entry.start)
        seen[entry.path] = entry.start
    return None


def split_key(text: str) -> Path:
    """The parts of a dotted key, which may be quoted: `a."b c".d`.

    Raises:
        ValueError: it is no key.
    """
    scanner = _Scanner(text)
    try:
        path = scanner.key()
    except _Unexpected:
        raise ValueError(f"'{text}' is not a key") from None
    if scanner.position != len(text):
        raise ValueError(f"'{text}' is not a key")
    return path


def entries(text: str) -> Iterator[WrittenKey]:
    """Every key of the text in the order it is written; of a text that is no TOML, those before it goes wrong."""
    with contextlib.suppress(_Unexpected, RecursionError):
        yield from _Scanner(text).document()


@functools.lru_cache(maxsize=4)
def _positions(text: str) -> Mapping[Path, Position]:
    """Path of a key -> where it stands first."""
    starts, source = _line_starts(text), text.split("\n")
    positions: dict[Path, Position] = {}
    for entry in entries(text):
        line = _line(starts, entry.start)
        column = entry.start - starts[line - 1] + 1
        positions.setdefault(entry.path, Position(line, column, source[line - 1], entry.value))
    return positions


def _line_starts(text: str) -> list[int]:
    """Offsets at which lines begin."""
    return [0, *(match.end() for match in re.finditer("\n", text))]


def _line(starts: list[int], offset: int) -> int:
    """The line of an offset, counted from 1."""
    return bisect.bisect_right(starts, offset)


class _Scanner:
    """Walks over a TOML text and yields its keys."""

    def __init__(self, text: str):
        self.text, self.position = text, 0
        self._table: Path = ()
        self._arrays: dict[Path, int] = {}  # array of tables -> index of its last table

    def document(self) -> Iterator[WrittenKey]:
        """Every key of the document."""
        self._skip(_SPACE_AND_LINES)
        while self.position < len(self.text):
            if self._peek() == "[":
                yield from self._header()
            else:
                yield from self._key_value(self._table)
            self._skip(_SPACE_AND_LINES)

    def key(self) -> Path:
        """A dotted key at the cursor."""
        parts = [self._key_part()]
        while True:
            after = self.position
            self._skip(_SPACE)
            if self._peek() != ".":
                self.position = after
                return tuple(parts)
            self.position += 1
            self._skip(_SPACE)
            parts.append(self._key_part())

    def _header(self) -> Iterator[WrittenKey]:
        """`[a.b]` or `[[a.b]]`, which begins a table."""
        start, brackets = self.position, 2 if self.text.startswith("[[", self.position) else 1
        self.position += brackets
        self._skip(_SPACE)
        parts = self.key()
        self._skip(_SPACE)
        self._expect("]" * brackets)
        path = self._inside_arrays(parts[:-1])
        yield from self._passing(path, start)
        path = (*path, parts[-1])
        if brackets == 2:
            self._arrays[path] = self._arrays.get(path, -1) + 1
            yield WrittenKey(path, start, None, defines=False)
            path = (*path, str(self._arrays[path]))
        self._table = path
        yield WrittenKey(path, start, None, defines=True)

    def _inside_arrays(self, parts: Path) -> Path:
        """The path of a table, with the index of the last table of each array on the way."""
        path: Path = ()
        for part in parts:
            path = (*path, part)
            if path in self._arrays:
                path = (*path, str(self._arrays[path]))
        return path

    def _passing(self, path: Path, start: int, skip: int = 0) -> Iterator[WrittenKey]:
        """The tables on the way to a key, which it implies."""
        for length in range(skip + 1, min(len(path), _DEEPEST_KEY) + 1):
            yield WrittenKey(path[:length], start, None, defines=False)

    def _key_value(self, table: Path) -> Iterator[WrittenKey]:
        """`a.b = value` inside a table."""
        start = self.position
        path = (*table, *self.key())
        self._skip(_SPACE)
        self._expect("=")
        self._skip(_SPACE)
        yield from self._passing(path[:-1], start, skip=len(table))
        yield from self._value(path, start, defines=True)

    def _value(self, path: Path, start: int, *, defines: bool) -> Iterator[WrittenKey]:
        """The value at the cursor: its own key, then those inside it."""
        begin, opening = self.position, self._peek()
        inner: list[WrittenKey] = []
        if opening == "[":
            inner = list(self._array(path))
        elif opening == "{":
            inner = list(self._inline_table(path))
        elif opening in ('"', "'"):
            self._string()
        else:
            self._skip(_SCALAR)
        end = min(self.position, begin + _LONGEST_VALUE)  # of nested arrays each has a value
        yield WrittenKey(path, start, self.text[begin:end].rstrip(), defines)
        yield from inner

    def _array(self, path: Path) -> Iterator[WrittenKey]:
        """The elements of an array."""
        self.position += 1
        for index in self._until("]"):
            yield from self._value((*path, str(index)), self.position, defines=False)

    def _inline_table(self, path: Path) -> Iterator[WrittenKey]:
        """The keys of an inline table."""
        self.position += 1
        for _ in self._until("}"):
            yield from self._key_value(path)

    def _until(self, closing: str) -> Iterator[int]:
        """Stands before each element of a comma list, and after its closing bracket at the end."""
        index = 0
        while True:
            self._skip(_SPACE_AND_LINES)
            if self._peek() == closing:
                self.position += 1
                return
            yield index
            index += 1
            self._skip(_SPACE_AND_LINES)
            if self._peek() == ",":
                self.position += 1
            elif self._peek() != closing:
                raise _Unexpected

    def _key_part(self) -> str:
        """One part of a dotted key, bare or quoted."""
        if self._peek() in ('"', "'"):
            raw = self._string()
            try:
                return tomllib.loads(f"key = {raw}")["key"]
            except tomllib.TOMLDecodeError:
                raise _Unexpected from None
        match = _BARE_KEY.match(self.text, self.position)
        if match is None:
            raise _Unexpected
        self.position = match.end()
        return match.group()

    def _string(self) -> str:
        """A string in any of its four forms, with its quotes."""
        for pattern in _STRINGS:
            match = pattern.match(self.text, self.position)
            if match is not None:
                self.position = match.end()
                return match.group()
        raise _Unexpected

    def _skip(self, pattern: re.Pattern[str]) -> None:
        """Moves over what the pattern matches."""
        match = pattern.match(self.text, self.position)
        assert match is not None  # every pattern given here matches the empty text
        self.position = match.end()

    def _expect(self, text: str) -> None:
        """Moves over a text that must stand here."""
        if not self.text.startswith(text, self.position):
            raise _Unexpected
        self.position += len(text)

    def _peek(self) -> str:
        """The character at the cursor; nothing at the end."""
        return self.text[self.position : self.position + 1]
