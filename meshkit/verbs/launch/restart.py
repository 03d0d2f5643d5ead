"""The gang of the next attempt, started while the present one trains, so that a failure does not wait for imports.

    attempt has made its first step -> Standby.start -> processes that import and wait (runs/standby.py)
    failure -> take: are all of them there, is their port still free? -> a byte for each -> the next attempt's gang
            -> if not: the next attempt is started as the first one was

A process that ends while it waits is no failure of the run. The next attempt then starts without the standby.

    failure -> Outage: found, ended -> first new step, parts of each process's start -> a line: what took how long
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from meshkit.distributed.roll_call import is_free
from meshkit.errors import ConfigError
from meshkit.runs.phases import Pulse
from meshkit.verbs.launch.processes import LocalGang


@dataclass(frozen=True)
class Started:
    """The running processes of an attempt."""

    gang: LocalGang
    pulses: tuple[Pulse, ...]
    """The pulse by which each process says how far it is, in the order of the gang."""
    coordinator: str | None = None
    """Host:port on which the processes are to meet; None where their environment names none."""


@dataclass(frozen=True)
class Outage:
    """The times of a failure, by `time.monotonic`."""

    failed_at: float
    """When the process ended; where it is stuck instead, `found_at`."""
    found_at: float
    """When the launcher noticed the failure."""
    ended_at: float
    """When the last process of the gang had ended."""

    def line(self, starts: Sequence[Mapping[str, float]], now: float) -> str:
        """Return a line on how long it took until training went on, with the seconds of each part.

        Args:
            starts: for each process of the next attempt, the seconds of its start by part. The last part is its first
                step.
            now: when all processes have made that step.
        """
        slowest = dict(max(starts, key=lambda parts: sum(parts.values())))
        total_s = now - self.failed_at
        seconds = {"found": self.found_at - self.failed_at, "others ended": self.ended_at - self.found_at}
        slowest["start"] = now - self.ended_at - sum(s for part, s in slowest.items() if part != "start")
        told = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in (seconds | slowest).items())
        return f"trains again {total_s:.2f} s after the failure: {told}"


Start = Callable[[int, Path, int | None], AbstractContextManager[Started]]


class Standby:
    """At most one gang that waits. A context manager, which ends the gang and removes its files.

    Args:
        start: starts a gang from the attempt's number, a folder of logs, and a descriptor. From the descriptor each
            process reads a byte before it goes on.
        folder: holds what the processes print while they wait.
    """

    def __init__(self, start: Start, folder: Path):
        self._start, self._folder = start, folder
        self._held, self._started, self._lets_go = ExitStack(), None, -1

    def start(self, number: int) -> None:
        """Starts the processes of an attempt, which then wait. Where the machine cannot start them, none wait."""
        self.close()  # also removes the files that a killed launcher has left
        reads, self._lets_go = os.pipe()
        self._held.callback(os.close, self._lets_go)
        try:
            self._started = self._held.enter_context(self._start(number, self._folder, reads))
        except (ConfigError, OSError):
            self.close()
        finally:
            os.close(reads)

    def take(self, logs: Path, into: ExitStack) -> Started | None:
        """Lets the waiting processes go on as those of the attempt that they were started for.

        Args:
            logs: folder of the attempt's logs; what the processes have printed moves there.
            into: the stack that ends the processes from now on, when it closes.

        Returns:
            The processes. None where no processes wait, one of them has ended, or their port is taken.
        """
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
        """Ends the processes that wait, and removes their files."""
        self._started = None
        self._held.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
