"""A compiled stage with experts, as Megatron-Core runs it. Part of replica.py, sixth in the flow of the replay.

    router            our matmul is fp32; Megatron's has 16-bit operands and an fp32 result (te_general_gemm in
                      RouterGatingLinearFunction, megatron/core/transformer/moe/moe_utils.py)
    8 bits            our experts multiply in 16: the same matmuls at the fp8 rate, and the casts that go with them
    sliding window    our layers all see the whole length: attention of a layer is the mean of both kinds

Not there: norms of queries and keys, sinks of attention, padding of expert rows, and dispatchers that send a token only
once to each GPU (DeepEP, HybridEP): ours sends a copy to every expert, as Megatron's `alltoall` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from benchmarks.published.experiments import Run
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.kernels import memory_bytes_per_s

_ROUTER, _HALF, _EIGHT = "f32_highest", "bf16", "f8e4m3fn"
_CAST_BYTES = 4  # an operand read in 16 bits, written in 8 along both of its dims (TransformerEngine's MXFP8)


def as_in_megatron(run: Run, schedule: Schedule) -> Schedule:
    """The schedule with the precision and the attention of the row's model; unchanged without experts."""
    if not run.shape.experts:
        return schedule
    attended = run.shape.attended(run.length)

    def one(i: Instruction) -> Instruction:
        if i.cost is None:
            return i
        if i.cost.attention_flops:
            return replace(i, cost=replace(i.cost, attention_flops=i.cost.attention_flops * attended))
        if not i.cost.matmul_flops:
            return i
        names = {_ROUTER: _HALF}
        if run.precision == "fp8" and "logits" not in i.source:
            names[_HALF] = _EIGHT
        return replace(i, cost=_renamed(i.cost, names))

    bodies = {name: tuple(one(i) for i in body) for name, body in schedule.computations.items()}
    return replace(schedule, computations=bodies)


def _renamed(cost: Cost, names: Mapping[str, str]) -> Cost:
    flops: dict[str, float] = {}
    for dtype, value in cost.matmul_flops.items():
        name = names.get(dtype, dtype)
        flops[name] = flops.get(name, 0.0) + value
    matmuls = tuple(replace(m, dtype=names.get(m.dtype, m.dtype)) for m in cost.matmuls)
    return replace(cost, matmul_flops=flops, matmuls=matmuls)


def quantization_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a layer and micro-batch of casting operands to 8 bits; 0 where the program does, or none is needed.

    Inputs of the four linear layers forward, gradients of their outputs backward; weights are cast once a step.
    """
    if not run.shape.experts or run.precision != "fp8":
        return 0.0
    s, k = run.shape, run.shape.experts_per_token
    queries = s.heads * s.head_dim
    attention = (s.hidden + queries) + (queries + 2 * s.keys + s.hidden)
    experts = k * (s.hidden + s.ffn) + k * (2 * s.ffn + s.hidden)
    tokens = run.micro_batch * run.length / run.context
    return _CAST_BYTES * tokens * (attention + experts) / run.tensor / memory_bytes_per_s(cluster.gpu)
