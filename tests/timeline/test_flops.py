"""Whether a compiled program does the work of the traced one."""

import pytest

from meshkit.timeline.flops import flop_note


@pytest.mark.parametrize("executed", [{"bf16": 1.0e12}, {"bf16": 6e11, "f8e4m3fn": 4.05e11}, {"bf16": 9.91e11}])
def test_one_percent_is_what_xla_itself_adds_and_drops(executed):
    assert flop_note(executed, 8e12, 8) is None


def test_repeated_work_is_named():
    note = flop_note({"bf16": 2e12}, 8e12, 8) or ""
    assert "executes 2.00 TFLOP of matmuls per GPU, the traced one needs 1.00 TFLOP (+100.0%): GPUs repeat" in note


def test_work_that_was_not_priced_is_named():
    assert "(-50.0%): not all of the compiled program is priced" in (flop_note({"bf16": 5e11}, 8e12, 8) or "")


def test_nothing_is_said_of_what_was_not_counted():
    assert flop_note({"bf16": 1e12}, None, 8) is None
    assert flop_note({}, 0.0, 8) is None
