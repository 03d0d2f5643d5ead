"""What Megatron-Core does once a step, and with largest values. Part of replica.py, sixth in the flow of the replay.

    gradients         their buffer is filled with zeros (distributed/param_and_grad_buffer.py, `reset`), and divided by
                      the number of replicas unless the collective averages (`average_in_collective`: recipes of NeMo 2
                      and Megatron-Bridge ask for it, Megatron-LM's own script does not). Those of experts, in buffers
                      of their own, are scaled in any case where GPUs share them, as an average is of fewer replicas
                      (distributed/distributed_data_parallel.py, `expert_gradient_scaling_factor`). Where the loss is
                      a sum over tokens (`calculate_per_token_loss`: GPT-OSS in Megatron-Bridge from v0.4.0 on,
                      recipes/gpt_oss/gpt_oss.py), none is scaled before, and all are divided by the number of tokens
                      once they are reduced (distributed/finalize_model_grads.py)
    weights           fp32 ones are copied to 16 bits, gradients of 16 bits to fp32 (optimizer/distrib_optimizer.py),
                      of experts what one of their fewer replicas owns. Neither with the precision-aware optimizer,
                      which Megatron-Bridge takes in bf16 (scripts/performance of v0.1.0rc4 to v0.5.1: run_script.py,
                      utils/helpers.py, utils/overrides.py) and NeMo 2 for Llama 3.1 405B on GB200 (@6f2c6fd,
                      scripts/performance/utils.py; v2.2 does not): TransformerEngine's Adam reads gradients where they
                      were reduced, and writes weights in 16 bits and what fp32 has beyond them
                      (`store_param_remainders`), as many bytes as fp32. Those of linear layers are cast to 8 or 4 bits
                      with the first micro-batch (TransformerEngine, `is_first_microbatch`), along both dims where
                      matmuls in 8 bits take no transposed operand, as on Hopper (pytorch/utils.py of v2.8,
                      is_non_tn_fp8_gemm_supported) and before v2.0. Kept in 8 bits (`fp8_params`, `fp8_param_gather`:
                      Megatron-Bridge, training/mixed_precision.py, and NeMo 2, where scales are of tensors), they
                      travel so and are only turned. Embedding and output head are no layers of TransformerEngine:
                      they stay in 16 bits (core/transformer/transformer_block.py makes its layers alone in
                      `fp8_model_init`; core/models/gpt/gpt_model.py)
    tied embedding    the gradients of its two copies, on the first stage and on the last, are summed behind those of
                      replicas (distributed/finalize_model_grads.py): beside nothing
    largest values    with delayed scaling all-reduced behind each pass of a micro-batch over a chunk, which waits
                      (TransformerEngine from v1.6 on, pytorch/fp8.py, reduce_and_update_fp8_tensors; before, launchers
                      of NVIDIA had that beside compute and among tensor-parallel GPUs alone): over tensor, context and
                      data parallelism, in core_v0.8.0 and in MLPerf v4.1 without the last (core/parallel_state.py)

A tenth of a millisecond a step or less, and not here: gradients of norms over tensor parallelism and the norm of all
gradients. Nor is clipping, which runs only where that norm is above its limit.
"""

from __future__ import annotations

import re

from benchmarks.published.blocks import MXFP8_CAST, cast_bytes, is_mxfp8
from benchmarks.published.experiments import Run
from benchmarks.published.ours import is_current, wants_both
from benchmarks.published.reduction import (
    GRADIENT_BYTES,
    gathered_bytes,
    optimizer_ways,
    stage_experts,
    stage_parameters,
    table_parameters,
)
from meshkit.config.cluster import Cluster
from meshkit.predict.kernels import memory_bytes_per_s
from meshkit.predict.network import collective_time_s

# Delayed, v1.6 or later; those of core_v0.8.0 or with `tp_only_amax_red` (MLPerf v4.1, conf/custom.yaml).
_WAITING = re.compile(r"DGXC NeMo|NeMo 24\.07|NeMo-Framework-Launcher|MLPerf Training v4\.1")
_AMONG_FEW = re.compile(r"NeMo 24\.07|MLPerf Training v4\.1")
_HALF_BYTES, _COPY_BYTES = 2, 6  # between 16 bits and fp32
_SCALED = 3  # passes over gradients that are scaled: zeros, read and written
_PRECISION_AWARE = re.compile(r"Megatron-Bridge|DGXC NeMo.*@1f6d9f4")  # in bf16
_SUMMED = re.compile(r"Megatron-Bridge 26\.0[468].* GPT OSS")
_LARGEST_BYTES = 4 * 4 * 3  # of a layer: four linear layers, three operands


def housekeeping_s(run: Run, cluster: Cluster) -> float:
    """Seconds a step of passes over gradients and weights on one GPU."""
    whole, owned, ways = stage_parameters(run), stage_experts(run), optimizer_ways(run)
    passes, wide = run.framework.gradient_passes, GRADIENT_BYTES[run.framework.reduce]
    moved = (whole - table_parameters(run) + owned) * weight_bytes(run, cluster)
    if passes:
        reduced = passes if run.data * run.context > 1 else 1
        if _SUMMED.search(f"{run.row.source} {run.row.say('model')}"):
            reduced = _SCALED
        moved += wide * (whole * reduced + owned * (_SCALED if run.experts > 1 else reduced))
    if passes and not (run.precision == "bf16" and _PRECISION_AWARE.search(run.row.source)):
        stepped = whole / ways + owned / max(1, ways // run.experts)
        moved += stepped * _COPY_BYTES * (2 if wide == _HALF_BYTES else 1)
    return moved / memory_bytes_per_s(cluster.gpu)


def weight_bytes(run: Run, cluster: Cluster) -> float:
    """Bytes that are moved to have a linear layer's weight in 8 or 4 bits, once a step."""
    if run.framework.name != "Megatron-Core" or run.precision == "bf16":
        return 0.0
    if run.precision == "nvfp4":
        return cast_bytes(run.recipe.cast_reads)
    if is_mxfp8(run):
        return MXFP8_CAST
    turned = wants_both(run, cluster)
    if gathered_bytes(run) == 1:
        return 2.0 * turned
    return 3 + turned + 2 * is_current(run)


def tied_s(run: Run, cluster: Cluster) -> float:
    """Seconds a step of summing the gradients of a tied embedding's two copies."""
    if not run.shape.tied or run.stages == 1:
        return 0.0
    crosses = run.gpus > cluster.gpus_used_per_domain
    payload = GRADIENT_BYTES[run.framework.reduce] * run.shape.vocab * run.shape.hidden / run.tensor
    inside, domains = (1, 2) if crosses else (2, 1)
    return collective_time_s(
        "all-reduce", payload_bytes=payload, gpus_per_domain=inside, domains=domains, cluster=cluster
    )


def largest_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a layer and micro-batch, of one pass, of reducing the largest values of its chunk."""
    delayed = run.precision == "fp8" and not is_mxfp8(run) and not is_current(run)
    if not (delayed and _WAITING.search(run.row.source)):
        return 0.0
    members = run.tensor * run.context * (1 if _AMONG_FEW.search(run.row.source) else run.data)
    if members == 1:
        return 0.0
    inside = min(members, cluster.gpus_used_per_domain)
    layers = run.stage_layers / run.chunks
    one = collective_time_s(
        "all-reduce", payload_bytes=_LARGEST_BYTES * layers, gpus_per_domain=inside, domains=members // inside,
        cluster=cluster,
    )  # fmt: skip
    return one / layers
