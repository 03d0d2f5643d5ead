"""`python -m benchmarks.published.blind`: how far off the predictions of blind.csv are, which was committed before.

`--predictions blind_nvfp4.csv` scores those of NVFP4, `blind_jax.csv` new runs of JAX. Whether a row is stated in full
is as the replay has it today (blind.csv has what it said then), but without what was looked up after blind.csv. Rows of
one source, model, precision and GPU are correlated: `by group` is the median over such groups of their medians.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.published.experiments import resolve
from benchmarks.published.rows import measured_step_time_s, read_rows

PREDICTED = Path(__file__).with_name("blind.csv")
NVFP4 = Path(__file__).with_name("blind_nvfp4.csv")
JAX = Path(__file__).with_name("blind_jax.csv")
_DATA = Path(__file__).parents[2] / "tests" / "data"
ROWS = tuple(_DATA / f"{name}.csv" for name in ("blind_runs", "blind_jax_runs", "published_runs"))


def lines(predicted: Path = PREDICTED) -> Iterator[str]:
    """Two tables in Markdown: each prediction of a file, and the median errors."""
    by_id = {row.id: row for path in ROWS for row in read_rows(path)}
    errors: dict[str, dict[tuple[str, ...], list[tuple[float, bool]]]] = defaultdict(lambda: defaultdict(list))
    yield "| row | GPUs | precision | configured | measured s | predicted s | error | inside its 80 % |"
    yield "|---|---|---|---|---|---|---|---|"
    with predicted.open(encoding="utf-8", newline="") as file:
        for p in csv.DictReader(file):
            row, run = by_id[p["id"]], resolve(by_id[p["id"]])
            if isinstance(run, str) or not p["predicted_step_time_s"]:
                continue
            if not (measured := measured_step_time_s(row, run.model_flops)[0]):
                continue
            step_s = float(p["predicted_step_time_s"])
            inside = float(p["interval_low_s"]) <= measured <= float(p["interval_high_s"])
            looked_up = row.correction and predicted == PREDICTED
            stated = "fully" if run.configured and not looked_up else "partly"
            kind = "experts" if p["family"].endswith("experts") else f"dense, {stated} stated"
            group = (row.say("source"), row.say("model"), p["precision"], p["gpu"])
            errors[kind][group].append((abs(step_s / measured - 1), inside))
            yield (
                f"| {p['id']} | {p['num_gpus']} {p['gpu']} | {p['precision']} | {stated} | {measured:.4g} | "
                f"{step_s:.4g} | {step_s / measured - 1:+.1%} | {'yes' if inside else 'no'} |"
            )
    yield from ("", "| rows | median error | by group | inside 80 % |", "|---|---|---|---|")
    for kind, groups in sorted(errors.items()):
        every = [found for members in groups.values() for found in members]
        by_row = statistics.median(error for error, _ in every)
        by_group = statistics.median(statistics.median(error for error, _ in found) for found in groups.values())
        inside = sum(inside for _, inside in every)
        yield f"| {kind} ({len(every)} rows, {len(groups)} groups) | {by_row:.1%} | {by_group:.1%} | {inside} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predictions", type=Path, default=PREDICTED, help="default: blind.csv")
    print("\n".join(lines(parser.parse_args().predictions.resolve())))
