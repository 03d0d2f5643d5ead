"""Published rows by the XLA of their time: `python -m benchmarks.older_xla --pythons FOLDER --rows FILE --out DIR`.

FOLDER/VERSION/bin/python is an interpreter with jax, jaxlib, jax-cuda12-plugin, jax-cuda12-pjrt of that version, numpy
below 2 and ptxas, for every version of images.toml. Each row's step is lowered by today's jax and compiled by both
XLAs; the same simulator prices the two schedules. A run that was scheduled by a profile is compiled once more, by the
prices of the older XLA's first schedule: what its profile would say. Writes DIR/older_xla.csv, resuming where it
stopped; `--score` compares such a file with what was measured. `--praxis` compiles praxis.py instead, with XLA's
rewriter of attention on and off.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import subprocess
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.older_xla.programs import praxis_schedule, schedule_by
from benchmarks.published.experiments import Run, resolve
from benchmarks.published.programs import Program, get_program
from benchmarks.published.rows import measured_step_time_s, read_rows
from benchmarks.published.summary import OLDER, read_older
from meshkit.compile.choices import predicted_costs
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.hlo.schedule import Schedule
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.simulate import Simulation, simulate
from meshkit.timeline import overlap
from meshkit.trace.measured import PGLE_FILE, write_pgle

_PAX = {"xla_gpu_enable_async_all_gather": True, "xla_gpu_enable_async_reduce_scatter": True,
        "xla_gpu_enable_triton_softmax_fusion": False}  # fmt: skip
COLUMNS = ("id", "jaxlib", "profiled", "today_s", "today_exposed_s", "older_s", "older_exposed_s", "unprofiled_s",
           "unprofiled_exposed_s")  # fmt: skip


def main() -> None:
    """Predicts, or scores what was predicted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.older_xla", description=__doc__)
    parser.add_argument("--pythons", type=Path, help="folder of VERSION/bin/python")
    parser.add_argument("--rows", type=Path, default=[], nargs="+", help="CSVs with the columns of published runs")
    parser.add_argument("--only", default="", help="rows whose id holds this text")
    parser.add_argument("--out", type=Path, help="folder of programs, as of benchmarks.published, and of the CSV")
    parser.add_argument("--score", type=Path, nargs="?", const=OLDER, help="a CSV; default: the committed one")
    parser.add_argument("--praxis", action="store_true", help="GPT 5B as praxis writes it")
    options = parser.parse_args()
    runs = [run for path in options.rows for row in read_rows(path) if not isinstance(run := resolve(row), str)]
    runs = [run for run in runs if run.handling == "none" and options.only in run.row.id]
    if options.score:
        print("\n".join(scores(runs, options.score)))
    elif options.praxis and options.pythons and options.out:
        print("\n".join(praxis(options.pythons, options.out)))
    elif options.pythons and options.out:
        predict(runs, options.pythons, options.out)
    else:
        parser.error("neither --score nor --pythons with --out")


def praxis(pythons: Path, out: Path) -> Iterator[str]:
    """Table in Markdown: GPT 5B on 256 A100s as praxis writes it, with XLA's rewriter of attention on and off."""
    experiment = load(OLDER.with_name("experiments") / "pax-5b-A100-256.toml")
    yield from ("| jaxlib | rewriter | cuDNN forward | backward | step s | exposed s |", "|---|---|---|---|---|---|")
    for jaxlib in ("0.4.25", "0.4.26"):
        for rewriter in (True, False):
            flags = {**_PAX, "xla_gpu_enable_cudnn_fmha": rewriter}
            folder = out / "praxis"
            schedule = praxis_schedule(pythons / jaxlib / "bin" / "python", experiment, folder, flags)
            calls = re.findall(rb"__cudnn\$fmha(\w+)", (folder / "scheduled.pb").read_bytes())
            backward = sum(call.endswith(b"Backward") for call in calls)
            step_s, exposed_s = _facts(simulate(schedule, experiment.cluster))
            yield (f"| {jaxlib} | {'on' if rewriter else 'off'} | {len(calls) - backward} | {backward} | {step_s} | "
                   f"{exposed_s} |")  # fmt: skip


