"""Find the memory cliff of a step: how much less memory makes XLA recompute or serialize, and the cost in step time.

    plan -> plans of the same step with smaller pools (larger ones if XLA already saves memory) -> bisection

XLA's scheduler and its rematerialization start to save memory at a limit, which depends on the memory that the client
may take (compile/choices.py). They count memory before XLA knows which buffers share it, so only compiles can show at
which pool they start.
"""

from __future__ import annotations

import dataclasses

from rich.table import Table

from meshkit.compile.choices import LIMIT, NO_LIMIT, room_for
from meshkit.config.experiment import Experiment, ProgramExperiment
from meshkit.planning.planner import Plan, plan_experiment
from meshkit.predict.coverage import rematerialized
from meshkit.report.schema import CliffPart, CliffPoint, FindingPart, Report
from meshkit.units import format_bytes, format_percent, format_seconds

_LONGER = 0.005  # Smaller changes come from another order of the step, which XLA chooses long before the cliff.
_WITHIN = 0.01  # The bisection ends at this share of the pool.
_SMALLER = (1.0, 0.94, 0.88, 0.82)  # Shares of the peak. XLA counts more than the peak, unless much is offloaded.
_LARGER = (1.05, 1.15, 1.3, 1.6)  # Multiples of the pool.
# Measured peaks of nine programs differ from plans by the same XLA by up to 2.3 % (benchmarks/gpu/memory.md).
_PEAK_ERROR = 0.023


def find_cliff(experiment: Experiment | ProgramExperiment, made: Plan) -> CliffPart:
    """Compile with other memory pools, and return at which pool XLA begins to save memory at the cost of step time.

    Raises:
        ProgramError: XLA refuses the step with one of the pools.
    """
    now = _point(made)
    points = [now]

    def saves_memory(point: CliffPoint) -> bool:
        """Return whether XLA saves memory: kernels run twice, or the step is longer than with another pool."""
        shortest_s = min(p.time_s for p in points)
        return point.recomputed_s > _LONGER * point.time_s or point.time_s > (1 + _LONGER) * shortest_s

    before, beyond = (None, now) if saves_memory(now) else (now, None)
    pools = [share * now.pool_bytes for share in _LARGER]
    if before:
        pools = [share * now.peak_bytes for share in _SMALLER]
        if made.compiled.options.get(LIMIT) == NO_LIMIT:  # Any pool with room for the peak gives this program.
            before = now.model_copy(update={"pool_bytes": min(now.pool_bytes, int(room_for(now.peak_bytes)))})
            points.append(before)

    def attempt(pool_bytes: float) -> None:
        nonlocal before, beyond
        points.append(tried := compile_with_pool(experiment, pool_bytes))
        before, beyond = (before, tried) if saves_memory(tried) else (tried, beyond)

    for pool_bytes in pools:
        if not (before and beyond):
            attempt(pool_bytes)
    while before and beyond and before.pool_bytes - beyond.pool_bytes > _WITHIN * now.pool_bytes:
        attempt((before.pool_bytes + beyond.pool_bytes) / 2)
    in_order = tuple(sorted(points, key=lambda p: -p.pool_bytes))
    if before is None or beyond is None:
        return CliffPart(points=in_order)
    distance = now.pool_bytes - before.pool_bytes
    return CliffPart(distance_bytes=distance, before=before, beyond=beyond, points=in_order)


def compile_with_pool(experiment: Experiment | ProgramExperiment, pool_bytes: float) -> CliffPoint:
    """Return the step compiled for a client with this memory pool, which may exceed the GPU's memory."""
    fraction = pool_bytes / experiment.cluster.gpu.memory_bytes
    train = experiment.train.model_copy(update={"memory_fraction": fraction})
    return _point(plan_experiment(dataclasses.replace(experiment, train=train)))


def with_cliff(report: Report, cliff: CliffPart) -> Report:
    """Return a report with its cliff; add a finding if the cliff is passed, or closer than a plan's error."""
    memory = report.memory.model_copy(update={"cliff": cliff})
    findings = report.findings
    if cliff.distance_bytes is not None and cliff.distance_bytes < _PEAK_ERROR * (memory.peak_bytes or 0):
        found = {
            "code": "memory_cliff",
            "severity": "warning",
            "message": cliff_text(cliff),
            "evidence": ("memory.cliff",),
            "try": "a larger train.memory_fraction, or more recomputation in the layers (train.remat)",
        }
        findings = (*findings, FindingPart.model_validate(found))
    return report.model_copy(update={"memory": memory, "findings": findings})


def cliff_text(cliff: CliffPart) -> str:
    """Return one sentence with the distance to the cliff and the changes beyond it."""
    before, beyond, distance = cliff.before, cliff.beyond, cliff.distance_bytes
    if before is None or beyond is None or distance is None:
        least, most = (format_bytes(end(p.pool_bytes for p in cliff.points)) for end in (min, max))
        return f"XLA saves memory with all or none of the pools between {least} and {most}: no cliff was found."
    changes = []
    if n := beyond.recomputed_kernels:
        twice = "1 kernel runs" if n == 1 else f"{n} kernels run"
        changes.append(f"{twice} twice, for {format_seconds(beyond.recomputed_s)}")
    if (exposed := beyond.exposed_s - before.exposed_s) > _LONGER * before.time_s:
        changes.append(f"another {format_seconds(exposed)} of communication is exposed")
    longer = format_percent(beyond.time_s / before.time_s - 1)
    takes = f"takes {format_seconds(beyond.time_s)}, {longer} longer" + ": " * bool(changes) + " and ".join(changes)
    if distance < 0:
        return f"XLA saves memory, because {format_bytes(-distance)} are missing: the step {takes}."
    enough, too_little = (format_bytes(distance + before.pool_bytes - p.pool_bytes) for p in (before, beyond))
    return f"With {enough} less memory, the step takes as long as now; with {too_little} less, it {takes}."


def cliff_table(cliff: CliffPart) -> Table:
    """Return a table with one row for each pool that was compiled."""
    table = Table(title=cliff_text(cliff), title_justify="left", box=None, pad_edge=False)
    for name in ("pool", "step", "exposed", "recomputed", "peak", "arena", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    for p in cliff.points:
        seconds = (format_seconds(s) for s in (p.time_s, p.exposed_s, p.recomputed_s))
        sizes = (format_bytes(size) for size in (p.peak_bytes, p.arena_bytes))
        table.add_row(format_bytes(p.pool_bytes), *seconds, *sizes, "yes" if p.fits else "no")
    return table


def _point(made: Plan) -> CliffPoint:
    memory, step, planned = made.report.memory, made.report.step, made.planned
    again = rematerialized(planned.simulation, made.compiled.log)
    return CliffPoint(
        pool_bytes=memory.pool_bytes or 0,
        time_s=step.time_s or 0.0,
        exposed_s=step.exposed_s or 0.0,
        peak_bytes=memory.peak_bytes or 0,
        arena_bytes=made.compiled.memory["temp"] - made.compiled.symmetric_bytes,
        fits=bool(memory.fits),
        recomputed_kernels=again.kernels,
        recomputed_s=again.seconds / planned.steps,
    )
