"""`mk.live`: capture one step of a user's loop every N steps, and measure it while the loop goes on.

    with live.step(n) -> a trace of step n -> a reader process -> Report -> `live.line`, `live.report`

The cost of a capture is the time for which it delays the loop, plus the CPU seconds of the reader process. If captures
cost more than a given share of the loop's time, they become rarer.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import jax

from meshkit.config.cluster import Cluster
from meshkit.config.mesh import MeshSpec
from meshkit.config.places import describe_error
from meshkit.console import say
from meshkit.distributed.join import Agreement
from meshkit.errors import ConfigError, MeshkitError, check_kinds
from meshkit.report.schema import Report, StragglerPart
from meshkit.trace.capture import device_numbers
from meshkit.trace.step_tracer import StepTracer
from meshkit.units import format_percent

_USUAL = 32  # The usual step time is the median of this many steps without a capture.
_SLOWED = 2  # A capture slows two steps: the captured one and the next.
_LATE = 0.01  # Stragglers and axes are named if they take at least this share of the step.
_MOST_AXES = 3  # `line` names at most this many axes.
LEAST_SHARE = 0.05  # A late process is named if the others wait for it more than this share of the step.
_TOLD_S = 10.0  # Time for all processes to read their traces of a step.
_made = itertools.count()  # the same number in every process, since all call `mk.live` in the same order


class Live:
    """The object that `mk.live` returns: `step` wraps each step of a loop, and `line` describes the last capture."""

    line: str = ""
    """A sentence on the last captured step that was read: its exposed communication, and the device or process that is
    late. Empty before the first one."""
    report: Report | None = None
    """The report of the same step; None before the first one."""

    def __init__(self, every: int, job: Mapping[str, Any], budget: float):
        self._every, self._job, self._budget = every, job, budget
        self._tracer = StepTracer("meshkit.verbs.profile.live_reader", programs=True)
        self._processes = Agreement(f"live/{next(_made)}")
        self._times: Counter[int] = Counter()  # step -> how often it was captured
        self._reading: threading.Thread | None = None
        self._warned = False
        self._captures, self._cost_s = 0, 0.0
        self._began = self._entered = 0.0
        self._usual: deque[float] = deque(maxlen=_USUAL)
        self._slowed = 0  # The number of coming steps that the last capture still slows.
        atexit.register(self.close)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Wrap one step of the loop in a `with` block, and capture it if a capture is due.

        The first step, in which programs are compiled, is never captured. If the step raises an exception, its capture
        is dropped and the exception is passed on. The first failing capture is reported on stderr; the loop goes on.

        Args:
            number: number of the step; it must be the same in all processes, so that they capture the same steps.
        """
        try:
            captures = self._count() and self._is_due(number) and self._start()
            yield
            if captures:
                self._stop(number)
        except BaseException:
            if self._tracer.tracing:
                with contextlib.suppress(Exception):
                    self._tracer.stop()
                self._tracer.forget()
            raise

    def wait(self, timeout_s: float | None = None) -> str:
        """Wait until the last captured step is read, for `timeout_s` at most, and return `line`."""
        if self._reading is not None:
            self._reading.join(timeout_s)
        return self.line

    def close(self) -> None:
        """End the reader process and remove its folder. This also happens at the end of a `with` and of the program."""
        self._warned = True  # A step that is still being read is lost, without a warning.
        self._tracer.close()
        if self._reading is not None and self._processes.size > 1:
            self._reading.join(_TOLD_S)  # it must not use jax's client after its end
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _count(self) -> bool:
        """Record the time of the previous step, and return whether there was one."""
        now, before = time.perf_counter(), self._entered
        self._entered = now
        if not before:
            self._began = now
            return False
        if self._slowed:
            self._slowed -= 1
            self._cost_s += now - before - (statistics.median(self._usual) if self._usual else 0.0)
        else:
            self._usual.append(now - before)
        return True

    def _is_due(self, number: int) -> bool:
        """Return whether to capture a step: its number is a multiple of `every`, and one more capture fits the budget.

        If it does not fit, `every` is doubled. Processes that double it at different steps thus still capture some
        steps together.
        """
        if number % self._every or self._slowed or (self._reading is not None and self._reading.is_alive()):
            return False
        spent_s = self._cost_s + self._tracer.cpu_s / (os.cpu_count() or 1)
        if self._captures and spent_s * (1 + 1 / self._captures) > self._budget * (self._entered - self._began):
            self._every *= 2
            return False
        return True

    def _start(self) -> bool:
        """Wait for the devices to finish the previous step, start a trace, and return whether it runs."""
        self._captures, self._slowed = self._captures + 1, _SLOWED
        try:
            jax.block_until_ready(jax.live_arrays())
            self._tracer.start()
        except Exception as error:  # Another profiler may run, or the right to profile may be missing.
            self._warn(f"no step can be captured: {describe_error(error)}")
        return self._tracer.tracing

    def _stop(self, number: int) -> None:
        try:
            with contextlib.suppress(Exception):  # jax raises an error of the step again when its results are used.
                jax.block_until_ready(jax.live_arrays())
            self._tracer.stop()
            self._reading = threading.Thread(target=self._read, args=(number,), name="meshkit-live", daemon=True)
            self._reading.start()
        except Exception as error:
            self._warn(f"step {number} cannot be captured: {describe_error(error)}")

    def _read(self, number: int) -> None:
        try:
            devices = device_numbers(jax.local_devices())
            answer = self._tracer.ask({"trace": str(self._tracer.traces), "devices": devices, **self._job})
            self.report = Report.model_validate_json(answer)
            self.line = describe_report(number, self.report)
        except Exception as error:
            why = error.message if isinstance(error, MeshkitError) else describe_error(error)
            self._warn(f"the captured step {number} cannot be read: {why}")
        else:
            self.line += self._late_process(number, self.report)
        finally:
            self._tracer.forget()

    def _late_process(self, number: int, report: Report) -> str:
        """Return what `late_process` finds, the same in all processes; "" if not all have captured this step."""
        if self._processes.size == 1:
            return ""
        self._times[number] += 1  # a loop may count anew in each epoch
        mine = [report.step.exposed_s, report.step.time_s]
        with contextlib.suppress(Exception):  # a process has not captured the step, or jax's service has ended
            return self._processes.reach(f"{number}/{self._times[number]}", mine, late_process, timeout_s=_TOLD_S)
        return ""

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            with contextlib.suppress(OSError):  # stderr may be a closed pipe.
                say(f"warning: {what.removesuffix('.')}. The loop goes on; this is reported once.")


