"""Lint an experiment in two passes: placements before the compiler, collectives after it.

`explain`, `plan` and `train` call `examine`. `plan` and `explain` then check the compiled program against its result.
Each collective needs a reason in the strategy. A collective without a reason, or with more bytes than its reason
allows, is a finding. Most often its cause is that XLA reshards an activation that no code constrains. XLA's own
"involuntary full rematerialization" is a finding too.
"""

from __future__ import annotations

import math
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, NamedSharding
from rich.console import Console

from meshkit.compile.lowering import lowering_for, traceable
from meshkit.compile.options import PLAIN
from meshkit.compile.program import CompiledProgram
from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshAxis, MeshSpec
from meshkit.config.precisions import PRECISIONS
from meshkit.config.rules import ShardingRules
from meshkit.config.sections import AllowTable
from meshkit.errors import ConfigError, check_kinds
from meshkit.hlo.module import Schedule
from meshkit.hlo.proto import dtype_bits
from meshkit.hlo.schedule import Collective
from meshkit.linting.placements import Finding, Subject, apply_allow_list, finding_lines, lint, summarize_unmatched
from meshkit.linting.ways import FAILS, WAY, apart_axes, is_part
from meshkit.sharding.constrain import Activation, partition_spec, record_activations
from meshkit.sharding.mesh import AnyMesh, DescribedMesh, described
from meshkit.sharding.resolve import STATES, Placed, array_of, placements, placements_by_state
from meshkit.sharding.strategy import SCALAR_BYTES, Axes, Payload, StageRuns, Strategy, make_weights
from meshkit.step.given import Groups, Program, group_arguments, held_bytes
from meshkit.step.muon import exchanged_elements
from meshkit.step.program import TrainProgram, local_bytes
from meshkit.units import format_bytes

SCALARS = "scalars and norms, up to 4 KiB each"
WITHIN = "copied by a GPU to itself, so nothing leaves a GPU"
TAKEN_APART = "token dispatch and combine, a ragged all-to-all that XLA takes apart: rows between NVLink domains"
CODES = ("unexplained_collective", "involuntary_rematerialization", "state_drifts", WAY, FAILS)
# Margin for XLA's padding and combined small sums; it is smaller than any array that is worth a finding.
_SLACK, _SLACK_BYTES = 1.05, 2**20
_LONGEST, _PLACES = 100, 4  # Most characters of a path, and most places of a combined collective, in a finding.
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


@dataclass
class Explained:
    """All collectives of one kind over the same axes for the same reason, in one step on one GPU."""

    collective: str
    axes: tuple[str, ...]
    explanation: str | None
    """The reason; None if no term of the strategy explains them."""
    bound_bytes: float | None = None
    """Bytes that the reason allows; None if it has no closed form."""
    count: float = 0
    """Number of collectives; a combined collective counts once, where its largest array belongs."""
    payload_bytes: float = 0
    sources: dict[str, float] = field(default_factory=dict)
    """op_name path -> bytes."""
    cause: str = ""
    """The likely cause, if there is no explanation."""

    @property
    def path(self) -> str:
        return f"collective/{self.collective}/{'+'.join(self.axes)}"

    @property
    def exceeds(self) -> bool:
        """Whether they move more bytes than their reason allows."""
        return self.bound_bytes is not None and self.payload_bytes > self.bound_bytes * _SLACK + _SLACK_BYTES


def explain_collectives(schedule: Schedule, strategy: Strategy) -> list[Explained]:
    """Return every collective of a step with its reason, those with the most bytes first.

    Counts and bytes of the program are divided by the strategy's `steps_per_call`.
    """
    rows: dict[tuple, Explained] = {}
    apart = apart_axes(i.collective for i, _ in schedule.walk() if i.collective is not None)
    for instruction, runs in schedule.walk():
        if (collective := instruction.collective) is None:
            continue
        times = runs / strategy.steps_per_call
        axes = frozenset(collective.axes)
        parts = _parts(collective)
        largest = max(range(len(parts)), key=lambda i: parts[i][1])
        for index, (part, size) in enumerate(parts):
            taken_apart = is_part(collective, apart)
            words, bound, cause = (TAKEN_APART, None, "") if taken_apart else _reason(part, collective, axes, strategy)
            row = rows.setdefault(
                (collective.collective, collective.axes, words),
                Explained(collective.collective, collective.axes, words, bound, cause=cause),
            )
            row.count += times * (index == largest)
            row.payload_bytes += times * size
            row.sources[collective.source] = row.sources.get(collective.source, 0) + times * size
    return sorted(rows.values(), key=lambda r: -r.payload_bytes)


