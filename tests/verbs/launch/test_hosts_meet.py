"""Test that launchers of several hosts begin together, hear how an attempt ends elsewhere, and wait for a lost one."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from meshkit.config.sections import LaunchTable
from meshkit.distributed.certificates import make_certificates, write_certificates
from meshkit.distributed.roll_call import free_port
from meshkit.errors import ConfigError, RunError
from meshkit.runs.snapshots import SnapshotMemory
from meshkit.verbs.launch.hosts import EndedElsewhere, Hosts

HERE = "127.0.0.1"
COUNT = 3


def launcher(index, address, certificates, show=print, fewer=(), **launch):
    return Hosts(
        index,
        COUNT,
        processes=1,
        coordinator=address,
        certificates=certificates and str(certificates),
        show=show,
        folder=certificates.parent if certificates else Path(),
        launch=LaunchTable(**launch),
        fewer=lambda: fewer,
    )


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Yield a function that makes the launcher of a host; all of them end with the test."""
    write_certificates(tmp_path / "mtls", make_certificates([HERE]))
    monkeypatch.setenv("MESHKIT_JOIN_TIMEOUT", "60")
    address, said = f"{HERE}:{free_port()}", []
    with ExitStack() as stack:

        def make(index, *, fewer=(), **launch):
            return stack.enter_context(launcher(index, address, tmp_path / "mtls", said.append, fewer, **launch))

        make.said = said
        make.address = address
        yield make


