"""SIGINT and SIGTERM: honoured at once before the first step, and between two steps from then on.

    SIGTERM in start, compile, restore -> exit 75 now: nothing has been made since the last checkpoint
    SIGTERM in the training loop       -> all processes stop after the same step, save, exit 75

Of several processes all must stop after the same step, whichever of them got the signal: one that goes on waits for
the others in a collective for ever. jax's preemption service brings them to agree (`reached_preemption_sync_point`). It
takes SIGTERM as its notice, so from the first step on this process leaves that signal to it, and turns SIGINT into one.
Before that the service is off: its notice would wait until a compilation of minutes is over.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

from meshkit.distributed.agreement import jax_runtime
from meshkit.distributed.environment import read_gang
from meshkit.errors import INTERRUPTED, PREEMPTED, RunError
from meshkit.runs.phases import PULSE_VARIABLE

_SERVICE = "jax_enable_preemption_service"


class Preempted(RunError):
    """The run got SIGTERM and has saved what there was to save; the same command resumes it."""

    exit_code = PREEMPTED


class StopRequest:
    """A context around a run. Until `arm`, a signal ends it; after that the first one only sets a flag.

    A second SIGINT interrupts at once. Outside of the main thread, where Python allows no handlers, it never asks to
    stop.
    """

    def __init__(self):
        self._signal: int | None = None
        self._armed = False
        self._before: dict[int, Any] = {}
        gang = read_gang()
        self._several = gang is not None and gang.num_processes > 1
        self._supervised = self._several or PULSE_VARIABLE in os.environ
        self._wakes: tuple[socket.socket, socket.socket] | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._signal is not None

    def arm(self) -> None:
        """The training loop begins: from now on there is something to save. All processes call it."""
        self._several = jax.process_count() > 1
        self._armed = True
        self._stop_waking()
        if self._several:
            _start_preemption_service()
            if self.requested:  # in the moment before
                os.kill(os.getpid(), signal.SIGTERM)

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
        if self._several:
            jax.config.update(_SERVICE, False)
        if threading.current_thread() is threading.main_thread():
            self._before = {s: signal.signal(s, self._receive) for s in (signal.SIGINT, signal.SIGTERM)}
            if self._supervised:
                self._start_waking()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_waking()
        for number, handler in self._before.items():
            if number == signal.SIGINT or not (self._several and self._armed):  # jax's handler stays
                signal.signal(number, handler)
        if self._several:
            jax.config.update(_SERVICE, True)

    def _receive(self, number: int, _frame: object) -> None:
        if not self._armed:
            if self._supervised:  # the other thread ends this process
                return
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise Preempted("stopped by SIGTERM before the first step; the last checkpoint, if any, has everything.")
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number
        if self._several and number == signal.SIGINT:
            os.kill(os.getpid(), signal.SIGTERM)

    def _start_waking(self) -> None:
        """Signals reach a thread at once; the main one takes them in only when XLA has compiled."""
        self._wakes = reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._leave_at_once, args=(reader,), name="meshkit-signals", daemon=True).start()

    def _stop_waking(self) -> None:
        if self._wakes is not None:
            signal.set_wakeup_fd(-1)
            self._wakes[1].close()  # which ends the thread
            self._wakes = None

    def _leave_at_once(self, reader: socket.socket) -> None:
        """Ends this process when a signal comes before the first step. Python's own way out waits for the others."""
        with reader:
            while data := reader.recv(64):
                number = next((n for n in data if n in (signal.SIGINT, signal.SIGTERM)), None)
                if number is None or self._armed:
                    continue
                with suppress(OSError, ValueError):
                    name = signal.Signals(number).name
                    print(f"meshkit: stopped by {name} before the first step: nothing to save.", file=sys.stderr)
                    sys.stderr.flush()
                os._exit(PREEMPTED if number == signal.SIGTERM else INTERRUPTED)


def _start_preemption_service() -> None:
    """What `jax.distributed.initialize` does last, unless the service is off or it was done before."""
    jax.config.update(_SERVICE, True)
    if jax_runtime().preemption_sync_manager is None:
        jax_runtime().initialize_preemption_sync_manager()
