"""Bytes that a framework other than JAX holds at its peak, in closed form. Sixth in the flow of the replay.

    peak = weights, gradients, optimizer + activations of the micro-batches in flight + what one layer or the loss adds

XLA's own peak is that of its own program; PyTorch's frameworks keep other copies (Megatron: 16-bit weights beside fp32
gradients and a sharded fp32 optimizer; FSDP2: fp32 shards and the gathered layer), and what autograd keeps for the
backward pass follows from the operators (Korthikanti et al., 2022, equations 1 to 4; extended here to gated blocks,
grouped keys and values and fused attention). What each keeps, and where that is known from: frameworks.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.published.experiments import Run
from benchmarks.published.frameworks import Memory
from benchmarks.published.reduction import optimizer_ways

_ADAM = 12  # bytes a parameter: fp32 weight and two moments
_FLOAT, _HALF = 4, 2
# What PyTorch's caching allocator reserves over what is allocated, at their peaks: 43 runs of Megatron-LM on 8 B200s,
# 1.03 to 1.09, the median (MooreThreads/SimuMax@4dcaae5, docs/b200/b200_release_v1.2_summary.json).
_RESERVED = 1.04


@dataclass(frozen=True)
class Kept:
    """Bytes that autograd keeps of a layer, for a token on one GPU.

    Attributes:
        layer: without recomputation.
        stored: with the run's.
        gradients: of the widest operator's inputs and outputs, while it goes back.
    """

    layer: float
    stored: float
    gradients: float


def framework_peak_bytes(run: Run, means: str = "allocated") -> int | None:
    """The largest that a GPU holds over all pipeline stages; None for what XLA compiles, and with experts.

    Args:
        run: the row.
        means: `allocated`, as torch.cuda.max_memory_allocated counts, or `reserved`, as max_memory_reserved.
    """
    memory, stages = run.framework.memory, {0, run.stages - 1}
    if memory is None or run.shape.experts:  # what dispatched tokens leave in memory is not modelled
        return None
    if memory.shards:
        peak = max(_sharded_peak(run, memory, stage, means) for stage in stages)
    else:
        peak = max(_stage_peak(run, memory, stage) for stage in stages)
    return int(peak * (_RESERVED if means == "reserved" else 1.0))


def kept_bytes(run: Run, memory: Memory) -> Kept:
    """What a layer keeps, per token and GPU, in 16 bits: inputs and outputs of norms, of matmuls and of attention."""
    s = run.shape
    keys = s.keys
    residual = 4 * s.hidden * _HALF  # inputs and outputs of both norms
    projections = (2 * s.hidden + 2 * keys) * _HALF  # queries, keys, values, and the output of attention
    wide = (3 if s.gated else 2) * s.ffn * _HALF  # inputs of the activation function, and its output
    if memory.dropout:
        residual += 2 * s.hidden  # a mask of a byte behind both blocks
    scores = 0.0
    if not run.framework.fused_attention:
        scores = s.heads * run.length * (2 * _HALF + (1 if memory.dropout else 0))
    cut = run.tensor if _cuts_residual(run) else 1
    layer = residual / cut + (projections + wide + scores) / run.tensor
    head = s.hidden * _HALF / cut
    gradients = (wide + (_HALF * s.ffn if s.gated else 0)) / run.tensor + head
    return Kept(layer, _stored(run, layer, scores / run.tensor, head, keys), gradients)


def _stored(run: Run, layer: float, scores: float, head: float, keys: int) -> float:
    """What the run's recomputation leaves of a layer."""
    remat, s = run.document["train"]["remat"], run.shape
    if remat == "none":
        return layer
    if remat == "full":
        return head
    if remat == "dots" and run.framework.name != "IBM fms-fsdp":
        return layer - scores  # Megatron's selective: all but attention between the projections
    sizes = {"query": s.hidden, "key": keys, "value": keys, "output": s.hidden, "gate": s.ffn, "up": s.ffn}
    sizes["down"] = s.hidden
    names = sizes if isinstance(remat, str) else remat
    attention = s.hidden  # fused attention is on PyTorch's list of what is kept
    return head + _HALF * (attention + sum(sizes[name] for name in names)) / run.tensor


def _cuts_residual(run: Run) -> bool:
    """Whether sequence parallelism cuts what tensor parallelism leaves whole."""
    return "act_residual_length" not in run.document["rules"].get("logical", {})


