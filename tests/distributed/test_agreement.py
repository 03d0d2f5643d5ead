"""Processes that agree: the same answer on all, the missing named in time, an error of process 0 on all."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from meshkit.distributed import agreement
from meshkit.distributed.agreement import Agreement
from meshkit.errors import RunError


class Service:
    """jax's coordination service, for threads that stand for processes."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value):
        with self.changed:
            assert key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise ValueError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            for name in [n for n in self.values if n.startswith(key)]:
                del self.values[name]


@pytest.fixture
def reach(monkeypatch):
    """Runs one round on processes of the given numbers, of a job of so many; rank -> the answer, or the error."""
    service = Service()
    monkeypatch.setattr(
        agreement, "jax_runtime", lambda: SimpleNamespace(client=service, process_id=0, num_processes=1)
    )

    def run(ranks, size, decide, topic="t", timeout_s=10.0):
        found = {}

        def one(rank):
            line = Agreement("test")
            line.rank, line.size = rank, size
            try:
                found[rank] = line.reach(topic, {"rank": rank}, decide, timeout_s=timeout_s)
            except RunError as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    run.service = service
    return run


def test_all_get_what_process_0_decides_from_all(reach):
    answers = reach(range(3), 3, lambda every: [each["rank"] for each in every])
    assert answers == {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]}
    assert [key for key in reach.service.values if "said" in key] == []  # nothing piles up over a long run


def test_the_missing_are_named_on_all_within_the_limit(reach):
    began = time.monotonic()
    answers = reach([0, 2], 4, lambda every: "never", timeout_s=0.5)
    assert time.monotonic() - began < 30  # the limit, and what a loaded machine takes
    for rank in (0, 2):
        assert str(answers[rank]).startswith("processes 1, 3 of 4 did not answer within")


def test_an_error_of_process_0_reaches_all(reach):
    def fail(_):
        raise OSError("no such folder")

    answers = reach(range(2), 2, fail)
    assert [str(answers[rank]) for rank in (0, 1)] == ["process 0 failed: no such folder"] * 2


def test_the_others_do_not_wait_for_a_process_0_that_is_gone(reach, monkeypatch):
    monkeypatch.setattr(agreement, "_ANSWER_S", 0.1)
    answers = reach([1], 2, lambda every: None, timeout_s=0.2)
    assert "process 0 gives no answer within 0 s: DEADLINE_EXCEEDED" in str(answers[1])
