"""Test compute by kind of work: numbers computed by hand, and kinds that add up to the step's compute."""

import numpy as np
import pytest

from meshkit.hlo.instructions import InstructionInfo
from meshkit.report.compare import compare
from meshkit.report.summarize import kernels_part, summarize
from meshkit.step.program import StepFacts
from meshkit.timeline import DeviceStep, Timeline, kernel_totals

INSTRUCTIONS = {
    "gemm": InstructionInfo("matmul", "matmul|f32[8]|mlp/dot|1", "mlp/dot", "models/x.py:7"),
    "add": InstructionInfo("elementwise", "elementwise|f32[8]|add|1", "add", None),
}
NAMES = ("gemm", "add", "some_kernel")


def make_timeline(factor=1.0):
    """Return gemm at 0-4 and 6-8, add at 3-5 and an unknown kernel at 8-9 (ms): gemm and add share 3-4."""
    step = DeviceStep(
        device=0,
        step=0,
        window=(0.0, 0.010 * factor),
        compute=np.array([(0, 4), (3, 5), (6, 8), (8, 9)]) * 1e-3 * factor,
        compute_op=np.array([0, 1, 0, 2]),
        communication=np.zeros((0, 2)),
        collective=np.zeros(0, int),
        copies=np.zeros((0, 2)),
    )
    return Timeline((step,), (), NAMES)


def ms(value):
    return pytest.approx(value * 1e-3, rel=1e-9)


def test_kinds_by_hand():
    timeline = make_timeline()
    found = {c.kind: c for c in kernels_part(NAMES, kernel_totals(timeline), INSTRUCTIONS).classes}
    assert list(found) == ["matmul", "elementwise", "unmapped"]  # The longest kind comes first.
    assert (found["matmul"].count, found["matmul"].time_s, found["matmul"].busy_s) == (2, ms(5.5), ms(6))
    assert (found["elementwise"].time_s, found["elementwise"].busy_s) == (ms(1.5), ms(2))
    assert found["unmapped"].ops[0].name == "some_kernel"
    (gemm,) = found["matmul"].ops
    assert (gemm.name, gemm.line, gemm.source, gemm.count, gemm.busy_s) == (
        "gemm",
        "models/x.py:7",
        "mlp/dot",
        2,
        ms(6),
    )


@pytest.mark.parametrize("each", [1, 4])
def test_kinds_add_up_to_the_compute_of_the_report(each):
    report = summarize(
        make_timeline(), source="profile", instructions=INSTRUCTIONS, facts=StepFacts(steps_per_call=each)
    )
    assert sum(c.time_s for c in report.kernels.classes) == pytest.approx(report.step.compute_s, rel=1e-12)
    assert report.step.compute_s == ms(8 / each)


def test_without_instructions_nothing_is_said():
    assert summarize(make_timeline(), source="profile").kernels is None


def test_kinds_and_operations_are_compared():
    fast, slow = (
        summarize(make_timeline(f), source=s, instructions=INSTRUCTIONS) for f, s in ((1.0, "plan"), (2.0, "profile"))
    )
    found = compare(fast, slow)
    # Kinds are ordered by seconds of difference.
    assert [k.kind for k in found.kernels] == ["matmul", "elementwise", "unmapped"]
    assert all(k.time_s.ratio == pytest.approx(2) for k in found.kernels)
    assert [op.b_name for op in found.kernel_ops] == ["gemm", "add"]
    # The kernel without an instruction has no key to join by: 1 of 9 ms busy.
    assert found.kernels_joined_share == pytest.approx(8 / 9)
