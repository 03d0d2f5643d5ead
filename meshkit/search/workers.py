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
import importlib
import json
import os
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshkit.children import Child, ChildDied, ChildFailed, ready, serve
from meshkit.compile.options import PLAIN
from meshkit.config.cluster import Cluster
from meshkit.config.experiment import load
from meshkit.config.mesh import MeshSpec
from meshkit.config.toml import inline
from meshkit.errors import MeshkitError
from meshkit.planning.planner import make_plan, plan_experiment
from meshkit.search.variants import Outcome, outcome_of
from meshkit.sharding.mesh import build_mesh, describe_devices
from meshkit.step.program import local_bytes
from meshkit.units import format_bytes

MODULE = "meshkit.search.workers"  # of the processes that plan

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
    """What plans several variants at a time: processes of ours here, an executor in `ExecutorWorkers`.

    Args:
        request: what all variants have in common.
        jobs: how many processes; None: one for each CPU.
        log: a file for what they say on stderr; None throws it away.
    """

    def __init__(self, request: Mapping[str, Any], jobs: int | None = None, log: Path | None = None):
        self.jobs = jobs or default_jobs()
        self._request, self._log = request, log
        self._waiting: list[Settings] = []
        self._idle: list[Child] = []
        self._busy: dict[Child, Settings] = {}

    def run(self, choose: Callable[[], Settings | None], take: Callable[[Outcome], None]) -> None:
        """Plans what `choose` asks for, as many variants at a time as there are processes, and hands over each outcome.

        `choose` is asked whenever a process is free; it ends once that gives None and nothing is being planned.

        Args:
            choose: gives the settings of the next variant, or None where there is none for now.
            take: gets every outcome in the order in which they are done.
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
        self.jobs = getattr(executor, "_max_workers", None) or _IN_FLIGHT
        self._request, self._executor = request, executor
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


def answer(request: str) -> str:
    """The outcome, as JSON, of a request of one variant: what an executor is asked."""
    return _outcome(json.loads(request)).model_dump_json()


def _outcome(request: Mapping[str, Any]) -> Outcome:
    settings = tuple(request["settings"])
    if "build" in request:
        return plan_named(request["build"], BuiltStep.of(request), settings)
    return plan_variant(request["experiment"], request["overrides"], settings)


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
    serve(lambda request: _outcome(request).model_dump(mode="json"))
