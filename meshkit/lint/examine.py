"""One lint of an experiment: placements before the compiler, collectives after it.

`explain`, `plan` and `train` all call `examine`, and `plan` and `explain` hold the compiled program against it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import jax
from rich.console import Console

from meshkit.compile.lowering import lowering_for
from meshkit.compile.program import CompiledProgram
from meshkit.config.experiment import Experiment
from meshkit.errors import ConfigError
from meshkit.lint.contract import (
    CODES,
    Explained,
    collective_findings,
    explain_collectives,
    rematerialization_findings,
)
from meshkit.lint.findings import Finding, apply_allow_list, finding_lines
from meshkit.lint.placements import Subject, in_sums, lint
from meshkit.sharding.constrain import record_activations
from meshkit.sharding.mesh import AnyMesh, DescribedMesh
from meshkit.sharding.resolve import STATES, placements, placements_by_state
from meshkit.sharding.strategy import BYTES_OF, StageRuns, Strategy, make_weights
from meshkit.step.program import local_bytes
from meshkit.step.train_step import TrainProgram


@dataclass(frozen=True)
class Lint:
    """What was found."""

    findings: list[Finding]  # that nobody allowed, errors first
    allowed: list[Finding]  # that the experiment's allow list silences, each with its reason
    collectives: list[Explained] | None = None
    """Collectives of the compiled step with their reasons; None where nothing was compiled."""


@dataclass(frozen=True)
class Examined:
    """An experiment's step as the lint sees it before the compiler."""

    experiment: Experiment
    subject: Subject  # placements and rules
    strategy: Strategy  # what the compiled step may communicate

    def lint(self) -> Lint:
        """Findings of rules, parameters and activations."""
        kept, allowed = apply_allow_list(lint(self.subject), self.experiment.lint.allow, unchecked=CODES)
        return Lint(in_sums(kept, self.subject), allowed)

    def lint_compiled(self, compiled: CompiledProgram) -> Lint:
        """Findings of the same, and of the compiled step's collectives."""
        rows = explain_collectives(compiled.schedule, self.strategy)
        found = [*lint(self.subject), *collective_findings(rows), *rematerialization_findings(compiled)]
        kept, allowed = apply_allow_list(found, self.experiment.lint.allow)
        return Lint(in_sums(kept, self.subject), allowed, rows)


def examine(experiment: Experiment, program: TrainProgram, mesh: AnyMesh) -> Examined:
    """Traces the step once for its activations, and resolves the rules for every state of the parameters."""
    model = program.model
    target = lowering_for(experiment.cluster) if isinstance(mesh, DescribedMesh) else nullcontext()
    with target, record_activations() as record:
        jax.eval_shape(program.step, program.abstract_state, program.abstract_batch)
    activations = list(dict.fromkeys(record))
    placed = placements_by_state(model.params, mesh, experiment.rules)
    others = placements(model.variables, mesh, experiment.rules)
    deferred = frozenset(program.deferred)
    document, cluster = experiment.document, experiment.cluster
    subject = Subject(
        parameters=placed["parameters"],
        activations=activations,
        rules=experiment.rules,
        spec=experiment.mesh,
        others=others,
        deferred=deferred,
        state_bytes=local_bytes(program.abstract_state),
        pool_bytes=None if cluster.is_cpu else int(cluster.gpu.memory_bytes * experiment.train.memory_fraction),
        written=document.table.get("rules", {}) if document is not None else None,
    )
    train = experiment.train
    strategy = Strategy(
        sizes=subject.sizes,
        roles=subject.roles,
        weights=make_weights(placed, subject.roles),
        statistics=make_weights(dict.fromkeys(STATES, others), subject.roles),
        activations=activations,
        tokens=train.global_batch * max(1, train.sequence_length),
        accumulate=train.accumulate,
        steps_per_call=program.steps_per_call,
        deferred=deferred,
        compute_bytes=BYTES_OF[train.precision],
        reduce_bytes=BYTES_OF[train.reduce_precision],
        local_sgd=experiment.local_sgd.axis,
        compression=experiment.compression.axis,
        compressed_bytes={"bf16": 2, "fp8": 1, "int8": 1}[experiment.compression.dtype],
        stages=_stages(experiment, program),
    )
    return Examined(experiment, subject, strategy)


def _stages(experiment: Experiment, program: TrainProgram) -> StageRuns | None:
    pipe, count = program.pipeline, experiment.pipeline.microbatches
    if pipe is None:
        return None
    s, v = pipe.stack.stages, pipe.stack.virtual_stages
    return StageRuns(pipe.axis, count, count * v + s - 1, count + v * s, pipe.stack.chunk_layers, pipe.stack.layers)


def announce_findings(experiment: Experiment, program: TrainProgram, console: Console) -> None:
    """Prints, on the first process, what the lint finds before a step is compiled.

    Raises:
        ConfigError: the first finding that is an error.
    """
    findings = examine(experiment, program, program.mesh).lint().findings
    for finding in findings if jax.process_index() == 0 else ():
        for line in finding_lines(finding):
            console.print(line)
    for finding in findings:
        if finding.severity == "error":
            raise ConfigError(f"{finding.message}.", at=finding.path, hint=finding.hint)
