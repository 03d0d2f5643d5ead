"""`meshkit rehearse`: one real GPU runs the program of one process of a job whose other GPUs are absent.

experiment -> a child process (`main` below) runs the step, with NCCL and the topology mocked
  -> capture: kernel times, the allocator's peak
  -> plan's simulation, with measured kernels and modelled collectives -> Timeline -> Report

Only `run` needs the GPU; its capture can be read later on any machine. In the child process, `jax_mock_gpu_topology`
makes jax see many GPUs, of which the real one is the first, and makes NCCL do nothing. The program is then that of
process 0 of the whole job. It runs on random weights of the right shapes.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.children import Child, ChildDied, ChildFailed, serve
from meshkit.compile.attached import compile_attached, compile_step
from meshkit.compile.choices import choices_for
from meshkit.compile.lowering import over_arrays
from meshkit.compile.options import version_of
from meshkit.compile.program import CompiledProgram, compile_absent
from meshkit.compile.traced import traced_flops
from meshkit.config import calibration, catalog
from meshkit.config.calibration import CALIBRATION_FILE, Calibration, MeasuredOn, Rates
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, ExperimentFile, ProgramExperiment, load_any
from meshkit.config.mesh import MeshAxis, MeshSpec
from meshkit.config.xla_options import as_overrides
from meshkit.discover.probe import read_nvml
from meshkit.distributed.environment import MEMORY_FRACTIONS
from meshkit.errors import ConfigError, MeshkitError, RunError, TraceError
from meshkit.hlo.instructions import read_instructions
from meshkit.hlo.module import Schedule
from meshkit.planning.planner import absent_step, choices_of, mesh_of_arguments, plan_experiment, steps_of
from meshkit.planning.resolved import find_tokenizer, functions_by_command, make_program, make_train_step
from meshkit.predict.assumptions import Assumptions, assumptions_for
from meshkit.predict.memory import Reserved, reserved_memory
from meshkit.predict.simulate import simulate, step_pricer
from meshkit.report.measured import captured_program, to_warnings
from meshkit.report.schema import MemoryPart, Report, Warning_
from meshkit.report.summarize import Machines, summarize_simulation
from meshkit.sharding.mesh import DescribedMesh, build_mesh, is_out_of_memory, too_little_memory
from meshkit.sharding.resolve import array_of
from meshkit.step.data import Batches, check_tokens, open_data, vocab_of
from meshkit.step.given import group_arguments
from meshkit.step.program import training_steps
from meshkit.step.train_step import TrainProgram
from meshkit.timeline import Timeline
from meshkit.trace.capture import Capture, CapturedStep
from meshkit.trace.captured import TRACE_FOLDER, Captured, CaptureRecord, notes_of_capture, open_capture, read_captured
from meshkit.trace.measured import MeasuredKernels, kernel_seconds, rates_of, tensor_share
from meshkit.trace.reader import COMMAND_BUFFERS_FLAG
from meshkit.units import format_bytes, format_percent, format_seconds

LOG_FILE = "logs/rehearsal.log"
MODULE = "meshkit.verbs.rehearse.rehearsal"  # The module that the process on the GPU runs.
FLAGS = (
    COMMAND_BUFFERS_FLAG,  # No CUDA graphs: a trace does not name the instructions inside them.
    "--xla_gpu_shard_autotuning=false",  # XLA would wait a day for autotuning results of the absent processes.
    # A ragged all-to-all would request its communicator before it runs, and a mocked NCCL has none.
    "--xla_gpu_experimental_ragged_all_to_all_use_barrier_with_nccl=false",
)
# Kernels that the trace lacks cause a warning if they have at least this share of all kernels' seconds.
NOTABLE = 0.01
# Notes that are left out, because every rehearsal's trace has one process, whose collectives run no kernel.
_EXPECTED = ("process_subset", "collective_counts")


WARM_UP = 2
IDS_FILE = "ids.json"  # The file in the run folder with the counts of `ids_of`.
# Random values repeat after this many, because drawing gigabytes of them would take longer than the rehearsal.
_BLOCK = 1 << 20
_SCALE = 0.02  # Standard deviation of weights, as models initialize them: with zeros, a GPU would draw less power.
_SMALLEST_VOCABULARY = 256


@dataclass(frozen=True)
class Rehearsed:
    """The result of a rehearsal; `calibration` is the path of the written file."""

    report: Report
    timeline: Timeline
    calibration: Path


def check_gpu() -> None:
    """Raise an error if this machine has no GPU to rehearse on.

    Raises:
        ConfigError: no NVIDIA driver finds a GPU.
    """
    if not gpus_here():
        raise ConfigError(
            "a rehearsal runs on one real NVIDIA GPU, and there is none here.",
            hint="`meshkit plan`, which needs no GPU; or --recorded, to read what a rehearsal has captured",
        )


def gpus_here() -> int:
    """Return the number of NVIDIA GPUs that this machine's driver lists; 0 without a driver."""
    found = read_nvml()
    return 0 if isinstance(found, str) else len(found["gpus"])


