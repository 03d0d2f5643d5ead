"""`meshkit plan`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshkit.console import output, run_folder, say, status, stdout
from meshkit.errors import ConditionError, ConfigError
from meshkit.units import format_bytes
from meshkit.verbs.arguments import (
    CompileTimeoutOption,
    ExperimentArg,
    JobsOption,
    JsonOption,
    NoCacheOption,
    OutOption,
    SetOption,
    show_report,
)

if TYPE_CHECKING:
    from meshkit.config.experiment import Experiment, ProgramExperiment
    from meshkit.planning.planner import Plan
    from meshkit.report.schema import Report


def plan(
    experiment: ExperimentArg,
    *,
    set_: SetOption = [],  # noqa: B006  (typer reads the default, nobody writes it)
    cluster: Annotated[str | None, typer.Option(metavar="NAME", help="Short for --set cluster=NAME.")] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Short for --set mesh=TABLE, as '{ fsdp = 8 }'.")
    ] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
    propose: Annotated[
        bool, typer.Option("--propose", help="Say which link each mesh axis belongs on, by its traffic.")
    ] = False,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="hosts=1,2,4", help="Plan at several numbers of hosts, or of GPUs with gpus=..."),
    ] = None,
    scaling: Annotated[
        str | None,
        typer.Option(metavar="weak|strong", help="weak: a --sweep's batch grows with the GPUs; strong: it stays."),
    ] = None,
    remedies: Annotated[
        bool,
        typer.Option(
            "--remedies/--no-remedies", help="If the step does not fit, compile changes that may make it fit."
        ),
    ] = True,
    options: Annotated[
        bool, typer.Option("--options", help="Also compile with other options of XLA, and compare.")
    ] = False,
    cliff: Annotated[
        bool, typer.Option("--cliff", help="Also compile with less memory, to see when it slows the step.")
    ] = False,
    imbalance: Annotated[
        float, typer.Option(metavar="FACTOR", help="Rows of an expert axis' busiest GPU, relative to the average.")
    ] = 1.0,
    failures: Annotated[
        bool,
        typer.Option("--failures", help="Predict goodput, the best checkpoint interval and spare hosts."),
    ] = False,
    require_fit: Annotated[bool, typer.Option("--require-fit", help="Exit with 3 if the step does not fit.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 if the lint warns of anything.")] = False,
    jobs: JobsOption = None,
    no_cache: NoCacheOption = False,
    compile_timeout: CompileTimeoutOption = None,
) -> None:
    """Predict a step on GPUs that are not there.

    EXPERIMENT may also be a program, with --cluster and --mesh: a jax.export file (.bin), StableHLO (.mlir) or HLO
    (.pb). Compiles the real training step with XLA:GPU and predicts step time, MFU, memory, and communication per axis,
    link and collective, overlapped and exposed. If the step does not fit, shows the cheapest changes that make it fit.
    """
    from meshkit.compile.program import compiling
    from meshkit.config.experiment import Experiment, load_any
    from meshkit.report.folder import write_folder

    start = time.perf_counter()
    set_ = [*set_, *(f"{key}={value}" for key, value in (("cluster", cluster), ("mesh", mesh)) if value is not None)]
    if out is not None:
        run_folder(out)
    _check_combination(sweep is not None, options, imbalance, failures, cliff)
    with compiling(keep=not no_cache, timeout_s=compile_timeout):
        if sweep is not None:
            _sweep(experiment, set_, sweep, scaling, out, as_json, jobs)
            return
        loaded = load_any(experiment, set_)
        made = _plan(loaded, imbalance)
        report = made.report
        if remedies and report.memory.fits is False and isinstance(loaded, Experiment):
            report = _with_remedies(report, experiment, set_, jobs)
        if options:
            report = _with_alternatives(report, experiment, set_, jobs)
        if isinstance(loaded, Experiment) and loaded.launch.min_hosts:
            report = _with_fewer_hosts(report, experiment, set_, jobs)
        report = _with_named_change(report, loaded, made)
        if cliff:
            report = _with_cliff(report, loaded, made)
    if failures:
        from meshkit.planning.failures import plan_failures

        report = report.model_copy(update={"failures": plan_failures(report, made.facts, loaded)})
    if out is not None:
        write_folder(report, out, made.timeline, title=loaded.name)
    _show(report, made, loaded.name, start, out, as_json)
    if propose:
        _say_placement(report, loaded)
    if require_fit and report.memory.fits is False:
        raise ConditionError("the step does not fit, but --require-fit requires that it does.")
    if strict and made.lint is not None:
        from meshkit.linting.placements import check_strict

        check_strict(made.lint.findings)


def _check_combination(sweep: bool, options: bool, imbalance: float, failures: bool, cliff: bool) -> None:
    if sweep and options:
        raise ConfigError(
            "--sweep and --options cannot be combined.", at="--options", hint="one of --sweep and --options"
        )
    for name, refused, others in (
        ("--imbalance", imbalance != 1.0 and (sweep or options), "--sweep and --options"),
        ("--cliff", cliff and sweep, "--sweep"),
        ("--failures", failures and sweep, "--sweep"),
    ):
        if refused:
            raise ConfigError(f"{name} applies to a single plan.", at=name, hint=f"leaving out {others}")


def _plan(loaded: Experiment | ProgramExperiment, imbalance: float) -> Plan:
    from meshkit.planning.planner import plan_experiment

    with status(f"compiling {loaded.name} for {loaded.cluster.num_gpus} x {loaded.cluster.gpu.name}"):
        return plan_experiment(loaded, imbalance=imbalance)


def _with_named_change(report: Report, loaded: Experiment | ProgramExperiment, made: Plan) -> Report:
    """Add the change that shortens the step most to the report's verdict, if the search finds one."""
    from meshkit.report.causes import add_plan_findings
    from meshkit.search.named_change import find_change

    change = find_change(report, loaded, made.planned)
    return report if change is None else add_plan_findings(report, made.planned, change)