def predict(runs: list[Run], pythons: Path, out: Path) -> None:
    """Appends the runs that are not yet in out/older_xla.csv."""
    file = out / OLDER.name
    done = {row["id"] for row in read_older(file)} if file.exists() else set()
    with file.open("a", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        if not done:
            writer.writerow(COLUMNS)
        for run in runs:
            image = image_of(run.row.id)
            if image is None or run.row.id in done:
                continue
            try:
                found = _predicted(run, image, pythons / image["jaxlib"] / "bin" / "python", out)
            except subprocess.CalledProcessError as error:
                print(f"{run.row.id}: refused: {(error.stderr.strip().splitlines() or [''])[-1][:300]}", flush=True)
                continue
            writer.writerow(found.values())
            stream.flush()
            print(found, flush=True)


def image_of(row: str) -> dict[str, Any] | None:
    """The entry of images.toml for a row."""
    images = tomllib.loads(Path(__file__).with_name("images.toml").read_text(encoding="utf-8"))["images"]
    return next((image for image in images if row.startswith(tuple(image["rows"]))), None)


def _predicted(run: Run, image: dict[str, Any], python: Path, out: Path) -> dict[str, Any]:
    program, _ = get_program(run.toml, out / "programs")
    schedules = _older(program, program.experiment.cluster, image, python)
    today, *older = (_facts(program.simulate(run.kernels, schedule)) for schedule in (None, *schedules))
    cells = [*today, *older[-1], *(older[0] if image["profiled"] else ("", ""))]
    return dict(zip(COLUMNS, (run.row.id, image["jaxlib"], "yes" if image["profiled"] else "no", *cells), strict=True))


def _older(program: Program, cluster: Cluster, image: dict[str, Any], python: Path) -> list[Schedule]:
    """The older XLA's schedule; of a profiled run also the one that it makes by the prices of that."""
    found: list[Schedule] = []
    with tempfile.TemporaryDirectory(prefix="meshkit-") as folder:
        for _ in range(2 if image["profiled"] else 1):
            profile = None
            if found:
                costs = predicted_costs(found[-1], cluster, Assumptions())
                profile = write_pgle(Path(folder) / PGLE_FILE, costs)
            found.append(
                schedule_by(python, program.experiment, Path(folder), flags=image.get("flags", {}), profile=profile)
            )
    return found


def _facts(simulation: Simulation) -> tuple[str, str]:
    """(step, exposed communication), seconds."""
    step = simulation.timeline.steps[0]
    exposed_s = overlap(step.compute, step.communication, step.window).exposed_s
    return f"{step.window[1]:.6g}", f"{exposed_s:.4g}"


def scores(runs: list[Run], path: Path) -> Iterator[str]:
    """Two tables in Markdown: each row by both XLAs, and medians over groups of correlated rows."""
    by_id = {run.row.id: run for run in runs}
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    columns = ("row", "jaxlib", "measured s", "today's XLA s, error", "exposed s", "of its time s, error", "exposed s",
               "without its profile")  # fmt: skip
    yield from (f"| {' | '.join(columns)} |", "|---" * len(columns) + "|")
    for p in read_older(path):
        run = by_id.get(p["id"])
        if run is None or not (measured := measured_step_time_s(run.row, run.model_flops)[0]):
            continue
        today, older = (float(p[name]) / measured - 1 for name in ("today_s", "older_s"))
        unprofiled = f"{float(p['unprofiled_s']) / measured - 1:+.1%}" if p["unprofiled_s"] else ""
        stated = "" if run.configured else ", partly stated"
        groups[(run.row.source, run.row.say("model"), run.precision, stated)].append((today, older))
        now, then = (f"{float(p[f'{xla}_s']):.4g} {error:+.1%} | {float(p[f'{xla}_exposed_s']):.3f}"
                     for xla, error in (("today", today), ("older", older)))  # fmt: skip
        yield f"| {p['id']} | {p['jaxlib']} | {measured:.4g} | {now} | {then} | {unprofiled} |"
    yield from ("", "| group | rows | today's XLA | of its time |", "|---|---|---|---|")
    for (source, model, precision, stated), found in sorted(groups.items()):
        today, older = (statistics.median(errors) for errors in zip(*found, strict=True))
        yield f"| {source.split('@')[0]}, {model}, {precision}{stated} | {len(found)} | {today:+.1%} | {older:+.1%} |"


if __name__ == "__main__":
    main()
