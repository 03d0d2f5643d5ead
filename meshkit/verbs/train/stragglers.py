"""Who keeps the others waiting while a job trains: what every process says of its own steps, without a trace.

    seconds of data and host of each step -> medians of a window -> process 0 compares -> one line, and the sinks

Processes in lockstep all take equally long for a step, whoever is late: the others wait for it in a collective. So the
step time says nothing. The late one is known by what it does itself, outside of the devices, longer than the others, or
by the clock of its GPU; or by a captured step (`live.py`). The exchange runs in a thread, and no step waits for it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshkit.discover import LiveProbe
from meshkit.discover.machine import visible_gpus
from meshkit.distributed.agreement import Agreement
from meshkit.errors import MeshkitError
from meshkit.units import format_percent, format_seconds

LEAST_SHARE = 0.05  # share of the step that the others must lose, and of the clock that a GPU must lack
_AGAIN = 1.5  # a straggler is named again where it costs so many times what it did
_ANSWER_S = 60.0
_PARTS = {"data_wait_s": "for its data", "host_s": "on its host, outside of the step"}


@dataclass(frozen=True)
class LateProcess:
    """A process that the others wait for, or whose GPU is slower than theirs."""

    process: int
    host: str
    share: float  # of each step that the others wait for it; 0 where only its clock is known
    message: str


class Stragglers:
    """Compares the processes of a job every so many steps.

    Args:
        every: steps; 0 never.
        say: prints a line; process 0 uses it.
        clock_mhz: of this process's slowest GPU; None where unknown.
    """

    def __init__(self, every: int, say: Callable[[str], None], clock_mhz: Callable[[], float | None] = lambda: None):
        self._line = Agreement("stragglers")
        self._every = every if self._line.size > 1 else 0
        self._say, self.clock_mhz = say, clock_mhz
        self._steps: list[Mapping[str, float]] = []
        self._window, self._thread = 0, None
        self._named: dict[int, float] = {}  # process -> share when it was named
        self._news: dict[str, float] = {}
        self._noted = 0  # steps
        self.cpu_s = 0.0  # of this process, for all that names stragglers

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts what this thread takes of a CPU meanwhile."""
        began = time.thread_time()
        yield
        self.cpu_s += time.thread_time() - began

    def note(self, step: Mapping[str, float]) -> None:
        """Takes the seconds of one step, with the names of metrics.jsonl; the window's last starts a comparison."""
        self._noted += 1
        if not self._every:
            return
        self._steps.append(step)
        if len(self._steps) < self._every:
            return
        mine = {name: statistics.median(s[name] for s in self._steps) for name in (*_PARTS, "step_time_s")}
        self._steps, self._window = [], self._window + 1
        self._thread = threading.Thread(
            target=self._compare, args=(self._window, mine), name="meshkit-stragglers", daemon=True
        )
        self._thread.start()

    def news(self) -> dict[str, float]:
        """What the record of the next step gets, once after a comparison.

        `straggler` (its process) and `straggler_share` if there is one; `straggler_cpu_s`, what naming them takes: CPU
        seconds a step, since the run began, of the process where it is most.
        """
        news, self._news = self._news, {}
        return news

    def join(self, timeout_s: float) -> None:
        """Waits for the comparison that runs, if one does."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _compare(self, window: int, mine: dict[str, Any]) -> None:
        said = mine | {"host": socket.gethostname(), "clock_mhz": self.clock_mhz(), "cpu_s": self.cpu_s}

        def decide(every: list[Any]) -> None:
            self.tell(judge(every), max(s["cpu_s"] for s in every))

        with self.counted(), contextlib.suppress(MeshkitError):  # the next window, or nobody: training goes on
            self._line.reach(str(window), said, decide, timeout_s=_ANSWER_S)

    def tell(self, found: Sequence[LateProcess], cpu_s: float) -> None:
        """Says who is late, the worst first, and what finding it took of CPUs so far; process 0 does."""
        for late in found:
            if late.share >= _AGAIN * self._named.get(late.process, 0.0):
                self._named[late.process] = max(late.share, LEAST_SHARE)
                self._say(f"warning: {late.message}")
        self._news |= {"straggler_cpu_s": cpu_s / max(1, self._noted)}
        if found:
            self._news |= {"straggler": found[0].process, "straggler_share": found[0].share}


def judge(said: Sequence[Mapping[str, Any]]) -> list[LateProcess]:
    """The processes that the others wait for, the worst first.

    Args:
        said: by process: medians of a window (`data_wait_s`, `host_s`, `step_time_s`), `host`, `clock_mhz`.
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
    """A clause on the clock of a process's GPU where it is slower than the others'; empty where not, or unknown."""
    clocks = [s["clock_mhz"] for s in said if s["clock_mhz"]]
    usual_mhz, mhz = statistics.median(clocks or [0.0]), said[process]["clock_mhz"]
    if len(clocks) < len(said) or mhz >= (1 - LEAST_SHARE) * usual_mhz:
        return ""
    return f"its GPU at {mhz:,.0f} MHz, the others at {usual_mhz:,.0f}"


def slowest_clock_mhz() -> float | None:
    """The clock of the multiprocessors of the slowest GPU that this process drives, now; None where nobody says it."""
    import jax
    import pynvml

    try:
        pynvml.nvmlInit()  # for the rest of the process: the next window asks again
        order = visible_gpus(LiveProbe(), pynvml.nvmlDeviceGetCount(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        handles = [pynvml.nvmlDeviceGetHandleByIndex(order[d.local_hardware_id]) for d in jax.local_devices()]
        return min(float(pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM)) for h in handles)
    except (pynvml.NVMLError, MeshkitError, LookupError, AttributeError, TypeError, ValueError):
        return None
