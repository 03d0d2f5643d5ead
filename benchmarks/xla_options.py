"""Predict the time that XLA options derived from a step save: `python -m benchmarks.xla_options [EXPERIMENT ...]`.

The script plans each experiment with XLA's own choice, then adds in turn the pipelining that `meshkit.compile.choices`
asks for, double buffering, and the combine thresholds. The options are forced, also where meshkit would not set them
itself; the last column says whether it would. The last row has the options that meshkit sets, scheduled by the plan's
own prices (`train.pgle = "predicted"`). It prints a Markdown table. None of it is measured on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from pathlib import Path

from meshkit.compile.choices import derive_options, loop_traffic, options_for
from meshkit.config.experiment import Experiment, load
from meshkit.config.sections import PREDICTED
from meshkit.errors import MeshkitError
from meshkit.planning.planner import plan_experiment
from meshkit.planning.resolved import make_train_step
from meshkit.sharding.mesh import build_mesh, describe_devices, use_no_accelerator

EXPERIMENTS = Path(__file__).parent.parent / "configs" / "experiments"
NAMES = ("llama3_8b", "llama3_70b", "llama3_8b_long", "mixtral_8x7b", "vit_l16")
# The rows of the table, each with a word that is in the names of the options that it adds.
STEPS = {
    "XLA's own": None,
    "pipelined": "_pipeline_",
    "and double-buffered": "double_buffering",
    "and combined": "_combine_",
}


def rows(experiment: Experiment) -> Iterable[str]:
    """Yield the lines of an experiment."""
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    program = make_train_step(experiment, mesh)
    traffic = loop_traffic(program, experiment.placement)
    forced = {o.name: o.value for o in options_for(traffic, experiment.cluster)} if traffic else {}
    derived = derive_options(program, experiment.cluster, experiment.placement)
    sets = "yes" if any(o.costs_memory for o in derived) else "no"
    words: list[str] = []
    for step, word in STEPS.items():
        words += [word] if word else []
        chosen = {name: value if any(w in name for w in words) else off(name) for name, value in forced.items()}
        yield row(dataclasses.replace(experiment, xla={**chosen, **experiment.xla}), step, sets)
    train = experiment.train.model_copy(update={"pgle": PREDICTED})
    yield row(dataclasses.replace(experiment, train=train), "what meshkit sets, by its prices", "where asked")


def off(name: str) -> object:
    """Return XLA's default value of an option."""
    if "_combine_" in name:
        return 30 * 2**20 + 7
    return "COLLECTIVE_PIPELINING_MODE_OFF" if "_pipeline_" in name else False


def row(experiment: Experiment, step: str, sets: str) -> str:
    """Return a line of the table."""
    try:
        report = plan_experiment(experiment).report
    except MeshkitError as e:
        return f"| {experiment.name} | {step} | | | | {e.message} | {sets} |"
    found, memory = report.step, report.memory
    fits = "fits" if memory.fits else "does not fit"
    return (
        f"| {experiment.name} | {step} | {found.time_s or 0:.4g} | {found.communication_s or 0:.3g} "
        f"| {found.exposed_s or 0:.3g} | {(memory.peak_bytes or 0) / 2**30:.1f}, {fits} | {sets} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, help="experiments of configs/experiments")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    use_no_accelerator()
    print("| experiment | options | step, s | communication, s | exposed, s | GiB a GPU | set |")
    print("|---|---|---|---|---|---|---|")
    for name in arguments.names:
        for row in rows(load(EXPERIMENTS / f"{name}.toml", arguments.set)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
