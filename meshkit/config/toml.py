"""Write plain tables as TOML, find the position of each key in a TOML text, and turn validation errors into messages.

tomlkit writes documents. Hints also show values that TOML does not have, so `inline` writes any value on one line. TOML
has no null, so a key whose value is None is left out.

`tomllib` parses values without positions, so a scanner reads the same text for positions alone. It assumes that tomllib
accepts the text, and on invalid text it stops without an error. The path of a key consists of the keys from the root
and indices into arrays: `("rules", "override", "0", "path")`.

pydantic validates tables strictly. An error about a value is a `SpecError` with the path of the key. A loader that has
the document turns it into a `ConfigError` that names file and line.
"""

from __future__ import annotations

import bisect
import contextlib
import datetime
import difflib
import functools
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from meshkit.errors import ConfigError

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
Key = tuple[str, ...]
_SPACE = re.compile(r"[ \t]*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_SCALAR = re.compile(r"[^,\]}#\n]*")
_STRINGS = (
    re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}', re.DOTALL),
    re.compile(r"'''.*?'{3,5}", re.DOTALL),
    re.compile(r'"(?:[^"\\\n]|\\.)*"'),
    re.compile(r"'[^'\n]*'"),
)
_LONGEST_VALUE = 400  # A longer value is cut.
_DEEPEST_KEY = 64  # Of a longer dotted key only so many leading parts have positions; no caller needs more.
FUNCTION_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
NAME_PATTERN = r"^[A-Za-z_][\w-]*$"
_FORMS = {FUNCTION_PATTERN: "package.module:name", NAME_PATTERN: "a_single_word"}
_MISSING = object()
_LONGEST_SHOWN = 60
_LARGEST_INTEGER = 2**63  # TOML promises 64-bit integers; tomllib reads any
_DEEPEST_TABLE = 16
# Examples for keys that declare neither an example nor a default.
_BY_TYPE = {"integer": 8, "number": 1.0, "boolean": True}
_QUOTED = {"an integer": r"-?\d+", "a number": r"-?\d+(\.\d+)?(e-?\d+)?", "true or false": "true|false"}
_WANTED = {
    "int": "an integer",
    "float": "a number",
    "string": "a string",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table",
    "model": "a table",
}


def to_toml(table: Mapping[str, Any]) -> str:
    """Return a table as a TOML document, with a `[section]` for each table in it.

    The tables in a table are written inline if a plain key follows one of them, since sections would change the order
    of the keys. Inside a section they are also written inline if all of them are small.
    """
    import tomlkit  # takes longer to import than an experiment to load

    def fill(section: Any, table: Mapping[str, Any], sections: Sequence[str]) -> Any:
        """Return a document or section of tomlkit with the keys of a table in it."""
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
    """Return a value as TOML on one line; tables become inline tables."""
    if isinstance(value, Mapping):
        entries = (f"{key_text(key)} = {inline(item)}" for key, item in value.items() if item is not None)
        body = ", ".join(entries)
        return f"{{ {body} }}" if body else "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(inline(item) for item in value)}]"
    return _scalar(value)


def dotted(key: Sequence[str]) -> str:
    """Return a key's path as TOML writes it: `mesh.tensor`, `model."odd name"`."""
    return ".".join(key_text(part) for part in key)


def key_text(key: str) -> str:
    """Return one part of a key, quoted where it must be."""
    return key if _BARE_KEY.fullmatch(key) else string_text(key)


def string_text(text: str) -> str:
    """Return a basic TOML string."""
    return '"' + "".join(_escape(char) for char in text) + '"'


