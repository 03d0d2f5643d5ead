"""One case of bench, a collective of one size over one axis: compiled, verified against numpy, timed.

All groups along the axis run at once, as in a training step. A small collective is repeated inside the program, where
a barrier of the compiler keeps the repetitions apart, so that the time of a launch does not hide that of the wire.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.units import GIB, MIB
from meshkit.verbs.bench.collectives import Kind, Place, make_operand

DTYPE = "float32"
ITEM_BYTES = 4
_MOST_LOOPS = 32
_LOOP_BYTES = {"cpu": 2 * MIB, "gpu": 512 * MIB}  # a program shall move about this much
_MOST_CHECKED = 2**20  # elements of a device's result; of a larger one every k-th
_ROUND, _MOST_RUNS = 3, 21  # runs between two looks at the clock, and in all

Program = Callable[[jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Case:
    """A collective of one size over one axis."""

    kind: Kind
    axis: str | None
    """The mesh axis; None for a copy, which stays on its device."""
    group_size: int
    """GPUs of a group."""
    size_bytes: int
    """Size as nccl-tests has it: a whole number of elements, and of pieces."""

    @property
    def count(self) -> int:
        """Elements as nccl-tests counts them: of a piece where the buffer is cut."""
        return self.size_bytes // ITEM_BYTES // (self.group_size if self.kind.is_split else 1)

    @property
    def operand_elements(self) -> int:
        """Elements that one device gives."""
        return self._elements(self.kind.gives)

    @property
    def result_elements(self) -> int:
        """Elements that one device takes."""
        return self._elements(self.kind.takes)

    def _elements(self, part: str) -> int:
        return self.count * (self.group_size if self.kind.is_split and part == "whole" else 1)


@dataclass(frozen=True)
class CaseTiming:
    """What a case came to: seconds of one collective, and the check of its result over all devices."""

    time_s: float
    runs: int
    wrong: int
    checked: int


def make_case(kind: Kind, axis: str | None, group_size: int, size_bytes: int) -> Case:
    """The case nearest to a size: rounded down to whole pieces, one element at least."""
    unit = ITEM_BYTES * (group_size if kind.is_split else 1)
    size_bytes = ITEM_BYTES if kind.is_barrier else max(1, size_bytes // unit) * unit
    return Case(kind, axis, group_size, size_bytes)


def measure(mesh: jax.sharding.Mesh, case: Case, *, budget_s: float) -> CaseTiming:
    """Runs a case for about `budget_s`; its time is the median of the runs, on virtual CPU devices the shortest one.

    Every process of the job must call it with the same arguments.
    """
    loops = _loops(case, mesh)
    program = _program(mesh, case, loops)
    x = operand(mesh, case.operand_elements)
    result = jax.block_until_ready(program(x, operand(mesh, case.result_elements)))
    wrong, checked = _verify(mesh, case, result)
    result, _ = _run_s(program, x, result)  # warm
    times_s: list[float] = []
    enough = False
    while not enough:
        for _ in range(_ROUND):
            result, time_s = _run_s(program, x, result)
            times_s.append(time_s)
        # all processes must run the same number of times, else they wait for each other for ever: the first one says it
        enough = bool(gather([float(sum(times_s) >= budget_s or len(times_s) >= _MOST_RUNS)])[0, 0])
    found = gather([_typical_s(times_s, platform_of(mesh.devices.flat[0])) / loops, wrong, checked])
    return CaseTiming(float(found[:, 0].max()), len(times_s), int(found[:, 1].sum()), int(found[:, 2].sum()))


def _typical_s(times_s: list[float], platform: str) -> float:
    """The median on GPUs. Virtual CPU devices share cores with all else on the machine, which can only add time."""
    return float(np.min(times_s) if platform == "cpu" else np.median(times_s))


def platform_of(device: Any) -> str:
    """`cpu` or `gpu`."""
    return "cpu" if device.platform == "cpu" else "gpu"


def gather(values: list[float]) -> np.ndarray:
    """[processes, values] what each process has."""
    mine = np.asarray(values, np.float32)
    if jax.process_count() == 1:
        return mine[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(mine))


def operand(mesh: jax.sharding.Mesh, elements: int) -> jax.Array:
    """Every device's operand as one array, sharded over all axes."""
    return _operand_maker(mesh, elements)()


