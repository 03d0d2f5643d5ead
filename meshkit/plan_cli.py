"""`meshkit plan`, `rehearse` and `tune`: what predicts. Part of the command line, just below its other verbs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from meshkit.arguments import ExperimentArg, JsonOption, NoCacheOption, OutOption, SetOption
from meshkit.console import (
    check_strict,
    memory_text,
    run_folder,
    say,
    say_proposal,
    show_report,
    status,
    stderr,
    stdout,
    wrote_text,
)
from meshkit.errors import ConditionError, ConfigError

JobsOption = Annotated[
    int | None, typer.Option("--jobs", metavar="N", min=1, help="Plans at a time; one for each CPU by default.")
]


def plan(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006  (typer reads the default, nobody writes it)
    out: OutOption = None,
    as_json: JsonOption = False,
    propose: Annotated[
        bool, typer.Option("--propose", help="Say which link each axis belongs on, by its traffic.")
    ] = False,
    sweep: Annotated[
        str | None, typer.Option(metavar="hosts=1,2,4", help="Plan at several sizes: scaling over hosts, or gpus=...")
    ] = None,
    scaling: Annotated[
        str, typer.Option(metavar="weak|strong", help="Of --sweep: the batch grows with the GPUs, or stays.")
    ] = "weak",
    remedies: Annotated[
        bool, typer.Option("--remedies/--no-remedies", help="Where it does not fit, compile changes until some do.")
    ] = True,
    require_fit: Annotated[bool, typer.Option("--require-fit", help="Exit with 3 when the step does not fit.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 when the lint warns of anything.")] = False,
    jobs: JobsOption = None,
    no_cache: NoCacheOption = False,
) -> None:
    """Predict a step on GPUs that are not there.

    Compiles the real training step with XLA:GPU and predicts step time, MFU, memory, and communication per axis, link
    and collective, overlapped and exposed. Where it does not fit, the cheapest changes with which it does.
    """
    from meshkit.planner import plan_experiment
    from meshkit.remedies import remedies_table
    from meshkit.report.folder import write_folder
    from meshkit.spec.experiment import load
    from meshkit.xla.cache import cache_off

    start = time.perf_counter()
    if out is not None:
        run_folder(out)
    if sweep is not None:
        with cache_off(when=no_cache):
            _sweep(experiment, set_, sweep, scaling, out, as_json, jobs)
        return
    loaded = load(experiment, set_)
    title = f"compiling {loaded.name} for {loaded.cluster.num_gpus} x {loaded.cluster.gpu.name}"
    with status(title), cache_off(when=no_cache):
        made = plan_experiment(loaded)
    report = made.report
    if remedies and report.memory.fits is False:
        with cache_off(when=no_cache):
            report = _with_remedies(report, experiment, set_, jobs)
    if out is not None:
        write_folder(report, out, made.timeline, title=loaded.name)
    show_report(report, as_json, loaded.name)
    if report.memory.remedies and not as_json:
        stdout().print(remedies_table(report))
    seconds = time.perf_counter() - start
    say(f"planned in {seconds:.1f} s; peak memory {memory_text(made.compiled.peak_rss_bytes)}{wrote_text(out)}")
    if propose:
        say_proposal(report, loaded)
    if require_fit and report.memory.fits is False:
        raise ConditionError("the step does not fit, and --require-fit asks that it does.")
    if strict and made.lint is not None:
        check_strict(made.lint.findings)


def tune(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where the search is kept; an existing one resumes. runs/NAME-tune."),
    ] = None,
    candidates: Annotated[int, typer.Option(metavar="N", min=1, help="Variants to compile at most.")] = 64,
    axes: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Mesh axes that may have a size; those of the rules.")
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(metavar="N,...", help="Further sizes of the cluster; the global batch stays.")
    ] = None,
    objective: Annotated[
        str, typer.Option(metavar="WHAT", help="time: fastest at the experiment's size; gpu_hours: of any size.")
    ] = "time",
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search the mesh, recomputation and micro-batches of an experiment.

    Rules out by closed forms, compiles the most promising variants, and writes the fastest that fits as winner.toml,
    with what it gained over the experiment as it is. The global batch stays. Killed, it resumes where it was.
    """
    from meshkit.spec.experiment import load
    from meshkit.tuner import WINNER_FILE
    from meshkit.tuner import tune as run_search
    from meshkit.tuning.page import write_tune_html
    from meshkit.tuning.progress import progress_bar
    from meshkit.tuning.sizes import parse_hosts
    from meshkit.tuning.views import render

    folder = run_folder(out or Path("runs") / f"{load(experiment, set_).name}-tune")
    names = [name.strip() for name in axes.split(",")] if axes else None
    with progress_bar(stderr()) as told:
        report = run_search(
            experiment,
            set_,
            out=folder,
            budget=candidates,
            jobs=jobs,
            axes=names,
            hosts=parse_hosts(hosts),
            objective=objective,
            progress=told,
        )
    write_tune_html(report, folder / "tune.html")
    if as_json:
        print(report.to_json())
    else:
        stdout().print(render(report))
    files = ["tune.json", "tune.html", *([WINNER_FILE] if report.winner else [])]
    say(f"searched in {report.wall_s:.0f} s; wrote {', '.join(str(folder / name) for name in files)}")


