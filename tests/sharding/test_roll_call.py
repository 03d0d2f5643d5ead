"""The roll call over loopback: who is missing, who comes twice, who belongs to another job, and strangers."""

import socket
import threading
import time

import pytest

from meshkit.errors import RunError
from meshkit.sharding.roll_call import call_roll
from meshkit.spec.environment import Gang


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def roll(members, timeout_s=20.0, before=lambda port: None):
    """What each (process id, job size) of `members` finds out."""
    port, found = free_port(), {}

    def one(index, number, size):
        gang = Gang(f"127.0.0.1:{port}", size, number)
        try:
            found[index] = call_roll(gang, timeout_s, bind=f"127.0.0.1:{port}")
        except RunError as e:
            found[index] = e

    threads = [threading.Thread(target=one, args=(i, *m)) for i, m in enumerate(members)]
    for thread in threads:
        thread.start()
    before(port)
    for thread in threads:
        thread.join(timeout=60)
    return [found[i] for i in range(len(members))]


def test_all_are_there():
    results = roll([(i, 5) for i in range(5)])
    assert all(r == results[0] for r in results)
    assert results[0].problem is None
    assert set(results[0].hosts) == set(range(5))
    assert max(map(abs, results[0].clocks_s.values())) < 20  # one machine, one clock; a message under load


def test_the_missing_are_named():
    first, *others = roll([(0, 5), (1, 5), (3, 5)], timeout_s=2.0)
    assert first.problem == "2 of 5 processes did not come: 2, 4."
    assert all(o == first for o in others)


def test_two_with_one_number():
    results = roll([(0, 3), (1, 3), (1, 3)])
    for result in results:
        assert "2 processes say that they are number 1" in result.problem


def test_two_sizes():
    results = roll([(0, 4), (1, 2)])
    assert "process 1 says that the job has 2 processes, and process 0 says 4" in results[0].problem


def test_nobody_listens():
    (result,) = roll([(1, 2)], timeout_s=0.5)
    assert isinstance(result, RunError)
    assert "did not reach the coordinator" in result.message


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RunError, match="cannot listen on"):
            call_roll(Gang(f"127.0.0.1:{port}", 2, 0), 1.0, bind=f"127.0.0.1:{port}")


STRANGERS = [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"x" * 5000, b'{"id": "a"}\n', b"\xff\xfe\n", b""]


@pytest.mark.parametrize("said", STRANGERS)
def test_strangers_change_nothing(said):
    def stranger(port):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(said)
                return
            except OSError:
                time.sleep(0.01)

    found = []
    gang = lambda number, port: Gang(f"127.0.0.1:{port}", 2, number)
    port = free_port()
    listen = threading.Thread(target=lambda: found.append(call_roll(gang(0, port), 20, bind=f"127.0.0.1:{port}")))
    listen.start()
    stranger(port)
    assert call_roll(gang(1, port), 20).problem is None
    listen.join(timeout=60)
    assert found[0].problem is None
