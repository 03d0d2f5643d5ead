"""Test how measured costs return: as fits that plan reads, and as the profile by which XLA schedules."""

import numpy as np
import pytest

from meshkit.config import calibration
from meshkit.config.cluster import Cluster
from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.algorithms import wire_factor
from meshkit.predict.kernels import full_clock
from meshkit.trace.captured import Captured, CapturedMesh, CaptureRecord
from meshkit.trace.measured import fit_line, measured_costs, write_calibration, write_pgle
from meshkit.trace.operations import TraceFile
from meshkit.trace.reader import read_trace
from tests.trace.trace_files import collective, gpu_op, plane_text, program, write_planes

LATENCY_S, BANDWIDTH = 20e-6, 200e9
GATHERS = [
    collective(f"all-gather-start.{i}", "all-gather", "fsdp", payload_bytes=size)
    for i, size in enumerate((2**20, 2**24, 2**28))
]


def seconds(gather):
    return LATENCY_S + gather.payload_bytes * wire_factor("all-gather", 2) / BANDWIDTH


@pytest.fixture
def trace(tmp_path):
    """Return a trace of one execution on two GPUs: two kernels, and three gathers for which the second is early."""
    planes = []
    for device, early_us in ((0, 0), (1, 30)):
        events, t = [gpu_op("gemm_fusion", 0, 1000), gpu_op("loop_fusion", 1000, 2000)], 3000.0
        for gather in GATHERS:
            events.append(gpu_op(gather.name, t - early_us, t + 1e6 * seconds(gather)))
            t += 1e6 * seconds(gather) + 100
        planes.append(plane_text(f"/device:GPU:{device}", events))
    return read_trace(
        [TraceFile(write_planes(tmp_path / "x", *planes), {0: 0, 1: 1})],
        program(*GATHERS, groups={g.name: np.array([[0, 1]]) for g in GATHERS}),
        num_steps=1,
    )


def test_costs_are_without_the_wait(trace):
    costs = measured_costs(trace)
    for gather in GATHERS:
        assert costs[gather.name] == pytest.approx(seconds(gather), abs=2e-12)  # A trace counts whole ps.
    assert costs["gemm_fusion"] == pytest.approx(1e-3)


def test_costs_are_written_as_xla_reads_them(tmp_path):
    file = write_pgle(tmp_path / "pgle.pbtxt", {"fusion.2": 1.5e-6, "all-gather-start": 2e-3})
    assert file.read_text() == (
        'costs { name: "all-gather-start" cost_us: 2000 }\ncosts { name: "fusion.2" cost_us: 1.5 }\n'
    )


def test_a_calibration_is_written_as_plan_reads_it(trace, tmp_path):
    cluster = Cluster.load("dgx_h100", hosts=1)
    instructions = (
        Instruction("gemm_fusion", "fusion", "kernel", cost=Cost({"bf16": 6e11}, bytes_accessed=1e8)),
        Instruction("loop_fusion", "fusion", "kernel", cost=Cost(bytes_accessed=2.4e9)),
    )
    captured = Captured(
        folder=tmp_path,
        records=(
            CaptureRecord(
                process=0,
                processes=1,
                host="h",
                platform="gpu",
                devices=(),
                mesh=CapturedMesh(axes=("fsdp",), shape=(2,), device_ids=(0, 1)),
                module="jit_f",
                program_file="p",
                first_step=1,
                num_steps=1,
                jax="0",
                jaxlib="0",
            ),
        ),
        cluster=cluster,
        placement=None,
        module=None,
        schedule=Schedule("jit_f", {"main": instructions}, "main", ""),
        program=program(),
        broken={},
    )
    found = calibration.load(write_calibration(tmp_path / "calibration.toml", captured, trace))
    (fit,) = found.fits
    assert (fit.link, fit.collective, fit.gpus_per_domain, fit.domains, fit.points) == ("nvlink", "all-gather", 2, 1, 3)
    assert (fit.latency_s, fit.bytes_per_s) == pytest.approx((LATENCY_S, BANDWIDTH), rel=1e-6)
    assert found.measured_on.gpu == "h100_sxm"
    # In a step that mostly waits, tensor cores ran at the full clock; a long run's rate is less.
    assert found.rates.matmul_flops_per_s == pytest.approx({"bf16": 6e14 / full_clock(cluster.gpu, "bf16")})
    assert found.rates.memory_bytes_per_s == pytest.approx(2.4e12)


@pytest.mark.parametrize(
    ("points", "line"),
    [
        ([(1e6, 1e-3, 1), (2e6, 2e-3, 5)], (0, 1e9)),
        ([(1e6, 1.1e-3, 1), (2e6, 2.1e-3, 1)], (1e-4, 1e9)),
        ([(1e6, 1e-3, 1)], (0, 1e9)),  # There is one size, so all of it is bandwidth.
        # It is faster when larger, so there is no line but the mean rate.
        ([(1e6, 2e-3, 1), (2e6, 1e-3, 1)], (0, 1e9)),
    ],
)
def test_lines(points, line):
    assert fit_line(points)[:2] == pytest.approx(line, rel=1e-9, abs=1e-12)


def test_no_messages_no_line():
    assert fit_line([(0, 1e-3, 1)]) is None
