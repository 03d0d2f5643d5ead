"""Memory passes of PyTorch's FSDP, and of MosaicML's models run eagerly, counted from source. Part of replay.py.

**What XLA's program of a whole step has and no framework makes** (`is_carried`): zeros that fill the stacks of its
loops before they are written, and copies of what its loops carry, which are no operation of the model's.

**FSDP**, bytes a parameter of a layer on one GPU, forward and backward (`Framework.gathered`). FSDP1 (torch 1.13 to
2.1, distributed/fsdp): weights are views of what was gathered; their gradients are joined, 4 (flat_param.py: the
gradient of `torch.split`), and divided before they are scattered, 4 (_runtime_utils.py, `_div_if_needed`). FSDP2 (torch
2.4 on, _composable/fsdp/_fsdp_collectives.py): weights are copied out of what was gathered, 4 with each gather
(`foreach_all_gather_copy_out`), gradients copied in and to fp32, 6 (`foreach_reduce_scatter_copy_in`; NCCL takes the
mean). MosaicML's runs on 128 H100s and more (llm-foundry@5e85bd62, of January 2024, whose setup.py asks for composer
0.17.2) travel in fp32, as composer's DEFAULT does from 0.16.4 on (composer/trainer/mosaic_fsdp_utils.py,
get_mixed_precision; mosaicml/composer@d745fcb1): gradients are cast 6 and divided 8 before, their shards divided 8 and
not cast.

**MosaicML's models** take the place of all that XLA has between the matmuls of layers. Bytes an element in 16 bits, of
llm-foundry@300cc5c (gpt_blocks.py, torch 1.13.1, composer 0.13.4) and v0.3.0, whose submit_benchmarks.py asks for it
(blocks.py, ffn.py, composer 0.16): both have the same operators. Weights are gathered in 16 bits, so that autocast
casts nothing; dropout of 0 launches nothing; no model asks for ALiBi, clipping of queries and keys, or no biases.

    norms        low_precision_layernorm, in 16 bits: 4; back its input's gradient 6, its weights' and biases' 4; by
                 torch's own kernels, which are slower than memory (eager.py, `NORM`)
    residuals    6; autograd sums both gradients of a norm's input, 6
    GELU         4 and 6
    biases       in the matmul's epilogue; gradients 2, of the outputs of four linear layers
    joint output queries, keys and values are views of it; their gradients are joined, 4 (`chunk`, `split`)
    again        a recomputed layer's forward pass, without its last residual where torch stops early (ours.py)
    fp8          te.Linear of Transformer Engine v0.10 casts along both dims, 4: inputs, gradients of outputs with those
                 of biases, and with every forward pass the weights (no `is_first_microbatch`)
    shards       cast to 16 bits for each of both gathers, 6; their gradients divided and cast to fp32, 4 and 6

A logit moves 34: xentropy of flash-attn 2 and 4; each of two metrics of training, on by default, a cast to fp32 6 and
log-softmax 8 (LanguageCrossEntropy and LanguagePerplexity, composer/metrics/nlp.py); with fp8 there is no autocast, and
the metrics are in 16 bits, 4 each. A parameter of an optimizer's step moves 92: DecoupledAdamW 80 (composer/optim,
operator by operator), norm and clipping 12.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.published.eager import NORM
from benchmarks.published.experiments import Run
from benchmarks.published.ours import (
    casts_weights,
    finds_scale,
    is_current,
    is_pass,
    is_stacked_gradient,
    runs_whole,
    without,
)
from benchmarks.published.reduction import stage_parameters
from benchmarks.published.transformer_engine import NAME as ENGINE
from benchmarks.published.transformer_engine import Moved, alone, launched, launches, logits_s, passes_logits
from benchmarks.published.transformer_engine import layer_moves as engine_moves
from meshkit.config.cluster import Cluster
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.kernels import memory_bytes_per_s

NAME = "mpt"  # of `Framework.between`
_LOGIT, _LOGIT_FP8, _LOGIT_OURS = 34, 14, 14
_STEP, _STEP_OURS = 92, 32
_WIDE_GPUS = 128  # from which on the page's rows are of 2024
_SHARDS = "jit(train_step)/convert_element_type"  # cast once a step
_MADE_BY_XLA = re.compile(r"(jit\(train_step\)(/broadcast_in_dim)?)?$")  # sources that name no operation of the model


def is_counted(run: Run) -> bool:
    """Whether the passes of MosaicML's models are those of a run."""
    return run.whole and run.framework.between == NAME


def scatters_wide(run: Run) -> bool:
    """Whether the gradients of a run of MosaicML's travel in fp32, where those of our program do in 16 bits."""
    return is_counted(run) and run.framework.reduce == "bf16" and not runs_whole(run) and run.gpus >= _WIDE_GPUS


def as_wide(schedule: Schedule) -> Schedule:
    """The schedule of a whole step whose scatters of gradients in 16 bits move fp32."""

    def one(i: Instruction) -> Instruction:
        c = i.collective
        if c is None or c.collective != "reduce-scatter" or c.dtype == "f32":
            return i
        return replace(i, collective=replace(c, dtype="f32", payload_bytes=2 * c.payload_bytes))

    return replace(schedule, computations={k: tuple(map(one, body)) for k, body in schedule.computations.items()})


def is_carried(i: Instruction) -> bool:
    """Whether an instruction fills a stack of XLA's loops, or copies what they carry."""
    if not is_pass(i):
        return False
    return _MADE_BY_XLA.match(i.source) is not None and i.name.startswith(
        ("loop_broadcast", "wrapped_broadcast", "copy", "wrapped_copy")
    )


