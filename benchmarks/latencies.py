"""Whether a schedule made for predicted latencies is better where they are wrong: `python -m benchmarks.latencies`.

Plans each experiment with XLA's own latencies and with `train.pgle = "predicted"`, then simulates both programs on
clusters whose GPUs compute at other rates than those that the latencies were made of; prints a Markdown table.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.config.sections import PREDICTED
from meshkit.predict.simulate import simulate
from meshkit.verbs.plan.planner import Plan, plan_experiment

EXPERIMENTS = Path(__file__).parent.parent / "configs" / "experiments"
NAMES = ("mixtral_8x7b", "llama3_70b")
RATES = (0.5, 0.7, 1.0, 1.4, 2.0)


def computing_at(cluster: Cluster, rate: float) -> Cluster:
    """A cluster whose matmuls, attention and memory are faster by a factor; its links are as they were."""
    gpu = cluster.gpu
    achieved = {name: value * rate for name, value in gpu.achieved.items()}
    faster = dataclasses.replace(gpu, achieved=achieved, memory_bytes_per_s=gpu.memory_bytes_per_s * rate)
    return cluster.model_copy(update={"gpu": faster})


def step_s(plan: Plan, cluster: Cluster) -> float:
    """A planned program's step on another cluster."""
    (step,) = simulate(plan.schedule, cluster).timeline.steps
    return step.window[1] - step.window[0]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help="experiments of configs/experiments")
    print("| experiment | compute rates, of those predicted | XLA's own latencies, s | predicted, s | |")
    print("|---|---|---|---|---|")
    for name in parser.parse_args().names:
        experiment = load(EXPERIMENTS / f"{name}.toml")
        train = experiment.train.model_copy(update={"pgle": PREDICTED})
        own, told = (plan_experiment(e) for e in (experiment, dataclasses.replace(experiment, train=train)))
        for rate in RATES:
            cluster = computing_at(experiment.cluster, rate)
            before, after = step_s(own, cluster), step_s(told, cluster)
            print(f"| {name} | {rate:g} | {before:.3f} | {after:.3f} | {after / before - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
