"""Test the warnings of a measurement: other machines, another plan, lost kernels, and shifted steps."""

import numpy as np
import pytest

from meshkit.config.cluster import Cluster
from meshkit.report.compare import plan_warnings
from meshkit.report.measured import bandwidth_notes, machine_notes
from meshkit.report.schema import ClusterPart, CommunicationPart, MeshAxisPart
from meshkit.report.summarize import group_rows, summarize
from meshkit.trace.operations import TraceFile
from meshkit.trace.reader import Facts, read_trace
from tests.trace.trace_files import clock_text, collective, gpu_op, plane_text, program, write_planes

H100 = Cluster.load("dgx_h100")
GATHER = collective("all-gather-start.1", "all-gather", "fsdp")


def read(folder, devices, *, clocks=None, groups=((0, 1),), steps=4):
    """Return the trace of devices, each a process; `devices` is device -> operations (name, start, end), in us."""
    files = []
    for device, ops in devices.items():
        texts = [plane_text("/device:GPU:0", [gpu_op(*op) for op in ops])]
        texts += [clock_text(clocks[device])] if clocks else []
        files.append(TraceFile(write_planes(folder / f"p{device}.pb", *texts), {0: device}, device))
    of = program(GATHER, groups={GATHER.name: np.array(groups)})
    return read_trace(files, of, rows=group_rows(of.distinct_collectives)[0], num_steps=steps)


def steps(first=0, count=4, *, drop=0):
    """Return steps of a millisecond whose compute differs, so that they can be told apart."""
    ops = []
    for i in range(count):
        at = 1000 * i
        compute = 500 + 40 * ((first + i) % 3)
        ops += [(f"fusion.{k}", at + 4 * k, at + 4 * k + 3) for k in range(60 - drop)]
        ops += [("dot.2", at + 300, at + compute), (GATHER.name, at + compute, at + 900)]
    return ops


def codes(notes):
    return [note.code for note in notes]


def test_a_process_whose_steps_are_shifted_is_no_matter_of_clocks(tmp_path):
    epoch = 10**18
    (tmp_path / "same").mkdir()
    same = read(tmp_path / "same", {0: steps(), 1: steps()}, clocks={0: epoch, 1: epoch})
    assert "shifted_steps" not in codes(same.notes)
    # Process 1 began to capture a step later than process 0, so their first steps differ by one.
    late = read(tmp_path, {0: steps(), 1: steps(first=1)}, clocks={0: epoch, 1: epoch + 10**6})
    (note,) = [n for n in late.notes if n.code == "shifted_steps"]
    assert "processes 1 are shifted" in note.message
    assert "began 1.00 ms later in process 1, 1 x the step" in note.message


def test_kernels_that_are_missing_on_one_device_are_seen(tmp_path):
    trace = read(tmp_path, {0: steps(), 1: steps(), 2: steps(drop=6)}, groups=((0, 1, 2),))
    (note,) = [n for n in trace.notes if n.code == "fewer_kernels"]
    assert "Devices 2 have fewer operations a step than the others (device 2: 56, the median 62)" in note.message


def test_bus_bandwidth_with_waits_in_it_is_said(tmp_path):
    whole = read(tmp_path, {0: steps(), 1: steps()})
    part = read(tmp_path, {0: steps(), 1: steps()}, groups=((0, 1, 2),))  # Nobody saw device 2.
    rows = [summarize(t.steps, source="profile", swept=t).communication for t in (whole, part)]
    assert codes(bandwidth_notes(rows[0])) == []
    assert codes(bandwidth_notes(rows[1])) == ["bus_bandwidth_with_waits"]


@pytest.mark.parametrize(
    ("facts", "kind", "found"),
    [
        (Facts(), None, None),
        (Facts(), "NVIDIA H100 80GB HBM3", None),
        (Facts(), "NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-80GBs"),
        (Facts(hardware={"device_vendor": "Nvidia", "compute_cap_major": 9, "memory_size": 85 * 10**9}), None, None),
        (Facts(hardware={"device_vendor": "AMD", "compute_cap_major": 9}), None, "GPUs of AMD"),
        (Facts(hardware={"compute_cap_major": 8, "compute_cap_minor": 0}), None, "GPUs of compute capability 8.0"),
        (Facts(hardware={"compute_cap_major": 9, "memory_size": 141 * 10**9}), None, "GPUs with 131 GiB of memory"),
        (Facts(cpu=True), None, "CPU devices"),
    ],
)
def test_a_cluster_of_other_gpus_than_the_traces(facts, kind, found):
    notes = list(machine_notes(H100, facts, kind))
    assert codes(notes) == (["other_gpu"] if found else [])
    assert all(f"The trace is of {found}, but the cluster has h100_sxm" in note.message for note in notes)
    assert list(machine_notes(None, facts, kind)) == []


def test_a_plan_of_another_job_is_said(report):
    plan = report.model_copy(update={"source": "plan"})
    assert list(plan_warnings(plan, report)) == []
    other_mesh = plan.model_copy(update={"mesh": (MeshAxisPart(axis="data", size=8),)})
    (warning,) = plan_warnings(other_mesh, report)
    assert "another mesh (data 8, measured data 2 x fsdp 4): do not compare its numbers" in warning.message
    a, b = (report.model_copy(update={"cluster": ClusterPart(gpu=gpu, num_gpus=8)}) for gpu in ("h100_sxm", "b200"))
    assert "another cluster (8 x h100_sxm, measured 8 x b200)" in next(plan_warnings(a, b)).message
    nothing = CommunicationPart(axes=("data",), count=1, ops=())
    program_ = report.program.model_copy(update={"fingerprint": "other"})
    stranger = plan.model_copy(update={"communication": (nothing,), "program": program_})
    assert "another program: none of its collectives" in next(plan_warnings(stranger, report)).message
