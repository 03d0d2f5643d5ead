"""Write and read the report's files in a run folder.

report.json     the report of the last command (plan, rehearse or profile)
report.html     the report as a page; a measurement's page also has the prediction, if there is one
trace.json.gz   the timeline for Perfetto
plan.json       the prediction that the measurement is compared with
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshkit.config.files import read_regular
from meshkit.config.sections import PGLE_OPTION, PREDICTED
from meshkit.errors import TraceError
from meshkit.report.compare import with_predicted
from meshkit.report.measured import read_goodput_part, read_history, trend_warnings
from meshkit.report.schema import REPORT_FILE, SCHEMA, FeedbackPart, Report
from meshkit.report.views.perfetto import TRACE_FILE, write_perfetto
from meshkit.report.views.report import write_html
from meshkit.timeline import Timeline

PLAN_FILE = "plan.json"
PAGE_FILE = "report.html"
# A report with a larger file size or a larger number is refused.
_LARGEST_BYTES, _LARGEST_NUMBER = 64 * 2**20, 1e40


def write_folder(
    report: Report,
    folder: str | Path,
    timeline: Timeline | None = None,
    *,
    predicted: Report | None = None,
    title: str | None = None,
    keep: bool = True,
) -> Report:
    """Write a report's files; return the written report, with history, goodput and prediction added to a measurement.

    Args:
        timeline: the timeline that the report summarizes, for the page and for Perfetto.
        predicted: the prediction to compare a measurement with; None looks in the folder (see `find_prediction`).
        title: the title of the page; by default the folder's name.
        keep: whether to write the prediction to `plan.json`, where later measurements find it.

    Raises:
        TraceError: the folder has a `plan.json` that is not a report.
        ConfigError: Plotly, which draws the page, is not installed.
        OSError: a file cannot be written.
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
            if keep:
                predicted.write(folder / PLAN_FILE)
            report = with_predicted(report, predicted)
    report.write(folder)
    about = {"title": title, "sources": _sources(report), "device": report.device}
    trace = write_perfetto(timeline, folder, **about) if timeline else None
    page, trace_file = folder / PAGE_FILE, TRACE_FILE if trace else None
    if measured and predicted is not None:
        write_html(predicted, page, other=report, other_timeline=timeline, title=title, trace_file=trace_file)
    else:
        write_html(report, page, timeline, title=title, trace_file=trace_file)
    return report


def _sources(report: Report) -> dict[str, str]:
    ops = [op for row in report.communication for op in row.ops]
    kernels = [op for c in (report.kernels.classes if report.kernels else ()) for op in c.ops]
    return {op.name: " ".join(text for text in (op.line, op.source) if text) for op in (*ops, *kernels)}


def find_prediction(folder: str | Path) -> Report | None:
    """Return the prediction in a run folder: `plan.json`, or the `report.json` of a plan.

    Raises:
        TraceError: `plan.json` is not a report.
    """
    folder = Path(folder)
    if (folder / PLAN_FILE).is_file():
        return read_report(folder / PLAN_FILE)
    with contextlib.suppress(TraceError):  # A missing or damaged report.json will be written anew.
        report = read_report(folder / REPORT_FILE)
        return report if report.source == "plan" else None
    return None


def read_report(path: str | Path) -> Report:
    """Read the report of a run.

    Args:
        path: a run folder with a `report.json`, or the file itself.

    Raises:
        TraceError: the file does not exist, or it is not a report of this version.
    """
    path = Path(path)
    file = path / REPORT_FILE if path.is_dir() else path
    try:
        text = read_regular(file, _LARGEST_BYTES).decode("utf-8")
    except OSError as e:
        hint = "a run folder with report.json, or `meshkit profile RUN` to write one from its trace"
        why = "" if isinstance(e, FileNotFoundError) else f": {e.strerror}"
        raise TraceError(f"there is no report to read{why}.", at=str(file), hint=hint) from None
    except UnicodeDecodeError:
        raise TraceError("this file is not a report: it is not text.", at=str(file)) from None
    hint = "a report.json as meshkit wrote it"
    try:
        report = Report.model_validate_json(text)
    except ValidationError as e:
        raise TraceError(f"this file is not a {SCHEMA}: {_first_error(e)}.", at=str(file), hint=hint) from None
    if too_large := _find_too_large(report.model_dump()):
        raise TraceError(f"this file is not a {SCHEMA}: {too_large} is out of range.", at=str(file), hint=hint)
    return report


def _find_too_large(document: Any) -> str | None:
    """Return the key of a number above the limit, since sums and ratios of it may overflow; None if there is none."""
    pending = [("", document)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            pending += [(f"{key}.{name}" if key else str(name), item) for name, item in value.items()]
        elif isinstance(value, list | tuple):
            pending += [(key, item) for item in value]
        elif isinstance(value, int | float) and abs(value) > _LARGEST_NUMBER:
            return key
    return None


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(str(p) for p in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    return f"{where + ': ' if where else ''}{first['msg'].rstrip('.')}{more}"


def feedback_part(options: Mapping[str, Any] | None) -> FeedbackPart | None:
    """Return the program and the step before a recompile with measured costs; None if the program was not recompiled.

    The compiler's options name the profile with these costs, which is in the folder of the earlier run.
    """
    named = (options or {}).get(PGLE_OPTION)
    if not named or named == PREDICTED:
        return None
    profile = Path(str(named))
    try:
        before = read_report(profile if profile.is_dir() else profile.parent)
    except (TraceError, OSError, ValueError):  # There is no report, or the text from a foreign sidecar is no path.
        return FeedbackPart(profile=str(named))
    return FeedbackPart(
        profile=str(named),
        before_fingerprint=before.program.fingerprint,
        before_time_s=before.step.time_s,
        before_exposed_s=before.step.exposed_s,
    )
