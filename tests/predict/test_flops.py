"""Whether a compiled program does the work of the traced one."""

import pytest

from meshkit.hlo.costs import Cost
from meshkit.hlo.module import Instruction, Schedule
from meshkit.predict.flops import executed_flops, flop_note


def program(*kernels, source="", **bodies):
    """A kernel of each of these FLOP, then a conditional on the bodies."""
    made = [Instruction(f"k{n}", "fusion", "kernel", source, Cost(dict(flops))) for n, flops in enumerate(kernels)]
    if bodies:
        made.append(Instruction("if", "conditional", "conditional", bodies=tuple(bodies)))
    return Schedule("m", {"main": tuple(made), **{name: tuple(b) for name, b in bodies.items()}}, "main", "f")


def note(schedule, traced: float | None = 8e12, *, step_s=1e-3, recomputed=False):
    return flop_note(schedule, traced, 8, step_s=step_s, peak_flops=1e15, recomputed=recomputed)


def found_in(schedule, **options):
    found = note(schedule, **options)
    assert found is not None
    return found


@pytest.mark.parametrize("executed", [{"bf16": 1.0e12}, {"bf16": 6e11, "f8e4m3fn": 4.05e11}, {"bf16": 9.91e11}])
def test_one_percent_is_what_xla_itself_adds_and_drops(executed):
    assert note(program(executed)) is None


def test_repeated_work_is_named():
    found = found_in(program({"bf16": 2e12}))
    assert found.code == "repeated_work"
    assert "executes 2.00 TFLOP of matmuls per GPU, the traced one needs 1.00 TFLOP (+100.0%): GPUs re" in found.message
    assert "XLA recomputes" in found_in(program({"bf16": 2e12}), recomputed=True).message


def test_work_that_was_not_priced_is_no_prediction():
    found = found_in(program({"bf16": 5e11}))
    assert found.code == "flops"
    assert "(-50.0%): not all of the compiled program is priced, so the step time is no prediction" in found.message


def test_ragged_matmuls_that_xla_makes_dense_are_named():
    found = found_in(program({"bf16": 4e12}, source="moe/experts/ragged_dot_general"))
    assert found.code == "ragged_dot"
    assert "(+300.0%): XLA:GPU makes ragged matmuls" in found.message
    assert (found.names, found.share) == (("k0",), 0.75)
    mixed = Schedule("m", {"main": (*program({"bf16": 1e12}, source="ragged_dot").computations["main"],
                                    *program({"bf16": 4e12}).computations["main"])}, "main", "f")  # fmt: skip
    assert found_in(mixed).code == "repeated_work"  # more than the ragged ones explain


def test_a_difference_that_costs_nothing_is_none():
    """1e12 FLOP are 1 ms of this GPU's peak: of a step of 2 s less than a thousandth."""
    assert note(program({}), step_s=2.0) is None


def test_of_a_conditional_the_branch_with_the_most_work_counts():
    """The longest may be another: one that communicates."""
    few, many = (Instruction("k", "fusion", "kernel", cost=Cost({"bf16": flops})) for flops in (1e11, 7e11))
    schedule = program({"bf16": 3e11}, short=[few], long=[many])
    assert executed_flops(schedule) == pytest.approx(1e12)
    assert note(schedule) is None


def test_nothing_is_said_of_what_was_not_counted():
    assert note(program({"bf16": 1e12}), None) is None
    assert note(program({}), 0.0) is None
