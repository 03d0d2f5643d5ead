"""Test how waiting is told from transfer, in handmade instances of collectives over several devices and processes."""

import numpy as np
import pytest

from meshkit.trace.operations import TraceFile
from meshkit.trace.reader import read_trace
from meshkit.trace.skew import align
from tests.trace.trace_files import clock_text, collective, gpu_op, plane_text, program, write_planes

REDUCE = collective("all-reduce-start.1", "all-reduce", "data", group_size=2)
PERMUTE = collective("collective-permute-start.1", "collective-permute", "stage", group_size=3)
US = 1e-6


def run(tmp_path, devices, coll, groups, *, clocks=None, processes=None):
    """Read the trace of one execution; `devices` is device -> [(start_us, end_us)] of the collective's instances.


    Args:
        clocks: process -> epoch ns at which it believes its trace began; one process without them.
        processes: device -> process.
    """
    processes = processes or dict.fromkeys(devices, 0)
    files = []
    for process in sorted(set(processes.values())):
        mine = [d for d in devices if processes[d] == process]
        texts = []
        for ordinal, device in enumerate(mine):
            events = [gpu_op("fusion", 0, 1)] + [gpu_op(coll.name, a, b) for a, b in devices[device]]
            texts.append(plane_text(f"/device:GPU:{ordinal}", events))
        if clocks:
            texts.append(clock_text(clocks[process]))
        path = write_planes(tmp_path / f"p{process}.pb", *texts)
        files.append(TraceFile(path, dict(enumerate(mine)), process))
    return read_trace(
        files,
        program(coll, groups={coll.name: np.array(groups)}),
        num_steps=1,
    )


def transfer_us(trace):
    return {s.device: round(float(w.transfer_s[0] / US), 6) for s, w in zip(trace.steps.steps, trace.sweeps)}


def test_the_early_one_waits_and_the_late_one_is_blamed(tmp_path):
    trace = run(tmp_path, {0: [(10, 60)], 1: [(40, 60)]}, REDUCE, [[0, 1]])
    assert transfer_us(trace) == {0: 20, 1: 20}
    assert trace.skew.method == "clocked"
    worst, other = trace.skew.stragglers
    assert (worst.device, worst.caused_wait_s, worst.waited_s, worst.last_share) == (1, pytest.approx(30 * US), 0, 1)
    assert (other.device, other.caused_wait_s, other.waited_s) == (0, 0, pytest.approx(30 * US))


def test_slowness_of_all_but_one_is_no_wait_where_clocks_can_tell(tmp_path):
    # Both arrive at 10, and one leaves earlier: it was faster, and the other did not wait.
    trace = run(tmp_path, {0: [(10, 60)], 1: [(10, 30)]}, REDUCE, [[0, 1]])
    assert transfer_us(trace) == {0: 50, 1: 20}
    assert trace.skew.wait_clock_free_s == pytest.approx(30 * US)
    assert trace.skew.wait_clocked_s == 0


def test_instances_are_told_apart_by_occurrence_and_group(tmp_path):
    devices = {0: [(10, 20), (30, 50)], 1: [(15, 20), (45, 50)], 2: [(1, 30), (30, 31)], 3: [(29, 30), (30, 31)]}
    trace = run(tmp_path, devices, REDUCE, [[0, 1], [2, 3]])
    assert transfer_us(trace) == {0: 10, 1: 10, 2: 2, 3: 2}
    assert trace.skew.instances == 4


def test_without_all_members_nothing_is_known(tmp_path):
    trace = run(tmp_path, {0: [(10, 60)]}, REDUCE, [[0, 1]])
    assert trace.skew.instances == 0
    assert all(sweep.transfer_s is None for sweep in trace.sweeps)


def test_one_lost_event_makes_its_collective_unknown_not_wrong(tmp_path):
    trace = run(tmp_path, {0: [(10, 20), (30, 50)], 1: [(15, 20)]}, REDUCE, [[0, 1]])
    assert not any(np.isfinite(w.transfer_s[0]) for w in trace.sweeps if w.transfer_s is not None)
    # Its second time on device 0 must not be compared with the first on device 1.
    assert trace.skew.stragglers == ()


def test_a_permute_waits_for_its_neighbours_only(tmp_path):
    # In 0 -> 1 -> 2, device 0 exchanges with 1 alone, so device 2, which is late, does not delay it.
    devices = {0: [(10, 30)], 1: [(20, 60)], 2: [(50, 60)]}
    trace = run(tmp_path, devices, PERMUTE, [[0, 1], [1, 2]])
    assert transfer_us(trace) == {0: 10, 1: 10, 2: 10}


