"""One step of a job that goes on, traced into the folder of a process beside it, which reads the trace meanwhile.

    start -> the step -> stop -> a request with `traces` -> the answer of the other process -> forget

The loop waits for the start and the end of the profiler, and for nothing that is read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import jax

from meshkit.children import Child, ChildFailed
from meshkit.errors import TraceError
from meshkit.trace.capture import start_trace


class Beside:
    """Traces single steps, and asks a process beside this one about them.

    Args:
        module: of that process, which calls `meshkit.children.serve`.
        programs: whether the traces hold the programs that run.
    """

    cpu_s: float = 0.0
    """CPU seconds of that process so far."""
    tracing: bool = False
    """Whether a trace is running."""

    def __init__(self, module: str, *, programs: bool = False):
        self._module, self._programs = module, programs
        self._child: Child | None = None

    @property
    def folder(self) -> Path:
        """The folder of the process, for what it is to read; it is there once a step was traced."""
        assert self._child is not None
        return self._child.folder

    @property
    def traces(self) -> Path:
        """Where the trace is of the step that was traced last, until `forget`."""
        return self.folder / "plugins"

    def start(self) -> bool:
        """Start the trace of a step; return whether the process that will read it is a new one.

        The process ends with the thread that calls this first.

        Raises:
            Exception: the profiler or the process does not start, as where somebody else's profiler runs.
        """
        new = self._child is None or self._child.ended()
        if new:
            self._end()
            self._child = Child(self._module, {**os.environ, "OMP_NUM_THREADS": "1"})
        self.tracing = True  # before: an interrupt in between must find it
        try:
            start_trace(self.folder, programs=self._programs)
        except Exception:
            self.tracing = False
            raise
        return new

    def stop(self) -> None:
        """Stop the trace, if one is running.

        Raises:
            Exception: the profiler does not stop, or cannot write its file.
        """
        if self.tracing:
            self.tracing = False
            jax.profiler.stop_trace()

    def ask(self, request: Any) -> Any:
        """Return the answer to a request.

        Raises:
            TraceError: what the process could not do, or that it is gone.
        """
        assert self._child is not None
        try:
            return self._child.ask(request)
        except ChildFailed as error:
            raise TraceError(str(error)) from None
        finally:
            self.cpu_s += self._child.cpu_s

    def forget(self) -> None:
        """Remove the trace of the step that was traced last."""
        if self._child is not None:
            shutil.rmtree(self.traces, ignore_errors=True)

    def close(self) -> None:
        """Stop what is running, end the process and remove its folder."""
        with contextlib.suppress(Exception):
            self.stop()
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
