"""Memory passes that frameworks make between matmuls, counted from their source. Sixth in the flow of the replay.

**PyTorch run eagerly.** Counted from torchtitan's Llama of the version that its page names (pytorch/torchtitan@9dec370,
models/norms.py and models/llama/model.py), operator by operator, each reading and writing memory by itself; a compiled
program fuses all of a norm, a rotation or an activation into one kernel. That is added to our program.

**Frameworks that bring fused kernels of their own.** What our program has between the matmuls of a layer's loops makes
way for what they launch there: `COUNTS`, bytes an element in 16 bits.

    Megatron-LM of 2021 and 2022, and DeepSpeed's: Korthikanti et al., 2022, section 4, and model/transformer.py
    (NVIDIA/Megatron-LM@50a4b5f). Norms 4 forward, 6 backward, and 4 more where apex reads both operands again for
    the gradients of weights and biases (csrc/layer_norm_cuda_kernel.cu); bias, dropout and residual 7 and 11;
    scores: scale, mask and softmax in one kernel 4 and 6, dropout with its mask of one byte 5 and 5; GELU with bias
    4 and 8; permutations and gradients of biases 4 and 14.

    InternEvo@c628a8c, modeling_internlm.py: norms are given their input in fp32 (`.float()`: 6, norm 6; back 10, 6
    for gradients of weights, 6 for the cast, 6 for the sum with the residual's), two residuals 6 each, the sum of
    the gradients of gate and up 6, rotation in place 8 and 8, the gated activation under torch.jit 6 and 10. A layer
    that is not recomputed lacks norms and its first residual all the same, which it makes again
    (activation_checkpoint of `_dropout_and_norm_attn` and `_dropout_and_norm_ffn`, on by default).

A logit moves 14 bytes in our program. Megatron-LM, 52 (mpu/cross_entropy.py): cast 6, largest 4, less it 8,
exponential 8, sum 4, quotient 8; its gradient 8, cast 6. InternEvo, 60: casts 12 (naive_amp.py), loss 12, and with
every micro-batch its metric (`AccPerplex`, metrics.py): a second loss 4, largest twice and argmax 12, less it 8,
exponential 8, sum 4.

An optimizer's step moves 32 bytes a parameter in our program. Megatron-LM, 52 (optimizer/optimizer.py): gradients to
fp32 6, unscaled and checked 8, norm 4, apex's Adam 28, weights to 16 bits 6. InternEvo, 62 (hybrid_zero_optim.py,
_step): flat 4, to fp32 6, norm of copies in fp32 10, unscaled 8, Adam 28, to 16 bits 6.

Every pass is priced at memory's sustained rate, which small kernels do not reach, but for norms of apex and torch
themselves: 0.6 of an A100's peak (`NORM`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from benchmarks.published.experiments import Run
from benchmarks.published.ours import is_pass, is_stacked_gradient
from benchmarks.published.reduction import optimizer_ways, stage_parameters
from meshkit.config import catalog
from meshkit.config.cluster import Cluster
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.kernels import memory_bytes_per_s

# Bytes an element, (all operators) - (one fused kernel).
# RMSNorm: x.float() 6, x * x 8, mean 4, x * rsqrt 8, type_as 6, times weight 4; its backward: weight 4 and 8, cast 6,
# products with rsqrt and with x 8 and 16, x * x 16 and 12, sum of both paths 12, cast 6.
_NORM, _NORM_BACK = 36 - 4, 88 - 6
_ROTATION = 20 - 4  # of queries and keys: float 6, complex product 8, type_as 6; backward alike
_REPEAT = 2  # keys and values copied for every head, summed again on the way back
_GATE, _GATE_BACK = 10 - 6, 18 - 10  # silu 4 and product 6; the product's two gradients 6 each, silu's 6
_RESIDUAL = 2  # an addition of its own 6, beside the norm behind it 4


# What a byte of a layer norm counts where passes have memory's sustained rate. Both, 14 bytes an element in 16 bits:
# apex's in 251 us for 16,384 x 1,024 (NVIDIA/apex, pull 1037, 2021), torch's in 235, 347 and 509 us for 8,192 x 2,048,
# 3,072 and 4,096 (pytorch/pytorch, pull 87445, 2022, in torch 2.0; 5 to 11 % more before): 0.60; 0.64, 0.65 and 0.59 of
# the 1,555 GB/s of an A100 with 40 GB (neither says which; of one with 80 GB, a quarter less). apex' FastLayerNorm,
# whose kernels are TransformerEngine's: 140 us, 10 bytes, by the first page. Carried to other GPUs.
NORM, FAST_NORM = (catalog.gpu("a100_40gb").achieved["memory"] / share for share in (0.6, 0.77))


@dataclass(frozen=True)
class Passes:
    """Bytes that one pass over a layer moves, for each of so many elements of a token.

    Attributes:
        whole: hidden elements that tensor parallelism cuts only as sequence parallelism.
        hidden, ffn, scores: elements that it cuts.
    """

    whole: float = 0.0
    hidden: float = 0.0
    ffn: float = 0.0
    scores: float = 0.0


@dataclass(frozen=True)
class Count:
    """The passes of a framework.

    Attributes:
        forward, backward: over a layer.
        again: what a layer makes again in its backward pass, by its `train.remat`.
        logit: bytes of a logit, beyond those of our program.
        step: bytes of a parameter in an optimizer's step, likewise.
    """

    forward: Passes
    backward: Passes
    again: dict[str, Passes]
    logit: float
    step: float


_MEGATRON, _INTERNEVO = Passes(8 * NORM + 14, 4, 4, 4 + 5), Passes(2 * (6 + 6 * NORM) + 2 * 6, 8, 6)
COUNTS = {
    "megatron": Count(
        _MEGATRON,
        Passes((12 + 8) * NORM + 22, 14, 8, 6 + 5),
        {"full": _MEGATRON, "dots": Passes(hidden=4, scores=4 + 5)},
        logit=52 - 14,
        step=52 - 32,
    ),
    "internevo": Count(
        _INTERNEVO,
        Passes(2 * ((10 + 6) * NORM + 6 + 6) + 6, 8, 10),
        {"full": _INTERNEVO, "none": Passes(2 * (6 + 6 * NORM) + 6)},
        logit=60 - 14,
        step=62 - 32,
    ),
}


def eager_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a step; 0 for a row that does not say `eager`, and for models without gate."""
    if not re.search(r"\beager\b", run.row.notes) or not run.shape.gated:
        return 0.0
    forward, backward = layer_bytes(run)
    again = 1 if run.document["train"]["remat"] == "none" else 2
    tokens = run.micro_batch * run.micro_batches * run.length / run.context
    layers = run.shape.layers / run.stages
    return tokens * layers * (again * forward + backward) / memory_bytes_per_s(cluster.gpu)