def at_once(*calls):
    """Return what each call returns or raises, with all of them running at the same time."""
    found = [None] * len(calls)

    def run(i):
        try:
            found[i] = calls[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def meet(*hosts, attempt=0):
    assert at_once(*(lambda h=h: h.meet(attempt, []) for h in hosts)) == [None] * len(hosts)


def news_of(host):
    deadline = time.monotonic() + 60
    while (word := host.news()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return word


def go_on(host):
    """Return the exit code that another launcher has told, where the job is over."""
    try:
        host.meet(1, [])
    except EndedElsewhere as ended:
        host.withdraw(ended.code)
        return ended.code


def test_all_begin_with_one_port_and_one_number(place):
    hosts = [place(i) for i in range(COUNT)]
    meet(*hosts, attempt=4)
    assert len({host.coordinator for host in hosts}) == 1
    assert hosts[0].coordinator != place.address
    assert {host.attempt for host in hosts} == {4}
    assert [host.news() for host in hosts] == [None] * COUNT


def test_a_failure_on_one_host_ends_the_attempt_on_all_and_they_meet_again(place):
    hosts = [place(i) for i in range(COUNT)]
    meet(*hosts)
    hosts[1].failed("process 1 failed")
    assert {news_of(hosts[0]), news_of(hosts[2])} == {"host 1: process 1 failed"}
    meet(*hosts, attempt=1)
    hosts[0].failed("process 0 failed")
    assert {news_of(hosts[1]), news_of(hosts[2])} == {"host 0: process 0 failed"}


@pytest.mark.parametrize("lost", [0, 2])
def test_one_that_is_lost_is_named_and_another_one_takes_its_place(place, lost):
    hosts = [place(i) for i in range(COUNT)]
    meet(*hosts)
    hosts[lost].__exit__()
    left = [host for host in hosts if host.index != lost]
    assert {news_of(host) for host in left} == {f"host {lost} is lost"}
    meet(*left, place(lost), attempt=1)
    assert {host.attempt for host in left} == {1}


def test_one_that_is_done_waits_for_the_others_and_hears_when_they_fail(place):
    hosts = [place(i) for i in range(COUNT)]
    meet(*hosts)
    found = at_once(*(lambda h=h: h.settle(60) for h in hosts[:2]), lambda: time.sleep(0.3) or hosts[2].failed("late"))
    assert found == ["host 2: late", "host 2: late", None]
    meet(*hosts)
    assert at_once(*(lambda h=h: h.settle(60) for h in hosts)) == [None] * COUNT


@pytest.mark.parametrize("first", range(COUNT))
def test_one_that_gives_up_ends_the_job_on_all_with_its_exit_code(place, first):
    hosts = [place(i) for i in range(COUNT)]
    meet(*hosts)

    hosts[first].failed("it is wrong")
    others = [host for host in hosts if host.index != first]
    found = at_once(lambda: hosts[first].withdraw(2), *(lambda h=h: go_on(h) for h in others))
    assert found == [None, 2, 2]


def test_one_that_ends_while_others_are_at_work_tells_those_too_that_were_done(place):
    hosts = [place(i) for i in range(COUNT)]
    meet(*hosts)
    found = at_once(
        lambda: hosts[0].settle(0.5) or hosts[0].withdraw(75),
        lambda: hosts[1].settle(60) and (time.sleep(0.5) or go_on(hosts[1])),  # It comes last.
        lambda: news_of(hosts[2]) and go_on(hosts[2]),
    )
    assert found == [None, 75, 75]


def test_waiting_ends_by_a_signal_or_names_who_is_missing(place, monkeypatch):
    with pytest.raises(EndedElsewhere, match="SIGTERM while waiting for the other hosts"):
        (first := place(0)).meet(0, [signal.SIGTERM])
    first.__exit__()
    monkeypatch.setenv("MESHKIT_JOIN_TIMEOUT", "1")
    with pytest.raises(RunError, match=r"host 1 of 3 has waited 1 s for .* host 0 at .*Connection refused"):
        place(1).meet(0, [])


def test_strangers_on_the_port_and_launchers_of_other_jobs_keep_nobody(place, tmp_path):
    write_certificates(tmp_path / "other", make_certificates([HERE]))
    hosts = [place(i) for i in range(COUNT)]
    host, port = place.address.split(":")
    stranger = launcher(1, place.address, tmp_path / "other")
    stop = []

    def disturb():
        with socket.create_connection((host, int(port))) as plain:
            plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with pytest.raises(EndedElsewhere):
                stranger.meet(0, stop)

    found = at_once(disturb, lambda: meet(*hosts), lambda: time.sleep(0.3) or stop.append(signal.SIGTERM))
    assert found == [None] * 3


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
def test_a_new_launcher_gets_snapshots_and_one_that_has_been_there_gets_none_back_that_were_dropped(place):
    hosts = [place(i) for i in range(COUNT)]
    memory = [SnapshotMemory() for _ in range(COUNT)]
    mine = memory[1].slots[0]
    meet(*hosts)
    with ExitStack() as stack:
        for host, held in zip(hosts, memory):
            stack.enter_context(host.sharing([held]))
        data = mine.reserve(3)
        data[:] = b"abc"
        mine.seal(data, {"step": 4})
        assert mine.wait_until_copied(60)
    mine.clear()  # Its process finds that the state was wrong.
    meet(*hosts, attempt=1)
    with hosts[1].sharing([memory[1]]):
        assert mine.record() is None
    hosts[1].__exit__()
    meet(hosts[0], hosts[2], new := place(1), attempt=2)
    with new.sharing([memory[1]]):
        assert bytes(mine.read()) == b"abc"
    for held in memory:
        held.close()


def test_without_certificates_it_is_an_error_that_says_how_to_make_them():
    with pytest.raises(ConfigError, match="need certificates to connect") as raised:
        launcher(0, f"{HERE}:61000", None)
    assert "launch certificates" in str(raised.value.hint)


def begin(*hosts, attempt):
    """Let launchers meet of which some may get no place; return their threads, in which these wait."""
    threads = [threading.Thread(target=at_once, args=(lambda h=h: h.meet(attempt, []),)) for h in hosts]
    for thread in threads:
        thread.start()
    return threads


def places(*hosts):
    return {host.index: (host.place, host.size) for host in hosts}


def test_a_spare_replaces_a_lost_host_at_once_and_whoever_comes_back_is_the_spare(place):
    hosts = [place(i, spares=1) for i in range(COUNT + 1)]
    waiting = begin(hosts[3], attempt=0)
    meet(*hosts[:3])
    assert places(*hosts[:3]) == {i: (i, 3) for i in range(3)}
    hosts[1].__exit__()
    assert {news_of(hosts[0]), news_of(hosts[2])} == {"host 1 is lost"}
    meet(hosts[0], hosts[2], attempt=1)
    waiting[0].join(60)
    assert places(hosts[0], hosts[2], hosts[3]) == {0: (0, 3), 2: (2, 3), 3: (1, 3)}
    assert hosts[3].overrides == []
    back = place(1, spares=1)
    over = [None]
    waiting = threading.Thread(target=lambda: over.append(go_on(back)))
    waiting.start()
    hosts[2].failed("process 2 failed")
    assert {news_of(hosts[0]), news_of(hosts[3])} == {"host 2: process 2 failed"}
    time.sleep(0.5)  # The one that came back is then there, which does not matter.
    meet(hosts[0], hosts[2], hosts[3], attempt=2)
    assert places(hosts[0], hosts[2], hosts[3]) == {0: (0, 3), 2: (2, 3), 3: (1, 3)}
    assert at_once(*(lambda h=h: h.settle(60) for h in (hosts[0], hosts[2], hosts[3]))) == [None] * 3
    while not Path(hosts[2].spare_file).exists():
        assert hosts[0].news() is None
    hosts[0].withdraw(0)
    waiting.join(60)
    assert over[-1] == 0


def test_a_sick_host_gives_its_place_to_a_spare_and_gets_one_again_only_if_nobody_else_can(place):
    hosts = [place(i, spares=1) for i in range(COUNT + 1)]
    waiting = begin(hosts[3], attempt=0)
    meet(*hosts[:2], hosts[2])
    while not Path(hosts[1].spare_file).exists():  # The spare may come after the others have met.
        assert hosts[0].news() is None
    assert not hosts[0].spare_file
    hosts[1].step_back()
    hosts[1].failed("process 1 failed (exit code 76)")
    assert {news_of(hosts[0]), news_of(hosts[2])} == {"host 1: process 1 failed (exit code 76)"}
    sick = begin(hosts[1], attempt=1)
    meet(hosts[0], hosts[2], attempt=1)
    waiting[0].join(60)
    assert places(hosts[0], hosts[2], hosts[3]) == {0: (0, 3), 2: (2, 3), 3: (1, 3)}
    while "host 1 is a spare" not in place.said:
        assert hosts[0].news() is None
    assert not Path(hosts[1].spare_file).exists()  # The spare that is left is sick.
    hosts[2].__exit__()
    assert news_of(hosts[0]) == "host 2 is lost"
    meet(hosts[0], hosts[3], attempt=2)
    sick[0].join(60)
    assert places(hosts[0], hosts[3], hosts[1]) == {0: (0, 3), 3: (1, 3), 1: (2, 3)}


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
def test_the_others_go_on_with_fewer_hosts_and_write_what_all_had_and_grow_again(place, tmp_path):
    hosts = [place(i, fewer=(2, 1), wait_s=0.5) for i in range(COUNT)]
    memory = [SnapshotMemory() for _ in range(COUNT)]
    meet(*hosts)
    with ExitStack() as stack:
        for host, held in zip(hosts, memory):
            stack.enter_context(host.sharing([held]))
        for rank, held in enumerate(memory):
            data = held.slots[0].reserve(3)
            data[:] = bytes([rank]) * 3
            held.slots[0].seal(data, {"step": 4})
        assert all(held.slots[0].wait_until_copied(60) for held in memory)
    hosts[1].__exit__()
    assert {news_of(hosts[0]), news_of(hosts[2])} == {"host 1 is lost"}
    meet(hosts[0], hosts[2], attempt=1)
    assert places(hosts[0], hosts[2]) == {0: (0, 2), 2: (1, 2)}
    assert hosts[2].overrides == ["--set", "launch.hosts=2"]
    written = tmp_path / "snapshots" / "4"
    assert [(written / str(rank)).read_bytes() for rank in range(COUNT)] == [bytes([rank]) * 3 for rank in range(COUNT)]
    assert {json.loads((written / f"{rank}.json").read_text())["processes"] for rank in range(COUNT)} == {COUNT}

    hosts[0].failed("process 0 failed")
    assert news_of(hosts[2]) == "host 0: process 0 failed"
    began = time.monotonic()
    meet(hosts[0], hosts[2], attempt=2)  # None of the last attempt is lost, so nobody is waited for.
    assert time.monotonic() - began < 30
    assert places(hosts[0], hosts[2]) == {0: (0, 2), 2: (1, 2)}

    waiting = begin(back := place(1, fewer=(2, 1), wait_s=0.5), attempt=0)
    while not Path(hosts[2].spare_file).exists():
        assert hosts[0].news() is None
    hosts[2].failed("process 1 failed")
    assert news_of(hosts[0]) == "host 2: process 1 failed"
    meet(hosts[0], hosts[2], attempt=3)
    waiting[0].join(60)
    assert places(hosts[0], back, hosts[2]) == {i: (i, 3) for i in range(3)}
    for held in memory:
        held.close()


def test_a_host_that_the_smaller_mesh_has_no_place_for_is_a_spare(place):
    hosts = [place(i, fewer=(1,), wait_s=0.5) for i in range(COUNT)]
    meet(*hosts)
    hosts[1].__exit__()
    assert {news_of(hosts[0]), news_of(hosts[2])} == {"host 1 is lost"}
    waiting = begin(hosts[2], attempt=1)
    meet(hosts[0], attempt=1)
    assert places(hosts[0]) == {0: (0, 1)}
    assert hosts[0].settle(60) is None
    hosts[0].withdraw(0)
    waiting[0].join(60)
    assert place.said[-1] == "host 2 is a spare"


def test_a_job_begins_with_all_its_hosts(place, monkeypatch):
    monkeypatch.setenv("MESHKIT_JOIN_TIMEOUT", "2")
    hosts = [place(i, fewer=(2,), wait_s=0.2) for i in range(2)]
    found = at_once(*(lambda h=h: h.meet(0, []) for h in hosts))
    assert [isinstance(error, RunError | EndedElsewhere) for error in found] == [True, True]


def test_fewer_hosts_than_the_job_can_go_on_with_wait_for_the_lost_one(place, monkeypatch):
    monkeypatch.setenv("MESHKIT_JOIN_TIMEOUT", "2")
    hosts = [place(i, fewer=(2,), wait_s=0.2) for i in range(COUNT)]
    meet(*hosts)
    hosts[1].__exit__()
    hosts[2].__exit__()
    news_of(hosts[0])
    with pytest.raises(RunError, match="host 0 of 3 has waited 2 s for hosts 1, 2"):
        hosts[0].meet(1, [])
