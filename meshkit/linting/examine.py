"""One lint of an experiment: placements before the compiler, collectives after it.

`explain`, `plan` and `train` all call `examine`, and `plan` and `explain` hold the compiled program against it.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding
from rich.console import Console

from meshkit.compile.lowering import lowering_for, traceable
from meshkit.compile.options import PLAIN
from meshkit.compile.program import CompiledProgram
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment
from meshkit.config.mesh import MeshAxis, MeshSpec
from meshkit.config.rules import ShardingRules
from meshkit.config.sections import AllowTable
from meshkit.errors import ConfigError
from meshkit.linting.contract import (
    CODES,
    Explained,
    collective_findings,
    explain_collectives,
    rematerialization_findings,
)
from meshkit.linting.findings import Finding, apply_allow_list, finding_lines
from meshkit.linting.placements import Subject, in_sums, lint
from meshkit.sharding.constrain import Activation, partition_spec, record_activations
from meshkit.sharding.mesh import AnyMesh, DescribedMesh, described
from meshkit.sharding.resolve import (
    STATES,
    Placed,
    array_of,
    is_named,
    is_statistic,
    path_name,
    placements,
    placements_by_state,
)
from meshkit.sharding.strategy import BYTES_OF, StageRuns, Strategy, make_weights
from meshkit.step.program import TrainProgram, local_bytes


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

    subject: Subject  # placements and rules
    strategy: Strategy  # what the compiled step may communicate
    allow: Sequence[AllowTable] = ()  # findings that are meant
    more: tuple[Finding, ...] = ()  # about the arguments of a step that is no experiment's
    parameters_bytes: int = 0  # of those arguments, on one GPU
    optimizer_bytes: int = 0

    def lint(self) -> Lint:
        """Findings of rules, parameters and activations."""
        kept, allowed = apply_allow_list([*lint(self.subject), *self.more], self.allow, unchecked=CODES)
        return Lint(in_sums(kept, self.subject), allowed)

    def lint_compiled(self, compiled: CompiledProgram) -> Lint:
        """Findings of the same, and of the compiled step's collectives."""
        rows = explain_collectives(compiled.schedule, self.strategy)
        found = [
            *lint(self.subject),
            *self.more,
            *collective_findings(rows, of_file=self.subject.of_file),
            *rematerialization_findings(compiled),
        ]
        kept, allowed = apply_allow_list(found, self.allow)
        return Lint(in_sums(kept, self.subject), allowed, rows)


