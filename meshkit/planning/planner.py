"""Plan: predict what a training step would do on GPUs that are not there.

step -> (export, child process) -> scheduled HLO -> Schedule -> simulated Timeline -> Report.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshkit.compile.child import CARRIED, FORWARD, OTHER
from meshkit.compile.choices import choices_for, readable_options
from meshkit.compile.lowering import on_own_stack, traceable
from meshkit.compile.options import PLAIN, CompileChoices
from meshkit.compile.program import CompiledProgram, compile_absent
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, ProgramExperiment, load
from meshkit.config.places import describe_error, line_within
from meshkit.console import notebook_line
from meshkit.errors import ConfigError, MeshkitError, check_kinds
from meshkit.hlo.instructions import read_instructions
from meshkit.hlo.module import Module, Schedule
from meshkit.linting.examine import Examined, Lint, drift_findings, rematerialization_findings
from meshkit.linting.ways import way_findings
from meshkit.planning.resolved import examine_experiment, examine_program, make_program, make_train_step
from meshkit.planning.warnings import imbalance_warning, plan_warnings, snapshot_warnings
from meshkit.predict.assumptions import assumptions_for
from meshkit.predict.memory import reserved_memory
from meshkit.predict.simulate import simulate
from meshkit.report.causes import Planned, add_plan_findings
from meshkit.report.schema import CompilePart, MemoryPart, OptionPart, ProgramPart, Report
from meshkit.report.summarize import Machines, summarize_simulation
from meshkit.sharding.mesh import (
    DescribedMesh,
    absent_devices,
    build_mesh,
    describe_devices,
    described,
    use_no_accelerator,
)
from meshkit.sharding.resolve import array_of
from meshkit.step.given import Groups, Program, group_arguments
from meshkit.step.program import NO_FACTS, StepFacts, TrainProgram
from meshkit.timeline import Timeline


@dataclass(frozen=True)
class Plan:
    """A report, and the results from which it was made."""

    report: Report
    timeline: Timeline
    """The simulated step."""
    compiled: CompiledProgram
    schedule: Schedule
    facts: StepFacts
    planned: Planned
    examined: Examined | None = None
    """The lint's examination of the step; None if nothing was examined before the compiler."""
    lint: Lint | None = None


def plan(
    step: Callable[..., Any] | Program,
    args: Sequence[Any] = (),
    *,
    mesh: DescribedMesh | jax.sharding.Mesh,
    cluster: Cluster,
    model_flops: float | None = None,
    tokens: float | None = None,
    options: Mapping[str, object] | None = None,
    memory_fraction: float = 0.92,
) -> Report:
    """Return the predicted report of any jitted function or closure on a cluster that is not attached.

    It needs no GPU, and works in a process that has already used jax.

    Args:
        step: a function, plain or under `jax.jit` or `nnx.jit`, or an `mk.Program`, which includes its arguments. If
            the function is not under `jax.jit`, changes in its modules are outputs, in addition to its results.
        args: abstract or concrete arguments, which may be nnx modules and optimizers. NamedShardings on a mesh with
            these axis names are kept. XLA chooses the layout of an array without a NamedSharding, as under `jit`.
        mesh: from `build_mesh(spec, cluster, devices=describe_devices(cluster))`. A mesh of attached devices only
            gives the shape and the axes.
        cluster: the GPUs and links.
        model_flops, tokens: as in `mk.Program`.
        options: XLA compiler options beyond meshkit's own.
        memory_fraction: share of the GPU's memory that the client may take.

    Raises:
        ConfigError: a cluster without GPUs, a mesh of another size, or no compiler installed.
        ProgramError: XLA refuses the program.
    """
    check_kinds(plan, mesh=mesh, cluster=cluster)
    program = step if isinstance(step, Program) else Program(step, args, tokens=tokens, model_flops=model_flops)
    choices = CompileChoices(options=options or {}, memory_fraction=memory_fraction)
    show, start = notebook_line(), time.perf_counter()
    show(f"compiling for cluster '{cluster.name}'")
    report = plan_program(program, mesh=mesh, cluster=cluster, choices=choices).report
    show(f"planned in {time.perf_counter() - start:.0f} s")
    return report


