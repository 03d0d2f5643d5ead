"""Processes that plan variants at the same time, each its own compiler: `python -m meshkit.verbs.plan.workers PARENT`.

XLA can die of a program, and a machine can run out of memory: then the variant is lost, and a new process goes on.

A process reads one request a line on stdin, `{"experiment": PATH, "overrides": [...], "settings": [...]}`, and answers
each with one line on stdout, an Outcome. Whatever else would be printed goes to stderr. It ends with stdin, or its
parent.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import ValidationError

from meshkit.compile.scratch import die_with_parent, scratch_folder, start_in
from meshkit.config.own_code import child_path
from meshkit.errors import MeshkitError
from meshkit.verbs.plan.outcome import Outcome, outcome_of

COMMAND = ("-P", "-m", "meshkit.verbs.plan.workers")  # beyond the interpreter

Settings = tuple[str, ...]


def default_jobs() -> int:
    """One process for each CPU that this one may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """A pool of planning processes.

    Args:
        experiment, overrides: the file, and what is laid over it below the settings of every variant.
        jobs: how many processes; None: one for each CPU.
        log: a file for what they say on stderr; None throws it away.
    """

    def __init__(
        self, experiment: str | Path, overrides: Sequence[str], jobs: int | None = None, log: Path | None = None
    ):
        self.jobs = jobs or default_jobs()
        self._request = {"experiment": str(experiment), "overrides": list(overrides)}
        self._requests: queue.SimpleQueue[Settings | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._log = log.open("ab") if log else None
        self._processes: dict[int, subprocess.Popen] = {}
        self._closing = False
        self._scratch = contextlib.ExitStack()
        self._folder = self._scratch.enter_context(scratch_folder())  # of all that they write for themselves
        self._threads = [threading.Thread(target=self._serve, args=(i,), daemon=True) for i in range(self.jobs)]
        for thread in self._threads:
            thread.start()

    def run(self, choose: Callable[[], Settings | None], take: Callable[[Outcome], None]) -> None:
        """Plans what `choose` asks for, as many variants at a time as there are processes, and hands over each outcome.

        `choose` is asked whenever a process is free; it ends once that gives None and nothing is being planned.
        """
        waiting = 0
        while True:
            while waiting < self.jobs and (settings := choose()) is not None:
                self.submit(settings)
                waiting += 1
            if not waiting:
                return
            take(self.next())
            waiting -= 1

    def submit(self, settings: Settings) -> None:
        """Asks for the outcome of the experiment with settings laid over it."""
        self._requests.put(settings)

    def next(self) -> Outcome:
        """The next outcome, whichever is done first; waits for it."""
        while True:  # in slices: a wait without end would not hear Ctrl-C
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=0.5)

    def close(self) -> None:
        """Ends the processes, also in the middle of a variant."""
        self._closing = True
        self._scratch.close()
        for _ in self._threads:
            self._requests.put(None)
        for thread in self._threads:
            thread.join(timeout=10)
        if self._log:
            self._log.close()

    def _serve(self, index: int) -> None:
        """Answers requests with the process of one thread, started again after it died."""
        while (settings := self._requests.get()) is not None and not self._closing:
            try:
                process = self._processes.get(index) or self._start(index)
            except ProcessLookupError:  # closed in the meantime
                break
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(json.dumps({**self._request, "settings": settings}) + "\n")
                process.stdin.flush()
                outcome = Outcome.model_validate_json(process.stdout.readline())
            except (OSError, ValueError, ValidationError):
                outcome = self._lost(index, settings)
            self._answers.put(outcome)
        if process := self._processes.pop(index, None):
            _end(process)

    def _start(self, index: int) -> subprocess.Popen:
        """A planning process that imports from where this one does, and loads the experiment's code by its location."""
        environment = dict(os.environ) | {"PYTHONPATH": child_path()}
        command = [sys.executable, *COMMAND]
        pipe = subprocess.PIPE
        stderr = self._log or subprocess.DEVNULL
        process = start_in(self._folder, command, environment, stdin=pipe, stdout=pipe, stderr=stderr, text=True)
        self._processes[index] = process
        return process

    def _lost(self, index: int, settings: Settings) -> Outcome:
        """The outcome of a variant whose process died."""
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
def open_workers(
    experiment: str | Path, overrides: Sequence[str], jobs: int | None = None, log: Path | None = None
) -> Iterator[Workers]:
    """Workers that are ended with the block."""
    workers = Workers(experiment, overrides, jobs, log)
    try:
        yield workers
    finally:
        workers.close()


def main() -> None:
    """Answers requests until there are no more."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and decides
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        outcome = plan_variant(request["experiment"], request["overrides"], tuple(request["settings"]))
        answers.write(outcome.model_dump_json() + "\n")
        answers.flush()


def plan_variant(experiment: str, overrides: Sequence[str], settings: Settings) -> Outcome:
    """The outcome of an experiment file with overrides and settings laid over it; an error is an outcome, too."""
    from meshkit.config.emit import inline
    from meshkit.config.experiment import load
    from meshkit.verbs.plan.planner import plan_experiment

    start = time.perf_counter()
    mesh: dict[str, str] = {}
    try:
        loaded = load(experiment, (*overrides, *settings))
        mesh = {name: inline(value) for name, value in loaded.mesh.to_dict().items()}
        plan = plan_experiment(loaded)
    except MeshkitError as e:
        wall_s = time.perf_counter() - start
        return Outcome(settings=settings, status="error", mesh=mesh, error=e.message, wall_s=wall_s)
    wall_s = time.perf_counter() - start
    return outcome_of(plan.report, settings, mesh, wall_s, plan.compiled.host_peak_bytes)


if __name__ == "__main__":
    main()
