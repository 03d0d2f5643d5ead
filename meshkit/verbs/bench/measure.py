"""Measure collectives and the sustained rates of one device. A `Case` is one collective of one size over one axis.

    size, axis, Kind -> Case -> compiled, its result compared with numpy's, timed

Sizes follow nccl-tests: a size is that of a GPU's operand or result, whichever is larger. Where a buffer is cut into
one piece per GPU (all-gather, reduce-scatter, all-to-all, scatter, gather), `count` is the size of a piece in elements.

XLA's only rooted collective is broadcast, and it runs on NVIDIA GPUs only. The other rooted collectives are emulated by
the collective that `emulated` names, which may move more bytes. Their bus bandwidth still uses nccl-tests' factor of
the rooted collective. It is therefore the rate that a program gets, and can be lower than the rate on the link.

All groups along the axis run at once, as in a training step. A program repeats a small collective, so that the launch
time is small against the time on the wire; optimization barriers keep the compiler from merging the repetitions.

Rates are sustained: a GPU at its power cap lowers its clock within a second, so each rate is the median over the second
half of a run of some seconds. Operands are random: on zeros a GPU draws less power, and is faster than in training.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.predict.algorithms import wire_factor
from meshkit.units import GIB, MIB
from meshkit.verbs.bench.bench_report import RatesPart

# Operands repeat a table of prime length, so that the pieces of a buffer differ, and each rank starts at another entry.
# The integers are small: a sum over any number of GPUs is exact in float32, so results can be compared with `==`.
_PERIOD = 8191
_RANK_SHIFT = 577
_TABLE = np.random.default_rng(0).integers(-30, 31, _PERIOD).astype(np.float32)

COPY, BARRIER = "copy", "barrier"
DTYPE = "float32"
ITEM_BYTES = 4
_MOST_LOOPS = 32
_LOOP_BYTES = {"cpu": 2 * MIB, "gpu": 512 * MIB}  # A program repeats a smaller collective up to about this size.
_MOST_CHECKED = 2**20  # At most so many elements of a device's result are checked: every k-th of a larger result.
_ROUND, _MOST_RUNS = 3, 21  # Timed runs between two checks of the budget, and the most in total.
Program = Callable[[jax.Array, jax.Array], jax.Array]
_REPEATS = 8  # Repetitions inside one program that measures a rate.
_FEWEST_RUNS = 6


@dataclass(frozen=True)
class Place:
    """The position of one device in its group."""

    members: np.ndarray
    """Ranks of the group, in the order of the axis."""
    place: int
    """Index of the device in `members`."""
    piece: int
    """Elements of a piece: the case's `count`."""


@dataclass(frozen=True)
class Kind:
    """One collective."""

    name: str
    """HLO opcode of the collective; `scatter`, `gather`, `reduce`, `barrier` and `copy` are no collectives in HLO."""
    run: Callable[[jax.Array, str, int], jax.Array]
    """(one device's operand, mesh axis, group size) -> the device's result."""
    expected: Callable[[Place, np.ndarray], np.ndarray]
    """(place, index array) -> numpy's result at these indices."""
    is_split: bool = False
    """Whether the buffer is cut into one piece per GPU of the group."""
    gives: str = "whole"
    """One device's operand, if the buffer is cut: all pieces (`whole`) or one (`piece`)."""
    takes: str = "whole"
    """One device's result, if the buffer is cut: `whole` or `piece`."""
    emulated: str | None = None
    """The collective that runs in its place; None if XLA has this collective."""
    root_only: bool = False
    """Whether only the result of the group's first device is defined."""

    @property
    def is_barrier(self) -> bool:
        """Return whether this is the barrier, an all-reduce of one element whatever the size."""
        return self.name == BARRIER

    def bus_factor(self, n: int) -> float | None:
        """Return nccl-tests' ratio of bus to algorithm bandwidth over n GPUs; None for a barrier, which has neither."""
        if self.is_barrier:
            return None
        return 1.0 if self.name in ("reduce", COPY) else wire_factor(self.name, n)


