"""The environment contract: the variables by which every launcher tells a process what job it is part of.

    launcher -> Gang.emit() -> MESHKIT_* variables -> read_gang() -> Gang -> jax.distributed.initialize

SLURM, OpenMPI, PMIx, Kubernetes and torchrun set variables of their own. They complete the contract where it leaves
something out, and where both say something, they agree or `read_gang` stops.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshkit.distributed.launchers import (
    ATTEMPT,
    CONTRACT,
    COORDINATOR,
    LOCAL_DEVICE_IDS,
    NUM_PROCESSES,
    PROCESS_ID,
    Claim,
    Said,
    detect,
)
from meshkit.distributed.mtls import MTLS
from meshkit.errors import ConfigError

JOIN_TIMEOUT = "MESHKIT_JOIN_TIMEOUT"
_REQUIRED = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
_EXAMPLES = {COORDINATOR: "10.0.0.1:12345", NUM_PROCESSES: "2", PROCESS_ID: "0"}


@dataclass(frozen=True)
class Gang:
    """What the environment says of the job, to one of its processes.

    Attributes:
        coordinator: host:port on which process 0 listens.
        num_processes: of the job.
        process_id: of this process, from 0.
        local_device_ids: the GPUs of its machine that it drives; None for all.
        attempt: restarts so far.
        mtls: folder of the certificates by which the processes know each other; None meets in the open.
        in_kubernetes: whether this is a pod, whose coordinator gets its name when it starts.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None
    attempt: int = 0
    mtls: str | None = None
    in_kubernetes: bool = field(default=False, compare=False)

    def emit(self) -> dict[str, str]:
        """The variables that `read_gang` reads back as this gang."""
        variables = {
            COORDINATOR: self.coordinator,
            NUM_PROCESSES: str(self.num_processes),
            PROCESS_ID: str(self.process_id),
            ATTEMPT: str(self.attempt),
        }
        if self.local_device_ids is not None:
            variables[LOCAL_DEVICE_IDS] = ",".join(map(str, self.local_device_ids))
        if self.mtls is not None:
            variables[MTLS] = self.mtls
        return variables


def read_gang(environment: Mapping[str, str] | None = None) -> Gang | None:
    """The job that the environment describes; None where it describes none, and this process is alone.

    Raises:
        ConfigError: a variable is missing, malformed, or contradicts another.
    """
    env = os.environ if environment is None else environment
    ours = {name: Said(name, env[name].strip()) for name in CONTRACT if env.get(name, "").strip()}
    claim = detect(env)
    if claim is not None:
        _check_agreement(ours, claim)
    said = {**(claim.said if claim else {}), **ours}
    if not _is_a_job(ours, claim):
        return None
    for name in _REQUIRED:
        if name not in said:
            raise _missing(name, said, claim)
    check_address(said[COORDINATOR].value)
    number, process = _whole(said[NUM_PROCESSES]), _whole(said[PROCESS_ID])
    if number < 1:
        raise _bad(said[NUM_PROCESSES], "is no number of processes", "1 or more")
    if process >= number:
        problem = f"is none of the {number} processes of {said[NUM_PROCESSES].variable}, which count from 0"
        raise _bad(said[PROCESS_ID], problem, f"0 to {number - 1}")
    attempt = _whole(said[ATTEMPT]) if ATTEMPT in said else 0
    return Gang(
        said[COORDINATOR].value,
        number,
        process,
        _devices(said.get(LOCAL_DEVICE_IDS)),
        attempt,
        mtls=env.get(MTLS, "").strip() or None,
        in_kubernetes=bool(env.get("KUBERNETES_SERVICE_HOST")),
    )


def join_timeout_s(environment: Mapping[str, str] | None = None, *, otherwise: float) -> float:
    """Seconds that a process waits for the others: what MESHKIT_JOIN_TIMEOUT says.

    Raises:
        ConfigError: it is no number of seconds.
    """
    env = os.environ if environment is None else environment
    text = env.get(JOIN_TIMEOUT, "").strip()
    if not text:
        return otherwise
    if not _NUMBER.fullmatch(text) or not int(text):
        raise _bad(Said(JOIN_TIMEOUT, text), "is no whole number of seconds", "300")
    return float(text)


def check_address(text: str, *, at: str = "environment", name: str = COORDINATOR) -> None:
    """Stops unless the text is host:port.

    Raises:
        ConfigError: it is not.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ConfigError(
            f"{name} is '{text[:80]}', not host:port.", at=at, hint="10.0.0.1:12345, host0:12345 or [::1]:12345"
        )


def _is_a_job(ours: Mapping[str, Said], claim: Claim | None) -> bool:
    """Whether anything says that there are other processes. An Indexed Job of Kubernetes may be one run in each pod."""
    if any(name in ours for name in _REQUIRED):
        return True
    if claim is None or claim.launcher == "Kubernetes":
        return False
    return NUM_PROCESSES not in claim.said or _whole(claim.said[NUM_PROCESSES]) > 1


def _check_agreement(ours: Mapping[str, Said], claim: Claim) -> None:
    for name in (NUM_PROCESSES, PROCESS_ID):
        mine, theirs = ours.get(name), claim.said.get(name)
        if mine is not None and theirs is not None and _whole(mine) != _whole(theirs):
            raise ConfigError(
                f"{mine}, but {theirs} ({claim.launcher}): they are not of the same job.",
                at="environment",
                hint=f"one of the two; `env -u {theirs.variable} meshkit ...` if {claim.launcher} did not start it",
            )


def _missing(name: str, said: Mapping[str, Said], claim: Claim | None) -> ConfigError:
    present = next(said[other].variable for other in _REQUIRED if other in said)
    message = f"{present} is set, but {name} is not: a job of several processes needs both."
    hint = f"{name}={_EXAMPLES[name]}, or none of {', '.join(_REQUIRED)} for one process"
    if claim is not None:
        message = f"{claim.launcher} started this process ({present} is set), and nothing says {name}."
        hint = f"{name}={_EXAMPLES[name]}, or `meshkit launch`, which sets it"
    return ConfigError(message, at="environment", hint=hint)


def _whole(said: Said) -> int:
    if not _NUMBER.fullmatch(said.value):
        raise _bad(said, "is no whole number", _EXAMPLES.get(said.variable, "0"))
    return int(said.value)


def _devices(said: Said | None) -> tuple[int, ...] | None:
    if said is None:
        return None
    parts = [part.strip() for part in said.value.split(",")]
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise _bad(said, "is no list of numbers", "0,1,2,3")
    ids = tuple(map(int, parts))
    if len(set(ids)) < len(ids):
        raise _bad(said, "names a device twice", ",".join(map(str, dict.fromkeys(ids))))
    return ids


def _bad(said: Said, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"{said} {problem}.", at="environment", hint=f"{said.variable}={hint}")
