"""The training step compiled for the devices that are there.

TrainProgram -> lowered -> XLA, with the options that plan uses -> what trainer runs and a capture records
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from meshkit.compile.choices import choices_for, compile_to_fit
from meshkit.compile.options import (
    CompileChoices,
    Option,
    RefusedOption,
    bytes_at_once,
    compile_lowered,
    hint_for,
    left_out_lines,
    memory_of,
)
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment
from meshkit.config.mesh import Placement
from meshkit.console import say
from meshkit.distributed.agreement import Agreement
from meshkit.hlo.module import Schedule, read_schedule
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
class _Executable:
    """One compile of the step for GPUs; see `CompileAttempt`."""

    program: Any
    chosen: Sequence[Option]
    log: tuple[str, ...]
    placement: Placement

    @property
    def peak_bytes(self) -> int:
        memory = memory_of(self.program)
        return bytes_at_once(memory) if memory else 0

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
    try:
        if experiment.cluster.is_cpu:
            compiled, _ = compile_lowered(lowered, experiment.xla, experiment.xla)
            return CompiledStep(compiled, experiment.xla, time.perf_counter() - began)
        placement = experiment.mesh.placement(experiment.cluster)
        choices = choices_for(experiment, program, program.mesh)
        made = compile_for_gpus(lowered, experiment.cluster, placement, choices)
    except RefusedOption as e:
        message = f"XLA refuses the option {e.name}: {e.reason}."
        raise experiment.error(f"xla.{e.name}", message, hint_for(e.name, e.reason)) from None
    if jax.process_index() == 0:
        for line in made.log:
            say(f"meshkit: {line}")
    return CompiledStep(made.program, {o.name: o.value for o in made.chosen}, time.perf_counter() - began)


def compile_for_gpus(lowered: Any, cluster: Cluster, placement: Placement, choices: CompileChoices) -> _Executable:
    """A lowered program compiled with the options and in the order that plan compiles it with.

    Raises:
        RefusedOption: XLA refuses one of the user's.
    """

    def make(chosen: Sequence[Option]) -> _Executable:
        compiled, left_out = compile_lowered(lowered, {o.name: o.value for o in chosen}, choices.options)
        kept = [o for o in chosen if o.name not in left_out]
        return _Executable(compiled, kept, tuple(left_out_lines(left_out, chosen)), placement)

    agree = _as_process_0 if jax.distributed.is_initialized() else lambda topic, mine: mine
    made, _ = compile_to_fit(make, cluster, choices, agree=agree)
    return made


def _as_process_0(topic: str, mine: Any) -> Any:
    """What process 0 of the job says: programs that differ in the order of their collectives would wait for ever."""
    return Agreement("pgle").reach(topic, mine, lambda said: said[0], timeout_s=_AGREE_S)
