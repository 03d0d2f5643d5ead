"""What a simulation takes into account, each part on or off: the ingredients of the model.

Everything is on by default; a step that was measured, or rehearsed, is priced without some.
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
_LEAST_RATE = 0.25  # a normal distribution has no end, a GPU that is in use does


@dataclass(frozen=True)
class Assumptions:
    """The ingredients of the model of a step."""

    shapes: bool = True  # matmuls are as fast as their shape allows; False: all as fast as a large one
    sustained: bool = True  # at the rate that the power cap leaves; False: at that of a short burst
    full_clock: bool = False
    """Operands draw little power, as repeated values do, so that no cap binds: tensor cores run at the full clock."""
    attention: bool = True  # fused attention at its measured rates; False: as fast as a matmul
    contention: bool = True
    """A collective takes multiprocessors and memory bandwidth from what computes at the same time."""
    slowest: bool = True  # all GPUs wait for the slowest of them, see `slowest_of`; False: all are alike
    streams: int = 1
    """On which asynchronous collectives run, in turn. XLA has one, however many its scheduler lets be in flight, and
    two with `xla_gpu_experimental_enable_collective_multi_streaming` (execution_stream_assignment.cc)."""
    single_queue: bool = False
    """One hardware queue feeds the GPU (`CUDA_DEVICE_MAX_CONNECTIONS=1`): a collective that must wait for another one
    holds up the kernels behind it."""
    symmetric: bool = False
    """Operands and results of reductions and gathers lie in symmetric memory: inside a domain NCCL may run its kernels
    for that, where they are faster."""
    graphed_copies: bool = True
    """Slices that go to host memory or come from it are parts of CUDA graphs, in which each waits for what is before it
    and holds up what is behind it (XLA since openxla/xla#28471)."""
    copy_engines: bool = False
    """With `symmetric`: gathers inside a domain run on copy engines, whatever that takes (NCCL's zero-CTA policy). XLA
    asks for it where a program has no fewer asynchronous collectives than blocking ones, or no fewer bytes of them
    (gpu_executable.cc, ShouldCollectiveUseMinimalResource)."""
    ragged: WayChoice = field(default_factory=WayChoice)  # which way XLA takes ragged all-to-alls
    imbalance: float = 1.0
    """Rows that the busiest GPU of an expert axis receives, over those of an average one. All wait for it."""


def assumptions_for(options: Mapping[str, object]) -> Assumptions:
    """The assumptions under a program's XLA options: streams and memory of collectives, and what CUDA graphs hold."""

    def is_on(name: str) -> bool:
        return str(options.get(name, "")).strip().lower() in ("1", "true")

    graphed = "DYNAMIC_SLICE" in str(options.get(_GRAPHS, "DYNAMIC_SLICE_FUSION"))  # which XLA's own list has
    streams = 2 if is_on(_TWO_STREAMS) else 1
    ragged = WayChoice(options)
    return Assumptions(streams=streams, symmetric=is_on(_SYMMETRIC), graphed_copies=graphed, ragged=ragged)


def slowest_of(gpus: int, spread: float | None = None) -> float:
    """Seconds of compute on the slowest of so many GPUs, over those on an average one.

    In a synchronous step every GPU waits for the slowest. Compute rates are normally distributed; the lowest of n draws
    lies at Blom's quantile (n - 0.375) / (n + 0.25).

    Args:
        gpus: of the job.
        spread: standard deviation of their rates, relative; None for that of published fleets (catalog, `gpu_spread`).
    """
    if gpus <= 1:
        return 1.0
    deviation = float(catalog.kernels()["gpu_spread"]) if spread is None else spread
    lowest = statistics.NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)) * deviation
    return 1.0 / max(_LEAST_RATE, 1.0 - lowest)
