"""What replicas do once a step: reduce gradients, gather or broadcast weights. Part of replica.py, sixth in the flow.

A framework that overlaps them cuts gradients into buckets. A bucket starts when its last gradient is there, so the
last one is beside nothing; the first bucket of weights likewise. Interleaved stages do it chunk by chunk.
"""

from __future__ import annotations

import re
from collections import Counter

from benchmarks.published.blocks import is_mxfp8
from benchmarks.published.experiments import Run
from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.predict.kernels import memory_bytes_per_s
from meshkit.predict.network import collective_time_s
from meshkit.predict.pricing import arithmetic_left

GRADIENT_BYTES = {"bf16": 2, "fp32": 4}
_KEPT_IN_8_BITS = re.compile(
    r"Megatron-Bridge|DGXC NeMo.*(@741c886|@1f6d9f4|nemo_megatron)|Together|FP8_PARAM(S|_GATHER)=True"
)
# Gradients in buckets of 128 Mi parameters at any number of replicas: CommOverlapConfig of Megatron-Bridge (training/
# comm_overlap.py, v0.1.0rc4 to v0.6.0), which all recipes of Llama and Qwen3 beside the pages have, of those of GPT-OSS
# 120B GB200's alone (scripts/performance/configs/gpt_oss, v0.4.0 to v0.5.1; the rest leave it to Megatron-Core), and
# MegatronCommOverlapCallback of NeMo 2 (lightning/pytorch/callbacks/megatron_comm_overlap.py, @03ec896 on), which
# recipes of Llama 3.1 have in performance mode. NeMo 1 hands Megatron-Core no size (megatron_gpt_model.py).
_WIDE = re.compile(
    r"Megatron-Bridge(?!.*GPT OSS)|GPT OSS.* GB200$|DGXC NeMo.*@(741c886|1f6d9f4)|Together.*(llama|qwen)"
)
_WIDE_PARAMETERS = 128 * 2**20
# A matmul that adds to a gradient takes longer than one of the same shape that writes, by this share of the time in
# which memory reads and writes the gradient: medians of 144 and 82 shapes of SimuMax's B200 (4dcaae5,
# configs/system/b200_bf16_ceperm.json: layout NT, accumulate); on its A100 0.42 of 61 in fp32.
_EPILOGUE = {"fp32": 0.57, "bf16": 0.14}


def stage_experts(run: Run) -> float:
    """Parameters of experts on one GPU of the fullest stage."""
    return run.stage_layers * run.shape.expert_parameters() / run.tensor / run.experts


def stage_parameters(run: Run) -> float:
    """Parameters on one GPU of the fullest stage, but for experts."""
    return run.stage_layers * run.shape.layer_parameters() / run.tensor + table_parameters(run)


def table_parameters(run: Run) -> float:
    """Parameters of embedding and output head on one GPU of the fullest stage."""
    shape = run.shape
    return shape.vocab * shape.hidden * (1 if run.stages > 1 or shape.tied else 2) / run.tensor


def optimizer_ways(run: Run) -> int:
    """GPUs that share the optimizer state of a stage: 1 without ZeRO-1."""
    if not run.framework.sharded_optimizer:
        return 1
    return _zero_group(run) or run.data * run.context


def _zero_group(run: Run) -> int | None:
    """The size of InternEvo's ZeRO-1 group, where the notes state one (`zero1=8`; -1: every replica)."""
    text = run.row.notes.replace(" ", "")
    if "zero1=" not in text:
        return None
    digits = text.split("zero1=", 1)[1]
    number = "".join(c for c in digits[:5].split("(")[0].split(",")[0] if c.isdigit() or c == "-")
    size = int(number) if number.lstrip("-").isdigit() else -1
    return run.data if size < 1 else min(size, run.data)


def gathered_bytes(run: Run) -> int:
    """Of a linear layer's weight that replicas gather: 1 where it is kept in 8 bits (housekeeping.py), else 2."""
    kept = _KEPT_IN_8_BITS.search(f"{run.row.source} {run.row.notes}")
    return 1 if kept and run.precision == "fp8" and not is_mxfp8(run) else 2


def gradients_s(run: Run, cluster: Cluster, backward_s: float, forward_s: float) -> float:
    """Seconds that reducing gradients and gathering weights once a step adds to it.

    Args:
        run: the row.
        cluster: of the whole run.
        backward_s: of a micro-batch, under which gradients may be reduced; 0 for none.
        forward_s: the same, for the gather of weights.
    """
    members = run.data * run.context
    if members == 1:
        return 0.0
    if not run.framework.overlaps_gradients:
        backward_s = forward_s = 0.0
    if not run.recipe.overlaps_weights:
        forward_s = 0.0
    size = stage_parameters(run)
    count = _buckets(run, size)
    wire = GRADIENT_BYTES[run.framework.reduce] * size / count
    if run.framework.per_tensor:
        reduction = _priced(run, cluster, "all-reduce", wire, members)
        return _beside(reduction, count, backward_s, cluster) + _broadcasts_s(run, cluster)
    if not run.framework.sharded_optimizer:
        return _beside(_priced(run, cluster, "all-reduce", wire, members), count, backward_s, cluster)
    scatter = _priced(run, cluster, "reduce-scatter", wire, members)
    sent = gathered_bytes(run) * size + (2 - gathered_bytes(run)) * table_parameters(run)  # which stay in 16 bits
    gather = _priced(run, cluster, "all-gather", sent / count, members)
    if run.shape.experts and members > run.experts:  # in buckets of their own, among fewer replicas
        owned, few = stage_experts(run), members // run.experts
        more = _buckets(run, owned)
        wire, scatter, gather = GRADIENT_BYTES[run.framework.reduce] * owned, count * scatter, count * gather
        scatter += _priced(run, cluster, "reduce-scatter", wire / more, few, run.experts) * more
        gather += _priced(run, cluster, "all-gather", gathered_bytes(run) * owned / more, few, run.experts) * more
        count += more
        scatter, gather = scatter / count, gather / count
    if run.framework.overlaps_stages and run.chunks > 1 and backward_s:
        return _by_chunks(run, cluster, (count * scatter, backward_s), (count * gather, forward_s), count)
    return _beside(scatter, count, backward_s, cluster) + _beside(gather, count, forward_s, cluster)


