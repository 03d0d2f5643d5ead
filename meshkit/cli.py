"""The command line: one function per verb. Layer 9. Exit codes: see `main`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from meshkit.errors import ConditionError, ConfigError, MeshkitError

app = typer.Typer(
    name="meshkit",
    help="Declarative meshes, sharding rules and truthful communication reports for JAX on NVIDIA GPU clusters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ExperimentArg = Annotated[
    Path, typer.Argument(metavar="EXPERIMENT", help="Experiment file (TOML).", show_default=False)
]
RunArg = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder with a trace.", show_default=False)]
SetOption = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the file; repeatable.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Where to write report.json and report.html.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else there.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(
            f"meshkit {metadata.version('meshkit')}, jax {metadata.version('jax')}, jaxlib {metadata.version('jaxlib')}"
        )
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Options before the verb."""


@app.command(epilog="Example: meshkit plan configs/experiments/llama3_8b.toml --set mesh.tensor=2")
def plan(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006  (typer reads the default, nobody writes it)
    out: OutOption = None,
    as_json: JsonOption = False,
    propose: Annotated[
        bool, typer.Option("--propose", help="Say which link each axis belongs on, by its traffic.")
    ] = False,
    require_fit: Annotated[bool, typer.Option("--require-fit", help="Exit with 3 when the step does not fit.")] = False,
) -> None:
    """Predict a step on GPUs that are not there.

    Compiles the real training step with XLA:GPU and predicts step time, MFU, memory, and communication per axis, link
    and collective, overlapped and exposed.
    """
    from meshkit.planner import plan_experiment
    from meshkit.report.html import write_html
    from meshkit.spec.experiment import load

    start = time.perf_counter()
    loaded = load(experiment, set_)
    if out is not None:
        _run_folder(out)
    with _status(f"compiling {loaded.name} for {loaded.cluster.num_gpus} x {loaded.cluster.gpu.name}"):
        made = plan_experiment(loaded)
    if out is not None:
        made.report.write(out)
        write_html(made.report, out / "report.html", timeline=made.timeline)
    _show_report(made.report, as_json, loaded.name)
    seconds = time.perf_counter() - start
    _say(f"planned in {seconds:.1f} s; peak memory {_memory(made.compiled.peak_rss_bytes)}{_wrote(out)}")
    if propose:
        _propose(made.report, loaded)
    if require_fit and made.report.memory.fits is False:
        raise ConditionError("the step does not fit, and --require-fit asks that it does.")


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
    from meshkit.spec.experiment import load

    loaded = load(experiment, set_)
    prepare_platform(loaded.cluster)
    from meshkit.trainer import train as run_training

    folder = _run_folder(out or Path("runs") / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    result = run_training(loaded, folder, console=_stderr())
    if as_json:
        print(json.dumps(result.to_dict()))
    _say(_trained(result))


@app.command(epilog="Example: meshkit profile runs/first --plan runs/plan")
def profile(
    run: RunArg,
    predicted: Annotated[
        Path | None, typer.Option("--plan", metavar="RUN", help="A plan's report, to show predicted beside measured.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a run from its trace.

    Overlapped and exposed communication per mesh axis, link and collective; with --plan beside a prediction.
    """
    from meshkit.profiler import profile_run
    from meshkit.report.compare import compare as compare_reports
    from meshkit.report.compare import render as render_comparison
    from meshkit.report.schema import read_report

    other = read_report(predicted) if predicted else None
    with _status(f"reading the trace of {run}"):
        report = profile_run(run, predicted=other)
    _show_report(report, as_json, run.name)
    if other is not None and not as_json:
        Console(width=_width()).print(render_comparison(compare_reports(other, report)))
    folder = run if run.is_dir() else run.parent
    _say(f"wrote {folder / 'report.json'} and {folder / 'report.html'}")


@app.command(epilog="Example: meshkit compare runs/plan runs/first --fail-if 'exposed_s>1.1x'")
def compare(
    a: Annotated[Path, typer.Argument(show_default=False, help="Run folder or report.json.")],
    b: Annotated[Path, typer.Argument(show_default=False, help="Run folder or report.json.")],
    fail_if: Annotated[list[str], typer.Option(metavar="CONDITION", help="Exit with 3 if B against A meets it.")] = [],  # noqa: B006
    as_json: JsonOption = False,
) -> None:
    """Two reports side by side, with ratios."""
    from meshkit.report.compare import compare as compare_reports
    from meshkit.report.compare import evaluate_condition
    from meshkit.report.compare import render as render_comparison
    from meshkit.report.schema import read_report

    comparison = compare_reports(read_report(a), read_report(b))
    met = [c for c in fail_if if evaluate_condition(comparison, c)]
    if as_json:
        print(comparison.to_json())
    else:
        Console(width=_width()).print(render_comparison(comparison))
    if met:
        raise ConditionError(f"{b} against {a} meets {' and '.join(met)}.", at="--fail-if")


@app.command(epilog="Example: meshkit explain configs/experiments/llama3_8b.toml --strict")
def explain(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006
    as_json: JsonOption = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 when there is any finding.")] = False,
) -> None:
    """Where every parameter and activation goes.

    Logical axes, mesh axes and bytes per GPU, and findings: what is legal and probably not meant. Needs no GPU.
    """
    from meshkit.explainer import explain as explain_experiment
    from meshkit.explainer import render
    from meshkit.spec.experiment import load

    explanation = explain_experiment(load(experiment, set_))
    if as_json:
        print(explanation.model_dump_json(by_alias=True))
    else:
        Console(width=_width()).print(render(explanation))
    if strict and explanation.findings:
        raise ConditionError(f"there are {len(explanation.findings)} findings, and --strict asks for none.")


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
    _say(f"wrote {out}; next: meshkit explain {out}")


@app.command(epilog="Example: meshkit schema report")
def schema(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="report, compare, explain or experiment.", show_default=False)
    ],
) -> None:
    """Print the JSON Schema of an output, or of the experiment file."""
    makers = _schemas()
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
    except SystemExit as e:
        if isinstance(e.__context__, BrokenPipeError):  # the command-line library turned the closed pipe into an exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        return e.code if isinstance(e.code, int) else 1
    except Exception as e:
        if hasattr(e, "show") and hasattr(e, "format_message"):  # a usage error of the command-line library
            e.show()  # pyright: ignore[reportAttributeAccessIssue]
            return 2
        traceback.print_exc()
        print("meshkit: this is a bug of ours; please report it with the lines above.", file=sys.stderr)
        return 1


def _run_folder(folder: Path) -> Path:
    """The folder, made if need be, before anything expensive begins.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise ConfigError(f"the run folder {folder} cannot be written: {e.strerror}.", hint="another --out") from None
    return folder


def _schemas() -> dict[str, Any]:
    from meshkit.report.compare import Comparison
    from meshkit.report.schema import report_json_schema
    from meshkit.spec.experiment import experiment_json_schema

    def explanation() -> dict:
        from meshkit.explainer import Explanation

        return Explanation.model_json_schema(mode="serialization")

    return {
        "report": report_json_schema,
        "compare": lambda: Comparison.model_json_schema(mode="serialization"),
        "explain": explanation,
        "experiment": experiment_json_schema,
    }


def _show_report(report: Any, as_json: bool, title: str) -> None:
    if as_json:
        print(report.to_json())
        return
    from meshkit.report.terminal import render

    Console(width=_width()).print(render(report, title=title))


def _propose(report: Any, experiment: Any) -> None:
    """Prints the best assignment of axes to links on stderr: stdout may hold JSON."""
    from meshkit.proposer import propose

    proposal = propose(report, experiment.mesh, experiment.cluster)
    _say(f"placement: {proposal.reason}")
    if proposal.changed:
        _say("  try " + " ".join(f"--set '{setting}'" for setting in proposal.settings))


def _trained(result: Any) -> str:
    """The last line of a training: what it reached, beside what frequencies alone would reach."""
    loss = "" if result.loss is None else f": loss {result.loss:.3f}"
    held_out = "" if result.evaluation_loss is None else f", held-out {result.evaluation_loss:.3f}"
    entropy = result.unigram_entropy_nats
    beside = "" if entropy is None else f" nats per token (unigram entropy of the data: {entropy:.3f})"
    return f"step {result.step} after {result.wall_s:.0f} s{loss}{held_out}{beside}; run folder {result.folder}"


def _width() -> int | None:
    """80 columns where the output is no terminal, so that logs read the same everywhere."""
    return None if sys.stdout.isatty() else 80


def _stderr() -> Console:
    return Console(stderr=True, width=None if sys.stderr.isatty() else 80)


def _status(text: str) -> Any:
    return _stderr().status(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _memory(child_bytes: int) -> str:
    import resource

    from meshkit.units import format_bytes

    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"{format_bytes(own)} here, {format_bytes(child_bytes)} in the compiler"


def _wrote(out: Path | None) -> str:
    return f"; wrote {out / 'report.json'} and {out / 'report.html'}" if out else ""


if __name__ == "__main__":
    sys.exit(main())
