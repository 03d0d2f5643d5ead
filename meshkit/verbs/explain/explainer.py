"""`meshkit explain`: show where every parameter and activation is placed, and which placements look wrong.

Checking rules and placements needs no compiler. If XLA's GPU compiler is installed and the cluster has GPUs, the step
is compiled as `plan` compiles it. Its collectives are then compared with those that the sharding rules explain, and
each mesh axis is assigned to the best link.
"""

from __future__ import annotations

import functools
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Literal

from pydantic import Field
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from meshkit.compile.lowering import on_own_stack
from meshkit.compile.options import check_compiler
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import Experiment, ExperimentFile, ProgramExperiment
from meshkit.config.mesh import MeshSpec
from meshkit.config.rules import ShardingRules
from meshkit.config.toml import to_toml
from meshkit.console import Printed
from meshkit.errors import ConfigError
from meshkit.linting.examine import SCALARS, Examined, Explained, examine_step
from meshkit.linting.placements import SEVERITY_COLOURS, Finding, Subject, finding_lines
from meshkit.planning.planner import Plan, absent_program, absent_step, plan_experiment, plan_program
from meshkit.planning.resolved import examine_experiment, examine_program
from meshkit.report.schema import Part
from meshkit.report.summarize import mesh_part
from meshkit.report.views.page import Cell, Table, number_columns, text_columns
from meshkit.search.proposals import propose
from meshkit.sharding.constrain import Activation
from meshkit.sharding.mesh import AnyMesh
from meshkit.sharding.resolve import Placed
from meshkit.step.given import Program
from meshkit.step.program import NO_FACTS
from meshkit.units import format_bytes

_LONGEST_ROW = 62  # Terminal columns in which an activation's shape is wrapped.


