"""FLOP of the compiled program beside those of the traced one: whether a prediction may be trusted. Layer 5; no jax."""

from __future__ import annotations

from collections.abc import Mapping

from meshkit.units import format_count

_MOST = 0.01  # XLA drops and adds a little: a first layer that is peeled off a loop, a recomputation it saves


def flop_note(
    executed: Mapping[str, float], traced: float | None, num_gpus: int, *, recomputed: bool = False
) -> str | None:
    """What a reader must know where a compiled program does other work than the traced one; None where it agrees.

    Args:
        executed: dtype -> FLOP of matmuls and attention that one GPU executes.
        traced: over all GPUs, of `xla.traced.traced_flops`; None where unknown.
        num_gpus: that share the work.
        recomputed: whether XLA recomputes some of it to save memory.
    """
    if not traced:
        return None
    compiled, expected = sum(executed.values()), traced / num_gpus
    difference = compiled / expected - 1.0
    if abs(difference) <= _MOST:
        return None
    counts = f"the compiled program executes {format_count(compiled)}FLOP of matmuls per GPU, the traced one needs"
    if difference > 0 and recomputed:
        why = "XLA recomputes some to keep within the memory"
    elif difference > 0:
        why = "GPUs repeat each other's work: some dim is not cut over every axis that cuts its batch or its weights"
    else:
        why = "not all of the compiled program is priced, so the step is longer than this"
    return f"{counts} {format_count(expected)}FLOP ({difference:+.1%}): {why}."
