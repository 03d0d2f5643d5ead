"""How a process leaves the gang that it is part of, when it fails or another one has.

exception or exit code -> is it one of several? -> gone at once, so that nobody waits for it
"""

from __future__ import annotations

import os
import sys

from meshkit.console import say
from meshkit.distributed.environment import Gang, read_gang
from meshkit.errors import DONE, PREEMPTED, ConfigError, RunError


def leave_gang(code: int) -> None:
    """Ends this process at once if it failed and is one of several; otherwise does nothing.

    Python's own way out waits for the others at jax's last barrier, and they wait for this process in a collective.
    """
    if code in (DONE, PREEMPTED) or _gang_of_several() is None:  # with these, all processes end together
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def say_lost_process(error: Exception) -> int:
    """Says that another process of the job is gone, where that is what jax's error means.

    Returns:
        The exit code 4, which a supervisor restarts; 0 where the error means something else, and nothing is said.
    """
    signs = ("Gloo", "NCCL", "coordination service", "heartbeat", "Connection reset", "Socket closed", "UNAVAILABLE")
    gang = _gang_of_several()
    if gang is None or type(error).__name__ != "JaxRuntimeError" or not any(sign in str(error) for sign in signs):
        return 0
    lost = RunError(
        f"process {gang.process_id} of {gang.num_processes} has lost another one: {str(error).splitlines()[0]}",
        hint="the logs of the others, one of which failed first; `meshkit launch` restarts them all",
    )
    say(f"meshkit: {lost.render()}")
    return lost.exit_code


def _gang_of_several() -> Gang | None:
    """The job that this process is part of; None where it is alone, or cannot tell."""
    try:
        gang = read_gang()
    except ConfigError:
        return None
    return gang if gang is not None and gang.num_processes > 1 else None