def collective_findings(rows: Sequence[Explained], *, of_file: bool = True) -> list[Finding]:
    """Return findings on collectives without a reason or with too many bytes; `of_file` lets hints name its tables."""
    found = []
    for row in rows:
        if row.explanation is not None and not row.exceeds:
            continue
        times = f"{row.count:g}" if row.count else "part of a combined"
        moved = f"{times} {row.collective} over {'+'.join(row.axes)}, {format_bytes(row.payload_bytes)}"
        if row.explanation is None:
            message = f"the strategy does not explain {moved} a step: {row.cause}; at {_places(row)}"
        else:
            message = (
                f"{moved} a step, where {row.explanation} take at most {format_bytes(row.bound_bytes or 0)}: something "
                f"is communicated more often than declared; most at {_places(row)}"
            )
        hint = _hint(row, of_file)
        code = "unexplained_collective"
        found.append(Finding(code=code, severity="warning", path=row.path, message=message, hint=hint))
    return found


def rematerialization_findings(compiled: CompiledProgram) -> list[Finding]:
    """Return the findings about arrays that XLA replicates, since it cannot convert one sharding into another."""
    return [
        Finding(
            code="involuntary_rematerialization",
            severity="warning",
            path=f"rematerialization/{r.source or r.array}",
            message=f"XLA replicates {r.array} on every GPU for a moment, to get from one sharding to another"
            + (f" at {r.source}" if r.source else ""),
            hint='x = meshkit.constrain(x, "act_batch", ...) on both sides of it, or rules that shard both alike',
        )
        for r in compiled.rematerializations
    ]


def drift_findings(compiled: CompiledProgram, state: Mapping[int, str]) -> list[Finding]:
    """Return a finding if a step returns arrays of its state (argument number -> path) with another sharding."""
    entry = compiled.hlo.entry
    given = {i.parameter_number: i.shape for i in entry.order if i.opcode == "parameter"}
    outputs = entry.root.shape.parts or (entry.root.shape,)
    carried = [(state[n], given[n], outputs[m]) for n, m in compiled.carried if n in state and n in given]
    drifting = [(path, before, after) for path, before, after in carried if before.dims != after.dims]
    if not drifting:
        return []
    shown = ", ".join(f"{path} ({before} a GPU before, {after} after)" for path, before, after in drifting[:_PLACES])
    more = f" and {len(drifting) - _PLACES} more" if len(drifting) > _PLACES else ""
    return [
        Finding(
            code="state_drifts",
            severity="warning",
            path=drifting[0][0] if len(drifting) == 1 else "state",
            message=f"{len(drifting)} of {len(carried)} arrays of the state have another sharding after a step: "
            f"{shown}{more}; the next call would need another program than the planned one, and a compiled step "
            "refuses such arrays",
            hint="@meshkit.keep_shardings(mesh, rules) below nnx.jit; under jax.jit out_shardings=(meshkit.shardings("
            "state, mesh, rules), None)",
        )
    ]


def _parts(c: Collective) -> list[tuple[Payload, float]]:
    """Return the arrays of a collective, each with its share of the payload."""
    gathered = c.group_size if c.collective == "all-gather" else 1
    shapes = [(dtype, [int(d) for d in dims.split(",") if d]) for dtype, dims in _SHAPE.findall(c.key.split("|")[3])]
    if c.collective == "ragged-all-to-all":
        shapes = shapes[:1]
    if c.collective == "all-to-all" and len(shapes) > 1:  # The shapes are pieces, one for each GPU of the group.
        total = sum(math.prod(dims) for _, dims in shapes)
        return [(Payload(c.collective, shapes[0][0], total, 1, c.payload_bytes, c.source), c.payload_bytes)]
    parts = []
    for dtype, dims in shapes:
        elements = math.prod(dims) * gathered
        size = math.ceil(elements * dtype_bits(dtype) / 8)
        parts.append((Payload(c.collective, dtype, elements, len(dims), size, c.source), size))
    return parts or [(Payload(c.collective, c.dtype, 0, 0, c.payload_bytes), c.payload_bytes)]


def _reason(part: Payload, c: Collective, axes: Axes, strategy: Strategy) -> tuple[str | None, float | None, str]:
    if not axes:  # Every group is a single GPU.
        return WITHIN, None, ""
    if c.payload_bytes <= SCALAR_BYTES:
        return SCALARS, None, ""
    for term in strategy.terms(axes):
        if part.collective in term.kinds and term.fits(part):
            return term.words, term.bound_bytes, ""
    if part.bytes <= SCALAR_BYTES:
        return SCALARS, None, ""
    return None, None, _guess(part, c, axes, strategy)


