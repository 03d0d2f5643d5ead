"""Join this process to its job with jax.distributed, and let processes agree on values other than arrays.

    join_gang: MESHKIT_* variables -> Gang -> jax.distributed.initialize, before jax starts -> all devices
    Agreement: a value from each process -> process 0 decides -> every process has the same answer

An agreement works from any thread. It uses jax's coordination service and never a collective on devices, because a
background thread commits a checkpoint while the devices train. Every wait has a limit, and the error names the
processes that did not answer.

Without certificates the service accepts messages from anybody who reaches its port. If the processes share a key
(`sign_with`), they therefore sign their messages with it and store them under names derived from it. Nobody else can
compute such a name or write a message that a process believes. If a stored message disappears, its process stores it
again while it waits for the answer.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import jax

from meshkit.console import say
from meshkit.distributed.certificates import Certificates, read_certificates
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
from meshkit.distributed.roll_call import bind_address, call_roll, named, session_key, wait_for_name
from meshkit.errors import ConfigError, RunError
from meshkit.redaction import redact_streams

# Machines of a large job start minutes apart, but processes of one machine start together. A lost process is noticed
# after the heartbeat timeout. The shutdown is a barrier; its timeout limits the wait for a process that has failed.
_JOIN_S, _JOIN_HERE_S, _CONNECT_S, HEARTBEAT_S, _SHUTDOWN_S = 300.0, 20.0, 60, 100, 120
# Process 0 may wait for the whole limit until it has all messages, so the others wait this much longer for its answer.
ANSWER_S = 60.0
AGAIN_S = 10.0  # a process stores its message again at this interval while it waits for the answer
_SIGNATURE = hashlib.sha256().digest_size * 2
_key: bytes | None = None


def join_gang(environment: Mapping[str, str] | None = None, *, timeout_s: float | None = None) -> tuple[int, int]:
    """Join the job that the environment describes, before jax starts.

    The call does nothing in a job of one process, or if this process has already joined.

    Args:
        environment: the variables; None for those of this process.
        timeout_s: the time limit for all processes to connect. The default is MESHKIT_JOIN_TIMEOUT; if that is not
            set, 300 s, or 20 s for a coordinator on a loopback address.

    Returns:
        The number of this process, and the number of processes.

    Raises:
        ConfigError: the environment is wrong, two processes have one number, a clock is off, the certificates are
            invalid, or jax has already started.
        RunError: a process does not connect, the coordinator cannot be reached, or its port is taken.
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
                initialization_timeout=max(round(timeout_s), _CONNECT_S),  # takes about 1 s, because all are there
                heartbeat_timeout_seconds=HEARTBEAT_S,
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
    """Return the certificates of this process after a test; None if the job has none.

    Raises:
        ConfigError: they are invalid or, on process 0, do not have the coordinator's name.
    """
    if gang.mtls is None:
        return None
    return read_certificates(gang.mtls, coordinator_host=gang.address[0] if gang.process_id == 0 else None)


def is_first_process() -> bool:
    """Return whether this is process 0, or the only process. Does not start jax."""
    return not jax_runtime().process_id