class PlacedPart(Part):
    """One array: its dims, the mesh axes that cut them, and what one GPU holds."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    logical_axes: tuple[str | None, ...] | None
    spec: tuple[tuple[str, ...], ...]
    rule: str
    shards: int
    bytes: int
    bytes_per_gpu: int


class CollectivePart(Part):
    """Collectives of one kind over the same axes for the same reason, in one step on one GPU."""

    collective: str
    axes: tuple[str, ...]
    count: float
    payload_bytes: float
    explanation: str | None
    bound_bytes: float | None
    sources: tuple[str, ...]


class PlacementPart(Part):
    """The best assignment of the mesh's axes to links.

    `settings` are the values for `--set` that make it; they are empty if the present mesh is the best.
    """

    reason: str
    settings: tuple[str, ...]
    communication_now_s: float
    communication_proposed_s: float


class Explanation(Printed, Part):
    """The object that `meshkit explain --json` prints; `collectives` and `placement` are null without a compile."""

    schema_: Literal["meshkit.explain/1"] = Field(default="meshkit.explain/1", alias="schema")
    experiment: str
    mesh: tuple[dict, ...]
    rules: dict[str, Any]
    parameters: tuple[PlacedPart, ...]
    activations: tuple[PlacedPart, ...]
    parameters_bytes_per_gpu: int
    optimizer_bytes_per_gpu: int
    findings: tuple[Finding, ...]
    allowed: tuple[Finding, ...]
    collectives: tuple[CollectivePart, ...] | None
    collectives_note: str | None
    placement: PlacementPart | None
    of_file: bool = Field(default=True, exclude=True)
    device: str = Field(default="GPU", exclude=True)
    links: tuple[str, str] = Field(default=("nvlink", "infiniband"), exclude=True)
    """Names of the links inside an NVLink domain and between domains."""

    @property
    def failing(self) -> tuple[Finding, ...]:
        """Return the findings that fail `--strict`."""
        return tuple(f for f in self.findings if f.severity != "note")

    def __rich__(self) -> RenderableType:
        return render(self)


def explain(experiment: Experiment | ProgramExperiment, *, compile: bool = True) -> Explanation:
    """Resolve the experiment's rules against its model, lint them, and check the compiled step's collectives.

    Args:
        experiment: an experiment loaded from a file.
        compile: whether to compile the step. It is not compiled for a CPU cluster or without XLA's GPU compiler.

    Raises:
        ConfigError: the rules do not fit the model or the mesh.
        ProgramError: XLA refuses the step.
    """
    cluster = experiment.cluster
    note = why_not_compiled(cluster) if compile else "--no-compile"
    if isinstance(experiment, ProgramExperiment):
        return on_own_stack(functools.partial(_explain_program, experiment, note))
    made = None
    if note is None:
        made = plan_experiment(experiment)
        facts, examined = made.facts, made.examined
        assert examined is not None
    else:
        program = absent_step(experiment)
        facts, examined = program.facts, examine_experiment(experiment, program)
    held = facts.parameters_bytes or 0, facts.optimizer_bytes or 0
    return _explanation(experiment.name, examined, cluster, made=made, note=note, held=held)


def _explain_program(experiment: ProgramExperiment, note: str | None) -> Explanation:
    cluster = experiment.cluster
    with absent_program(experiment) as (program, mesh):
        examined = examine_program(experiment, program, mesh)
        made = plan_program(program, mesh=mesh, cluster=cluster, examined=examined) if note is None else None
    found = made.facts if made else NO_FACTS  # The compiled program has the shardings that XLA chose.
    held = (
        found.parameters_bytes or examined.parameters_bytes,
        found.optimizer_bytes or examined.optimizer_bytes,
    )
    return _explanation(experiment.name, examined, cluster, made=made, note=note, held=held)


def explain_step(
    step: Callable[..., Any] | Program,
    args: Sequence[Any] = (),
    *,
    mesh: AnyMesh,
    cluster: Cluster,
    rules: ShardingRules | None = None,
    accumulate: int = 1,
    compile: bool = True,
) -> Explanation:
    """Explain a user's step: where arrays are placed, which placements look wrong, and why the step communicates.

    Parameters are the `nnx.Param`s of modules and the arrays under a key `params` in the arguments. If there are none,
    they are the float arrays in the first argument. Activations are the arrays whose sharding the step constrains.

    Args:
        step, args, mesh, cluster: as `mk.plan` takes them.
        rules: the rules by which the arguments were placed; None: their present placement is the intended one.
        accumulate: micro-batches of the step, each of which may gather weights and reduce gradients.
        compile: whether to compile the step, if that is possible here, and check its collectives against the rules.

    Raises:
        ConfigError: the rules do not fit the arrays or the mesh.
        ProgramError: XLA refuses the step.
    """
    program = step if isinstance(step, Program) else Program(step, args)
    examined = examine_step(
        program.step,
        program.args,
        mesh=mesh,
        cluster=cluster,
        rules=rules,
        accumulate=accumulate,
        names=program.names,
    )
    note = why_not_compiled(cluster) if compile else "compile=False"
    made = None
    if note is None:
        made = plan_program(program, mesh=mesh, cluster=cluster, examined=examined)
    held = examined.parameters_bytes, examined.optimizer_bytes
    name = getattr(program.step, "__name__", None) or type(program.step).__name__
    return _explanation(name, examined, cluster, made=made, note=note, held=held)


def _explanation(
    name: str, examined: Examined, cluster: Cluster, *, made: Plan | None, note: str | None, held: tuple[int, int]
) -> Explanation:
    """Return the explanation of an examined step.

    Args:
        made: the plan of the step, which has its collectives; None if it was not compiled.
        note: why the step was not compiled.
        held: bytes per GPU of parameters and of optimizer state.
    """
    subject = examined.subject
    lint = (made.lint if made else None) or examined.lint()
    return Explanation(
        experiment=name,
        mesh=tuple(row.model_dump() for row in mesh_part(subject.spec.placement(cluster))),
        rules=subject.rules.to_dict(),
        parameters=tuple(_placed(p, subject, p.path, p.rule) for p in subject.parameters),
        activations=tuple(
            _placed(a, subject, " ".join(x or "-" for x in a.logical_axes), "logical") for a in subject.activations
        ),
        parameters_bytes_per_gpu=held[0],
        optimizer_bytes_per_gpu=held[1],
        findings=tuple(lint.findings),
        allowed=tuple(lint.allowed),
        collectives=None if lint.collectives is None else tuple(map(_collective, lint.collectives)),
        collectives_note=None if note is None else f"collectives were not checked: {note}",
        placement=None if made is None else _placement(made, subject.spec, cluster),
        of_file=subject.of_file,
        device="device" if cluster.is_cpu else "GPU",
        links=(cluster.scale_up.replace("_", " "), cluster.fabric or "infiniband"),
    )


def why_not_compiled(cluster: Cluster) -> str | None:
    """Return why no step for a cluster can be compiled on this machine; None if one can."""
    if cluster.is_cpu:
        return f"cluster '{cluster.name}' has no GPUs"
    try:
        check_compiler()
    except ConfigError as e:
        return f"{str(e).rstrip('.')}" + (f" ({e.hint})" if e.hint else "")
    return None


def rules_toml(experiment: ExperimentFile) -> str:
    """Return the resolved [rules] table of an experiment as TOML: its preset's rows, overridden by its own."""
    return to_toml({"rules": experiment.rules.to_dict()})


def _collective(row: Explained) -> CollectivePart:
    ranked = sorted(row.sources, key=lambda source: -row.sources[source])
    return CollectivePart.from_sources(row, sources=tuple(source for source in ranked if source)[:5])


def _placement(made: Plan, mesh: MeshSpec, cluster: Cluster) -> PlacementPart:
    best = propose(made.report, mesh, cluster)
    seconds = {"communication_now_s": best.seconds_now, "communication_proposed_s": best.seconds_proposed}
    return PlacementPart.from_sources(best, **seconds)


