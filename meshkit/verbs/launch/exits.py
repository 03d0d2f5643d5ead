"""What the end of a process means for its gang: which ends are final, and which a restart may mend.

exit code or signal -> Ending -> supervisor, and the batch scripts and pod policies that `render` writes
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

DONE, BUG, USER_ERROR, CONDITION, RUN_FAILED, PREEMPTED, INTERRUPTED = 0, 1, 2, 3, 4, 75, 130
# Nothing that a restart changes: the experiment is wrong, a condition is not met, a person stopped it.
FINAL = (DONE, USER_ERROR, CONDITION, INTERRUPTED)

_MEANINGS = {
    DONE: "done",
    BUG: "an exception; its traceback is in the log",
    USER_ERROR: "what the user gave is wrong",
    CONDITION: "a condition the user asked for is not met",
    RUN_FAILED: "the run failed and may be restarted",
    PREEMPTED: "preempted; a checkpoint is saved",
    INTERRUPTED: "interrupted",
}
_SIGNALS = {
    signal.SIGKILL: "out of memory, or killed from outside",
    signal.SIGABRT: "a fatal error of jax or NCCL, often because another process is gone",
    signal.SIGBUS: "often a full /dev/shm",
}


@dataclass(frozen=True)
class Ending:
    """How a process ended.

    Attributes:
        code: its exit code, or minus the signal that killed it.
    """

    code: int

    @property
    def is_final(self) -> bool:
        """Whether a restart cannot help, or is not wanted."""
        return self.code in FINAL

    @property
    def is_restartable(self) -> bool:
        """Whether this launcher starts the gang again. Not after a preemption: the machine is about to be taken."""
        return not self.is_final and self.code != PREEMPTED

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code} ({_MEANINGS.get(self.code, 'unknown')})"
        try:
            number = signal.Signals(-self.code)
        except ValueError:
            return f"killed by signal {-self.code}"
        cause = _SIGNALS.get(number)
        return f"killed by {number.name}" + (f" ({cause})" if cause else "")
