"""The parts of a training step: the user's code, imported, and the sections of an experiment that say how it trains.

planning.resolve -> StepSpec -> model, loss, optimizer, examples -> TrainProgram
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
    """A resolved experiment, as far as its training step goes; rules and mesh come beside it.

    Attributes:
        model_class: what `model.class` names.
        loss: what `train.loss` names; None is next-token cross-entropy.
        optimizer_class: what `optimizer.class` names; None is AdamW.
        source: what `data.source` names, called with `seed`; None where that is tokens.
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
        """Where the keys of the sections were written."""
        return self.model_class.places
