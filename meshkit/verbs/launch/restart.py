"""Start the processes of the next attempt while the present attempt trains, so that a restart skips their imports.

    the attempt has made its first step -> Standby.start -> processes that import and wait (runs/standby.py)
    failure -> Standby.take: all of them running, and their port free? -> a byte for each, and they are the next attempt
            -> if not: the next attempt starts new processes, as the first attempt did

A process that ends while it waits is no failure of the run. The next attempt then starts new processes.

    failure -> Outage (its times) -> first step of the next attempt -> Outage.line: the lost time, part by part
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from meshkit.distributed.roll_call import is_free
from meshkit.errors import ConfigError, RunError
from meshkit.runs.phases import Pulse
from meshkit.verbs.launch.processes import LocalGang


@dataclass(frozen=True)
class Started:
    """The running processes of an attempt."""

    gang: LocalGang
    pulses: tuple[Pulse, ...]
    """The pulse by which each process reports its progress, in the order of the gang."""
    coordinator: str | None = None
    """Host:port on which process 0 will listen; None if the environment of the processes names none."""


@dataclass(frozen=True)
class Outage:
    """The times of a failure, by `time.monotonic`."""

    failed_at: float
    """When the process ended; `found_at` for a stuck process."""
    found_at: float
    """When the launcher noticed the failure."""
    ended_at: float
    """When the last process of the failed attempt had ended."""

    def line(self, starts: Sequence[Mapping[str, float]], now: float) -> str:
        """Return a line on the time from the failure to the next attempt's first step, with the seconds of each part.

        Args:
            starts: for each process of the next attempt, the seconds of its start by part. The last part is its first
                step. The line shows the parts of the process with the longest start.
            now: the time at which all processes had made that step.
        """
        slowest = dict(max(starts, key=lambda parts: sum(parts.values())))
        total_s = now - self.failed_at
        seconds = {"found": self.found_at - self.failed_at, "others ended": self.ended_at - self.found_at}
        slowest["start"] = now - self.ended_at - sum(s for part, s in slowest.items() if part != "start")
        told = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in (seconds | slowest).items())
        return f"trains again {total_s:.2f} s after the failure: {told}"


Start = Callable[[int, Path, int | None], AbstractContextManager[Started]]


class Standby:
    """Hold the waiting processes of at most one attempt. A context manager, which ends them and removes their files.

    Args:
        start: starts the processes, given the attempt's number, a folder for logs, and a descriptor. Each process reads
            a byte from the descriptor before it goes on.
        folder: the folder for the logs of waiting processes.
    """

    def __init__(self, start: Start, folder: Path):
        self._start, self._folder = start, folder
        self._held, self._started, self._lets_go = ExitStack(), None, -1
        self._starting = threading.Thread()

    def start(self, number: int) -> None:
        """Start the processes of an attempt, which then wait. If the machine cannot start them, none wait.

        A thread starts them: on a busy machine that may take long, and the caller watches for failures meanwhile.
        """
        self.close()  # also removes the files that a killed launcher has left
        self._starting = threading.Thread(target=self._run, args=(number,), name="meshkit-standby", daemon=True)
        self._starting.start()

    def _run(self, number: int) -> None:
        reads, self._lets_go = os.pipe()
        self._held.callback(os.close, self._lets_go)
        try:
            self._started = self._held.enter_context(self._start(number, self._folder, reads))
        except (ConfigError, RunError, OSError):
            self._held.close()
        finally:
            os.close(reads)

    def take(self, logs: Path, into: ExitStack) -> Started | None:
        """Let the waiting processes go on as the processes of the next attempt.

        Args:
            logs: folder for the attempt's logs. The logs of the waiting processes are moved there.
            into: the stack that takes over the processes, and ends them when it closes.

        Returns:
            The processes. None if no processes wait, one of them has ended, their port is taken, or their logs cannot
            be moved.
        """
        self._wait()
        try:
            found = self._started
            if found is None or found.gang.poll() or (found.coordinator and not is_free(found.coordinator)):
                return None
            self._folder.rename(logs)
            found.gang.begin(logs)
            os.write(self._lets_go, b"." * len(found.gang.members))
            into.push(self._held.pop_all())
            return found
        except OSError:
            return None
        finally:
            self.close()

    def close(self) -> None:
        """End the waiting processes, and remove their files."""
        self._wait()
        self._started = None
        self._held.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self) -> None:
        if self._starting.ident is not None:
            self._starting.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
