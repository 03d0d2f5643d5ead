"""Print what a user sees of meshkit, one line each: verbs, flags, schema keys, public names, exit codes and lint codes.

Run `python -m benchmarks.surface` in two checkouts; a diff of the outputs shows what a change added or removed.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import meshkit as mk
from meshkit import cli, errors


def commands(command: Any, path: str) -> Iterator[str]:
    """Yield a line for every verb's arguments and options, with a mark on required ones."""
    for p in command.params:
        yield f"cli {path} {' '.join(sorted(p.opts))}{' (required)' if p.required else ''}"
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{path} {name}")


def keys(schema: Any, path: str, definitions: dict[str, Any], within: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a line for every key of a JSON Schema, with its type."""
    if isinstance(schema, list):
        for part in schema:
            yield from keys(part, path, definitions, within)
    elif isinstance(schema, dict):
        if "$ref" in schema:
            name = schema["$ref"].rsplit("/", 1)[-1]
            if name not in within:
                yield from keys(definitions[name], path, definitions, (*within, name))
        for name, part in schema.get("properties", {}).items():
            yield f"schema {path}.{name}: {part.get('type', '')}".rstrip(": ")
            yield from keys(part, f"{path}.{name}", definitions, within)
        for word in ("items", "anyOf", "oneOf", "allOf", "prefixItems", "additionalProperties"):
            yield from keys(schema.get(word), path, definitions, within)


def schemas() -> Iterator[str]:
    """Yield the lines of every schema that `meshkit schema` prints."""
    for name in ("report", "compare", "explain", "topo", "bench", "tune", "scaling", "doctor", "experiment"):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            cli.main(["schema", name])
        schema = json.loads(printed.getvalue())
        yield from keys(schema, name, schema.get("$defs", {}))


def main() -> None:
    """Print the surface, sorted."""
    lines = set(commands(typer.main.get_command(cli.app), "meshkit"))
    lines |= set(schemas())
    lines |= {f"name meshkit.{name}" for name in mk.__all__}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    lines |= {f"exit {kind.__name__} {kind.exit_code}" for kind in kinds if hasattr(kind, "exit_code")}
    page = (Path(__file__).resolve().parents[1] / "docs/reference/lint.md").read_text(encoding="utf-8")
    lines |= {f"lint {code}" for code in re.findall(r"^- `(\w+)` \(", page, re.MULTILINE)}
    print(*sorted(lines), sep="\n")


if __name__ == "__main__":
    main()
