"""How long a process may stay in a phase before it counts as stuck: one number, which options and the environment set.

    --stall-timeout SECONDS, PHASE=SECONDS | MESHKIT_STALL_TIMEOUT -> read_limits -> Limits -> launcher, HangWatch, XLA

The limit is a number and learns nothing: a slow step is called a hang only where it takes longer than that. What takes
long by its nature (a compilation, a checkpoint, a start) has six times as much.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshkit.distributed.environment import END_S
from meshkit.errors import ConfigError
from meshkit.runs.phases import PHASES

STALL_TIMEOUT = "MESHKIT_STALL_TIMEOUT"
# A process that somebody has stopped says so itself (its state is T), however busy the machine is.
_STOPPED_S, _STOPPED = 10.0, "stopped"
# Longer between two looks: the one who looks was stopped (a job that is suspended), or had no CPU.
AWAY_S = 5.0
# What takes long by its nature: the limit of a step does not hold there.
_PATIENT = ("start", "compile", "restore", "init", "trace", "save")
_PATIENCE = 6.0
_NEVER = float("inf")


@dataclass(frozen=True)
class Limits:
    """When a process is called stuck."""

    stall_s: float = 600.0
    """Seconds in one phase of the loop (data, step, evaluate, check); six times that for start, compile, restore, init,
    trace and save, and for the first pulse to come; the end has 300 s. 0 watches nothing that has no limit of its
    own."""
    of_phase: Mapping[str, float] = field(default_factory=dict)
    """Seconds in a phase, in place of the above; 0 for no limit."""
    stopped_s: float = _STOPPED_S
    """Seconds in the state that SIGSTOP brings; 0 for no limit. Seen on Linux alone; elsewhere it is the phase's."""
    silent_too: bool = True
    """Whether one that has never said what it does can be stuck in its start; a command of the user's need not."""

    def of(self, phase: str) -> float:
        """Return the seconds that a process may stay in a phase.

        Returns:
            Infinity where the limit is 0.
        """
        by_nature = self.stall_s * (_PATIENCE if phase in _PATIENT else 1.0)
        if phase == "end" and self.stall_s:
            by_nature = END_S
        return self.of_phase.get(phase, by_nature) or _NEVER


def read_limits(texts: Sequence[str], *, own: bool = False, at: str = "--stall-timeout") -> Limits:
    """Return the limits that options give: `SECONDS` for all phases, `PHASE=SECONDS` for one or for `stopped`.

    Args:
        texts: the options.
        own: whether they are of a command of the user's, which need not say what it does.
        at: what gives them, for an error.

    Raises:
        ConfigError: one is no number from 0 on, or of no phase.
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


def limits_of_environment(environment: Mapping[str, str] | None = None) -> Limits:
    """Return the limits that MESHKIT_STALL_TIMEOUT gives, with a space between several; 600 s without it.

    Args:
        environment: in place of the process's own.

    Raises:
        ConfigError: it says something else.
    """
    env = os.environ if environment is None else environment
    return read_limits(env.get(STALL_TIMEOUT, "").split(), at=STALL_TIMEOUT)
