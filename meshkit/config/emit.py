"""TOML text of plain tables: documents such as the `experiment.toml` of a run, and values on one line in errors.

tomlkit writes documents. The one-line form is our own, since a hint shows any value, also one that is no TOML.
`None` has no TOML form: a key whose value is None is left out.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


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
