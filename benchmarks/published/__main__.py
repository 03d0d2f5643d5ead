"""Plan the JAX runs of a file, and score the plans: `python -m benchmarks.published --rows FILE.csv --out DIR`.

Each row of a JAX trainer becomes an experiment file in DIR/experiments, which `meshkit plan` takes as it is; nothing is
changed afterwards. DIR/predictions.csv has a line for every row, blank with the reason if there is no plan. A second
run resumes, because meshkit keeps compiled programs.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.published.experiments import Run, Unplannable, experiment_of
from benchmarks.published.intervals import Residual, group_medians, stratum_name
from benchmarks.published.rows import Row, measured_step_s, read_rows, trainer_of
from meshkit.config import catalog
from meshkit.errors import MeshkitError

ROOT = Path(__file__).parents[2]
MOST_S = 1800  # Time limit of one plan.
COLUMNS = ("id", "measured_step_time_s", "predicted_step_time_s", "interval_low_s", "interval_high_s",
           "predicted_exposed_s", "predicted_peak_bytes", "configured", "program", "note")  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """A row beside its plan; None or "" is unknown."""

    row: Row
    trainer: str = ""
    """The JAX trainer of the row; "" if it is of another framework, or may be."""
    measured_s: float | None = None
    predicted_s: float | None = None
    interval_s: tuple[tuple[int, float, float], ...] = ()
    """The intervals of the step, each as (level in percent, low, high)."""
    exposed_s: float | None = None
    peak_bytes: int | None = None
    configured: str = ""
    """`fully` or `partly`, as `Run.configured`."""
    stratum: str = ""
    """The stratum of the plan."""
    note: str = ""
    """The assumptions of the plan, or the reason why there is none."""

    def inside(self, percent: int) -> bool | None:
        """Return whether the measured step lies in the interval of a level; None if either is missing."""
        if self.measured_s is None:
            return None
        return next((low <= self.measured_s <= high for p, low, high in self.interval_s if p == percent), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the rows of a file; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument(
        "--rows", type=Path, required=True, help="CSV with the columns of benchmarks/published/rows.csv"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for predictions.csv and experiments/")
    parser.add_argument("--only", default="", help="rows whose id, source, model or framework holds this text")
    parser.add_argument("--jobs", type=int, default=1, help="number of plans at a time")
    parser.add_argument("--files", action="store_true", help="write the experiment files, and plan nothing")
    options = parser.parse_args(arguments)
    try:
        rows = [row for row in read_rows(options.rows) if _wanted(row, options.only)]
        (options.out / "experiments").mkdir(parents=True, exist_ok=True)
        found = {row.id: Prediction(row, note="not reached yet") for row in rows}
        write(options.out, found.values())
    except (MeshkitError, OSError) as error:
        print(f"published: {error}", file=sys.stderr)
        return 2
    runs: dict[str, Run] = {}
    for row in rows:
        found[row.id] = _prepared(row, runs)
    files = {}
    for index, (name, run) in enumerate(runs.items()):
        stem = run.document["name"]
        files[name] = options.out / "experiments" / f"{stem if stem not in _stems(files) else f'{stem}_{index}'}.toml"
        files[name].write_text(run.text, encoding="utf-8")
    if not options.files:
        with ThreadPoolExecutor(max(1, options.jobs)) as pool:
            started = time.perf_counter()
            plans = pool.map(lambda name: (name, _planned(found[name], runs[name], files[name])), runs)
            for count, (name, prediction) in enumerate(plans, 1):
                found[name] = prediction
                write(options.out, found.values())
                left_s = (time.perf_counter() - started) / count * (len(runs) - count)
                print(f"[{count}/{len(runs)}] {_said(prediction)}, {left_s / 60:.0f} min left", file=sys.stderr)
    write(options.out, found.values())
    print("\n".join(summary(options.rows.name, list(found.values()))))
    return 0


def _wanted(row: Row, text: str) -> bool:
    cells = (row.id, *map(row.say, ("source", "source_ref", "model", "framework")))
    return text.lower() in " ".join(cells).lower()


def _stems(files: dict[str, Path]) -> set[str]:
    return {path.stem for path in files.values()}


def _prepared(row: Row, runs: dict[str, Run]) -> Prediction:
    """Return the prediction of a row before its plan, and add the row's experiment to `runs`."""
    measured, how = measured_step_s(row)
    trainer, why = trainer_of(row)
    blank = Prediction(row, trainer, measured)
    if not trainer:
        return replace(blank, note=_joined(why, how))
    try:
        runs[row.id] = run = experiment_of(row)
    except Unplannable as error:
        return replace(blank, note=_joined(str(error), how))
    except Exception as error:  # Whatever a row holds, only that row fails.
        return replace(blank, note=_joined(f"no experiment file: {type(error).__name__}: {str(error)[:200]}", how))
    return replace(blank, configured=run.configured, stratum=stratum_name(run.document), note="not planned yet")