def run(experiment: Experiment | ProgramExperiment, folder: Path, *, steps: int) -> None:
    """Run one process's part of an experiment on this machine's first GPU, and capture it into a run folder.

    Args:
        folder: the run folder; an earlier capture in it is replaced.
        steps: the number of steps to capture, after two warm-up steps.

    Raises:
        ConfigError: the cluster has no GPUs, or this machine has none.
        RunError: the child process failed, for instance because the GPU has too little memory.
    """
    if experiment.cluster.is_cpu:
        raise ConfigError(
            f"cluster '{experiment.cluster.name}' has no GPUs to rehearse.", hint="--set cluster=dgx_h100"
        )
    check_gpu()
    (folder / "experiment.toml").write_text(experiment.to_toml(), encoding="utf-8")
    log = folder / LOG_FILE
    log.parent.mkdir(parents=True, exist_ok=True)
    beside = str(experiment.path.absolute()) if experiment.path else None
    request = {
        "experiment": str(folder / "experiment.toml"),
        "overrides": [*as_overrides(experiment.xla), *functions_by_command(experiment)],
        "beside": beside,
        "folder": str(folder),
        "steps": steps,
    }
    log.unlink(missing_ok=True)
    with Child(MODULE, gpu_environment(experiment, os.environ), log) as child:
        try:
            child.ask(request)
        except ChildFailed as e:
            said = str(e)
            if isinstance(e, ChildDied):
                lines = [line for line in e.log.splitlines() if line.strip()]
                marked = (line for line in reversed(lines) if "RESOURCE_EXHAUSTED" in line or "Error" in line)
                said = f"{said}: {next(marked, (lines or ['nothing'])[-1])}"
            if is_out_of_memory(said):
                cluster, train = experiment.cluster, experiment.train
                raise too_little_memory(cluster, train, experiment.file, said, at=str(log)) from None
            raise RunError(f"the rehearsal failed: {said[:300]}", at=str(log)) from None


