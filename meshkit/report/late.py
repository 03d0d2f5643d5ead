"""Find devices that take longer than the median device, and split their extra time by cause.

trace -> each device's own time (its step without waiting for peers), by part -> excess over the median device

A part is an instruction, memory copies, moving data, or one of three kinds of idle time. Slower kernels have one of
three causes: the clock, if most compute-bound kernels are slower by the same factor; the memory, if only memory-bound
kernels are slower by the same factor; else single kernels, which are named. The rest is reported as not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshkit.hlo.instructions import InstructionInfo, kind_of_kernel
from meshkit.report.schema import LateKernelPart, LatePart
from meshkit.timeline import Sweep
from meshkit.trace.reader import Trace

_LEAST = 0.01  # A device is late if it is behind by at least this share of the step.
_LEAST_CAUSE = 0.1  # A cause is reported if it is at least this share of the time that the device is behind.
_LEAST_RATIO = 1.01  # Kernels are slower if they take at least this multiple of the usual device's time.
_ALIKE = 0.3  # Kernels are slower alike if their slowdowns differ from the median slowdown by at most this share.
_MOST_OF = 0.75  # To blame the clock or the memory, this share of kernels (by number and seconds) must be slower alike.
_FEWEST, _MOST_NAMED = 3, 3  # The fewest kernels to blame the clock or the memory; the most kernels that are named.
_COMPUTE_BOUND = {"matmul", "attention", "convolution"}
_MEMORY_BOUND = {"elementwise", "reduction", "data movement"}


def late_devices(
    trace: Trace, instructions: Mapping[str, InstructionInfo], steps_per_execution: int = 1
) -> dict[int, LatePart]:
    """Return each device whose own time exceeds the median by at least 1 % of the step, with the causes.

    Args:
        instructions: name of an instruction -> its kind and source.
        steps_per_execution: training steps per execution of the program; seconds in the result are per training step.

    Returns:
        Device -> why it is late; empty if the devices cannot be compared, or if there is only one.
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
            if name == "host":  # Idle time at the end of a step is not in `own`; what exceeds the usual is added.
                behind[row] += np.maximum(0.0, more)
            parts[name] = parts.get(name, 0.0) + more
        behind[row] += own - _median(own)
    of_steps = 1 / (len(entries) * steps_per_execution)
    step_s = sum(swept.total.window_s for swept in trace.sweeps) / len(trace.sweeps)
    kinds = [i.kind if (i := instructions.get(n)) else kind_of_kernel(n) for n in trace.steps.op_names]
    kinds = [""] * ops if trace.facts.cpu else kinds  # Virtual CPU devices have no clock or memory of their own.
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
    """Return the lower median over devices (the first axis): of two devices, the faster one is the usual one."""
    middle = (len(values) - 1) // 2
    return np.partition(values, middle, axis=0)[middle]


def _waited_s(swept: Sweep) -> float:
    """Return the exposed waiting for peers; if it is unknown, all exposed communication."""
    return swept.total.exposed_s if swept.exposed_wait_s is None else float(swept.exposed_wait_s.sum())


def _parts(sweeps: Sequence[Sweep], waits: np.ndarray) -> dict[str, np.ndarray]:
    idle, between, fed, copies, exposed = np.array(
        [(s.total.idle_s, s.between_s, s.input_s, s.total.other_s, s.total.exposed_s) for s in sweeps]
    ).T
    gaps = np.maximum(0.0, idle - between - fed)
    return {"launch_gaps": gaps, "host": between, "input": fed, "copies": copies, "communication": exposed - waits}


class _Kernels:
    """Compares the kernels of a late device with those of the usual device, and finds why they are slower.

    Args:
        kinds: [ops] the kind of each operation.
        seconds: [ops] seconds per step on the late device.
        usual: [ops] seconds per step on the usual device.
        least_s: a kernel with a smaller excess is not named.
    """

    def __init__(self, kinds: Sequence[str], seconds: np.ndarray, usual: np.ndarray, least_s: float):
        self.usual, self.excess = usual, seconds - usual
        bound = np.array([(kind in _COMPUTE_BOUND) - (kind in _MEMORY_BOUND) for kind in kinds])
        self.ratio = np.divide(seconds, usual, out=np.ones_like(usual), where=usual > 0)
        self.compute_bound, clock = self._alike(bound == 1)
        self.memory_bound, memory = self._alike(bound == -1)
        shared, self.causes = np.zeros_like(usual), dict[str, float]()
        if clock and self.compute_bound:  # A slow clock slows other kernels by at most the same factor.
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
        """Return the median ratio of some kernels, weighted by seconds, and whether most of them are slower alike.

        The ratio is None if there are no such kernels.
        """
        weight = np.where(which, self.usual, 0.0)
        which = which & (weight > 0.02 * weight.sum())  # The ratio of a short kernel is noise.
        if not which.any():
            return None, False
        ratio, weight = self.ratio[which], weight[which]
        order = np.argsort(ratio)
        middle = int(np.searchsorted(weight[order].cumsum(), 0.5 * weight.sum()))
        median = float(ratio[order][middle])
        near = abs(ratio - median) <= max(_LEAST_RATIO - 1, _ALIKE * (median - 1))
        share = min(float(near.mean()), float(weight[near].sum() / weight.sum()))
        return median, median >= _LEAST_RATIO and len(ratio) >= _FEWEST and share >= _MOST_OF
