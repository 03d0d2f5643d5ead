"""Test copies of snapshots at another launcher: who has the job's certificate gets back what was sealed."""

import json
import os
import socket
import ssl
import threading
import time
from contextlib import contextmanager

import pytest

from meshkit.distributed.certificates import make_certificates, read_certificates, write_certificates
from meshkit.runs.snapshots import SnapshotMemory
from meshkit.verbs.launch.copies import Channel, Keeper, SnapshotCopies, fetch_copies

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs memfd_create")
HERE = "127.0.0.1"
RANK = 3


def channel(folder):
    write_certificates(folder, make_certificates([HERE]))
    found = read_certificates(str(folder))
    return Channel(found.client(), found.server(), HERE)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return channel(tmp_path_factory.mktemp("certificates") / "mtls")


@pytest.fixture
def keeper(job):
    with Keeper(HERE, job) as made:
        made.keep([RANK], anew=False)
        yield made


@contextmanager
def memory():
    held = SnapshotMemory()
    yield held
    held.close()


def data_of(step, size=5 << 20):
    return bytes([step % 251]) * size


def seal(slot, step, size=5 << 20):
    data = slot.reserve(size)
    data[:] = data_of(step, size)
    slot.seal(data, {"step": step, "run": "run"})


def copied(held, keeper, job, said, *, rank=RANK, until=lambda slots: all(s.said_copied() is not None for s in slots)):
    """Copy what a process has, as its launcher does during an attempt."""
    deadline = time.monotonic() + 60
    with SnapshotCopies({rank: held}, (HERE, keeper.port), job, said.append):
        while not until([slot for slot in held.slots if slot.record()]):
            assert time.monotonic() < deadline, said
            time.sleep(0.01)


def fetched(keeper, job):
    """Return what a new launcher gets: step -> data."""
    with memory() as held:
        steps = fetch_copies({RANK: held}, (HERE, keeper.port), job)
        found = {slot.record()["step"]: bytes(slot.read()) for slot in held.slots if slot.record()}
        assert steps == sorted(found)
        return found


def test_a_new_launcher_gets_both_snapshots_bit_for_bit(job, keeper):
    with memory() as held:
        seal(held.slots[0], 4)
        seal(held.slots[1], 8, size=0)
        copied(held, keeper, job, said := [])
        assert [slot.said_copied() for slot in held.slots] == [True, True]
    assert fetched(keeper, job) == {4: data_of(4), 8: b""}
    assert said == []


@pytest.mark.parametrize(
    ("sealed", "kept"),
    [
        ([(1, 4), (0, 8), (1, 12), (0, 16), (1, 20)], [16, 20]),
        ([(0, 4), (1, 8), (1, 6)], [4, 6]),  # Another gang goes on from step 4, so its step 8 may be another one.
    ],
)
def test_the_copies_are_of_what_the_process_has_last(job, keeper, sealed, kept):
    with memory() as held:
        for slot, step in sealed:
            seal(held.slots[slot], step)
            copied(held, keeper, job, [])
    assert fetched(keeper, job) == {step: data_of(step) for step in kept}


def test_a_snapshot_that_is_damaged_is_no_copy_and_its_process_hears_so(job, keeper):
    with memory() as held:
        seal(held.slots[0], 4)
        os.pwrite(held.descriptors[0], b"?", 4100)
        copied(held, keeper, job, said := [])
        assert held.slots[0].said_copied() is False
    assert "no copy of process 3's snapshot of step 4: it came damaged" in said[0]
    assert fetched(keeper, job) == {}


def test_a_snapshot_that_the_keeper_does_not_expect_yet_is_copied_once_it_does(job, keeper):
    with memory() as held:
        seal(held.slots[0], 4)
        soon = threading.Timer(0.5, lambda: keeper.keep([RANK, RANK + 1], anew=False))
        soon.start()
        copied(held, keeper, job, said := [], rank=RANK + 1)
        soon.join()
    assert said == []


def test_a_sender_that_has_vanished_keeps_nobody_waiting(job, keeper):
    """Its copy is on its way as the next attempt begins, and as a new launcher asks for what is there."""
    with memory() as held:
        seal(held.slots[0], 4)
        copied(held, keeper, job, [])
    for goes_on in (lambda: keeper.keep([RANK], anew=False), lambda: fetched(keeper, job)):
        with job.connect((HERE, keeper.port)) as silent, silent.makefile("rwb") as file:
            message = {"rank": RANK, "size": 9 << 20, "record": {"step": 8, "sha256": "8"}, "whole": []}
            file.write(json.dumps(message).encode() + b"\n" + b"part")
            file.flush()
            assert json.loads(file.readline()) == {"answer": "send"}
            began = time.monotonic()
            goes_on()
            assert time.monotonic() - began < 10  # else it would wait for 30 s
    assert fetched(keeper, job) == {}  # that sender had no whole snapshot, by its own word


def test_who_has_another_certificate_or_none_gets_nothing(job, keeper, tmp_path):
    with memory() as held:
        seal(held.slots[0], 4)
        copied(held, keeper, job, [])
    stranger = channel(tmp_path / "mtls")
    with memory() as mine, pytest.raises(ssl.SSLCertVerificationError):
        fetch_copies({RANK: mine}, (HERE, keeper.port), stranger)
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    with pytest.raises((ssl.SSLError, ConnectionError)):
        fetch_copies({RANK: held}, (HERE, keeper.port), Channel(trusting, job.server, HERE))
    assert fetched(keeper, job) == {4: data_of(4)}


def test_a_copy_on_its_way_does_not_keep_the_launcher(job):
    """Its neighbour has stopped, so nothing reads what it sends."""
    with memory() as held, socket.create_server((HERE, 0)) as silent:
        seal(held.slots[0], 4)
        began = time.monotonic()
        with SnapshotCopies({RANK: held}, silent.getsockname(), job, print):
            time.sleep(0.3)
        assert time.monotonic() - began < 20
