"""plan: what a training step would do on GPUs that are not there.

step -> (export, child process) -> scheduled HLO -> Schedule -> simulated Timeline -> Report.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax

from meshkit.compile.child import CARRIED, FORWARD, OTHER
from meshkit.compile.choices import LIMIT, NO_LIMIT, choices_for
from meshkit.compile.lowering import on_own_stack, traceable
from meshkit.compile.options import PLAIN, CompileChoices
from meshkit.compile.program import CompiledProgram, compile_absent
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment
from meshkit.console import notebook_line
from meshkit.errors import ConfigError
from meshkit.hlo.instructions import read_instructions
from meshkit.hlo.module import Module, Schedule
from meshkit.linting.examine import Examined, Lint, examine, rematerialization_findings
from meshkit.linting.placements import Finding
from meshkit.predict import coverage
from meshkit.predict.assumptions import assumptions_for
from meshkit.predict.kernels import COMPUTE_DTYPE, calibration_note, precision_of
from meshkit.predict.memory import reserved_memory
from meshkit.predict.simulate import Simulation, simulate
from meshkit.report.causes import Planned, judged_plan
from meshkit.report.schema import CompilePart, MemoryPart, OptionPart, ProgramPart, Report, Warning_
from meshkit.report.summarize import Machines, summarize_simulation
from meshkit.sharding.mesh import DescribedMesh, build_mesh, describe_devices, described, use_no_accelerator
from meshkit.step.program import NO_FACTS, StepFacts, TrainProgram
from meshkit.step.train_step import make_train_step
from meshkit.timeline import Timeline
from meshkit.units import format_bytes, format_rate, format_seconds

HOST_MEMORY_EXCEEDED = "host_memory_exceeded"  # the code of a warning: offloaded arrays do not fit into host memory


@dataclass(frozen=True)
class Plan:
    """A plan and what it was made from."""

    report: Report
    timeline: Timeline  # the simulated step, for pictures
    compiled: CompiledProgram  # its memory and its compile times
    schedule: Schedule  # the program as read
    facts: StepFacts
    examined: Examined | None = None  # what was checked, of an experiment's own step
    lint: Lint | None = None  # what that found


def plan(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: DescribedMesh | jax.sharding.Mesh,
    cluster: Cluster,
    model_flops: float | None = None,
    tokens: float | None = None,
    options: Mapping[str, object] | None = None,
    memory_fraction: float = 0.92,
) -> Report:
    """The predicted report of any jitted function or closure on a cluster that is not there.

    Needs no GPU, and works in a process that has already used jax.

    Args:
        step: under `jax.jit` or `nnx.jit`, or plain. What one that is not under `jax.jit` changes in its modules is an
            output, as what it returns is.
        args: abstract or concrete arguments, nnx modules and optimizers among them. NamedShardings on a mesh with these
            axis names are kept; of an array without one XLA chooses the layout, as it does under `jit`.
        mesh: from `build_mesh(spec, cluster, devices=describe_devices(cluster))`; of a mesh of attached devices only
            the shape counts.
        cluster: the GPUs and links.
        model_flops: FLOP of the model per call over all GPUs, for MFU.
        tokens: tokens per call over all GPUs.
        options: XLA compiler options beyond meshkit's own.
        memory_fraction: share of the GPU's memory that the client may take.

    Raises:
        ConfigError: a cluster without GPUs, a mesh of another size, or no compiler installed.
        ProgramError: XLA refuses the program.
    """
    facts = StepFacts(model_flops=model_flops, tokens=tokens)
    choices = CompileChoices(options=options or {}, memory_fraction=memory_fraction)
    show, start = notebook_line(), time.perf_counter()
    show(f"compiling for cluster '{cluster.name}'")
    report = make_plan(step, args, mesh=mesh, cluster=cluster, facts=facts, choices=choices).report
    show(f"planned in {time.perf_counter() - start:.0f} s")
    return report


def plan_experiment(experiment: Experiment) -> Plan:
    """The plan of an experiment's own training step, the one that `train` runs.

    Args:
        experiment: its cluster has GPUs; none of them need be here.

    Raises:
        ConfigError: a cluster of CPUs, a model or rules that do not fit, or no compiler installed.
        ProgramError: XLA refuses the step.
    """
    return on_own_stack(functools.partial(_plan_experiment, experiment))


def _plan_experiment(experiment: Experiment) -> Plan:
    """The work of `plan_experiment`, without a frame of its caller below it."""
    check_has_gpus(experiment.cluster)
    program = absent_step(experiment)
    return make_plan(
        program.step,
        (program.abstract_state, program.abstract_batch),
        mesh=program.mesh,
        cluster=experiment.cluster,
        facts=program.facts,
        choices=choices_for(experiment, program, program.mesh),
        examined=examine(experiment, program, program.mesh),
    )


def absent_step(experiment: Experiment) -> TrainProgram:
    """The experiment's own training step, for the GPUs that its cluster describes.

    Returns:
        Its `mesh` is a described one; if jax has not started, tracing and lowering take the CPU alone.

    Raises:
        ConfigError: a model or loss that cannot be imported, options it does not take, or rules that do not fit it.
    """
    use_no_accelerator()
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    return make_train_step(experiment, mesh)


def make_plan(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: DescribedMesh | jax.sharding.Mesh,
    cluster: Cluster,
    facts: StepFacts = NO_FACTS,
    choices: CompileChoices = PLAIN,
    examined: Examined | None = None,
) -> Plan:
    """Compiles, simulates and summarizes; see `plan`. What was examined is held against the compiled step.

    Args:
        step, args, mesh, cluster: as `plan` takes them.
        facts: of one step; what they leave out (FLOP, tokens, bytes of the state) the report does, too.
        choices: of the compiler; its `memory_fraction` is that of the report's pool.
        examined: the step as the lint saw it before the compiler; without it findings are of the compiled one alone.

    Raises:
        ConfigError: a cluster of CPUs, a mesh of another size than the cluster, or no compiler installed.
        ProgramError: XLA refuses the program.
    """
    check_has_gpus(cluster)
    use_no_accelerator()
    absent = described(mesh, cluster)
    step, args = traceable(step, args, mesh, absent)
    compiled = compile_absent(step, args, mesh=absent, cluster=cluster, choices=choices)
    module, schedule = compiled.hlo, compiled.schedule
    simulation = simulate(schedule, cluster, assumptions=assumptions_for(compiled.options))
    memory = memory_part(compiled, module, schedule, cluster, memory_fraction=choices.memory_fraction, facts=facts)
    lint = examined.lint_compiled(compiled) if examined else None
    findings = lint.findings if lint else rematerialization_findings(compiled)
    instructions = read_instructions(module)
    report = summarize_simulation(
        simulation,
        schedule,
        source="plan",
        machines=Machines(compiled.placement, cluster, processes_seen=0, processes_expected=cluster.hosts),
        facts=facts,
        instructions=instructions,
        warnings=plan_warnings(compiled, schedule, simulation, memory, cluster, findings, facts),
    )
    parts = {
        "memory": memory,
        "program": _program_part(compiled, schedule),
        "compile": CompilePart(lower_s=compiled.lower_s, compile_s=compiled.compile_s, cached=compiled.cached),
    }
    planned = Planned(simulation, schedule, instructions, cluster, facts.steps_per_call)
    report = judged_plan(report.model_copy(update=parts), planned)
    return Plan(report, simulation.timeline, compiled, schedule, facts, examined, lint)


def _program_part(compiled: CompiledProgram, schedule: Schedule) -> ProgramPart:
    """What is known of a program that was compiled for GPUs that are not there."""
    options = tuple(map(OptionPart.of, compiled.chosen))
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    return ProgramPart.of(schedule, compiled, options=options, **versions)


def memory_part(
    compiled: CompiledProgram,
    module: Module,
    schedule: Schedule,
    cluster: Cluster,
    *,
    memory_fraction: float,
    facts: StepFacts = NO_FACTS,
) -> MemoryPart:
    """Whether a program fits, and what its peak is made of.

    The parts of a training step add up to the peak: what is none of the others is temporary.

    Args:
        compiled, module, schedule: the program.
        cluster: the GPU, and what connects it.
        memory_fraction: share of the GPU's memory that the client may take.
        facts: the bytes of parameters, optimizer and gradients.
    """
    capacity = int(cluster.gpu.memory_bytes)
    pool = int(capacity * memory_fraction)
    reserved = reserved_memory(module, schedule, cluster, compiled.memory["temp"])
    outside = reserved.outside_pool + compiled.symmetric_bytes
    # Where memory_fraction leaves too little outside, the plan counts with one that leaves enough: most of what lies
    # there is NCCL's, whose count is an upper bound. `outside_warning` says so.
    margin = min(pool, capacity - outside) - compiled.peak_bytes - reserved.inside_pool
    parameters_bytes, optimizer_bytes = facts.parameters_bytes, facts.optimizer_bytes
    gradients, activations = _split(compiled, facts.gradients_bytes)
    named = sum(part or 0 for part in (gradients, activations))
    temporary = compiled.memory["temp"] - compiled.symmetric_bytes - named
    if parameters_bytes is not None:  # what else is an argument (the batch) is nobody's
        temporary = compiled.peak_bytes - named - parameters_bytes - (optimizer_bytes or 0)
    return MemoryPart(
        capacity_bytes=capacity,
        pool_bytes=pool,
        peak_bytes=compiled.peak_bytes,
        reserved_bytes=reserved.inside_pool + outside,
        context_bytes=reserved.context,
        nccl_bytes=reserved.nccl,
        nccl_communicators=reserved.communicators,
        cudnn_workspace_bytes=reserved.cudnn_workspace,
        fragmentation_bytes=reserved.fragmentation,
        margin_bytes=margin,
        fits=margin >= 0,
        parameters_bytes=parameters_bytes,
        optimizer_bytes=optimizer_bytes,
        gradients_bytes=gradients,
        activations_bytes=activations,
        temporary_bytes=max(0, temporary),
    )


def _split(compiled: CompiledProgram, gradients: int | None) -> tuple[int | None, int | None]:
    """Gradients and activations among the temporaries at the peak.

    What is alive at the peak says what made it. Activations are what the forward pass made: what it keeps for the
    backward pass. Gradients are told apart where their closed form fits into what neither pass made by itself (loops
    carry them); what was recomputed or gathered, and what packing loses, stays temporary.
    """
    temp, live = compiled.memory["temp"], compiled.live
    if live is None:
        return (gradients if (gradients or 0) <= temp else None), None
    sums = live[CARRIED] + live[OTHER]
    known = min(gradients, sums, temp) if gradients is not None else None
    return known, min(live[FORWARD], temp - (known or 0))


def check_has_gpus(cluster: Cluster, verb: str = "plan") -> None:
    """Stops where there is nothing to predict.

    Args:
        cluster: any, loaded.
        verb: the command that the message names.

    Raises:
        ConfigError: a cluster of CPUs.
    """
    if cluster.is_cpu:
        raise ConfigError(
            f"cluster '{cluster.name}' has no GPUs, and {verb} predicts GPUs.",
            hint="--set cluster=dgx_h100 (or any shipped cluster), with --set mesh... to match it",
        )


def plan_warnings(
    compiled: CompiledProgram,
    schedule: Schedule,
    simulation: Simulation,
    memory: MemoryPart,
    cluster: Cluster,
    findings: Sequence[Finding],
    facts: StepFacts = NO_FACTS,
) -> list[Warning_]:
    """Everything there is to warn of, what changes the meaning of all numbers first.

    Args:
        compiled, schedule, simulation: of the step.
        memory: of its report.
        cluster: it is planned for.
        findings: of the lint.
        facts: the precision of a training step, and how many one call of the program makes.
    """
    steps, measured = facts.steps_per_call, calibration_note(cluster)
    return [
        *_precision_warning(facts.precision, cluster),
        *([Warning_(code="calibration", message=measured)] if measured else []),
        *_dead_update_warning(compiled),
        *_flop_warning(compiled, schedule, simulation, cluster, steps),
        *_rematerialization_warning(compiled, simulation, memory, steps),
        *_warnings(compiled, simulation, memory, steps),
        *outside_warning(compiled.symmetric_bytes, memory),
        *_launch_warning(simulation, steps),
        *_host_warning(compiled, simulation, cluster, steps),
        *map(_finding_warning, findings),
    ]


# Of the step: below, the least that kernels take changes no number that anybody acts on.
_NOTABLE = 0.05
_NOTES = {
    "unknown trip count": "a loop whose number of iterations XLA does not know is counted once",
    "conditional": "a conditional is counted as its longest branch",
    "opaque custom call": "a custom call whose FLOP are unknown takes longer than its memory traffic, its price",
    "side stream": "a computation on a stream of its own is counted as if it ran on the main one",
}


def _finding_warning(finding: Finding) -> Warning_:
    """A finding of the lint as a warning of the report."""
    hint = f"; {finding.hint}" if finding.hint else ""
    return Warning_(code=finding.code, message=f"{finding.severity}: {finding.message}{hint}")


def _precision_warning(precision: str | None, cluster: Cluster) -> list[Warning_]:
    """That the GPU does not multiply in the precision that was asked for."""
    if precision is None or cluster.gpu.compute_capability is None:
        return []
    runs_as = precision_of(cluster.gpu, COMPUTE_DTYPE[precision])
    if precision != "fp8" or runs_as == "fp8":
        return []
    instead = "bf16" if runs_as == "bf16" else "fp32"
    message = (
        f"{cluster.gpu.name} has no fp8 matmuls: they run in {runs_as}, and the casts to fp8 come on top; "
        f'train.precision = "{instead}" saves them, and MFU refers to the peak of {runs_as}'
    )
    return [Warning_(code="precision", message=message)]


def _dead_update_warning(compiled: CompiledProgram) -> list[Warning_]:
    """That the step drops the parameters that it computes, so that half of it is not planned."""
    dead = compiled.dead_updates
    if not dead:
        return []
    more = f" and {len(dead) - 3} more" if len(dead) > 3 else ""
    message = (
        f"the step makes {', '.join(dead[:3])}{more} anew and returns no array of a parameter's shape: its update is "
        "dead code, which XLA leaves out, and so does this plan; try returning the new parameters and optimizer state, "
        "or giving the nnx.jit'ed step itself, with its modules as arguments"
    )
    return [Warning_(code="dead_update", message=message)]


def _flop_warning(
    compiled: CompiledProgram, schedule: Schedule, simulation: Simulation, cluster: Cluster, steps: int
) -> list[Warning_]:
    """That the compiled program does other work than the traced one, where it does, and what more of it takes."""
    start, end = simulation.timeline.steps[0].window
    note = coverage.flop_note(
        schedule,
        compiled.traced_flops,
        cluster.num_gpus,
        step_s=end - start,
        peak_flops=max(cluster.gpu.peak_flops.values()),
        recomputed=coverage.rematerialized(simulation, compiled.log).kernels > 0,
    )
    if note is None:
        return []
    seconds = coverage.kernel_seconds_by_name(simulation) if note.names else {}
    known = note.share * sum(seconds.get(name, 0.0) for name in set(note.names)) / steps
    return [Warning_(code=note.code, message=note.message, seconds=known or None)]


def _rematerialization_warning(
    compiled: CompiledProgram, simulation: Simulation, memory: MemoryPart, steps: int
) -> list[Warning_]:
    """What XLA computes twice because it counts more memory than the step may take, and what to try."""
    found = coverage.rematerialized(simulation, compiled.log)
    if not found.kernels:
        return []
    seconds = found.seconds / steps
    counted = "" if found.counted_bytes is None else f" (it counts {format_bytes(found.counted_bytes)})"
    message = (
        f"XLA recomputes {found.kernels} kernels, {format_seconds(seconds)} a step, to keep within the "
        f"memory{counted}; the compiled step needs {format_bytes(memory.peak_bytes)}"
    )
    tried = any(o.name == LIMIT and o.why != "[xla]" for o in compiled.chosen)
    if memory.fits and not tried:
        way = f"it may fit without: try the XLA option {LIMIT} = {NO_LIMIT}"
    else:
        way = "try more recomputation in the layers (train.remat), where it costs less, or more micro-batches"
    return [Warning_(code=coverage.REMATERIALIZED, message=f"{message}; {way}", seconds=seconds)]


def outside_warning(symmetric: int, memory: MemoryPart) -> list[Warning_]:
    """What lies outside of the pool, where collectives keep memory there or `memory_fraction` leaves too little."""
    capacity, context, nccl = memory.capacity_bytes or 0, memory.context_bytes or 0, memory.nccl_bytes or 0
    outside, left = context + nccl + symmetric, capacity - (memory.pool_bytes or 0)
    if not symmetric and outside <= left:
        return []
    message = (
        f"outside of the pool lie {format_bytes(context)} of CUDA's, {format_bytes(nccl)} of NCCL's at most and "
        f"{format_bytes(symmetric)} of collectives in symmetric memory, whose prices are derived; "
        f"train.memory_fraction leaves {format_bytes(left)}"
    )
    if outside > left and memory.fits:
        most = math.floor(1000 * (capacity - outside) / capacity) / 1000
        message += f": the plan counts with train.memory_fraction = {most:g}, which a run needs, too"
    return [Warning_(code="outside_pool", message=message)]


def _launch_warning(simulation: Simulation, steps: int) -> list[Warning_]:
    """That the step is mostly kernels too small for their price to hold."""
    found = coverage.short_kernels(simulation)
    start, end = simulation.timeline.steps[0].window
    if found.seconds < _NOTABLE * (end - start):
        return []
    seconds = found.seconds / steps
    message = (
        f"{found.kernels // steps} kernels a step are priced below what any kernel takes: the step is bound by "
        f"launches, and on a GPU up to {format_seconds(seconds)} longer"
    )
    return [Warning_(code="launch_bound", message=message, seconds=seconds)]


def _host_warning(compiled: CompiledProgram, simulation: Simulation, cluster: Cluster, steps: int) -> list[Warning_]:
    """What lies in host memory (offloaded activations, optimizer state), and what fetching it costs a step."""
    if not simulation.host_bytes:
        return []
    link, seconds = cluster.offload_link(), simulation.host_transfer_s / steps
    needed = compiled.host_peak_bytes * cluster.num_gpus / cluster.hosts
    there = cluster.host_memory_bytes
    of = "" if there is None else f" of {format_bytes(there)}"
    message = (
        f"{format_bytes(compiled.host_peak_bytes)} per GPU lie in host memory, {format_bytes(needed)}{of} a host; "
        f"{format_bytes(simulation.host_bytes / steps)} a step cross {link.fabric}, "
        f"{format_seconds(seconds)} at {format_rate(link.bytes_per_s * link.achieved)}, one direction after the other"
    )
    found = [Warning_(code="host_memory", message=message, seconds=seconds)]
    if there is not None and needed > there:
        too_much = f"what is offloaded needs {format_bytes(needed)} of a host, which has {format_bytes(there)}"
        found.append(Warning_(code=HOST_MEMORY_EXCEEDED, message=f"{too_much}: offload less, or fewer GPUs a host"))
    return found


def _warnings(compiled: CompiledProgram, simulation: Simulation, memory: MemoryPart, each: int) -> list[Warning_]:
    """What was assumed of single instructions, what the compiler said, and by how much the step is too large."""
    seconds = coverage.unpriced_seconds(simulation, steps=each)
    found = [
        Warning_(code=kind.replace(" ", "_"), message=f"{_NOTES.get(kind, kind)}: {', '.join(names[:5])}"
                 + (f" and {len(names) - 5} more" if len(names) > 5 else ""), seconds=seconds.get(kind))
        for kind, names in simulation.notes.items()
    ]  # fmt: skip
    found += [Warning_(code="compiler", message=line) for line in compiled.log]
    if memory.fits is False:
        missing, reserved = format_bytes(-(memory.margin_bytes or 0)), format_bytes(memory.reserved_bytes)
        found.append(
            Warning_(
                code="does_not_fit",
                message=f"the step needs {format_bytes(memory.peak_bytes)} a GPU, and {reserved} is taken beside it: "
                f"{missing} more than there is",
            )
        )
    return found
