"""Check whether a predicted time covers all work of its program, for the warnings of a plan.

- The FLOP of the compiled program are compared with the FLOP of the traced program.
- Some prices rest on an assumption, such as those of custom calls and of loops of unknown length.
- XLA may run kernels twice because it counts more memory than a program may use. Its rematerialization pass clones
  instructions as `NAME.remat`, `NAME.remat2.1`, ... before it knows how buffers share memory, so it may clone them in a
  program that would fit anyway. If the pass cannot stay below the limit, it logs the bytes that it counted.
- Very small kernels take longer than their price: in a recorded training step the smallest kernels take `least_s`
  (catalog), whatever their work. A step of mostly such kernels takes longer than predicted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshkit.config import catalog
from meshkit.config.cluster import Gpu
from meshkit.hlo.pipeline_report import useful_flops
from meshkit.hlo.schedule import Instruction, Schedule
from meshkit.predict.kernels import precision_of
from meshkit.predict.simulate import Simulation
from meshkit.timeline import Timeline
from meshkit.units import format_count

_MOST = 0.01  # XLA removes and adds a few FLOP: it peels a first layer off a loop, or saves a recomputation.
# A difference in FLOP is ignored if a GPU at its peak rate needs less than this share of the step's time for it. XLA
# turns products with a vector, and tiny products, into sums and elementwise kernels: these have a price, but no FLOP.
_LEAST = 0.001
_RAGGED = "ragged_dot"  # The name of jax's primitive, in the source of its instructions.

NOT_PREDICTED = "flops"
LAUNCH_BOUND, UNKNOWN_TRIPS = "launch_bound", "unknown_trip_count"  # warnings: the step takes longer than predicted
REPEATED = "repeated_work"
DENSE = "ragged_dot"  # The code of a warning: ragged matmuls were made dense.


@dataclass(frozen=True)
class FlopNote:
    """The note that a compiled program does more or less work than the traced program."""

    code: str
    """`flops`: the compiled program executes less, so part of it has no price, and the step time is not a prediction.
    `repeated_work` or `ragged_dot`: it executes more, and the predicted step includes all of it."""
    message: str
    names: tuple[str, ...] = ()
    """Instructions that execute more than needed."""
    share: float = 0.0
    """The share of the FLOP of `names` that is not needed."""


def flop_note(
    schedule: Schedule, traced: float | None, num_gpus: int, *, step_s: float, peak_flops: float, recomputed: bool
) -> FlopNote | None:
    """Return a note if a compiled program does more or less work than the traced program; None if they agree.

    Args:
        traced: executed FLOP over all GPUs, as `compile.traced` counts them; None if unknown.
        step_s: seconds of the whole program.
        peak_flops: the highest peak of a GPU, FLOP/s.
        recomputed: whether XLA recomputes part of the program to save memory.
    """
    if not traced:
        return None
    compiled, expected = useful_flops(schedule), traced / num_gpus
    difference = compiled / expected - 1.0
    if abs(difference) <= _MOST or abs(compiled - expected) < _LEAST * step_s * peak_flops:
        return None
    counts = (
        f"the compiled program executes {format_count(compiled)}FLOP of matmuls per GPU, the traced one needs "
        f"{format_count(expected)}FLOP ({difference:+.1%})"
    )
    if difference < 0:
        why = "part of the compiled program has no price, so the step takes longer than the stated time"
        return FlopNote(NOT_PREDICTED, f"{counts}: {why}")
    more = compiled - expected
    ragged = [(i, times) for i, times in schedule.walk() if _RAGGED in i.source and _flops_of(i)]
    dense = sum(_flops_of(i) * times for i, times in ragged)
    if dense >= more:
        why = (
            "XLA:GPU makes ragged matmuls (lax.ragged_dot) dense, so a GPU multiplies each row by the weights of all "
            "its groups; for a mixture of experts try one expert per GPU (a longer expert axis), a capacity_factor, or "
            "a grouped kernel that is not dense: jax.experimental.pallas.ops.gpu.ragged_dot_mgpu or tokamax.ragged_dot"
        )
        return FlopNote(DENSE, f"{counts}: {why}", tuple(i.name for i, _ in ragged), more / dense)
    why = "GPUs repeat each other's work: a matmul is not sharded over every axis that shards its batch or its weights"
    if recomputed:
        why = "XLA recomputes some of it to stay within the memory"
    every = tuple(i.name for i, _ in schedule.walk() if _flops_of(i))
    return FlopNote(REPEATED, f"{counts}: {why}", every, more / compiled)


def dequantized_note(schedule: Schedule, gpu: Gpu, wanted: float) -> str | None:
    """Return a note if XLA dequantizes operands of block-scaled matmuls, which it does silently; None if it does not.

    Args:
        wanted: FLOP of block-scaled matmuls that one GPU should execute.
    """
    scaled = 0.0
    for i, times in schedule.walk():
        for dtype, flops in (i.cost.matmul_flops if i.cost else {}).items():
            scaled += times * flops * (precision_of(gpu, dtype) in ("mxfp8", "nvfp4"))
    if scaled >= wanted * (1.0 - _MOST):
        return None
    why = (
        "this XLA made no block-scaled kernels for them"
        if "mxfp8" in gpu.peak_flops
        else f"{gpu.name} has no block-scaled kernels"
    )
    return (
        f"{1.0 - scaled / wanted:.0%} of the FLOP of block-scaled matmuls run in bf16 or fp32: {why}. The step "
        'quantizes their operands, and XLA dequantizes them again; train.precision = "bf16" saves both, and a GPU with '
        "MXFP8 matmuls (B200, GB200) runs them as asked"
    )


def _flops_of(i: Instruction) -> float:
    return sum(i.cost.matmul_flops.values()) + i.cost.attention_flops if i.cost else 0.0


@dataclass(frozen=True)
class Launches:
    """Kernels of a step whose price is below the shortest time of any kernel (`least_s`)."""

    kernels: int
    """Their number; a kernel in a loop counts in each iteration."""
    seconds: float
    """Seconds that they take in addition to their price."""


def short_kernels(simulation: Simulation) -> Launches:
    """Return how many kernels are priced below the shortest time of any kernel, and the seconds missing in total."""
    compute = simulation.timeline.steps[0].compute
    missing = float(catalog.kernels()["least_s"]) - (compute[:, 1] - compute[:, 0])
    short = missing > 0
    return Launches(int(np.count_nonzero(short)), float(missing[short].sum()))


REMATERIALIZED = "xla_rematerialization"
_CLONE = re.compile(r"\.remat\d*(\.\d+)*$")
_COUNTED = re.compile(r"rematerialization;.*down from \S+ \((\d+) bytes\)")


@dataclass(frozen=True)
class Rematerialized:
    """Kernels that run again because of XLA's rematerialization."""

    kernels: int
    seconds: float
    """Seconds of these repeated runs in one run of the program."""
    counted_bytes: int | None
    """Bytes that XLA counted before the pass; None if it logged nothing, because it stayed within the limit."""