def live(
    *,
    every: int = 500,
    mesh: jax.sharding.Mesh | None = None,
    cluster: Cluster | None = None,
    mesh_spec: MeshSpec | None = None,
    budget: float = 0.01,
) -> Live:
    """Capture one step of a loop every `every` steps, and describe its exposed communication while the loop goes on.

        with mk.live(every=500, mesh=mesh) as live:
            for number, batch in enumerate(batches):
                with live.step(number):
                    state, loss = train_step(state, batch)
                if number % 100 == 0:
                    print(number, loss, live.line)

    A reader process turns the trace of a captured step into a report, at the lowest CPU priority. In a job of several
    processes, each process captures and reads its own devices. They capture the same steps if they pass the same
    numbers to `step`. Then `line` also names the process for which the others wait, if there is one.

    Args:
        every: least number of steps between two captures.
        mesh: the mesh of the programs in the step, whose axes `line` names.
        cluster: the cluster of the devices; without it, links have no name.
        mesh_spec: the spec that the mesh was built from, if any.
        budget: share of the loop's time that captures may take: the delay of the loop, plus the CPU seconds of the
            reader process divided by the number of CPUs. The first capture is always made. If captures take more, later
            ones become rarer.

    Raises:
        ConfigError: `every` is not a number of steps, `budget` is not positive, or another argument has the wrong type.
    """
    check_kinds(live, mesh=mesh, cluster=cluster, mesh_spec=mesh_spec)
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ConfigError(f"every is {every!r}, not a number of steps.", hint="every=500")
    if not isinstance(budget, int | float) or not budget > 0:
        raise ConfigError(f"budget is {budget!r}, not a share of the loop's time.", hint="budget=0.01")
    if mesh is not None and mesh_spec is None:
        mesh_spec = MeshSpec.parse(dict(mesh.shape))
    job = {
        "mesh": mesh_spec and mesh_spec.to_dict(),
        "cluster": cluster and {**cluster.to_dict(), "calibration": None},
    }
    return Live(every, job, budget)


def describe_report(number: int, report: Report) -> str:
    """Return a sentence on a report of one step: its exposed communication, by axes if known, and its straggler."""
    step_s = report.step.time_s or 1.0
    exposed: dict[str, float] = {}
    for row in report.communication:
        name = "+".join(row.axes)
        exposed[name] = exposed.get(name, 0.0) + (row.exposed_s or 0.0) / step_s
    named = sorted((n for n in exposed if n and exposed[n] >= _LATE), key=lambda n: -exposed[n])[:_MOST_AXES]
    axes = ", ".join(f"{name} {format_percent(exposed[name])}" for name in named)
    late = max(report.stragglers.devices if report.stragglers else (), key=_late_s, default=None)
    share = _late_s(late) / step_s if late else 0.0
    device = late.device if late and share >= _LATE else None
    return describe_overlap(number, (report.step.exposed_s or 0.0) / step_s, device, share, axes)


def late_process(told: Sequence[Sequence[Any]]) -> str:
    """Return `, process 3 is late by 10.0 % of the step`, or "" if no process is late.

    Processes that wait have more exposed communication than the one for which they wait.

    Args:
        told: for each process, the seconds of its exposed communication and of its step.
    """
    if any(None in one for one in told):
        return ""
    exposed, times = zip(*told)
    late = exposed.index(min(exposed))
    share = (statistics.median(exposed[:late] + exposed[late + 1 :]) - exposed[late]) / (max(times) or 1.0)
    return f", process {late} is late by {format_percent(share)} of the step" if share > LEAST_SHARE else ""


def _late_s(device: StragglerPart) -> float:
    """Return the mean seconds that others wait for a device; if unknown, the extra seconds of its own work."""
    if device.delay_s is not None:
        return device.delay_s
    return device.late.behind_s if device.late else 0.0


def describe_overlap(
    number: int, exposed_share: float, late_device: int | None = None, late_share: float = 0.0, axes: str = ""
) -> str:
    """Return `captured step 7: 25.0 % of the step is exposed communication, device 5 is late by 10.0 % of the step`."""
    by = f" ({axes})" if axes else ""
    late = "" if late_device is None else f", device {late_device} is late by {format_percent(late_share)} of the step"
    return f"captured step {number}: {format_percent(exposed_share)} of the step is exposed communication{by}{late}"
