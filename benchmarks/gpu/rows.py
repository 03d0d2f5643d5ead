"""Trainings of one GPU: planned before it is asked for, run and traced there, scored at home.

    plan_all -> blind-GPU.json (committed) ... a card: measure -> NAME/run/trace ... scoring.py

A process may be started before the GPU is free: this module imports all that a training needs, and no device is used.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
from flax import nnx

import meshkit as mk
from benchmarks.gpu.programs import PROGRAMS
from benchmarks.gpu.sampling import Sampler
from benchmarks.gpu.trainings import TRAININGS, Training
from benchmarks.gpu.verbs import DEBUG, LLAMA_1B
from benchmarks.third_party.models import Foreign
from meshkit.compile.attached import compile_step
from meshkit.compile.options import bytes_at_once, memory_of
from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, load
from meshkit.discover.probe import read_nvml
from meshkit.errors import MeshkitError
from meshkit.planning.planner import plan_experiment, plan_program
from meshkit.planning.resolved import make_train_step
from meshkit.report.schema import Report
from meshkit.step.given import Program, group_arguments
from meshkit.trace.capture import Capture, CapturedStep
from meshkit.trace.captured import TRACE_FOLDER
from meshkit.verbs.rehearse.rehearsal import first_batch
from meshkit.weights.files import first_state

_WARM_UP, _TRACED, _AFTER = 3, 3, 6  # steps
_BEFORE, _BEFORE_S = 8, 2.5  # steps before the trace: at least so many, for at least so long
_MEMORY = 0.92  # of the GPU, as `train.memory_fraction`
_CLUSTER = "cluster={{ gpu='{}', hosts=1, gpus_per_host=1 }}"


def plan_all(names: Sequence[str], gpu: str, file: Path) -> None:
    """Plan trainings for one GPU that is not here; each is written into the file as soon as it is planned."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in names:
        began = time.perf_counter()
        try:
            found[name] = _summary(_plan(TRAININGS[name], gpu))
        except MeshkitError as e:
            found[name] = {"problem": e.message}
        file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: {found[name].get('step_s', found[name])} ({time.perf_counter() - began:.0f} s)", flush=True)


def _plan(training: Training, gpu: str) -> Report:
    if training.program is None:
        return plan_experiment(_experiment(training, gpu)).report
    foreign, cluster = PROGRAMS[training.program](False), _cluster(gpu)
    mesh = mk.build_mesh(mk.MeshSpec.parse({"data": 1}), cluster, devices=mk.describe_devices(cluster))
    args = (*_as_arguments(mk.abstract(foreign.make, mesh, foreign.rules)), *foreign.batch)
    return plan_program(Program(_step(foreign, mesh), args), mesh=mesh, cluster=cluster).report


def _summary(report: Report) -> dict[str, Any]:
    """What a plan promises of a step."""
    step, kernels = report.step, report.kernels
    return {
        "step_s": step.time_s,
        "compute_s": step.compute_s,
        "copies_s": step.other_s,
        "idle_s": step.idle_s,
        "peak_bytes": report.memory.peak_bytes,
        "kernels_s": {c.kind: c.time_s for c in kernels.classes} if kernels else {},
        "jaxlib": report.program.jaxlib,
        "fits": report.memory.fits,
    }


def _experiment(training: Training, gpu: str | None) -> Experiment:
    """The experiment of a training; without a GPU at toy size, for one CPU device."""
    if gpu is None:
        sets = (_CLUSTER.format("cpu"), "mesh={ fsdp = 1 }", training.toy, *_TOY.get(training.toy, ()))
        return load(DEBUG, [*sets, "profile.steps=", "train.evaluate_every=0", *_toy(training.train)])
    return load(LLAMA_1B, [f"cluster.gpu={gpu}", *training.model, *training.train])


def _toy(settings: Sequence[str]) -> list[str]:
    return [s for s in settings if not s.startswith("xla.xla_gpu")]


_TOY = {
    TRAININGS["vit_l16"].toy: ("train.sequence_length=17",),
    TRAININGS["gpt2"].toy: ("train.sequence_length=64", "train.precision=fp32"),  # CPUs lack some matmuls of bf16
}


def _cluster(gpu: str) -> Cluster:
    return load(LLAMA_1B, [f"cluster.gpu={gpu}"]).cluster


@dataclass(frozen=True)
class Traced:
    """A step that jax has traced: nothing of it has run, and the GPU holds nothing."""

    gpu: str | None  # the catalog's key
    compile: Callable[[], CapturedStep]
    start: Callable[[Any], tuple[Any, Callable[[Any], tuple[Any, Any]]]]  # compiled -> a state; state -> next, metrics