def gpu_environment(experiment: Experiment | ProgramExperiment, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the child process on the GPU, which sees one GPU of the machine.

    Args:
        experiment: its `train.memory_fraction` is the share of the GPU's memory that jax's client may take.
        environment: the environment of this process. CUDA_VISIBLE_DEVICES is cut to its first entry, and FLAGS replace
            flags of the same names in XLA_FLAGS.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    names = [flag.partition("=")[0] for flag in FLAGS]
    flags = [f for f in environment.get("XLA_FLAGS", "").split() if f.partition("=")[0] not in names]
    return {name: value for name, value in environment.items() if name not in MEMORY_FRACTIONS} | {
        "CUDA_VISIBLE_DEVICES": visible,
        "JAX_PLATFORMS": "cuda",
        MEMORY_FRACTIONS[0]: f"{experiment.train.memory_fraction:g}",
        "XLA_FLAGS": " ".join([*flags, *FLAGS]),
    }


def measure(experiment: Experiment | ProgramExperiment, folder: Path) -> Rehearsed:
    """Return the report of a rehearsal's capture, and write the rates of its kernels as a calibration file.

    Raises:
        TraceError: there is no capture, it cannot be read, or its mesh is not the experiment's.
    """
    cluster = experiment.cluster
    captured = open_capture(folder)
    _check_same(experiment, captured)
    trace, record, schedule = read_captured(captured), captured.record, captured.schedule
    if schedule is None:
        raise TraceError(
            "this version of meshkit does not understand the HLO of the captured program.", at=str(captured.folder)
        )
    times = kernel_seconds(trace, schedule)
    if isinstance(experiment, ProgramExperiment):
        known: dict[str, Any] = {"training_steps": steps_of(experiment, record.work.tokens)}
    else:
        known = {"precision": experiment.train.precision, "training_steps": training_steps(experiment.train)}
    price = MeasuredKernels(times, cluster)
    assumptions = replace(assumptions_for(record.options or experiment.xla), contention=False, slowest=False)
    simulation = simulate(schedule, cluster, seconds=price, assumptions=assumptions)
    reserved = reserved_memory(captured.module, schedule, cluster, 0)
    mocked = any(i.collective for i, _ in schedule.walk())
    rates = rates_of(schedule, times, cluster, busy=0.0 if mocked else tensor_share(trace, schedule, cluster.gpu))
    file = calibration.write(folder / CALIBRATION_FILE, _calibration(rates, captured, cluster))
    notes = [n for n in (*notes_of_capture(captured), *trace.notes) if n.code not in _EXPECTED]
    report = summarize_simulation(
        simulation,
        schedule,
        source="rehearse",
        machines=Machines(captured.placement, cluster, processes_expected=cluster.num_gpus),
        facts=record.work.model_copy(update=known),
        instructions=read_instructions(captured.module),
        warnings=[
            *_other_gpu(captured, cluster),
            *_not_measured(experiment, reserved),
            *([_clock(schedule, times, cluster)] if mocked else []),
            *_unnamed(price),
            *_against_plan(experiment, captured, schedule),
            *to_warnings(notes),
        ],
    )
    parts = {"memory": _memory(experiment, captured, reserved), "program": captured_program(record, schedule)}
    return Rehearsed(report.model_copy(update=parts), simulation.timeline, file)


def _check_same(experiment: ExperimentFile, captured: Captured) -> None:
    sizes = dict(zip(captured.record.mesh.axes, captured.record.mesh.shape))
    found, expected = ([(n, s) for n, s in each.items() if s > 1] for each in (sizes, experiment.mesh.sizes))
    if found != expected:
        raise TraceError(
            f"the capture has mesh {sizes}, but the experiment has {experiment.mesh.sizes}.",
            at=str(captured.folder),
            hint="the experiment that was rehearsed, or rehearsing again",
        )


def _calibration(rates: Rates, captured: Captured, cluster: Cluster) -> Calibration:
    record = captured.record
    file = captured.folder / f"capture-p{record.process}.json"
    date = datetime.datetime.fromtimestamp(file.stat().st_mtime, datetime.UTC).isoformat(timespec="seconds")
    gpu = _gpu_of(captured) or cluster.gpu.key
    measured = MeasuredOn(
        gpu=gpu, scale_up=cluster.scale_up, devices=1, date=date, jax=record.jax, jaxlib=record.jaxlib
    )
    return Calibration((), measured, rates)


def _memory(experiment: Experiment | ProgramExperiment, captured: Captured, reserved: Reserved) -> MemoryPart:
    """Return the allocator's measured peak, which includes cuDNN workspaces and fragmentation, and whether it fits."""
    capacity = int(experiment.cluster.gpu.memory_bytes)
    pool = int(capacity * experiment.train.memory_fraction)
    peak = captured.record.memory.peak_bytes
    margin = None if peak is None else min(pool, capacity - reserved.outside_pool) - peak
    return MemoryPart(
        capacity_bytes=capacity,
        pool_bytes=pool,
        peak_bytes=peak,
        program_bytes=captured.record.memory.program_bytes,
        reserved_bytes=reserved.outside_pool,
        context_bytes=reserved.context,
        nccl_bytes=reserved.nccl,
        nccl_communicators=reserved.communicators,
        margin_bytes=margin,
        fits=None if margin is None else margin >= 0,
    )


def _gpu_of(captured: Captured) -> str | None:
    """Return the catalog key of the GPU on which a capture was made, or its vendor's name if the catalog lacks it."""
    kind = captured.record.device_kind
    return next((key for key in catalog.gpu_keys() if catalog.gpu(key).name == kind), kind)


def _other_gpu(captured: Captured, cluster: Cluster) -> list[Warning_]:
    gpu = _gpu_of(captured)
    if gpu is None or captured.record.platform == "cpu" or gpu == cluster.gpu.key:
        return []
    message = (
        f"the kernels ran on a {captured.record.device_kind}, but the cluster has {cluster.gpu.name}: their times and "
        f"the calibration are those of a {gpu}"
    )
    return [Warning_(code="rehearsal_other_gpu", message=message)]


def _not_measured(experiment: ExperimentFile, reserved: Reserved) -> Iterator[Warning_]:
    messages = {
        "rehearsal": "measured: kernels of one GPU and its allocator's peak; from the network model: every collective",
        "rehearsal_contention": "no collective overlapped the kernels, so they are faster than beside NCCL, which "
        "takes multiprocessors and memory bandwidth; no GPU is a straggler",
        "rehearsal_nccl_memory": f"NCCL allocated nothing; the {format_bytes(reserved.nccl)} for its "
        f"{reserved.communicators} communicators come from the memory model",
    }
    sizes = experiment.mesh.sizes
    if any(sizes.get(axis, 1) > 1 for axis in experiment.rules.mapping("parameters").get("experts", ())):
        messages["rehearsal_routing"] = (
            "tokens from other GPUs are missing, so the experts' load comes from mocked buffers, not from a trained "
            "router: their kernels count as balanced"
        )
    return (Warning_(code=code, message=message) for code, message in messages.items())


def _clock(schedule: Schedule, times: Mapping[str, float], cluster: Cluster) -> Warning_:
    """Warn that matmuls and attention take longer in training, where real values draw more power than mocked ones."""
    free = Assumptions(contention=False, slowest=False, full_clock=True)
    pricers = [step_pricer(schedule, cluster, each) for each in (free, replace(free, full_clock=False))]
    measured, planned = 0.0, [0.0, 0.0]
    for i, runs in schedule.walk():
        if i.kind == "kernel" and i.cost and i.cost.multiplies and i.name in times:
            measured += runs * times[i.name]
            planned = [s + runs * p.work(i).alone_s for s, p in zip(planned, pricers)]
    longer = planned[1] / planned[0] - 1 if planned[0] else 0.0
    message = (
        "mocked collectives move nothing, so the values that they return are arbitrary. Losses mean nothing, and "
        "matmuls of gathered weights draw less power than in training, so the clock is higher: matmuls and "
        f"attention took {format_seconds(measured)} a step, planned {format_seconds(planned[0])} at the full clock and "
        f"{format_seconds(planned[1])} under the power cap; in training expect {longer:.0%} more, by "
        f"{format_seconds(measured * longer)} a step"
    )
    return Warning_(code="rehearsal_values", message=message, seconds=measured * longer)


def _unnamed(price: MeasuredKernels) -> list[Warning_]:
    missing, known = sum(price.missing.values()), price.known_s
    if not missing or missing < NOTABLE * (missing + known):
        return []
    names = ", ".join(sorted(price.missing, key=lambda n: -price.missing[n])[:5])
    share = format_percent(missing / (missing + known))
    count = len(price.missing)
    message = f"{count} kernels ({share} of their seconds) are not in the trace; their times are predicted: {names}"
    return [Warning_(code="rehearsal_unnamed", message=message, seconds=missing)]


def _against_plan(
    experiment: Experiment | ProgramExperiment, captured: Captured, schedule: Schedule
) -> Iterator[Warning_]:
    """Compare the rehearsed program with the planned one: yield notes on their collectives and on their peak memory."""
    try:
        planned = planned_program(experiment)
    except MeshkitError as e:
        message = f"the rehearsed program could not be compared with the planned one: {e.message}"
        yield Warning_(code="rehearsal_unchecked", message=message)
        return
    why = _differences(planned, captured.record)
    expected, found = _communicated(planned.schedule), _communicated(schedule)
    if expected == found:
        message = f"the rehearsed program communicates exactly what the planned one does: {sum(found.values())} times"
        yield Warning_(code="rehearsal_collectives", message=message)
    else:
        words = [f"{count} fewer {_words(key)}" for key, count in (expected - found).most_common(3)]
        words += [f"{count} more {_words(key)}" for key, count in (found - expected).most_common(3)]
        message = f"the rehearsed program communicates differently from the planned one ({why}): {'; '.join(words)}"
        yield Warning_(code="rehearsal_collectives_differ", message=message)
    memory, peak = captured.record.memory, captured.record.memory.peak_bytes
    if peak is not None:
        counted = f" (XLA counts {format_bytes(memory.program_bytes)} for the program on the GPU)"
        message = (
            f"the allocator's peak is {format_bytes(peak)}{counted if memory.program_bytes else ''}; the plan's peak "
            f"is {format_bytes(planned.peak_bytes)} ({peak / planned.peak_bytes - 1:+.1%}; {why}): another "
            "compiler, and kernels that autotuning on a GPU selects, change the order of a step and its live buffers"
        )
        yield Warning_(code="rehearsal_memory", message=message)


def _differences(planned: CompiledProgram, record: CaptureRecord) -> str:
    here, theirs, chosen = version_of("jaxlib"), record.jaxlib, record.options or {}
    found = [f"compiled by jaxlib {theirs}, and the plan's by {here}"] if theirs != here else []
    if record.options is not None:
        names = sorted({*planned.options, *chosen})
        other = [name for name in names if planned.options.get(name) != chosen.get(name)]
        found += [f"{name} is {chosen.get(name)}, and the plan's {planned.options.get(name)}" for name in other[:3]]
    return "; ".join(found) or "of one compiler and the same options"


def _communicated(schedule: Schedule) -> Counter:
    """Count a program's collectives by (collective, axes, dtype, bytes); those in loops count once per iteration."""
    found: Counter = Counter()
    for i, times in schedule.walk():
        if (c := i.collective) is not None:
            found[(c.collective, c.axes, c.dtype, c.payload_bytes)] += times
    return found


def _words(key: tuple[str, tuple[str, ...], str, int]) -> str:
    collective, axes, dtype, payload = key
    return f"{collective} {dtype} over {' + '.join(axes) or 'no axis'} of {format_bytes(payload)}"


def planned_program(experiment: Experiment | ProgramExperiment) -> CompiledProgram:
    """Return the experiment's step, compiled for absent GPUs as `meshkit plan` compiles it.

    Raises:
        ConfigError: the experiment does not fit its cluster, or no compiler is installed.
        ProgramError: XLA refuses the step.
    """
    if isinstance(experiment, ProgramExperiment):
        return plan_experiment(experiment).compiled
    program = absent_step(experiment)
    assert isinstance(program.mesh, DescribedMesh)
    args = (program.abstract_state, program.abstract_batch)
    choices = choices_for(program, experiment.cluster, experiment.placement, experiment.xla)
    return compile_absent(program.step, args, mesh=program.mesh, cluster=experiment.cluster, choices=choices)


def main(request: dict[str, Any]) -> None:
    """Compile, run and capture the experiment of a request, in the child process that `run` starts.

    Args:
        request: `experiment` (path of a file with all keys), `overrides` (values of keys that a file may not set),
            `beside` (the user's own file, whose folder has the user's code; or None), `folder` (the run folder) and
            `steps` (the number of steps to capture).
    """
    experiment = load_any(request["experiment"], request["overrides"])
    if request["beside"]:
        experiment = replace(experiment, path=Path(request["beside"]))
    mock(experiment.cluster)
    devices = sorted(jax.devices(), key=lambda d: d.id)
    rehearse(experiment, devices, Path(request["folder"]), request["steps"])


def mock(cluster: Cluster) -> None:
    """Configure jax, before it starts, to see all GPUs of the cluster and to skip their communication.

    jax reads this option from no environment variable. The topology has one process per GPU, as only one GPU is real.
    """
    topology = f"{cluster.num_nvlink_domains}x{cluster.gpus_used_per_domain}x1"  # Domains x processes x GPUs.
    jax.config.update("jax_mock_gpu_topology", topology)


def rehearse(experiment: Experiment | ProgramExperiment, devices: list[Any], folder: Path, steps: int) -> None:
    """Run the experiment's step on the given devices: two warm-up steps, then `steps` captured ones."""
    mesh: Any = build_mesh(experiment.mesh, experiment.cluster, devices=devices)
    ready = _program_ready(experiment, mesh) if isinstance(experiment, ProgramExperiment) else _ready(experiment, mesh)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / IDS_FILE).write_text(json.dumps(ready.ids), encoding="utf-8")
    last = WARM_UP + steps - 1
    capture = Capture(folder / TRACE_FOLDER, ready.step, steps=(WARM_UP, last), processes=(jax.process_index(),))
    args = ready.args
    for step in range(WARM_UP + steps):
        capture.before(step, args)
        outputs = ready.step.program(*args)
        capture.after(step, outputs)
        args = ready.following(args, outputs)
        del outputs


