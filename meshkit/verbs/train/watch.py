"""Watch a job while it trains: find the process that keeps the others waiting, and replicas that differ.

    data and host seconds of each step -> medians over a window of steps -> process 0 compares -> log line, metrics
    every N-th step is captured -> a reader process makes a table of some KB -> process 0 compares -> log line, metrics
    state -> each GPU hashes its own shards -> min and max over the axes that do not cut an array -> equal or not

All processes have the same step time, because the others wait for a late process in a collective. So the step time does
not show which process is late. A late process spends more time than the others outside of the device program (in data
loading or on its host), has a GPU with a lower clock, or is found in a captured step. The processes exchange their
times in a thread, and no step waits for it.

Replicas of an array are equal because every GPU computes the same values. No error is raised when they become unequal,
by silent corruption in a GPU or a diverged rank. So they are hashed. The hash of a shard of n elements, modulo 2^32, is

    sum over i of mix(bits_i xor mix(i))

`mix` is one-to-one, so a change within one element always changes the sum. The index i makes swapped elements change
it. A sum does not depend on the order, so every platform and every reduction gives the same hash. Two changed elements
cancel with probability 2^-32. Each GPU reads its shards of the replicated arrays once (at memory bandwidth: 10 GB in
3 ms on an H100), and takes part in two all-reduces of 4 bytes per array. Only after a difference a second program finds
the GPU that differs, by an all-gather of 4 bytes per array and GPU.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pynvml
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from meshkit.config.places import describe_error
from meshkit.discover import LiveProbe
from meshkit.discover.health import ErrorGrowth, error_counts
from meshkit.discover.machine import visible_gpus
from meshkit.distributed.join import Agreement
from meshkit.errors import MeshkitError, RunError, TraceError
from meshkit.sharding.resolve import path_name
from meshkit.trace.capture import CapturedStep, device_numbers, serialized_module
from meshkit.trace.step_tracer import StepTracer
from meshkit.units import format_percent, format_seconds
from meshkit.verbs.profile.live import LEAST_SHARE

_AGAIN = 1.5  # a straggler is named again if its share has grown by this factor
_SLOWER = 1.5  # steps are slow if their median time is this many times the fastest window's
_ANSWER_S, _CAPTURE_ANSWER_S = 60.0, 120.0
_PARTS = {"data_wait_s": "for its data", "host_s": "on its host, outside of the step"}
# For captured steps:
_BUDGET_S = 1e-3  # seconds of CPU time per step
_BUDGET = 0.01  # share of the steps' time
_OF_ALL = 1.5  # in a job of n processes a straggler causes at least this / n of all waiting, or 75 % if that is less
_LONGER = 0.03  # if a straggler computes longer than the median by more than this share, the message says so
# For replicas:
_MOST_NAMED = 4
_HOST_NAME_BYTES = 64


@dataclass(frozen=True)
class LateProcess:
    """A process that the others wait for, or whose GPU is slower than theirs."""

    process: int
    host: str
    share: float
    """The share of each step for which the others wait for this process; 0 if only its clock is known."""
    message: str


class Stragglers:
    """Compare the processes of a job every `every` steps.

    Args:
        every: steps between two comparisons; 0 for none.
        say: prints a line; called in process 0.
        clock_mhz: returns the clock of this process's slowest GPU; None if unknown.
        errors: returns the error counters of this process's machine, see `error_counts`. Their growth is reported.
    """

    def __init__(
        self,
        every: int,
        say: Callable[[str], None],
        clock_mhz: Callable[[], float | None] = lambda: None,
        errors: Callable[[], Mapping[str, int]] = dict,
    ):
        self.line = Agreement("stragglers")
        self._every, self._say, self.clock_mhz, self._errors = every, say, clock_mhz, errors
        self._growth, self._slow_steps = ErrorGrowth(), SlowSteps()
        self._steps: list[Mapping[str, float]] = []
        self._window, self._thread = 0, None
        self._named: dict[int, float] = {}  # process -> share when it was named
        self._late: set[int] = set()  # processes that the last comparison found late
        self.sick: str | None = None
        """The reason why another host should replace this one; None without one."""
        self._news: dict[str, float] = {}
        self.captured: Mapping[str, float] = {}
        """In process 0: the number of the last captured step that was read, and its numbers from the reader process."""
        self._noted = 0  # number of steps
        self.cpu_s = 0.0  # CPU seconds of this process for finding stragglers

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Add the CPU time of this thread inside the block to `cpu_s`."""
        began = time.thread_time()
        yield
        self.cpu_s += time.thread_time() - began

    def note(self, step: Mapping[str, float]) -> None:
        """Record the seconds of one step. The last step of a window starts a comparison.

        Args:
            step: the step's record in metrics.jsonl, with at least `data_wait_s`, `host_s` and `step_time_s`.
        """
        self._noted += 1
        if not self._every:
            return
        self._steps.append(step)
        if len(self._steps) < self._every:
            return
        mine = {name: statistics.median(s[name] for s in self._steps) for name in (*_PARTS, "step_time_s")}
        self._steps, self._window = [], self._window + 1
        run = (self._window, mine, self._thread)
        self._thread = threading.Thread(target=self._compare, args=run, name="meshkit-stragglers", daemon=True)
        self._thread.start()

    def news(self) -> dict[str, float]:
        """Return numbers for the record of the next step: once after each comparison, otherwise {}.

        If there is a straggler, `straggler` is its process and `straggler_share` its share. `straggler_cpu_s` is the
        cost of finding stragglers: CPU seconds per step since the run began, in the process with the largest cost.
        """
        news, self._news = self._news, {}
        return news

    def join(self, timeout_s: float) -> None:
        """Wait for a running comparison, if there is one."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _compare(self, window: int, mine: dict[str, Any], earlier: threading.Thread | None) -> None:
        if earlier is not None:  # a comparison uses what the one before it has found
            earlier.join()
        said = mine | {"host": socket.gethostname(), "clock_mhz": self.clock_mhz(), "errors": self._errors()}
        said["cpu_s"] = self.cpu_s

        def decide(every: list[Any]) -> dict[str, str]:
            for line in self._growth.look(every):
                self._say(f"warning: {line}")
            found = judge(every)
            self.tell(found, max(s["cpu_s"] for s in every))
            if not found and (line := self._slow_steps.look(every)):
                self._say(f"warning: {line}")
            return self._sick_processes(every, found)

        with self.counted(), contextlib.suppress(MeshkitError):  # training goes on, and so does the next comparison
            sick = self.line.reach(str(window), said, decide, timeout_s=_ANSWER_S)
            self.sick = sick.get(str(self.line.rank))

    def _sick_processes(self, every: Sequence[Mapping[str, Any]], found: Sequence[LateProcess]) -> dict[str, str]:
        """Map each process that needs another host to the reason: late in two comparisons in a row, or errors grow."""
        late = {each.process: each.message for each in found}
        twice = {process: message for process, message in late.items() if process in self._late}
        self._late = set(late)
        hosts = {process: s["host"] for process, s in enumerate(every) if s["host"] in self._growth.hosts}
        growing = {process: f"the error counters of {host} grow" for process, host in hosts.items()}
        return {str(process): reason for process, reason in (growing | twice).items()}

    def tell(self, found: Sequence[LateProcess], cpu_s: float) -> None:
        """Report the late processes and the cost of finding them. Called in process 0.

        Args:
            found: the late processes of one comparison, the worst first. A process that was reported before is reported
                again only if its share has grown to 1.5 times the reported one.
            cpu_s: CPU seconds since the run began, in the process with the largest cost.
        """
        for late in found:
            if late.share >= _AGAIN * self._named.get(late.process, 0.0):
                self._named[late.process] = max(late.share, LEAST_SHARE)
                self._say(f"warning: {late.message}")
        self._news |= {"straggler_cpu_s": cpu_s / max(1, self._noted)}
        if found:
            self._news |= {"straggler": found[0].process, "straggler_share": found[0].share}


class SlowSteps:
    """Compare windows in which no process is late: if all processes get slower, clocks or the network may be slow."""

    def __init__(self):
        self._fastest_s, self._reported_s, self._clock_mhz = math.inf, 0.0, None

    def look(self, said: Sequence[Mapping[str, Any]]) -> str:
        """Return a sentence if steps have become slow, else "".

        Slow steps take at least 1.5 times as long as those of the fastest window. They are reported again when they
        take at least 1.5 times as long as at the last report.

        Args:
            said: as for `judge`.
        """
        step_s = statistics.median(s["step_time_s"] for s in said)
        clocks = [s["clock_mhz"] for s in said if s["clock_mhz"]]
        clock_mhz = statistics.median(clocks) if clocks else None
        if step_s < self._fastest_s:
            self._fastest_s, self._clock_mhz = step_s, clock_mhz
        if step_s < _SLOWER * self._fastest_s:
            self._reported_s = 0.0
        elif step_s >= _AGAIN * self._reported_s:
            self._reported_s = step_s
            several = len({s["host"] for s in said}) > 1
            why = "a link between hosts may be slow, or others use it" if several else "the GPUs may be slow"
            if clock_mhz and self._clock_mhz and clock_mhz < (1 - LEAST_SHARE) * self._clock_mhz:
                why = f"the GPUs' clocks fell from {self._clock_mhz:,.0f} to {clock_mhz:,.0f} MHz"
            return (
                f"a step takes {format_seconds(step_s)}, {step_s / self._fastest_s:.1f} times as long as the fastest "
                f"before, and no process is late: {why}"
            )
        return ""


def judge(said: Sequence[Mapping[str, Any]]) -> list[LateProcess]:
    """Return the processes that the others wait for, the worst first.

    Args:
        said: for each process, the medians of a window (`data_wait_s`, `host_s`, `step_time_s`), `host`, `clock_mhz`.
    """
    step_s = statistics.median(s["step_time_s"] for s in said)
    usual = {part: statistics.median(s[part] for s in said) for part in _PARTS}
    found = []
    for process, s in enumerate(said):
        where = f"process {process} on {s['host']}"
        clock = slow_clock(said, process)
        excess = {part: s[part] - usual[part] for part in _PARTS}
        late_s = sum(excess.values())
        if step_s > 0 and late_s > LEAST_SHARE * step_s:
            part = max(excess, key=lambda name: excess[name])
            message = f"{where} takes {format_seconds(late_s)} longer than the others {_PARTS[part]}: they wait "
            message += f"{format_percent(late_s / step_s)} of each step" + (f"; {clock}" if clock else "")
            found.append(LateProcess(process, s["host"], late_s / step_s, message))
        elif clock:
            found.append(LateProcess(process, s["host"], 0.0, f"{where} may keep the others waiting: {clock}"))
    return sorted(found, key=lambda late: -late.share)


def slow_clock(said: Sequence[Mapping[str, Any]], process: int) -> str:
    """Return a clause on the clock of a process's GPU if it is more than LEAST_SHARE below the median, else "".

    Args:
        said: for each process, a dict with `clock_mhz`. If it is None for any process, the result is "".
        process: the process whose GPU is compared with the median.
    """
    clocks = [s["clock_mhz"] for s in said if s["clock_mhz"]]
    usual_mhz, mhz = statistics.median(clocks or [0.0]), said[process]["clock_mhz"]
    if len(clocks) < len(said) or mhz >= (1 - LEAST_SHARE) * usual_mhz:
        return ""
    return f"its GPU at {mhz:,.0f} MHz, the others at {usual_mhz:,.0f}"


def slowest_clock_mhz() -> float | None:
    """Return the present clock of the slowest GPU of this process, in MHz, or None if no driver reports it."""
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in _gpus_of_this_process()]
        return min((float(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM)) for h in handles), default=None)
    except (pynvml.NVMLError, AttributeError, TypeError, ValueError):
        return None


def errors_of_this_process() -> dict[str, int]:
    """Return the error counters of this process's GPUs and of its machine's links; see `error_counts`."""
    return error_counts(LiveProbe(), _gpus_of_this_process())


def _gpus_of_this_process() -> list[int]:
    """Return the NVML indices of the GPUs that this process drives; [] if there is no driver."""
    try:
        pynvml.nvmlInit()  # stays initialized for the next windows
        order = visible_gpus(LiveProbe(), pynvml.nvmlDeviceGetCount(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        return [order[d.local_hardware_id] for d in jax.local_devices()]
    except (pynvml.NVMLError, MeshkitError, LookupError, AttributeError, TypeError, ValueError):
        return []


class StepCaptures:
    """Capture a step of a training every `every` steps, and read the capture while training goes on.

    A separate process at low priority reads each capture. Training only waits for the start and the end of a trace. Two
    costs are measured: the time that captures add to the steps, and the CPU time for finding stragglers. Captures
    become rarer until the added time is at most 1 % of the steps' time, and the CPU time is at most 1 ms per step. The
    process with the largest cost counts. Process 0 chooses the next step to capture, far enough ahead that all
    processes know it in time. If a process does not answer, all processes stop capturing.

    Args:
        every: the smallest number of steps between two captures; 0 for none.
        step: the step of the training.
        stragglers: reports late processes, and counts CPU time.
        say: prints a line.
        first_step: the first step of this attempt.
        budget_s: CPU seconds per step.
        budget: share of the steps' time that captures may add.
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
        budget: float = _BUDGET,
    ):
        self.line = Agreement("captures")
        self._every = every
        self._now = first_step - 1  # the last step that began
        self._next = _multiple_after(self._now, every) if every else 0  # the next step that all processes capture
        self._step, self._stragglers, self._say = step, stragglers, say
        self._first_step, self._budget_s, self._budget = first_step, budget_s, budget
        self._began = self._took_s = 0.0  # the captured call's start, and its seconds with the profiler's
        self._lost_s = self._each_s = 0.0  # seconds: added by captures so far, and of one training step
        self._captures, self._suspect, self._warned = 0, -1, False
        self._thread: threading.Thread | None = None
        self._tracer = StepTracer("meshkit.trace.live")
        self._introduced = False

    @property
    def active(self) -> bool:
        """Whether a step is being captured."""
        return self._tracer.tracing

    def is_due(self, first: int, last: int) -> bool:
        """Return whether all processes capture the call that makes the training steps `first` to `last`."""
        self._now = last
        return first <= self._next <= last

    def start(self, pending: Any) -> None:
        """Wait for the arrays in `pending`, so that the trace holds nothing of the step before, and start the trace."""
        jax.block_until_ready(pending)
        self._began = time.perf_counter()
        with self._stragglers.counted():
            try:
                self._introduced &= not self._tracer.start()
            except Exception as error:  # another profiler runs, or there is no permission
                self._warn(f"no step can be captured: {describe_error(error)}")

    def stop(self, step: int, pending: Any) -> None:
        """Wait for the arrays in `pending`, and stop the trace. It is read while the next steps run.

        Args:
            step: the last training step of the captured call; the same on all processes.
            pending: the outputs of the call, a tree of arrays.
        """
        jax.block_until_ready(pending)
        problem = None
        with self._stragglers.counted():
            try:
                self._tracer.stop()
            except Exception as error:
                problem = describe_error(error)
        self._took_s = time.perf_counter() - self._began
        self._thread = threading.Thread(target=self.exchange, args=(step, problem), name="meshkit-live", daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for a running exchange, if there is one."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def close(self) -> None:
        """End the reader process, and remove the captures."""
        self._warned = True  # a capture that is still being read is lost, which needs no warning
        self._tracer.close()

    def exchange(self, step: int, problem: str | None) -> None:
        """Read the trace of a step, send the result to process 0, and receive the next step to capture."""
        said: dict[str, Any] = {"host": socket.gethostname(), "clock_mhz": self._stragglers.clock_mhz(), "step": step}
        with self._stragglers.counted():
            try:
                if problem is not None:
                    raise TraceError(problem)
                if not self._introduced:
                    self._introduce(self._tracer.folder / "program.hlo.pb")
                said |= self.ask_reader({"trace": str(self._tracer.traces)})
                said["lost_s"] = max(0.0, self._took_s - said["step_s"])
                said["each_s"] = said["step_s"] / self._step.facts.steps_per_call
            except Exception as error:  # from the reader process or a disk; the others are told
                said["error"] = error.message if isinstance(error, TraceError) else describe_error(error)
            self._tracer.forget()
        said["cpu_s"] = self._stragglers.cpu_s
        with self._stragglers.counted():
            try:
                self._next = self.line.reach(str(step), said, self.decide, timeout_s=_CAPTURE_ANSWER_S)
            except Exception as error:
                why = error.message if isinstance(error, MeshkitError) else describe_error(error)
                self._warn(f"no more steps are captured: {why}")

    def decide(self, said: list[Mapping[str, Any]]) -> int:
        """Report a late process, and return the step that all processes capture next. Called in process 0."""
        step, cpu_s, every = said[0]["step"], max(s["cpu_s"] for s in said), self._every
        bad = {process: s["error"] for process, s in enumerate(said) if "error" in s}
        try:
            found = None if bad else self.ask_reader({"judge": said})
            late = found and self._late(said, found["late"])
            self._stragglers.tell([late] if late else [], cpu_s)
            if found:
                self._stragglers.captured = {"captured_step": step, **found["line"]}
        except TraceError as error:
            bad[0] = error.message
        for process, why in list(bad.items())[:1]:
            self._warn(f"the captured step {step} of process {process} cannot be read: {why}")
        self._captures += 1
        more = 1 + 1 / self._captures  # includes the next capture, at the mean cost of the others
        each_s = max(s.get("each_s", 0.0) for s in said)
        if each_s > 0:
            self._each_s, self._lost_s = each_s, self._lost_s + max(s.get("lost_s", 0.0) for s in said)
        now = max(step, self._now)
        heard = now + (now - step) + 1  # all know by then: the answer takes no longer than the reading has taken
        steps = max(cpu_s * more / self._budget_s, self._lost_s * more / (self._budget * (self._each_s or 1.0)))
        while steps > _multiple_after(heard, every) - self._first_step + 1:
            every *= 2
        return _multiple_after(heard, every)

    def _late(self, said: Sequence[Mapping[str, Any]], worst: Mapping[str, Any] | None) -> LateProcess | None:
        """Return the process that causes most of the waiting, if it was the same one in the previous capture."""
        if worst is None or worst["share"] < LEAST_SHARE or worst["of_all"] < min(0.75, _OF_ALL / len(said)):
            self._suspect = -1
            return None
        process = worst["process"]
        suspected, self._suspect = self._suspect, process
        if process != suspected:
            return None
        host, others = said[process]["host"], worst["others"]
        message = f"process {process} on {host} "
        if worst["longer"] > _LONGER:
            message += f"computes {format_percent(worst['longer'])} longer than the median and "
        message += f"makes {others} other{'s' * (others > 1)} wait {format_percent(worst['share'])} of the step"
        clock = slow_clock(said, process)
        return LateProcess(process, host, worst["share"], message + (f"; {clock}" if clock else ""))

    def ask_reader(self, request: Mapping[str, Any]) -> Any:
        """Return the answer of the reader process to a request.

        Raises:
            TraceError: the process could not do what was asked, or it is gone.
        """
        before_s = self._tracer.cpu_s
        try:
            return self._tracer.ask(request)
        finally:
            self._stragglers.cpu_s += self._tracer.cpu_s - before_s

    def _introduce(self, program: Path) -> None:
        """Send the reader process the facts about the program and the mesh; `program` is the file for the program."""
        mesh = self._step.mesh
        program.write_bytes(serialized_module(self._step.program))
        self.ask_reader(
            {
                "program": str(program),
                "axes": mesh.axis_names,
                "shape": mesh.devices.shape,
                "device_ids": [d.id for d in mesh.devices.flat],
                "devices": device_numbers(mesh.local_devices),
            }
        )
        self._introduced = True

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._say(f"warning: {what.removesuffix('.')}. Training goes on; this is reported once.")


def _multiple_after(step: int, n: int) -> int:
    return (step // n + 1) * n


@dataclass(frozen=True)
class Difference:
    """One part of an array whose copies differ."""

    path: str
    """Path of the array in the state."""
    devices: tuple[Any, ...]
    """The devices that differ from the majority; without a majority, all devices that hold this part."""
    copies: int
    """The number of devices that hold this part."""
    majority: bool
    """Whether more than half of the copies agree."""


class ReplicaCheck:
    """Compare the replicas of every array of a state.

    Args:
        mesh: a mesh of attached devices.
        state: tree of arrays, or of ShapeDtypeStructs, with NamedShardings on that mesh.
    """

    paths: list[str]
    """Paths of the arrays that have replicas, in tree order. All other arrays have only one copy of each part."""
    share: float
    """The share of the state's bytes in arrays that have replicas, which this check can compare."""

    def __init__(self, mesh: jax.sharding.Mesh, state: Any):
        self._mesh = mesh
        leaves = jax.tree_util.tree_flatten_with_path(state)[0]
        axes = [_replica_axes(x, mesh) for _, x in leaves]
        self._indices = [i for i, replicated in enumerate(axes) if replicated]
        self._axes = [axes[i] for i in self._indices]
        self.paths = [path_name(leaves[i][0]) for i in self._indices]
        self._shardings = [leaves[i][1].sharding for i in self._indices]
        sizes = [x.size * x.dtype.itemsize for _, x in leaves]
        self.share = sum(sizes[i] for i in self._indices) / max(1, sum(sizes))
        self.differ = jax.jit(self._over_mesh(self._compare))
        self._gather = jax.jit(self._over_mesh(self._all_hashes))

    def check(self, state: Any, step: int) -> None:
        """Raise an error if replicas differ. Every process must call this.

        Args:
            state: has the shapes and shardings of the `state` of `__init__`, in device memory or pinned host memory.
            step: the number of the step that made this state.

        Raises:
            RunError: names the arrays, and the GPUs and hosts that differ from the others.
        """
        found = self.differences(state)
        if not found:
            return
        hosts = _host_names()
        named = "; ".join(_describe(difference, hosts) for difference in found[:_MOST_NAMED])
        more = f"; and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise RunError(
            f"after step {step} replicas of {len({d.path for d in found})} of {len(self.paths)} arrays differ: "
            f"{named}{more}.",
            hint="the last checkpoint before this step, without the hosts named; a checkpoint after it may be damaged",
        )

    def differences(self, state: Any) -> list[Difference]:
        """Return the parts of arrays whose copies differ, in tree order.

        Every process must call this, because a program over the whole mesh compares the hashes.

        Args:
            state: see `check`.
        """
        leaves = jax.tree.leaves(state)
        arrays = [leaves[index] for index in self._indices]
        if not arrays:
            return []
        differ = np.asarray(self.differ(*arrays).addressable_data(0))
        if not differ.any():
            return []
        hashes = np.asarray(self._gather(*arrays).addressable_data(0)).reshape(*self._mesh.devices.shape, -1)
        return [d for i in np.flatnonzero(differ) for d in self._outliers(int(i), hashes[..., i])]

    def _over_mesh(self, local: Any) -> Any:
        """Return a function in which each GPU calls `local` with its own shards; `local` gives all the same result."""
        specs = tuple(sharding.spec for sharding in self._shardings)
        mapped = jax.shard_map(local, mesh=self._mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)

        def run(*arrays):
            return mapped(*map(_on_device, arrays, self._shardings))

        return run

    def _compare(self, *shards: jax.Array) -> jax.Array:
        """Return bool [arrays]: whether any part of the array has copies that differ."""
        groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for index, axes in enumerate(self._axes):
            groups[axes].append(index)
        differ = jnp.zeros(len(shards), jnp.int32)
        for axes, members in groups.items():
            hashes = jnp.stack([hash_bits(shards[i]) for i in members])
            unequal = lax.pmin(hashes, axes) != lax.pmax(hashes, axes)
            differ = differ.at[jnp.asarray(members)].set(unequal.astype(jnp.int32))
        return lax.pmax(differ, self._mesh.axis_names) > 0  # so that every process gets the same result

    def _all_hashes(self, *shards: jax.Array) -> jax.Array:
        """Return the hashes, uint32 [devices in mesh order, arrays]."""
        return lax.all_gather(jnp.stack([hash_bits(x) for x in shards]), self._mesh.axis_names)

    def _outliers(self, index: int, hashes: np.ndarray) -> list[Difference]:
        """Return the parts of one array whose copies differ. `hashes` has the shape of the mesh."""
        replicas = [self._mesh.axis_names.index(a) for a in self._axes[index]]
        last = range(-len(replicas), 0)
        copies = int(np.prod([hashes.shape[a] for a in replicas]))
        parts = np.moveaxis(hashes, replicas, last).reshape(-1, copies)
        devices = np.moveaxis(self._mesh.devices, replicas, last).reshape(-1, copies)
        found = []
        for values, holders in zip(parts, devices):
            (common, count), *others = Counter(values.tolist()).most_common()
            if others:
                majority = 2 * count > copies
                odd = tuple(d for v, d in zip(values, holders) if not majority or v != common)
                found.append(Difference(self.paths[index], odd, copies, majority))
        return found


def hash_bits(x: jax.Array) -> jax.Array:
    """Return the hash of an array's bits that this module's docstring defines, a uint32 scalar.

    Args:
        x: integers, floats, bools or PRNG keys, of any shape. The shape does not affect the hash.
    """
    words = _words(x).reshape(-1)
    return jnp.sum(_mix(words ^ _mix(lax.iota(jnp.uint32, words.size))), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    """Return a one-to-one map of uint32 in which every input bit reaches every output bit: MurmurHash3's finalizer."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> jax.Array:
    """Return the bits of an array as uint32: one per element, or two per element of 64 bits."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    size = x.dtype.itemsize
    if size >= 4:
        return lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.uint16 if size == 2 else jnp.uint8).astype(jnp.uint32)


def _replica_axes(x: Any, mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Return the mesh axes with more than one device over which an array is not sharded."""
    spec = x.sharding.spec
    cut = {a for axes in spec if axes is not None for a in (axes if isinstance(axes, tuple) else (axes,))}
    return tuple(a for a in mesh.axis_names if mesh.shape[a] > 1 and a not in cut)


def _on_device(x: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return x in device memory, copied from the host if it is there."""
    return jax.device_put(x, sharding.with_memory_kind("device")) if sharding.memory_kind == "pinned_host" else x


def _host_names() -> list[str]:
    """Return the host name of every process. This is a collective."""
    name = socket.gethostname().encode()[:_HOST_NAME_BYTES].ljust(_HOST_NAME_BYTES)
    rows = multihost_utils.process_allgather(np.frombuffer(name, np.uint8))
    return [bytes(row).decode(errors="replace").strip() for row in np.atleast_2d(rows)]


def _describe(difference: Difference, hosts: Sequence[str]) -> str:
    """Return, for example, `params/norm/scale on GPU 3 (process 0, host node7) against 7 others`."""
    devices = difference.devices
    where = ", ".join(f"GPU {d.id} (process {d.process_index}, host {hosts[d.process_index]})" for d in devices[:8])
    where += f" and {len(devices) - 8} more" if len(devices) > 8 else ""
    if difference.majority:
        return f"{difference.path} on {where} against {difference.copies - len(devices)} others"
    return f"{difference.path} among {where}, without a majority"
