"""Propose changes to a plan: other links for the mesh axes, remedies for a step that does not fit, XLA options.

Other links keep the sizes of the axes, so the program stays the same. Only the axes' factors on NVLink and InfiniBand
change, and with them the placement of GPUs. From the rows of a report the network model predicts the communication time
of every assignment that the cluster allows.

Remedies are changes of the experiment, and a compile shows that each one fits. Changes that usually cost least come
first: more recomputation, micro-batches, a longer fsdp axis, tensor and sequence parallelism, moments in bf16 or in
host memory. If too few single changes fit, recomputation is combined with another change. Changes that fit are ranked
by their predicted step time.

On request, other options of XLA are compiled in place of those that meshkit derives (compile/choices.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, ProgramExperiment, load, load_any
from meshkit.config.mesh import MeshAxis, MeshSpec
from meshkit.config.sections import PGLE_OPTION, TABLE_OPTION
from meshkit.config.toml import inline
from meshkit.errors import ConfigError
from meshkit.planning.planner import experiments_with_fewer_hosts
from meshkit.report.schema import RemedyPart, Report
from meshkit.search.bounds import Bounds, Shape, collective_seconds, group_shape, ruled_out
from meshkit.search.candidate import Candidate, Outcome, Settings, fastest_first
from meshkit.search.variants import factorizations, make_space
from meshkit.search.workers import file_request, open_workers
from meshkit.units import format_bytes, format_percent, format_seconds

# A smaller gain is within the error of the network model.
_WORTH = 0.01
# The number of remedies to find, and the most compiles to try. Closed forms rule out other changes without a compile.
WANTED = 3
TRIES = 9
_MOST_SIZES = 4  # The most numbers of hosts for which `plan_fewer_hosts` compiles.
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")
# XLA's defaults of options that meshkit sets to other values: a description, the prefix and the suffix of the options'
# names, and the value (30 MiB is kDefaultAllReduceCombineThreshold and similar in xla/service/collective_utils.h).
_XLAS_OWN = (
    ("collectives not pipelined over layers", "xla_gpu_pipeline_", "", "COLLECTIVE_PIPELINING_MODE_OFF"),
    ("one layer in the body of the loop", "xla_gpu_enable_while_loop_double_buffering", "", False),
    ("messages combined up to 30 MiB", "xla_gpu_", "_combine_threshold_bytes", 30 * 2**20 + 7),
)
# meshkit derives no options for a `[program]`. These are the options that it would derive for a loop over layers.
_FOR_A_PROGRAM: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "collectives pipelined over layers",
        {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in _KINDS},
    ),
    ("two layers in the body of the loop", {"xla_gpu_enable_while_loop_double_buffering": True}),
    ("messages combined up to 256 MiB", {f"xla_gpu_{kind}_combine_threshold_bytes": 2**28 for kind in _KINDS}),
)
_WORDS = {"full": "recompute every layer", "dots": "keep projections and attention, recompute the rest"}


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind over the same axes in a step, on one GPU."""

    axes: tuple[str, ...]
    """The mesh axes that a group covers completely."""
    collective: str
    payload_bytes: float
    """Bytes of one collective: the operand, or the result of an all-gather."""
    count: float = 1
    shape: Shape | None = None
    """The shape of a group that does not cover whole axes; its predicted time is the same in every assignment."""


@dataclass(frozen=True)
class Proposal:
    """The best assignment of a mesh's axes to links."""

    axes: tuple[MeshAxis, ...]
    """The mesh's axes in their order, with the proposed factors."""
    seconds_now: float
    """Seconds of communication in a step on the present mesh, if nothing overlaps."""
    seconds_proposed: float
    reason: str
    changed: tuple[str, ...] = ()
    """The axes with new factors; empty if the present mesh is best."""

    @property
    def mesh(self) -> MeshSpec:
        """Return the proposed mesh."""
        return MeshSpec(self.axes)

    @property
    def settings(self) -> tuple[str, ...]:
        """Return the values for `--set` that make the change, one for each changed axis: `mesh.tensor=8`."""
        return tuple(f"mesh.{axis.name}={inline(axis.to_plain())}" for axis in self.axes if axis.name in self.changed)


