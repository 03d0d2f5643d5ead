"""A step compiled for GPUs that are not there: what plan simulates, and a rehearsal is held against.

step -> lowered -> XLA (again with plan's own prices, if asked for) -> CompiledProgram, Schedule
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshkit.compile.derived import derive_options
from meshkit.compile.latencies import schedule_by_prices, without_path
from meshkit.compile.options import Option
from meshkit.compile.program import CompiledProgram, lower_absent
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment
from meshkit.config.mesh import Placement
from meshkit.config.sections import PREDICTED
from meshkit.hlo.module import Schedule, load_module, read_schedule
from meshkit.predict.assumptions import assumptions_for
from meshkit.sharding.mesh import AnyMesh, DescribedMesh
from meshkit.step.program import TrainProgram


@dataclass(frozen=True)
class CompileChoices:
    """How a step is compiled."""

    options: Mapping[str, object] = field(default_factory=dict)  # that the step and the user ask for
    derived: Sequence[Option] = ()  # that follow from weights, rules and links
    memory_fraction: float = 0.92  # share of the GPU's memory that the client may take
    pgle: str = "off"  # `train.pgle`


PLAIN = CompileChoices()


def choices_for(experiment: Experiment, program: TrainProgram, mesh: AnyMesh) -> CompileChoices:
    """How an experiment's own step is compiled."""
    return CompileChoices(
        options={**program.xla_options, **experiment.xla},
        derived=derive_options(experiment, program, mesh),
        memory_fraction=experiment.train.memory_fraction,
        pgle=experiment.train.pgle,
    )


@dataclass(frozen=True)
class PlannedStep:
    """A compiled program and where its partitions lie."""

    compiled: CompiledProgram  # the program, its memory and its compile times
    placement: Placement  # partition id -> GPU, NVLink domain and host

    @functools.cached_property
    def module(self) -> Any:
        """The scheduled HLO."""
        return load_module(self.compiled.module)

    @functools.cached_property
    def schedule(self) -> Schedule:
        """The same as read."""
        return read_schedule(self.module, self.placement)


def compile_planned(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: DescribedMesh,
    cluster: Cluster,
    choices: CompileChoices,
) -> PlannedStep:
    """A step as XLA compiles it for a cluster.

    Args:
        step, args, mesh, cluster: as `lower_absent`.
        choices: how it is compiled.

    Raises:
        ConfigError: the compiler is missing.
        ProgramError: XLA refuses the program.
    """
    lowered = lower_absent(step, args, mesh=mesh, cluster=cluster)
    placement, pool_bytes = mesh.placement(cluster), cluster.gpu.memory_bytes * choices.memory_fraction

    def make(some: Sequence[Option]) -> PlannedStep:
        return PlannedStep(lowered.compile(choices.options, some, pool_bytes=pool_bytes), placement)

    made = make(choices.derived)
    if choices.pgle != PREDICTED:
        return made
    names = {o.name for o in choices.derived}
    settled = [o for o in made.compiled.chosen if o.name in names]
    each: list[PlannedStep] = [made]

    def remake(option: Option) -> PlannedStep:
        each.append(make([*settled, option]))
        return each[-1]

    fastest = schedule_by_prices(
        made,
        remake,
        lambda one: one.schedule,
        cluster,
        assumptions=assumptions_for(made.compiled.options),
        fits=lambda one: one.compiled.peak_bytes <= pool_bytes,
    )
    compiled = dataclasses.replace(
        fastest.compiled,
        chosen=without_path(fastest.compiled.chosen),
        compile_s=sum(one.compiled.compile_s for one in each),
        cached=all(one.compiled.cached for one in each),
    )
    return PlannedStep(compiled, placement)