def is_between(i: Instruction) -> bool:
    """Whether an instruction of a whole step is a kernel between the matmuls of its layers; gradients that are added up
    stay."""
    if not is_pass(i) or is_stacked_gradient(i):
        return False
    return "(layers)" in i.source or i.source == _SHARDS or _MADE_BY_XLA.match(i.source) is not None


def with_fsdp(run: Run, schedule: Schedule, cluster: Cluster) -> Schedule:
    """The schedule of a whole step with FSDP's own passes."""
    tokens, weights = run.tokens, layer_weights(run)
    wide = scatters_wide(run)
    sizes = zip(run.framework.gathered, (0, wide * (6 + 8 - 4)))
    forward, backward = (Moved((b + more) * weights / tokens) for b, more in sizes)
    return _launched(run, schedule, cluster, "fsdp", ((forward, 1), (Moved(), 1), (backward, 2 + wide)))


def as_eager(run: Run, schedule: Schedule, cluster: Cluster) -> Schedule:
    """The schedule of a whole step with the passes of MosaicML's models in the place of XLA's."""
    passes = tuple(zip(layer_moves(run), layer_launches(run)))
    return _launched(run, without(schedule, is_between), cluster, "eager", passes)


def is_engine(run: Run) -> bool:
    """Whether a whole step of FSDP is Megatron-Core's, which launches what its stages do."""
    return run.whole and run.framework.between == ENGINE and not run.shape.experts


def as_engine(run: Run, schedule: Schedule, cluster: Cluster) -> Schedule:
    """The schedule of a whole step with Megatron-Core's passes in the place of XLA's, but for casts of weights."""
    casts, logits, current = casts_weights(run), passes_logits(run), is_current(run)

    def unwanted(i: Instruction) -> bool:
        return logits(i) or (is_between(i) and not (casts(i) and (current or not finds_scale(i))))

    forward, backward = zip(engine_moves(run, cluster), launches(run, cluster))
    kept = {name: tuple(map(alone, body)) for name, body in without(schedule, unwanted).computations.items()}
    return _launched(run, replace(schedule, computations=kept), cluster, "engine", (forward, forward, backward))


def engine_logits_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a step of Megatron-Core's passes over logits."""
    return run.micro_batches * logits_s(run, cluster)


def layer_weights(run: Run) -> float:
    """Parameters of a layer on one GPU, gathered."""
    return run.shape.layer_parameters() / run.tensor


def layer_moves(run: Run) -> tuple[Moved, Moved, Moved]:
    """What a layer of MosaicML's models moves, a token: forward, again where it is recomputed, backward."""
    s, fp8 = run.shape, run.precision == "fp8"
    weights = layer_weights(run) / run.tokens
    forward = Moved((2 * 4 * NORM + 2 * 6) * s.hidden + 4 * s.ffn, cast=fp8 * 4 * (3 * s.hidden + s.ffn + weights))
    again = forward if runs_whole(run) else forward + Moved(-6 * s.hidden)
    outputs = 5 * s.hidden + s.ffn
    back = Moved((2 * 10 * NORM + 2 * 6 + 3 * 4) * s.hidden + 6 * s.ffn, cast=fp8 * 4 * outputs)
    if not fp8:
        back += Moved(2 * outputs)
    ways = run.sharded
    shards = 8 if scatters_wide(run) else 4 + 6
    return forward + Moved(6 * weights / ways), again, back + Moved((6 + shards) * weights / ways)


def layer_launches(run: Run) -> tuple[int, int, int]:
    """Kernels that it launches for that: forward, again, backward.

    Transformer Engine of that version finds scales with every linear layer, in 3 and 2 (transformer_engine.py).
    """
    fp8 = run.precision == "fp8"
    forward, back = 2 + 2 + 1 + fp8 * 4 * (2 + 3), 4 + 2 + 1 + 1 + 4 + fp8 * 4 * 2
    return forward + 1, forward if runs_whole(run) else forward - 1, back + 3 - scatters_wide(run) + fp8 * 4


def rest_s(run: Run, cluster: Cluster) -> float:
    """Seconds of a step of MosaicML's passes over logits and of its optimizer, beyond those of our program."""
    each = (_LOGIT_FP8 if run.precision == "fp8" else _LOGIT) - _LOGIT_OURS
    logits = run.micro_batches * run.tokens * run.shape.vocab / run.tensor
    owned = stage_parameters(run) / run.sharded
    return (each * logits + (_STEP - _STEP_OURS) * owned) / memory_bytes_per_s(cluster.gpu)


def _launched(
    run: Run, schedule: Schedule, cluster: Cluster, what: str, passes: tuple[tuple[Moved, int], ...]
) -> Schedule:
    """The schedule with kernels beside those of attention, as many as there are of each pass over a layer."""
    times = [0.0, 0.0, 0.0]

    def count(name: str, trips: int) -> None:
        for i in schedule.computations[name]:
            for body in i.bodies:
                count(body, trips * (i.trip_count or 1))
            found = _pass_of(i)
            if found is not None:
                times[found] += trips

    count(schedule.entry, 1)
    wanted = run.shape.layers * run.micro_batches

    def one(body: tuple[Instruction, ...]) -> Iterator[Instruction]:
        for i in body:
            found = _pass_of(i)
            if found is not None:
                moved, number = passes[found]
                yield from launched(run, cluster, wanted / times[found] * moved, f"{i.name}.{what}", number)
            yield i

    return replace(schedule, computations={name: tuple(one(b)) for name, b in schedule.computations.items()})


def _pass_of(i: Instruction) -> int | None:
    """Which pass a kernel of attention is of: forward, again, backward."""
    if i.cost is None or not i.cost.attention_flops:
        return None
    return 2 if i.cost.attention_backward else int("rematted" in i.source or "transpose(" in i.source)
