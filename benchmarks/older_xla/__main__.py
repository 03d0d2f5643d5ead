"""Published rows with the XLA of their time: `python -m benchmarks.older_xla --python PYTHON --rows FILE --only TEXT`.

PYTHON is an interpreter with jax, jaxlib, jax-cuda12-plugin and jax-cuda12-pjrt 0.4.38 (December 2024) and ptxas. Each
row's step is lowered by today's jax and compiled by both; the same simulator prices the two schedules.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from benchmarks.older_xla.programs import in_fp8, schedule_by
from benchmarks.published.experiments import resolve
from benchmarks.published.kernels import kernels_of
from benchmarks.published.programs import get_program
from benchmarks.published.rows import measured_step_time_s, read_rows
from meshkit.timeline.simulate import Simulation
from meshkit.timeline.spans import overlap

_LINE = "| {:<32} | {:>9.4} | {:>9.4} {:>+7.1%} | {:>7.3f} | {:>9.4} {:>+7.1%} | {:>7.3f} |"


def main() -> None:
    """Prints a line per row: measured, and predicted with either schedule."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.older_xla", description=__doc__)
    parser.add_argument("--python", type=Path, required=True, help="interpreter with jax 0.4.38 and its CUDA plugin")
    parser.add_argument("--rows", type=Path, required=True, help="CSV with the columns of the published runs")
    parser.add_argument("--only", default="maxtext", help="rows whose id holds this text")
    parser.add_argument("--out", type=Path, required=True, help="folder for programs, as of benchmarks.published")
    options = parser.parse_args()
    print("| row | measured s | this XLA s, error | exposed s | XLA of 2024 s, error | exposed s |")
    print("|---|---|---|---|---|---|")
    for row in read_rows(options.rows):
        run = resolve(row) if options.only in row.id else "not asked for"
        if isinstance(run, str) or not run.whole:
            continue
        program, _ = get_program(run.toml, options.out / "programs")
        kernels = kernels_of(run.row, run.framework)
        with tempfile.TemporaryDirectory(prefix="meshkit-") as folder:
            try:
                older = schedule_by(options.python, program.experiment, Path(folder))
            except subprocess.CalledProcessError as error:
                print(f"| {row.id} | refused: {error.stderr.strip().splitlines()[-1][:200]} |", flush=True)
                continue
        if run.document["train"]["precision"] == "fp8":
            older = in_fp8(older, int(run.document["model"]["vocab"]))
        tokens = run.micro_batch * run.micro_batches * run.data * run.sharded * run.length
        measured = measured_step_time_s(row, run.shape.model_flops(tokens, run.length))[0] or float("nan")
        now, then = (_facts(program.simulate(kernels, schedule)) for schedule in (None, older))
        errors = now[0] / measured - 1, then[0] / measured - 1
        print(_LINE.format(row.id, measured, now[0], errors[0], now[1], then[0], errors[1], then[1]), flush=True)


def _facts(simulation: Simulation) -> tuple[float, float]:
    """(step, exposed communication), seconds."""
    step = simulation.timeline.steps[0]
    return step.window[1], overlap(step.compute, step.communication, step.window).exposed_s


if __name__ == "__main__":
    main()
