"""Test hangs planted in real gangs: they are named in at most 12 lines, and ended.

Three cheap cases run by default on any machine, and all of them are `slow`. `python -m benchmarks.hangs` prints the
table, and holds each to its limit and 5 s.
"""

import sys

import pytest

from benchmarks.hangs.__main__ import CASES, Case, run_case

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux: /proc"),
]
CHEAP = (
    Case("data", 1, 2),
    Case("program", 1, 2),
    Case("data", 0, 2, launcher="hosts"),
)
SLOW = tuple(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in CHEAP)


@pytest.mark.parametrize("case", [*CHEAP, *SLOW], ids=lambda case: f"{case.name}, {case.launcher}")
def test_a_planted_hang_is_named(case, tmp_path):
    found = run_case(case, tmp_path / "case", late_s=60)
    assert not found.wrong, "\n".join(found.message)
