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
from dataclasses import dataclass, field, replace

from benchmarks.published.rows import Row

_FSDP1, _FSDP2 = (0, 4 + 4), (4, 4 + 6)  # bytes of fsdp.py
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
class Memory:
    """What a framework that is not JAX keeps in a GPU's memory, for holdings.py.

    Attributes:
        shards: FSDP: fp32 shards of everything; otherwise weights and gradients of a stage whole, 16-bit weights beside
            an fp32 optimizer.
        gradient_bytes: a parameter, of a replica.
        step_bytes: a parameter, while the optimizer of a replica steps: flat copies of gradients.
        dummy_gradients: Transformer Engine keeps an empty gradient in 16 bits for every shape of weight where matmuls
            add to fp32 gradients (get_dummy_wgrad); the output head makes one.
        dropout: with its masks.
        shard_bytes: a parameter and its two moments, of FSDP's shards.
        reduces_last: gradients stay whole until the last micro-batch.
        whole_logits: not cut by tensor parallelism at the loss.
        logit_bytes: an element of the logits, at the loss: 6 in 16 bits and fp32, then in place (Megatron-LM,
            cross_entropy.py); 12 in fp32 for the log-softmax, its gradient and that of its input
            (torch.nn.functional.cross_entropy); 8 in 16 bits for the same and the logits.
        compiles_loss: pattern of sources in which torch.compile compiles the loss too; "" for none.
        why: where this is from.
    """

    shards: bool = False
    gradient_bytes: int = 4
    step_bytes: int = 0
    dummy_gradients: bool = False
    dropout: bool = False
    shard_bytes: int = 12
    reduces_last: bool = False
    whole_logits: bool = False
    logit_bytes: int = 6
    compiles_loss: str = ""
    why: str = ""


