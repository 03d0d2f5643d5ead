"""Let a standby process import its modules and wait, so that it can replace a training process soon after a failure.

    launcher, once the processes train -> the same command with MESHKIT_STANDBY -> imports -> waits for its turn
    a failure -> the launcher writes a byte for each process -> the process goes on like a newly started one
    the launcher ends -> the pipe closes -> the process ends

Until its turn comes, the process uses no device, does not join the job, and reads neither the experiment nor the user's
code. So all of this behaves, and fails, in the same way as in a process that was not on standby.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading
import time
from contextlib import suppress

STANDBY_VARIABLE = "MESHKIT_STANDBY"
_LOWEST_PRIORITY = 19
_turn_came_at: float | None = None


def wait_for_turn(module: str) -> None:
    """Import a module, and return when the launcher lets this process go on. Return at once if it is not on standby.

    The import must not slow the training, so it runs with low priority. It runs in a thread of its own, because a
    thread cannot raise its priority again.

    Args:
        module: the module, which takes long to import. Its exceptions are ignored here; a later import raises them.
    """
    global _turn_came_at
    descriptor = os.environ.pop(STANDBY_VARIABLE, None)
    if descriptor is None:
        return
    importing = threading.Thread(target=_import, args=(module,), name="meshkit-standby", daemon=True)
    importing.start()
    with open(int(descriptor), "rb", buffering=0) as turn:
        if not turn.read(1):
            os._exit(0)  # the launcher has ended, or needs no further attempt
    _turn_came_at = time.monotonic()
    importing.join()


def turn_came_at() -> float | None:
    """Return when this process's wait ended, by `time.monotonic`; None if it was not on standby."""
    return _turn_came_at


def _import(module: str) -> None:
    if sys.platform == "linux":  # elsewhere this would set the priority of the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    with suppress(Exception):
        importlib.import_module(module)
    # Keep imported objects out of garbage collections. Otherwise the tracing of jax, which makes many objects and so
    # causes many collections, takes a fifth longer.
    gc.collect()
    gc.freeze()
