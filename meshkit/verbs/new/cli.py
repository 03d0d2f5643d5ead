"""`meshkit new`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.console import output, say
from meshkit.errors import ConfigError


def new(
    model: Annotated[
        str | None,
        typer.Option(metavar="PKG.MOD:CLASS", help="The model's import path; default models.llama:Llama."),
    ] = None,
    preset: Annotated[str | None, typer.Option(metavar="NAME", help="A preset of the model.")] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="A shipped cluster, or a file; default cpu8 (MaxText: dgx_h100).")
    ] = None,
    hosts: Annotated[int | None, typer.Option(metavar="N", min=1, help="How many hosts the cluster has.")] = None,
    copy_model: Annotated[
        str | None,
        typer.Option("--copy-model", metavar="NAME", help="Copy a shipped model next to the file, to edit: llama."),
    ] = None,
    from_maxtext: Annotated[
        str | None,
        typer.Option(
            "--from-maxtext",
            metavar="CONFIG.yml",
            help="Configuration file of MaxText to plan; base: its base.yml.",
        ),
    ] = None,
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="A key of MaxText, as ici_fsdp_parallelism=8.")
    ] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="File to write; default stdout.")] = None,
) -> None:
    """Write a commented experiment file; with --from-maxtext, one that plans MaxText's own training step."""
    from meshkit.verbs.new.template import copy_model as copy
    from meshkit.verbs.new.template import maxtext_experiment, new_experiment

    if copy_model is not None and model is not None:
        raise ConfigError("--copy-model already names the model.", at="--model", hint="one of the two")
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists, and `new` overwrites nothing.", hint="another --out")
    if set_ and from_maxtext is None:
        raise ConfigError(
            "--set changes only keys of MaxText's configuration.", at="--set", hint="--from-maxtext CONFIG.yml"
        )
    copied: list[Path] = []
    if copy_model is not None:
        model, copied = copy(copy_model, out.parent if out else Path())
    if from_maxtext is not None:
        if model or preset:
            raise ConfigError(
                "MaxText's configuration already names the model.", at="--from-maxtext", hint="--set model_name="
            )
        text = maxtext_experiment(from_maxtext, set_, cluster=cluster or "dgx_h100", hosts=hosts, file=out)
    else:
        text = new_experiment(
            model=model or "models.llama:Llama", preset=preset, cluster=cluster or "cpu8", hosts=hosts, file=out
        )
    if copied:
        say(f"copied {', '.join(map(str, copied))}; what you change there is what the experiment runs")
    if out is None:
        output(text, end="")
        return
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{out} cannot be written: {e.strerror}.") from None
    say(f"wrote {out}; next: meshkit explain {out}")