def _escape(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    return f"\\u{ord(char):04X}" if ord(char) < 0x20 or ord(char) == 0x7F else char


def _scalar(value: Any) -> str:
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
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _is_small(value: Any) -> bool:
    """Return whether a table fits on one line, such as `{ nvlink = 2, infiniband = 4 }`."""
    nested = (Mapping, list, tuple)
    return isinstance(value, Mapping) and len(value) <= 3 and not any(isinstance(v, nested) for v in value.values())


def _tables_at_the_end(table: Mapping[str, Any]) -> list[str]:
    """Return the keys of tables that can be sections; none if sections would change the order, which has a meaning."""
    keys = [key for key, item in table.items() if isinstance(item, Mapping) or _is_array_of_tables(item)]
    written_last = [key for key in table if table[key] is not None][-len(keys) :] if keys else []
    return keys if keys == written_last else []


def _sections_of(table: Mapping[str, Any]) -> list[str]:
    keys = _tables_at_the_end(table)
    return [] if all(_is_small(table[key]) for key in keys) else keys


@dataclass(frozen=True)
class Position:
    """The position of a key; for an element of an array, the position of its value."""

    line: int
    value: str | None
    """The value's text; None for a table header or an implied table."""


@dataclass(frozen=True)
class WrittenKey:
    """A key in the text; `defines` is False if the text only passes through it (the `a` of `a.b = 1`)."""

    path: Key
    start: int
    value: str | None
    defines: bool


class _Unexpected(Exception):
    """The text is not what TOML allows here."""


def locate(text: str, key: Key) -> Position | None:
    """Return the position of a key in a TOML text; None if the text does not have it."""
    return _positions(text).get(key)


def find_duplicate(text: str) -> tuple[Key, int, int] | None:
    """Return the first key that is defined twice, with both lines; tables count, elements of arrays do not."""
    lines, seen = _line_starts(text), dict[Key, int]()
    for entry in entries(text):
        if not entry.defines:
            continue
        if entry.path in seen:
            return entry.path, _line(lines, seen[entry.path]), _line(lines, entry.start)
        seen[entry.path] = entry.start
    return None


def split_key(text: str) -> Key:
    """Return the parts of a dotted key, which may be quoted: `a."b c".d`.

    Raises:
        ValueError: the text is not a key.
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
    """Yield every key in the order of the text; if the text is not TOML, only the keys before the first error."""
    with contextlib.suppress(_Unexpected, RecursionError):
        yield from _Scanner(text).document()


@functools.lru_cache(maxsize=4)
def _positions(text: str) -> Mapping[Key, Position]:
    starts = _line_starts(text)
    positions: dict[Key, Position] = {}
    for entry in entries(text):
        positions.setdefault(entry.path, Position(_line(starts, entry.start), entry.value))
    return positions


def _line_starts(text: str) -> list[int]:
    return [0, *(match.end() for match in re.finditer("\n", text))]


def _line(starts: list[int], offset: int) -> int:
    return bisect.bisect_right(starts, offset)


class _Scanner:
    """Walks over a TOML text and yields its keys."""

    def __init__(self, text: str):
        self.text, self.position = text, 0
        self._table: Key = ()
        self._arrays: dict[Key, int] = {}  # Array of tables -> index of its last table.

    def document(self) -> Iterator[WrittenKey]:
        self._skip(_SPACE_AND_LINES)
        while self.position < len(self.text):
            if self._peek() == "[":
                yield from self._header()
            else:
                yield from self._key_value(self._table)
            self._skip(_SPACE_AND_LINES)

    def key(self) -> Key:
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

    def _inside_arrays(self, parts: Key) -> Key:
        """Return the path of a table, with the index of the latest table of each array of tables on the way."""
        path: Key = ()
        for part in parts:
            path = (*path, part)
            if path in self._arrays:
                path = (*path, str(self._arrays[path]))
        return path

    def _passing(self, path: Key, start: int, skip: int = 0) -> Iterator[WrittenKey]:
        for length in range(skip + 1, min(len(path), _DEEPEST_KEY) + 1):
            yield WrittenKey(path[:length], start, None, defines=False)

    def _key_value(self, table: Key) -> Iterator[WrittenKey]:
        start = self.position
        path = (*table, *self.key())
        self._skip(_SPACE)
        self._expect("=")
        self._skip(_SPACE)
        yield from self._passing(path[:-1], start, skip=len(table))
        yield from self._value(path, start, defines=True)

    def _value(self, path: Key, start: int, *, defines: bool) -> Iterator[WrittenKey]:
        begin, opening = self.position, self._peek()
        inner: list[WrittenKey] = []
        if opening == "[":
            self.position += 1
            for index in self._until("]"):
                inner += self._value((*path, str(index)), self.position, defines=False)
        elif opening == "{":
            self.position += 1
            for _ in self._until("}"):
                inner += self._key_value(path)
        elif opening in ('"', "'"):
            self._string()
        else:
            self._skip(_SCALAR)
        # Without a limit, each level of nested arrays would copy the text of all levels inside it.
        end = min(self.position, begin + _LONGEST_VALUE)
        yield WrittenKey(path, start, self.text[begin:end].rstrip(), defines)
        yield from inner

    def _until(self, closing: str) -> Iterator[int]:
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
        for pattern in _STRINGS:
            match = pattern.match(self.text, self.position)
            if match is not None:
                self.position = match.end()
                return match.group()
        raise _Unexpected

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self.text, self.position)
        assert match is not None  # Every pattern given here matches the empty text.
        self.position = match.end()

    def _expect(self, text: str) -> None:
        if not self.text.startswith(text, self.position):
            raise _Unexpected
        self.position += len(text)

    def _peek(self) -> str:
        return self.text[self.position : self.position + 1]


class SpecError(ConfigError):
    """An error about a key, given by its path; shown as `at key = value` if no document is known.

    Args:
        key: path of the key from the root of the experiment, such as `("mesh", "tensor")`.
        at: place of the error, if it is not in the document of the loader but, for example, in a cluster file.
    """

    def __init__(
        self, message: str, *, key: Sequence[str], value: Any = _MISSING, hint: str | None = None, at: str | None = None
    ):
        self.key: Key = tuple(key)
        self.located = at is not None
        shown = dotted(self.key) if value is _MISSING else f"{dotted(self.key)} = {show(value)}"
        super().__init__(message, at=at or shown or None, hint=hint)


def show(value: Any) -> str:
    """Return a value as the user would write it in TOML, on one line, shortened if it is long."""
    text = inline(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def kind(value: Any) -> str:
    """Describe a TOML value in words: `the string "ten"`."""
    if isinstance(value, bool):
        return f"the boolean {show(value)}"
    for types, word in ((str, "string"), (int, "integer"), (float, "number")):
        if isinstance(value, types):
            return f"the {word} {show(value)}"
    if isinstance(value, dict):
        return "a table"
    return "a list" if isinstance(value, list) else f"the {type(value).__name__} {show(value)}"


def did_you_mean(word: str, choices: Iterable[str], *, what: str = "one of") -> str:
    """Return a hint: the closest choice in quotes, or `one of: a, b` in alphabetical order if none is close."""
    names = [str(choice) for choice in choices]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:  # The usual slips are case and separators.
        plain = {name.replace("-", "_").lower(): name for name in names}
        close = [plain[word.replace("-", "_").lower()]] if word.replace("-", "_").lower() in plain else []
    return f"'{close[0]}'" if close else f"{what}: {', '.join(sorted(names)) or '(none)'}"


class TomlTable(BaseModel):
    """Base of every table of a TOML file: immutable, strict types, no unknown keys, no inf or nan."""

    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True, defer_build=True
    )  # defer_build: a process that reads one kind of file does not build the validators of other kinds

    @classmethod
    def fields_by_key(cls) -> dict[str, FieldInfo]:
        """Return the fields by their names in the file."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    def table_at(cls, path: Sequence[str]) -> type[TomlTable]:
        """Return the class of the table at a path of keys; if there is no table, the class of the table around it."""
        found: type[TomlTable] = cls
        for part in path:
            field = found.fields_by_key().get(part)
            candidates = [field.annotation, *get_args(field.annotation)] if field else []
            found = next((c for c in candidates if isinstance(c, type) and issubclass(c, TomlTable)), found)
        return found


def check_plain(table: Mapping[str, Any]) -> None:
    """Refuse values that tomllib reads but no key has: non-finite numbers, integers beyond 64 bits, deep nesting."""
    pending: list[tuple[Key, Any]] = [((), table)]
    while pending:  # A loop, because dotted keys can nest deeper than the interpreter's stack.
        path, value = pending.pop()
        if len(path) > _DEEPEST_TABLE:
            raise SpecError(
                f"tables or lists are nested more than {_DEEPEST_TABLE} deep.",
                key=path[:1],
                hint="fewer levels: no key of an experiment is that deep",
            )
        if isinstance(value, Mapping):
            pending.extend(((*path, str(key)), item) for key, item in value.items())
        elif isinstance(value, list):
            pending.extend(((*path, str(index)), item) for index, item in enumerate(value))
        elif isinstance(value, float) and not math.isfinite(value):
            raise SpecError(f"{dotted(path)} is not a finite number.", key=path, value=value, hint="a finite number")
        elif isinstance(value, int) and not -_LARGEST_INTEGER <= value < _LARGEST_INTEGER:
            raise SpecError(f"{dotted(path)} does not fit into 64 bits.", key=path, hint="a smaller number")


def validate[T: TomlTable](model: type[T], table: Any, *, within: Sequence[str] = ()) -> T:
    """Return the table as an instance of `model`; errors have keys under the path `within`.

    Raises:
        SpecError: `table` is not a table, or pydantic refuses it; unknown keys are reported first.
    """
    if not isinstance(table, Mapping):
        raise SpecError(
            f"{_section(within)} must be a table, not {kind(table)}.",
            key=within,
            value=table,
            hint=f"a section [{dotted(within)}] with its keys below it",
        )
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise _translate(model, error, tuple(within)) from None


def _translate(model: type[TomlTable], error: ValidationError, within: Key) -> SpecError:
    """Translate pydantic's first error; unknown keys come first, since they are often misspelt missing keys."""
    problem = min(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    path = tuple(str(part) for part in problem["loc"])
    owner = model.table_at(path[:-1])
    if problem["type"] == "extra_forbidden":
        return unknown_key(owner.fields_by_key(), (*within, *path), problem["input"])
    if problem["type"] == "missing":
        is_table = model.table_at(path) is not owner or path == ("mesh",)
        return _missing(path, within, owner.fields_by_key()[path[-1]], is_table=is_table)
    while path[-1].isdigit():  # An entry of a list has the example of the whole list.
        path = path[:-1]
    field = model.table_at(path[:-1]).fields_by_key().get(path[-1])
    key = (*within, *(str(part) for part in problem["loc"]))
    message, hint = _wrong_value(key, problem, _examples(path[-1], field), field)
    return SpecError(message, key=key, value=problem["input"], hint=hint)


def unknown_key(known: Iterable[str], key: Key, value: Any) -> SpecError:
    """Return an error about a key that its table does not have; the hint is the key that was probably meant."""
    return SpecError(
        f"unknown key '{key[-1]}' in {_section(key[:-1])}.",
        key=key,
        value=value,
        hint=did_you_mean(key[-1], known, what="one of its keys"),
    )


def _missing(path: Key, within: Key, field: FieldInfo, *, is_table: bool) -> SpecError:
    section, whole = (*within, *path[:-1]), dotted((*within, *path))
    where = f"below [{dotted(section)}]" if section else "at the top of the file"
    line = f"a line {_examples(path[-1], field)} {where}"
    return SpecError(
        f"{_section(section)} has no '{path[-1]}', which it needs.",
        key=section,
        hint=f"a section [{whole}] with its keys below it" if is_table else line,
    )


def _wrong_value(key: Key, problem: Any, example: str, field: FieldInfo | None) -> tuple[str, str]:
    """Return message and hint for a value of the wrong type, range or form; `example` is a correct line."""
    name, given, code, context = dotted(key), problem["input"], problem["type"], problem.get("ctx", {})
    if code.endswith("_type") or code in ("int_from_float", "dataclass_type"):
        wanted = _WANTED.get(code.removesuffix("_type"), "another type")
        return f"{name} must be {wanted}, not {kind(given)}.", _of_type(key, wanted, given, example, field)
    if code == "literal_error":
        choices = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        return f"{name} must be one of {', '.join(choices)}; not {show(given)}.", did_you_mean(str(given), choices)
    for bound, words in (("gt", "greater than"), ("ge", "at least"), ("lt", "less than"), ("le", "at most")):
        if bound in context:
            limit = f"{words} {context[bound]:.15g}"
            return f"{name} must be {limit}, not {show(given)}.", f"{example}, or another value {limit}"
    if code in ("too_short", "too_long"):
        entries = f"{context.get('min_length') or context.get('max_length')} entries"
        return f"{name} must have {entries}, not {len(given)}.", f"{entries}: {example}"
    if code == "string_too_short":
        return f"{name} is an empty string.", example
    if code == "value_error":
        return f"{name} {context['error']}.", example
    if code == "string_pattern_mismatch":
        return f"{name} is {show(given)}, which does not have the required form.", example
    return f"{name}: {problem['msg']}.", example


def _examples(name: str, field: FieldInfo | None) -> str:
    if field is None:
        return f"{name} = ..."
    found = field.examples or ([field.default] if field.default not in (None, PydanticUndefined, []) else [])
    about = ""
    if not found:
        found = [_example_of(_adapter(field).json_schema())]
        about = f" ({field.description})"
    lines = [f"{key_text(name)} = {inline(value)}{about}" for value in found]
    return " or ".join(lines)


def _adapter(field: FieldInfo) -> TypeAdapter[Any]:
    form: Any = Annotated
    kind: Any = field.annotation
    return TypeAdapter(form[(kind, *field.metadata)] if field.metadata else kind)


def _example_of(schema: Mapping[str, Any]) -> Any:
    for choice in schema.get("anyOf", (schema,)):
        if choice.get("type") in _BY_TYPE:
            return _BY_TYPE[choice["type"]]
        if choice.get("pattern") in _FORMS:
            return _FORMS[choice["pattern"]]
    return "..."


def _of_type(key: Key, wanted: str, given: Any, example: str, field: FieldInfo | None) -> str:
    """Return a hint with a value of the right type: the given value without quotes, if only the quotes are wrong."""
    if isinstance(given, str) and re.fullmatch(_QUOTED.get(wanted, "(?!)"), given):
        with contextlib.suppress(tomllib.TOMLDecodeError, ValidationError):
            bare = tomllib.loads(f"value = {given}")["value"]
            if field and not key[-1].isdigit():
                _adapter(field).validate_python(bare)
            return f"{key[-1]} = {given}, without quotes"
    if wanted == "a table":
        section = f"[[{dotted(key[:-1])}]]" if key[-1].isdigit() else f"[{dotted(key)}]"
        return f"a section {section} with its keys below it"
    return f"{wanted}{' without quotes' if isinstance(given, str) and wanted != 'a list' else ''}, such as {example}"


def _section(key: Sequence[str]) -> str:
    return f"[{dotted(key)}]" if key else "the experiment file"
