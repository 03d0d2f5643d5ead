"""Trace steps of a training: the range `[profile] steps`, and one in every `[profile] every`, which is read at once.

    before a step: start | after it: stop -> `trace/` in the run folder (`steps`) | watch.StepCaptures (`every`)

A trace holds only its own steps: it starts when devices have computed the state before the steps, and stops when they
have computed the outputs.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import jax

from meshkit.config.sections import ProfileTable
from meshkit.runs.phases import Phases
from meshkit.step.state import TrainState
from meshkit.trace.capture import Capture, CapturedStep, chosen_processes
from meshkit.trace.captured import TRACE_FOLDER
from meshkit.verbs.train.hooks import TrainingStep
from meshkit.verbs.train.records import StepRecords
from meshkit.verbs.train.watch import StepCaptures


def planned_capture(profile: ProfileTable, step: CapturedStep, folder: Path, resumed_step: int) -> Capture | None:
    """Return the capture of `[profile] steps`; None if it is not set, or if all of its steps are done already.

    Args:
        profile: the experiment's `[profile]` table.
        step: the step of the training.
        folder: the run folder.
        resumed_step: the number of steps that are done already.

    Raises:
        ConfigError: `processes` names one that the job does not have.
    """
    if profile.steps is None or profile.steps[1] <= resumed_step:
        return None
    first, last = profile.steps
    return Capture(
        folder / TRACE_FOLDER,
        step,
        steps=(max(first, resumed_step + 1) + step.facts.steps_per_call - 1, last),
        processes=chosen_processes(profile.processes, jax.process_count()),
    )


class Captures:
    """Start and stop the traces of a training; one profiler runs at a time.

    Args:
        planned: the capture of `[profile] steps`; None if this attempt makes none of these steps.
        live: the captures of `[profile] every`.
        records: the records of the steps. A finished capture amends them, and their clock must not include traces.
        phases: the phases of this process.
    """

    def __init__(self, planned: Capture | None, live: StepCaptures, records: StepRecords, phases: Phases):
        self._planned, self._live = planned, live
        self._records, self._phases = records, phases
        self._live_next = self._live_now = False

    def before(self, step: int, state: TrainState) -> None:
        """If this step is to be captured, wait for `state` and start the trace."""
        planned, self._live_now = self._planned is not None and step == self._planned.first, self._live_next
        if not planned and not self._live_now:
            return
        self._phases.enter("trace")
        if planned and self._planned:
            times_s = self._records.step_times_s
            self._planned.untraced_step_s = statistics.median(times_s) if times_s else None
            self._planned.before(step, state)
        if self._live_now:
            self._live.start(state)
        self._phases.enter("step")
        self._records.restart_clock()

    def is_due(self, step: TrainingStep) -> bool:
        """Return whether a trace ends with this step or begins with the next; if so, read this step's metrics first."""
        following = step.number + step.per_call
        planned = self._planned
        # `live.is_due` is called after every step, except while the planned capture runs.
        others = planned is not None and planned.first <= following < planned.last + step.per_call
        self._live_next = not others and self._live.is_due(step.number + 1, following)
        edges = planned is not None and step.number in (planned.first - step.per_call, planned.last)
        return edges or self._live_now or self._live_next

    def after(self, step: TrainingStep) -> None:
        """If a trace ends with this step, wait for the step's outputs and stop the trace."""
        if self._live.active:
            self._live.stop(step.number, (step.state, step.arrays))
        if self._planned and self._planned.active:
            self._phases.enter("trace")
            self._planned.after(step.number, (step.state, step.arrays))
            self._phases.enter("step")
            if not self._planned.active:
                self._records.log.measure_capture()

    def close(self) -> None:
        """End the process that reads live captures."""
        self._live.close()