@functools.lru_cache(maxsize=64)
def _operand_maker(mesh: jax.sharding.Mesh, elements: int) -> Callable[[], jax.Array]:
    axes = mesh.axis_names
    spec = PartitionSpec(axes)
    made = jax.shard_map(
        lambda: make_operand(lax.axis_index(axes), elements), mesh=mesh, in_specs=(), out_specs=spec, check_vma=False
    )
    return jax.jit(made, out_shardings=NamedSharding(mesh, spec))


def _loops(case: Case, mesh: jax.sharding.Mesh) -> int:
    return int(np.clip(_LOOP_BYTES[platform_of(mesh.devices.flat[0])] // case.size_bytes, 1, _MOST_LOOPS))


def _program(mesh: jax.sharding.Mesh, case: Case, loops: int) -> Program:
    """(operand, buffer) -> result, written into the buffer: memory is neither allocated nor first touched in it."""

    def again(_, carry):
        # the operand waits for the last result, so that the compiler can neither drop nor merge nor hoist a repetition
        x, _ = lax.optimization_barrier(carry)
        return x, case.kind.run(x, case.axis or "", case.group_size)

    def on_one_device(x: jax.Array, buffer: jax.Array) -> jax.Array:
        carry = (x, buffer)
        return (again(0, carry) if loops == 1 else lax.fori_loop(0, loops, again, carry))[1]

    spec = PartitionSpec(mesh.axis_names)
    made = jax.shard_map(on_one_device, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    return jax.jit(made, donate_argnums=1, keep_unused=True)


def _run_s(program: Program, x: jax.Array, buffer: jax.Array) -> tuple[jax.Array, float]:
    """The result, and the seconds it took."""
    began = time.perf_counter()
    result = jax.block_until_ready(program(x, buffer))
    return result, time.perf_counter() - began


def _verify(mesh: jax.sharding.Mesh, case: Case, result: jax.Array) -> tuple[int, int]:
    """(wrong, checked) elements of this process's devices."""
    ranks = np.arange(mesh.size).reshape(mesh.devices.shape)
    rank_of = {device.id: rank for rank, device in enumerate(mesh.devices.flat)}
    wrong = checked = 0
    for shard in result.addressable_shards:
        place = _place(mesh, case, ranks, rank_of[shard.device.id])
        if case.kind.root_only and place.place != 0:
            continue
        index, values = _sample(shard.data)
        wrong += int(np.count_nonzero(values != case.kind.expected(place, index)))
        checked += len(index)
    return wrong, checked


def _place(mesh: jax.sharding.Mesh, case: Case, ranks: np.ndarray, rank: int) -> Place:
    if case.axis is None:
        return Place(np.array([rank]), 0, case.count)
    dim = mesh.axis_names.index(case.axis)
    position = list(np.unravel_index(rank, ranks.shape))
    place = int(position[dim])
    position[dim] = slice(None)  # pyright: ignore[reportArgumentType, reportCallIssue]
    return Place(ranks[tuple(position)], place, case.count)


def _sample(data: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Indices and values of a result: all of it, or every k-th of a large one, with k odd so as to meet every lane."""
    step = -(-data.size // _MOST_CHECKED) | 1
    index = np.arange(0, data.size, step)
    return index, np.asarray(data if step == 1 else data[::step])


def largest_size_bytes(mesh: jax.sharding.Mesh, host_available_bytes: int | None) -> int:
    """The largest size that fits: operand, result, and as much again for what XLA and NCCL need.

    On CPUs it ends at 64 MiB: virtual devices share the caches and memory of one machine, and are past saturation.
    """
    local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        # the processes of a job on CPUs are as a rule on one machine
        free = (host_available_bytes or GIB) / mesh.size / 2
        most = 64 * MIB
    else:
        stats = [d.memory_stats() or {} for d in local]
        free = min(s.get("bytes_limit", 0) - s.get("bytes_in_use", 0) for s in stats)
        most = 4096 * MIB  # 2^30 elements: indices stay in 32 bits
    fits = min(most, free / 4)
    return int(gather([max(fits, 1024.0)])[:, 0].min())
