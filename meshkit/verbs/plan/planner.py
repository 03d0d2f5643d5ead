"""plan: what a training step would do on GPUs that are not there.

step -> (export, child process) -> scheduled HLO -> Schedule -> simulated Timeline -> Report.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from meshkit.compile.derived import choices_for
from meshkit.compile.lowering import on_own_stack
from meshkit.compile.options import PLAIN, CompileChoices
from meshkit.compile.program import CompiledProgram, compile_absent
from meshkit.config.cluster import Cluster
from meshkit.errors import ConfigError
from meshkit.hlo.instructions import read_instructions
from meshkit.hlo.module import Schedule
from meshkit.lint.contract import rematerialization_findings
from meshkit.lint.examine import Examined, Lint, examine
from meshkit.predict.assumptions import assumptions_for
from meshkit.predict.simulate import simulate
from meshkit.report.program import program_part
from meshkit.report.schema import CompilePart, Report
from meshkit.report.summarize import Machines, summarize_simulation
from meshkit.sharding.mesh import DescribedMesh, build_mesh, describe_devices, use_no_accelerator
from meshkit.step.facts import NO_FACTS, StepFacts
from meshkit.timeline import Timeline
from meshkit.verbs.plan.memory import memory_part
from meshkit.verbs.plan.plan_warnings import plan_warnings

if TYPE_CHECKING:
    from meshkit.config.experiment import Experiment


@dataclass(frozen=True)
class Plan:
    """A plan and what it was made from.

    Attributes:
        report: the contract's report.
        timeline: the simulated step, for pictures.
        compiled: the program, its memory and its compile times.
        schedule: the program as read.
        examined, lint: of an experiment: what was checked, and what was found; None of any other step.
    """

    report: Report
    timeline: Timeline
    compiled: CompiledProgram
    schedule: Schedule
    examined: Examined | None = None
    lint: Lint | None = None


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
        step: jitted or plain.
        args: abstract or concrete arguments. NamedShardings on a mesh with these axis names are kept; of an argument
            without one XLA chooses the layout, as it does under `jit`.
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
    return make_plan(step, args, mesh=mesh, cluster=cluster, facts=facts, choices=choices).report


def plan_experiment(experiment: Experiment) -> Plan:
    """The plan of an experiment's own training step, the one that `train` runs."""
    return on_own_stack(functools.partial(_plan_experiment, experiment))


def _plan_experiment(experiment: Experiment) -> Plan:
    from meshkit.step.train_step import make_train_step

    _check_has_gpus(experiment.cluster)
    use_no_accelerator()
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    program = make_train_step(experiment, mesh)
    args = (program.abstract_state, program.abstract_batch)
    return make_plan(
        program.step,
        args,
        mesh=mesh,
        cluster=experiment.cluster,
        facts=program.facts,
        choices=choices_for(experiment, program, mesh),
        examined=examine(experiment, program, mesh),
    )


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
    """Compiles, simulates and summarizes; see `plan`. What was examined is held against the compiled step."""
    _check_has_gpus(cluster)
    if not isinstance(args, tuple | list):
        raise ConfigError(f"args must be a tuple of arguments, not {type(args).__name__}.", hint="args=(x,)")
    use_no_accelerator()
    absent = _described(mesh, cluster)
    compiled = compile_absent(step, _on_mesh(args, absent), mesh=absent, cluster=cluster, choices=choices)
    module, schedule = compiled.hlo, compiled.schedule
    simulation = simulate(schedule, cluster, assumptions=assumptions_for(compiled.options))
    memory = memory_part(compiled, module, schedule, cluster, memory_fraction=choices.memory_fraction, facts=facts)
    lint = examined.lint_compiled(compiled, schedule) if examined else None
    findings = lint.findings if lint else rematerialization_findings(compiled)
    report = summarize_simulation(
        simulation,
        schedule,
        source="plan",
        machines=Machines(compiled.placement, cluster, processes_seen=0, processes_expected=cluster.hosts),
        facts=facts,
        instructions=read_instructions(module),
        warnings=plan_warnings(compiled, schedule, simulation, memory, cluster, findings,
                               steps=facts.steps_per_call, precision=facts.precision),
    )  # fmt: skip
    parts = {
        "memory": memory,
        "program": program_part(compiled, schedule),
        "compile": CompilePart(lower_s=compiled.lower_s, compile_s=compiled.compile_s, cached=compiled.cached),
    }
    return Plan(report.model_copy(update=parts), simulation.timeline, compiled, schedule, examined, lint)


def _check_has_gpus(cluster: Cluster) -> None:
    if cluster.is_cpu:
        raise ConfigError(
            f"cluster '{cluster.name}' has no GPUs, and plan predicts GPUs.",
            hint="--set cluster=dgx_h100 (or any shipped cluster), with --set mesh... to match it",
        )


def _described(mesh: DescribedMesh | jax.sharding.Mesh, cluster: Cluster) -> DescribedMesh:
    if mesh.devices.size != cluster.num_gpus:
        raise ConfigError(
            f"the mesh has {mesh.devices.size} devices, but cluster '{cluster.name}' has {cluster.num_gpus} GPUs.",
            hint="build_mesh(spec, cluster, devices=describe_devices(cluster))",
        )
    if isinstance(mesh, DescribedMesh):
        return mesh
    devices = np.empty(cluster.num_gpus, dtype=object)
    devices[:] = describe_devices(cluster)
    return DescribedMesh(devices.reshape(mesh.devices.shape), mesh.axis_names)


def _on_mesh(args: Sequence[Any], mesh: DescribedMesh) -> tuple[Any, ...]:
    """Arrays as ShapeDtypeStructs, their NamedShardings moved to this mesh; other leaves as they are."""

    def one(leaf: Any) -> Any:
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            return leaf
        given = getattr(leaf, "sharding", None)
        sharding = None
        if isinstance(given, NamedSharding):
            sharding = NamedSharding(mesh, given.spec, memory_kind=given.memory_kind)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return tuple(jax.tree.map(one, tuple(args)))
