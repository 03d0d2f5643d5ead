"""What meshkit brings for experiments to name: models (`models.llama:Llama`), and experiments (`llama3_8b`).

In a clone they lie at its top, `models/` and `configs/experiments/`; in the wheel below the package. No installed
package is called `models`, and a user's own comes before.
"""

from __future__ import annotations

import ast
import os
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from meshkit.config.validate import did_you_mean
from meshkit.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
MODELS = "models"


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
