"""A search on a terminal: the winner and why, what was ruled out, and the best variants."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from meshkit.units import format_bytes, format_percent, format_seconds
from meshkit.verbs.plan.outcome import Outcome, mesh_text
from meshkit.verbs.tune.tune_report import TuneReport

SHOWN = 12
RULE_WORDS = {
    "divisibility": "a dim or the batch does not divide",
    "memory": "state, and gradients or saved activations, exceed the pool",
    "host_memory": "what is offloaded exceeds a host's memory",
    "time": "FLOP at peak or weights moved once take longer than the best",
}


def render(report: TuneReport) -> RenderableType:
    """The whole search, for `rich.print`."""
    parts: list[RenderableType] = [_headline(report)]
    if report.winner is not None and not report.winner_is_base:
        parts += [_heading("why it wins"), *(_bullet(text) for text in report.why), _heading("the winner")]
        parts += [Text(f"--set '{setting}'") for setting in report.winner.settings]
    else:
        parts += [_bullet(text) for text in report.why]
    parts += [_heading("variants"), _counts(report)]
    parts += [_heading("the best that were compiled"), _table(best_first(report.outcomes)[:SHOWN], report)]
    return Group(*parts)


def best_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those that fit by time, then those that do not, then errors."""
    order = {"fits": 0, "does_not_fit": 1, "error": 2}
    return sorted(outcomes, key=lambda o: (order[o.status], o.time_s or 0.0, o.settings))


def what_text(outcome: Outcome) -> str:
    """The settings in words as short as a table needs."""
    if not outcome.settings:
        return "as it is"
    words = []
    for setting in outcome.settings:
        key, _, value = setting.partition("=")
        if key == "mesh":
            words.append(mesh_text(outcome))
        elif key == "cluster.hosts":
            words.append(f"{value} hosts")
        elif key == "train.remat":
            words.append(f"remat {_remat_text(value)}")
        elif key == "train.accumulate":
            words.append(f"accumulate {value}")
        elif key == "rules.gradients.embed":
            words.append("reduced each")
        elif key == "train.pgle":
            words.append(f"pgle {value.strip(chr(34))}")
        elif key.startswith("pipeline."):
            words.append(f"{key.removeprefix('pipeline.')} {value.strip(chr(34))}")
        elif key.startswith("xla."):
            words.append(f"{key.removeprefix('xla.xla_').removeprefix('gpu_')} {value.strip(chr(34))}")
    return ", ".join(words)


def _remat_text(value: str) -> str:
    """`offload gate up, keep key value`, or what else the setting says."""
    try:
        remat = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return value.strip('"')
    if isinstance(remat, list):
        return f"keep {' '.join(remat)}"
    if isinstance(remat, dict):
        return " and ".join(f"{key} {' '.join(names)}" for key, names in remat.items() if names)
    return str(remat)


def cells_of(outcome: Outcome) -> tuple[str, ...]:
    """GPUs, step, GPU seconds, compute, exposed, MFU, memory and verdict of a row."""
    verdict = {"fits": "fits", "does_not_fit": "too large", "error": "error"}[outcome.status]
    gpu_seconds = None if outcome.time_s is None or outcome.num_gpus is None else outcome.time_s * outcome.num_gpus
    return (
        "-" if outcome.num_gpus is None else str(outcome.num_gpus),
        format_seconds(outcome.time_s),
        "-" if gpu_seconds is None else f"{gpu_seconds:,.0f}",
        format_seconds(outcome.compute_s),
        format_seconds(outcome.exposed_s),
        format_percent(outcome.mfu),
        format_bytes(outcome.peak_bytes),
        verdict,
    )


COLUMNS = ("GPUs", "step", "GPU s", "compute", "exposed", "MFU", "memory", "")


def _headline(report: TuneReport) -> RenderableType:
    title = f"{report.experiment} on {report.num_gpus} x {report.gpu}, global batch {report.global_batch}"
    lines = [Text(title, "bold underline")]
    winner = report.winner
    if winner is not None and not report.winner_is_base:
        line = f"{mesh_text(winner)}: {format_seconds(winner.time_s)} a step, MFU {format_percent(winner.mfu)}"
        before = "" if report.base.time_s is None else f"; as it is {format_seconds(report.base.time_s)}"
        if winner.num_gpus != report.num_gpus:
            before += f" on {report.num_gpus} GPUs, and the winner on {winner.num_gpus}"
        lines.append(Text(f"{line}{before}", "green"))
    return Group(*lines)


def _counts(report: TuneReport) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right")
    table.add_column()
    table.add_row(f"{report.space:,}", "in the space")
    for part in report.pruned:
        table.add_row(f"-{part.count:,}", f"ruled out: {RULE_WORDS.get(part.rule, part.rule)}")
    reused = f", {report.reused} of them earlier" if report.reused else ""
    table.add_row(f"{report.compiled:,}", f"compiled{reused}, by {report.jobs} processes in {report.wall_s:.0f} s")
    table.add_row(f"{report.left:,}", "left")
    return table


def _table(outcomes: Sequence[Outcome], report: TuneReport) -> RenderableType:
    table = Table(box=None, padding=(0, 1), show_edge=False, pad_edge=False)
    table.add_column("variant", overflow="fold", ratio=1)
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in outcomes:
        style = "bold" if report.winner is not None and outcome.settings == report.winner.settings else ""
        table.add_row(what_text(outcome), *cells_of(outcome), style=style)
    return table


def _heading(text: str) -> RenderableType:
    return Padding(Text(text, "bold"), (1, 0, 0, 0))


def _bullet(text: str) -> RenderableType:
    table = Table.grid(padding=(0, 1))
    table.add_row(Text("-", "dim"), Text(text))
    return table
