"""Published rows with the XLA of their time: `python -m benchmarks.older_xla --python PYTHON --rows FILE --only TEXT`.

PYTHON is an interpreter with jax, jaxlib, jax-cuda12-plugin and jax-cuda12-pjrt 0.4.38 (December 2024) and ptxas. Each
row's step is lowered by today's jax and compiled by both; the same simulator prices the two schedules. With `--pgle`
the older XLA compiles it again and schedules by the prices of its first schedule: what a profile of the run would say.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from benchmarks.older_xla.programs import in_fp8, schedule_by
from benchmarks.published.experiments import Run, resolve
from benchmarks.published.kernels import adapted, kernels_of
from benchmarks.published.programs import Program, get_program
from benchmarks.published.rows import measured_step_time_s, read_rows
from meshkit.compile.choices import predicted_costs
from meshkit.config.cluster import Cluster
from meshkit.hlo.schedule import Schedule
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.simulate import Simulation
from meshkit.timeline import overlap
from meshkit.trace.measured import PGLE_FILE, write_pgle


def main() -> None:
    """Prints a line per row: measured, and predicted with either schedule."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.older_xla", description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="interpreter with jax 0.4.38 and its CUDA plugin")
    parser.add_argument("--rows", type=Path, required=True, help="CSV with the columns of the published runs")
    parser.add_argument("--only", default="maxtext", help="rows whose id holds this text")
    parser.add_argument("--out", type=Path, required=True, help="folder for programs, as of benchmarks.published")
    parser.add_argument("--pgle", action="store_true", help="and once more, by latencies that we predict")
    options = parser.parse_args()
    last = " by our latencies s, error | exposed s |" if options.pgle else ""
    print(f"| row | measured s | this XLA s, error | exposed s | XLA of 2024 s, error | exposed s |{last}")
    print("|---|---|---|---|---|---|" + ("---|---|" if options.pgle else ""))
    for row in read_rows(options.rows):
        run = resolve(row) if options.only in row.id else "not asked for"
        if isinstance(run, str) or not run.whole:
            continue
        program, _ = get_program(run.toml, options.out / "programs")
        kernels = kernels_of(run.row, run.framework)
        try:
            schedules = [None, *_older(options, run, program, adapted(program.experiment.cluster, kernels))]
        except subprocess.CalledProcessError as error:
            print(f"| {row.id} | refused: {error.stderr.strip().splitlines()[-1][:200]} |", flush=True)
            continue
        tokens = run.micro_batch * run.micro_batches * run.data * run.sharded * run.length
        measured = measured_step_time_s(row, run.shape.model_flops(tokens, run.length))[0] or float("nan")
        facts = (_facts(program.simulate(kernels, schedule)) for schedule in schedules)
        cells = (f"{step:>9.4} {step / measured - 1:>+7.1%} | {exposed:>7.3f} |" for step, exposed in facts)
        print(f"| {row.id:<32} | {measured:>9.4} |", *cells, flush=True)


def _older(options: argparse.Namespace, run: Run, program: Program, cluster: Cluster) -> list[Schedule]:
    """The older XLA's schedule; with `--pgle` also the one that it makes by the prices of that."""
    found: list[Schedule] = []
    with tempfile.TemporaryDirectory(prefix="meshkit-") as folder:
        for _ in range(2 if options.pgle else 1):
            profile = (
                write_pgle(Path(folder) / PGLE_FILE, predicted_costs(found[-1], cluster, Assumptions()))
                if found
                else None
            )
            schedule = schedule_by(options.python, program.experiment, Path(folder), profile=profile)
            if run.document["train"]["precision"] == "fp8":
                schedule = in_fp8(schedule, int(run.document["model"]["vocab"]))
            found.append(schedule)
    return found


def _facts(simulation: Simulation) -> tuple[float, float]:
    """(step, exposed communication), seconds."""
    step = simulation.timeline.steps[0]
    return step.window[1], overlap(step.compute, step.communication, step.window).exposed_s


if __name__ == "__main__":
    main()