def propose(source: Report | Sequence[Traffic], mesh: MeshSpec, cluster: Cluster) -> Proposal:
    """Return the fastest assignment of the axes' factors to NVLink and InfiniBand, and why it is faster.

    Args:
        source: a report of a plan on this mesh, or its traffic.
        mesh: the present mesh; the sizes of its axes do not change.
        cluster: its links determine how long the collectives take.

    Returns:
        The present assignment, unless another is more than 1 % faster. Among equally fast assignments it is the one
        with the fewest changes.

    Raises:
        ConfigError: the mesh does not fit the cluster, or is not the one of the report or the traffic.
    """
    now = mesh.resolve(cluster)
    if isinstance(source, Report):
        _check_mesh(source, now)
    rows = traffic_of(source) if isinstance(source, Report) else tuple(source)
    _check_axes(rows, now)
    seconds_of = collective_seconds(cluster)
    shape_of = lambda row, mesh: row.shape or group_shape(row.axes, mesh)
    spent = {
        mesh: [row.count * seconds_of(row.collective, row.payload_bytes, shape_of(row, mesh)) for row in rows]
        for mesh in assignments(now, cluster)
    }
    best = min(spent, key=lambda candidate: (sum(spent[candidate]), len(_changes(now, candidate))))
    seconds_now, seconds_best = sum(spent[now]), sum(spent[best])
    if seconds_best >= seconds_now * (1 - _WORTH):
        return Proposal(now.axes, seconds_now, seconds_now, _why_not(len(spent), seconds_now, cluster))
    reason = _why(rows, spent[now], spent[best], now, best)
    return Proposal(best.axes, seconds_now, seconds_best, reason, _changes(now, best))


