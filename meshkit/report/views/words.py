"""Make the texts of a report that both the terminal and the HTML page show."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from meshkit.config import catalog
from meshkit.hlo.schedule import Collective
from meshkit.predict.coverage import NOT_PREDICTED
from meshkit.report.compare import ComparedRow
from meshkit.report.goodput import PHASES, goodput_part
from meshkit.report.schema import (
    WORD,
    ClusterPart,
    CommunicationPart,
    GoodputPart,
    MeshAxisPart,
    Report,
    Source,
    StepPart,
    StepSample,
)
from meshkit.runs.phases import Goodput
from meshkit.units import format_bytes, format_count, format_flops, format_percent, format_rate, format_seconds


class Look(NamedTuple):
    """A mark and a style (in rich's notation) for a terminal, and a colour for the page.

    Parts differ in their marks too, for log files and colour-blind readers.
    """

    mark: str
    style: str
    color: str


LOOKS = {
    "compute": Look("█", "green", "#3f7cac"),
    "exposed": Look("▓", "red", "#d1495b"),
    "other": Look("▒", "yellow", "#edae49"),
    "idle": Look("░", "bright_black", "#d9dde3"),
    "wait": Look("w", "magenta", "#e8a3ad"),
    "idle_between": Look("░", "bright_black", "#d9dde3"),
    "idle_inside": Look("-", "bright_black", "#b9c1cb"),
    "idle_input": Look("d", "bright_black", "#9aa5b1"),
    # Memory.
    "parameters": Look("█", "blue", "#30638e"),
    "optimizer": Look("▓", "cyan", "#5b9bc9"),
    "gradients": Look("▒", "magenta", "#8f6bb0"),
    "activations": Look("░", "green", "#4c9f70"),
    "temporary": Look("▚", "yellow", "#edae49"),
    "rest": Look("=", "bright_black", "#a9b4c2"),
    "cudnn": Look("c", "bright_black", "#c9a0dc"),
    "fragmentation": Look("f", "bright_black", "#bfc5cd"),
    "context": Look("u", "bright_black", "#6c757d"),
    "nccl": Look("n", "bright_black", "#4a5260"),
    "reserved": Look("x", "bright_black", "#6c757d"),
    "free": Look("·", "bright_black", ""),
    # Wall time of the run.
    "goodput.step": Look("█", "green", "#4c9f70"),
    "goodput.data_wait": Look("d", "yellow", "#edae49"),
    "goodput.evaluate": Look("e", "cyan", "#5b9bc9"),
    "goodput.checkpoint": Look("▓", "magenta", "#8f6bb0"),
    "goodput.start": Look("s", "bright_black", "#a9b4c2"),
    "goodput.compile": Look("c", "blue", "#30638e"),
    "goodput.restore": Look("r", "bright_black", "#c9a0dc"),
    "goodput.init": Look("i", "bright_black", "#6c757d"),
    "goodput.lost": Look("x", "red", "#d1495b"),
    "goodput.restart": Look("░", "red", "#8c2f39"),
    "goodput.other": Look("▒", "yellow", "#d9dde3"),
}


@dataclass(frozen=True)
class Share:
    """One part of a bar."""

    key: str
    label: str
    value: float | None

    @property
    def look(self) -> Look:
        return LOOKS[self.key]


_IDLE = {"idle_between": "idle between steps", "idle_inside": "idle, late host", "idle_input": "idle, waiting for data"}


def step_shares(step: StepPart | StepSample, waits_s: float | None = None) -> list[Share]:
    """Return the parts of a step's time, which add up to it.

    Args:
        waits_s: seconds of exposed waiting for peers; None if unknown.
    """
    exposed = [Share("exposed", "exposed communication", step.exposed_s)]
    if waits_s is not None and step.exposed_s is not None:
        moving = Share("exposed", "exposed transfer", max(0.0, step.exposed_s - waits_s))
        exposed = [moving, Share("wait", "exposed waiting for peers", waits_s)]
    idle = [Share("idle", "idle", step.idle_s)]
    split = [Share(key, label, getattr(step, f"{key}_s", None)) for key, label in _IDLE.items()]
    if all(share.value is not None for share in split):
        idle = [share for share in split if share.value] or idle
    return [
        Share("compute", "compute", step.compute_s), *exposed, Share("other", "memory copies", step.other_s), *idle
    ]  # fmt: skip


def report_shares(report: Report) -> list[Share]:
    """Return the parts of a report's step; waiting is a part of its own if it is known for all communication."""
    waits = [row.exposed_wait_s for row in report.communication]
    known = bool(waits) and None not in waits
    return step_shares(report.step, sum(w or 0.0 for w in waits) if known else None)


def memory_shares(report: Report) -> list[Share]:
    """Return the known parts of a GPU's memory at the peak, the rest of the peak, and the reserved parts."""
    m = report.memory
    keys = ("parameters", "optimizer", "gradients", "activations", "temporary")
    known = [Share(key, key, value) for key in keys if (value := getattr(m, f"{key}_bytes"))]
    rest = (m.peak_bytes or 0) - sum(share.value or 0 for share in known)
    if rest > 0:
        known.append(Share("rest", "other" if known else "peak", rest))
    reserved = [
        Share("cudnn", "cuDNN workspace", m.cudnn_workspace_bytes),
        Share("fragmentation", "fragmentation", m.fragmentation_bytes),
        Share("context", "CUDA context", m.context_bytes),
        Share("nccl", f"NCCL, {m.nccl_communicators or '?'} communicators", m.nccl_bytes),
    ]
    known += [share for share in reserved if share.value]
    rest = (m.reserved_bytes or 0) - sum(share.value or 0 for share in reserved)
    if rest > 0:
        known.append(Share("reserved", "reserved outside the pool", rest))
    return known


def share_text(value: float | None, total: float | None, *, unknown: str = "-") -> str:
    """Return `value / total` in percent; the text `unknown` if a number is missing or `total` is 0."""
    return format_percent(value / total) if value is not None and total else unknown


def names_of(sources: Sequence[Source]) -> list[str]:
    """Return the names of reports: `predicted`, `measured`; two of one source are `measured A` and `measured B`."""
    words = [WORD[source] for source in sources]
    return [f"{w} {'AB'[i]}" if words.count(w) > 1 else w for i, w in enumerate(words)]


def plural(n: int, word: str) -> str:
    """Return `1 step` or `3 steps`."""
    return f"{n} {word}{'' if n == 1 else 's'}"


def machines(report: Report) -> str:
    """Return `16 x h100_sxm: 2 hosts x 8, NVLink domains of 8`."""
    c, gpus = report.cluster, report.devices
    if c.hosts is None:
        return gpus
    fabric = f", {c.fabric}" if c.fabric else ""
    hosts = f"{c.hosts} host{'s' if c.hosts != 1 else ''}"
    return f"{gpus}: {hosts} x {c.gpus_per_host}, {links(c)[0]} domains of {c.nvlink_domain_size}{fabric}"


def links(cluster: ClusterPart) -> tuple[str, str]:
    """Return the links inside and between NVLink domains, such as `shared memory` and `ethernet`."""
    inside, across = cluster.scale_up or "nvlink", cluster.fabric or "infiniband"
    return inside.replace("_", " "), across


def mesh_text(cluster: ClusterPart, mesh: Sequence[MeshAxisPart]) -> str:
    """Return `data 2 (infiniband) x fsdp 8 (nvlink 2 x infiniband 4) x tensor 4`.

    An axis inside a domain has only its size. Axes of size 1 are left out, unless there are no others.
    """
    parts, (inside, between) = [], links(cluster)
    for axis in [axis for axis in mesh if axis.size != 1] or mesh:
        across = axis.infiniband or 1
        where = "" if across == 1 else f" ({inside} {axis.nvlink} x {between} {across})"
        where = f" ({between})" if across == axis.size and across > 1 else where
        parts.append(f"{axis.axis} {axis.size}{where}")
    return " x ".join(parts) or "-"


def facts(report: Report) -> list[tuple[str, str]]:
    """Return the lines of the headline as (label, text); lines without a known value are left out."""
    step, window = report.step, report.window
    found = [
        ("cluster", machines(report)),
        ("mesh", mesh_text(report.cluster, report.mesh)),
        ("step", step_text(report)),
        ("MFU", format_percent(step.mfu) + _utilization(report)),
        ("throughput", _throughput(report)),
        ("memory", memory_text(report)),
    ]
    if interval := interval_text(report):
        found.insert(3, ("expected", interval))
    if report.training.hours is not None:
        found.append(("training", training_text(report)))
    if report.training.checkpoint_s is not None:
        found.append(("checkpoint", f"{format_seconds(report.training.checkpoint_s)} to write"))
    if report.source != "plan":
        found.append(
            ("mean over", f"{plural(window.steps, 'step')}, {plural(window.devices, 'device')}{_processes(report)}")
        )
    return [fact for fact in found if fact[1] != "-"]


def step_text(report: Report) -> str:
    """Return the step time and its bounds; if part of the program has no predicted time, a lower bound."""
    if any(w.code == NOT_PREDICTED for w in report.warnings):
        return f"no prediction (more than {format_seconds(report.step.time_s)}): read the first warnings"
    return format_seconds(report.step.time_s) + _bounds(report)


def memory_text(report: Report) -> str:
    """Return `61.3 GiB of 79.6 GiB a GPU, 385 MiB reserved: fits, 17.9 GiB free`.

    The peak, the reserved and the free bytes add up to the limit.
    """
    m = report.memory
    if m.peak_bytes is None:
        return "-"
    limit = m.pool_bytes if m.pool_bytes is not None else m.capacity_bytes
    text = f"{format_bytes(m.peak_bytes)} of {format_bytes(limit)} a {report.device}"
    if m.fits is None:
        return text
    if m.margin_bytes is None:
        return f"{text}: {'fits' if m.fits else 'does not fit'}"
    reserved = limit - m.peak_bytes - m.margin_bytes if limit is not None else 0
    text += f", {format_bytes(reserved)} reserved" if reserved > 0 else ""
    margin = format_bytes(abs(m.margin_bytes))
    return f"{text}: fits, {margin} free" if m.fits else f"{text}: does not fit, {margin} too much"


_HOURS_A_YEAR = 24 * 365.25


def training_text(report: Report) -> str:
    """Return `12.3 days for 100,000 steps: 37.2 k GPU hours, cost 92.1 k`; without GPUs only the time."""
    t = report.training
    hours = t.hours or 0.0
    length = f"{hours / 24:.1f} days" if hours >= 48 else format_seconds(hours * 3600)
    length = f"{hours / _HOURS_A_YEAR:.1f} years" if hours >= 2 * _HOURS_A_YEAR else length
    said = f"{length} for {t.steps or 0:,} steps"
    if t.gpu_hours is None:
        return said
    cost = "" if t.cost is None else f", cost {format_count(t.cost).strip()}"
    gpu_hours = "less than 0.01" if 0 < t.gpu_hours < 0.01 else format_count(t.gpu_hours).strip()
    return f"{said}: {gpu_hours} GPU hours{cost}"


def link_text(row: CommunicationPart | Collective | ComparedRow) -> str:
    """Return the name of a row's link or of its fabric: `nvlink`, `infiniband`, `shared memory`, `roce 400`."""
    if not row.link or not row.fabric or row.fabric.startswith(row.link):
        return row.link or "-"
    return row.fabric.replace("_", " ")


def axes_text(axes: Sequence[str]) -> str:
    """Return `data + fsdp`, or `no axis`."""
    return " + ".join(axes) or "no axis"


def group_text(row: CommunicationPart, device: str) -> str:
    """Return `8 groups of 16 GPUs, 8 per domain`: the members of a group have eight GPUs of each NVLink domain."""
    if row.group_size is None or row.num_groups is None:
        return ""
    inside = "" if row.link != "infiniband" else f", {row.gpus_per_domain} per domain"
    part = "" if row.axes_complete is not False else ", part of the axis"
    listed = f", {row.replica_groups}" if row.replica_groups else ""
    return f"{plural(row.num_groups, 'group')} of {plural(row.group_size, device)}{inside}{part}{listed}"


def row_name(row: CommunicationPart | ComparedRow) -> str:
    """Return `all-gather bf16`."""
    return " ".join(part for part in (row.collective or "unknown", row.dtype) if part)


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a verdict or a finding."""
    return re.split(r"(?<=\.) (?=[A-Z\d])", text)


def shorten_verdict(report: Report, width: int) -> str:
    """Return the sentences of a verdict that fit on two lines, and the sentence that recommends a change."""
    said = ""
    for sentence in split_sentences(report.verdict or ""):
        longer = f"{said} {sentence}".strip()
        said = longer if sentence == report.change or len(textwrap.wrap(longer, width)) <= 2 else said
    return said


def spread_text(report: Report) -> str:
    """Return a text on how the step time varies over devices and steps; empty if it is constant or unknown."""
    s = report.spread.time_s
    if s.median is None or s.min == s.max:
        return ""
    of = f"{format_seconds(s.min)} to {format_seconds(s.max)} ({report.device} {s.worst_device}, step {s.worst_step})"
    return f"one {report.device}'s step: {of}, median {format_seconds(s.median)}, p90 {format_seconds(s.p90)}"


def waiting_lines(report: Report) -> list[str]:
    """Return lines on how much of communication is waiting for peers, and for which devices; empty if unknown."""
    rows = [r for r in report.communication if r.wait_s is not None and r.busy_s]
    if not rows:
        return []
    wait_s, busy_s = sum(r.wait_s or 0.0 for r in rows), sum(r.busy_s or 0.0 for r in rows)
    how = {"clocked": "by start times", "clock_free": "by the shortest duration in each"}
    method = report.quality.wait_method if report.quality else None
    split = f" ({how[method]})" if method else ""
    lines = [
        f"{format_seconds(wait_s)} of {format_seconds(busy_s)} in collectives, {format_percent(wait_s / busy_s)}{split}"
    ]
    for d in (report.stragglers.devices if report.stragglers else ())[:3]:
        if d.caused_wait_s:
            where = "" if d.host is None else f" on {d.host}"
            late = "" if d.last_share is None else f", last in {format_percent(d.last_share)} of collectives"
            waited_s, each = (d.caused_wait_s, "") if d.delay_s is None else (d.delay_s, " each")
            waited = f"{format_seconds(waited_s)} a step{each}"
            lines.append(f"{report.device} {d.device}{where}: others waited {waited}{late}")
    return lines


def quality_text(report: Report) -> str:
    """Return the main points of data quality; empty for a prediction."""
    q = report.quality
    if q is None:
        return ""
    parts = [
        f"{q.events:,} operations" if q.events is not None else "",
        f"{format_percent(q.mapped_share)} of communication mapped" if q.mapped_share is not None else "",
        f"{format_percent(q.kernels_mapped_share)} of compute mapped" if q.kernels_mapped_share is not None else "",
        f"{q.clocks} clocks within {format_seconds(q.clock_residual_s)}" if q.clock_residual_s is not None else "",
        f"capture added {format_seconds(q.overhead_s)} a step" if q.overhead_s is not None else "",
        f"{q.dropped_events:,} events lost" if q.dropped_events else "",
        "rows by axis withheld" if q.axes_withheld else "",
    ]
    return ", ".join(part for part in parts if part)


def pipeline_lines(report: Report) -> list[str]:
    """Return lines of at most 78 columns on a pipeline's schedule and its cost; none without a pipeline."""
    p, step = report.pipeline, report.step
    if p is None:
        return []
    chunks = f" x {p.virtual_stages} chunks" if p.virtual_stages > 1 else ""
    flop = f"; layers execute {p.executed_over_useful:.3f} x their useful FLOP"
    ticks = p.warmup_ticks + p.steady_ticks + p.drain_ticks
    kinds = f"{p.warmup_ticks} warm-up, {p.steady_ticks} steady, {p.drain_ticks} drain"
    lines = [
        f"{p.schedule} over {p.axis}: {p.stages} stages{chunks}, {p.microbatches} microbatches",
        f"{ticks} ticks: {kinds}; at most {p.slots} inputs kept",
        f"bubble {format_seconds(step.bubble_s)}, {format_percent(step.bubble_fraction)} of the step{flop}",
    ]
    if p.padding_layers:
        lines.append(f"{p.padding_layers} padding layers are computed too, and count as bubble")
    if p.permute_s is not None:
        exposed = format_seconds(p.permute_exposed_s)
        lines.append(f"{p.permute_count:g} permutes between stages: {format_seconds(p.permute_s)}, {exposed} exposed")
    return lines


def goodput_shares(part: GoodputPart) -> list[Share]:
    """Return the parts of a run's wall time that are not zero."""
    found = ((f"goodput.{key}", label, getattr(part, f"{key}_s")) for key, label in PHASES.values())
    return [Share(key, label, seconds) for key, label, seconds in found if seconds]


def goodput_text(part: GoodputPart) -> str:
    """Return `93.1 % of 11h 24m, 3 attempts, 12 steps made again`."""
    attempts = f", {plural(part.attempts, 'attempt')}" if part.attempts else ""
    again = f", {plural(part.lost_steps, 'step')} made again" if part.lost_steps else ""
    return f"{format_percent(part.share)} of {format_seconds(part.wall_s)}{attempts}{again}"


def failures_lines(report: Report) -> list[str]:
    """Return sentences on the goodput under failures; none if the report has no prediction of it."""
    f, step_s = report.failures, report.step.time_s
    if f is None or not step_s:
        return []
    studies = catalog.failures()["published"]
    source = studies[f.rate_source]["name"] if f.rate_source in studies else "failures.per_host_day"
    elsewhere = [
        f"{format_percent(goodput)} ({studies[study]['name'] if study in studies else study})"
        for study, goodput in f.published.items()
        if study != f.rate_source
    ]
    kept = "With a checkpoint" if f.every else "No checkpoints are written (checkpoint.every = 0); with one"
    low, high, saving, lost, down, best, snapshots = map(
        format_percent,
        (f.goodput_low, f.goodput_high, f.saving_share, f.lost_share, f.down_share, f.best_goodput, f.snapshot_goodput),
    )
    detection, restart, read, blocked, written = map(
        format_seconds, (f.detection_s, f.restart_s, f.read_s, f.blocked_s, f.write_s)
    )
    job = f"The job fails every {format_seconds(f.between_s)} on average"
    hosts = f"it has {plural(f.hosts, 'host')} with {f.per_host_day:.2g} failures a day each ({source})"
    reading = f"reading the state {read} at {format_rate(f.storage_bytes_per_s)}"
    goodput = f"goodput is {format_percent(f.goodput)} if a spare host is always at hand"
    months = f"one month in ten has less than {low}, and one in ten more than {high}"
    best_every, snapshot_every = (_every(steps, step_s) for steps in (f.best_every, f.best_snapshot_every))
    save = f"A save stops the steps for {blocked} and is written {written} later"
    held = f"they take {format_bytes(f.snapshot_host_bytes)} of a host's memory"
    alone = []
    if f.host_share and f.spares:
        repair = f"the job waits for the repair of a lost host, which takes {f.repair_hours:g} hours"
        alone = [f"Without a spare host, goodput is {format_percent(f.spares[0].goodput)}, since {repair}."]
    return [
        f"{job}: {hosts}.",
        f"A failure is detected after {detection}; the restart takes {restart}, and {reading}.",
        f"{kept} {_every(f.every or f.best_every, step_s)}, {goodput}; {months}.",
        f"The rest of the time goes to saves ({saving}), lost steps ({lost}) and restarts ({down}).",
        *alone,
        f"The best interval is {best_every}, with a goodput of {best}. {save}.",
        f"With snapshots in host memory and a copy on another host it is {snapshot_every}, with {snapshots}; {held}.",
        *([f"With other published failure rates, goodput is {' and '.join(elsewhere)}."] if elsewhere else []),
    ]


def _every(steps: int, step_s: float) -> str:
    return f"every {plural(steps, 'step')} ({format_seconds(steps * step_s)})"


def goodput_summary(goodput: Goodput | None) -> str:
    """Return one line for the end of a training, with every part of the wall time; empty if unknown."""
    if goodput is None or not goodput.wall_s:
        return ""
    part = goodput_part(goodput)
    parts = [f"{s.label} {format_seconds(s.value)}" for s in goodput_shares(part)]
    return f"goodput {goodput_text(part)}: {', '.join(parts)}"


_TREND = {
    "step_time_s": "step time",
    "tokens_per_s": "tokens/s",
    "examples_per_s": "examples/s",
    "mfu": "MFU",
    "loss": "loss",
    "exposed_s": "exposed",
}


def trend_text(report: Report) -> str:
    """Return `From the first third of the steps to the last: step time +1.2 %, loss -31.0 %.`; empty if unknown."""
    trend = report.history.trend if report.history else {}
    parts = [
        f"{label} {change:+.1%}".replace("%", " %")
        for key, label in _TREND.items()
        if (change := trend.get(key)) is not None
    ]
    return f"From the first third of the steps to the last: {', '.join(parts)}." if parts else ""


def interval_text(report: Report) -> str:
    """Return `0.99 to 1.17 s (holds for 80 % of comparable runs, see ...)`, or why there is none; empty if unknown."""
    part, reason = report.step.time_interval, report.step.time_interval_reason
    if part is None:
        return f"no interval: {reason}" if reason else ""
    low, high = (format_seconds(end) for end in part.p80_s)
    number, _, unit = low.partition(" ")
    low = number if high.endswith(f" {unit}") else low
    whose = "80 % of comparable runs" + ("" if part.calibrated else ", all of one publisher")
    return f"{low} to {high} (holds for {whose}, see docs/concepts/validation.md)"


def _bounds(report: Report) -> str:
    low, high = report.step.all_overlapped_s, report.step.all_exposed_s
    if low is None or high is None:
        return ""
    return f" ({format_seconds(low)} if all communication hid, {format_seconds(high)} if none did)"


def _utilization(report: Report) -> str:
    step = report.step
    causal = step.mfu_causal if step.mfu_causal != step.mfu else None  # They are equal without attention.
    extra = [
        f"{label}{format_percent(value)} by {what} FLOP"
        for label, value, what in (("", causal, "causal"), ("HFU ", step.hfu, "executed"))
        if value is not None
    ]
    return f" ({', '.join(extra)})" if extra else ""


def _throughput(report: Report) -> str:
    (what, rate), flops = rate_of(report), report.step.model_flops
    parts = []
    if rate is not None:
        parts.append(f"{format_count(rate).strip()} {what}/s per {report.device}")
    if flops is not None:
        parts.append(f"{format_flops(flops)} of the model a step")
    return ", ".join(parts) or "-"


def rate_of(report: Report) -> tuple[Literal["tokens", "examples"], float | None]:
    """Return `tokens`, or `examples` if a step has no tokens, and the number that one device processes per second."""
    step = report.step
    if step.tokens_per_s_per_gpu is None and step.examples_per_s_per_gpu is not None:
        return "examples", step.examples_per_s_per_gpu
    return "tokens", step.tokens_per_s_per_gpu


def _processes(report: Report) -> str:
    seen, expected = report.window.processes_seen, report.window.processes_expected
    return "" if seen == expected == 1 else f", {seen} of {expected} processes"
