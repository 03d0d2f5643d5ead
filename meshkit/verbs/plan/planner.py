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

from meshkit.compile.absent import compile_planned
from meshkit.compile.derived import derive_options
from meshkit.compile.options import Option
from meshkit.compile.own_stack import on_own_stack
from meshkit.compile.program import CompiledProgram
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import Placement
from meshkit.errors import ConfigError
from meshkit.hlo.instructions import read_instructions
from meshkit.hlo.module import Schedule
from meshkit.lint.contract import rematerialization_findings
from meshkit.lint.examine import Examined, Lint, examine
from meshkit.predict.assumptions import assumptions_for
from meshkit.predict.kernels import compute_peak_flops, peak_flops
from meshkit.predict.network import checkpoint_time_s
from meshkit.predict.simulate import Simulation, simulate
from meshkit.report.kernel_rows import totals_of
from meshkit.report.pipeline_part import ScheduleCost, useful_flops, with_pipeline
from meshkit.report.program import program_part
from meshkit.report.schema import CompilePart, Report
from meshkit.report.summarize import Work, summarize, training_cost
from meshkit.sharding.devices import describe_devices, use_no_accelerator
from meshkit.sharding.mesh import DescribedMesh, build_mesh
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


@dataclass(frozen=True)
class Budget:
    """What the plan is judged by, beyond the program.

    Attributes:
        memory_fraction: share of the GPU's memory that the client may take.
        parameters_bytes, optimizer_bytes: in a GPU's memory, where known.
        steps: of the whole training, for time and cost.
        gradients_bytes: per GPU, as they are accumulated, where known.
        state_bytes: of a checkpoint, over all GPUs and without replicas.
        precision: of the matmuls, whose peak MFU refers to; None for that of most of the program's FLOP.
        steps_per_call: training steps that one call of the program makes; the report gives means of them.
    """

    memory_fraction: float = 0.92
    parameters_bytes: int | None = None
    optimizer_bytes: int | None = None
    steps: int | None = None
    precision: str | None = None
    state_bytes: int | None = None
    gradients_bytes: int | None = None
    steps_per_call: int = 1


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
    work = Work(model_flops=model_flops, tokens=tokens)
    budget = Budget(memory_fraction=memory_fraction)
    return make_plan(step, args, mesh=mesh, cluster=cluster, work=work, options=options, budget=budget).report


def plan_experiment(experiment: Experiment) -> Plan:
    """The plan of an experiment's own training step, the one that `train` runs."""
    return on_own_stack(functools.partial(_plan_experiment, experiment))


