"""FLOP of the compiled program beside those of the traced one: whether a prediction may be trusted."""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.hlo.schedule import Instruction, Schedule
from meshkit.units import format_count

_MOST = 0.01  # XLA drops and adds a little: a first layer that is peeled off a loop, a recomputation it saves
# Of the step: what would be less than this even on a GPU at its peak changes no number. XLA turns products with a
# vector, and tiny ones, into sums and elementwise kernels, which have their price but no matmul.
_LEAST = 0.001
_RAGGED = "ragged_dot"

NOT_PREDICTED = "flops"
REPEATED = "repeated_work"
DENSE = "ragged_dot"


@dataclass(frozen=True)
class FlopNote:
    """That a compiled program does other work than the traced one.

    Attributes:
        code: `flops`: it executes less, so that not all of it was read and the step is no prediction;
            `repeated_work` or `ragged_dot`: it executes more, and the step has it all.
        message: in one sentence.
        names: of instructions that execute more than needed.
        share: of their FLOP.
    """

    code: str
    message: str
    names: tuple[str, ...] = ()
    share: float = 0.0


def executed_flops(schedule: Schedule, name: str | None = None) -> float:
    """FLOP of matmuls and attention that one GPU executes; of a conditional those of the branch with the most."""
    total = 0.0
    for i in schedule.computations.get(name or schedule.entry, ()):
        total += _flops_of(i)
        inside = [executed_flops(schedule, body) for body in i.bodies]
        times = 1 if i.trip_count is None else i.trip_count
        total += times * max(inside, default=0.0)
    return total


def flop_note(
    schedule: Schedule, traced: float | None, num_gpus: int, *, step_s: float, peak_flops: float, recomputed: bool
) -> FlopNote | None:
    """What a reader must know where a compiled program does other work than the traced one; None where it agrees.

    Args:
        schedule: of the compiled program.
        traced: over all GPUs, of `xla.traced.traced_flops`; None where unknown.
        num_gpus: that share the work.
        step_s: of the whole program.
        peak_flops: the highest of a GPU, FLOP/s.
        recomputed: whether XLA recomputes some of it to save memory.
    """
    if not traced:
        return None
    compiled, expected = executed_flops(schedule), traced / num_gpus
    difference = compiled / expected - 1.0
    if abs(difference) <= _MOST or abs(compiled - expected) < _LEAST * step_s * peak_flops:
        return None
    counts = (
        f"the compiled program executes {format_count(compiled)}FLOP of matmuls per GPU, the traced one needs "
        f"{format_count(expected)}FLOP ({difference:+.1%})"
    )
    if difference < 0:
        why = "not all of the compiled program is priced, so the step time is no prediction: it takes longer"
        return FlopNote(NOT_PREDICTED, f"{counts}: {why}")
    more = compiled - expected
    ragged = [(i, times) for i, times in schedule.walk() if _RAGGED in i.source and _flops_of(i)]
    dense = sum(_flops_of(i) * times for i, times in ragged)
    if dense >= more:
        why = (
            "XLA:GPU makes ragged matmuls (lax.ragged_dot) dense, so each row meets every group of its GPU; for "
            "experts try one a GPU (a longer expert axis), or a capacity_factor"
        )
        return FlopNote(DENSE, f"{counts}: {why}", tuple(i.name for i, _ in ragged), more / dense)
    why = "GPUs repeat each other's work: some dim is not cut over every axis that cuts its batch or its weights"
    if recomputed:
        why = "XLA recomputes some to keep within the memory"
    every = tuple(i.name for i, _ in schedule.walk() if _flops_of(i))
    return FlopNote(REPEATED, f"{counts}: {why}", every, more / compiled)


def _flops_of(i: Instruction) -> float:
    return sum(i.cost.matmul_flops.values()) + i.cost.attention_flops if i.cost else 0.0