def _guess(part: Payload, c: Collective, axes: Axes, s: Strategy) -> str:
    """Return the likely cause of a collective that no term explains."""
    names = " x ".join(c.axes)
    weight = s.weight_of(part, axes)
    if c.collective == "all-reduce" and weight and s.gathers_whole(part, axes):
        return f"the gradient of {weight.path} is reduced whole, although {names} keeps it in shards"
    if c.collective == "all-gather" and weight and axes & weight.stays:
        return f"{weight.path}, or an array of its size, is gathered over {names}, which should work on its shards"
    if axes & s.roles.batch and c.collective in ("all-gather", "all-reduce"):
        return f"an activation is gathered over {names}, which shards the batch"
    if axes & s.roles.tensor and c.collective == "all-gather":
        return f"an activation is gathered that {names} should keep in shards (heads, hidden or vocabulary)"
    if axes & s.roles.length and c.collective == "all-gather":
        return f"an activation is gathered over {names}, which shards the sequence"
    return "XLA moves shards between two layouts"


def _hint(row: Explained, of_file: bool) -> str:
    if row.explanation is not None:
        own = "micro-batches (say `accumulate`)"
        return f"see what repeats it: `remat`, {'`accumulate`' if of_file else own}, or a layer that is run twice"
    if not of_file:
        return "constrain the array where it is made"
    allow = f'[[lint.allow]] code = "unexplained_collective", path = "{row.path}", reason = "..."'
    return f"constrain the array where it is made; or, if it is meant, {allow}"


def _places(row: Explained) -> str:
    ranked = sorted(row.sources, key=lambda s: -row.sources[s])
    shown = [_short(s) for s in ranked[:2]]
    return " and ".join(shown) + (f" and {len(ranked) - 2} more places" if len(ranked) > 2 else "")


def _short(source: str) -> str:
    """Return an op_name path without the parts common to all paths; for a combined collective, the paths' ends."""
    path = re.sub(r"jit\(train_step\)/|while/body/|eval_jaxpr/|checkpoint/|rematted_computation/", "", source)
    if ":" in path:
        ends = dict.fromkeys("/".join(p.strip("()").rsplit("/", 3)[-3:]) for p in path.split(":"))
        shown = list(ends)[:_PLACES]
        return ", ".join(shown) + (f" and {len(ends) - len(shown)} more" if len(ends) > len(shown) else "")
    if len(path) > _LONGEST:
        return "..." + path[-_LONGEST:].partition("/")[2]
    return path or "an op without a name"


@dataclass(frozen=True)
class Lint:
    """The findings of a lint."""

    findings: list[Finding]
    """Findings that the allow list does not silence, errors first."""
    allowed: list[Finding]
    """Findings that the experiment's allow list silences, each with its reason."""
    collectives: list[Explained] | None = None
    """Collectives of the compiled step with their reasons; None if nothing was compiled."""


@dataclass(frozen=True)
class Examined:
    """The facts about a step that the lint checks, collected before the compiler runs."""

    subject: Subject
    strategy: Strategy
    allow: Sequence[AllowTable] = ()
    more: tuple[Finding, ...] = ()
    """Findings about the arguments of a user's own step."""
    parameters_bytes: int = 0
    """Bytes on one GPU of the arguments that are parameters; known for a user's own step."""
    optimizer_bytes: int = 0

    def lint(self) -> Lint:
        kept, allowed = apply_allow_list([*lint(self.subject), *self.more], self.allow, unchecked=CODES)
        return Lint(summarize_unmatched(kept, self.subject), allowed)

    def lint_compiled(self, compiled: CompiledProgram, also: Sequence[Finding] = ()) -> Lint:
        """Return the findings of `lint` and of the compiled step, and the findings `also` (about drifts and ways)."""
        rows = explain_collectives(compiled.schedule, self.strategy)
        found = [
            *lint(self.subject),
            *self.more,
            *collective_findings(rows, of_file=self.subject.of_file),
            *rematerialization_findings(compiled),
            *also,
        ]
        kept, allowed = apply_allow_list(found, self.allow)
        return Lint(summarize_unmatched(kept, self.subject), allowed, rows)


