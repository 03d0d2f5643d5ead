"""Write the warnings of a plan: assumptions, messages of the compiler, and steps that do not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from meshkit.compile.choices import LIMIT, NO_LIMIT
from meshkit.compile.program import CompiledProgram
from meshkit.config.cluster import Cluster
from meshkit.config.precisions import PRECISIONS
from meshkit.hlo.module import Schedule
from meshkit.linting.placements import Finding
from meshkit.predict import coverage
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.kernels import calibration_note, precision_of
from meshkit.predict.pricing import Pricer
from meshkit.predict.simulate import Simulation
from meshkit.predict.ways import RAGGED
from meshkit.report.schema import MemoryPart, Warning_
from meshkit.runs.snapshots import snapshots_held
from meshkit.step.program import NO_FACTS, StepFacts
from meshkit.units import format_bytes, format_percent, format_rate, format_seconds

HOST_MEMORY_EXCEEDED = "host_memory_exceeded"
# A smaller share of the step, or of its FLOP, is not worth a warning.
_NOTABLE = 0.05
_NOTES = {
    "unknown trip count": "a loop whose number of iterations XLA does not know is counted once",
    "conditional": "a conditional is counted as its longest branch",
    "opaque custom call": "a custom call of unknown FLOP is priced by its memory traffic alone, so it takes longer",
    "packed attention": "attention over packed sequences is priced as one sequence of all tokens, an upper bound",
    "padded attention": "attention with lengths as arguments is priced as if no token were padding, an upper bound",
    "crowded scatter": "a scatter-add is priced as if its indices differed, but additions to the same element take "
    "turns and can take a hundred times as long, above all in 16 bits; try a one-hot matmul, or float32",
    "side stream": "a computation on a stream of its own is counted as if it ran on the main one",
}


def plan_warnings(
    compiled: CompiledProgram,
    schedule: Schedule,
    simulation: Simulation,
    memory: MemoryPart,
    cluster: Cluster,
    findings: Sequence[Finding],
    facts: StepFacts = NO_FACTS,
) -> list[Warning_]:
    """Return all warnings of a plan; those that change the meaning of every number come first.

    Args:
        facts: precision of a training step, and training steps in one call of the program.
    """
    steps, measured = facts.steps_per_call, calibration_note(cluster)
    return [
        *_precision_warning(facts.precision, cluster),
        *_block_scaling_warning(compiled, schedule, cluster),
        *([Warning_(code="calibration", message=measured)] if measured else []),
        *_dead_update_warning(compiled),
        *_given_flops_warning(compiled, facts),
        *_flop_warning(compiled, schedule, simulation, cluster, steps),
        *_rematerialization_warning(compiled, simulation, memory, steps),
        *_warnings(compiled, simulation, memory, steps),
        *outside_warning(compiled.symmetric_bytes, memory),
        *_launch_warning(simulation, steps),
        *_host_warning(compiled, simulation, cluster, steps),
        *map(_finding_warning, findings),
    ]


def _finding_warning(finding: Finding) -> Warning_:
    hint = f"; {finding.hint}" if finding.hint else ""
    message = f"{finding.severity}: {finding.message}{hint}"
    return Warning_(code=finding.code, message=message, seconds=finding.seconds)


def _precision_warning(precision: str | None, cluster: Cluster) -> list[Warning_]:
    """Warn if the GPU does not multiply in the requested precision."""
    if precision is None or cluster.gpu.compute_capability is None:
        return []
    runs_as = precision_of(cluster.gpu, PRECISIONS[precision].operands)
    if precision != "fp8" or runs_as == "fp8":
        return []
    instead = "bf16" if runs_as == "bf16" else "fp32"
    message = (
        f"{cluster.gpu.name} has no fp8 matmuls: they run in {runs_as}, and casting to fp8 costs extra time; "
        f'train.precision = "{instead}" avoids the casts. MFU refers to the peak of {runs_as}'
    )
    return [Warning_(code="precision", message=message)]


def _block_scaling_warning(compiled: CompiledProgram, schedule: Schedule, cluster: Cluster) -> list[Warning_]:
    wanted = (compiled.traced_flops.block_scaled if compiled.traced_flops else 0.0) / cluster.num_gpus
    note = coverage.dequantized_note(schedule, cluster.gpu, wanted)
    return [] if note is None else [Warning_(code="precision", message=note)]


def _dead_update_warning(compiled: CompiledProgram) -> list[Warning_]:
    """Warn if the step drops the parameters that it computes, so that its update is not in the plan."""
    dead = compiled.dead_updates
    if not dead:
        return []
    more = f" and {len(dead) - 3} more" if len(dead) > 3 else ""
    message = (
        f"the step computes new values of {', '.join(dead[:3])}{more} but returns no array of their shape: its update "
        "is dead code, which XLA removes, so this plan does not contain it; try returning the new parameters and "
        "optimizer state, or passing the nnx.jit'ed step itself, with its modules as arguments"
    )
    return [Warning_(code="dead_update", message=message)]


def _given_flops_warning(compiled: CompiledProgram, facts: StepFacts) -> list[Warning_]:
    """Warn if the stated model FLOP are less than those traced with causal attention, or more than with full one."""
    traced, given = compiled.traced_flops, facts.model_flops
    if facts.flops_source != "given" or not given or traced is None or traced.model <= 0:
        return []
    if traced.model_causal * (1 - _NOTABLE) <= given <= traced.model * (1 + _NOTABLE):
        return []
    message = (
        f"the program states {given:.4g} model FLOP a step, {given / traced.model:.2f} times the {traced.model:.4g} of "
        "its traced step without recomputation; MFU uses the stated FLOP"
    )
    return [Warning_(code="given_flops", message=message)]


def _flop_warning(
    compiled: CompiledProgram, schedule: Schedule, simulation: Simulation, cluster: Cluster, steps: int
) -> list[Warning_]:
    """Warn if the compiled program has other FLOP than the traced program, with the time of the extra work."""
    start, end = simulation.timeline.steps[0].window
    note = coverage.flop_note(
        schedule,
        compiled.traced_flops and compiled.traced_flops.executed,
        cluster.num_gpus,
        step_s=end - start,
        peak_flops=max(cluster.gpu.peak_flops.values()),
        recomputed=coverage.rematerialized(simulation, compiled.log).kernels > 0,
    )
    if note is None:
        return []
    seconds = coverage.kernel_seconds_by_name(simulation.timeline) if note.names else {}
    known = note.share * sum(seconds.get(name, 0.0) for name in set(note.names)) / steps
    return [Warning_(code=note.code, message=note.message, seconds=known or None)]


def _rematerialization_warning(
    compiled: CompiledProgram, simulation: Simulation, memory: MemoryPart, steps: int
) -> list[Warning_]:
    """Warn of kernels that XLA recomputes because it expects more memory than the step may take; suggest a remedy."""
    found = coverage.rematerialized(simulation, compiled.log)
    if not found.kernels:
        return []
    seconds = found.seconds / steps
    counted = "" if found.counted_bytes is None else f" (it expects to need {format_bytes(found.counted_bytes)})"
    message = (
        f"XLA recomputes {found.kernels} kernels ({format_seconds(seconds)} a step) to stay within the "
        f"memory{counted}; the compiled step needs {format_bytes(memory.peak_bytes)}"
    )
    tried = any(o.name == LIMIT and o.why != "[xla]" for o in compiled.chosen)
    if memory.fits and not tried:
        way = f"it may fit without recomputation: try the XLA option {LIMIT} = {NO_LIMIT}"
    else:
        way = "try more recomputation in the layers (train.remat), where it costs less, or more micro-batches"
    return [Warning_(code=coverage.REMATERIALIZED, message=f"{message}; {way}", seconds=seconds)]


def outside_warning(symmetric: int, memory: MemoryPart) -> list[Warning_]:
    """Warn if collectives take symmetric memory outside the pool, or if `memory_fraction` leaves too little outside."""
    capacity, context, nccl = memory.capacity_bytes or 0, memory.context_bytes or 0, memory.nccl_bytes or 0
    outside, left = context + nccl + symmetric, capacity - (memory.pool_bytes or 0)
    if not symmetric and outside <= left:
        return []
    message = (
        f"outside the memory pool, CUDA takes {format_bytes(context)}, NCCL at most {format_bytes(nccl)}, and "
        f"collectives in symmetric memory {format_bytes(symmetric)}; train.memory_fraction leaves {format_bytes(left)}"
    )
    if outside > left and memory.fits:
        most = math.floor(1000 * (capacity - outside) / capacity) / 1000
        message += f", which is too little: set train.memory_fraction = {most:g}, as the plan assumes"
    if symmetric:
        message += "; the times of collectives in symmetric memory are derived, not measured"
    return [Warning_(code="outside_pool", message=message)]


def imbalance_warning(schedule: Schedule, cluster: Cluster, assumptions: Assumptions, steps: int) -> list[Warning_]:
    """Return a warning with the effects of an uneven load of the experts, if one is assumed."""
    factor = assumptions.imbalance
    if factor == 1.0:
        return []
    even, uneven = (Pricer(cluster, a) for a in (replace(assumptions, imbalance=1.0), assumptions))
    ragged = [(i, n / steps) for i, n in schedule.walk() if i.collective and i.collective.collective == RAGGED]
    seconds = sum(n * (uneven.collective_s(i) - even.collective_s(i)) for i, n in ragged)
    whole = [i.collective.room for i, _ in ragged if i.collective and i.collective.axes and i.collective.axes_complete]
    message = (
        f"the busiest GPU of an expert axis is assumed to have {factor:g} times the average rows: if nothing overlaps "
        f"ragged all-to-alls, they take {format_seconds(seconds)} longer; the experts' matmuls have static shapes, so "
        "their time does not depend on the load"
    )
    if whole and (room := min(whole)) < factor:
        dropped = 1 - room / factor
        message += (
            f"; its buffer has room for {room:.3g} times the average, so it drops {format_percent(dropped)} of its rows"
        )
    if not ragged:
        message += (
            "; this step has no ragged all-to-alls: with a capacity, exchanges have static shapes, too, and excess "
            "rows are dropped"
        )
    return [Warning_(code="imbalance", message=message, seconds=seconds)]


def _launch_warning(simulation: Simulation, steps: int) -> list[Warning_]:
    """Warn if many kernels are priced below the least time that a kernel takes."""
    found = coverage.short_kernels(simulation)
    start, end = simulation.timeline.steps[0].window
    if found.seconds < _NOTABLE * (end - start):
        return []
    seconds = found.seconds / steps
    message = (
        f"{found.kernels // steps} kernels a step are priced below the least time of any kernel: the step is bound by "
        f"launches, and on a GPU it may take up to {format_seconds(seconds)} longer"
    )
    return [Warning_(code=coverage.LAUNCH_BOUND, message=message, seconds=seconds)]


def snapshot_warnings(state_bytes: int, compiled: CompiledProgram, cluster: Cluster) -> list[Warning_]:
    """Return the warnings about the host memory of snapshots, which comes on top of the step's offloaded arrays.

    Args:
        state_bytes: bytes of the state on one GPU; a snapshot holds replicated arrays only once for each process.
    """
    each = cluster.gpus_used_per_host
    held = snapshots_held(cluster.hosts_used) * state_bytes
    taken, needed = held * each, (held + compiled.host_peak_bytes) * each
    there = cluster.host_memory_bytes
    of = "" if there is None else f" of {format_bytes(there)}"
    others = ", two of another host" if cluster.hosts_used > 1 else ""
    message = (
        f"for checkpoint.snapshot_every, the memory of each host holds two snapshots{others} and one copy on its way "
        f"from the GPUs: up to {format_bytes(taken)}{of}"
    )
    found = [Warning_(code="host_memory", message=message)]
    if there is not None and needed > there:
        with_them = f"with snapshots a host needs {format_bytes(needed)}, but it has {format_bytes(there)}"
        found.append(Warning_(code=HOST_MEMORY_EXCEEDED, message=f"{with_them}; try checkpoint.snapshot_every = 0"))
    return found


def _host_warning(compiled: CompiledProgram, simulation: Simulation, cluster: Cluster, steps: int) -> list[Warning_]:
    if not simulation.host_bytes:
        return []
    link, seconds = cluster.offload_link(), simulation.host_transfer_s / steps
    needed = compiled.host_peak_bytes * cluster.gpus_used_per_host
    there = cluster.host_memory_bytes
    of = "" if there is None else f" of {format_bytes(there)}"
    message = (
        f"{format_bytes(compiled.host_peak_bytes)} per GPU are in host memory, {format_bytes(needed)}{of} a host; "
        f"{format_bytes(simulation.host_bytes / steps)} a step cross {link.fabric}, which takes "
        f"{format_seconds(seconds)} at {format_rate(link.bytes_per_s * link.achieved)}, one direction after the other"
    )
    found = [Warning_(code="host_memory", message=message, seconds=seconds)]
    if there is not None and needed > there:
        too_much = f"offloaded arrays need {format_bytes(needed)} of a host's memory, but it has {format_bytes(there)}"
        found.append(Warning_(code=HOST_MEMORY_EXCEEDED, message=f"{too_much}; try offloading less"))
    return found


def _warnings(compiled: CompiledProgram, simulation: Simulation, memory: MemoryPart, each: int) -> list[Warning_]:
    """Return the warnings about assumed prices of instructions, from the compiler, and for a step that does not fit."""
    seconds = coverage.unpriced_seconds(simulation, steps=each)
    found = [
        Warning_(code=kind.replace(" ", "_"), message=f"{_NOTES.get(kind, kind)}: {', '.join(names[:5])}"
                 + (f" and {len(names) - 5} more" if len(names) > 5 else ""), seconds=seconds.get(kind))
        for kind, names in simulation.notes.items()
    ]  # fmt: skip
    found += [Warning_(code="compiler", message=line) for line in compiled.log]
    if memory.fits is False:
        missing, reserved = format_bytes(-(memory.margin_bytes or 0)), format_bytes(memory.reserved_bytes)
        needed = format_bytes(memory.peak_bytes)
        message = f"the step needs {needed} a GPU, and {reserved} is reserved: together {missing} more than the GPU has"
        found.append(Warning_(code="does_not_fit", message=message))
    return found
