"""The simulator on schedules small enough to do by hand."""

import numpy as np
import pytest

import meshkit as mk
from meshkit.timeline.network import nccl_constants
from meshkit.timeline.simulate import simulate
from meshkit.timeline.spans import sweep
from meshkit.xla.collective import Collective
from meshkit.xla.costs import Cost
from meshkit.xla.hlo import Instruction, Schedule

GAP = nccl_constants()["kernel"]["gap_s"]
SECONDS = {"matmul": 1.0, "gather": 0.6, "reduce": 0.5, "copy": 0.3}


def collective(name):
    return Collective(name, name, "all-gather", ("fsdp",), True, "nvlink", None, "bf16", 8, 1, 8, 1024)


def kernel(name="matmul"):
    return Instruction(name, "fusion", "kernel", cost=Cost({"bf16": 1e12}))


def start(name="gather"):
    return Instruction(name, "all-gather", "start", collective=collective(name))


def done(name="gather"):
    return Instruction(f"{name}-done", "async-done", "done", starts=name)


def run(entry, **bodies):
    computations = {"entry": tuple(entry), **{k: tuple(v) for k, v in bodies.items()}}
    result = simulate(Schedule("test", computations, "entry", "0"), mk.Cluster.load("dgx_h100"),
                      seconds=lambda i: SECONDS[i.name])  # fmt: skip
    step = result.timeline.steps[0]
    return result, step, sweep(step, len(result.timeline.collectives)).total


def test_a_collective_hides_under_the_kernel_between_its_start_and_its_done():
    result, step, swept = run([start(), kernel(), done()])
    assert step.window[1] == pytest.approx(GAP + 1.0)
    assert swept.exposed_s == pytest.approx(GAP)
    assert result.all_overlapped_s == pytest.approx(GAP + 1.0)
    assert result.all_exposed_s == pytest.approx(GAP + 1.6)


def test_a_done_right_after_its_start_exposes_everything():
    _, step, swept = run([start(), done(), kernel()])
    assert step.window[1] == pytest.approx(0.6 + GAP + 1.0)
    assert swept.exposed_s == pytest.approx(0.6)


def test_collectives_queue_on_one_stream():
    _, step, _ = run([start("gather"), start("reduce"), kernel(), done("gather"), done("reduce")])
    assert step.communication.tolist() == [[0.0, 0.6], [0.6, 1.1]]
    assert step.window[1] == pytest.approx(1.1)


def test_a_blocking_collective_stops_the_compute_stream():
    blocking = Instruction("gather", "all-gather", "collective", collective=collective("gather"))
    _, step, swept = run([kernel(), blocking, kernel()])
    assert step.window[1] == pytest.approx(2 * (GAP + 1.0) + 0.6)
    assert swept.overlapped_s == pytest.approx(0.0)


def test_a_loop_repeats_its_body():
    loop = Instruction("while", "while", "while", bodies=("body",), trip_count=3)
    result, step, swept = run([loop], body=[start(), kernel(), done()])
    assert len(step.communication) == 3
    assert step.window[1] == pytest.approx(3 * (GAP + 1.0))
    assert swept.communication_s == pytest.approx(1.8)
    assert result.flops["bf16"] == 3e12
    assert np.diff(step.compute[:, 0]).tolist() == pytest.approx([GAP + 1.0] * 2)


def test_loops_nest():
    outer = Instruction("outer", "while", "while", bodies=("middle",), trip_count=4)
    inner = Instruction("inner", "while", "while", bodies=("body",), trip_count=5)
    result, step, _ = run([outer], middle=[inner, kernel()], body=[kernel()])
    assert len(step.compute) == 4 * (5 + 1)
    assert result.flops["bf16"] == 24e12


def test_a_conditional_counts_its_longest_branch():
    branch = Instruction("if", "conditional", "conditional", bodies=("short", "long"))
    _, step, _ = run([branch], short=[kernel()], long=[kernel(), kernel()])
    assert step.window[1] == pytest.approx(2 * (GAP + 1.0))


def test_copies_run_beside_compute():
    copy = Instruction("copy", "dynamic-slice", "start", cost=Cost(bytes_accessed=1.0))
    _, step, swept = run([copy, kernel(), done("copy")])
    assert step.copies.tolist() == [[0.0, 0.3]]
    assert step.window[1] == pytest.approx(GAP + 1.0)
    assert swept.other_s == pytest.approx(GAP)
