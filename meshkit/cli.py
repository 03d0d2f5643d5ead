"""The command line: one function per verb. Layer 9. Exit codes: see `main`."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from meshkit.arguments import ExperimentArg, JsonOption, RunArg, SetOption
from meshkit.checkpoint_cli import checkpoint_app
from meshkit.console import (
    byte_sizes,
    check_strict,
    run_folder,
    say,
    schemas,
    show_report,
    status,
    stderr,
    stdout,
    training_summary,
)
from meshkit.doctor_cli import doctor
from meshkit.errors import ConditionError, ConfigError, MeshkitError, RunError
from meshkit.launch_cli import launch_app, leave_gang, say_lost_process
from meshkit.plan_cli import plan, rehearse, tune
from meshkit.redaction import redact_streams

app = typer.Typer(
    name="meshkit",
    help="Declarative meshes, sharding rules and truthful communication reports for JAX on NVIDIA GPU clusters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(launch_app, name="launch")
app.add_typer(checkpoint_app, name="checkpoint")
app.command(epilog="Example: meshkit doctor configs/experiments/llama3_8b.toml")(doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(", ".join(f"{name} {metadata.version(name)}" for name in ("meshkit", "jax", "jaxlib")))
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Options before the verb."""


_PREDICT = "configs/experiments/llama3_8b.toml"
app.command(epilog=f"Example: meshkit plan {_PREDICT} --set mesh.tensor=2")(plan)
app.command(epilog=f"Example: meshkit rehearse {_PREDICT} --out runs/rehearsal")(rehearse)
app.command(epilog=f"Example: meshkit tune {_PREDICT} --candidates 16 --out runs/tune")(tune)


