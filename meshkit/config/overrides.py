"""`--set key=value`: changes laid over the tables of an experiment file before they are checked."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshkit.config.cluster import as_table
from meshkit.config.document import Override
from meshkit.config.locate import split_key
from meshkit.config.paths import absolute_paths
from meshkit.config.problems import did_you_mean, dotted
from meshkit.errors import ConfigError

_REMOVED = object()
_STARTS_A_STRUCTURE = ("[", "{", '"', "'")


def apply_overrides(table: Mapping[str, Any], raw: Sequence[str]) -> tuple[dict[str, Any], tuple[Override, ...]]:
    """A copy of the table with every `key=value` laid over it, in order.

    An empty value removes the key. A value is TOML; what is not becomes a string. Relative paths in a value are
    relative to the working directory, unlike those in the file.

    Raises:
        ConfigError: no `key=value`, a key that cannot be, or one to remove that is not there.
    """
    result, parsed = copy.deepcopy(dict(table)), []
    for text in raw:
        override = _parse(text)
        value = _value(text, override)
        if isinstance(result.get("cluster"), str) and len(override.key) > 1 and override.key[0] == "cluster":
            result["cluster"] = as_table(result["cluster"])
        _set(result, override, absolute_paths(override.key, value, Path.cwd()) if value is not _REMOVED else value)
        parsed.append(override)
    return result, tuple(parsed)


def _parse(text: str) -> Override:
    key, equals, _ = text.partition("=")
    hint = "--set mesh.tensor=8"
    if not equals:
        raise ConfigError("an override needs a key and a value.", at=f"--set {text}", hint=hint)
    try:
        return Override(split_key(key.strip()), text)
    except ValueError:
        raise ConfigError(f"'{key.strip()}' is not a key.", at=f"--set {text}", hint=hint) from None


def _value(text: str, override: Override) -> Any:
    raw = text.partition("=")[2].strip()
    if not raw:
        return _REMOVED
    try:
        table = tomllib.loads(f"value = {raw}")
        if set(table) == {"value"}:
            return table["value"]
    except tomllib.TOMLDecodeError as error:
        if raw.startswith(_STARTS_A_STRUCTURE):
            problem = str(error).split(" (at ")[0]
            raise ConfigError(
                f"the value of {dotted(override.key)} is not TOML: {problem[:1].lower()}{problem[1:]}.",
                at=f"--set {text}",
                hint="quoting it for the shell: --set 'mesh.fsdp={ nvlink = 2, infiniband = 4 }'",
            ) from None
    except (RecursionError, ValueError):
        raise ConfigError(
            f"the value of {dotted(override.key)} is out of range.", at=f"--set {text}", hint="a smaller value"
        ) from None
    return raw


def _set(table: dict[str, Any], override: Override, value: Any) -> None:
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
        raise ConfigError(f"there is no {dotted(override.key)} to remove.", at=f"--set {override.raw}", hint=hint)


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
    if part.isascii() and part.isdigit() and len(part) < 6 and int(part) < len(holder):
        return int(part)
    raise ConfigError(
        f"a list of {len(holder)} entries has no entry '{part}'.",
        at=f"--set {override.raw}",
        hint="a number from 0, or the whole list as the value",
    )


def _not_a_table(override: Override, depth: int) -> ConfigError:
    key = dotted(override.key[:depth])
    return ConfigError(
        f"{key} is not a table, so it has no key '{override.key[depth]}'.",
        at=f"--set {override.raw}",
        hint=f"--set {key}=...",
    )
