"""Declare the effects that a simulation takes into account, each of which can be turned off.

Everything is on by default; a measured or rehearsed step is priced without some of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshkit.config import catalog
from meshkit.predict.ways import WayChoice

_TWO_STREAMS = "xla_gpu_experimental_enable_collective_multi_streaming"
_SYMMETRIC = "xla_gpu_experimental_enable_nccl_symmetric_buffers"
_GRAPHS = "xla_gpu_enable_command_buffer"
_LEAST_RATE = 0.25  # A normal distribution has no end, but a GPU in use is never slower than this.


@dataclass(frozen=True)
class Assumptions:
    """The effects that a simulated step takes into account."""

    shapes: bool = True
    """Matmuls are as fast as their shape allows; False: all are as fast as a large one."""
    sustained: bool = True
    """Tensor cores run at the rate that the power cap leaves; False: at that of a short burst."""
    full_clock: bool = False
    """Operands draw little power, as repeated values do, so that no cap binds: tensor cores run at the full clock."""
    attention: bool = True
    """Fused attention has its measured rates; False: it is as fast as a matmul."""
    contention: bool = True
    """A collective takes multiprocessors and memory bandwidth from kernels that run at the same time."""
    slowest: bool = True
    """All GPUs wait for the slowest of them, see `slowest_of`; False: all are alike."""
    streams: int = 1
    """Streams that run asynchronous collectives in turn. XLA has one, however many its scheduler lets be in flight, and
    two with `xla_gpu_experimental_enable_collective_multi_streaming` (execution_stream_assignment.cc)."""
    single_queue: bool = False
    """One hardware queue feeds the GPU (`CUDA_DEVICE_MAX_CONNECTIONS=1`): a collective that must wait for another one
    holds up the kernels behind it."""
    symmetric: bool = False
    """Operands and results of reductions and gathers are in symmetric memory, so that NCCL may run its faster kernels
    for that inside a domain."""
    graphed_copies: bool = True
    """Slices to or from host memory are parts of CUDA graphs, in which each waits for what is before it and blocks what
    is behind it (XLA since openxla/xla#28471)."""
    copy_engines: bool = False
    """With `symmetric`: gathers inside a domain run on copy engines, whatever that takes (NCCL's zero-CTA policy). XLA
    asks for it where a program has no fewer asynchronous collectives than blocking ones, or no fewer bytes of them
    (gpu_executable.cc, ShouldCollectiveUseMinimalResource)."""
    ragged: WayChoice = field(default_factory=WayChoice)
    """The way that XLA takes for ragged all-to-alls."""
    imbalance: float = 1.0
    """Rows that the busiest GPU of an expert axis receives, over those of an average one. All wait for it."""


def assumptions_for(options: Mapping[str, object]) -> Assumptions:
    """Return the assumptions that follow from XLA options: streams and memory of collectives, and CUDA graphs."""

    def is_on(name: str) -> bool:
        return str(options.get(name, "")).strip().lower() in ("1", "true")

    graphed = "DYNAMIC_SLICE" in str(options.get(_GRAPHS, "DYNAMIC_SLICE_FUSION"))  # XLA's own list has it.
    streams = 2 if is_on(_TWO_STREAMS) else 1
    ragged = WayChoice(options)
    return Assumptions(streams=streams, symmetric=is_on(_SYMMETRIC), graphed_copies=graphed, ragged=ragged)


def slowest_of(gpus: int, spread: float | None = None) -> float:
    """Return the seconds of compute on the slowest of so many GPUs, over those on an average one.

    In a synchronous step every GPU waits for the slowest. Compute rates are normally distributed; the lowest of n draws
    lies at Blom's quantile (n - 0.375) / (n + 0.25).

    Args:
        spread: standard deviation of their rates, relative; None for that of published fleets (catalog, `gpu_spread`).
    """
    if gpus <= 1:
        return 1.0
    deviation = float(catalog.kernels()["gpu_spread"]) if spread is None else spread
    lowest = statistics.NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)) * deviation
    return 1.0 / max(_LEAST_RATE, 1.0 - lowest)