def _plan_experiment(experiment: Experiment) -> Plan:
    from meshkit.step.state import HOST_MEMORY
    from meshkit.step.train_step import make_train_step

    _check_has_gpus(experiment.cluster)
    use_no_accelerator()
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    program = make_train_step(experiment, mesh)
    train = experiment.train
    tokens = program.work["tokens"]
    steps = -(-train.tokens_total // int(tokens)) if train.tokens_total else train.steps
    moments = [x for x in jax.tree.leaves(program.abstract_state.opt_state) if x.sharding.memory_kind != HOST_MEMORY]
    budget = Budget(
        train.memory_fraction,
        local_bytes(program.abstract_state.params),
        local_bytes(moments),
        steps,
        train.precision,
        global_bytes(program.abstract_state),
        program.gradients_bytes,
        program.steps_per_call,
    )
    work = Work(
        model_flops=program.work["model_flops"],
        model_flops_causal=program.work["model_flops_causal"],
        tokens=tokens,
    )
    args = (program.abstract_state, program.abstract_batch)
    examined = examine(experiment, program, mesh)
    return make_plan(
        program.step,
        args,
        mesh=mesh,
        cluster=experiment.cluster,
        work=work,
        options={**program.xla_options, **experiment.xla},
        derived=derive_options(experiment, program, mesh),
        budget=budget,
        examined=examined,
        pipeline=program.pipeline and program.pipeline.report(experiment.pipeline.microbatches),
        pgle=train.pgle,
    )


def make_plan(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: DescribedMesh | jax.sharding.Mesh,
    cluster: Cluster,
    work: Work,
    budget: Budget,
    options: Mapping[str, object] | None = None,
    derived: Sequence[Option] = (),
    examined: Examined | None = None,
    pipeline: ScheduleCost | None = None,
    pgle: str = "off",
) -> Plan:
    """Compiles, simulates and summarizes; see `plan`. What was examined is held against the compiled step.

    `pipeline` is what the schedule of the step's pipeline costs, if it has one; `pgle` is `train.pgle`.
    """
    _check_has_gpus(cluster)
    if not isinstance(args, tuple | list):
        raise ConfigError(f"args must be a tuple of arguments, not {type(args).__name__}.", hint="args=(x,)")
    use_no_accelerator()
    absent = _described(mesh, cluster)
    planned = compile_planned(
        step,
        _on_mesh(args, absent),
        mesh=absent,
        placement=placement_of(absent, cluster),
        cluster=cluster,
        options=options,
        derived=derived,
        pool_bytes=cluster.gpu.memory_bytes * budget.memory_fraction,
        pgle=pgle,
    )
    compiled, module, schedule = planned.compiled, planned.module, planned.schedule
    simulation = simulate(schedule, cluster, assumptions=assumptions_for(compiled.options))
    each = budget.steps_per_call
    executed = useful_flops(schedule, pipeline) if pipeline else sum(simulation.flops.values())
    full_work = Work(
        model_flops=work.model_flops,
        model_flops_causal=work.model_flops_causal,
        hardware_flops_per_gpu=executed / each,
        tokens=work.tokens,
        peak_flops_per_gpu=_peak(simulation, cluster, budget),
        num_gpus=cluster.num_gpus,
    )
    memory = memory_part(
        compiled,
        module,
        schedule,
        cluster,
        memory_fraction=budget.memory_fraction,
        parameters_bytes=budget.parameters_bytes,
        optimizer_bytes=budget.optimizer_bytes,
        gradients_bytes=budget.gradients_bytes,
    )
    lint = examined.lint_compiled(compiled, schedule) if examined else None
    findings = lint.findings if lint else rematerialization_findings(compiled)
    instructions = read_instructions(module)
    report = summarize(
        simulation.timeline,
        source="plan",
        cluster=cluster,
        mesh_axes=mesh_rows(absent),
        processes_seen=0,
        processes_expected=cluster.hosts,
        work=full_work,
        memory=memory,
        program=program_part(compiled, schedule),
        compile=CompilePart(lower_s=compiled.lower_s, compile_s=compiled.compile_s, cached=compiled.cached),
        training=training_cost(
            simulation.timeline.steps[0].window[1] / each,
            budget.steps,
            cluster.num_gpus,
            cluster.price_per_gpu_hour,
            checkpoint_time_s(budget.state_bytes, cluster),
        ),
        step_bounds=(simulation.all_overlapped_s / each, simulation.all_exposed_s / each),
        steps_per_execution=each,
        instructions=instructions,
        warnings=plan_warnings(
            compiled, schedule, simulation, memory, cluster, findings, steps=each, precision=budget.precision
        ),
    )
    if pipeline is not None:
        totals, names = totals_of(simulation.timeline), simulation.timeline.op_names
        report = with_pipeline(report, pipeline, names, totals, instructions, steps_per_execution=each)
    return Plan(report, simulation.timeline, compiled, schedule, examined, lint)


def placement_of(mesh: DescribedMesh, cluster: Cluster) -> Placement:
    """Partition id -> GPU, NVLink domain and host of a described mesh."""
    devices = list(mesh.devices.flat)
    links = ("nvlink", "infiniband") if cluster.num_nvlink_domains > 1 else ("nvlink",)
    return Placement(
        axis_names=tuple(mesh.axis_names),
        shape=tuple(mesh.devices.shape),
        gpus=np.array([d.id for d in devices]),
        domains=np.array([d.domain for d in devices]),
        hosts=np.array([d.process_index for d in devices]),
        fabric={name: cluster.link(name).fabric for name in links},
    )


def mesh_rows(mesh: DescribedMesh) -> list[dict[str, object]]:
    """Each axis with its size and how it divides into NVLink and InfiniBand."""
    rows: list[dict[str, object]] = []
    for i, (name, size) in enumerate(zip(mesh.axis_names, mesh.devices.shape)):
        line = np.moveaxis(mesh.devices, i, -1).reshape(-1, size)[0]
        domains = len({d.domain for d in line})
        rows.append({"axis": name, "size": size, "nvlink": size // domains, "infiniband": domains})
    return rows


def local_bytes(tree: Any) -> int:
    """Bytes of one GPU's shards of a tree of abstract arrays."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if hasattr(leaf, "sharding") and leaf.sharding is not None
    )


def global_bytes(tree: Any) -> int:
    """Bytes of a tree of abstract arrays, each counted once."""
    return sum(int(np.prod(leaf.shape, dtype=np.int64)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


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


def _peak(simulation: Simulation, cluster: Cluster, budget: Budget) -> float | None:
    """The peak that MFU refers to, FLOP/s."""
    if budget.precision is not None or not simulation.flops:
        return compute_peak_flops(cluster.gpu, budget.precision or "bf16")
    return peak_flops(cluster.gpu, max(simulation.flops, key=lambda dtype: simulation.flops[dtype]))
