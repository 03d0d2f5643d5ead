"""The training step compiled for the devices that are there.

TrainProgram -> lowered -> XLA, with the options that plan uses -> what trainer runs and a capture records
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshkit.compile.derived import derive_options
from meshkit.compile.latencies import schedule_by_prices, without_path
from meshkit.compile.options import Option, RefusedOption, compile_for_gpus, compile_lowered, hint_for, peak_bytes
from meshkit.config.experiment import Experiment
from meshkit.config.mesh import Placement
from meshkit.config.sections import PREDICTED
from meshkit.distributed.agreement import Agreement
from meshkit.hlo.module import Schedule, read_schedule
from meshkit.predict.assumptions import assumptions_for
from meshkit.step.train_step import TrainProgram

# Processes begin to compile together, and differ by what their hosts are busy with.
_AGREE_S = 1800.0


@dataclass(frozen=True)
class CompiledStep:
    """An executable step."""

    program: Any  # takes state and batch
    options: Mapping[str, object]  # compiler options it was made with
    seconds: float  # that tracing, lowering and compiling took


@dataclass(frozen=True)
class _Made:
    """One compile of the step for GPUs."""

    program: Any
    chosen: tuple[Option, ...]
    lines: tuple[str, ...]
    placement: Placement

    @functools.cached_property
    def schedule(self) -> Schedule:
        return read_schedule(self.program.runtime_executable().hlo_modules()[0], self.placement)


def compile_step(program: TrainProgram, experiment: Experiment) -> CompiledStep:
    """The step compiled ahead of time.

    Raises:
        ConfigError: XLA refuses an option of the experiment's.
        RunError: other processes of the job did not answer.
    """
    began = time.perf_counter()
    lowered = program.step.lower(program.abstract_state, program.abstract_batch)
    users = {**program.xla_options, **experiment.xla}
    try:
        if experiment.cluster.is_cpu:
            compiled, _ = compile_lowered(lowered, experiment.xla, experiment.xla)
            return CompiledStep(compiled, experiment.xla, time.perf_counter() - began)
        made = _compile_for_gpus(lowered, users, experiment, derive_options(experiment, program, program.mesh))
    except RefusedOption as e:
        message = f"XLA refuses the option {e.name}: {e.reason}."
        raise experiment.error(f"xla.{e.name}", message, hint_for(e.name, e.reason)) from None
    if jax.process_index() == 0:
        for line in made.lines:
            print(f"meshkit: {line}", file=sys.stderr)
    options = {o.name: o.value for o in without_path(made.chosen)}
    return CompiledStep(made.program, options, time.perf_counter() - began)


def _compile_for_gpus(lowered: Any, users: dict[str, Any], experiment: Experiment, derived: Sequence[Option]) -> _Made:
    """The step with the options that plan compiles it with, and in the order that `train.pgle` asks for."""
    cluster = experiment.cluster
    pool_bytes = cluster.gpu.memory_bytes * experiment.train.memory_fraction
    placement = experiment.mesh.placement(cluster)

    def make(some: Sequence[Option]) -> _Made:
        compiled, chosen, lines = compile_for_gpus(lowered, cluster.gpu, users, some, pool_bytes)
        return _Made(compiled, tuple(chosen), tuple(lines), placement)

    made = make(derived)
    if experiment.train.pgle != PREDICTED:
        return made
    names = {o.name for o in derived}
    settled = [o for o in made.chosen if o.name in names]
    return schedule_by_prices(
        made,
        lambda option: make([*settled, option]),
        lambda one: one.schedule,
        cluster,
        assumptions=assumptions_for({o.name: o.value for o in made.chosen}),
        fits=lambda one: peak_bytes(one.program) <= pool_bytes,
        agree=_as_process_0 if jax.distributed.is_initialized() else lambda topic, mine: mine,
    )


def _as_process_0(topic: str, mine: Any) -> Any:
    """What process 0 of the job says: programs that differ in the order of their collectives would wait for ever."""
    return Agreement("pgle").reach(topic, mine, lambda said: said[0], timeout_s=_AGREE_S)
