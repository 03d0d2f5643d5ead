"""Test traces of many processes, read one after the other: memory stays that of a few, and numbers are those of all."""

import tracemalloc

import numpy as np
import pytest

from meshkit.trace.operations import TraceFile
from meshkit.trace.reader import read_trace
from tests.trace.trace_files import collective, gpu_op, plane_text, program, write_planes

REDUCE = collective("all-reduce-start.1", "all-reduce", "data", group_size=64)
STEPS, KERNELS = 4, 200


def one_process(path, late_us, kernels=KERNELS):
    events = []
    for step in range(STEPS):
        t = 1000 * step
        events += [gpu_op(f"fusion.{i}", t + 2 * i, t + 2 * i + 1) for i in range(kernels)]
        events.append(gpu_op(REDUCE.name, t + 500 + late_us, t + 600))
    return write_planes(path, plane_text("/device:GPU:0", events))


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Return two files, of a process that is on time and of one that is late; the others are the same."""
    folder = tmp_path_factory.mktemp("traces")
    return one_process(folder / "early.pb", 0), one_process(folder / "late.pb", 40)


def read(paths, processes, late, *, group=64, **kwargs):
    files = [TraceFile(paths[p == late], {0: p}, p) for p in range(processes)]
    return read_trace(
        files,
        program(REDUCE, groups={REDUCE.name: np.arange(group)[None]}),
        num_steps=STEPS,
        **kwargs,
    )


@pytest.mark.parametrize("processes", [64, 512])
def test_many_processes_are_one_measurement(tmp_path, processes):
    paths = [one_process(tmp_path / str(late_us), late_us, kernels=20) for late_us in (0, 40)]
    trace = read(paths, processes, late=17, group=processes)
    assert trace.notes == ()
    assert len(trace.sweeps) == processes * (STEPS - 1)
    assert trace.skew.instances == STEPS - 1
    worst = trace.skew.stragglers[0]
    assert (worst.device, worst.last_share) == (17, 1)
    assert worst.caused_wait_s == pytest.approx((processes - 1) * 40e-6 * (STEPS - 1))


def test_memory_is_that_of_one_file_and_of_what_is_kept(monkeypatch, paths, tmp_path):
    monkeypatch.setattr("meshkit.trace.reader.KEPT_SPANS", 10 * KERNELS)

    def peak(processes, of):
        tracemalloc.start()
        read(of, processes, late=0)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    few = [one_process(tmp_path / name, 0, kernels=KERNELS // 10) for name in ("early", "late")]
    read(paths, 2, late=0)  # This loads what is loaded once.
    grown, grown_of_few = (peak(20, of) - peak(4, of) for of in (paths, few))
    # Of the 16 others, totals and instances are kept, but no span of any kernel, which takes 24 bytes.
    assert grown - grown_of_few < 0.1 * 16 * (STEPS - 1) * (KERNELS - KERNELS // 10) * 24
