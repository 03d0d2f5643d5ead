"""What a simulated step prices by less than it knows: custom calls, side streams, loops of unknown length."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from meshkit.predict.simulate import Simulation

# A custom call is priced by the memory it moves; its FLOP are unknown.
BY_BYTES = "opaque custom call"


def unpriced_seconds(simulation: Simulation, *, steps: int = 1) -> Mapping[str, float]:
    """Kind of note -> seconds a step of what it names: the least that they take.

    Args:
        simulation: of a program.
        steps: training steps that it makes.
    """
    names = {kind: {n.partition(" (")[0] for n in noted} for kind, noted in simulation.notes.items()}
    seconds = {**simulation.noted_s, **kernel_seconds_by_name(simulation)}
    found = {kind: sum(seconds.get(n, 0.0) for n in noted) / steps for kind, noted in names.items()}
    return {kind: value for kind, value in found.items() if value > 0}


def unpriced_share(simulation: Simulation) -> float:
    """Share of the step's time in kernels whose FLOP are unknown."""
    start, end = simulation.timeline.steps[0].window
    return unpriced_seconds(simulation).get(BY_BYTES, 0.0) / max(end - start, 1e-30)


def kernel_seconds_by_name(simulation: Simulation) -> Mapping[str, float]:
    """Instruction name -> seconds of all its runs."""
    step, names = simulation.timeline.steps[0], simulation.timeline.op_names
    durations = step.compute[:, 1] - step.compute[:, 0]
    totals = np.bincount(step.compute_op, weights=durations, minlength=len(names))
    found: dict[str, float] = {}
    for name, seconds in zip(names, totals.tolist()):
        found[name] = found.get(name, 0.0) + seconds
    return found
