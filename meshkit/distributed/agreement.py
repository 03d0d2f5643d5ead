"""How the processes of a job agree on something that is no array, from any thread.

    what each process says -> process 0 decides -> every process has the same answer

It goes through jax's coordination service and never through a collective on devices: a checkpoint is committed by a
background thread while the devices train. Every wait has a limit, and says which processes it missed.

Without certificates that service takes the word of whoever reaches its port. So, where the processes share a key
(`sign_with`), what they say is signed by it, and stands under names that follow from it: nobody else can write there
before they do, nor write anything that they believe. A word that somebody removes is said again, for as long as its
process waits for the answer.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from meshkit.distributed.roll_call import named
from meshkit.errors import ConfigError, RunError

# Process 0 has the whole limit to hear all others; they wait for its answer a little longer than that.
_ANSWER_S = 60.0
_AGAIN_S = 10.0  # a process says its word again while it waits for the answer
_SIGNATURE = hashlib.sha256().digest_size * 2

_key: bytes | None = None


def sign_with(key: bytes | None) -> None:
    """From now on this process signs what it says, and believes what is signed by the same key; None believes all."""
    global _key
    _key = key


class Forged(RunError):
    """What stands in another process's place was not said by it."""


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
        """What process 0 decides from what every process says; the same on all of them.

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
            decided = _get(client, answer, 0, timeout_s + _ANSWER_S, again)
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

    def _decide(
        self, client: Any, said: str, mine: Any, decide: Callable[[list[Any]], Any], timeout_s: float
    ) -> dict[str, Any]:
        """What process 0 answers: its decision on what all have said, or what is wrong, so that nobody waits."""
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
    client.key_value_set(_name(topic, rank), _sign(topic, rank, text) + text, allow_overwrite=True)


def _get(client: Any, topic: str, rank: int, timeout_s: float, again: Callable[[], None] | None = None) -> Any:
    """What a process says, once it has; `again` is called now and then meanwhile.

    Raises:
        Forged: it is none of its words.
        RunError: it says nothing in time.
    """
    ends, text = time.monotonic() + timeout_s, None
    while text is None:
        began = time.monotonic()
        wait_s = max(0.001, min(ends - began, _AGAIN_S if again else timeout_s))
        try:
            text = client.blocking_key_value_get(_name(topic, rank), round(wait_s * 1000))
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


def _name(topic: str, rank: int) -> str:
    return f"{_folder(topic)}/{rank if _key is None else _digest('name', topic, str(rank))}"


def _sign(topic: str, rank: int, text: str) -> str:
    return "" if _key is None else _digest("word", topic, str(rank), text)


def _digest(*words: str) -> str:
    assert _key is not None
    return hmac.digest(_key, json.dumps(words).encode(), "sha256").hex()


def jax_runtime() -> Any:
    """The state of jax.distributed, which has no public name: `client`, `process_id`, `num_processes`, ..."""
    from jax._src import distributed

    return distributed.global_state
