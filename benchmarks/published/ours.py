"""What of a compiled stage only our program does, and what only the framework it stands for does. Part of replica.py.

Of a whole step of FSDP that is the first line: FSDP casts its fp32 shards with every micro-batch too. More: fsdp.py.

    copies of the loop over layers    it stacks what the backward pass needs, and takes it apart again; autograd keeps
                                      references
    casts of fp32 weights             with every micro-batch; Megatron-LM, DeepSpeed and InternEvo hold 16 bits
    fp8 weights, and scales           the same; Transformer Engine casts weights once a step and, with delayed scaling,
                                      finds largest values on the way (housekeeping.py says when they are reduced);
                                      MXFP8 has none, as a scale of 32 values is their own
    accumulators filled with zeros    once a step elsewhere
    repeats (`.remat`)                XLA recomputes where the program wants more memory than there is; the other fit

Stacking the gradients reads and writes each once, as adding them to those of the micro-batches before does; it goes
where matmuls add to them in their epilogue (`Framework.fused_gradients`; `reduction.py` has what that costs).
What else is between the matmuls makes way for what the framework launches there (eager.py, transformer_engine.py).

cuDNN's attention has heads of up to 128 in XLA, so that our program keeps the scores of wider ones in memory
(`fused_scores`); FlashAttention 2 has them up to 256.

Where layers are recomputed, XLA makes again only what a gradient needs: all but a layer's last matmul and its reduction
over tensor parallelism. Checkpoints of Megatron-LM, DeepSpeed and InternEvo, and torch's reentrant one, run a layer's
forward pass whole; so did torch's other one until its early stop became the default (pytorch/pytorch, pull requests
90105 and 96866, of March 2023: in 2.1). `rerun` adds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.published.experiments import Run
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Instruction, Schedule

_STACKED_GRADIENT = re.compile(r"transpose\(.*/dynamic_update_slice$")
_LOOP_COPY = re.compile(r"/dynamic_slice$|^(?!.*transpose\().*/dynamic_update_slice$")
_CAST = re.compile(
    r"/(query_key_value|query|key|value|output|gate_up|gate|up|down|head|logits|moe)/convert_element_type$"
)
_LARGEST = re.compile(r"/(query_key_value|query|key|value|output|gate_up|gate|up|down)/reduce_max$")
_LAST = "/mlp/down/dot_general"  # of a layer
_SCORES, _FUSED_HEAD = "/attention/vmap(", 128  # kernels between the projections; cuDNN's widest head in XLA
_WEIGHT_BYTES = (4, 5, 6)  # read in fp32; written not at all, in fp8, in 16 bits
_SCALES_BYTES = 64  # of a collective of largest values


def casts_weights(run: Run) -> Callable[[Instruction], bool]:
    """Whether an instruction of the run's compiled stage casts weights, turns them or finds their scale."""
    sizes = _weight_sizes(run)
    delayed = not is_current(run)
    fp8 = run.document["train"]["precision"] == "fp8"

    def found(i: Instruction) -> bool:
        if fp8 and delayed and finds_scale(i):
            return True
        if not is_pass(i):
            return False
        if _CAST.search(i.source) or _LARGEST.search(i.source):
            moved = i.cost.bytes_accessed  # pyright: ignore[reportOptionalMemberAccess]
            return any(abs(moved - b * size) < 0.01 * b * size for size in sizes for b in _WEIGHT_BYTES)
        return fp8 and i.name.startswith("wrapped_transpose")  # of weights, for Hopper's fp8 matmuls: once a step

    return found


def finds_scale(i: Instruction) -> bool:
    """Whether an instruction finds the largest value of a tensor and does nothing else, or sends such values."""
    if i.collective is not None:
        return i.collective.payload_bytes <= _SCALES_BYTES
    return is_pass(i) and i.name.startswith("input_reduce_fusion") and _LARGEST.search(i.source) is not None


def is_current(run: Run) -> bool:
    """Whether fp8's scales are those of the tensors at hand (current scaling), not of steps before (delayed)."""
    return run.precision == "fp8" and re.search(r"cs|current", run.row.say("precision"), re.IGNORECASE) is not None


def wants_both(run: Run, cluster: Cluster) -> bool:
    """Whether TransformerEngine's matmuls in 8 bits take no transposed operand: on Hopper, and before v2.0 anywhere."""
    return cluster.gpu.key.startswith("h") or "MLPerf Training v4.1" in run.row.source


def is_loop_copy(i: Instruction) -> bool:
    """Whether an instruction copies into or out of the stacks of the loop over layers: FSDP does not either."""
    return is_pass(i) and _LOOP_COPY.search(i.source) is not None