def plan_program(
    program: Program,
    *,
    mesh: DescribedMesh | jax.sharding.Mesh,
    cluster: Cluster,
    choices: CompileChoices = PLAIN,
    examined: Examined | None = None,
    training_steps: int | None = None,
    imbalance: float = 1.0,
) -> Plan:
    """Return the plan of a user's own step.

    The roles of its arguments, its tokens and its model FLOP are inferred if the program does not state them.

    Args:
        program, mesh, cluster, choices, examined, imbalance: as `plan` and `make_plan` take them.
        training_steps: steps of the whole training, for its time and cost.
    """
    groups = group_arguments(program.args, program.names)
    mesh = mesh_of_arguments(groups, DescribedMesh) or mesh
    given = {"tokens": program.tokens, "model_flops": program.model_flops, "training_steps": training_steps}
    facts = groups.facts().model_copy(update={key: value for key, value in given.items() if value is not None})
    return make_plan(
        program.step,
        program.args,
        mesh=mesh,
        cluster=cluster,
        facts=facts,
        choices=choices,
        examined=examined,
        groups=groups,
        imbalance=imbalance,
    )


def mesh_of_arguments[T](groups: Groups, kind: type[T]) -> T | None:
    """Return the mesh of type `kind` that shards a program's arguments, if any; a trainer may have made that mesh."""
    arrays = map(array_of, (*groups.of_state, *groups.batch.values()))
    meshes = (getattr(getattr(array, "sharding", None), "mesh", None) for array in arrays)
    return next((mesh for mesh in meshes if isinstance(mesh, kind)), None)


def plan_experiment(experiment: Experiment | ProgramExperiment, *, imbalance: float = 1.0) -> Plan:
    """Return the plan of an experiment's training step: the step that `train` runs, or that its `[program]` makes.

    Args:
        experiment: an experiment whose cluster has GPUs, which need not be attached.
        imbalance: rows that the busiest GPU of an expert axis receives, divided by an average GPU's.

    Raises:
        ConfigError: the cluster has only CPUs, a model or rules do not fit, no compiler is installed, or the imbalance
            is below 1.
        ProgramError: XLA refuses the step.
    """
    if not 1.0 <= imbalance < math.inf:
        message = f"an imbalance of {imbalance:g} is not possible: the busiest GPU has at least an average GPU's rows."
        raise ConfigError(message, hint="1 for an even load, 1.5")
    return on_own_stack(functools.partial(_plan_experiment, experiment, imbalance))


def _plan_experiment(experiment: Experiment | ProgramExperiment, imbalance: float) -> Plan:
    """Do the work of `plan_experiment`, which calls this on a stack of its own, without the caller's frames."""
    check_has_gpus(experiment.cluster)
    if isinstance(experiment, ProgramExperiment):
        return _plan_users_program(experiment, imbalance)
    program = absent_step(experiment)
    made = make_plan(
        program.step,
        (program.abstract_state, program.abstract_batch),
        mesh=program.mesh,
        cluster=experiment.cluster,
        facts=program.facts,
        choices=choices_for(program, experiment.cluster, experiment.placement, experiment.xla),
        examined=examine_experiment(experiment, program),
        imbalance=imbalance,
    )
    if not experiment.checkpoint.snapshot_every:
        return made
    leaves = jax.tree.leaves(program.abstract_state)  # A snapshot holds all leaves, also those in host memory.
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    told = snapshot_warnings(held, made.compiled, experiment.cluster)
    return replace(made, report=made.report.model_copy(update={"warnings": (*made.report.warnings, *told)}))


def _plan_users_program(experiment: ProgramExperiment, imbalance: float) -> Plan:
    with absent_program(experiment) as (program, mesh):
        facts = group_arguments(program.args, program.names).facts()
        return plan_program(
            program,
            mesh=mesh,
            cluster=experiment.cluster,
            choices=choices_of(experiment),
            examined=examine_program(experiment, program, mesh) if experiment.has_rules else None,
            training_steps=steps_of(experiment, program.tokens or facts.tokens),
            imbalance=imbalance,
        )


def steps_of(experiment: ProgramExperiment, tokens: float | None) -> int | None:
    """Return the steps of the whole training: all tokens divided by a step's, or the stated steps; None if unknown."""
    train = experiment.train
    if train.tokens_total and tokens:
        return math.ceil(train.tokens_total / tokens)
    return train.steps if "steps" in train.model_fields_set else None


def choices_of(experiment: ProgramExperiment) -> CompileChoices:
    """Return the compiler options of a `[program]`: its `[xla]`, `train.memory_fraction` and `train.pgle`.

    meshkit derives no options of its own for a user's step.

    Raises:
        ConfigError: an option of XLA names a file that cannot be read.
    """
    options = readable_options(experiment.xla, experiment.places)
    train = experiment.train
    return CompileChoices(options=options, memory_fraction=train.memory_fraction, pgle=train.pgle)


