"""Reads a report that is written: one of this version, whose numbers can be reckoned with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshkit.config.bounded import read_regular
from meshkit.errors import TraceError
from meshkit.report.schema import REPORT_FILE, SCHEMA, Report

_LARGEST_BYTES, _LARGEST_NUMBER = 64 * 2**20, 1e40


def read_report(path: str | Path) -> Report:
    """Reads the report of a run.

    Args:
        path: a run folder that holds `report.json`, or that file.

    Raises:
        TraceError: there is no such file, or it is no report of this version.
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
    """The key of a number so large that sums and ratios of it may have no value."""
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