def is_stacked_gradient(i: Instruction) -> bool:
    """Whether an instruction copies a layer's gradient into the stack of all layers'."""
    return is_pass(i) and _STACKED_GRADIENT.search(i.source) is not None


def is_filled(i: Instruction) -> bool:
    """Whether an instruction fills an accumulator."""
    return is_pass(i) and i.name.startswith(("loop_broadcast", "wrapped_broadcast"))


def is_pass(i: Instruction) -> bool:
    """Whether an instruction is a kernel that multiplies nothing."""
    return i.collective is None and i.cost is not None and not i.cost.multiplies


def without(schedule: Schedule, unwanted: Callable[[Instruction], bool]) -> Schedule:
    """The schedule without some of its instructions; what waits for one of them no longer does."""
    gone = {i.name for body in schedule.computations.values() for i in body if unwanted(i) and not i.bodies}
    kept = {
        name: tuple(i for i in body if i.name not in gone and i.starts not in gone)
        for name, body in schedule.computations.items()
    }
    return replace(schedule, computations=kept)


def repeats(schedule: Schedule) -> set[str]:
    """Names of the copies that XLA's rematerialization made of an instruction; of each one is kept, as the original.

    Where XLA uses only copies it removes the original, so a copy may be all there is of what the model asks for.
    """
    families: dict[str, list[str]] = {}
    for body in schedule.computations.values():
        for i in body:
            families.setdefault(i.name.partition(".remat")[0], []).append(i.name)
    return {name for names in families.values() for name in sorted(names, key=len)[1:] if ".remat" in name}


def runs_whole(run: Run) -> bool:
    """Whether what a run recomputes runs whole: by its framework's pattern of precisions."""
    return bool(run.framework.reruns and re.search(run.framework.reruns, run.row.say("precision")))


def rerun(run: Run, schedule: Schedule) -> Schedule:
    """The schedule with the last matmul of every layer, and its collective, once more where the framework does so."""
    if run.document["train"]["remat"] != "full" or not runs_whole(run):
        return schedule
    computations = {name: tuple(_twice(body)) for name, body in schedule.computations.items()}
    return replace(schedule, computations=computations)


def has_wide_heads(run: Run) -> bool:
    """Whether a run's framework fuses attention that our program does not."""
    return run.framework.fused_attention and run.shape.head_dim > _FUSED_HEAD and not run.row.say("attention")


def fused_scores(run: Run, schedule: Schedule) -> Schedule:
    """The schedule with one kernel a pass in the place of those that make and read the scores of attention."""
    heads, length = run.shape.heads // run.tensor, run.length
    forward = Cost(
        attention_flops=2.0 * run.tokens * length * heads * run.shape.head_dim,  # of half the square
        attention_queries=round(run.tokens * heads),
        attention_length=length,
        attention_head_dim=run.shape.head_dim,
        attention_causal=True,
    )

    def fused(body: tuple[Instruction, ...]) -> Iterator[Instruction]:
        made = False
        for i in body:
            if _SCORES not in i.source or i.bodies:
                yield i
            elif not made:
                made, backward = True, "transpose(" in i.source
                cost = replace(
                    forward,
                    attention_flops=forward.attention_flops * (2.5 if backward else 1.0),
                    attention_backward=backward,
                )
                yield replace(i, name=f"{i.name}.fused", kind="kernel", cost=cost)

    return replace(schedule, computations={name: tuple(fused(b)) for name, b in schedule.computations.items()})


def _twice(body: tuple[Instruction, ...]) -> Iterator[Instruction]:
    again: set[str] = set()
    for i in body:
        yield i
        if i.source.endswith(_LAST) and "transpose(" not in i.source and (i.cost or i.collective):
            again.add(i.name)
            yield replace(i, name=f"{i.name}.rerun")
        elif i.starts in again:
            yield replace(i, name=f"{i.name}.rerun", starts=f"{i.starts}.rerun")


def _weight_sizes(run: Run) -> set[float]:
    """Elements of the weights of a layer and of the output head on one GPU."""
    s = run.shape
    keys, queries = s.hidden * s.keys, s.hidden * s.heads * s.head_dim
    attention = (queries, keys, 2 * keys, queries + 2 * keys)
    experts = s.experts * s.hidden * s.ffn / run.experts
    return {
        size / run.tensor for size in (*attention, experts, s.hidden * s.ffn, 2 * s.hidden * s.ffn, s.vocab * s.hidden)
    }
