"""Set how long a process may stay in a phase before it counts as stuck.

    --stall-timeout SECONDS, PHASE=SECONDS | MESHKIT_STALL_TIMEOUT -> read_limits -> Limits -> launcher, HangWatch, XLA

The limit is a fixed number of seconds, and does not adapt to the times of past steps. Phases that are long by nature
(such as a compilation, a checkpoint or the start) have six times this limit.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshkit.distributed.environment import END_S
from meshkit.errors import ConfigError
from meshkit.runs.phases import PHASES

STALL_TIMEOUT = "MESHKIT_STALL_TIMEOUT"
# This limit may be short: the kernel reports reliably that a process is stopped (state T), even on a busy machine.
_STOPPED_S, _STOPPED = 10.0, "stopped"
# A longer time between two checks is not counted: the checking process was stopped (job suspended), or had no CPU.
AWAY_S = 5.0
# Within this time after a limit, HangWatch has named the hang and ended all processes.
HANG_WATCH_S = 12.0
# Phases that are long by nature: their limit is `_PATIENCE` times that of a step.
_PATIENT = ("start", "compile", "restore", "init", "trace", "save")
_PATIENCE = 6.0
_NEVER = float("inf")


@dataclass(frozen=True)
class Limits:
    """When a process counts as stuck."""

    stall_s: float = 600.0
    """Limit in seconds for a phase of the loop (data, step, evaluate, check). The phases start, compile, restore, init,
    trace and save have six times this limit, and so has the time until the first pulse. `end` has 300 s. With 0 only
    the phases in `of_phase` have a limit."""
    of_phase: Mapping[str, float] = field(default_factory=dict)
    """Limits in seconds by phase, which replace the limit from `stall_s`; 0 for no limit."""
    stopped_s: float = _STOPPED_S
    """Limit in seconds for a process stopped by SIGSTOP, on Linux; elsewhere the phase's limit applies. 0: no limit."""
    silent_too: bool = True
    """Whether a process without any pulse can count as stuck in `start`. A user's own command need not have one."""

    def of(self, phase: str) -> float:
        """Return the seconds that a process may stay in a phase.

        Returns:
            The limit; infinity if it is set to 0.
        """
        by_nature = self.stall_s * (_PATIENCE if phase in _PATIENT else 1.0)
        if phase == "end" and self.stall_s:
            by_nature = END_S
        return self.of_phase.get(phase, by_nature) or _NEVER


def read_limits(texts: Sequence[str], *, own: bool = False, at: str = "--stall-timeout") -> Limits:
    """Return the limits from options: `SECONDS` for all phases, `PHASE=SECONDS` for one phase or for `stopped`.

    Args:
        texts: the options.
        own: whether they are for the user's own command, which need not report its phases.
        at: the name of the option or variable, for error messages.

    Raises:
        ConfigError: an option is no number from 0 on, or names no phase.
    """
    stall_s, of_phase = Limits.stall_s, {}
    for text in texts:
        phase, sign, number = text.rpartition("=")
        try:
            seconds = float(number)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds < _NEVER or (sign and phase not in (*PHASES, _STOPPED)):
            raise ConfigError(
                f"'{text:.80}' is no limit.",
                at=at,
                hint=f"SECONDS from 0 on, or PHASE=SECONDS for one of {', '.join(PHASES)}, {_STOPPED}",
            )
        if sign:
            of_phase[phase] = seconds
        else:
            stall_s = seconds
    stopped_s = of_phase.pop(_STOPPED, _STOPPED_S if stall_s else 0.0)
    return Limits(stall_s, of_phase, silent_too=not own, stopped_s=stopped_s)


def limits_of_environment() -> Limits:
    """Return the limits in MESHKIT_STALL_TIMEOUT, separated by spaces; without the variable the limit is 600 s.

    Raises:
        ConfigError: the variable holds something else.
    """
    return read_limits(os.environ.get(STALL_TIMEOUT, "").split(), at=STALL_TIMEOUT)
