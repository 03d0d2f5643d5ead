"""What computes, by kind of work, and which instructions of it take the most time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshkit.hlo.instructions import InstructionInfo
from meshkit.report.parts import KernelClassPart, KernelPart, KernelsPart
from meshkit.timeline import KernelTotals

UNMAPPED = "unmapped"
_MAX_OPS = 25  # a kind's instructions that are kept by name; the rest are in its sums


def kernels_part(
    op_names: Sequence[str],
    totals: KernelTotals,
    instructions: Mapping[str, InstructionInfo],
    *,
    steps_per_execution: int = 1,
) -> KernelsPart | None:
    """Compute by kind, as means over the device steps; None where nothing is known of the kernels.

    The seconds of a kind are shares, as those of communication rows are: an instant at which k operations run gives 1/k
    to each, so that they add up to the step's `compute_s`.

    Args:
        op_names: names of instructions, or of kernels that could not be joined to one.
        totals: what each took, as means over executions of the program.
        instructions: what they are.
        steps_per_execution: training steps in each execution.
    """
    if not op_names or not instructions:
        return None
    known = [instructions.get(name) for name in op_names]
    kinds = list(dict.fromkeys(info.kind if info else UNMAPPED for info in known))
    kind_of_op = np.array([kinds.index(info.kind if info else UNMAPPED) for info in known], np.intp)
    time_s, busy_s, count = (
        np.pad(v, (0, len(known) - len(v))) / steps_per_execution for v in (totals.time_s, totals.busy_s, totals.count)
    )
    classes = [
        KernelClassPart(
            kind=kind,
            count=_whole(float(count[kind_of_op == k].sum())),
            time_s=float(time_s[kind_of_op == k].sum()),
            busy_s=float(busy_s[kind_of_op == k].sum()),
            ops=_ops(op_names, known, np.flatnonzero(kind_of_op == k), busy_s, count),
        )
        for k, kind in enumerate(kinds)
    ]
    return KernelsPart(classes=tuple(sorted((c for c in classes if c.count), key=lambda c: -(c.time_s or 0))))


def _ops(
    op_names: Sequence[str], known: Sequence[InstructionInfo | None], members: np.ndarray, busy_s, count
) -> tuple[KernelPart, ...]:
    """The instructions of one kind with the most busy seconds; what has the same name is one."""
    by_name: dict[str, list[int]] = {}
    for i in members:
        by_name.setdefault(op_names[int(i)], []).append(int(i))
    parts = []
    for name, indices in by_name.items():
        info = known[indices[0]]
        parts.append(
            KernelPart(
                name=name,
                key=info.key if info else None,
                source=(info.source or None) if info else None,
                line=info.line if info else None,
                count=_whole(float(count[indices].sum())),
                busy_s=float(busy_s[indices].sum()),
            )
        )
    return tuple(sorted((p for p in parts if p.count), key=lambda p: (-(p.busy_s or 0), p.name))[:_MAX_OPS])


def _whole(x: float) -> int | float:
    nearest = round(x)
    return nearest if abs(x - nearest) <= 1e-9 * max(1.0, abs(x)) else x