@dataclass(frozen=True)
class _Ready:
    """A compiled step with the arguments of its first call."""

    step: CapturedStep
    args: tuple[Any, ...]
    following: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]
    """(a call's arguments, its results) -> the next call's arguments."""
    ids: dict[str, dict[str, int]]
    """The counts of `ids_of`."""


def _ready(experiment: Experiment, mesh: Any) -> _Ready:
    program = make_train_step(experiment, mesh)
    compiled = compile_step(program, experiment.cluster, experiment.placement, experiment.xla)
    state, batch = filled(program, experiment)
    step = CapturedStep(compiled.program, mesh, experiment.cluster, experiment.mesh, program.facts, compiled.options)
    return _Ready(step, (state, batch), lambda args, outputs: (outputs[0], args[1]), ids_of(batch))


def _program_ready(experiment: ProgramExperiment, mesh: Any) -> _Ready:
    """Return the step of a `[program]`, compiled for the mesh, with random arguments.

    Weights are normal with a standard deviation of 0.02, other floats are the absolute values of such numbers, and
    integers are random ids below 256. In the next call, each donated argument is replaced by the first unused result
    with its shape, dtype and sharding, as XLA pairs them.
    """
    program = make_program(experiment, mesh)
    groups = group_arguments(program.args, program.names)
    function, given = over_arrays(program.step, program.args)
    jitted: Any = function if hasattr(function, "lower") else jax.jit(function)
    traced: list[Any] = []
    lowered: list[Any] = []

    def lower() -> Any:
        traced.append(jitted.trace(*given))
        lowered.append(traced[0].lower())
        return lowered[0]

    cluster = experiment.cluster
    compiled = compile_attached(lower, cluster, experiment.placement, choices_of(experiment), experiment.places)
    tree = compiled.program.in_tree
    infos = tree.flatten_up_to(lowered[0].args_info)
    layouts = tree.flatten_up_to(compiled.program.input_shardings)
    leaves = jax.tree.leaves(given)
    weights = {id(array_of(leaf)) for leaf in groups.parameters.values()}
    aligned = len(leaves) == len(infos)  # If not, some arguments are static, and leaves cannot be matched to infos.
    random = np.random.default_rng(0)

    def fill(number: int) -> jax.Array:
        info, layout = infos[number], layouts[number]
        # An argument without a layout is one that the step does not read.
        layout = NamedSharding(mesh, PartitionSpec()) if layout is None else layout
        abstract = jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=layout)
        return _filled(abstract, random, signed=aligned and id(array_of(leaves[number])) in weights)

    def following(args: tuple[Any, ...], outputs: Any) -> tuple[Any, ...]:
        returned = jax.tree.leaves(outputs)
        found = jax.tree.leaves(args)
        for number, (info, array) in enumerate(zip(infos, found)):
            if not info.donated:
                continue
            same = (i for i, out in enumerate(returned) if out.aval == array.aval and out.sharding == array.sharding)
            place = next(same, None)
            found[number] = fill(number) if place is None else returned.pop(place)
        return jax.tree.unflatten(tree, found)[0]

    arrays = [fill(number) for number in range(len(infos))]
    facts = groups.facts()
    known: dict[str, Any] = {"tokens": program.tokens or facts.tokens, "model_flops": program.model_flops}
    if program.model_flops is None and (flops := traced_flops(traced[0].jaxpr)) is not None:
        known |= {"model_flops": flops.model, "model_flops_causal": flops.model_causal, "flops_source": "traced"}
    its_mesh = mesh_of_arguments(groups, jax.sharding.Mesh) or mesh
    spec = _spec_of(experiment.mesh, its_mesh)
    step = CapturedStep(compiled.program, its_mesh, cluster, spec, facts.model_copy(update=known), compiled.options)
    ids = {str(i): array for i, array in enumerate(arrays) if array.ndim and jnp.issubdtype(array.dtype, np.integer)}
    return _Ready(step, jax.tree.unflatten(tree, arrays)[0], following, ids_of(ids))


