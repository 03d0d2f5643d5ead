"""Plan the trainings for a GPU before it runs them, then run and trace them on that GPU.

`plan_all` writes blind-GPU.json, which is committed before the GPU runs anything. `measure` runs on the GPU and leaves
NAME/run/trace; score_rows.py compares both.

A process may start before the GPU is free: importing this module imports everything that a training needs, but uses no
device.
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

_WARM_UP, _TRACED, _AFTER = 3, 3, 6  # Numbers of steps.
_BEFORE, _BEFORE_S = 8, 2.5  # Before the trace: at least so many steps, for at least so many seconds.
_MEMORY = 0.92  # The share of the GPU, as `train.memory_fraction`.
_CLUSTER = "cluster={{ gpu='{}', hosts=1, gpus_per_host=1 }}"


def plan_all(names: Sequence[str], gpu: str, file: Path) -> None:
    """Plan trainings for one absent GPU, and write each plan to the file as soon as it is made."""
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
    """Return the times and the peak that a plan predicts for a step."""
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
    """Return the experiment of a training; if `gpu` is None, at toy size for one CPU device."""
    if gpu is None:
        sets = (_CLUSTER.format("cpu"), "mesh={ fsdp = 1 }", training.toy, *_TOY.get(training.toy, ()))
        return load(DEBUG, [*sets, "profile.steps=", "train.evaluate_every=0", *_toy(training.train)])
    return load(LLAMA_1B, [f"cluster.gpu={gpu}", *training.model, *training.train])


def _toy(settings: Sequence[str]) -> list[str]:
    return [s for s in settings if not s.startswith("xla.xla_gpu")]


_TOY = {
    TRAININGS["vit_l16"].toy: ("train.sequence_length=17",),
    TRAININGS["gpt2"].toy: ("train.sequence_length=64", "train.precision=fp32"),  # CPUs lack some bf16 matmuls.
}


def _cluster(gpu: str) -> Cluster:
    return load(LLAMA_1B, [f"cluster.gpu={gpu}"]).cluster


@dataclass(frozen=True)
class Traced:
    """A step that jax has traced; it has not run, and the GPU holds nothing of it."""

    gpu: str | None
    """The GPU's key in the catalog; None for a CPU."""
    compile: Callable[[], CapturedStep]
    """A function that compiles the step."""
    start: Callable[[Any], tuple[Any, Callable[[Any], tuple[Any, Any]]]]
    """A function from the compiled step to a state, and to a function from a state to the next state and metrics."""


def measure(folder: Path, toy: bool, name: str) -> Iterator[dict[str, Any]]:
    """Yield the results of a training of some twenty steps.

    They are the compile time, the seconds of a step before and after a trace, the clock and power, and the peak of
    memory.
    """
    traced = trace(name, toy)
    yield {"gpu": traced.gpu}

    began = time.perf_counter()
    captured = traced.compile()
    memory = memory_of(captured.program)
    yield {"compile_s": time.perf_counter() - began, "program_bytes": bytes_at_once(memory) if memory else None}
    state, advance = traced.start(captured.program)
    losses: list[float] = []

    def steps(count: int, seconds: float = 0.0) -> float:
        """Run steps and return the mean seconds of one; each step is waited for while the next one runs."""
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
    """Return the step of a training, traced for the first GPU here or, at toy size, for a CPU device.

    jax must not have started before.
    """
    training, gpu = TRAININGS[name], None if toy else _gpu_here()
    cluster = _cluster(gpu) if gpu else _experiment(training, None).cluster
    mk.prepare_platform(cluster, memory_fraction=_MEMORY)
    jax.config.update("jax_default_prng_impl", "rbg")  # With it, random states take seconds instead of a minute.
    devices = sorted(jax.devices(), key=lambda d: d.id)[:1]
    return _program(training, cluster, devices, toy) if training.program else _own(training, gpu, devices)


def _gpu_here() -> str:
    """Return the catalog's key of the GPU here. The driver is asked, which does not start CUDA."""
    found: Any = read_nvml()
    return next(key for key in catalog.gpu_keys() if catalog.gpu(key).name == found["gpus"][0]["name"])


def _own(training: Training, gpu: str | None, devices: list[Any]) -> Traced:
    """Return meshkit's own step of a training."""
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
    """Return the step of a program of programs.py, compiled by jax."""
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
            return ((found[0],), found[1]) if foreign.optimizer else (state, found)  # Modules change in place.

        return _as_arguments(mk.shard_model(foreign.make, mesh, foreign.rules)), advance

    gpu = None if cluster.is_cpu else cluster.gpu.key
    return Traced(gpu, lambda: CapturedStep(lowered.compile(), mesh, cluster, spec, facts), start)


def _step(foreign: Foreign, mesh: Any) -> Any:
    """Return the step of a program: its own, or a ready-made step of its loss."""
    if foreign.step is None:
        return mk.sharded_step(cast(Any, foreign.loss), mesh, foreign.rules, optimizer=foreign.optimizer)
    return nnx.jit(mk.keep_shardings(mesh, foreign.rules)(foreign.step))


def _as_arguments(state: Any) -> tuple[Any, ...]:
    return state if isinstance(state, tuple) else (state,)
