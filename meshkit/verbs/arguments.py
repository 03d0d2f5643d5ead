"""Arguments and options that several verbs share."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from meshkit.console import output, stdout


def complete_experiment(incomplete: str) -> list[str]:
    """Return the folders, TOML files and shipped experiments whose names begin with `incomplete`, for the shell."""
    from meshkit.config.user_code import shipped_experiments

    found = sorted(
        path for path in glob.glob(f"{glob.escape(incomplete)}*") if os.path.isdir(path) or path.endswith(".toml")
    )
    return [*(f"{path}/" if os.path.isdir(path) else path for path in found)] + [
        name for name in shipped_experiments() if name.startswith(incomplete)
    ]


ExperimentArg = Annotated[
    Path,
    typer.Argument(
        metavar="EXPERIMENT",
        help="Experiment file (TOML), or the name of a shipped one: llama3_8b.",
        show_default=False,
        autocompletion=complete_experiment,
    ),
]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; repeatable.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to write report.json and report.html.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]
NoCacheOption = Annotated[
    bool, typer.Option("--no-cache", help="Neither read nor write the cache of compiled programs.")
]
CompileTimeoutOption = Annotated[
    int | None,
    typer.Option(
        "--compile-timeout",
        metavar="SECONDS",
        min=1,
        max=999_999_999,
        help="Time limit of one compile; default half an hour.",
    ),
]

JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", metavar="N", min=1, help="How many plans run at a time; default one for each CPU."),
]


def show_report(report: Any, as_json: bool, title: str) -> None:
    """Print a report on stdout, as JSON or as tables."""
    if as_json:
        output(report.to_json())
        return
    from meshkit.report.views.report import render

    stdout().print(render(report, title=title))
