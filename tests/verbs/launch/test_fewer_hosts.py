"""Test hosts that do not come back: a spare replaces one, or the job goes on with fewer, from memory."""

import sys

import numpy as np
import pytest

from benchmarks.kill_matrix.gang import Gate
from benchmarks.kill_matrix.hosts import DISK_ALONE, DRAIN, GATE, MEMORY_ALONE, THREE_HOSTS, several_hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc"),
]
FROM_MEMORY = "the snapshot of step 14 is restored; no checkpoint is read"


def run(folder, options, *, spares=0, lost=(2,)):
    """Return the losses of a run that loses hosts for good, and all that its launchers say."""
    with several_hosts(folder, options, 3, spares=spares, experiment=THREE_HOSTS) as hosts:
        hosts.wait_for_gate()
        hosts.lose(*lost)
        losses = hosts.end(*lost)
        assert not (folder / "run" / "snapshots").exists()
        return losses, hosts.said


@pytest.fixture(scope="module")
def with_a_spare(tmp_path_factory):
    return run(tmp_path_factory.mktemp("spare"), (*MEMORY_ALONE, "--set", "launch.spares=1"), spares=1)


def test_a_spare_takes_the_place_of_a_lost_host_and_its_share_of_the_snapshot(with_a_spare):
    losses, said = with_a_spare
    assert [step for step, _ in losses] == list(range(1, 25))
    assert "host 3 takes place 2 of 3" in said
    assert "host 3 received its share of the snapshots of step" in said
    assert said.count(FROM_MEMORY) == 3


def test_fewer_hosts_go_on_from_memory_as_they_do_from_the_disk(with_a_spare, tmp_path):
    """Losses agree bit for bit; those of the larger mesh differ in the last digits, since it sums in another order."""
    losses, said = run(tmp_path / "memory", MEMORY_ALONE)
    assert said.count(FROM_MEMORY) == 2
    assert "2 of 3 hosts go on, on a smaller mesh (launch.hosts = 2)" in said
    from_disk, said = run(tmp_path / "disk", DISK_ALONE)
    assert FROM_MEMORY not in said
    assert losses == from_disk
    assert losses[:14] == with_a_spare[0][:14]
    np.testing.assert_allclose([loss for _, loss in losses], [loss for _, loss in with_a_spare[0]], rtol=1e-5)


def test_a_host_that_returns_is_used_again_after_the_next_restart(with_a_spare, tmp_path):
    gates = {0: GATE, 1: Gate(GATE.phase, GATE.rank, 20)}
    with several_hosts(tmp_path, MEMORY_ALONE, 3, experiment=THREE_HOSTS, gates=gates) as hosts:
        hosts.wait_for_gate()
        hosts.lose(2)
        hosts.launches[1].wait_for_mark(1, "at")
        hosts.replace(2)
        hosts.launches[0].wait(lambda: any((tmp_path / "run").rglob("spare")), "the host that returns")
        hosts.kill_process()
        losses = hosts.end()
    assert hosts.said.count("2 of 3 hosts go on, on a smaller mesh") == 1
    assert "the snapshot of step 18 is restored; no checkpoint is read" in hosts.launches[2].said
    np.testing.assert_allclose([loss for _, loss in losses], [loss for _, loss in with_a_spare[0]], rtol=1e-5)


def test_a_spare_replaces_a_host_that_is_late_twice_in_a_row_after_its_next_snapshot(with_a_spare, tmp_path):
    with several_hosts(tmp_path, DRAIN, 3, spares=1, experiment=THREE_HOSTS, slow=2) as hosts:
        hosts.launches[1].let_go(0)
        losses = hosts.end()
    assert "a spare is to replace this host after step" in hosts.launches[2].said
    assert "host 2 is a spare" in hosts.launches[2].said
    assert "host 3 takes place 2 of 3" in hosts.launches[3].said
    assert "no checkpoint is read" in hosts.launches[0].said
    assert losses == with_a_spare[0]