def _by_chunks(run: Run, cluster: Cluster, gradients: tuple[float, float], weights: tuple[float, float], count: int):
    """Seconds that collectives of all gradients, and of all weights, add to an interleaved schedule's micro-batches.

    All stages start a chunk's gradients at once, when the first of them is done with its last micro-batch
    (`align_grad_reduce`): those of the chunk that ends last are beside nothing, the others under as many turns as there
    are stages for each chunk to come. The weights of the first two chunks start with the step, so that the first is
    gathered under one turn of its own, the others under those of all before them (Megatron-LM core_v0.8.0,
    pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving, and training/training.py).

    Args:
        run: the row.
        cluster: of the whole run.
        gradients, weights: seconds of all of their collectives, and of a pass of one micro-batch over the stage.
        count: collectives of each.
    """
    each, rest = 1 / run.chunks, 1 - 1 / run.chunks
    turns = min(run.stages, run.micro_batches) * rest
    first = max(1, round(count * each))
    return (
        gradients[0] * each
        + _beside(gradients[0] * rest, 1, gradients[1] * turns, cluster)
        + _beside(weights[0] * each / first, first, weights[1] * each, cluster)
        + _beside(weights[0] * rest, 1, weights[1] * turns, cluster)
    )


def copies_s(run: Run, cluster: Cluster) -> float:
    """Seconds a step of copying gradients into buckets and back."""
    return run.framework.bucket_copy_bytes * stage_parameters(run) / memory_bytes_per_s(cluster.gpu)


def accumulation_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a layer and micro-batch of adding to gradients in the epilogues of matmuls; 0 where none does.

    Experts' grouped calls were measured with theirs (experts.py).
    """
    if not run.framework.fused_gradients:
        return 0.0
    kept = run.framework.reduce
    weights = run.shape.layer_parameters() / run.tensor
    weights += 0.0 if run.recipe.grouped else stage_experts(run) / run.stage_layers
    moved = 2 * GRADIENT_BYTES[kept] * weights
    return _EPILOGUE[kept] * moved / memory_bytes_per_s(cluster.gpu)


def _buckets(run: Run, size: float) -> int:
    """Collectives that a stage's gradients are reduced in; 1 where they are not overlapped."""
    framework = run.framework
    if not (framework.bucket_parameters and framework.overlaps_gradients):
        return 1
    each = max(framework.bucket_parameters, framework.bucket_per_replica * run.data * run.context)
    row = run.row
    if _WIDE.search(f"{row.source} {row.say('model')} {row.say('gpu')}"):
        each = _WIDE_PARAMETERS
    return max(1, round(size / each))


def _beside(seconds: float, count: int, window_s: float, cluster: Cluster) -> float:
    """Seconds that `count` collectives of so many seconds add to compute which they run beside.

    They slow it, and may outlast it: by the law of a plan (predict/pricing.py). The last bucket starts when compute is
    done.
    """
    if not window_s:
        return count * seconds
    last = seconds if count > 1 else 0.0
    window_s *= (count - 1) / count if count > 1 else 1.0
    seconds *= count - 1 if count > 1 else 1
    left = arithmetic_left(cluster.gpu, catalog.kernels()["nccl_channels"][cluster.num_nvlink_domains > 1])
    slowed = window_s + seconds * (1 - left) if seconds * left <= window_s else seconds
    return max(slowed, seconds) - window_s + last


def _broadcasts_s(run: Run, cluster: Cluster) -> float:
    """Seconds of broadcasting every parameter tensor inside the ZeRO-1 group, one after the other.

    A group of fewer GPUs than there are tensors flattens those of an owner into one. Each waits for the one before: the
    next owner is, in NCCL's rings of a host, as a rule behind the last one, and so the last that the chain reaches.
    """
    group, sizes = optimizer_ways(run), _tensor_sizes(run)
    if group < len(sizes):
        sizes = [sum(sizes) / group] * group
    counts = Counter(sizes)
    kind = "collective-broadcast"
    return sum(n * _priced(run, cluster, kind, gathered_bytes(run) * size, group) for size, n in counts.items())


def _tensor_sizes(run: Run) -> list[float]:
    """Elements of each parameter tensor on one GPU: queries, keys and values in one, norms and biases apart."""
    s = run.shape
    qkv = s.hidden * (s.heads * s.head_dim + 2 * s.keys)
    matrices = [qkv, s.hidden * s.hidden, *[s.hidden * s.ffn] * (3 if s.gated else 2)]
    layer = [m / run.tensor for m in matrices] + [float(s.hidden)] * 4
    return layer * run.stage_layers + [s.vocab * s.hidden / run.tensor] * (1 if s.tied else 2) + [float(s.hidden)]


def _priced(run: Run, cluster: Cluster, kind: str, size: float, members: int, apart: int = 1) -> float:
    """Seconds of a collective among replicas, every `apart`-th: neighbours on the mesh are `tensor` GPUs apart."""
    if members == 1:
        return 0.0
    inside = min(members, max(1, cluster.gpus_used_per_domain // (run.tensor * apart)))
    while members % inside:
        inside -= 1
    return collective_time_s(
        kind, payload_bytes=size, gpus_per_domain=inside, domains=members // inside, cluster=cluster
    )
