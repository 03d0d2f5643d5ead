"""Processes that plan variants at the same time, each its own compiler: `python -m meshkit.search.workers PARENT`.

XLA can die of a program, and a machine can run out of memory: then the variant is lost, and a new process goes on.

A process reads one request a line on stdin, `{"experiment": PATH, "overrides": [...], "settings": [...]}`, or of a step
of somebody's `{"build": "pkg.mod:fn", "cluster": {...}, "mesh": {...}, "choices": {...}, "settings": [...]}`, and
answers each with one line on stdout, an Outcome. Whatever else would be printed goes to stderr. It ends with stdin, or
its parent. A user's executor gets the same lines as texts.

    build(mesh, **choices) -> (step, args) -> plan -> Outcome

A variant of a step of somebody's is settings, as it is of an experiment: `mesh={ fsdp = 8 }`, `remat="full"`. So a
request for it names the function that builds it, and carries no code.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshkit.compile.options import PLAIN
from meshkit.compile.scratch import die_with_parent, scratch_folder, start_in
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.config.mesh import MeshSpec
from meshkit.config.toml import inline
from meshkit.config.user_code import child_path
from meshkit.errors import MeshkitError
from meshkit.planning.planner import make_plan, plan_experiment
from meshkit.search.variants import Outcome, outcome_of
from meshkit.sharding.mesh import build_mesh, describe_devices
from meshkit.step.program import local_bytes
from meshkit.units import format_bytes

COMMAND = ("-P", "-m", "meshkit.search.workers")  # beyond the interpreter

_IN_FLIGHT = 32  # requests at a time to an executor that does not say how many workers it has

Settings = tuple[str, ...]
Build = Callable[..., tuple[Callable[..., Any], Sequence[Any]]]


@dataclass(frozen=True)
class BuiltStep:
    """A step as it is, before anything is changed: a mesh of a cluster, and a value of every choice."""

    cluster: Cluster
    mesh: MeshSpec
    choices: Mapping[str, Any]

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> BuiltStep:
        """What `to_dict` gave."""
        return cls(Cluster.load(plain["cluster"]), MeshSpec.parse(plain["mesh"]), plain["choices"])

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"cluster": self.cluster.to_dict(), "mesh": self.mesh.to_dict(), "choices": dict(self.choices)}


def plan_named(name: str, base: BuiltStep, settings: tuple[str, ...]) -> Outcome:
    """The outcome of one variant of what a function of that name, `pkg.mod:fn`, builds.

    Args:
        name: importable in this process.
        base, settings: see `plan_built`.

    Raises:
        ImportError, AttributeError: there is no such function here.
    """
    module, _, path = name.partition(":")
    build: Any = importlib.import_module(module)
    for part in path.split("."):
        build = getattr(build, part)
    return plan_built(build, base, settings)


def plan_built(build: Build, base: BuiltStep, settings: tuple[str, ...]) -> Outcome:
    """The outcome of one variant; what goes wrong is one too. Arguments that leave no room are not compiled.

    Args:
        build: called with the variant's mesh, described, and a value for every choice; gives a step and its arguments.
        base: the step as it is, which settings are laid over.
        settings: each TOML, `mesh = {...}` or `choice = value`.

    Raises:
        ConfigError: a mesh that does not fit the cluster.
    """
    start, cluster = time.perf_counter(), base.cluster
    changed = {key: value for setting in settings for key, value in tomllib.loads(setting).items()}
    spec = (MeshSpec.parse(changed.pop("mesh")) if "mesh" in changed else base.mesh).resolve(cluster)
    axes = {name: inline(value) for name, value in spec.to_dict().items()}

    def not_planned(status: Any, error: str) -> Outcome:
        wall_s = time.perf_counter() - start
        return Outcome(settings=settings, status=status, mesh=axes, error=error, num_gpus=spec.size, wall_s=wall_s)

    try:
        absent = build_mesh(spec, cluster, devices=describe_devices(cluster))
        step, args = build(absent, **{**base.choices, **changed})
        pool = int(cluster.gpu.memory_bytes * PLAIN.memory_fraction)
        if (needed := local_bytes(args)) > pool:
            text = f"the arguments take {format_bytes(needed)} on each GPU, of {format_bytes(pool)}"
            return not_planned("does_not_fit", text)
        made = make_plan(step, args, mesh=absent, cluster=cluster)
    except MeshkitError as e:
        return not_planned("error", e.message)
    except Exception as e:  # of the function's own, such as a batch that the mesh does not divide
        return not_planned("error", f"{type(e).__name__}: {e}")
    return outcome_of(made.report, settings, axes, time.perf_counter() - start, made.compiled.host_peak_bytes)


def default_jobs() -> int:
    """One process for each CPU that this one may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """A pool of planning processes.

    Args:
        request: what all variants have in common.
        jobs: how many processes; None: one for each CPU.
        log: a file for what they say on stderr; None throws it away.
    """

    def __init__(self, request: Mapping[str, Any], jobs: int | None = None, log: Path | None = None):
        self.jobs = jobs or default_jobs()
        self._request = request
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

        Args:
            choose: gives the settings of the next variant, or None where there is none for now.
            take: gets every outcome in the order in which they are done, in the caller's thread.
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