_FSDP = Memory(shards=True, logit_bytes=12, why="FSDP with fp32 parameters, eager cross-entropy in fp32")
_MEGATRON = Memory(
    dummy_gradients=True,
    why="Megatron-LM core: bf16 weights, fp32 main gradients, distributed optimizer; Transformer Engine 2; "
    "vocab_parallel_cross_entropy in place",
)
_HALF = Memory(gradient_bytes=2, dropout=True, why="fp16 weights and gradients, fp32 Adam, dropout")


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
        chunked_tensor: gathers and scatters of sequence parallelism run beside their matmuls (userbuffers.py).
        overlaps_stages: sends between pipeline stages of several chunks hide under other micro-batches.
        sequence_parallel: with tensor parallelism, unless the row says no.
        prefetches: FSDP in PyTorch: gathers and scatters run on a stream beside compute (prefetch.py).
        per_tensor: ZeRO-1 that all-reduces gradients, and broadcasts each parameter tensor from its one owner.
        bucket_parameters, bucket_per_replica: parameters whose gradients are reduced at once where that is overlapped,
            at least, and for every replica; 0: all.
        bucket_copy_bytes: a parameter, of copies of gradients around their reduction, once a step.
        gradient_passes: over the buffer of gradients, once a step, with replicas (housekeeping.py); 0: others
            that are counted elsewhere.
        reruns: pattern of precisions of rows in which recomputation runs a layer whole (ours.py); "" for none.
        fused_gradients: matmuls add to the gradients of weights in their epilogue (`gradient_accumulation_fusion`).
        between: count of eager.py, or transformer_engine.py, that what our program has between the matmuls of a layer
            makes way for (fsdp.py for a whole step); "" for none.
        gathered: bytes a parameter of a layer that FSDP moves itself, forward and backward (fsdp.py).
        memory: what a GPU holds; None where XLA's program says it.
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
    prefetches: bool = False
    per_tensor: bool = False
    bucket_parameters: int = 0
    bucket_per_replica: int = 0
    bucket_copy_bytes: int = 0
    gradient_passes: int = 0
    reruns: str = ""
    fused_gradients: bool = False
    between: str = ""
    gathered: tuple[float, float] = (0, 0)
    memory: Memory | None = None
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
        "MosaicML", r"MosaicML|llm-foundry", whole=True, prefetches=True, attention="triton_flash1", reduce="bf16",
        xla=_FSDP_OPTIONS, memory=_FSDP, reruns="^bf16$", between="mpt", gathered=_FSDP1,
        why="FSDP1: composer's get_mixed_precision (PURE, and DEFAULT up to 0.16.3: fsdp.py) leaves gradients in the "
        "compute dtype; prefetch of the next block; triton FlashAttention; rows in pure bf16 are those of the page of "
        "May 2023 (300cc5c), with torch 1.13.1, whose checkpoint runs whole blocks again; amp_fp8 is Transformer "
        "Engine's DelayedScaling (mosaicml/composer@d4c0aacf, core/precision.py)",
    ),
    Framework(
        "IBM fms-fsdp", r"fms-fsdp|IBM", whole=True, prefetches=True, attention="flash2", reduce="bf16",
        xla=_FSDP_OPTIONS, memory=_FSDP, gathered=_FSDP1,
        why="fms_fsdp/policies/mixed_precision.py: bf16 reductions; torch.compile",
    ),
    Framework(
        "torchtitan", r"torchtitan", whole=True, prefetches=True, attention="flash2", reduce="fp32",
        sequence_parallel=True, sharded_optimizer=True, overlaps_gradients=True, xla=_FSDP_OPTIONS,
        gathered=_FSDP2, memory=replace(
            _FSDP, compiles_loss=r"_?(2025|2026)",
            why="pytorch/torchtitan@9dec370 (2024-12): cross-entropy of pred.float(), compiling it commented out; "
            "@e7c0cae (2025-06): compiled",
        ),
        why="FSDP2, fp32 reductions by default (mixed_precision_reduce); with pipeline stages weights stay gathered",
    ),
    Framework(
        "KempnerForge", r"Kempner", whole=True, prefetches=True, attention="flash2", reduce="fp32",
        sequence_parallel=True, xla=_FSDP_OPTIONS, gathered=_FSDP2,
        memory=Memory(
            shards=True, shard_bytes=6, reduces_last=True, whole_logits=True, logit_bytes=8,
            why="KempnerInstitute/KempnerForge, distributed/parallel.py, training/grad.py and loss.py: all in bf16, "
            "fp32 reductions with the last micro-batch, logits gathered over tensor parallelism and lost in bf16",
        ),
        why="FSDP2 with fp32 reductions (default_mp_policy), torch.compile",
    ),
    Framework(
        "InternEvo", r"InternEvo", attention="flash2", reduce="bf16", sharded_optimizer=True,
        overlaps_gradients=True, per_tensor=True, bucket_parameters=512 * 2**20,
        bucket_copy_bytes=8, reruns=".", between="internevo",
        memory=Memory(
            gradient_bytes=2, step_bytes=6, logit_bytes=12,
            why="hybrid_zero_optim.py: weights and gradients in bf16, flat copies in bf16 and fp32 in _step",
        ),
        why="InternLM/InternEvo@c628a8c, hybrid_zero_optim.py and configs/7B_sft.py: bf16 gradients copied "
        "into buckets of 2^29 and back, all-reduced over all replicas under the last backward pass "
        "(overlap_sync_grad); every parameter tensor has one owner in the ZeRO-1 group, which broadcasts its new value "
        "after the optimizer (overlap_sync_param is off)",
    ),
    Framework(
        "SimuMax", r"SimuMax", sharded_optimizer=True, overlaps_tensor=False, sequence_parallel=True, memory=_MEGATRON,
        fused_gradients=True, gradient_passes=3, between="transformer_engine",
        why="the page: Megatron-LM 0.14, distributed optimizer, overlap of communication off by design; fusion of "
        "gradients on by default (training/arguments.py)",
    ),
    Framework(
        "vTrain", r"vTrain", fused_attention=False, reduce="bf16", overlaps_tensor=False, memory=_HALF, reruns=".",
        between="megatron", bucket_copy_bytes=12,
        why="Megatron-DeepSpeed of 2022: fp16 gradients all-reduced after the last micro-batch (made flat, scaled and "
        "copied back: engine.py, allreduce_and_copy), no FlashAttention",
    ),
    Framework(
        "Megatron-LM", r"(?<!NVIDIA/)Megatron-LM|SC21", fused_attention=False, reduce="bf16", overlaps_tensor=False,
        memory=_HALF, reruns=".", between="megatron", bucket_copy_bytes=6,
        why="arXiv 2104.04473, NVIDIA/Megatron-LM@50a4b5f: fp16, no overlap of any collective (gradients in a buffer "
        "that is zeroed and divided: model/distributed.py), no FlashAttention",
    ),
    Framework(
        "Megatron-LM", r"Korthikanti", fused_attention=False, reduce="bf16", memory=_HALF, reruns=".",
        between="megatron", bucket_copy_bytes=6,
        why="arXiv 2205.05198: as in 2021, but collectives of tensor parallelism in the backward pass run beside the "
        "matmuls of weights (mpu/layers.py of @841f789: LinearWithGradAccumulationAndAsyncAllreduce)",
    ),
    Framework(
        "Megatron-Core", r"Megatron|NeMo|MLPerf|Together", prefetches=True, xla=_ROOM, sharded_optimizer=True,
        overlaps_gradients=True, memory=_MEGATRON, chunked_tensor=True, overlaps_stages=True, sequence_parallel=True,
        bucket_parameters=40_000_000, bucket_per_replica=1_000_000, reruns=".",
        fused_gradients=True, gradient_passes=1, between="transformer_engine",
        why="NeMo's and Megatron-Bridge's recipes: distributed optimizer, overlap_grad_reduce, overlap_param_gather "
        "(buckets of 40 million parameters, or a million a replica: distributed_data_parallel.py; what recipes set "
        "instead: reduction.py), "
        "overlap_p2p, tp_comm_overlap (userbuffers), sequence parallelism with tensor parallelism, "
        "gradient_accumulation_fusion (models/gpt_provider.py, v0.3.0; gpt/model/base.py, NeMo v2.0.0)",
    ),
    Framework(
        "Llama 3 paper", r"Llama 3 paper", xla=_ROOM, sharded_optimizer=True, overlaps_gradients=True,
        overlaps_stages=True, sequence_parallel=True, memory=_FSDP,
        why="arXiv 2407.21783, section 3.3: FSDP without resharding after forward, asynchronous sends, fp32 reductions",
    ),
)  # fmt: skip
_SHARDED = Framework(
    "other, fully sharded", "", whole=True, prefetches=True, xla=_FSDP_OPTIONS, memory=_FSDP,
    why="source unknown: taken as fully sharded training",
)  # fmt: skip
_REPLICATED = Framework(
    "other, replicas", "", sharded_optimizer=True, overlaps_gradients=True, sequence_parallel=True, memory=_MEGATRON,
    reruns=".", fused_gradients=True, gradient_passes=1, between="transformer_engine",
    why="source unknown: taken as Megatron-Core",
)  # fmt: skip


def find_framework(row: Row) -> Framework:
    """The framework of a row: by its source, else by whether it cuts its parameters (`fsdp`)."""
    for framework in FRAMEWORKS:
        if re.search(framework.source, row.source, re.IGNORECASE):
            return framework
    return _SHARDED if (row.count("fsdp") or 1) > 1 and (row.count("pp") or 1) == 1 else _REPLICATED
