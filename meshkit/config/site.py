"""Read what a site allows experiments to name: folders of code, folders of files, and installed packages.

    /etc/meshkit/site.toml, MESHKIT_MODEL_ROOTS, MESHKIT_FILE_ROOTS -> Site -> load_object, check_writers, load

    model_roots = ["/opt/models", "/home/shared/experiments"]    # code that `pkg.mod:Name` may come from
    file_roots  = ["/data"]                                      # files and folders that an experiment may name
    functions   = ["our_text"]    # installed packages whose functions it may name as a loss, a tokenizer and the like

Without roots, an experiment may name any file, and any code that `find_folder` finds. An experiment file has no key for
roots, so it cannot widen them. The environment variables can only narrow the site's file. The roots protect users who
run somebody else's experiment. They do not confine code that runs, nor users who write their own code.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.config.files import PATH_KEYS
from meshkit.config.toml import SpecError, did_you_mean, dotted
from meshkit.errors import ConfigError

SITE_FILE = Path("/etc/meshkit/site.toml")
_VARIABLES = {"model_roots": "MESHKIT_MODEL_ROOTS", "file_roots": "MESHKIT_FILE_ROOTS"}
_FUNCTIONS = "functions"
_SITE_EXAMPLE = {**dict.fromkeys(_VARIABLES, '["/opt/models"]'), _FUNCTIONS: '["our_text"]'}


@dataclass(frozen=True)
class Site:
    """The allowed folders, with links resolved; None allows any folder."""

    model_roots: tuple[Path, ...] | None = None
    """Folders that models, losses, data, metrics and hook functions may come from."""
    file_roots: tuple[Path, ...] | None = None
    """Folders that must contain the files and folders that an experiment names."""
    functions: tuple[str, ...] = ()
    """Installed packages whose functions an experiment file may name, in addition to `user_code.FUNCTIONS`."""


def read_site() -> Site:
    """Read the site's file and narrow it by the environment variables.

    Raises:
        ConfigError: users other than root can change the file, the file is not valid, a root is not absolute, or a
            variable names a root that the file does not allow.
    """
    table = _read_file(SITE_FILE)
    declared = {key: _roots(table[key], str(SITE_FILE)) for key in _VARIABLES if key in table}
    found: dict[str, tuple[Path, ...] | None] = {}
    for key, variable in _VARIABLES.items():
        allowed = declared.get(key)
        wanted = _roots(os.environ[variable].split(os.pathsep), variable) if os.environ.get(variable) else None
        if wanted is not None and allowed is not None:
            for root in wanted:
                if not is_under(root, allowed):
                    raise ConfigError(
                        f"{variable} names {root}, which {SITE_FILE} does not allow.",
                        at="environment",
                        hint=f"a folder in {listed(allowed)}",
                    )
        found[key] = allowed if wanted is None else wanted
    return Site(found["model_roots"], found["file_roots"], tuple(table.get(_FUNCTIONS, ())))


def is_under(path: str | Path, roots: Sequence[Path]) -> bool:
    """Return whether a path, with `..` and links resolved, is one of the roots or inside one."""
    real = Path(os.path.realpath(path))
    return any(real == root or root in real.parents for root in roots)


def listed(roots: Sequence[Path]) -> str:
    return ", ".join(map(str, roots)) or "no folder at all"


def check_files(table: Mapping[str, Any]) -> None:
    """Refuse an experiment that names a file outside of the allowed folders; the caller has made its paths absolute.

    Raises:
        ConfigError: a file is outside; the message names the key and the allowed folders.
    """
    roots = read_site().file_roots
    if roots is None:
        return
    for key in PATH_KEYS:
        value: Any = table
        for name in key:
            value = value.get(name) if isinstance(value, Mapping) else None
        # Other values are not paths: the name of a cluster, a function, the standard library.
        if isinstance(value, str) and os.path.isabs(value) and not is_under(value, roots):
            raise SpecError(
                f"{dotted(key)} is outside of the folders that this site allows.",
                key=key,
                value=value,
                hint=f"a path in {listed(roots)}",
            )


def _read_file(path: Path) -> dict[str, list[str]]:
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ConfigError(
                    f"{path} could be changed by others than the administrator (uid {found.st_uid}, mode "
                    f"{stat.S_IMODE(found.st_mode):04o}).",
                    hint=f"chown root {path} && chmod 644 {path}",
                )
            table = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # not TOML, not UTF-8
        hint = f"{', '.join(_SITE_EXAMPLE)}, each a list of strings"
        raise ConfigError(f"the site's file cannot be read: {error}.", at=str(path), hint=hint) from None
    for key, value in table.items():
        if key not in _SITE_EXAMPLE:
            hint = did_you_mean(key, _SITE_EXAMPLE)
            raise ConfigError(f"the site's file has an unknown key '{key}'.", at=str(path), hint=hint)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            what = "packages" if key == _FUNCTIONS else "folders"
            raise ConfigError(f"{key} is not a list of {what}.", at=str(path), hint=f"{key} = {_SITE_EXAMPLE[key]}")
    return table


def _roots(texts: Sequence[str], at: str) -> tuple[Path, ...]:
    for text in texts:
        if not os.path.isabs(text):
            raise ConfigError(f"'{text}' is not an absolute path.", at=at, hint="folders from / on")
    return tuple(Path(os.path.realpath(text)) for text in texts)
