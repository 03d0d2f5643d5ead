"""Compare schedules made with predicted latencies against schedules made with XLA's own latencies.

    python -m benchmarks.latencies [EXPERIMENT ...] [--ways]

Each experiment is planned with XLA's own latencies and with `train.pgle = "predicted"`. Both programs are then
simulated on clusters whose compute rates differ from those that the latencies were predicted for, to see whether the
schedule is still the better one when its latencies are wrong. The script prints a Markdown table. With `--ways` it
plans each experiment with every value of `train.pgle` instead, and counts the collectives that have moved.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, load
from meshkit.config.sections import PREDICTED, TABLE
from meshkit.planning.planner import Plan, plan_experiment
from meshkit.predict.simulate import simulate

EXPERIMENTS = Path(__file__).parent.parent / "configs" / "experiments"
NAMES = ("mixtral_8x7b", "llama3_70b")
RATES = (0.5, 0.7, 1.0, 1.4, 2.0)


def computing_at(cluster: Cluster, rate: float) -> Cluster:
    """Return a cluster whose matmuls, attention and memory run `rate` times as fast; its links are unchanged."""
    gpu = cluster.gpu
    achieved = {name: value * rate for name, value in gpu.achieved.items()}
    faster = dataclasses.replace(gpu, achieved=achieved, memory_bytes_per_s=gpu.memory_bytes_per_s * rate)
    return cluster.model_copy(update={"gpu": faster})


def step_s(plan: Plan, cluster: Cluster) -> float:
    """Return the seconds of a step of a planned program when it is simulated on another cluster."""
    (step,) = simulate(plan.schedule, cluster).timeline.steps
    return step.window[1] - step.window[0]


def flights(plan: Plan) -> dict[str, frozenset[str]]:
    """Return, for each asynchronous collective, the names of the kernels scheduled between its start and its end."""
    found = {}
    for body in plan.schedule.computations.values():
        begun = {i.name: n for n, i in enumerate(body) if i.collective}
        for n, i in enumerate(body):
            if (first := begun.get(i.starts or "")) is not None:
                found[body[first].name] = frozenset(k.name for k in body[first:n] if k.kind == "kernel")
    return found


def moved(own: Plan, told: Plan) -> tuple[int, int]:
    """Count the collectives that overlap other kernels than in XLA's own schedule, and all that both schedules have."""
    before, after = flights(own), flights(told)
    common = before.keys() & after.keys()
    return sum(before[name] != after[name] for name in common), len(common)


def ways(experiment: Experiment) -> Iterator[str]:
    """Yield a row of the table for each value of `train.pgle`."""
    own: Plan | None = None
    for way in ("off", TABLE, PREDICTED):
        train = experiment.train.model_copy(update={"pgle": way})
        plan = plan_experiment(dataclasses.replace(experiment, train=train))
        own, step = own or plan, plan.report.step
        at = "{} of {}".format(*moved(own, plan))
        yield f"| {experiment.name} | {way} | {at} | {step.exposed_s or 0:.4g} | {step.time_s or 0:.5g} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help="experiments of configs/experiments")
    parser.add_argument("--ways", action="store_true", help="compare the values of train.pgle instead")
    asked = parser.parse_args()
    if asked.ways:
        print("| experiment | train.pgle | collectives moved | exposed, s | step, s |\n|---|---|---|---|---|")
        for name in asked.names:
            for line in ways(load(EXPERIMENTS / f"{name}.toml")):
                print(line, flush=True)
        return
    print("| experiment | compute rates, of those predicted | XLA's own latencies, s | predicted, s | |")
    print("|---|---|---|---|---|")
    for name in asked.names:
        experiment = load(EXPERIMENTS / f"{name}.toml")
        train = experiment.train.model_copy(update={"pgle": PREDICTED})
        own, told = (plan_experiment(e) for e in (experiment, dataclasses.replace(experiment, train=train)))
        for rate in RATES:
            cluster = computing_at(experiment.cluster, rate)
            before, after = step_s(own, cluster), step_s(told, cluster)
            print(f"| {name} | {rate:g} | {before:.3f} | {after:.3f} | {after / before - 1:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