def _show(report: Report, made: Plan, title: str, start: float, out: Path | None, as_json: bool) -> None:
    from meshkit.children import peak_rss_bytes
    from meshkit.search.cliff import cliff_table
    from meshkit.search.proposals import remedies_table

    show_report(report, as_json, title)
    if not as_json:
        for head, found in (
            ("what makes it fit", report.memory.remedies),
            ("other options of XLA", report.program.alternatives),
            ("after the loss of hosts", report.program.fewer_hosts),
        ):
            if found:
                stdout().print(remedies_table(head, found))
        if report.memory.cliff is not None:
            stdout().print(cliff_table(report.memory.cliff))
    memory = f"{format_bytes(peak_rss_bytes())} here, {format_bytes(made.compiled.peak_rss_bytes)} in the compiler"
    wrote = f"; wrote {out / 'report.json'} and {out / 'report.html'}" if out else ""
    say(f"planned in {time.perf_counter() - start:.1f} s; peak memory {memory}{wrote}")


def _say_placement(report: Report, experiment: Experiment | ProgramExperiment) -> None:
    from meshkit.search.proposals import propose

    proposal = propose(report, experiment.mesh, experiment.cluster)
    say(f"placement: {proposal.reason}")
    if proposal.changed:
        say("  try " + " ".join(f"--set '{setting}'" for setting in proposal.settings))


def _with_remedies(report: Any, experiment: Path, set_: list[str], jobs: int | None) -> Any:
    from meshkit.search.proposals import TRIES, find_remedies

    compiled: list[Any] = []
    with status(f"the step does not fit: compiling up to {TRIES} changes that may make it fit"):
        found = find_remedies(experiment, set_, step_s=report.step.time_s, jobs=jobs, done=compiled.append)
    if not found:
        say(f"none of the {len(compiled)} compiled changes makes the step fit; `meshkit tune` searches further.")
    return report.model_copy(update={"memory": report.memory.model_copy(update={"remedies": found})})


def _with_alternatives(report: Any, experiment: Path, set_: list[str], jobs: int | None) -> Any:
    from meshkit.search.proposals import find_alternatives

    with status("compiling with other options of XLA"):
        found = find_alternatives(experiment, set_, report, jobs=jobs)
    return report.model_copy(update={"program": report.program.model_copy(update={"alternatives": found})})


def _with_fewer_hosts(report: Any, experiment: Path, set_: list[str], jobs: int | None) -> Any:
    from meshkit.search.proposals import plan_fewer_hosts

    with status("compiling for fewer hosts"):
        found = plan_fewer_hosts(experiment, set_, report, jobs=jobs)
    if not found:
        say("[launch] allows fewer hosts, but no smaller number divides the mesh, the batch and the parameters.")
    return report.model_copy(update={"program": report.program.model_copy(update={"fewer_hosts": found})})


def _with_cliff(report: Report, experiment: Experiment | ProgramExperiment, made: Any) -> Report:
    from meshkit.search.cliff import find_cliff, with_cliff

    with status("compiling with other memory limits"):
        return with_cliff(report, find_cliff(experiment, made))


def _sweep(
    experiment: Path, set_: list[str], what: str, scaling: str | None, out: Path | None, as_json: bool, jobs: int | None
) -> None:
    from meshkit.search.scaling import SCALING_FILE, scale
    from meshkit.verbs.plan.scaling_page import render, write_scaling_html

    if scaling not in (None, "weak", "strong"):
        raise ConfigError(f"unknown scaling '{scaling}'.", at="--scaling", hint="weak or strong")
    start = time.perf_counter()
    with status(f"planning at every size of {what}"):
        report = scale(experiment, set_, what, scaling, jobs=jobs)
    if out is not None:
        (out / SCALING_FILE).write_text(report.to_json() + "\n", encoding="utf-8")
        write_scaling_html(report, out / "scaling.html")
    if as_json:
        output(report.to_json())
    else:
        stdout().print(render(report))
    wrote = f"; wrote {out / SCALING_FILE} and {out / 'scaling.html'}" if out else ""
    say(f"planned {len(report.points)} sizes in {time.perf_counter() - start:.1f} s{wrote}")
