"""`python -m benchmarks.published --rows FILE.csv --out DIR`: the command line of the replay."""

from __future__ import annotations

import argparse
import csv
import sys
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks.published.experiments import Run, resolve
from benchmarks.published.kernels import calibration_text
from benchmarks.published.reasons import with_repeats
from benchmarks.published.replay import Prediction
from benchmarks.published.rows import Row, measured_step_time_s, read_rows
from benchmarks.published.runner import replay
from meshkit.errors import MeshkitError

COLUMNS = (
    "id",
    "measured_step_time_s",
    "predicted_step_time_s",
    "predicted_exposed_s",
    "predicted_peak_bytes",
    "note",
    "interval_low_s",
    "interval_high_s",
    "configured",
    "handling",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Replays the rows of a file; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="CSV with the columns of the published runs")
    parser.add_argument("--out", type=Path, required=True, help="folder for predictions.csv; a second run resumes")
    parser.add_argument("--only", default="", help="rows whose id, source or model holds this text")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile and simulate")
    parser.add_argument("--simulate-only", action="store_true", help="leave rows blank whose program is not compiled")
    parser.add_argument("--print", action="store_true", dest="show", help="print the experiment files and stop")
    parser.add_argument("--files", action="store_true", help="write those of JAX and torchtitan into --out, and stop")
    options = parser.parse_args(arguments)
    try:
        rows = [row for row in read_rows(options.rows) if _wanted(row, options.only)]
        options.out.mkdir(parents=True, exist_ok=True)
    except (MeshkitError, OSError) as error:
        print(f"published: {error}", file=sys.stderr)
        return 2
    if options.show:
        return _show(rows)
    if options.files:
        return _write_files(rows, options.out)
    done: dict[str, Prediction] = {}
    started = time.perf_counter()
    write(options.out, rows, done)
    for found in replay(rows, options.out, max(1, options.jobs), not options.simulate_only):
        done[found.id] = found
        _say(found, len(done), len(rows), time.perf_counter() - started)
        if not options.simulate_only or len(done) == len(rows):
            write(options.out, rows, done)
    return 0


def _wanted(row: Row, text: str) -> bool:
    return text.lower() in " ".join((row.id, row.source, row.say("model"))).lower()


def _show(rows: Iterable[Row]) -> int:
    for row in rows:
        run = resolve(row)
        print(f"# {row.id}: {run}" if isinstance(run, str) else f"# {row.id}: {'; '.join(run.assumed)}\n{run.toml}")
    return 0


def experiment_files(rows: Iterable[Row]) -> dict[str, str]:
    """File name -> experiment file, under a comment that says where its row is from, of the rows whose whole step
    `meshkit plan` compiles as it is: JAX's, which it predicts, and torchtitan's; with the calibrations they name."""
    files = {}
    for row in rows:
        run = resolve(row)
        if isinstance(run, Run) and run.whole and (run.handling == "none" or run.framework.name == "torchtitan"):
            files[f"{run.document['name']}.toml"] = f"{_provenance(run)}\n{run.toml}"
            if calibration := run.document["cluster"].get("calibration"):
                files[calibration] = calibration_text(calibration)
    return files


def _provenance(run: Run) -> str:
    measured_s, how = measured_step_time_s(run.row, run.model_flops)
    said = f"{measured_s:.4g} s a step{f' ({how})' if how else ''}" if measured_s else "no step time"
    plan = {
        "none": "What `meshkit plan` of this file says is what the replay predicts.",
        "adjusted": "The replay changes the planned step as FSDP in PyTorch runs it: docs/concepts/validation.md.",
    }[run.handling]
    lines = [f"{run.row.id}: {run.row.source}", f"Published: {said}. {plan}"]
    for text in run.assumed:
        lines.append(f"{'Row' if text.startswith('row ') else 'Assumed:'} {text.lstrip('!').removeprefix('row ')}.")
    return "".join(f"# {part}\n" for line in lines for part in textwrap.wrap(line, 118, break_long_words=False))


def _write_files(rows: Iterable[Row], folder: Path) -> int:
    for name, text in experiment_files(rows).items():
        (folder / name).write_text(text, encoding="utf-8")
    return 0


def _say(found: Prediction, count: int, total: int, elapsed_s: float) -> None:
    left_s = elapsed_s / count * (total - count)
    if found.error is not None:
        result = f"{found.predicted_s:.4g} s, measured {found.measured_s:.4g} s ({found.error:+.1%})"
    else:
        result = f"{found.predicted_s:.4g} s" if found.predicted_s else found.note[:90]
    print(f"[{count}/{total}] {found.id}: {result}; {found.seconds:.1f} s, {left_s / 60:.0f} min left", file=sys.stderr)


def write(folder: Path, rows: Iterable[Row], done: dict[str, Prediction]) -> None:
    """predictions.csv, as the contract has it, and details.csv with everything that is known of each row."""
    found = with_repeats([done.get(row.id) or Prediction(row.id, row.source, note="not reached yet") for row in rows])
    table: list[dict[str, object]] = [
        dict(
            zip(
                COLUMNS,
                (
                    p.id,
                    p.measured_s,
                    p.predicted_s,
                    p.exposed_s,
                    p.peak_bytes,
                    p.note,
                    p.interval_low_s,
                    p.interval_high_s,
                    _configured(p),
                    p.handling,
                ),
                strict=True,
            )
        )
        for p in found
    ]
    _write(folder / "predictions.csv", COLUMNS, table)
    _write(folder / "details.csv", [f.name for f in fields(Prediction)], [asdict(p) for p in found])


def _configured(p: Prediction) -> str:
    return ("fully" if p.configured else "partly") if p.predicted_s else ""


def _write(path: Path, columns: Sequence[str], table: Iterable[dict[str, object]]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows({k: _cell(v) for k, v in row.items()} for row in table)
    temporary.replace(path)


def _cell(value: object) -> object:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
