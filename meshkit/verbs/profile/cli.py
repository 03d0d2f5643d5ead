"""`meshkit profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.console import output, say, status, stdout
from meshkit.verbs.arguments import (
    JsonOption,
    RunArg,
    show_report,
)


def profile(
    run: RunArg,
    predicted: Annotated[
        Path | None, typer.Option("--plan", metavar="RUN", help="A plan's report, to show predicted beside measured.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a run from its trace.

    Overlapped and exposed communication per mesh axis, link and collective. Predicted beside measured with --plan, or
    where the run folder holds the plan (plan.json, or a plan made with the same --out).
    """
    from meshkit.report.compare import compare as compare_reports
    from meshkit.report.folder import find_prediction
    from meshkit.report.schema import read_report
    from meshkit.report.views.compare import render as render_comparison
    from meshkit.verbs.profile.profiler import profile_run

    folder = run if run.is_dir() else run.parent
    other = read_report(predicted) if predicted else find_prediction(folder)
    with status(f"reading the trace of {run}"):
        report = profile_run(run, predicted=other)
    show_report(report, as_json, run.name)
    if other is not None and not as_json:
        output("")
        stdout().print(render_comparison(compare_reports(other, report)))
    say(f"wrote report.json, report.html and trace.json.gz into {folder}")
