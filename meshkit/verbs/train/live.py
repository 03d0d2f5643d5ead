"""One captured step every so many, read while training goes on: the process that the others wait for in collectives.

    every process traces the same step -> a process beside it, at low priority, reads the trace -> a table of some KB
    tables -> process 0 -> who is waited for -> if in two captures in a row, one line, and the sinks

A step waits for nothing but the start and the end of its trace. What all of it takes of CPUs is counted, and captures
become rarer until it is at most a millisecond a step, on the process where it is most. Process 0 says which step is
next, so far ahead that all hear of it before; who is not heard from ends the captures of all.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from meshkit.compile.scratch import scratch_folder, start_in
from meshkit.config.user_code import child_path, describe_error
from meshkit.distributed.agreement import Agreement
from meshkit.errors import MeshkitError, TraceError
from meshkit.trace.capture import CapturedStep, serialized_module, start_trace, trace_devices
from meshkit.units import format_percent
from meshkit.verbs.train.stragglers import LEAST_SHARE, LateProcess, Stragglers, slow_clock

_BUDGET_S = 1e-3  # of CPU a step
_OF_ALL = 1.5  # x an even share of all waiting, that one process must cause
_LONGER = 0.03  # of compute, from which it is said
_ANSWER_S = 120.0


class StepCaptures:
    """Captures a step of a training every so many, where several processes train.

    Args:
        every: steps, at least; 0 never.
        step: what runs.
        stragglers: which says who is late, and counts.
        say: prints a line.
        first_step: of this attempt.
        budget_s: CPU seconds a step.
    """

    def __init__(
        self,
        every: int,
        step: CapturedStep,
        stragglers: Stragglers,
        say: Callable[[str], None],
        *,
        first_step: int = 1,
        budget_s: float = _BUDGET_S,
    ):
        self._line = Agreement("captures")
        self._every = every if self._line.size > 1 else 0
        self._now = first_step - 1  # the last step that began
        self._next = _multiple_after(self._now, every) if self._every else 0  # to be captured, by all processes
        self._step, self._stragglers, self._say = step, stragglers, say
        self._first_step, self._budget_s = first_step, budget_s
        self._captures, self._suspect, self._warned = 0, -1, False
        self._thread: threading.Thread | None = None
        self._reader: subprocess.Popen | None = None
        self._introduced = False
        self._around = contextlib.ExitStack()
        self._folder = self._around.enter_context(scratch_folder()) if self._every else Path()
        self.active = False

    def is_due(self, first: int, last: int) -> bool:
        """Whether the call of the step that makes these training steps is captured, by all processes."""
        self._now = last
        return first <= self._next <= last

    def start(self, pending: Any) -> None:
        """Starts the trace once `pending` arrays are ready, which nothing of the step before is to be in."""
        jax.block_until_ready(pending)
        with self._stragglers.counted():
            try:
                if self._reader is None:  # here, as it would end with a thread that started it
                    self._reader = self._start_reader()
                start_trace(self._folder, programs=False)
                self.active = True
            except Exception as error:  # somebody else's profiler, or no right to one
                self._warn(f"no step can be captured: {describe_error(error)}")

    def stop(self, step: int, pending: Any) -> None:
        """Stops the trace once `pending` arrays are ready; it is read behind the back of the steps that follow."""
        jax.block_until_ready(pending)
        self.active, problem = False, None
        with self._stragglers.counted():
            try:
                jax.profiler.stop_trace()
            except Exception as error:
                problem = describe_error(error)
        self._thread = threading.Thread(target=self._exchange, args=(step, problem), name="meshkit-live", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the exchange that runs, if one does."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """Ends the process that reads, and removes what was captured."""
        if self.active:
            self.active = False
            with contextlib.suppress(Exception):
                jax.profiler.stop_trace()
        self._around.close()

    def _exchange(self, step: int, problem: str | None) -> None:
        """Reads the trace of a step, and hears from process 0 when the next one is captured."""
        said: dict[str, Any] = {"host": socket.gethostname(), "clock_mhz": self._stragglers.clock_mhz(), "step": step}
        traced = self._folder / "plugins"
        with self._stragglers.counted():
            try:
                if problem is not None:
                    raise TraceError(problem)
                if not self._introduced:
                    self._introduce()
                said |= self._ask({"trace": str(traced)})
            except Exception as error:  # of a process, or a disk: the others hear of it
                said["error"] = error.message if isinstance(error, TraceError) else describe_error(error)
            shutil.rmtree(traced, ignore_errors=True)
        said["cpu_s"] = self._stragglers.cpu_s
        with self._stragglers.counted():
            try:
                self._next = self._line.reach(str(step), said, self._decide, timeout_s=_ANSWER_S)
            except MeshkitError as error:
                self._warn(f"no more steps are captured: {error.message}")

    def _decide(self, said: list[Mapping[str, Any]]) -> int:
        """Says who is late, and which step is captured next: the same for all processes."""
        step, cpu_s, every = said[0]["step"], max(s["cpu_s"] for s in said), self._every
        bad = {process: s["error"] for process, s in enumerate(said) if "error" in s}
        try:
            late = None if bad else self._late(said, self._ask({"judge": said})["late"])
            self._stragglers.tell([late] if late else [], cpu_s)
        except (OSError, ValueError, TraceError) as error:
            bad[0] = str(error)
        for process, why in list(bad.items())[:1]:
            self._warn(f"the captured step {step} of process {process} cannot be read: {why}")
        self._captures += 1
        next_s = cpu_s * (1 + 1 / self._captures)  # with a capture that takes what the others took
        now = max(step, self._now)
        heard = now + (now - step) + 1  # by all: the answer takes no longer than all the rest has
        while next_s > self._budget_s * (_multiple_after(heard, every) - self._first_step + 1):
            every *= 2
        return _multiple_after(heard, every)

    def _late(self, said: Sequence[Mapping[str, Any]], worst: Mapping[str, Any] | None) -> LateProcess | None:
        """The process that most waiting is for, if it was in the capture before too."""
        if worst is None or worst["share"] < LEAST_SHARE or worst["of_all"] < min(0.75, _OF_ALL / len(said)):
            self._suspect = -1
            return None
        process = worst["process"]
        suspected, self._suspect = self._suspect, process
        if process != suspected:
            return None
        host, others = said[process]["host"], worst["others"]
        message = f"process {process} on {host} makes {others} other{'s' * (others > 1)} wait "
        message += f"{format_percent(worst['share'])} of the step"
        if worst["longer"] > _LONGER:
            message += f", computing {format_percent(worst['longer'])} longer than the median"
        clock = slow_clock(said, process)
        return LateProcess(process, host, worst["share"], message + (f", {clock}" if clock else ""))

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of the process that reads.

        Raises:
            TraceError: what it could not do.
            OSError, ValueError: it is gone.
        """
        process = self._reader
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        self._stragglers.cpu_s += answer.pop("cpu_s")
        if "error" in answer:
            raise TraceError(answer["error"])
        return answer

    def _start_reader(self) -> subprocess.Popen:
        """The process that reads."""
        environment = dict(os.environ) | {"PYTHONPATH": child_path(), "OMP_NUM_THREADS": "1"}
        command, pipe = [sys.executable, "-P", "-m", "meshkit.trace.live"], subprocess.PIPE
        options: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": subprocess.DEVNULL, "text": True}
        return start_in(self._folder, command, environment, **options)

    def _introduce(self) -> None:
        """Tells the process that reads what it will read traces of."""
        program, mesh = self._folder / "program.hlo.pb", self._step.mesh
        program.write_bytes(serialized_module(self._step.program))
        self._ask(
            {
                "program": str(program),
                "axes": mesh.axis_names,
                "shape": mesh.devices.shape,
                "device_ids": [d.id for d in mesh.devices.flat],
                "devices": {d.ordinal: d.id for d in trace_devices(mesh)},
            }
        )
        self._introduced = True

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._say(f"warning: {what.removesuffix('.')}. Training goes on; this is said once.")


def _multiple_after(step: int, n: int) -> int:
    return (step // n + 1) * n