class ExecutorWorkers(Workers):
    """A pool of somebody else's: any `concurrent.futures.Executor`, which gets a text and gives one back.

    Args:
        request: what all variants have in common.
        executor: of this machine, or of a cluster whose processes have meshkit and see the same files.
    """

    def __init__(self, request: Mapping[str, Any], executor: Executor):
        self.jobs = getattr(executor, "_max_workers", None) or _IN_FLIGHT
        self._request, self._executor = request, executor
        self._answers = queue.SimpleQueue()
        self._futures: set[Future] = set()

    def submit(self, settings: Settings) -> None:
        """Asks the executor."""
        future = self._executor.submit(answer, json.dumps({**self._request, "settings": settings}))
        self._futures.add(future)
        future.add_done_callback(lambda done: self._take(done, settings))

    def _take(self, done: Future, settings: Settings) -> None:
        self._futures.discard(done)
        try:
            outcome = Outcome.model_validate_json(done.result())
        except (Exception, CancelledError) as e:
            outcome = Outcome(settings=settings, status="error", error=f"the executor failed: {type(e).__name__}: {e}")
        self._answers.put(outcome)

    def close(self) -> None:
        """Takes back what has not begun; the executor is the user's."""
        for future in list(self._futures):
            future.cancel()


class SubmititExecutor(Executor):
    """SLURM by the package `submitit`: each request is a job of its own.

    What submitit pickles is the name of a function of meshkit and the text of the request.

    Args:
        executor: `submitit.AutoExecutor(folder=...)`, with its parameters (partition, time, CPUs, memory) set.
        jobs: in the queue at a time.
        poll_s: seconds between two looks at the queue.
    """

    def __init__(self, executor: Any, *, jobs: int = _IN_FLIGHT, poll_s: float = 5.0):
        self._executor, self._max_workers, self._poll_s = executor, jobs, poll_s
        self._jobs: dict[Future, Any] = {}
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Queues a job.

        Args:
            fn: what the job calls; submitit pickles it with its arguments.

        Returns:
            A future that is done up to `poll_s` seconds after its job; cancelling it cancels the job.
        """
        future: Future = Future()
        job = self._executor.submit(fn, *args, **kwargs)
        with self._lock:
            self._jobs[future] = job
            if len(self._jobs) == 1:
                threading.Thread(target=self._watch, daemon=True).start()
        return future

    def _watch(self) -> None:
        """Hands over what is done, and cancels what is no longer wanted, until nothing is left."""
        while True:
            with self._lock:
                over = {future: job for future, job in self._jobs.items() if future.cancelled() or job.done()}
                for future in over:
                    del self._jobs[future]
                left = bool(self._jobs)
            for future, job in over.items():
                _hand_over(job, future)
            if not left:
                return
            time.sleep(self._poll_s)


def _hand_over(job: Any, future: Future) -> None:
    """What became of a job of submitit's; one that nobody waits for is ended."""
    if not future.set_running_or_notify_cancel():
        job.cancel()
        return
    try:
        future.set_result(job.result())
    except Exception as e:
        future.set_exception(e)


@contextlib.contextmanager
def open_workers(
    experiment: str | Path, overrides: Sequence[str], jobs: int | Executor | None = None, log: Path | None = None
) -> Iterator[Workers]:
    """Workers for an experiment that are ended with the block; on an executor where `jobs` is one.

    Args:
        experiment: its file, made absolute where it is one, or a shipped experiment's name.
        overrides: `key=value`, beneath the settings of every variant.
        jobs: planning processes, None for one of each CPU; or an executor, which is not shut down.
        log: a file to which their stderr is added; None throws it away, and an executor does not use it.
    """
    path = Path(experiment).absolute() if Path(experiment).exists() else experiment
    with opened({"experiment": str(path), "overrides": list(overrides)}, jobs, log) as workers:
        yield workers


@contextlib.contextmanager
def opened(
    request: Mapping[str, Any], jobs: int | Executor | None = None, log: Path | None = None
) -> Iterator[Workers]:
    """Workers for a request that are ended with the block.

    Args:
        request: what all variants have in common, as the module says: JSON without `settings`.
        jobs, log: see `open_workers`.
    """
    workers = ExecutorWorkers(request, jobs) if isinstance(jobs, Executor) else Workers(request, jobs, log)
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
        answers.write(answer(line) + "\n")
        answers.flush()


def answer(request: str) -> str:
    """The outcome, as JSON, of a request of one variant."""
    wanted = json.loads(request)
    settings = tuple(wanted["settings"])
    if "build" in wanted:
        return plan_named(wanted["build"], BuiltStep.of(wanted), settings).model_dump_json()
    return plan_variant(wanted["experiment"], wanted["overrides"], settings).model_dump_json()


def plan_variant(experiment: str, overrides: Sequence[str], settings: Settings) -> Outcome:
    """The outcome of an experiment file with overrides and settings laid over it; an error is an outcome, too.

    Args:
        experiment: a file, or a shipped experiment's name.
        overrides: `key=value`, beneath the settings.
        settings: `key=value`, of the variant.
    """
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
