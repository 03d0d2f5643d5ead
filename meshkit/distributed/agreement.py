"""How the processes of a job agree on something that is no array, from any thread.

    what each process says -> process 0 decides -> every process has the same answer

It goes through jax's coordination service and never through a collective on devices: a checkpoint is committed by a
background thread while the devices train. Every wait has a limit, and says which processes it missed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from meshkit.distributed.roll_call import named
from meshkit.errors import RunError

# Process 0 has the whole limit to hear all others; they wait for its answer a little longer than that.
_ANSWER_S = 60.0


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
            RunError: some did not in time, or process 0 gave no answer.
        """
        if self.size == 1:
            return decide([mine])
        said, answer = f"{self._prefix}/{topic}/said", f"{self._prefix}/{topic}/answer"
        client = jax_runtime().client
        if self.rank != 0:
            client.key_value_set(f"{said}/{self.rank}", json.dumps(mine))
            decided = json.loads(self._get(client, answer, timeout_s + _ANSWER_S, "process 0 gives no answer"))
        else:
            decided = self._decide(client, said, mine, decide, timeout_s)
            client.key_value_set(answer, json.dumps(decided))
            client.key_value_delete(said)
        if "error" in decided:
            raise RunError(decided["error"])
        return decided["answer"]

    def _decide(
        self, client: Any, said: str, mine: Any, decide: Callable[[list[Any]], Any], timeout_s: float
    ) -> dict[str, Any]:
        ends, every, missing = time.monotonic() + timeout_s, [mine], []
        for rank in range(1, self.size):
            left_s = max(0.001, ends - time.monotonic())
            try:
                every.append(json.loads(self._get(client, f"{said}/{rank}", left_s, "")))
            except RunError:
                missing.append(rank)
        if missing:
            noun = "process" if len(missing) == 1 else "processes"
            return {"error": f"{noun} {named(missing)} of {self.size} did not answer within {timeout_s:.0f} s."}
        try:
            return {"answer": decide(every)}
        except Exception as error:  # the others must not wait for an answer that never comes
            return {"error": f"process 0 failed: {error}"}

    def _get(self, client: Any, key: str, timeout_s: float, problem: str) -> str:
        try:
            return client.blocking_key_value_get(key, round(timeout_s * 1000))
        except Exception as error:  # jaxlib raises one class for a limit that passed and for a service that is gone
            raise RunError(f"{problem} within {timeout_s:.0f} s: {str(error).splitlines()[0]}") from None


def jax_runtime() -> Any:
    """The state of jax.distributed, which has no public name: `client`, `process_id`, `num_processes`, ..."""
    from jax._src import distributed

    return distributed.global_state