def examine(
    program: TrainProgram,
    cluster: Cluster,
    spec: MeshSpec,
    *,
    allow: Sequence[AllowTable] = (),
    written: Mapping[str, Any] | None = None,
) -> Examined:
    """Trace a training step once for its activations, and resolve its rules for every state of the parameters.

    Args:
        program: the training step; on a described mesh it is traced for the cluster's GPU.
        allow: `[[lint.allow]]`, the findings that are intended.
        written: `[rules]` as in the experiment's file, if there is a file.
    """
    model, mesh, rules, how = program.model, program.mesh, program.rules, program.spec
    target = lowering_for(cluster) if isinstance(mesh, DescribedMesh) else nullcontext()
    activations = _activations(program.step, (program.abstract_state, program.abstract_batch), target)
    placed = placements_by_state(model.params, mesh, rules)
    others = placements(model.variables, mesh, rules)
    deferred, train = frozenset(program.deferred), how.train
    precision = PRECISIONS[train.precision]
    subject = Subject(
        parameters=placed["parameters"],
        activations=activations,
        rules=rules,
        spec=spec,
        others=others,
        deferred=deferred,
        state_bytes=local_bytes(program.abstract_state),
        pool_bytes=None if cluster.is_cpu else int(cluster.gpu.memory_bytes * train.memory_fraction),
        written=written,
    )
    strategy = _strategy(
        subject,
        placed,
        tokens=train.global_batch * max(1, train.sequence_length),
        accumulate=train.accumulate,
        steps_per_call=program.steps_per_call,
        deferred=deferred,
        compute_bytes=precision.item_bytes,
        reduce_bytes=PRECISIONS[train.reduce_precision].item_bytes,
        block=precision.block,
        packed=precision.packed,
        local_sgd=how.local_sgd.axis,
        compression=how.compression.axis,
        compressed_bytes={"bf16": 2, "fp8": 1, "int8": 1}[how.compression.dtype],
        stages=_stages(program),
        orthogonalizes=exchanged_elements(model.params, mesh, rules) if how.optimizer.algorithm == "muon" else None,
    )
    return Examined(subject, strategy, allow)


def _strategy(subject: Subject, placed: Mapping[str, Any], **more: Any) -> Strategy:
    return Strategy(
        sizes=subject.sizes,
        roles=subject.roles,
        weights=make_weights(placed, subject.roles),
        statistics=make_weights(dict.fromkeys(STATES, subject.others), subject.roles),
        activations=subject.activations,
        **more,
    )


def _activations(step: Callable[..., Any], args: Sequence[Any], *around: AbstractContextManager) -> list[Activation]:
    with ExitStack() as stack, record_activations() as record:
        for context in around:
            stack.enter_context(context)
        jax.eval_shape(step, *args)
    return list(dict.fromkeys(record))


def _stages(program: TrainProgram) -> StageRuns | None:
    pipe, count = program.pipeline, program.spec.pipeline.microbatches
    if pipe is None:
        return None
    s, v = pipe.stack.stages, pipe.stack.virtual_stages
    return StageRuns(pipe.axis, count, count * v + s - 1, count + v * s, pipe.stack.chunk_layers, pipe.stack.layers)


def announce_findings(examined: Examined, console: Console) -> None:
    """Print, on the first process, what the lint finds before a step is compiled.

    Raises:
        ConfigError: the first finding that is an error.
    """
    findings = examined.lint().findings
    for finding in findings if jax.process_index() == 0 else ():
        for line in finding_lines(finding):
            console.print(line)
    for finding in findings:
        if finding.severity == "error":
            raise ConfigError(f"{finding.message}.", at=finding.path, hint=finding.hint)


def lint_step(
    step: Callable[..., Any] | Program,
    args: Sequence[Any] = (),
    *,
    mesh: AnyMesh,
    cluster: Cluster,
    rules: ShardingRules | None = None,
) -> tuple[Finding, ...]:
    """Return the findings about the rules, parameters and activations of any step.

    Nothing is compiled. `mk.explain` also checks collectives; its docstring lists which arguments count as parameters.

    Args:
        step, args, mesh, cluster: as `mk.plan` takes them.
        rules: the rules that placed the arguments; None: their present placement is the intended one.

    Raises:
        ConfigError: the rules do not fit the arrays or the mesh.
    """
    program = step if isinstance(step, Program) else Program(step, args)
    found = examine_step(program.step, program.args, mesh=mesh, cluster=cluster, rules=rules, names=program.names)
    return tuple(found.lint().findings)