@contextmanager
def absent_program(experiment: ProgramExperiment) -> Iterator[tuple[Program, DescribedMesh]]:
    """Yield the program that `program.make` builds for absent GPUs, and their mesh.

    Inside the block, jax's devices are the absent GPUs.

    Raises:
        ConfigError: see `make_program`; or the step raised an error while the block traced it.
    """
    use_no_accelerator()
    cluster = experiment.cluster
    mesh = build_mesh(experiment.mesh, cluster, devices=describe_devices(cluster))
    assert isinstance(mesh, DescribedMesh)
    with absent_devices(describe_devices(cluster)):
        program = make_program(experiment, mesh)
        try:
            yield program, mesh
        except MeshkitError:
            raise
        except Exception as error:
            if line_within(error) is None:
                raise
            said = f"the step that {experiment.program.make} made raised {describe_error(error)}"
            raise experiment.error("program.make", f"{said}.") from error


def experiments_with_fewer_hosts(experiment: Experiment) -> Iterator[Experiment]:
    """Yield the experiment on fewer hosts, the most hosts first.

    A number is passed over if no mesh axis can shrink to it, or if it leaves the global batch or a dim indivisible.
    """
    document, most = experiment.document, experiment.cluster.hosts_used
    set_by_user = [override.raw for override in document.overrides] if document is not None else []
    for hosts in range(most - 1, (experiment.launch.min_hosts or most) - 1, -1):
        try:
            smaller = load(experiment.file, [*set_by_user, f"launch.hosts={hosts}"])
            absent_step(smaller)
        except ConfigError:
            continue
        yield smaller


