"""Splits what late devices do longer than the usual one by cause.

trace -> each device's own time (its step without waiting for peers) by part -> what exceeds the median device

A part is an instruction, memory copies, moving data, or one of three kinds of idle time. Slower kernels are put down to
the clock where the compute-bound ones are slower alike, to the memory where only the memory-bound ones are; otherwise
they are named. What remains is reported as not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshkit.hlo.instructions import InstructionInfo, kind_of_kernel
from meshkit.report.schema import LateKernelPart, LatePart
from meshkit.timeline import Sweep
from meshkit.trace.reader import Trace

_LEAST = 0.01  # A device is late from this share of the step.
_LEAST_CAUSE = 0.1  # A cause is named from this share of what the device is behind.
_LEAST_RATIO = 1.01  # Kernels whose seconds are below this multiple of the usual device's take the same time.
_ALIKE = 0.3  # Slowdowns within this share of each other are alike.
_MOST_OF = 0.75  # This share of the kernels, by number and by seconds, must be slower alike to blame a clock.
_FEWEST, _MOST_NAMED = 3, 3  # Kernels that it takes to blame a clock, and kernels that are named.
_COMPUTE_BOUND = {"matmul", "attention", "convolution"}
_MEMORY_BOUND = {"elementwise", "reduction", "data movement"}


def late_devices(
    trace: Trace, instructions: Mapping[str, InstructionInfo], steps_per_execution: int = 1
) -> dict[int, LatePart]:
    """Return the devices whose own time exceeds the usual one's by 1 % of the step or more, and why, in seconds a step.

    Returns:
        An empty dict where the devices cannot be compared, or there is only one.
    """
    entries: dict[int, dict[int, int]] = {}
    for i, step in enumerate(trace.steps.steps):
        entries.setdefault(step.step, {})[step.device] = i
    devices = sorted({step.device for step in trace.steps.steps})
    if len(devices) < 2 or trace.incomparable(""):
        return {}
    ops = len(trace.steps.op_names)
    behind = np.zeros((len(entries), len(devices)))
    parts: dict[str, np.ndarray] = {}
    kernels, usual = np.zeros((len(devices), ops)), np.zeros(ops)
    least, most = np.full((len(devices), ops), np.inf), np.zeros((len(devices), ops))
    for row, of in enumerate(entries.values()):
        sweeps = [trace.sweeps[of[d]] for d in devices]
        seconds = np.stack([np.pad(s, (0, ops - len(s))) for s in (trace.kernel_s[of[d]] for d in devices)])
        median, waits = _median(seconds), np.array([_waited_s(swept) for swept in sweeps])
        kernels, usual = kernels + seconds, usual + median
        least, most = np.minimum(least, seconds), np.maximum(most, seconds)
        own = np.array([s.total.window_s - s.between_s for s in sweeps]) - waits
        for name, values in _parts(sweeps, waits).items():
            more = values - _median(values)
            if name == "host":  # A device that waits for its own host at the end of a step is not early by that.
                behind[row] += np.maximum(0.0, more)
            parts[name] = parts.get(name, 0.0) + more
        behind[row] += own - _median(own)
    of_steps = 1 / (len(entries) * steps_per_execution)
    step_s = sum(swept.total.window_s for swept in trace.sweeps) / len(trace.sweeps)
    kinds = [i.kind if (i := instructions.get(n)) else kind_of_kernel(n) for n in trace.steps.op_names]
    kinds = [""] * ops if trace.facts.cpu else kinds  # Virtual devices have no clock of their own.
    found = {}
    for d, device in enumerate(devices):
        if behind[:, d].mean() < _LEAST * step_s:
            continue
        behind_s = float(behind[:, d].sum()) * of_steps
        split = _Kernels(kinds, kernels[d] * of_steps, usual * of_steps, _LEAST_CAUSE * behind_s)
        causes = {name: float(seconds[d]) * of_steps for name, seconds in parts.items()} | split.causes
        named = {n: s for n, s in causes.items() if s >= _LEAST_CAUSE * behind_s}
        if (rest := behind_s - sum(named.values())) >= _LEAST_CAUSE * behind_s:
            named["not_known"] = rest
        found[device] = LatePart(
            behind_s=behind_s,
            late_share=float((behind[:, d] >= 0.5 * _LEAST * step_s).mean()),
            causes=dict(sorted(named.items(), key=lambda item: -item[1])),
            compute_bound_ratio=split.compute_bound,
            memory_bound_ratio=split.memory_bound,
            kernels=tuple(
                LateKernelPart(
                    name=trace.steps.op_names[i],
                    line=info.line if (info := instructions.get(trace.steps.op_names[i])) else None,
                    excess_s=float(split.excess[i]),
                    usual_s=float(split.usual[i]),
                    least_s=float(least[d, i]) / steps_per_execution,
                    most_s=float(most[d, i]) / steps_per_execution,
                )
                for i in split.named
            ),
        )
    return found


def _median(values: np.ndarray) -> np.ndarray:
    """Return the lower median over devices, the first axis, so that of two devices the faster one is usual."""
    middle = (len(values) - 1) // 2
    return np.partition(values, middle, axis=0)[middle]


def _waited_s(swept: Sweep) -> float:
    """Return the exposed waiting for peers; where it is not known, all exposed communication."""
    return swept.total.exposed_s if swept.exposed_wait_s is None else float(swept.exposed_wait_s.sum())


def _parts(sweeps: Sequence[Sweep], waits: np.ndarray) -> dict[str, np.ndarray]:
    idle, between, fed, copies, exposed = np.array(
        [(s.total.idle_s, s.between_s, s.input_s, s.total.other_s, s.total.exposed_s) for s in sweeps]
    ).T
    gaps = np.maximum(0.0, idle - between - fed)
    return {"launch_gaps": gaps, "host": between, "input": fed, "copies": copies, "communication": exposed - waits}


class _Kernels:
    """Compares the kernels of a device with the usual one's, and finds why they are slower.

    Args:
        kinds: [ops] the kind of each operation.
        seconds: [ops] seconds a step on the device; `usual` on the usual one.
        least_s: a kernel with a smaller excess is not named.
    """

    def __init__(self, kinds: Sequence[str], seconds: np.ndarray, usual: np.ndarray, least_s: float):
        self.usual, self.excess = usual, seconds - usual
        bound = np.array([(kind in _COMPUTE_BOUND) - (kind in _MEMORY_BOUND) for kind in kinds])
        self.ratio = np.divide(seconds, usual, out=np.ones_like(usual), where=usual > 0)
        self.compute_bound, clock = self._alike(bound == 1)
        self.memory_bound, memory = self._alike(bound == -1)
        shared, self.causes = np.zeros_like(usual), dict[str, float]()
        if clock and self.compute_bound:  # A slow clock slows other kernels at most as much.
            as_slow = usual * (self.compute_bound - 1)
            near = (bound == 1) & (self.excess <= (1 + _ALIKE) * as_slow)
            shared = np.where(near, self.excess, np.clip(self.excess, 0.0, as_slow))
            self.causes["clock"] = float(shared.sum())
        elif memory and self.compute_bound and self.compute_bound < _LEAST_RATIO:
            shared = np.where(bound == 1, 0.0, np.clip(self.excess, 0.0, usual * ((self.memory_bound or 1.0) - 1)))
            self.causes["memory"] = float(shared.sum())
        own = self.excess - shared
        self.named = [i for i in np.argsort(-own)[:_MOST_NAMED].tolist() if own[i] >= least_s]
        self.causes["kernels"] = float(own[self.named].sum())

    def _alike(self, which: np.ndarray) -> tuple[float | None, bool]:
        """Return the median ratio of some kernels by seconds (None without any), and whether most are slower alike."""
        weight = np.where(which, self.usual, 0.0)
        which = which & (weight > 0.02 * weight.sum())  # Short kernels say little.
        if not which.any():
            return None, False
        ratio, weight = self.ratio[which], weight[which]
        order = np.argsort(ratio)
        middle = int(np.searchsorted(weight[order].cumsum(), 0.5 * weight.sum()))
        median = float(ratio[order][middle])
        near = abs(ratio - median) <= max(_LEAST_RATIO - 1, _ALIKE * (median - 1))
        share = min(float(near.mean()), float(weight[near].sum() / weight.sum()))
        return median, median >= _LEAST_RATIO and len(ratio) >= _FEWEST and share >= _MOST_OF