def examine_step(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: AnyMesh,
    cluster: Cluster,
    rules: ShardingRules | None,
    accumulate: int = 1,
    names: Mapping[str, str | Sequence[str]] | None = None,
    allow: Sequence[AllowTable] = (),
    memory_fraction: float = PLAIN.memory_fraction,
) -> Examined:
    """Return the examination of any step that can be planned; see `examine`.

    The step is assumed to compute in the widest dtype of its parameters and activations, which gives the bound on
    gathered bytes. The bound on reduced bytes assumes fp32.

    Args:
        step, args, mesh, cluster: as `mk.plan` takes them.
        rules: the rules that placed the arguments; None: their present placement is the intended one.
        accumulate: micro-batches of a step, which multiply the bytes that the step may move.
        names: roles of the arguments, as in `mk.Program`.
        allow: `[[lint.allow]]`, the findings that are intended.
        memory_fraction: share of the GPU's memory that the client may take.

    Raises:
        ConfigError: the arguments are not a tuple, the mesh has another size than the cluster, or the rules do not fit.
    """
    check_kinds(examine_step, mesh=mesh, cluster=cluster, rules=rules)
    absent = described(mesh, cluster)
    pure, arrays, _ = traceable(step, args, mesh, absent)
    found = group_arguments(args, names)
    within = found.within if rules else {}  # Rules derived from placements name full paths.
    rules = rules or _rules_as_placed(found)
    # The metadata forces a new trace: a cached trace, such as a plan's, would record no constraints.
    anew = set_xla_metadata(meshkit_trace=uuid.uuid4().hex)
    activations = _activations(pure, arrays, nullcontext() if cluster.is_cpu else lowering_for(cluster), anew)
    placed = placements_by_state(found.parameters, absent, rules, within=within)
    others = placements(found.others, absent, rules, within=within)
    across = absent.placement(cluster).domains_along()
    axes = [MeshAxis(name, size // across[name], across[name]) for name, size in absent.shape.items()]
    subject = Subject(
        parameters=placed["parameters"],
        activations=activations,
        rules=rules,
        spec=MeshSpec(tuple(axes)),
        others=others,
        deferred=frozenset(name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit),
        state_bytes=sum(map(held_bytes, found.of_state)),
        pool_bytes=None if cluster.is_cpu else int(cluster.gpu.memory_bytes * memory_fraction),
        of_file=False,
    )
    widest = max((jnp.dtype(a.dtype).itemsize for a in (*subject.parameters, *activations)), default=4)
    strategy = _strategy(subject, placed, tokens=found.most_tokens, accumulate=accumulate, compute_bytes=widest)
    return Examined(
        subject,
        strategy,
        allow,
        more=_placed_otherwise(found.parameters, placed["parameters"], absent),
        parameters_bytes=sum(map(held_bytes, found.parameters.values())),
        optimizer_bytes=sum(map(held_bytes, found.optimizer.values())),
    )


def _rules_as_placed(groups: Groups) -> ShardingRules:
    """Return rules that keep the placement of every array, and map `act_batch` to the axes that shard the batch."""
    arrays = {**groups.parameters, **groups.others}
    batch: tuple[str, ...] = ()
    for spec in map(_spec, groups.batch.values()):
        axes = spec[0] if spec and spec[0] is not None else ()
        batch = max(batch, (axes,) if isinstance(axes, str) else tuple(axes), key=len)
    logical = {"act_batch": list(batch)} if batch else {}
    return ShardingRules(logical, overrides=[(path, _spec(leaf)) for path, leaf in arrays.items()])


def _spec(leaf: Any) -> tuple[Any, ...]:
    array = array_of(leaf)
    spec = tuple(array.sharding.spec) if isinstance(getattr(array, "sharding", None), NamedSharding) else ()
    return (*spec, *(None,) * (len(array.shape) - len(spec)))


def _placed_otherwise(parameters: Mapping[str, Any], placed: Sequence[Placed], mesh: AnyMesh) -> tuple[Finding, ...]:
    """Return a single finding about parameters that are not where the rules put them."""
    wrong = []
    for p in placed:
        given = getattr(array_of(parameters[p.path]), "sharding", None)
        wanted = NamedSharding(mesh, partition_spec(p.spec)).shard_shape(p.shape)
        named = isinstance(given, NamedSharding)
        if not named or given.shard_shape(p.shape) != wanted:
            wrong.append((p, given.spec if named else "no mesh axes, so that XLA chooses"))
    if not wrong:
        return ()
    first, lies = wrong[0]
    return (
        Finding(
            code="placed_otherwise",
            severity="warning",
            path=first.path if len(wrong) == 1 else "parameters",
            message=f"{len(wrong)} of {len(placed)} parameters are not where the rules put them: {first.path} "
            f"{list(first.shape)} has {lies}, but the rules say {partition_spec(first.spec)}",
            hint="args=(*meshkit.abstract(make, mesh, rules), batch), or meshkit.shard_model for real arrays",
        ),
    )
