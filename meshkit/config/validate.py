"""Strict validation of plain TOML tables with pydantic, and what is wrong with a key in our words.

The parsers of this package raise `SpecError` with the key's path; a loader that knows the document turns it into a
`ConfigError` that points at file and line.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from meshkit.config.toml_text import dotted, inline
from meshkit.errors import ConfigError

Key = tuple[str, ...]

FUNCTION_PATTERN = r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"
NAME_PATTERN = r"^[A-Za-z_][\w-]*$"
_MISSING = object()
_LONGEST_VALUE = 60
_LARGEST_INTEGER = 2**63  # TOML promises 64-bit integers; tomllib reads any
_DEEPEST_TABLE = 16
_EXAMPLES = {  # of values that a validator of ours refuses
    "train.remat": 'remat = "full", remat = ["gate", "up"], or remat = { keep = ["key"], offload = ["gate"] }'
}
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


class SpecError(ConfigError):
    """A wrong key, by its path; shown as `at key = value` where no document is known.

    Args:
        message: one sentence that says what is wrong, with the numbers.
        key: path of the key from the root of the experiment, such as `("mesh", "tensor")`.
        value: what stands there, if anything does.
        hint: what to do about it, without the leading "try".
        at: where, if the raiser knows better than the loader (a cluster file of its own).
    """

    def __init__(
        self, message: str, *, key: Sequence[str], value: Any = _MISSING, hint: str | None = None, at: str | None = None
    ):
        self.key: Key = tuple(key)
        self.located = at is not None
        shown = dotted(self.key) if value is _MISSING else f"{dotted(self.key)} = {show(value)}"
        super().__init__(message, at=at or shown or None, hint=hint)


def show(value: Any) -> str:
    """A value as the user would write it in TOML, on one line, cut where it is long."""
    text = inline(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def kind(value: Any) -> str:
    """What a TOML value is, in words, with the value: `the string "ten"`."""
    if isinstance(value, bool):
        return f"the boolean {show(value)}"
    for types, word in ((str, "string"), (int, "integer"), (float, "number")):
        if isinstance(value, types):
            return f"the {word} {show(value)}"
    if isinstance(value, dict):
        return "a table"
    return "a list" if isinstance(value, list) else f"the {type(value).__name__} {show(value)}"


def did_you_mean(word: str, choices: Iterable[str], *, what: str = "one of") -> str:
    """A hint: the closest choice, or all of them where none is close."""
    names = [str(choice) for choice in choices]
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if not close:  # case and separators are the usual slip
        plain = {name.replace("-", "_").lower(): name for name in names}
        close = [plain[word.replace("-", "_").lower()]] if word.replace("-", "_").lower() in plain else []
    return f"'{close[0]}'" if close else f"{what}: {', '.join(sorted(names)) or '(none)'}"


class TomlTable(BaseModel):
    """Base of every table of a TOML file: strict types, no unknown keys, no inf or nan; never changed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, populate_by_name=True)

    @classmethod
    def fields_by_key(cls) -> dict[str, FieldInfo]:
        """The fields by what the file calls them."""
        return {field.alias or name: field for name, field in cls.model_fields.items()}

    @classmethod
    def table_at(cls, path: Sequence[str]) -> type[TomlTable]:
        """The table that a path of keys leads to; the one around it where it leads to none."""
        found: type[TomlTable] = cls
        for part in path:
            field = found.fields_by_key().get(part)
            candidates = [field.annotation, *get_args(field.annotation)] if field else []
            found = next((c for c in candidates if isinstance(c, type) and issubclass(c, TomlTable)), found)
        return found


