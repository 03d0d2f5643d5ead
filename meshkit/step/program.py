"""A training step: its facts (StepFacts), and its functions and arrays, to compile, run and describe it (TrainProgram).

    TrainProgram.facts -> plan's verdicts, the sidecar of a trace -> summarize

Model FLOP of a step, the numerator of MFU (Chowdhery et al., 2022, appendix B):

    model_flops = 6 N tokens + 12 layers heads head_dim T tokens

N counts the parameters that multiply activations. The output head counts, also where it is tied to the input table; an
input look-up does not. The second term is attention's two matmuls over a full T x T square. A causal kernel computes
half of that square; a kernel with a sliding window computes the band that its mask leaves.

Reports and traces read facts without importing jax: only functions in this module import it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from meshkit.config.rules import ShardingRules
from meshkit.config.sections import TrainTable
from meshkit.hlo.costs import visible_share
from meshkit.hlo.pipeline_report import PipelineReport
from meshkit.step.spec import StepSpec

if TYPE_CHECKING:
    import jax

    from meshkit.parallel.pipeline import Pipeline
    from meshkit.sharding.mesh import AnyMesh
    from meshkit.step.pipelined import Arrangement
    from meshkit.step.state import ModelDescription, TrainState


class StepFacts(BaseModel):
    """Facts about one step; an unknown fact is None. FLOP, tokens and examples are those of all GPUs."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    model_flops: float | None = None
    """FLOP of the model, without recompute."""
    model_flops_causal: float | None = None
    """FLOP of the model without recompute, where attention counts only what its mask leaves."""
    flops_source: str | None = None
    """`model` where the model counts its own parameters, else `shapes`."""
    hardware_flops_per_gpu: float | None = None
    """Executed matmul FLOP of one GPU, with recompute."""
    peak_flops_per_gpu: float | None = None
    """Dense peak of the compute precision, FLOP/s."""
    precision: str | None = None
    """The precision of matmuls; if it is None, the precision of most of the program's FLOP is used."""
    tokens: float | None = None
    examples: int | None = None
    parameters: int | None = None
    matmul_parameters: int | None = None
    """How many of `parameters` are used by matmuls."""
    parameters_bytes: int | None = None
    """Bytes on one GPU."""
    optimizer_bytes: int | None = None
    """Bytes in one GPU's own memory; what is offloaded to host memory does not count."""
    gradients_bytes: int | None = None
    """Bytes on one GPU of the fp32 gradients that micro-batches accumulate."""
    state_bytes: int | None = None
    """Bytes of a checkpoint: the state of all GPUs, with replicas counted once."""
    training_steps: int | None = None
    steps_per_call: int = Field(
        default=1,
        ge=1,
        validation_alias=AliasChoices("steps_per_call", "steps_per_execution"),
        serialization_alias="steps_per_execution",
    )
    """Training steps that one call of the program makes; with local SGD a call makes a round of several."""
    pipeline: PipelineReport | None = None


NO_FACTS = StepFacts()


