"""The inputs of a training step: the user's imported code, and the sections of an experiment that configure training.

planning.resolved -> StepSpec -> model, loss, optimizer, examples -> TrainProgram
"""

from __future__ import annotations

from dataclasses import dataclass

from meshkit.config.places import Places, UserCode
from meshkit.config.sections import (
    CompressionTable,
    DataTable,
    LocalSgdTable,
    ModelTable,
    OptimizerTable,
    PipelineTable,
    TrainTable,
)


@dataclass(frozen=True)
class StepSpec:
    """The parts of a resolved experiment that its training step needs, except rules and mesh.

    Attributes:
        model_class: the class or function that `model.class` names.
        loss: the function that `train.loss` names; None: next-token cross-entropy.
        optimizer_class: what `optimizer.class` names; if None, `optimizer.algorithm` selects AdamW or Muon.
        source: the function that `data.source` names, called with `seed`; None if the source is tokens.
        model, train, optimizer, data, pipeline, local_sgd, compression: the sections.
    """

    model_class: UserCode
    loss: UserCode | None
    optimizer_class: UserCode | None
    source: UserCode | None
    model: ModelTable
    train: TrainTable
    optimizer: OptimizerTable
    data: DataTable
    pipeline: PipelineTable
    local_sgd: LocalSgdTable
    compression: CompressionTable

    @property
    def places(self) -> Places:
        """The file and place where each key of the sections is written."""
        return self.model_class.places
