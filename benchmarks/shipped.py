"""Measure what planning each shipped experiment takes: `python -m benchmarks.shipped [EXPERIMENT ..] [--json]`.

Each experiment of configs/experiments that has GPUs is planned in a process of its own, without a compile cache.
Prints a Markdown table: seconds and CPU seconds, the largest memory of the planning process and of its compiler, the
share of the step that is priced by memory traffic alone, and the collectives that no rule explains.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from benchmarks.matrix import EXPERIMENTS, unpriced_share
from meshkit.children import peak_rss_bytes
from meshkit.config.experiment import load_any
from meshkit.planning.planner import plan_experiment

HEAD = (
    "| experiment | GPUs | step, s | planned in, s | CPU, s | memory, GB | unpriced, % | unexplained |\n"
    "|---|---|---|---|---|---|---|---|"
)


def shipped() -> list[str]:
    """Return the names of the shipped experiments on GPUs."""
    return [file.stem for file in sorted(EXPERIMENTS.glob("*.toml")) if not load_any(str(file), ()).cluster.is_cpu]


def planned(name: str) -> dict[str, Any]:
    """Plan an experiment in this process, and return what it took and what the plan leaves open."""
    start = time.perf_counter()
    experiment = load_any(str(EXPERIMENTS / f"{name}.toml"), ())
    made = plan_experiment(experiment)
    assert made.lint is not None  # of [model], whose rules explain the collectives
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "experiment": name,
        "gpus": experiment.cluster.num_gpus,
        "step_s": made.report.step.time_s,
        "wall_s": time.perf_counter() - start,
        "cpu_s": sum(each.ru_utime + each.ru_stime for each in used),
        "memory_bytes": peak_rss_bytes() + (made.compiled.peak_rss_bytes or 0),
        "unpriced_share": unpriced_share(made),
        "unexplained": [finding.message for finding in made.lint.findings if finding.code == "unexplained_collective"],
    }


def planned_apart(name: str) -> dict[str, Any]:
    """Do what `planned` does, in another process without a compile cache."""
    command = [sys.executable, "-m", "benchmarks.shipped", name, "--json"]
    done = subprocess.run(command, env=os.environ | {"MESHKIT_CACHE": "off"}, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def main() -> None:
    """Print the table, or with --json what one experiment took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help="names; default all")
    parser.add_argument("--json", action="store_true", help="plan one experiment in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.json:
        print(json.dumps(planned(*arguments.experiments)))
        return
    print(HEAD)
    for name in arguments.experiments or shipped():
        row = planned_apart(name)
        cells = f"{row['wall_s']:.0f} | {row['cpu_s']:.0f} | {row['memory_bytes'] / 1e9:.1f}"
        share, unexplained = 100 * row["unpriced_share"], len(row["unexplained"])
        print(f"| {name} | {row['gpus']} | {row['step_s']:.3g} | {cells} | {share:.2f} | {unexplained} |", flush=True)


if __name__ == "__main__":
    main()