def training_steps(train: TrainTable) -> int:
    """Return the steps of the whole training: from `tokens_total` if it is given, otherwise `steps`."""
    if train.tokens_total is None:
        return train.steps
    return -(-train.tokens_total // (train.global_batch * train.sequence_length))


@dataclass(frozen=True)
class TrainProgram:
    """A training step for one mesh, with all that is needed to compile, run and describe it.

    Attributes:
        step: jitted (state, batch) -> (state, metrics); donates the state. Metrics are scalars: `loss` (nats per
            token), `grad_norm`, `learning_rate`, `weight`, and the loss function's own.
        gradients: jitted (state, batch) -> (loss, gradients). They are exactly those that `step` clips and applies.
            With a pipeline they are laid out as `arrangement` lays out the parameters.
        evaluate: jitted (state, batch) -> {"loss_sum", "weight"}.
        init: jitted () -> state, created sharded.
        abstract_state, abstract_batch: ShapeDtypeStructs with their shardings: arguments to lower `step` with.
        abstract_step_batch: the batch of one training step, which `evaluate` and `gradients` take. It is
            `abstract_batch` unless a call of `step` makes several training steps.
        stack: jitted, the batches of `steps_per_call` training steps -> the batch of one call; None where a call makes
            one training step.
        xla_options: options of the GPU compiler that this step asks for; those of the experiment override them.
        spec: what the step was built from.
        mesh, rules: what the step was built for.
        deferred: mesh axes over which the step itself cuts the batch, outside of the model. Over these axes gradients
            are reduced, and weights gathered, once a step. Over the axis of `[local_sgd]` weights are averaged once a
            call.
        facts: facts about a step.
        model: the model as the step takes it; with a pipeline its layers are arranged in stages.
        pipeline: the pipeline of `[pipeline]`, whose `report(microbatches)` has its bubble; None without one.
        arrangement: order and sharding of a pipeline's state in memory and on disk; None without a pipeline.
        notes: settings of the user that this model cannot honour, one sentence each.
    """

    step: Any
    gradients: Any
    evaluate: Any
    init: Any
    abstract_state: TrainState
    abstract_batch: dict[str, jax.ShapeDtypeStruct]
    abstract_step_batch: dict[str, jax.ShapeDtypeStruct]
    spec: StepSpec
    mesh: AnyMesh
    rules: ShardingRules
    facts: StepFacts
    model: ModelDescription
    deferred: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    stack: Any = None
    xla_options: Mapping[str, object] = field(default_factory=dict)
    pipeline: Pipeline | None = None
    arrangement: Arrangement | None = None

    @property
    def steps_per_call(self) -> int:
        """Training steps that one call of `step` makes.

        With `[local_sgd]` a call makes a round of several steps. The first dim of every array of the batch and of every
        metric is then the steps of the round.
        """
        return self.facts.steps_per_call


def find_facts(
    spec: StepSpec,
    model: ModelDescription,
    state: TrainState,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    *,
    gradients_bytes: int,
    steps_per_call: int = 1,
    pipeline: Pipeline | None = None,
) -> StepFacts:
    """Return the facts for `TrainProgram.facts`.

    Integer arrays [batch, sequence, ...] count as tokens; `model` must be the model as it is without a pipeline.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    train = spec.train
    tokens = train.global_batch * train.sequence_length
    params = nnx.to_pure_dict(model.params)
    with spec.model_class.calling(f"matmul_parameters or attention_shape of {spec.model_class.name}"):
        flops = count_model_flops(model.abstract_model(), params, tokens, train.sequence_length)
    sequences = (train.global_batch, train.sequence_length)
    has_tokens = any(x.shape[:2] == sequences and jnp.issubdtype(x.dtype, jnp.integer) for x in batch.values())
    return StepFacts(
        **flops.model_dump(exclude_unset=True, exclude=set() if has_tokens else {"tokens"}),
        precision=train.precision,
        examples=train.global_batch,
        parameters=sum(p.size for p in jax.tree.leaves(params)),
        parameters_bytes=local_bytes(state.params),
        optimizer_bytes=local_bytes(state.opt_state),
        gradients_bytes=gradients_bytes,
        state_bytes=sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state)),
        training_steps=training_steps(train),
        steps_per_call=steps_per_call,
        pipeline=pipeline and pipeline.report(spec.pipeline.microbatches),
    )


def count_model_flops(model: Any, abstract_params: Any, tokens: int, sequence_length: int) -> StepFacts:
    """Return the FLOP of a step on `tokens` tokens in sequences of `sequence_length`, and what they are counted from.

    Args:
        model: may have three methods. Without `matmul_parameters() -> int` every parameter of two dims or more counts
            as one that multiplies activations. Without `attention_shape() -> (layers, heads, head_dim)` there is no
            attention term. `attention_windows() -> (tokens, ...)` gives the window of each layer with a sliding window.
        abstract_params: tree of the model's parameters; read where the model has no `matmul_parameters`.
    """
    import jax

    described = hasattr(model, "matmul_parameters")
    if described:
        n = int(model.matmul_parameters())
    else:
        n = sum(math.prod(p.shape) for p in jax.tree.leaves(abstract_params) if len(p.shape) >= 2)
    layers, heads, head_dim = model.attention_shape() if hasattr(model, "attention_shape") else (0, 0, 0)
    dense = 6.0 * n * tokens
    windows = model.attention_windows() if hasattr(model, "attention_windows") else ()
    each = 12.0 * heads * head_dim * sequence_length * tokens  # attention FLOP per layer
    seen = sum(visible_share(sequence_length, True, window) for window in windows) + (layers - len(windows)) / 2
    return StepFacts(
        model_flops=dense + layers * each,
        model_flops_causal=dense + seen * each,
        flops_source="model" if described else "shapes",
        matmul_parameters=n,
        tokens=tokens,
    )


def local_bytes(tree: Any) -> int:
    """Return the bytes of a tree in one GPU's memory, without random keys, host memory and unsharded arrays."""
    import jax
    from jax.sharding import NamedSharding

    from meshkit.step.state import HOST_MEMORY

    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
        and leaf.sharding.memory_kind != HOST_MEMORY
        and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def find_notes(spec: StepSpec, model: ModelDescription) -> tuple[str, ...]:
    """Return the notes for `TrainProgram.notes`."""
    train = spec.train
    if train.precision == "bf16" and train.reduce_precision == "fp32" and not model.takes_dtype:
        name = spec.model_class.name
        return (f"{name} takes no `dtype`: its weights are cast to bf16 for it, so its gradients are reduced in bf16.",)
    return ()
