"""`meshkit checkpoint`: one function per verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshkit.console import say, stderr
from meshkit.errors import ConditionError, ConfigError
from meshkit.units import format_bytes
from meshkit.verbs.arguments import SetOption

checkpoint_app = typer.Typer(
    help="List a run's checkpoints, verify them, and export their weights as safetensors.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: meshkit checkpoint verify runs/first",
)

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
StepOption = Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Step of the checkpoint.")]


@checkpoint_app.command("list", epilog="Example: meshkit checkpoint list runs/first")
def list_(run: RunFolder) -> None:
    """List the checkpoints of a run: step, size, and whether all files exist in full size."""
    from meshkit.verbs.checkpoint.checkpoints import find

    _show(find(run))


@checkpoint_app.command(epilog="Example: meshkit checkpoint verify runs/first")
def verify(run: RunFolder, step: StepOption = None) -> None:
    """Read every file and compare it with the manifest. Exit code 3 if a checkpoint is corrupt."""
    from meshkit.verbs.checkpoint.checkpoints import find
    from meshkit.verbs.checkpoint.manifest import unreadable_error

    found = [s for s in find(run, contents=True) if step in (None, s.step)]
    if not found:
        raise ConfigError(f"{run} has no checkpoint of step {step}.", hint="meshkit checkpoint list RUN")
    _show(found)
    bad = [s for s in found if s.corruption]
    if bad:
        raise ConditionError(
            f"{len(bad)} of {len(found)} checkpoints are corrupt: {', '.join(s.folder.name for s in bad)}."
        )
    for s in found:
        if s.unreadable:
            raise unreadable_error(f"checkpoint {s.folder.name}", s.unreadable, str(s.folder))


@checkpoint_app.command(epilog="Example: meshkit checkpoint export runs/first --experiment my.toml --out weights")
def export(
    run: RunFolder,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write, new or empty.")],
    experiment: Annotated[
        Path | None,
        typer.Option("--experiment", metavar="FILE", help="Your experiment file, whose model defines the layout."),
    ] = None,
    set_: SetOption = [],  # noqa: B006
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the model that the run folder's own experiment.toml names.")
    ] = False,
    step: StepOption = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="Precision to write: fp32 or bf16.")] = "fp32",
) -> None:
    """Write the parameters as safetensors with config.json, for Hugging Face's from_pretrained."""
    from meshkit.config.experiment import load
    from meshkit.verbs.checkpoint.checkpoints import export as write

    if (experiment is None) is not trust:
        which = "both --experiment and --trust are given" if trust else "no experiment is named"
        raise ConfigError(
            f"{which}: an export runs the model's code, so exactly one of them must say where to find it.",
            at="checkpoint export",
            hint=f"--experiment FILE, the file of the training; or --trust, if nobody else can write {run}",
        )
    if experiment is None and not (run / "experiment.toml").is_file():
        raise ConfigError(f"{run} has no experiment.toml, which would name the model.", hint="--experiment FILE")
    loaded = load(experiment or run / "experiment.toml", set_)
    done = write(run, out, experiment=loaded, step=step, dtype=dtype)
    say(f"wrote the weights of step {done} to {out}")


def _show(found: list) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("step", "size", "arrays"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("state")
    for s in found:
        state = "intact" if s.corruption is None else f"corrupt: {s.corruption}"
        state = f"cannot be read: {s.unreadable['reason']}" if s.unreadable else state
        state += "; set aside" if s.set_aside else ""
        table.add_row(str(s.step), format_bytes(s.size_bytes), "-" if s.arrays is None else str(s.arrays), state)
    stderr().print(table)