def absent_step(experiment: Experiment) -> TrainProgram:
    """Return the experiment's own training step for the GPUs that its cluster describes.

    Its `mesh` is a described mesh. If jax has not started, tracing and lowering use only the CPU.

    Raises:
        ConfigError: a model or loss cannot be imported or does not take its options, or the rules do not fit the model.
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
    groups: Groups | None = None,
    imbalance: float = 1.0,
) -> Plan:
    """Compile, simulate and summarize a step, and lint the compiled step against its earlier examination.

    Args:
        step, args, mesh, cluster: as `plan` takes them.
        facts: facts of one step (FLOP, tokens, bytes of the state); missing facts are missing in the report.
        choices: compiler options; their `memory_fraction` gives the size of the report's pool.
        examined: the lint's examination before the compiler; without it, findings come from the compiled step alone.
        groups: roles of the arguments; if given, missing facts are read from the traced and the compiled step.
        imbalance: rows that the busiest GPU of an expert axis receives, divided by an average GPU's.

    Raises:
        ConfigError: the cluster has only CPUs, the mesh has another size than the cluster, or no compiler is installed.
        ProgramError: XLA refuses the program.
    """
    check_has_gpus(cluster)
    use_no_accelerator()
    absent = described(mesh, cluster)
    step, args, given = traceable(step, args, mesh, absent)
    compiled = compile_absent(step, args, mesh=absent, cluster=cluster, choices=choices)
    module, schedule = compiled.hlo, compiled.schedule
    if groups is not None:
        facts = _completed(facts, groups, given, compiled)
    assumptions = replace(assumptions_for(compiled.options), imbalance=imbalance)
    simulation = simulate(schedule, cluster, assumptions=assumptions)
    memory = memory_part(compiled, module, schedule, cluster, memory_fraction=choices.memory_fraction, facts=facts)
    drifts = drift_findings(compiled, _paths_of_state(groups, given, compiled)) if groups else []
    also = [*drifts, *way_findings(compiled, cluster, assumptions, facts.steps_per_call)]
    lint = examined.lint_compiled(compiled, also) if examined else None
    findings = lint.findings if lint else [*rematerialization_findings(compiled), *also]
    instructions = read_instructions(module)
    report = summarize_simulation(
        simulation,
        schedule,
        source="plan",
        machines=Machines(compiled.placement, cluster, processes_seen=0, processes_expected=cluster.hosts_used),
        facts=facts,
        instructions=instructions,
        warnings=[
            *plan_warnings(compiled, schedule, simulation, memory, cluster, findings, facts),
            *imbalance_warning(schedule, cluster, assumptions, facts.steps_per_call),
        ],
    )
    parts = {
        "memory": memory,
        "program": _program_part(compiled, schedule),
        "compile": CompilePart(lower_s=compiled.lower_s, compile_s=compiled.compile_s, cached=compiled.cached),
    }
    planned = Planned(simulation, schedule, instructions, cluster, facts.steps_per_call)
    report = add_plan_findings(report.model_copy(update=parts), planned)
    return Plan(report, simulation.timeline, compiled, schedule, facts, planned, examined, lint)


def _completed(facts: StepFacts, groups: Groups, given: Sequence[Any], compiled: CompiledProgram) -> StepFacts:
    """Return the facts with model FLOP from the traced step, and bytes of the arguments from the compiled step.

    Only the compiled step shows how XLA sharded an argument that had no sharding.
    """
    known: dict[str, Any] = {}
    if facts.model_flops is not None:
        known["flops_source"] = "given"
    elif (flops := compiled.traced_flops) is not None and flops.model > 0:
        known = {"model_flops": flops.model, "model_flops_causal": flops.model_causal, "flops_source": "traced"}
    entry = compiled.hlo.entry.order
    held = {i.parameter_number: i.shape for i in entry if i.opcode == "parameter" and not i.shape.on_host}
    for group in ("parameters", "optimizer"):
        wanted = {id(array_of(leaf)) for leaf in getattr(groups, group).values()}
        places = [number for number, leaf in enumerate(given) if id(leaf) in wanted]
        if wanted and len(places) == len(wanted):
            known[f"{group}_bytes"] = sum(held[number].bytes for number in places if number in held)
    return facts.model_copy(update=known)


def _paths_of_state(groups: Groups, given: Sequence[Any], compiled: CompiledProgram) -> dict[int, str]:
    """Return argument number -> path of the sharded arrays that a training step takes and returns.

    A step counts as training if it returns an optimizer's state, or an array in the place of a donated argument.
    """
    state = {id(array_of(leaf)): path for path, leaf in {**groups.parameters, **groups.others}.items()}
    moments = {id(array_of(leaf)): path for path, leaf in groups.optimizer.items()}
    if not any(id(given[n]) in moments or n in compiled.donated for n, _ in compiled.carried):
        return {}
    known = state | moments
    return {
        n: known[id(leaf)]
        for n, leaf in enumerate(given)
        if id(leaf) in known and isinstance(getattr(leaf, "sharding", None), NamedSharding)
    }


def _program_part(compiled: CompiledProgram, schedule: Schedule) -> ProgramPart:
    options = tuple(map(OptionPart.from_sources, compiled.chosen))
    versions = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    return ProgramPart.from_sources(schedule, compiled, options=options, **versions)


def memory_part(
    compiled: CompiledProgram,
    module: Module,
    schedule: Schedule,
    cluster: Cluster,
    *,
    memory_fraction: float,
    facts: StepFacts = NO_FACTS,
) -> MemoryPart:
    """Return whether a program fits into the GPU's memory, and the parts of its peak.

    The parts of a training step add up to the peak; memory that belongs to no other part is temporary.

    Args:
        memory_fraction: share of the GPU's memory that the client may take.
        facts: bytes of parameters, optimizer and gradients.
    """
    capacity = int(cluster.gpu.memory_bytes)
    pool = int(capacity * memory_fraction)
    reserved = reserved_memory(module, schedule, cluster, compiled.memory["temp"])
    outside = reserved.outside_pool + compiled.symmetric_bytes
    # If memory_fraction leaves too little outside the pool, the plan assumes a fraction that leaves enough: most of the
    # memory outside is NCCL's, for which the plan has an upper bound. `outside_warning` reports it.
    margin = min(pool, capacity - outside) - compiled.peak_bytes - reserved.inside_pool
    parameters_bytes, optimizer_bytes = facts.parameters_bytes, facts.optimizer_bytes
    gradients, activations = _split(compiled, facts.gradients_bytes)
    named = sum(part or 0 for part in (gradients, activations))
    temporary = compiled.memory["temp"] - compiled.symmetric_bytes - named
    if parameters_bytes is not None:  # The batch, an argument without a part of its own, is included.
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
    """Return the bytes of gradients and of activations among the temporaries at the peak.

    A live buffer is classified by the operation that made it. Activations are the buffers that the forward pass keeps
    for the backward pass. Loops carry gradients, so their buffers belong to neither pass: their bytes are those of the
    closed form, up to the size of such buffers. Recomputed or gathered arrays and space lost to packing stay temporary.
    """
    temp, live = compiled.memory["temp"], compiled.live
    if live is None:
        return (gradients if (gradients or 0) <= temp else None), None
    sums = live[CARRIED] + live[OTHER]
    known = min(gradients, sums, temp) if gradients is not None else None
    return known, min(live[FORWARD], temp - (known or 0))


def check_has_gpus(cluster: Cluster, verb: str = "plan") -> None:
    """Raise a `ConfigError` that names the command `verb` if the cluster has no GPUs to predict."""
    if cluster.is_cpu:
        raise ConfigError(
            f"cluster '{cluster.name}' has no GPUs, and {verb} only predicts GPUs.",
            hint="--set cluster=dgx_h100 or another shipped cluster, and --set mesh=... to match it",
        )
