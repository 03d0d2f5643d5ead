"""Test the rendezvous over loopback: missing and duplicate processes, those of another job, and strangers."""

import json
import socket
import threading
import time
from dataclasses import asdict

import pytest

from meshkit.distributed import roll_call
from meshkit.distributed.environment import Gang
from meshkit.distributed.roll_call import Attendance, call_roll
from meshkit.errors import ConfigError, RunError


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


SECRET = "a secret of thirty-two characters"


def roll(members, timeout_s=20.0, before=lambda port: None, secret=None):
    """Return what each (process id, job size, and perhaps another secret) of `members` finds out."""
    port, found = free_port(), {}

    def one(index, number, size, secret=secret):
        gang = Gang(f"127.0.0.1:{port}", size, number, secret=secret)
        try:
            found[index] = call_roll(gang, timeout_s, bind=f"127.0.0.1:{port}")
        except RunError as e:
            found[index] = e

    threads = [threading.Thread(target=one, args=(i, *m)) for i, m in enumerate(members)]
    threads[0].start()
    before(port)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return [found[i] for i in range(len(members))]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_all_are_there(secret):
    results = roll([(i, 5) for i in range(5)], secret=secret)
    assert all(r == results[0] for r in results)
    assert results[0].problem is None
    assert set(results[0].hosts) == set(range(5))
    # One machine has one clock; the bound is for a message under load.
    assert max(map(abs, results[0].clocks_s.values())) < 20


def test_the_missing_are_named():
    first, *others = roll([(0, 5), (1, 5), (3, 5)], timeout_s=2.0)
    assert first.problem == "2 of 5 processes did not come: 2, 4."
    assert all(o == first for o in others)


@pytest.mark.parametrize("secret", [None, SECRET])
def test_two_with_one_number(secret):
    results = roll([(0, 3), (1, 3), (1, 3)], secret=secret)
    for result in results:
        assert "2 processes say that they are number 1" in result.problem


def test_two_sizes():
    results = roll([(0, 4), (1, 2)])
    assert "process 1 says that the job has 2 processes, and process 0 says 4" in results[0].problem


def test_nobody_listens():
    (result,) = roll([(1, 2)], timeout_s=0.5)
    assert isinstance(result, RunError)
    assert "did not reach the coordinator" in result.message


def test_a_port_that_is_taken(monkeypatch):
    monkeypatch.setattr(roll_call, "OTHER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(RunError, match="cannot listen on"):
            call_roll(Gang(f"127.0.0.1:{port}", 2, 0), 1.0, bind=f"127.0.0.1:{port}")


STRANGERS = [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"x" * 5000, b'{"id": "a"}\n', b"\xff\xfe\n", b""]
STRANGERS += [b"[" * 1000 + b"\n", b'{"id": 1, "of": 2, "host": "x\\u001b[2J", "time": 0, "token": "a"}\n']
STRANGERS += [b'{"id": 1, "of": 2, "host": "x", "time": NaN, "token": "a"}\n']


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


def claim(number, size, token="t"):
    said = {"id": number, "of": size, "host": "evil", "time": time.time(), "token": token}
    return json.dumps(said).encode() + b"\n"


def say(port, *lines):
    """Connect as a stranger once something listens; return the connection and the answer to the last line."""
    deadline = time.monotonic() + 20
    while True:
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=1)
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    heard = b""
    for line in lines:
        connection.sendall(line)
        try:
            heard = connection.recv(1000)
        except OSError:
            heard = b""
    return connection, heard


CLAIMS = [(1, 2), (0, 2), (1, 3), (7, 2), (-1, 2)]


@pytest.mark.parametrize("said", CLAIMS)
def test_one_wrong_line_of_a_stranger_decides_nothing(said):
    """Without a secret, whoever says it and leaves is not counted."""
    found = roll([(0, 2), (1, 2)], before=lambda port: say(port, claim(*said))[0].close())
    assert [f.problem for f in found] == [None, None]
    assert "evil" not in found[0].hosts.values()


