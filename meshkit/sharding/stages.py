"""A pipeline as the communication contract needs it: how often each thing runs in a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stages:
    """How often a step runs what is in, and what is around, the stages of a pipeline.

    Attributes:
        axis: the mesh axis that cuts the layers.
        microbatches: of a step.
        ticks: in which one chunk goes forward, and as many in which one goes backward: M v + S - 1.
        outer_ticks: in which the embedding, or the head, may run, at most.
        chunk_layers: of one chunk, padding included.
        layers: of the model.
    """

    axis: str
    microbatches: int
    ticks: int
    outer_ticks: int
    chunk_layers: int
    layers: int

    @property
    def layer_runs(self) -> float:
        """Runs of layers on one GPU and in one direction, over the layers of the model."""
        return self.ticks * self.chunk_layers / self.layers
