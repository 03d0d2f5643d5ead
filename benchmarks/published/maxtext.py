"""Plan MaxText's rows from MaxText's own program: `python -m benchmarks.published.maxtext --out FILE.csv`.

Run it where MaxText is installed (`make check-maxtext` makes such an environment). Each row of `rows.csv` whose trainer
is MaxText becomes a `[program]` file, with cluster, mesh and `[xla]` from the row's own file and MaxText's options from
its columns. `--score` plans nothing; it prints the predictions of FILE.csv beside the measured times and the
predictions of our model.

The experiment files stay in `--files`, so that a row can be planned otherwise, for example with
`--set 'train.pgle="predicted"'`.

All rows differ from their runs in the same ways: they use today's MaxText and XLA, `cudnn_flash_jax` instead of
Transformer Engine's attention, and XLA's own latencies where a run had a profile.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.published.__main__ import plan
from benchmarks.published.experiments import experiment_of
from benchmarks.published.rows import Row, measured_step_s, read_rows, trainer_of
from meshkit.config.toml import to_toml

FOLDER = Path(__file__).parent
COLUMNS: tuple[str, ...] = ("id", "predicted_step_time_s", "predicted_exposed_s", "predicted_peak_bytes", "note")
_POLICY = re.compile(r"\((save_\w+)\)|^(\w+)$")


def program_of(row: Row) -> dict[str, Any]:
    """Return the `[program]` experiment of a row of MaxText's."""
    document = experiment_of(row).document
    train = document["train"]
    gpus = document["cluster"]["hosts"] * document["cluster"]["gpus_per_host"]
    found = _POLICY.search(row.say("recompute"))
    options: dict[str, Any] = {
        "model_name": row.say("model"),
        "per_device_batch_size": train["global_batch"] // gpus,
        "max_target_length": train["sequence_length"],
        "remat_policy": next(filter(None, found.groups())) if found else "minimal",
        "attention": "cudnn_flash_jax",
        "use_iota_embed": True,
        "logits_dot_in_fp32": False,
        "scan_layers": "7b" not in row.say("model"),
    }
    if row.say("precision") == "fp8":
        options["quantization"] = "fp8"
    return {
        "name": f"program-{row.id}",
        "cluster": document["cluster"],
        "mesh": document["mesh"],
        "program": {"make": "meshkit.integrations.maxtext:make", "options": options},
        "train": {"memory_fraction": train.get("memory_fraction", 0.92)},
        "xla": document.get("xla", {}),
    }


def main() -> int:
    """Plan or score; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.maxtext", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER / "maxtext_program.csv")
    parser.add_argument("--files", type=Path, default=Path("build/published-maxtext"), help="where experiment files go")
    parser.add_argument("--only", default="", help="rows whose id holds this text")
    parser.add_argument("--score", action="store_true", help="plan nothing, print the errors")
    options = parser.parse_args()
    rows = [row for row in read_rows(FOLDER / "rows.csv") if trainer_of(row)[0] == "maxtext" and options.only in row.id]
    if options.score:
        print("\n".join(table(rows, _read(options.out), _read(FOLDER / "predictions.csv"))))
        return 0
    done = _read(options.out) if options.out.exists() else {}
    for row in rows:
        if done.get(row.id, {}).get("predicted_step_time_s"):
            continue
        start = time.perf_counter()
        path = options.files / f"{row.id}.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_toml(program_of(row)), encoding="utf-8")
        report, why = plan(path)
        done[row.id] = {"id": row.id, "note": why}
        if report is not None:
            step, peak = report["step"], report["memory"]["peak_bytes"]
            values = f"{step['time_s']:.6g}", f"{step['exposed_s']:.6g}", str(peak)
            done[row.id] |= zip(COLUMNS[1:4], values)
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(done.values())
        print(f"{row.id}: planned in {time.perf_counter() - start:.0f} s {why}", file=sys.stderr)
    return 0


def _read(path: Path) -> dict[str, dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return {line["id"]: line for line in csv.DictReader(file)}


def table(rows: list[Row], theirs: dict[str, dict[str, Any]], ours: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the table of errors, and their medians."""
    lines = ["| row | measured | MaxText's program | our model's file |", "|---|---|---|---|"]
    errors: list[tuple[float, float]] = []
    for row in rows:
        measured, _ = measured_step_s(row)
        cells = [side.get(row.id, {}).get("predicted_step_time_s") for side in (theirs, ours)]
        if not measured or not all(cells):
            note = theirs.get(row.id, {}).get("note") or "not planned"
            lines.append(f"| {row.id} | {measured or '-'} | {note[:80]} | |")
            continue
        found = [float(cell or 0) / measured - 1 for cell in cells]
        errors.append((found[0], found[1]))
        said = " | ".join(f"{float(cell or 0):.2f} s ({error:+.1%})" for cell, error in zip(cells, found))
        lines.append(f"| {row.id} | {measured:.2f} s | {said} |")
    for name, side in zip(("MaxText's program", "our model's file"), zip(*errors)):
        median, bias = statistics.median(map(abs, side)), statistics.median(side)
        lines.append(f"{name}: {len(side)} rows, median error {median:.1%}, bias {bias:+.1%}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
