"""SIGINT and SIGTERM as a request that the training loop honours between two steps. Layer 4.

Of several processes all must stop after the same step, whichever of them was told: one that goes on waits for the
others in a collective for ever. jax's preemption service brings them to agree (`reached_preemption_sync_point`). It
takes SIGTERM as its notice, so this process leaves that signal to it, and turns SIGINT into one.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class StopRequest:
    """A context in which the first SIGINT or SIGTERM only sets a flag; a second SIGINT interrupts at once.

    Outside of the main thread, where Python allows no handlers, it never asks to stop.
    """

    def __init__(self):
        self._signal: int | None = None
        self._before: dict[int, Any] = {}
        self._several = jax.process_count() > 1

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    def agreed(self, first: int, last: int) -> bool:
        """Whether the job stops after this call of the step: the same answer on all processes.

        Args:
            first, last: the training steps of the call. All processes ask about every call, in order.
        """
        if not self._several:
            return self.requested
        # Every number is asked about, since the agreed one may be any of them.
        reached = [multihost_utils.reached_preemption_sync_point(step) for step in range(first, last + 1)]
        if any(reached) and self._signal is None:
            self._signal = signal.SIGTERM
        return any(reached)

    @property
    def preempted(self) -> bool:
        """Whether it was SIGTERM."""
        return self._signal == signal.SIGTERM

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            ours = (signal.SIGINT,) if self._several else (signal.SIGINT, signal.SIGTERM)
            self._before = {s: signal.signal(s, self._receive) for s in ours}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
        if self._several:
            os.kill(os.getpid(), signal.SIGTERM)
