"""explain: where every parameter and activation goes, and what looks wrong about it. Layer 7. Compiles nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import jax
import numpy as np
from pydantic import Field
from rich.console import Group, RenderableType
from rich.table import Table

from meshkit.planner import local_bytes, mesh_rows
from meshkit.report.schema import Part
from meshkit.sharding.constrain import Activation, record_activations
from meshkit.sharding.devices import describe_devices, use_no_accelerator
from meshkit.sharding.mesh import DescribedMesh, build_mesh
from meshkit.sharding.resolve import Placed, placements
from meshkit.spec.experiment import Experiment
from meshkit.units import format_bytes
from meshkit.xla.program import lowering_for

# A parameter of this many bytes that no axis cuts is worth a finding: below it, gathering costs more than it saves
# (one NCCL ring step's latency buys about 1 MB at NVLink speed: 3.4 us x 360 GB/s).
_SMALL_BYTES = 2**20


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


class Finding(Part):
    """Something that is legal and probably not meant."""

    code: str
    message: str


class Explanation(Part):
    """The object that `meshkit explain --json` prints."""

    schema_: Literal["meshkit.explain/1"] = Field(default="meshkit.explain/1", alias="schema")
    experiment: str
    mesh: tuple[dict, ...]
    parameters: tuple[PlacedPart, ...]
    activations: tuple[PlacedPart, ...]
    parameters_bytes_per_gpu: int
    optimizer_bytes_per_gpu: int
    findings: tuple[Finding, ...]


def explain(experiment: Experiment) -> Explanation:
    """Resolves the experiment's rules against its model, without compiling or touching a device."""
    from meshkit.training.state import describe_model
    from meshkit.training.step import make_train_step

    use_no_accelerator()
    mesh = build_mesh(experiment.mesh, experiment.cluster, devices=describe_devices(experiment.cluster))
    assert isinstance(mesh, DescribedMesh)
    program = make_train_step(experiment, mesh)
    params = placements(describe_model(experiment).params, mesh, experiment.rules)
    with lowering_for(experiment.cluster), record_activations() as record:
        jax.eval_shape(program.step, program.abstract_state, program.abstract_batch)
    activations = list(dict.fromkeys(record))
    return Explanation(
        experiment=experiment.name,
        mesh=tuple(mesh_rows(mesh)),
        parameters=tuple(_parameter(p, mesh) for p in params),
        activations=tuple(_activation(a, mesh) for a in activations),
        parameters_bytes_per_gpu=local_bytes(program.abstract_state.params),
        optimizer_bytes_per_gpu=local_bytes(program.abstract_state.opt_state),
        findings=tuple(_lint(params, activations, experiment, mesh)),
    )


def _parameter(p: Placed, mesh: DescribedMesh) -> PlacedPart:
    total = math.prod(p.shape) * np.dtype(p.dtype).itemsize if p.dtype != "bfloat16" else math.prod(p.shape) * 2
    shards = p.shards(mesh)
    return PlacedPart(
        path=p.path,
        shape=p.shape,
        dtype=p.dtype,
        logical_axes=p.logical_axes,
        spec=p.spec,
        rule=p.rule,
        shards=shards,
        bytes=total,
        bytes_per_gpu=total // shards,
    )


def _activation(a: Activation, mesh: DescribedMesh) -> PlacedPart:
    total = math.prod(a.shape) * jax.numpy.dtype(a.dtype).itemsize
    shards = math.prod(mesh.shape[x] for axes in a.spec for x in axes)
    return PlacedPart(
        path=" ".join(x or "-" for x in a.logical_axes),
        shape=a.shape,
        dtype=a.dtype,
        logical_axes=a.logical_axes,
        spec=a.spec,
        rule="logical",
        shards=shards,
        bytes=total,
        bytes_per_gpu=total // shards,
    )


def _lint(
    params: list[Placed], activations: list[Activation], experiment: Experiment, mesh: DescribedMesh
) -> Iterable[Finding]:
    for p in params:
        size = _parameter(p, mesh).bytes
        if p.shards(mesh) == 1 and mesh.size > 1 and size >= _SMALL_BYTES and _shards_parameters(params, mesh):
            why = "no rule names it" if p.rule == "none" else "its logical axes map to no mesh axis"
            yield Finding(
                code="replicated_parameter",
                message=f"{p.path} {p.shape} is whole on every GPU ({format_bytes(size)} each): {why}",
            )
    for a in activations:
        if a.dropped:
            yield Finding(
                code="axis_left_out",
                message=f"mesh axis {', '.join(a.dropped)} does not divide activation {a.logical_axes} of shape "
                f"{a.shape}, which stays whole along it",
            )
    used = {n for p in params for n in p.logical_axes or ()} | {n for a in activations for n in a.logical_axes}
    for name in experiment.rules.mapping("parameters"):
        if name in experiment.rules.explicit and name not in used:
            yield Finding(code="rule_never_used", message=f"rule '{name}' matches no dim of the model")
    cut = {x for p in params for axes in p.spec for x in axes} | {
        x for a in activations for axes in a.spec for x in axes
    }
    for axis, size in mesh.shape.items():
        if size > 1 and axis not in cut:
            yield Finding(
                code="idle_axis", message=f"mesh axis '{axis}' of size {size} shards nothing: its GPUs repeat work"
            )


def _shards_parameters(params: list[Placed], mesh: DescribedMesh) -> bool:
    """Whether the rules shard parameters at all: plain data parallelism replicates them on purpose."""
    return any(p.shards(mesh) > 1 for p in params)


def render(explanation: Explanation) -> RenderableType:
    """Tables of at most 80 columns."""
    parts: list[RenderableType] = [
        _table("Parameters", explanation.parameters),
        _table("Activations", explanation.activations),
        _held(explanation),
    ]
    parts += [f"[yellow]{f.code}[/]: {f.message}" for f in explanation.findings] or ["[green]nothing looks wrong[/]"]
    return Group(*parts)


def _held(explanation: Explanation) -> str:
    parameters, optimizer = explanation.parameters_bytes_per_gpu, explanation.optimizer_bytes_per_gpu
    return f"one GPU holds {format_bytes(parameters)} of parameters and {format_bytes(optimizer)} of optimizer state"


def _table(title: str, rows: tuple[PlacedPart, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    table.add_column("array", overflow="fold", ratio=3)
    table.add_column("shape: axes", overflow="fold", ratio=4)
    table.add_column("shards", justify="right")
    table.add_column("a GPU", justify="right", no_wrap=True)
    for row in rows:
        dims = ", ".join(f"{n}:{'+'.join(axes)}" if axes else str(n) for n, axes in zip(row.shape, row.spec))
        table.add_row(
            row.path, f"[{dims}] {row.dtype}".replace("[", r"\["), str(row.shards), format_bytes(row.bytes_per_gpu)
        )
    return table
