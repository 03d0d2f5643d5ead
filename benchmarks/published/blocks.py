"""A stage in NVFP4 or MXFP8, as TransformerEngine runs it. Part of replica.py, sixth in the flow of the replay.

In NVFP4 our program multiplies in 16 bits. What is other in TransformerEngine with `NVFP4BlockScaling` (v2.12 and the
commits that Megatron-Bridge pins):

    linear layers         all three matmuls of all of them in NVFP4, which keeps no layer in 16 bits unless its recipe
                          says so (`first_last_layers_bf16`: NVIDIA's benchmarks do not); attention and the output head
                          stay
    casts                 of inputs forward and of gradients backward, each along both dims, one of them behind a random
                          Hadamard transform; `cast_bytes`. Weights are cast once a step, which is not counted
    tensor parallelism    no userbuffers (`tp_comm_overlap` off): what is gathered is cast before it travels; the gather
                          of inputs for the gradient of weights runs beside that of inputs, and the scatter of gradients
                          beside the one of weights; all others block

In MXFP8 our program multiplies in fp8 with a scale for each tensor; matmuls get MXFP8's rates here.

Not there: the host that launches some 20 kernels a linear layer, and scales that are swizzled before a matmul.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published.experiments import Run
from benchmarks.published.experts import CAST_SHARE, renamed
from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.network import collective_time_s
from meshkit.predict.pricing import arithmetic_left

_FOUR, _EIGHT = "f4e2m1fn", {f"{name}{how}": "mxfp8" for name in ("f8e4m3fn", "f8e5m2") for how in ("", "_highest")}
_HALF_BYTES = 2
MXFP8_CAST = 2 + 2 * (1 + 1 / 32)  # bytes an element: read in 16 bits, written along both dims, each with scales
_FOUR_BYTES = 0.5 + 1 / 16  # with the scale, in 8 bits, of 16 elements


def as_nvfp4(run: Run, schedule: Schedule) -> Schedule:
    """The schedule with the linear layers of a run in NVFP4, without what travels among tensor-parallel GPUs in layers.

    Unchanged in another precision.
    """
    if run.precision != "nvfp4":
        return schedule

    def one(i: Instruction) -> Instruction:
        if i.cost is None or not i.cost.matmul_flops or "logits" in i.source:
            return i
        return replace(i, cost=renamed(i.cost, {"bf16": _FOUR}))

    bodies = {name: tuple(one(i) for i in body) for name, body in schedule.computations.items()}
    for name in bodies.keys() - {schedule.entry}:
        travels = {i.name for i in bodies[name] if i.collective is not None and tuple(i.collective.axes) == ("tensor",)}
        bodies[name] = tuple(i for i in bodies[name] if i.name not in travels and i.starts not in travels)
    return replace(schedule, computations=bodies)


def as_mxfp8(run: Run, schedule: Schedule) -> Schedule:
    """The schedule of a run in MXFP8, whose program multiplies in fp8 with a scale for each tensor, at MXFP8's rates.

    Unchanged in another precision.
    """
    if not is_mxfp8(run):
        return schedule

    def one(i: Instruction) -> Instruction:
        return replace(i, cost=renamed(i.cost, _EIGHT)) if i.cost is not None and i.cost.matmul_flops else i

    bodies = {name: tuple(one(i) for i in body) for name, body in schedule.computations.items()}
    return replace(schedule, computations=bodies)


def is_mxfp8(run: Run) -> bool:
    """Whether the linear layers of a run multiply in 8 bits with a scale for 32 of them."""
    words = run.row.say("precision").lower()
    return run.precision == "fp8" and ("mxfp8" in words or words == "fp8-mx")


def cast_bytes(reads: int) -> float:
    """Bytes that a cast moves for an element: read in 16 bits so many times, written along both dims.

    Three times where each dim is cast by a kernel of its own, twice where one does both; once of them for the largest
    value.
    """
    return reads * _HALF_BYTES + 2 * _FOUR_BYTES


def casts_s(run: Run, cluster: Cluster, *, forward: bool) -> float:
    """Seconds of a layer and micro-batch of casting inputs of the linear layers, or gradients of their outputs.

    0 but in NVFP4: casts to 8 bits are in transformer_engine.py, those of experts in experts.py.
    """
    if run.precision != "nvfp4":
        return 0.0
    each = cast_bytes(run.recipe.cast_reads)
    s = run.shape
    queries, up = s.heads * s.head_dim, (2 if s.gated else 1) * s.ffn
    width = 2 * s.hidden + (queries + s.ffn if forward else queries + 2 * s.keys + up)
    moved = each * run.tokens * width / run.tensor
    return moved / (CAST_SHARE * cluster.gpu.memory_bytes_per_s)


def travel_s(run: Run, cluster: Cluster, *, forward: bool) -> tuple[float, float]:
    """(seconds that block, seconds beside a matmul) of a layer and micro-batch among tensor-parallel GPUs, in NVFP4.

    Two gathers and two scatters a pass, and the largest values of what is gathered.
    """
    if run.tensor == 1 or run.precision != "nvfp4":
        return 0.0, 0.0
    elements = run.tokens * run.shape.hidden

    def one(kind: str, payload: float) -> float:
        return collective_time_s(kind, payload_bytes=payload, gpus_per_domain=run.tensor, cluster=cluster)

    scatters = 2 * one("reduce-scatter", elements * _HALF_BYTES)
    inputs = 2 * one("all-gather", elements * _FOUR_BYTES)
    largest = 2 * one("all-reduce", 8)
    if forward:
        return inputs + scatters + largest, 0.0
    return 2 * one("all-gather", elements * 2 * _FOUR_BYTES) + largest, inputs + scatters


def slowed_s(seconds: float, cluster: Cluster) -> float:
    """Seconds that collectives of so many seconds add to matmuls that outlast them, by the law of a plan."""
    return seconds * (1 - arithmetic_left(cluster.gpu, catalog.kernels()["nccl_channels"][0]))
