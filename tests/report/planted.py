"""Write traces of 8 GPUs with planted causes: a small training step is simulated, and it is known why a device is late.

Devices go through the same kernels and collectives in order. A collective's members leave it together, once the last
has come and its data has moved. Times are microseconds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from meshkit.config.cluster import Cluster
from meshkit.hlo.schedule import Collective
from meshkit.predict.network import collective_time_s
from meshkit.trace.operations import TracedProgram, TraceFile
from tests.trace.trace_files import clock_text, collective, gpu_op, plane_text, program, write_planes

DEVICES, EXECUTIONS = 8, 9  # The last execution is not measured.
H100 = Cluster.load("dgx_h100")
SEEDS = {"seen": 20261101, "held out": 20261127}  # The second seed was fixed before any verdict was written.
EVERYWHERE: int | None = None  # This stands in place of a device.

Truth = tuple[str, int | None]  # This is a cause and its device.


@dataclass
class Plant:
    """Differences of some devices, in tables of device -> value."""

    clock: dict[int, float] = field(default_factory=dict)  # Kernels bound by compute take this many times as long.
    memory: dict[int, float] = field(default_factory=dict)  # Kernels bound by memory take this many times as long.
    kernel: dict[int, tuple[int, float]] = field(default_factory=dict)  # This kernel takes so many us longer.
    varies: float = 0.0  # By step, the kernel's excess is between 1 - this and 1 + this of it.
    data: dict[int, float] = field(default_factory=dict)  # The next input comes this late.
    gap: dict[int, float] = field(default_factory=dict)  # This gap is before each kernel.
    # Of the gathers of this group, transfers take this many times as long.
    link: dict[int, float] = field(default_factory=dict)
    # In this (step, device) the device is idle for so long.
    stall: dict[tuple[int, int], float] = field(default_factory=dict)
    # In this (step, device) all kernels take this many times as long.
    warm: dict[tuple[int, int], float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A made-up trace and what was planted in it."""

    name: str
    truth: frozenset[Truth]
    plant: Plant
    seed: int


@dataclass(frozen=True)
class Kernel:
    name: str
    us: float
    computes: bool  # The kernel is bound by arithmetic, not by memory.


