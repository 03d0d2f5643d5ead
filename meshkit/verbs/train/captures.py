"""Which steps of a training are traced: those of `[profile] steps`, and one of every so many that is read at once.

    before a step: start | after it: stop -> `trace/` of the run folder | watch.StepCaptures

A trace holds nothing but its steps: it begins once the state before them is there, and ends with their outputs.
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
    """Return the capture that `[profile] steps` asks for; None where an attempt from this step on makes none of them.

    Args:
        profile: of the experiment.
        step: what runs.
        folder: the run folder.
        resumed_step: steps that are done already.

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
    """Starts and stops the traces of a training; one profiler runs at a time.

    Args:
        planned: of `[profile] steps`; None where this attempt makes none of them.
        live: of `[profile] every`.
        records: which a finished capture amends, and whose clock no trace is to be part of.
        phases: of this process.
    """

    def __init__(self, planned: Capture | None, live: StepCaptures, records: StepRecords, phases: Phases):
        self._planned, self._live = planned, live
        self._records, self._phases = records, phases
        self._live_next = self._live_now = False

    def before(self, step: int, state: TrainState) -> None:
        """Starts the trace of a step that is to be captured, once its state is there."""
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
        """Return whether a trace ends with this step, or begins with the next: its metrics are to be read before."""
        following = step.number + step.per_call
        planned = self._planned
        # asked at each step, unless the other profiler runs
        others = planned is not None and planned.first <= following < planned.last + step.per_call
        self._live_next = not others and self._live.is_due(step.number + 1, following)
        edges = planned is not None and step.number in (planned.first - step.per_call, planned.last)
        return edges or self._live_now or self._live_next

    def after(self, step: TrainingStep) -> None:
        """Stops the trace that ends with this step, once its outputs are there."""
        if self._live.active:
            self._live.stop(step.number, (step.state, step.arrays))
        if self._planned and self._planned.active:
            self._phases.enter("trace")
            self._planned.after(step.number, (step.state, step.arrays))
            self._phases.enter("step")
            if not self._planned.active:
                self._records.log.measure_capture()

    def close(self) -> None:
        """Ends what reads traces beside this process."""
        self._live.close()