@app.command(epilog="Example: meshkit train configs/experiments/llama_debug_cpu.toml --out runs/first")
def train(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Run folder; an existing one resumes.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train, evaluate, checkpoint, resume.

    With [profile] steps in the experiment it also captures a trace of them.
    """
    from meshkit.sharding.devices import prepare_platform
    from meshkit.sharding.gang import keep_stdout
    from meshkit.spec.experiment import load

    keep_stdout()
    loaded = load(experiment, set_)
    prepare_platform(loaded.cluster)
    from meshkit.trainer import train as run_training

    folder = run_folder(out or Path("runs") / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    result = run_training(loaded, folder, console=stderr())
    if as_json:
        print(json.dumps(result.to_dict()))
    say(training_summary(result))


@app.command(epilog="Example: meshkit profile runs/first --plan runs/plan")
def profile(
    run: RunArg,
    predicted: Annotated[
        Path | None, typer.Option("--plan", metavar="RUN", help="A plan's report, to show predicted beside measured.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a run from its trace.

    Overlapped and exposed communication per mesh axis, link and collective. Predicted beside measured with --plan, or
    where the run folder holds the plan (plan.json, or a plan made with the same --out).
    """
    from meshkit.profiler import profile_run
    from meshkit.report.compare import compare as compare_reports
    from meshkit.report.compare_terminal import render as render_comparison
    from meshkit.report.folder import find_prediction
    from meshkit.report.schema import read_report

    folder = run if run.is_dir() else run.parent
    other = read_report(predicted) if predicted else find_prediction(folder)
    with status(f"reading the trace of {run}"):
        report = profile_run(run, predicted=other)
    show_report(report, as_json, run.name)
    if other is not None and not as_json:
        print()
        stdout().print(render_comparison(compare_reports(other, report)))
    say(f"wrote report.json, report.html and trace.json.gz into {folder}")


@app.command(epilog="Example: meshkit compare runs/plan runs/first --fail-if 'exposed_s>1.1x'")
def compare(
    a: Annotated[Path, typer.Argument(show_default=False, help="Run folder or report.json.")],
    b: Annotated[Path, typer.Argument(show_default=False, help="Run folder or report.json.")],
    fail_if: Annotated[
        list[str],
        typer.Option(metavar="CONDITION", help="Exit with 3 if B against A meets it; may be given several times."),
    ] = [],  # noqa: B006
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the comparison as a page.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Two reports side by side, with ratios; a regression check for CI."""
    from meshkit.report.compare import compare as compare_reports
    from meshkit.report.compare_terminal import render as render_comparison
    from meshkit.report.condition import condition_text, judge
    from meshkit.report.html import write_html
    from meshkit.report.schema import read_report

    first, second = read_report(a), read_report(b)
    comparison = compare_reports(first, second)
    judged = tuple(judge(comparison, condition) for condition in fail_if)
    comparison = comparison.model_copy(update={"conditions": judged})
    if html is not None:
        run_folder(html.parent)
        write_html(first, html, other=second, title=f"{a.name} and {b.name}")
    if as_json:
        print(comparison.to_json())
    else:
        stdout().print(render_comparison(comparison))
    met = [condition_text(c) for c in judged if c.met]
    if met:
        raise ConditionError(f"{b} against {a} meets {len(met)} of {len(judged)} conditions: {'; '.join(met)}.")


@app.command(epilog="Example: meshkit explain configs/experiments/llama3_8b.toml --strict")
def explain(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 when there is a warning.")] = False,
    compile_: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the step, to check its collectives.")
    ] = True,
    propose: Annotated[
        bool, typer.Option("--propose", help="Say which link each axis belongs on, by its traffic; the default.")
    ] = False,
    rules: Annotated[bool, typer.Option("--rules", help="Print the resolved [rules] table as TOML and exit.")] = False,
) -> None:
    """Where every parameter and activation goes.

    Logical axes, mesh axes and bytes per GPU; findings: what is legal and probably not meant; why each collective of
    the compiled step is there, and the best placement of the axes on links. Needs no GPU.
    """
    from meshkit.explainer import explain as explain_experiment
    from meshkit.explainer import render, rules_toml
    from meshkit.spec.experiment import load

    start = time.perf_counter()
    loaded = load(experiment, set_)
    if rules:
        print(rules_toml(loaded), end="")
        return
    if propose and not compile_:
        raise ConfigError("--propose compiles the step, and --no-compile forbids it.", hint="one of the two")
    with status(f"checking {loaded.name}"):
        explanation = explain_experiment(loaded, compile=compile_)
    if as_json:
        print(explanation.model_dump_json(by_alias=True))
    else:
        stdout().print(render(explanation))
        say(f"explained in {time.perf_counter() - start:.1f} s")
    if propose and explanation.placement is None:
        raise ConfigError(f"there is no placement to propose: {explanation.collectives_note}.")
    if strict:
        check_strict(explanation.findings)


@app.command(epilog="Example: meshkit topo --check configs/experiments/llama3_8b.toml")
def topo(
    action: Annotated[
        str | None,
        typer.Argument(metavar="[record]", help="record writes a bundle to --out, without names and serials."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="PATH", help="Cluster file to write; of record, the bundle.")
    ] = None,
    bundle: Annotated[Path | None, typer.Option(metavar="PATH", help="Replay a recorded bundle.")] = None,
    xml: Annotated[Path | None, typer.Option(metavar="FILE", help="Read NCCL's topology XML instead.")] = None,
    matrix: Annotated[Path | None, typer.Option(metavar="FILE", help="Read `nvidia-smi topo -m` instead.")] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="KEY", help="Catalog key of the GPUs, where none is found.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(metavar="EXPERIMENT", help="Compare with its cluster; exit with 3 where they differ.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """What this machine is: GPUs, NVLink, NICs, PCIe.

    As a table, a picture, and a cluster file. Needs no GPU: it says so where there is none.
    """
    from meshkit.spec.experiment import load
    from meshkit.topo import render, run

    if action not in (None, "record"):
        raise ConfigError(f"`topo` has no action '{action}'.", hint="meshkit topo record --out DIR")
    if action == "record" and out is None:
        raise ConfigError("`topo record` needs a place for the bundle.", hint="meshkit topo record --out DIR")
    declared = load(check).cluster if check else None
    recording = out if action == "record" else None
    cluster_file = None if action == "record" else out
    report = run(bundle=bundle, check=declared, out=cluster_file, record=recording, xml=xml, matrix=matrix, gpu=gpu)
    if as_json:
        print(report.to_json())
    else:
        stdout().print(render(report))
    if report.findings:
        raise ConditionError(f"the machine differs from the cluster of {check} in {len(report.findings)} places.")


@app.command(epilog="Example: meshkit bench configs/experiments/llama_debug_cpu.toml --out runs/bench")
def bench(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where to write bench.json, bench.html, calibration.toml."),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="BYTES,...", help="Sizes to measure; 1 KiB, 4 KiB, ... by default.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure collectives on the devices present.

    Over each mesh axis, with nccl-tests' columns and every result checked; writes a calibration file that plan reads.
    Started in several processes (MESHKIT_COORDINATOR, MESHKIT_NUM_PROCESSES, MESHKIT_PROCESS_ID), it measures over all
    of them, and the first one writes.
    """
    from meshkit.sharding.devices import prepare_platform
    from meshkit.spec.experiment import load

    loaded = load(experiment, set_)
    prepare_platform(loaded.cluster)
    from meshkit.bench.views import render
    from meshkit.bencher import bench as run_bench
    from meshkit.sharding.gang import is_first_process, keep_stdout

    keep_stdout()
    report = run_bench(loaded, run_folder(out) if out else None, sizes=byte_sizes(sizes), console=stderr())
    if is_first_process():
        print(report.to_json()) if as_json else stdout().print(render(report, title=loaded.name))
    if report.wrong:
        raise RunError(f"{report.wrong} elements of results differ from numpy's.", hint="the rows with a #wrong count")
    if out is not None and is_first_process():
        say(f"wrote {out / 'bench.json'}, {out / 'bench.html'} and {out / 'calibration.toml'}")


@app.command(epilog="Example: meshkit new --model models.llama:Llama --out my.toml")
def new(
    model: Annotated[
        str, typer.Option(metavar="PKG.MOD:CLASS", help="The model's import path.")
    ] = "models.llama:Llama",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="File to write; stdout without it.")] = None,
) -> None:
    """Write a commented experiment file."""
    from meshkit.spec.template import new_experiment

    text = new_experiment(model=model)
    if out is None:
        print(text, end="")
        return
    if out.exists():
        raise ConfigError(f"{out} exists, and `new` overwrites nothing.", hint="another --out")
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ConfigError(f"{out} cannot be written: {e.strerror}.") from None
    say(f"wrote {out}; next: meshkit explain {out}")


