"""Who is late, and why: causes planted in made traces of 8 GPUs; 20 were drawn before the verdict was written."""

import pytest

from meshkit.report.summarize import group_rows
from meshkit.trace.reader import read_trace
from tests.report import planted

CASES = [*planted.cases("seen"), *planted.cases("held out")]


def read(case, folder):
    files, of = planted.write_case(case, folder)
    return read_trace(files, of, rows=group_rows(of.distinct_collectives)[0], num_steps=planted.EXECUTIONS), of


def test_every_cause_is_planted_and_drawn_again_alike():
    assert len(CASES) == 40
    named = {cause for case in CASES for cause, _ in case.truth}
    assert named == {"clock", "kernels", "input", "launch_gaps", "slow_link", "outlier", "warm_up"}
    assert [*planted.cases("seen"), *planted.cases("held out")] == CASES


@pytest.mark.parametrize("case", CASES[::13], ids=lambda case: case.name)
def test_made_traces_are_read_whole(case, tmp_path):
    trace, _ = read(case, tmp_path)
    assert {step.device for step in trace.steps.steps} == set(range(planted.DEVICES))
    assert trace.skew.method == "clocked"
    assert not trace.facts.odd_executions
