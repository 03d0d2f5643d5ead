"""What every verb needs of the terminal: where text goes, how wide it is, and run folders. Just below the CLI."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from meshkit.errors import ConditionError, ConfigError


def run_folder(folder: Path) -> Path:
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


def schemas() -> dict[str, Any]:
    """Name of an output or file -> a function that makes its JSON Schema."""
    from meshkit.bench.schema import bench_json_schema
    from meshkit.report.compare import Comparison
    from meshkit.report.schema import report_json_schema
    from meshkit.spec.experiment import experiment_json_schema
    from meshkit.topo import topo_json_schema

    def explanation() -> dict:
        from meshkit.explainer import Explanation

        return Explanation.model_json_schema(mode="serialization")

    def tuning() -> dict:
        from meshkit.tuning.schema import tune_json_schema

        return tune_json_schema()

    def scaling() -> dict:
        from meshkit.scaling import scaling_json_schema

        return scaling_json_schema()

    def diagnosis() -> dict:
        from meshkit.doctor.schema import Diagnosis

        return Diagnosis.model_json_schema(mode="serialization")

    return {
        "doctor": diagnosis,
        "tune": tuning,
        "scaling": scaling,
        "report": report_json_schema,
        "topo": topo_json_schema,
        "bench": bench_json_schema,
        "compare": lambda: Comparison.model_json_schema(mode="serialization"),
        "explain": explanation,
        "experiment": experiment_json_schema,
    }


def byte_sizes(text: str | None) -> list[int] | None:
    """`1024,4096` as numbers; None as it is.

    Raises:
        ConfigError: not positive whole numbers.
    """
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"'{text}' is no list of sizes in bytes.", at="--sizes", hint="--sizes 1024,65536,1048576")
    return [int(part) for part in parts]


def show_report(report: Any, as_json: bool, title: str) -> None:
    """Prints a report on stdout: its JSON, or its tables."""
    if as_json:
        print(report.to_json())
        return
    from meshkit.report.terminal import render

    stdout().print(render(report, title=title))


def check_strict(findings: Any) -> None:
    """Stops if any finding is more than a note.

    Raises:
        ConditionError: with how many, and which.
    """
    failing = [f for f in findings if f.severity != "note"]
    if failing:
        codes = ", ".join(dict.fromkeys(f.code for f in failing))
        number = "is 1 finding" if len(failing) == 1 else f"are {len(failing)} findings"
        raise ConditionError(
            f"there {number} ({codes}), and --strict asks for none.",
            hint="mend it, or allow it: [[lint.allow]] code, path, reason",
        )


def say_proposal(report: Any, experiment: Any) -> None:
    """Prints the best assignment of axes to links on stderr: stdout may hold JSON."""
    from meshkit.proposer import propose

    proposal = propose(report, experiment.mesh, experiment.cluster)
    say(f"placement: {proposal.reason}")
    if proposal.changed:
        say("  try " + " ".join(f"--set '{setting}'" for setting in proposal.settings))


def training_summary(result: Any) -> str:
    """The last lines of a training: where its time went, and what it reached, beside what frequencies alone would."""
    from meshkit.report.goodput import goodput_summary

    loss = "" if result.loss is None else f": loss {result.loss:.3f}"
    held_out = "" if result.evaluation_loss is None else f", held-out {result.evaluation_loss:.3f}"
    entropy = result.unigram_entropy_nats
    beside = "" if entropy is None else f" nats per token (unigram entropy of the data: {entropy:.3f})"
    reached = f"step {result.step} after {result.wall_s:.0f} s{loss}{held_out}{beside}; run folder {result.folder}"
    went_to = goodput_summary(result.goodput)
    return f"{went_to}\n{reached}" if went_to else reached


def width() -> int | None:
    """80 columns where the output is no terminal, so that logs read the same everywhere."""
    return None if sys.stdout.isatty() else 80


def stdout() -> Console:
    """A console for what a verb is asked for. Text is printed as it is: a name from a file may look like markup."""
    return Console(width=width(), markup=False)


def stderr() -> Console:
    """A console for progress and tables that must stay off stdout."""
    return Console(stderr=True, width=None if sys.stderr.isatty() else 80, markup=False)


def status(text: str) -> Any:
    """A spinner with text while the block runs; nothing where there is no terminal."""
    return stderr().status(Text(text))


def say(text: str) -> None:
    """Prints a line on stderr."""
    print(text, file=sys.stderr)


def memory_text(child_bytes: int) -> str:
    """Peak memory of this process and of the compiler's."""
    import resource

    from meshkit.units import format_bytes

    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return f"{format_bytes(own)} here, {format_bytes(child_bytes)} in the compiler"


def wrote_text(out: Path | None) -> str:
    """What a plan left in its run folder."""
    return f"; wrote {out / 'report.json'} and {out / 'report.html'}" if out else ""
