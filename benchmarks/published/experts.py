"""A compiled stage with experts, as Megatron-Core runs it. Part of replica.py, sixth in the flow of the replay.

    router            our matmul is fp32; Megatron's has 16-bit operands and an fp32 result (te_general_gemm in
                      RouterGatingLinearFunction, megatron/core/transformer/moe/moe_utils.py)
    8 bits            our experts multiply in 16: the same matmuls at the fp8 rate, and the casts that go with them
    sliding window    our layers all see the whole length: every second one's attention goes, and costs `window_s`
    tokens' travel    ours is an all-to-all of every copy of a token, of a tensor-parallel replica in each of its GPUs,
                      as XLA schedules it; Megatron's is `exchange_s`, and blocks unless the recipe overlaps it
    around experts    what our program does to rows before and after their matmuls goes (`is_routing`); what Megatron
                      launches there is counted instead (`passes_s`, `operators_s`)
    attention         and all other kernels between matmuls but the router's: transformer_engine.py

Not there: the sink of attention, gradients of biases in the epilogue of a matmul, the host
that launches all this and waits for the counts of rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from benchmarks.published.experiments import Run
from benchmarks.published.ours import is_current
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.kernels import memory_bytes_per_s
from meshkit.predict.network import collective_time_s
from meshkit.predict.pricing import arithmetic_left

_ROUTER, _HALF, _EIGHT = "f32_highest", "bf16", "f8e4m3fn"
_ACTIVATION, _COUNT = 2, 8  # bytes
_CAST_BYTES = 4  # an operand read in 16 bits, written in 8 along both of its dims (TransformerEngine's MXFP8)

# Shares of the peak of device memory. A cast along both dims: 8192 x 8192 in 52.3 us on B200 (ROCm/TransformerEngine,
# pull 598); 4,096 x 4,096 in 51.7 us on H100 (NVIDIA/TransformerEngine, pull 101; its pull 258, since v1.7, makes no
# large difference).
# TransformerEngine's permutations: 0.50 and backward 0.51 (SimuMax 4dcaae5, configs/system/b200_bf16_ceperm.json).
# DeepEP's own, before the experts and behind them: its issue 590, 16 B300s, 4,096 tokens of 14,336 bytes to 8 of 128
# experts: 864 MB in the 229 us that a dispatch takes longer with one, and in 633 of a combine.
CAST_SHARE, HOPPER_CAST_SHARE = 0.68, 0.388
_PERMUTE_SHARE, _HYBRID_PERMUTE_SHARE, _HYBRID_RETURN_SHARE = 0.5, 0.475, 0.172

# A grouped call over its price as one batched matmul, by rows of an expert: forward and gradients of inputs; gradients
# of weights. Medians of 108 calls of TransformerEngine in bf16 on a B200, each over what kernels.py gives, less the
# 1.26 of that machine's 468 plain matmuls (the same file of SimuMax); 1,024 and 1,232 rows together.
_GROUPED_ROWS = (128, 256, 512, 1024, 2460)
_GROUPED = (1.56, 1.74, 1.34, 1.13, 1.0)
_GROUPED_WEIGHTS = (1.03, 1.19, 1.49, 1.52, 1.17)

# Bytes an element, forward and backward, in Megatron-LM d7288711 (transformer/moe/experts.py, _apply_bias;
# fusions/fused_bias_geglu.py; models/common/embeddings/rope_utils.py): what is no fused kernel runs by operators. Of
# each pass first those of operators in 16 bits of which a tensor is strided or broadcast, then the others.
#   gated      an output of the gate: two inputs and the output; a gradient, both inputs and their gradients
#   clamp      an output of the first matmul: two clamps of halves and a concatenation; their gradients are
#              comparisons, a selection of strided gradients (clamp_backward of PyTorch) and a concatenation
#   bias       an output of the second: b p, t + b p, their concatenation; with fp32 p, which HybridEP wants, a cast too
#   residual   a token's, twice a layer: bias and residual without bias_dropout_fusion
#   rotation   of queries and keys, beyond our program's: YaRN's scale has no fused kernel
#   norm       a token's, where it is recomputed: that before the experts; attention's is part of a matmul
_GATED, _CLAMP = ((0, 6), (0, 10)), ((4, 4), (9.5, 5.5))
_BIAS, _BIAS_FLOAT = ((2, 10), (8, 8)), ((0, 28), (0, 40))
_RESIDUAL, _ROTATION, _NORM = ((4, 6), (0, 4)), ((10, 10), (10, 12)), (0, 4)

# Bytes that a multiprocessor handles a clock in PyTorch's operators in 16 bits of which a tensor is strided or
# broadcast, so that they load no vectors: SiLU and a product of halves of a tensor, 2.68e8 outputs and 10 bytes of
# each, in 1.495 ms on an H100 (linkedin/Liger-Kernel ead96b61, benchmark/data/all_benchmark_data.csv, megatron_swiglu,
# torch, forward). That is 0.54 of its memory's rate, of which whole tensors reach 0.86 (relu_squared): memory is not
# the limit. On an H200, of which memory alone is faster, a broadcast one reaches 0.46 of a whole one's rate
# (tile-ai/TileOPs pull 500: prelu and leaky_relu), 0.43 by this. Nothing was found of Blackwell, nor of fp32, which is
# taken to run as whole tensors do.
_STRIDED_BYTES = 10 * 8192 * 32768 / 1.4953e-3 / (132 * 1.98e9)

# Seconds of a query and head of 64 with a window of 128 keys, both passes, bf16: cuDNN 9.22, batch 2, 4,096 tokens, 128
# heads (NVIDIA/cudnn-frontend 3929da2, benchmark/sdpa_benchmark_training/results/gpt_oss). Hopper's: cuDNN 9.19 on H200
# with 1,024 keys, of which blocks of 128 queries see 7.9 blocks in the mean, and 1.97 of 128 keys.
_WINDOW_S = {"gb200": 0.675e-3 / 2**20, "gb300": 0.644e-3 / 2**20, "hopper": 1.4e-3 / 2**19 / 4}

# Bytes/s, forward and backward, of RMS norms of heads of 128 for 131,072 heads, cuDNN's (the same repository,
# benchmark/norms, qwen3-30b-131072x128: the fastest there). The recipes run TransformerEngine's, of which no rate was
# found.
_HEADS_NORMED = {"gb200": (4.11e12, 3.77e12), "gb300": (4.27e12, 3.94e12), "hopper": (3.19e12, 2.88e12)}
_HEAD_NORM = (4, 6)  # bytes of an element

# DeepEP, branch hybrid-ep, docs/README_Hybrid-EP.md: GB/s of received tokens in 16 bits through PyTorch, by GPUs that
# share experts. GB200 with 32 multiprocessors, as in the recipes (B200: 536 and 531 with 16); beyond 36 GPUs the last.
# Between hosts of H100s by what goes to hosts, the own among them, with 16.
_HYBRID = {"gpus": (8, 16, 24, 32, 36), "dispatch": (546, 523, 507, 484, 479), "combine": (569, 522, 484, 465, 448)}
_HYBRID_IB = {"gpus": (16, 32, 64), "dispatch": (54.5, 47.4, 41.2), "combine": (53.4, 52.5, 46.6)}
_HYBRID_CHANNELS = 32  # moe_hybridep_num_sms, utils/overrides.py of the recipes


def as_in_megatron(run: Run, schedule: Schedule, *, grouped: bool = True) -> Schedule:
    """The schedule with the precision and the attention of the row's model; unchanged without experts.

    `grouped`: whether grouped calls are priced as such, else as batched matmuls.
    """
    if not run.shape.experts:
        return schedule
    whole = 0.5 if _windowed(run) else 1.0
    rows = run.tokens * run.shape.experts_per_token * run.experts / run.shape.experts

    def one(i: Instruction) -> Instruction:
        if i.cost is None:
            return i
        if i.cost.attention_flops:
            return replace(i, cost=replace(i.cost, attention_flops=i.cost.attention_flops * whole))
        if not i.cost.matmul_flops:
            return i
        names = {_ROUTER: _HALF}
        calls = grouped and run.recipe.grouped and "/moe/experts/" in i.source
        cost = _grouped(i.cost, rows) if calls else i.cost
        if run.precision == "fp8" and "logits" not in i.source:
            names[_HALF] = f"{_EIGHT}_highest" if "transpose(" in i.source else _EIGHT
        return replace(i, cost=renamed(cost, names))

    bodies = {name: tuple(one(i) for i in body) for name, body in schedule.computations.items()}
    return replace(schedule, computations=bodies)


def _grouped(cost: Cost, rows: float) -> Cost:
    """A batched matmul of experts as a grouped call: what it takes longer as FLOP of no shape."""
    weights = any(m.k == round(rows) for m in cost.matmuls)
    slower = float(np.interp(np.log(rows), np.log(_GROUPED_ROWS), _GROUPED_WEIGHTS if weights else _GROUPED))
    return replace(cost, matmul_flops={dtype: flops * slower for dtype, flops in cost.matmul_flops.items()})


def is_routing(i: Instruction) -> bool:
    """Whether an instruction of our program moves tokens to experts and back, or works on rows there."""
    if i.collective is not None:
        return "/moe/" in i.source
    plain = i.cost is not None and not i.cost.matmul_flops and not i.bodies
    return plain and "/moe/experts/" in i.source and "dynamic_update" not in i.source


def renamed(cost: Cost, names: Mapping[str, str]) -> Cost:
    """The cost of matmuls with other element types; those that are not named stay."""
    flops: dict[str, float] = {}
    for dtype, value in cost.matmul_flops.items():
        name = names.get(dtype, dtype)
        flops[name] = flops.get(name, 0.0) + value
    matmuls = tuple(replace(m, dtype=names.get(m.dtype, m.dtype)) for m in cost.matmuls)
    return replace(cost, matmul_flops=flops, matmuls=matmuls)


def cast_share(cluster: Cluster) -> float:
    """Of the peak of device memory, that a cast along both dims reaches."""
    return HOPPER_CAST_SHARE if cluster.gpu.key.startswith("h") else CAST_SHARE


def quantization_s(run: Run, cluster: Cluster, share: float | None = None) -> float:
    """Seconds of a layer and micro-batch of casting operands to 8 bits; 0 where the program does, or none is needed.

    Inputs of both linear layers of experts forward, gradients of their outputs backward; weights are cast once a step,
    and attention's casts are in transformer_engine.py. `share`: of the peak of device memory; default: measured.
    """
    if not run.shape.experts or run.precision != "fp8":
        return 0.0
    s, k = run.shape, run.shape.experts_per_token
    between = 0 if run.recipe.fused else 3 * s.ffn  # of both matmuls of an expert
    experts = k * (2 * s.hidden + between)
    each = _CAST_BYTES + (_ACTIVATION if is_current(run) else 0)  # which reads once more, for the largest values
    moved = each * run.tokens * experts / run.tensor
    return moved / ((share or cast_share(cluster)) * cluster.gpu.memory_bytes_per_s)


def copies(run: Run, groups: int) -> float:
    """Of so many equal groups of experts, those that a token goes to on average: k of E are drawn evenly."""
    e, k = run.shape.experts, run.shape.experts_per_token
    return groups * (1 - math.comb(e - e // groups, k) / math.comb(e, k))


def exchange_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a layer and micro-batch of sending tokens to experts and back, both passes, none of it hidden.

    A tensor-parallel replica cuts its tokens over its GPUs, and gathers the rows of all of them behind the all-to-all.
    What tells which rows come: HybridEP gathers a byte of each token and expert by NCCL, which its published rates lack
    (Executor::allgather_routing_map); Megatron-Core from 0.13 on gathers counts, and sends a probability with each row,
    there and back (MoEAlltoAllTokenDispatcher).
    """
    s, ways = run.shape, run.experts
    sent = run.tokens / run.tensor * s.hidden * _ACTIVATION
    rows = sent * s.experts_per_token
    total = 0.0
    if run.tensor > 1:
        gathered = {"payload_bytes": rows * run.tensor, "gpus_per_domain": run.tensor, "cluster": cluster}
        total += 2 * (collective_time_s("all-gather", **gathered) + collective_time_s("reduce-scatter", **gathered))
    if ways == 1:
        return total
    inside = math.gcd(ways, max(1, cluster.gpus_used_per_domain // run.tensor))
    hosts = ways // inside
    group = {"gpus_per_domain": inside, "domains": hosts, "cluster": cluster}
    if run.recipe.dispatcher == "hybridep":
        table, received = (_HYBRID, sent * copies(run, ways))
        if hosts > 1:
            table, received = _HYBRID_IB, sent * copies(run, hosts)
        dispatch, combine = (1e9 * float(np.interp(ways, table["gpus"], table[way])) for way in ("dispatch", "combine"))
        mapped = run.tokens / run.tensor * s.experts * ways
        gather = collective_time_s("all-gather", payload_bytes=mapped, **group)
        return total + gather + 2 * received * (1 / dispatch + 1 / combine)
    if "Megatron-Bridge" in run.row.source:
        total += collective_time_s("all-gather", payload_bytes=_COUNT * s.experts * ways, **group)
        total += 2 * collective_time_s("all-to-all", payload_bytes=rows / s.hidden, **group)
    return total + 4 * collective_time_s("all-to-all", payload_bytes=rows, **group)


def beside_s(run: Run, cluster: Cluster, compute_s: float) -> float:
    """Seconds that the exchange of a layer adds to it, as the recipe runs it.

    Overlapped it runs beside the layers of the micro-batch before, and the first and the last are beside nothing.
    """
    alone = exchange_s(run, cluster)
    if not run.recipe.overlapped:
        return alone
    left = arithmetic_left(cluster.gpu, _HYBRID_CHANNELS)
    slowed = compute_s + alone * (1 - left) if alone * left <= compute_s else alone
    return max(slowed, alone) - compute_s + alone / run.micro_batches


def passes_s(run: Run, cluster: Cluster, share: float | None = None) -> float:
    """Seconds of a layer and micro-batch of moving rows to an expert's matmuls and back.

    Permutations: by destination, then by expert where a GPU has several, and back, which sums the copies of a token; so
    do DeepEP's own as they combine. `share`: of the peak of device memory, for permutations; default: measured.
    """
    s, recipe = run.shape, run.recipe
    tokens = run.tokens / run.tensor
    rows = tokens * s.experts_per_token
    wide = s.hidden * _ACTIVATION / cluster.gpu.memory_bytes_per_s
    if recipe.dispatcher == "hybridep":
        moved = 2 * (tokens * copies(run, run.experts) + rows)
        seconds = moved * wide * (1 / (share or _HYBRID_PERMUTE_SHARE) + 1 / (share or _HYBRID_RETURN_SHARE))
    else:
        sorts = run.tensor if recipe.grouped and s.experts > run.experts else 0
        seconds = 4 * (tokens + rows + 2 * rows * sorts) * wide / (share or _PERMUTE_SHARE)
        if run.precision == "fp8" and not recipe.capacity:
            seconds += 8 * rows * s.hidden * _ACTIVATION / memory_bytes_per_s(cluster.gpu)
    return seconds


def operators_s(run: Run, cluster: Cluster, share: float | None = None) -> float:
    """Seconds of a layer and micro-batch of operators and small kernels between an expert's matmuls and around them.

    `share`: of memory's peak, which operators on strided tensors reach; default: as measured.
    """
    s, recipe = run.shape, run.recipe
    tokens = run.tokens / run.tensor
    rows = tokens * s.experts_per_token
    again = "moe_act" in recipe.recomputes
    done: list[tuple[float, tuple[float, float]]] = []  # elements, and bytes of each
    if not recipe.fused:
        done += [(rows * s.ffn, i) for i in (*_GATED, *_GATED[:again])]
    if s.biased and not recipe.fused:
        bias = _BIAS_FLOAT if recipe.dispatcher == "hybridep" else _BIAS
        done += [(rows * 2 * s.ffn, i) for i in (*_CLAMP, *_CLAMP[:again])] + [(rows * s.hidden, i) for i in bias]
    if s.biased:
        done += [(2 * tokens * s.hidden, i) for i in _RESIDUAL]
        done += [(tokens * (s.heads * s.head_dim + s.keys), i) for i in _ROTATION]
    if "layernorm" in recipe.recomputes:
        done.append((tokens * s.hidden, _NORM))
    gpu = cluster.gpu
    rate = share * gpu.memory_bytes_per_s if share else _STRIDED_BYTES * gpu.sms * gpu.clock_hz
    strided = sum(count * i[0] for count, i in done) / min(rate, memory_bytes_per_s(gpu))
    return strided + sum(count * i[1] for count, i in done) / memory_bytes_per_s(gpu)


def _windowed(run: Run) -> bool:
    """Whether every second layer attends to a window."""
    return 0 < run.shape.window < run.length


def window_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a layer and micro-batch, both passes, of attention to a window, which every second layer has."""
    if not _windowed(run):
        return 0.0
    queries = run.tokens * run.shape.heads / run.tensor
    return 0.5 * queries * _WINDOW_S[_measured_on(cluster)]


def heads_norms_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a layer and micro-batch of norms of queries and keys, both passes."""
    s = run.shape
    elements = run.tokens * (s.heads * s.head_dim + s.keys) / run.tensor
    rates = (min(i, memory_bytes_per_s(cluster.gpu)) for i in _HEADS_NORMED[_measured_on(cluster)])
    return sum(elements * size / rate for size, rate in zip(_HEAD_NORM, rates)) if s.normed else 0.0


def _measured_on(cluster: Cluster) -> str:
    """The GPU of NVIDIA/cudnn-frontend's tables that stands for a cluster's."""
    generation = {"b200": "gb200", "gb200": "gb200", "b300": "gb300", "gb300": "gb300"}
    return generation.get(cluster.gpu.key, "hopper")
