"""Plan variants in parallel processes, each with its own compiler.

If XLA crashes on a program or memory runs out, only one variant is lost, and a new process continues.

A request is `{"experiment": PATH, "overrides": [...], "settings": [...]}`, or for a step that a user's function builds
`{"build": "pkg.mod:fn", "cluster": {...}, "mesh": {...}, "choices": {...}, "settings": [...]}`. The answer is an
Outcome. A user's executor gets the same request as JSON text.

    build(mesh, **choices) -> (step, args) -> plan -> Outcome

Variants of such a step are settings like those of an experiment: `mesh={ fsdp = 8 }`, `remat="full"`. A request names
the function that builds the step, and contains no code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from pathlib import Path
from typing import Any, Self

from meshkit.children import Child, ChildDied, ChildFailed, ready, serve
from meshkit.compile.options import PLAIN
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load_any
from meshkit.config.mesh import MeshSpec
from meshkit.config.toml import inline
from meshkit.errors import MeshkitError
from meshkit.planning.planner import plan_experiment, plan_program
from meshkit.search.candidate import Candidate, Outcome, Settings, make_outcome
from meshkit.sharding.mesh import build_mesh, describe_devices
from meshkit.step.given import as_program
from meshkit.step.program import local_bytes
from meshkit.units import format_bytes

MODULE = "meshkit.search.workers"  # The module that planning processes run.

_IN_FLIGHT = 32  # Requests at a time to an executor that does not say how many workers it has.

Build = Callable[..., tuple[Callable[..., Any], Sequence[Any]]]


def file_request(experiment: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the request that all candidates of an experiment share.

    The path of a file that exists is made absolute. The settings of each candidate are applied after the overrides.
    """
    path = Path(experiment).absolute() if Path(experiment).exists() else experiment
    return {"experiment": str(path), "overrides": list(overrides)}