def measure(folder: Path, toy: bool, name: str) -> Iterator[dict[str, Any]]:
    """A training of some twenty steps: compile, seconds of a step before and after a trace, clock, power and peak."""
    traced = trace(name, toy)
    yield {"gpu": traced.gpu}

    began = time.perf_counter()
    captured = traced.compile()
    memory = memory_of(captured.program)
    yield {"compile_s": time.perf_counter() - began, "program_bytes": bytes_at_once(memory) if memory else None}
    state, advance = traced.start(captured.program)
    losses: list[float] = []

    def steps(count: int, seconds: float = 0.0) -> float:
        """Return the seconds of a step; each is waited for when the next one is under way."""
        nonlocal state
        began, done, last = time.perf_counter(), 0, None
        while done < count or time.perf_counter() - began < seconds:
            state, metrics = advance(state)
            jax.block_until_ready(last)
            last, done = metrics, done + 1
        losses.append(float(jax.tree.leaves(last)[0]))
        return (time.perf_counter() - began) / done

    steps(_WARM_UP)
    with Sampler() as sampler:
        yield {"before_s": steps(_BEFORE, 0.0 if toy else _BEFORE_S)}
    yield sampler.summary()
    capture = Capture(folder / "run" / TRACE_FOLDER, captured, steps=(1, _TRACED))
    for step in range(1, _TRACED + 1):
        capture.before(step, state)
        state, metrics = advance(state)
        capture.after(step, metrics)
    yield {"after_s": steps(_AFTER), "losses": losses}
    stats = jax.devices()[0].memory_stats() or {}
    yield {"peak_bytes": stats.get("peak_bytes_in_use"), "seconds": time.perf_counter() - began}


def trace(name: str, toy: bool) -> Traced:
    """The step of a training on the first GPU here, or at toy size on a CPU device; jax has not started before."""
    training, gpu = TRAININGS[name], None if toy else _gpu_here()
    cluster = _cluster(gpu) if gpu else _experiment(training, None).cluster
    mk.prepare_platform(cluster, memory_fraction=_MEMORY)
    jax.config.update("jax_default_prng_impl", "rbg")  # states of programs are drawn in seconds, not in a minute
    devices = sorted(jax.devices(), key=lambda d: d.id)[:1]
    return _program(training, cluster, devices, toy) if training.program else _own(training, gpu, devices)


def _gpu_here() -> str:
    """The catalog's key of the GPU here; its driver is asked, which starts no CUDA."""
    found: Any = read_nvml()
    return next(key for key in catalog.gpu_keys() if catalog.gpu(key).name == found["gpus"][0]["name"])


def _own(training: Training, gpu: str | None, devices: list[Any]) -> Traced:
    """meshkit's own step of a training."""
    experiment = _experiment(training, gpu)
    mesh: Any = mk.build_mesh(experiment.mesh, experiment.cluster, devices=devices)
    program = make_train_step(experiment, mesh)
    program.step.trace(program.abstract_state, program.abstract_batch)
    batch = first_batch(program, experiment)

    def compiled() -> CapturedStep:
        made = compile_step(program, experiment.cluster, experiment.placement, experiment.xla)
        return CapturedStep(made.program, mesh, experiment.cluster, experiment.mesh, program.facts, made.options)

    def start(step: Any) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
        def advance(state: Any) -> tuple[Any, Any]:
            state, metrics = step(state, batch)
            return state, metrics["loss"]

        return first_state(program, None), advance

    return Traced(gpu, compiled, start)


def _program(training: Training, cluster: Cluster, devices: list[Any], toy: bool) -> Traced:
    """A program of programs.py, compiled as jax does it."""
    assert training.program is not None
    foreign = PROGRAMS[training.program](toy)
    spec = mk.MeshSpec.parse({"data": 1})
    mesh: Any = mk.build_mesh(spec, cluster, devices=devices)
    step = _step(foreign, mesh)
    args = (*_as_arguments(mk.abstract(foreign.make, mesh, foreign.rules)), *foreign.batch)
    lowered, facts = step.lower(*args), group_arguments(args, {}).facts()

    def start(step: Any) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
        batch = jax.device_put(foreign.batch, devices[0])

        def advance(state: Any) -> tuple[Any, Any]:
            found = step(*state, *batch)
            return ((found[0],), found[1]) if foreign.optimizer else (state, found)  # modules change in place

        return _as_arguments(mk.shard_model(foreign.make, mesh, foreign.rules)), advance

    gpu = None if cluster.is_cpu else cluster.gpu.key
    return Traced(gpu, lambda: CapturedStep(lowered.compile(), mesh, cluster, spec, facts), start)


def _step(foreign: Foreign, mesh: Any) -> Any:
    """The step of a program: its own, or a ready one of its loss."""
    if foreign.step is None:
        return mk.sharded_step(cast(Any, foreign.loss), mesh, foreign.rules, optimizer=foreign.optimizer)
    return nnx.jit(mk.keep_shardings(mesh, foreign.rules)(foreign.step))


def _as_arguments(state: Any) -> tuple[Any, ...]:
    return state if isinstance(state, tuple) else (state,)