def _logits(run: Run, memory: Memory) -> float:
    """Elements on one GPU."""
    return run.tokens * run.shape.vocab / (1 if memory.whole_logits else run.tensor)


def _parameters(run: Run, stage: int) -> float:
    """On one GPU of a stage, with the tables of the vocabulary that it has; of all layers without stages."""
    s = run.shape
    layers = run.last_layers if stage == run.stages - 1 else run.stage_layers
    tables = (1 if s.tied else 2) if run.stages == 1 else 1
    return (layers * s.layer_parameters() + tables * s.vocab * s.hidden) / run.tensor


def in_flight(run: Run, stage: int) -> float:
    """Micro-batches whose activations a stage keeps at a time.

    1F1B: as many as stages are left (Narayanan et al., 2021); with v chunks (p - 1) / v more on the first stage
    (Korthikanti et al., 2022, section 4.2.3), fewer behind it.
    """
    left = run.stages - stage
    return min(run.micro_batches, left + (left - 1) / run.chunks if run.chunks > 1 else left)


def _stage_peak(run: Run, memory: Memory, stage: int) -> float:
    """Of a replica's stage: Megatron-LM and its relatives."""
    kept, tokens = kept_bytes(run, memory), run.tokens
    parameters = _parameters(run, stage)
    state = parameters * (_HALF + memory.gradient_bytes + _ADAM / optimizer_ways(run))
    layers = run.last_layers if stage == run.stages - 1 else run.stage_layers
    again = kept.layer - kept.stored  # of the layer that is recomputed
    activations = tokens * (layers * kept.stored * in_flight(run, stage) + again)
    dummies, head = 0.0, 0.0
    if memory.dummy_gradients:
        dummies = _HALF * run.shape.layer_parameters() / run.tensor
        head = _HALF * run.shape.vocab * run.shape.hidden / run.tensor
    extra = tokens * kept.gradients
    if stage == run.stages - 1:  # logits in 16 bits and fp32; then their gradient beside that of the head's weights
        extra = max(extra, _logits(run, memory) * memory.logit_bytes, _logits(run, memory) * _HALF + head)
    step = memory.step_bytes * parameters / optimizer_ways(run)
    return state + max(activations + extra, step) + dummies


def _sharded_peak(run: Run, memory: Memory, stage: int, means: str) -> float:
    """Of FSDP, at the loss: shards of parameters and moments, what is gathered, stored activations and the logits.

    Gradients are gone then (`zero_grad` sets them to None), but for those of micro-batches before: shards, or whole in
    fp32 where only the last micro-batch reduces them (`set_requires_gradient_sync`), as with pipeline stages. Gathered
    are two layers and the root, which holds the tables of the vocabulary; with pipeline stages all.
    """
    kept, tokens, parameters = kept_bytes(run, memory), run.tokens, _parameters(run, stage)
    ways = (run.sharded if run.whole else run.data) * run.context
    layers = run.last_layers if stage == run.stages - 1 else run.stage_layers
    layer = run.shape.layer_parameters() / run.tensor
    state = parameters * memory.shard_bytes / ways
    if run.stages > 1:
        state += parameters * (_HALF + _FLOAT)
    else:
        state += (parameters - (layers - 2) * layer) * _HALF if ways > 1 else 0.0
        if run.micro_batches > 1:
            state += parameters * (_FLOAT if memory.reduces_last else _FLOAT / ways)
    stored = tokens * layers * kept.stored * in_flight(run, stage)
    backward = tokens * (kept.layer - kept.stored + kept.gradients) + (_HALF + _FLOAT) * layer
    loss = _logits(run, memory) * _logit_bytes(run, memory, means) if stage == run.stages - 1 else 0.0
    return state + stored + max(backward, loss)


def _logit_bytes(run: Run, memory: Memory, means: str) -> int:
    """Of an element of the logits at the loss: what is allocated, and what the allocator has in blocks of its own.

    Eager cross-entropy of PyTorch in fp32 has the log-softmax, its gradient and that of its input at a time. Before
    that, the logits in 16 bits had a block which is too small for any of the three. Compiled, only the logits and their
    gradient in 16 bits are written.
    """
    compiled = memory.compiles_loss and re.search(memory.compiles_loss, run.row.source)
    if compiled and "compile" in run.row.notes:
        return 2 * _HALF
    return memory.logit_bytes + (_HALF if means == "reserved" and memory.logit_bytes > 2 * _FLOAT else 0)
