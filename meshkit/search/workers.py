"""Processes that plan variants at the same time, each with a compiler of its own.

XLA can die of a program, and a machine can run out of memory: then the variant is lost, and a new process goes on.

A request is `{"experiment": PATH, "overrides": [...], "settings": [...]}`, or of a step of somebody's `{"build":
"pkg.mod:fn", "cluster": {...}, "mesh": {...}, "choices": {...}, "settings": [...]}`; its answer is an Outcome. A user's
executor gets the same as text.

    build(mesh, **choices) -> (step, args) -> plan -> Outcome

A variant of a step of somebody's is settings, as it is of an experiment: `mesh={ fsdp = 8 }`, `remat="full"`. So a
request for it names the function that builds it, and carries no code.
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
from meshkit.search.candidate import Candidate, Outcome, Settings, outcome_of
from meshkit.sharding.mesh import build_mesh, describe_devices
from meshkit.step.given import as_program
from meshkit.step.program import local_bytes
from meshkit.units import format_bytes

MODULE = "meshkit.search.workers"  # of the processes that plan

_IN_FLIGHT = 32  # requests at a time to an executor that does not say how many workers it has

Build = Callable[..., tuple[Callable[..., Any], Sequence[Any]]]


def request_of_file(experiment: str | Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what the candidates of an experiment have in common.

    Args:
        experiment: its file, made absolute where it is one, or a shipped experiment's name.
        overrides: `key=value`, beneath the settings of every candidate.
    """
    path = Path(experiment).absolute() if Path(experiment).exists() else experiment
    return {"experiment": str(path), "overrides": list(overrides)}


