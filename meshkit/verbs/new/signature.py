"""What a model's source says that it takes, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshkit.config.places import is_shipped_name, shipped_folder
from meshkit.config.user_code import find_source

_GIVEN = ("self", "rngs", "parent", "name")  # by meshkit, or by linen


@dataclass(frozen=True)
class Signature:
    """Options of a class or function: all names, those without a default with their annotation, and its presets."""

    names: list[str]
    needed: dict[str, str]
    presets: list[str] = field(default_factory=list)


def read_signature(model: str, folders: Iterable[Path]) -> Signature | None:
    """The options of `"pkg.mod:Name"`; None where its source is not found or says nothing."""
    module, _, name = model.partition(":")
    shipped = [shipped_folder()] if is_shipped_name(module) else []
    file = find_source(module, [*folders, *shipped])
    try:
        tree = ast.parse(file.read_text(encoding="utf-8")) if file else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return None
    made = next((node for node in tree.body if getattr(node, "name", None) == name), None)
    if isinstance(made, ast.ClassDef):
        init = next((n for n in made.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        options = dict(_arguments(init) if init else _fields(made))
    elif isinstance(made, ast.FunctionDef):
        options = dict(_arguments(made))
    else:
        return None
    options = {key: kind for key, kind in options.items() if key not in _GIVEN}
    needed = {key: kind for key, kind in options.items() if kind is not None}
    return Signature(list(options), needed, _presets(tree))


def _arguments(function: ast.FunctionDef) -> Iterator[tuple[str, str | None]]:
    """Name and annotation of each argument; None for one that has a default."""
    given = function.args
    places = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(places) - len(given.defaults)) + list(given.defaults)
    for argument, default in [*zip(places, defaults), *zip(given.kwonlyargs, given.kw_defaults)]:
        yield argument.arg, None if default is not None else _text(argument.annotation)


def _fields(made: ast.ClassDef) -> Iterator[tuple[str, str | None]]:
    """Name and annotation of each field, as of a dataclass; None for one that has a default."""
    for node in made.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, None if node.value is not None else _text(node.annotation)


def _text(annotation: ast.expr | None) -> str:
    return ast.unparse(annotation) if annotation else "no default"


def _presets(tree: ast.Module) -> list[str]:
    """Keys of the module's `PRESETS`."""
    tables = (node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict))
    named = (n.value for n in tables if any(isinstance(t, ast.Name) and t.id == "PRESETS" for t in n.targets))
    keys = next((table.keys for table in named if isinstance(table, ast.Dict)), [])
    return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
