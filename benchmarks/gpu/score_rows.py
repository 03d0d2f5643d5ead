"""Compare the measured trainings of a folder with the plans made before they ran, in one table.

The folder has NAME/result.json and NAME/run/trace. The plans are in blind-GPU.json, committed before the trainings ran,
or in the folder's own blind.json. The tables go to rows.md. The column "today" has the prices that the present model
gives to the program that ran. No GPU is needed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.scoring import alone
from benchmarks.gpu.trainings import TRAININGS
from meshkit.errors import MeshkitError
from meshkit.report.compare import Comparison, compare
from meshkit.report.schema import Report
from meshkit.report.summarize import Machines
from meshkit.units import format_seconds
from meshkit.verbs.profile.profiler import measure_run

ROWS = "rows.md"
_LEAST = 0.01  # The least share of a step of an instruction among the worst.
_WORST = 10


@dataclass(frozen=True)
class Scored:
    """A training that ran."""

    name: str
    """The name of the training."""
    blind: dict[str, Any]
    """The summary of the plan that was made before it ran."""
    step_s: float
    """The median of the measured step times before and after the trace."""
    peak_bytes: float | None
    """The measured peak of device memory."""
    measured: Report | None
    """The report of the trace; None if it cannot be read."""
    today: Report | None
    """The present model's report of the program that ran; None if the trace has no program for a GPU."""

    @property
    def kernels(self) -> dict[str, tuple[float, float]]:
        """The seconds of each class of kernels, as (planned blind, measured)."""
        found = self.measured.kernels if self.measured else None
        seconds = {c.kind: c.time_s or 0.0 for c in found.classes} if found else {}
        return {kind: (self.blind["kernels_s"].get(kind, 0.0), s) for kind, s in seconds.items()}

    @property
    def compared(self) -> Comparison | None:
        """The program that ran, compared instruction by instruction with its prices of today."""
        return compare(self.today, self.measured) if self.today and self.measured else None


def score_rows(folder: Path) -> str:
    """Write the tables of a folder of trainings into it, and return them.

    Args:
        folder: results of `--rows`. Their plans, by name, are in its blind.json or else in that of their GPU.
    """
    rows = list(_scored(folder, _blind(folder)))
    text = "\n".join([*_table(rows), "", *_medians(rows), "", *_worst(rows)]) + "\n"
    (folder / ROWS).write_text(text, encoding="utf-8")
    return text


def _blind(folder: Path) -> dict[str, Any]:
    """Return the plans that were made before the folder's trainings ran; toy results are compared with H100 plans."""
    own, found = folder / "blind.json", folder.glob("row_*/values.json")
    gpu = next((key for f in found if (key := json.loads(f.read_text(encoding="utf-8")).get("gpu"))), "h100_sxm")
    path = own if own.exists() else Path(__file__).with_name(f"blind-{gpu}.json")
    return json.loads(path.read_text(encoding="utf-8"))


def _scored(folder: Path, blind: dict[str, Any]) -> Iterator[Scored]:
    for name in TRAININGS:
        path = folder / f"row_{name}" / "result.json"
        values = json.loads(path.read_text(encoding="utf-8"))["values"] if path.exists() else {}
        if "before_s" not in values or "step_s" not in blind.get(name, {}):
            continue
        step_s = statistics.median([values[key] for key in ("before_s", "after_s") if key in values])
        measured, today = _read(path.parent / "run")
        yield Scored(name, blind[name], step_s, values.get("peak_bytes"), measured, today)


def _read(run: Path) -> tuple[Report | None, Report | None]:
    """Return the report of a run's trace, and the model's report of the program in it."""
    try:
        found = measure_run(run)
    except MeshkitError as e:
        print(f"{run}: {e.message}")
        return None, None
    captured = found.captured
    if captured.schedule is None or captured.cluster is None or captured.cluster.is_cpu:
        return found.report, None
    machines = Machines(captured.placement, captured.cluster, processes_expected=1)
    record = captured.record
    today = alone(captured.schedule, captured.module, record.options or {}, machines, record.work)
    return found.report, today.model_copy(update={"program": found.report.program})


def _table(rows: Sequence[Scored]) -> Iterator[str]:
    yield "| training | step, blind | measured | measured / blind | today | compute | peak | class that is off most |"
    yield "|---" * 8 + "|"
    for row in rows:
        seen, today = row.measured, row.today
        compute = seen.step.compute_s if seen else None
        kind = max(row.kernels, key=lambda k: abs(row.kernels[k][0] - row.kernels[k][1]), default=None)
        pair = row.kernels[kind] if kind else (0.0, 0.0)
        off = f"{kind}: {format_seconds(pair[0])}, {format_seconds(pair[1])}" if kind else ""
        cells = [
            format_seconds(row.blind["step_s"]),
            format_seconds(row.step_s),
            _ratio(row.step_s, row.blind["step_s"]),
            _ratio(row.step_s, today.step.time_s if today else None),
            _ratio(compute, row.blind["compute_s"]),
            _ratio(row.peak_bytes, row.blind["peak_bytes"]),
            off,
        ]
        yield f"| `{row.name}` | {' | '.join(cells)} |"


def _ratio(measured: float | None, predicted: float | None) -> str:
    return f"{measured / predicted:.3f}" if measured and predicted else ""


def _medians(rows: Sequence[Scored]) -> Iterator[str]:
    steps = [abs(row.blind["step_s"] / row.step_s - 1) for row in rows]
    peaks = [abs(row.blind["peak_bytes"] / row.peak_bytes - 1) for row in rows if row.peak_bytes]
    for what, errors in (("step", steps), ("peak", peaks)):
        if errors:
            within = [sum(e <= bound for e in errors) for bound in (0.05, 0.10, 0.15)]
            yield (
                f"Blind errors of {len(errors)} {what}s: median {statistics.median(errors):.1%}, worst "
                f"{max(errors):.1%}; {within[0]} within 5 %, {within[1]} within 10 %, {within[2]} within 15 %."
            )


def _worst(rows: Sequence[Scored]) -> Iterator[str]:
    """Yield the instructions whose price of today is off by the largest factor, if they matter to their step."""
    found = []
    for row in rows:
        for ratio in compared.worst_ratios if (compared := row.compared) else ():
            pair = ratio.seconds
            if pair.ratio and max(pair.a or 0.0, pair.b or 0.0) >= _LEAST * row.step_s:
                found.append((max(pair.ratio, 1 / pair.ratio), row.name, ratio))
    yield "| training | instruction | kind | priced | measured | ratio | line |"
    yield "|---" * 7 + "|"
    for _, name, r in sorted(found, key=lambda each: -each[0])[:_WORST]:
        pair = r.seconds
        cells = (name, r.name, r.kind, format_seconds(pair.a or 0.0), format_seconds(pair.b or 0.0))
        yield f"| {' | '.join(cells)} | {pair.ratio:.2f} | {r.line or r.source or ''} |"