def request_of_step(mesh: MeshSpec, cluster: Cluster, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the candidates of a step of somebody's have in common, but for the function that `build`s it.

    Args:
        mesh, choices: of the step as it is.
        cluster: of all.
    """
    return {"cluster": cluster.to_dict(), "mesh": mesh.to_dict(), "choices": dict(choices)}


def name_of(build: Any) -> str | None:
    """Return the name by which another process finds a function, `pkg.mod:fn`; None where there is none."""
    name = f"{getattr(build, '__module__', None)}:{getattr(build, '__qualname__', '<')}"
    with contextlib.suppress(ImportError, AttributeError):
        if "<" not in name and not name.startswith("__main__:") and _named(name) is build:
            return name
    return None


def _named(name: str) -> Any:
    """The function of that name, `pkg.mod:fn`; ImportError, AttributeError where there is none."""
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(module))


def default_jobs() -> int:
    """One process for each CPU that this one may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers:
    """What plans several candidates at a time, in processes of ours; an end of the block ends them.

    Args:
        request: what all candidates have in common.
        jobs: how many processes; None: one for each CPU.
        log: a file for what they say on stderr; None throws it away.
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

    def run(self, choose: Callable[[], Candidate | None], take: Callable[[Candidate], None] = lambda _: None) -> None:
        """Plans what `choose` asks for, as many candidates at a time as there are processes.

        `choose` is asked whenever a process is free; it ends once that gives None and nothing is being planned.

        Args:
            choose: gives the next candidate, or None where there is none for now.
            take: gets each with its outcome, in the order in which they are done.
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
        """Plans all of some candidates."""
        waiting = iter(candidates)
        self.run(lambda: next(waiting, None))

    def submit(self, settings: Settings) -> None:
        """Asks for the outcome of the experiment with settings laid over it."""
        self._waiting.append(settings)
        self._start()

    def next(self) -> Outcome:
        """The next outcome, whichever is done first; waits for it. A process that dies costs its variant alone."""
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
        """Ends the processes, also in the middle of a variant."""
        for child in (*self._idle, *self._busy):
            child.close()

    def _start(self) -> None:
        """Gives what waits to processes that are free."""
        while self._waiting and len(self._busy) < self.jobs:
            child = self._idle.pop() if self._idle else Child(MODULE, log=self._log)
            self._busy[child] = settings = self._waiting.pop(0)
            child.send({**self._request, "settings": settings})


class ExecutorWorkers(Workers):
    """A pool of somebody else's: any `concurrent.futures.Executor`, which gets a text and gives one back.

    Args:
        request: what all variants have in common.
        executor: of this machine, or of a cluster whose processes have meshkit and see the same files.
    """

    def __init__(self, request: Mapping[str, Any], executor: Executor):
        super().__init__(request, getattr(executor, "_max_workers", None) or _IN_FLIGHT)
        self._executor = executor
        self._futures: dict[Future, Settings] = {}

    def submit(self, settings: Settings) -> None:
        """Asks the executor."""
        self._futures[self._executor.submit(answer, json.dumps({**self._request, "settings": settings}))] = settings

    def next(self) -> Outcome:
        """The next outcome; of those that are done, what was asked first."""
        wait(self._futures, return_when=FIRST_COMPLETED)
        future = next(future for future in self._futures if future.done())
        settings = self._futures.pop(future)
        try:
            return Outcome.model_validate_json(future.result())
        except (Exception, CancelledError) as e:
            return Outcome(settings=settings, status="error", error=f"the executor failed: {type(e).__name__}: {e}")

    def close(self) -> None:
        """Takes back what has not begun; the executor is the user's."""
        for future in self._futures:
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


class WorkersHere(Workers):
    """Plans in this process, one candidate after the other, what a function builds that has no name.

    Args:
        build: see `plan_step`.
        request: as of `request_of_step`.
    """

    def __init__(self, build: Build, request: Mapping[str, Any]):
        super().__init__(request, jobs=1)
        self._build = build

    def submit(self, settings: Settings) -> None:
        """Notes what is to be planned."""
        self._waiting.append(settings)

    def next(self) -> Outcome:
        """Plans it."""
        return plan_step(self._build, {**self._request, "settings": self._waiting.pop(0)})


def open_workers(request: Mapping[str, Any], jobs: int | Executor | None = None, log: Path | None = None) -> Workers:
    """Return workers for the candidates of a request, to be used in a `with` block.

    Args:
        request: what all candidates have in common, as the module says: JSON without `settings`.
        jobs: planning processes, None for one of each CPU; or an executor, which is not shut down.
        log: a file to which their stderr is added; None throws it away, and an executor does not use it.
    """
    return ExecutorWorkers(request, jobs) if isinstance(jobs, Executor) else Workers(request, jobs, log)


def answer(request: str) -> str:
    """The outcome, as JSON, of a request of one candidate: what an executor is asked."""
    return _outcome(json.loads(request)).model_dump_json()


def _outcome(request: Mapping[str, Any]) -> Outcome:
    return plan_step(_named(request["build"]), request) if "build" in request else plan_file(request)


def plan_step(build: Build, request: Mapping[str, Any]) -> Outcome:
    """The outcome of one candidate of a step; what goes wrong is one, too. What has no room is not compiled.

    Args:
        build: called with the candidate's mesh, described, and a value for every choice; gives a step and its
            arguments.
        request: as of `request_of_step`, with the settings laid over it: each is TOML, `mesh = {...}` or `choice =
            value`.

    Raises:
        ConfigError: a mesh that does not fit the cluster.
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
    except Exception as e:  # of the function's own, such as a batch that the mesh does not divide
        return not_planned("error", f"{type(e).__name__}: {e}")
    return outcome_of(made.report, settings, axes, time.perf_counter() - start, made.compiled.host_peak_bytes)


def plan_file(request: Mapping[str, Any]) -> Outcome:
    """The outcome of an experiment file with overrides and settings laid over it; an error is an outcome, too.

    Args:
        request: as of `request_of_file`, with the settings.
    """
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
    return outcome_of(plan.report, settings, mesh, wall_s, plan.compiled.host_peak_bytes)


if __name__ == "__main__":
    serve(lambda request: _outcome(request).model_dump(mode="json"))
