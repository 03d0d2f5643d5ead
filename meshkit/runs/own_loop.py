"""A training loop of the user's own, under a launcher: it joins the job, says how far it is, and is watched.

    MESHKIT_* -> init_distributed -> jax.distributed; progress(step) -> pulse of this process, metrics.jsonl

Both do nothing in a process that nobody launched, so a script runs alone as well.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from meshkit.console import say
from meshkit.distributed.environment import OUT, leave_gang, say_lost_process
from meshkit.errors import BUG, MeshkitError
from meshkit.runs.phases import Phase, Phases


class _Loop:
    """The state of a process with a loop of the user's own, until it ends."""

    def __init__(self) -> None:
        self.around = ExitStack()
        self.phases: Phases | None = None
        self.log: Any = None
        self.process = 0

    def begin(self) -> Phases:
        """Return the pulse, from now to the end of the process; how it fails is said, and keeps nobody waiting."""
        if self.phases is None:
            self.phases = self.around.enter_context(Phases())
            atexit.register(self.around.close)
            sys.excepthook = _leave
        return self.phases


_loop = _Loop()


def init_distributed(*, timeout_s: float | None = None) -> tuple[int, int]:
    """Joins the job that `meshkit launch` (or SLURM, MPI, Kubernetes, torchrun) describes, before any other use of jax.

    From then on the launcher watches this process, and one that ends with an exception ends at once: it does not wait
    for the others, which wait for it in a collective.

    Args:
        timeout_s: for all processes to come; MESHKIT_JOIN_TIMEOUT by default, and without it 300 s, or 20 s where the
            coordinator is on a loopback address.

    Returns:
        This process's number, and how many there are; 0 and 1 for a process that is alone.

    Raises:
        ConfigError: the environment is wrong, or jax has already started.
        RunError: a process does not come, or the coordinator cannot be reached.
    """
    from meshkit.distributed.join import join_gang  # with jax
    from meshkit.runs.hang_watch import HangWatch

    phases = _loop.begin()
    _loop.process, count = join_gang(timeout_s=timeout_s)
    if folder := os.environ.get(OUT):
        _loop.around.enter_context(HangWatch(phases, Path(folder), say))
    return _loop.process, count


def progress(step: int, *, phase: Phase = "step", **metrics: float | None) -> None:
    """Says that this process has come to a step, so that a loop that stands still is noticed.

    Process 0 also adds a line to `metrics.jsonl` in the run folder that the launcher names: restarts that reach no new
    step end the job, and `meshkit profile` shows the values. Costs some microseconds, and reads no device.

    Args:
        step: the training step, from 1.
        phase: what it does now; in `save`, `restore` or `compile` it may stay six times as long as in a step.
        metrics: numbers of this step; not finite ones become null.

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
    """Prints an exception as Python does, and ends this process without the others."""
    lost = say_lost_process(error) if isinstance(error, Exception) else 0
    if not lost:
        sys.__excepthook__(kind, error, traceback)
    leave_gang(lost or (error.exit_code if isinstance(error, MeshkitError) else BUG))
