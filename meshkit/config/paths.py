"""The keys of an experiment that hold paths, and what their relative paths are relative to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from meshkit.config.validate import FUNCTION_PATTERN

STDLIB_SOURCE = "python-stdlib"


def absolute_paths(key: Sequence[str], value: Any, folder: Path) -> Any:
    """The value of a key with the relative paths in it made absolute, from `folder`; tables are copied.

    What holds a path: `cluster` (when it names a file), `cluster.file`, `cluster.calibration`, `checkpoint.initial` and
    `data.source` (when it is neither a function nor the standard library).
    """
    key = tuple(key)
    if isinstance(value, Mapping) and key in ((), ("cluster",), ("data",), ("checkpoint",)):
        return {name: absolute_paths((*key, name), item, folder) for name, item in value.items()}
    if not isinstance(value, str) or "\0" in value:
        return value
    if key == ("cluster",):
        return absolute(value, folder) if is_path(value) else value
    if key in (("cluster", "file"), ("cluster", "calibration"), ("checkpoint", "initial")):
        return absolute(value, folder)
    if key == ("data", "source") and value and value != STDLIB_SOURCE and not re.match(FUNCTION_PATTERN, value):
        return absolute(value, folder)
    return value


def absolute(path: str, folder: Path) -> str:
    """A path from `folder`, without following links."""
    return str(folder.absolute() / Path(path).expanduser())


def is_path(text: str) -> bool:
    """Whether a bare cluster string is a path rather than a name."""
    return text.endswith(".toml") or "/" in text or "\\" in text
