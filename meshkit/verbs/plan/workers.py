"""Processes that plan variants at the same time, each its own compiler.

XLA can die of a program, and a machine can run out of memory: then the variant is lost, and a new process goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from meshkit.verbs.plan.outcome import Outcome


@dataclass(frozen=True)
class _Request:
    experiment: str
    overrides: tuple[str, ...]
    settings: tuple[str, ...]


COMMAND = ("-m", "meshkit.verbs.plan.plan_worker")  # beyond the interpreter


def default_jobs() -> int:
    """One process for each CPU that this one may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """A pool of planning processes.

    Args:
        jobs: how many.
        log: a file for what they say on stderr; None throws it away.
    """

    def __init__(self, jobs: int, log: Path | None = None):
        self._requests: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._log = log.open("ab") if log else None
        self._processes: dict[int, subprocess.Popen] = {}
        self._closing = False
        self._threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(jobs)]
        for thread in self._threads:
            thread.start()

    def submit(self, experiment: str, overrides: Sequence[str], settings: Sequence[str]) -> None:
        """Asks for the outcome of an experiment file with overrides laid over it, and settings over those."""
        self._requests.put(_Request(experiment, tuple(overrides), tuple(settings)))

    def next(self) -> Outcome:
        """The next outcome, whichever is done first; waits for it."""
        while True:  # in slices: a wait without end would not hear Ctrl-C
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=0.5)

    def close(self) -> None:
        """Ends the processes, also in the middle of a variant."""
        self._closing = True
        for process in list(self._processes.values()):
            process.kill()
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join(timeout=10)
        if self._log:
            self._log.close()

    def _serve(self, index: int) -> None:
        while (request := self._requests.get()) is not None and not self._closing:
            process = self._processes.get(index) or self._start(index)
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps(dataclasses.asdict(request)) + "\n")
                process.stdin.flush()
                outcome = Outcome.model_validate_json(process.stdout.readline())
            except (OSError, ValueError, ValidationError):
                outcome = self._lost(index, request.settings)
            self._answers.put(outcome)
        if process := self._processes.pop(index, None):
            _end(process)

    def _start(self, index: int) -> subprocess.Popen:
        environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, *COMMAND]
        pipe = subprocess.PIPE
        stderr = self._log or subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=environment, text=True)
        self._processes[index] = process
        return process

    def _lost(self, index: int, settings: tuple[str, ...]) -> Outcome:
        code = _end(self._processes.pop(index))
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return Outcome(settings=settings, status="error", error=f"the planning process died ({how}).")


def _end(process: subprocess.Popen) -> int:
    """Ends a process, whatever it is doing; its exit code."""
    process.kill()
    code = process.wait()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was written last may have nobody to read it
            if pipe is not None:
                pipe.close()
    return code


@contextlib.contextmanager
def open_workers(jobs: int, log: Path | None = None) -> Iterator[Workers]:
    """Workers that are ended with the block."""
    workers = Workers(jobs, log)
    try:
        yield workers
    finally:
        workers.close()