class Step:
    """The kernels and collectives of one training step, drawn at random."""

    def __init__(self, draw: random.Random):
        self.group = draw.choice((4, 8))
        self.asynchronous = draw.random() < 0.5
        layers = draw.randint(2, 4)
        self.items: list[Kernel | tuple[str, Collective]] = []
        self.collectives: list[Collective] = []
        self.transfer_us: dict[str, float] = {}
        for i in range(layers):
            gather = self._gather("all-gather", f"all-gather-start.{i}", draw)
            self.items.append(("start", gather))
            if not self.asynchronous:
                self.items.append(("wait", gather))
            self.items += [
                Kernel(f"gemm_fusion_dot.{i}", draw.uniform(800, 3000), True),
                Kernel(f"cudnn_fmha.{i}", draw.uniform(300, 1200), True),
                Kernel(f"loop_multiply_fusion.{i}", draw.uniform(100, 500), False),
            ]
            if self.asynchronous:
                self.items.append(("wait", gather))
        for i in range(layers):
            self.items += [
                Kernel(f"gemm_fusion_dot.{10 + i}", draw.uniform(800, 3000), True),
                Kernel(f"cublas_gemm.{i}", draw.uniform(800, 3000), True),
                Kernel(f"input_reduce_fusion.{i}", draw.uniform(100, 500), False),
            ]
            scatter = self._gather("reduce-scatter", f"reduce-scatter.{i}", draw)
            self.items += [("start", scatter), ("wait", scatter)]
        self.items.append(Kernel("input_scatter_fusion", draw.uniform(500, 1500), False))
        if self.group < DEVICES:
            across = self._gather("all-reduce", "all-reduce-start.1", draw, size=DEVICES // self.group, axis="data")
            self.items += [("start", across), ("wait", across)]
        self.items += [Kernel(f"loop_add_fusion.{20 + i}", draw.uniform(100, 600), False) for i in range(3)]

    def _gather(self, kind: str, name: str, draw: random.Random, size: int | None = None, axis: str = "fsdp"):
        size = size or self.group
        payload = draw.randint(40, 120) * 2**20
        made = replace(collective(name, kind, axis, group_size=size, payload_bytes=payload), num_groups=DEVICES // size)
        seconds = collective_time_s(kind, payload_bytes=payload, gpus_per_domain=size, domains=1, cluster=H100)
        self.collectives.append(made)
        self.transfer_us[name] = 1e6 * seconds * draw.uniform(0.95, 1.15)
        return made

    @property
    def kernels(self) -> list[Kernel]:
        return [item for item in self.items if isinstance(item, Kernel)]

    @property
    def us(self) -> float:
        """Return about how long the step takes."""
        return sum(k.us for k in self.kernels) + sum(self.transfer_us.values()) * (0.6 if self.asynchronous else 1)

    def groups_of(self, c: Collective) -> np.ndarray:
        """Return [groups, members] of the devices that run the collective together."""
        devices = np.arange(DEVICES)
        return devices.reshape(-1, c.group_size) if c.axes == ("fsdp",) else devices.reshape(c.group_size, -1).T


def write_case(case: Case, folder: Path) -> tuple[list[TraceFile], TracedProgram]:
    """Write the trace of a case; return its files and what is known of its program."""
    draw = random.Random(case.seed)
    step = Step(draw)
    events = simulated(step, case.plant, draw)
    processes = draw.choice((1, 2))
    each = DEVICES // processes
    files = []
    for process in range(processes):
        off_us = 0 if process == 0 else draw.uniform(-3e5, -1e5)
        mine = range(process * each, (process + 1) * each)
        texts = [
            plane_text(f"/device:GPU:{i}", [(name, a - off_us, b - off_us, stats) for name, a, b, stats in events[d]])
            for i, d in enumerate(mine)
        ]
        texts.append(clock_text(10**18 + round(off_us * 1e3), 60.0))
        path = write_planes(folder / f"host{process}.xplane.pb", *texts)
        files.append(TraceFile(path, dict(enumerate(mine)), process))
    groups = {c.name: step.groups_of(c) for c in step.collectives}
    return files, program(*step.collectives, groups=groups)


def simulated(step: Step, plant: Plant, draw: random.Random) -> list[list[tuple[str, float, float, dict]]]:
    """Return [devices], the events of all executions."""
    at, free, fed = np.full(DEVICES, 1000.0), np.zeros(DEVICES), np.zeros(DEVICES)
    chip = [draw.uniform(0.998, 1.002) for _ in range(DEVICES)]
    events: list[list] = [[] for _ in range(DEVICES)]
    for number in range(EXECUTIONS):
        at = np.maximum(at, fed) + 5.0
        began, until = at.copy(), dict[str, np.ndarray]()
        kernel = 0
        for item in step.items:
            if isinstance(item, Kernel):
                for d in range(DEVICES):
                    us = item.us * chip[d] * draw.gauss(1, 0.004) * plant.warm.get((number, d), 1.0)
                    us *= (plant.clock if item.computes else plant.memory).get(d, 1.0)
                    which, more = plant.kernel.get(d, (-1, 0.0))
                    us += more * draw.uniform(1 - plant.varies, 1 + plant.varies) if which == kernel else 0.0
                    start = at[d] + draw.uniform(1, 3) + plant.gap.get(d, 0.0)
                    start += plant.stall.get((number, d), 0.0) if kernel == 3 else 0.0
                    events[d].append(gpu_op(item.name, start, start + us))
                    at[d] = start + us
                kernel += 1
                continue
            what, c = item
            if what == "wait":
                at = np.maximum(at, until[c.name])
                continue
            came, end = np.maximum(at, free) + 1.0, np.zeros(DEVICES)
            for g, members in enumerate(step.groups_of(c)):
                slow = plant.link.get(g, 1.0) if c.axes == ("fsdp",) else 1.0
                end[members] = came[members].max() + step.transfer_us[c.name] * slow * draw.gauss(1, 0.01)
            for d in range(DEVICES):
                events[d].append(gpu_op(c.name, came[d], end[d]))
            until[c.name] = free = end
        for d in range(DEVICES):
            end = at[d] + plant.data[d] if d in plant.data else began[d] + 0.5 * (at[d] - began[d])
            events[d].append(("MemcpyH2D", end - 40, end, {"memcpy_details": "kind_src:pinned"}))
            fed[d] = end
    return events


def cases(of: str) -> list[Case]:
    """Return the twenty cases of a seed; `of` is a key of `SEEDS`."""
    draw = random.Random(SEEDS[of])
    made = [*_cases(draw)]
    return [Case(f"{of} {i}: {name}", frozenset(truth), plant, seed) for i, (name, truth, plant, seed) in made]


def _cases(draw: random.Random) -> Iterator[tuple[int, tuple[str, set[Truth], Plant, int]]]:
    kinds = ["clock"] * 3 + ["kernels"] * 3 + ["input"] * 3 + ["launch_gaps"] * 3 + ["slow_link"] * 2 + ["outlier"] * 2
    kinds += ["warm_up"] * 2 + ["mixed"] * 2
    for i, kind in enumerate(kinds):
        seed = draw.randrange(2**32)
        step, plant = Step(random.Random(seed)), Plant()
        everywhere = kind in ("input", "launch_gaps") and i % 3 == 2
        if kind == "mixed":
            first, second = draw.sample(["clock", "kernels", "input", "launch_gaps", "slow_link", "warm_up"], 2)
            one, other = draw.sample(range(DEVICES), 2)
            truth = {plant_one(first, one, plant, step, draw), plant_one(second, other, plant, step, draw)}
            kind = f"{first} and {second}"
        else:
            device = EVERYWHERE if everywhere else draw.randrange(DEVICES)
            truth = {plant_one(kind, device, plant, step, draw)}
        yield i, (kind, truth, plant, seed)


def plant_one(kind: str, device: int | None, plant: Plant, step: Step, draw: random.Random) -> Truth:
    """Add one cause to a plant; return what a verdict should name."""
    devices = list(range(DEVICES)) if device is None else [device]
    much = draw.uniform(0.04, 0.12) * step.us
    if kind == "clock":
        ratio = draw.uniform(1.05, 1.15)
        for d in devices:
            plant.clock[d], plant.memory[d] = ratio, 1 + (ratio - 1) * draw.uniform(0, 0.4)
    elif kind == "kernels":
        which = draw.randrange(len(step.kernels))
        plant.varies = draw.choice((0.0, 0.6))
        plant.kernel |= dict.fromkeys(devices, (which, much))
    elif kind == "input":
        plant.data |= dict.fromkeys(devices, much)
    elif kind == "launch_gaps":
        plant.gap |= dict.fromkeys(devices, much / len(step.kernels))
    elif kind == "slow_link":
        groups = range(DEVICES // step.group) if draw.random() < 0.5 else [0]
        plant.link |= dict.fromkeys(groups, draw.uniform(2.5, 4.0))
        return kind, EVERYWHERE
    elif kind == "outlier":
        plant.stall[draw.randrange(2, EXECUTIONS - 2), draw.randrange(DEVICES)] = draw.uniform(0.7, 6) * step.us
        return kind, EVERYWHERE
    elif kind == "warm_up":
        late = draw.randrange(DEVICES)
        plant.stall[0, draw.randrange(DEVICES)] = draw.uniform(0.2, 20) * step.us
        for number in range(draw.choice((1, 2))):
            plant.warm[number, late] = draw.uniform(1.05, 1.5)
        return kind, EVERYWHERE
    return kind, device
