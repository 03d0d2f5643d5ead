"""What makes a step fit that does not: changes of the experiment, each shown to by a compile.

The changes that usually cost the least come first: recompute more, micro-batches, a longer fsdp axis, tensor and
sequence parallelism, moments in bf16 or in host memory; where too few of them are enough, more recomputation together
with another. Those that fit are ranked by the step they predict.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from meshkit.config.experiment import Experiment, load
from meshkit.config.toml_text import inline
from meshkit.errors import ConfigError
from meshkit.report.schema import RemedyPart, Report
from meshkit.units import format_bytes, format_percent, format_seconds
from meshkit.verbs.plan.bounds import Bounds, pool_bytes
from meshkit.verbs.plan.outcome import Outcome
from meshkit.verbs.plan.space import make_space
from meshkit.verbs.plan.workers import Settings, open_workers

WANTED = 3
# Compiles at most; what the closed forms rule out costs none.
TRIES = 9
_WORDS = {"full": "recompute every layer", "dots": "keep the projections, recompute the rest"}


@dataclass(frozen=True)
class Change:
    """A change that may help."""

    group: str  # its kind: of each the mildest that fits is kept
    what: str  # in words
    settings: Settings
    parts: tuple[Change, ...] = ()
    """Of two changes at once, each; they are tried where too few changes are enough alone."""


def find_remedies(
    path: str | Path,
    overrides: Sequence[str],
    *,
    step_s: float | None = None,
    jobs: int | None = None,
    tries: int = TRIES,
    done: Callable[[Outcome], None] = lambda _: None,
) -> tuple[RemedyPart, ...]:
    """The three cheapest changes with which an experiment fits, fewer where fewer do.

    Args:
        path, overrides: the experiment.
        step_s: what its step would take if it fit, to say what each change costs.
        jobs: planning processes at a time; None: one for each CPU.
        tries: compiles at most.
        done: hears every outcome.
    """
    experiment = load(path, overrides)
    bounds = Bounds(experiment)
    waiting = [change for change in changes(experiment, bounds) if _may_fit(path, overrides, change, bounds)]
    if not waiting:
        return ()
    order = list(waiting)
    found: list[tuple[Change, Outcome]] = []
    asked: dict[Settings, Change] = {}
    answered = 0

    def choose() -> Settings | None:
        maybe = len(found) + len(asked) - answered  # those that are being compiled may fit, too
        if not waiting or len(asked) >= tries or len(found) >= WANTED or maybe > WANTED:
            return None
        change = _next(waiting, list(asked.values()))
        asked[change.settings] = change
        return change.settings

    def take(outcome: Outcome) -> None:
        nonlocal answered
        answered += 1
        done(outcome)
        if outcome.fits:
            change = asked[outcome.settings]
            found.append((change, outcome))
            waiting[:] = [c for c in waiting if c.group != change.group and not _needless(c, change, order)]

    with open_workers(path, overrides, jobs) as workers:
        workers.run(choose, take)
    found.sort(key=lambda pair: pair[1].time_s or float("inf"))
    # a change is worth nothing beside a part of it that is as fast
    found = [
        (c, o) for i, (c, o) in enumerate(found) if not any(set(b.settings) < set(c.settings) for b, _ in found[:i])
    ]
    return tuple(_part(change, outcome, step_s) for change, outcome in found[:WANTED])


def changes(experiment: Experiment, bounds: Bounds) -> Iterator[Change]:
    """What may make an experiment fit, the mildest of each kind first; then recomputation together with another."""
    alone = list(_single_changes(experiment, bounds))
    yield from alone
    # where one is not enough, the strongest of two come first
    for second in reversed([c for c in alone if c.group in ("micro-batches", "fsdp", "tensor")]):
        for first in reversed([c for c in alone if c.group == "remat"]):
            both = f"{first.what}; {second.what}"
            yield Change(f"remat, {second.group}", both, (*first.settings, *second.settings), (first, second))
    host = next((c for c in alone if c.group == "host"), None)
    full = next((c for c in alone if c.settings == ('train.remat="full"',)), None)
    if host is not None and full is not None:
        both = f"{host.what}, and {full.what}"
        yield Change("both", both, (*host.settings, *full.settings), (host, full))


def _single_changes(experiment: Experiment, bounds: Bounds) -> Iterator[Change]:
    """Changes of one thing each, the mildest of each kind first."""
    optimizer = experiment.optimizer
    if experiment.pipeline.axis is not None and experiment.pipeline.residuals == "stash":
        yield Change("remat", "keep the inputs of chunks, run each again", ('pipeline.residuals="recompute"',))
    yield from _recompute(experiment, bounds)
    yield from _micro_batches(experiment)
    space = make_space(experiment, axes=None, logical_axes=bounds.logical_axes, remats=())
    yield from _larger_axes(experiment, space)
    if optimizer.dtype == "fp32" and optimizer.class_path is None:
        yield Change("moments", "first moment in bf16", ('optimizer.dtype="bf16"',))
    if optimizer.memory == "device" and experiment.local_sgd.axis is None:
        yield Change("host", "optimizer state in host memory", ('optimizer.memory="host"',))


def _recompute(experiment: Experiment, bounds: Bounds) -> Iterator[Change]:
    """More recomputation than now."""
    if not bounds.model.takes_remat:
        return
    now = experiment.train.remat
    policies = {"none": ["dots", "full"], "dots": ["full"], "full": ["offload"]}
    for policy in policies.get(now if isinstance(now, str) else "dots", []):
        what = _WORDS.get(policy, "keep the layers' inputs in host memory")
        yield Change("remat", what, (f"train.remat={inline(policy)}",))


def _micro_batches(experiment: Experiment) -> Iterator[Change]:
    """Two, four, eight times the micro-batches; gradients reduced with each, where that is what makes room."""
    train, pipeline = experiment.train, experiment.pipeline
    for times in (2, 4, 8):
        if pipeline.axis is not None:
            count = pipeline.microbatches * times
            yield Change("micro-batches", f"{count} microbatches", (f"pipeline.microbatches={count}",))
            continue
        count = train.accumulate * times
        what, setting = f"{count} micro-batches", f"train.accumulate={count}"
        cut = "fsdp" in experiment.mesh.axis_names and not experiment.rules.gradients
        if cut:
            also = 'rules.gradients.embed="fsdp"'
            yield Change("micro-batches", f"{what}, gradients reduced with each", (setting, also))
        else:
            yield Change("micro-batches", what, (setting,))


def _larger_axes(experiment: Experiment, space) -> Iterator[Change]:
    """Meshes that cut the state further: over `fsdp` what `data` has, and over `tensor` what either has."""
    now = {axis.name: axis.size for axis in experiment.mesh.axes}
    for name, what in (("fsdp", "cut the state over more GPUs"), ("tensor", "tensor parallelism with sequences cut")):
        larger = [mesh for mesh in space.meshes if _grows_only(now, {a.name: a.size for a in mesh.axes}, name)]
        # inside a domain as far as may be: an axis that crosses domains is slow
        larger.sort(key=lambda mesh: [(a.size, a.number("infiniband")) for a in mesh.axes if a.name == name])
        sizes = set()
        for mesh in larger:
            size = next(a.size for a in mesh.axes if a.name == name)
            if size in sizes:
                continue
            sizes.add(size)
            variant = dataclasses.replace(space.base, mesh=mesh)
            yield Change(name, f"{what}: {name} {size}", space.settings(variant))


def _grows_only(now: dict[str, int], then: dict[str, int], name: str) -> bool:
    """Whether an axis grows by what the axes that it may take from lose, and all others stay."""
    grown = then.get(name, 1) > now.get(name, 1)
    taken = ("data",) if name == "fsdp" else ("data", "fsdp")
    return grown and all(then.get(n, 1) == now.get(n, 1) for n in {*now, *then} - {name, *taken})


def _may_fit(path: str | Path, overrides: Sequence[str], change: Change, bounds: Bounds) -> bool:
    """Whether the closed forms leave room for the experiment with a change; False also where it cannot be loaded."""
    try:
        experiment = load(path, (*overrides, *change.settings))
        return bounds.of(experiment).needed_bytes <= pool_bytes(experiment)
    except ConfigError:
        return False


def _needless(change: Change, fits: Change, order: Sequence[Change]) -> bool:
    """Whether a change of several holds one that is of the kind of one that fits alone, and at least as strong."""
    return any(
        part == fits or (part.group == fits.group and part in order and order.index(part) > order.index(fits))
        for part in change.parts
    )


def _next(waiting: list[Change], asked: Sequence[Change]) -> Change:
    """The next change: of the kind that was asked the least often; two at once after all that are one."""
    counts = {c.group: sum(a.group == c.group for a in asked) for c in waiting}
    change = min(waiting, key=lambda c: (bool(c.parts), counts[c.group], waiting.index(c)))
    waiting.remove(change)
    return change


def remedies_table(report: Report) -> Table:
    """The changes with which a step fits, and the step that each predicts."""
    table = Table(title="what makes it fit", title_style="bold", title_justify="left", box=None, pad_edge=False)
    table.add_column("change", overflow="fold", ratio=1)
    for name in ("step", "cost", "peak", "to spare"):
        table.add_column(name, justify="right", no_wrap=True)
    for remedy in report.memory.remedies or ():
        what = f"{remedy.what}: {' '.join(remedy.settings)}"
        memory = format_bytes(remedy.peak_bytes), format_bytes(remedy.margin_bytes)
        table.add_row(what, format_seconds(remedy.time_s), _cost_text(remedy), *memory)
    return table


def _cost_text(remedy: RemedyPart) -> str:
    """`+12.3 %`: what a change adds to the step that does not fit."""
    if remedy.cost_s is None or not remedy.time_s:
        return "-"
    share = format_percent(remedy.cost_s / (remedy.time_s - remedy.cost_s))
    return share if share.startswith("-") else f"+{share}"


def _part(change: Change, outcome: Outcome, step_s: float | None) -> RemedyPart:
    """A change that fits, with what its compile has shown, for the report."""
    return RemedyPart(
        settings=change.settings,
        what=change.what,
        time_s=outcome.time_s,
        cost_s=None if step_s is None or outcome.time_s is None else outcome.time_s - step_s,
        peak_bytes=outcome.peak_bytes,
        margin_bytes=outcome.margin_bytes,
    )
