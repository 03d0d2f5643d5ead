"""The report's files in a run folder: report.json, report.html, trace.json.gz, and the prediction of what was measured.

report.json     the report of the last verb
report.html     its page; predicted and measured side by side where a prediction is known
trace.json.gz   the steps for Perfetto
plan.json       the prediction that a measurement is compared with
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from meshkit.errors import TraceError
from meshkit.report.compare import plan_warnings
from meshkit.report.history import read_goodput_part, read_history, trend_warnings
from meshkit.report.reading import read_report
from meshkit.report.schema import REPORT_FILE, Report
from meshkit.report.views.html import write_html
from meshkit.report.views.perfetto import TRACE_FILE, write_perfetto
from meshkit.timeline import Timeline

PLAN_FILE = "plan.json"
PAGE_FILE = "report.html"


def write_folder(
    report: Report,
    folder: str | Path,
    timeline: Timeline | None = None,
    *,
    predicted: Report | None = None,
    title: str | None = None,
) -> Report:
    """Writes a report's files, and returns the report as written: with the history and the goodput of the run.

    Args:
        report: of the plan, or of the measurement.
        folder: the run folder.
        timeline: what it summarizes, for the page and for Perfetto.
        predicted: what to compare a measurement with; None looks in the folder (see `find_prediction`).
        title: what the page is about; the folder's name by default.
    """
    folder = Path(folder)
    title = title or folder.resolve().name
    measured = report.source != "plan"
    if measured:
        predicted = predicted or find_prediction(folder)
        history = read_history(folder)
        warnings = (*report.warnings, *trend_warnings(history))
        goodput = read_goodput_part(folder)
        report = report.model_copy(update={"history": history, "goodput": goodput, "warnings": warnings})
        if predicted is not None:
            predicted.write(folder / PLAN_FILE)
            report = report.model_copy(update={"warnings": (*plan_warnings(predicted, report), *report.warnings)})
    report.write(folder)
    trace = write_perfetto(timeline, folder, title=title, sources=_sources(report)) if timeline else None
    page, trace_file = folder / PAGE_FILE, TRACE_FILE if trace else None
    if measured and predicted is not None:
        write_html(predicted, page, other=report, other_timeline=timeline, title=title, trace_file=trace_file)
    else:
        write_html(report, page, timeline, title=title, trace_file=trace_file)
    return report


def _sources(report: Report) -> dict[str, str]:
    """Name of an instruction -> line of source and op_name path."""
    ops = [op for row in report.communication for op in row.ops]
    kernels = [op for c in (report.kernels.classes if report.kernels else ()) for op in c.ops]
    return {op.name: " ".join(text for text in (op.line, op.source) if text) for op in (*ops, *kernels)}


def find_prediction(folder: str | Path) -> Report | None:
    """The prediction that a run folder holds: `plan.json`, or the `report.json` of a plan made into the same folder.

    Raises:
        TraceError: there is a `plan.json` that is no report.
    """
    folder = Path(folder)
    if (folder / PLAN_FILE).is_file():
        return read_report(folder / PLAN_FILE)
    with contextlib.suppress(TraceError):  # none, or a damaged one, which will be written anew
        report = read_report(folder / REPORT_FILE)
        return report if report.source == "plan" else None
    return None
