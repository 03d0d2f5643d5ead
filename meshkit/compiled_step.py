"""The training step compiled for the devices that are there. Layer 8.

TrainProgram -> lowered -> XLA, with the options that plan uses -> what trainer runs and a capture records
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax

from meshkit.spec.experiment import Experiment
from meshkit.timeline.derived import derive_options
from meshkit.training.step import TrainProgram
from meshkit.xla.compiling import RefusedOption, compile_for_gpus, compile_lowered, hint_for


def compile_step(program: TrainProgram, experiment: Experiment) -> tuple[Any, float]:
    """The step compiled once, ahead of time, and the seconds that tracing, lowering and compiling took.

    Raises:
        ConfigError: XLA refuses an option of the experiment's.
    """
    began = time.perf_counter()
    cluster = experiment.cluster
    lowered = program.step.lower(program.abstract_state, program.abstract_batch)
    try:
        if cluster.is_cpu:
            (compiled, _), lines = compile_lowered(lowered, experiment.xla, experiment.xla), []
        else:
            users = {**program.xla_options, **experiment.xla}
            derived = derive_options(experiment, program, program.mesh)
            pool_bytes = cluster.gpu.memory_bytes * experiment.train.memory_fraction
            compiled, lines = compile_for_gpus(lowered, cluster.gpu, users, derived, pool_bytes)
    except RefusedOption as e:
        message = f"XLA refuses the option {e.name}: {e.reason}."
        raise experiment.error(f"xla.{e.name}", message, hint_for(e.name, e.reason)) from None
    if jax.process_index() == 0:
        for line in lines:
            print(f"meshkit: {line}", file=sys.stderr)
    return compiled, time.perf_counter() - began