def test_a_permute_that_lost_events_everywhere_but_on_one_device_says_nothing(tmp_path):
    devices = {0: [(10, 30), (40, 50)], 1: [(20, 60)], 2: []}
    trace = run(tmp_path, devices, PERMUTE, [[0, 1], [1, 2]])
    assert not any(np.isfinite(w.transfer_s[0]) for w in trace.sweeps if w.transfer_s is not None)


@pytest.mark.parametrize("ahead_us", [0, 480_000, -7_000])
def test_clocks_of_processes_are_aligned_by_the_ends(tmp_path, ahead_us):
    # Process 1 believes that its trace began `ahead_us` later than it did.
    devices = {d: [(10 + 100 * i + 3 * (d % 2), 60 + 100 * i) for i in range(5)] for d in range(4)}
    clocks = {0: 1_700_000_000_000_000_000, 1: 1_700_000_000_000_000_000 + ahead_us * 1000}
    trace = run(tmp_path, devices, REDUCE, [[0, 2], [1, 3]], clocks=clocks, processes={0: 0, 1: 0, 2: 1, 3: 1})
    assert trace.skew.clocks is not None
    assert trace.skew.clocks.offset_s[1] == pytest.approx(ahead_us * US, abs=1e-9)
    assert trace.skew.clocks.residual_s == pytest.approx(0, abs=1e-9)


def test_a_straggler_in_another_process_is_found(tmp_path):
    devices = {0: [(10, 60)], 1: [(10, 60)], 2: [(40, 60)], 3: [(10, 60)]}
    four = collective(REDUCE.name, "all-reduce", "data", group_size=4)
    clocks = {0: 1_700_000_000_000_000_000, 1: 1_700_000_000_250_000_000}
    trace = run(tmp_path, devices, four, [[0, 1, 2, 3]], clocks=clocks, processes={0: 0, 1: 0, 2: 1, 3: 1})
    worst = trace.skew.stragglers[0]
    assert (worst.device, worst.process) == (2, 1)
    assert worst.caused_wait_s == pytest.approx(90 * US)


def test_bad_clocks_are_not_used_and_it_is_said(tmp_path):
    # The ends scatter by far more than anybody waits, so no offset makes these clocks agree.
    scatter = [0, 400, -300, 350, -200]
    devices = {
        0: [(1000 * i, 1000 * i + 60) for i in range(1, 6)],
        1: [(1000 * i + s + 2, 1000 * i + s + 60) for i, s in zip(range(1, 6), scatter)],
    }
    clocks = dict.fromkeys((0, 1), 1_700_000_000_000_000_000)
    trace = run(tmp_path, devices, REDUCE, [[0, 1]], clocks=clocks, processes={0: 0, 1: 1})
    assert trace.skew.method == "clock_free"
    assert [n.code for n in trace.notes] == ["clocks"]
    assert sum(w.transfer_s[0] for w in trace.sweeps) == pytest.approx(2 * 5 * 58 * US)


def test_clocks_of_a_chain_of_groups():
    # No group spans the job: 0-1, 1-2 and 2-3 each run 20 times, and every clock is ahead by another offset.
    ahead = np.array([0.0, 0.3, -0.2, 5.0])
    rng = np.random.default_rng(0)
    rows = []
    for i in range(60):
        pair, true_end = i % 3, i * 1e-3
        rows += [(i, p, true_end + ahead[p] + rng.normal(0, 1e-6)) for p in (pair, pair + 1)]
    instance, process, end = (np.array(c) for c in zip(*rows))
    clocks = align(instance, process, end)
    assert clocks is not None
    assert clocks.connected
    # The chain has three steps, with 1 us of noise on each.
    np.testing.assert_allclose(clocks.offset_s, ahead, atol=3e-6)
    assert clocks.residual_s < 5e-6


def test_clocks_that_drift():
    # 10 parts in a million are half a millisecond after a minute.
    instance = np.repeat(np.arange(600), 2)
    process = np.tile([0, 1], 600)
    true_end = np.repeat(np.arange(600) * 0.1, 2)
    end = true_end + process * (0.5 + 10e-6 * true_end)
    clocks = align(instance, process, end)
    assert clocks is not None
    assert clocks.drift[1] - clocks.drift[0] == pytest.approx(10e-6, rel=1e-3)
    aligned = end - clocks.ahead_s(process, end)
    assert np.abs(aligned[1::2] - aligned[::2]).max() < 2e-6
    assert clocks.residual_s < 2e-6


def test_processes_without_anything_in_common_are_not_connected():
    clocks = align(np.array([0, 0, 1, 1]), np.array([0, 1, 2, 3]), np.array([0.0, 0.1, 0.0, 0.2]))
    assert clocks is not None
    assert not clocks.connected


def test_one_process_needs_no_alignment():
    assert align(np.array([0, 0]), np.array([3, 3]), np.array([1.0, 2.0])) is None
