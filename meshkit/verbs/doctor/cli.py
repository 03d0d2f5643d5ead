"""`meshkit doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from meshkit.console import output, stderr
from meshkit.errors import ConditionError
from meshkit.verbs.arguments import JsonOption, SetOption


def doctor(
    experiment: Annotated[
        Path | None,
        typer.Argument(
            metavar="[EXPERIMENT]", help="An experiment that should run on this machine.", show_default=False
        ),
    ] = None,
    set_: SetOption = [],  # noqa: B006
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder that the run would write to.")] = Path(
        "runs"
    ),
    gang: Annotated[
        bool, typer.Option("--gang", help="Wait for the job's other processes, and name missing ones.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="How long to wait for the other processes.")
    ] = 60,
    json_: JsonOption = False,
) -> None:
    """Check the installation and this machine: packages, GPUs, variables, limits, disk; with --gang the whole job.

    Every finding comes with a remedy. The exit code is 3 if a job would fail or hang here.
    """
    from meshkit.config.experiment import load_any
    from meshkit.verbs.doctor.checkup import examine
    from meshkit.verbs.doctor.node import show

    loaded = load_any(experiment, set_) if experiment else None
    diagnosis = examine(loaded, folder=out, gang_timeout_s=timeout if gang else None)
    if json_:
        output(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        show(diagnosis, stderr())
    if diagnosis.errors:
        names = ", ".join(dict.fromkeys(c.check for c in diagnosis.errors))
        raise ConditionError(f"a job would fail or hang on {diagnosis.host}: {names}.")
