"""What a predicted step is bound by, in a few sentences: the verdict of a plan.

report, simulation, program -> parts of the step that do nothing new, each with its seconds -> verdict

Only what a simulation knows is named: no waiting, clocks or outliers, which a measurement alone has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from meshkit.config.cluster import Cluster
from meshkit.hlo.instructions import InstructionInfo
from meshkit.hlo.schedule import Schedule
from meshkit.predict.coverage import NOT_PREDICTED, kernel_seconds_by_name
from meshkit.predict.kernels import peak_flops
from meshkit.predict.simulate import Simulation
from meshkit.report.causes import EXPOSED_WARNS, WARNS, JudgedReport, named, recomputes, small_collectives, source
from meshkit.report.schema import MemoryPart, Report
from meshkit.units import format_bytes, format_percent, format_seconds

_LINKS = {"nvlink": "NVLink", "infiniband": "InfiniBand"}
_HELD = ("parameters", "optimizer", "gradients", "activations", "temporary")


class Foreseen(NamedTuple):
    """What is known of a plan beside its report."""

    simulation: Simulation
    schedule: Schedule
    instructions: Mapping[str, InstructionInfo]
    cluster: Cluster
    steps: int = 1  # that one run of the program makes


class _Part(NamedTuple):
    """A part of the step that might be saved, what it is called, and more of it."""

    seconds: float
    name: str
    least: float  # share of the step from which it is named
    more: str = ""


def foreseen(report: Report, known: Foreseen) -> Report:
    """A prediction with its verdict."""
    memory, time_s = report.memory, report.step.time_s
    said = [_too_large(memory)] if memory.fits is False else []
    if not time_s or any(w.code == NOT_PREDICTED for w in report.warnings):
        return report.model_copy(update={"verdict": " ".join(said) or None})
    case = _Predicted(report, known)
    parts = [p for p in sorted(_parts(case), reverse=True) if p.seconds >= p.least * time_s][:2]
    said += [case.share(part.seconds, part.name, first=not i) + part.more for i, part in enumerate(parts)]
    if not parts:
        said.append(_bound(case))
    if memory.fits and memory.margin_bytes is not None:
        said.append(f"It fits, with {format_bytes(memory.margin_bytes)} a GPU to spare.")
    return report.model_copy(update={"verdict": " ".join(said)})


class _Predicted(JudgedReport):
    """A simulated step: a transfer takes as long as it is busy."""

    def __init__(self, report: Report, known: Foreseen):
        rows = tuple(r.model_copy(update={"transfer_s": r.busy_s}) for r in report.communication)
        report = report.model_copy(update={"communication": rows})
        super().__init__(report, known.cluster, known.simulation.timeline.collectives)
        self.foreseen = known


def _parts(case: _Predicted) -> list[_Part]:
    """What of the step is no new work of the model."""
    step, known = case.step, case.foreseen
    pipeline = case.report.pipeline
    of = f" ({pipeline.stages} stages, {pipeline.microbatches} microbatches)" if pipeline else ""
    seconds = kernel_seconds_by_name(known.simulation)
    again_s = sum(s for name, s in seconds.items() if recomputes(name, known.instructions.get(name)))
    return [
        _Part(step.exposed_s or 0.0, "exposed communication", EXPOSED_WARNS, _largest(case)),
        _Part(step.bubble_s or 0.0, f"the pipeline's bubble{of}", WARNS),
        _Part(again_s / known.steps, "recomputation of the forward pass", WARNS),
        _Part(step.other_s or 0.0, "memory copies with nothing beside them", WARNS),
        _Part(step.idle_s or 0.0, "idle between kernels", WARNS),
    ]


def _largest(case: _Predicted) -> str:
    """The row that is exposed most, the step without it, and what combining small messages would save."""
    i, row = max(enumerate(case.rows), key=lambda item: item[1].exposed_s or 0.0, default=(0, None))
    if row is None or not row.exposed_s or not case.step.exposed_s:
        return ""
    most = "Most of it" if row.exposed_s > 0.5 * case.step.exposed_s else "Its largest part"
    fabric = row.fabric if row.fabric and row.link and not row.fabric.startswith(row.link) else None
    on = f" on {fabric.replace('_', ' ') if fabric else _LINKS[row.link]}" if row.link else ""
    without = format_seconds(case.time_s - (row.sole_exposed_s or 0.0))
    text = (
        f" {most} is {named(row)}{on}{source(row)}, {format_seconds(row.exposed_s)}; without it the step would take "
        f"{without}."
    )
    evidence = f"communication.{i}.count"
    small = [f for f in small_collectives(case) if evidence in f.evidence and (f.seconds or 0) >= WARNS * case.time_s]
    return text + "".join(f" {f.message}" for f in small)


def _too_large(memory: MemoryPart) -> str:
    """That the step does not fit, by how much, and what takes the most."""
    held = {name: getattr(memory, f"{name}_bytes") or 0 for name in _HELD}
    most = max(held, key=lambda name: held[name])
    largest = f" The most is {most}, {format_bytes(held[most])}." if held[most] else ""
    too_much = f": {format_bytes(-memory.margin_bytes)} a GPU too much" if memory.margin_bytes is not None else ""
    return f"The step does not fit{too_much}.{largest}"


def _bound(case: _Predicted) -> str:
    """What a step is bound by of which little is lost."""
    step, known, time_s = case.step, case.foreseen, case.time_s
    kinds = [c for c in (case.report.kernels.classes if case.report.kernels else ()) if c.time_s][:2]
    said = []
    for kind in kinds:
        share = format_percent((kind.time_s or 0.0) / time_s)
        rate = _matmul_rate(known, kind.time_s or 0.0) if kind.kind == "matmul" else None
        said.append(f"{kind.kind} {share}" + (f", at {format_percent(rate)} of the GPU's peak" if rate else ""))
    of = f" ({'; '.join(said)})" if said else ""
    exposed = f", {format_percent((step.exposed_s or 0.0) / time_s)} is exposed communication" if case.rows else ""
    compute = format_percent((step.compute_s or 0.0) / time_s)
    return f"The step of {format_seconds(time_s)} is bound by compute: {compute} of it{of}{exposed}."


def _matmul_rate(known: Foreseen, time_s: float) -> float:
    """The share of the GPU's peak at which matmuls run, which take `time_s` of a step."""
    gpu, least_s = known.cluster.gpu, 0.0
    for i, times in known.schedule.walk():
        info = known.instructions.get(i.name)
        if i.cost is not None and info is not None and info.kind == "matmul":
            least_s += times * sum(n / peak_flops(gpu, dtype) for dtype, n in i.cost.matmul_flops.items())
    return least_s / known.steps / time_s
