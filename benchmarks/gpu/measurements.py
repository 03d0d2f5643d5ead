"""List the measurements, the most valuable first: the question of each, its duration, and its function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.trainings import TRAININGS
from benchmarks.gpu.verbs import EXPERIMENTS, LLAMA_1B


@dataclass(frozen=True)
class Measurement:
    """One question to a GPU."""

    name: str
    """The name of the measurement and of its folder."""
    piece: int
    """The number of the command of nine minutes that runs it. Pieces 4 and 5 are the trainings of trainings.py."""
    expected_s: float
    """The expected seconds on an H100 with 16 cores, compiles included."""
    question: str
    """The question that it answers, for a reader."""
    function: str
    """The module:function of benchmarks.gpu that is called with (folder, toy, **options)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function."""

    @property
    def limit_s(self) -> float:
        """The seconds after which the measurement counts as hung and is stopped."""
        return 2 * self.expected_s + 20

    def run(self, folder: Path, toy: bool) -> Iterator[dict[str, Any]]:
        """Run the measurement in this process, and yield each result as it is found; `toy` asks for sizes for CPUs."""
        return self.load()(folder, toy, **self.options)

    def load(self) -> Callable[..., Iterator[dict[str, Any]]]:
        """Import and return the function."""
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(f"benchmarks.gpu.{module}"), name)


def _rehearsal(name: str, piece: int, expected_s: float, question: str, *settings: str) -> Measurement:
    file = LLAMA_1B if name == LLAMA_1B.stem else EXPERIMENTS / f"{name.split('-')[0]}.toml"
    options = {"experiment": file, "settings": settings}
    return Measurement(f"rehearse_{name}", piece, expected_s, question, "verbs:rehearse", options)


_8B_FSDP = ("mesh={ fsdp = { nvlink = 8, infiniband = 2 } }", "rules.preset=fsdp")
_8B_TENSOR = ("mesh={ fsdp = { nvlink = 2, infiniband = 2 }, tensor = 4 }", "rules.preset=fsdp_tensor")
_8B_PIPELINE = (
    "mesh={ pipeline = { infiniband = 2 }, fsdp = 8 }",
    "rules.preset=fsdp",
    "train.global_batch=64",
    "pipeline={ axis = 'pipeline', microbatches = 8 }",
)

MEASUREMENTS = (
    Measurement("card", 1, 12, "Which GPU, driver, clocks, limits; what topo and doctor say of it", "verbs:card"),
    Measurement("train_llama_1b", 1, 65, "Step, mfu_causal, peak and compile time against plan", "verbs:train"),
    _rehearsal("llama_1b", 1, 60, "The training of piece 1, rehearsed: how far made-up values stand for real ones"),
    _rehearsal("llama3_70b", 1, 65, "8 of 80 layers on 64 x 8: kernels and peak against plan", "model.layers=8"),
    Measurement("matmul", 1, 100, "Sustained matmuls, bf16 and fp8, with power and clocks", "kernels:matmuls"),
    Measurement("copy", 1, 15, "Bandwidth of device memory by size", "kernels:copies"),
    Measurement("attention", 1, 42, "cuDNN attention, causal, forward and backward, 4k and 8k", "kernels:attention"),
    Measurement("small_trace", 1, 20, "A training small enough that its trace becomes a test's data", "verbs:trace"),
    Measurement("small_kernels", 1, 35, "Casts, amax, norms, gathers, embedding gradient, AdamW", "kernels:small"),
    _rehearsal("llama3_8b", 1, 57, "FSDP on 2 x 8", *_8B_FSDP),
    Measurement("bench", 1, 50, "meshkit bench on one GPU: its rates, as a calibration", "verbs:bench"),
    _rehearsal("llama3_8b-tensor", 2, 65, "FSDP and tensor on 2 x 8", *_8B_TENSOR),
    _rehearsal("mixtral_8x7b", 2, 75, "Experts on their own cluster", "model.layers=8"),
    _rehearsal("llama3_8b_long", 2, 80, "Context parallel, 131,072 tokens", "model.layers=8"),
    _rehearsal("llama3_8b-pipeline", 2, 115, "A pipeline of 2 stages", *_8B_PIPELINE),
    Measurement(
        "train_llama_1b_fp8",
        2,
        195,
        "The same training in fp8",
        "verbs:train",
        {"settings": ("train.precision=fp8",)},
    ),
    Measurement("contention", 3, 50, "Kernels beside held multiprocessors and what a ring moves", "contention:measure"),
    Measurement(
        "train_predicted_latencies",
        3,
        120,
        "Scheduling by predicted prices, beside XLA's own",
        "verbs:train",
        {"settings": ("train.pgle=predicted",)},
    ),
    Measurement("xla_options", 3, 200, "XLA's options on two programs, each on and off", "options:measure"),
    Measurement(
        "attention_32k",
        3,
        22,
        "cuDNN attention at 32k",
        "kernels:attention",
        {"lengths": (32_768,)},
    ),
    Measurement("kill_and_resume", 3, 35, "kill -9 in training, and the same losses bit for bit", "verbs:resume"),
    Measurement("preemption", 3, 23, "SIGTERM: a checkpoint and exit code 75", "verbs:preempt"),
    Measurement("live_captures", 3, 30, "One step in five captured and read beside the training", "captures:measure"),
    Measurement("floor", 6, 130, "meshkit's step and the same model in plain jax, in turn", "floor:measure"),
    Measurement("out_of_memory", 3, 50, "A step that does not fit: message, exit code 4, a remedy", "verbs:exhaust"),
)

_ROWS_A_PIECE = 16  # The traces of so many trainings fill an archive.

ROWS = tuple(
    Measurement(f"row_{name}", 4 + i // _ROWS_A_PIECE, 30, training.what, "rows:measure", {"name": name})
    for i, (name, training) in enumerate(TRAININGS.items())
)
