"""Memory passes of Megatron-Core between the matmuls of a layer, counted from its source. Part of replica.py.

Bytes an element, operator by operator, of Megatron-LM core_v0.7.0 to core_v0.16.0 with TransformerEngine v0.12 to v2.12
(`te`). They take the place of what our program has in its loops over layers between matmuls, and of what XLA adds to
matmuls there: operands that it joins, and turns for Hopper's fp8.

    norms             te common/normalization: forward reads and writes, 4; backward reads its output's gradient and its
                      input, writes one, 6; each slower than memory (eager.py) but for cuDNN's (Megatron-Bridge on GB200
                      and GB300); `zero_centered_gamma` is in the kernel. With delayed scaling it casts: 3
    residuals         core/fusions/fused_bias_dropout.py: without bias and dropout an addition, 6; with dropout its
                      mask, 7 and back 5; gradient of a bias 2. Autograd sums both gradients of a norm's input, 6, and
                      those of the output that a router and experts have, 6
    queries, keys     core/transformer/attention.py: queries of several heads a key are copied out of the joint output
                      (`reshape` of a view), 4; rotated (te fused_rope), queries and keys 4, back 4; values are made
                      contiguous, 4 (transformer_engine.py, forward, or te get_qkv_layout); SplitAlongDim joins their
                      gradients, 4. Without rotation attention takes all three where they lie, and writes alike;
                      FlashAttention of te v1 takes them apart first, 4 (`_PrepareQKVForFA`)
    activation        core/fusions/fused_bias_swiglu.py: 6 and 10 for an element of the second matmul's input; GELU and
                      squared ReLU 4 and 6, gradient of a bias 2. MLPerf's GPT-3 has te's own layer, in which GELU
                      writes 8 bits, 3, which back are transposed by themselves, and its gradient, that of the bias
                      and both layouts are one kernel, 6 (te pytorch/module/layernorm_mlp.py, 09ba842, v1.6 to v1.11;
                      `gemm_gelu_fusion` is off)
    context           te AttnFuncWithCPAndKVP2P, causal, c GPUs, the mean over them: keys and values joined, halves of
                      them or of queries made contiguous, outputs rescaled and added up, and so the gradients: queries
                      5.5 c - 1.5 and 7.5 c - 3.5, keys 2 c + 6 and 11 c + 5
    casts to 8 bits   inputs of the four linear layers, gradients of their outputs (te pytorch/module/linear.py and
                      layernorm_linear.py): read in 16 bits, written once, 3; with current scaling the largest value
                      first, 2, but where the norm finds it (te v2.8 on, unless cuDNN's norm is asked for, as
                      Megatron-Bridge does on GB200 and GB300). Hopper wants both layouts (te
                      is_non_tn_fp8_gemm_supported; before v2.0 all do): the same kernel writes the second, 1, at the
                      measured rate of such a kernel; of what is gathered another transposes all, at the catalog's
    casts to MXFP8    both layouts with scales in one kernel, 4 1/16; of gradients that userbuffers gather one by one,
                      6 1/16; at the measured rate of such a cast

Weights are cast and turned once a step (housekeeping.py), by te v0.12 as by v2.12. Casts of NVFP4: blocks.py. Passes
over logits: te pytorch/triton/cross_entropy.py 10 (largest and sum 2, gradient in place 4, times that of the loss 4);
core/fusions/fused_cross_entropy.py as torch compiles it 32 (to fp32 and largest 6, exponential and sum 8, quotient 8,
gradient 10); without fusion 52 (eager.py).

Dropout of attention's scores, where there is dropout, is in attention's kernel: `_DROPPED`.

Each is a kernel, after a gap as any (`launches`): a norm back two, a cast with current scaling three (largest value,
scale and cast: te pytorch/csrc/quantizer.cpp). Up to v1.5 te finds scales with every module and pass: a copy of largest
values and the update, at the least, and scales that are kept for the way back (pytorch/fp8.py and module/base.py).

Layers with experts have the same attention, norms and residuals; GPT-OSS adds residuals and biases, and rotates, by
operators (experts.py).

Not there: gaps of ring attention's kernels, partial sums of a norm's weights (a row of fp32 for each multiprocessor),
copies of whole attention for micro-batches of several sequences before core_v0.13, and all that waits for the host.
Scales of MXFP8 that are put in cuBLASLt's order before a matmul (te pytorch/csrc/extensions/gemm.cpp; from v2.12 on
those of weights and of what was gathered) are in its rate: te's own benchmark, which that is from, times both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.published.blocks import MXFP8_CAST, is_mxfp8
from benchmarks.published.eager import FAST_NORM, kernels_between
from benchmarks.published.experiments import Run
from benchmarks.published.experts import cast_share
from benchmarks.published.ours import is_current, is_pass, wants_both
from benchmarks.published.userbuffers import find_overlap
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.kernels import memory_bytes_per_s

NAME = "transformer_engine"  # of `Framework.between`
_FUSED, _COMPILED, _EAGER = 10, 32, 52  # bytes of a logit
# Share of a B200's memory's peak of two of them, forward and back of up to 0.5 G logits (MooreThreads/SimuMax@4dcaae5,
# configs/system/b200_bf16_ceperm.json: `ce_fusion`, which counts 8 bytes, and `ce`); of Hopper no number was found.
_LOSS_SHARES = {_FUSED: 0.2795 * 10 / 8, _EAGER: 0.3246}

# Seconds of attention with dropout of a tenth over those without, both passes, 4,096 tokens, 16 heads of 128, by what a
# run has (kernels.toml): FlashAttention 2.7.4 on GB200, 0.728 over 0.695 ms (NVIDIA/TransformerEngine, pull 3313): the
# same kernel, and as fast on a multiprocessor, as on an H100, of which no number was found; cuDNN on H200, 0.614 over
# 0.594 (issue 3312, sbhd).
_DROPPED = {"flash2": 0.728 / 0.695, "cudnn_9_1": 0.614 / 0.594, "cudnn_9_4": 0.614 / 0.594}

# Which passes over logits a source's recipes ask for (cross_entropy_loss_fusion, cross_entropy_fusion_impl; NeMo
# v2.3.0, scripts/performance/utils.py; Megatron-Bridge v0.1.0rc4 to v0.5.0, utils/overrides.py; MLPerf v4.1, conf/
# custom.yaml), dropout of a tenth with micro-batches of one (gpt3_175b_hydra.yaml of dgxc-benchmarking@35a9aec, gpt3/
# 175b.yaml of NeMo-Framework-Launcher@26e42fa; 175b_mlperf.yaml of @121c975d, of two, has none), and te's own layer
# (MLPerf v3.1, conf/custom.yaml of NeMo bd0b818, AutocastTransformerLayer; v4.1, megatron_gpt_full_te_layer_autocast).
_LOSS_OF_TE = re.compile(r"Megatron-Bridge|1f6d9f4|Together")
_OF_EXPERTS = re.compile("/moe/(experts|router)/")
_LOSS_OURS = re.compile(r"jvp\(\)\)?/|\(jvp\(logits\)\)/convert_element_type$")
_LOSS_COMPILED = re.compile(r"MLPerf Training v4\.1")
_LOSS_UNFUSED = re.compile(r"weak scaling|gpt3|grok", re.IGNORECASE)
_DROPS = re.compile(r"DGXC NeMo|NeMo 24\.07")
_WHOLE_LAYER = re.compile(r"MLPerf Training v(3\.1|4\.1)")
_UPDATES_SCALES = re.compile(r"MLPerf Training v3\.1")


def is_counted(run: Run) -> bool:
    """Whether these passes are those of a run; those of its experts and their router are in experts.py."""
    return not run.whole and run.framework.between == NAME


@dataclass(frozen=True)
class Moved:
    """What a pass over a layer moves on one GPU, a token.

    Attributes:
        plain: bytes, as fast as memory is.
        cast: bytes of casts along both dims.
        turned: elements in 8 bits that a kernel of its own transposes.
    """

    plain: float = 0.0
    cast: float = 0.0
    turned: float = 0.0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.plain + other.plain, self.cast + other.cast, self.turned + other.turned)

    def __rmul__(self, elements: float) -> Moved:
        return Moved(elements * self.plain, elements * self.cast, elements * self.turned)


def as_launched(run: Run, schedule: Schedule, cluster: Cluster) -> Schedule:
    """The schedule of a stage with these passes in the place of all that is between the matmuls of its layers."""
    loops, kernels = kernels_between(schedule)
    gone = {i.name for i in kernels if not _OF_EXPERTS.search(i.source)}
    bodies = dict(schedule.computations)
    for name in (name for loop in loops for name in loop.bodies):
        kept = (i for i in bodies[name] if i.name not in gone and i.starts not in gone)
        bodies[name] = tuple(i if _OF_EXPERTS.search(i.source) else alone(i) for i in kept)
    moves, kernels = layer_moves(run, cluster), launches(run, cluster)
    for loop, moved, number in zip((*loops[:1], *loops[-1:]), moves, kernels):
        bodies[loop.bodies[0]] = (*launched(run, cluster, moved, loop.name, number), *bodies[loop.bodies[0]])
    return replace(schedule, computations=bodies)


def launched(run: Run, cluster: Cluster, moved: Moved, where: str, number: int) -> Iterator[Instruction]:
    """The kernels of one pass: an instruction for all of a kind, the first with the gaps of those beyond one each."""
    rate = memory_bytes_per_s(cluster.gpu) / cluster.gpu.memory_bytes_per_s
    cast = moved.cast * rate / cast_share(cluster)
    turned = run.tokens * moved.turned
    costs = {
        "plain": Cost(bytes_accessed=run.tokens * moved.plain),
        "cast": Cost(bytes_accessed=run.tokens * cast),
        "turned": Cost(bytes_accessed=2 * turned, transposed=turned),
    }
    kinds = {kind: cost for kind, cost in costs.items() if cost.bytes_accessed}
    for kind, cost in kinds.items():
        cost = replace(cost, launches=number - len(kinds) + 1 if kind == "plain" else 1)
        yield Instruction(f"{where}.{kind}", "fusion", "kernel", "between matmuls", cost)


def alone(i: Instruction) -> Instruction:
    """A matmul without what XLA does to its operands."""
    if i.cost is None or not (i.cost.joined_bytes or i.cost.turned_bytes):
        return i
    return replace(i, cost=replace(i.cost, joined_bytes=0.0, turned_bytes=0.0))


def layer_moves(run: Run, cluster: Cluster) -> tuple[Moved, Moved]:
    """What a layer moves, forward and backward; of one with experts all but what they and their router do."""
    s, ways = run.shape, run.tensor
    hidden, queries, keys, ffn = s.hidden / ways, s.heads * s.head_dim / ways, s.keys / ways, s.ffn / ways
    biased, drops = _is_biased(run), _drops(run)
    activation = (0, 0) if s.experts else (6, 10) if s.gated else (3, 0) if _casts_gelu(run) else (4, 6 + 2 * biased)
    added, rotated = (0, 0) if s.biased else (6, 4)  # GPT-OSS has both by operators, in experts.py
    norm = 1.0 if _normed_by_cudnn(run, cluster) else FAST_NORM
    forward = 2 * (4 * norm + added + drops) * hidden + activation[0] * ffn
    back = 2 * (6 * norm + 6 + 2 * biased + 5 * drops) * hidden + activation[1] * ffn
    if s.experts:
        back += 6 * hidden
    if not biased:
        forward += (rotated + 4 * _copies_queries(run)) * queries + (rotated + 4) * keys
        back += (rotated + 4) * queries + (rotated + 8) * keys
    elif run.kernels.attention.startswith("flash"):
        forward, back = (i + 4 * (queries + 2 * keys) for i in (forward, back))
    if run.context > 1:
        c = run.context
        forward += (5.5 * c - 1.5) * queries + (2 * c + 6) * keys
        back += (7.5 * c - 3.5) * queries + (11 * c + 5) * keys
    casts, casts_back = _casts(run, cluster) if run.precision == "fp8" else (Moved(), Moved())
    return Moved(forward) + casts, Moved(back) + casts_back


def launches(run: Run, cluster: Cluster) -> tuple[int, int]:
    """Kernels that a layer launches for what it moves, forward and backward; casts to NVFP4 are in blocks.py."""
    fused, biased, drops = _casts_gelu(run), _is_biased(run), _drops(run)
    routed, operators = run.shape.experts > 0, run.shape.biased
    forward = 2 + 2 * (not operators) + (not routed)
    back = 4 + 2 + 1 + 2 * biased + 2 * drops + (biased and not fused)  # the gradient of an activation, or of a router
    if not biased:
        rotations = 2 * (not operators)
        forward, back = forward + rotations + 1 + _copies_queries(run), back + rotations + 1
    elif run.kernels.attention.startswith("flash"):
        forward, back = forward + 1, back + 1
    if run.precision != "fp8":
        return forward, back
    blocks = 1 if routed else 2
    if is_mxfp8(run):
        return forward + 2 * blocks, back + 2 * blocks
    if is_current(run):
        forward, back = forward + blocks * (6 - _finds_largest(run, cluster)), back + 6 * blocks
    else:
        forward, back = forward + blocks - fused, back + 2 * blocks - fused
    if wants_both(run, cluster):
        back += blocks * (2 if run.tensor > 1 else 0 if is_current(run) else 1) + fused
    if _UPDATES_SCALES.search(run.row.source):  # three modules
        forward, back = forward + 3 * 3, back + 3 * 2
    return forward, back


def _is_biased(run: Run) -> bool:
    """GPT-3 and its like: biases, learned positions."""
    return not run.shape.gated and run.shape.kv_heads == run.shape.heads


def _drops(run: Run) -> bool:
    return _is_biased(run) and run.micro_batch == 1 and _DROPS.search(run.row.source) is not None


def drops_scores(run: Run) -> bool:
    """Whether attention drops a tenth of its scores: those recipes have `attention_dropout` as `hidden_dropout`."""
    return is_counted(run) and _drops(run) and run.kernels.attention in _DROPPED


def as_dropped(run: Run, schedule: Schedule) -> Schedule:
    """The schedule of a stage with attention that drops, as more FLOP of attention."""

    def one(i: Instruction) -> Instruction:
        if i.cost is None or not i.cost.attention_flops:
            return i
        flops = i.cost.attention_flops * _DROPPED[run.kernels.attention]
        return replace(i, cost=replace(i.cost, attention_flops=flops))

    return replace(schedule, computations={k: tuple(map(one, body)) for k, body in schedule.computations.items()})


def _copies_queries(run: Run) -> bool:
    return run.shape.kv_heads < run.shape.heads and run.shape.kv_heads > run.tensor


def _finds_largest(run: Run, cluster: Cluster) -> bool:
    """Whether norms find the largest values of what they write."""
    return "Megatron-Bridge" in run.row.source and not _normed_by_cudnn(run, cluster)


def _normed_by_cudnn(run: Run, cluster: Cluster) -> bool:
    return "Megatron-Bridge" in run.row.source and cluster.gpu.key.startswith("g")


def _casts(run: Run, cluster: Cluster) -> tuple[Moved, Moved]:
    """Of casts to 8 bits: of the inputs of linear layers, forward, and of gradients of their outputs, backward."""
    s, ways, turns, current = run.shape, run.tensor, wants_both(run, cluster), is_current(run)
    hidden, queries, ffn = s.hidden / ways, s.heads * s.head_dim / ways, 0 if s.experts else s.ffn / ways
    blocks = 1 if s.experts else 2  # of two linear layers each
    inside = queries + ffn  # inputs of the second of two linear layers, and gradients of the first one's outputs
    out = queries + 2 * s.keys / ways + (2 if s.gated else 1) * ffn
    if is_mxfp8(run):
        both, overlap = Moved(cast=MXFP8_CAST), find_overlap(run)
        again = Moved(cast=2 if overlap and not overlap.off else 0)
        return (blocks * hidden + inside) * both, (blocks * hidden + out) * both + blocks * hidden * again
    largest = 2 if current else 0
    both = Moved(largest, cast=4) if turns else Moved(largest + 3)
    gathered, turned = both, 0.0
    if ways > 1:  # along one dim, and what was gathered is transposed whole
        gathered, turned = Moved(largest + 3), 2 * blocks * s.hidden
    normed = gathered
    if not current:  # norms write 8 bits, and what they write is transposed
        normed, turned = Moved(-1), turned or blocks * hidden
    elif _finds_largest(run, cluster):
        normed = gathered + Moved(-2)
    if _casts_gelu(run):  # with the cast, and so is its gradient
        inside, out, turned = queries, out - ffn, turned + ffn
    back = blocks * hidden * gathered + out * both + Moved(turned=turned if turns else 0.0)
    if _casts_gelu(run):
        back += ffn * Moved(cast=6)
    return blocks * hidden * normed + inside * both, back


def _casts_gelu(run: Run) -> bool:
    return run.precision == "fp8" and not run.shape.gated and _WHOLE_LAYER.search(run.row.source) is not None


def logits_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a micro-batch of passes over logits, on the stage of the output head."""
    each = _COMPILED
    if _LOSS_OF_TE.search(run.row.source):
        each = _FUSED
    elif not _LOSS_COMPILED.search(run.row.source) and _LOSS_UNFUSED.search(f"{run.row.source} {run.row.say('model')}"):
        each = _EAGER
    rate = memory_bytes_per_s(cluster.gpu)
    if each in _LOSS_SHARES and (cluster.gpu.compute_capability or (0, 0)) >= (10, 0):
        rate = _LOSS_SHARES[each] * cluster.gpu.memory_bytes_per_s
    return _logits(run) * each / rate


def passes_logits(run: Run) -> Callable[[Instruction], bool]:
    """Whether an instruction of the run's program is a pass over logits that multiplies nothing."""
    least = 3.5 * _logits(run)  # fp32, read once

    def found(i: Instruction) -> bool:
        large = is_pass(i) and i.cost is not None and i.cost.bytes_accessed > least
        return large and _LOSS_OURS.search(i.source) is not None

    return found


def _logits(run: Run) -> float:
    """Of a micro-batch, on one GPU."""
    return run.tokens * run.shape.vocab / run.tensor
