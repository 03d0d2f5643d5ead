"""StepFacts: what is known of a training step, from `make_train_step` to the report. Imports no jax.

TrainProgram.facts -> plan's verdicts, the sidecar of a trace -> summarize
"""

from __future__ import annotations

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from meshkit.config.sections import TrainTable
from meshkit.hlo.pipeline_report import PipelineReport


class StepFacts(BaseModel):
    """What one step computes, holds and belongs to; None where unknown. FLOP, tokens and examples are of all GPUs."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    model_flops: float | None = None  # of the model, without recompute
    model_flops_causal: float | None = None  # the same with half of the attention term
    flops_source: str | None = None  # `model` where it describes itself, else `shapes`
    hardware_flops_per_gpu: float | None = None  # executed matmul FLOP of one GPU, with recompute
    peak_flops_per_gpu: float | None = None  # dense peak of the compute precision, FLOP/s
    precision: str | None = None  # of the matmuls; None takes that of most of the program's FLOP
    tokens: float | None = None
    examples: int | None = None
    parameters: int | None = None  # numbers in the model
    matmul_parameters: int | None = None  # of them, those used in matmuls
    parameters_bytes: int | None = None  # on one GPU
    optimizer_bytes: int | None = None  # on one GPU, without what lies in host memory
    gradients_bytes: int | None = None  # on one GPU, as micro-batches add them up in fp32
    state_bytes: int | None = None  # of a checkpoint: over all GPUs, replicas counted once
    training_steps: int | None = None  # of the whole training
    steps_per_call: int = Field(
        default=1,
        ge=1,
        validation_alias=AliasChoices("steps_per_call", "steps_per_execution"),
        serialization_alias="steps_per_execution",
    )
    """Training steps that one call of the program makes: a round of local SGD makes several."""
    pipeline: PipelineReport | None = None  # what the schedule of its pipeline costs; None without one


NO_FACTS = StepFacts()


def training_steps(train: TrainTable) -> int:
    """Steps of the whole training: `tokens_total` where given, else `steps`."""
    if train.tokens_total is None:
        return train.steps
    return -(-train.tokens_total // (train.global_batch * train.sequence_length))