def _planned(prediction: Prediction, run: Run, path: Path) -> Prediction:
    """Return the prediction with the results of `meshkit plan` on its file."""
    report, why = plan(path)
    row = prediction.row
    if report is None:
        return replace(prediction, configured="", note=_joined(f"not planned: {why}", run.note))
    step = report["step"]
    peaks = catalog.gpu(run.document["cluster"]["gpu"]).peak_flops
    peak = peaks.get(run.document["train"]["precision"], peaks.get("bf16"))
    measured, how = measured_step_s(row, step["model_flops"], peak)
    interval, reason = step["time_interval"], step["time_interval_reason"]
    ends = tuple((p, *interval[f"p{p}_s"]) for p in (50, 80)) if interval else ()
    return replace(
        prediction,
        measured_s=measured,
        predicted_s=step["time_s"],
        interval_s=ends,
        exposed_s=step["exposed_s"],
        peak_bytes=report["memory"]["peak_bytes"],
        note=_joined(run.note, how, f"no interval: {reason}" if reason else ""),
    )


def plan(path: Path) -> tuple[dict | None, str]:
    """Return the report of `meshkit plan` on a file, or None and the reason why there is none."""
    command = [sys.executable, "-m", "meshkit", "plan", str(path.resolve()), "--json", "--no-remedies"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=MOST_S)
    except subprocess.TimeoutExpired:
        return None, f"it takes more than {MOST_S} s"
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        said = next((line for line in lines if line.startswith("meshkit: ")), lines[-1] if lines else "")
        return None, said.removeprefix("meshkit: ")[:300] or f"meshkit plan exits with {done.returncode}"
    return json.loads(done.stdout), ""


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


def _said(p: Prediction) -> str:
    if p.predicted_s is None:
        return f"{p.row.id}: {p.note[:90]}"
    beside = f", measured {p.measured_s:.4g} s ({p.predicted_s / p.measured_s - 1:+.1%})" if p.measured_s else ""
    return f"{p.row.id}: {p.predicted_s:.4g} s{beside}"


def write(folder: Path, found: Iterable[Prediction]) -> None:
    """Write predictions.csv; it is replaced as a whole."""
    path = folder / "predictions.csv"
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for p in found:
            ends = next((ends[1:] for ends in p.interval_s if ends[0] == 80), (None, None))
            planned = p.predicted_s is not None
            cells = (p.row.id, p.measured_s, p.predicted_s, *ends, p.exposed_s, p.peak_bytes,
                     p.configured if planned else "", "ours" if planned else "", p.note)  # fmt: skip
            writer.writerow(["" if c is None else f"{c:.6g}" if isinstance(c, float) else c for c in cells])
    temporary.replace(path)


def summary(name: str, found: Sequence[Prediction]) -> list[str]:
    """Return lines that say how many JAX rows of a file were predicted, and how far off they are."""
    jax = [p for p in found if p.trainer]
    planned = [p for p in jax if p.predicted_s is not None]
    share = f" ({len(planned) / len(jax):.0%})" if jax else ""
    others = f"{len(found) - len(jax)} rows of other or unknown frameworks"
    lines = [f"{name}: {len(planned)} of {len(jax)} JAX rows predicted{share}; {others}."]
    scored = [
        (p, Residual(p.row.id, p.predicted_s / p.measured_s - 1, p.row.group, p.row.publisher, p.stratum))
        for p in planned
        if p.predicted_s and p.measured_s
    ]
    if not scored:
        return lines
    residuals = [r for _, r in scored]
    by_group, bias = group_medians(residuals)
    by_row = statistics.median(abs(r.error) for r in residuals)
    groups = {(r.group, r.stratum) for r in residuals}
    lines.append(
        f"{len(scored)} rows of {len(groups)} groups: median |error| {by_row:.1%} by row, {by_group:.1%} by group; "
        f"bias {bias:+.1%} (median over groups)."
    )
    lines += [_coverage(scored, percent, lambda r: (r.group, r.stratum)) for percent in (50, 80)]
    return lines


def _coverage(
    scored: Sequence[tuple[Prediction, Residual]], percent: int, group_of: Callable[[Residual], object]
) -> str:
    inside: dict[object, list[bool]] = {}
    for p, r in scored:
        if (found := p.inside(percent)) is not None:
            inside.setdefault(group_of(r), []).append(found)
    rows = [one for some in inside.values() for one in some]
    if not rows:
        return f"interval of {percent} %: no row has one."
    by_group = statistics.fmean(statistics.fmean(some) for some in inside.values())
    return (f"interval of {percent} %: covers {statistics.fmean(rows):.0%} of {len(rows)} rows, {by_group:.0%} of "
            f"{len(inside)} groups.")  # fmt: skip


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("published: stopped; the same command resumes with the programs compiled so far.", file=sys.stderr)
        sys.exit(130)