def keep_stdout() -> None:
    """Reserve standard output for Python's own prints, in a job of several processes.

    Gloo prints a line for every group of processes that it connects. Native libraries such as Gloo now print to stderr.
    """
    if read_gang() is None:
        return
    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(ours, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
    redact_streams()


def _mtls_arguments(certificates: Certificates | None) -> dict[str, Any]:
    """Return the TLS arguments of jax.distributed.initialize, or raise ConfigError if this jax is too old for them."""
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
    """Remove the variables of HTTP proxies in this context, since gRPC would use a proxy. Restore them afterwards."""
    found = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(found)
        if found:  # gRPC reads the variables again when it reconnects, so exempt the coordinator from the proxy
            direct = found.get("no_grpc_proxy") or found.get("no_proxy") or found.get("NO_PROXY", "")
            os.environ.update(no_grpc_proxy=",".join(filter(None, (direct, split_address(coordinator)[0]))))


def sign_with(key: bytes | None) -> None:
    """Sign all further messages of this process with a key, and accept only such messages; None turns this off."""
    global _key
    _key = key


class Forged(RunError):
    """A stored message does not come from the process in whose place it is stored."""


class Agreement:
    """A channel between the processes of a job, for one purpose.

    Args:
        name: the same in all processes, and unique to this purpose.
    """

    def __init__(self, name: str):
        self._prefix = f"meshkit/{name}"
        state = jax_runtime()  # not jax.process_index(), which would start the backends
        self.rank, self.size = int(state.process_id or 0), int(state.num_processes or 1)

    def reach(self, topic: str, mine: Any, decide: Callable[[list[Any]], Any], *, timeout_s: float) -> Any:
        """Return process 0's decision on the values of all processes; all processes get the same answer.

        Args:
            topic: a name that is used once. Topics may be used in any order and from any thread.
            mine: the value of this process; JSON.
            decide: the values by process number -> the answer; JSON. It runs only in process 0.
            timeout_s: the time limit for all processes to send their values.

        Raises:
            ConfigError: `decide` has raised it.
            RunError: a process was late, `decide` failed, process 0 gave no answer, or a message was forged.
        """
        if self.size == 1:
            return decide([mine])
        said, answer = f"{self._prefix}/{topic}/said", f"{self._prefix}/{topic}/answer"
        client = jax_runtime().client
        if self.rank != 0:
            _set(client, said, self.rank, mine)
            again = lambda: _set(client, said, self.rank, mine)
            decided = _get(client, answer, 0, timeout_s + ANSWER_S, again)
        else:
            decided = self._decide(client, said, mine, decide, timeout_s)
            _set(client, answer, 0, decided)
            client.key_value_delete(_folder(said))
        match decided:
            case {"answer": decision}:
                return decision
            case {"error": str(problem)}:
                raise RunError(problem)
            case {"wrong": [str(problem), str() | None as at, str() | None as hint]}:
                raise ConfigError(problem, at=at, hint=hint)
        raise _forged(answer, 0)

    def announce(self, topic: str, word: str = "yes") -> bool:
        """Announce a topic with an unsigned word; return whether this process is the first to do so."""
        try:
            jax_runtime().client.key_value_set(_named(f"{self._prefix}/{topic}"), word)
        except Exception:  # another process was first, or the service is gone
            return False
        return True

    def heard(self, topic: str) -> str:
        """Return the word with which a process has announced a topic, without waiting; "" if none has."""
        try:
            return jax_runtime().client.key_value_try_get(_named(f"{self._prefix}/{topic}"))
        except Exception:  # nobody has, or the service is gone
            return ""

    def tell(self, topic: str, mine: Any) -> None:
        """Store a value (JSON) that other processes can `gather`, without waiting."""
        _set(jax_runtime().client, f"{self._prefix}/{topic}", self.rank, mine)

    def gather(self, topic: str, *, timeout_s: float) -> list[Any]:
        """Return the value of every process by number; None for a late or forged value."""
        ends, found = time.monotonic() + timeout_s, []
        for rank in range(self.size):
            try:
                left_s = max(0.001, ends - time.monotonic())
                found.append(_get(jax_runtime().client, f"{self._prefix}/{topic}", rank, left_s))
            except RunError:
                found.append(None)
        return found

    def _decide(
        self, client: Any, said: str, mine: Any, decide: Callable[[list[Any]], Any], timeout_s: float
    ) -> dict[str, Any]:
        """Return process 0's answer: its decision on all values, or an error for the others, who wait for it."""
        ends, every, missing, problem = time.monotonic() + timeout_s, [mine], [], ""
        for rank in range(1, self.size):
            left_s = max(0.001, ends - time.monotonic())
            try:
                every.append(_get(client, said, rank, left_s))
            except Forged as error:
                problem = error.message
            except RunError:
                missing.append(rank)
        if problem:
            return {"error": problem}
        if missing:
            noun = "process" if len(missing) == 1 else "processes"
            return {"error": f"{noun} {named(missing)} of {self.size} did not answer within {timeout_s:.0f} s."}
        try:
            return {"answer": decide(every)}
        except ConfigError as error:  # the same exit code for all
            return {"wrong": [error.message, error.at, error.hint]}
        except Exception as error:  # the others must not wait for an answer that never comes
            return {"error": f"process 0 failed: {error}"}


def _set(client: Any, topic: str, rank: int, word: Any) -> None:
    """Store a value, signed if there is a key, and overwrite any message in its place."""
    text = json.dumps(word)
    client.key_value_set(word_name(topic, rank), _sign(topic, rank, text) + text, allow_overwrite=True)


def _get(client: Any, topic: str, rank: int, timeout_s: float, again: Callable[[], None] | None = None) -> Any:
    """Wait for the value of a process, and call `again` every `AGAIN_S` seconds meanwhile.

    Raises:
        Forged: the stored message is not from this process.
        RunError: there is no message in time.
    """
    ends, text = time.monotonic() + timeout_s, None
    while text is None:
        began = time.monotonic()
        wait_s = max(0.001, min(ends - began, AGAIN_S if again else timeout_s))
        try:
            text = client.blocking_key_value_get(word_name(topic, rank), round(wait_s * 1000))
        except Exception as error:  # jaxlib raises the same class for a timeout and for a lost service
            passed, why = time.monotonic() - began > 0.9 * wait_s, str(error).splitlines()[0]
            if again is None or not passed or time.monotonic() >= ends:
                raise RunError(f"process {rank} gives no answer within {timeout_s:.0f} s: {why}") from None
            with suppress(Exception):  # if the service is gone, the next read reports it
                again()
    length = _SIGNATURE if _key is not None else 0
    signature, text = text[:length], text[length:]
    try:
        if hmac.compare_digest(signature.encode(), _sign(topic, rank, text).encode()):
            return json.loads(text)
    except (ValueError, RecursionError):
        pass
    raise _forged(topic, rank)


def _forged(topic: str, rank: int) -> Forged:
    return Forged(
        f"somebody who is no process of this job has written in the place of process {rank} ({topic}).",
        hint="mutual TLS, which keeps others off the coordinator's port: `meshkit launch` with --mtls",
    )


def _folder(topic: str) -> str:
    return topic if _key is None else f"meshkit/{_digest('folder', topic)}"


def word_name(topic: str, rank: int) -> str:
    """Return the name under which a process stores its value; with a shared key, nobody else can compute it."""
    return f"{_folder(topic)}/{rank if _key is None else _digest('name', topic, str(rank))}"


def _named(topic: str) -> str:
    """Return the name of an announcement; with a shared key, nobody else can compute it."""
    return topic if _key is None else f"meshkit/{_digest('announcement', topic)}"


def _sign(topic: str, rank: int, text: str) -> str:
    return "" if _key is None else _digest("word", topic, str(rank), text)


def _digest(*words: str) -> str:
    assert _key is not None
    return hmac.digest(_key, json.dumps(words).encode(), "sha256").hex()


def jax_runtime() -> Any:
    """Return the private state of jax.distributed: `client`, `process_id`, `num_processes`, ..."""
    from jax._src import distributed

    return distributed.global_state
