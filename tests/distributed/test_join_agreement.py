"""Test that processes agree: all get one answer, the missing are named in time, and process 0's error reaches all.

This also holds where a stranger, who only has to reach the port, writes to jax's coordination service.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from meshkit.distributed import join as agreement
from meshkit.distributed.join import Agreement
from meshkit.errors import ConfigError, MeshkitError


class Service:
    """Stand in for jax's coordination service, with threads in place of processes."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values
            self.values[key] = value
            self.changed.notify_all()

    def blocking_key_value_get(self, key, timeout_ms):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, timeout_ms / 1000):
                raise ValueError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
            return self.values[key]

    def key_value_try_get(self, key):
        with self.changed:
            if key not in self.values:
                raise ValueError("NOT_FOUND")
            return self.values[key]

    def key_value_delete(self, key):
        with self.changed:
            for name in [n for n in self.values if n.startswith(f"{key}/")]:
                del self.values[name]


@pytest.fixture
def reach(monkeypatch):
    """Yield a function that runs one round on the given ranks of a job and returns each rank's answer or error."""
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
            except MeshkitError as error:
                found[rank] = error

        threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    run.service = service
    yield run
    agreement.sign_with(None)


@pytest.fixture(params=[None, b"key"], ids=["in the open", "signed"])
def key(request):
    return request.param


def test_all_get_what_process_0_decides_from_all(reach, key):
    agreement.sign_with(key)
    answers = reach(range(3), 3, lambda every: [each["rank"] for each in every])
    assert answers == {0: [0, 1, 2], 1: [0, 1, 2], 2: [0, 1, 2]}
    assert len(reach.service.values) == 1  # Only the answer stays, so that nothing piles up over a long run.


def test_the_missing_are_named_on_all_within_the_limit(reach):
    began = time.monotonic()
    answers = reach([0, 2], 4, lambda every: "never", timeout_s=0.5)
    assert time.monotonic() - began < 30  # This is the limit plus what a loaded machine takes.
    for rank in (0, 2):
        assert str(answers[rank]).startswith("processes 1, 3 of 4 did not answer within")


def test_one_is_the_first_to_announce_and_gathers_what_the_others_tell(reach, key):
    agreement.sign_with(key)
    lines = [Agreement("hang") for _ in range(3)]
    for rank, line in enumerate(lines):
        line.rank, line.size = rank, 3
    assert not lines[0].heard("late")
    assert [line.announce("late") for line in lines] == [True, False, False]
    assert all(line.heard("late") for line in lines)
    lines[0].tell("said", {"phase": "data"})
    lines[2].tell("said", {"phase": "step"})
    assert lines[0].gather("said", timeout_s=0.2) == [{"phase": "data"}, None, {"phase": "step"}]


def test_an_error_of_process_0_reaches_all(reach):
    def fail(_):
        raise OSError("no such folder")

    answers = reach(range(2), 2, fail)
    assert [str(answers[rank]) for rank in (0, 1)] == ["process 0 failed: no such folder"] * 2


def test_what_the_user_gave_wrong_is_so_on_all(reach):
    def refuse(_):
        raise ConfigError("another job has it.", at="runs/a")

    answers = reach(range(2), 2, refuse)
    assert [(type(e), e.message, e.at, e.hint) for e in answers.values()] == [
        (ConfigError, "another job has it.", "runs/a", None)
    ] * 2


def test_the_others_do_not_wait_for_a_process_0_that_is_gone(reach, monkeypatch):
    monkeypatch.setattr(agreement, "ANSWER_S", 0.1)
    answers = reach([1], 2, lambda every: None, timeout_s=0.2)
    assert "process 0 gives no answer within 0 s: DEADLINE_EXCEEDED" in str(answers[1])


GUESSES = ("meshkit/test/t/answer", "meshkit/test/t/answer/0", "meshkit/test/t/said/0", "meshkit/test/t/said/1")


def test_what_a_stranger_writes_before_is_not_believed(reach):
    """Every name that can be known beforehand already holds what a process would have said there."""
    agreement.sign_with(b"key")
    for name in GUESSES:
        reach.service.values[name] = '{"answer": "forged"}'
    answers = reach(range(2), 2, lambda every: [each["rank"] for each in every])
    assert answers == {0: [0, 1], 1: [0, 1]}


class Vandal(Service):
    """Stand in for a service in which a stranger overwrites what a process, except process 0, has just said."""

    def __init__(self, forged):
        super().__init__()
        self.forged = forged

    def key_value_set(self, key, value, allow_overwrite=False):
        super().key_value_set(key, self.forged(value) if '"rank"' in value else value, allow_overwrite)