def check_plain(table: Mapping[str, Any]) -> None:
    """Refuse what TOML allows and no key of ours does: non-finite numbers, integers beyond 64 bits, deep nesting."""
    pending: list[tuple[Key, Any]] = [((), table)]
    while pending:  # a loop, not recursion: dotted keys can nest deeper than the interpreter's stack
        path, value = pending.pop()
        if len(path) > _DEEPEST_TABLE:
            raise SpecError(
                f"tables are nested more than {_DEEPEST_TABLE} deep.",
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
            raise SpecError(f"{dotted(path)} is beyond 64 bits.", key=path, hint="a smaller number")


def validate[T: TomlTable](model: type[T], table: Any, *, within: Sequence[str] = ()) -> T:
    """The table as `model`; the first thing that is wrong with it as a SpecError under the path `within`."""
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
        raise _translate(model, table, error, tuple(within)) from None


def _translate(model: type[TomlTable], table: Mapping[str, Any], error: ValidationError, within: Key) -> SpecError:
    # An unknown key is often the misspelt form of a missing one, so it is what to say first.
    """The first error of pydantic in our words."""
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    path = tuple(str(part) for part in problem["loc"])
    owner = model.table_at(path[:-1])
    if problem["type"] == "extra_forbidden":
        return _unknown(owner, path, within, problem["input"])
    if problem["type"] == "missing":
        return _missing(path, within)
    message, hint = _wrong_value((*within, *path), problem)
    return SpecError(message, key=(*within, *path), value=problem["input"], hint=hint)


def _unknown(owner: type[TomlTable], path: Key, within: Key, value: Any) -> SpecError:
    """An error: a key that the table does not have, with the one that was probably meant."""
    return SpecError(
        f"unknown key '{path[-1]}' in {_section((*within, *path[:-1]))}.",
        key=(*within, *path),
        value=value,
        hint=did_you_mean(path[-1], owner.fields_by_key(), what="one of its keys"),
    )


def _missing(path: Key, within: Key) -> SpecError:
    """An error: a key that the table needs."""
    section = (*within, *path[:-1])
    return SpecError(
        f"{_section(section)} has no '{path[-1]}', which it needs.",
        key=section,
        hint=f"a line {path[-1]} = ..." + (f" below [{dotted(section)}]" if section else " at the top of the file"),
    )


def _wrong_value(key: Key, problem: Any) -> tuple[str, str]:
    """Message and hint for a value of the wrong type, out of range or of the wrong form."""
    name, given, code, context = dotted(key), problem["input"], problem["type"], problem.get("ctx", {})
    if code.endswith("_type") or code in ("int_from_float", "dataclass_type"):
        wanted = _WANTED.get(code.removesuffix("_type"), "another type")
        return f"{name} must be {wanted}, not {kind(given)}.", _example(name, wanted, given)
    if code == "literal_error":
        choices = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        return f"{name} must be one of {', '.join(choices)}; not {show(given)}.", did_you_mean(str(given), choices)
    for bound, words in (("gt", "greater than"), ("ge", "at least"), ("lt", "less than"), ("le", "at most")):
        if bound in context:
            return f"{name} must be {words} {context[bound]}, not {show(given)}.", f"{name} {words} {context[bound]}"
    if code in ("too_short", "too_long"):
        return f"{name} must have {_length(context)} entries, not {len(given)}.", f"{_length(context)} entries"
    if code == "value_error":
        return f"{name} {context['error']}.", _EXAMPLES.get(name, "the form that the message describes")
    if code == "string_pattern_mismatch":
        return f"{name} is {show(given)}, which has not the form it needs.", f"text like {_pattern(context)}"
    return f"{name}: {problem['msg']}.", "a value of the right form"


def _pattern(context: Mapping[str, Any]) -> str:
    """What a text of that pattern looks like."""
    return {FUNCTION_PATTERN: "package.module:name", NAME_PATTERN: "a_single_word"}.get(
        context["pattern"], str(context["pattern"])
    )


def _length(context: Mapping[str, Any]) -> int:
    """How many entries a list must have."""
    return context.get("min_length") or context.get("max_length") or 0


def _example(name: str, wanted: str, given: Any) -> str:
    """A line with a value of the right type: the given one, where only its quotes are wrong."""
    short = name.rsplit(".", 1)[-1]
    if isinstance(given, str) and re.fullmatch(_QUOTED.get(wanted, "(?!)"), given):
        return f"{short} = {given}, without quotes"
    example = {"an integer": "1", "a number": "1.0", "a string": '"text"', "true or false": "true", "a list": "[0, 1]"}
    return f"{short} = {example[wanted]}" if wanted in example else f"{wanted} for {short}"


def _section(key: Sequence[str]) -> str:
    """A table in words."""
    return f"[{dotted(key)}]" if key else "the experiment file"