def step_request(mesh: MeshSpec, cluster: Cluster, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request that all candidates of a user's step share, without its key `build`."""
    return {"cluster": cluster.to_dict(), "mesh": mesh.to_dict(), "choices": dict(choices)}


def import_name(build: Any) -> str | None:
    """Return the name by which another process can import a function, `pkg.mod:fn`; None if there is none."""
    name = f"{getattr(build, '__module__', None)}:{getattr(build, '__qualname__', '<')}"
    with contextlib.suppress(ImportError, AttributeError):
        if "<" not in name and not name.startswith("__main__:") and _named(name) is build:
            return name
    return None


def _named(name: str) -> Any:
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def default_jobs() -> int:
    """Return the number of CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """Plans several candidates at a time in processes, which end with the `with` block.

    Args:
        jobs: number of processes; None: one for each CPU.
        log: a file for their stderr; None discards it.
    """

    def __init__(self, request: Mapping[str, Any], jobs: int | None = None, log: Path | None = None):
        self.jobs = jobs or default_jobs()
        self._request, self._log = request, log
        self._waiting: list[Settings] = []
        self._idle: list[Child] = []
        self._busy: dict[Child, Settings] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plan_chosen(
        self, choose: Callable[[], Candidate | None], take: Callable[[Candidate], None] = lambda _: None
    ) -> None:
        """Plan the candidates that `choose` returns, as many at a time as there are processes.

        `choose` is called whenever a process is free. This call returns once `choose` returns None and no candidate is
        being planned.
        """
        planned: dict[Settings, Candidate] = {}
        while True:
            while len(planned) < self.jobs and (candidate := choose()) is not None:
                planned[candidate.settings] = candidate
                self.submit(candidate.settings)
            if not planned:
                return
            outcome = self.next()
            candidate = planned.pop(outcome.settings)
            candidate.outcome = outcome
            take(candidate)

    def plan(self, candidates: Iterable[Candidate]) -> None:
        waiting = iter(candidates)
        self.plan_chosen(lambda: next(waiting, None))

    def submit(self, settings: Settings) -> None:
        """Request the outcome of the experiment with these settings."""
        self._waiting.append(settings)
        self._start()

    def next(self) -> Outcome:
        """Wait for the first outcome. A process that dies loses only its own variant, which gets an error."""
        child = ready(list(self._busy))[0]
        settings = self._busy.pop(child)
        try:
            outcome = Outcome.model_validate(child.receive())
            self._idle.append(child)
        except ChildFailed as e:
            child.close()
            text = f"the planning process died ({e.how})." if isinstance(e, ChildDied) else str(e)
            outcome = Outcome(settings=settings, status="error", error=text)
        self._start()
        return outcome

    def close(self) -> None:
        """End the processes, even in the middle of a variant."""
        for child in (*self._idle, *self._busy):
            child.close()

    def _start(self) -> None:
        while self._waiting and len(self._busy) < self.jobs:
            child = self._idle.pop() if self._idle else Child(MODULE, log=self._log)
            self._busy[child] = settings = self._waiting.pop(0)
            child.send({**self._request, "settings": settings})


class ExecutorWorkers(Workers):
    """Plans candidates with a user's `concurrent.futures.Executor`, which takes and returns text.

    The executor runs on this machine, or on a cluster whose processes can import meshkit and read the same files.
    """

    def __init__(self, request: Mapping[str, Any], executor: Executor):
        super().__init__(request, getattr(executor, "_max_workers", None) or _IN_FLIGHT)
        self._executor = executor
        self._futures: dict[Future, Settings] = {}

    def submit(self, settings: Settings) -> None:
        self._futures[self._executor.submit(answer, json.dumps({**self._request, "settings": settings}))] = settings

    def next(self) -> Outcome:
        """Wait for an outcome; if several are ready, return the one that was requested first."""
        wait(self._futures, return_when=FIRST_COMPLETED)
        future = next(future for future in self._futures if future.done())
        settings = self._futures.pop(future)
        try:
            return Outcome.model_validate_json(future.result())
        except (Exception, CancelledError) as e:
            return Outcome(settings=settings, status="error", error=f"the executor failed: {type(e).__name__}: {e}")

    def close(self) -> None:
        """Cancel requests that have not begun. The executor belongs to the user and stays open."""
        for future in self._futures:
            future.cancel()


class SubmititExecutor(Executor):
    """Runs requests on SLURM with the package `submitit`, each as a job.

    submitit pickles the name of a function of meshkit and the text of the request.

    Args:
        executor: `submitit.AutoExecutor(folder=...)`, with its parameters (partition, time, CPUs, memory) set.
        jobs: jobs in the queue at a time.
        poll_s: seconds between two looks at the queue.
    """

    def __init__(self, executor: Any, *, jobs: int = _IN_FLIGHT, poll_s: float = 5.0):
        self._executor, self._max_workers, self._poll_s = executor, jobs, poll_s
        self._jobs: dict[Future, Any] = {}
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Queue a job. Its future is done up to `poll_s` seconds after it; cancelling the future cancels the job."""
        future: Future = Future()
        job = self._executor.submit(fn, *args, **kwargs)
        with self._lock:
            self._jobs[future] = job
            if len(self._jobs) == 1:
                threading.Thread(target=self._watch, daemon=True).start()
        return future

    def _watch(self) -> None:
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
    if not future.set_running_or_notify_cancel():
        job.cancel()
        return
    try:
        future.set_result(job.result())
    except Exception as e:
        future.set_exception(e)


class WorkersHere(Workers):
    """Plans candidates in this process, one after the other, for a function that cannot be imported by name."""

    def __init__(self, build: Build, request: Mapping[str, Any]):
        super().__init__(request, jobs=1)
        self._build = build

    def submit(self, settings: Settings) -> None:
        self._waiting.append(settings)

    def next(self) -> Outcome:
        return plan_step(self._build, {**self._request, "settings": self._waiting.pop(0)})


def open_workers(request: Mapping[str, Any], jobs: int | Executor | None = None, log: Path | None = None) -> Workers:
    """Return workers for the candidates of a request, to be used in a `with` block.

    Args:
        jobs: the number of planning processes (None: one for each CPU), or an executor, which is not shut down.
        log: a file to which the processes' stderr is appended; None discards it, and an executor does not use it.
    """
    return ExecutorWorkers(request, jobs) if isinstance(jobs, Executor) else Workers(request, jobs, log)


def answer(request: str) -> str:
    """Return the outcome of a request as JSON; an executor calls this."""
    return _outcome(json.loads(request)).model_dump_json()


def _outcome(request: Mapping[str, Any]) -> Outcome:
    return plan_step(_named(request["build"]), request) if "build" in request else plan_file(request)


def plan_step(build: Build, request: Mapping[str, Any]) -> Outcome:
    """Return the outcome of one candidate of a step, even if it fails.

    A step whose arguments alone exceed the GPU's memory is not compiled.

    Args:
        build: a function that is called with the candidate's described mesh and a value for every choice, and returns
            a step and its arguments.

    Raises:
        ConfigError: a mesh does not fit the cluster.
    """
    start, cluster, settings = time.perf_counter(), Cluster.load(request["cluster"]), tuple(request["settings"])
    changed = {key: value for setting in settings for key, value in tomllib.loads(setting).items()}
    spec = MeshSpec.parse(changed.pop("mesh", request["mesh"])).resolve(cluster)
    axes = {name: inline(value) for name, value in spec.to_dict().items()}

    def not_planned(status: Any, error: str) -> Outcome:
        wall_s = time.perf_counter() - start
        return Outcome(settings=settings, status=status, mesh=axes, error=error, num_gpus=spec.size, wall_s=wall_s)

    try:
        absent = build_mesh(spec, cluster, devices=describe_devices(cluster))
        program = as_program(build(absent, **{**request["choices"], **changed}), getattr(build, "__name__", "build"))
        pool = int(cluster.gpu.memory_bytes * PLAIN.memory_fraction)
        if (needed := local_bytes(program.args)) > pool:
            text = f"the arguments take {format_bytes(needed)} on each GPU, of {format_bytes(pool)}"
            return not_planned("does_not_fit", text)
        made = plan_program(program, mesh=absent, cluster=cluster)
    except MeshkitError as e:
        return not_planned("error", e.message)
    except Exception as e:  # The user's function failed, such as on a batch that the mesh does not divide.
        return not_planned("error", f"{type(e).__name__}: {e}")
    return make_outcome(made.report, settings, axes, time.perf_counter() - start, made.compiled.host_peak_bytes)


def plan_file(request: Mapping[str, Any]) -> Outcome:
    """Return the outcome of an experiment file with the request's overrides and settings, even if it fails."""
    start, settings = time.perf_counter(), tuple(request["settings"])
    mesh: dict[str, str] = {}
    try:
        loaded = load_any(request["experiment"], (*request["overrides"], *settings))
        mesh = {name: inline(value) for name, value in loaded.mesh.to_dict().items()}
        plan = plan_experiment(loaded)
    except MeshkitError as e:
        wall_s = time.perf_counter() - start
        return Outcome(settings=settings, status="error", mesh=mesh, error=e.message, wall_s=wall_s)
    wall_s = time.perf_counter() - start
    return make_outcome(plan.report, settings, mesh, wall_s, plan.compiled.host_peak_bytes)


if __name__ == "__main__":
    serve(lambda request: _outcome(request).model_dump(mode="json"))