@pytest.mark.parametrize(
    "forged",
    [
        lambda value: "0" * 64 + value[64:],
        lambda value: value.replace('"rank": 1', '"rank": 0'),
        lambda value: '{"rank": 1}',
        lambda value: "\ud800",
        lambda value: "",
    ],
)
def test_what_a_stranger_writes_over_it_ends_the_wait_at_once(reach, monkeypatch, forged):
    """Process 0 reports it at once, not after the hour that storage has, and all go on."""
    service = Vandal(forged)
    agreement.sign_with(b"key")
    monkeypatch.setattr(
        agreement, "jax_runtime", lambda: SimpleNamespace(client=service, process_id=0, num_processes=1)
    )
    began = time.monotonic()
    answers = reach(range(2), 2, lambda every: "forged", timeout_s=3600.0)
    assert time.monotonic() - began < 30
    for rank in range(2):
        assert "somebody who is no process of this job has written in the place of process 1 (meshkit/" in str(
            answers[rank]
        )


@pytest.mark.parametrize("garbage", ["", "{", "[" * 100_000, "5", '"answer"', '{"wrong": [1]}'])
def test_garbage_in_the_open_ends_the_wait_at_once(reach, garbage):
    """Processes overwrite what was there before; what comes in between is an error of that round."""
    reach.service.values["meshkit/test/t/answer/0"] = garbage
    began = time.monotonic()
    answers = reach([1], 2, lambda every: None, timeout_s=3600.0)
    assert time.monotonic() - began < 30
    assert "has written in the place of process 0 (meshkit/test/t/answer)" in str(answers[1])


def test_a_word_of_another_attempt_or_topic_is_none(reach):
    """A process of the job has signed the word, but for another attempt or topic."""
    agreement.sign_with(b"key")
    reach(range(2), 2, lambda every: 1, topic="a")
    (said,) = reach.service.values.values()
    for topic, key in (("b", b"key"), ("a", b"another")):
        agreement.sign_with(key)
        name = agreement.word_name(f"meshkit/test/{topic}/answer", 0)
        reach.service.values = {name: said}
        answers = reach([1], 2, lambda every: None, topic=topic, timeout_s=3600.0)
        assert "has written in the place of process 0" in str(answers[1])


class Remover(Service):
    """Stand in for a service in which a stranger removes the first words of one process."""

    def __init__(self, times, whose):
        super().__init__()
        self.times, self.whose = times, whose

    def key_value_set(self, key, value, allow_overwrite=False):
        if self.whose in value and self.times > 0:
            self.times -= 1
            return
        super().key_value_set(key, value, allow_overwrite)


def test_a_word_that_a_stranger_removes_is_said_again(reach, key, monkeypatch):
    monkeypatch.setattr(agreement, "AGAIN_S", 0.2)
    agreement.sign_with(key)
    service = Remover(3, '"rank": 1')
    monkeypatch.setattr(
        agreement, "jax_runtime", lambda: SimpleNamespace(client=service, process_id=0, num_processes=1)
    )
    began = time.monotonic()
    answers = reach(range(3), 3, lambda every: [each["rank"] for each in every], timeout_s=3600.0)
    assert time.monotonic() - began < 30
    assert answers == {rank: [0, 1, 2] for rank in range(3)}


def test_an_answer_that_a_stranger_removes_costs_the_limit_and_is_named(reach, monkeypatch):
    monkeypatch.setattr(agreement, "AGAIN_S", 0.1)
    monkeypatch.setattr(agreement, "ANSWER_S", 0.5)
    service = Remover(100, '"answer"')
    monkeypatch.setattr(
        agreement, "jax_runtime", lambda: SimpleNamespace(client=service, process_id=0, num_processes=1)
    )
    answers = reach(range(2), 2, lambda every: "done", timeout_s=1.0)
    assert answers[0] == "done"
    assert "process 0 gives no answer within 2 s: DEADLINE_EXCEEDED" in str(answers[1])


def test_a_service_that_is_gone_is_not_waited_for(reach, monkeypatch):
    def gone(key, timeout_ms):
        raise ValueError("UNAVAILABLE: failed to connect")

    monkeypatch.setattr(reach.service, "blocking_key_value_get", gone)
    began = time.monotonic()
    answers = reach([1], 2, lambda every: None, timeout_s=3600.0)
    assert time.monotonic() - began < 5
    assert "UNAVAILABLE" in str(answers[1])