def rehearse(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Run folder; runs/NAME-rehearsal by default.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps to capture.")] = 5,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Run nothing: read what a rehearsal left in --out. Needs no GPU.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run one GPU's part of a step on one real GPU.

    One process runs its program of the whole job with NCCL mocked: real kernel times and the allocator's real peak;
    communication is predicted, as in a plan. Writes a calibration that later plans read.
    """
    from meshkit.rehearsal import check_gpu, measure, run
    from meshkit.report.folder import write_folder
    from meshkit.spec.experiment import load

    loaded = load(experiment, set_)
    if recorded and out is None:
        raise ConfigError("--recorded reads a rehearsal's run folder, and none is named.", hint="--out DIR")
    if not recorded:
        check_gpu()
    folder = run_folder(out or Path("runs") / f"{loaded.name}-rehearsal")
    if not recorded:
        with status(f"running {loaded.name} as one of {loaded.cluster.num_gpus} x {loaded.cluster.gpu.name}"):
            run(loaded, folder, steps=steps)
    with status("reading what was captured"):
        rehearsed = measure(loaded, folder)
    write_folder(rehearsed.report, folder, rehearsed.timeline, title=loaded.name)
    show_report(rehearsed.report, as_json, loaded.name)
    say(f"wrote {folder / 'report.json'}, {folder / 'report.html'} and {rehearsed.calibration}")


def _with_remedies(report: Any, experiment: Path, set_: list[str], jobs: int | None) -> Any:
    from meshkit.remedies import TRIES, find_remedies, with_remedies

    done = 0

    def told(outcome: Any) -> None:
        nonlocal done
        done += 1

    with status(f"the step does not fit: compiling up to {TRIES} changes with which it may"):
        found = find_remedies(experiment, set_, jobs=jobs, done=told)
    if not found:
        say(f"none of {done} changes that were compiled makes the step fit; `meshkit tune` looks further.")
    return with_remedies(report, found)


def _sweep(
    experiment: Path, set_: list[str], sweep: str, scaling: str, out: Path | None, as_json: bool, jobs: int | None
) -> None:
    from meshkit.scaling import SCALING_FILE, scale
    from meshkit.tuning.scaling_views import render, write_scaling_html
    from meshkit.tuning.workers import default_jobs

    if scaling not in ("weak", "strong"):
        raise ConfigError(f"there is no scaling '{scaling}'.", at="--scaling", hint="weak or strong")
    start = time.perf_counter()
    with status(f"planning at every size of {sweep}"):
        report = scale(experiment, set_, sweep, scaling, jobs=jobs or default_jobs())
    if out is not None:
        (out / SCALING_FILE).write_text(report.to_json() + "\n", encoding="utf-8")
        write_scaling_html(report, out / "scaling.html")
    if as_json:
        print(report.to_json())
    else:
        stdout().print(render(report))
    wrote = f"; wrote {out / SCALING_FILE} and {out / 'scaling.html'}" if out else ""
    say(f"planned {len(report.points)} sizes in {time.perf_counter() - start:.1f} s{wrote}")
