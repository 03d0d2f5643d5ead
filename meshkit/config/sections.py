"""The sections of an experiment as frozen dataclasses, every default filled in.

`tables.py` says which keys a file may have and what they mean; these are what the rest of meshkit works with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# The XLA option that names a profile to schedule by, and what `train.pgle` says instead of one.
PGLE_OPTION = "xla_gpu_pgle_profile_file_or_directory_path"
PREDICTED = "predicted"


@dataclass(frozen=True)
class ModelSpec:
    """The model: `pkg.mod:Class`, the name of a preset, and what overrides it."""

    class_path: str
    preset: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RematMix:
    """`train.remat` as a table: what waits for the backward pass on the GPU, and what in host memory.

    Attributes:
        keep, offload: names of values that the model marks, none in both.
    """

    keep: tuple[str, ...]
    offload: tuple[str, ...]

    def to_dict(self) -> dict[str, list[str]]:
        """As the file has it, and as a model is given it."""
        kept = {"keep": list(self.keep)} if self.keep else {}
        return {**kept, "offload": list(self.offload)}


@dataclass(frozen=True)
class TrainSpec:
    """The training loop; see the table of the experiment file for what each key means."""

    global_batch: int
    sequence_length: int = 1
    steps: int = 100
    tokens_total: int | None = None
    accumulate: int = 1
    precision: str = "bf16"
    reduce_precision: str = "fp32"
    remat: str | tuple[str, ...] | RematMix = "none"
    memory_fraction: float = 0.92
    pgle: str = "off"
    loss: str | None = None
    evaluate_every: int = 0
    evaluate_batches: int = 4
    seed: int = 0
    log_every: int = 1
    replica_check_every: int = 0
    metrics: str | None = None
    tensorboard: bool = False

    @property
    def offloads(self) -> bool:
        """Whether activations wait for the backward pass in host memory."""
        return isinstance(self.remat, RematMix) or str(self.remat).startswith("offload")


@dataclass(frozen=True)
class OptimizerSpec:
    """AdamW and its schedule; clip = 0 clips nothing."""

    learning_rate: float = 3e-4
    warmup_steps: int = 0
    weight_decay: float = 0.1
    clip: float = 1.0
    dtype: str = "fp32"
    memory: str = "device"
    schedule: str = "cosine"
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8


@dataclass(frozen=True)
class DataSpec:
    """Where examples come from: `python-stdlib`, an absolute path, or `pkg.mod:fn`."""

    source: str = "python-stdlib"
    seed: int = 0
    validation_fraction: float = 0.05

    @property
    def options(self) -> dict[str, Any]:
        """What is not the source."""
        return {"seed": self.seed, "validation_fraction": self.validation_fraction}


@dataclass(frozen=True)
class CheckpointSpec:
    """When checkpoints are written; every = 0 writes none."""

    every: int = 0
    keep: int = 2
    keep_every: int = 0
    verify: str = "own"
    initial: str | None = None


@dataclass(frozen=True)
class ProfileSpec:
    """The first and the last step that are captured (None: none), and by which processes (None: all)."""

    steps: tuple[int, int] | None = None
    processes: int | list[int] | None = None


@dataclass(frozen=True)
class LocalSgdSpec:
    """Local SGD (DiLoCo): replicas along `axis` step on their own and meet every `every` steps; axis None = off."""

    axis: str | None = None
    every: int = 1
    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    staleness: int = 0


@dataclass(frozen=True)
class CompressionSpec:
    """Gradients over `axis` travel as `dtype`; axis None = off."""

    axis: str | None = None
    dtype: str = "bf16"
    error_feedback: bool = True


@dataclass(frozen=True)
class PipelineSpec:
    """Layers in stages over `axis`, a batch in `microbatches`; axis None = off."""

    axis: str | None = None
    microbatches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    residuals: str = "recompute"
    head: str = "vocab_parallel"
    layout: str | None = None


@dataclass(frozen=True)
class Allowed:
    """A finding of the lint that the user accepts, by code and by path pattern, with the reason."""

    code: str
    path: str
    reason: str


@dataclass(frozen=True)
class LintSpec:
    """What the lint shall not report."""

    allow: tuple[Allowed, ...] = ()
