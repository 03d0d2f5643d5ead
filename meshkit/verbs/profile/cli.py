"""`meshkit profile`."""

from __future__ import annotations

import gc
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshkit.console import output, say, status, stdout
from meshkit.errors import ConfigError, TraceError
from meshkit.verbs.arguments import JsonOption, show_report

if TYPE_CHECKING:
    from meshkit.config.cluster import Cluster
    from meshkit.config.mesh import MeshSpec

_MOST_STEPS = 1_000_000
_FILES = "report.json, report.html and trace.json.gz"


def profile(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Run folder; any JAX trace: FILE.xplane.pb, nsys' FILE.sqlite, a folder; NCCL Inspector's folder.",
            show_default=False,
        ),
    ],
    *,
    predicted: Annotated[
        Path | None,
        typer.Option("--plan", metavar="RUN", help="A plan's report, to show predicted and measured side by side."),
    ] = None,
    experiment: Annotated[
        Path | None,
        typer.Option("--experiment", metavar="FILE", help="The experiment of a trace without a run folder."),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", metavar="AXES", help="The mesh of a trace without a run folder: data=2,tensor=4."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="CLUSTER", help="The cluster of a trace without a run folder: name or file."),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option("--program", metavar="NAME", help="Jitted function of the program, in such a trace."),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option("--steps", metavar="STEPS", help="Steps to measure: 20-29, 3,5 or all; default without outliers."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where to write the report of a trace without a run folder."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a run from its trace, or any JAX trace.

    Shows overlapped and exposed communication per mesh axis, link and collective. Shows predicted values beside the
    measured ones: those of --plan, or of the run folder's plan (plan.json, or a plan made with the same --out), or else
    those of the traced program. --cluster names the GPUs and links of a bare trace.
    """
    from meshkit.report.compare import compare as compare_reports
    from meshkit.report.folder import read_report
    from meshkit.report.views.report import render
    from meshkit.trace.inspector import find_inspector_files
    from meshkit.trace.loose import is_loose
    from meshkit.verbs.profile.profiler import TracedJob, measure_run, measure_traces, profile_inspector

    inspector, chosen = find_inspector_files(run), _chosen(steps)
    if inspector and steps:
        raise ConfigError("--steps is for a trace; NCCL Inspector's files have no steps.", at=str(run))
    if inspector or is_loose(run):
        axes, where = _declared(experiment, mesh, cluster)
        other = read_report(predicted) if predicted else None
        with status(f"reading {run}"), _uncollected():
            if inspector:
                report = profile_inspector(inspector, mesh=axes, cluster=where, out=out, predicted=other)
            else:
                found = measure_traces(run, TracedJob(axes, where), program=program, steps=chosen)
                other = other or found.price()
                report = found.write(out, other)
    else:
        _check_run(run, experiment=experiment, mesh=mesh, cluster=cluster, program=program, out=out)
        out = run if run.is_dir() else run.parent
        plan = read_report(predicted) if predicted else None
        with status(f"reading the trace of {run}"), _uncollected():
            report, other = measure_run(out, steps=chosen).write_run(out, plan)
    show_report(report, as_json, run.name)
    if other is not None and not as_json:
        output("")
        stdout().print(render(compare_reports(other, report)))
    if out is not None:
        say(f"wrote {'report.json and report.html' if inspector else _FILES} into {out}")


def _check_run(run: Path, **options: object) -> None:
    """Refuse options that describe a bare trace, if there is a run folder or no trace at all."""
    from meshkit.trace.captured import has_capture

    if given := [name for name, value in options.items() if value is not None]:
        if not run.exists():
            raise TraceError("there is no such trace or run folder.", at=str(run))
        if has_capture(run if run.is_dir() else run.parent):
            message = f"--{given[0]} is for a trace without a run folder; this one knows its mesh and cluster."
            raise ConfigError(message, at=str(run))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause Python's garbage collector, which would traverse the hundred thousand names of a trace repeatedly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _chosen(steps: str | None) -> Container[int] | None:
    """Return the step numbers in the value of --steps; None without the option."""
    if steps is None or steps == "all":
        return None if steps is None else range(sys.maxsize)
    numbers: set[int] = set()
    for part in steps.split(","):
        first, _, last = (word.strip() for word in part.partition("-"))
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) < _MOST_STEPS):
            raise ConfigError(
                f"'{steps}' names no steps.", at="--steps", hint="--steps 20-29, --steps 3,5, --steps all"
            )
        numbers |= set(range(int(first), int(last) + 1))
    return numbers


def _declared(experiment: Path | None, mesh: str | None, cluster: str | None) -> tuple[MeshSpec | None, Cluster | None]:
    """Return the mesh and the cluster that the options declare; None for those that they do not."""
    from meshkit.config.cluster import Cluster
    from meshkit.config.mesh import MeshSpec

    if experiment is not None:
        from meshkit.config.experiment import load

        if mesh is not None or cluster is not None:
            raise ConfigError(
                "--experiment already names mesh and cluster.", hint="only --experiment, or --mesh and --cluster"
            )
        job = load(experiment)
        return job.mesh, job.cluster
    axes = None
    if mesh is not None:
        sizes: dict[str, int] = {}
        for part in mesh.split(","):
            name, _, size = (word.strip() for word in part.partition("="))
            if not name or not size.isdecimal() or name in sizes:
                raise ConfigError(
                    f"'{mesh}' is not a list of axes and their sizes.", at="--mesh", hint="--mesh data=2,tensor=4"
                )
            sizes[name] = int(size)
        axes = MeshSpec.parse(sizes)
    return axes, Cluster.load(cluster) if cluster is not None else None