@pytest.mark.parametrize("proof", [None, b"", b"0" * 64, b"\xff" * 64])
@pytest.mark.parametrize("said", CLAIMS)
def test_strangers_without_the_secret_are_not_heard(said, proof):
    """Strangers are not heard even while they stay connected."""
    kept = []
    lines = [claim(*said)] if proof is None else [claim(*said), proof + b"\n"]
    found = roll([(0, 2), (1, 2)], before=lambda port: kept.append(say(port, *lines)), secret=SECRET)
    assert [f.problem for f in found] == [None, None]
    assert "evil" not in found[0].hosts.values()
    kept[0][0].close()


def test_a_proof_that_was_overheard_serves_nobody_else():
    """A stranger repeats an overheard line with its proof to the next attempt of the same process."""
    line, kept = claim(1, 2), []
    gang = Gang("127.0.0.1:1", 2, 1, secret=SECRET)
    heard = []

    def overhear(port):
        connection, said = say(port, line)
        question = said.strip().split(b" ")[1]
        heard.append((question, roll_call.prove(gang, b"member", question, line.strip())))
        connection.sendall(heard[0][1] + b"\n")
        kept.append(connection)

    first = roll([(0, 2)], before=overhear, secret=SECRET)[0]
    assert first.hosts[1] == "evil"  # Whoever knows the secret belongs to the job.
    found = roll(
        [(0, 2), (1, 2)],
        before=lambda port: kept.append(say(port, line, heard[0][1] + b"\n")[0]),
        secret=SECRET,
    )
    assert [f.problem for f in found] == [None, None]
    assert found[0].session != first.session
    for connection in kept:
        connection.close()


def test_processes_of_which_one_has_another_secret_are_told():
    first, second = roll([(0, 2), (1, 2, SECRET[::-1])], timeout_s=2.0, secret=SECRET)
    assert first.problem == "1 of 2 processes did not come: 1. 1 came without the job's secret (MESHKIT_SECRET)."
    assert not first.is_final
    assert "did not reach the coordinator" in second.message
    first, second = roll([(0, 2), (1, 2, None)], timeout_s=2.0, secret=SECRET)
    assert "it asks for the job's secret (MESHKIT_SECRET)" in second.message
    first, second = roll([(0, 2, None), (1, 2)], timeout_s=2.0, secret=SECRET)
    assert "what listens there does not know the job's secret (MESHKIT_SECRET)" in second.message