def _spec_of(spec: MeshSpec, mesh: Any) -> MeshSpec | None:
    """Return the spec of a program's own mesh, which may add axes of size 1; None if it differs in any other axis."""
    known = {axis.name: axis for axis in spec.axes}
    if {name: size for name, size in mesh.shape.items() if size > 1} != {n: s for n, s in spec.sizes.items() if s > 1}:
        return None
    return MeshSpec(tuple(known.get(name) or MeshAxis(name, 1, 1) for name in mesh.axis_names))


def filled(program: TrainProgram, experiment: Experiment) -> tuple[Any, Any]:
    """Return a state and a batch with a program's shapes and shardings; this process holds its own shards.

    Weights are normal with a standard deviation of 0.02. The batch is that of `first_batch`.
    """
    random = np.random.default_rng(0)
    state = program.abstract_state
    # Weights need both signs: signs affect how many bits flip between numbers, and so the power that a matmul draws.
    weights = jax.tree.map(lambda leaf: _filled(leaf, random, signed=True), state.params)
    # Second moments must not be negative.
    others = jax.tree.map(lambda leaf: _filled(leaf, random, signed=False), replace(state, params=()))
    return replace(others, params=weights), first_batch(program, experiment)


def first_batch(program: TrainProgram, experiment: Experiment) -> Any:
    """Return the first batch of the experiment's data, as `program.step` takes it.

    Real token ids matter: the times of embedding look-ups and of their gradient depend on how often each id occurs.
    If the data cannot be read on this machine, ids are random, and a message goes to stderr.
    """
    model = program.model.abstract_model()
    try:
        data = open_data(program.spec, find_tokenizer(experiment))
        check_tokens(program.spec, data, model)
        first = Batches(data.train, program.abstract_step_batch, experiment.data.seed).iterate(
            0, program.steps_per_call
        )
        return program.stack([*first]) if program.stack else next(first)
    except MeshkitError as e:
        sys.stderr.write(f"the batch is synthetic, with random ids: {e.message}\n")
        random, ids = np.random.default_rng(0), vocab_of(model) or _SMALLEST_VOCABULARY
        return jax.tree.map(lambda leaf: _filled(leaf, random, signed=False, ids=ids), program.abstract_batch)


