"""`meshkit train`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshkit.console import output, run_folder, say, stderr
from meshkit.verbs.arguments import ExperimentArg, JsonOption, SetOption

if TYPE_CHECKING:
    from meshkit.verbs.train.trainer import TrainResult


def train(
    experiment: ExperimentArg,
    set_: SetOption = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Run folder; an existing run resumes.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train, evaluate, checkpoint, resume.

    If the experiment sets `steps` in [profile], these steps are also traced.
    """
    from meshkit.runs.standby import wait_for_turn

    wait_for_turn("meshkit.verbs.train.trainer")
    from meshkit.config.experiment import load
    from meshkit.distributed.join import keep_stdout
    from meshkit.sharding.mesh import prepare_platform

    keep_stdout()
    loaded = load(experiment, set_)
    prepare_platform(loaded.cluster, memory_fraction=loaded.train.memory_fraction)
    from meshkit.verbs.train.trainer import train as run_training

    folder = run_folder(out or Path("runs") / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    result = run_training(loaded, folder, console=stderr())
    if as_json:
        output(json.dumps(result.to_dict()))
    say(training_summary(result))


def training_summary(result: TrainResult) -> str:
    """Return the last lines of a training: its goodput, step, time and losses, and the unigram entropy of its data."""
    from meshkit.report.views.words import goodput_summary

    loss = "" if result.loss is None else f": loss {result.loss:.3f}"
    held_out = "" if result.evaluation_loss is None else f", held-out {result.evaluation_loss:.3f}"
    entropy = result.unigram_entropy_nats
    compared = "" if entropy is None else f" nats per token (unigram entropy of the data: {entropy:.3f})"
    reached = f"step {result.step} after {result.wall_s:.0f} s{loss}{held_out}{compared}; run folder {result.folder}"
    goodput = goodput_summary(result.goodput)
    return f"{goodput}\n{reached}" if goodput else reached
