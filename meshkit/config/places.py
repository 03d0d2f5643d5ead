"""What an experiment may name that lies elsewhere: what meshkit ships, and the folders that a site allows.

Shipped are models (`models.llama:Llama`) and experiments (`llama3_8b`). In a clone they lie at its top, `models/` and
`configs/experiments/`; in the wheel below the package. No installed package is called `models`, and a user's own comes
before.

    /etc/meshkit/site.toml, MESHKIT_MODEL_ROOTS, MESHKIT_FILE_ROOTS -> Site -> load_object, load

    model_roots = ["/opt/models", "/home/shared/experiments"]    # code that `pkg.mod:Name` may come from
    file_roots  = ["/data"]                                      # files and folders that an experiment may name

Without them an experiment may name any file, and code where `meshkit.config.user_code` finds it. An experiment file has
no key for it, so it cannot widen what is declared; the variables can only narrow what the site's file says. This
protects whoever runs somebody else's experiment; it does not confine code once it runs, nor a user who writes their
own.
"""

from __future__ import annotations

import ast
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshkit.config.document import PATH_KEYS
from meshkit.config.validate import SpecError, did_you_mean, dotted
from meshkit.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
MODELS = "models"
SITE_FILE = Path("/etc/meshkit/site.toml")
_VARIABLES = {"model_roots": "MESHKIT_MODEL_ROOTS", "file_roots": "MESHKIT_FILE_ROOTS"}


def shipped_folder() -> Path:
    """The folder that holds `models/` and `configs/experiments/`."""
    inside = _PACKAGE / "_shipped"
    return inside if inside.is_dir() else _PACKAGE.parent


def is_shipped_name(module_name: str) -> bool:
    """Whether a module may be one of the shipped models, by its name."""
    return module_name.partition(".")[0] == MODELS


@cache
def shipped_experiments() -> dict[str, Path]:
    """Name -> file of every shipped experiment."""
    return {file.stem: file for file in sorted((shipped_folder() / "configs" / "experiments").glob("*.toml"))}


def find_experiment(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The file of an experiment: as given, or a shipped one by its name where no such file is.

    Raises:
        ConfigError: a bare name of which there is neither.
    """
    name = os.fspath(path)
    if not name or "/" in name or os.sep in name or name.endswith(".toml") or os.path.isfile(name):
        return path
    known = shipped_experiments()
    if name in known:
        return known[name]
    if not name.isidentifier() or os.path.exists(name):
        return path
    hint = did_you_mean(name, known)
    raise ConfigError("there is no such experiment file, nor one that meshkit ships.", at=name, hint=hint)


def example_of(model: str, preset: str | None = None) -> dict[str, Any]:
    """The tables of a shipped experiment with that model: the one of its preset, else one on a CPU; empty if none."""
    return next((t for t in _tables(model) if t["model"].get("preset") == preset), None) or next(_on_cpu(model), {})


def _on_cpu(model: str | None = None) -> Iterator[dict[str, Any]]:
    return (table for table in _tables(model) if table["cluster"] == "cpu8")


def _tables(model: str | None = None) -> Iterator[dict[str, Any]]:
    """The shipped experiments with a model, or all."""
    tables = (tomllib.loads(file.read_text(encoding="utf-8")) for file in shipped_experiments().values())
    return (table for table in tables if model in (None, table["model"]["class"]))


def copy_model(name: str, folder: Path) -> tuple[str, list[Path]]:
    """Copies a shipped model, and the modules that it imports, to `models/` in a folder; overwrites nothing.

    Returns:
        Import path of the model, and the files that were written.

    Raises:
        ConfigError: no such model, a file that exists, or one that cannot be written.
    """
    paths = (table["model"]["class"] for table in _on_cpu())
    known = {path.partition(":")[0].removeprefix(f"{MODELS}."): path for path in paths}
    if name not in known:
        raise ConfigError(f"there is no shipped model '{name}'.", at="--copy-model", hint=did_you_mean(name, known))
    source, target = shipped_folder() / MODELS, folder / MODELS
    files = {target / f"{module}.py": source / f"{module}.py" for module in ["__init__", *_closure(source, name)]}
    if existing := next((file for file in files if os.path.lexists(file)), None):
        raise ConfigError(f"{existing} exists, and `new` overwrites nothing.", hint="another --out")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for file, original in files.items():
            file.write_text(original.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}.", at="--copy-model") from None
    return known[name], list(files)


def _closure(folder: Path, name: str) -> list[str]:
    """A model's module and those of its package that it imports, and what they import."""
    found, pending = set(), [name]
    while pending:
        module = pending.pop()
        if module in found:
            continue
        found.add(module)
        for node in ast.walk(ast.parse((folder / f"{module}.py").read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == MODELS:
                pending += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{MODELS}."):
                pending.append(str(node.module).split(".")[1])
    return sorted(found)


@dataclass(frozen=True)
class Site:
    """The declared folders, resolved; None where nothing is declared and any will do.

    Attributes:
        model_roots: that models, losses, data and metrics functions may come from.
        file_roots: that files and folders named by an experiment may lie in.
    """

    model_roots: tuple[Path, ...] | None = None
    file_roots: tuple[Path, ...] | None = None


def read_site() -> Site:
    """The site's file, narrowed by the variables.

    Raises:
        ConfigError: the file can be changed by others, or says something else; a root is not absolute, or a variable
            names one that the file does not allow.
    """
    declared = _read_file(SITE_FILE)
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
    return Site(found["model_roots"], found["file_roots"])


def is_under(path: str | Path, roots: Sequence[Path]) -> bool:
    """Whether a path, with `..` and links resolved, is one of the roots or lies in one."""
    real = Path(os.path.realpath(path))
    return any(real == root or root in real.parents for root in roots)


def listed(roots: Sequence[Path]) -> str:
    """The roots in words."""
    return ", ".join(map(str, roots)) or "no folder at all"


def check_files(table: Mapping[str, Any]) -> None:
    """Stops where an experiment names a file outside of the declared folders; its paths are absolute by now.

    Raises:
        ConfigError: which key, and where it may lie.
    """
    roots = read_site().file_roots
    if roots is None:
        return
    for key in PATH_KEYS:
        value: Any = table
        for name in key:
            value = value.get(name) if isinstance(value, Mapping) else None
        # what is no path: the name of a cluster, a function, the standard library
        if isinstance(value, str) and os.path.isabs(value) and not is_under(value, roots):
            raise SpecError(
                f"{dotted(key)} is outside of the folders that this site allows.",
                key=key,
                value=value,
                hint=f"a path in {listed(roots)}",
            )


def _read_file(path: Path) -> dict[str, tuple[Path, ...]]:
    """The folders that the site's file declares; none without a file."""
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
        hint = "model_roots and file_roots, each a list of folders"
        raise ConfigError(f"the site's file cannot be read: {error}.", at=str(path), hint=hint) from None
    for key, value in table.items():
        if key not in _VARIABLES:
            hint = did_you_mean(key, _VARIABLES)
            raise ConfigError(f"the site's file has an unknown key '{key}'.", at=str(path), hint=hint)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{key} is not a list of folders.", at=str(path), hint=f'{key} = ["/opt/models"]')
    return {key: _roots(value, str(path)) for key, value in table.items()}


def _roots(texts: Sequence[str], at: str) -> tuple[Path, ...]:
    """Absolute folders, with links resolved."""
    for text in texts:
        if not os.path.isabs(text):
            raise ConfigError(f"'{text}' is not an absolute path.", at=at, hint="folders from / on")
    return tuple(Path(os.path.realpath(text)) for text in texts)