def _placed(array: Placed | Activation, subject: Subject, path: str, rule: str) -> PlacedPart:
    shards = subject.pieces(array.axes)
    return PlacedPart.from_sources(array, path=path, rule=rule, shards=shards, bytes_per_gpu=array.bytes // shards)


def render(explanation: Explanation) -> RenderableType:
    """Return the explanation for `rich.print`: the findings first, then tables of at most 80 columns."""
    parts: list[RenderableType] = [_headline(explanation)]
    parts += [line for f in explanation.findings for line in finding_lines(f)]
    parts += [Text(f"allowed {f.code} at {f.path}: {f.reason}", "dim") for f in explanation.allowed]
    parameters, optimizer = explanation.parameters_bytes_per_gpu, explanation.optimizer_bytes_per_gpu
    held = f"{format_bytes(parameters)} of parameters and {format_bytes(optimizer)} of optimizer state"
    parts += ["", _placed_table("Parameters", explanation.parameters, explanation.device)]
    parts += [f"one {explanation.device} holds {held}", ""]
    parts += [_placed_table("Activations", explanation.activations, explanation.device)]
    if explanation.collectives is not None:
        parts += ["", _collectives_table(explanation.collectives)]
    if explanation.placement is not None:
        parts += ["", *_placement_lines(explanation.placement, explanation.of_file)]
    if explanation.collectives_note is not None:
        parts += ["", Text(explanation.collectives_note, "dim")]
    return Group(*parts)


def _headline(explanation: Explanation) -> Text:
    inside, across = explanation.links
    axes = [
        f"{row['axis']} {row['size']}"
        + (f" ({inside} {row['nvlink']} x {across} {row['infiniband']})" if row["infiniband"] > 1 else "")
        for row in explanation.mesh
    ]
    counts = {severity: sum(f.severity == severity for f in explanation.findings) for severity in SEVERITY_COLOURS}
    found = ", ".join(f"{n} {severity}{'s' * (n > 1)}" for severity, n in counts.items() if n)
    checked = f"{len(explanation.parameters)} parameters, {len(explanation.activations)} activations"
    if explanation.collectives is not None:
        checked += f", {len(explanation.collectives)} kinds of collectives"
    verdict = (found, "yellow") if found else ("nothing looks wrong", "green")
    return Text.assemble(f"{explanation.experiment} on {' x '.join(axes) or 'one GPU'}\n", verdict, f" in {checked}")


def _placement_lines(placement: PlacementPart, of_file: bool) -> Iterator[RenderableType]:
    yield Text(f"placement on links: {'better with' if placement.settings else 'best as it is'}")
    option = "  --set '{}'" if of_file else "  {}"
    yield from (Text(option.format(s)) for s in placement.settings)
    yield Padding(Text(placement.reason), (0, 0, 0, 2))


def _collectives_table(rows: tuple[CollectivePart, ...]) -> RenderableType:
    """Return a table of the collectives, most bytes first; all those of scalars and norms share the last row."""
    small = [row for row in rows if row.explanation == SCALARS]
    cells: list[Sequence[Cell]] = []
    for row in rows:
        if row in small:
            continue
        axes = " x ".join(row.axes)
        why = row.explanation and row.explanation.replace(f" over {axes}", "", 1)
        size = format_bytes(int(row.payload_bytes))
        cells.append((f"{row.collective} {axes}", f"{row.count:.3g}", size, why or Text("unexplained", "yellow")))
    if small:
        count, size = sum(row.count for row in small), sum(row.payload_bytes for row in small)
        cells.append(("others", f"{count:.3g}", format_bytes(int(size)), SCALARS))
    columns = (*text_columns("collective"), *number_columns("count", "a GPU"), *text_columns("why"))
    return Table(columns, cells).terminal(title="Collectives of a step")


def _placed_table(title: str, placed: tuple[PlacedPart, ...], device: str) -> RenderableType:
    """Return a table of arrays with their axes, shards and bytes per device. Its title names the most common dtype."""
    usual = Counter(row.dtype for row in placed).most_common(1)[0][0] if placed else "none"
    named, rows = title == "Parameters", []
    for row in placed:
        names = () if named else row.logical_axes or ()
        dims = [f"{name} {n}" if name else str(n) for name, n in zip_longest(names, row.shape)]
        text = ", ".join(f"{d}:{'+'.join(axes)}" if axes else d for d, axes in zip(dims, row.spec)) or "scalar"
        text += "" if row.dtype == usual else f" {row.dtype}"
        first = [row.path] if named else []
        wrapped = text if named else "\n".join(textwrap.wrap(text, _LONGEST_ROW, subsequent_indent="  "))
        rows.append((*first, wrapped, str(row.shards), format_bytes(row.bytes_per_gpu)))
    heads = ("array", "shape: axes") if named else ("shape: axes",)
    columns = (*text_columns(*(heads if placed else ())), *number_columns("cut in", f"a {device}"))
    return Table(columns, rows).terminal(title=f"{title}, {usual}")