@app.command(epilog="Example: meshkit schema report")
def schema(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="report, compare, explain, topo, bench, tune, scaling or experiment.",
            show_default=False,
        ),
    ],
) -> None:
    """Print the JSON Schema of an output, or of the experiment file."""
    makers = schemas()
    name = name.removeprefix("meshkit.").removesuffix("/1")
    if name not in makers:
        raise ConfigError(f"there is no schema '{name}'.", hint=", ".join(sorted(makers)))
    print(json.dumps(makers[name](), indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Returns:
        0 done (also when a step does not fit); 1 a bug of ours; 2 what the user gave is wrong or unreadable; 3 a
        condition the user asked for is not met; 4 the run failed and may be restarted; 75 preempted with a checkpoint
        saved; 130 interrupted.
    """
    # XLA's C++ side logs at INFO that it found no GPU; read when its library loads.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    redact_streams()
    code = _run(argv)
    if argv is None:
        leave_gang(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        code = app(args=list(argv) if argv is not None else None, standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except MeshkitError as e:
        print(f"meshkit: {e.render()}", file=sys.stderr)
        return e.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as e:
        if e.filename is None:
            return _bug()
        print(f"meshkit: {e.filename} cannot be read or written: {e.strerror}.", file=sys.stderr)
        return 2
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # the command-line library turned the closed pipe into an exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return e.code if isinstance(e.code, int) else 1
    except Exception as e:
        if hasattr(e, "show") and hasattr(e, "format_message"):  # a usage error of the command-line library
            e.show()  # pyright: ignore[reportAttributeAccessIssue]
            return 2
        return say_lost_process(e) or _bug()


def _bug() -> int:
    traceback.print_exc()
    print("meshkit: this is a bug of ours; please report it with the lines above.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