def ids_of(batch: Any) -> dict[str, dict[str, int]]:
    """Return how many ids each array of integers has here, how many differ, and how often the commonest occurs."""
    found = {}
    for name, array in batch.items():
        if np.issubdtype(array.dtype, np.integer):
            held = {str(shard.index): np.asarray(shard.data).ravel() for shard in array.addressable_shards}
            counts = np.unique(np.concatenate([*held.values()]), return_counts=True)[1]
            found[name] = {"count": int(counts.sum()), "different": len(counts), "most": int(counts.max())}
    return found


def _filled(
    leaf: jax.ShapeDtypeStruct, random: np.random.Generator, *, signed: bool, ids: int = _SMALLEST_VOCABULARY
) -> jax.Array:
    """Return a random array with the leaf's shape and sharding; only this process's shards are made.

    Floats are normal with a standard deviation of 0.02, or absolute values of such numbers if not `signed`. Integers
    are uniform from 0 to `ids` - 1.
    """

    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        implementation: Any = leaf.dtype
        keys = jax.random.split(jax.random.key(0, impl=implementation._impl), leaf.shape)
        return jax.device_put(keys, leaf.sharding)

    def shard(index: tuple[slice, ...] | None) -> np.ndarray:
        assert leaf.sharding is not None
        shape = leaf.sharding.shard_shape(leaf.shape)
        size = int(np.prod(shape, dtype=np.int64))
        if np.issubdtype(leaf.dtype, np.integer):
            block = random.integers(0, ids, min(size, _BLOCK))
        else:
            block = random.standard_normal(min(size, _BLOCK), dtype=np.float32) * _SCALE
            block = block if signed else np.abs(block)
        return np.resize(block, shape).astype(leaf.dtype)

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, shard)


if __name__ == "__main__":
    serve(main)
