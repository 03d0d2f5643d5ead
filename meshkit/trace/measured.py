"""Measured kernels in place of modelled ones: their seconds by instruction, their rates by class.

A rehearsal captures the kernels of a program whose collectives did nothing; simulated with them, a step has measured
compute and modelled communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from meshkit.config.calibration import Rates
from meshkit.config.cluster import Cluster
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.assumptions import Assumptions
from meshkit.predict.kernels import attention_share, matmul_share, precision_of
from meshkit.predict.pricing import Pricer
from meshkit.trace.reader import Trace


def kernel_runs(trace: Trace, schedule: Schedule | None) -> dict[str, float]:
    """Instruction -> how often an execution ran it, as a mean over the captured steps.

    A trace counts kernels, and one instruction may be several: cuDNN's attention backward three, a sort some dozens. So
    the program says how often; where it does not know, or where the trace has lost kernels, each kernel is one run.
    """
    known = schedule.known_runs() if schedule is not None else {}
    counts = zip(trace.timeline.op_names, trace.kernels.count.tolist())
    return {name: min(count, known.get(name, count)) for name, count in counts if count > 0}


def kernel_seconds(trace: Trace, schedule: Schedule | None) -> dict[str, float]:
    """Instruction -> mean seconds of one run of it, all its kernels together, over the captured steps."""
    busy = dict(zip(trace.timeline.op_names, trace.kernels.busy_s.tolist()))
    return {name: busy[name] / runs for name, runs in kernel_runs(trace, schedule).items()}


class MeasuredKernels:
    """Seconds of an instruction: measured kernels, and the models for collectives and copies.

    Attributes:
        missing: kernels that no step of the trace has, with what the kernel model says of them.
    """

    def __init__(self, times: Mapping[str, float], cluster: Cluster):
        self._times, self._model = times, Pricer(cluster, Assumptions(contention=False, slowest=False))
        self.missing: dict[str, float] = {}
        self.known_s = 0.0

    def __call__(self, i: Instruction) -> float:
        if i.collective is not None:
            return self._model.collective_s(i)
        if i.kind == "kernel" and (measured := self._times.get(i.name)) is not None:
            self.known_s += measured
            return measured
        seconds = _alone(self._model, i)
        if i.kind == "kernel":
            self.missing[i.name] = seconds
        return seconds


def _alone(model: Pricer, i: Instruction) -> float:
    work = model.work(i)
    return max(work.arithmetic_s, work.memory_s, work.host_s)


def rates_of(schedule: Schedule, times: Mapping[str, float], cluster: Cluster) -> Rates:
    """Sustained rates of the kernels, by class, as those of large ones: work of all of them over the time that it took.

    Matmuls count where they are nothing else, attention forward and backward; what multiplies nothing gives the rate of
    memory. A class without a kernel has none.
    """
    matmul: dict[str, list[float]] = {}
    attention: dict[str, list[float]] = {}
    memory = [0.0, 0.0]
    for instructions in schedule.computations.values():
        for i in instructions:
            if i.cost is None or i.kind != "kernel" or (seconds := times.get(i.name)) is None:
                continue
            if i.cost.attention_flops:
                flops = i.cost.attention_flops / attention_share(i.cost, cluster.gpu)  # as the model multiplies it back
                _add(attention, "backward" if i.cost.attention_backward else "forward", flops, seconds)
            elif len(i.cost.matmul_flops) == 1:
                ((dtype, flops),) = i.cost.matmul_flops.items()
                _add(matmul, precision_of(cluster.gpu, dtype), flops / matmul_share(i.cost, cluster.gpu), seconds)
            elif not i.cost.matmul_flops and i.cost.bytes_accessed:
                memory[0] += i.cost.bytes_accessed
                memory[1] += seconds
    return Rates(
        matmul_flops_per_s={name: flops / seconds for name, (flops, seconds) in matmul.items() if seconds},
        attention_flops_per_s={name: flops / seconds for name, (flops, seconds) in attention.items() if seconds},
        memory_bytes_per_s=memory[0] / memory[1] if memory[1] else None,
    )


def _add(sums: dict[str, list[float]], name: str, work: float, seconds: float) -> None:
    total = sums.setdefault(name, [0.0, 0.0])
    total[0] += work
    total[1] += seconds


def collectives_of_schedule(schedule: Schedule) -> Counter:
    """How often a program communicates what: (collective, axes, dtype, bytes) -> count, loops multiplied out."""
    found: Counter = Counter()
    for i, times in schedule.walk():
        if (c := i.collective) is not None:
            found[(c.collective, c.axes, c.dtype, c.payload_bytes)] += times
    return found
