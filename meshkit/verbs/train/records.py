"""Write a record for each step: its numbers, its time, and the times for which the host waited.

    TrainingStep -> read: waits for the devices -> numbers, times -> write -> metrics.jsonl and sinks, progress, goodput

The numbers of a step are read while the next step runs, unless a hook or a checkpoint needs them before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meshkit.config.sections import TrainTable
from meshkit.errors import RunError
from meshkit.runs.phases import GoodputLog, Phases
from meshkit.step.program import StepFacts
from meshkit.verbs.checkpoint.store import CheckpointStore
from meshkit.verbs.train.hooks import TrainingStep
from meshkit.verbs.train.session import RunLog, StepProgress
from meshkit.verbs.train.watch import Stragglers


@dataclass
class StepRecords:
    """Write the records of one attempt's steps, in the order of the steps."""

    train: TrainTable
    folder: Path
    facts: StepFacts
    devices: int
    phases: Phases
    goodput: GoodputLog
    progress: StepProgress
    store: CheckpointStore
    stragglers: Stragglers
    log: RunLog
    step_times_s: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    """The newest record; empty before the first one."""
    data_wait_s: float = 0.0
    """Seconds that the host has waited for batches since the last step was read."""
    _clock: float = 0.0

    def restart_clock(self) -> None:
        """Leave the time until now out of the next step's time."""
        self._clock = time.perf_counter()

    def read(self, arrays: Mapping[str, jax.Array]) -> list[dict[str, float]]:
        """Wait for the metrics of a call of the compiled step, and measure its time.

        Args:
            arrays: scalars, or one number for each of the call's steps.

        Returns:
            For each step, its numbers and its share of the call's seconds, which is equal for all steps of the call.
        """
        per_call, phase = self.facts.steps_per_call, self.phases.phase
        if phase != "step":  # inside a hook
            self.phases.enter("step")
        began = time.perf_counter()
        values = {name: np.asarray(value, np.float64).reshape(per_call).tolist() for name, value in arrays.items()}
        waits = {"data_wait_s": self.data_wait_s, "device_wait_s": time.perf_counter() - began}
        waits = {name: seconds / per_call for name, seconds in waits.items()}
        elapsed_s = (time.perf_counter() - self._clock) / per_call
        waits["host_s"] = max(0.0, elapsed_s - sum(waits.values()))  # Python and dispatch
        waits["step_time_s"] = elapsed_s
        self.data_wait_s = 0.0
        if phase != "step":
            self.phases.enter(phase)
        return [waits | {name: value[i] for name, value in values.items()} for i in range(per_call)]

    def write(self, step: TrainingStep) -> None:
        """Wait for the metrics of a call, and write the record of each of its steps.

        Raises:
            RunError: the loss or the norm of the gradients is not finite.
        """
        for number, values in enumerate(step.wait(), step.first):
            is_whole = number == step.number
            self._write_one(number, dict(values), step.added if is_whole else {}, is_whole and step.is_last)

    def _write_one(self, step: int, values: dict[str, float], added: Mapping[str, float], is_last: bool) -> None:
        loss, elapsed_s = values.pop("loss"), values.pop("step_time_s")
        self.step_times_s.append(elapsed_s)
        speed = speed_of(self.facts, self.devices, elapsed_s)
        record: dict[str, Any] = {**values, "step": step, "loss": loss, "step_time_s": elapsed_s, **speed, **added}
        if (share := self.goodput.share()) is not None:
            record["goodput"] = share
        self.stragglers.note(record)
        record |= self.stragglers.captured
        if step % self.train.log_every == 0 or is_last or added:
            self.log.write(record | self.store.news() | self.stragglers.news())
            self.progress.tell_capture(record)
        self.progress.update(record)
        self.last = record
        self.restart_clock()
        self.goodput.made(step)
        norm = values.get("grad_norm", 0.0)
        if not math.isfinite(loss) or not math.isfinite(norm):  # found before a checkpoint replaces a good one
            raise RunError(
                f"the loss is {loss} and the gradient norm {norm} at step {step}.",
                at=str(self.folder),
                hint="a lower optimizer.learning_rate, a longer warm-up, or clip; the last good checkpoint is kept",
            )


def speed_of(facts: StepFacts, devices: int, step_time_s: float) -> dict[str, float | None]:
    """Return `tokens_per_s` (`examples_per_s` for data without tokens) and `mfu`, model FLOPs utilization.

    `mfu` is None if the peak FLOP/s of the devices is not known, as for virtual CPU devices.
    """
    assert facts.examples is not None
    assert facts.model_flops is not None
    what, count = ("tokens", facts.tokens) if facts.tokens is not None else ("examples", facts.examples)
    peak = facts.peak_flops_per_gpu
    return {
        f"{what}_per_s": count / step_time_s,
        "mfu": facts.model_flops / (peak * devices * step_time_s) if peak else None,
    }
