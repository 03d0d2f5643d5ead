"""The command `meshkit tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.console import output, run_folder, say, stderr, stdout
from meshkit.verbs.arguments import CompileTimeoutOption, ExperimentArg, JobsOption, JsonOption, SetOption


def tune(
    experiment: ExperimentArg,
    *,
    set_: SetOption = [],  # noqa: B006
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Folder of the search, which resumes; default runs/NAME-tune."),
    ] = None,
    candidates: Annotated[int, typer.Option(metavar="N", min=1, help="How many variants to compile at most.")] = 64,
    axes: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Mesh axes that variants may use; default those of the rules."),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="N,...", help="Further sizes of the cluster, with the same global batch.")
    ] = None,
    objective: Annotated[
        str, typer.Option(metavar="WHAT", help="Minimize time at the experiment's size, or gpu_hours at any.")
    ] = "time",
    vary: Annotated[
        list[str],
        typer.Option(metavar="KEY=[A,B]", help="Values to try of a [program] key, as program.options.remat=[..]."),
    ] = [],  # noqa: B006
    jobs: JobsOption = None,
    compile_timeout: CompileTimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search the mesh, recomputation and micro-batches of an experiment.

    Rules out variants by closed forms, compiles the most promising ones, and writes the fastest that fits as
    winner.toml. Shows its gain over the experiment. Keeps the global batch. A killed search resumes if run again.
    """
    from meshkit.compile.program import compiling
    from meshkit.config.experiment import load_any
    from meshkit.search.tune_report import render
    from meshkit.search.tuner import WINNER_FILE, Sizes, parse_hosts, tune_experiment
    from meshkit.verbs.tune.page import progress_bar, write_tune_html

    folder = run_folder(out or Path("runs") / f"{load_any(experiment, set_).name}-tune")
    names = [name.strip() for name in axes.split(",")] if axes else None
    with compiling(timeout_s=compile_timeout), progress_bar(stderr()) as progress:
        report = tune_experiment(
            experiment,
            set_,
            out=folder,
            budget=candidates,
            jobs=jobs,
            axes=names,
            vary=vary,
            sizes=Sizes(parse_hosts(hosts), objective),
            progress=progress,
        )
    write_tune_html(report, folder / "tune.html")
    if as_json:
        output(report.to_json())
    else:
        stdout().print(render(report))
    files = ["tune.json", "tune.html", *([WINNER_FILE] if report.winner else [])]
    say(f"searched in {report.wall_s:.0f} s; wrote {', '.join(str(folder / name) for name in files)}")
