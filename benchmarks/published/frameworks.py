"""What each framework does on its own account, in one table. Third in the flow of the replay.

A JAX run is replayed whole: our step, compiled for its mesh, with the XLA options that its source states. So is fully
sharded training in PyTorch, whose gathers and scatters per layer and micro-batch are those of our program; its prefetch
of the next layer is XLA's pipelining of collectives.

Frameworks that run whole replicas (Megatron-LM, DeepSpeed, InternEvo) launch one program per pipeline stage and reduce
gradients themselves. There one stage of one replica is compiled, and `replica.py` adds what the framework does around
it: 1F1B, the reduction of gradients, the gather of weights. Nothing here is a fitted number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.published.rows import Row

# XLA runs every collective on its own as soon as a program wants more memory than the GPU has. A published run fitted,
# so its program shall not be held to that where ours wants more.
_ROOM = {"xla_gpu_memory_limit_slop_factor": 1000}
_PIPELINED = {
    "xla_gpu_pipeline_all_gather": 2,
    "xla_gpu_pipeline_reduce_scatter": 2,
    "xla_gpu_pipeline_all_reduce": 2,
    "xla_disable_hlo_passes": "rematerialization",
}
_LAYER_AT_A_TIME = {
    "xla_gpu_all_gather_combine_threshold_bytes": 2**31,
    "xla_gpu_all_reduce_combine_threshold_bytes": 2**31,
}


@dataclass(frozen=True)
class Framework:
    """How a framework runs a training step, as far as its programs differ from ours.

    Attributes:
        name: what families of rows are called.
        source: pattern of a row's source.
        whole: the whole step is one compiled program; otherwise one stage of one replica is.
        fused_attention: or scores in memory, as before FlashAttention.
        attention: kernels of kernels.toml; "" where those of the catalog serve.
        reduce: dtype in which gradients travel.
        sharded_optimizer: ZeRO-1: gradients are scattered, weights gathered once a step; else gradients all-reduced.
        overlaps_gradients: their reduction runs under the last backward pass, the gather under the next forward pass.
        overlaps_tensor: collectives of tensor and context parallelism run as the compiled schedule has them; else each
            blocks.
        chunked_tensor: gathers and scatters of sequence parallelism run piece by piece beside their matmuls
            (userbuffers): of `tensor` pieces one is exposed.
        overlaps_stages: sends between pipeline stages hide under other micro-batches.
        sequence_parallel: with tensor parallelism, unless the row says no.
        per_tensor: ZeRO-1 that all-reduces gradients, and broadcasts each parameter tensor from its one owner.
        xla: options of the compiler.
        why: where this is from.
    """

    name: str
    source: str
    whole: bool = False
    fused_attention: bool = True
    attention: str = ""
    reduce: str = "fp32"
    sharded_optimizer: bool = False
    overlaps_gradients: bool = False
    overlaps_tensor: bool = True
    chunked_tensor: bool = False
    overlaps_stages: bool = False
    sequence_parallel: bool = False
    per_tensor: bool = False
    xla: Mapping[str, object] = field(default_factory=dict)
    why: str = ""


_JAX_OPTIONS = {**_PIPELINED, **_LAYER_AT_A_TIME}
_FSDP_OPTIONS = {**_ROOM, **_JAX_OPTIONS}

FRAMEWORKS = (
    Framework(
        "MaxText", r"MaxText", whole=True, reduce="bf16", xla=_JAX_OPTIONS,
        why="configure.sh of the row's page: pipelined collectives, combine thresholds, rematerialization pass off",
    ),
    Framework(
        "Paxml", r"Paxml|\bpax\b|T5X", whole=True, reduce="bf16", xla=_JAX_OPTIONS,
        why="the images of the same months as MaxText's rows; their XLA options are not stated",
    ),
    Framework(
        "MosaicML", r"MosaicML|llm-foundry", whole=True, attention="triton_flash1", reduce="bf16", xla=_FSDP_OPTIONS,
        why="FSDP1: composer's get_mixed_precision (DEFAULT and PURE) leaves gradients in the compute dtype; prefetch "
        "of the next block; triton FlashAttention",
    ),
    Framework(
        "IBM fms-fsdp", r"fms-fsdp|IBM", whole=True, attention="flash2", reduce="bf16", xla=_FSDP_OPTIONS,
        why="fms_fsdp/policies/mixed_precision.py: bf16 reductions; torch.compile",
    ),
    Framework(
        "torchtitan", r"torchtitan", whole=True, attention="flash2", reduce="fp32", sequence_parallel=True,
        sharded_optimizer=True, overlaps_gradients=True, xla=_FSDP_OPTIONS,
        why="FSDP2, fp32 reductions by default (mixed_precision_reduce); with pipeline stages weights stay gathered",
    ),
    Framework(
        "KempnerForge", r"Kempner", whole=True, attention="flash2", reduce="fp32", sequence_parallel=True,
        xla=_FSDP_OPTIONS,
        why="FSDP2 and torch.compile; reductions as FSDP2's users set them, not stated",
    ),
    Framework(
        "InternEvo", r"InternEvo", attention="flash2", reduce="bf16", sharded_optimizer=True,
        overlaps_gradients=True, per_tensor=True,
        why="hybrid_zero_optim.py and configs/7B_sft.py: bf16 gradients all-reduced over all replicas under the last "
        "backward pass (overlap_sync_grad); every parameter tensor has one owner in the ZeRO-1 group, which broadcasts "
        "its new value after the optimizer (overlap_sync_param is off)",
    ),
    Framework(
        "SimuMax", r"SimuMax", sharded_optimizer=True, overlaps_tensor=False, sequence_parallel=True,
        why="the page: Megatron-LM 0.14, distributed optimizer, overlap of communication off by design",
    ),
    Framework(
        "vTrain", r"vTrain", fused_attention=False, reduce="bf16", overlaps_tensor=False,
        why="Megatron-DeepSpeed of 2022: fp16 gradients all-reduced after the last micro-batch, no FlashAttention",
    ),
    Framework(
        "Megatron-LM", r"Korthikanti|Megatron-LM|SC21", fused_attention=False, reduce="bf16", overlaps_tensor=False,
        why="arXiv 2104.04473 and 2205.05198: fp16, no overlap of the gradient all-reduce, no FlashAttention",
    ),
    Framework(
        "Megatron-Core", r"Megatron|NeMo", xla=_ROOM, sharded_optimizer=True, overlaps_gradients=True,
        chunked_tensor=True, overlaps_stages=True, sequence_parallel=True,
        why="NeMo's and Megatron-Bridge's recipes: distributed optimizer, overlap_grad_reduce, overlap_param_gather, "
        "overlap_p2p, tp_comm_overlap (userbuffers) and sequence parallelism with tensor parallelism (recalled)",
    ),
    Framework(
        "Llama 3 paper", r"Llama 3 paper", xla=_ROOM, sharded_optimizer=True, overlaps_gradients=True,
        overlaps_stages=True, sequence_parallel=True,
        why="arXiv 2407.21783, section 3.3: FSDP without resharding after forward, asynchronous sends, fp32 reductions",
    ),
)  # fmt: skip
_SHARDED = Framework(
    "other, fully sharded", "", whole=True, xla=_FSDP_OPTIONS, why="source unknown: taken as fully sharded training"
)
_REPLICATED = Framework(
    "other, replicas", "", sharded_optimizer=True, overlaps_gradients=True, sequence_parallel=True,
    why="source unknown: taken as Megatron-Core",
)  # fmt: skip


def find_framework(row: Row) -> Framework:
    """The framework of a row: by its source, else by whether it cuts its parameters (`fsdp`)."""
    for framework in FRAMEWORKS:
        if re.search(framework.source, row.source, re.IGNORECASE):
            return framework
    return _SHARDED if (row.count("fsdp") or 1) > 1 and (row.count("pp") or 1) == 1 else _REPLICATED
