"""Trace one step of a running job into the folder of a reader process, which reads the trace while the job continues.

    start -> the step runs -> stop -> ask, with the path `traces` -> the reader process answers -> forget

The loop waits only for the profiler to start and stop, never for the trace to be read.
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


class StepTracer:
    """Traces single steps, and sends requests about them to a reader process.

    Args:
        module: name of the module that the reader process runs; the module calls `meshkit.children.serve`.
        programs: whether the traces contain the HLO of the traced programs.
    """

    cpu_s: float = 0.0
    """CPU seconds of the reader process so far."""
    tracing: bool = False

    def __init__(self, module: str, *, programs: bool = False):
        self._module, self._programs = module, programs
        self._child: Child | None = None

    @property
    def folder(self) -> Path:
        """The folder of the reader process, for its input files; it exists after the first call of `start`."""
        assert self._child is not None
        return self._child.folder

    @property
    def traces(self) -> Path:
        """The folder with the trace of the last traced step; `forget` removes it."""
        return self.folder / "plugins"

    def start(self) -> bool:
        """Start the trace of a step; return whether this call started a new reader process.

        The reader process ends when the thread that started it ends.

        Raises:
            Exception: the profiler or the process does not start, for instance because another profiler runs.
        """
        new = self._child is None or self._child.ended()
        if new:
            self._end()
            self._child = Child(self._module, {**os.environ, "OMP_NUM_THREADS": "1"})
        self.tracing = True  # It is set before the trace starts, so that `stop` works after an interrupt in between.
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
        """Return the reader process's answer to a request.

        Raises:
            TraceError: the process could not answer, or has ended.
        """
        assert self._child is not None
        try:
            return self._child.ask(request)
        except ChildFailed as error:
            raise TraceError(str(error)) from None
        finally:
            self.cpu_s += self._child.cpu_s

    def forget(self) -> None:
        if self._child is not None:
            shutil.rmtree(self.traces, ignore_errors=True)

    def close(self) -> None:
        """Stop a running trace, end the process and remove its folder."""
        with contextlib.suppress(Exception):
            self.stop()
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()
