"""What is wrong with a key that the user wrote, before we know in which file it stands.

The parsers of this layer (cluster, mesh, rules, tables) raise `SpecError` with the key's path; a loader that knows the
document turns it into a `ConfigError` that points at file and line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from meshkit.config.emit import dotted, inline
from meshkit.errors import ConfigError

Key = tuple[str, ...]

_MISSING = object()
_LONGEST_VALUE = 60


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
