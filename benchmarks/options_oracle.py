"""Predict what XLA options do to Marin's step on 64 GB200, beside Marin's published sweep.

    python -m benchmarks.options_oracle [--predict]

`--predict` compiles the step of benchmarks/marin/fsdp.toml with the options that Marin's run sets, and once more for
each published arm that this step can be given. It simulates each program and keeps the seconds in
benchmarks/marin/predicted.csv. The script prints a table that compares them with benchmarks/marin/published.csv, whose
effects are on throughput (marin-community/marin, issue 8054).
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshkit.compile.choices import LIMIT, NO_LIMIT
from meshkit.config.experiment import load
from meshkit.planning.planner import plan_experiment

MARIN = Path(__file__).parent / "marin"
PREDICTED, PUBLISHED = MARIN / "predicted.csv", MARIN / "published.csv"
NOISE_PERCENT = 0.78  # The spread between runs of one arm in the published sweep.
# Marin's run used jaxlib 0.11, which schedules without latencies. From 0.12 on, both options are on by default.
BASE = {"xla_gpu_enable_latency_hiding_scheduler": False, "xla_gpu_enable_analytical_sol_latency_estimator": False}
SCHEDULED = {"xla_gpu_enable_latency_hiding_scheduler": True}
LATENCIES = {"xla_gpu_enable_analytical_sol_latency_estimator": True}
KINDS = ("all_reduce", "all_gather", "reduce_scatter")
PIPELINED = {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in KINDS}
BUFFERED = {"xla_gpu_enable_while_loop_double_buffering": True}
ARMS: Mapping[str, Mapping[str, object]] = {
    "adopted": {},
    "xla_gpu_enable_pipelined_{all_reduce,all_gather,reduce_scatter}": PIPELINED,
    "pipelined + double buffering + SOL estimator (O1 without LHS)": {**PIPELINED, **BUFFERED, **LATENCIES},
    "JAX_OPTIMIZATION_LEVEL=O1": {**SCHEDULED, **PIPELINED, **BUFFERED, **LATENCIES},
    "latency hiding scheduler + parallel_collective_overlap_limit=4": {
        **SCHEDULED,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    },
    "combine thresholds 512 MiB (default 31.5 MB)": {f"xla_gpu_{k}_combine_threshold_bytes": 2**29 for k in KINDS},
    "analytical SOL latency estimator alone": LATENCIES,
}


def predict(arms: Mapping[str, Mapping[str, object]]) -> Iterator[tuple[str, float]]:
    """Yield the name of each arm and the predicted seconds of its step."""
    for arm, options in arms.items():
        xla = (f"xla.{name}={json.dumps(value)}" for name, value in {LIMIT: NO_LIMIT, **BASE, **options}.items())
        made = plan_experiment(load(MARIN / "fsdp.toml", ("train.derived_options=false", *xla)))
        yield arm, made.report.step.time_s or 0.0


def score() -> Iterator[str]:
    """Yield the lines of the table of predicted and published effects on throughput."""
    with PREDICTED.open(encoding="utf-8") as file:
        seconds = {row["arm"]: float(row["step_s"]) for row in csv.DictReader(file)}
    with PUBLISHED.open(encoding="utf-8") as file:
        published = list(csv.DictReader(file))
    yield "| arm | base | predicted | published | sign |"
    yield "|---|---|---|---|---|"
    for row in published:
        arm, effect = row["arm"], float(row["effect_percent"])
        predicted = 100 * (seconds["adopted"] / seconds[arm] - 1)
        sign = "right" if predicted * effect > 0 else "wrong"
        sign = "none predicted" if abs(predicted) < NOISE_PERCENT else sign
        yield f"| {arm} | {row['base']} | {predicted:+.2f} % | {effect:+.2f} % | {sign} |"


def main() -> None:
    """Print the table; with `--predict`, compile every arm first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true", help="compile every arm anew")
    if parser.parse_args().predict:
        made = [[arm, f"{seconds:.4f}"] for arm, seconds in predict(ARMS)]  # an arm that fails leaves the old file
        with PREDICTED.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([["arm", "step_s"], *made])
    print("\n".join(score()))


if __name__ == "__main__":
    main()
