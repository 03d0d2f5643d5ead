"""A process that waits to take the place of one that may fail: it has imported what it needs, and no more.

    launcher, once an attempt trains -> the same command with MESHKIT_STANDBY -> imports -> waits for its turn
    a failure -> a byte for each process -> it goes on as one that has just been started
    the launcher ends -> the pipe ends, and so does the process

Until its turn comes it touches no device, joins nobody, and reads neither the experiment nor code of the user's. So
what these do, and what is wrong with them, is the same as in a process that was not started beforehand.
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
    """Imports a module and returns once the launcher lets this process go on; at once where it waits for none.

    The import runs in a thread, because a thread that has given up its priority cannot take it back, and the training
    must not pay for it.

    Args:
        module: what takes long to import. What it raises is raised by who imports it afterwards.
    """
    global _turn_came_at
    descriptor = os.environ.pop(STANDBY_VARIABLE, None)
    if descriptor is None:
        return
    importing = threading.Thread(target=_import, args=(module,), name="meshkit-standby", daemon=True)
    importing.start()
    with open(int(descriptor), "rb", buffering=0) as turn:
        if not turn.read(1):
            os._exit(0)  # the launcher is gone, or needs no other attempt
    _turn_came_at = time.monotonic()
    importing.join()


def turn_came_at() -> float | None:
    """When this process was let go, by `time.monotonic`; None where it did not wait."""
    return _turn_came_at


def _import(module: str) -> None:
    if sys.platform == "linux":  # elsewhere it would be the priority of the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
    with suppress(Exception):
        importlib.import_module(module)
    # What was imported stays. Tracing, which makes many objects, takes a fifth longer where each collection visits it.
    gc.collect()
    gc.freeze()
