"""The gang of processes that runs one job: what its environment says, and how a process joins it. Layer 2.

    MESHKIT_* variables -> Gang -> jax.distributed.initialize, before jax starts -> devices of all processes

Every launcher sets the same variables, and this is the one place that reads them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from meshkit.errors import ConfigError, RunError

COORDINATOR, NUM_PROCESSES, PROCESS_ID = "MESHKIT_COORDINATOR", "MESHKIT_NUM_PROCESSES", "MESHKIT_PROCESS_ID"
LOCAL_DEVICE_IDS, ATTEMPT = "MESHKIT_LOCAL_DEVICE_IDS", "MESHKIT_ATTEMPT"
_REQUIRED = (COORDINATOR, NUM_PROCESSES, PROCESS_ID)
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)

# Machines of a large job start minutes apart. A process that is gone is noticed after the heartbeat; the end is a
# barrier, which must not keep the others waiting for long once one has failed.
_JOIN_S, _HEARTBEAT_S, _SHUTDOWN_S = 300, 100, 120


@dataclass(frozen=True)
class Gang:
    """What the environment says of the job.

    Attributes:
        coordinator: host:port on which process 0 listens.
        num_processes: of the job.
        process_id: of this process, from 0.
        local_device_ids: the GPUs of its machine that it drives; None for all.
        attempt: restarts so far.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_device_ids: tuple[int, ...] | None = None
    attempt: int = 0


def read_gang(environment: Mapping[str, str] | None = None) -> Gang | None:
    """The job that the environment describes; None where it describes none, and this process is alone.

    Raises:
        ConfigError: a variable is missing, malformed, or contradicts another.
    """
    env = os.environ if environment is None else environment
    given = {name: env[name].strip() for name in (*_REQUIRED, LOCAL_DEVICE_IDS, ATTEMPT) if env.get(name, "").strip()}
    if not any(name in given for name in _REQUIRED):
        return None
    for name in _REQUIRED:
        if name not in given:
            present = next(other for other in _REQUIRED if other in given)
            raise ConfigError(
                f"{present} is set, but {name} is not: a job of several processes needs both.",
                at="environment",
                hint=f"{name}={_EXAMPLES[name]}, or none of {', '.join(_REQUIRED)} for one process",
            )
    _check_address(given[COORDINATOR])
    number, process = _whole(given, NUM_PROCESSES), _whole(given, PROCESS_ID)
    if number < 1:
        raise _bad(given, NUM_PROCESSES, "is no number of processes", "1 or more")
    if process >= number:
        problem = f"is none of the {number} processes of {NUM_PROCESSES}, which count from 0"
        raise _bad(given, PROCESS_ID, problem, f"0 to {number - 1}")
    attempt = _whole(given, ATTEMPT) if ATTEMPT in given else 0
    return Gang(given[COORDINATOR], number, process, _devices(given), attempt)


def join_gang(environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Joins the job that the environment describes, before jax starts; does nothing for one process, or a second time.

    Returns:
        This process's number, and how many there are.

    Raises:
        ConfigError: the environment is wrong, or jax has already started.
        RunError: the coordinator cannot be reached, or its port is taken.
    """
    gang = read_gang(environment)
    state = _state()
    if state.client is not None:
        mine = int(state.process_id), int(state.num_processes)
        if gang is not None and mine != (gang.process_id, gang.num_processes):
            raise ConfigError(
                f"the environment says process {gang.process_id} of {gang.num_processes}, but jax.distributed has "
                f"started as process {mine[0]} of {mine[1]}.",
                at="environment",
                hint=f"either {PROCESS_ID} and {NUM_PROCESSES}, or jax.distributed.initialize",
            )
        return mine
    if gang is None or gang.num_processes == 1:
        return 0, 1
    _check_not_started(gang)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        with _without_proxies(gang.coordinator):
            jax.distributed.initialize(
                coordinator_address=gang.coordinator,
                num_processes=gang.num_processes,
                process_id=gang.process_id,
                local_device_ids=gang.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=_JOIN_S,
                heartbeat_timeout_seconds=_HEARTBEAT_S,
                shutdown_timeout_seconds=_SHUTDOWN_S,
            )
    except RuntimeError as error:  # what jaxlib raises
        does = "listen" if gang.process_id == 0 else "reach the coordinator"
        raise RunError(
            f"process {gang.process_id} of {gang.num_processes} cannot {does} on {gang.coordinator}: "
            f"{str(error).splitlines()[0]}",
            hint="a host that all machines reach, with a port that is free there",
        ) from None
    return gang.process_id, gang.num_processes


def is_first_process() -> bool:
    """Whether this process speaks for the job: process 0, or the only one. Does not start jax."""
    return not _state().process_id


def keep_stdout() -> None:
    """Leaves standard output to this program's own prints, in a job of several processes.

    Gloo prints a line to it for every group of processes that it connects; libraries below Python get stderr instead.
    """
    if read_gang() is None:
        return
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(ours, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)


_EXAMPLES = {COORDINATOR: "10.0.0.1:12345", NUM_PROCESSES: "2", PROCESS_ID: "0"}


def _check_address(text: str) -> None:
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ConfigError(
            f"{COORDINATOR} is '{text[:80]}', not host:port.",
            at="environment",
            hint="10.0.0.1:12345, host0:12345 or [::1]:12345",
        )


def _whole(given: Mapping[str, str], name: str) -> int:
    if not _NUMBER.fullmatch(given[name]):
        raise _bad(given, name, "is no whole number", _EXAMPLES.get(name, "0"))
    return int(given[name])


def _devices(given: Mapping[str, str]) -> tuple[int, ...] | None:
    if LOCAL_DEVICE_IDS not in given:
        return None
    parts = [part.strip() for part in given[LOCAL_DEVICE_IDS].split(",")]
    if not all(_NUMBER.fullmatch(part) for part in parts):
        raise _bad(given, LOCAL_DEVICE_IDS, "is no list of numbers", "0,1,2,3")
    ids = tuple(map(int, parts))
    if len(set(ids)) < len(ids):
        raise _bad(given, LOCAL_DEVICE_IDS, "names a device twice", ",".join(map(str, dict.fromkeys(ids))))
    return ids


def _bad(given: Mapping[str, str], name: str, problem: str, hint: str) -> ConfigError:
    return ConfigError(f"{name}={given[name][:80]} {problem}.", at="environment", hint=f"{name}={hint}")


def _check_not_started(gang: Gang) -> None:
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise ConfigError(
            f"jax has already started, so process {gang.process_id} can no longer join the other "
            f"{gang.num_processes - 1}.",
            at="environment",
            hint="join_gang() before any other use of jax",
        )


def _state() -> Any:
    from jax._src import distributed

    return distributed.global_state


@contextmanager
def _without_proxies(coordinator: str) -> Iterator[None]:
    """Without HTTP proxies, which gRPC would send the connection through; afterwards they are back, for other hosts."""
    found = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(found)
        if found:  # a connection that is made again reads them again
            direct = found.get("no_grpc_proxy") or found.get("no_proxy") or found.get("NO_PROXY", "")
            host = coordinator.rsplit(":", 1)[0].strip("[]")
            os.environ.update(no_grpc_proxy=",".join(filter(None, (direct, host))))