def examine(experiment: Experiment, program: TrainProgram, mesh: AnyMesh) -> Examined:
    """Traces the step once for its activations, and resolves the rules for every state of the parameters."""
    model = program.model
    target = lowering_for(experiment.cluster) if isinstance(mesh, DescribedMesh) else nullcontext()
    activations = _activations(program.step, (program.abstract_state, program.abstract_batch), target)
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
    strategy = _strategy(
        subject,
        placed,
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
    return Examined(subject, strategy, experiment.lint.allow)


def _strategy(subject: Subject, placed: Mapping[str, Any], **more: Any) -> Strategy:
    """What a step of such placements may communicate; `more` are further fields of it."""
    return Strategy(
        sizes=subject.sizes,
        roles=subject.roles,
        weights=make_weights(placed, subject.roles),
        statistics=make_weights(dict.fromkeys(STATES, subject.others), subject.roles),
        activations=subject.activations,
        **more,
    )


def _activations(step: Callable[..., Any], args: Sequence[Any], *around: AbstractContextManager) -> list[Activation]:
    """What a step constrains, each once."""
    with ExitStack() as stack, record_activations() as record:
        for context in around:
            stack.enter_context(context)
        jax.eval_shape(step, *args)
    return list(dict.fromkeys(record))


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


def lint_step(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: AnyMesh,
    cluster: Cluster,
    rules: ShardingRules,
) -> tuple[Finding, ...]:
    """What is legal and probably not meant about a step of anybody's: its rules, parameters and activations.

    Nothing is compiled; `mk.explain` checks collectives too. What counts as parameters: see there.

    Args:
        step, args, mesh, cluster: as `mk.plan` takes them.
        rules: that the arguments were placed by.

    Raises:
        ConfigError: rules that do not fit the arrays or the mesh.
    """
    return tuple(examine_step(step, args, mesh=mesh, cluster=cluster, rules=rules).lint().findings)


def examine_step(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: AnyMesh,
    cluster: Cluster,
    rules: ShardingRules,
    accumulate: int = 1,
) -> Examined:
    """As `examine`, of any step that can be planned; it computes in the widest type of its parameters and activations.

    What it keeps and gathers is bounded in that type, what it reduces in fp32.
    """
    absent = described(mesh, cluster)
    pure, arrays = traceable(step, args, mesh, absent)
    found = _arguments(args)
    # traced anew: what jax remembers of a step, from a plan of it say, has asked for nothing
    anew = set_xla_metadata(meshkit_trace=uuid.uuid4().hex)
    activations = _activations(pure, arrays, nullcontext() if cluster.is_cpu else lowering_for(cluster), anew)
    placed = placements_by_state(found.parameters, absent, rules)
    others = placements(found.others, absent, rules)
    across = absent.placement(cluster).domains_along()
    axes = [MeshAxis(name, size // across[name], across[name]) for name, size in absent.shape.items()]
    subject = Subject(
        parameters=placed["parameters"],
        activations=activations,
        rules=rules,
        spec=MeshSpec(tuple(axes)),
        others=others,
        deferred=frozenset(name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit),
        state_bytes=sum(map(_local_bytes, found.of_state)),
        pool_bytes=None if cluster.is_cpu else int(cluster.gpu.memory_bytes * PLAIN.memory_fraction),
        of_file=False,
    )
    widest = max((jnp.dtype(a.dtype).itemsize for a in (*subject.parameters, *activations)), default=4)
    strategy = _strategy(subject, placed, tokens=found.tokens, accumulate=accumulate, compute_bytes=widest)
    return Examined(
        subject,
        strategy,
        more=_placed_otherwise(found.parameters, placed["parameters"], absent),
        parameters_bytes=sum(map(_local_bytes, found.parameters.values())),
        optimizer_bytes=sum(map(_local_bytes, found.optimizer.values())),
    )


@dataclass(frozen=True)
class _Arguments:
    """The arrays of a step's arguments by what they are for, each group by path."""

    parameters: dict[str, Any]
    others: dict[str, Any]  # that come with parameters: batch statistics and the like
    optimizer: dict[str, Any]
    tokens: int  # of the batch, at most: elements of its largest array, the last dim of floats left out

    @property
    def of_state(self) -> Iterator[Any]:
        """All arrays but the batch."""
        return chain(self.parameters.values(), self.others.values(), self.optimizer.values())


def _arguments(args: Sequence[Any]) -> _Arguments:
    """Parameters are the `nnx.Param`s of modules and what lies under `params`, or the first argument's floats."""

    def is_module(leaf: Any) -> bool:
        return nnx.graphlib.is_graph_node(leaf) and not isinstance(leaf, nnx.Variable)

    groups: dict[str, dict[str, Any]] = {"parameters": {}, "others": {}, "optimizer": {}}
    plain: list[list[tuple[str, Any]]] = []
    for arg in args:
        tree = jax.tree.map(lambda leaf: nnx.state(leaf) if is_module(leaf) else leaf, arg, is_leaf=is_module)
        rest = []
        for key_path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_named)[0]:
            path = path_name(key_path)
            if is_statistic(key_path, leaf):
                groups["optimizer"][path] = leaf
            elif isinstance(leaf, nnx.Variable):
                groups["parameters" if isinstance(leaf, nnx.Param) else "others"][path] = leaf
            elif "params" in path.split("/"):
                groups["parameters"][path] = leaf
            elif hasattr(array_of(leaf), "shape"):
                rest.append((path, leaf))
        plain.append(rest)
    if not groups["parameters"] and plain:
        floats = {p: leaf for p, leaf in plain[0] if jnp.issubdtype(array_of(leaf).dtype, jnp.inexact)}
        groups["parameters"], plain[0] = floats, [(p, leaf) for p, leaf in plain[0] if p not in floats]
    sizes = [1]
    for arrays in plain:
        for _, leaf in arrays:
            array = array_of(leaf)
            is_float = jnp.issubdtype(array.dtype, jnp.inexact)
            sizes.append(math.prod(array.shape[: -1 if is_float else None]))
    return _Arguments(**groups, tokens=max(sizes))


def _local_bytes(leaf: Any) -> int:
    """Bytes of an array on one GPU; of one without a sharding all of them."""
    array = array_of(leaf)
    if isinstance(getattr(array, "sharding", None), NamedSharding):
        return local_bytes(array)
    return math.prod(array.shape) * array.dtype.itemsize if hasattr(array, "shape") else 0


def _placed_otherwise(parameters: Mapping[str, Any], placed: Sequence[Placed], mesh: AnyMesh) -> tuple[Finding, ...]:
    """A finding about parameters that do not lie where the rules put them, as one sentence."""
    wrong = []
    for p in placed:
        given = getattr(array_of(parameters[p.path]), "sharding", None)
        wanted = NamedSharding(mesh, partition_spec(p.spec)).shard_shape(p.shape)
        if not isinstance(given, NamedSharding) or given.shard_shape(p.shape) != wanted:
            wrong.append(
                (p, "no mesh axes, so that XLA chooses" if not isinstance(given, NamedSharding) else given.spec)
            )
    if not wrong:
        return ()
    first, lies = wrong[0]
    return (
        Finding(
            code="placed_otherwise",
            severity="warning",
            path=first.path if len(wrong) == 1 else "parameters",
            message=f"{len(wrong)} of {len(placed)} parameters do not lie where the rules put them: {first.path} "
            f"{list(first.shape)} has {lies}, and the rules say {partition_spec(first.spec)}",
            hint="args=(*meshkit.abstract(make, mesh, rules), batch), or meshkit.shard_model for real arrays",
        ),
    )