def operand_values(rank: int | np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return the operand of a rank at these indices, as a numpy array: float32, whole numbers from -30 to 30.

    An array of ranks must broadcast against the indices.
    """
    return _TABLE[(index % _PERIOD + np.asarray(rank) * _RANK_SHIFT) % _PERIOD]


def make_operand(rank: jax.Array, elements: int) -> jax.Array:
    """Return the operand of a rank, float32 [elements], fewer than 2^31 elements; made on the device, not the host."""
    index = lax.iota(jnp.int32, elements) % _PERIOD
    return jnp.asarray(_TABLE)[(index + rank % _PERIOD * _RANK_SHIFT % _PERIOD) % _PERIOD]


def kinds(platform: str) -> tuple[Kind, ...]:
    """Return all collectives over a mesh axis; on `cpu` the broadcast is emulated, on `gpu` it is XLA's own."""
    if platform == "gpu":
        return _KINDS
    by_sum = replace(_BROADCAST, run=_broadcast_by_sum, emulated="all-reduce")
    return tuple(by_sum if kind is _BROADCAST else kind for kind in _KINDS)


def _sum(p: Place, index: np.ndarray) -> np.ndarray:
    return operand_values(p.members[:, None], index[None]).sum(0) if len(index) else np.zeros(0, np.float32)


def _pieces_of_all(p: Place, index: np.ndarray) -> np.ndarray:
    return operand_values(p.members[index // p.piece], index % p.piece)


def _broadcast_by_sum(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.psum(jnp.where(lax.axis_index(axis) == 0, x, 0), axis)


def _all_to_all(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.all_to_all(x.reshape(n, -1), axis, 0, 0)


def _shift(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


def _all_gather(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.all_gather(x, axis, tiled=True)


_BROADCAST = Kind(
    "collective-broadcast",
    lambda x, axis, n: lax.pbroadcast(x, (axis,), 0),
    lambda p, index: operand_values(p.members[0], index),
)
_KINDS = (
    Kind("collective-permute", _shift, lambda p, index: operand_values(p.members[p.place - 1], index)),
    _BROADCAST,
    Kind("all-reduce", lambda x, axis, n: lax.psum(x, axis), _sum),
    Kind("all-gather", _all_gather, _pieces_of_all, is_split=True, gives="piece"),
    Kind(
        "reduce-scatter",
        lambda x, axis, n: lax.psum_scatter(x, axis, tiled=True),
        lambda p, index: _sum(p, p.place * p.piece + index),
        is_split=True,
        takes="piece",
    ),
    Kind(
        "all-to-all",
        lambda x, axis, n: _all_to_all(x, axis, n).reshape(-1),
        lambda p, index: operand_values(p.members[index // p.piece], p.place * p.piece + index % p.piece),
        is_split=True,
    ),
    Kind("reduce", lambda x, axis, n: lax.psum(x, axis), _sum, emulated="all-reduce", root_only=True),
    Kind(
        "scatter",
        lambda x, axis, n: _all_to_all(x, axis, n)[0],
        lambda p, index: operand_values(p.members[0], p.place * p.piece + index),
        is_split=True,
        takes="piece",
        emulated="all-to-all",
    ),
    Kind("gather", _all_gather, _pieces_of_all, is_split=True, gives="piece", emulated="all-gather", root_only=True),
    Kind(BARRIER, lambda x, axis, n: lax.psum(x, axis), _sum, emulated="all-reduce"),
)
COPY_KIND = Kind(COPY, lambda x, axis, n: jnp.copy(x), lambda p, index: operand_values(p.members[p.place], index))


@dataclass(frozen=True)
class Case:
    """A collective of one size over one axis."""

    kind: Kind
    axis: str | None
    """The mesh axis; None for a copy, which stays on its device."""
    group_size: int
    size_bytes: int
    """Size as nccl-tests defines it, rounded to whole elements and whole pieces."""

    @property
    def count(self) -> int:
        """Return nccl-tests' count: the elements of one piece if the buffer is cut, of the whole buffer otherwise."""
        return self.size_bytes // ITEM_BYTES // (self.group_size if self.kind.is_split else 1)

    @property
    def operand_elements(self) -> int:
        return self._elements(self.kind.gives)

    @property
    def result_elements(self) -> int:
        return self._elements(self.kind.takes)

    def _elements(self, part: str) -> int:
        return self.count * (self.group_size if self.kind.is_split and part == "whole" else 1)


@dataclass(frozen=True)
class CaseTiming:
    """The measurement of a case: seconds of one collective; and `wrong` of `checked` elements, over all devices."""

    time_s: float
    runs: int
    wrong: int
    checked: int


def make_case(kind: Kind, axis: str | None, group_size: int, size_bytes: int) -> Case:
    """Return the case of a size, rounded down to whole pieces but at least one. A barrier is always one element."""
    unit = ITEM_BYTES * (group_size if kind.is_split else 1)
    size_bytes = ITEM_BYTES if kind.is_barrier else max(1, size_bytes // unit) * unit
    return Case(kind, axis, group_size, size_bytes)


def measure(mesh: jax.sharding.Mesh, case: Case, *, budget_s: float) -> CaseTiming:
    """Time a case: the median of its runs on GPUs, the shortest run on virtual CPU devices.

    Every process of the job must call this function with the same arguments.

    Args:
        budget_s: seconds of timed runs, without compiling and the check; 3 runs at least, 21 at most.
    Returns:
        The time of the slowest process, and the `wrong` and `checked` elements summed over all processes.
    """
    platform = platform_of(mesh.devices.flat[0])
    loops = int(np.clip(_LOOP_BYTES[platform] // case.size_bytes, 1, _MOST_LOOPS))
    program = _program(mesh, case, loops)
    x = operand(mesh, case.operand_elements)
    result = jax.block_until_ready(program(x, operand(mesh, case.result_elements)))
    wrong, checked = _verify(mesh, case, result)
    result, _ = _run_s(program, x, result)  # Warm up.
    times_s: list[float] = []
    enough = False
    while not enough:
        for _ in range(_ROUND):
            result, time_s = _run_s(program, x, result)
            times_s.append(time_s)
        # Process 0 decides for all: with different numbers of runs, the processes would wait for each other forever.
        enough = bool(gather([float(sum(times_s) >= budget_s or len(times_s) >= _MOST_RUNS)])[0, 0])
    found = gather([_typical_s(times_s, platform) / loops, wrong, checked])
    return CaseTiming(float(found[:, 0].max()), len(times_s), int(found[:, 1].sum()), int(found[:, 2].sum()))


def _typical_s(times_s: list[float], platform: str) -> float:
    """Return the median on GPUs, the minimum on CPU devices: other programs on the cores only add time."""
    return float(np.min(times_s) if platform == "cpu" else np.median(times_s))


def platform_of(device: Any) -> str:
    """Return `cpu` or `gpu`."""
    return "cpu" if device.platform == "cpu" else "gpu"


def gather(values: list[float]) -> np.ndarray:
    """Return the values of all processes, float32 [processes, values]. Every process must pass equally many values."""
    mine = np.asarray(values, np.float32)
    if jax.process_count() == 1:
        return mine[None]
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(mine))


def operand(mesh: jax.sharding.Mesh, elements: int) -> jax.Array:
    """Return float32 [devices * elements], sharded over all axes: each device has `make_operand` of its rank."""
    return _operand_maker(mesh, elements)()


@functools.lru_cache(maxsize=64)
def _operand_maker(mesh: jax.sharding.Mesh, elements: int) -> Callable[[], jax.Array]:
    axes = mesh.axis_names
    spec = PartitionSpec(axes)
    made = jax.shard_map(
        lambda: make_operand(lax.axis_index(axes), elements), mesh=mesh, in_specs=(), out_specs=spec, check_vma=False
    )
    return jax.jit(made, out_shardings=NamedSharding(mesh, spec))


def _program(mesh: jax.sharding.Mesh, case: Case, loops: int) -> Program:
    """Return (operand, buffer) -> result. The buffer is donated to the result, so a run allocates no new memory."""

    def again(_, carry):
        # Each repetition depends on the previous result, so that the compiler cannot drop, merge or hoist it.
        x, _ = lax.optimization_barrier(carry)
        return x, case.kind.run(x, case.axis or "", case.group_size)

    def on_one_device(x: jax.Array, buffer: jax.Array) -> jax.Array:
        carry = (x, buffer)
        return (again(0, carry) if loops == 1 else lax.fori_loop(0, loops, again, carry))[1]

    spec = PartitionSpec(mesh.axis_names)
    made = jax.shard_map(on_one_device, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)
    return jax.jit(made, donate_argnums=1, keep_unused=True)


def _run_s(program: Program, x: jax.Array, buffer: jax.Array) -> tuple[jax.Array, float]:
    began = time.perf_counter()
    result = jax.block_until_ready(program(x, buffer))
    return result, time.perf_counter() - began


def _verify(mesh: jax.sharding.Mesh, case: Case, result: jax.Array) -> tuple[int, int]:
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
    """Return indices and values of a result: all, or every k-th of a large one. An odd k samples all vector lanes."""
    step = -(-data.size // _MOST_CHECKED) | 1
    index = np.arange(0, data.size, step)
    return index, np.asarray(data if step == 1 else data[::step])


def largest_size_bytes(mesh: jax.sharding.Mesh, host_available_bytes: int | None) -> int:
    """Return the largest size of which four buffers fit: operand, result, and as much again for XLA and NCCL.

    Every process must call this function: the result is the minimum over all processes. It is at least 1 KiB. On GPUs
    it is at most 4 GiB, and on CPUs 64 MiB, where the memory that the virtual devices share is already saturated.

    Args:
        host_available_bytes: memory of this machine, used on CPUs only; None assumes 1 GiB.
    """
    local = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    if local[0].platform == "cpu":
        # The processes of a job on CPUs usually share one machine.
        free = (host_available_bytes or GIB) / mesh.size / 2
        most = 64 * MIB
    else:
        stats = [d.memory_stats() or {} for d in local]
        free = min(s.get("bytes_limit", 0) - s.get("bytes_in_use", 0) for s in stats)
        most = 4096 * MIB  # With 2^30 elements, indices fit in 32 bits.
    fits = min(most, free / 4)
    return int(gather([max(fits, 1024.0)])[:, 0].min())


@dataclass(frozen=True)
class RateSizes:
    """The sizes of the measured work on one platform, and how long each rate is measured."""

    matmul: int
    """Rows and columns of both matrices."""
    attention: tuple[int, int, int, int]
    """Batch, length, heads, head_dim."""
    copy_bytes: int
    seconds: float


_SIZES = {
    "gpu": RateSizes(matmul=8192, attention=(4, 4096, 16, 128), copy_bytes=2 * GIB, seconds=3.0),
    "cpu": RateSizes(matmul=512, attention=(1, 256, 4, 32), copy_bytes=32 * MIB, seconds=0.2),
}


def measure_rates(device: Any) -> RatesPart:
    """Measure one device alone: matmul by precision, causal attention forward and backward, and a copy.

    A rate is the work of a call, divided by its median time in the second half of the runs. A copied byte counts twice,
    because it is read and written.
    """
    platform = platform_of(device)
    sizes = _SIZES[platform]
    with jax.default_device(device):
        return RatesPart(
            matmul_flops_per_s={name: _matmul_flops_per_s(name, sizes) for name in _precisions(device, platform)},
            attention_flops_per_s=_attention_flops_per_s(sizes, device, platform),
            memory_bytes_per_s=_memory_bytes_per_s(sizes),
        )


def _precisions(device: Any, platform: str) -> tuple[str, ...]:
    if platform == "cpu":
        return ("fp32",)
    if _capability(device) >= (8, 9):
        return ("bf16", "fp16", "tf32", "fp32", "fp8")
    return ("bf16", "fp16", "tf32", "fp32") if _capability(device) >= (8, 0) else ("fp16", "fp32")


def _capability(device: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(getattr(device, "compute_capability", "0.0")).split("."))


def _matmul_flops_per_s(precision: str, sizes: RateSizes) -> float:
    """Return the rate of a matmul so large that no shape is faster, as for `achieved.matmul` in the catalog."""
    n = sizes.matmul
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16, "fp8": jnp.float8_e4m3fn}.get(precision, jnp.float32)
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.float32).astype(dtype) for i in range(2))
    # On GPUs, fp32 operands are multiplied in TF32 unless the highest precision is requested. fp8 gives bf16 results.
    asked = lax.Precision.HIGHEST if precision == "fp32" else lax.Precision.DEFAULT
    out = jnp.bfloat16 if precision == "fp8" else dtype
    multiply = functools.partial(jnp.matmul, precision=asked, preferred_element_type=out)
    return 2 * n**3 / _seconds_each(lambda x: multiply(*x), (a, b), sizes.seconds)


def _attention_flops_per_s(sizes: RateSizes, device: Any, platform: str) -> dict[str, float]:
    batch, length, heads, head_dim = shape = sizes.attention
    fused = platform == "gpu" and _capability(device) >= (8, 0)
    dtype = jnp.bfloat16 if fused else jnp.float32
    qkv = tuple(jax.random.normal(jax.random.key(i), shape, dtype) for i in range(3))
    name = "cudnn" if fused else "xla"
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=name)
    # Two matmuls (QK^T, PV) of 2 * batch * heads * length^2 * head_dim FLOP; the causal mask leaves half of each.
    forward_flops = 2 * batch * heads * length**2 * head_dim
    forward_s = _seconds_each(lambda x: attend(*x), qkv, sizes.seconds)
    gradient = jax.grad(lambda x: attend(*x).astype(jnp.float32).sum())
    both_s = _seconds_each(gradient, qkv, sizes.seconds)
    # The backward pass has five matmuls, the forward pass two: hence the factor 2.5.
    backward_s = max(both_s - forward_s, forward_s / 10)
    return {"forward": forward_flops / forward_s, "backward": 2.5 * forward_flops / backward_s}


def _memory_bytes_per_s(sizes: RateSizes) -> float:
    x = jax.random.normal(jax.random.key(0), (sizes.copy_bytes // 4,), jnp.float32)
    return 2 * sizes.copy_bytes / _seconds_each(lambda x: x + 1, x, sizes.seconds)


def _seconds_each(work: Callable, operands, seconds: float) -> float:
    """Run `work` for about `seconds`, and return the median time of one call over the second half of the runs."""

    def repeated(operands):
        def again(_, carry):
            operands, _ = lax.optimization_barrier(carry)  # It keeps the repetitions apart, as in `_program`.
            return operands, work(operands)

        return lax.fori_loop(0, _REPEATS - 1, again, (operands, work(operands)))[1]

    program = jax.jit(repeated)
    jax.block_until_ready(program(operands))
    times: list[float] = []
    while len(times) < _FEWEST_RUNS or sum(times) < seconds:
        began = time.perf_counter()
        jax.block_until_ready(program(operands))
        times.append(time.perf_counter() - began)
    return float(np.median(times[len(times) // 2 :])) / _REPEATS
