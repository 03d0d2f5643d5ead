"""Test hosts that are lost: the next attempt goes on from memory wherever one of two neighbours is left."""

import signal
import sys

import pytest

from benchmarks.kill_matrix.cells import baseline
from benchmarks.kill_matrix.gang import send
from benchmarks.kill_matrix.hosts import DISK_TOO, MEMORY_ALONE, several_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc"),
]
FROM_MEMORY = "is restored; no checkpoint is read"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return baseline(tmp_path_factory.mktemp("alone"))


def test_the_host_of_the_coordinator_is_lost_and_replaced_alike(alone, tmp_path):
    with several_hosts(tmp_path, MEMORY_ALONE) as hosts:
        hosts.wait_for_gate()
        hosts.lose(0)
        hosts.replace(0)
        assert hosts.end() == alone
    assert "host 0 received its share of the snapshots" in hosts.said
    assert hosts.said.count(FROM_MEMORY) == 2


def test_a_process_that_is_lost_alone_takes_no_neighbour(alone, tmp_path):
    with several_hosts(tmp_path, MEMORY_ALONE) as hosts:
        hosts.wait_for_gate()
        hosts.kill_process()
        assert hosts.end() == alone
    assert hosts.said.count(f"the snapshot of step 14 {FROM_MEMORY}") == 2
    assert "from the next host" not in hosts.said


def test_one_host_after_the_other_is_lost(alone, tmp_path):
    """The second is lost after the first has got its share, and before the next snapshot."""
    with several_hosts(tmp_path, MEMORY_ALONE) as hosts:
        hosts.wait_for_gate()
        hosts.lose(1)
        hosts.replace(1)
        hosts.launches[0].wait(lambda: FROM_MEMORY in hosts.launches[0].said or None, "the second attempt")
        hosts.lose(0)
        hosts.replace(0)
        assert hosts.end() == alone
    assert FROM_MEMORY in hosts.launches[0].said.split("host 0 received its share")[1]


def test_where_both_neighbours_are_lost_the_disk_is_read(alone, tmp_path):
    with several_hosts(tmp_path, DISK_TOO) as hosts:
        hosts.wait_for_gate()
        hosts.lose(0, 1)
        hosts.replace(0, 1)
        assert hosts.end() == alone
    assert hosts.said.count("after step 8") == 2


def test_a_launcher_that_is_interrupted_while_it_waits_ends_the_others_with_its_exit_code(tmp_path):
    with several_hosts(tmp_path, MEMORY_ALONE) as hosts:
        hosts.wait_for_gate()
        hosts.lose(1)
        hosts.launches[0].wait(lambda: "host 1 is lost" in hosts.launches[0].said or None, "word of the loss")
        send(hosts.launches[0].process.pid, signal.SIGINT)
        hosts.replace(1)
        assert [launch.end() for launch in hosts.launches] == [130, 130]
