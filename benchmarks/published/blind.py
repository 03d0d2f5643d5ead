"""`python -m benchmarks.published.blind`: how far off the predictions of blind.csv are, which was committed before.

Whether a row is stated in full is as the replay has it today (blind.csv has what it said then). Rows of one source,
model, precision and GPU are correlated: `by group` is the median over such groups of their medians.
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
ROWS = Path(__file__).parents[2] / "tests" / "data" / "blind_runs.csv"


def lines(rows: Path) -> Iterator[str]:
    """Two tables in Markdown: each prediction, and the median errors."""
    by_id = {row.id: row for row in read_rows(rows)}
    errors: dict[str, dict[tuple[str, ...], list[tuple[float, bool]]]] = defaultdict(lambda: defaultdict(list))
    yield "| row | GPUs | precision | configured | measured s | predicted s | error | inside its 80 % |"
    yield "|---|---|---|---|---|---|---|---|"
    with PREDICTED.open(encoding="utf-8", newline="") as file:
        for p in csv.DictReader(file):
            row, run = by_id[p["id"]], resolve(by_id[p["id"]])
            if isinstance(run, str) or not (measured := measured_step_time_s(row, run.model_flops)[0]):
                continue
            predicted = float(p["predicted_step_time_s"])
            inside = float(p["interval_low_s"]) <= measured <= float(p["interval_high_s"])
            stated = "fully" if run.configured else "partly"
            kind = "experts" if p["family"].endswith("experts") else f"dense, {stated} stated"
            group = (row.say("source"), row.say("model"), p["precision"], p["gpu"])
            errors[kind][group].append((abs(predicted / measured - 1), inside))
            yield (
                f"| {p['id']} | {p['num_gpus']} {p['gpu']} | {p['precision']} | {stated} | {measured:.4g} | "
                f"{predicted:.4g} | {predicted / measured - 1:+.1%} | {'yes' if inside else 'no'} |"
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
    parser.add_argument("--rows", type=Path, default=ROWS, help="the published runs that blind.csv is of")
    print("\n".join(lines(parser.parse_args().rows)))
