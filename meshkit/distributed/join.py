"""How a process joins the gang that runs its job, and how the processes agree on what is no array, from any thread.

    join_gang: MESHKIT_* variables -> Gang -> jax.distributed.initialize, before jax starts -> all devices
    Agreement: what each process says -> process 0 decides -> every process has the same answer

An agreement goes through jax's coordination service and never through a collective on devices: a checkpoint is
committed by a background thread while the devices train. Every wait has a limit, and says which processes it missed.

Without certificates that service takes the word of whoever reaches its port. So, where the processes share a key
(`sign_with`), what they say is signed by it, and stands under names that follow from it: nobody else can write there
before they do, nor write anything that they believe. A word that somebody removes is said again, for as long as its
process waits for the answer.
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

# Machines of a large job start minutes apart, processes of one machine together. A process that is gone is noticed
# after the heartbeat; the end is a barrier, which must not keep the others waiting for long once one has failed.
_JOIN_S, _JOIN_HERE_S, _CONNECT_S, HEARTBEAT_S, _SHUTDOWN_S = 300.0, 20.0, 60, 100, 120
# Process 0 has the whole limit to hear all others; they wait for its answer a little longer than that.
ANSWER_S = 60.0
AGAIN_S = 10.0  # a process says its word again while it waits for the answer
_SIGNATURE = hashlib.sha256().digest_size * 2
_key: bytes | None = None


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


def sign_with(key: bytes | None) -> None:
    """From now on this process signs what it says, and believes what is signed by the same key; None believes all."""
    global _key
    _key = key


class Forged(RunError):
    """Another process has written in the place of this one."""


class Agreement:
    """The line between the processes of a job, for one purpose.

    Args:
        name: the same on all processes, and no other's.
    """

    def __init__(self, name: str):
        self._prefix = f"meshkit/{name}"
        state = jax_runtime()  # not jax.process_index(), which would start the backends
        self.rank, self.size = int(state.process_id or 0), int(state.num_processes or 1)

    def reach(self, topic: str, mine: Any, decide: Callable[[list[Any]], Any], *, timeout_s: float) -> Any:
        """Return process 0's decision on the words of all processes, the same on all of them.

        Args:
            topic: each is used once, in any order and from any thread.
            mine: what this process says; JSON.
            decide: what each process said, by number -> the answer, JSON. Runs in process 0 alone.
            timeout_s: for all processes to say theirs.

        Raises:
            ConfigError: `decide` has raised it.
            RunError: some did not in time, process 0 gave no answer, or somebody else has written in its place.
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

    def announce(self, topic: str) -> bool:
        """Whether this process is the first that announces it."""
        try:
            jax_runtime().client.key_value_set(_named(f"{self._prefix}/{topic}"), str(self.rank))
        except Exception:  # there already, or the service is gone
            return False
        return True

    def heard(self, topic: str) -> bool:
        """Whether somebody has announced it. Does not wait."""
        try:
            jax_runtime().client.key_value_try_get(_named(f"{self._prefix}/{topic}"))
        except Exception:  # nobody has, or the service is gone
            return False
        return True

    def tell(self, topic: str, mine: Any) -> None:
        """Says a word of JSON for whoever gathers it. Waits for nobody."""
        _set(jax_runtime().client, f"{self._prefix}/{topic}", self.rank, mine)

    def gather(self, topic: str, *, timeout_s: float) -> list[Any]:
        """Return the word of every process by number; None for a late one, or one in whose place another wrote."""
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
        """Return process 0's answer: its decision on all words, or the problem, so that nobody waits."""
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
    """Says a word, also where somebody has said another in this process's place."""
    text = json.dumps(word)
    client.key_value_set(word_name(topic, rank), _sign(topic, rank, text) + text, allow_overwrite=True)


def _get(client: Any, topic: str, rank: int, timeout_s: float, again: Callable[[], None] | None = None) -> Any:
    """Wait for the word of a process; `again` is called now and then meanwhile.

    Raises:
        Forged: it is none of its words.
        RunError: it says nothing in time.
    """
    ends, text = time.monotonic() + timeout_s, None
    while text is None:
        began = time.monotonic()
        wait_s = max(0.001, min(ends - began, AGAIN_S if again else timeout_s))
        try:
            text = client.blocking_key_value_get(word_name(topic, rank), round(wait_s * 1000))
        except Exception as error:  # jaxlib raises one class for a limit that passed and for a service that is gone
            passed, why = time.monotonic() - began > 0.9 * wait_s, str(error).splitlines()[0]
            if again is None or not passed or time.monotonic() >= ends:
                raise RunError(f"process {rank} gives no answer within {timeout_s:.0f} s: {why}") from None
            with suppress(Exception):  # of a service that is gone: the next look says so
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
    """Return the key of the store under which a process says its word; with a secret, one that nobody else knows."""
    return f"{_folder(topic)}/{rank if _key is None else _digest('name', topic, str(rank))}"


def _named(topic: str) -> str:
    """The key of an announcement; with a secret, one that nobody else knows."""
    return topic if _key is None else f"meshkit/{_digest('announcement', topic)}"


def _sign(topic: str, rank: int, text: str) -> str:
    return "" if _key is None else _digest("word", topic, str(rank), text)


def _digest(*words: str) -> str:
    assert _key is not None
    return hmac.digest(_key, json.dumps(words).encode(), "sha256").hex()


def jax_runtime() -> Any:
    """The state of jax.distributed, which has no public name: `client`, `process_id`, `num_processes`, ..."""
    from jax._src import distributed

    return distributed.global_state
