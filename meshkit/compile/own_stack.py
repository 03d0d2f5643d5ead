"""A program that is the same wherever it is asked for.

jax writes the lines of source that led to an operation into the program, those of its callers among them, and the cache
of compiled programs tells programs apart by every byte. An experiment planned by the command line, by a search or in a
notebook is traced on a stack of its own, so that what one of them compiled serves the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


def on_own_stack[Result](work: Callable[[], Result]) -> Result:
    """What work returns or raises, run in a thread, where no frame of a caller is below it.

    Settings of jax that hold for one thread (`jax.set_mesh`, `jax.enable_x64` as contexts) are not passed on. Ctrl-C is
    heard at once; what the thread still does ends with the process.
    """
    returned: list[Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=run, name="meshkit-plan", daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return returned[0]