def traffic_of(report: Report) -> tuple[Traffic, ...]:
    """Return the communication rows of a report; a row whose groups cover no whole axes has the groups' shape."""
    rows = []
    for row in report.communication:
        if not row.collective or not row.group_size or not row.count:
            continue  # The shape of communication without an instruction is unknown.
        inside = row.gpus_per_domain or row.group_size
        whole = bool(row.axes) and row.axes_complete is not False
        shape = None if whole else (inside, max(1, row.group_size // inside))
        rows.append(Traffic(row.axes, row.collective, (row.payload_bytes or 0) / row.count, row.count, shape))
    return tuple(rows)


def assignments(mesh: MeshSpec, cluster: Cluster) -> Iterator[MeshSpec]:
    """Yield every way to factor the sizes of the axes into GPUs of one domain x domains."""
    for inside in factorizations(cluster.gpus_used_per_domain, len(mesh.axes)):
        if not any(axis.size % n for axis, n in zip(mesh.axes, inside)):
            yield MeshSpec(tuple(MeshAxis(axis.name, n, axis.size // n) for axis, n in zip(mesh.axes, inside)))


def _check_mesh(report: Report, mesh: MeshSpec) -> None:
    sizes = {axis.axis: axis.size for axis in report.mesh}
    expected = mesh.sizes
    if sizes and sizes != expected:
        raise ConfigError(
            f"the report is of the mesh {sizes}, not of {expected}.", hint="a plan of the same experiment"
        )


def _check_axes(rows: Sequence[Traffic], mesh: MeshSpec) -> None:
    for name in {name for row in rows if row.shape is None for name in row.axes} - set(mesh.axis_names):
        raise ConfigError(
            f"there is traffic over axis '{name}', which the mesh does not have.", hint="the mesh of the report"
        )


def _changes(now: MeshSpec, other: MeshSpec) -> tuple[str, ...]:
    return tuple(old.name for old, new in zip(now.axes, other.axes) if old != new)


def _why_not(assignments: int, seconds: float, cluster: Cluster) -> str:
    if assignments == 1:
        domains = cluster.num_nvlink_domains
        where = f"{domains} NVLink domain{'s' if domains > 1 else ''} of {cluster.gpus_used_per_domain} GPUs"
        return f"no other assignment of axes of these sizes fits {where}."
    if seconds == 0:
        return "there is no communication to place."
    return (
        f"of the {assignments} assignments with these axis sizes none is faster than the present one "
        f"({format_seconds(seconds)} of communication a step, if none overlaps)."
    )


def _why(
    rows: Sequence[Traffic], spent_now: Sequence[float], spent_best: Sequence[float], now: MeshSpec, best: MeshSpec
) -> str:
    gains: dict[tuple[str, ...], float] = {}
    for row, before, after in zip(rows, spent_now, spent_best):
        gains[row.axes] = gains.get(row.axes, 0.0) + before - after
    axes = max(gains, key=lambda key: gains[key])
    moved = sum(row.payload_bytes * row.count for row in rows if row.axes == axes)
    row = next(row for row in rows if row.axes == axes)
    before, after = group_shape(row.axes, now), group_shape(row.axes, best)
    names = " and ".join(f"'{name}'" for name in axes)
    subject = f"axis {names}" if len(axes) == 1 else f"axes {names} together"
    verb = "moves" if len(axes) == 1 else "move"
    changed = [axis for axis in best.axes if axis.name in _changes(now, best)]
    setting = ", ".join(f"{axis.name} = {inline(axis.to_plain())}" for axis in changed)
    total = f"{format_seconds(sum(spent_best))} instead of {format_seconds(sum(spent_now))}"
    return (
        f"{subject} {verb} {format_bytes(moved)} a step on each GPU and would {_where(before, after)}; "
        f"with {setting} communication takes {total} a step, if none overlaps."
    )


def _where(before: Shape, after: Shape) -> str:
    if after[1] == 1 < before[1]:
        return f"stay inside an NVLink domain instead of crossing {before[1]}"
    if before[1] != after[1]:
        return f"cross {after[1]} NVLink domains instead of {before[1]}"
    return f"keep {after[0]} GPUs of a group in each NVLink domain"


def find_remedies(
    path: str | Path,
    overrides: Sequence[str],
    *,
    step_s: float | None = None,
    jobs: int | None = None,
    done: Callable[[Outcome], None] = lambda _: None,
) -> tuple[RemedyPart, ...]:
    """Return up to three changes with which an experiment fits, the fastest first.

    Args:
        step_s: the step time if the unchanged experiment did fit, from which the cost of each change is computed.
        jobs: planning processes at a time; None: one for each CPU.

    Returns:
        The changes; their `cost_s` is None if `step_s` is None. Empty if no tried change fits.

    Raises:
        ConfigError: the experiment is invalid.
    """
    experiment = load(path, overrides)
    bounds = Bounds(experiment)
    waiting = [change for change in changes(experiment, bounds) if may_fit(path, overrides, change, bounds)]
    if not waiting:
        return ()
    order, asked = list(waiting), list[Candidate]()

    def choose() -> Candidate | None:
        found = sum(change.fits for change in asked)
        maybe = found + sum(change.outcome is None for change in asked)  # Changes that are being compiled may fit, too.
        if not waiting or len(asked) >= TRIES or found >= WANTED or maybe > WANTED:
            return None
        asked.append(next_change(waiting, asked))
        return asked[-1]

    def take(change: Candidate) -> None:
        assert change.outcome is not None
        done(change.outcome)
        if change.fits:
            waiting[:] = [c for c in waiting if c.group != change.group and not _is_redundant(c, change, order)]

    with open_workers(file_request(path, overrides), jobs) as workers:
        workers.plan_chosen(choose, take)
    found = fastest_first(asked)
    # A change is useless if a subset of its settings is as fast.
    found = [c for i, c in enumerate(found) if not any(set(b.settings) < set(c.settings) for b in found[:i])]
    return tuple(_part(change, step_s) for change in found[:WANTED])


def find_alternatives(
    path: str | Path, overrides: Sequence[str], report: Report, *, jobs: int | None = None
) -> tuple[RemedyPart, ...]:
    """Compile alternatives to the XLA options that meshkit derives; return those that compile, the fastest first.

    Raises:
        ConfigError: the experiment is invalid.
    """
    asked = list(other_options(load_any(path, overrides), report))
    with open_workers(file_request(path, overrides), jobs) as workers:
        workers.plan(asked)
    planned = sorted((c for c in asked if c.time_s), key=lambda c: c.time_s or 0.0)
    return tuple(_part(change, report.step.time_s) for change in planned)


def plan_fewer_hosts(
    path: str | Path, overrides: Sequence[str], report: Report, *, jobs: int | None = None
) -> tuple[RemedyPart, ...]:
    """Compile the step that a job makes after the loss of hosts, for the numbers of hosts that `[launch]` allows.

    If it allows more than four numbers, the three largest and the smallest are compiled.

    Raises:
        ConfigError: the experiment is invalid.
    """
    experiment = load(path, overrides)
    fewer = list(experiments_with_fewer_hosts(experiment))
    if len(fewer) > _MOST_SIZES:
        fewer = [*fewer[: _MOST_SIZES - 1], fewer[-1]]
    asked = []
    for smaller in fewer:
        key, pieces = "accumulate", smaller.train.accumulate
        if smaller.pipeline.axis is not None:
            key, pieces = "microbatches", smaller.pipeline.microbatches
        axes = " x ".join(f"{axis} {size}" for axis, size in smaller.mesh.sizes.items())
        what = f"{smaller.cluster.hosts_used} of {experiment.cluster.hosts_used} hosts, {axes}, {key} {pieces}"
        asked.append(_change("hosts", what, (f"launch.hosts={smaller.cluster.hosts_used}",)))
    with open_workers(file_request(path, overrides), jobs) as workers:
        workers.plan(asked)
    return tuple(_part(change, report.step.time_s) for change in asked if change.time_s)


def other_options(experiment: Experiment | ProgramExperiment, report: Report) -> Iterator[Candidate]:
    """Yield candidates with other XLA options: XLA's defaults replace one kind of derived options, or all of them.

    Further candidates use other latencies for XLA's scheduler. A `[program]` has no derived options, so its candidates
    have the options that meshkit would choose.
    """
    if isinstance(experiment, ProgramExperiment):
        yield from _options_of_a_program(experiment)
    else:
        yield from _options_without_derived(experiment, report)
    for latencies, words in (("predicted", "this plan's prices"), ("table", "its prices of collectives")):
        if experiment.train.pgle != latencies and not {PGLE_OPTION, TABLE_OPTION} & set(experiment.xla):
            yield _change("options", f"scheduled by {words}", (f"train.pgle={inline(latencies)}",))


def _options_without_derived(experiment: Experiment, report: Report) -> Iterator[Candidate]:
    derived = [o.name for o in report.program.options or () if o.name not in experiment.xla]
    for what, begin, end, value in _XLAS_OWN:
        names = [name for name in derived if name.startswith(begin) and name.endswith(end)]
        if names:
            yield _change("options", what, tuple(f"xla.{name}={inline(value)}" for name in names))
    if experiment.train.derived_options:
        yield _change("options", "none of what meshkit derives", ("train.derived_options=false",))


def _options_of_a_program(experiment: ProgramExperiment) -> Iterator[Candidate]:
    kinds = [
        (what, tuple(f"xla.{name}={inline(value)}" for name, value in options.items() if name not in experiment.xla))
        for what, options in _FOR_A_PROGRAM
    ]
    found = [(what, settings) for what, settings in kinds if settings]
    for what, settings in found:
        yield _change("options", what, settings)
    if len(found) > 1:
        yield _change("options", "; ".join(what for what, _ in found), tuple(s for _, each in found for s in each))


def _change(group: str, what: str, settings: Settings, parts: tuple[Candidate, ...] = ()) -> Candidate:
    return Candidate(settings, what=what, group=group, parts=parts)


def changes(experiment: Experiment, bounds: Bounds) -> Iterator[Candidate]:
    """Yield the changes that may make an experiment fit: single changes, the weakest of each kind first, then pairs."""
    alone = list(_single_changes(experiment, bounds))
    yield from alone
    # Pairs are for the case that one change is not enough, so the strongest pairs come first.
    for second in reversed([c for c in alone if c.group in ("micro-batches", "fsdp", "tensor")]):
        for first in reversed([c for c in alone if c.group == "remat"]):
            both = f"{first.what}; {second.what}"
            yield _change(f"remat, {second.group}", both, (*first.settings, *second.settings), (first, second))
    host = next((c for c in alone if c.group == "host"), None)
    full = next((c for c in alone if c.settings == ('train.remat="full"',)), None)
    if host is not None and full is not None:
        both = f"{host.what}, and {full.what}"
        yield _change("both", both, (*host.settings, *full.settings), (host, full))


def _single_changes(experiment: Experiment, bounds: Bounds) -> Iterator[Candidate]:
    optimizer = experiment.optimizer
    if experiment.pipeline.axis is not None and experiment.pipeline.residuals == "stash":
        yield _change("remat", "keep the inputs of chunks, run each again", ('pipeline.residuals="recompute"',))
    yield from _recompute(experiment, bounds)
    yield from _micro_batches(experiment)
    space = make_space(experiment, axes=None, logical_axes=bounds.logical_axes, remats=())
    yield from _larger_axes(experiment, space)
    if optimizer.dtype == "fp32" and optimizer.class_path is None:
        yield _change("moments", "first moment in bf16", ('optimizer.dtype="bf16"',))
    if optimizer.memory == "device" and experiment.local_sgd.axis is None:
        yield _change("host", "optimizer state in host memory", ('optimizer.memory="host"',))


def _recompute(experiment: Experiment, bounds: Bounds) -> Iterator[Candidate]:
    if not bounds.model.takes_remat:
        return
    now = experiment.train.remat
    policies = {"none": ["dots", "full"], "dots": ["full"], "full": ["offload"]}
    for policy in policies.get(now if isinstance(now, str) else "dots", []):
        what = _WORDS.get(policy, "keep the layers' inputs in host memory")
        yield _change("remat", what, (f"train.remat={inline(policy)}",))


def _micro_batches(experiment: Experiment) -> Iterator[Candidate]:
    train, pipeline = experiment.train, experiment.pipeline
    for times in (2, 4, 8):
        if pipeline.axis is not None:
            count = pipeline.microbatches * times
            yield _change("micro-batches", f"{count} microbatches", (f"pipeline.microbatches={count}",))
            continue
        count = train.accumulate * times
        what, setting = f"{count} micro-batches", f"train.accumulate={count}"
        cut = "fsdp" in experiment.mesh.axis_names and not experiment.rules.gradients
        if cut:
            also = 'rules.gradients.embed="fsdp"'
            yield _change("micro-batches", f"{what}, gradients reduced with each", (setting, also))
        else:
            yield _change("micro-batches", what, (setting,))


def _larger_axes(experiment: Experiment, space) -> Iterator[Candidate]:
    now = {axis.name: axis.size for axis in experiment.mesh.axes}
    crossing = lambda mesh: {axis.name for axis in mesh.axes if axis.number("infiniband") > 1}
    # Axes that exchange activations stay inside an NVLink domain.
    may_cross = crossing(experiment.mesh) | {"data", "fsdp", experiment.pipeline.axis}
    meshes = [mesh for mesh in space.meshes if crossing(mesh) <= may_cross]
    for name, what in (("fsdp", "shard the state over more GPUs"), ("tensor", "tensor and sequence parallelism")):
        larger = [mesh for mesh in meshes if _grows_only(now, {a.name: a.size for a in mesh.axes}, name)]
        # For each size, an axis inside a domain comes before an axis that crosses domains, which is slower.
        larger.sort(key=lambda mesh: [(a.size, a.number("infiniband")) for a in mesh.axes if a.name == name])
        sizes = set()
        for mesh in larger:
            size = next(a.size for a in mesh.axes if a.name == name)
            if size in sizes:
                continue
            sizes.add(size)
            variant = dataclasses.replace(space.base, mesh=mesh)
            yield _change(name, f"{what}: {name} {size}", space.settings(variant))


def _grows_only(now: dict[str, int], then: dict[str, int], name: str) -> bool:
    """Return whether axis `name` grows and only `data` (for `tensor` also `fsdp`) changes with it."""
    grown = then.get(name, 1) > now.get(name, 1)
    taken = ("data",) if name == "fsdp" else ("data", "fsdp")
    return grown and all(then.get(n, 1) == now.get(n, 1) for n in {*now, *then} - {name, *taken})


def may_fit(path: str | Path, overrides: Sequence[str], change: Candidate, bounds: Bounds) -> bool:
    """Return whether a change may fit by the closed forms; False also if the changed experiment cannot be loaded."""
    try:
        experiment = load(path, (*overrides, *change.settings))
        return ruled_out(experiment, bounds.bound(experiment)) is None
    except ConfigError:
        return False


def _is_redundant(change: Candidate, fits: Candidate, order: Sequence[Candidate]) -> bool:
    """Return whether a part of a pair is at least as strong as `fits`, a single change of its kind that fits."""
    return any(
        part == fits or (part.group == fits.group and part in order and order.index(part) > order.index(fits))
        for part in change.parts
    )


def next_change(waiting: list[Candidate], asked: Sequence[Candidate]) -> Candidate:
    """Remove and return the next change: one of the kind that was tried least often, single changes before pairs."""
    counts = {c.group: sum(a.group == c.group for a in asked) for c in waiting}
    change = min(waiting, key=lambda c: (bool(c.parts), counts[c.group], waiting.index(c)))
    waiting.remove(change)
    return change


def remedies_table(title: str, remedies: Sequence[RemedyPart]) -> Table:
    """Return a table of changes with the predicted step time of each."""
    table = Table(title=title, title_style="bold", title_justify="left", box=None, pad_edge=False)
    table.add_column("change", overflow="fold", ratio=1)
    for name in ("step", "cost", "peak", "to spare"):
        table.add_column(name, justify="right", no_wrap=True)
    for remedy in remedies:
        what = f"{remedy.what}: {' '.join(remedy.settings)}"
        memory = format_bytes(remedy.peak_bytes), format_bytes(remedy.margin_bytes)
        table.add_row(what, format_seconds(remedy.time_s), cost_text(remedy), *memory)
    return table


def cost_text(remedy: RemedyPart) -> str:
    """Return the step time that a change adds, as a share of the unchanged step, such as `+12.3 %`."""
    if remedy.cost_s is None or not remedy.time_s:
        return "-"
    share = format_percent(remedy.cost_s / (remedy.time_s - remedy.cost_s))
    return share if share.startswith("-") else f"+{share}"


def _part(change: Candidate, step_s: float | None) -> RemedyPart:
    cost_s = None if step_s is None or change.time_s is None else change.time_s - step_s
    return RemedyPart.from_sources(change.outcome, settings=change.settings, what=change.what, cost_s=cost_s)
