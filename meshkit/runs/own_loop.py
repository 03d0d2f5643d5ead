"""Let the user's own training loop, under a launcher, join the job, report its progress, and be watched for hangs.

    MESHKIT_* -> init_distributed -> jax.distributed; progress(step) -> pulse of this process, metrics.jsonl

In a process without a launcher both functions do nothing, so a script also runs alone.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from meshkit.console import say
from meshkit.distributed.environment import OUT, leave_gang, say_lost_process
from meshkit.errors import BUG, MeshkitError
from meshkit.runs.phases import Phase, Phases


class _Loop:
    """The state of a process that runs the user's own loop."""

    def __init__(self) -> None:
        self.around = ExitStack()
        self.phases: Phases | None = None
        self.log: Any = None
        self.process = 0

    def begin(self) -> Phases:
        """Return the phases; the first call starts the pulse, and makes the process end at once on an exception."""
        if self.phases is None:
            self.phases = self.around.enter_context(Phases())
            atexit.register(self.around.close)
            sys.excepthook = _leave
        return self.phases


_loop = _Loop()


def init_distributed(*, timeout_s: float | None = None) -> tuple[int, int]:
    """Join the job that `meshkit launch` (or SLURM, MPI, Kubernetes, torchrun) describes, before any other use of jax.

    From then on the launcher watches this process. After an exception the process ends at once: it does not wait for
    the others, which wait for it in a collective.

    Args:
        timeout_s: seconds to wait for all processes; by default MESHKIT_JOIN_TIMEOUT, and without it 300 s, or 20 s if
            the coordinator is on a loopback address.

    Returns:
        The number of this process and the number of processes; 0 and 1 for a process that runs alone.

    Raises:
        ConfigError: the environment is wrong, or jax has already started.
        RunError: a process does not come, or the coordinator cannot be reached.
    """
    from meshkit.distributed.join import join_gang  # imports jax
    from meshkit.runs.hang_watch import HangWatch

    phases = _loop.begin()
    _loop.process, count = join_gang(timeout_s=timeout_s)
    if folder := os.environ.get(OUT):
        _loop.around.enter_context(HangWatch(phases, Path(folder), say))
    return _loop.process, count


def progress(step: int, *, phase: Phase = "step", **metrics: float | None) -> None:
    """Report that this process has reached a step, so that a loop which makes no progress is noticed.

    Process 0 also adds a line to `metrics.jsonl` in the launcher's run folder. The launcher reads the step from it and
    ends the job if restarts reach no new step; `meshkit profile` shows the values. A call takes some microseconds, and
    does not synchronize with devices.

    Args:
        step: the training step, from 1.
        phase: what the process does now. `save`, `restore` and `compile` have six times the limit of `step`.
        metrics: numbers of this step; values that are not finite become null.

    Raises:
        OSError: process 0 cannot write the run folder or its `metrics.jsonl`.
    """
    _loop.begin().enter(phase, step)
    folder = os.environ.get(OUT)
    if phase != "step" or _loop.process != 0 or not folder:
        return
    if _loop.log is None:
        from meshkit.runs.metrics import MetricsLog

        Path(folder).mkdir(parents=True, exist_ok=True)
        _loop.log = MetricsLog(Path(folder) / "metrics.jsonl", step - 1)
        _loop.around.callback(_loop.log.close)
    _loop.log.write({"step": step, **metrics})


def _leave(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    """Print an exception as Python does, and end this process without waiting for the others."""
    lost = say_lost_process(error) if isinstance(error, Exception) else 0
    if not lost:
        sys.__excepthook__(kind, error, traceback)
    with suppress(Exception):
        _loop.around.__exit__(kind, error, traceback)  # tells the other processes
    leave_gang(lost or (error.exit_code if isinstance(error, MeshkitError) else BUG))
