"""`meshkit compare`: compare two reports, and check conditions on the comparison."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshkit.console import output, run_folder, status, stdout
from meshkit.errors import ConditionError
from meshkit.verbs.arguments import JsonOption

if TYPE_CHECKING:
    from meshkit.report.schema import Report


def compare(
    a: Annotated[Path, typer.Argument(show_default=False, help="Run folder, report.json, or a JAX trace.")],
    b: Annotated[Path, typer.Argument(show_default=False, help="Run folder, report.json, or a JAX trace.")],
    fail_if: Annotated[
        list[str],
        typer.Option(metavar="CONDITION", help="Exit with 3 if B, compared with A, meets CONDITION; repeatable."),
    ] = [],  # noqa: B006
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the comparison as HTML.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare two reports by ratios; usable as a regression check in CI.

    Traces (FILE.xplane.pb, or folders of them) are measured first. The result names what became slower.
    """
    from meshkit.report.compare import check_condition, condition_text
    from meshkit.report.compare import compare as compare_reports
    from meshkit.report.views.report import render, write_html

    first, second = _report(a), _report(b)
    comparison = compare_reports(first, second)
    checked = tuple(check_condition(comparison, condition) for condition in fail_if)
    comparison = comparison.model_copy(update={"conditions": checked})
    if html is not None:
        run_folder(html.parent)
        write_html(first, html, other=second, title=f"{a.name} and {b.name}")
    if as_json:
        output(comparison.to_json())
    else:
        stdout().print(render(comparison))
    met = [condition_text(c) for c in checked if c.met]
    if met:
        raise ConditionError(
            f"{b}, compared with {a}, meets {len(met)} of {len(checked)} conditions: {'; '.join(met)}."
        )


def _report(path: Path) -> Report:
    from meshkit.report.folder import read_report
    from meshkit.report.schema import REPORT_FILE
    from meshkit.trace.loose import is_loose

    if (path / REPORT_FILE).is_file() or not is_loose(path):
        return read_report(path)
    from meshkit.verbs.profile.profiler import TracedJob, measure_traces

    with status(f"reading the trace {path}"):
        found = measure_traces(path, TracedJob())
        return found.write(None, found.price())
