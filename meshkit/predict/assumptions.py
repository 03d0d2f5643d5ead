"""Define the effects that a simulation takes into account; each can be turned off.

All effects are on by default. A measured or rehearsed step is priced without some of them.
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
_LEAST_RATE = 0.25  # A normal distribution has no lower end; a GPU in use is taken to be no slower than this.


@dataclass(frozen=True)
class Assumptions:
    """The effects that a simulated step takes into account."""

    shapes: bool = True
    """The rate of a matmul depends on its shape; if False, every matmul is as fast as a large one."""
    sustained: bool = True
    """Tensor cores run at the rate that the power cap allows; if False, at the rate of a short burst."""
    full_clock: bool = False
    """Operands draw little power, as repeated values do, so tensor cores run at the full clock, below the power cap."""
    attention: bool = True
    """Fused attention has its measured rates; if False, it is as fast as a matmul."""
    contention: bool = True
    """A collective takes multiprocessors and memory bandwidth from kernels that run at the same time."""
    slowest: bool = True
    """All GPUs wait for the slowest one (see `slowest_of`); if False, all are equally fast."""
    streams: int = 1
    """Number of streams for asynchronous collectives, which are assigned to them in turn. XLA has one, however many
    collectives its scheduler allows in flight, and two with `xla_gpu_experimental_enable_collective_multi_streaming`
    (execution_stream_assignment.cc)."""
    single_queue: bool = False
    """One hardware queue feeds the GPU (`CUDA_DEVICE_MAX_CONNECTIONS=1`): a collective that must wait for another one
    delays the kernels after it."""
    symmetric: bool = False
    """Operands and results of reductions and gathers are in symmetric memory, for which NCCL has faster kernels inside
    a domain."""
    graphed_copies: bool = True
    """Copies of slices to or from host memory are nodes of CUDA graphs, where each waits for the node before it and
    blocks the node after it (XLA since openxla/xla#28471)."""
    copy_engines: bool = False
    """With `symmetric`: gathers inside a domain run on copy engines, even if that is slower (NCCL's zero-CTA policy).
    XLA requests this for a program with at least as many asynchronous as blocking collectives, by number or by bytes
    (gpu_executable.cc, ShouldCollectiveUseMinimalResource)."""
    ragged: WayChoice = field(default_factory=WayChoice)
    """XLA's choice of an implementation for ragged all-to-alls."""
    imbalance: float = 1.0
    """Rows that the busiest GPU of an expert axis receives, divided by an average GPU's. All wait for the busiest."""


def assumptions_for(options: Mapping[str, object]) -> Assumptions:
    """Return the assumptions that follow from XLA options: streams and memory of collectives, and CUDA graphs."""

    def is_on(name: str) -> bool:
        return str(options.get(name, "")).strip().lower() in ("1", "true")

    graphed = "DYNAMIC_SLICE" in str(options.get(_GRAPHS, "DYNAMIC_SLICE_FUSION"))  # XLA's default list has it.
    streams = 2 if is_on(_TWO_STREAMS) else 1
    ragged = WayChoice(options)
    return Assumptions(streams=streams, symmetric=is_on(_SYMMETRIC), graphed_copies=graphed, ragged=ragged)


def slowest_of(gpus: int, spread: float | None = None) -> float:
    """Return the seconds of compute on the slowest of this many GPUs, divided by those on an average GPU.

    In a synchronous step every GPU waits for the slowest. Compute rates are taken as normally distributed. The lowest
    of n draws is at Blom's quantile (n - 0.375) / (n + 0.25).

    Args:
        spread: relative standard deviation of the rates; None: the value of published fleets (catalog, `gpu_spread`).
    """
    if gpus <= 1:
        return 1.0
    deviation = float(catalog.kernels()["gpu_spread"]) if spread is None else spread
    lowest = statistics.NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)) * deviation
    return 1.0 / max(_LEAST_RATE, 1.0 - lowest)