def layer_bytes(run: Run) -> tuple[float, float]:
    """Bytes a token and layer on one GPU, forward and backward, beyond those of fused kernels."""
    s = run.shape
    keys = s.keys
    cut = _residual_ways(run)
    heads = _ROTATION * (s.hidden + keys) + 2 * _REPEAT * s.hidden * (s.heads > s.kv_heads)
    forward = 2 * (_NORM + _RESIDUAL) * s.hidden / cut + (heads + _GATE * s.ffn) / run.tensor
    backward = 2 * _NORM_BACK * s.hidden / cut + (heads + _GATE_BACK * s.ffn) / run.tensor
    return forward, backward


def between_s(run: Run, cluster: Cluster) -> tuple[float, float]:
    """Seconds of the kernels between a layer's matmuls for one micro-batch: forward; backward with what is made again.

    (0, 0) where those of our program stand.
    """
    count = COUNTS.get(run.framework.between)
    if count is None:
        return 0.0, 0.0
    again = count.again.get(run.document["train"]["remat"], Passes())
    back = _passes_bytes(run, count.backward) + _passes_bytes(run, again)
    rate = memory_bytes_per_s(cluster.gpu)
    return run.tokens * _passes_bytes(run, count.forward) / rate, run.tokens * back / rate


def logits_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a micro-batch on the stage of the output head, beyond what our program does with logits."""
    count = COUNTS.get(run.framework.between)
    elements = run.tokens * run.shape.vocab / run.tensor
    return elements * count.logit / memory_bytes_per_s(cluster.gpu) if count else 0.0


def step_s(run: Run, cluster: Cluster) -> float:
    """Seconds of an optimizer's step on one GPU, beyond those of our program."""
    count = COUNTS.get(run.framework.between)
    owned = stage_parameters(run) / optimizer_ways(run)
    return owned * count.step / memory_bytes_per_s(cluster.gpu) if count else 0.0


def between_matmuls(run: Run, schedule: Schedule) -> set[str]:
    """Names of the kernels of a stage's loops over layers that the framework's own take the place of."""
    return {i.name for i in kernels_between(schedule)[1]} if run.framework.between in COUNTS else set()


def kernels_between(schedule: Schedule) -> tuple[list[Instruction], list[Instruction]]:
    """The loops over layers of a stage, forward first, and the kernels in them that neither multiply nor send.

    Gradients that are added up stay (ours.py).
    """
    loops = [i for i in schedule.computations[schedule.entry] if (i.trip_count or 0) > 1]
    kernels = (i for loop in loops for body in loop.bodies for i in schedule.computations[body])
    return loops, [i for i in kernels if is_pass(i) and not is_stacked_gradient(i)]


def _passes_bytes(run: Run, p: Passes) -> float:
    """Bytes a token on one GPU."""
    s = run.shape
    cut = p.hidden * s.hidden + p.ffn * s.ffn + p.scores * s.heads * run.length
    return p.whole * s.hidden / _residual_ways(run) + cut / run.tensor


def _residual_ways(run: Run) -> int:
    """GPUs that share a token's residual stream: those of tensor parallelism where it is sequence parallelism too."""
    return run.tensor if "act_residual_length" not in run.document["rules"].get("logical", {}) else 1
