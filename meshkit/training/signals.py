"""SIGINT and SIGTERM as a request that the training loop honours between two steps. Layer 4."""

from __future__ import annotations

import signal
import threading
from typing import Any, Self


class StopRequest:
    """A context in which the first SIGINT or SIGTERM only sets a flag; a second SIGINT interrupts at once.

    Outside of the main thread, where Python allows no handlers, it never asks to stop.
    """

    def __init__(self):
        self._signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    @property
    def preempted(self) -> bool:
        """Whether it was SIGTERM."""
        return self._signal == signal.SIGTERM

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._receive) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
