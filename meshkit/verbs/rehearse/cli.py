"""`meshkit rehearse`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.console import run_folder, say, status
from meshkit.errors import ConfigError
from meshkit.verbs.arguments import (
    ExperimentArg,
    JsonOption,
    SetOption,
    show_report,
)


def rehearse(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Run folder; default runs/NAME-rehearsal.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="How many steps to capture.")] = 5,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Only read again the rehearsal in the folder --out, without a GPU.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run one GPU's part of a step on one real GPU.

    The program is that of the whole job. One of its processes runs here, with NCCL mocked. Kernel times and the
    allocator's peak are measured; communication is predicted, as in a plan. Writes a calibration that later plans can
    read.
    """
    from meshkit.config.experiment import Experiment, load_any
    from meshkit.report.folder import write_folder
    from meshkit.verbs.rehearse.rehearsal import check_gpu, measure, run

    loaded = load_any(experiment, set_)
    if isinstance(loaded, Experiment):
        loaded.train.check_runs(loaded.places)
    if recorded and out is None:
        raise ConfigError("--recorded reads the run folder of a rehearsal, but --out names none.", hint="--out DIR")
    if not recorded:
        check_gpu()
    folder = run_folder(out or Path("runs") / f"{loaded.name}-rehearsal")
    if not recorded:
        with status(f"running {loaded.name}: the part of one of {loaded.cluster.num_gpus} GPUs"):
            run(loaded, folder, steps=steps)
    with status("reading what was captured"):
        rehearsed = measure(loaded, folder)
    write_folder(rehearsed.report, folder, rehearsed.timeline, title=loaded.name)
    show_report(rehearsed.report, as_json, loaded.name)
    say(f"wrote {folder / 'report.json'}, {folder / 'report.html'} and {rehearsed.calibration}")
