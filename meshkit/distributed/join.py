"""How a process joins the gang that runs its job.

environment: MESHKIT_* variables -> Gang -> jax.distributed.initialize, before jax starts -> all devices
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from meshkit.console import say
from meshkit.distributed.agreement import jax_runtime, sign_with
from meshkit.distributed.environment import (
    MTLS,
    NUM_PROCESSES,
    PROCESS_ID,
    SECRET,
    Gang,
    join_timeout_s,
    read_gang,
    split_address,
)
from meshkit.distributed.mtls import Certificates, read_certificates
from meshkit.distributed.roll_call import call_roll, session_key, wait_for_name
from meshkit.errors import ConfigError, RunError
from meshkit.redaction import redact_streams

# Machines of a large job start minutes apart, processes of one machine together. A process that is gone is noticed
# after the heartbeat; the end is a barrier, which must not keep the others waiting for long once one has failed.
_JOIN_S, _JOIN_HERE_S, _CONNECT_S, _HEARTBEAT_S, _SHUTDOWN_S = 300.0, 20.0, 60, 100, 120


def join_gang(environment: Mapping[str, str] | None = None, *, timeout_s: float | None = None) -> tuple[int, int]:
    """Joins the job that the environment describes, before jax starts; does nothing for one process, or a second time.

    Args:
        environment: in place of the process's own.
        timeout_s: for all processes to come; MESHKIT_JOIN_TIMEOUT by default, and without it 300 s, or 20 s where the
            coordinator is on a loopback address.

    Returns:
        This process's number, and how many there are.

    Raises:
        ConfigError: the environment is wrong (also: two processes with one number, a clock that is off, certificates
            that do not fit), or jax has already started.
        RunError: a process does not come, the coordinator cannot be reached, or its port is taken.
    """
    gang = read_gang(environment)
    state = jax_runtime()
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
    certificates = certificates_of(gang)
    mtls = _mtls_arguments(certificates)
    if timeout_s is None:
        timeout_s = join_timeout_s(environment, otherwise=_JOIN_HERE_S if gang.on_loopback else _JOIN_S)
    wait_for_name(gang, timeout_s, _log)
    bind = bind_address(gang.coordinator)
    if gang.process_id == 0 and not (gang.mtls or gang.secret or gang.on_loopback):
        _log(f"warning: neither {MTLS} nor {SECRET} is set: whoever reaches {gang.coordinator} can end this job")
    attendance = call_roll(gang, timeout_s, bind=bind, certificates=certificates, log=_log)
    if attendance.problem is not None:
        wrong = ConfigError if attendance.is_final else RunError
        raise wrong(attendance.problem, at="environment", hint="meshkit doctor --gang in place of the training")
    sign_with(session_key(gang, attendance))
    try:
        with _without_proxies(gang.coordinator):
            jax.distributed.initialize(
                coordinator_address=gang.coordinator,
                coordinator_bind_address=bind if gang.process_id == 0 else None,
                num_processes=gang.num_processes,
                process_id=gang.process_id,
                local_device_ids=gang.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=max(round(timeout_s), _CONNECT_S),  # all are there: it takes a second
                heartbeat_timeout_seconds=_HEARTBEAT_S,
                shutdown_timeout_seconds=_SHUTDOWN_S,
                **mtls,
            )
    except RuntimeError as error:  # what jaxlib raises
        does = "listen" if gang.process_id == 0 else "reach the coordinator"
        raise RunError(
            f"process {gang.process_id} of {gang.num_processes} cannot {does} on {gang.coordinator}: "
            f"{str(error).splitlines()[0]}",
            hint="a host that all machines reach, with a port that is free there",
        ) from None
    return gang.process_id, gang.num_processes


def certificates_of(gang: Gang) -> Certificates | None:
    """The certificates of this process, tried out; None where the job has none.

    Raises:
        ConfigError: they do not fit, or (process 0) are not of the coordinator's name.
    """
    if gang.mtls is None:
        return None
    return read_certificates(gang.mtls, coordinator_host=gang.address[0] if gang.process_id == 0 else None)


def is_first_process() -> bool:
    """Whether this process speaks for the job: process 0, or the only one. Does not start jax."""
    return not jax_runtime().process_id


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
    redact_streams()


def bind_address(coordinator: str) -> str | None:
    """Where process 0 listens: on the one interface that has the coordinator's address, not on all of them.

    None, which leaves it to jax (all interfaces), where the name's address is not of this machine (a proxy is in
    between), or is a loopback one that the other machines do not mean by it.
    """
    host, port = split_address(coordinator)
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0))
    except OSError:
        return None
    ip = str(address[0])
    if ip != host and host != "localhost" and (ip.startswith("127.") or ip == "::1"):
        return None
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"


def _mtls_arguments(certificates: Certificates | None) -> dict[str, Any]:
    """Arguments of jax.distributed.initialize; an older jax has no such arguments."""
    if certificates is None:
        return {}
    if "mtls_cert_file" not in inspect.signature(jax.distributed.initialize).parameters:
        raise ConfigError(
            f"{MTLS} is set, but jax {jax.__version__} cannot protect the meeting of the processes.",
            at="environment",
            hint="jax 0.11.2 or newer, or a network that others are not on and no --mtls",
        )
    return {
        "mtls_cert_file": str(certificates.certificate),
        "mtls_key_file": str(certificates.key),
        "mtls_ca_file": str(certificates.ca),
        "verify_secure_credentials": True,
    }


def _log(line: str) -> None:
    say(f"meshkit: {line}")


def _check_not_started(gang: Gang) -> None:
    from jax._src import xla_bridge

    if xla_bridge.backends_are_initialized():
        raise ConfigError(
            f"jax has already started, so process {gang.process_id} can no longer join the other "
            f"{gang.num_processes - 1}.",
            at="environment",
            hint="join_gang() before any other use of jax",
        )


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
            os.environ.update(no_grpc_proxy=",".join(filter(None, (direct, split_address(coordinator)[0]))))