def rematerialized(simulation: Simulation, log: Sequence[str]) -> Rematerialized:
    """Return the repeated kernels of XLA's rematerialization that take time.

    Of an original kernel and its clones one run is needed, so the first of them is not counted.

    Args:
        log: the compiler's log lines.
    """
    families: dict[str, list[tuple[bool, float]]] = {}  # Original -> (whether it is a clone, seconds) of each.
    for name, s in kernel_seconds_by_name(simulation.timeline).items():
        families.setdefault(_CLONE.sub("", name), []).append((_CLONE.search(name) is not None, s))
    seconds = [s for found in families.values() for clone, s in sorted(found)[1:] if clone and s > 0]
    counted = next((int(found[1]) for line in log if (found := _COUNTED.search(line))), None)
    return Rematerialized(len(seconds), sum(seconds), counted)


def unpriced_seconds(simulation: Simulation, *, steps: int = 1) -> Mapping[str, float]:
    """Return kind of note -> priced seconds per training step of the instructions that it names, if greater than 0."""
    names = {kind: {n.partition(" (")[0] for n in noted} for kind, noted in simulation.notes.items()}
    seconds = {**simulation.noted_s, **kernel_seconds_by_name(simulation.timeline)}
    found = {kind: sum(seconds.get(n, 0.0) for n in noted) / steps for kind, noted in names.items()}
    return {kind: value for kind, value in found.items() if value > 0}


def kernel_seconds_by_name(timeline: Timeline) -> Mapping[str, float]:
    """Return instruction name -> seconds of all its runs in a simulated timeline."""
    step, names = timeline.steps[0], timeline.op_names
    durations = step.compute[:, 1] - step.compute[:, 0]
    totals = np.bincount(step.compute_op, weights=durations, minlength=len(names))
    found: defaultdict[str, float] = defaultdict(float)
    for name, seconds in zip(names, totals.tolist()):
        found[name] += seconds
    return found
