"""`meshkit new`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.console import output, say
from meshkit.errors import ConfigError


def new(
    model: Annotated[
        str, typer.Option(metavar="PKG.MOD:CLASS", help="The model's import path.")
    ] = "models.llama:Llama",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="File to write; stdout without it.")] = None,
) -> None:
    """Write a commented experiment file."""
    from meshkit.verbs.new.template import new_experiment

    text = new_experiment(model=model)
    if out is None:
        output(text, end="")
        return
    if out.exists():
        raise ConfigError(f"{out} exists, and `new` overwrites nothing.", hint="another --out")
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{out} cannot be written: {e.strerror}.") from None
    say(f"wrote {out}; next: meshkit explain {out}")