def test_who_listens_on_the_port_without_the_secret_is_not_believed():
    """Another user's process listens before process 0 does, greets like it, and says that two came."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        answer = json.dumps(asdict(Attendance(2, {0: "evil"}, {0: 0.0}, {1: ["a", "b"]}, {}))).encode()

        def squat(greeting):
            connection, _ = server.accept()
            connection.recv(1000)
            connection.sendall(greeting)
            connection.recv(1000)
            connection.sendall(answer + b" " + b"0" * 64 + b"\n")
            server.settimeout(0)  # The next ones wait forever.
            kept.append(connection)

        kept = []
        squatter = threading.Thread(target=squat, args=(b"meshkit 00\n",))
        squatter.start()
        with pytest.raises(RunError, match="did not reach the coordinator"):
            call_roll(Gang(f"127.0.0.1:{server.getsockname()[1]}", 2, 1, secret=SECRET), 0.8)
        squatter.join(timeout=30)
        kept[0].close()


def test_two_that_both_say_they_are_number_0():
    """The second cannot listen where the first does; it introduces itself, and then both know."""
    results = roll([(0, 2), (0, 2)])
    for result in results:
        assert "2 processes say that they are number 0" in result.problem


def test_two_on_different_machines_that_both_say_they_are_number_0(monkeypatch):
    """The second cannot listen on the coordinator's address, which belongs to another machine."""
    port, found, whole = free_port(), [], roll_call.open_server
    elsewhere = lambda gang, bind: whole(gang, bind or f"127.0.0.1:{free_port()}")
    monkeypatch.setattr(roll_call, "open_server", elsewhere)
    call = lambda bind: found.append(call_roll(Gang(f"127.0.0.1:{port}", 2, 0), 30, bind=bind))
    both = [threading.Thread(target=call, args=(bind,)) for bind in (f"127.0.0.1:{port}", None)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(timeout=60)
    assert ["2 processes say that they are number 0" in f.problem for f in found] == [True, True]


def test_a_name_that_leads_back_to_process_0_is_no_second_one():
    """Process 0 listens on all interfaces and reaches itself, as behind a proxy."""
    port, found = free_port(), []
    gang = lambda number: Gang(f"127.0.0.1:{port}", 2, number)
    first = threading.Thread(target=lambda: found.append(call_roll(gang(0), 30)))
    first.start()
    time.sleep(0.5)
    assert call_roll(gang(1), 30).problem is None
    first.join(timeout=60)
    assert found[0].problem is None


def test_a_connection_that_breaks_is_no_second_process():
    """Process 1 says who it is, loses the connection, and says it again."""
    port, found = free_port(), []
    gang = lambda number: Gang(f"127.0.0.1:{port}", 3, number)
    first = threading.Thread(target=lambda: found.append(call_roll(gang(0), 20, bind=f"127.0.0.1:{port}")))
    first.start()
    line = json.dumps({"id": 1, "of": 3, "host": "a", "time": time.time(), "token": "t"}).encode() + b"\n"
    connections = []
    while len(connections) < 2:
        try:
            connections.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        except OSError:
            time.sleep(0.01)
            continue
        connections[-1].sendall(line)
        assert connections[-1].recv(100) == b"meshkit\n"
        if len(connections) == 1:
            connections[0].close()
    assert call_roll(gang(2), 20).problem is None
    first.join(timeout=60)
    assert found[0].problem is None
    assert b'"expected": 3' in connections[1].recv(10_000)  # The second connection has the answer.
    connections[1].close()


@pytest.mark.parametrize("says", [b"", b"220 mail.example.com ESMTP\r\n", b"meshkit\n{}\n", b"\0" * 3000])
def test_something_else_that_listens_on_the_port(says, monkeypatch):
    monkeypatch.setattr(roll_call, "GREETING_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        over = threading.Event()

        def answer():
            while not over.is_set():
                try:
                    connection, _ = server.accept()
                    connection.sendall(says)
                    kept.append(connection)
                except OSError:
                    continue

        kept = []
        stranger = threading.Thread(target=answer)
        stranger.start()
        try:
            with pytest.raises(RunError, match=r"did not reach the coordinator .*: what listens there "):
                call_roll(Gang(f"127.0.0.1:{server.getsockname()[1]}", 2, 1), 1.0)
        finally:
            over.set()
            stranger.join(timeout=30)
            for connection in kept:
                connection.close()


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_a_clock_that_is_off(off_s):
    found = Attendance(3, {0: "a", 1: "b", 2: "c"}, {0: 0.0, 1: 2.0, 2: off_s}, {}, {})
    assert found.problem == f"the clock of process 2 (c) is {off_s:+.0f} s off from that of process 0 (a)."
    assert found.is_final


@pytest.mark.parametrize(("in_kubernetes", "seconds"), [(False, 0.2), (True, 0.6)])
@pytest.mark.parametrize("process", [0, 1])
def test_a_coordinator_that_nobody_knows(monkeypatch, process, in_kubernetes, seconds):
    monkeypatch.setattr(roll_call, "NAME_S", 0.2)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"knows no host by the name of the coordinator no-such-host\.invalid:61000"):
        call_roll(Gang("no-such-host.invalid:61000", 2, process, in_kubernetes=in_kubernetes), 0.6)
    assert time.monotonic() - began >= seconds


def test_whom_it_waits_for_is_said(monkeypatch):
    monkeypatch.setattr(roll_call, "FIRST_WORD_S", 0.3)
    port, said = free_port(), []
    found = call_roll(Gang(f"127.0.0.1:{port}", 3, 0), 2.5, bind=f"127.0.0.1:{port}", log=said.append)
    assert found.missing == [1, 2]
    assert said[0].startswith("waiting for 2 of 3 processes: 1, 2 (")
    assert 1 <= len(said) <= 4  # It says so after 0.3, 0.6, 1.2 and 2.4 s at most.
